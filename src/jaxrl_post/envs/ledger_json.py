"""The ledger as JSON, for checkpoints; nothing damaged is read."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxrl_post import types
from jaxrl_post.envs import ledger as ledgers

# What a field may hold; all others are counts.
_CHOICES = {
  "state": ledgers.STATES,
  "on_stale": ("wait", "drop"),
  "ordered": (False, True),
  "stopped": (False, True),
}
_OPTIONAL = ("oldest", "num_steps")
_T = TypeVar("_T", ledgers.Entry, ledgers.Count, ledgers.Ledger)


def to_json(ledger: ledgers.Ledger) -> dict[str, Any]:
  """Returns the ledger as what JSON can hold."""
  data = dataclasses.asdict(ledger)
  return {**data, "outstanding": list(data["outstanding"])}


def from_json(data: Any) -> ledgers.Ledger:
  """Reads what `to_json` wrote.

  Returns:
    The ledger that was written.

  Raises:
    RunError: `data` is no ledger, or one that no events lead to.
  """
  try:
    counts = (*ledgers.FATES, "discarded")
    known = {name: _read(ledgers.Count, data[name]) for name in counts}
    entries = tuple(_read(ledgers.Entry, one) for one in data["outstanding"])
    ledger = _read(ledgers.Ledger, data, outstanding=entries, **known)
    _check_possible(ledger)
  except (KeyError, TypeError, ValueError) as error:
    raise types.RunError(
      f"ledger: expected what to_json wrote, got {error}. Resume from another "
      "checkpoint."
    ) from error
  ledgers.check(ledger)
  return ledger


def _read(kind: type[_T], data: Any, **known: Any) -> _T:
  """Makes a dataclass of its fields; checks those that are not `known`."""
  names = {f.name for f in dataclasses.fields(kind)}
  if not isinstance(data, Mapping) or data.keys() != names:
    raise ValueError(f"{data!r} for {kind.__name__}")
  for name in names - known.keys():
    value = data[name]
    if name in _CHOICES:
      # By their text: 1 equals True.
      fits = repr(value) in map(repr, _CHOICES[name])
    elif value is None:
      fits = name in _OPTIONAL
    else:
      fits = type(value) is int and value >= 0
    if not fits:
      raise ValueError(f"{value!r} for {name}")
  return kind(**{**data, **known})


def _check_possible(ledger: ledgers.Ledger) -> None:
  """Raises unless events can lead here, counts aside."""
  entries = ledger.outstanding
  order = [0, *(e.admitted for e in entries), ledger.version, ledger.step]
  unique = len({e.uid for e in entries}) == len(entries)
  dated = all(_dated(e, ledger.version) for e in entries)
  some = ledger.groups_per_step > 0
  if order != sorted(order) or not (unique and dated and some):
    raise ValueError(repr(ledger))


def _dated(entry: ledgers.Entry, version: int) -> bool:
  """Whether the oldest token, if any, is of the time since admission."""
  if entry.oldest is None or not entry.tokens:
    return entry.oldest is None and not entry.tokens
  return entry.admitted <= entry.oldest <= version
