"""What a step asks of an algorithm."""

from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from jaxrl_post import types


@runtime_checkable
class Algorithm(Protocol):
  """Turns rewards into advantages and log-probabilities into a loss.

  `algos.objective.Objective` is the one that all named algorithms are made of.
  """

  @property
  def needs(self) -> frozenset[str]:
    """What a step has to provide, see `algos.objective.Objective.needs`."""
    ...

  @property
  def corrects(self) -> bool:
    """Whether it weighs tokens for what the sampler's policy was."""
    ...

  @property
  def reference_moves(self) -> tuple[int, float]:
    """After how many batches the reference moves, 0 for never; and how far."""
    ...

  @property
  def mask_equal(self) -> bool:
    """Whether groups whose rewards agree are left out."""
    ...

  @property
  def mask_truncated(self) -> bool:
    """Whether rollouts that the length limit ended are left out."""
    ...

  @property
  def candidates(self) -> int:
    """How many of a teacher's most probable tokens the loss compares."""
    ...

  @property
  def critic(self) -> Any:
    """The settings of its critic, `algos.baselines.Critic`; None without."""
    ...

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Gives each token its advantage."""
    ...

  def returns(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Gives each token what the critic is to predict, if there is one."""
    ...

  def shares(
    self,
    mask: Float[Array, "B T"],
    sequence: Int[Array, "B T"],
    rollout_ids: Int[Array, " N"],
  ) -> Float[Array, "B T"]:
    """Gives each token its share in the loss of the step."""
    ...

  def loss(
    self, inputs: types.LossInputs
  ) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Gives the share of some rows in the step's loss, and metrics.

    Of these, [B, T] numbers are averaged over the trained tokens of the step,
    and scalars added up.
    """
    ...
