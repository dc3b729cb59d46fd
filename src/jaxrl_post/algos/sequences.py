"""Sums over sequences, of which a row of a batch may hold several."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types


def total(
  x: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """Adds up each segment of each row.

  Args:
    x: one number a token.
    segment_ids: which tokens of a row belong together, in [0, T].

  Returns:
    The sum over a token's segment, at each of its tokens.
  """
  return _each(jax.ops.segment_sum, x, segment_ids)


def largest(
  x: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns the largest number of a token's segment, at each of its tokens."""
  return _each(jax.ops.segment_max, x, segment_ids)


def _each(
  reduce: Callable[..., jax.Array], x: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  num = x.shape[1] + 1

  def row(x: jax.Array, ids: jax.Array) -> jax.Array:
    return reduce(x, ids, num)[ids]

  return jax.vmap(row)(x, segment_ids)


def mean(
  x: Float[Array, "B T"],
  mask: Float[Array, "B T"],
  segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T"]:
  """Averages each segment over its tokens in the mask; 0 where it has none.

  Args:
    x: one number a token; finite also where the mask is 0.
    mask: 1 on the tokens that count.
    segment_ids: as in `total`.

  Returns:
    The mean over a token's segment, at each of its tokens.
  """
  count = total(mask, segment_ids)
  return total(x * mask, segment_ids) / jnp.maximum(count, 1.0)


def gather(
  table: Float[Array, " N"], sequence: Int[Array, "B T"], fill: float = 0.0
) -> Float[Array, "B T"]:
  """Returns each token's entry in a table of sequences; `fill` where none."""
  return table.at[sequence].get(mode="fill", fill_value=fill)


def scatter(
  x: Float[Array, "B T"], sequence: Int[Array, "B T"], num: int
) -> Float[Array, " N"]:
  """Adds up the tokens of each sequence into a table of `num` of them."""
  return jnp.zeros(num, x.dtype).at[sequence].add(x, mode="drop")


class Rollouts(NamedTuple):
  """The rollouts of a step, each once: entry i is that of rollout id i.

  Attributes:
    rewards: what each has earned, of any token too; NaN where there is none.
    group_ids: of each; 0 where there is none.
  """

  rewards: Float[Array, " N"]
  group_ids: Int[Array, " N"]


def rollouts(
  inputs: types.Batch | types.AdvantageInputs, tokens: Float[Array, "B T"]
) -> Rollouts:
  """Returns the rollouts of a step, whose sequences each have the reward.

  Args:
    inputs: of the step.
    tokens: what single ones have earned, of any sequence of a rollout.
  """
  ids, num = inputs.rollout_ids, inputs.rewards.shape[0]
  valid = jnp.isfinite(inputs.rewards)
  found = jnp.where(valid, inputs.rewards, -jnp.inf)
  found = jax.ops.segment_max(found, ids, num)
  of_each = scatter(tokens, inputs.sequence, num)
  extra = jax.ops.segment_sum(of_each, ids, num)
  groups = jnp.where(valid, inputs.group_ids, 0)
  groups = jnp.maximum(jax.ops.segment_max(groups, ids, num), 0)
  return Rollouts(
    jnp.where(jnp.isfinite(found), found, jnp.nan) + extra, groups
  )
