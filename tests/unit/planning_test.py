"""Plans: the simulation against closed forms, costs from runs, the table."""

import dataclasses
import json
import re

import pytest

from jaxrl_post import config, types
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.planning import costs as costs_lib
from jaxrl_post.planning import measure, plan, simulate
from tests.e2e import runs
from tests.house import source

# A batch fills the rows once, and all completions take two blocks of four.
_SETTING = costs_lib.Setting(
  mode="split",
  groups_per_step=4,
  group_size=4,
  rows=16,
  block=4,
  max_tokens=8,
  max_prompt=16,
  max_lag=0,
)
_COSTS = costs_lib.Costs(
  column_s=0.25,
  update_s=1.0,
  publish_s=0.125,
  host_s=0.0625,
  call_s=0.5,
  lengths=(8,),
)
_GENERATION_S = 8 * 0.25 + 0.5


def simulated(costs=_COSTS, **changes):
  """Returns the outcome of a setting that differs from the usual one."""
  setting = dataclasses.replace(_SETTING, **changes)
  return simulate.simulate(setting, costs, steps=8)


def varied(**changes):
  """Returns costs that differ from the usual ones."""
  return dataclasses.replace(_COSTS, **changes)


# ------------------------------------------------------------- closed forms


@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_lockstep_takes_as_long_as_its_parts_one_after_the_other(mode):
  # The host's rest of a step runs beside the next batch's sampling.
  costs = varied(reward_s=0.25, take_s=0.03125, block_s=0.0625)
  more = {"rollout_s": 0.015625, "pack_s": 0.5, "packed_s": 0.015625}
  costs = dataclasses.replace(costs, **more)
  got = simulated(costs, mode=mode)
  host = 2 * 0.0625 + 16 * 0.015625 + 0.5 + 16 * 0.015625
  step = _GENERATION_S + host + 0.25 + 1.0 + 0.125 + 0.03125
  assert got.step_s == pytest.approx(step)
  devices = 2 if mode == "split" else 1
  assert got.consumed_per_device_hour == pytest.approx(
    16 * 3600 / step / devices
  )
  assert got.training_idle == pytest.approx(1 - 1.125 / step)
  assert got.generation_idle == pytest.approx(
    1 - (_GENERATION_S + 0.03125) / step
  )
  assert (got.staleness_mean, got.staleness_max) == (0.0, 0)


def test_without_a_thread_of_its_own_generation_waits_for_the_host_too():
  got = simulated(asynchronous=False)
  assert got.step_s == pytest.approx(simulated().step_s + 0.0625)


@pytest.mark.parametrize("update_s", [0.5, 5.0])
def test_split_with_lag_takes_as_long_as_the_longer_stage(update_s):
  got = simulated(varied(update_s=update_s, host_s=0.0), max_lag=1)
  longer = max(_GENERATION_S, update_s + 0.125)
  assert got.step_s == pytest.approx(longer, rel=0.02)
  assert got.staleness_max == 1
  idle = got.generation_idle if update_s > 1 else got.training_idle
  shorter = min(_GENERATION_S, update_s + 0.125)
  assert idle == pytest.approx(1 - shorter / longer, abs=0.02)


def test_colocated_with_lag_takes_turns():
  got = simulated(varied(host_s=0.0), mode="colocated", max_lag=1)
  assert got.step_s == pytest.approx(_GENERATION_S + 1.125, rel=0.02)
  free = simulated(
    varied(host_s=0.0, colocated=1.0), mode="colocated", max_lag=1
  )
  assert free.step_s == pytest.approx(_GENERATION_S, rel=0.02)


def test_one_slot_makes_one_completion_after_the_other():
  got = simulated(varied(call_s=0.0), rows=1, block=1)
  assert got.step_s == pytest.approx(16 * 8 * 0.25 + 1.125)


def test_rows_that_end_are_refilled_between_blocks_only():
  # One slot: 5 tokens take two blocks of four, the second of one token.
  costs = varied(call_s=0.0, lengths=(5,), block_s=0.125)
  got = simulated(costs, rows=1)
  assert got.step_s == pytest.approx(16 * (5 * 0.25 + 2 * 0.125) + 1.125)
  # Two slots: a short one waits for the block's end with the longer one.
  pair = varied(call_s=0.0, lengths=(1, 3))
  both = simulated(pair, rows=2, groups_per_step=1, group_size=2)
  assert 1.125 + 0.25 <= both.step_s <= 1.125 + 0.75


