"""Settings against each other: a table, and what to set."""

import dataclasses
import itertools
import pathlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.planning import costs as costs_lib
from jaxrl_post.planning import measure, simulate
from jaxrl_post.runtime import history, log

# A setting as good as the fastest one, and a staleness no worse than another.
_NEAR, _SAME = 0.95, 0.02
_STEPS = 8
_FACTORS = (0.5, 1, 2)
_LAGS = (0, 1, 2, 4)
_HEADER = (
  f"{'devices':>23}{'max':>17}{'rollouts a':>12}{'seconds':>9}{'idle':>8}"
  f"{'stale-':>10}",
  f"  {'placement':<10}{'train':>6}{'gen':>5}{'slots':>6}{'groups':>7}"
  f"{'lag':>4}{'device-hour':>12}{'a step':>9}{'gen':>5}{'train':>6}"
  f"{'ness':>7}",
)


@dataclasses.dataclass(frozen=True)
class Planned:
  """A setting and what it is expected to give."""

  setting: costs_lib.Setting
  outcome: simulate.Outcome


def text(
  paths: Sequence[pathlib.Path],
  *,
  devices: int | None = None,
  save: str | None = None,
) -> str:
  """Plans from finished runs, or from costs.

  Args:
    paths: folders of runs of one model and machine, the first of which is to
      become better; or one file of `costs.write`, or written by hand.
    devices: to plan for; None for as many as the first run holds.
    save: a file to write sizes and costs into; None for none.

  Returns:
    What things cost, how well that explains the runs, the settings that are not
    worse than another in both throughput and staleness, and what to set. At
    most 80 columns.

  Raises:
    InputError: something of it cannot be read, used or written, or a folder is
      named twice.
  """
  runs: list[measure.Measured] = []
  if len(paths) == 1 and (paths[0].suffix == ".json" or paths[0].is_file()):
    base, costs = costs_lib.read(paths[0])
  else:
    history.check_distinct(paths)
    runs = [measure.read(path) for path in paths]
    base, costs = runs[0].setting, measure.calibrate(runs)
  if save is not None:
    costs_lib.write(save, base, costs)
  target = base if devices in (None, base.devices) else None
  every = [run_of(s, costs) for s in settings(base, costs, devices)]
  if not every:
    raise types.InputError(
      f"--devices: expected a number that some placement of {base.rows} slots "
      f"and {base.rollouts} rollouts in {base.cut} parts divides over, got "
      f"{devices or base.devices}. Change it."
    )
  chosen = recommend(every, base.groups_per_step)
  shown = pareto(every)
  if chosen not in shown:
    shown.append(chosen)
  own = None if target is None else run_of(target, costs)
  if own is not None and own.setting not in [p.setting for p in shown]:
    shown.append(own)
  shown.sort(key=lambda p: -p.outcome.consumed_per_device_hour)
  lines = [*_costs(costs, base), *_checks(runs, costs), "", *_HEADER]
  for planned in shown:
    marks = {chosen.setting: "*", base: ">"}
    lines.append(_row(planned, marks.get(planned.setting, " ")))
  lines += [
    "* recommended; > as it is" if own else "* recommended",
    "",
    *_advice(chosen, base, own),
    "",
    *_assumptions(costs, base, runs),
  ]
  return log.visible("\n".join(lines))


def run_of(setting: costs_lib.Setting, costs: costs_lib.Costs) -> Planned:
  """Returns a setting with its outcome."""
  return Planned(setting, simulate.simulate(setting, costs, steps=_STEPS))


