"""Attention over positions that a mesh splits, without gathering them.

Each device keeps its queries. Keys and values travel around the ring of
devices, one neighbour at a time, and what was read of each part is joined by
its log-sum-exp (Liu et al. 2023, arXiv 2310.01889). In the backward pass they
travel once more, and their gradients with them (Dao 2023, arXiv 2307.08691,
section 3.1): a device never has more than two parts of keys and values, nor
scores of more than a block of queries. Runs within a `shard_map`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_BLOCK = 256  # queries whose scores there are at once
_LOWEST = -1e30  # of a score; exp(_LOWEST - _LOWEST) is masked where it occurs


class Ring(NamedTuple):
  """The devices that keys travel along.

  Attributes:
    axis: their axis of the mesh.
    parts: how many there are.
    seen: places of queries and of keys, trees of [B, T] and [B, S], to which
      keys each query reads, [B, 1, T, S].
  """

  axis: Any
  parts: int
  seen: Callable[[Any, Any], jax.Array]


class _Read(NamedTuple):
  """What some queries have read so far; `best` and `total` are [B, K, G, T]."""

  made: jax.Array  # [B, K, G, T, H], times total
  best: jax.Array  # largest score
  total: jax.Array  # sum of exp(score - best)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  ring: Ring, places: Any, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
  """Softmax attention of a device's queries over the keys of all.

  Args:
    ring: the devices.
    places: of this device's tokens.
    q: its queries, [B, T, N, H].
    k: keys of its tokens, [B, T, K, H].
    v: values, likewise.

  Returns:
    What each query read, [B, T, N, H], in the dtype of `q`. A query that reads
    nothing gets 0.
  """
  return _forward(ring, places, q, k, v)[0]


def _forward(
  ring: Ring, places: Any, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, Any]:
  asks = _grouped(q, k.shape[2])
  shape = asks.shape[:4]
  start = _Read(
    made=jnp.zeros(asks.shape, jnp.float32),
    best=jnp.full(shape, _LOWEST, jnp.float32),
    total=jnp.zeros(shape, jnp.float32),
  )

  def turn(carry: Any, _: None) -> tuple[Any, None]:
    read, moving = carry
    theirs, keys, values = moving
    cut = functools.partial(_cut, axis=3)
    read = _over_blocks(
      lambda mine, query, read: _join(
        ring.seen(mine, theirs), query, keys, values, read
      ),
      (_cut_places(places), cut(asks), jax.tree.map(cut, read)),
      q.shape[1],
    )
    return (read, _pass_on(ring, moving)), None

  (read, _), _ = jax.lax.scan(
    turn, (start, (places, k, v)), None, length=ring.parts
  )
  total = jnp.where(read.total > 0, read.total, 1.0)
  out = _flat(read.made / total[..., None]).astype(q.dtype)
  lse = read.best + jnp.log(total)
  return out, (places, q, k, v, out, lse)


def _backward(ring: Ring, kept: Any, d_out: jax.Array) -> tuple[Any, ...]:
  places, q, k, v, out, lse = kept
  heads = k.shape[2]
  asks, d_asks = (_grouped(x, heads) for x in (q, d_out))
  weighed = jnp.sum(
    d_asks.astype(jnp.float32) * _grouped(out, heads).astype(jnp.float32), -1
  )

  def turn(carry: Any, _: None) -> tuple[Any, None]:
    d_q, moving = carry
    theirs, keys, values, d_k, d_v = moving

    def block(sums: Any, xs: Any) -> tuple[Any, jax.Array]:
      mine, query, d_query, norm, weight, d_before = xs
      more = _gradients(
        ring.seen(mine, theirs), query, keys, values, d_query, norm, weight
      )
      d_here, *d_there = more
      return jax.tree.map(jnp.add, sums, tuple(d_there)), d_before + d_here

    cut = functools.partial(_cut, axis=3)
    # What pads a block must read nothing, whatever its scores.
    xs = (
      _cut_places(places),
      cut(asks),
      cut(d_asks),
      cut(lse, fill=jnp.inf),
      cut(weighed),
      cut(d_q),
    )
    (d_k, d_v), d_q = jax.lax.scan(block, (d_k, d_v), xs)
    d_q = _whole(d_q, q.shape[1])
    return (d_q, _pass_on(ring, (theirs, keys, values, d_k, d_v))), None

  start = (
    jnp.zeros(asks.shape, jnp.float32),
    (
      places,
      k,
      v,
      jnp.zeros(k.shape, jnp.float32),
      jnp.zeros(v.shape, jnp.float32),
    ),
  )
  # After as many turns as there are devices each part is home again.
  (d_q, (_, _, _, d_k, d_v)), _ = jax.lax.scan(
    turn, start, None, length=ring.parts
  )
  return (
    None,
    _flat(d_q).astype(q.dtype),
    d_k.astype(k.dtype),
    d_v.astype(v.dtype),
  )


attend.defvjp(_forward, _backward)


def _scores(
  mask: jax.Array, query: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns scores [B, K, G, T, S] in float32, and where they count."""
  scores = jnp.einsum(
    "bkgth,bskh->bkgts", query, keys, preferred_element_type=jnp.float32
  )
  mask = mask[:, :, None]
  return jnp.where(mask, scores * query.shape[-1] ** -0.5, _LOWEST), mask


