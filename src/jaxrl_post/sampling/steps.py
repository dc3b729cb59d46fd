"""The engine's pure steps: prefill, insert, decode.

A group's prompt is prefilled once and inserted into a cache row for each of
its completions. `decode` then makes a block of tokens for all rows in one
dispatch. The key of a token is fold_in(fold_in(key, uid), position): the same
completion comes out whatever the row, the neighbours or the block size.

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
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.sampling import pick


@types.record
class Prefix:
  """Prompts as the cache sees them: P of them, padded to one bucket.

  Attributes:
    cache: keys and values, [L, P, bucket, K, H].
    last_token: the last token of each prompt; the first decode step feeds it.
    length: tokens in each prompt.
  """

  cache: transformer.KVCache
  last_token: Int[Array, " P"]
  length: Int[Array, " P"]


@types.record
class Rows:
  """What each row of the engine is sampling, and how.

  Attributes:
    uid: identity of the completion.
    temperature: see `types.SamplingParams`; likewise the next three.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    stop_ids: padded with -1.
    max_tokens: longest completion.
    made: tokens of the completion so far, those taken from `forced` included.
    forced: what the completion begins with, whatever is drawn; -1 beyond.
  """

  uid: UInt32[Array, " B"]
  temperature: Float[Array, " B"]
  top_k: Int[Array, " B"]
  top_p: Float[Array, " B"]
  stop_ids: Int[Array, "B M"]
  max_tokens: Int[Array, " B"]
  made: Int[Array, " B"]
  forced: Int[Array, "B F"]


@types.record
class DecodeState:
  """The engine between two blocks.

  Attributes:
    cache: keys and values, [L, B, S, K, H]; slot s holds position s.
    token: the newest token of each row, not yet in the cache.
    position: its position.
    active: rows that still sample.
    rows: what they sample.
  """

  cache: transformer.KVCache
  token: Int[Array, " B"]
  position: Int[Array, " B"]
  active: Bool[Array, " B"]
  rows: Rows


@types.record
class Block:
  """What one `decode` made, column by column.

  Attributes:
    tokens: 0 where not valid.
    logprobs: in nats; 0 where not valid.
    valid: the row sampled a token at that column; one run a row, which begins
      behind the tokens that were forced.
    active: rows that go on after the block.
  """

  tokens: Int[Array, "B T"]
  logprobs: Float[Array, "B T"]
  valid: Bool[Array, "B T"]
  active: Bool[Array, " B"]


def rows_for(
  uids: Sequence[int],
  sampling: types.SamplingParams,
  *,
  num_stop_ids: int,
  width: int | None = None,
  begun: Sequence[Sequence[int]] = (),
  num_forced: int = 0,
) -> Rows:
  """Says what to sample in rows that are about to be filled.

  Args:
    uids: identity of each completion.
    sampling: how all of them are sampled.
    num_stop_ids: M, at least the number of stop ids in `sampling`.
    width: rows to return, filled up with idle ones; None for one a uid.
    begun: tokens that the completions begin with, in the order of `uids`;
      fewer than `sampling.max_tokens` and no stop token among them.
    num_forced: F, at least the longest of them; that of `empty`.

  Returns:
    NumPy arrays; the step that takes them places them.
  """
  width = len(uids) if width is None else width
  stop_ids = np.full((width, num_stop_ids), -1, np.int32)
  stop_ids[:, : len(sampling.stop_ids)] = sampling.stop_ids
  forced = np.full((width, num_forced), -1, np.int32)
  for row, tokens in enumerate(begun):
    forced[row, : len(tokens)] = tokens
  fields: dict[str, Any] = dict(
    uid=np.array([*uids, *[0] * (width - len(uids))], np.uint32),
    temperature=np.full(width, sampling.temperature, np.float32),
    top_k=np.full(width, sampling.top_k, np.int32),
    top_p=np.full(width, sampling.top_p, np.float32),
    stop_ids=stop_ids,
    max_tokens=np.full(width, sampling.max_tokens, np.int32),
    made=np.zeros(width, np.int32),
    forced=forced,
  )
  return Rows(**fields)


def empty(
  config: transformer.Config,
  *,
  rows: int,
  slots: int,
  num_stop_ids: int,
  dtype: str,
  num_forced: int = 0,
) -> DecodeState:
  """Returns an engine with no completion in it.

  Args:
    config: shape of the model.
    rows: completions in flight at a time.
    slots: positions of each, prompt included.
    num_stop_ids: most stop tokens of a row.
    dtype: of the cache.
    num_forced: most tokens that a completion can be continued from.

  Returns:
    A state of idle rows.
  """
  # Each field is a buffer of its own: one that is shared cannot be donated.
  return DecodeState(
    cache=transformer.empty_cache(config, rows, slots, dtype),
    token=jnp.zeros(rows, jnp.int32),
    position=jnp.zeros(rows, jnp.int32),
    active=jnp.zeros(rows, bool),
    rows=Rows(
      uid=jnp.zeros(rows, jnp.uint32),
      temperature=jnp.ones(rows, jnp.float32),
      top_k=jnp.zeros(rows, jnp.int32),
      top_p=jnp.ones(rows, jnp.float32),
      stop_ids=jnp.full((rows, num_stop_ids), -1, jnp.int32),
      max_tokens=jnp.zeros(rows, jnp.int32),
      made=jnp.zeros(rows, jnp.int32),
      forced=jnp.full((rows, num_forced), -1, jnp.int32),
    ),
  )


def prefill(
  params: types.Tree,
  tokens: Int[Array, "P T"],
  length: Int[Array, " P"],
  *,
  decoder: decoders.Decoder,
) -> Prefix:
  """Computes the keys and values of some prompts.

  Args:
    params: weights, in the engine's dtype.
    tokens: prompts padded on the right to a bucket.
    length: tokens in each, at least 1.
    decoder: the model.

  Returns:
    The prefix of each prompt. What lies beyond `length` is never attended to.
  """
  num, bucket = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(bucket), (num, bucket))
  cache = transformer.empty_cache(decoder.config, num, bucket, decoder.dtype)
  _, cache = transformer.forward(
    params,
    decoder.config,
    tokens,
    positions,
    cache=cache,
    dtype=decoder.dtype,
  )
  assert cache is not None
  last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
  return Prefix(cache=cache, last_token=last, length=length)


def insert(
  prefix: Prefix,
  state: DecodeState,
  source: Int[Array, ""],
  at: Int[Array, " G"],
  rows: Rows,
) -> DecodeState:
  """Starts completions of one prompt in some rows.

  Args:
    prefix: from `prefill`.
    state: donate it; nothing else holds the cache.
    source: which prompt of the prefix.
    at: rows to fill; an index past the last row is left out.
    rows: what to sample in each of them.

  Returns:
    The state with those rows active at the end of their prompt, and all other
    rows as they were.
  """
  bucket = prefix.cache.k.shape[2]
  at_slots = (slice(None), at, slice(0, bucket))

  def write(cache: jax.Array, new: jax.Array) -> jax.Array:
    return cache.at[at_slots].set(new[:, source][:, None], mode="drop")

  def put(x: jax.Array, value: Any) -> jax.Array:
    return x.at[at].set(value, mode="drop")

  return DecodeState(
    cache=transformer.KVCache(
      write(state.cache.k, prefix.cache.k),
      write(state.cache.v, prefix.cache.v),
    ),
    # The last prompt token is fed again by the first decode step, which thus
    # samples every token of a completion in the same program.
    token=put(state.token, prefix.last_token[source]),
    position=put(state.position, prefix.length[source] - 1),
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
) -> tuple[DecodeState, Block]:
  """Samples up to `num_steps` tokens in every active row.

  Args:
    params: weights, in the engine's dtype; never donated.
    state: donate it.
    key: the run's key.
    decoder: the model.
    num_steps: width of the block; ends early when no row is active.

  Returns:
    The state after the block, and the block. A row stops being active with its
    stop token, which is part of the block, or with its last allowed token.
    Forced tokens take a column each and are not part of the block.
  """
  num_rows = state.token.shape[0]
  block = Block(
    tokens=jnp.zeros((num_rows, num_steps), jnp.int32),
    logprobs=jnp.zeros((num_rows, num_steps), jnp.float32),
    valid=jnp.zeros((num_rows, num_steps), bool),
    active=state.active,
  )
  # One more, so that also a row of forced tokens only ends in a free one.
  forced_tokens = jnp.pad(
    state.rows.forced, ((0, 0), (0, 1)), constant_values=-1
  )

  def proceed(carry: tuple[jax.Array, DecodeState, Block]) -> jax.Array:
    return (carry[0] < num_steps) & jnp.any(carry[1].active)

  def one(carry: tuple[jax.Array, DecodeState, Block]):
    column, state, block = carry
    rows, active = state.rows, state.active
    hidden, cache = transformer.forward(
      params,
      decoder.config,
      state.token[:, None],
      state.position[:, None],
      cache=state.cache,
      dtype=decoder.dtype,
    )
    keys = jax.vmap(lambda uid, position: _token_key(key, uid, position))(
      rows.uid, state.position + 1
    )
    token, logprob = pick.pick(
      transformer.logits(params, decoder.config, hidden[:, 0]),
      keys,
      rows.temperature,
      rows.top_k,
      rows.top_p,
    )
    forced = jnp.take_along_axis(
      forced_tokens, rows.made[:, None], axis=1, mode="clip"
    )[:, 0]
    token = jnp.where(forced >= 0, forced, token)
    drawn = active & (forced < 0)
    made = rows.made + active.astype(jnp.int32)
    stops = jnp.any(token[:, None] == rows.stop_ids, axis=-1)
    block = Block(
      tokens=block.tokens.at[:, column].set(jnp.where(drawn, token, 0)),
      logprobs=block.logprobs.at[:, column].set(jnp.where(drawn, logprob, 0.0)),
      valid=block.valid.at[:, column].set(drawn),
      active=active & ~stops & (made < rows.max_tokens),
    )
    assert cache is not None
    state = DecodeState(
      cache=cache,
      token=jnp.where(active, token, state.token),
      position=state.position + active.astype(jnp.int32),
      active=block.active,
      rows=dataclasses.replace(rows, made=made),
    )
    return column + 1, state, block

  start = (jnp.zeros((), jnp.int32), state, block)
  _, state, block = jax.lax.while_loop(proceed, one, start)
  return state, block


def completions(
  block: Block,
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


def _token_key(key: jax.Array, uid: jax.Array, position: jax.Array):
  return jax.random.fold_in(jax.random.fold_in(key, uid), position)
