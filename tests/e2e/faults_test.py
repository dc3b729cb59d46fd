"""What breaks in a run ends it at once, with the reason and nobody left."""

import concurrent.futures
import os
import pathlib
import signal
import threading

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.sampling import engine
from tests.e2e import runs


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


def threads() -> list[str]:
  ours = ("rollout", "checkpoint")
  return [t.name for t in threading.enumerate() if t.name.startswith(ours)]


def interrupted(cwd: pathlib.Path) -> runs.Outcome:
  """Presses Ctrl-C in the middle of a run."""
  command = (runs.experiment(), "--set=num_steps=1000000", "--set=max_lag=1")
  with runs.started(cwd, *command) as process:
    runs.read_until(process, "step 1/")
    # A terminal sends it to all of them.
    os.killpg(process.pid, signal.SIGINT)
    return runs.ended(process)


@pytest.fixture(name="ends", scope="module")
def _ends(tmp_path_factory):
  """Starts a run that breaks and one that is interrupted, side by side."""
  broken, stopped = (tmp_path_factory.mktemp("cwd") for _ in range(2))
  command = (runs.experiment("with_boom"), "--set=max_lag=1")
  with concurrent.futures.ThreadPoolExecutor(2) as workers:
    other = workers.submit(interrupted, stopped)
    end = runs.run(broken, *command)
    return end, (broken / "raised").stat().st_mtime, other.result(300)


def test_c73_a_reward_that_raises_ends_the_run(ends):
  end, raised, _ = ends
  assert end.code not in (0, 2)
  assert end.at - raised < 5
  assert "ValueError: boom" in end.err
  # The frame of the worker, not only that of the one who waited.
  assert "in boom" in end.err
  assert end.survivors == ()


def test_ctrl_c_ends_the_run_with_one_line(ends):
  _, _, end = ends
  assert end.code not in (0, 2)
  assert "Traceback" not in end.err
  assert end.err.splitlines()[-1].startswith("interrupted")
  assert end.survivors == ()


def test_c73_a_rollout_worker_that_raises_ends_the_run(tmp_path, monkeypatch):
  blocks = iter(range(6))
  step = engine.Engine.step

  def failing(*args):
    if next(blocks, None) is None:
      raise ValueError("bang")
    return step(*args)

  monkeypatch.setattr(engine.Engine, "step", failing)
  with pytest.raises(ValueError, match="bang") as error:
    runs.train(tmp_path, "max_lag=1")
  assert "failing" in [entry.name for entry in error.traceback]
  assert threads() == []


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
  with pytest.raises(types.RunError, match=r"stream\.max_left: "):
    runs.train(
      tmp_path,
      "stream.filter_zero_signal=true",
      "stream.max_left=2",
      exp="with_constant",
    )
  assert threads() == []


def test_c76_c93_data_that_ends_ends_the_run(tmp_path, caplog):
  run = runs.train(tmp_path, "data.train.size=10", "data.epochs=1", "max_lag=1")
  assert [line["step"] for line in run.metrics] == [1, 2]
  assert runs.steps(tmp_path) == [2]
  seen = [r.prompt.uid for gs in run.groups for g in gs for r in g.rollouts]
  assert len(set(seen)) == 8
  assert "data ended: 2 groups left over" in caplog.text
  assert threads() == []
