"""The optimizer: one of optax, with clipping, weight decay and a schedule."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxrl_post import types
from jaxrl_post.training import lora
from jaxrl_post.training import trained as trained_lib


@dataclasses.dataclass(frozen=True)
class Optim:
  """Settings of the optimizer.

  Attributes:
    name: adamw (Loshchilov and Hutter 2019, arXiv 1711.05101), lion (Chen et
      al. 2023, arXiv 2302.06675), or sgd with momentum. Weight decay is
      decoupled in all of them.
    learning_rate: at the top of the schedule.
    schedule: shape after the warm-up: constant, or falling to zero at the last
      step as a line or a half cosine.
    warmup_steps: updates over which the rate rises from zero. Less than a run
      has, if the rate is to fall then; a constant one may rise to the end, as
      the run may go on.
    b1: decay of the gradient average; the momentum of sgd.
    b2: decay of the squared gradient average; of lion, of the gradient average
      that it keeps. Not read by sgd.
    eps: added to the root of the former; read by adamw only.
    moments: dtype of the gradient average. The squared one stays float32.
    weight_decay: per unit of learning rate, on matrices only.
    clip_norm: largest global gradient norm; a longer gradient is scaled.
    microbatches: parts an update's rows are cut into, one after the other, to
      save memory; changes neither loss nor gradient. Parts without a row cost
      nothing: rollouts share rows where they fit.
    minibatches: updates that share the rows of a batch.
    epochs: how often each row is trained; the same order each time.
    max_skipped: updates in a row that may be skipped because their loss or
      gradient is not finite; one more ends the run. 0 stops at the first.
    trained: None trains all weights, `trained.Only` some of them, `lora.Lora`
      adapters. Decay, gradient and norms are of what trains.
  """

  name: Literal["adamw", "lion", "sgd"] = "adamw"
  learning_rate: float = 1e-6
  schedule: Literal["constant", "linear", "cosine"] = "constant"
  warmup_steps: int = 0
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  moments: Literal["float32", "bfloat16"] = "float32"
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  microbatches: int = 1
  minibatches: int = 1
  epochs: int = 1
  max_skipped: int = 3
  trained: lora.Lora | trained_lib.Only | None = None

  def __post_init__(self) -> None:
    rules = (
      ("learning_rate", 0 <= self.learning_rate <= 1e30, "in [0, 1e30]"),
      ("warmup_steps", self.warmup_steps >= 0, ">= 0"),
      ("b1", 0 <= self.b1 < 1, "in [0, 1)"),
      ("b2", 0 <= self.b2 < 1, "in [0, 1)"),
      ("eps", self.eps > 0, "> 0"),
      ("weight_decay", self.weight_decay >= 0, ">= 0"),
      ("clip_norm", self.clip_norm > 0, "> 0"),
      ("microbatches", self.microbatches >= 1, ">= 1"),
      ("minibatches", self.minibatches >= 1, ">= 1"),
      ("epochs", self.epochs >= 1, ">= 1"),
      ("max_skipped", self.max_skipped >= 0, ">= 0"),
    )
    for name, holds, rule in rules:
      if not holds:
        raise types.InputError(
          f"optim.{name}: expected {rule}, got {getattr(self, name)}. "
          "Correct the value."
        )

  @property
  def updates(self) -> int:
    """How many updates a batch has."""
    return self.minibatches * self.epochs


def schedule(cfg: Optim, num_steps: int) -> optax.Schedule:
  """Returns the learning rate as a function of the updates applied."""
  rest = max(num_steps - cfg.warmup_steps, 1)
  after = {
    "constant": optax.constant_schedule(cfg.learning_rate),
    "linear": optax.linear_schedule(cfg.learning_rate, 0.0, rest),
    "cosine": optax.cosine_decay_schedule(cfg.learning_rate, rest),
  }[cfg.schedule]
  if not cfg.warmup_steps:
    return after
  rise = optax.linear_schedule(0.0, cfg.learning_rate, cfg.warmup_steps)
  return optax.join_schedules([rise, after], [cfg.warmup_steps])


def build(cfg: Optim, num_steps: int) -> optax.GradientTransformation:
  """Returns clip, optimizer and schedule as one optax transformation."""

  def decays(params: types.Tree) -> types.Tree:
    # Vectors are told by name: stacked, they have two dims too.
    vectors = ("norm", "bias", "scale", "value_head")
    return jax.tree.map_with_path(
      lambda path, x: x.ndim > 1 and not str(path[-1].key).endswith(vectors),
      params,
    )

  return optax.chain(
    optax.clip_by_global_norm(cfg.clip_norm),
    _scaled(cfg),
    optax.add_decayed_weights(cfg.weight_decay, mask=decays),
    optax.scale_by_learning_rate(schedule(cfg, num_steps)),
  )


def _scaled(cfg: Optim) -> optax.GradientTransformation:
  """Returns what turns gradients into directions."""
  if cfg.name == "adamw":
    return optax.scale_by_adam(
      cfg.b1, cfg.b2, cfg.eps, mu_dtype=jnp.dtype(cfg.moments)
    )
  if cfg.name == "lion":
    return optax.scale_by_lion(cfg.b1, cfg.b2, mu_dtype=jnp.dtype(cfg.moments))
  return optax.trace(cfg.b1, accumulator_dtype=jnp.dtype(cfg.moments))
