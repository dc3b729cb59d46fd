"""Training here and generation in replicas on Ray, against one process.

Replicas, and then the driver, are killed on the way: nothing may be lost, and
nobody may be left.
"""

import contextlib
import functools
import os
import pathlib
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.e2e import runs

# Of a line of metrics: what does not depend on the clock.
AREAS = ("loss/", "reward/", "completion/", "signal/", "staleness/")
STEPS = 60
_PATIENCE_S = 30.0


@pytest.fixture(autouse=True, scope="module")
def _cached():
  with runs.compile_cache():
    yield


# -------------------------------------------------------------------- tools


@contextlib.contextmanager
def started(
  folder: pathlib.Path, *assignments: str
) -> Iterator[subprocess.Popen]:
  """Starts a run in mode roles; at the end nothing of it is left."""
  chosen = ("placement.mode=roles", "placement.cpu_devices=1")
  chosen = (*chosen, "placement.generation.data=-1", *assignments)
  args = (runs.experiment(), f"--workdir={folder}", *runs.settings(*chosen))
  folder.parent.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    process = stack.enter_context(runs.started(folder.parent, *args))
    stack.callback(end_all, process)
    yield process


def end_all(process: subprocess.Popen) -> None:
  """Kills what a run has left, if anything."""
  for pid in runs.members(process.pid):
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)


def title(pid: int) -> str:
  try:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
  except (FileNotFoundError, ProcessLookupError):
    return ""


def replicas(process: subprocess.Popen) -> list[int]:
  """Returns the replicas that there are, oldest first."""
  found = runs.members(process.pid)
  return sorted(pid for pid in found if title(pid).startswith("ray::Replica"))


def left(pids: tuple[int, ...]) -> list[str]:
  """Names those that live, but for two of Ray: these outlive it by a minute.

  They look for their cluster as long, when it was killed; they hold no device.
  """
  names = [title(pid) for pid in pids]
  ray = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
  return [name for name in names if name and not name.startswith(ray)]


def cores(pid: int) -> set[int]:
  """Returns where the threads of a process may be."""
  tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
  return set.union(*(os.sched_getaffinity(int(task.name)) for task in tasks))


def wait_for(holds: Callable[[], bool], limit_s: float) -> None:
  begun = time.monotonic()
  while not holds():
    assert time.monotonic() - begun < limit_s, f"not within {limit_s:g} s"
    threading.Event().wait(0.02)


def wait_for_step(
  process: subprocess.Popen, folder: pathlib.Path, step: int
) -> None:
  """Waits until the log has the line of a step."""
  path = folder / "metrics.jsonl"

  def done() -> bool:
    assert process.poll() is None, process.communicate()[1]
    return path.exists() and len(path.read_text().splitlines()) >= step

  wait_for(done, limit_s=120)


def outcome(line: dict) -> dict:
  """Returns the numbers of a step that any placement must agree on."""
  chosen = {k: v for k, v in line.items() if k.startswith(AREAS)}
  return {**chosen, "version": line["policy_version"]}


def same_tokens(folder: pathlib.Path, other: pathlib.Path, most: int) -> None:
  """Compares the rollouts of the first steps, as far as `folder` has them."""
  texts = [(f / "rollouts.txt").read_text() for f in (folder, other)]
  mine, theirs = (re.split(r"(?m)^(?=step \d+ )", text)[1:] for text in texts)
  count = min(len(mine), most * 4)  # Groups of four.
  assert count
  assert mine[:count] == theirs[:count]


def same_numbers(folder: pathlib.Path, other: pathlib.Path, most: int) -> None:
  for mine, theirs in zip(
    runs.metrics(folder)[:most], runs.metrics(other), strict=False
  ):
    got, want = outcome(mine), outcome(theirs)
    assert got.keys() == want.keys()
    # What a batch has none of is null on both sides.
    assert {k for k in got if got[k] is None} == {
      k for k in want if want[k] is None
    }
    for name, value in want.items():
      if value is not None:
        assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def conserves(folder: pathlib.Path, steps: int) -> None:
  """Checks that every group was trained once, and none is missing."""
  lines = runs.metrics(folder)
  assert [line["step"] for line in lines] == list(range(1, steps + 1))
  # A ledger counts from its own start.
  for line in lines:
    out = ("trained", "filtered", "failed", "dropped", "outstanding")
    kinds = {name: line[f"ledger/{name}"] for name in out}
    assert line["ledger/admitted"] == sum(kinds.values())
    assert kinds["filtered"] == kinds["failed"] == kinds["dropped"] == 0
  heads = re.findall(
    r"(?m)^step (\d+) prompt (\d+) ", (folder / "rollouts.txt").read_text()
  )
  assert len({int(prompt) for _, prompt in heads}) == 4 * steps == len(heads)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory(prefix="roles-")


@functools.cache
def one_process() -> pathlib.Path:
  """Runs everything in one process, on one device."""
  folder = pathlib.Path(_folder().name) / "one"
  runs.train(folder, f"num_steps={STEPS}", "max_lag=0")
  return folder