def _join(
  mask: jax.Array,
  query: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  read: _Read,
) -> _Read:
  scores, mask = _scores(mask, query, keys)
  best = jnp.maximum(read.best, scores.max(-1))
  share = jnp.where(mask, jnp.exp(scores - best[..., None]), 0.0)
  left = jnp.exp(read.best - best)
  more = jnp.einsum(
    "bkgts,bskh->bkgth",
    share.astype(values.dtype),
    values,
    preferred_element_type=jnp.float32,
  )
  return _Read(
    made=read.made * left[..., None] + more,
    best=best,
    total=read.total * left + share.sum(-1),
  )


def _gradients(
  mask: jax.Array,
  query: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *of_read: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns what these queries and keys add to the gradients, in float32."""
  d_read, lse, weighed = of_read
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  scores, mask = _scores(mask, query, keys)
  share = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
  d_share = product("bkgth,bskh->bkgts", d_read, values)
  d_scores = share * (d_share - weighed[..., None]) * query.shape[-1] ** -0.5
  d_scores, share = (x.astype(keys.dtype) for x in (d_scores, share))
  return (
    product("bkgts,bskh->bkgth", d_scores, keys),
    product("bkgts,bkgth->bskh", d_scores, query),
    product("bkgts,bkgth->bskh", share, d_read),
  )


def _pass_on(ring: Ring, moving: Any) -> Any:
  steps = [(i, (i + 1) % ring.parts) for i in range(ring.parts)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, steps), moving)


# --------------------------------------------------------- blocks of queries


def _grouped(x: jax.Array, heads: int) -> jax.Array:
  """[B, T, N, H] to [B, K, G, T, H]."""
  num, length, all_heads, width = x.shape
  x = x.reshape(num, length, heads, all_heads // heads, width)
  return x.transpose(0, 2, 3, 1, 4)


def _flat(x: jax.Array) -> jax.Array:
  num, heads, group, length, width = x.shape
  return x.transpose(0, 3, 1, 2, 4).reshape(num, length, heads * group, width)


def _cut(x: jax.Array, axis: int, fill: float = 0) -> jax.Array:
  """Cuts an axis into blocks, which come first; the last one is padded."""
  size = min(_BLOCK, x.shape[axis])
  short = -x.shape[axis] % size
  more = [(0, short if at == axis else 0) for at in range(x.ndim)]
  x = jnp.pad(x, more, constant_values=fill)
  shape = *x.shape[:axis], -1, size, *x.shape[axis + 1 :]
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def _cut_places(places: Any) -> Any:
  return jax.tree.map(lambda x: _cut(x, 1), places)


def _whole(x: jax.Array, length: int) -> jax.Array:
  """Joins blocks of [B, K, G, T, ...] again."""
  x = jnp.moveaxis(x, 0, 3)
  return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :length]


def _over_blocks(
  join: Callable[..., _Read], xs: tuple[Any, ...], length: int
) -> _Read:
  _, made = jax.lax.scan(lambda _, x: (None, join(*x)), None, xs)
  return jax.tree.map(lambda x: _whole(x, length), made)