def test_prompts_are_read_in_calls():
  # 2 prompts fit into a call: 2 calls for 4 groups.
  got = simulated(prefill_tokens=32)
  assert got.step_s == pytest.approx(8 * 0.25 + 2 * 0.5 + 1.125)
  # A prompt that is longer than a call takes several.
  got = simulated(prefill_tokens=8)
  assert got.step_s == pytest.approx(8 * 0.25 + 4 * 2 * 0.5 + 1.125)


def test_lengths_end_at_the_limit():
  assert simulated(varied(lengths=(100,))).step_s == simulated().step_s


def test_groups_without_signal_are_sampled_for_nothing():
  half = simulated(varied(left=0.5, call_s=0.0), max_lag=2)
  assert half.step_s == pytest.approx(2 * 8 * 0.25, rel=0.25)
  assert half.ledger.filtered.groups > 0


def test_weights_in_flight_mix_versions_and_drained_ones_do_not():
  costs = varied(lengths=(2, 8, 30), update_s=0.25, publish_s=0.0)
  sizes = {"max_tokens": 32, "max_lag": 4, "block": 2}
  kept = simulated(costs, **sizes)
  drained = simulated(costs, drain=True, **sizes)
  assert 0 < kept.staleness_mean < 4 and kept.staleness_max <= 4
  assert drained.step_s > kept.step_s
  entries = [c.tokens for c in (drained.ledger.trained, kept.ledger.trained)]
  assert min(entries) > 0


# ------------------------------------------------------------ what must hold


def test_the_ledger_is_conserved_and_lag_bounded_in_every_setting():
  costs = varied(lengths=(1, 2, 5, 8), left=0.2, reward_s=0.3)
  for mode in ("split", "colocated"):
    for lag in (0, 1, 3):
      for rows in (3, 16):
        got = simulated(costs, mode=mode, max_lag=lag, rows=rows)
        ledgers.check(got.ledger)
        assert got.staleness_max <= lag
        assert 0 <= got.generation_idle <= 1 and 0 <= got.training_idle <= 1


def test_equal_arguments_give_equal_outcomes():
  costs = varied(lengths=(1, 4, 8), left=0.3)
  assert simulated(costs, max_lag=1) == simulated(costs, max_lag=1)


def test_more_of_anything_that_costs_is_slower_and_more_lag_is_not():
  costs = varied(lengths=(2, 4, 8))
  base = simulated(costs, max_lag=1).step_s
  for name in ("column_s", "update_s", "call_s", "publish_s"):
    more = {name: 1.5 * getattr(costs, name)}
    assert simulated(dataclasses.replace(costs, **more), max_lag=1).step_s >= (
      base - 1e-9
    )
  # A call that reads prompts costs the same for one prompt.
  free = dataclasses.replace(costs, call_s=0.0)
  steps = [simulated(free, max_lag=lag).step_s for lag in range(4)]
  assert all(b <= a * 1.01 for a, b in zip(steps, steps[1:], strict=False))


def test_more_devices_are_faster_by_the_stated_arithmetic():
  costs = varied(row_s=0.125, position_s=0.0625)
  assert costs.column(_SETTING) == 0.25 + 0.125 * 16
  two = dataclasses.replace(_SETTING, training=2, generation=2)
  assert costs.column(two) == 0.25 + 0.125 * 8
  # Four rows, each with a prompt once and its four completions.
  positions = 4 * (15 + 4 * 9)
  assert costs.update(_SETTING) == 1.0 + 0.0625 * positions
  assert costs.update(two) == pytest.approx(1.0 + 0.0625 * positions / 1.8)
  assert costs_lib.speed(4, 0.9) == pytest.approx(4 * 0.81)
  assert (two.devices, _SETTING.devices) == (4, 2)
  alone = dataclasses.replace(_SETTING, mode="colocated")
  assert alone.devices == 1
  assert (costs.slowdown(alone), costs.slowdown(two)) == (2.0, 1.0)


# --------------------------------------------------------- folders of runs


