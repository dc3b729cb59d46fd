"""A block of tokens, drawn one after the other in one dispatch.

What reads the newest token of each row is given: pages of keys and values, or
whatever a model remembers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post import types
from jaxrl_post.sampling import pick

# Takes a state with `token`, `position`, `active` and `rows` (`steps.Rows`);
# returns the logits behind the newest token of each row, its experts [B, L, X]
# or None, and the state with the token in memory.
Read: TypeAlias = Callable[[Any], tuple[jax.Array, jax.Array | None, Any]]


@types.record
class Block:
  """What one `decode` made, column by column.

  Attributes:
    tokens: 0 where not valid.
    logprobs: in nats; 0 where not valid.
    valid: the row sampled a token at that column; one run a row, which begins
      behind the tokens that were forced.
    top_ids: the most probable tokens of each place; 0 where not valid.
    top_logprobs: theirs.
    active: rows that go on after the block.
    made: tokens of each row's completion after it, forced ones included.
    routing: experts of the token that each column has read, see `noted`: a
      column for each token, forced ones included, from the first; None without.
  """

  tokens: Int[Array, "B T"]
  logprobs: Float[Array, "B T"]
  valid: Bool[Array, "B T"]
  top_ids: Int[Array, "B T n"]
  top_logprobs: Float[Array, "B T n"]
  active: Bool[Array, " B"]
  made: Int[Array, " B"]
  routing: Int[Array, "B T L X"] | None = None


def sample(
  state: Any,
  key: jax.Array,
  read: Read,
  *,
  num_steps: int,
  num_top: int = 0,
  routing: Int[Array, "B T L X"] | None = None,
) -> tuple[Any, Block]:
  """Samples up to `num_steps` tokens in every active row.

  Args:
    state: of an engine, see `Read`.
    key: the run's key.
    read: what reads a token.
    num_steps: width of the block; ends early when no row is active.
    num_top: most probable tokens to report with each.
    routing: room for the experts of the tokens that are read; None if `read`
      does not tell them.

  Returns:
    The state after the block, and the block. A row stops being active with a
    stop token that it draws, which is part of the block, or with its last
    allowed token. Forced tokens take a column each, stop nothing, and are not
    part of the block.
  """
  num_rows = state.token.shape[0]
  block = Block(
    tokens=jnp.zeros((num_rows, num_steps), jnp.int32),
    logprobs=jnp.zeros((num_rows, num_steps), jnp.float32),
    valid=jnp.zeros((num_rows, num_steps), bool),
    top_ids=jnp.zeros((num_rows, num_steps, num_top), jnp.int32),
    top_logprobs=jnp.zeros((num_rows, num_steps, num_top), jnp.float32),
    active=state.active,
    made=state.rows.made,
    routing=routing,
  )
  # One more, so that also a row of forced tokens only ends in a free one.
  forced_tokens = jnp.pad(
    state.rows.forced, ((0, 0), (0, 1)), constant_values=-1
  )

  def proceed(carry: tuple[jax.Array, Any, Block]) -> jax.Array:
    return (carry[0] < num_steps) & jnp.any(carry[1].active)

  def one(carry: tuple[jax.Array, Any, Block]):
    column, state, block = carry
    rows, active = state.rows, state.active
    logits, chosen, read_state = read(state)
    picked = pick.pick(
      logits,
      _token_keys(key, rows, state.position + 1),
      rows.controls,
      rows.made,
      num_top=num_top,
    )
    forced = jnp.take_along_axis(
      forced_tokens, rows.made[:, None], axis=1, mode="clip"
    )[:, 0]
    token = jnp.where(forced >= 0, forced, picked.token)
    drawn = active & (forced < 0)
    made = rows.made + active.astype(jnp.int32)
    stops = jnp.any(token[:, None] == rows.controls.stop_ids, axis=-1) & drawn
    block = dataclasses.replace(
      block,
      tokens=block.tokens.at[:, column].set(jnp.where(drawn, token, 0)),
      logprobs=block.logprobs.at[:, column].set(
        jnp.where(drawn, picked.logprob, 0.0)
      ),
      valid=block.valid.at[:, column].set(drawn),
      top_ids=block.top_ids.at[:, column].set(
        jnp.where(drawn[:, None], picked.top_ids, 0)
      ),
      top_logprobs=block.top_logprobs.at[:, column].set(
        jnp.where(drawn[:, None], picked.top_logprobs, 0.0)
      ),
      active=active & ~stops & (made < rows.max_tokens),
      made=made,
      routing=None
      if block.routing is None
      else block.routing.at[:, column].set(chosen),
    )
    state = dataclasses.replace(
      read_state,
      token=jnp.where(active, token, state.token),
      position=state.position + active.astype(jnp.int32),
      active=block.active,
      rows=dataclasses.replace(rows, made=made),
    )
    return column + 1, state, block

  start = (jnp.zeros((), jnp.int32), state, block)
  _, state, block = jax.lax.while_loop(proceed, one, start)
  return state, block


def _token_keys(key: jax.Array, rows: Any, position: jax.Array) -> jax.Array:
  """Returns the key of a token for each row; of a seeded one, by its member."""

  def one(uid: Any, seed: Any, member: Any, position: Any) -> jax.Array:
    own = jax.random.key_data(jax.random.key(seed))
    given = seed >= 0
    base = jnp.where(given, own, jax.random.key_data(key))
    base = jax.random.wrap_key_data(base)
    name = jnp.where(given, member.astype(jnp.uint32), uid)
    return jax.random.fold_in(jax.random.fold_in(base, name), position)

  return jax.vmap(one)(rows.uid, rows.seed, rows.member, position)
