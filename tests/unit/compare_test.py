"""Whether a change worked, told from the lines that two runs have written."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.planning import plan
from jaxrl_post.runtime import compare, history, report, steps

SETTINGS: dict[str, Any] = {
  "model": {"chunk": 1024, "config": {"width": 64}, "path": None},
  "data": {"train": {"size": 20000}, "held_out": {"size": 256}},
  "rewards": {"functions": ["tiny:score"], "weights": []},
  "evaluation": {"every": 50, "temperature": 0.0},
  "group_size": 8,
  "groups_per_step": 4,
  "max_lag": 1,
  "sampling": {"max_tokens": 7},
  "seed": 0,
}
ROLLOUTS = 32


def drift(rng, count, alike=0.5):
  """Noise whose neighbours are alike: AR(1), of variance 1."""
  values = [rng.normal()]
  for draw in rng.normal(size=count - 1):
    values.append(alike * values[-1] + math.sqrt(1 - alike**2) * draw)
  return np.array(values)


def lines(
  seed,
  count=120,
  *,
  step_s=1.0,
  lag=1.0,
  reward=1.0,
  slower_learnt=1.0,
  noise=0.3,
  devices=2,
) -> list[dict[str, Any]]:
  """A run that learns; step times vary by `noise`, rewards by 0.1."""
  rng = np.random.default_rng(seed)
  seconds = step_s * np.exp(noise * drift(rng, count) - noise**2 / 2)
  seconds[0] += 30.0
  wall = np.cumsum(seconds)
  waited = np.cumsum(0.25 * seconds)
  learnt = reward * (1 - np.exp(-np.arange(count) / (20 * slower_learnt)))
  rewards = learnt + 0.1 * drift(rng, count)
  made = []
  for at in range(count):
    done = (at + 1) * ROLLOUTS
    rate = 3600 * done / wall[at] / devices
    made.append(
      {
        "step": at + 1,
        "time/seconds": wall[at],
        "devices": float(devices),
        "throughput/consumed_per_device_hour": rate,
        "throughput/generated_per_device_hour": rate,
        "throughput/trained_tokens_per_s": 5 * done / wall[at],
        "idle/training": waited[at] / wall[at],
        "idle/training/queue_empty": waited[at] / wall[at],
        "sync/latency_s": None if at == 0 else 0.02,
        "staleness/mean": lag,
        "staleness/max": math.ceil(lag),
        "mismatch/mean_abs": None,
        "reward/mean": rewards[at],
        "reward/std": 0.5,
        "reward/standard_error": 0.1,
        "compile/count": 16.0,
        "compile/seconds": 24.0,
        "engine/decode_tokens": float(done),
      }
    )
  return made


def run(made: list[dict[str, Any]], name="run", **settings) -> history.Run:
  return history.Run(
    path=pathlib.Path(name), config={**SETTINGS, **settings}, lines=made
  )


def written(path, made, *, digest=None, **settings):
  path.mkdir()
  (path / "config.json").write_text(json.dumps({**SETTINGS, **settings}))
  text = "".join(json.dumps(row) + "\n" for row in made)
  (path / "metrics.jsonl").write_text(text)
  if digest:
    checkpoint = path / "checkpoints" / "100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text(json.dumps({"data": digest}))
  return path


# -------------------------------------------------------------------- figures


def test_a_rate_is_a_sum_over_a_sum():
  tops, bottoms = np.ones(40), np.array([1.0, 3.0] * 20)
  found = steps.ratio(tops, bottoms)
  assert found.value == pytest.approx(0.5)  # the mean of ratios is 2/3
  # All are half off; stretches would say nothing of it, as halves cancel.
  assert found.error == pytest.approx(2.262 * math.sqrt(40 * 0.25) / 80)
  assert math.isnan(steps.ratio(tops[:29], bottoms[:29]).error)
  with_gap = steps.ratio(np.append(tops, math.nan), np.append(bottoms, 9.0))
  assert with_gap == found


@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_an_interval_holds_the_truth_about_as_often_as_it_says(alike):
  rng = np.random.default_rng(0)
  held = 0
  for _ in range(400):
    values = 5.0 + drift(rng, 120, alike)
    low, high = steps.ratio(values, np.ones(120)).interval
    held += low <= 5.0 <= high
  # Single steps taken for independent would hold it in 74 % at 0.5.
  assert 0.91 <= held / 400 <= 0.98


def test_figures_are_of_each_step_and_not_since_the_first_admission():
  found = steps.measure(run(lines(0, 200, noise=0.0)))
  # The first step took 31 s, and does not count.
  assert found["step, s"].value == pytest.approx(1.0)
  rate = found["consumed a device-hour"]
  assert rate.value == pytest.approx(3600 * ROLLOUTS / 2)
  assert found["idle part of training"].value == pytest.approx(0.25)
  assert found["weight sync, ms"].value == pytest.approx(20.0)
  assert math.isnan(found["mismatch, nats"].value)


def test_steps_that_compile_and_those_after_a_gap_do_not_count():
  made = lines(0, 60, noise=0.0)
  for row in made[40:]:
    row["compile/count"] += 1  # one program more, from step 41 on
  del made[20]
  ok = history.counted(made)
  steps_out = {made[at]["step"] for at in np.flatnonzero(~ok)}
  assert steps_out == {1, 2, 3, 4, 5, 6, 22, 41, 59, 60}


def test_the_first_steps_of_a_process_that_goes_on_do_not_count_either():
  made = lines(0, 60)
  for row in made[30:]:
    row["compile/seconds"] = 3.0
    row["engine/decode_tokens"] -= 30 * ROLLOUTS
  assert list(np.flatnonzero(history.restarted(made))) == [30]
  assert not history.restarted(lines(0, 60)).any()
  out = [*range(6), *range(30, 36), 58, 59]
  assert list(np.flatnonzero(~history.counted(made))) == out


def test_the_further_ahead_generation_was_the_fewer_steps_count():
  ok = history.counted(lines(0, 60, lag=4.0))
  assert list(np.flatnonzero(ok)) == list(range(9, 55))
  silent = [{**row, "staleness/max": None} for row in lines(0, 60)]
  assert list(np.flatnonzero(history.counted(silent))) == list(range(5, 59))
  assert not history.counted(lines(0, 8)).any()


def test_rewards_are_compared_at_equal_device_hours():
  # Both learn; the longer one is further at its own end.
  rows = lines(1, 120)[:60]
  shift = [{**row, "reward/mean": row["reward/mean"] + 0.5} for row in rows]
  found = steps.reward_change(run(shift), run(lines(1, 120)))
  assert found.value == pytest.approx(-0.5)
  # Of 30 steps, whose own standard errors are wider than no variation at all.
  assert found.error == pytest.approx(2.262 * 0.1 * math.sqrt(2 / 30))


@pytest.mark.parametrize("swap", [False, True], ids=["slow", "fast"])
def test_a_run_in_half_the_time_may_need_twice_the_steps(swap):
  """Rewards that rise with time alone are equal, whoever makes more steps."""
  slow, fast = lines(1, 100, step_s=2.0), lines(2, 200, noise=0.1)
  for rows in (slow, fast):
    for row in rows:
      row["reward/mean"] = row["time/seconds"] / 100
  pair = (run(fast), run(slow)) if swap else (run(slow), run(fast))
  assert abs(steps.reward_change(*pair).value) < 0.01
  behind = [{**row, "reward/mean": 0.5 * row["reward/mean"]} for row in fast]
  pair = (run(slow), run(behind))
  assert steps.reward_change(*pair).value < -0.3


# ------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
  ("verdict", "count", "change"),
  [
    ("worked", 300, {"step_s": 0.7}),
    ("worked", 300, {"reward": 1.5}),
    ("worked", 120, {"step_s": 0.7, "slower_learnt": 1.3}),
    ("no difference", 300, {}),
    ("no difference", 300, {"step_s": 0.99}),
    ("bad deal", 300, {"step_s": 0.7, "lag": 16.0}),
    ("bad deal", 300, {"step_s": 0.7, "reward": 0.5}),
    ("bad deal", 300, {"step_s": 0.7, "lag": 16.0, "reward": 0.5}),
    ("slower", 300, {"step_s": 1.5}),
    ("slower", 300, {"step_s": 1.5, "reward": 1.5}),
    ("worse", 300, {"step_s": 1.5, "reward": 0.5}),
    ("worse", 300, {"reward": 0.5}),
    ("worse", 300, {"lag": 16.0}),
    ("undecided", 34, {"step_s": 0.5}),
    ("undecided", 60, {"noise": 1.5}),
  ],
)
def test_verdicts(verdict, count, change):
  a, b = run(lines(1, count, lag=0.0)), run(lines(2, count, **change))
  found = compare.verdict(a, b)
  assert found.name == verdict, found.reasons


def test_the_lag_that_is_tolerated_grows_with_that_of_the_first():
  a, b = run(lines(1, 300, lag=8.0)), run(lines(2, 300, step_s=0.7, lag=9.5))
  assert compare.verdict(a, b).name == "worked"


def test_runs_without_rewards_are_judged_by_their_speed():
  silent = {"reward/mean": None, "reward/std": None}
  a, b = (
    run([{**row, **silent} for row in lines(seed, 300, step_s=s)])
    for seed, s in ((1, 1.0), (2, 0.7))
  )
  assert compare.verdict(a, b).name == "worked"


def test_what_is_not_known_is_not_judged():
  short, long = run(lines(1, 2)), run(lines(2, 60))
  found = compare.verdict(short, long)
  assert found.name == "undecided"
  assert not any("nan" in reason for reason in found.reasons)
  assert "mean lag: not known" in found.reasons


def test_two_runs_of_one_setting_are_hardly_ever_told_apart():
  told = []
  for seed in range(100):
    a, b = (run(lines(of, 60 + 60 * (seed % 2))) for of in (seed, seed + 1000))
    told.append(compare.verdict(a, b).name)
  others = [n for n in told if n not in ("no difference", "undecided")]
  assert len(others) <= 5, others  # 5 %


# ---------------------------------------------------------------- comparability


@pytest.mark.parametrize(
  ("name", "settings"),
  [
    ("model.config.width", {"model": {"config": {"width": 128}}}),
    ("data.train.size", {"data": {"train": {"size": 5}}}),
    ("rewards.functions", {"rewards": {"functions": ["a:b"], "weights": []}}),
    ("rewards.model.path", {"rewards": {"model": {"path": "/b"}}}),
    ("group_size", {"group_size": 16}),
    ("groups_per_step", {"groups_per_step": 16}),
    ("sampling.max_tokens", {"sampling": {"max_tokens": 8}}),
  ],
)
def test_runs_of_other_things_are_refused_by_name(name, settings):
  a, b = run(lines(1, 5), "x"), run(lines(2, 5), "y", **settings)
  with pytest.raises(types.InputError, match=f"one {name}, got .* in x and"):
    compare.check([a, b])


def test_settings_that_may_change_are_not_refused():
  model = {**SETTINGS["model"], "chunk": 64}
  sooner = {"every": 10, "temperature": 0.0}
  compare.check(
    [run([]), run([], max_lag=4, seed=3, model=model, evaluation=sooner)]
  )


def test_other_data_under_the_same_settings_are_refused(tmp_path):
  a = written(tmp_path / "a", lines(1, 5), digest="abc")
  b = written(tmp_path / "b", lines(2, 5), digest="xyz")
  with pytest.raises(types.InputError, match="digest of data.train, got abc"):
    compare.text([a, b])


def test_rates_of_other_devices_are_by_device_and_that_is_said(tmp_path):
  a = written(tmp_path / "a", lines(1, 300))
  b = written(tmp_path / "b", lines(2, 300, step_s=0.5, devices=4))
  text = compare.text([a, b])
  assert "B against A: no difference" in text
  assert "B: other devices than A" in text


def test_lines_without_devices_are_rates_of_a_device_all_the_same(tmp_path):
  old = lines(1, 300)
  for row in old:
    del row["devices"]
  a, b = written(tmp_path / "a", old), written(tmp_path / "b", lines(2, 300))
  text = compare.text([a, b])
  assert "devices: unknown" in text
  assert "B against A: no difference" in text


# ------------------------------------------------------------------------ text


def test_runs_stand_side_by_side_in_80_columns(tmp_path):
  tested = lines(1, 120)
  tested[49]["eval/reward"] = 0.25
  tested[99]["eval/reward"] = 0.75
  other = lines(2, 100, step_s=0.6, lag=3.0)
  other[49]["eval/reward"] = 0.5
  a = written(tmp_path / "a", tested, digest="abc")
  b = written(tmp_path / "b", other, digest="abc", max_lag=3, seed=1)
  c = written(tmp_path / "c", lines(3, 120, step_s=0.6, lag=16.0), max_lag=99)
  text = compare.text([a, b, c])
  shown = [line for line in text.splitlines() if str(tmp_path) not in line]
  assert max(map(len, shown)) <= 80
  table = {line[:26].strip(): line[26:].split() for line in shown if line}
  assert table["most lag, versions"] == ["1", "3", "16"]
  assert table["held-out, last"][:4] == ["0.75", "(step", "100)", "0.5"]
  assert "max_lag: 3 after 1" in text and "seed: 1 after 0" in text
  assert "B against A: worked" in text
  assert "C against A: bad deal" in text
  assert "C: no checkpoint" in text
  both = compare.text([a, b])
  assert "held-out, step 50" in both


def test_evaluations_of_other_prompts_are_not_shown(tmp_path):
  tested = lines(1, 40)
  tested[9]["eval/reward"] = 0.25
  data = {**SETTINGS["data"], "held_out": {"size": 7}}
  a = written(tmp_path / "a", tested)
  b = written(tmp_path / "b", tested, data=data)
  text = compare.text([a, b])
  assert "held-out" not in text and "B: other evaluations than A" in text
  same = written(tmp_path / "c", tested)
  assert "held-out" in compare.text([a, same])


@pytest.mark.parametrize("told", [compare.text, report.report, plan.text])
def test_a_run_beside_itself_is_refused_whatever_it_is_called(tmp_path, told):
  a, b = (written(tmp_path / name, lines(1, 9)) for name in "ab")
  link = tmp_path / "c"
  link.symlink_to(a)
  for folders in ([a, a], [a, link], [a, tmp_path / "b" / ".." / "a"]):
    with pytest.raises(types.InputError, match="Name each run once") as error:
      told(folders)
    assert f"{folders[1]}: expected folders of different runs" in str(
      error.value
    )
    assert "\n" not in str(error.value)
  if told is compare.text:
    assert told([a, b])


def test_what_a_folder_says_cannot_steer_the_terminal(tmp_path):
  a = written(tmp_path / "a\x1b[2J", lines(1, 9))
  b = written(tmp_path / "b", lines(1, 9), debug={"\x1b[31m\u202ename": 1})
  text = compare.text([a, b])
  assert "a\\x1b[2J" in text and "debug.\\x1b[31m\\u202ename" in text
  assert not set("\x1b\u202e") & set(text)


def test_a_line_that_is_being_written_is_left_out(tmp_path):
  a = written(tmp_path / "a", lines(1, 40))
  with (a / "metrics.jsonl").open("a") as file:
    file.write('{"step": 41, "rew')
  assert len(history.read(a).rows) == 40


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda path: (path / "config.json").unlink(), "without config.json"),
    (lambda path: (path / "metrics.jsonl").unlink(), "without metrics.jsonl"),
    (lambda path: (path / "metrics.jsonl").write_text("{}\n"), "trained step"),
    (
      lambda path: (path / "metrics.jsonl").write_text("{\n"),
      "line 1: expected",
    ),
  ],
)
def test_what_is_no_run_is_refused_in_a_line(tmp_path, spoil, message):
  a, b = (written(tmp_path / name, lines(1, 5)) for name in "ab")
  spoil(b)
  with pytest.raises(types.InputError, match=message) as error:
    compare.text([a, b])
  assert str(b) in str(error.value) and "\n" not in str(error.value)
