"""The bounded-lag stream as a pure state machine: (ledger, event) -> ledger.

A *step* trains one batch of `groups_per_step` groups; `version` counts the
batches whose weights have been published. A group admitted at version v is in
a step not later than v + max_lag, so no trained token has a larger lag. Rules
and arguments are in `docs/stream.md`.

No clocks, threads or rollouts here; `stream` runs it, the planner may too.
"""

import collections
import dataclasses
import operator
from collections.abc import Collection
from typing import Any, Literal

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Admit:
  """A group begins to be sampled."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Pass:
  """Draws are passed over: they never become groups."""

  uids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Block:
  """Tokens of a group were sampled; any number of times, in any turn.

  Attributes:
    uid: the group.
    tokens: how many, at least one, in all its rollouts together.
    version: of the weights that sampled them: batches, as `Ledger.version`.
  """

  uid: int
  tokens: int
  version: int


@dataclasses.dataclass(frozen=True)
class Finish:
  """All rollouts of a group have ended."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Score:
  """A finished group has its rewards and may be trained."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Filter:
  """A finished group leaves untrained, by choice."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Fail:
  """A group leaves untrained, by fault."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Drop:
  """A group leaves untrained because it became older than the bound."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Retry:
  """A group starts again, its tokens so far are lost; it keeps its place."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Consume:
  """The trainer takes a batch."""

  uids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Publish:
  """The weights after `version` batches may be sampled from."""

  version: int


@dataclasses.dataclass(frozen=True)
class Stop:
  """Nothing is admitted any more; what is outstanding may finish."""


Move = Block | Finish | Score | Filter | Fail | Drop | Retry
Event = Admit | Pass | Move | Consume | Publish | Stop

STATES = ("sampling", "scoring", "ready")
FATES = ("trained", "filtered", "failed", "dropped")
# Where a group may be when an event moves it.
_FROM: dict[type[Move], tuple[str, ...]] = {
  Block: ("sampling",),
  Finish: ("sampling",),
  Score: ("scoring",),
  Filter: ("scoring", "ready"),
  Fail: ("sampling", "scoring"),
  Drop: STATES,
  Retry: ("sampling", "scoring"),
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """A group that was admitted and has not left.

  Attributes:
    uid: the group.
    admitted: version at its admission; no token of it is older.
    state: what it waits for.
    tokens: sampled since it started, or last started again.
    oldest: smallest version of these tokens; None without any.
    retries: times that it started again by a fault.
  """

  uid: int
  admitted: int
  state: Literal["sampling", "scoring", "ready"] = "sampling"
  tokens: int = 0
  oldest: int | None = None
  retries: int = 0


Entries = tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Count:
  """Groups and their sampled tokens."""

  groups: int = 0
  tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Ledger:
  """Where every admitted group, and every sampled token, is.

  Attributes:
    groups_per_step: groups in a batch.
    max_lag: inclusive bound, in batches.
    on_stale: "wait" for groups at their deadline, or "drop" them.
    ordered: batches are strictly first come: all wait, whatever `on_stale`.
    num_steps: batches of the run; no more is admitted than they need.
    stopped: nothing is admitted any more.
    version: newest published, in batches.
    step: batches consumed.
    outstanding: admitted and not left, in order of admission, so of deadline.
    admitted: groups, ever.
    passed: draws that were passed over, ever; no groups.
    sampled: tokens, ever.
    trained: left in a batch.
    filtered: left by choice.
    failed: left by fault.
    dropped: left by age.
    discarded: tokens lost by starting again; its groups count the retries.
  """

  groups_per_step: int
  max_lag: int
  on_stale: Literal["wait", "drop"] = "wait"
  ordered: bool = False
  num_steps: int | None = None
  stopped: bool = False
  version: int = 0
  step: int = 0
  outstanding: Entries = ()
  admitted: int = 0
  passed: int = 0
  sampled: int = 0
  trained: Count = Count()
  filtered: Count = Count()
  failed: Count = Count()
  dropped: Count = Count()
  discarded: Count = Count()

  def __str__(self) -> str:
    held = dict(collections.Counter(e.state for e in self.outstanding))
    left = {fate: getattr(self, fate).groups for fate in FATES}
    return f"step {self.step}, version {self.version}, groups {held}, {left}"


def start(
  groups_per_step: int,
  max_lag: int,
  *,
  on_stale: Literal["wait", "drop"] = "wait",
  ordered: bool = False,
  num_steps: int | None = None,
  step: int = 0,
) -> Ledger:
  """Returns the ledger of a run whose first `step` batches are trained.

  The arguments are those fields of `Ledger`. Tokens count from here on.
  """
  trained = step * groups_per_step
  return Ledger(
    groups_per_step=groups_per_step,
    max_lag=max_lag,
    on_stale=on_stale,
    ordered=ordered,
    num_steps=num_steps,
    version=step,
    step=step,
    admitted=trained,
    trained=Count(groups=trained),
  )


def window(ledger: Ledger) -> int:
  """Returns how many groups may be admitted now.

  Returns:
    Places in the steps that may train what is admitted now, less the groups
    that are outstanding already; 0 once stopped.
  """
  if ledger.stopped:
    return 0
  end = ledger.version + ledger.max_lag + 1
  if ledger.num_steps is not None:
    end = min(end, ledger.num_steps)
  places = (end - ledger.step) * ledger.groups_per_step
  return max(0, places - len(ledger.outstanding))


def deadline(ledger: Ledger, entry: Entry) -> int:
  """Returns the last step that may train the group."""
  return entry.admitted + ledger.max_lag


def stale(ledger: Ledger) -> tuple[int, ...]:
  """Returns the groups that no step may train any more, to be dropped.

  Returns:
    Uids of those whose deadline has passed. Always empty when the trainer
    waits: with on_stale="wait" or `ordered`.
  """
  first = ledger.step - ledger.max_lag
  return tuple(e.uid for e in ledger.outstanding if e.admitted < first)


def batch(ledger: Ledger) -> tuple[int, ...]:
  """Returns the groups the next step trains, or () when it has to wait.

  Returns:
    `groups_per_step` uids of ready groups, earliest deadline first: if
    `ordered` the first that are outstanding; otherwise, with on_stale="wait",
    such that all who are passed over can keep their deadlines. Or nothing:
    before they are ready, `step` is published, and stale groups are dropped.
  """
  if ledger.version < ledger.step or stale(ledger):
    return ()
  n = ledger.groups_per_step
  first = ledger.outstanding[:n] if ledger.ordered else ledger.outstanding
  uids = tuple(e.uid for e in first if e.state == "ready")[:n]
  if len(uids) < n:
    return ()
  left = _without(ledger, uids)
  late = _waits(ledger) and _in_time(ledger, left, ledger.step + 1) != left
  return () if late else uids


def apply(ledger: Ledger, event: Event) -> Ledger:
  """Moves the ledger by one event.

  Returns:
    The next ledger. Conserved, in groups and in tokens: admitted = trained +
    filtered + failed + dropped + outstanding; sampled = the same + discarded.

  Raises:
    RunError: the event is not possible in this state; the ledger would lie.
  """
  match event:
    case Admit(uid):
      _require(window(ledger) > 0, ledger, event, "an open window")
      known = any(e.uid == uid for e in ledger.outstanding)
      _require(not known, ledger, event, "a uid that is not outstanding")
      result = dataclasses.replace(
        ledger,
        admitted=ledger.admitted + 1,
        outstanding=(*ledger.outstanding, Entry(uid, ledger.version)),
      )
    case Pass(uids):
      out = {e.uid for e in ledger.outstanding}
      fresh = len(out.union(uids)) == len(out) + len(uids)
      _require(fresh and uids != (), ledger, event, "draws not outstanding")
      result = dataclasses.replace(ledger, passed=ledger.passed + len(uids))
    case Consume(uids):
      _require(uids == batch(ledger) != (), ledger, event, "the next batch")
      left = _without(ledger, uids)
      tokens = _tokens(ledger.outstanding) - _tokens(left)
      result = dataclasses.replace(
        ledger,
        step=ledger.step + 1,
        outstanding=left,
        trained=_plus(ledger.trained, len(uids), tokens),
      )
    case Publish(version):
      in_order = ledger.version <= version <= ledger.step
      _require(in_order, ledger, event, "a version in order")
      result = dataclasses.replace(ledger, version=version)
    case Stop():
      result = dataclasses.replace(ledger, stopped=True)
    case _:
      result = _move(ledger, event)
  check(result)
  return result


def restore(saved: Ledger, fresh: Ledger, keep: Collection[int] = ()) -> Ledger:
  """Returns the ledger of a run that continues from a checkpoint.

  Args:
    saved: the checkpoint's.
    fresh: from `start`: the settings of the run that continues, and the step
      of the checkpoint's weights.
    keep: outstanding groups whose tokens are all kept.

  Returns:
    Settings of `fresh`, counts and outstanding groups of `saved`, not stopped.
    Groups that are not ready and not in `keep` start again, their tokens
    discarded, no retry counted. Groups that have no place in time under changed
    settings are missing, as if never admitted, their tokens discarded; with
    equal settings there are none.

  Raises:
    RunError: `saved` is of another step, or `keep` names others.
  """
  uids = {e.uid for e in saved.outstanding}
  if saved.step != fresh.step or not uids.issuperset(keep):
    raise types.RunError(
      f"ledger: expected step {fresh.step} and outstanding {sorted(keep)}, "
      f"got {saved}. Resume from another checkpoint."
    )
  entries = tuple(
    e if e.state == "ready" or e.uid in keep else _again(e)
    for e in saved.outstanding
  )
  if _waits(fresh):
    entries = _in_time(fresh, entries, fresh.step)
  entries = entries[: window(fresh)]
  lost = _tokens(saved.outstanding) - _tokens(entries)
  result = dataclasses.replace(
    fresh,
    outstanding=entries,
    admitted=saved.admitted - len(uids) + len(entries),
    passed=saved.passed,
    sampled=saved.sampled,
    discarded=_plus(saved.discarded, 0, lost),
    **{fate: getattr(saved, fate) for fate in FATES},
  )
  check(result)
  return result


def check(ledger: Ledger) -> None:
  """Raises unless every group and every token is accounted for.

  Raises:
    RunError: some are lost, or counted twice.
  """
  left = [getattr(ledger, fate) for fate in FATES]
  groups = sum(c.groups for c in left) + len(ledger.outstanding)
  tokens = sum(c.tokens for c in (*left, ledger.discarded))
  tokens += _tokens(ledger.outstanding)
  if (groups, tokens) != (ledger.admitted, ledger.sampled):
    raise types.RunError(
      f"ledger: expected {ledger.admitted} groups and {ledger.sampled} tokens "
      f"accounted for, got {groups} and {tokens} in {ledger}"
    )


def _move(ledger: Ledger, event: Move) -> Ledger:
  """Applies an event of one group."""
  found = [i for i, e in enumerate(ledger.outstanding) if e.uid == event.uid]
  _require(bool(found), ledger, event, "a uid that is outstanding")
  entry, states = ledger.outstanding[found[0]], _FROM[type(event)]
  _require(entry.state in states, ledger, event, " or ".join(states))
  changes: dict[str, Any] = {}
  match event:
    case Block(_, tokens, version):
      fits = tokens > 0 and entry.admitted <= version <= ledger.version
      rule = f"tokens of versions {entry.admitted} to {ledger.version}"
      _require(fits, ledger, event, rule)
      oldest = version if entry.oldest is None else min(entry.oldest, version)
      changes = {"sampled": ledger.sampled + tokens}
      tokens += entry.tokens
      entry = dataclasses.replace(entry, tokens=tokens, oldest=oldest)
    case Finish():
      entry = dataclasses.replace(entry, state="scoring")
    case Score():
      entry = dataclasses.replace(entry, state="ready")
    case Retry():
      changes = {"discarded": _plus(ledger.discarded, 1, entry.tokens)}
      entry = dataclasses.replace(_again(entry), retries=entry.retries + 1)
    case _:
      may = not isinstance(event, Drop) or event.uid in stale(ledger)
      _require(may, ledger, event, "a stale group")
      why = {Filter: "filtered", Fail: "failed", Drop: "dropped"}[type(event)]
      changes = {why: _plus(getattr(ledger, why), 1, entry.tokens)}
      left = _without(ledger, (event.uid,))
      return dataclasses.replace(ledger, outstanding=left, **changes)
  outstanding = list(ledger.outstanding)
  outstanding[found[0]] = entry
  return dataclasses.replace(ledger, outstanding=tuple(outstanding), **changes)


def _waits(ledger: Ledger) -> bool:
  """Whether the trainer waits for groups at their deadline."""
  return ledger.ordered or ledger.on_stale == "wait"


def _in_time(ledger: Ledger, entries: Entries, first: int) -> Entries:
  """Returns who can be trained in time, by steps from `first` on, in order."""
  n, kept = ledger.groups_per_step, []
  for e in entries:
    if first + len(kept) // n <= deadline(ledger, e):
      kept.append(e)
  return tuple(kept)


def _without(ledger: Ledger, uids: tuple[int, ...]) -> Entries:
  gone = {*uids}
  return tuple(e for e in ledger.outstanding if e.uid not in gone)


def _again(entry: Entry) -> Entry:
  return dataclasses.replace(entry, state="sampling", tokens=0, oldest=None)


def _plus(count: Count, groups: int, tokens: int) -> Count:
  return Count(count.groups + groups, count.tokens + tokens)


def _tokens(entries: Entries) -> int:
  return sum(map(operator.attrgetter("tokens"), entries))


def _require(holds: bool, ledger: Ledger, event: Event, rule: str) -> None:
  if not holds:
    raise types.RunError(f"ledger: {event}: expected {rule}, got {ledger}")
