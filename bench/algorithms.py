"""Has algorithms solve the demo, and says how well each does.

    python bench/algorithms.py [--quick] [--algorithms gspo rloo ...]
      [--seeds N] [--steps N]

Each is `experiments/tiny.py` with nothing else changed, trained as a process of
its own, one after the other. Counted is the share of held-out questions that
are answered right, greedily, before and after. The goal is 0.9. --quick is a
smoke test: a few steps of one.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from jaxrl_post import config
from jaxrl_post.algos import (
  algorithm,
  cispo,
  dapo,
  grpo,
  gspo,
  ppo,
  reinforce_pp,
  rloo,
  sapo,
)
from jaxrl_post.runtime import summary

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GOAL = 0.9
_LIMIT_S = 1800


def _with(algo: algorithm.Algorithm) -> config.Run:
  run = config.load("tiny", _ROOT / "experiments")
  return dataclasses.replace(run, algo=algo)


def with_grpo() -> config.Run:
  """The demo as it is."""
  return _with(grpo.objective())


def with_ppo() -> config.Run:
  """A critic of its own, which learns as fast as the policy."""
  run = _with(ppo.objective())
  return config.override(run, ["algo.baseline.learning_rate=1e-3"])


def with_dapo() -> config.Run:
  """Clip-higher; truncated rollouts left out."""
  return _with(dapo.objective())


def with_gspo() -> config.Run:
  """Ratios of sequences."""
  return _with(gspo.objective())


def with_cispo() -> config.Run:
  """Clipped weights."""
  return _with(cispo.objective())


def with_sapo() -> config.Run:
  """A soft gate."""
  return _with(sapo.objective())


def with_rloo() -> config.Run:
  """The score function, against the other rollouts."""
  return _with(rloo.objective())


def with_reinforce_pp() -> config.Run:
  """Returns whitened over the step."""
  return _with(reinforce_pp.objective())


NAMES = (
  "grpo",
  "ppo",
  "gspo",
  "rloo",
  "cispo",
  "dapo",
  "sapo",
  "reinforce_pp",
)


def right(name: str, seed: int, steps: int) -> tuple[float, float]:
  """Trains; returns the share of right answers before and after."""
  with tempfile.TemporaryDirectory() as folder:
    command = (
      sys.executable,
      "-m",
      "jaxrl_post.main",
      f"--exp={pathlib.Path(__file__).resolve()}:with_{name}",
      f"--workdir={folder}/run",
      f"--set=seed={seed}",
      f"--set=num_steps={steps}",
    )
    done = subprocess.run(
      command,
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=_LIMIT_S,
      check=False,
    )
    if done.returncode:
      raise SystemExit(f"{name}, seed {seed}:\n{done.stderr}")
    rows = summary.read(pathlib.Path(folder) / "run")
  found = [row["eval/reward_exact"] for row in rows if "eval/reward" in row]
  return found[0], found[-1]


def main() -> None:
  """Runs them and prints a line each."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--algorithms", nargs="+", choices=NAMES, default=NAMES)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=450)
  asked = parser.parse_args()
  if asked.quick:
    asked.algorithms, asked.seeds, asked.steps = NAMES[:1], 1, 3
  figures = {}
  print(f"{'':14} before  after, of each seed", flush=True)
  for name in asked.algorithms:
    ends = []
    before = 0.0
    for seed in range(asked.seeds):
      before, after = right(name, seed, asked.steps)
      ends.append(after)
    shown = "  ".join(f"{end:.3f}" for end in ends)
    print(f"{name:14} {before:6.3f}  {shown}", flush=True)
    value = statistics.median(ends)
    figures[f"algorithms/{name}"] = {
      "value": value,
      "goal": _GOAL,
      "peer": None,
      "met": value >= _GOAL,
    }
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
