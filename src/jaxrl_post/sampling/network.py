"""The engine's steps for a model of the user's own: one memory for each row.

What a row remembers is what the model's cache holds of it, or, of a model
without one, its tokens: then each new token takes a pass over the whole row,
which is right and slow. Nothing is shared between rows and nothing is in pages;
a prompt is read once for its group, and then copied. Keys, picking and what is
reported are those of `steps`, by the same code.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import network as networks
from jaxrl_post.sampling import blocks, steps
from jaxrl_post.sampling import prefix as prefixes


@types.record
class State:
  """The engine between two blocks.

  Attributes:
    memory: of each row, without its newest token.
    token: as of `steps.DecodeState`, likewise what follows.
    position: of the newest token.
    active: rows that still sample.
    rows: what they sample.
  """

  memory: types.Tree
  token: Int[Array, " B"]
  position: Int[Array, " B"]
  active: Bool[Array, " B"]
  rows: steps.Rows


def empty(
  decoder: decoders.Decoder, *, rows: int, room: int, num_forced: int = 0
) -> State:
  """Returns an engine with no completion in it.

  Args:
    decoder: the model, a `Network`.
    rows: completions in flight.
    room: most positions of a row.
    num_forced: most tokens that a completion can be continued from.
  """
  return State(
    memory=_fresh(decoder, rows, room),
    token=jnp.zeros(rows, jnp.int32),
    position=jnp.zeros(rows, jnp.int32),
    active=jnp.zeros(rows, bool),
    rows=steps.idle(rows, num_forced),
  )


def prefill(
  params: types.Tree,
  tokens: Int[Array, "P C"],
  length: Int[Array, " P"],
  *,
  decoder: decoders.Decoder,
  room: int,
) -> prefixes.Memory:
  """Reads some prompts, or their first tokens.

  Args:
    params: weights.
    tokens: prompts, padded on the right; or their first C tokens.
    length: tokens in each whole prompt, at least 1.
    decoder: the model.
    room: most positions of a row.
  """
  nothing = prefixes.Memory(
    memory=_fresh(decoder, len(tokens), room),
    last_token=jnp.zeros(len(tokens), jnp.int32),
    length=length,
  )
  begin = jnp.zeros((), jnp.int32)
  return extend(params, nothing, tokens, begin, decoder=decoder, room=room)


def extend(
  params: types.Tree,
  prefix: prefixes.Memory,
  tokens: Int[Array, "P C"],
  begin: Int[Array, ""],
  *,
  decoder: decoders.Decoder,
  room: int,
) -> prefixes.Memory:
  """Reads the next tokens of some prompts; one after the other into a cache.

  Args:
    params: weights.
    prefix: donate it; of the tokens before these.
    tokens: the next C of each prompt, padded where a prompt has ended.
    begin: position of the first of them.
    decoder: the model.
    room: most positions of a row.
  """
  num, chunk = tokens.shape

  def one(i: jax.Array, memory: types.Tree) -> types.Tree:
    position = begin + i
    token = jax.lax.dynamic_index_in_dim(tokens, i, axis=1, keepdims=False)
    everywhere = jnp.full(num, position, jnp.int32)
    _, memory = _read(
      params,
      (memory, token, everywhere, position < prefix.length - 1),
      decoder=decoder,
      room=room,
    )
    return memory

  if _network(decoder).memory is None:
    at = begin + jnp.arange(chunk)
    memory = prefix.memory.at[:, at].set(tokens, mode="drop")
  else:
    count = jnp.clip(jnp.max(prefix.length) - 1 - begin, 0, chunk)
    memory = jax.lax.fori_loop(0, count, one, prefix.memory)
  place = prefix.length - 1 - begin
  last = jnp.take_along_axis(tokens, place[:, None], axis=1, mode="clip")[:, 0]
  here = (place >= 0) & (place < chunk)
  return prefixes.Memory(
    memory=memory,
    last_token=jnp.where(here, last, prefix.last_token),
    length=prefix.length,
  )


def insert(
  prefix: prefixes.Memory,
  state: State,
  source: Int[Array, " N"],
  at: Int[Array, "N G"],
  rows: steps.Rows,
) -> State:
  """Starts completions of some prompts in some rows, see `steps.insert`."""
  where = at.reshape(-1)

  def put(x: jax.Array, value: Any) -> jax.Array:
    return x.at[where].set(value, mode="drop")

  def each(of_prompt: jax.Array) -> jax.Array:
    return jnp.repeat(of_prompt[source], at.shape[1], axis=0)

  return State(
    memory=jax.tree.map(
      lambda x, new: put(x, each(new)), state.memory, prefix.memory
    ),
    # The last prompt token is fed again by the first decode step, which thus
    # samples every token of a completion in the same program.
    token=put(state.token, each(prefix.last_token)),
    position=put(state.position, each(prefix.length - 1)),
    active=put(state.active, True),
    rows=jax.tree.map(put, state.rows, rows),
  )


def cut(state: State, left: Int[Array, " B"]) -> State:
  """Ends the rows of which something is to be left; none is held."""
  return dataclasses.replace(state, active=state.active & (left < 0))


def resume(state: State, at: Int[Array, " N"], rows: steps.Rows) -> State:
  """Returns the state: no row is held that could go on."""
  del at, rows
  return state


def decode(
  params: types.Tree,
  state: State,
  key: jax.Array,
  *,
  decoder: decoders.Decoder,
  room: int,
  num_steps: int,
  num_top: int = 0,
) -> tuple[State, blocks.Block]:
  """Samples up to `num_steps` tokens in every active row.

  Args:
    params: weights, in the engine's dtype; never donated.
    state: donate it.
    key: the run's key.
    decoder: the model.
    room: most positions of a row.
    num_steps: width of the block; ends early when no row is active.
    num_top: most probable tokens to report with each.

  Returns:
    As `blocks.sample`.
  """

  def read(state: State) -> tuple[jax.Array, None, State]:
    given = state.memory, state.token, state.position, state.active
    found, memory = _read(params, given, decoder=decoder, room=room)
    logits = networks.logits(_network(decoder), params, found)
    return logits, None, dataclasses.replace(state, memory=memory)

  return blocks.sample(state, key, read, num_steps=num_steps, num_top=num_top)


def _network(decoder: decoders.Decoder) -> networks.Network:
  assert isinstance(decoder.config, networks.Network)
  return decoder.config


def _fresh(decoder: decoders.Decoder, num: int, room: int) -> types.Tree:
  """Returns the memory of rows that have no token; each a buffer of its own."""
  network = _network(decoder)
  if network.memory is None:
    return jnp.zeros((num, room), jnp.int32)
  return jax.tree.map(
    lambda x: jnp.tile(x[None], (num, *(1,) * x.ndim)),
    network.memory(room, decoder.dtype),
  )


def _read(
  params: types.Tree,
  given: tuple[types.Tree, jax.Array, jax.Array, jax.Array],
  *,
  decoder: decoders.Decoder,
  room: int,
) -> tuple[Float[Array, "B D"], types.Tree]:
  """Reads a token a row.

  Args:
    params: weights.
    given: memory of the rows, a token of each, its position, and whether it is
      to be remembered.
    decoder: the model.
    room: most positions of a row.

  Returns:
    The state behind each token, or its logits; and the memory.
  """
  memory, token, position, kept = given
  network = _network(decoder)
  if network.memory is None:
    row = jnp.arange(len(token))
    tokens = memory.at[row, position].set(token)
    order = jnp.broadcast_to(jnp.arange(room), tokens.shape)
    # What lies behind a token changes nothing for it.
    found = networks.states(network, params, tokens, order, dtype=decoder.dtype)
    return found[row, position], tokens
  read, cast = network.read, networks.cast(params, decoder.dtype)
  assert read is not None
  found, new = jax.vmap(lambda *row: read(cast, *row, room))(
    memory, token, position
  )

  def keep(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(kept.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

  return found, jax.tree.map(keep, new, memory)
