"""What a run folder holds to look at: the trace of a step, and rollouts."""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxrl_post import types
from jaxrl_post.runtime import clock, draw, history, log, trace

_LANES = ("training", "generation", "rewards")
_KINDS = {kind.partition("/")[0] for kind in clock.KINDS}
_HEADER = re.compile(r"step (\d+) prompt ")
_MOST_LINES = 120
# Neighbours share an edge, but for the rounding of floats.
_TOUCH_S = 1e-7


@types.host_record
class Timeline:
  """A step, as it was traced.

  Attributes:
    lanes: names of the rows.
    spans: what was done in them, in seconds from the step's beginning.
    seconds: the length of the step.
    levels: of the queue: by name, when it had which value.
    note: what is shown; or why nothing is.
  """

  lanes: Sequence[str]
  spans: Sequence[draw.Span]
  seconds: float
  levels: Mapping[str, Sequence[tuple[float, float]]]
  note: str


@types.host_record
class Sample:
  """A group of rollouts, as rollouts.txt has it.

  Attributes:
    title: step and prompt.
    text: prompt and completions; what is left out is said.
  """

  title: str
  text: str


def typical(
  folder: pathlib.Path,
  rows: Sequence[history.Row],
  where: Bool[np.ndarray, " N"],
) -> Timeline:
  """Finds the step of median length among some, in the trace of a run.

  Args:
    folder: of the run.
    rows: lines of its trained steps.
    where: which of them to choose from.

  Returns:
    A timeline; without spans where there is no trace, or it has nothing of the
    step. Broken lines, such as the last of a run that was killed, are passed
    over.
  """
  wall = history.column(rows, "time/seconds")
  lengths = history.added(wall)
  follows = history.added(history.column(rows, "step")) == 1.0
  steps = np.flatnonzero(where & follows)
  if not len(steps):
    return _nothing("No step to show: none follows another.")
  order = steps[np.argsort(lengths[steps], kind="stable")]
  middle = order[(len(steps) - 1) // 2]
  step, seconds = int(rows[middle]["step"]), float(lengths[middle])
  start = float(wall[middle]) - seconds
  spans, levels = [], {"outstanding": [], "ready": []}
  try:
    for event in _events(folder / trace.FILE):
      at = event["ts"] / 1e6 - start
      if event["ph"] == "X":
        spans += _spans(event, at, seconds)
      elif event["ph"] == "C" and event.get("name") == "queue":
        _count(levels, event.get("args", {}), at, seconds)
  except FileNotFoundError:
    return _nothing(f"No {trace.FILE} in the run folder: nothing to draw.")
  if not spans:
    return _nothing(f"{trace.FILE} has nothing of step {step}.")
  return Timeline(
    lanes=_LANES,
    spans=spans,
    seconds=seconds,
    levels={name: values for name, values in levels.items() if values},
    note=f"Step {step}, of median length among {len(steps)}: from the line of "
    f"the step before to its own. All of {trace.FILE} opens in Perfetto "
    "(ui.perfetto.dev).",
  )


def rollouts(folder: pathlib.Path) -> list[Sample]:
  """Returns the first group of the first and of the last step in a run's log.

  Returns:
    None, one or two; of the last step the newest of its groups.
  """
  path = folder / log.ROLLOUTS_FILE
  if not path.exists():
    return []
  found: list[list[str]] = []
  # Not splitlines: it also cuts at form feeds and the like.
  with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
    for line in file:
      if _HEADER.match(line):
        found = [*found[:1], [line]]
      elif found:
        found[-1].append(line)
  return [_sample(lines) for lines in found]


def _sample(lines: Sequence[str]) -> Sample:
  body = lines[1:]
  text = "".join(body[:_MOST_LINES]).rstrip("\n")
  if len(body) > _MOST_LINES:
    text += f"\n  ({len(body) - _MOST_LINES} more lines in rollouts.txt)"
  title = lines[0].rstrip("-\n ")
  return Sample(title=title[:1].upper() + title[1:], text=text)


def _nothing(note: str) -> Timeline:
  return Timeline(lanes=(), spans=(), seconds=0.0, levels={}, note=note)


def _events(path: pathlib.Path) -> Iterator[Mapping[str, Any]]:
  """Yields the events of a trace that have a time; one a line."""
  with path.open(encoding="utf-8", errors="replace") as file:
    for line in file:
      try:
        event = json.loads(line.strip().strip("[],") or "null")
      except json.JSONDecodeError:
        continue
      if isinstance(event, dict) and isinstance(event.get("ts"), int | float):
        yield {"ph": "", **event}


def _spans(
  event: Mapping[str, Any], at: float, seconds: float
) -> list[draw.Span]:
  """Returns the part of an event that lies in the step, if any."""
  end = at + float(event.get("dur") or 0.0) / 1e6
  tid, kind = event.get("tid"), event.get("cat")
  # Completions and calls that overlap have lanes of their own beside these.
  if tid not in (1, 2, 3) or kind not in _KINDS:
    return []
  if end <= _TOUCH_S or at >= seconds - _TOUCH_S:
    return []
  return [
    draw.Span(
      lane=tid - 1,
      kind=kind,
      name=f"{event.get('name', kind)} ({kind})",
      start=max(at, 0.0),
      end=min(end, seconds),
    )
  ]


def _count(
  levels: dict[str, list[tuple[float, float]]],
  args: Mapping[str, Any],
  at: float,
  seconds: float,
) -> None:
  """Notes a counter; of those before the step only the last."""
  if at >= seconds - _TOUCH_S:
    return
  for name, values in levels.items():
    value = args.get(name)
    if isinstance(value, int | float):
      if at <= _TOUCH_S:
        values.clear()
      values.append((max(at, 0.0), float(value)))
