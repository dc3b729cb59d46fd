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
repeats. In the same turns the rate of large float32 products is measured. The
peak of memory is of a process from its start, with compilers and libraries.

Useful operations are three times those of a forward pass over each row's prompt
and completion, with logits of completions only. Microbatches (`_ROWS`) are the
peers' best ones of an earlier study, and the best of three for ours on W1, W2
and W4. On W4 ours also runs with every completion padded to the longest.
torch computes no entropies, which TRL does, and pads to the longest of a
microbatch and not of a batch. Processes of JAX get huge pages for malloc.

The environments of the others are those of bench/rollout.py. --quick is a smoke
test.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rollout
import scored
import workloads

_HERE = pathlib.Path(__file__).resolve().parent
_OWN, _PEERS = "own", ("tunix", "torch")
_PEER_GOAL = {"W1": 2.0, "W2": 2.0, "W3": 1.8}
_RATE_GOAL = 0.65
# Of ours with each completion in a row of the longest, where lengths differ.
_PADDED, _PACKING_GOAL = "own,padded", 1.5
_DISTURBED = 0.1
_SAME_UPDATE = 0.1
# Rows of a microbatch.
_ROWS = {
  "own": {"W1": 32, "W2": 32, "W3": 8, "W4": 4},
  "tunix": {"W1": 32, "W2": 8, "W3": 4, "W4": 8},
  "torch": {"W1": 32, "W2": 8, "W3": 4, "W4": 8},
}
_SCRIPTS = {
  _OWN: ("own_update.py",),
  "tunix": ("peer_update_tunix.py",),
  "torch": ("peer_update_torch.py",),
}


def systems(
  w: workloads.Workload,
  chosen: argparse.Namespace,
  scripts: Mapping[str, Sequence[str]],
) -> list[rollout.System]:
  """Returns what takes turns on a workload.

  Args:
    w: the workload.
    chosen: the command line; whose Python is not given is left out.
    scripts: script and flags by name, ours first. A name starts with whose it
      is, up to a comma.
  """
  jax_cpu = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "JAX_PLATFORMS": "cpu",
  }
  source = {**jax_cpu, "PYTHONPATH": str(_HERE.parent / "src")}
  by_owner = {
    _OWN: (sys.executable, source),
    "tunix": (chosen.tunix, jax_cpu),
    "torch": (chosen.torch, {}),
  }
  found = []
  for name, (script, *flags) in scripts.items():
    owner = name.partition(",")[0]
    python, env = by_owner[owner]
    if python:
      rows = f"--rows={_ROWS[owner][w.name]}"
      run = (python, str(_HERE / script), w.name, rows, *flags)
      found.append(rollout.System(name, run, env))
  return found


@dataclasses.dataclass(frozen=True)
class Measured:
  """What a workload gave, a value for each repeat.

  Attributes:
    w: the workload.
    turns: by system, the answers to its steps.
    limits: GFLOP/s of large products.
    memory: by system, its peak of resident bytes.
    flops: operations that a step cannot do without, of the tokens of each
      completion.
  """

  w: workloads.Workload
  turns: Mapping[str, list[dict[str, Any]]]
  limits: list[float]
  memory: Mapping[str, int]
  flops: Callable[[workloads.Workload, Sequence[int]], int]

  def rates(self, name: str) -> list[float]:
    """Returns the rows a second of a system; none if it was left out."""
    turns = self.turns.get(name, [])
    return [len(turn["lengths"]) / turn["seconds"] for turn in turns]

  def rate(self, names: Sequence[str]) -> float | None:
    """Returns the best median rate of systems; None if one was left out."""
    rates = [self.rates(name) for name in names]
    return max(map(statistics.median, rates)) if all(rates) else None

  def useful(self, name: str) -> list[float]:
    """Returns a system's useful operations a second, in GFLOP/s."""
    return [
      self.flops(self.w, turn["lengths"]) / turn["seconds"] / 1e9
      for turn in self.turns[name]
    ]

  def others(self, name: str) -> float:
    """Returns the cores that others took in a system's median turn."""
    return statistics.median(turn["others"] for turn in self.turns[name])

  @property
  def disturbed(self) -> bool:
    """Whether others took so much that rates are not judged."""
    return any(self.others(name) > _DISTURBED for name in self.turns)


def measure(
  w: workloads.Workload,
  among: Sequence[rollout.System],
  repeats: int,
  folder: pathlib.Path,
  *,
  alike: Callable[[workloads.Workload, Sequence[rollout.Process], int], None],
  flops: Callable[[workloads.Workload, Sequence[int]], int],
) -> Measured:
  """Runs a workload: all systems in turn, as often as it is repeated.

  Args:
    w: the workload.
    among: the systems, ours first.
    repeats: turns of each.
    folder: for what they say.
    alike: is called as each is ready, with all that are so far and the number
      of a step that is not measured; has the newest do that step, which
      compiles, and ends the run unless it does the same work as the first.
    flops: see `Measured`.
  """
  running: list[rollout.Process] = []
  limits = []
  try:
    for system in among:
      process = rollout.Process(system, folder)
      running.append(process)
      print(f"{w.name} {process.name}: {process.ready['version']}", flush=True)
      rollout.same_model(w, process.name, [p.ready["check"] for p in running])
      alike(w, running, repeats)
    turns: dict[str, list] = {process.name: [] for process in running}
    for step in range(repeats):
      limits.append(running[0].ask("limits")["square"])
      for process in running:
        turns[process.name].append(process.turn(step))
    memory = {p.name: p.ask("memory")["memory"] for p in running}
  finally:
    for process in running:
      process.close()
  return Measured(w, turns, limits, memory, flops)


