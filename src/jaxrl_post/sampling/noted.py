"""The engine's forward pass, which may note where its tokens went.

With `Decoder.replays` the experts of each token that the engine reads are kept:
those of a prompt in its prefix, those of a completion in the blocks that made
it. A trainer sends the same tokens through them again, see `experts.Routing`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer


def blank(
  decoder: decoders.Decoder, *places: int
) -> Int[Array, "*places L X"] | None:
  """Returns room for the experts of tokens; None where nobody notes them."""
  each = decoder.noted
  return None if each is None else jnp.zeros((*places, *each.shape), each.dtype)


def forward(
  params: types.Tree,
  decoder: decoders.Decoder,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  *,
  cache: Any,
  attend: transformer.Attend,
) -> tuple[Float[Array, "B T D"], Any, Int[Array, "B T L X"] | None]:
  """Runs the decoder over tokens, see `transformer.forward`.

  Args:
    params: weights.
    decoder: the model.
    tokens: ids.
    positions: of the tokens.
    cache: of all layers.
    attend: reads and writes it.

  Returns:
    Hidden states, the cache, and the experts of each token in each layer, as
    small as `Decoder.noted` says; None where it says nothing.
  """
  each = decoder.noted
  hidden, kept = transformer.forward(
    params,
    decoder.shape,
    tokens,
    positions,
    cache=cache,
    attend=attend,
    mix=decoder.mix,
    counted=None if each is None else jnp.ones(tokens.shape, jnp.float32),
    dtype=decoder.dtype,
  )
  if each is None:
    return hidden, kept, None
  cache, told = kept
  return hidden, cache, jnp.moveaxis(told.ids, 0, 2).astype(each.dtype)
