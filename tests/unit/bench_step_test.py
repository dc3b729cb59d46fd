"""The benchmark of steps runs whole ones, and judges what it says."""

import argparse
import importlib
import json
import pathlib
import subprocess
import sys

import pytest

from bench import workloads

BENCH = pathlib.Path(workloads.__file__).parent
# Its only weight is what the sampler adds to ids; an update changes it.
SYSTEM = """
import sys
import scored, workloads
w, chosen = scored.asked("A stub.", kind={"default": "sound"})
added = []

def generate(step, prompts):
  ids = [128 + step + (0 if chosen.kind == "stale" else len(added))] * 31
  return [[*ids, p[0]] for p in prompts for _ in range(w.group)]

def update(batch):
  assert len(batch.prompts) == len(batch.completions) == w.rows
  if chosen.kind != "idle":
    added.append(batch.rewards)

scored.serve_steps(
  w,
  generate,
  update,
  check=lambda: -400.0 - len(added) / 8,
  version="stub",
  others={"limits": lambda: {"square": 50.0}},
)
"""


@pytest.fixture(name="scripts")
def _scripts(monkeypatch):
  """Imports the scripts as they are run: their folder is on the path."""
  monkeypatch.syspath_prepend(str(BENCH))
  names = ("step", "update", "scored", "rollout")
  return [importlib.import_module(name) for name in names]


def turn(seconds: float, *lengths: int, others: float = 0.0) -> dict:
  return {"seconds": seconds, "lengths": list(lengths), "others": others}


def figures(scripts, name: str, turns: dict[str, list[dict]], **gib: float):
  step, update, *_ = scripts
  limits = [100.0] * len(turns["own"])
  memory = {key.replace("_", ", "): int(x * 2**30) for key, x in gib.items()}
  w = workloads.WORKLOADS[name]
  return step.figures(update.Measured(w, turns, limits, memory, step.flops))


def stub(rollout, name: str, kind: str):
  command = (sys.executable, "-c", SYSTEM, "W1", f"--kind={kind}")
  return rollout.System(name, command, {"PYTHONPATH": str(BENCH)})


def measured(scripts, folder: pathlib.Path, *kinds: str):
  """Measures stubs as the bench does its systems."""
  step, update, _, rollout = scripts
  return update.measure(
    workloads.WORKLOADS["W1"],
    [stub(rollout, f"{at}", kind) for at, kind in enumerate(kinds)],
    2,
    folder,
    alike=step.steps_alike,
    flops=step.flops,
  )


def test_completions_are_rewarded_with_their_share_of_even_ids(scripts):
  scored, w = scripts[2], workloads.WORKLOADS["W1"]
  prompts = [[number] for number in range(w.prompts)]
  made = [[2, 4, 5, 6]] * w.group + [[1]] * (w.rows - w.group)
  batch = scored.earned(w, prompts, made)
  assert batch.rewards == [0.75] * w.group + [0.0] * (w.rows - w.group)
  assert batch.prompts[w.group - 1] == [0] and batch.prompts[w.group] == [1]
  assert batch.completions == made


def test_a_number_is_a_whole_step_and_a_draw_trains_nothing(scripts):
  stubbed = stub(scripts[3], "a", "sound")
  done = subprocess.run(
    stubbed.command,
    input="draw\ndraw\n3\ncheck\ndraw\nmemory\n",
    env=dict(stubbed.environment),
    capture_output=True,
    text=True,
    check=True,
    timeout=60,
  )
  ready, *draws, made, check, after, memory = map(
    json.loads, done.stdout.splitlines()
  )
  assert ready == {"check": -400.0, "version": "stub"}
  assert draws[0] == draws[1] != after
  assert made["lengths"] == [32] * 128 and made["seconds"] > 0
  assert check == {"check": -400.125}
  assert 2**20 < memory["memory"] < 2**35


