"""Times whole steps of GRPO beside Tunix and torch.

    python bench/step.py [--quick] [--workloads W1 W2] [--repeats N]
      [--tunix PYTHON] [--torch PYTHON]

From prompts to new weights, in lockstep: a group of completions of each prompt
of a workload is sampled, rewarded with its share of even ids, and trained on by
one update, whose weights the next step samples with. All is in the time, for
us also publishing from trainer to engine. Systems, workloads and how they take
turns are those of bench/rollout.py and bench/update.py, and so are the settings
of each; what both of those run in several ways is so here too, and the best way
of a system counts.

All start from the same weights and do the same number of steps; completions are
each system's own. After one step the log-probability of a sequence must have
changed for all, and on W1 the sampler, which made the same completions twice,
must make others of the same prompts.

Useful operations are those of both other benches. A peak of memory is of a
process from its start: weights, compilers and libraries are in it. Those of W4
are medians of about half as many repeats. --quick is a smoke test.
"""

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence

import rollout
import scored
import update
import workloads

_PEER_GOAL = {"W1": 2.0, "W2": 2.0, "W3": 1.8, "W4": 3.0}
_MEMORY_GOAL = 1.0
# The workload whose sampler is looked at: on others that takes longer.
_LOOKED_INTO = "W1"


def scripts(w: workloads.Workload) -> Mapping[str, Sequence[str]]:
  """Returns script and flags of all that takes turns, our step first."""
  found = {
    "own": ("own_step.py",),
    "tunix": ("peer_step_tunix.py",),
    "torch": ("peer_step_torch.py",),
  }
  if w.ragged:
    found |= {
      "own, 32 rows": ("own_step.py", "--engine_rows=32", "--block=8"),
      "torch, continuous": ("peer_step_torch.py", "--continuous"),
    }
  return found


def flops(w: workloads.Workload, made: Sequence[int]) -> int:
  """Counts the operations that sampling and training cannot do without.

  Args:
    w: the workload.
    made: tokens of each completion.
  """
  return workloads.flops(w, made) + scored.flops(w, made)


def steps_alike(
  w: workloads.Workload, running: Sequence[rollout.Process], step: int
) -> None:
  """Has the newest system do a step, which must change its sampler."""
  newest = running[-1]
  looks = w.name == _LOOKED_INTO
  draws = [newest.ask("draw")["draw"] for _ in range(2 * looks)]
  newest.ask(step)
  after = newest.ask("check")["check"]
  draws += [newest.ask("draw")["draw"] for _ in range(looks)]
  changed(w, newest.name, (newest.ready["check"], after), draws)


def changed(
  w: workloads.Workload,
  name: str,
  checks: tuple[float, float],
  draws: Sequence[int],
) -> None:
  """Ends the run when a sampler still has the weights of before a step.

  Args:
    w: the workload.
    name: of the system.
    checks: log-probability of the checked sequence before and after.
    draws: what tells apart the completions of the same prompts, twice before
      and once after; empty if they were not made.
  """
  before, after = checks
  if not abs(after - before) > 0:
    sys.exit(
      f"{w.name}, {name}: expected a step that changes a sequence's "
      f"log-probability of {before:.4f}, got {after:.4f}. It trains nothing."
    )
  if draws and draws[0] != draws[1]:
    sys.exit(
      f"{w.name}, {name}: expected the same completions of the same weights, "
      "got others. The step is not its only seed."
    )
  if draws and draws[1] == draws[2]:
    sys.exit(
      f"{w.name}, {name}: expected other completions after a step, got the "
      "same. The sampler does not have the new weights."
    )


def figures(seen: update.Measured) -> dict[str, dict]:
  """Returns the figures of a workload by name.

  Returns:
    A `value`, the `goal`, what it is a ratio to (`peer`), and whether the goal
    is `met`; null what was not measured, and rates that others have disturbed.
    `of_least_memory` is the peak of our faster way, in GiB, over the least of
    all peers; its goal is to be below.
  """
  name, names = seen.w.name, tuple(scripts(seen.w))
  ours = [n for n in names if n.startswith("own")]
  peers = [n for n in names if n not in ours]
  rate = update.of_best_peer(seen, ours, peers, _PEER_GOAL[name])
  own = max(ours, key=lambda n: seen.rate((n,)) or 0.0)
  used = [seen.memory.get(peer) for peer in peers]
  least = None if None in used else min(filter(None, used)) / 2**30
  memory = rollout.figure(
    None if least is None else seen.memory[own] / 2**30 / least,
    _MEMORY_GOAL,
    least,
    lambda value, goal: value < goal,
  )
  return {
    **update.judged(seen, {f"{name}/of_best_peer": rate}),
    f"{name}/of_least_memory": memory,
  }


def bench(
  w: workloads.Workload, chosen: argparse.Namespace, folder: pathlib.Path
) -> dict[str, dict]:
  """Measures a workload, prints its table and returns its figures."""
  seen = update.measure(
    w,
    update.systems(w, chosen, scripts(w)),
    rollout.repeats(w, chosen),
    folder,
    alike=steps_alike,
    flops=flops,
  )
  update.table(seen)
  return figures(seen)


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line and runs."""
  rollout.run(bench, __doc__, arguments)


if __name__ == "__main__":
  main()
