"""A user's own `flax.linen` or `flax.nnx` language model as a policy.

`linen` and `nnx` return the model of a run. Weights are the module's
parameters and nothing else: what it draws at random, or keeps besides them, is
refused. A module sees tokens and, where it asks for them, positions and the
mask; with a cache of its own it also reads one token after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen
import jax

from jaxrl_post import types
from jaxrl_post.models import decoder, flax_modules, named, network


def linen(
  module: Any,
  *,
  vocab_size: int,
  max_positions: int,
  takes: tuple[str, ...] = (),
  call: Callable[..., Any] | None = None,
  decode: Callable[..., Any] | None = None,
  head: Callable[..., Any] | None = None,
  dtype: Literal["float32", "bfloat16"] = "float32",
  chunk: int | None = None,
) -> decoder.Model:
  """Makes the policy of a run of a `flax.linen` module.

  Args:
    module: the model, causal by itself: tokens [B, T] to the logits of the next
      token behind each, [B, T, V].
    vocab_size: V, ids that it knows.
    max_positions: longest sequence.
    takes: which of "positions" [B, T] and "mask" [B, 1, T, T], True where a
      query reads a key, it gets too, by name. With both, rollouts share rows;
      else each has a row of its own.
    call: how it is called, as `call(module, tokens, ...)`; None is
      `module(tokens, ...)`.
    decode: reads one token [1, 1] and gives its logits [1, 1, V], as
      `decode(module, token)`, with its positions [1, 1] if `takes` has them.
      The module keeps what came before in the collection "cache", which it
      makes when it is called without one on a row of the greatest length, as
      flax's attention does. None reads the whole row again for each token.
    head: returns the matrix [D, V] of its last layer, as `head(module)`; the
      module then gives the states [B, T, D] before it, and logits exist for a
      chunk of tokens at a time. None computes those of all tokens of a
      microbatch at once.
    dtype: that its weights are cast to before it is run; the dtype of products
      is its own business.
    chunk: tokens whose logits a device has at a time, 1024 if None; only with
      `head`.

  Returns:
    The model, with random first weights.

  Raises:
    InputError: a setting is wrong. What the model gives is checked when the run
      is prepared.
  """
  if not isinstance(module, flax.linen.Module):
    raise types.InputError(
      f"from_flax.linen: expected a flax.linen module, got "
      f"{type(module).__name__}. Make one, as in linen(MyModel(), ...)."
    )
  _check(takes)
  own = flax_modules.Linen(
    module, takes, call or _call, decode=decode, head=head
  )
  return _model(
    own,
    f"linen {named.text(module)}",
    sizes=(vocab_size, max_positions),
    takes=takes,
    given=(call, decode, head),
    dtype=dtype,
    chunk=chunk,
  )


def nnx(
  make: Any,
  *,
  vocab_size: int,
  max_positions: int,
  takes: tuple[str, ...] = (),
  call: Callable[..., Any] | None = None,
  decode: Callable[..., Any] | None = None,
  cache: Callable[..., None] | None = None,
  head: Callable[..., Any] | None = None,
  dtype: Literal["float32", "bfloat16"] = "float32",
  chunk: int | None = None,
) -> decoder.Model:
  """Makes the policy of a run of a `flax.nnx` module.

  Args:
    make: makes the module of `nnx.Rngs`: a class, or a function. It is put into
      `eval` mode.
    vocab_size: as for `linen`, likewise the next two.
    max_positions: longest sequence.
    takes: what the model is called with besides tokens.
    call: how it is called, as `call(model, tokens, ...)`.
    decode: as for `linen`, as `decode(model, token, ...)`. The model keeps what
      came before in variables of type `nnx.Cache`.
    cache: makes those, as `cache(model, length, dtype)`, of one row of so many
      positions and for weights of that dtype; given if, and only if, `decode`
      is.
    head: as for `linen`, as `head(model)`.
    dtype: as for `linen`, likewise the next.
    chunk: tokens whose logits a device has at a time, 1024 if None; only with
      `head`.

  Returns:
    The model, with random first weights.

  Raises:
    InputError: a setting is wrong. What the model gives is checked when the run
      is prepared.
  """
  if not callable(make):
    raise types.InputError(
      f"from_flax.nnx: expected what makes a model, got {type(make).__name__}. "
      "Give its class, or a function of nnx.Rngs."
    )
  if (decode is None) != (cache is None):
    raise types.InputError(
      "from_flax.nnx: expected both of decode and cache or none, got one. A "
      "cache is made, and then read and written."
    )
  _check(takes)
  own = flax_modules.Nnx(
    make, takes, call or _call, decode=decode, cache=cache, head=head
  )
  return _model(
    own,
    f"nnx {named.text(make)}",
    sizes=(vocab_size, max_positions),
    takes=takes,
    given=(call, decode, cache, head),
    dtype=dtype,
    chunk=chunk,
  )


def _check(takes: tuple[str, ...]) -> None:
  known = flax_modules.TAKES
  if not set(takes) <= set(known):
    raise types.InputError(
      f"from_flax: expected takes of {' and '.join(known)}, or one of them, "
      f"got {takes}. Correct it."
    )


def _model(
  own: Any,
  about: str,
  *,
  sizes: tuple[int, int],
  takes: tuple[str, ...],
  given: Sequence[Callable[..., Any] | None],
  dtype: Literal["float32", "bfloat16"],
  chunk: int | None,
) -> decoder.Model:
  """Returns the model of a run; `given` functions are part of what it is."""
  how = ", ".join(named.text(f) for f in given if f is not None)
  about = f"{about} of {', '.join(('tokens', *takes))}"
  made = network.Network(
    about=f"{about} by {how}" if how else about,
    vocab_size=sizes[0],
    max_positions=sizes[1],
    packs=set(takes) == set(flax_modules.TAKES),
    spec=own.spec,
    init=own.init,
    states=own.states,
    head=own.head if own.has_head else None,
    memory=own.memory if own.has_memory else None,
    read=own.read if own.has_memory else None,
  )
  if chunk is None:
    return decoder.Model(config=made, dtype=dtype)
  if made.head is None:
    raise types.InputError(
      f"from_flax: expected chunk only with head, got {chunk}. Logits that the "
      "model gives are all there at once."
    )
  return decoder.Model(config=made, dtype=dtype, chunk=chunk)


def _call(model: Any, tokens: jax.Array, **more: jax.Array) -> Any:
  return model(tokens, **more)
