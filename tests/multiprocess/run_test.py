"""A run of several processes is the run of one; and they end together."""

import functools
import json
import pathlib
import random
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_post import types
from tests.e2e import runs
from tests.multiprocess import group

SPLIT = runs.settings(
  "placement.mode=split",
  "placement.training.fsdp=-1",
  "placement.generation.data=-1",
)
COLOCATED = runs.settings(
  "placement.training.fsdp=-1", "placement.generation.data=-1"
)
STEPS = 6
# Name: how many processes, and what they run.
EXACT = {
  "split, 1": (1, SPLIT),
  "split, 2": (2, SPLIT),
  "split, 4": (4, SPLIT),
  "colocated, 1": (1, COLOCATED),
  "colocated, 2": (2, COLOCATED),
}
PAIRS = [
  ("split, 1", "split, 2"),
  ("split, 1", "split, 4"),
  ("colocated, 1", "colocated, 2"),
]
# Kill to end, in seconds: the promise is 30, the others need a moment.
PROMPT_S = 10.0
STOPPED_S = 8.0


@types.host_record
class Ran:
  """A run folder, and what its processes left behind."""

  folder: pathlib.Path
  outcomes: tuple[runs.Outcome, ...]


@pytest.fixture(name="ran", scope="module")
def _ran(tmp_path_factory):
  """Makes each run once, when it is first asked for."""

  @functools.cache
  def ran(name: str) -> Ran:
    count, settings = EXACT[name]
    cwd = tmp_path_factory.mktemp("cwd")
    outcomes = group.run(count, cwd, *command(f"num_steps={STEPS}"), *settings)
    return Ran(folder=cwd / "run", outcomes=tuple(outcomes))

  return ran


def command(*assignments: str, exp: str = "get_config") -> list[str]:
  return [
    runs.experiment(exp),
    "--workdir=run",
    *runs.settings(*assignments),
  ]


