"""What a run shows in the terminal: one line that moves, a curve at the end."""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Metrics of the line: label, metric name, format.
_SHOWN = (
  ("reward", "reward/mean", ".3f"),
  ("lag", "staleness/mean", ".1f"),
  ("rollouts/device-h", "throughput/consumed_per_device_hour", ".0f"),
)
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Progress:
  """Says how far a run is; one thread.

  On a terminal it rewrites one line after every step. Elsewhere, in a log
  file, it adds a plain line whenever a further tenth of the steps is done,
  and after the last.
  """

  def __init__(
    self,
    total: int,
    stream: Any = None,
    now: Callable[[], float] = time.monotonic,
  ) -> None:
    """Prints nothing yet.

    Args:
      total: steps of the whole run.
      stream: a text file, a terminal or not; None is standard error.
      now: seconds; the time left is estimated from the first update on.
    """
    self._total = total
    self._stream = sys.stderr if stream is None else stream
    self._now = now
    self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
    self._first: tuple[int, float] | None = None
    self._tenth = -1

  def update(self, step: int, metrics: Mapping[str, float]) -> None:
    """Shows a step.

    Args:
      step: finished steps.
      metrics: of that step; reward, lag and throughput are shown if there.
    """
    self._first = self._first or (step, self._now())
    line = self._line(step, metrics)
    tenth = 10 * step // max(self._total, 1)
    if self._live:
      columns = shutil.get_terminal_size().columns
      self._stream.write(f"\r\x1b[K{line[: columns - 1]}")
    elif tenth > self._tenth:
      self._stream.write(line + "\n")
    self._tenth = max(tenth, self._tenth)
    self._stream.flush()

  def close(self) -> None:
    """Leaves the line as it is and moves to the next."""
    if self._live and self._first is not None:
      self._stream.write("\n")
      self._stream.flush()

  def _line(self, step: int, metrics: Mapping[str, float]) -> str:
    shown = [f"step {step}/{self._total}"]
    for label, name, form in _SHOWN:
      value = metrics.get(name, math.nan)
      if not math.isnan(value):
        shown.append(f"{label} {value:{form}}")
    assert self._first is not None, "update sets it"
    first, since = self._first
    if step > first:
      left = (self._now() - since) / (step - first) * (self._total - step)
      shown.append(f"{_duration(left)} left")
    return "  ".join(shown)


def curve(
  values: Sequence[float], width: int = 60, height: int = 8, first: int = 1
) -> str:
  """Draws numbers over steps with block characters.

  Args:
    values: one a step; NaN where there is none.
    width: most columns of the drawing, at least 16. A column is the mean of
      its steps, or a step takes several columns.
    height: its rows, eight levels each.
    first: the step of the first value.

  Returns:
    `height` rows with the largest and the smallest column mean beside the
    top and the bottom one, an axis, and a row with the first and the last
    step. No line break at the end. A lower column is a lower mean; the lowest
    has one level, one without numbers is blank.
  """
  if not any(map(math.isfinite, values)):
    return "(no numbers to draw)"
  columns = _columns(values, width)
  numbers = [c for c in columns if not math.isnan(c)]
  low, high = min(numbers), max(numbers)
  levels = [_level(c, low, high, 8 * height) for c in columns]
  labels = [""] * height
  labels[-1] = f"{low:.3g}"
  labels[0] = f"{high:.3g}"
  margin = max(map(len, labels))
  rows = [
    f"{label:>{margin}} │" + "".join(_cell(v, height - 1 - i) for v in levels)
    for i, label in enumerate(labels)
  ]
  start, end = str(first), str(first + len(values) - 1)
  steps = start + end.rjust(len(columns) - len(start))
  blank = " " * (margin + 1)
  return "\n".join([*rows, f"{blank}└{'─' * len(columns)}", f"{blank} {steps}"])


def _columns(values: Sequence[float], width: int) -> list[float]:
  count = min(width, len(values))
  edges = [i * len(values) // count for i in range(count + 1)]
  means = []
  for a, b in zip(edges, edges[1:], strict=False):
    part = [v for v in values[a:b] if math.isfinite(v)]
    mean = sum(part) / len(part) if part else math.nan
    means += [mean] * (width // count)
  return means


def _level(value: float, low: float, high: float, top: int) -> int:
  if math.isnan(value):
    return 0
  if high == low:
    return top // 2
  return 1 + round((value - low) / (high - low) * (top - 1))


def _cell(level: int, row: int) -> str:
  return _BLOCKS[min(8, max(0, level - 8 * row))]


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours} h {minutes:02d} min"
  return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
