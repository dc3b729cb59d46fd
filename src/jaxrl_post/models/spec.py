"""A weight is declared once; shapes, shardings and arrays follow from it."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl_post import types

# The axis of a dim that is split like "embed", if it is the largest of its
# weight that can be.
ANY = "any"


@dataclasses.dataclass(frozen=True)
class Weight:
  """One leaf of a parameter tree.

  Attributes:
    shape: in the order the forward pass uses.
    axes: logical axis name of each dim; a rule table maps them to mesh axes.
    fan_in: inputs summed into one output; None for a weight that starts at
      `start`.
    start: the constant a weight without fan-in starts at.
  """

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  fan_in: int | None = None
  start: float = 1.0


def _is_weight(x: object) -> bool:
  return isinstance(x, Weight)


def on(shapes: types.Tree, shardings: types.Tree) -> types.Tree:
  """Returns shapes together with how they lie, as arrays that are not there."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def abstract(spec: types.Tree, dtype: jax.typing.DTypeLike) -> types.Tree:
  """Returns the shape and dtype of each leaf, with no array behind it."""
  return jax.tree.map(
    lambda w: jax.ShapeDtypeStruct(w.shape, dtype), spec, is_leaf=_is_weight
  )


def init(
  spec: types.Tree, key: jax.Array, dtype: jax.typing.DTypeLike
) -> types.Tree:
  """Draws starting weights: normal with variance 1/fan_in, or a constant.

  Returns:
    A tree like `spec`. Each leaf has its own key, so that adding a leaf leaves
    the others as they were.
  """
  flat, tree = jax.tree.flatten_with_path(spec, is_leaf=_is_weight)

  def draw(path: tuple, weight: Weight) -> jax.Array:
    if weight.fan_in is None:
      return jnp.full(weight.shape, weight.start, dtype)
    name = jax.tree_util.keystr(path)
    leaf_key = jax.random.fold_in(key, _hash(name))
    scale = 1 / math.sqrt(weight.fan_in)
    return (jax.random.normal(leaf_key, weight.shape) * scale).astype(dtype)

  return jax.tree.unflatten(tree, [draw(path, w) for path, w in flat])


def _hash(name: str) -> int:
  value = 2166136261  # FNV-1a: stable between processes, unlike hash().
  for byte in name.encode():
    value = (value ^ byte) * 16777619 % 2**32
  return value


def partition(
  spec: types.Tree,
  rules: Mapping[str, str | tuple[str, ...] | None],
  mesh_axes: Mapping[str, int],
) -> types.Tree:
  """Maps logical axes to mesh axes.

  Args:
    spec: the weights.
    rules: logical axis name to mesh axis; names that are missing are
      replicated.
    mesh_axes: size of each mesh axis.

  Returns:
    A tree of `jax.P`. A dim that its mesh axis does not divide is replicated.
    A mesh axis splits one dim of a weight: of several, the largest it divides.
  """

  def one(weight: Weight) -> jax.P:
    names: list[str | tuple[str, ...] | None] = [None] * len(weight.shape)
    for i in sorted(range(len(names)), key=lambda i: -weight.shape[i]):
      axis = weight.axes[i]
      target = rules.get("embed" if axis == ANY else axis)
      targets = (target,) if isinstance(target, str) else (target or ())
      parts = math.prod(mesh_axes[t] for t in targets)
      if targets and weight.shape[i] % parts == 0 and target not in names:
        names[i] = target
    return jax.P(*names)

  return jax.tree.map(one, spec, is_leaf=_is_weight)


def count(spec: types.Tree) -> int:
  """Returns the number of parameters."""
  leaves = jax.tree.leaves(spec, is_leaf=_is_weight)
  return sum(math.prod(w.shape) for w in leaves)
