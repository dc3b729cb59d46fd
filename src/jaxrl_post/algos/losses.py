"""Losses of single tokens from log-probabilities; minimised; no model inside.

The ratio says how much more probable a token, or its sequence, is under the
weights that are trained; the trust region how far that may carry the update.

Every function returns values at all positions that are finite wherever
`loss_mask` is 0, in the backward pass too: masked inputs are replaced before
the exponential, since 0 * inf is not 0.
"""

import dataclasses
import math
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post import types
from jaxrl_post.algos import sequences

Level: TypeAlias = Literal["token", "sequence", "sequence_token"]

# Of a token: its loss, and 1 where the trust region has changed its gradient.
TokenLosses = tuple[Float[Array, "B T"], Float[Array, "B T"]]


# Logarithms of ratios and weights act as this at most: one token whose numbers
# leave float32 would cost the whole update.
LARGEST = 20.0


def difference(
  upper: jax.Array, lower: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns upper - lower on the mask and 0 off it, whatever they are there."""
  keep = mask > 0
  return jnp.where(keep, upper, 0.0) - jnp.where(keep, lower, 0.0)


def masked(inputs: types.LossInputs) -> types.LossInputs:
  """Returns the inputs with 0 wherever the mask is 0, whatever was there."""
  names = ["logprobs", "entropy", "old_logprobs", "sampler_logprobs"]
  names += ["advantages", "lag"]
  if inputs.reference_logprobs is not None:
    names.append("reference_logprobs")
  keep = inputs.loss_mask > 0
  found = {name: jnp.where(keep, getattr(inputs, name), 0.0) for name in names}
  return dataclasses.replace(inputs, **found)


def check_choice(where: str, value: str, choices: Any) -> None:
  """Refuses a word that is none of a `Literal`'s.

  Args:
    where: the setting's name.
    value: what was given.
    choices: the `Literal`.

  Raises:
    InputError: names the setting and what it may be.
  """
  if value not in get_args(choices):
    allowed = ", ".join(get_args(choices))
    raise types.InputError(
      f"{where}: expected one of {allowed}, got {value}. Correct the word."
    )


def log_ratio(
  inputs: types.LossInputs,
  level: Level = "token",
) -> Float[Array, "B T"]:
  """Compares the weights that are trained with those before the update.

  Args:
    inputs: log-probabilities and mask.
    level: "token" compares the token; "sequence" the geometric mean over its
      sequence (GSPO, arXiv 2507.18071, equation 7); "sequence_token" has the
      value of the latter and the gradient of the token's own (its equation 14).

  Returns:
    The logarithm of the ratio; 0 where the mask is 0.
  """
  own = difference(inputs.logprobs, inputs.old_logprobs, inputs.loss_mask)
  if level == "token":
    return own
  whole = sequences.mean(own, inputs.loss_mask, inputs.segment_ids)
  whole = whole * inputs.loss_mask
  if level == "sequence":
    return whole
  return jax.lax.stop_gradient(whole - own) + own


@dataclasses.dataclass(frozen=True)
class Clip:
  """PPO's clipped surrogate (Schulman et al. 2017, equation 7).

  Attributes:
    low: distance below 1 at which the ratio of negative-advantage tokens stops
      to matter.
    high: distance above 1, likewise for positive advantages; larger than `low`
      it is DAPO's clip-higher (arXiv 2503.14476, equation 10).
    dual: the loss of a negative-advantage token is at most `dual` x |A| (Ye et
      al. 2020, arXiv 1912.09729); None sets no limit.
  """

  low: float = 0.2
  high: float = 0.2
  dual: float | None = None

  def __post_init__(self) -> None:
    _check_band(self.low, self.high)
    if self.dual is not None and not 1 + self.high < self.dual < math.inf:
      raise types.InputError(
        f"algo.region.dual: expected > 1 + high = {1 + self.high}, or none, "
        f"got {self.dual}. 3 is usual."
      )

  def losses(
    self, log_ratio: Float[Array, "B T"], inputs: types.LossInputs
  ) -> TokenLosses:
    """Returns max(-A r, -A clip(r)), and where the clipped branch acts.

    With `dual`, no more than dual x |A| for A < 0; such tokens count as clipped
    too.
    """
    inputs = masked(inputs)
    ratio = _exp(log_ratio)
    free = -inputs.advantages * ratio
    bound = -inputs.advantages * jnp.clip(ratio, 1 - self.low, 1 + self.high)
    loss, clipped = jnp.maximum(free, bound), bound > free
    if self.dual is not None:
      most = -inputs.advantages * self.dual
      beyond = (inputs.advantages < 0) & (loss > most)
      loss, clipped = jnp.where(beyond, most, loss), clipped | beyond
    return loss * inputs.loss_mask, _marked(clipped, inputs.loss_mask)


@dataclasses.dataclass(frozen=True)
class Cispo:
  """Clips the weight and not the gradient (arXiv 2506.13585).

  Attributes:
    low: the weight is at least 1 - low; 1 sets no lower limit, as in the paper.
    high: and at most 1 + high.
  """

  low: float = 1.0
  high: float = 4.0

  def __post_init__(self) -> None:
    _check_band(self.low, self.high)

  def losses(
    self, log_ratio: Float[Array, "B T"], inputs: types.LossInputs
  ) -> TokenLosses:
    """Returns -sg(clip(r)) A log p, and where the clip acts."""
    inputs = masked(inputs)
    ratio = jax.lax.stop_gradient(_exp(log_ratio))
    used = jnp.clip(ratio, 1 - self.low, 1 + self.high)
    loss = -used * inputs.advantages * inputs.logprobs
    acts = (used != ratio) & (inputs.advantages != 0)
    return loss * inputs.loss_mask, _marked(acts, inputs.loss_mask)


@dataclasses.dataclass(frozen=True)
class Sapo:
  """A gate that closes softly (Gao et al. 2025, arXiv 2511.20347).

  Attributes:
    positive: how steep it is for positive advantages.
    negative: and for the others; steeper, as those tokens are less sure.
  """

  positive: float = 1.0
  negative: float = 1.05

  def __post_init__(self) -> None:
    for name in ("positive", "negative"):
      if not 0 < getattr(self, name) < math.inf:
        raise types.InputError(
          f"algo.region.{name}: expected > 0, got {getattr(self, name)}. 1 is "
          "usual."
        )

  def losses(
    self, log_ratio: Float[Array, "B T"], inputs: types.LossInputs
  ) -> TokenLosses:
    """Returns -A f(r) with f(r) = 4 / tau sigmoid(tau (r - 1)); no clipping.

    The gradient of f is 1 at r = 1 and falls off on both sides.
    """
    inputs = masked(inputs)
    ratio = _exp(log_ratio)
    tau = jnp.where(inputs.advantages > 0, self.positive, self.negative)
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
    loss = -inputs.advantages * gate * inputs.loss_mask
    return loss, jnp.zeros_like(loss)


@dataclasses.dataclass(frozen=True)
class Dppo:
  """Leaves out tokens whose probability has moved too far from the sampler's.

  The total-variation mask of DPPO (Qi et al. 2026, arXiv 2602.04879), with the
  ratio itself for the others.

  Attributes:
    low: most that the probability of a negative-advantage token may have sunk.
    high: most that the probability of a positive-advantage token may have
      risen.
  """

  low: float = 0.2
  high: float = 0.2

  def __post_init__(self) -> None:
    _check_band(self.low, self.high, most=1.0)

  def losses(
    self, log_ratio: Float[Array, "B T"], inputs: types.LossInputs
  ) -> TokenLosses:
    """Returns -A r of the tokens that stay, and which of them do not."""
    inputs = masked(inputs)
    moved = jnp.exp(inputs.logprobs) - jnp.exp(inputs.sampler_logprobs)
    risen = (inputs.advantages > 0) & (moved > self.high)
    far = risen | ((inputs.advantages < 0) & (moved < -self.low))
    loss = -inputs.advantages * _exp(log_ratio) * inputs.loss_mask
    return jnp.where(far, 0.0, loss), _marked(far, inputs.loss_mask)


@dataclasses.dataclass(frozen=True)
class Score:
  """No trust region: the score function itself (Williams 1992, REINFORCE)."""

  def losses(
    self, log_ratio: Float[Array, "B T"], inputs: types.LossInputs
  ) -> TokenLosses:
    """Returns -A log p; the ratio is not used."""
    del log_ratio
    inputs = masked(inputs)
    loss = -inputs.advantages * inputs.logprobs * inputs.loss_mask
    return loss, jnp.zeros_like(loss)


def value_losses(
  values: Float[Array, "B T"],
  old_values: Float[Array, "B T"],
  returns: Float[Array, "B T"],
  mask: Float[Array, "B T"],
  *,
  clip: float | None,
) -> TokenLosses:
  """Scores a critic (PPO's reference code; clipped as in Huang et al. 2022).

  Args:
    values: predicted returns; the only differentiable argument.
    old_values: those before the update.
    returns: what is to be predicted.
    mask: 1 on tokens that train.
    clip: values may move by so much; None sets no limit.

  Returns:
    max((v - R)^2, (clip(v) - R)^2) / 2, and where the clipped branch acts; both
    0 where the mask is 0.
  """
  keep = mask > 0
  values, old_values, returns = (
    jnp.where(keep, x, 0.0) for x in (values, old_values, returns)
  )
  free = jnp.square(values - returns)
  if clip is None:
    return 0.5 * free * mask, jnp.zeros_like(mask)
  moved = old_values + jnp.clip(values - old_values, -clip, clip)
  bound = jnp.square(moved - returns)
  loss = 0.5 * jnp.maximum(free, bound) * mask
  return loss, _marked(bound > free, mask)


def _marked(where: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mask where something is the case, 0 elsewhere."""
  return jnp.where(where, mask, 0.0)


def _exp(log_ratio: jax.Array) -> jax.Array:
  """Returns a ratio that stays finite, and so does its gradient."""
  return jnp.exp(jnp.minimum(log_ratio, LARGEST))


def _check_band(low: float, high: float, most: float = math.inf) -> None:
  for name, value, limit in (("low", low, 1.0), ("high", high, most)):
    if not 0 < value <= limit:
      rule = "> 0" if limit == math.inf else f"in (0, {limit:g}]"
      raise types.InputError(
        f"algo.region.{name}: expected {rule}, got {value}. Write a distance, "
        "not a bound: docs/algorithms.md has the usual ones."
      )
