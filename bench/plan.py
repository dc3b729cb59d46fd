"""Compares what the planner expects with what runs then do.

    python bench/plan.py [--quick] [--steps N] [--repeats N]

Three runs are measured: two in lockstep, that differ in slots and in the size
of the batch, and one in which the stages overlap. From what they cost, settings
are predicted that were not among them: other bounds on the lag, slots, batches,
groups, limits on tokens, placements. Then each of them runs. The last line is
JSON. Completions of a model that knows nothing end at random, so that their
lengths differ; the reward is no task.
"""

import argparse
import json
import operator
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

import overlap
import rollout

from jaxrl_post.planning import measure, simulate

_GOAL = 0.1
# bench/balanced.py with a smaller decoder, which stops after some twenty
# tokens, and a larger engine.
_SMALL = (
  "model.config.num_layers=2",
  "model.config.width=64",
  "model.config.head_width=16",
  "model.config.ff_width=256",
  "model.config.vocab_size=32",
  "optim.learning_rate=1e-7",
  "sampling.max_tokens=32",
  "sampling.rows=32",
  "sampling.block=4",
  "group_size=8",
)
_SPLIT = ("placement.mode=split", "placement.cpu_devices=2")

# To calibrate on, and to predict.
KNOWN: dict[str, tuple[str, ...]] = {
  "lockstep": (*_SPLIT, "max_lag=0"),
  "lockstep, half": (
    *_SPLIT,
    "max_lag=0",
    "sampling.rows=16",
    "groups_per_step=4",
  ),
  "max_lag 1": (*_SPLIT, "max_lag=1"),
}
NEW: dict[str, tuple[str, ...]] = {
  "max_lag 2, 24 slots": (*_SPLIT, "max_lag=2", "sampling.rows=24"),
  "max_lag 1, 6 groups": (*_SPLIT, "max_lag=1", "groups_per_step=6"),
  "max_lag 4, 16 slots, 12 groups": (
    *_SPLIT,
    "max_lag=4",
    "sampling.rows=16",
    "groups_per_step=12",
  ),
  "max_lag 1, groups of 4": (*_SPLIT, "max_lag=1", "group_size=4"),
  "lockstep, 20 tokens, 48 slots": (
    *_SPLIT,
    "max_lag=0",
    "sampling.max_tokens=20",
    "sampling.rows=48",
  ),
  "colocated, lockstep, 12 groups": (
    "placement.mode=colocated",
    "placement.cpu_devices=1",
    "max_lag=0",
    "groups_per_step=12",
  ),
}


def run(
  name: str, settings: Sequence[str], steps: int, folder: pathlib.Path
) -> measure.Measured:
  """Runs the program once; returns what it did."""
  chosen = (*_SMALL, *settings)
  return measure.read(overlap.run(folder / name, chosen, steps, folder))


def compare(steps: int, repeats: int, folder: pathlib.Path) -> dict[str, dict]:
  """Runs everything in turn, prints the table, returns the figures."""
  made: dict[str, list[measure.Measured]] = {n: [] for n in {**KNOWN, **NEW}}
  for number in range(repeats):
    for name, how in {**KNOWN, **NEW}.items():
      made[name].append(run(f"{name}, {number}", how, steps, folder))
  costs = measure.calibrate([one for name in KNOWN for one in made[name]])
  print(
    f"{'rollouts a device-hour':<38}{'planned':>12}{'measured':>12}   error"
  )
  errors = []
  for name, ones in made.items():
    setting = ones[0].setting
    planned = simulate.simulate(setting, costs).consumed_per_device_hour
    measured = statistics.median(one.consumed_per_device_hour for one in ones)
    error = planned / measured - 1
    mark = "*" if name in NEW else " "
    errors += [abs(error)] * (name in NEW)
    print(f"{mark} {name:<36}{planned:12.0f}{measured:12.0f}{error:+8.1%}")
  print(f"* not used to calibrate; medians of {repeats}")
  worst = max(errors)
  print(f"mean error {sum(errors) / len(errors):.1%}, worst {worst:.1%}")
  return {
    "plan/worst_error": rollout.figure(worst, _GOAL, None, operator.le),
  }


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line, measures and prints."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--repeats", type=int, default=1)
  parser.add_argument("--keep", help="a folder for the runs, to look at")
  chosen = parser.parse_args(arguments)
  steps = 16 if chosen.quick else chosen.steps
  if chosen.keep:
    print(json.dumps(compare(steps, chosen.repeats, pathlib.Path(chosen.keep))))
    return
  with tempfile.TemporaryDirectory(prefix="plan-") as folder:
    print(json.dumps(compare(steps, chosen.repeats, pathlib.Path(folder))))


if __name__ == "__main__":
  main()