def settings(
  base: costs_lib.Setting, costs: costs_lib.Costs, devices: int | None = None
) -> Iterator[costs_lib.Setting]:
  """Yields the settings that are tried.

  Args:
    base: what they are varied from.
    costs: where no cost of a row is known, the slots stay as they are.
    devices: that they hold; None for as many as `base` does.

  Yields:
    Every combination of a placement on all devices, half, all and twice the
    slots and groups of a batch, and bounds of 0, 1, 2 and 4 on the lag, that
    a run would not refuse.
  """
  count = base.devices if devices is None else devices
  places = [("colocated", count, count)]
  shares = {1, count // 4, count // 2, count - count // 4, count - 1}
  places += [("split", count - g, g) for g in sorted(shares) if 0 < g < count]
  slots = {int(base.rows * f) for f in (_FACTORS if costs.row_s else (1,))}
  batches = {int(base.groups_per_step * f) for f in _FACTORS}
  lags = {*_LAGS, base.max_lag}
  for place, rows, groups, lag in itertools.product(
    places, sorted(slots - {0}), sorted(batches - {0}), sorted(lags)
  ):
    mode, training, generation = place
    setting = dataclasses.replace(
      base,
      mode=mode,
      training=training,
      generation=generation,
      idle=0,
      rows=rows,
      groups_per_step=groups,
      max_lag=lag,
      asynchronous=base.asynchronous or lag > 0,
    )
    if setting.divides:
      yield setting


def pareto(every: Sequence[Planned]) -> list[Planned]:
  """Returns those that no other beats: as little stale, and faster.

  Returns:
    By throughput, the fastest first; of those that differ in staleness by less
    than 0.02 versions only the fastest.
  """
  best: list[Planned] = []
  by_speed = sorted(
    every,
    key=lambda p: (
      -p.outcome.consumed_per_device_hour,
      p.outcome.staleness_mean,
    ),
  )
  for planned in by_speed:
    least = min((p.outcome.staleness_mean for p in best), default=float("inf"))
    if planned.outcome.staleness_mean < least - _SAME:
      best.append(planned)
  return best


def recommend(every: Sequence[Planned], groups_per_step: int) -> Planned:
  """Returns the least stale of the fastest.

  Args:
    every: to choose from.
    groups_per_step: of the batch that it must have, if any has: another batch
      is another learning rate, and so another run.

  Returns:
    Of the settings with at least 95 % of the largest throughput the one with
    the least staleness, and of equals the fastest.
  """
  same = [p for p in every if p.setting.groups_per_step == groups_per_step]
  among = same or [*every]
  top = max(p.outcome.consumed_per_device_hour for p in among)
  near = [p for p in among if p.outcome.consumed_per_device_hour >= _NEAR * top]
  least = min(p.outcome.staleness_mean for p in near)
  fresh = [p for p in near if p.outcome.staleness_mean <= least + _SAME]
  return max(fresh, key=lambda p: p.outcome.consumed_per_device_hour)


def predict(file: str, tree: Mapping[str, Any], count: int) -> simulate.Outcome:
  """Returns what a run is expected to give.

  Args:
    file: of `costs.write`.
    tree: the configuration of the run, as in config.json.
    count: of JAX's devices.

  Raises:
    InputError: the file is none of costs, or the run is not simulated.
  """
  _, costs = costs_lib.read(file)
  return simulate.simulate(costs_lib.setting(tree, count), costs)


def flags(setting: costs_lib.Setting, base: costs_lib.Setting) -> list[str]:
  """Returns what of the command line makes one setting of another."""
  found = []
  places = [(s.mode, s.training, s.generation) for s in (setting, base)]
  if places[0] != places[1]:
    part = setting.generation / setting.devices
    given = {
      f"placement.mode={setting.mode}": setting.mode != base.mode,
      f"placement.generation_fraction={part:.3g}": setting.mode == "split",
      "placement.training.fsdp=-1": base.fixed_training,
      "placement.generation.data=-1": base.fixed_generation,
    }
    found += [flag for flag, is_new in given.items() if is_new]
  for name, place in (
    ("rows", "sampling.rows"),
    ("groups_per_step", "groups_per_step"),
    ("max_lag", "max_lag"),
  ):
    if getattr(setting, name) != getattr(base, name):
      found.append(f"{place}={getattr(setting, name)}")
  if setting.asynchronous and not base.asynchronous:
    found.append("stream.asynchronous=true")
  return [f"--set {flag}" for flag in found]


def _costs(costs: costs_lib.Costs, base: costs_lib.Setting) -> list[str]:
  """Says what things cost in the setting that there is."""
  lengths = sorted(costs.lengths)
  mean = sum(lengths) / len(lengths)
  tail = lengths[min(len(lengths) - 1, int(0.99 * len(lengths)))]
  milli = {
    "a token of every slot": costs.column(base),
    "a call that reads prompts": costs.call(base),
    "the host, a block": costs.block_s,
    "the host, a completion": costs.rollout_s,
    "the host, to pack a batch": costs.pack(base),
    "score and update": costs.update(base),
    "publish": costs.publish_s + costs.take_s,
    "rewards of a group": costs.reward_s,
    "the rest of a step": costs.host_s,
  }
  lines = [f"{name:<28}{1e3 * s:10.2f} ms" for name, s in milli.items()]
  beside = f"{costs.colocated:.2f} colocated, {costs.split:.2f} split"
  return [
    *lines,
    f"{'both stages at once':<28}{beside:>10} times as long",
    f"{'completions':<28}mean {mean:.1f}, 99 % below {tail + 1} tokens",
  ]


def _checks(
  runs: Sequence[measure.Measured], costs: costs_lib.Costs
) -> list[str]:
  """Says how well the costs explain the runs that they are of."""
  lines = []
  for run in runs:
    made = simulate.simulate(run.setting, costs).consumed_per_device_hour
    real = run.consumed_per_device_hour
    lines.append(
      f"{run.name[:26]:<28}{made:10.0f} a device-hour, {real:.0f} measured "
      f"({made / real - 1:+.1%})"
    )
  return lines


def _row(planned: Planned, mark: str) -> str:
  s, o = planned.setting, planned.outcome
  return (
    f"{mark} {s.mode:<10}{s.training:>6}{s.generation:>5}{s.rows:>6}"
    f"{s.groups_per_step:>7}{s.max_lag:>4}{o.consumed_per_device_hour:>12.0f}"
    f"{o.step_s:>9.4g}{o.generation_idle:>5.2f}{o.training_idle:>6.2f}"
    f"{o.staleness_mean:>7.2f}"
  )


def _advice(
  chosen: Planned, base: costs_lib.Setting, own: Planned | None
) -> list[str]:
  wanted = flags(chosen.setting, base)
  if own is None:
    what = f"on {chosen.setting.devices} devices"
  else:
    gain = (
      chosen.outcome.consumed_per_device_hour
      / own.outcome.consumed_per_device_hour
    )
    what = f"{gain:.2f} times the throughput as it is"
  if not wanted:
    return [f"recommended: leave it as it is ({what})"]
  return [f"recommended ({what}):", *(f"  {flag}" for flag in wanted)]


def _assumptions(
  costs: costs_lib.Costs,
  base: costs_lib.Setting,
  runs: Sequence[measure.Measured],
) -> list[str]:
  """Says what the numbers rest on."""
  seen = {run.setting.mode for run in runs if run.setting.max_lag}
  said = [
    "lengths do not depend on the prompt, nor change as the policy learns;",
    "slots and rollouts divide over data-parallel devices; each doubling keeps",
    f"{costs.efficiency:.0%} of an update's speed; a publish costs the same on",
    "any number; evaluations and checkpoints are as frequent as they were.",
  ]
  if not costs.row_s:
    said.append(
      f"Of slots only {base.rows} are known: beside this a run with other"
      " sampling.rows shows what a slot costs."
    )
  for mode in ("colocated", "split"):
    if runs and mode not in seen:
      said.append(
        f"There is no {mode} run with max_lag > 0: what a stage does beside the"
        f" other is taken to last {getattr(costs, mode):.3g} times as long."
      )
  return textwrap.wrap(f"assumed: {' '.join(said)}", 80)
