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
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from jaxrl_post import config, types
from jaxrl_post.data import dataset, sources
from jaxrl_post.models import decoder, transformer
from jaxrl_post.placement import mesh
from jaxrl_post.planning import measure, simulate
from jaxrl_post.rewards import pool
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

_LETTERS = "".join(chr(ord("a") + i) for i in range(26))
_PROMPT = 8
_GOAL = 0.1
_DEADLINE_S = 300.0
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


def make(index: int) -> types.Example:
  """Makes a prompt of letters that mean nothing."""
  letters = random.Random(index).choices(_LETTERS, k=_PROMPT)
  return types.Example(prompt="".join(letters), reference="")


def score(rollout: types.Rollout, reference: str) -> float:
  """Scores every other rollout, at no cost."""
  return float(rollout.completion.uid % 2)


def get_config() -> config.Run:
  """A small decoder that stops after some twenty tokens, and learns nothing."""
  return config.Run(
    model=decoder.Model(
      config=transformer.Config(
        num_layers=2,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        head_width=16,
        ff_width=256,
        vocab_size=32,
      )
    ),
    data=dataset.Data(
      train=sources.Generated(make, size=20_000),
      alphabet=_LETTERS,
      max_prompt=_PROMPT,
    ),
    rewards=pool.Rewards(functions=(score,), batch=64),
    optim=optim.Optim(learning_rate=1e-7),
    sampling=engine.Sampling(max_tokens=32, rows=32, block=4),
    placement=mesh.Placement(cpu_devices=2, mode="split"),
    num_steps=40,
    groups_per_step=8,
    group_size=8,
    max_lag=0,
  )


def run(
  name: str, settings: Sequence[str], steps: int, folder: pathlib.Path
) -> measure.Measured:
  """Runs the program once; returns what it did."""
  path = folder / name
  chosen = [*settings, f"num_steps={steps}", "checkpoint.every=0"]
  args = [f"--exp={__file__}", f"--workdir={path}"]
  args += [f"--set={setting}" for setting in chosen]
  root = pathlib.Path(__file__).resolve().parents[1]
  end = subprocess.run(
    [sys.executable, "-m", "jaxrl_post.main", *args],
    env={
      "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      **os.environ,
      "PYTHONPATH": str(root / "src"),
      "JAX_PLATFORMS": "cpu",
    },
    capture_output=True,
    text=True,
    timeout=_DEADLINE_S,
    check=False,
  )
  if end.returncode:
    sys.exit(f"{name}: exit code {end.returncode}\n{end.stderr}")
  return measure.read(path)


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
  return {
    "plan/worst_error": {
      "value": round(worst, 4),
      "goal": _GOAL,
      "met": worst <= _GOAL,
    },
    "plan/mean_error": {"value": round(sum(errors) / len(errors), 4)},
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
