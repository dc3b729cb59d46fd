"""What runs have cost, read from their folders.

A cost that has a part for the whole and one for each row, rollout or position
needs runs that differ in their number; of one number, all of it is taken for
the part that `calibrate` says. Times are taken where the stages work in turn,
in runs with `max_lag=0`, if there are any; how much they are in each other's
way is what makes the others come out as they were.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_post import types
from jaxrl_post.planning import costs as costs_lib
from jaxrl_post.planning import simulate
from jaxrl_post.runtime import history, metrics

_LEAST, _SAMPLE = 5, 100
_SHARES = (
  "busy/generation",
  "busy/training",
  "idle/generation/host",
  "idle/training/host",
  "idle/training/reward_pending",
  "overhead/generation/sync",
  "overhead/training/sync",
  "overhead/training/checkpoint",
  "overhead/training/eval",
)
_COUNTS = (
  "engine/prefill_calls",
  "engine/prefill_s",
  "engine/blocks",
  "engine/columns",
  "engine/decode_s",
  "ledger/filtered",
  "ledger/failed",
  "ledger/trained",
)


@dataclasses.dataclass(frozen=True)
class Measured:
  """A run in its steady state.

  Attributes:
    name: of its folder.
    setting: its sizes.
    steps: that were looked at.
    step_s: seconds of one, their mean.
    each: the mean of a step by metric: of counts and seconds what is added, of
      shares of time the seconds that are added.
    lengths: a sample of the lengths of completions, in tokens, in order.
    staleness_mean: lag of trained tokens.
    staleness_max: the largest.
  """

  name: str
  setting: costs_lib.Setting
  steps: int
  step_s: float
  each: Mapping[str, float]
  lengths: tuple[int, ...]
  staleness_mean: float
  staleness_max: float

  @property
  def consumed_per_device_hour(self) -> float:
    """Trained rollouts for an hour of a device."""
    hours = self.setting.devices * self.step_s / 3600
    return self.setting.rollouts / hours


def read(path: pathlib.Path) -> Measured:
  """Reads a run.

  Args:
    path: its folder.

  Returns:
    What the steps that count cost on average.

  Raises:
    InputError: it is no folder of a run, it is too short, or it does not say
      what is needed.
  """
  run = history.read(path)
  rows, ok = run.rows, history.counted(run.rows)
  if ok.sum() < _LEAST:
    raise types.InputError(
      f"{path}: expected {_LEAST} steps or more that count, got {ok.sum()} of "
      f"{len(rows)} (docs/metrics.md says which). Let the run train more steps."
    )

  def mean(
    name: str, *, total: bool = False, scale: np.ndarray | float = 1.0
  ) -> float:
    values = history.column(rows, name) * scale
    found = (history.added(values) if total else values)[ok].mean()
    if math.isnan(found):
      raise types.InputError(
        f"{path}: expected {name} in its metrics, got a step without. Run it "
        "again with this version, in one process and not in mode roles."
      )
    return float(found)

  wall = history.column(rows, "time/seconds")
  each = {name: mean(name, total=True) for name in _COUNTS}
  each |= {name: mean(name, total=True, scale=wall) for name in _SHARES}
  return Measured(
    name=path.name,
    setting=costs_lib.setting(run.config, round(mean("devices"))),
    steps=int(ok.sum()),
    step_s=mean("time/seconds", total=True),
    each=each,
    lengths=_lengths(
      [mean(name) for name in metrics.LENGTHS], mean("completion/mean_tokens")
    ),
    staleness_mean=mean("staleness/mean"),
    staleness_max=float(history.column(rows, "staleness/max")[ok].max()),
  )


def calibrate(runs: Sequence[Measured]) -> costs_lib.Costs:
  """Finds costs that explain some runs.

  Args:
    runs: of one model and machine, at least one. Of one number of rows, a pass
      through the model is taken to cost the same with any; of one batch, an
      update to cost nothing but its positions. Of several runs with one setting
      each number's median counts: machines have bad moments.

  Returns:
    The costs.
  """
  runs = _medians(runs)
  calm = [run for run in runs if not run.setting.max_lag] or [*runs]
  usual = costs_lib.Costs(column_s=1.0, update_s=1.0, lengths=(1,))

  def mean(*names: str) -> float:
    # Differences of shares of time may round to a little below 0.
    seconds = [sum(r.each[n] for n in names) for r in calm]
    return max(0.0, float(np.mean(seconds)))

  column = _line(
    calm,
    lambda r: r.setting.rows / r.setting.generation,
    lambda r: r.each["engine/decode_s"] / r.each["engine/columns"],
    fixed=True,
  )
  host = _line(
    calm,
    lambda r: r.setting.rollouts / r.each["engine/blocks"],
    lambda r: _host(r) / r.each["engine/blocks"],
  )
  call = _line(
    [r for r in calm if r.each["engine/prefill_calls"]],
    lambda r: r.setting.prompts * r.setting.max_prompt,
    lambda r: r.each["engine/prefill_s"] / r.each["engine/prefill_calls"],
    fixed=True,
  )
  update = _line(
    calm,
    lambda r: (
      r.setting.positions
      / costs_lib.speed(r.setting.training, usual.efficiency)
    ),
    lambda r: r.each["busy/training"],
  )
  gone = mean("ledger/filtered", "ledger/failed")
  found = costs_lib.Costs(
    lengths=tuple(sorted(n for run in runs for n in run.lengths)),
    column_s=column[0],
    row_s=column[1],
    block_s=host[0],
    rollout_s=host[1],
    call_s=call[0],
    read_s=call[1],
    update_s=update[0],
    position_s=update[1],
    publish_s=mean("overhead/training/sync"),
    take_s=mean("overhead/generation/sync"),
    reward_s=mean("idle/training/reward_pending"),
    host_s=mean(
      "idle/training/host",
      "overhead/training/checkpoint",
      "overhead/training/eval",
    ),
    left=gone / (gone + mean("ledger/trained")),
  )
  lockstep = [run for run in runs if not run.setting.max_lag]
  rest = _line(lockstep, lambda r: r.setting.rollouts, _unexplained(found))
  pack_s, packed_s = (max(0.0, part) for part in rest)
  found = dataclasses.replace(found, pack_s=pack_s, packed_s=packed_s)
  for field, modes in (
    ("colocated", ("colocated",)),
    ("split", ("split", "roles")),
  ):
    beside = [r for r in runs if r.setting.max_lag and r.setting.mode in modes]
    if beside:
      value = _slowdown(beside, found, field)
      found = dataclasses.replace(found, **{field: value})
  return found


def _medians(runs: Sequence[Measured]) -> list[Measured]:
  """Makes one run of those with one setting."""
  alike: dict[costs_lib.Setting, list[Measured]] = {}
  for run in runs:
    alike.setdefault(run.setting, []).append(run)
  return [
    dataclasses.replace(
      ones[0],
      step_s=statistics.median(one.step_s for one in ones),
      each={
        name: statistics.median(one.each[name] for one in ones)
        for name in ones[0].each
      },
      lengths=tuple(sorted(n for one in ones for n in one.lengths)),
    )
    for ones in alike.values()
  ]


def _lengths(means: Sequence[float], mean: float) -> tuple[int, ...]:
  """Returns lengths with some percentiles, of `metrics.LENGTHS`, and a mean."""
  knots, shares = np.array(means), np.array([*metrics.LENGTHS.values()])
  low, rise, weights = knots[:-1], np.diff(knots), np.diff(shares)
  # How the lengths between two percentiles lie makes the mean what it is.
  share = (mean - weights @ low) / max(weights @ rise, 1e-9)
  bend = 1 / np.clip(share, 0.05, 0.95) - 1
  at = (np.arange(_SAMPLE) + 0.5) / _SAMPLE
  i = np.searchsorted(shares, at, side="right") - 1
  part = (at - shares[i]) / weights[i]
  values = low[i] + rise[i] * part**bend
  return tuple(max(1, round(n)) for n in values.tolist())


def _host(run: Measured) -> float:
  """Returns the seconds that the host of generation takes, a step."""
  each = run.each
  whole = each["busy/generation"] + each["idle/generation/host"]
  return max(0.0, whole - each["engine/decode_s"] - each["engine/prefill_s"])


def _line(
  runs: Sequence[Measured],
  at: Callable[[Measured], float],
  seconds: Callable[[Measured], float],
  *,
  fixed: bool = False,
) -> tuple[float, float]:
  """Fits `a + b x` with neither below 0.

  Args:
    runs: to fit.
    at: x of one.
    seconds: y of one.
    fixed: whether, where all have about one x, y is taken for a; or else for
      b x.

  Returns:
    a and b.
  """
  if not runs:
    return 0.0, 0.0
  x = np.array([at(run) for run in runs])
  y = np.array([seconds(run) for run in runs])
  flat = (float(y.mean()), 0.0)
  steep = (0.0, float((x @ y) / (x @ x)))
  if x.max() < 1.2 * x.min():
    return flat if fixed else steep
  slope, start = (float(v) for v in np.polyfit(x, y, 1))
  if slope < 0:
    return flat
  return (start, slope) if start >= 0 else steep


def _unexplained(found: costs_lib.Costs) -> Callable[[Measured], float]:
  """Returns what of the seconds of a run's step the costs do not explain."""

  def rest(run: Measured) -> float:
    return run.step_s - simulate.simulate(run.setting, found).step_s

  return rest


def _slowdown(
  runs: Sequence[Measured], found: costs_lib.Costs, field: str
) -> float:
  """Returns the slowdown with which runs take as long as they did."""
  wanted = math.fsum(math.log(run.step_s) for run in runs)

  def excess(value: float) -> float:
    costs = dataclasses.replace(found, **{field: value})
    made = [simulate.simulate(r.setting, costs).step_s for r in runs]
    return math.fsum(map(math.log, made)) - wanted

  low, high = 1.0, 4.0
  if excess(low) >= 0:
    return low
  for _ in range(10):
    middle = (low + high) / 2
    low, high = (low, middle) if excess(middle) > 0 else (middle, high)
  return (low + high) / 2
