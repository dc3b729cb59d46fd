"""Times the demo's evaluations beside training against those it waits for.

    python bench/beside.py [--quick] [--repeats N]

The demo (one device to train, one to generate) runs in processes of its own, in
turn with evaluations that training waits for, with the same beside training,
and without any but the first and the last. Compared are seconds in which the
trainer does not train (it waits for groups, for rewards, or for an evaluation),
and seconds of a step; both between the same two steps, behind those that
compile, and before the last evaluation, which either has to wait for.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.runtime import summary

# Of the time that evaluations in turn have the trainer not train.
_GOAL = 0.5
_EVERY, _FROM, _DEADLINE_S = 5, 6, 900.0
_SETTINGS = {
  "in turn": (f"evaluation.every={_EVERY}",),
  "beside": (f"evaluation.every={_EVERY}", "evaluation.beside.blocks=1"),
  "none": ("evaluation.every=0",),
}


@types.host_record
class Cost:
  """What one run took.

  Attributes:
    step_s: seconds of a step.
    idle_s: seconds a step in which the trainer did not train.
    tests: evaluations that were logged.
  """

  step_s: float
  idle_s: float
  tests: int


def measure(settings: Sequence[str], steps: int, prompts: int) -> Cost:
  """Runs the demo, and reads its metrics."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "jaxrl_post.main", "--exp=tiny"]
    command += [f"--workdir={folder}/run", f"--set=num_steps={steps}"]
    command += ["--set=checkpoint.every=0"]
    command += [f"--set=data.held_out.size={prompts}"]
    command += [f"--set={setting}" for setting in settings]
    done = subprocess.run(
      command,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=_DEADLINE_S,
    )
    if done.returncode:
      sys.exit(f"the demo failed:\n{done.stderr[-2000:]}")
    rows: Any = summary.read(pathlib.Path(folder, "run"))
  timed = {row["step"]: row for row in rows if "time/seconds" in row}
  first, last = timed[_FROM], timed[steps - 1]
  idle = [
    (row["idle/training"] + row["overhead/training/eval"]) * row["time/seconds"]
    for row in (first, last)
  ]
  count = last["step"] - first["step"]
  return Cost(
    step_s=(last["time/seconds"] - first["time/seconds"]) / count,
    idle_s=(idle[1] - idle[0]) / count,
    tests=sum("eval/version" in row for row in rows),
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line, measures, prints a table and a line of JSON."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--repeats", type=int, default=5)
  chosen = parser.parse_args(arguments)
  repeats, steps, prompts = chosen.repeats, 61, 1024
  if chosen.quick:
    repeats, steps, prompts = 1, 17, 256
  costs: dict[str, list[Cost]] = {name: [] for name in _SETTINGS}
  for repeat, name in itertools.product(range(repeats), _SETTINGS):
    cost = measure(_SETTINGS[name], steps, prompts)
    costs[name].append(cost)
    print(
      f"{repeat + 1}/{repeats} evaluations {name:8}: "
      f"{1e3 * cost.step_s:7.1f} ms a step, trainer idle "
      f"{1e3 * cost.idle_s:7.1f} ms of it, {cost.tests} evaluations",
      flush=True,
    )
  print("evaluations | ms a step | trainer idle | idle for each evaluation")
  step_s, idle_s = (
    {
      name: statistics.median(getattr(cost, what) for cost in made)
      for name, made in costs.items()
    }
    for what in ("step_s", "idle_s")
  )
  for name in _SETTINGS:
    each = _EVERY * (idle_s[name] - idle_s["none"])
    print(
      f"{name:11} | {1e3 * step_s[name]:9.1f} | {1e3 * idle_s[name]:12.1f} | "
      f"{each:.3f} s"
    )
  spent = {name: idle_s[name] - idle_s["none"] for name in _SETTINGS}
  left = spent["beside"] / spent["in turn"]
  slower = step_s["beside"] / step_s["in turn"]
  figures = {
    "tiny/beside/idle": {
      "value": round(left, 4),
      "goal": _GOAL,
      "peer": round(_EVERY * spent["in turn"], 4),
      "met": left <= _GOAL,
    },
    "tiny/beside/step": {
      "value": round(slower, 4),
      "goal": 1.0,
      "peer": round(step_s["in turn"], 4),
      "met": slower <= 1.0,
    },
  }
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
