"""Times the update of a scored batch beside Tunix and torch.

    python bench/update.py [--quick] [--workloads W1 W2] [--repeats N]
      [--tunix PYTHON] [--torch PYTHON]

Batches of `workloads` (W1 tiny, W2 small, W3 with the shape of a real model, W4
with completions of unequal lengths) are trained by one optimizer update of GRPO
each: by our trainer, by Tunix's, and by torch with what TRL does. All hold the
same random weights; a sequence scored by each before and after the first update
must come out alike. Each system is a process of its own; they take turns, and
the one whose turn it is has the machine to itself. An update is timed from
lists of ids and rewards on the host to the new weights: packing or padding,
advantages, forward and backward passes and AdamW are in it. Medians over the
repeats. In the same turns the rate of large float32 products is measured.

Useful operations are three times those of a forward pass over each row's prompt
and completion, with logits of completions only. Microbatches (`_ROWS`) are the
peers' best ones of an earlier study and a guess for ours: not tuned here yet.
torch computes no entropies, which TRL does, and pads to the longest of a
microbatch and not of a batch. Processes of JAX get huge pages for malloc.

The environments of the others are those of bench/rollout.py. --quick is a smoke
test.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import rollout
import scored
import workloads

_HERE = pathlib.Path(__file__).resolve().parent
_OWN, _PEERS = "own", ("tunix", "torch")
_PEER_GOAL = {"W1": 2.0, "W2": 2.0, "W3": 1.8}
_RATE_GOAL = 0.65
_DISTURBED = 0.1
_SAME_MODEL, _SAME_UPDATE = 1e-2, 0.1
# Rows of a microbatch.
_ROWS = {
  "own": {"W1": 32, "W2": 16, "W3": 8, "W4": 16},
  "tunix": {"W1": 32, "W2": 8, "W3": 4, "W4": 8},
  "torch": {"W1": 32, "W2": 8, "W3": 4, "W4": 8},
}


def systems(
  w: workloads.Workload, chosen: argparse.Namespace
) -> list[rollout.System]:
  """Returns what takes turns on a workload, our trainer first."""
  jax_cpu = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "JAX_PLATFORMS": "cpu",
  }
  source = {**jax_cpu, "PYTHONPATH": str(_HERE.parent / "src")}
  found = [(_OWN, sys.executable, "own_update.py", source)]
  for name, python in (("tunix", chosen.tunix), ("torch", chosen.torch)):
    if python:
      env = jax_cpu if name == "tunix" else {}
      found.append((name, python, f"peer_update_{name}.py", env))
  return [
    rollout.System(
      name,
      (python, str(_HERE / script), w.name, f"--rows={_ROWS[name][w.name]}"),
      env,
    )
    for name, python, script, env in found
  ]


@dataclasses.dataclass(frozen=True)
class Measured:
  """What a workload gave, a value for each repeat.

  Attributes:
    w: the workload.
    turns: by system, the answers to its steps.
    limits: GFLOP/s of large products.
  """

  w: workloads.Workload
  turns: Mapping[str, list[dict[str, Any]]]
  limits: list[float]

  def rates(self, name: str) -> list[float]:
    """Returns the rows a second of a system; none if it was left out."""
    turns = self.turns.get(name, [])
    return [len(turn["lengths"]) / turn["seconds"] for turn in turns]

  def useful(self, name: str) -> list[float]:
    """Returns a system's useful operations a second, in GFLOP/s."""
    return [
      scored.flops(self.w, turn["lengths"]) / turn["seconds"] / 1e9
      for turn in self.turns[name]
    ]

  def others(self, name: str) -> float:
    """Returns the cores that others took in a system's median turn."""
    return statistics.median(turn["others"] for turn in self.turns[name])


def measure(
  w: workloads.Workload,
  chosen: argparse.Namespace,
  repeats: int,
  folder: pathlib.Path,
) -> Measured:
  """Runs a workload: all systems in turn, as often as it is repeated."""
  running: list[rollout.Process] = []
  turns: dict[str, list[dict[str, Any]]] = {}
  limits, after = [], []
  try:
    for system in systems(w, chosen):
      process = rollout.Process(system, folder)
      running.append(process)
      print(f"{w.name} {process.name}: {process.ready['version']}", flush=True)
      process.ask(repeats)  # compiles
      after.append(process.ask("check")["check"])
      same_update(w, process.name, [p.ready["check"] for p in running], after)
      turns[process.name] = []
    for step in range(repeats):
      limits.append(running[0].ask("limits")["square"])
      for process in running:
        turns[process.name].append(process.turn(step))
  finally:
    for process in running:
      process.close()
  return Measured(w, turns, limits)


