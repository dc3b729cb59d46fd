"""Times the demo with checkpoints against the demo without them.

    python bench/saving.py [--quick] [--repeats N]

The demo runs in processes of its own, in turn with a checkpoint every tenth
step, every step, and after the last step only. Compared are seconds per step,
without the first steps, which compile; and what the clock of the run says the
trainer spent on checkpoints.
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

_GOAL = 0.02
_FROM, _DEADLINE_S = 10, 900.0
# Steps between checkpoints, by name. The demo's own setting is 50.
_EVERY = {"every 10": 10, "every step": 1, "none": 0}


@types.host_record
class Cost:
  """What one run took.

  Attributes:
    step_s: seconds of a step.
    held: part of the time that the trainer spent on checkpoints.
  """

  step_s: float
  held: float


def measure(every: int, steps: int) -> Cost:
  """Runs the demo without evaluations, and reads its metrics."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "jaxrl_post.main", "--exp=tiny"]
    command += [f"--workdir={folder}/run", f"--set=num_steps={steps}"]
    command += [f"--set=checkpoint.every={every}", "--set=evaluation.every=0"]
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
  # The evaluation after the last step is left out, and its checkpoint.
  first, last = timed[min(_FROM, steps // 2)], timed[steps - 1]
  name = "overhead/training/checkpoint"
  held = [row[name] * row["time/seconds"] for row in (first, last)]
  wall = last["time/seconds"] - first["time/seconds"]
  return Cost(
    step_s=wall / (last["step"] - first["step"]),
    held=(held[1] - held[0]) / wall,
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line, measures, prints a table and a line of JSON."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--repeats", type=int, default=5)
  chosen = parser.parse_args(arguments)
  repeats, steps = (1, 12) if chosen.quick else (chosen.repeats, 60)
  costs: dict[str, list[Cost]] = {name: [] for name in _EVERY}
  for repeat, name in itertools.product(range(repeats), _EVERY):
    cost = measure(_EVERY[name], steps)
    costs[name].append(cost)
    print(
      f"{repeat + 1}/{repeats} checkpoints {name:10}: "
      f"{1e3 * cost.step_s:7.1f} ms a step, trainer held "
      f"{100 * cost.held:5.2f} %",
      flush=True,
    )
  without = statistics.median(cost.step_s for cost in costs["none"])
  figures = {}
  print("checkpoints |  ms a step (spread)      | slower by | trainer held")
  for name, made in costs.items():
    times = [cost.step_s for cost in made]
    middle = statistics.median(times)
    held = statistics.median(cost.held for cost in made)
    more = middle / without - 1
    spread = f"({1e3 * min(times):.1f}..{1e3 * max(times):.1f})"
    print(
      f"{name:11} | {1e3 * middle:7.1f} {spread:16} | {100 * more:7.2f} % | "
      f"{100 * held:6.2f} %"
    )
    if name == "every 10":
      figures["tiny/saving/wall"] = {
        "value": round(more, 4),
        "goal": _GOAL,
        "peer": round(without, 4),
        "met": more <= _GOAL,
      }
      figures["tiny/saving/held"] = {
        "value": round(held, 4),
        "goal": _GOAL,
        "peer": round(without, 4),
        "met": held <= _GOAL,
      }
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
