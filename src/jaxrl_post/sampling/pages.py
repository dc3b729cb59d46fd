"""The cache of the engine: keys and values in pages, shared by a group.

A page holds some consecutive positions of one sequence, in every layer. The
prompt of a group is in pages of the pool `prompt`, once for all its rows; what
a row makes is in pages of the pool `own`, which it takes when it comes to them
and gives back with its end. So rows of any lengths waste less than a page each.

The first dim of everything is the data-parallel part: rows, pages and tables
of a part know of no other. Within a part R rows have M pages of their own of p
positions, up to W each; S groups of up to G rows have prompts of up to U pages.
An index past the last row, page or group stands for none.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from jaxrl_post import types
from jaxrl_post.models import quantize, transformer


class Pool(NamedTuple):
  """Pages of one layer; keys lie transposed, as the product reads them.

  In 8 bits, a key or value is its integers times a float32 scale of its slot
  and head; else there are no scales.
  """

  k: Num[Array, "D M K H p"]
  v: Num[Array, "D M K p H"]
  k_scale: Float[Array, "D M K p"] | None = None
  v_scale: Float[Array, "D M K p"] | None = None


@types.record
class Table:
  """Which page holds what.

  Attributes:
    pages: own pages of each row, in the order of their positions.
    owner: the row that has a page.
    place: which of that row's pages it is.
    free: pages that nobody has, the next to take last.
    num_free: how many of them.
    start: the position of a row's first own slot: the last of its prompt.
    group: where a row's prompt is.
    member: which row of its group it is.
    tag: of a group; 0 where there is none.
    prompt: pages of each group.
    length: prompt positions in them: all but the last.
    rows: of each group, by `member`.
    prompt_free: pages of the pool of prompts that nobody has.
    num_prompt_free: how many of them.
  """

  pages: Int[Array, "D R W"]
  owner: Int[Array, "D M"]
  place: Int[Array, "D M"]
  free: Int[Array, "D M"]
  num_free: Int[Array, " D"]
  start: Int[Array, "D R"]
  group: Int[Array, "D R"]
  member: Int[Array, "D R"]
  tag: UInt32[Array, "D S"]
  prompt: Int[Array, "D S U"]
  length: Int[Array, "D S"]
  rows: Int[Array, "D S G"]
  prompt_free: Int[Array, "D Q"]
  num_prompt_free: Int[Array, " D"]


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How large a cache is; all but `parts` of one data-parallel part.

  Attributes:
    parts: D.
    rows: R.
    group: G, most rows of one prompt.
    page: p, positions of a page.
    row_pages: W, most own pages of a row.
    prompt_pages: U, most pages of a prompt.
    pages: M.
    pool_pages: Q, pages of the pool of prompts.
  """

  parts: int
  rows: int
  group: int
  page: int
  row_pages: int
  prompt_pages: int
  pages: int
  pool_pages: int