def _updates_alike(
  w: workloads.Workload, running: Sequence[rollout.Process], step: int
) -> None:
  """Has the newest system do an update, which must be that of the first."""
  newest = running[-1]
  newest.ask(step)
  newest.ready["after"] = newest.ask("check")["check"]
  same_update(
    w,
    newest.name,
    [process.ready["check"] for process in running],
    [process.ready["after"] for process in running],
  )


def same_update(
  w: workloads.Workload,
  name: str,
  before: Sequence[float],
  after: Sequence[float],
) -> None:
  """Ends the run when the newest system makes another update.

  Args:
    w: the workload.
    name: of the newest system.
    before: log-probability of the checked sequence by each system.
    after: the same after one update.
  """
  ours, theirs = after[0] - before[0], after[-1] - before[-1]
  if not abs(theirs - ours) <= _SAME_UPDATE * abs(ours):
    sys.exit(
      f"{w.name}, {name}: expected an update that changes a sequence's "
      f"log-probability by {ours:.4f} within {_SAME_UPDATE:.0%}, got "
      f"{theirs:.4f}. It is not the same update."
    )


def table(seen: Measured) -> None:
  """Prints what a workload gave."""
  load = " ".join(f"{x:.2f}" for x in os.getloadavg())
  print(f"\n{seen.w.name}, medians of {len(seen.limits)} (spread); load {load}")
  head = ("rows/s", "GFLOP/s, useful")
  print(f"{'':17} {head[0]:>22} {head[1]:>20}   own is  peak GiB  other cores")
  ours = statistics.median(seen.rates(_OWN))
  for name in seen.turns:
    rates, others = seen.rates(name), seen.others(name)
    print(
      f"{name:17} {rollout.spread(rates, '.2f'):>22} "
      f"{rollout.spread(seen.useful(name), '.0f'):>20} "
      f"{ours / statistics.median(rates):7.2f}x "
      f"{seen.memory[name] / 2**30:9.2f} {others:12.2f}"
      f"{' !' if others > _DISTURBED else ''}"
    )
  limit = rollout.spread(seen.limits, ".0f")
  print(f"{'limit, products':17} {'':22} {limit:>20}")
  if seen.disturbed:
    print("! was disturbed by others: no rate of this workload is judged")


def judged(seen: Measured, figures: dict[str, dict]) -> dict[str, dict]:
  """Returns figures of rates, open where others have disturbed them."""
  if not seen.disturbed:
    return figures
  return {key: {**figure, "met": None} for key, figure in figures.items()}


def of_best_peer(
  seen: Measured, ours: Sequence[str], peers: Sequence[str], goal: float
) -> dict[str, Any]:
  """Returns the figure of our best rate over the best of peers."""
  own, best = seen.rate(ours), seen.rate(peers)
  value = None if own is None or best is None else own / best
  return rollout.figure(value, goal, best)


def figures(seen: Measured) -> dict[str, dict]:
  """Returns the figures of a workload by name.

  Returns:
    A `value`, the `goal`, what it is a ratio to (`peer`), and whether the goal
    is `met`; null what was not measured, and what others have disturbed. Where
    lengths differ, packing is compared with padding, and there is no other
    goal.
  """
  name = seen.w.name
  if seen.w.ragged:
    gain = of_best_peer(seen, (_OWN,), (_PADDED,), _PACKING_GOAL)
    return judged(seen, {f"{name}/of_padded": gain})
  limit = statistics.median(seen.limits)
  part = statistics.median(seen.useful(_OWN)) / limit
  found = {
    f"{name}/of_best_peer": of_best_peer(
      seen, (_OWN,), _PEERS, _PEER_GOAL[name]
    ),
    f"{name}/of_products": rollout.figure(part, _RATE_GOAL, limit),
  }
  return judged(seen, found)


def bench(
  w: workloads.Workload, chosen: argparse.Namespace, folder: pathlib.Path
) -> dict[str, dict]:
  """Measures a workload, prints its table and returns its figures."""
  scripts = dict(_SCRIPTS)
  if w.ragged:
    scripts[_PADDED] = ("own_update.py", "--padded")
  seen = measure(
    w,
    systems(w, chosen, scripts),
    chosen.repeats,
    folder,
    alike=_updates_alike,
    flops=scored.flops,
  )
  table(seen)
  return figures(seen)


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line and runs."""
  rollout.run(bench, __doc__, arguments)


if __name__ == "__main__":
  main()
