"""A run is planned from another one, and says how far the plan was off."""

import json

from jaxrl_post.planning import costs as costs_lib
from jaxrl_post.planning import plan
from jaxrl_post.runtime import summary
from tests.e2e import runs


def test_a_run_logs_how_far_it_is_from_the_plan_of_another(tmp_path):
  sizes = runs.settings("num_steps=14", "evaluation.every=0", "max_lag=0")
  first = runs.run(tmp_path, runs.experiment(), "--workdir=one", *sizes)
  assert first.code == 0, first.err
  assert "plan/error" not in summary.read(tmp_path / "one")[-1]
  planned = runs.run(tmp_path, "--mode=plan", "--plan=costs.json", "one")
  assert planned.code == 0, planned.err
  assert "recommended" in planned.out
  setting, costs = costs_lib.read(tmp_path / "costs.json")
  assert setting.max_lag == 0 and costs.position_s > 0

  again = runs.run(
    tmp_path, runs.experiment(), "--workdir=two", "--plan=costs.json", *sizes
  )
  assert again.code == 0, again.err
  assert "rollouts consumed per device-hour" in again.out
  tree = json.loads((tmp_path / "two" / "config.json").read_text())
  lines = [x for x in summary.read(tmp_path / "two") if "reward/mean" in x]
  errors = [line["plan/error"] for line in lines]
  assert errors[:5] == [None] * 5 and None not in errors[5:]
  wall = lines[-1]["time/seconds"] - lines[4]["time/seconds"]
  measured = wall / (len(lines) - 5)
  count = int(lines[-1]["devices"])
  planned = plan.predict(str(tmp_path / "costs.json"), tree, count).step_s
  assert errors[-1] == measured / planned - 1


def test_what_only_planning_reads_is_refused_elsewhere(tmp_path):
  end = runs.run(tmp_path, runs.experiment(), "--devices=2")
  assert end.code == 2 and "error: --devices: expected none" in end.err
  end = runs.run(tmp_path, "--mode=plan")
  assert end.code == 2 and "error: --mode=plan: expected the folders" in end.err
  assert not list(tmp_path.iterdir())
