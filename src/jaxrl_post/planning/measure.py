"""What runs have cost, read from their folders.

A cost that has a part for the whole and one for each row, rollout or position
needs runs that differ in their number; of one number, all of it is taken for
the part that `calibrate` says. Times are taken where the stages work in turn,
in runs with `max_lag=0`, if there are any; how much they are in each other's
way is what makes the others come out as they were.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_post import types
from jaxrl_post.planning import costs as costs_lib
from jaxrl_post.planning import simulate
from jaxrl_post.runtime import folder as folder_lib
from jaxrl_post.runtime import log, metrics

_LEAST, _SAMPLE = 5, 100
_PERCENTS = (0, *metrics.PERCENTS, 100)
_LENGTHS = ("min_tokens", *(f"p{p}_tokens" for p in metrics.PERCENTS))
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
    What its steps cost on average. Left out are those in which a program was
    compiled, or the process was another one, those before the third, and those
    for whose successors nothing more was admitted.

  Raises:
    InputError: it is no folder of a run, it is too short, or it does not say
      what is needed.
  """
  try:
    tree = json.loads((path / folder_lib.CONFIG_FILE).read_text("utf-8"))
    text = (path / log.METRICS_FILE).read_text("utf-8")
  except (OSError, ValueError) as error:
    raise types.InputError(
      f"{path}: expected the folder of a run, or a JSON file of costs, got "
      f"neither: {' '.join(str(error).split())}. Name one."
    ) from error
  rows = _rows(text)
  setting = costs_lib.setting(tree, _devices(path, tree, rows))
  lag = setting.max_lag
  pairs = [
    (a, b)
    for a, b in list(zip(rows, rows[1:], strict=False))[: -(lag + 1)]
    if b["step"] == a["step"] + 1 and b["step"] > 2 + 2 * lag
  ]
  kept = [
    {k: _value(path, b, k) - _value(path, a, k) for k in _COUNTS}
    | _seconds(path, a, b)
    for a, b in pairs
    if a.get("compile/count") == b.get("compile/count")
    and _value(path, b, "engine/blocks") > _value(path, a, "engine/blocks")
  ]
  if len(kept) < _LEAST:
    raise types.InputError(
      f"{path}: expected {_LEAST} steps or more in which nothing is compiled, "
      f"between the first {2 + 2 * lag} and the last {lag + 1}, got "
      f"{len(kept)}. Let the run train more steps."
    )
  seen = [b for _, b in pairs]
  each = {k: float(np.mean([row[k] for row in kept])) for k in kept[0]}
  return Measured(
    name=path.name,
    setting=setting,
    steps=len(kept),
    step_s=each["time/seconds"],
    each=each,
    lengths=_lengths(path, seen),
    staleness_mean=float(
      np.mean([_value(path, b, "staleness/mean") for b in seen])
    ),
    staleness_max=max(_value(path, b, "staleness/max") for b in seen),
  )


def calibrate(runs: Sequence[Measured]) -> costs_lib.Costs:
  """Finds costs that explain some runs.

  Args:
    runs: of one model and machine, at least one. Of one number of rows, a pass
      through the model is taken to cost the same with any; of one batch, an
      update to cost nothing but its positions.

  Returns:
    The costs.
  """
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
  found = dataclasses.replace(found, pack_s=rest[0], packed_s=rest[1])
  for field, modes in (
    ("colocated", ("colocated",)),
    ("split", ("split", "roles")),
  ):
    beside = [r for r in runs if r.setting.max_lag and r.setting.mode in modes]
    if beside:
      value = _slowdown(beside, found, field)
      found = dataclasses.replace(found, **{field: value})
  return found


def _rows(text: str) -> list[dict[str, float]]:
  """Returns the lines of trained steps; a torn one is left out."""
  rows = []
  for line in text.splitlines():
    try:
      row = json.loads(line)
    except ValueError:
      continue
    if isinstance(row, dict) and "busy/training" in row and "step" in row:
      rows.append(row)
  return rows


def _devices(
  path: pathlib.Path, tree: Mapping, rows: Sequence[Mapping[str, float]]
) -> int:
  """Returns how many devices a run held, by what it says of an hour of one."""
  for row in reversed(rows):
    hours = _value(path, row, "time/seconds") / 3600
    rate = row.get("throughput/consumed_per_device_hour")
    groups = row.get("ledger/trained")
    if rate and groups:
      return max(1, round(groups * tree.get("group_size", 1) / rate / hours))
  raise types.InputError(
    f"{path}: expected a run that has trained, got {len(rows)} steps of which "
    "none says how much for an hour of a device. Name another."
  )


def _value(
  path: pathlib.Path, row: Mapping[str, float | None], name: str
) -> float:
  value = row.get(name)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise types.InputError(
      f"{path}: expected {name} in its metrics, got {value} in step "
      f"{row.get('step')}. Run it again with this version, in one process and "
      "not in mode roles."
    )
  return float(value)


def _seconds(
  path: pathlib.Path, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
  """Returns the seconds of a step in each state, and its own."""
  wall = [_value(path, row, "time/seconds") for row in (before, after)]
  found = {
    name: _value(path, after, name) * wall[1]
    - _value(path, before, name) * wall[0]
    for name in _SHARES
  }
  return found | {"time/seconds": wall[1] - wall[0]}


def _lengths(
  path: pathlib.Path, rows: Sequence[Mapping[str, float]]
) -> tuple[int, ...]:
  """Returns lengths with the mean and the percentiles of some steps."""
  names = [f"completion/{name}" for name in (*_LENGTHS, "max_tokens")]
  knots, mean = (
    np.array([np.mean([_value(path, r, name) for r in rows]) for name in those])
    for those in (names, ["completion/mean_tokens"])
  )
  weights = np.diff(_PERCENTS) / 100
  low, rise = knots[:-1], np.diff(knots)
  # How the lengths between two percentiles lie makes the mean what it is.
  share = (mean[0] - weights @ low) / max(weights @ rise, 1e-9)
  bend = 1 / np.clip(share, 0.05, 0.95) - 1
  at = (np.arange(_SAMPLE) + 0.5) * 100 / _SAMPLE
  i = np.searchsorted(_PERCENTS, at, side="right") - 1
  part = (at - np.array(_PERCENTS)[i]) / (100 * weights[i])
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
    return max(0.0, run.step_s - simulate.simulate(run.setting, found).step_s)

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
