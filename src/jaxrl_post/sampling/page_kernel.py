"""The read of own pages as one TPU kernel (Pallas, compiled by Mosaic).

The portable read copies the query of a row to each of its pages and multiplies
pages that nobody has. Here a loop goes over pages that somebody has, and no
others: keys, values and the owner's query of the next few pages travel from
HBM to VMEM while these are read. That is all the memory traffic of a page, but
for what was read there.

A page is one matrix of its slots' key heads, [p*K, H], and all queries of its
owner are multiplied with all of it. Products of one head's query and another's
key are masked: they cost a share of the matrix unit, which has nothing else to
do, and spare a matrix product of a few rows for each head.

What Mosaic asks for, here and of the layouts in `formats`:

* the page size is a multiple of 8 (`SUBLANES`);
* the head width lies along the 128 lanes: narrower heads take the room and the
  time of 128. Key heads of a device that are not 1, 2, 4 or a multiple of 8
  take the room of the next of these;
* two times eight pages, or as many as fit into 4 MiB, lie in VMEM, with one
  device's key heads; two at least have to fit;
* three integers a page lie in SMEM; with a window, four.

Pages in 8 bits are for the portable read.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import layout
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.sampling import attention
from jaxrl_post.sampling import pages as paging

# VMEM of pages that are read and of those that come, in bytes.
_ROOM = 4 << 20
_LANES = 128
_START, _WAIT = operator.methodcaller("start"), operator.methodcaller("wait")
# The size of a page is a multiple of it.
SUBLANES = 8


class _Live(NamedTuple):
  """Pages that are read come first; how many, whose, and from and to where."""

  page: Any
  count: Any
  owner: Any
  last: Any
  first: Any


class _Arrays(NamedTuple):
  """Of all pages in HBM, or of two times a few pages in VMEM."""

  q: Any
  k: Any
  v: Any
  stats: Any
  value: Any


class _Refs(NamedTuple):
  """All that the kernel has; `read` and `written` tell of copies that ended."""

  live: _Live
  there: _Arrays
  here: _Arrays
  read: Any
  written: Any


def formats(pages: Any, num_kv: int) -> Any:
  """Returns how a pool lies on devices: the width within heads within slots.

  So do the keys and values of a token, which are written in one piece.

  Args:
    pages: which device has which pages and key heads.
    num_kv: key heads of a device. A dim of one does not lie next to the last,
      where it would take the room of two.
  """
  orders = (0, 1, 4, 2, 3), (0, 1, 3, 2, 4)
  if num_kv == 1:
    orders = (0, 1, 2, 4, 3), (0, 1, 2, 3, 4)
  lie: Any = (layout.Format(layout.Layout(order), pages) for order in orders)
  return paging.Pool(*lie)


def on(
  mesh: jax.sharding.Mesh,
  parts: Sequence[str],
  heads: str | None,
  *,
  interpret: Any = False,
) -> attention.ReadPages:
  """Says to read pages where they lie.

  Args:
    mesh: of the engine.
    parts: mesh axes of the data-parallel parts; a device has one of them.
    heads: mesh axis of queries' and key heads; None where each device has all.
    interpret: see `read_pages`.

  Returns:
    `read_pages` of each device's own part and heads, without communication.
  """
  rows: Any = jax.P(parts, None, heads)
  table = jax.P(parts)
  mapped = jax.shard_map(
    functools.partial(read_pages, interpret=interpret),
    mesh=mesh,
    in_specs=(rows, paging.Pool(rows, rows), table, table, table),
    out_specs=attention.Read(rows, rows, rows),
    check_vma=False,
  )
  return lambda q, own, owner, limit, first=None: mapped(
    q, own, owner, limit, first
  )


def read_pages(
  q: Float[Array, "D R N H"],
  own: paging.Pool,
  owner: Int[Array, "D M"],
  limit: Int[Array, "D M"],
  first: Int[Array, "D M"] | None = None,
  *,
  together: int = 8,
  interpret: Any = False,
) -> attention.Read:
  """Reads every page that somebody has with the queries of its owner.

  Args:
    q: queries; those of one key head lie side by side.
    own: pages of one layer.
    owner: the row that has a page.
    limit: the last slot that is seen, or one beyond; below 0 for a page that
      nobody has, or that nobody reads.
    first: the first slot that is seen, or one before; None where all are.
    together: pages that are read at a time, to fill each other's gaps; fewer
      where they are large.
    interpret: runs it without a TPU, see `pallas_call`.

  Returns:
    As `attention.read_pages`, but for pages that nobody reads: nothing is
    fetched or written for them.

  Raises:
    InputError: a page is larger than the room for it.
  """
  one = functools.partial(_read_part, together=together, interpret=interpret)
  parts = [
    one(*jax.tree.map(lambda x, i=i: x[i], (q, own, owner, limit, first)))
    for i in range(q.shape[0])
  ]
  return jax.tree.map(lambda *x: jnp.stack(x), *parts)


def _read_part(
  q: Float[Array, "R N H"],
  own: Any,
  owner: Int[Array, " M"],
  limit: Int[Array, " M"],
  first: Int[Array, " M"] | None,
  *,
  together: int,
  interpret: Any,
) -> attention.Read:
  """Reads the pages of one data-parallel part."""
  num_pages, num_kv, page, width = own.v.shape
  num_heads = q.shape[1]
  slots = num_kv * page
  dense = num_kv in (1, 2, 4) or num_kv % 8 == 0
  rows = slots if dense else page * (-(-num_kv // 8) * 8)
  size = 2 * rows * (-(-width // _LANES) * _LANES) * own.v.dtype.itemsize
  if 2 * size > _ROOM:
    most = _ROOM // (2 * size // page) // SUBLANES * SUBLANES
    raise types.InputError(
      f"sampling.page: expected <= {most} on a TPU, got {page}. Two pages, "
      f"{size} bytes each, have to fit into {_ROOM}."
    )
  together = min(together, num_pages, _ROOM // (2 * size))
  lanes = -(-num_heads // _LANES) * _LANES
  # Pages lie as `formats` says, so that this moves nothing.
  k, v = own.k.transpose(0, 3, 1, 2), own.v.transpose(0, 2, 1, 3)
  if dense:
    k, v = (x.reshape(num_pages, slots, width) for x in (k, v))
  live = _Live(
    page=jnp.argsort(limit < 0).astype(jnp.int32),
    count=jnp.sum(limit >= 0, dtype=jnp.int32)[None],
    owner=owner,
    last=jnp.minimum(limit, page - 1),
    first=first,
  )
  buffers = _Arrays(
    q=pltpu.VMEM((2, together, num_heads, width), q.dtype),
    k=pltpu.VMEM((2, together, *k.shape[1:]), k.dtype),
    v=pltpu.VMEM((2, together, *v.shape[1:]), v.dtype),
    stats=pltpu.VMEM((2, together, 2, lanes), jnp.float32),
    value=pltpu.VMEM((2, together, num_heads, width), jnp.float32),
  )
  there, scalars = pl.BlockSpec(memory_space=pltpu.HBM), pltpu.SMEM
  call = pl.pallas_call(
    functools.partial(_kernel, num_kv=num_kv),
    out_shape=[
      (
        pltpu.HBM((num_pages, 2, lanes), jnp.float32),
        pltpu.HBM((num_pages, num_heads, width), jnp.float32),
      )
    ],
    in_specs=[
      jax.tree.map(lambda _: pl.BlockSpec(memory_space=scalars), live),
      (there, there, there),
    ],
    out_specs=[(there, there)],
    scratch_shapes=[
      buffers,
      (pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))),
    ],
    name="read_pages",
    interpret=interpret,
  )
  given = (q, k, v)
  if not interpret:
    # Else XLA may copy a pool to VMEM first, if it is not large.
    given = tuple(
      pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in given
    )
  ((stats, value),) = call(live, given)
  top, total = stats[:, 0, :num_heads], stats[:, 1, :num_heads]
  return attention.Read(top, total, value)


def _kernel(
  live: _Live,
  given: tuple[Any, Any, Any],
  made: tuple[Any, Any],
  here: _Arrays,
  signals: tuple[Any, Any],
  *,
  num_kv: int,
) -> None:
  """Goes over the pages, a few at a time; on the next while on these."""
  refs = _Refs(live, _Arrays(*given, *made), here, *signals)
  together, heads, width = here.q.shape[1:]
  slots, lanes = math.prod(here.k.shape[2:-1]), here.stats.shape[3]
  count = live.count[0]
  steps = pl.cdiv(count, together)
  # How far a column is in its page, and whether its head is the query's own.
  row, column = (
    jax.lax.broadcasted_iota(jnp.int32, (heads, slots), dim) for dim in (0, 1)
  )
  mine = jax.lax.rem(column, num_kv) == jax.lax.div(row, heads // num_kv)
  row, lane = (
    jax.lax.broadcasted_iota(jnp.int32, (heads, lanes), dim) for dim in (0, 1)
  )
  diagonal = row == lane

  def go_on(step: Any, carry: Any) -> Any:
    half = jax.lax.rem(step, 2)
    _each(refs, step + 1, _coming, _START)
    _each(refs, step, _coming, _WAIT)
    _each(refs, step - 2, _going, _WAIT)
    for j in range(together):
      page = live.page[jnp.minimum(step * together + j, count - 1)]
      seen = mine & (column < (live.last[page] + 1) * num_kv)
      if live.first is not None:
        seen = seen & (column >= live.first[page] * num_kv)
      *sums, value = _read(
        here.q[half, j],
        here.k[half, j].reshape(slots, width),
        here.v[half, j].reshape(slots, width),
        seen,
      )
      # From one a sublane to one a lane.
      for i, each in enumerate(sums):
        line = jnp.sum(jnp.where(diagonal, each, 0.0), axis=0)
        here.stats[half, j, i, :] = line
      here.value[half, j] = value
    _each(refs, step, _going, _START)
    return carry

  _each(refs, 0, _coming, _START)
  jax.lax.fori_loop(0, steps, go_on, None)
  _each(refs, steps - 2, _going, _WAIT)
  _each(refs, steps - 1, _going, _WAIT)


def _each(refs: _Refs, step: Any, copies: Any, act: Any) -> None:
  """Does something to the copies of each page of a step, if there is one."""
  together = refs.here.q.shape[1]
  for j in range(together):
    at = step * together + j

    @pl.when((step >= 0) & (at < refs.live.count[0]))
    def _(at: Any = at, j: int = j) -> None:
      for copy in copies(refs, refs.live.page[at], jax.lax.rem(step, 2), j):
        act(copy)


def _coming(refs: _Refs, page: Any, half: Any, j: int) -> list[Any]:
  """Returns the copies of what a page is read for."""
  there, here = refs.there, refs.here
  pairs = (
    (there.q.at[refs.live.owner[page]], here.q.at[half, j]),
    (there.k.at[page], here.k.at[half, j]),
    (there.v.at[page], here.v.at[half, j]),
  )
  return [pltpu.make_async_copy(*pair, refs.read.at[half]) for pair in pairs]


def _going(refs: _Refs, page: Any, half: Any, j: int) -> list[Any]:
  """Returns the copies of what was read in a page."""
  there, here = refs.there, refs.here
  pairs = (
    (here.stats.at[half, j], there.stats.at[page]),
    (here.value.at[half, j], there.value.at[page]),
  )
  return [pltpu.make_async_copy(*pair, refs.written.at[half]) for pair in pairs]


def _read(
  q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """As that of `attention`, of one page; sums are columns."""

  def product(x: jax.Array, y: jax.Array, dim: int) -> jax.Array:
    dims = (((1,), (dim,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)

  score = product(q, k, 1) * (1 / math.sqrt(q.shape[-1]))
  score = jnp.where(seen, score, attention.NOWHERE)
  top = jnp.max(score, axis=1, keepdims=True)
  weight = jnp.exp(score - top)
  value = product(weight.astype(v.dtype), v, 0)
  return top, jnp.sum(weight, axis=1, keepdims=True), value
