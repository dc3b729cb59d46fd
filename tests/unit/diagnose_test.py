"""The five signs, the regime and the lever, of runs whose seconds are known."""

import numpy as np
import pytest

from jaxrl_post.runtime import diagnose, window
from tests.unit import report_runs

# A step of a second: 0.6 s of sampling, then 0.4 s of training.
LOCKSTEP = (
  {"busy": 0.6, "idle/weights_pending": 0.4},
  {"busy": 0.38, "overhead/sync": 0.02, "idle/queue_empty": 0.6},
)
BUSY = (
  {"busy": 0.95, "overhead/sync": 0.02, "idle/lag_gate": 0.03},
  {"busy": 0.9, "overhead/sync": 0.03, "idle/queue_empty": 0.07},
)


def fires(found: diagnose.Diagnosis) -> list[bool | None]:
  return [sign.fires for sign in found.signs]


def test_compilation_at_the_start_is_in_no_figure():
  rows = report_runs.lines(*LOCKSTEP)
  found = window.steady(rows)
  assert found is not None
  assert (found.first, found.last, found.steps) == (6, 11, 6)
  assert found.seconds == pytest.approx(6.0)
  assert found.shares["generation"]["busy"] == pytest.approx(0.6)
  assert found.shares["generation"]["compile"] == pytest.approx(0.0, abs=1e-9)
  whole = window.over(rows, np.ones(len(rows), bool))
  assert whole.shares["generation"]["compile"] == pytest.approx(5 / 17)
  for shares in (*found.shares.values(), *whole.shares.values()):
    assert sum(shares.values()) == pytest.approx(1.0)


def test_only_steps_in_which_nothing_is_built_are_measured():
  rows = report_runs.lines(*LOCKSTEP)
  for row in rows[7:]:
    row["compile/count"] = 8.0
  found = window.steady(rows)
  assert found is not None and found.span == "5 of steps 6 to 11"
  assert found.seconds == pytest.approx(5.0)
  for at, row in enumerate(rows):
    row["compile/count"] = float(at)
  assert window.steady(rows) is None
  late = diagnose.diagnose(rows, report_runs.config())
  assert fires(late) == [None] * 5 and late.levers == []
  assert late.because == "needs 3 steps that count, got 0 of 12"


def test_lockstep_that_generation_bounds_gains_by_one_version_of_lag():
  rows = report_runs.lines(*LOCKSTEP, sync__latency_s=0.03)
  found = diagnose.diagnose(rows, report_runs.config())
  assert fires(found) == [True, True, False, None, None]
  assert found.signs[0].figure == pytest.approx((0.6 + 0.38) / 2)
  assert found.signs[1].figure == pytest.approx(0.6)
  assert "training waits, 0.60 for queue_empty" in found.signs[1].why
  # In lockstep nothing else goes on while the weights are on their way.
  assert found.signs[2].figure == pytest.approx(0.03)
  assert found.regime == "composition"
  assert found.levers[0].flags == "--set max_lag=1"
  assert found.levers[0].gain == pytest.approx((0.6 + 0.4) / 0.6)
  assert "(0.6 s + 0.4 s) / 0.6 s a step" in found.levers[0].how


def test_scoring_overlaps_as_well():
  waits = {"busy": 0.5, "idle/reward_pending": 0.1, "idle/weights_pending": 0.4}
  rows = report_runs.lines(waits, {"busy": 0.4, "idle/queue_empty": 0.6})
  found = diagnose.diagnose(rows, report_runs.config())
  assert found.levers[0].gain == pytest.approx(2.0)
  assert found.levers[0].how == "(0.5 s + 0.4 s + 0.1 s) / 0.5 s a step"


def test_in_turn_is_the_other_way_out_of_lockstep():
  rows = report_runs.lines(*LOCKSTEP)
  found = diagnose.diagnose(rows, report_runs.config())
  assert found.levers[1].flags == "--set placement.mode=colocated"
  assert found.levers[1].gain == pytest.approx(2.0)