def assert_as_one_process(
  end: runs.Outcome, folder: pathlib.Path, steps: int
) -> None:
  """Checks that a run ended well, lost nothing, and computed the same."""
  assert end.code == 0, end.err
  assert end.survivors == ()
  same_tokens(folder, one_process(), STEPS)
  same_numbers(folder, one_process(), STEPS)
  conserves(folder, steps)


# ------------------------------------------------------------- one replica


@pytest.fixture(name="pinned", scope="module")
def _pinned(tmp_path_factory):
  """Runs the trainer and one replica, on a core each; so it takes two."""
  first, second, *_ = sorted(os.sched_getaffinity(0))
  chosen = {"training": first, "generation": second}
  pins = [f"placement.roles.{k}_cores={v}" for k, v in chosen.items()]
  folder = tmp_path_factory.mktemp("pinned") / "run"
  with started(folder, f"num_steps={STEPS}", *pins) as process:
    wait_for_step(process, folder, 1)
    (replica,) = replicas(process)
    where = {"training": cores(process.pid), "generation": cores(replica)}
    end = runs.ended(process)
  return folder, end, chosen, where


def test_one_replica_gives_the_tokens_and_losses_of_one_process(pinned):
  folder, end, *_ = pinned
  assert end.code == 0, end.err
  same_tokens(folder, one_process(), STEPS)
  lines, others = runs.metrics(folder), runs.metrics(one_process())
  assert [outcome(x) for x in lines] == [outcome(x) for x in others]
  conserves(folder, STEPS)


def test_each_process_stays_on_its_own_core(pinned):
  *_, chosen, where = pinned
  assert where == {name: {core} for name, core in chosen.items()}


def test_an_undisturbed_run_says_no_more_than_any_other(pinned):
  _, end, *_ = pinned
  assert [x for x in end.err.splitlines() if not x.startswith("step ")] == []
  assert end.survivors == ()


# --------------------------------------------------- deaths, and a new start


def kill_one(process: subprocess.Popen, draw: random.Random) -> None:
  """Kills a replica at some moment of a step; waits until it is noticed."""
  threading.Event().wait(draw.uniform(0, 0.1))
  alive = replicas(process)
  os.kill(draw.choice(alive), signal.SIGKILL)
  runs.read_until(process, "is lost and started again")


def test_deaths_of_replicas_and_of_the_driver_lose_nothing(tmp_path):
  """Two replicas, two deaths, and a new start after the driver's."""
  draw, folder = random.Random(3), tmp_path / "run"
  two = "placement.roles.generation_replicas=2"
  command = (two, f"num_steps={STEPS}", "checkpoint.every=1")
  with started(folder, *command) as process:
    wait_for_step(process, folder, draw.randint(2, 15))
    kill_one(process, draw)
    wait_for_step(process, folder, draw.randint(25, 30))
    process.kill()
    process.wait(_PATIENCE_S)
    wait_for(lambda: not left(runs.members(process.pid)), limit_s=15)
  with started(folder, *command) as process:
    wait_for_step(process, folder, draw.randint(40, 45))
    kill_one(process, draw)
    end = runs.ended(process)
  assert_as_one_process(end, folder, STEPS)


@pytest.mark.slow
def test_ten_deaths_at_random_moments_lose_nothing(tmp_path):
  draw, folder, steps = random.Random(4), tmp_path / "run", 200
  with started(folder, f"num_steps={steps}", "max_lag=0") as process:
    for last in range(15, 165, 15):
      wait_for_step(process, folder, last - draw.randint(0, 10))
      kill_one(process, draw)
    end = runs.ended(process)
  assert_as_one_process(end, folder, steps)


def test_a_replica_that_hangs_is_replaced_and_the_lag_keeps_its_bound(tmp_path):
  folder, steps = tmp_path / "run", 40
  command = ("max_lag=2", f"num_steps={steps}", "placement.peer_timeout_s=3")
  with started(folder, *command) as process:
    wait_for_step(process, folder, 5)
    (hung,) = replicas(process)
    os.kill(hung, signal.SIGSTOP)
    said = runs.read_until(process, "is lost and started again")
    end = runs.ended(process)
  assert end.code == 0, end.err
  assert "replica 0" in said
  assert "silent for 3 s" in said
  # Nor is the one that was stopped.
  assert end.survivors == ()
  lags = [line["staleness/max"] for line in runs.metrics(folder)]
  assert max(lags) <= 2
  assert max(lags) > 0
  conserves(folder, steps)


# ------------------------------------------------ several that train together


def test_two_that_train_give_the_same_and_ctrl_c_ends_all(tmp_path):
  folder = tmp_path / "run"
  command = (
    "placement.roles.training_processes=2",
    "placement.training.fsdp=-1",
    "num_steps=1000000",
  )
  with started(folder, *command) as process:
    wait_for_step(process, folder, 20)
    # A terminal sends it to all of them.
    os.killpg(process.pid, signal.SIGINT)
    begun = time.monotonic()
    end = runs.ended(process)
    took_s = time.monotonic() - begun
  assert end.code == 0, end.err
  assert "stopped by Ctrl-C; the same command continues" in end.out
  assert took_s < 15
  assert left(end.survivors) == []
  same_tokens(folder, one_process(), 20)
  same_numbers(folder, one_process(), 20)
  losses = [line["loss/policy"] for line in runs.metrics(folder)[:20]]
  assert np.isfinite(losses).all()
