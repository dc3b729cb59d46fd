"""What breaks in a run ends it at once, with the reason and nobody left."""

import os
import signal
import threading

import numpy as np
import pytest

from jaxrl_post import types
from tests.e2e import runs


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


def threads() -> list[str]:
  ours = ("rollout", "checkpoint")
  return [t.name for t in threading.enumerate() if t.name.startswith(ours)]


def test_c73_a_reward_that_raises_ends_the_run(tmp_path):
  end = runs.run(tmp_path, runs.experiment("with_boom"), "--set=max_lag=1")
  assert end.code not in (0, 2)
  assert end.at - (tmp_path / "raised").stat().st_mtime < 5
  assert "ValueError: boom" in end.err
  # The frame of the worker, not only that of the one who waited.
  assert "in boom" in end.err
  assert end.survivors == ()


def test_c73_a_rollout_worker_that_raises_ends_the_run(tmp_path):
  end = runs.run(tmp_path, runs.experiment("broken_engine"))
  assert end.code not in (0, 2)
  assert "ValueError: bang" in end.err
  assert "in failing" in end.err
  assert end.survivors == ()


def test_ctrl_c_ends_the_run_with_one_line(tmp_path):
  command = (runs.experiment(), "--set=num_steps=1000000", "--set=max_lag=1")
  with runs.started(tmp_path, *command) as process:
    runs.read_until(process, "step 1/")
    # A terminal sends it to all of them.
    os.killpg(process.pid, signal.SIGINT)
    end = runs.ended(process)
  assert end.code not in (0, 2)
  assert "Traceback" not in end.err
  assert end.err.splitlines()[-1].startswith("interrupted")
  assert end.survivors == ()


def test_a_reward_that_hangs_ends_the_run_in_its_time(tmp_path):
  with pytest.raises(types.RunError, match="hang.*timeout after 1 s"):
    runs.train(tmp_path, "max_lag=1", exp="with_hang")
  assert threads() == []


def test_c84_rollouts_without_reward_are_counted_and_not_trained(tmp_path):
  # One in four raises and one in four is NaN; and stale groups may go.
  run = runs.train(
    tmp_path, "max_lag=1", "stream.on_stale=drop", exp="with_patches"
  )
  assert len(run.metrics) == 4
  for line, groups in zip(run.metrics, run.groups, strict=True):
    valid = [
      rollout
      for group in groups
      for rollout in group.rollouts
      if np.isfinite(rollout.reward)
    ]
    assert len(valid) == 8
    assert line["reward/missing"] == 8
    assert line["reward/mean"] == pytest.approx(
      np.mean([rollout.reward for rollout in valid])
    )
    tokens = sum(len(rollout.completion.tokens) for rollout in valid)
    assert line["loss/tokens"] == tokens
    assert line["loss/policy"] is not None
    assert line["staleness/max"] <= 1
  reasons = {r.failure for gs in run.groups for g in gs for r in g.rollouts}
  assert any("boom" in reason for reason in reasons)
  assert threads() == []


def test_rewards_that_never_differ_end_a_run_that_filters(tmp_path):
  with pytest.raises(types.RunError, match=r"stream\.filter_zero_signal: "):
    runs.train(
      tmp_path,
      "stream.filter_zero_signal=true",
      "stream.max_filtered=2",
      exp="with_constant",
    )
  assert threads() == []


def test_c76_c93_data_that_ends_ends_the_run(tmp_path):
  end = runs.run(
    tmp_path,
    runs.experiment(),
    *runs.settings("data.train.size=10", "data.epochs=1", "max_lag=1"),
    "--workdir=run",
  )
  assert end.code == 0, end.err
  lines = runs.metrics(tmp_path / "run")
  assert [line["step"] for line in lines] == [1, 2]
  assert runs.steps(tmp_path / "run") == [2]
  assert "data ended: 2 groups left over" in end.err
  assert end.survivors == ()
