"""LoRA: a change of low rank beside frozen weights is what trains.

Hu et al. 2021 (arXiv 2106.09685): W + alpha / rank * A B, A normal and B zero
at the start, so that the first policy is the one without adapters. The paper
writes the product the other way round, as B A: its vectors are columns.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxrl_post import types
from jaxrl_post.models import adapted, quantize
from jaxrl_post.models import spec as specs


@dataclasses.dataclass(frozen=True)
class Lora:
  """Trains adapters of some matrices in place of the weights.

  Attributes:
    rank: of each change.
    alpha: a change is multiplied by alpha / rank.
    targets: matrices with an adapter in each layer, by the names of
      `models.transformer.spec`; all of them are q, k, v, o, gate, up, down.
  """

  rank: int = 8
  alpha: float = 16.0
  targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")

  def __post_init__(self) -> None:
    once = len(set(self.targets)) == len(self.targets) > 0
    rules = (
      (self.rank >= 1, "rank", ">= 1", self.rank),
      (0 < self.alpha <= 1e30, "alpha", "in (0, 1e30]", self.alpha),
      (once, "targets", "names of matrices, each once", self.targets),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"optim.trained.{name}: expected {rule}, got {value}. Correct it."
        )

  @property
  def scale(self) -> float:
    """What the product of the factors is multiplied by."""
    return self.alpha / self.rank


def spec(tree: types.Tree, cfg: Lora) -> types.Tree:
  """Declares the adapters of a model's weights.

  Args:
    tree: of `specs.Weight`, as `transformer.spec` declares them.
    cfg: which ones have an adapter.

  Returns:
    For each target of `layers`: `a`, its layers and inputs by the rank, and
    `b`, its layers, the rank and its outputs. Dims have the axes of the
    weight's, and so lie on a mesh as they do; all of the rank is everywhere.

  Raises:
    InputError: the model has no such matrix, or the rank is above its smaller
      side.
  """
  sides = quantize.channels(tree)
  known = [name for name in tree["layers"] if _path(name) in sides]
  layers = {}
  for name in cfg.targets:
    if name not in known:
      raise types.InputError(
        f"optim.trained.targets: expected names among {', '.join(known)}, got "
        f"{name!r}. Correct it."
      )
    weight = tree["layers"][name]
    cut = 1 + len(sides[_path(name)])
    num_in = math.prod(weight.shape[1:cut])
    num_out = math.prod(weight.shape[cut:])
    if cfg.rank > min(num_in, num_out):
      raise types.InputError(
        f"optim.trained.rank: expected at most {min(num_in, num_out)}, the "
        f"smaller side of {name} ({num_in} x {num_out}), got {cfg.rank}. Lower "
        "it, or leave the matrix out of optim.trained.targets."
      )
    layers[name] = {
      "a": specs.Weight(
        (*weight.shape[:cut], cfg.rank), (*weight.axes[:cut], "rank"), num_in
      ),
      "b": specs.Weight(
        (weight.shape[0], cfg.rank, *weight.shape[cut:]),
        (weight.axes[0], "rank", *weight.axes[cut:]),
        start=0.0,
      ),
    }
  return {"layers": layers}


def _path(name: str) -> str:
  return f"['layers']['{name}']"


def init(tree: types.Tree, key: jax.Array, cfg: Lora) -> types.Tree:
  """Draws adapters that change nothing yet.

  Args:
    tree: of the weights, as `transformer.spec` declares them.
    key: of the first weights; adapters are drawn apart from them.
    cfg: the settings.

  Returns:
    A tree like `spec(tree, cfg)`, in float32: `a` normal with variance 1 over
    its number of inputs, `b` zero.

  Raises:
    InputError: see `spec`.
  """
  return specs.init(spec(tree, cfg), key, jnp.dtype("float32"))


def attach(params: types.Tree, adapters: types.Tree, cfg: Lora) -> types.Tree:
  """Returns weights with adapters beside them, as the forward pass takes both.

  Args:
    params: the weights beneath; they get no gradient.
    adapters: like `spec`; the result is differentiable in them.
    cfg: the settings.
  """
  layers = dict(params["layers"])
  for name, change in adapters["layers"].items():
    layers[name] = adapted.Adapted(
      weight=jax.lax.stop_gradient(layers[name]),
      a=change["a"],
      b=cfg.scale * change["b"],
    )
  return {**params, "layers": layers}


def merge(params: types.Tree, adapters: types.Tree, cfg: Lora) -> types.Tree:
  """Returns the weights of the policy: W + alpha / rank * A B.

  Args:
    params: the weights beneath.
    adapters: like `spec`.
    cfg: the settings.

  Returns:
    A tree like `params`, in its dtype. Weights without an adapter are the same
    arrays.
  """
  return jax.tree.map(
    lambda w: adapted.merged(w) if isinstance(w, adapted.Adapted) else w,
    attach(params, adapters, cfg),
    is_leaf=lambda w: isinstance(w, adapted.Adapted),
  )
