"""How the losses of single tokens become the loss of an optimizer step.

A reducer gives each trained token its share in the loss, once, for the whole
step. The loss is the sum of token losses times shares, so how the step is cut
into microbatches, rows or devices changes neither it nor its gradient.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.algos import sequences


@dataclasses.dataclass(frozen=True)
class TokenMean:
  """Every trained token of the step counts alike (DAPO, section 3.3)."""

  def shares(
    self,
    mask: Float[Array, "B T"],
    sequence: Int[Array, "B T"],
    rollout_ids: Int[Array, " N"],
  ) -> Float[Array, "B T"]:
    """Returns 1 / trained tokens of the step."""
    del sequence, rollout_ids
    return mask / jnp.maximum(jnp.sum(mask), 1.0)


@dataclasses.dataclass(frozen=True)
class SequenceMean:
  """The mean over rollouts of the mean over their tokens (GRPO, equation 3)."""

  def shares(
    self,
    mask: Float[Array, "B T"],
    sequence: Int[Array, "B T"],
    rollout_ids: Int[Array, " N"],
  ) -> Float[Array, "B T"]:
    """Returns 1 / (rollouts x trained tokens of the rollout)."""
    count, num = _counts(mask, sequence, rollout_ids)
    return mask / (jnp.maximum(count, 1.0) * num)


@dataclasses.dataclass(frozen=True)
class SequenceSum:
  """The mean over rollouts of the sum over their tokens."""

  def shares(
    self,
    mask: Float[Array, "B T"],
    sequence: Int[Array, "B T"],
    rollout_ids: Int[Array, " N"],
  ) -> Float[Array, "B T"]:
    """Returns 1 / rollouts."""
    _, num = _counts(mask, sequence, rollout_ids)
    return mask / num


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

  def shares(
    self,
    mask: Float[Array, "B T"],
    sequence: Int[Array, "B T"],
    rollout_ids: Int[Array, " N"],
  ) -> Float[Array, "B T"]:
    """Returns 1 / (rollouts x length)."""
    _, num = _counts(mask, sequence, rollout_ids)
    return mask / (num * self.length)


def _counts(
  mask: jax.Array, sequence: jax.Array, rollout_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Counts tokens and rollouts.

  Returns:
    Trained tokens of the rollout of each token, in whatever sequences they are;
    and how many rollouts have some, at least 1.
  """
  size = rollout_ids.shape[0]
  tokens = sequences.scatter(mask, sequence, size)
  tokens = jax.ops.segment_sum(tokens, rollout_ids, size)
  num = jnp.maximum(jnp.sum((tokens > 0).astype(jnp.float32)), 1.0)
  return sequences.gather(tokens[rollout_ids], sequence), num
