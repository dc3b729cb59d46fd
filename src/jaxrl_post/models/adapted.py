"""A frozen weight with a change of low rank beside it: W + A B.

Hu et al. 2021 (arXiv 2106.09685). A product multiplies by the sum, as the
engine does, so that both compute the same policy in any dtype; its backward
pass goes through the two factors, and no gradient of the size of a weight is
ever made.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post import types

_EXACT = jax.lax.Precision.HIGHEST  # Of accelerators, too; it is a thin one.


@types.record
class Adapted:
  """A weight that stands for `weight + a @ b`.

  Attributes:
    weight: its inputs, then its outputs; layers first where they are stacked.
      It is frozen: it has no gradient.
    a: the weight's layers and inputs, then the rank.
    b: the weight's layers, the rank, then the weight's outputs.
  """

  weight: Float[Array, "..."]
  a: Float[Array, "..."]
  b: Float[Array, "..."]

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the weight."""
    return self.weight.shape


def merged(w: Adapted) -> Float[Array, "..."]:
  """Returns the weight that `w` stands for, in the dtype of its parts."""
  shape = w.weight.shape
  stacked = w.a.ndim + w.b.ndim - 2 - len(shape)
  layers = shape[:stacked]
  width = math.prod(w.a.shape[stacked:-1])
  matrices = (
    w.weight.reshape(*layers, width, -1),
    w.a.reshape(*layers, width, -1),
    w.b.reshape(*layers, w.a.shape[-1], -1),
  )
  return _sum(*matrices).reshape(shape)


def product(x: Float[Array, "T i"], w: Adapted) -> Float[Array, "T o"]:
  """Multiplies rows with an adapted weight.

  Args:
    x: rows, in the compute dtype.
    w: of one layer.

  Returns:
    `x @ merged(w)`, the sum cast to the dtype of `x`, with all dims of outputs
    as one. Differentiable in `x`, `w.a` and `w.b`.
  """
  rank = w.a.shape[-1]
  a, b = w.a.reshape(-1, rank), w.b.reshape(rank, -1)
  return _product(x, w.weight.reshape(a.shape[0], -1), a, b)


def _sum(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  return weight + jnp.matmul(a, b, precision=_EXACT)


@jax.custom_vjp
def _product(
  x: jax.Array, weight: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array:
  return x @ _sum(weight, a, b).astype(x.dtype)


def _forward(
  x: jax.Array, weight: jax.Array, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return _product(x, weight, a, b), (x, weight, a, b)


def _backward(
  kept: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, None, jax.Array, jax.Array]:
  x, weight, a, b = kept
  # Made again and not kept: a layer's sum is as large as its weight.
  whole = _sum(weight, a, b).astype(x.dtype)
  wide = _matmul(g, b.T.astype(g.dtype)).astype(x.dtype)
  low = _matmul(x, a.astype(x.dtype)).astype(g.dtype)
  return (
    g @ whole.T,
    None,
    _matmul(x.T, wide).astype(a.dtype),
    _matmul(low.T, g).astype(b.dtype),
  )


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.matmul(x, y, preferred_element_type=jnp.float32)


_product.defvjp(_forward, _backward)
