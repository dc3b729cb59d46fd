"""What the steps of a finished run say: figures with intervals.

Everything is computed from what is in the run folder. A figure is of the steps
that count: neither the first ones nor those that compiled. Rates are a sum over
a sum, not a mean of ratios. Steps that follow each other are alike, and an
interval takes that into account.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_post import types
from jaxrl_post.runtime import folder as folder_lib
from jaxrl_post.runtime import log

FIRST_STEPS = 5  # never count: the pipeline fills
LEAST_STEPS = 30  # that must count, for an interval
_BATCHES = 10
_MOST_ALIKE = 0.95  # correlation of neighbours, in an estimate
_STUDENT_T = 2.262  # of 95 %, two-sided, with _BATCHES - 1 degrees of freedom

Row = Mapping[str, float | None]


@types.host_record
class Run:
  """What a run folder says.

  Attributes:
    name: the folder, as it was given.
    leaves: JSON of each setting by its dotted name.
    rows: lines of metrics.jsonl with a trained step, oldest first.
    tests: reward on held-out prompts by step.
    data: digest of the training data; None when no checkpoint tells.
  """

  name: str
  leaves: dict[str, str]
  rows: tuple[Row, ...]
  tests: dict[int, float]
  data: str | None


@types.host_record
class Estimate:
  """A figure and how well it is known.

  Attributes:
    value: NaN if nothing was measured.
    error: half of the 95 % interval; NaN with fewer than `LEAST_STEPS`.
  """

  value: float
  error: float

  @property
  def interval(self) -> tuple[float, float]:
    """Both ends."""
    return self.value - self.error, self.value + self.error


# --------------------------------------------------------------------- reading


def read(folder: str | os.PathLike[str]) -> Run:
  """Reads a run folder; of a run that is under way, what is there.

  Raises:
    InputError: there is no run, no trained step, or a file is damaged.
  """
  path = pathlib.Path(folder)
  settings = _text(path / folder_lib.CONFIG_FILE)
  # A last line without its end is still being written, or was cut by a kill.
  lines = _text(path / log.METRICS_FILE).split("\n")[:-1]
  try:
    leaves = folder_lib.leaves(json.loads(settings))
    rows = [json.loads(line) for line in lines]
  except json.JSONDecodeError as error:
    raise types.InputError(
      f"{path}: expected JSON in {folder_lib.CONFIG_FILE} and in each line of "
      f"{log.METRICS_FILE}, got {error.msg}. Choose another run."
    ) from error
  trained = tuple(row for row in rows if "reward/mean" in row)
  if not trained:
    raise types.InputError(
      f"{path}: expected a run with a trained step, got none. Train it first."
    )
  tests = {
    int(row["step"]): float(row["eval/reward"])
    for row in rows
    if row.get("eval/reward") is not None
  }
  return Run(
    name=str(folder), leaves=leaves, rows=trained, tests=tests, data=_data(path)
  )


def _text(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except OSError as error:
    raise types.InputError(
      f"{path.parent}: expected the folder of a run, got none with "
      f"{path.name} ({error.strerror}). Name the folder of a run."
    ) from error


def _data(path: pathlib.Path) -> str | None:
  """Returns the digest of the training data, which checkpoints hold."""
  for meta in sorted((path / "checkpoints").glob("[0-9]*/meta.json")):
    try:
      return json.loads(meta.read_text(encoding="utf-8"))["data"]
    except (OSError, json.JSONDecodeError, KeyError):
      continue  # of a save that was cut off; another one says the same
  return None


def column(run: Run, name: str) -> Float[np.ndarray, " N"]:
  """Returns a metric of every trained step; NaN where a line has none."""
  found = (row.get(name) for row in run.rows)
  return np.array([math.nan if x is None else x for x in found], float)


def counted(run: Run) -> Bool[np.ndarray, " N"]:
  """Says which steps count.

  Returns:
    False for the first `FIRST_STEPS`, for a step without the line before it,
    and for one in which a program was built: that of a run that was continued
    is among them, as the new process builds all of its own.
  """
  ok = np.arange(len(run.rows)) >= FIRST_STEPS
  ok &= _added(column(run, "step")) == 1.0
  ok &= _added(column(run, "time/seconds")) > 0.0
  for name in ("compile/count", "compile/seconds"):
    ok &= _added(np.nan_to_num(column(run, name))) == 0.0
  return ok


def restarts(run: Run) -> int:
  """Counts the processes that went on with a run, as far as lines tell."""
  falls = np.zeros(len(run.rows), bool)
  for name in ("compile/seconds", "engine/decode_tokens", "engine/decode_s"):
    falls[1:] |= np.diff(column(run, name)) < 0.0
  return int(falls.sum())


# ------------------------------------------------------------------- measuring


def ratio(
  tops: Float[np.ndarray, " N"], bottoms: Float[np.ndarray, " N"]
) -> Estimate:
  """Estimates the sum of one by the sum of the other, over steps in order.

  Args:
    tops: of each step; NaN leaves a step out.
    bottoms: likewise; ones for a mean.

  Returns:
    The interval is the wider of two, with Student's t for 9 degrees of freedom.
    By batch means: what `tops` have beyond the ratio is summed over ten
    stretches, whose sums vary. By neighbours, which is wider where stretches
    are too short to be independent: single steps vary, and are taken for a
    first-order autoregression.
  """
  known = ~(np.isnan(tops) | np.isnan(bottoms))
  tops, bottoms = tops[known], bottoms[known]
  total = bottoms.sum()
  if not total > 0:
    return Estimate(value=math.nan, error=math.nan)
  value = float(tops.sum() / total)
  if len(tops) < LEAST_STEPS:
    return Estimate(value=value, error=math.nan)
  beyond = tops - value * bottoms
  sums = [part.sum() for part in np.array_split(beyond, _BATCHES)]
  by_batches = _BATCHES * np.var(sums, ddof=1)
  variance = max(float(by_batches), _by_neighbours(beyond))
  return Estimate(
    value=value, error=_STUDENT_T * math.sqrt(variance) / float(total)
  )


def _by_neighbours(values: Float[np.ndarray, " N"]) -> float:
  """Returns the variance of a sum if each depends on the one before."""
  count, spread = len(values), float(values @ values)
  if spread == 0.0:
    return 0.0
  alike = float(values[1:] @ values[:-1]) / spread
  alike += (1 + 3 * alike) / count  # it is estimated too small by that
  alike = min(max(alike, 0.0), _MOST_ALIKE)
  return spread * (1 + alike) / (1 - alike)


def measure(run: Run) -> dict[str, Estimate]:
  """Measures the steps of a run that count.

  Returns:
    By what it is: rollouts a device-hour, seconds of a step, idle fraction of
    each stage, milliseconds of a weight sync, lag and mismatch of trained
    tokens. What the lines do not have is NaN; of runs that name no devices
    each counts as one, as their rates are already by device.
  """
  ok = counted(run)
  wall, ones = column(run, "time/seconds"), np.ones(int(ok.sum()))
  devices = np.nan_to_num(column(run, "devices"), nan=1.0)
  seconds, held = _added(wall)[ok], (_added(wall) * devices)[ok]
  found = {}
  # Lines hold averages since the first admission.
  for name in ("consumed", "generated"):
    rate = column(run, f"throughput/{name}_per_device_hour")
    done = _added(rate * wall * devices)[ok]
    found[f"{name} a device-hour"] = ratio(done, held)
  found["step, s"] = ratio(seconds, ones)
  stages = (k for k in run.rows[-1] if k.split("/")[:-1] == ["idle"])
  for name in sorted(stages):
    idle = _added(column(run, name) * wall)[ok]
    found[f"idle part of {name.split('/')[1]}"] = ratio(idle, seconds)
  for label, name, scale in (
    ("weight sync, ms", "sync/latency_s", 1e3),
    ("mean lag, versions", "staleness/mean", 1.0),
    ("mismatch, nats", "mismatch/mean_abs", 1.0),
  ):
    found[label] = ratio(scale * column(run, name)[ok], ones)
  return found


def _added(totals: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
  """Returns what each step added to a sum since the first admission."""
  return np.diff(totals, prepend=0.0)


def _window(count: int) -> int:
  """Returns how many of the last steps a reward is the mean of."""
  return max(count // 4, LEAST_STEPS)


def reward(run: Run, where: Bool[np.ndarray, " N"]) -> Estimate:
  """Estimates the mean reward over the last quarter of some steps.

  Args:
    run: whose.
    where: the steps; at least `LEAST_STEPS` of them are taken.

  Returns:
    With the larger of two intervals: that of the steps, and that of the
    standard errors which the lines have.
  """
  values = column(run, "reward/mean")[where][-_window(int(where.sum())) :]
  errors = column(run, "reward/standard_error")[where][-len(values) :]
  return _wider(ratio(values, np.ones(len(values))), errors**2)


def reward_change(a: Run, b: Run) -> Estimate:
  """Estimates by how much B's reward is above A's at equal rollouts.

  Steps have equally many rollouts, and are compared one by one: what both
  learn from step to step is then not in the interval.
  """
  ours, theirs = _by_step(a), _by_step(b)
  steps = sorted(ours.keys() & theirs.keys())
  steps = steps[-_window(len(steps)) :]
  pairs = np.array([(*ours[k], *theirs[k]) for k in steps]).reshape(-1, 4)
  change = pairs[:, 2] - pairs[:, 0]
  squares = pairs[:, 1] ** 2 + pairs[:, 3] ** 2
  return _wider(ratio(change, np.ones(len(change))), squares)


def _by_step(run: Run) -> dict[float, tuple[float, float]]:
  names = ("step", "reward/mean", "reward/standard_error")
  steps, *values = (column(run, name).tolist() for name in names)
  return dict(zip(steps, zip(*values, strict=True), strict=True))


def _wider(found: Estimate, squares: Float[np.ndarray, " N"]) -> Estimate:
  """Widens an interval to that of the lines' own standard errors."""
  squares = squares[~np.isnan(squares)]
  if not len(squares):
    return found
  own = _STUDENT_T * math.sqrt(squares.mean() / len(squares))
  return Estimate(value=found.value, error=float(np.maximum(found.error, own)))