def computed(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns of each step what does not depend on the clock."""
  names = ("step", "policy", "loss", "reward", "completion", "mismatch")
  return [
    {k: v for k, v in line.items() if k.startswith(names)}
    for line in runs.metrics(folder)
  ]


def weights(folder: pathlib.Path, settings: list[str]) -> list[np.ndarray]:
  assignments = [text.removeprefix("--set=") for text in settings]
  state = runs.state(folder, runs.configured(*assignments))
  return jax.tree.leaves(state.params)


def assert_ended(
  outcomes: list[runs.Outcome], after: float, within_s: float, *words: str
) -> None:
  """Checks that all failed soon, say why, and leave nobody behind."""
  for end in outcomes:
    assert end.code not in (0, 2), end
    assert end.at - after < within_s
    assert any(
      all(word in line for word in words) for line in end.err.splitlines()
    ), end.err
    assert end.survivors == ()


# -------------------------------------------------------------------- the same


@pytest.mark.parametrize("name", EXACT)
def test_every_process_ends_well_and_the_head_alone_reports(name, ran):
  head, *others = ran(name).outcomes
  assert head.code == 0, head.err
  assert f"step {STEPS}/{STEPS}" in head.err
  for end in others:
    assert (end.code, end.err) == (0, "")
    assert "run folder" not in end.out  # where Gloo talks
  assert all(end.survivors == () for end in (head, *others))


@pytest.mark.slow
def test_experts_that_an_engine_chose_reach_every_process(tmp_path):
  options = ("num_steps=2", "model.routing.replay=true")
  ends = group.run(2, tmp_path, *command(*options, exp="moe"), *SPLIT)
  assert [end.code for end in ends] == [0, 0], ends
  for line in runs.metrics(tmp_path / "run"):
    assert 0 <= line["moe/differing"] < 0.01  # Rounding alone.
    assert line["mismatch/max_abs"] <= 1e-5


@pytest.mark.parametrize("one, many", PAIRS)
def test_c113_several_processes_make_the_tokens_and_losses_of_one(
  one, many, ran
):
  reference, run = ran(one).folder, ran(many).folder
  text = (run / "rollouts.txt").read_text()
  assert text == (reference / "rollouts.txt").read_text()
  assert text.count("prompt") >= 4 * STEPS
  lines, expected = computed(run), computed(reference)
  assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
  for got, want in zip(lines, expected, strict=True):
    assert got == pytest.approx(want, abs=1e-5, rel=0)


@pytest.mark.parametrize("one, many", PAIRS)
def test_c113_several_processes_end_with_the_weights_of_one(one, many, ran):
  reference = weights(ran(one).folder, EXACT[one][1])
  trained = weights(ran(many).folder, EXACT[many][1])
  for got, expected in zip(trained, reference, strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_two_and_four_processes_reduce_in_the_same_order(ran):
  # A process adds up its own devices in another order than those of others.
  two, four = ran("split, 2").folder, ran("split, 4").folder
  assert computed(two) == computed(four)
  for got, expected in zip(
    weights(two, SPLIT), weights(four, SPLIT), strict=True
  ):
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", EXACT)
def test_every_engine_has_the_weights_of_the_step(name, ran):
  for line in runs.metrics(ran(name).folder):
    assert line["staleness/max"] == 0
    # Rollouts of all processes are in it; old weights differ by far more.
    assert line["mismatch/max_abs"] <= 1e-4
    assert line["sync/bytes"] > 0


# ----------------------------------------------------------------- lost, stuck


@pytest.fixture(name="killed", scope="module")
def _killed(tmp_path_factory):
  """Kills one of four, then the head of four, then lets them end."""
  cwd = tmp_path_factory.mktemp("cwd")
  args = command(f"num_steps={STEPS}", "checkpoint.every=1") + SPLIT
  chance = random.Random(0)
  first = kill(cwd, args, chance.randrange(1, 4), step=f"step 3/{STEPS}")
  second = kill(cwd, args, 0, after_s=chance.uniform(0, 5))
  last = group.run(4, cwd, *args)
  return cwd / "run", first, second, last


@types.host_record
class Kill:
  """How the others ended, and of which process.

  Attributes:
    number: of the process that was killed.
    pid: likewise.
    at: time.time() of the kill.
    others: how they ended.
    saved: steps that had a checkpoint when they had ended.
  """

  number: int
  pid: int
  at: float
  others: tuple[runs.Outcome, ...]
  saved: tuple[int, ...]


def kill(
  cwd: pathlib.Path,
  args: list[str],
  number: int,
  *,
  step: str = "",
  after_s: float = 0.0,
) -> Kill:
  """Starts four processes and kills one, at a step or after a time."""
  with group.started(4, cwd, *args) as processes:
    group.read_plan(processes[0])
    if step:
      runs.read_until(processes[0], step)
    threading.Event().wait(after_s)
    victim = processes.pop(number)
    assert victim.poll() is None, "it ended before it was killed"
    victim.kill()
    at = time.time()
    return Kill(
      number=number,
      pid=victim.pid,
      at=at,
      others=tuple(group.ended(processes)),
      saved=tuple(whole(cwd / "run")),
    )


def whole(folder: pathlib.Path) -> list[int]:
  found = (folder / "checkpoints").glob("*/manifest.json")
  return sorted(int(path.parent.name) for path in found)


def assert_named(end: Kill) -> None:
  name = f"process {end.number} of 4 ("
  assert_ended(
    list(end.others), end.at, PROMPT_S, name, f"pid {end.pid}) was lost"
  )


def test_a_process_that_is_killed_ends_the_others_with_its_name(killed):
  _, first, second, _ = killed
  assert first.number != 0 and second.number == 0
  assert_named(first)
  assert_named(second)


def test_killed_runs_go_on_from_the_newest_checkpoint(killed, ran):
  folder, first, second, last = killed
  assert first.saved and set(second.saved) & set(range(1, STEPS + 1))
  assert [end.code for end in last] == [0] * 4, [end.err for end in last]
  assert f"step 1/{STEPS}" not in last[0].err
  # As if nothing had been: bit for bit.
  expected = ran("split, 4").folder
  assert computed(folder) == computed(expected)
  for got, want in zip(
    weights(folder, SPLIT), weights(expected, SPLIT), strict=True
  ):
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_ten_kills_at_random_times_are_survived(tmp_path):
  chance = random.Random(1)
  endless = command("num_steps=1000000", "checkpoint.every=1") + SPLIT
  saved = 0
  for _ in range(10):
    end = kill(
      tmp_path, endless, chance.randrange(4), after_s=chance.uniform(0, 60)
    )
    assert_named(end)
    newest = max(end.saved, default=0)
    assert newest >= saved
    saved = newest
  assert saved > 0
  last = command(f"num_steps={saved + 3}", "checkpoint.every=1") + SPLIT
  ends = group.run(4, tmp_path, *last)
  assert [end.code for end in ends] == [0] * 4, [end.err for end in ends]
  steps = [line["step"] for line in runs.metrics(tmp_path / "run")]
  assert steps == list(range(1, saved + 4))


@pytest.fixture(name="stopped", scope="module")
def _stopped(tmp_path_factory):
  """Stops one of two in a run that may lag, after some steps."""
  cwd = tmp_path_factory.mktemp("cwd")
  args = command(
    "num_steps=100000", "max_lag=2", f"placement.peer_timeout_s={STOPPED_S}"
  )
  log = cwd / "run" / "metrics.jsonl"
  with group.started(2, cwd, *args, *SPLIT) as (head, other):
    group.read_plan(head)
    wait_for_lines(log, 10)
    other.send_signal(signal.SIGSTOP)
    at = time.time()
    (end,) = group.ended([head])
  return runs.metrics(log.parent), other.pid, at, end


def wait_for_lines(path: pathlib.Path, count: int) -> None:
  deadline = time.monotonic() + 120
  while not path.exists() or path.read_text().count("\n") < count:
    assert time.monotonic() < deadline, f"no {count} lines in {path}"
    threading.Event().wait(0.1)


def test_c64_several_processes_keep_the_bound_of_lag(stopped):
  lags = [line["staleness/max"] for line in stopped[0]]
  assert len(lags) >= 10
  assert max(lags) <= 2
  assert max(lags) >= 1


def test_a_process_that_is_stopped_ends_the_others_with_its_name(stopped):
  _, pid, at, end = stopped
  assert end.at - at > STOPPED_S / 2
  words = ("process 1 of 2 (", f"pid {pid}) was silent for")
  assert_ended([end], at, STOPPED_S + PROMPT_S, *words)


# -------------------------------------------------------------- ends of a kind


def test_c73_a_reward_that_raises_ends_all_with_its_cause(tmp_path):
  ends = group.run(2, tmp_path, *command(exp="with_boom"), *SPLIT)
  raised = (tmp_path / "raised").stat().st_mtime
  assert_ended(ends, raised, PROMPT_S, "process 0 of 2 (", "ValueError: boom")


def test_c124_a_placement_that_does_not_fit_is_exit_2_of_all(tmp_path):
  args = command("placement.training.fsdp=3")
  for end in group.run(2, tmp_path, *args):
    assert end.code == 2, end.err
    assert "error: " in end.err and "placement" in end.err
    assert "Traceback" not in end.err
  assert not (tmp_path / "run").exists()


@pytest.fixture(name="short", scope="module")
def _short(tmp_path_factory):
  """Trains two processes on data of two steps and a half, with a test."""
  cwd = tmp_path_factory.mktemp("cwd")
  args = command(
    "data.train.size=10",
    "data.epochs=1",
    "evaluation.every=1",
    "evaluation.temperature=1.0",
    exp="with_held_out",
  )
  args += SPLIT
  return cwd, args, group.run(2, cwd, *args)


def test_c76_data_that_ends_ends_all_processes_well(short):
  cwd, _, ends = short
  assert [end.code for end in ends] == [0, 0], [end.err for end in ends]
  lines = runs.metrics(cwd / "run")
  # The first weights are tested, too.
  assert [line["step"] for line in lines] == [0, 1, 2]
  assert whole(cwd / "run") == [2]
  for line in lines:
    assert line["eval/rollouts"] == 10
    assert line["eval/reward"] == pytest.approx(0.7)


def test_an_evaluation_by_two_processes_is_that_of_one(short):
  cwd, args, _ = short
  (alone,) = group.run(1, cwd, *args, "--mode=eval")
  head, other = group.run(2, cwd, *args, "--mode=eval")
  assert [alone.code, head.code, other.code] == [0, 0, 0], other.err
  assert "eval/" not in other.out
  one, two = (json.loads(end.out.splitlines()[-1]) for end in (alone, head))
  assert one == two
  assert one["step"] == 2
  assert one["eval/rollouts"] == 10


def test_a_mistake_that_the_head_alone_sees_is_exit_2_of_all(short):
  cwd, _, _ = short
  # The folder is that of another run; the head opens it.
  ends = group.run(2, cwd, *command(), *SPLIT)
  for end in ends:
    assert end.code == 2, end.err
    assert "--workdir" in end.err
    assert "Traceback" not in end.err
