"""A run that is asked to stop: after its batch, saved, with exit code 0."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from jaxrl_post import types
from tests.e2e import runs

ENDLESS = ("num_steps=100000", "checkpoint.every=0")
WARNED = "stopping after this step; once more to exit now"
AT_ONCE = (
  "ended at once by {}; the same command goes on from the newest checkpoint, "
  "if any"
)


@types.host_record
class Stopped:
  """A run that was asked to stop.

  Attributes:
    folder: of the run.
    end: what it left behind.
    said: what it said once it was asked.
    seconds: from each signal to what it did.
  """

  folder: pathlib.Path
  end: runs.Outcome
  said: str
  seconds: tuple[float, ...]


def press(process: subprocess.Popen, name: str) -> None:
  """Sends a signal as it comes: Ctrl-C of a terminal goes to all of them."""
  if name == "Ctrl-C":
    os.killpg(process.pid, signal.SIGINT)
  else:
    process.send_signal(signal.SIGTERM)


def stopped(
  cwd: pathlib.Path,
  exp: str,
  names: tuple[str, ...],
  ready: Callable[[pathlib.Path], bool],
  *settings: str,
) -> Stopped:
  """Starts a run in `cwd`/run and sends it signals when it is ready."""
  said, seconds = "", []
  args = (runs.experiment(exp), "--workdir=run", *runs.settings(*settings))
  with runs.started(cwd, *args) as process:
    deadline = time.monotonic() + 120
    while not ready(cwd):
      assert process.poll() is None, runs.ended(process)
      assert time.monotonic() < deadline
      threading.Event().wait(0.05)
    for i, name in enumerate(names):
      begun = time.monotonic()
      press(process, name)
      if i < len(names) - 1:
        said += runs.read_until(process, WARNED)
        seconds.append(time.monotonic() - begun)
    process.wait(60)
    seconds.append(time.monotonic() - begun)
    end = runs.ended(process)
  return Stopped(
    folder=cwd / "run", end=end, said=said + end.err, seconds=tuple(seconds)
  )


def lines(count: int) -> Callable[[pathlib.Path], bool]:
  def ready(cwd: pathlib.Path) -> bool:
    log = cwd / "run" / "metrics.jsonl"
    return log.exists() and log.read_text().count("\n") >= count

  return ready


def there(name: str) -> Callable[[pathlib.Path], bool]:
  return lambda cwd: (cwd / name).exists()


CASES = {
  "after two steps": ("get_config", ("SIGTERM",), lines(2), *ENDLESS),
  "a reward hangs": (
    "with_late_hang",
    ("Ctrl-C",),
    there("hangs"),
    *ENDLESS,
  ),
  "twice": (
    "with_stuck_step",
    ("SIGTERM", "Ctrl-C"),
    there("stuck"),
    "num_steps=100000",
    "checkpoint.every=1",
    "max_lag=1",
  ),
  "before it trains": (
    "get_config",
    ("SIGTERM",),
    there("run/config.json"),
    *ENDLESS,
  ),
}


@pytest.fixture(name="runs_of", scope="module")
def _runs_of(tmp_path_factory) -> dict[str, Stopped]:
  """Makes them two at a time."""

  def make(case) -> Stopped:
    return stopped(tmp_path_factory.mktemp("cwd"), *case)

  with concurrent.futures.ThreadPoolExecutor(2) as workers:
    found = workers.map(make, CASES.values(), timeout=300)
    return dict(zip(CASES, found, strict=True))


def assert_saved(run: Stopped, name: str) -> None:
  assert run.end.code == 0, run.said
  assert f"stopped by {name}; the same command continues" in run.end.out
  assert run.said.splitlines().count(WARNED) == 1
  assert "Traceback" not in run.said
  assert run.end.survivors == ()
  steps = len(runs.metrics(run.folder))
  assert steps >= 1
  assert runs.steps(run.folder) == [steps]


def test_sigterm_ends_a_run_after_its_batch_with_a_checkpoint(runs_of) -> None:
  assert_saved(runs_of["after two steps"], "SIGTERM")


def test_ctrl_c_does_the_same_and_no_wait_for_a_reward_delays_it(runs_of):
  run = runs_of["a reward hangs"]
  assert_saved(run, "Ctrl-C")
  assert run.seconds[0] < 10  # The pool takes some to end its workers.


def test_the_second_signal_ends_a_run_whose_main_thread_is_stuck(runs_of):
  run = runs_of["twice"]
  assert run.end.code == 1
  assert run.end.out.count("stopped by") == 0
  assert run.end.err.splitlines() == [AT_ONCE.format("Ctrl-C")]
  assert run.end.survivors == ()
  assert max(run.seconds) < 2
  assert len(runs.metrics(run.folder)) == 2
  # What was complete is still there; the save that was cut off does not count.
  state = runs.state(run.folder, runs.configured())
  assert int(state.step) in (1, 2)


def test_before_it_trains_the_first_signal_ends_a_run_at_once(runs_of):
  run = runs_of["before it trains"]
  assert run.end.code == 1
  assert run.said.splitlines()[-1] == AT_ONCE.format("SIGTERM")
  assert "Traceback" not in run.said
  assert run.end.survivors == ()
  assert run.seconds[0] < 2
  assert runs.steps(run.folder) == []