def test_systems_take_turns_and_say_their_memory(scripts, tmp_path):
  seen = measured(scripts, tmp_path, "sound", "sound")
  assert [len(turns) for turns in seen.turns.values()] == [2, 2]
  assert seen.limits == [50.0, 50.0] and set(seen.memory) == {"0", "1"}
  w = workloads.WORKLOADS["W1"]
  made = [32] * w.rows
  wanted = workloads.flops(w, made) + scripts[2].flops(w, made)
  took = seen.turns["1"][0]["seconds"]
  assert seen.useful("1")[0] == pytest.approx(wanted / took / 1e9)


@pytest.mark.parametrize(
  ("kind", "why"),
  [("idle", "It trains nothing"), ("stale", "not have the new weights")],
)
def test_a_sampler_without_the_new_weights_ends_the_run(
  scripts, tmp_path, kind, why
):
  with pytest.raises(SystemExit, match=f"W1, 1: expected .*{why}"):
    measured(scripts, tmp_path, "sound", kind)


def test_a_sampler_that_is_not_repeatable_ends_the_run(scripts):
  step, w = scripts[0], workloads.WORKLOADS["W1"]
  step.changed(w, "a", (-1.0, -2.0), [5, 5, 6])
  step.changed(w, "a", (-1.0, -2.0), [])
  with pytest.raises(SystemExit, match="W1, a: .* not its only seed"):
    step.changed(w, "a", (-1.0, -2.0), [5, 7, 6])
  with pytest.raises(SystemExit, match="got nan"):
    step.changed(w, "a", (-1.0, float("nan")), [])


def test_goals_are_against_the_best_peer_and_the_least_memory(scripts):
  turns = {
    "own": [turn(8.0, 64, 64)] * 3,
    "own, 32 rows": [turn(2.0, 64, 64)] * 3,
    "tunix": [turn(6.0, 64, 64)] * 3,
    "torch": [turn(9.0, 64, 64)] * 3,
    "torch, continuous": [turn(5.0, 64, 64)] * 3,
  }
  used = {"own": 1.0, "tunix": 3.0, "torch": 2.0, "torch_continuous": 2.5}
  got = figures(scripts, "W4", turns, **used, **{"own_32 rows": 3.0})
  assert got == {
    "W4/of_best_peer": {"value": 2.5, "goal": 3.0, "peer": 0.4, "met": False},
    "W4/of_least_memory": {
      "value": 1.5,
      "goal": 1.0,
      "peer": 2.0,
      "met": False,
    },
  }


def test_an_absent_peer_leaves_goals_open(scripts):
  turns = {"own": [turn(1.0, 32)], "tunix": [turn(9.0, 32)]}
  got = figures(scripts, "W1", turns, own=1.0, tunix=2.0)
  assert [figure["value"] for figure in got.values()] == [None, None]
  assert [figure["met"] for figure in got.values()] == [None, None]


def test_what_others_disturbed_leaves_rates_open_but_not_memory(scripts):
  turns = {
    "own": [turn(1.0, 32)] * 3,
    "tunix": [turn(9.0, 32, others=0.5)] * 2 + [turn(9.0, 32)],
    "torch": [turn(9.0, 32)] * 3,
  }
  got = figures(scripts, "W1", turns, own=1.0, tunix=3.0, torch=2.0)
  assert got["W1/of_best_peer"]["value"] == 9.0
  assert got["W1/of_best_peer"]["met"] is None
  assert got["W1/of_least_memory"]["value"] == 0.5
  assert got["W1/of_least_memory"]["met"] is True


def test_each_runs_with_its_own_python_and_microbatches(scripts):
  step, update, *_ = scripts
  w = workloads.WORKLOADS["W4"]
  chosen = argparse.Namespace(tunix=None, torch="/torch/python")
  found = update.systems(w, chosen, step.scripts(w))
  assert [system.name for system in found] == [
    "own",
    "torch",
    "own, 32 rows",
    "torch, continuous",
  ]
  python, script, *flags = found[3].command
  assert python == "/torch/python"
  assert pathlib.Path(script) == BENCH / "peer_step_torch.py"
  assert flags == ["W4", "--rows=8", "--continuous"]
