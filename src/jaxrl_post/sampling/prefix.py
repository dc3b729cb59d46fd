"""The engine's pure steps on prompts: prefill, and extend for long ones."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer


@types.record
class Prefix:
  """Prompts as the cache sees them: P of them, padded to one bucket of T.

  Attributes:
    k: keys of each layer.
    v: values.
    last_token: the last token of each prompt; the first decode step feeds it.
    length: tokens in each prompt.
  """

  k: Float[Array, "L P T K H"]
  v: Float[Array, "L P T K H"]
  last_token: Int[Array, " P"]
  length: Int[Array, " P"]


def prefill(
  params: types.Tree,
  tokens: Int[Array, "P C"],
  length: Int[Array, " P"],
  *,
  decoder: decoders.Decoder,
  bucket: int | None = None,
) -> Prefix:
  """Computes the keys and values of some prompts, or of their first tokens.

  Args:
    params: weights, in the engine's dtype.
    tokens: prompts, padded on the right; or their first C tokens.
    length: tokens in each whole prompt, at least 1.
    decoder: the model.
    bucket: T, that the prefix has room for; None for C. What is beyond C is for
      `extend` to read.

  Returns:
    The prefix of each prompt. What lies beyond `length` is never attended to.
  """
  cfg, (num, chunk) = decoder.config, tokens.shape
  shape = (cfg.num_layers, num, bucket or chunk, cfg.num_kv_heads)
  blank = jnp.zeros((*shape, cfg.head_width), decoder.dtype)
  nothing = Prefix(
    k=blank, v=blank, last_token=jnp.zeros(num, jnp.int32), length=length
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
    The prefix with them in it.
  """
  num, chunk = tokens.shape
  positions = jnp.broadcast_to(begin + jnp.arange(chunk), (num, chunk))
  slots = jnp.arange(prefix.k.shape[2])
  mask = (slots <= positions[..., None])[:, None]

  def attend(cache: Any, q: jax.Array, k: jax.Array, v: jax.Array):
    k, v = (
      jax.lax.dynamic_update_slice_in_dim(old, new, begin, axis=1)
      for old, new in zip(cache, (k, v), strict=True)
    )
    return transformer.attention(q, k, v, mask), (k, v)

  _, (k, v) = transformer.forward(
    params,
    decoder.config,
    tokens,
    positions,
    cache=(prefix.k, prefix.v),
    attend=attend,
    dtype=decoder.dtype,
  )
  place = prefix.length - 1 - begin
  last = jnp.take_along_axis(tokens, place[:, None], axis=1, mode="clip")[:, 0]
  here = (place >= 0) & (place < chunk)
  return Prefix(
    k=k,
    v=v,
    last_token=jnp.where(here, last, prefix.last_token),
    length=prefix.length,
  )
