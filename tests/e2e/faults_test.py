"""What breaks in a run ends it at once, with the reason and nobody left."""

import dataclasses
import errno
import itertools
import json
import os
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
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
  raised = (tmp_path / "raised").stat().st_mtime
  assert end.code not in (0, 2)
  assert end.at - raised < 5
  assert "ValueError: boom" in end.err
  # The frame of the worker, not only that of the one who waited.
  assert "in boom" in end.err
  # Cause and advice come last, in one line.
  *above, last = end.err.rstrip().splitlines()
  told = "^error: reward boom, rollout 1[2-5]: ValueError: boom. Mend "
  assert re.search(told, last)
  file = re.search(r"rewards\.check (\S+):boom tries it", last)[1]
  assert (tmp_path / file).samefile(runs.ROOT / "tests/e2e/experiment.py")
  # The user's frames alone stand above it.
  begins = above.index("Traceback (most recent call last):")
  frames = [line for line in above[begins:] if line.startswith("  File ")]
  assert frames and all("experiment.py" in line for line in frames)
  assert above[-2:] == ["ValueError: boom", ""]
  assert "rewards.on_failure=mask" in last
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


def poisoned(monkeypatch, *steps: int) -> None:
  """Makes the loss of some steps NaN."""
  build, count = trainers.build, itertools.count(1)

  def poisoning(*args, **options):
    made = build(*args, **options)

    def score(state, batch, reference=None):
      batch = made.score(state, batch, reference)
      if next(count) not in steps:
        return batch
      return dataclasses.replace(batch, advantages=batch.advantages * jnp.nan)

    return dataclasses.replace(made, score=score)

  monkeypatch.setattr(trainers, "build", poisoning)


def finite(folder: pathlib.Path) -> bool:
  state = runs.state(folder, runs.configured())
  return all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep=9")


def test_c115_a_loss_that_is_not_finite_stops_a_run_of_no_patience(
  tmp_path, monkeypatch
):
  poisoned(monkeypatch, 3)
  with pytest.raises(types.RunError) as error:
    runs.train(tmp_path, "optim.max_skipped=0", *EVERY_STEP)
  text = str(error.value)
  assert text.startswith("step 3: expected a finite loss, gradient and update")
  assert "loss nan, gradient norm nan and an update that was" in text
  assert "skipped, 1 times in a row" in text
  assert "\n" not in text
  # The last good one is kept, and none of the bad step is written.
  assert runs.steps(tmp_path) == [1, 2]
  assert finite(tmp_path)
  assert threads() == []


def test_c115_some_are_skipped_and_counted_and_never_in_the_weights(
  tmp_path, monkeypatch
):
  poisoned(monkeypatch, 2, 4)
  run = runs.train(tmp_path, "optim.max_skipped=1", *EVERY_STEP)
  assert [line["loss/skipped"] for line in run.metrics] == [0, 1, 0, 1]
  assert (int(run.state.step), int(run.state.version)) == (4, 2)
  assert runs.steps(tmp_path) == [1, 2, 3, 4]
  assert finite(tmp_path)


def test_c98_a_disk_that_fills_up_ends_the_run_at_its_next_step(
  tmp_path, monkeypatch
):
  write = checkpoint.folder_lib.write

  def full(path, content):
    if path.parent.name == "2":
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    write(path, content)

  monkeypatch.setattr(checkpoint.folder_lib, "write", full)
  with pytest.raises(types.RunError, match="No space left") as error:
    runs.train(tmp_path, "num_steps=1000", "checkpoint.every=1")
  folder = tmp_path / "checkpoints" / "2"
  assert str(error.value).startswith(f"checkpoint {folder}: expected to save")
  assert "\n" not in str(error.value)
  assert runs.steps(tmp_path) == [1]
  assert int(runs.state(tmp_path, runs.configured()).step) == 1
  assert len(runs.metrics(tmp_path)) <= 4
  assert threads() == []


def test_the_best_by_a_metric_of_the_log_stays(tmp_path):
  run = runs.train(
    tmp_path,
    "checkpoint.every=1",
    "checkpoint.keep=1",
    "checkpoint.keep_best=1",
    "checkpoint.best_by=reward/mean",
  )
  rewards = {line["step"]: line["reward/mean"] for line in run.metrics}
  best = max(rewards, key=lambda step: (rewards[step], step))
  assert runs.steps(tmp_path) == sorted({best, 4})
  meta = (tmp_path / "checkpoints" / str(best) / "meta.json").read_text()
  assert json.loads(meta)["metrics"]["reward/mean"] == rewards[best]


def test_c76_c93_data_that_ends_ends_the_run(tmp_path, caplog):
  run = runs.train(tmp_path, "data.train.size=10", "data.epochs=1", "max_lag=1")
  assert [line["step"] for line in run.metrics] == [1, 2]
  assert runs.steps(tmp_path) == [2]
  seen = [r.prompt.uid for gs in run.groups for g in gs for r in g.rollouts]
  assert len(set(seen)) == 8
  assert "data ended: 2 groups left over" in caplog.text
  assert threads() == []
