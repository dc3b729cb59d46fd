"""A batch, some rows at a time: what is found of tokens, and gradients.

Dims, beside those of `types`: M portions of m rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types

# Rows of a batch to arrays of [m, T, ...].
OfRows = Callable[[types.Batch], Any]
# Numbers of a step: those that add up over portions, and largest ones.
_Sums = dict[str, jax.Array]


def split(batch: types.Batch, num: int) -> dict[str, jax.Array]:
  """Cuts what is a row a row into `num` portions, [M, m, T, ...], by name.

  The k-th has rows k, k + M, ...: so each has rows of every device of the batch
  axis.
  """
  fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
  fields = {k: x for k, x in fields.items() if x is not None and x.ndim > 1}
  return {k: _split(x, num) for k, x in fields.items()}


def take(
  batch: types.Batch, portions: dict[str, jax.Array], number: jax.Array
) -> types.Batch:
  """Returns a batch with the rows of one portion, and all sequences' numbers.

  Args:
    batch: the whole.
    portions: from `split`.
    number: which; may be traced.
  """
  fields = {
    name: jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
    for name, x in portions.items()
  }
  return dataclasses.replace(batch, **fields)


def each(find: OfRows, batch: types.Batch, num: int) -> Any:
  """Finds something of each token, a portion at a time.

  Args:
    find: rows to arrays of [m, T, ...].
    batch: all rows.
    num: portions; divides B. Those at the end that train no token are left out.

  Returns:
    What `find` returns for the whole, [B, T, ...]; 0 where it is left out.
  """
  if num == 1:
    return find(batch)
  portions = split(batch, num)

  def one(number: jax.Array) -> Any:
    return find(take(batch, portions, number))

  def put(number: jax.Array, found: Any) -> Any:
    return jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, number, 0),
      found,
      one(number),
    )

  shape = jax.eval_shape(one, jnp.zeros((), jnp.int32))
  found = jax.tree.map(lambda s: jnp.zeros((num, *s.shape), s.dtype), shape)
  found = jax.lax.fori_loop(0, _count(portions["loss_mask"]), put, found)
  return jax.tree.map(
    lambda x: x.swapaxes(0, 1).reshape(*batch.tokens.shape, *x.shape[3:]), found
  )


def total(find: OfRows, batch: types.Batch, num: int) -> Any:
  """Adds up something over portions.

  Args:
    find: rows to arrays that add up.
    batch: all rows.
    num: portions; divides B. Those at the end that train no token are left out.

  Returns:
    The sums of what `find` returns.
  """
  if num == 1:
    return find(batch)
  portions = split(batch, num)

  def add(number: jax.Array, sums: Any) -> Any:
    found = find(take(batch, portions, number))
    return jax.tree.map(jnp.add, sums, found)

  shape = jax.eval_shape(find, take(batch, portions, jnp.zeros((), jnp.int32)))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
  return jax.lax.fori_loop(0, _count(portions["loss_mask"]), add, zeros)


def accumulate(
  loss_fn: Callable[..., Any],
  weights: types.Tree,
  batch: types.Batch,
  shares: Float[Array, "B T"],
  num: int,
) -> tuple[types.Tree, _Sums, _Sums]:
  """Adds up gradients and metrics over portions.

  Args:
    loss_fn: of weights, rows and their shares; returns a loss, and metrics that
      add up and those of which the largest counts.
    weights: what the gradient is of.
    batch: all rows.
    shares: of each token in the loss of the step.
    num: portions; divides B. Those at the end that train no token are left out.

  Returns:
    The gradient of the sum of all losses, and both kinds of metrics.
  """
  grad_fn = jax.grad(loss_fn, has_aux=True)
  if num == 1:
    grads, (sums, most) = grad_fn(weights, batch, shares)
    return grads, sums, most
  portions, cut = split(batch, num), _split(shares, num)

  def one(number: jax.Array):
    here = jax.lax.dynamic_index_in_dim(cut, number, keepdims=False)
    rows = take(batch, portions, number)
    grads, (sums, most) = grad_fn(weights, rows, here)
    return grads, sums, most

  def add(number: jax.Array, total: tuple[Any, _Sums, _Sums]):
    grads, sums, most = one(number)
    return (
      jax.tree.map(jnp.add, total[0], grads),
      jax.tree.map(jnp.add, total[1], sums),
      jax.tree.map(jnp.maximum, total[2], most),
    )

  shape = jax.eval_shape(one, jnp.zeros((), jnp.int32))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
  return jax.lax.fori_loop(0, _count(portions["loss_mask"]), add, zeros)


def _split(x: Array, num: int) -> Array:
  return x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1)


def _count(mask: Float[Array, "M m T"]) -> Int[Array, ""]:
  """Returns how many portions there are up to the last that trains a token."""
  some = jnp.any(mask > 0, axis=(1, 2))
  order = jnp.arange(1, mask.shape[0] + 1)
  return jnp.max(jnp.where(some, order, 0)).astype(jnp.int32)
