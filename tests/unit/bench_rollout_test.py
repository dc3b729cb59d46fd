"""The rollout benchmark counts alike for all, and holds what it says."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest

from bench import workloads

BENCH = pathlib.Path(workloads.__file__).parent
ECHO = """
import workloads
w = workloads.WORKLOADS["W1"]
workloads.serve(
  w,
  lambda step, prompts: [p for p in prompts for _ in range(w.group)],
  check=-3.0,
  version="echo",
  others={"limits": lambda: {"decode": 2.0}},
)
"""


@pytest.fixture(name="rollout")
def _rollout(monkeypatch):
  """Imports the script as it is run: its folder is on the path."""
  monkeypatch.syspath_prepend(str(BENCH))
  return importlib.import_module("rollout")


def turn(seconds: float, *lengths: int, others: float = 0.0) -> dict:
  return {"seconds": seconds, "lengths": list(lengths), "others": others}


def figures(rollout, name: str, turns: dict[str, list[dict]], **more) -> dict:
  w = workloads.WORKLOADS[name]
  count = len(next(iter(turns.values())))
  given = {
    "limits": [{"decode": 100.0, "square": 1.0, "read": 1.0}] * count,
    "gaps": [0.01] * count,
    "recompiled": None,
    **more,
  }
  return rollout.figures(rollout.Measured(w, turns, **given))


@pytest.mark.parametrize("step", [0, 1])
def test_lengths_of_w4_have_their_mean_and_reach_the_longest(step):
  w = workloads.WORKLOADS["W4"]
  made = workloads.lengths(w, step)
  assert len(made) == w.rows and min(made) >= 1 and max(made) == 256
  assert sum(made) == 64 * w.rows
  assert made != workloads.lengths(w, 1 - step)
  assert sorted(made) == sorted(workloads.lengths(w, 1 - step))
  assert len(w.end_ids) == 64 and 0 not in w.end_ids


def test_prompts_hold_no_end_id_and_differ_by_step():
  w = workloads.WORKLOADS["W4"]
  first, second = workloads.prompts(w, 0), workloads.prompts(w, 1)
  assert first == workloads.prompts(w, 0) != second
  assert not {0, *w.end_ids} & {id_ for prompt in first for id_ in prompt}


def test_operations_are_counted_token_by_token():
  w = workloads.WORKLOADS["W3"]
  made = [1, 2, 5]
  seen = [place + 1 for _ in range(w.prompts) for place in range(w.prompt_len)]
  for count in made:
    seen += [w.prompt_len + place + 1 for place in range(count - 1)]
  drawn = workloads.weights(w)
  layer = sum(x.size for x in drawn["layers"][0].values())
  assert layer == w.layer_weights and len(drawn["layers"]) == w.layers
  wanted = 2 * w.layers * layer * len(seen)
  wanted += 4 * w.layers * w.heads * w.head_width * sum(seen)
  wanted += 2 * drawn["embed"].size * sum(made)
  assert workloads.flops(w, made) == wanted


def test_a_system_answers_steps_and_other_orders(tmp_path):
  script = tmp_path / "echo.py"
  script.write_text(ECHO)
  done = subprocess.run(
    [sys.executable, str(script)],
    input="0\nlimits\n",
    env={"PYTHONPATH": str(BENCH)},
    capture_output=True,
    text=True,
    check=True,
    timeout=60,
  )
  ready, step, limits = map(json.loads, done.stdout.splitlines())
  assert ready == {"check": -3.0, "version": "echo"}
  assert step["lengths"] == [32] * 128 and step["seconds"] > 0
  assert limits == {"decode": 2.0}


def test_a_system_that_cuts_completions_short_is_refused(tmp_path):
  script = tmp_path / "echo.py"
  script.write_text(ECHO.replace("[p for", "[p[1:] for"))
  done = subprocess.run(
    [sys.executable, str(script)],
    input="0\n",
    env={"PYTHONPATH": str(BENCH)},
    capture_output=True,
    text=True,
    check=False,
    timeout=60,
  )
  assert done.returncode == 1
  assert done.stderr.endswith("expected 32 tokens in each, got 31.\n")


def test_a_turn_skips_what_libraries_print_and_ends_loudly(rollout, tmp_path):
  code = "print('hello'); print('{\"check\": 1}'); input(); print('{}')"
  system = rollout.System("echo", (sys.executable, "-uc", code), {})
  process = rollout.Process(system, tmp_path)
  try:
    assert process.ready == {"check": 1}
    answer = process.turn(0)
    assert answer.keys() == {"others"} and answer["others"] >= 0
    with pytest.raises(SystemExit, match=r"rollout: echo: .* its end \(0\)"):
      process._answer(5.0)
  finally:
    process.close()


def test_goals_are_against_the_best_peer(rollout):
  turns = {
    "own": [turn(1.0, 300), turn(1.0, 330), turn(1.0, 900)],
    "tunix": [turn(1.0, 100)] * 3,
    "transformers": [turn(1.0, 150)] * 3,
  }
  got = figures(rollout, "W2", turns)
  assert got["W2/of_best_peer"] == {
    "value": 2.2,
    "goal": 2.2,
    "peer": 150.0,
    "met": True,
  }
  assert got["W2/of_llama_cpp"]["met"] is None
  part = got["W2/of_decode_products"]
  wanted = workloads.flops(workloads.WORKLOADS["W2"], [330]) / 100e9
  assert part["value"] == round(wanted, 4) and part["met"] == (wanted >= 0.7)
  assert got["W2/outside_programs"]["met"] is True
  slow = figures(rollout, "W2", turns, gaps=[0.05] * 3)
  assert slow["W2/outside_programs"]["met"] is False


def test_an_absent_peer_leaves_its_goal_open(rollout):
  turns = {"own": [turn(1.0, 300)], "tunix": [turn(1.0, 10)]}
  got = figures(rollout, "W1", turns)
  assert got["W1/of_best_peer"]["value"] is None
  assert got["W1/of_best_peer"]["met"] is None


def test_a_goal_is_not_judged_by_turns_that_others_disturbed(rollout):
  turns = {"own": [turn(1.0, 300)] * 3}
  for busy, met in ((1, True), (2, None)):
    slow = [turn(9.0, 10, others=0.5)] * busy + [turn(1.0, 10)] * (3 - busy)
    turns |= {"tunix": slow, "transformers": [turn(1.0, 20)] * 3}
    got = figures(rollout, "W1", turns)["W1/of_best_peer"]
    assert got["value"] == 15.0 and got["met"] is met


def test_w4_counts_the_better_of_two_own_sizes(rollout):
  turns = {
    "own": [turn(1.0, 100)],
    "own, 32 rows": [turn(1.0, 170)],
    "own, lockstep": [turn(1.0, 100)],
    "tunix": [turn(1.0, 50)],
    "transformers": [turn(1.0, 60)],
    "transformers, continuous": [turn(1.0, 80)],
  }
  got = figures(rollout, "W4", turns)
  assert got["W4/of_lockstep"]["value"] == 1.7 and got["W4/of_lockstep"]["met"]
  assert got["W4/of_best_peer"]["value"] == 2.125
  assert got["W4/of_best_peer"]["met"] is True


def test_compilations_after_the_warm_up_fail_their_goal(rollout):
  turns = {"own": [turn(1.0, 300)]}
  for count in (0, 1):
    seen = {"prompts": 200, "compilations": count}
    got = figures(rollout, "W1", turns, recompiled=seen)
    assert got["W1/compilations"]["met"] is (count == 0)


def test_another_model_ends_the_run(rollout):
  w = workloads.WORKLOADS["W1"]
  rollout.same_model(w, "a", [-400.0, -403.0])
  with pytest.raises(SystemExit, match="W1, b: expected .* got -405.00"):
    rollout.same_model(w, "b", [-400.0, -403.0, -405.0])
  with pytest.raises(SystemExit, match="W1, b: expected .* got nan"):
    rollout.same_model(w, "b", [-400.0, float("nan")])
