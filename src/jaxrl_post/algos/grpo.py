"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300).

With DAPO's two settings that became the norm: clip-higher and the token mean
over the whole optimizer step (Yu et al. 2025, arXiv 2503.14476, sections 3.1
and 3.3). No KL term: it needs a reference policy, which is not offered yet.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.algos import advantages as baselines
from jaxrl_post.algos import losses


@dataclasses.dataclass(frozen=True)
class Grpo:
  """Settings of GRPO.

  Attributes:
    clip_low: the ratio acts down to 1 - clip_low.
    clip_high: the ratio acts up to 1 + clip_high.
    scale: divide advantages by the group's sample standard deviation ("std")
      or not ("none", Dr.GRPO, arXiv 2503.20783).
    importance_cap: cap of the weight old / sampler that corrects for lag and
      for differences of the engine; None trains without the weight.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  scale: Literal["std", "none"] = "std"
  importance_cap: float | None = 2.0

  def __post_init__(self) -> None:
    for name, most in (("clip_low", 1.0), ("clip_high", math.inf)):
      value = getattr(self, name)
      if not 0 < value <= most:
        raise types.InputError(
          f"algo.{name}: expected a distance from 1 in (0, {most}], got "
          f"{value}. 0.2 is the usual value."
        )
    if self.importance_cap is not None and self.importance_cap < 1:
      raise types.InputError(
        f"algo.importance_cap: expected >= 1 or none, got "
        f"{self.importance_cap}. A cap below 1 would scale every token down."
      )

  def advantages(
    self, rewards: Float[Array, " B"], group_ids: Int[Array, " B"]
  ) -> Float[Array, " B"]:
    """Scores rows against their group; see `group_advantages`."""
    return baselines.group_advantages(rewards, group_ids, scale=self.scale)

  def loss(
    self, inputs: types.LossInputs, num_tokens: Float[Array, ""]
  ) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Sums the token losses of some rows over the step's denominator.

    Args:
      inputs: the rows of one microbatch.
      num_tokens: trained tokens of the whole optimizer step, so that the sum
        over microbatches is the token mean, however the step is cut.

    Returns:
      The share of these rows in the loss, in nats a token, and the shares of
      metrics, which add up over microbatches in the same way.
    """
    token_loss, was_clipped = losses.clipped(
      inputs, clip_low=self.clip_low, clip_high=self.clip_high
    )
    shares = {"loss/clip_fraction": was_clipped}
    if self.importance_cap is not None:
      weight, capped = losses.truncated_weight(inputs, cap=self.importance_cap)
      token_loss = token_loss * weight
      shares["loss/importance_mean"] = weight
      shares["loss/importance_capped"] = capped
    scale = 1.0 / jnp.maximum(num_tokens, 1.0)
    shares = {name: jnp.sum(x) * scale for name, x in shares.items()}
    return jnp.sum(token_loss) * scale, shares
