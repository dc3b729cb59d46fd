"""A run that evaluates beside training, next to one that waits for it."""

import collections
import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl_post import loop, prepare, types
from jaxrl_post.envs import evaluate
from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.runtime import summary
from tests.e2e import accounts_test, runs

EXP = "with_held_out_letters"
# Weights are no clock's, so both runs evaluate the same ones.
SETTINGS = (
  *accounts_test.SPLIT,
  "max_lag=1",
  "stream.deterministic=true",
  "sampling.in_flight=drain",
  "evaluation.every=2",
  "evaluation.temperature=1",
  "checkpoint.every=1",
  "checkpoint.keep=9",
)
BESIDE = (*SETTINGS, "evaluation.beside.blocks=1")


@types.host_record
class Made:
  """A run, where it is, and what was answered by version."""

  folder: object
  run: runs.Trained
  answers: dict[int, list[types.Completion]]

  @property
  def tests(self) -> dict[int, dict[str, float]]:
    return evaluations(self.folder)


def evaluations(folder) -> dict[int, dict[str, float]]:
  """Returns the metrics of evaluations by step."""
  rows = {
    row["step"]: {k: v for k, v in row.items() if k.startswith("eval/")}
    for row in summary.read(folder)
  }
  return {step: row for step, row in rows.items() if row}


def noted(patch, answers, then=lambda version: None) -> None:
  """Notes what is answered; calls `then` while an evaluation is under way."""
  plain = evaluate.evaluate

  def noting(prompts, *, generate, **rest):
    def listening(requests):
      found = generate(requests)
      version = found[0].versions[0]
      answers[version] += found
      then(version)
      return found

    return plain(prompts, generate=listening, **rest)

  patch.setattr(evaluate, "evaluate", noting)


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory) -> dict[str, Made]:
  found = {}
  with runs.compile_cache():
    for name, settings in (("in turn", SETTINGS), ("beside", BESIDE)):
      folder = tmp_path_factory.mktemp("made") / "run"
      answers = collections.defaultdict(list)
      with pytest.MonkeyPatch.context() as patch:
        noted(patch, answers)
        run = runs.train(folder, *settings, exp=EXP)
      found[name] = Made(folder=folder, run=run, answers=answers)
  return found


def test_what_is_evaluated_beside_training_is_what_is_evaluated_in_turn(made):
  one, other = made["in turn"], made["beside"]
  for got, want in zip(
    jax.tree.leaves(other.run.state.params),
    jax.tree.leaves(one.run.state.params),
    strict=True,
  ):
    np.testing.assert_array_equal(got, want)
  # Token for token, with log-probabilities; of one version each.
  assert sorted(other.answers) == [0, 2, 4]
  assert other.answers == one.answers
  for version, answers in other.answers.items():
    assert len(answers) == 10
    assert {v for a in answers for v in a.versions} == {version}
  assert len({repr([a.tokens for a in x]) for x in one.answers.values()}) > 1
  assert other.tests == one.tests
  assert {s: t["eval/version"] for s, t in one.tests.items()} == {
    0: 0.0,
    2: 2.0,
    4: 4.0,
  }


def test_lines_stand_in_order_and_every_second_in_an_account(made):
  lines = [(x["step"], "eval/version" in x) for x in made["beside"].run.metrics]
  assert [step for step, late in lines if not late] == [1, 2, 3, 4]
  assert [step for step, late in lines if late] == [0, 2, 4]
  assert (
    lines.index((2, False)) < lines.index((2, True)) < lines.index((4, False))
  )
  assert lines[-1] == (4, True)
  rows = [x for x in made["beside"].run.metrics if "time/seconds" in x]
  assert max(row["staleness/max"] for row in rows) <= 1
  accounts_test.check(made["beside"].folder, rows)
  found = accounts_test.events(made["beside"].folder)
  assert {"cat": "eval", "tid": 2, "name": "evaluate"}.items() <= next(
    e for e in found if e["name"] == "evaluate"
  ).items()
  assert rows[-1]["overhead/generation/eval"] > 0


def without(folder, copy, step: int, *, newest: int) -> None:
  """Makes a run as a kill leaves it, before an evaluation was logged."""
  shutil.copytree(folder, copy)
  lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
  kept = [
    line
    for line in lines
    if json.loads(line)["step"] != step or "eval/version" not in line
  ]
  assert len(kept) == len(lines) - 1
  (copy / "metrics.jsonl").write_text("".join(kept))
  for path in (copy / "checkpoints").iterdir():
    if int(path.name) > newest:
      shutil.rmtree(path)


@pytest.mark.parametrize(
  ("step", "newest", "again"),
  [
    (4, 4, True),
    pytest.param(2, 3, False, marks=pytest.mark.slow),
    pytest.param(2, 2, True, marks=pytest.mark.slow),
  ],
)
def test_it_is_made_again_from_a_checkpoint_of_its_weights_only(
  made, tmp_path, step, newest, again
):
  copy = tmp_path / "run"
  without(made["beside"].folder, copy, step, newest=newest)
  with runs.compile_cache():
    runs.train(copy, *BESIDE, exp=EXP)
  found = evaluations(copy)
  assert (step in found) == again
  want = made["beside"].tests
  assert found == {s: want[s] for s in found} and {0, 4} <= found.keys()
  if newest == 4:  # Trained on no more.
    assert runs.metrics(copy)[-1].keys() == {*want[4], "step"}


def test_a_run_that_is_to_stop_keeps_half_an_evaluation_from_the_log(tmp_path):
  cfg = runs.configured(*BESIDE, "num_steps=8", exp=EXP)
  hosts = hosts_lib.Hosts()

  def stop(version: int) -> None:
    if version == 2:
      hosts.stopping = "SIGTERM"

  with runs.compile_cache(), pytest.MonkeyPatch.context() as patch:
    noted(patch, collections.defaultdict(list), stop)
    state = loop.run(cfg, prepare.prepare(cfg), tmp_path, hosts)
  step = int(state.step)
  assert 2 <= step < 8 and runs.steps(tmp_path)[-1] == step
  assert list(evaluations(tmp_path)) == [0]
