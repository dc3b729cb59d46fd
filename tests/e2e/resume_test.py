"""A run that is interrupted, ended or killed goes on as if nothing had been."""

import concurrent.futures
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_post import loop, prepare, types
from tests.e2e import runs

RUN = (runs.experiment(), "--workdir=run")
EVERY_STEP = runs.settings("num_steps=10", "checkpoint.every=1")
KEPT = runs.settings("checkpoint.every=4", "checkpoint.keep=10")
# What a step computes; the other numbers are of clocks.
COMPUTED = ("loss/", "reward/", "completion/", "mismatch/", "staleness/")


@types.host_record
class Made:
  """A run folder that several processes wrote, and its state after each."""

  folder: pathlib.Path
  states: tuple[types.TrainState, ...]
  steps: tuple[list[int], ...]
  outcomes: tuple[runs.Outcome, ...]


def made(cwd: pathlib.Path, *commands: list[str]) -> Made:
  states, steps, outcomes = [], [], []
  for command in commands:
    outcomes.append(runs.run(cwd, *RUN, *command))
    assert outcomes[-1].code == 0, outcomes[-1].err
    steps.append(runs.steps(cwd / "run"))
    states.append(runs.state(cwd / "run", runs.configured()))
  return Made(
    folder=cwd / "run",
    states=tuple(states),
    steps=tuple(steps),
    outcomes=tuple(outcomes),
  )


def killed(cwd: pathlib.Path) -> Made:
  """Kills a run soon after its third step, and starts it again."""
  with runs.started(cwd, *RUN, *EVERY_STEP) as process:
    runs.read_until(process, "step 3/10")
    process.kill()
    assert runs.ended(process).code == -9
  assert max(runs.steps(cwd / "run")) < 10
  return made(cwd, EVERY_STEP)


@pytest.fixture(name="chains", scope="module")
def _chains(tmp_path_factory):
  """Makes the run in one go, in two halves, and with a kill in between."""
  one, two, three = (tmp_path_factory.mktemp("cwd") for _ in range(3))
  # The first process compiles for all others.
  first = made(one, runs.settings("num_steps=10") + KEPT)
  with concurrent.futures.ThreadPoolExecutor(2) as workers:
    halves = workers.submit(
      made, two, runs.settings("num_steps=5"), runs.settings("num_steps=10")
    )
    kill = workers.submit(killed, three)
    lines = runs.metrics(one / "run")
    rest = made(
      one,
      runs.settings("num_steps=10") + KEPT,
      runs.settings("num_steps=12") + KEPT,
    )
    return first, lines, rest, halves.result(300), kill.result(300)


def assert_equal(got: types.TrainState, expected: types.TrainState) -> None:
  """Compares weights, both moments, counts and the key, bit for bit."""
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def computed(lines):
  return [
    {k: v for k, v in line.items() if k.startswith((*COMPUTED, "step", "pol"))}
    for line in lines
  ]


def test_c95_two_halves_equal_the_run_in_one_go(chains):
  first, lines, _, halves, _ = chains
  state = first.states[0]
  assert (int(state.step), int(state.version)) == (10, 10)
  assert_equal(halves.states[1], state)
  assert computed(runs.metrics(halves.folder)) == computed(lines)
  # The rollouts of all steps: whose they are, their text and their reward.
  text = (halves.folder / "rollouts.txt").read_text()
  whole = (first.folder / "rollouts.txt").read_text()
  assert whole.startswith(text)
  assert text.count("step 10 prompt") == 4


def test_c95_the_second_half_did_train(chains):
  _, _, _, halves, _ = chains
  before, after = (jax.tree.leaves(s.params) for s in halves.states)
  assert int(halves.states[0].step) == 5
  assert any((a != b).any() for a, b in zip(before, after, strict=True))


def test_a_killed_run_goes_on_to_the_same_weights(chains):
  first, lines, _, _, kill = chains
  assert_equal(kill.states[0], first.states[0])
  assert computed(runs.metrics(kill.folder)) == computed(lines)


def test_c100_the_last_step_is_saved_and_a_finished_run_stays(chains):
  first, lines, rest, _, _ = chains
  assert first.steps == ([4, 8, 10],)
  assert rest.steps[0] == [4, 8, 10]
  assert_equal(rest.states[0], first.states[0])
  assert len(lines) == 10
  assert rest.outcomes[0].code == 0


def test_c100_two_more_steps_are_exactly_two(chains):
  _, lines, rest, _, _ = chains
  assert rest.steps[1] == [4, 8, 10, 12]
  after = runs.metrics(rest.folder)
  assert [line["step"] for line in after] == list(range(1, 13))
  assert after[:10] == lines
  assert int(rest.states[1].version) == 12


def test_c101_other_data_is_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  data, run = tmp_path / "data.jsonl", tmp_path / "run"
  lines = [json.dumps({"prompt": x, "answer": x}) + "\n" for x in "abcd" * 2]
  data.write_text("".join(lines))
  cfg = runs.configured("num_steps=1", exp="from_file")
  run.mkdir()
  with runs.compile_cache():
    loop.run(cfg, prepare.prepare(cfg), run)
    before = runs.state(run, cfg)
    data.write_text("".join(lines[:5]))
    more = runs.configured("num_steps=2", exp="from_file")
    with pytest.raises(types.InputError, match=r"--workdir: .*others") as error:
      loop.run(more, prepare.prepare(more), run)
  assert "\n" not in str(error.value)
  assert_equal(runs.state(run, cfg), before)
