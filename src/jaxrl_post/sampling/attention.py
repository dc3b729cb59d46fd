"""Attention of the engine's rows to their pages.

Queries go to the pages, instead of the pages to the rows: the query of a row is
taken to each of its pages, all queries of a group to the group's prompt. What
they read there is merged by its log-sum-exp, in the order of positions (Milakov
and Gimelshein 2018, arXiv 1805.02867). Which pages a row has, and what lies
beside them, changes no bit of it, as long as that is finite. Shape letters as
in `pages`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.sampling import pages as paging

# Prompt positions that all queries of a group read at a time.
_SPAN = 64
# A score that no key has; -inf would make NaN where a whole page has none.
NOWHERE = -1e30


class Read(NamedTuple):
  """What queries read in some keys: softmax without its division.

  The largest score, the sum of exp(score - largest), and the values that are
  weighted by it.
  """

  top: jax.Array
  total: jax.Array
  value: jax.Array


# What reads all own pages: `read_pages` here, or in `page_kernel`.
ReadPages: TypeAlias = Callable[
  [jax.Array, paging.Pool, jax.Array, jax.Array, jax.Array | None], Read
]


def _read(
  q: Float[Array, "... r H"], keys: paging.Pool, seen: Bool[Array, "... _ t"]
) -> Read:
  """Reads keys that lie side by side; float32 but for the two products.

  Scales of keys in 8 bits go into the scores, and those of values into the
  weights: neither is scaled itself.

  Args:
    q: queries.
    keys: k [... H t] and v [... t H], and their scales [... t] if they have.
    seen: which of them each query reads, or all of these.
  """
  k, v = (x.astype(q.dtype) for x in (keys.k, keys.v))
  scale = 1 / math.sqrt(q.shape[-1])
  score = jnp.matmul(q, k, preferred_element_type=jnp.float32) * scale
  if keys.k_scale is not None:
    score = score * keys.k_scale[..., None, :]
  score = jnp.where(seen, score, NOWHERE)
  top = jnp.max(score, axis=-1)
  weight = jnp.exp(score - top[..., None])
  total = jnp.sum(weight, axis=-1)
  if keys.v_scale is not None:
    weight = weight * keys.v_scale[..., None, :]
  value = jnp.matmul(
    weight.astype(v.dtype), v, preferred_element_type=jnp.float32
  )
  return Read(top, total, value)


def read_pages(
  q: Float[Array, "D R N H"],
  own: paging.Pool,
  owner: Int[Array, "D M"],
  limit: Int[Array, "D M"],
  first: Int[Array, "D M"] | None = None,
) -> Read:
  """Reads every own page with the queries of the row that has it.

  Args:
    q: queries; those of one key head lie side by side.
    own: pages of one layer.
    owner: the row that has a page.
    limit: the last slot that is seen, or one beyond; below 0 for a page that
      nobody has, or that nobody reads.
    first: the first slot that is seen, or one before; None where all are.

  Returns:
    What each query read in each page, [D, M, N]; of no meaning for a page that
    nobody reads.
  """

  def one(q: Any, own: paging.Pool, owner: Any, limit: Any, first: Any):
    num_kv, at = own.v.shape[1], jnp.arange(own.v.shape[2])
    asked = q.at[owner].get(mode="clip")
    asked = asked.reshape(asked.shape[0], num_kv, -1, asked.shape[-1])
    seen = at <= limit[:, None]
    if first is not None:
      seen = seen & (at >= first[:, None])
    read = _read(asked, own, seen[:, None, None])
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), read)

  return jax.vmap(one)(q, own, owner, limit, first)


class Groups(NamedTuple):
  """In which order prompts are read: those with more pages come first.

  `order` are groups, `reach[j]` is how many reach into the j-th span, in the
  part that has the most of them.
  """

  order: Int[Array, "D S"]
  reach: Int[Array, " J"]


def _span_pages(page: int, most: int) -> int:
  """Returns pages of a prompt that are read at a time: 8 times at most."""
  return max(1, min(most, max(_SPAN // page, -(-most // 8))))


def groups(table: paging.Table, page: int) -> Groups:
  """Says how to go through the prompts; the same until rows come or go."""
  most = table.prompt.shape[2]
  pages = _span_pages(page, most)
  spans = -(-most // pages) if most else 0
  begin = jnp.arange(spans) * (pages * page)
  reach = jnp.sum(table.length[..., None] > begin, axis=1)
  return Groups(
    order=jnp.argsort(-table.length, axis=1),
    reach=jnp.max(reach, axis=0).astype(jnp.int32),
  )


class View(NamedTuple):
  """Where the newest token of each row is, and what it reads.

  `pages` are those of `table` that it reads. With a window, it reads from the
  slot `first` of each page, from the position `since` of each row's prompt, and
  no row reads a span of its prompt before `span`.
  """

  table: paging.Table
  groups: Groups
  page: Int[Array, "D R"]
  slot: Int[Array, "D R"]
  pages: Int[Array, "D R W"]
  limit: Int[Array, "D M"]
  first: Int[Array, "D M"] | None = None
  since: Int[Array, "D R"] | None = None
  span: Int[Array, ""] | None = None


def view(
  table: paging.Table,
  prompts: Groups,
  position: Int[Array, "D R"],
  active: Bool[Array, "D R"],
  page: int,
) -> View:
  """Looks up one token a row.

  Args:
    table: from `advance` to these positions.
    prompts: from `groups`.
    position: of the tokens.
    active: rows that have one; the others write nothing.
    page: positions of a page.
  """

  def one(t: paging.Table, position: jax.Array, active: jax.Array):
    offset = position - t.start
    none = t.owner.shape[0]
    order = jnp.arange(offset.shape[0])
    at = t.pages.at[order, offset // page].get(mode="fill", fill_value=none)
    # Of those that do not ask, nobody has to read the pages.
    seen = jnp.where(active, offset, -1)
    limit = seen.at[t.owner].get(mode="fill", fill_value=-1)
    return jnp.where(active, at, none), offset % page, limit - t.place * page

  at, slot, limit = jax.vmap(one)(table, position, active)
  return View(table, prompts, at, slot, table.pages, limit)


def within(
  seen: View, position: Int[Array, "D R"], window: int, page: int
) -> View:
  """Returns what layers with a window see.

  Pages in which a row reads nothing, and spans of prompts in which none does,
  are not read. They are kept: all layers have the same pages.

  Args:
    seen: from `view`, of these positions; what other layers see.
    position: of the tokens.
    window: positions that a token reads, its own among them.
    page: positions of a page.
  """

  def one(t: paging.Table, limit: jax.Array, since: jax.Array):
    none, order = t.owner.shape[0], jnp.arange(t.pages.shape[1])
    offset = since - t.start
    before = offset[:, None] >= (order + 1) * page
    first = offset.at[t.owner].get(mode="fill", fill_value=0) - t.place * page
    return (
      jnp.where(before, none, t.pages),
      jnp.where(first < page, limit, -1),
      first,
    )

  since = position - window + 1
  pages, limit, first = jax.vmap(one)(seen.table, seen.limit, since)
  num_groups, most = seen.table.prompt.shape[1:]
  grouped = seen.table.group < num_groups
  least = jnp.min(jnp.where(grouped, since, most * page))
  span = jnp.maximum(least, 0) // (_span_pages(page, most) * page)
  return View(*seen[:4], pages, limit, first, since, span)


def attend(
  seen: View,
  cache: tuple[paging.Pool, paging.Pool],
  q: Float[Array, "D R N H"],
  k: Float[Array, "D R K H"],
  v: Float[Array, "D R K H"],
  *,
  read_pages: ReadPages = read_pages,
) -> tuple[Float[Array, "D R N H"], paging.Pool]:
  """Writes one token a row and attends to that row's positions.

  Args:
    seen: where the tokens are, and what they read.
    cache: own pages and those of prompts, of one layer.
    q: queries; those of one key head lie side by side.
    k: keys of the tokens.
    v: values of the tokens.
    read_pages: see `read_pages`; a back-end may have its own.

  Returns:
    What each query read, in float32, and own pages with the tokens in them.
  """
  own, prompt = cache

  own = jax.vmap(paging.write)(own, seen.page, seen.slot, k, v)
  shared = _read_prompts(seen, prompt, q)
  read = read_pages(q, own, seen.table.owner, seen.limit, seen.first)

  def one(pages: jax.Array, read: Read, q: jax.Array, shared: Read):
    def of_row(x: jax.Array, first: jax.Array, nothing: float) -> jax.Array:
      mine = x.at[pages].get(mode="fill", fill_value=nothing)
      return jnp.concatenate([first, mine], axis=1)

    top = of_row(read.top, shared.top, NOWHERE)
    weight = jnp.exp(top - jnp.max(top, axis=1, keepdims=True))
    total = jnp.sum(weight * of_row(read.total, shared.total, 0.0), axis=1)
    spans = shared.value.shape[1]
    # Added up one by one, and not in one sum: XLA's CPU back-end takes five
    # times as long for that (jaxlib 0.10.2).
    whole = jnp.zeros(q.shape, jnp.float32)
    for j in range(spans):
      whole = whole + weight[:, j, :, None] * shared.value[:, j]

    def add(j: jax.Array, whole: jax.Array) -> jax.Array:
      mine = read.value.at[pages[:, j]].get(mode="fill", fill_value=0.0)
      return whole + weight[:, spans + j, :, None] * mine

    num = pages.shape[1]
    whole = jax.lax.fori_loop(0, num, add, whole, unroll=min(num, 8))
    # An idle row has read nothing.
    return whole / jnp.maximum(total, 1e-30)[..., None]

  return jax.vmap(one)(seen.pages, read, q, shared), own


def _read_prompts(
  seen: View, prompt: paging.Pool, q: Float[Array, "D R N H"]
) -> Read:
  """Reads each group's prompt once, for all queries of the group together.

  Returns:
    What each query read in each span, [D, R, J, N].
  """
  table, count = seen.table, seen.groups.reach
  num_groups, group = table.rows.shape[1:]
  page, most = prompt.v.shape[3], table.prompt.shape[2]
  pages = _span_pages(page, most)
  batch = min(num_groups, -(-q.shape[1] // group))
  spans = (*q.shape[:2], count.shape[0])
  nothing = Read(
    jnp.full((*spans, q.shape[2]), NOWHERE, jnp.float32),
    jnp.zeros((*spans, q.shape[2]), jnp.float32),
    jnp.zeros((*spans, *q.shape[2:]), jnp.float32),
  )
  if not count.shape[0]:
    return nothing
  order = jnp.pad(
    seen.groups.order, ((0, 0), (0, batch)), constant_values=num_groups
  )
  beyond = count.shape[0] * pages - most
  lists = jnp.pad(table.prompt, ((0, 0), (0, 0), (0, beyond)))

  def proceed(carry: tuple[jax.Array, jax.Array, Read]) -> jax.Array:
    span, first, _ = carry
    return first < count.at[span].get(mode="fill", fill_value=0)

  def go_on(carry: tuple[jax.Array, jax.Array, Read]):
    span, first, old = carry
    ids = jax.lax.dynamic_slice_in_dim(order, first, batch, axis=1)
    some = jax.lax.dynamic_slice_in_dim(lists, span * pages, pages, axis=2)

    def one(t: paging.Table, pool: paging.Pool, q: Any, at: Any, since: Any):
      ids, some = at
      rows = t.rows.at[ids].get(mode="fill", fill_value=q.shape[0])
      place = span * pages * page + jnp.arange(pages * page)
      length = t.length.at[ids].get(mode="fill", fill_value=0)
      reads = (place < length[:, None])[:, None]
      if since is not None:
        reads = reads & (place >= since.at[rows].get(mode="clip")[..., None])
      read = _read_span(
        pool,
        some.at[ids].get(mode="clip"),
        q.at[rows].get(mode="clip"),
        reads,
      )
      return rows.reshape(-1), read

    rows, found = jax.vmap(one)(table, prompt, q, (ids, some), seen.since)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
      return jax.vmap(lambda x, rows, y: x.at[rows, span].set(y, mode="drop"))(
        old, rows, new
      )

    after = first + batch
    ended = after >= count[span]
    return (
      jnp.where(ended, span + 1, span),
      jnp.where(ended, 0, after),
      jax.tree.map(put, old, found),
    )

  zero = jnp.zeros((), jnp.int32)
  start = (zero if seen.span is None else seen.span, zero, nothing)
  return jax.lax.while_loop(proceed, go_on, start)[2]


def _read_span(
  pool: paging.Pool,
  pages: Int[Array, "B s"],
  q: Float[Array, "B G N H"],
  seen: Bool[Array, "B _ t"],
) -> Read:
  """Reads some pages of B prompts for the G rows of each; B x G rows of N.

  Heads and rows are one dim where anything is summed: XLA's CPU back-end of
  jaxlib 0.10.2 crashes in sums over arrays of more than six dims.
  """
  num, group, heads, width = q.shape
  num_kv = pool.v.shape[1]
  q = q.reshape(num, group, num_kv, -1, width).swapaxes(1, 2)
  q = q.reshape(num, num_kv, -1, width)
  k = pool.k.at[pages].get(mode="clip").transpose(0, 2, 3, 1, 4)
  v = pool.v.at[pages].get(mode="clip").transpose(0, 2, 1, 3, 4)
  k = k.reshape(num, num_kv, width, -1)
  v = v.reshape(num, num_kv, -1, width)

  def scale(x: jax.Array | None) -> jax.Array | None:
    if x is None:
      return None
    x = x.at[pages].get(mode="clip").swapaxes(1, 2)
    return x.reshape(num, num_kv, -1)

  keys = paging.Pool(k, v, scale(pool.k_scale), scale(pool.v_scale))
  if seen.shape[1] > 1:
    seen = jnp.repeat(seen, heads // num_kv, axis=1)
  read = _read(q, keys, seen[:, None])

  def by_row(x: jax.Array) -> jax.Array:
    x = x.reshape(num, num_kv, group, -1, *x.shape[3:]).swapaxes(1, 2)
    return x.reshape(num * group, heads, *x.shape[4:])

  return jax.tree.map(by_row, read)
