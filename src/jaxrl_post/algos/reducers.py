"""How the losses of single tokens become the loss of an optimizer step.

A reducer gives each trained token its share in the loss, once, for the whole
step. The loss is the sum of token losses times shares, so how the step is cut
into microbatches, rows or devices changes neither it nor its gradient.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.algos import sequences


class Counts(NamedTuple):
  """What the trained tokens of a step are shares of.

  Attributes:
    mask: 1 on tokens that train.
    tokens: trained tokens of the rollout of each token, in whatever sequences.
    rollouts: how many rollouts have some; at least 1.
  """

  mask: Float[Array, "B T"]
  tokens: Float[Array, "B T"]
  rollouts: Float[Array, ""]


def count(
  mask: Float[Array, "B T"],
  sequence: Int[Array, "B T"],
  rollout_ids: Int[Array, " N"],
) -> Counts:
  """Counts the trained tokens of a step.

  Args:
    mask: 1 on tokens that train.
    sequence: which sequence each token is of; N where none is.
    rollout_ids: which sequences are of one rollout.
  """
  size = rollout_ids.shape[0]
  tokens = sequences.scatter(mask, sequence, size)
  tokens = jax.ops.segment_sum(tokens, rollout_ids, size)
  rollouts = jnp.maximum(jnp.sum((tokens > 0).astype(jnp.float32)), 1.0)
  own = sequences.gather(tokens[rollout_ids], sequence)
  return Counts(mask, own, rollouts)


@dataclasses.dataclass(frozen=True)
class TokenMean:
  """Every trained token of the step counts alike (DAPO, section 3.3)."""

  def shares(self, counts: Counts) -> Float[Array, "B T"]:
    """Returns 1 / trained tokens of the step."""
    return counts.mask / jnp.maximum(jnp.sum(counts.mask), 1.0)


@dataclasses.dataclass(frozen=True)
class SequenceMean:
  """The mean over rollouts of the mean over their tokens (GRPO, equation 3)."""

  def shares(self, counts: Counts) -> Float[Array, "B T"]:
    """Returns 1 / (rollouts x trained tokens of the rollout)."""
    return counts.mask / (jnp.maximum(counts.tokens, 1.0) * counts.rollouts)


@dataclasses.dataclass(frozen=True)
class SequenceSum:
  """The mean over rollouts of the sum over their tokens."""

  def shares(self, counts: Counts) -> Float[Array, "B T"]:
    """Returns 1 / rollouts."""
    return counts.mask / counts.rollouts


@dataclasses.dataclass(frozen=True)
class Constant:
  """The sum over rollouts x a constant (Dr.GRPO, arXiv 2503.20783).

  Attributes:
    length: the constant, in tokens: usually the longest completion, whatever
      the width of a batch.
  """

  length: int

  def __post_init__(self) -> None:
    if self.length < 1:
      raise types.InputError(
        f"algo.reducer.length: expected >= 1, got {self.length}. The longest "
        "completion is usual."
      )

  def shares(self, counts: Counts) -> Float[Array, "B T"]:
    """Returns 1 / (rollouts x length)."""
    return counts.mask / (counts.rollouts * self.length)
