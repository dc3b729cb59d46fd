"""The log of a run: a line of numbers a step, and samples for people."""

import json
import logging
import math
import os
import pathlib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from jaxrl_post import types
from jaxrl_post.runtime import folder as folder_lib

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.txt"
_WIDTH = 80
_HEADER = re.compile(r"^step (\d+) ")

_log = logging.getLogger(__name__)


class Log:
  """Appends to `metrics.jsonl` and `rollouts.txt` of a run; one thread."""

  def __init__(self, folder: str | os.PathLike[str]) -> None:
    """Opens the files of a run folder.

    A last line that was cut off by a kill is dropped; nothing else is changed.
    """
    self._metrics = pathlib.Path(folder) / METRICS_FILE
    self._rollouts = pathlib.Path(folder) / ROLLOUTS_FILE
    _repair(self._metrics)
    self._file = self._metrics.open("a", encoding="utf-8")
    self._last = _last_step(_lines(self._metrics))
    self._warned: set[str] = set()

  def step(
    self, step: int, metrics: Mapping[str, float], *, late: bool = False
  ) -> None:
    """Appends the line of one step, and flushes it.

    Args:
      step: larger than that of all lines before, if it is not late.
      metrics: numbers by name. JSON has no NaN and no infinity: they become
        null. NaN means that there was nothing to average; infinity is a fault,
        warned of the first time for each name.
      late: adds to a step that may have a line, and others after it.

    Raises:
      RunError: the file already has this step or a later one.
    """
    if step <= self._last and not late:
      raise types.RunError(
        f"{self._metrics}: expected a step after {self._last}, got {step}. "
        "Cut the file off with truncate first."
      )
    values: dict[str, float | None] = {k: float(v) for k, v in metrics.items()}
    for name, value in metrics.items():
      if not math.isfinite(value):
        values[name] = None
      if math.isinf(value):
        self._warn(step, name, value)
    values["step"] = step
    line = json.dumps(values, sort_keys=True, allow_nan=False)
    self._file.write(line + "\n")
    self._file.flush()
    self._last = max(step, self._last)

  def has(self, step: int, name: str) -> bool:
    """Says whether some line of a step has a number of that name."""
    lines = map(json.loads, _lines(self._metrics))
    return any(x["step"] == step and x.get(name) is not None for x in lines)

  def rollouts(
    self, step: int, groups: Sequence[types.Group], limit: int
  ) -> None:
    """Appends samples for people to read, in 80 columns.

    Args:
      step: the step they were trained in.
      groups: the first `limit` are written, with all their rollouts.
      limit: most groups to write.
    """
    with self._rollouts.open("a", encoding="utf-8") as file:
      for group in groups[:limit]:
        file.write(_group_text(step, group))

  def truncate(self, step: int) -> None:
    """Cuts off what a resumed run will write again.

    Args:
      step: the first step that will be written next.

    Returns:
      Nothing. Both files then hold only what is of steps before it.
    """
    self._file.close()
    kept = [x for x in _lines(self._metrics) if _step_of(x) < step]
    folder_lib.write(self._metrics, "".join(kept))
    if self._rollouts.exists():
      text = _before(_lines(self._rollouts), step)
      folder_lib.write(self._rollouts, text)
    self._file = self._metrics.open("a", encoding="utf-8")
    self._last = _last_step(kept)

  def close(self) -> None:
    """Closes the files."""
    self._file.close()

  def _warn(self, step: int, name: str, value: float) -> None:
    if name not in self._warned:
      self._warned.add(name)
      _log.warning(
        "metric %s is %s at step %d; null is written", name, value, step
      )


def visible(text: str) -> str:
  """Writes out what has no picture, and could steer whoever shows the text.

  Returns:
    The text with escapes, as Python's, in place of control characters, marks
    that turn the direction of writing, and the like; line breaks stay.
  """
  return "".join(
    c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text
  )


def _lines(path: pathlib.Path) -> list[str]:
  # Not splitlines: it also cuts at form feeds and the like.
  with path.open(encoding="utf-8", newline="\n") as file:
    return list(file)


def _step_of(line: str) -> int:
  return json.loads(line)["step"]


def _last_step(lines: Sequence[str]) -> int:
  return max(map(_step_of, lines), default=-1)


def _repair(path: pathlib.Path) -> None:
  if not path.exists():
    return
  data = path.read_bytes()
  whole = data[: data.rfind(b"\n") + 1]
  if whole != data:
    _log.warning("%s: its last line was cut off, and is dropped", path)
    folder_lib.write(path, whole.decode("utf-8"))


def _before(lines: Iterable[str], step: int) -> str:
  kept = []
  for line in lines:
    header = _HEADER.match(line)
    if header and int(header[1]) >= step:
      break
    kept.append(line)
  return "".join(kept)


def _group_text(step: int, group: types.Group) -> str:
  lines = [f"step {step} prompt {group.prompt.uid} ".ljust(_WIDTH, "-")]
  lines += _body(group.prompt.text)
  for rollout in group.rollouts:
    lines += [
      "",
      *_about(rollout),
      *_body(rollout.conversation or rollout.text),
    ]
  return "\n".join([*lines, "", ""])


def _about(rollout: types.Rollout) -> list[str]:
  completion = rollout.completion
  versions = sorted({*completion.versions} - {-1})
  begun = len(completion.segments)
  span = f"{versions[0]} to {versions[-1]}" if versions else "none"
  facts = [
    f"uid {completion.uid}",
    f"reward {rollout.earned:g}",
    *(f"{name} {value:g}" for name, value in sorted(rollout.parts.items())),
    f"{len(completion.tokens)} tokens",
    *([f"{1 + begun} rows"] if begun else []),
    completion.finish,
    f"versions {span}",
  ]
  if rollout.failure:
    facts.append(f"failure: {rollout.failure}")
  return _wrap("  * ", ", ".join(facts))


def _body(text: str) -> list[str]:
  # What a model writes must not steer the terminal that shows it.
  return [line for part in text.split("\n") for line in _wrap("    ", part)]


def _wrap(indent: str, text: str) -> list[str]:
  lines = textwrap.wrap(
    visible(text),
    _WIDTH,
    initial_indent=indent,
    subsequent_indent="    ",
    drop_whitespace=False,
  )
  return lines or [""]
