"""The batches that bench/update.py and bench/step.py have systems train on.

Needs only NumPy: scripts import it in the environments of other libraries. As
in `workloads`, a system is a process that answers orders, one a line. By hand:
`echo 0 | python bench/peer_update_torch.py W1`.
"""

import argparse
import dataclasses
import json
import resource
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import workloads

LEARNING_RATE = 1e-4
CLIP = 0.2
_SEED = 1234


@dataclasses.dataclass(frozen=True)
class Batch:
  """Completions with rewards; rows of a group lie side by side.

  Attributes:
    prompts: of each row, ids.
    completions: of each row, ids.
    rewards: of each row.
  """

  prompts: list[list[int]]
  completions: list[list[int]]
  rewards: list[float]

  def advantages(self, group: int) -> np.ndarray:
    """Returns rewards less their group's mean, over its deviation."""
    rewards = np.asarray(self.rewards, np.float32).reshape(-1, group)
    centred = rewards - rewards.mean(1, keepdims=True)
    scale = rewards.std(1, keepdims=True, ddof=1) + 1e-4
    return (centred / scale).ravel()


def batch(w: workloads.Workload, step: int) -> Batch:
  """Draws the batch of a step: random completions of the workload's lengths."""
  rng = np.random.default_rng((_SEED, 11, step))
  return Batch(
    [row for row in workloads.prompts(w, step) for _ in range(w.group)],
    [
      rng.integers(1, w.vocab, length).tolist()
      for length in workloads.lengths(w, step)
    ],
    rng.random(w.rows).tolist(),
  )


def earned(
  w: workloads.Workload,
  prompts: Sequence[list[int]],
  completions: Sequence[list[int]],
) -> Batch:
  """Rewards completions with their share of even ids.

  Args:
    w: the workload.
    prompts: of a step, each once.
    completions: a group of each prompt, in their order.
  """
  return Batch(
    [prompt for prompt in prompts for _ in range(w.group)],
    list(completions),
    [sum(id_ % 2 == 0 for id_ in row) / len(row) for row in completions],
  )


def flops(w: workloads.Workload, made: Sequence[int]) -> int:
  """Counts the operations that one update cannot do without.

  Args:
    w: the workload.
    made: tokens of each completion.

  Returns:
    Floating-point operations, three times those of a forward pass over prompt
    and completion of every row, with logits of the completions only; padding,
    and what is computed twice, is not counted.
  """
  sizes = [w.prompt_len + count for count in made]
  seen = sum(size * (size + 1) // 2 for size in sizes)
  products = 2 * w.layers * w.layer_weights * sum(sizes)
  attention = 4 * w.layers * w.heads * w.head_width * seen
  return 3 * (products + attention + 2 * w.vocab * w.width * sum(made))


def asked(
  about: str | None, **more: Mapping[str, Any]
) -> tuple[workloads.Workload, argparse.Namespace]:
  """Reads the command line of a system.

  Args:
    about: what it does; the first line is shown.
    more: flags of this system, each with what `add_argument` takes.

  Returns:
    The workload, and all that was chosen: `rows` of a microbatch, and `more`.
  """
  first = (about or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=first)
  parser.add_argument("workload", choices=sorted(workloads.WORKLOADS))
  parser.add_argument("--rows", type=int, help="of a microbatch; default all")
  for name, options in more.items():
    parser.add_argument(f"--{name}", **options)
  chosen = parser.parse_args()
  w = workloads.WORKLOADS[chosen.workload]
  chosen.rows = chosen.rows or w.rows
  return w, chosen


def serve(
  w: workloads.Workload,
  update: Callable[[Batch], None],
  *,
  check: Callable[[], float],
  version: str,
  others: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
) -> None:
  """Answers orders until there are no more.

  Args:
    w: the workload.
    update: trains on a batch and returns when the new weights are there; what
      it takes, from lists of ids, is what is timed.
    check: sum of the log-probabilities of `workloads.checked`, in nats, under
      the weights as they are; also what the order `check` is answered with.
    version: what is measured.
    others: what other orders are answered with. A number is a step.
  """
  known = _orders(check, others)
  _say({"check": check(), "version": version})
  for line in sys.stdin:
    order = line.strip()
    if not order.isdecimal():
      _say(known[order]())
      continue
    given = batch(w, int(order))
    begun = time.perf_counter()
    update(given)
    seconds = time.perf_counter() - begun
    _say({"seconds": seconds, "lengths": list(map(len, given.completions))})


def serve_steps(
  w: workloads.Workload,
  generate: Callable[[int, list[list[int]]], list[list[int]]],
  update: Callable[[Batch], None],
  *,
  check: Callable[[], float],
  version: str,
  others: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
) -> None:
  """Answers orders, a number with a whole step, until there are no more.

  A step samples, rewards by `earned`, and trains; all of it is timed, and its
  answer is that of `workloads.serve`. The order `draw` tells completions of
  step 0 apart from others: it only samples.

  Args:
    w: the workload.
    generate: makes the completions of a step's prompts with the newest weights
      of the sampler. The step is the only seed.
    update: trains on a batch and returns when the sampler has the new weights.
    check: as `serve` has it, under the weights of the sampler.
    version: what is measured.
    others: what other orders are answered with.
  """

  def step(number: int, prompts: list[list[int]]) -> list[list[int]]:
    made = generate(number, prompts)
    update(earned(w, prompts, made))
    return made

  def draw() -> dict[str, int]:
    made = generate(0, workloads.prompts(w, 0))
    return {"draw": zlib.crc32(json.dumps(made).encode())}

  workloads.serve(
    w,
    step,
    check=check(),
    version=version,
    others=_orders(check, {"draw": draw, **(others or {})}),
  )


def _orders(
  check: Callable[[], float],
  others: Mapping[str, Callable[[], Mapping[str, Any]]] | None,
) -> dict[str, Callable[[], Mapping[str, Any]]]:
  """Returns what is answered besides steps; `memory` is the peak in bytes."""

  def memory() -> dict[str, int]:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory": used * 1024}

  return {
    "check": lambda: {"check": check()},
    "memory": memory,
    **(others or {}),
  }


def _say(answer: Mapping[str, Any]) -> None:
  print(json.dumps(answer), flush=True)
