"""The engine's pure steps on prompts: prefill, and extend for long ones."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.models import among, scoring
from jaxrl_post.models import decoder as decoders
from jaxrl_post.sampling import noted


@types.record
class Scores:
  """How probable the tokens of some prompts are, as far as they are read.

  Attributes:
    logprobs: of each token given those before it, in nats; 0 at the first.
      What lies beyond the prompt's length says nothing.
    hidden: the state after the last token that was read; predicts the next.
    temperature: divides the logits; 0 counts as 1.
  """

  logprobs: Float[Array, "P T"]
  hidden: Float[Array, "P D"]
  temperature: Float[Array, " P"]


@types.record
class Prefix:
  """Prompts as the cache sees them: P of them, padded to one bucket of T.

  Attributes:
    k: keys of each layer.
    v: values.
    last_token: the last token of each prompt; the first decode step feeds it.
    length: tokens in each prompt.
    scores: of their tokens; None if `prefill` was not asked for them.
    routing: experts of each token, see `decoder.noted`; None without such.
  """

  k: Float[Array, "L P T K H"]
  v: Float[Array, "L P T K H"]
  last_token: Int[Array, " P"]
  length: Int[Array, " P"]
  scores: Scores | None = None
  routing: Int[Array, "P T L X"] | None = None


@types.record
class Memory:
  """Prompts as a model of the user's own remembers them, see `network`.

  Attributes:
    memory: of each prompt, with all but its last token in it.
    last_token: as of `Prefix`, likewise the next.
    length: tokens in each prompt.
    scores: none, likewise the next.
    routing: none.
  """

  memory: types.Tree
  last_token: Int[Array, " P"]
  length: Int[Array, " P"]
  scores: None = None
  routing: None = None


# What a prompt that was read is to the engine.
Read: TypeAlias = Prefix | Memory


def prefill(
  params: types.Tree,
  tokens: Int[Array, "P C"],
  length: Int[Array, " P"],
  *,
  decoder: decoders.Decoder,
  bucket: int | None = None,
  temperature: Float[Array, " P"] | None = None,
) -> Prefix:
  """Computes the keys and values of some prompts, or of their first tokens.

  Args:
    params: weights, in the engine's dtype.
    tokens: prompts, padded on the right; or their first C tokens.
    length: tokens in each whole prompt, at least 1.
    decoder: the model.
    bucket: T, that the prefix has room for; None for C. What is beyond C is for
      `extend` to read.
    temperature: of each prompt, to score its tokens too; None scores none,
      which is another program.

  Returns:
    The prefix of each prompt. What lies beyond `length` is never attended to.
  """
  cfg, (num, chunk) = decoder.shape, tokens.shape
  shape = (cfg.num_layers, num, bucket or chunk, cfg.num_kv_heads)
  blank = jnp.zeros((*shape, cfg.head_width), decoder.dtype)
  scores = None
  if temperature is not None:
    scores = Scores(
      logprobs=jnp.zeros(blank.shape[1:3], jnp.float32),
      hidden=jnp.zeros((num, cfg.width), decoder.dtype),
      temperature=temperature,
    )
  nothing = Prefix(
    k=blank,
    v=blank,
    last_token=jnp.zeros(num, jnp.int32),
    length=length,
    scores=scores,
    routing=noted.blank(decoder, *blank.shape[1:3]),
  )
  begin = jnp.zeros((), jnp.int32)
  return extend(params, nothing, tokens, begin, decoder=decoder)


def extend(
  params: types.Tree,
  prefix: Prefix,
  tokens: Int[Array, "P C"],
  begin: Int[Array, ""],
  *,
  decoder: decoders.Decoder,
) -> Prefix:
  """Reads the next tokens of some prompts.

  Args:
    params: weights, in the engine's dtype.
    prefix: donate it; of the tokens before these.
    tokens: the next C of each prompt, padded where a prompt has ended.
    begin: position of the first of them; begin + C is in the bucket.
    decoder: the model.

  Returns:
    The prefix with them in it, and scored if those before are.
  """
  num, chunk = tokens.shape
  positions = jnp.broadcast_to(begin + jnp.arange(chunk), (num, chunk))
  slots = jnp.arange(prefix.k.shape[2])
  mask = near = (slots <= positions[..., None])[:, None]
  if decoder.shape.window is not None:
    reach = decoder.shape.window.size
    near = mask & (slots > positions[..., None] - reach)[:, None]

  def attend(cache: Any, q: jax.Array, k: jax.Array, v: jax.Array, local: Any):
    k, v = (
      jax.lax.dynamic_update_slice_in_dim(old, new, begin, axis=1)
      for old, new in zip(cache, (k, v), strict=True)
    )
    seen = mask if local is None else among.either(local, near, mask)
    return among.attention(q, k, v, seen), (k, v)

  hidden, (k, v), routing = noted.forward(
    params,
    decoder,
    tokens,
    positions,
    cache=(prefix.k, prefix.v),
    attend=attend,
  )
  if routing is not None and prefix.routing is not None:
    routing = jax.lax.dynamic_update_slice_in_dim(
      prefix.routing, routing, begin, axis=1
    )
  place = prefix.length - 1 - begin
  last = jnp.take_along_axis(tokens, place[:, None], axis=1, mode="clip")[:, 0]
  here = (place >= 0) & (place < chunk)
  return Prefix(
    k=k,
    v=v,
    last_token=jnp.where(here, last, prefix.last_token),
    length=prefix.length,
    scores=_scored(
      params, prefix.scores, tokens, hidden, begin, decoder=decoder
    ),
    routing=routing,
  )


def _scored(
  params: types.Tree,
  scores: Scores | None,
  tokens: Int[Array, "P C"],
  hidden: Float[Array, "P C D"],
  begin: Int[Array, ""],
  *,
  decoder: decoders.Decoder,
) -> Scores | None:
  """Scores the tokens of a chunk; the chunk before predicts its first."""
  if scores is None:
    return None
  before = jnp.concatenate([scores.hidden[:, None], hidden[:, :-1]], axis=1)
  logprobs, _ = scoring.token_logprobs(
    params,
    decoder.shape,
    before,
    tokens,
    jnp.broadcast_to(scores.temperature[:, None], tokens.shape),
    chunk=decoder.chunk,
  )
  first = begin + jnp.arange(tokens.shape[1]) == 0  # Nothing predicts it.
  return dataclasses.replace(
    scores,
    logprobs=jax.lax.dynamic_update_slice_in_dim(
      scores.logprobs, jnp.where(first, 0.0, logprobs), begin, axis=1
    ),
    hidden=hidden[:, -1],
  )
