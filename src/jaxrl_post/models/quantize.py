"""Weights in 8 bits: integers, and a scale for each output channel.

Symmetric absmax quantization, as the "vector-wise" one of Dettmers et al. 2022
(arXiv 2208.07339) does it for weights. Products take integers, which are exact
in bfloat16 already, and scale what comes out: a matrix of dequantized weights
is never asked for.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.models import spec as specs

_LARGEST = 127.0
# A product and not a quotient: XLA writes one for the other, NumPy does not.
_INVERSE = 1.0 / _LARGEST
# Below it a scale is no normal float32, and devices differ in what it is.
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


@types.record
class Int8:
  """A weight as `values * scale`, the scale broadcast over `dims` of it.

  Attributes:
    values: in [-127, 127].
    scale: float32; one for all values that are summed into one output. 1 for a
      channel of zeros; NaN or infinite where a value of its channel was.
  """

  values: Int[Array, "..."]
  scale: Float[Array, "..."]


def scales(
  x: Float[Array, "..."], dims: tuple[int, ...]
) -> Float[Array, "..."]:
  """Returns the scale of each channel: its largest magnitude / 127, in float32.

  Args:
    x: what is to be quantized.
    dims: that a channel goes over; they are not in the result.
  """
  scale = jnp.max(jnp.abs(x), axis=dims).astype(jnp.float32) * _INVERSE
  # NaN is not below anything: it stays, and is seen.
  return jnp.where(scale < _SMALLEST, 1.0, scale)


def values(x: Float[Array, "..."], dims: tuple[int, ...]) -> Int[Array, "..."]:
  """Returns int8 values: `x` in units of its channel's scale, rounded.

  Half-way cases go to the even integer. Each value is at most half a scale
  away from `x`.

  Args:
    x: what is to be quantized.
    dims: that a channel goes over.
  """
  scale = jnp.expand_dims(scales(x, dims), dims)
  near = jnp.round(x.astype(jnp.float32) / scale)
  return jnp.clip(near, -_LARGEST, _LARGEST).astype(jnp.int8)


def spec(tree: types.Tree) -> types.Tree:
  """Declares the weights of a decoder as the engine holds them in 8 bits.

  Args:
    tree: of `specs.Weight`, as trained.

  Returns:
    The same with `Int8` of declarations in place of the matrices of layers.
    Embedding, head, norms and biases are as they were. A scale has the axes of
    its weight's outputs, and so lies on a mesh as they do.

  Raises:
    InputError: the model has experts.
  """
  leaves = jax.tree.leaves(tree, is_leaf=_is_weight)
  if any("experts" in weight.axes for weight in leaves):
    raise types.InputError(
      "sampling.dtype: expected float32 or bfloat16 for a mixture of experts, "
      "got 8 bits. Its experts cannot be quantized here."
    )
  dims = channels(tree)
  flat, structure = jax.tree.flatten_with_path(tree, is_leaf=_is_weight)
  out = []
  for path, weight in flat:
    over = dims.get(jax.tree_util.keystr(path))
    if over is None:
      out.append(weight)
      continue
    kept = [i for i in range(len(weight.shape)) if i not in over]
    scale = specs.Weight(
      tuple(weight.shape[i] for i in kept), tuple(weight.axes[i] for i in kept)
    )
    # jaxtyping leaves records alone: see `types.record`.
    fields: dict = dict(values=weight, scale=scale)
    out.append(Int8(**fields))
  return jax.tree.unflatten(structure, out)


def channels(tree: types.Tree) -> dict[str, tuple[int, ...]]:
  """Says which weights are quantized, and over which dims a channel goes.

  Args:
    tree: of `specs.Weight`, as trained.

  Returns:
    Of each matrix of a layer, by its key path as `jax.tree_util.keystr` writes
    it, the dims that a product with it sums over. Experts are left out.
  """
  flat, _ = jax.tree.flatten_with_path(tree, is_leaf=_is_weight)
  return {
    jax.tree_util.keystr(path): _summed(weight)
    for path, weight in flat
    if weight.fan_in is not None
    and weight.axes[0] == "layers"
    and "experts" not in weight.axes
  }


def quantize(tree: types.Tree, params: types.Tree) -> types.Tree:
  """Quantizes weights where they are.

  Args:
    tree: of `specs.Weight`, as trained.
    params: weights like it.

  Returns:
    Weights like `spec(tree)`; those that are not quantized are the same arrays.
  """
  dims = channels(tree)

  def one(path: tuple, x: jax.Array) -> types.Tree:
    over = dims.get(jax.tree_util.keystr(path))
    if over is None:
      return x
    return Int8(values=values(x, over), scale=scales(x, over))

  return jax.tree.map_with_path(one, params)


def dequantize(tree: types.Tree, params: types.Tree) -> types.Tree:
  """Returns the float32 weights that quantized ones stand for.

  Args:
    tree: of `specs.Weight`, as trained.
    params: weights like `spec(tree)`.
  """
  dims = channels(tree)

  def one(path: tuple, x: types.Tree) -> types.Tree:
    if not isinstance(x, Int8):
      return x
    scale = jnp.expand_dims(x.scale, dims[jax.tree_util.keystr(path)])
    return x.values.astype(jnp.float32) * scale

  return jax.tree.map_with_path(one, params, is_leaf=is_int8)


def is_int8(x: object) -> bool:
  """Says whether a node of a tree is a quantized weight."""
  return isinstance(x, Int8)


def product(
  x: Float[Array, "T i"], w: Int8, num_in: int
) -> Float[Array, "T o"]:
  """Multiplies rows with a quantized weight; float32 sums, scaled at the end.

  Args:
    x: rows, in the compute dtype.
    w: of one layer.
    num_in: dims of the weight that are summed, the first ones.

  Returns:
    `x @ w` in the dtype of `x`, with all dims of outputs as one.
  """
  width = math.prod(w.values.shape[:num_in])
  matrix = w.values.reshape(width, -1).astype(x.dtype)
  out = jnp.matmul(x, matrix, preferred_element_type=jnp.float32)
  return (out * w.scale.reshape(-1)).astype(x.dtype)


def _is_weight(x: object) -> bool:
  return isinstance(x, specs.Weight)


def _summed(weight: specs.Weight) -> tuple[int, ...]:
  """Returns the dims behind "layers" whose product is the weight's fan-in."""
  size, dims = 1, []
  for dim in range(1, len(weight.shape)):
    if size == weight.fan_in:
      break
    size *= weight.shape[dim]
    dims.append(dim)
  return tuple(dims)