def sizes(
  *,
  rows: int,
  group: int,
  page: int,
  max_prompt: int,
  max_tokens: int,
  share: float = 1.0,
  parts: int = 1,
  multiple: int = 1,
) -> Sizes:
  """Returns the sizes of a cache.

  Args:
    rows: completions in flight at a time, in all parts.
    group: most rows of one prompt.
    page: positions of a page; no more than a completion needs are used.
    max_prompt: longest prompt, in tokens.
    max_tokens: longest completion.
    share: of the pages that all rows together can need, in (0, 1]; at least
      those of one row.
    parts: data-parallel parts.
    multiple: what the positions of a page are rounded up to a multiple of.
  """
  page = max(1, min(page, max(max_tokens, max_prompt - 1)))
  page = -(-page // multiple) * multiple
  row_pages = -(-max_tokens // page)
  prompt_pages = -(-(max_prompt - 1) // page)
  here = rows // parts
  return Sizes(
    parts=parts,
    rows=here,
    group=group,
    page=page,
    row_pages=row_pages,
    prompt_pages=prompt_pages,
    pages=max(row_pages, math.ceil(share * here * row_pages)),
    pool_pages=max(prompt_pages, math.ceil(share * here * prompt_pages)),
  )


def empty_pools(
  cfg: transformer.Config, size: Sizes, num_pages: int, dtype: str
) -> tuple[Pool, ...]:
  """Returns pages of zeros for every layer, each a buffer of its own.

  Args:
    cfg: shape of the model.
    size: of the cache.
    num_pages: of a part.
    dtype: of keys and values; "int8" has scales.
  """
  lead = (size.parts, num_pages, cfg.num_kv_heads)

  def scale() -> jax.Array | None:
    return jnp.zeros((*lead, size.page)) if dtype == "int8" else None

  return tuple(
    Pool(
      jnp.zeros((*lead, cfg.head_width, size.page), dtype),
      jnp.zeros((*lead, size.page, cfg.head_width), dtype),
      scale(),
      scale(),
    )
    for _ in range(cfg.num_layers)
  )


def write(
  pool: Pool,
  page: Int[Array, " R"],
  slot: Int[Array, " R"],
  k: Float[Array, "R K H"],
  v: Float[Array, "R K H"],
) -> Pool:
  """Writes one token a row.

  Args:
    pool: of rows, of one layer and one part.
    page: that a row writes to; past the last one it writes nothing.
    slot: of the page.
    k: keys, quantized here if the pool is.
    v: values, likewise.
  """
  k, k_scale = _as_stored(k, pool)
  v, v_scale = _as_stored(v, pool)
  at = (page, slice(None), slot)
  return Pool(
    pool.k.at[page, :, :, slot].set(k, mode="drop"),
    pool.v.at[at].set(v, mode="drop"),
    _set(pool.k_scale, at, k_scale),
    _set(pool.v_scale, at, v_scale),
  )


def _as_stored(x: jax.Array, pool: Pool) -> tuple[jax.Array, jax.Array | None]:
  """Returns keys or values as a pool has them; a scale is over the last dim."""
  if pool.k_scale is None:
    return x, None
  dims = (x.ndim - 1,)
  return quantize.values(x, dims), quantize.scales(x, dims)


def _set(x: jax.Array | None, at: Any, value: jax.Array | None) -> Any:
  return None if x is None else x.at[at].set(value, mode="drop")


def empty_table(size: Sizes) -> Table:
  """Returns a table in which nobody has a page; no two fields share memory."""
  d, r, m, q = size.parts, size.rows, size.pages, size.pool_pages

  def full(shape: tuple[int, ...], value: int) -> jax.Array:
    return jnp.full((d, *shape), value, jnp.int32)

  def stack(num: int) -> jax.Array:
    return jnp.tile(jnp.arange(num, dtype=jnp.int32)[::-1], (d, 1))

  fields: dict[str, Any] = dict(
    pages=full((r, size.row_pages), m),
    owner=full((m,), r),
    place=full((m,), 0),
    free=stack(m),
    num_free=full((), m),
    start=full((r,), 0),
    group=full((r,), r),
    member=full((r,), 0),
    tag=jnp.zeros((d, r), jnp.uint32),
    prompt=full((r, size.prompt_pages), q),
    length=full((r,), 0),
    rows=full((r, size.group), r),
    prompt_free=stack(q),
    num_prompt_free=full((), q),
  )
  return Table(**fields)


def _give(
  free: jax.Array, count: jax.Array, pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Puts pages onto a stack of free ones; an index past the last is none."""
  none = free.shape[0]
  real = pages < none
  at = jnp.where(real, count + jnp.cumsum(real) - 1, none)
  return free.at[at].set(pages, mode="drop"), count + jnp.sum(real)


def _take(
  free: jax.Array, count: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Takes a page where one is wanted; returns them and what is left."""
  at = count - jnp.cumsum(wanted)
  page = jnp.where(
    wanted & (at >= 0), free.at[at].get(mode="clip"), free.shape[0]
  )
  return page, count - jnp.sum(wanted)


def release(table: Table, ended: Bool[Array, "D R"]) -> Table:
  """Gives back the pages of rows, and of groups that have no row any more.

  Args:
    table: what there is.
    ended: the rows.

  Returns:
    The table without them.
  """
  kept = jnp.where(ended, 0, table.pages.shape[2])
  return jax.vmap(_leave)(trim(table, kept), ended)


def _leave(t: Table, ended: jax.Array) -> Table:
  """Has rows leave their groups."""
  num_rows, num_groups = t.start.shape[0], t.tag.shape[0]
  group = jnp.where(ended, num_groups, t.group)
  left = jnp.zeros(num_groups, jnp.int32).at[group].add(1, mode="drop") > 0
  none = t.prompt_free.shape[0]
  unused = jnp.where(left[:, None], none, t.prompt).reshape(-1)
  prompt_free, num_prompt_free = _give(t.prompt_free, t.num_prompt_free, unused)
  # Through the rows' own field: one that left its group is no query of it.
  rows = jnp.full_like(t.rows, num_rows)
  rows = rows.at[group, t.member].set(jnp.arange(num_rows), mode="drop")
  return dataclasses.replace(
    t,
    group=group,
    tag=jnp.where(left, t.tag, 0),
    prompt=jnp.where(left[:, None], t.prompt, none),
    length=jnp.where(left, t.length, 0),
    rows=rows,
    prompt_free=prompt_free,
    num_prompt_free=num_prompt_free,
  )


def trim(table: Table, kept: Int[Array, "D R"]) -> Table:
  """Gives back the pages of rows beyond so many of each."""

  def one(t: Table, kept: jax.Array) -> Table:
    num_rows, none = t.start.shape[0], t.owner.shape[0]
    beyond = jnp.arange(t.pages.shape[1]) >= kept[:, None]
    gone = jnp.where(beyond, t.pages, none).reshape(-1)
    free, num_free = _give(t.free, t.num_free, gone)
    return dataclasses.replace(
      t,
      pages=jnp.where(beyond, none, t.pages),
      owner=t.owner.at[gone].set(num_rows, mode="drop"),
      free=free,
      num_free=num_free,
    )

  return jax.vmap(one)(table, kept)


def join(
  table: Table,
  at: Int[Array, "N G"],
  member: Int[Array, "N G"],
  tag: UInt32[Array, " N"],
  length: Int[Array, " N"],
  *,
  page: int,
) -> tuple[Table, Int[Array, "D N U"]]:
  """Puts rows into groups, in each part that has some of them.

  Args:
    table: what there is; the rows have nothing in it, see `release`.
    at: rows of each group, numbered through all parts.
    member: which of the group each of them is, in [0, G).
    tag: of the groups, not 0, none twice; rows join the one of that tag, if it
      is there.
    length: tokens of their prompts.
    page: positions of a page.

  Returns:
    The table, and the pages of the prompts in each part. There must be enough.
  """
  num_rows = table.start.shape[1]
  part = jnp.arange(table.start.shape[0])
  local = at - part[:, None, None] * num_rows
  local = jnp.where((local >= 0) & (local < num_rows), local, num_rows)
  shared = length - 1

  def one(t: Table, mine: jax.Array) -> tuple[Table, jax.Array]:
    (num_groups, num_places), none = t.prompt.shape, t.prompt_free.shape[0]
    some = jnp.any(mine < num_rows, axis=1)
    same = t.tag == tag[:, None]
    known = jnp.any(same, axis=1)
    new = some & ~known
    # The first new group takes the first place that is free, and so on.
    spare = jnp.nonzero(t.tag == 0, size=tag.shape[0], fill_value=num_groups)
    group = jnp.where(
      known, jnp.argmax(same, axis=1), spare[0][jnp.cumsum(new) - 1]
    )
    group = jnp.where(some, group, num_groups)
    place = jnp.where(mine < num_rows, member, t.rows.shape[1])
    pages = jnp.arange(num_places) * page < shared[:, None]
    wanted = (new[:, None] & pages).reshape(-1)
    taken, num_left = _take(t.prompt_free, t.num_prompt_free, wanted)
    taken = taken.reshape(pages.shape)
    known = known[:, None]
    taken = jnp.where(known, t.prompt.at[group].get(mode="clip"), taken)
    taken = jnp.where(some[:, None], taken, none)

    def for_rows(of_group: jax.Array) -> jax.Array:
      return jnp.broadcast_to(of_group[:, None], mine.shape)

    return dataclasses.replace(
      t,
      start=t.start.at[mine].set(for_rows(shared), mode="drop"),
      group=t.group.at[mine].set(for_rows(group), mode="drop"),
      member=t.member.at[mine].set(member, mode="drop"),
      tag=t.tag.at[group].set(tag, mode="drop"),
      prompt=t.prompt.at[group].set(taken, mode="drop"),
      length=t.length.at[group].set(shared, mode="drop"),
      rows=t.rows.at[for_rows(group), place].set(mine, mode="drop"),
      num_prompt_free=num_left,
    ), taken

  return jax.vmap(one)(table, local)


def fill(
  pool: Pool,
  at: Int[Array, "D N U"],
  k: Float[Array, "N T K H"],
  v: Float[Array, "N T K H"],
) -> Pool:
  """Writes prompts into their pages.

  Args:
    pool: of prompts, of one layer.
    at: pages, from `join`.
    k: keys of the prompts, quantized here if the pool is; what lies beyond
      their length is never read.
    v: values, likewise.
  """
  page, (_, num, most) = pool.v.shape[3], at.shape
  size = most * page

  def in_pages(x: jax.Array) -> jax.Array:
    beyond = max(0, size - x.shape[1])
    x = jnp.pad(x[:, :size], ((0, 0), (0, beyond), (0, 0), (0, 0)))
    return x.reshape(num * most, page, *x.shape[2:])

  (k, k_scale), (v, v_scale) = (_as_stored(in_pages(x), pool) for x in (k, v))

  def heads_first(scale: jax.Array | None) -> jax.Array | None:
    return None if scale is None else scale.swapaxes(1, 2)

  def one(pool: Pool, at: jax.Array) -> Pool:
    return Pool(
      pool.k.at[at].set(k.transpose(0, 2, 3, 1), mode="drop"),
      pool.v.at[at].set(v.transpose(0, 2, 1, 3), mode="drop"),
      _set(pool.k_scale, at, heads_first(k_scale)),
      _set(pool.v_scale, at, heads_first(v_scale)),
    )

  return jax.vmap(one)(pool, at.reshape(at.shape[0], -1))


def advance(
  table: Table,
  position: Int[Array, "D R"],
  active: Bool[Array, "D R"],
  page: int,
) -> Table:
  """Gives every active row the page that its position lies in.

  There must be enough: `Sizes.pages` are for all rows, or the host counts.
  """

  def one(t: Table, position: jax.Array, active: jax.Array) -> Table:
    offset = position - t.start
    order = jnp.arange(offset.shape[0])
    taken, num_free = _take(t.free, t.num_free, active & (offset % page == 0))
    real = taken < t.owner.shape[0]
    place = jnp.where(real, offset // page, t.pages.shape[1])
    return dataclasses.replace(
      t,
      pages=t.pages.at[order, place].set(taken, mode="drop"),
      owner=t.owner.at[taken].set(order, mode="drop"),
      place=t.place.at[taken].set(place, mode="drop"),
      num_free=num_free,
    )

  return jax.vmap(one)(table, position, active)
