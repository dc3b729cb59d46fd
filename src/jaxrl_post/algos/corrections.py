"""Weights for tokens that another policy sampled than the one that is trained.

Tokens come from older weights, or from an engine whose numerics differ. A
correction compares the proximal policy (`old_logprobs`: the trainer's, before
the update) with the sampler and weighs or leaves out what is too far off. All
of them are 1 where the two agree, and carry no gradient.
"""

import dataclasses
import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post import types
from jaxrl_post.algos import losses, sequences

Level: TypeAlias = Literal["token", "sequence", "geometric"]
Action: TypeAlias = Literal["truncate", "mask", "reject"]

# Of a token: its weight, and 1 where the correction has changed or dropped it.
Weights = tuple[Float[Array, "B T"], Float[Array, "B T"]]


@dataclasses.dataclass(frozen=True)
class Importance:
  """Importance weights w = proximal / sampler, bounded in one of three ways.

  level "token" with "truncate" is TIS, with "mask" MIS and IcePop; with
  "reject" a weight only decides: rejection sampling, at level "geometric" the
  `geo_rs` of verl.

  Attributes:
    level: what is compared: each "token"; the whole "sequence", the product
      over its trained tokens; or their "geometric" mean.
    action: "truncate" uses min(w, high); "mask" uses w in [low, high] and drops
      the others; "reject" drops the others and uses 1.
    high: upper bound.
    low: lower bound; "truncate" raises smaller weights to it.
  """

  level: Level = "token"
  action: Action = "truncate"
  high: float = 2.0
  low: float = 0.0

  def __post_init__(self) -> None:
    losses.check_choice("algo.correction.level", self.level, Level)
    losses.check_choice("algo.correction.action", self.action, Action)
    if not 0 <= self.low <= 1 <= self.high:
      raise types.InputError(
        f"algo.correction: expected 0 <= low <= 1 <= high, got low {self.low} "
        f"and high {self.high}. Bounds that leave out 1 would change tokens "
        "that need no correction."
      )

  def weights(self, inputs: types.LossInputs) -> Weights:
    """Returns the weights, and where the bounds act; both 0 off the mask."""
    mask = inputs.loss_mask
    gap = losses.difference(inputs.old_logprobs, inputs.sampler_logprobs, mask)
    if self.level == "sequence":
      gap = sequences.total(gap, inputs.segment_ids)
    elif self.level == "geometric":
      gap = sequences.mean(gap, mask, inputs.segment_ids)
    gap = jnp.where(mask > 0, gap, 0.0)
    weight = jax.lax.stop_gradient(jnp.exp(jnp.minimum(gap, losses.LARGEST)))
    outside = (weight < self.low) | (weight > self.high)
    # A NaN of the sampler stays one, so that the update is skipped.
    one = jnp.where(jnp.isnan(weight), weight, 1.0)
    if self.action == "truncate":
      used = jnp.clip(weight, self.low, self.high)
    else:
      kept = weight if self.action == "mask" else one
      used = jnp.where(outside, 0.0, kept)
    return used * mask, jnp.where(outside, mask, 0.0)


@dataclasses.dataclass(frozen=True)
class OffPolicyMask:
  """Drops bad sequences that have become unlikely (OPSM; DeepSeek-V3.2).

  Attributes:
    delta: most that the log-probability of a token of a negative-advantage
      sequence may have fallen since the sampler, on average, in nats.
  """

  delta: float = 1e-4

  def __post_init__(self) -> None:
    if not 0 <= self.delta < math.inf:
      raise types.InputError(
        f"algo.correction.delta: expected >= 0, got {self.delta}. 1e-4 is "
        "usual."
      )

  def weights(self, inputs: types.LossInputs) -> Weights:
    """Returns 0 on the tokens of those sequences, else 1; and which they are.

    A sequence's advantage is the mean over its trained tokens.
    """
    mask, ids = inputs.loss_mask, inputs.segment_ids
    fall = losses.difference(inputs.sampler_logprobs, inputs.logprobs, mask)
    fall = sequences.mean(jax.lax.stop_gradient(fall), mask, ids)
    advantage = jnp.where(mask > 0, inputs.advantages, 0.0)
    bad = sequences.mean(advantage, mask, ids) < 0
    dropped = jnp.where(bad & (fall > self.delta), mask, 0.0)
    return mask - dropped + 0.0 * fall * mask, dropped
