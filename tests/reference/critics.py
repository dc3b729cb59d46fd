"""A critic the slow way: float64, loops over tokens, one sequence at a time.

Written from the formulas alone; reads the same weights as the package, and no
code of it.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Scored:
  """One sequence: the values of its trained tokens, in order."""

  values: list[float]
  old_values: list[float]
  returns: list[float]


def read(hidden: np.ndarray, head: np.ndarray, trained: list[int]):
  """Reads the values of some tokens of a sequence off its hidden states.

  Args:
    hidden: [T, D], behind each token of the sequence, which starts at 0.
    head: [D].
    trained: places of tokens; their value is that of the state before them.
  """
  return [float(sum(hidden[place - 1] * head)) for place in trained]


def targets(rewards, values, *, gamma: float, decay: float) -> list[float]:
  """Lambda-returns by their recursion, R_t = r + g ((1 - l) V' + l R')."""
  found = [0.0] * len(values)
  after_value, after_return = 0.0, 0.0
  for t in reversed(range(len(values))):
    mixed = (1 - decay) * after_value + decay * after_return
    found[t] = rewards[t] + gamma * mixed
    after_value, after_return = values[t], found[t]
  return found


def loss(batch: list[Scored], clip: float | None) -> tuple[float, list, float]:
  """Returns the loss, its slope by each value, and the share of clipped."""
  count = sum(len(s.values) for s in batch)
  total, slopes, clipped = 0.0, [], 0
  for s in batch:
    row = []
    for v, old, r in zip(s.values, s.old_values, s.returns, strict=True):
      near = v if clip is None else min(max(v, old - clip), old + clip)
      free, bound = 0.5 * (v - r) ** 2, 0.5 * (near - r) ** 2
      slope = 0.0 if bound > free else v - r
      clipped += bound > free
      total += max(free, bound) / count
      row.append(slope / count)
    slopes.append(row)
  return total, slopes, clipped / count


def explained_variance(returns: list[float], values: list[float]) -> float:
  left = [r - v for r, v in zip(returns, values, strict=True)]
  return 1.0 - float(np.var(left)) / float(np.var(returns))
