"""Several sources as one, each with its share of the draws.

Which source a draw is of, and which of its items, follows from the draw's
number alone: nothing but the number is needed to go on.
"""

import dataclasses
import fractions
import math
import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from jaxrl_post import types
from jaxrl_post.data import sources as source_lib

# Longest pattern of sources that is laid out; it repeats after that.
MAX_PERIOD = 1_000_000


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Draws from several sources, by weights.

  Of the first n draws, the source with the share w of all weights has n * w, to
  within one, for every n. Each source is a pass of its own: every item once,
  then every item in another order. Small sources with large weights come around
  more often than others.

  Attributes:
    sources: what to draw from; not mixtures themselves.
    weights: of the draws, one for each source; None takes their sizes, so that
      all items come equally often.
  """

  sources: tuple[source_lib.Source, ...]
  weights: tuple[float, ...] | None = None

  def __post_init__(self) -> None:
    weights = self.weights
    positive = all(
      isinstance(w, int | float) and 0 < w < math.inf for w in weights or ()
    )
    nested = any(isinstance(source, Mixture) for source in self.sources)
    rules = (
      (bool(self.sources), "sources", "at least one", "none"),
      (not nested, "sources", "no mixture in a mixture", "one"),
      (
        weights is None or len(weights) == len(self.sources),
        "weights",
        f"one for each of {len(self.sources)} sources",
        weights,
      ),
      (positive, "weights", "numbers above 0", weights),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"mixture.{name}: expected {rule}, got {value}. Correct it."
        )

  def load(self) -> tuple[types.Example, ...]:
    """Reads all sources, one after the other; no weight is asked for."""
    return tuple(example for part in self.parts() for example in part)

  def parts(self) -> tuple[tuple[types.Example, ...], ...]:
    """Reads the examples of each source."""
    return tuple(source.load() for source in self.sources)


@types.host_record
class Order:
  """The place of the item that each draw takes; `order` makes it.

  Attributes:
    pattern: the source of each draw, which repeats behind its end.
    rank: how many draws of the same source are before it in the pattern.
    counts: draws of each source in the pattern.
    first: place of the first item of each source.
    passes: order of the items of each source, pass behind pass.
    length: number of draws.
  """

  pattern: np.ndarray
  rank: np.ndarray
  counts: np.ndarray
  first: tuple[int, ...]
  passes: tuple[grain.MapDataset, ...]
  length: int

  def __len__(self) -> int:
    """Counts the draws; `sys.maxsize` when they never end."""
    return self.length

  def __getitem__(self, draw: int) -> int:
    """Returns the place of an item; any draw, in any order."""
    period, at = divmod(draw, len(self.pattern))
    source = int(self.pattern[at])
    index = period * int(self.counts[source]) + int(self.rank[at])
    place: Any = self.passes[source][index]  # grain's elements have no type
    return self.first[source] + place


def order(
  sizes: Sequence[int],
  weights: Sequence[float] | None,
  *,
  seed: int,
  epochs: int | None,
) -> Order:
  """Sets the order of the draws of a mixture.

  Args:
    sizes: items of each source; their places follow each other.
    weights: as in `Mixture`.
    seed: of the order within each source.
    epochs: passes over a source; None never ends.

  Returns:
    Draws that end before the first one that would begin a further pass of any
    source: no item comes more than `epochs` times, and all shares hold to the
    end. With `weights` None every item then comes exactly `epochs` times.

  Raises:
    types.InputError: the weights have too many digits to be kept exactly.
  """
  counts = _whole(sizes if weights is None else weights)
  return laid_out(_pattern(counts), sizes, seed=seed, epochs=epochs)


def pattern(weights: Sequence[float]) -> np.ndarray:
  """Lays out sources by weights, so that no count is off its share by one.

  Args:
    weights: as in `Mixture`.

  Returns:
    The source of each of some draws, after which it repeats: each as often as
    its weight says, exactly.

  Raises:
    types.InputError: the weights have too many digits to be kept exactly.
  """
  return _pattern(_whole(weights))


def laid_out(
  pattern: np.ndarray, sizes: Sequence[int], *, seed: int, epochs: int | None
) -> Order:
  """Sets the order of draws whose sources are known.

  Args:
    pattern: the source of each draw, which repeats behind its end.
    sizes: items of each source; their places follow each other.
    seed: of the order within each source.
    epochs: passes over a source; None never ends.

  Returns:
    Draws that end before the first one that would begin a further pass of any
    source.
  """
  counts = np.bincount(pattern, minlength=len(sizes))
  rank = np.empty_like(pattern)
  length = sys.maxsize
  for i, (size, count) in enumerate(zip(sizes, counts.tolist(), strict=True)):
    where = np.flatnonzero(pattern == i)
    rank[where] = np.arange(count)
    if epochs is not None:
      periods, at = divmod(epochs * size, count)
      length = min(length, periods * len(pattern) + int(where[at]))
  passes = tuple(
    grain.MapDataset.source(range(size))
    .seed((seed + i) % 2**32)
    .shuffle()
    .repeat()
    for i, size in enumerate(sizes)
  )
  return Order(
    pattern=pattern,
    rank=rank,
    counts=counts,
    first=tuple(sum(sizes[:i]) for i in range(len(sizes))),
    passes=passes,
    length=length,
  )


def _whole(weights: Sequence[float]) -> list[int]:
  """Returns the smallest whole numbers in the ratios of some weights."""
  # By their digits: 0.1 is a tenth here, which no float is.
  exact = [fractions.Fraction(str(weight)) for weight in weights]
  scale = math.lcm(*(weight.denominator for weight in exact))
  whole = [int(weight * scale) for weight in exact]
  divisor = math.gcd(*whole)
  whole = [weight // divisor for weight in whole]
  if sum(whole) > MAX_PERIOD:
    raise types.InputError(
      "data.train.weights: expected ratios that come out even within "
      f"{MAX_PERIOD} draws, got {tuple(weights)}. Round them: 2 and 1 instead "
      "of 0.6666667 and 0.3333333, or leave them out."
    )
  return whole


def _pattern(counts: Sequence[int]) -> np.ndarray:
  """Lays out sources so that no count is ever off its share by one.

  Tijdeman's rule for the chairman assignment problem (Discrete Mathematics 32,
  1980): of the sources that have less than their share by enough, the one whose
  next draw is due first. With k sources, counts of the first n draws are off
  n * w by at most 1 - 1 / (2 k - 2).

  Args:
    counts: draws of each source.

  Returns:
    The source of each of `sum(counts)` draws, each as often as its count.
  """
  total, many = sum(counts), len(counts)
  pattern = np.zeros(total, np.int32)
  if many == 1:
    return pattern
  twice = 2 * many - 2
  common = math.lcm(*counts)
  spacing = [common // count for count in counts]
  drawn = [0] * many
  for n in range(1, total + 1):
    ready = [
      i
      for i in range(many)
      if twice * (n * counts[i] - drawn[i] * total) >= total
    ]
    chosen = min(ready, key=lambda i: (twice * (drawn[i] + 1) - 1) * spacing[i])
    pattern[n - 1] = chosen
    drawn[chosen] += 1
  return pattern
