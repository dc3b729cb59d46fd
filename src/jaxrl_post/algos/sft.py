"""Supervised fine-tuning: the negative log-likelihood of given completions."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Sft:
  """Has no settings: every masked token counts alike."""

  def advantages(
    self, rewards: Float[Array, " B"], group_ids: Int[Array, " B"]
  ) -> Float[Array, " B"]:
    """Returns zeros: there is no reward."""
    del group_ids
    return jnp.zeros_like(rewards)

  def loss(
    self, inputs: types.LossInputs, num_tokens: Float[Array, ""]
  ) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Sums the negative log-likelihood over the step's denominator.

    Returns:
      The share of these rows in the mean over all trained tokens of the step,
      in nats a token, and no metrics.
    """
    keep = inputs.loss_mask > 0
    nll = -jnp.sum(jnp.where(keep, inputs.logprobs, 0.0))
    return nll / jnp.maximum(num_tokens, 1.0), {}
