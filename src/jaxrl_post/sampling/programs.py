"""The compiled steps of an engine, and its weights as they read them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_post import types
from jaxrl_post.sampling import blocks, pages


@dataclasses.dataclass(frozen=True)
class Steps:
  """The compiled steps of one engine, as a placement provides them.

  The state is `steps.DecodeState`, or `network.State` of a model of the user's
  own; a prefix one of `prefix.Read`.

  Attributes:
    size: of the cache.
    empty: see `steps`.
    layout: weights as `decode` reads them best.
    prefill: of parameters, tokens, lengths and the bucket, and temperatures
      where the prompts' tokens are scored.
    extend: see `steps`, likewise the next two.
    insert: donates the state.
    decode: donates the state; of laid out weights.
    cut: donates the state.
    resume: donates the state.
    state: shapes of the state, and how it lies on the devices.
    prefix: how a prefix lies.
    holds: whether a row that has ended can stay in the cache, see
      `types.Request.hold`; otherwise what goes on from it is made again.
  """

  size: pages.Sizes
  empty: Callable[[], types.Tree]
  layout: Callable[[types.Tree], types.Tree]
  prefill: Callable[..., types.Tree]
  extend: Callable[..., types.Tree]
  insert: Callable[..., types.Tree]
  decode: Callable[
    [types.Tree, types.Tree, jax.Array], tuple[types.Tree, blocks.Block]
  ]
  cut: Callable[[types.Tree, Any], types.Tree]
  resume: Callable[..., types.Tree]
  state: types.Tree
  prefix: types.Tree
  holds: bool = True


class LaidOut:
  """The newest weights as `decode` reads them, made once for each tree."""

  def __init__(self, layout: Callable[[types.Tree], types.Tree]) -> None:
    """Holds nothing yet."""
    self._layout = layout
    self._last: tuple[types.Tree, types.Tree] | None = None

  def of(self, params: types.Tree) -> types.Tree:
    """Returns the weights laid out; those before are dropped first."""
    if self._last is None or self._last[0] is not params:
      self.drop()
      self._last = params, self._layout(params)
    return self._last[1]

  def drop(self) -> None:
    """Holds nothing any more."""
    self._last = None