def test_rewards_lag_replicas_and_pauses_have_levers_of_their_own():
  def lever(generation, training, **changes):
    rows = report_runs.lines(generation, training, devices=(4, 2, 2))
    settings = report_runs.config(max_lag=1, **changes)
    found = diagnose.diagnose(rows, settings)
    return {lever.flags.split()[-1]: lever.gain for lever in found.levers}

  scored = {"busy": 0.7, "idle/reward_pending": 0.3}
  assert lever(scored, scored)["rewards.workers=4"] == pytest.approx(1 / 0.85)
  uneven = lever(
    {"busy": 0.7, "idle/lag_gate": 0.3}, {"busy": 0.7, "idle/queue_empty": 0.3}
  )
  assert uneven == {"max_lag=2": pytest.approx(1 / 0.7)}
  slow = {
    "placement__mode": "roles",
    "placement__roles": {"generation_replicas": 2},
  }
  fast = {"busy": 0.6, "idle/queue_empty": 0.4}
  replica = lever({"busy": 0.9, "idle/host": 0.1}, fast, **slow)
  assert replica["placement.roles.generation_replicas=3"] == pytest.approx(1.5)
  tested = {"busy": 0.6, "overhead/eval": 0.4}
  pauses = lever(tested, tested, evaluation__every=5)
  assert pauses["evaluation.every=10"] == pytest.approx(1 / 0.8)
  swapped = report_runs.lines(
    {"busy": 0.8, "idle/lag_gate": 0.2},
    {"busy": 0.6, "overhead/sync": 0.3},
    sync__swap_s=0.2,
    sync__copy_s=0.1,
  )
  found = diagnose.diagnose(swapped, report_runs.config(max_lag=1))
  assert found.levers[0].flags == "--set sampling.block=4"


def test_axes_that_are_written_out_have_no_flag():
  rows = report_runs.lines(
    {"busy": 0.25, "idle/lag_gate": 0.75}, {"busy": 1.0}, devices=(8, 4, 4)
  )
  settings = report_runs.config(max_lag=1, placement__generation={"data": 4})
  found = diagnose.diagnose(rows, settings)
  assert found.levers[0].flags == ""
  assert "2 of 8 devices" in found.levers[0].why


def test_an_engine_elsewhere_works_as_long_as_it_says():
  rows = report_runs.lines({"busy": 1.0}, {"busy": 1.0})
  for row in rows:
    row["fleet/busy_s"] = 0.25 * row["step"]
  made = window.steady(rows)
  assert made is not None
  found = made.shares["generation"]
  assert (found["busy"], found["transit"]) == (
    pytest.approx(0.25),
    pytest.approx(0.75),
  )


def test_stages_that_are_busy_need_faster_kernels():
  rows = report_runs.lines(*BUSY)
  found = diagnose.diagnose(rows, report_runs.config(max_lag=1))
  assert fires(found) == [False, False, False, None, None]
  assert found.regime == "kernels"
  assert "generation is the longer" in found.levers[0].why.lower()
  # Half of 0.95 s less, but training still takes 0.93 s.
  assert found.levers[0].gain == pytest.approx(1 / 0.93)


def test_slow_weights_are_the_third_sign():
  rows = report_runs.lines(
    {"busy": 0.8, "overhead/sync": 0.01, "idle/lag_gate": 0.19},
    {"busy": 0.75, "overhead/sync": 0.2, "idle/queue_empty": 0.05},
    sync__latency_s=0.2,
    sync__copy_s=0.15,
    sync__swap_s=0.01,
  )
  found = diagnose.diagnose(rows, report_runs.config(max_lag=1))
  assert fires(found)[:3] == [False, False, True]
  assert found.signs[2].figure == pytest.approx(0.2)
  sync = next(x for x in found.levers if "groups_per_step=16" in x.flags)
  assert sync.gain == pytest.approx(1 / 0.9)


def test_devices_go_to_the_stage_that_is_waited_for():
  rows = report_runs.lines(
    {"busy": 0.25, "idle/lag_gate": 0.75}, {"busy": 1.0}, devices=(8, 4, 4)
  )
  found = diagnose.diagnose(rows, report_runs.config(max_lag=1))
  assert found.levers[0].flags == "--set placement.generation_fraction=0.25"
  # 1 and 4 device-seconds: on 2 and 6 devices 0.5 and 0.67 s.
  assert found.levers[0].gain == pytest.approx(6 / 4)


