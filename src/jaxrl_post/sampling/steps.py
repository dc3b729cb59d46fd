"""The engine's pure steps after the prompt: insert, decode, cut, resume.

A group's prompt is prefilled once (`prefix`) and inserted once for all of its
completions; `pages` has the cache. `decode` then makes a block of tokens for
all rows in one dispatch. The key of a token is fold_in(fold_in(key, uid),
position): the same completion comes out whatever the row, the neighbours or the
block size.

A completion may be continued: `decode` then takes the tokens that it has made
already instead of drawing them, in the same program. So the cache is rebuilt by
the very operations that built it, bit for bit with equal weights, and nothing
further is compiled. It costs one decode step a token for rows that would else
sample; a prefill of prompt and tokens would be one pass, but a program for each
length, and equal to rounding only.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.sampling import attention, blocks, noted, pick
from jaxrl_post.sampling import pages as paging
from jaxrl_post.sampling import prefix as prefixes

# Most stop tokens of a row, and most that are biased or forbidden.
MAX_IDS = 64


@types.record
class Rows:
  """What each row of the engine is sampling, and how.

  Attributes:
    uid: identity of the completion.
    tag: of its group, not 0: rows of one tag share the prompt.
    member: which row of its group it is.
    seed: see `types.SamplingParams`; -1 for none.
    controls: how tokens are picked.
    max_tokens: longest completion.
    made: tokens of the completion so far, those taken from `forced` included.
    forced: what the completion begins with, whatever is drawn; -1 beyond.
    hold: whether its pages stay its own when it ends, see `resume`.
  """

  uid: UInt32[Array, " B"]
  tag: UInt32[Array, " B"]
  member: Int[Array, " B"]
  seed: Int[Array, " B"]
  controls: pick.Controls
  max_tokens: Int[Array, " B"]
  made: Int[Array, " B"]
  forced: Int[Array, "B F"]
  hold: Bool[Array, " B"]


@types.record
class DecodeState:
  """The engine between two blocks.

  Attributes:
    own: pages of what the rows have made, of each layer.
    prompt: pages of the prompts.
    table: who has which of them.
    token: the newest token of each row, not yet in the cache.
    position: its position.
    active: rows that still sample.
    rows: what they sample.
  """

  own: tuple[paging.Pool, ...]
  prompt: tuple[paging.Pool, ...]
  table: paging.Table
  token: Int[Array, " B"]
  position: Int[Array, " B"]
  active: Bool[Array, " B"]
  rows: Rows


def rows_for(
  uids: Sequence[int],
  sampling: types.SamplingParams,
  *,
  width: int | None = None,
  begun: Sequence[Sequence[int]] = (),
  num_forced: int = 0,
  tag: int = 0,
  members: Sequence[int] = (),
  made: int = 0,
  hold: bool = False,
) -> Rows:
  """Says what to sample in rows that are about to be filled.

  Args:
    uids: identity of each completion.
    sampling: how all of them are sampled.
    width: rows to return, filled up with idle ones; None for one a uid.
    begun: tokens that the completions begin with, in the order of `uids`;
      fewer than `sampling.max_tokens` and no stop token among them.
    num_forced: F, at least the longest of them; that of `empty`.
    tag: of the group, in [1, 2^32); 0 for the first uid, plus 1. Rows that are
      inserted later with the same tag, and while a row of it is in the making,
      share the prompt of the first ones: same weights, same prompt.
    members: which rows of the group they are; empty for the first ones.
    made: tokens that the completions have already, see `resume`.
    hold: whether the rows keep their pages when they end.

  Returns:
    NumPy arrays; the step that takes them places them.
  """
  width = len(uids) if width is None else width
  forced = np.full((width, num_forced), -1, np.int32)
  for row, tokens in enumerate(begun):
    forced[row, : len(tokens)] = tokens
  idle = width - len(uids)
  members = members or range(len(uids))
  fields: dict[str, Any] = dict(
    uid=np.array([*uids, *[0] * idle], np.uint32),
    tag=np.full(width, tag or (*uids, 0)[0] % (2**32 - 1) + 1, np.uint32),
    member=np.array([*members, *[0] * idle], np.int32),
    seed=np.full(
      width, -1 if sampling.seed is None else sampling.seed, np.int32
    ),
    controls=pick.controls_for(sampling, width, MAX_IDS, MAX_IDS),
    max_tokens=np.full(width, sampling.max_tokens, np.int32),
    made=np.full(width, made, np.int32),
    forced=forced,
    hold=np.full(width, hold),
  )
  return Rows(**fields)


def empty(
  config: transformer.Config,
  size: paging.Sizes,
  *,
  dtype: str,
  num_forced: int = 0,
) -> DecodeState:
  """Returns an engine with no completion in it.

  Args:
    config: shape of the model.
    size: of the cache: rows, pages, parts.
    dtype: of the cache.
    num_forced: most tokens that a completion can be continued from.

  Returns:
    A state of idle rows.
  """
  rows = size.parts * size.rows
  # Each field is a buffer of its own: one that is shared cannot be donated.
  return DecodeState(
    own=paging.empty_pools(config, size, size.pages, dtype),
    prompt=paging.empty_pools(config, size, size.pool_pages, dtype),
    table=paging.empty_table(size),
    token=jnp.zeros(rows, jnp.int32),
    position=jnp.zeros(rows, jnp.int32),
    active=jnp.zeros(rows, bool),
    rows=idle(rows, num_forced),
  )


def idle(rows: int, num_forced: int) -> Rows:
  """Returns rows that sample nothing, each field a buffer of its own."""
  return Rows(
    uid=jnp.zeros(rows, jnp.uint32),
    tag=jnp.zeros(rows, jnp.uint32),
    member=jnp.zeros(rows, jnp.int32),
    seed=jnp.full(rows, -1, jnp.int32),
    controls=pick.idle_controls(rows, MAX_IDS, MAX_IDS),
    max_tokens=jnp.zeros(rows, jnp.int32),
    made=jnp.zeros(rows, jnp.int32),
    forced=jnp.full((rows, num_forced), -1, jnp.int32),
    hold=jnp.zeros(rows, bool),
  )


def insert(
  prefix: prefixes.Prefix,
  state: DecodeState,
  source: Int[Array, " N"],
  at: Int[Array, "N G"],
  rows: Rows,
) -> DecodeState:
  """Starts completions of some prompts in some rows.

  Args:
    prefix: from `prefill`.
    state: donate it; nothing else holds the cache.
    source: which prompt of the prefix each group has.
    at: rows to fill, of each group; an index past the last row is left out.
    rows: what to sample in each of them, in the order of `at`; no two groups
      that have rows have one tag.

  Returns:
    The state with those rows active at the end of their prompt, whatever was in
    them, and all other rows as they were.
  """
  page = state.own[0].v.shape[3]
  ended = jnp.zeros(state.active.shape, bool).at[at].set(True, mode="drop")
  table = paging.release(state.table, ended.reshape(state.table.start.shape))
  member = (rows.member % table.rows.shape[2]).reshape(at.shape)
  tag, length = rows.tag.reshape(at.shape)[:, 0], prefix.length[source]
  table, pages = paging.join(table, at, member, tag, length, page=page)

  def put(x: jax.Array, value: Any) -> jax.Array:
    return x.at[at.reshape(-1)].set(value, mode="drop")

  def each(of_group: jax.Array) -> jax.Array:
    return jnp.repeat(of_group, at.shape[1])

  return DecodeState(
    own=state.own,
    prompt=tuple(
      paging.fill(pool, pages, prefix.k[i, source], prefix.v[i, source])
      for i, pool in enumerate(state.prompt)
    ),
    table=table,
    # The last prompt token is fed again by the first decode step, which thus
    # samples every token of a completion in the same program.
    token=put(state.token, each(prefix.last_token[source])),
    position=put(state.position, each(length - 1)),
    active=put(state.active, True),
    rows=jax.tree.map(put, state.rows, rows),
  )


def cut(state: DecodeState, left: Int[Array, " B"]) -> DecodeState:
  """Ends rows, whether they still sample or are held.

  Args:
    state: donate it.
    left: tokens that remain of the completion of each row; the row holds their
      pages, and is free where it is 0. Below 0 nothing happens to the row.

  Returns:
    The state with all other pages of theirs free.
  """
  page, parts = state.own[0].v.shape[3], state.table.start.shape
  # Of the tokens of a row, the newest is not in the cache; before the first of
  # them lies the last one of the prompt.
  kept = jnp.where(left < 0, state.table.pages.shape[2], -(-left // page))
  table = paging.trim(state.table, kept.reshape(parts))
  rows = dataclasses.replace(
    state.rows, hold=jnp.where(left < 0, state.rows.hold, left > 0)
  )
  return dataclasses.replace(
    state,
    table=paging.release(table, (left == 0).reshape(parts)),
    active=state.active & (left < 0),
    rows=rows,
  )


def resume(state: DecodeState, at: Int[Array, " N"], rows: Rows) -> DecodeState:
  """Has held rows sample again, behind further tokens.

  Args:
    state: donate it.
    at: held rows; an index past the last row is left out.
    rows: what to sample in each of them. They have `made` tokens, as `cut` or
      their end has left them: the newest is fed next, the cache has the others.
      `forced` begins with those, and what the row goes on from follows.

  Returns:
    The state with those rows active.
  """
  newest = jnp.take_along_axis(
    rows.forced, rows.made[:, None] - 1, axis=1, mode="clip"
  )[:, 0]
  start = state.table.start.reshape(-1).at[at].get(mode="clip")

  def put(x: jax.Array, value: Any) -> jax.Array:
    return x.at[at].set(value, mode="drop")

  return dataclasses.replace(
    state,
    token=put(state.token, newest),
    position=put(state.position, start + rows.made),
    active=put(state.active, True),
    rows=jax.tree.map(put, state.rows, rows),
  )


def decode(
  params: types.Tree,
  state: DecodeState,
  key: jax.Array,
  *,
  decoder: decoders.Decoder,
  num_steps: int,
  num_top: int = 0,
  read_pages: attention.ReadPages = attention.read_pages,
) -> tuple[DecodeState, blocks.Block]:
  """Samples up to `num_steps` tokens in every active row.

  Args:
    params: weights, in the engine's dtype; never donated. Best unstacked
      (`transformer.unstack`) where the compiler copies a layer to use it.
    state: donate it. Its pages must be enough for the block.
    key: the run's key.
    decoder: the model.
    num_steps: width of the block; ends early when no row is active.
    num_top: most probable tokens to report with each.
    read_pages: see `attention.attend`.

  Returns:
    The state after the block, and the block. A row stops being active with a
    stop token that it draws, which is part of the block, or with its last
    allowed token. Forced tokens take a column each, stop nothing, and are not
    part of the block.
  """
  num_rows, page = state.token.shape[0], state.own[0].v.shape[3]
  parts, window = state.table.start.shape, decoder.shape.window
  if not isinstance(params["layers"], tuple):
    params = transformer.unstack(params)
  groups = attention.groups(state.table, page)

  def read(
    state: DecodeState,
  ) -> tuple[jax.Array, jax.Array | None, DecodeState]:
    here = state.position.reshape(parts), state.active.reshape(parts)
    table = paging.advance(state.table, *here, page)
    whole = near = attention.view(table, groups, *here, page)
    if window is not None:
      near = attention.within(whole, here[0], window.size, page)

    def attend(
      cache: Any, q: jax.Array, k: jax.Array, v: jax.Array, local: Any
    ):
      q, k, v = (x.reshape(*parts, *x.shape[2:]) for x in (q, k, v))
      # A plain bool, as layers are not scanned here.
      seen = near if local else whole
      read, own = attention.attend(seen, cache, q, k, v, read_pages=read_pages)
      read = read.reshape(num_rows, 1, *read.shape[2:]).astype(q.dtype)
      return read, (own, cache[1])

    hidden, cache, routing = noted.forward(
      params,
      decoder,
      state.token[:, None],
      state.position[:, None],
      cache=tuple(zip(state.own, state.prompt, strict=True)),
      attend=attend,
    )
    own = tuple(own for own, _ in cache)
    return (
      transformer.logits(params, decoder.shape, hidden[:, 0]),
      None if routing is None else routing[:, 0],
      dataclasses.replace(state, own=own, table=table),
    )

  state, made = blocks.sample(
    state,
    key,
    read,
    num_steps=num_steps,
    num_top=num_top,
    routing=noted.blank(decoder, num_rows, num_steps),
  )
  ended = ~(state.active | state.rows.hold)
  table = paging.release(state.table, ended.reshape(parts))
  return dataclasses.replace(state, table=table), made


def completions(
  block: blocks.Block,
  uids: Sequence[int],
  *,
  version: int,
  stop_ids: Sequence[int] = (),
) -> list[types.Completion]:
  """Reads the completions of a block that began and ended all of them.

  Args:
    block: from `decode`; waited for.
    uids: of its rows, in order.
    version: policy version of the weights that made it.
    stop_ids: that the rows were asked to stop at.

  Returns:
    One completion a uid.
  """
  host = jax.device_get(block)
  made = []
  for row, uid in enumerate(uids):
    count = int(host.valid[row].sum())
    tokens = tuple(host.tokens[row, :count].tolist())
    made.append(
      types.Completion(
        uid=uid,
        tokens=tokens,
        logprobs=tuple(host.logprobs[row, :count].tolist()),
        versions=(version,) * count,
        finish=finish(tokens, stop_ids),
      )
    )
  return made


def finish(
  tokens: Sequence[int], stop_ids: Sequence[int]
) -> Literal["stop", "length"]:
  """Says what ended a completion: a stop token, or the limit."""
  return "stop" if tokens[-1] in stop_ids else "length"