def same_update(
  w: workloads.Workload,
  name: str,
  before: Sequence[float],
  after: Sequence[float],
) -> None:
  """Ends the run when the newest system has another model, or another update.

  Args:
    w: the workload.
    name: of the newest system.
    before: log-probability of the checked sequence by each system.
    after: the same after one update.
  """
  ours, theirs = before[0], before[-1]
  if not abs(theirs - ours) <= _SAME_MODEL * abs(ours):
    sys.exit(
      f"update: {w.name}, {name}: expected a sequence's log-probability of "
      f"{ours:.2f} within {_SAME_MODEL:.0%}, got {theirs:.2f}. It is not the "
      "same model."
    )
  ours, theirs = after[0] - before[0], after[-1] - before[-1]
  if not abs(theirs - ours) <= _SAME_UPDATE * abs(ours):
    sys.exit(
      f"update: {w.name}, {name}: expected an update that changes a sequence's "
      f"log-probability by {ours:.4f} within {_SAME_UPDATE:.0%}, got "
      f"{theirs:.4f}. It is not the same update."
    )


def report(seen: Measured) -> dict[str, dict]:
  """Prints a workload's table and returns the figures that have goals."""
  load = " ".join(f"{x:.2f}" for x in os.getloadavg())
  print(f"\n{seen.w.name}, medians of {len(seen.limits)} (spread); load {load}")
  head = ("rows/s", "GFLOP/s, useful")
  print(f"{'':16} {head[0]:>22} {head[1]:>20}   own is  other cores")
  ours = statistics.median(seen.rates(_OWN))
  for name in seen.turns:
    rates, others = seen.rates(name), seen.others(name)
    print(
      f"{name:16} {rollout.spread(rates, '.2f'):>22} "
      f"{rollout.spread(seen.useful(name), '.0f'):>20} "
      f"{ours / statistics.median(rates):7.2f}x {others:11.2f}"
      f"{' !' if others > _DISTURBED else ''}"
    )
  limit = rollout.spread(seen.limits, ".0f")
  print(f"{'limit, products':16} {'':22} {limit:>20}")
  if any(seen.others(name) > _DISTURBED for name in seen.turns):
    print("! was disturbed by others: no goal of this workload is judged")
  return figures(seen)


def figures(seen: Measured) -> dict[str, dict]:
  """Returns the figures of a workload by name.

  Returns:
    A `value`, the `goal`, what it is a ratio to (`peer`), and whether the goal
    is `met`; null what was not measured, and what others have disturbed. W4
    has no goals.
  """
  name = seen.w.name
  if name not in _PEER_GOAL:
    return {}
  ours = statistics.median(seen.rates(_OWN))
  rates = [seen.rates(peer) for peer in _PEERS]
  best = max(map(statistics.median, rates)) if all(rates) else None
  limit = statistics.median(seen.limits)
  part = statistics.median(seen.useful(_OWN)) / limit
  found = {
    f"{name}/of_best_peer": rollout.figure(
      None if best is None else ours / best, _PEER_GOAL[name], best
    ),
    f"{name}/of_products": rollout.figure(part, _RATE_GOAL, limit),
  }
  if any(seen.others(name) > _DISTURBED for name in seen.turns):
    found = {key: {**figure, "met": None} for key, figure in found.items()}
  return found


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line, measures, prints tables and a line of JSON."""
  chosen = rollout.asked(__doc__, arguments)
  found: dict[str, dict] = {}
  with tempfile.TemporaryDirectory(prefix="update-") as folder:
    for name in chosen.workloads:
      w = workloads.WORKLOADS[name]
      found |= report(measure(w, chosen, chosen.repeats, pathlib.Path(folder)))
  print(json.dumps(found))


if __name__ == "__main__":
  main()
