"""The update benchmark counts alike for all, and judges what it says."""

import importlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from bench import workloads

BENCH = pathlib.Path(workloads.__file__).parent
ECHO = """
import scored, workloads
seen = []
scored.serve(
  workloads.WORKLOADS["W4"],
  seen.append,
  check=lambda: -3.0 - len(seen),
  version="echo",
  others={"limits": lambda: {"square": 2.0}},
)
"""


@pytest.fixture(name="scripts")
def _scripts(monkeypatch):
  """Imports the scripts as they are run: their folder is on the path."""
  monkeypatch.syspath_prepend(str(BENCH))
  return [importlib.import_module(name) for name in ("update", "scored")]


def turn(seconds: float, *lengths: int, others: float = 0.0) -> dict:
  return {"seconds": seconds, "lengths": list(lengths), "others": others}


def figures(update, name: str, turns: dict[str, list[dict]]) -> dict:
  w = workloads.WORKLOADS[name]
  limits = [100.0] * len(turns["own"])
  seen = update.Measured(w, turns, limits, {}, update.scored.flops)
  return update.figures(seen)


def test_a_batch_is_the_same_for_all_and_differs_by_step(scripts):
  _, scored = scripts
  w = workloads.WORKLOADS["W4"]
  first, second = scored.batch(w, 0), scored.batch(w, 1)
  assert first == scored.batch(w, 0) != second
  assert list(map(len, first.completions)) == workloads.lengths(w, 0)
  assert first.prompts[0] == first.prompts[7] != first.prompts[8]
  gains = first.advantages(w.group).reshape(w.prompts, w.group)
  np.testing.assert_allclose(gains.mean(1), 0, atol=1e-5)
  np.testing.assert_allclose(gains.std(1, ddof=1), 1, atol=1e-3)


def test_operations_are_counted_token_by_token(scripts):
  _, scored = scripts
  w = workloads.WORKLOADS["W3"]
  made = [1, 2, 5]
  seen = [at + 1 for count in made for at in range(w.prompt_len + count)]
  drawn = workloads.weights(w)
  layer = sum(x.size for x in drawn["layers"][0].values())
  wanted = 2 * w.layers * layer * len(seen)
  wanted += 4 * w.layers * w.heads * w.head_width * sum(seen)
  wanted += 2 * drawn["embed"].size * sum(made)
  assert scored.flops(w, made) == 3 * wanted


def test_a_system_answers_steps_and_other_orders():
  done = subprocess.run(
    [sys.executable, "-c", ECHO],
    input="0\ncheck\nlimits\nmemory\n",
    env={"PYTHONPATH": str(BENCH)},
    capture_output=True,
    text=True,
    check=True,
    timeout=60,
  )
  ready, step, check, limits, memory = map(json.loads, done.stdout.splitlines())
  assert ready == {"check": -3.0, "version": "echo"}
  assert step["lengths"] == workloads.lengths(workloads.WORKLOADS["W4"], 0)
  assert check == {"check": -4.0} and limits == {"square": 2.0}
  assert 2**20 < memory["memory"] < 2**35


def test_goals_are_against_the_better_peer_and_the_limit(scripts):
  update, scored = scripts
  turns = {
    "own": [turn(1.0, 64, 64), turn(2.0, 64, 64), turn(9.0, 64, 64)],
    "tunix": [turn(4.0, 64, 64)] * 3,
    "torch": [turn(5.0, 64, 64)] * 3,
  }
  got = figures(update, "W2", turns)
  assert got["W2/of_best_peer"] == {
    "value": 2.0,
    "goal": 2.0,
    "peer": 0.5,
    "met": True,
  }
  useful = scored.flops(workloads.WORKLOADS["W2"], [64, 64]) / 2.0 / 1e9
  assert got["W2/of_products"]["value"] == round(useful / 100.0, 4)
  assert got["W2/of_products"]["met"] == (useful >= 65)


def test_packing_is_judged_where_lengths_differ(scripts):
  turns = {
    "own": [turn(2.0, 16, 64)] * 3,
    "own,padded": [turn(2.9, 16, 64)] * 3,
    "tunix": [turn(1.0, 16, 64)] * 3,
  }
  got = figures(scripts[0], "W4", turns)
  assert list(got) == ["W4/of_padded"]
  assert got["W4/of_padded"]["value"] == 1.45
  assert got["W4/of_padded"]["met"] is False


def test_an_absent_peer_leaves_its_goal_open(scripts):
  turns = {"own": [turn(1.0, 32)], "tunix": [turn(1.0, 32)]}
  got = figures(scripts[0], "W1", turns)["W1/of_best_peer"]
  assert got["value"] is None and got["met"] is None


def test_a_goal_is_not_judged_by_turns_that_others_disturbed(scripts):
  turns = {
    "own": [turn(1.0, 32)] * 3,
    "tunix": [turn(9.0, 32, others=0.5)] * 2 + [turn(9.0, 32)],
    "torch": [turn(9.0, 32)] * 3,
  }
  got = figures(scripts[0], "W1", turns)
  assert got["W1/of_best_peer"]["value"] == 9.0
  assert {figure["met"] for figure in got.values()} == {None}


def test_another_update_ends_the_run(scripts):
  update, w = scripts[0], workloads.WORKLOADS["W1"]
  update.same_update(w, "b", [-400.0, -403.0], [-400.5, -403.52])
  for after in (-400.0, -399.5, float("nan")):
    with pytest.raises(SystemExit, match="W1, b: .* not the same update"):
      update.same_update(w, "b", [-400.0, -400.0], [-400.5, after])
