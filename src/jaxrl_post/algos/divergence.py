"""How far the policy is from another: estimates of KL a token, and sums of it.

k1, k2 and k3 are those of Schulman, "Approximating KL divergence" (2020), with
log r = log p_reference - log p.
"""

import dataclasses
import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post import types
from jaxrl_post.algos import losses

Estimator: TypeAlias = Literal["k1", "k2", "k3"]
Place: TypeAlias = Literal["loss", "reward"]
Gradient: TypeAlias = Literal["own", "unbiased"]


@dataclasses.dataclass(frozen=True)
class Kl:
  """A penalty on leaving the reference policy.

  Attributes:
    coef: its factor, beta.
    every: the reference moves towards the policy after so many batches; 0
      keeps it where it is.
    share: how far: 1 makes it the policy (Gorbatovski et al. 2024, arXiv
      2404.09656), less an exponential average.
    estimator: k1 has no bias and much variance; k2 has little of both near the
      reference; k3 has no bias and is never negative.
    place: "loss" adds the estimate to the loss of a token, "reward" takes k1
      or the like of the weights before the update from the rewards.
    gradient: "own" is that of the estimate, which for k1 is 0 on average and
      for k3 that of the other KL; "unbiased" has the estimate's value and the
      gradient of k2, which on average is that of KL(policy || reference) for
      tokens of the policy (Tang and Munos 2025, arXiv 2506.09477).
    without_signal: whether groups whose rewards agree, which have no other
      gradient, are drawn to the reference too; otherwise they do not train.
  """

  coef: float
  every: int = 0
  share: float = 1.0
  estimator: Estimator = "k3"
  place: Place = "loss"
  gradient: Gradient = "own"
  without_signal: bool = True

  def __post_init__(self) -> None:
    losses.check_choice("algo.kl.estimator", self.estimator, Estimator)
    losses.check_choice("algo.kl.place", self.place, Place)
    losses.check_choice("algo.kl.gradient", self.gradient, Gradient)
    if not 0 < self.coef < math.inf:
      raise types.InputError(
        f"algo.kl.coef: expected > 0, got {self.coef}. algo.kl = none goes "
        "without a reference."
      )
    if self.every < 0 or not 0 < self.share <= 1:
      raise types.InputError(
        "algo.kl: expected every >= 0 and share in (0, 1], got "
        f"{self.every} and {self.share}. 0 and 1 keep the reference."
      )
    if self.place == "reward" and self.gradient != "own":
      raise types.InputError(
        "algo.kl.gradient: expected own with place=reward, got "
        f"{self.gradient}. A reward has no gradient."
      )

  def estimate(self, inputs: types.LossInputs) -> Float[Array, "B T"]:
    """Estimates it for the weights that are trained, see `estimate`."""
    assert inputs.reference_logprobs is not None
    return estimate(
      inputs.logprobs,
      inputs.reference_logprobs,
      inputs.loss_mask,
      estimator=self.estimator,
      gradient=self.gradient,
    )


# What a teacher has left beside its most probable tokens counts from here on;
# less is rounding.
_REST = 1e-6


@dataclasses.dataclass(frozen=True)
class TopK:
  """KL(teacher || policy) over the teacher's most probable tokens (GKD).

  Agarwal et al. 2024, arXiv 2306.13649, with tokens of the policy; all tokens
  that are not among these count as one. So it is never more than the whole KL,
  equal to it if `num` is the vocabulary, and 0 only if both agree on all of
  them.

  Attributes:
    num: how many tokens.
  """

  num: int = 32
  needs = frozenset({"candidates", "teacher"})

  def __post_init__(self) -> None:
    if self.num < 1:
      raise types.InputError(
        f"algo.region.num: expected >= 1, got {self.num}. 32 is usual."
      )

  def losses(
    self, log_ratio: Float[Array, "B T"], inputs: types.LossInputs
  ) -> losses.TokenLosses:
    """Returns it for each token; neither ratio nor advantage is used."""
    del log_ratio
    teacher, policy = inputs.teacher_logprobs, inputs.candidate_logprobs
    assert teacher is not None and policy is not None
    mask = inputs.loss_mask
    teacher, policy = (
      jnp.where(mask[..., None] > 0, x, 0.0) for x in (teacher, policy)
    )
    share = jnp.exp(teacher)
    found = jnp.sum(share * (teacher - policy), axis=-1)
    left, rest = (1 - jnp.sum(jnp.exp(x), axis=-1) for x in (teacher, policy))
    counts = left > _REST
    left, rest = (jnp.where(counts, x, 1.0) for x in (left, rest))
    # Below, where float32 does not know it, the logarithm goes on as a line: a
    # policy that is sure of these tokens still feels what it leaves out.
    log_rest = jnp.log(jnp.maximum(rest, _REST))
    log_rest += jnp.minimum(rest - _REST, 0.0) / _REST
    found += left * (jnp.log(left) - log_rest)
    return jnp.where(mask > 0, found, 0.0), jnp.zeros_like(mask)


def estimate(
  logprobs: Float[Array, "B T"],
  reference: Float[Array, "B T"],
  mask: Float[Array, "B T"],
  *,
  estimator: Estimator,
  gradient: Gradient = "own",
) -> Float[Array, "B T"]:
  """Estimates KL(policy || reference) at each token.

  Args:
    logprobs: of the sampled tokens under the policy.
    reference: under the reference; no gradient is wanted for it.
    mask: 1 on tokens that count.
    estimator: see `Kl`, likewise the next.
    gradient: of the estimate.

  Returns:
    The estimates in nats, 0 where the mask is 0.
  """
  gap = losses.difference(logprobs, jax.lax.stop_gradient(reference), mask)
  square = 0.5 * jnp.square(gap)
  if estimator == "k1":
    value = gap
  elif estimator == "k2":
    value = square
  else:
    value = jnp.expm1(-gap) + gap
  if gradient == "unbiased":
    value = jax.lax.stop_gradient(value - square) + square
  return value * mask