def folder(path, costs, steps=16, name="tiny", **changes):
  """Writes a run that costs what is said, and has taken what is simulated."""
  cfg = config.load(name, source.ROOT / "experiments")
  sizes = {"sampling.rows": 16, "groups_per_step": 4, **changes}
  sets = [f"{key}={value}" for key, value in sizes.items()]
  cfg = config.override(cfg, sets)
  path.mkdir(parents=True)
  tree = config.to_json(cfg)
  (path / "config.json").write_text(json.dumps(tree))
  count = 1 if cfg.placement.mode == "colocated" else 2
  setting = costs_lib.setting(tree, count)
  step = simulate.simulate(setting, costs).step_s
  rows = setting.rollouts
  blocks, columns = 4, 24
  lines = []
  for number in range(1, steps + 1):
    wall = 5.0 + step * number
    spent = {
      "busy/generation": columns * costs.column(setting)
      + costs.call(setting)
      + blocks * costs.block_s
      + rows * costs.rollout_s,
      "busy/training": costs.update(setting),
      "overhead/training/sync": costs.publish_s,
      "overhead/generation/sync": costs.take_s,
      "idle/training/host": costs.host_s,
      "idle/training/reward_pending": costs.reward_s,
    }
    line = {k: number * v / wall for k, v in spent.items()}
    zero = (
      "idle/generation/host",
      *(f"overhead/training/{k}" for k in ("eval", "checkpoint")),
    )
    line |= dict.fromkeys(zero, 0.0)
    totals = {
      "engine/prefill_calls": 1,
      "engine/prefill_s": costs.call(setting),
      "engine/blocks": blocks,
      "engine/columns": columns,
      "engine/decode_s": columns * costs.column(setting),
      "ledger/filtered": 0,
      "ledger/failed": 0,
      "ledger/trained": setting.groups_per_step,
    }
    line |= {k: number * v for k, v in totals.items()}
    hours = count * wall / 3600
    line |= {
      "step": number,
      "time/seconds": wall,
      "devices": float(count),
      "compile/count": min(number, 2),
      "throughput/consumed_per_device_hour": number * rows / hours,
      "staleness/mean": 0.5,
      "staleness/max": float(setting.max_lag),
      "completion/min_tokens": 6.0,
      "completion/max_tokens": 6.0,
      "completion/mean_tokens": 6.0,
      **{f"completion/p{p}_tokens": 6.0 for p in (10, 25, 50, 75, 90, 99)},
    }
    lines.append(json.dumps(line))
  (path / "metrics.jsonl").write_text("\n".join([*lines, '{"torn']))
  return path


_TRUE = costs_lib.Costs(
  column_s=0.01,
  row_s=0.0001,
  call_s=0.02,
  block_s=0.002,
  rollout_s=0.0001,
  update_s=0.05,
  position_s=0.0001,
  publish_s=0.01,
  take_s=0.005,
  host_s=0.01,
  pack_s=0.004,
  packed_s=0.0005,
  split=1.25,
  lengths=(6,),
)


@pytest.fixture(name="three", scope="module")
def _three(tmp_path_factory):
  """Two lockstep runs of two sizes, and one that overlaps."""
  at = tmp_path_factory.mktemp("runs")
  half = {"sampling.rows": 8, "groups_per_step": 2}
  return [
    folder(at / "a", _TRUE, max_lag=0),
    folder(at / "b", _TRUE, max_lag=0, **half),
    folder(at / "c", _TRUE, max_lag=1),
  ]


def test_costs_are_found_again_in_the_runs_that_they_made(three):
  found = measure.calibrate([measure.read(path) for path in three])
  for name in ("column_s", "row_s", "update_s", "position_s", "publish_s"):
    assert getattr(found, name) == pytest.approx(getattr(_TRUE, name)), name
  for name in ("take_s", "host_s", "block_s", "rollout_s"):
    assert getattr(found, name) == pytest.approx(getattr(_TRUE, name)), name
  # What nothing else explains; what is explained above depends on chance.
  for name in ("pack_s", "packed_s"):
    wanted = getattr(_TRUE, name)
    assert getattr(found, name) == pytest.approx(wanted, rel=0.05), name
  assert found.split == pytest.approx(1.25, abs=0.02)
  assert set(found.lengths) == {6} and found.left == 0
  # One number of prompts a call was seen: all of a call is in its fixed part.
  run = measure.read(three[0])
  assert found.call(run.setting) == pytest.approx(_TRUE.call(run.setting))
  assert run.setting.devices == 2 and run.steps == 10
  made = simulate.simulate(run.setting, _TRUE)
  assert run.consumed_per_device_hour == pytest.approx(
    made.consumed_per_device_hour
  )


