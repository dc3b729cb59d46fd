"""Losses of single tokens from log-probabilities; minimised; no model inside.

Every function returns values at all positions that are finite wherever
`loss_mask` is 0, in the backward pass too: masked inputs are replaced before
the exponential, since 0 * inf is not 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post import types


def _log_ratio(
  upper: jax.Array, lower: jax.Array, mask: jax.Array
) -> jax.Array:
  keep = mask > 0
  return jnp.where(keep, upper, 0.0) - jnp.where(keep, lower, 0.0)


def clipped(
  inputs: types.LossInputs, *, clip_low: float, clip_high: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Computes PPO's clipped surrogate (Schulman et al. 2017, equation 7).

  Args:
    inputs: log-probabilities, advantages and mask.
    clip_low: distance below 1 at which the ratio of negative-advantage tokens
      stops to matter.
    clip_high: distance above 1, likewise for positive advantages; larger than
      `clip_low` it is DAPO's clip-higher (arXiv 2503.14476, equation 10).

  Returns:
    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with
    r = exp(logprobs - old_logprobs), and 1 where the clipped branch is the
    active one and differs, else 0; both 0 where the mask is 0.
  """
  ratio = jnp.exp(
    _log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.loss_mask)
  )
  free = -inputs.advantages * ratio
  bound = -inputs.advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  loss = jnp.maximum(free, bound) * inputs.loss_mask
  was_clipped = (bound > free).astype(jnp.float32) * inputs.loss_mask
  return loss, was_clipped


def truncated_weight(
  inputs: types.LossInputs, *, cap: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Weighs tokens for having been sampled by other weights or numerics.

  Truncated importance sampling between the trainer's policy before the update
  and the sampler, with no gradient through the weight. It is the behaviour
  weight of decoupled PPO (Hilton et al. 2021, arXiv 2110.00641) with a cap.

  Args:
    inputs: log-probabilities and mask.
    cap: largest weight.

  Returns:
    min(exp(old_logprobs - sampler_logprobs), cap), and 1 where the cap acts;
    both 0 where the mask is 0. The weight is 1 where the two agree.
  """
  weight = jnp.exp(
    _log_ratio(inputs.old_logprobs, inputs.sampler_logprobs, inputs.loss_mask)
  )
  weight = jax.lax.stop_gradient(weight)
  capped = (weight > cap).astype(jnp.float32) * inputs.loss_mask
  return jnp.minimum(weight, cap) * inputs.loss_mask, capped