def test_stages_on_the_same_devices_wait_only_when_neither_works():
  settings = report_runs.config(placement__mode="colocated")
  rows = report_runs.lines(*LOCKSTEP, devices=(2, 2, 2))
  found = diagnose.diagnose(rows, settings)
  assert found.signs[1].figure == pytest.approx(0.0, abs=1e-9)
  assert found.regime == "kernels"


def test_an_evaluation_of_both_stages_is_one():
  half = {"busy": 0.3, "overhead/eval": 0.2, "idle/host": 0.5}
  rows = report_runs.lines(half, half, devices=(2, 2, 2))
  settings = report_runs.config(placement__mode="colocated")
  found = diagnose.diagnose(rows, settings)
  assert found.signs[1].figure == pytest.approx(1 - 0.3 - 0.3 - 0.2)


def test_devices_that_are_held_and_not_used_count():
  settings = report_runs.config(placement__mode="colocated")
  rows = report_runs.lines(*LOCKSTEP, devices=(8, 2, 2))
  found = diagnose.diagnose(rows, settings)
  assert found.signs[0].figure == pytest.approx(0.98 / 4)
  assert found.levers[0].gain == pytest.approx(4.0)
  assert "placement.training.fsdp=-1" in found.levers[0].flags


def test_a_faster_kernel_that_the_wall_clock_does_not_see_is_the_fourth_sign():
  before = report_runs.lines(*LOCKSTEP)
  now = report_runs.lines(
    {"busy": 0.3, "idle/weights_pending": 0.7}, LOCKSTEP[1], tokens=1100.0
  )
  settings = report_runs.config()
  found = diagnose.diagnose(now, settings, (before, settings))
  # 2.2 times the tokens a second of sampling, 1.1 times in all.
  assert found.signs[3].figure == pytest.approx(0.1 / 1.2)
  assert found.signs[3].fires is True
  assert "fewer devices" in found.signs[4].why
  other = report_runs.config(model__path="another/model")
  unlike = diagnose.diagnose(now, settings, (before, other))
  assert "the same model" in unlike.signs[3].why


@pytest.mark.parametrize(("tokens", "fired"), [(1500.0, True), (1700.0, False)])
def test_devices_that_bring_too_little_are_the_fifth_sign(tokens, fired):
  settings = report_runs.config(max_lag=1)
  before = report_runs.lines(*BUSY)
  now = report_runs.lines(*BUSY, devices=(4, 2, 2), tokens=tokens)
  found = diagnose.diagnose(now, settings, (before, settings))
  assert found.signs[4].figure == pytest.approx(tokens / 2000)
  assert found.signs[4].fires is fired
  assert found.regime == ("composition" if fired else "kernels")
  assert found.signs[3].fires is False


def test_more_devices_are_no_faster_kernel():
  settings = report_runs.config(max_lag=1)
  now = report_runs.lines(*BUSY, devices=(4, 2, 2), tokens=2600.0)
  before = report_runs.lines(*BUSY)
  found = diagnose.diagnose(now, settings, (before, settings))
  # 1.3 times the tokens a device-second, of the stages and of the run.
  assert found.signs[3].figure == pytest.approx(1.0)
  assert "1.30 times as fast, the run 1.30 times" in found.signs[3].why


def test_few_steps_old_runs_and_nulls_leave_signs_unknown():
  few = diagnose.diagnose(
    report_runs.lines(*LOCKSTEP, steps=3), report_runs.config()
  )
  assert fires(few) == [None] * 5 and few.regime == "not known"
  assert "needs 3 steps that count, got 0 of 3" in few.because
  rows = report_runs.lines(*LOCKSTEP, sync__latency_s=None)
  for row in rows:
    del row["devices"]
  old = diagnose.diagnose(rows, report_runs.config())
  assert fires(old)[:3] == [None, True, False]
  assert "devices/*" in old.signs[0].why


def test_time_in_no_account_is_said():
  rows = report_runs.lines({"busy": 0.97}, {"busy": 1.0})
  found = diagnose.diagnose(rows, report_runs.config(max_lag=1))
  assert "0.030 of a stage's time is in no account" in found.notes[0]