def test_lengths_have_the_percentiles_and_the_mean_of_the_run(tmp_path):
  path = folder(tmp_path / "run", _TRUE, max_lag=0)
  drawn = sorted(round(0.5 + 20 * (i / 100) ** 3) for i in range(1, 101))
  tops = {p: float(drawn[p - 1]) for p in (10, 25, 50, 75, 90, 99)}
  known = {f"completion/p{p}_tokens": n for p, n in tops.items()}
  known["completion/min_tokens"] = float(drawn[0])
  known["completion/max_tokens"] = float(drawn[-1])
  known["completion/mean_tokens"] = sum(drawn) / 100
  lines = [
    json.dumps(json.loads(line) | known)
    for line in (path / "metrics.jsonl").read_text().splitlines()[:-1]
  ]
  (path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
  found = measure.read(path).lengths
  assert sum(found) / len(found) == pytest.approx(sum(drawn) / 100, abs=0.15)
  assert (found[0], found[-1]) == (drawn[0], drawn[-1])
  for percent, most in tops.items():
    assert abs(found[percent - 1] - most) <= 1


def test_seconds_that_round_to_below_zero_are_none(three):
  run = measure.read(three[0])
  each = {**run.each, "idle/training/reward_pending": -1e-19}
  run = dataclasses.replace(run, each=each)
  assert measure.calibrate([run]).reward_s == 0.0


def test_a_run_in_a_bad_moment_changes_nothing(three):
  runs = [measure.read(path) for path in three]
  slow = [
    dataclasses.replace(
      run,
      step_s=3 * run.step_s,
      each={name: 3 * value for name, value in run.each.items()},
    )
    for run in runs
  ]
  found = measure.calibrate([*runs, *runs, *slow])
  assert dataclasses.replace(found, lengths=(6,)) == dataclasses.replace(
    measure.calibrate(runs), lengths=(6,)
  )


def test_a_single_run_says_what_it_does_not_know(three, monkeypatch):
  monkeypatch.setattr(plan, "_LAGS", (0,))
  found = measure.calibrate([measure.read(three[0])])
  assert found.row_s == 0 and found.update_s == 0 and found.split == 1.0
  shown = " ".join(plan.text(three[:1]).split())
  assert "only 16 are known" in shown
  assert "There is no split run with max_lag > 0" in shown


def test_the_plan_is_a_table_and_flags_that_the_config_takes(
  three, tmp_path, monkeypatch
):
  monkeypatch.setattr(plan, "_FACTORS", (1, 2))
  monkeypatch.setattr(plan, "_LAGS", (0, 1))
  kept = tmp_path / "costs.json"
  shown = plan.text(three, save=str(kept))
  assert max(map(len, shown.splitlines())) <= 80
  assert "\n* " in shown and "\n> " in shown
  flags = re.findall(r"--set (\S+)", shown)
  cfg = config.load("tiny", source.ROOT / "experiments")
  assert flags and config.override(cfg, ["max_lag=0", *flags])
  # From the file that it wrote comes the same advice.
  again = plan.text([kept])
  assert re.findall(r"--set (\S+)", again) == flags
  found = costs_lib.read(kept)[1]
  assert found == measure.calibrate([measure.read(path) for path in three])
  more = plan.text([kept], devices=4)
  assert "on 4 devices" in more and "\n> " not in more


def test_the_table_has_only_what_none_beats():
  costs = varied(lengths=(2, 4, 8))
  every = [plan.run_of(s, costs) for s in plan.settings(_SETTING, costs)]
  front = plan.pareto(every)
  pairs = [
    (p.outcome.consumed_per_device_hour, p.outcome.staleness_mean)
    for p in front
  ]
  assert pairs == sorted(pairs, reverse=True)
  for other in every:
    fast, stale = (
      other.outcome.consumed_per_device_hour,
      other.outcome.staleness_mean,
    )
    assert any(f >= fast and s <= stale + 0.02 for f, s in pairs)
  chosen = plan.recommend(every, 4)
  assert chosen.setting.groups_per_step == 4
  best = max(
    p.outcome.consumed_per_device_hour
    for p in every
    if p.setting.groups_per_step == 4
  )
  assert chosen.outcome.consumed_per_device_hour >= 0.95 * best


def test_settings_divide_over_the_devices():
  made = list(plan.settings(_SETTING, varied(row_s=0.1), 8))
  assert {s.devices for s in made} == {8}
  assert {s.mode for s in made} == {"colocated", "split"}
  for s in made:
    assert s.rows % s.generation == 0 and s.rollouts % s.training == 0
  # What a run would refuse: written axes, and parts of a batch.
  fours = dataclasses.replace(
    _SETTING, generation_axes=4, generation_inner=4, cut=4
  )
  tried = list(plan.settings(fours, varied(row_s=0.1), 8))
  assert tried and all(s.generation % 4 == 0 for s in tried)
  assert all(s.rollouts % (4 * s.training) == 0 for s in tried)
  assert {s.max_lag for s in made} == {0, 1, 2, 4}
  assert {s.rows for s in made} == {8, 16, 32}
  assert {s.rows for s in plan.settings(_SETTING, _COSTS, 8)} == {16}


def test_flags_say_what_differs_and_free_axes_that_are_written_out():
  assert plan.flags(_SETTING, _SETTING) == []
  other = dataclasses.replace(
    _SETTING, training=3, rows=32, groups_per_step=2, max_lag=2
  )
  assert plan.flags(other, _SETTING) == [
    "--set placement.generation_fraction=0.25",
    "--set sampling.rows=32",
    "--set groups_per_step=2",
    "--set max_lag=2",
  ]
  alone = dataclasses.replace(_SETTING, mode="colocated")
  fixed = dataclasses.replace(_SETTING, fixed_training=True)
  assert plan.flags(alone, fixed) == [
    "--set placement.mode=colocated",
    "--set placement.training.fsdp=-1",
  ]


# --------------------------------------------------------------- plan/error


def test_a_run_expects_what_its_own_settings_give(three, tmp_path):
  kept = tmp_path / "costs.json"
  base = measure.read(three[0]).setting
  costs_lib.write(kept, base, _TRUE)
  tree = json.loads((three[2] / "config.json").read_text())
  got = plan.predict(str(kept), tree, 2)
  wanted = dataclasses.replace(base, max_lag=1)
  assert got == simulate.simulate(wanted, _TRUE)


# ------------------------------------------------------------ hostile inputs


def one_line(*paths, **others):
  """Returns the line with which a plan is refused."""
  with pytest.raises(types.InputError) as error:
    plan.text(list(paths), **others)
  assert "\n" not in str(error.value)
  return str(error.value)


def test_a_wrong_folder_is_one_line(three, tmp_path):
  assert "expected the folder of a run" in one_line(tmp_path)
  assert "expected the folder of a run" in one_line(tmp_path / "none")
  (tmp_path / "list.json").write_text("[1]")
  assert "an object with setting and costs" in one_line(tmp_path / "list.json")
  short = folder(tmp_path / "short", _TRUE, steps=4, max_lag=0)
  assert "5 steps or more" in one_line(short)
  old = folder(tmp_path / "old", _TRUE, max_lag=0)
  text = (old / "metrics.jsonl").read_text()
  (old / "metrics.jsonl").write_text(text.replace("engine/columns", "engine/c"))
  assert "expected engine/columns in its metrics" in one_line(old)
  (old / "metrics.jsonl").write_text("")
  assert "expected a run with a trained step" in one_line(old)
  (old / "config.json").write_text('{"stream": 1}')
  assert "expected" in one_line(old)
  drops = folder(tmp_path / "drops", _TRUE, max_lag=0)
  settings = (drops / "config.json").read_text()
  (drops / "config.json").write_text(
    settings.replace('"on_stale": "wait"', '"on_stale": "drop"')
  )
  assert "stream.on_stale: expected wait" in one_line(drops)
  assert "can be written" in one_line(three[0], save=str(tmp_path / "x" / "y"))
  assert "--devices: expected a number" in one_line(three[0], devices=7)


def test_the_mode_takes_folders_and_needs_no_experiment(three, tmp_path):
  end = runs.run(tmp_path, "--mode=plan", str(three[0]))
  assert end.code == 0 and "recommended" in end.out
  assert not list(tmp_path.iterdir())
