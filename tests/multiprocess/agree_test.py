"""What the processes of a run agree on beside the numbers of a step."""

import functools
import pathlib
import signal
import threading

import pytest

from tests.e2e import runs
from tests.multiprocess import group

SPLIT = runs.settings(
  "placement.mode=split",
  "placement.training.fsdp=-1",
  "placement.generation.data=-1",
)
# Groups without signal are refilled, in turn, while a test set is answered
# before the first batch and in between.
REFILLED = runs.settings(
  "num_steps=3",
  "stream.asynchronous=false",
  "stream.filter_zero_signal=true",
  "sampling.max_tokens=1",
  "group_size=2",
  "evaluation.every=2",
)


def _rollouts(folder: pathlib.Path) -> str:
  return (folder / "rollouts.txt").read_text()


@pytest.fixture(name="refilled", scope="module")
def _refilled(tmp_path_factory):
  @functools.cache
  def refilled(count: int) -> pathlib.Path:
    cwd = tmp_path_factory.mktemp("cwd")
    args = [runs.experiment("with_held_out_letters"), "--workdir=run"]
    for end in group.run(count, cwd, *args, *SPLIT, *REFILLED):
      assert end.code == 0, end.err
    return cwd / "run"

  return refilled


def test_refilled_groups_and_tests_are_those_of_one_process(refilled):
  one, two = refilled(1), refilled(2)
  assert _rollouts(two) == _rollouts(one)
  names = ("ledger/", "eval/", "reward/")
  for got, expected in zip(runs.metrics(two), runs.metrics(one), strict=True):
    assert got.keys() - expected.keys() <= {
      name for name in got if name.startswith("fleet/")
    }
    for name in expected:
      if name.startswith(names):
        assert got[name] == pytest.approx(expected[name], abs=1e-6), name


def test_some_groups_were_refilled(refilled):
  assert runs.metrics(refilled(2))[-1]["ledger/filtered"] > 0


def test_sigterm_to_any_process_ends_all_after_one_batch(tmp_path):
  args = [
    runs.experiment(),
    "--workdir=run",
    *SPLIT,
    *runs.settings("num_steps=100000", "checkpoint.every=0"),
  ]
  log, patience = tmp_path / "run" / "metrics.jsonl", iter(range(2400))
  with group.started(2, tmp_path, *args) as processes:
    while not (log.exists() and log.read_text().count("\n") >= 2):
      next(patience)  # two minutes
      threading.Event().wait(0.05)
    processes[1].send_signal(signal.SIGTERM)
    ends = group.ended(processes)
  for end in ends:
    assert end.code == 0, end.err
    assert end.survivors == ()
  assert "stopped by SIGTERM; the same command continues" in ends[0].out
  done = len(runs.metrics(tmp_path / "run"))
  assert runs.steps(tmp_path / "run") == [done]


def test_a_process_with_other_settings_is_refused(tmp_path):
  args = [runs.experiment(), "--workdir=run", *SPLIT]
  with group.started(2, tmp_path, *args, more=["--set=seed=1"]) as processes:
    ends = group.ended(processes)
  assert [end.code for end in ends] == [2, 2]
  rule = "process 1: expected seed = 0 as in process 0, got seed = 1."
  assert rule in ends[0].err
  assert rule in ends[1].err
