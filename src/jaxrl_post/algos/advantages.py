"""Rewards to advantages.

Group-relative baseline of GRPO (Shao et al. 2024, arXiv 2402.03300, section
4.1.2). The standard deviation is the sample one, dividing by n - 1, as in TRL,
verl and slime.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def group_advantages(
  rewards: Float[Array, " B"],
  group_ids: Int[Array, " B"],
  *,
  scale: Literal["std", "none"] = "std",
  eps: float = 1e-6,
) -> Float[Array, " B"]:
  """Scores each rollout against the other rollouts of its own prompt.

  Args:
    rewards: one number a row, in the task's unit; NaN or infinite where there
      is none. Such rows do not enter the statistics of their group.
    group_ids: rows of one group share an id in [0, B); order carries no
      meaning.
    scale: "std" divides by the group's sample standard deviation plus `eps`,
      "none" keeps the unit of the rewards.
    eps: added to the standard deviation.

  Returns:
    Advantages that average to zero over each group. Exactly zero for rows
    without a reward, for groups of one, and where all rewards of a group agree.
  """
  num = rewards.shape[0]
  valid = jnp.isfinite(rewards)
  rewards = jnp.where(valid, rewards, 0.0)

  def total(x: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x, group_ids, num)

  count = total(valid.astype(jnp.float32))
  mean = total(rewards) / jnp.maximum(count, 1.0)
  centred = jnp.where(valid, rewards - mean[group_ids], 0.0)
  # Equal rewards leave rounding dust, which its own tiny deviation would blow
  # up to an advantage near one. So agreement is decided on the rewards.
  top = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), group_ids, num)
  low = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), group_ids, num)
  centred = jnp.where((top > low)[group_ids], centred, 0.0)
  if scale == "none":
    return centred
  variance = total(centred * centred) / jnp.maximum(count - 1.0, 1.0)
  return centred / (jnp.sqrt(variance) + eps)[group_ids]
