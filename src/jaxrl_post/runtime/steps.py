"""What the steps of a finished run say: figures with intervals.

Figures are of the steps that count (`history.counted`). Rates are a sum over a
sum, not a mean of ratios. Steps that follow each other are alike, and an
interval takes that into account.
"""

import math

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_post import types
from jaxrl_post.runtime import history

LEAST_STEPS = 30  # that must count, for an interval
_BATCHES = 10
_MOST_ALIKE = 0.95  # correlation of neighbours, in an estimate
_STUDENT_T = 2.262  # of 95 %, two-sided, with _BATCHES - 1 degrees of freedom


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


def measure(run: history.Run) -> dict[str, Estimate]:
  """Measures the steps of a run that count.

  Returns:
    By what it is: rollouts a device-hour, seconds of a step, idle fraction of
    each stage, milliseconds of a weight sync, lag and mismatch of trained
    tokens. What the lines do not have is NaN; of runs that name no devices
    each counts as one, as their rates are already by device.
  """
  rows, added = run.rows, history.added
  ok = history.counted(rows)
  wall = history.column(rows, "time/seconds")
  devices = np.nan_to_num(history.column(rows, "devices"), nan=1.0)
  seconds, held = added(wall)[ok], (added(wall) * devices)[ok]
  ones = np.ones(len(seconds))
  found = {}
  for name in ("consumed", "generated"):
    rate = history.column(rows, f"throughput/{name}_per_device_hour")
    found[f"{name} a device-hour"] = ratio(
      added(rate * wall * devices)[ok], held
    )
  found["step, s"] = ratio(seconds, ones)
  for stage in history.STAGES:
    idle = added(history.column(rows, f"idle/{stage}") * wall)[ok]
    found[f"idle part of {stage}"] = ratio(idle, seconds)
  for label, name, scale in (
    ("weight sync, ms", "sync/latency_s", 1e3),
    ("mean lag, versions", "staleness/mean", 1.0),
    ("mismatch, nats", "mismatch/mean_abs", 1.0),
  ):
    found[label] = ratio(scale * history.column(rows, name)[ok], ones)
  return found


def _window(count: int) -> int:
  """Returns how many of the last steps a reward is the mean of."""
  return max(count // 4, LEAST_STEPS)


def reward(run: history.Run, where: Bool[np.ndarray, " N"]) -> Estimate:
  """Estimates the mean reward over the last quarter of some steps.

  Args:
    run: whose.
    where: the steps; at least `LEAST_STEPS` of them are taken.

  Returns:
    With the larger of two intervals: that of the steps, and that of the
    standard errors which the lines have.
  """
  last = np.flatnonzero(where)[-_window(int(where.sum())) :]
  values, errors = (
    history.column(run.rows, name)[last]
    for name in ("reward/mean", "reward/standard_error")
  )
  return _wider(ratio(values, np.ones(len(values))), errors**2)


def held(run: history.Run) -> Float[np.ndarray, " N"]:
  """Returns the device-seconds that a run had held at the end of each step."""
  devices = np.nan_to_num(history.column(run.rows, "devices"), nan=1.0)
  return devices * history.column(run.rows, "time/seconds")


def reward_change(a: history.Run, b: history.Run) -> Estimate:
  """Estimates by how much B's reward is above A's at equal device-hours.

  Up to the end of the run that held its devices for less. Of the run that made
  fewer steps until then the last quarter is taken, at least `LEAST_STEPS`; each
  is compared with the step of the other run that ended closest to it. What both
  learn meanwhile is then not in the interval.
  """
  ends = [held(run) for run in (a, b)]
  least = min(end.max(initial=0.0) for end in ends)
  fewer = int(np.argmin([(end <= least).sum() for end in ends]))
  taken = np.flatnonzero(ends[fewer] <= least)
  taken = taken[-_window(len(taken)) :]
  if not len(taken):
    return Estimate(value=math.nan, error=math.nan)
  gaps = np.abs(ends[1 - fewer] - ends[fewer][taken][:, None])
  at = {fewer: taken, 1 - fewer: gaps.argmin(axis=1)}
  names = ("reward/mean", "reward/standard_error")
  ours, theirs = (
    [history.column(run.rows, name)[at[which]] for name in names]
    for which, run in enumerate((a, b))
  )
  change = theirs[0] - ours[0]
  squares = ours[1] ** 2 + theirs[1] ** 2
  return _wider(ratio(change, np.ones(len(change))), squares)


def _wider(found: Estimate, squares: Float[np.ndarray, " N"]) -> Estimate:
  """Widens an interval to that of the lines' own standard errors."""
  squares = squares[~np.isnan(squares)]
  if not len(squares):
    return found
  own = _STUDENT_T * math.sqrt(squares.mean() / len(squares))
  return Estimate(value=found.value, error=float(np.maximum(found.error, own)))
