"""Modules of `flax.linen` and `flax.nnx` as functions of their weights.

What `network.Network` asks for, of either kind. A module sees tokens and what
else it takes; what it draws at random, or keeps besides weights and cache, is
refused.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
from flax import errors
from flax.core import meta

from jaxrl_post import types
from jaxrl_post.models import network
from jaxrl_post.models import spec as specs

# What a model may be called with besides tokens.
TAKES = ("positions", "mask")
_RANDOM = (
  "model: expected a model that draws no random numbers when it is run, got "
  "{what}. Leave dropout out, or make it deterministic."
)
_STATE = (
  "model: expected parameters only, got {what}, which no optimizer trains. "
  "Leave it out; in place of BatchNorm take LayerNorm or RMSNorm."
)


def _named(
  takes: tuple[str, ...], positions: jax.Array, mask: jax.Array | None
) -> dict[str, Any]:
  """Returns what a model gets besides tokens."""
  found: dict[str, Any] = {}
  if "positions" in takes:
    found["positions"] = positions
  if "mask" in takes:
    if mask is None:  # It asks for one, but has a row for each sequence.
      length = positions.shape[1]
      mask = jnp.tril(jnp.ones((len(positions), 1, length, length), bool))
    found["mask"] = mask
  return found


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
  """Puts a leaf into nested dicts."""
  for name in path[:-1]:
    tree = tree.setdefault(name, {})
  tree[path[-1]] = value


def _float32(params: types.Tree) -> types.Tree:
  return jax.tree.map(lambda w: w.astype(jnp.float32), params)


# ---------------------------------------------------------------------- linen


class Linen:
  """Functions of a linen module."""

  def __init__(
    self,
    module: flax.linen.Module,
    takes: tuple[str, ...],
    call: Callable[..., Any],
    *,
    decode: Callable[..., Any] | None,
    head: Callable[..., Any] | None,
  ) -> None:
    self._module, self._takes = module, takes
    self._call, self._decode, self._head = call, decode, head
    self.has_head, self.has_memory = head is not None, decode is not None

  def spec(self) -> types.Tree:
    """Declares the weights, by their names in the module."""
    return self._spec

  @functools.cached_property
  def _spec(self) -> types.Tree:
    made = jax.eval_shape(lambda: self._init(jax.random.key(0)))
    more = sorted(made.keys() - {"params"})
    if more:
      what = f"variables of {', '.join(more)}"
      raise types.InputError(_STATE.format(what=what))

    def one(path: tuple, leaf: Any) -> specs.Weight:
      name = "/".join(str(key.key) for key in path)
      if isinstance(leaf, meta.AxisMetadata):
        names = getattr(leaf, "names", None)
        return network.weight(name, meta.unbox(leaf), names)
      return network.weight(name, leaf, None)

    return jax.tree.map_with_path(
      one,
      made.get("params", {}),
      is_leaf=lambda x: isinstance(x, meta.AxisMetadata),
    )

  def init(self, key: jax.Array) -> types.Tree:
    """Draws first weights, in float32."""
    return _float32(meta.unbox(self._init(key)["params"]))

  def states(
    self,
    params: types.Tree,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
  ) -> Any:
    """Runs the module over rows of tokens."""
    more = _named(self._takes, positions, mask)
    return self._apply(self._call, {"params": params}, tokens, **more)

  def head(self, params: types.Tree) -> Any:
    """Returns the matrix of the last layer."""
    assert self._head is not None
    return self._apply(self._head, {"params": params})

  def memory(self, length: int, dtype: str) -> types.Tree:
    """Returns the cache of a row before its first token."""
    params = jax.tree.map(
      lambda w: jnp.zeros(w.shape, dtype), specs.abstract(self._spec, dtype)
    )
    tokens = jnp.zeros((1, length), jnp.int32)
    # Called without a cache it makes one, and leaves it empty.
    _, made = self._read(params, {}, tokens, jnp.zeros_like(tokens))
    if not jax.tree.leaves(made):
      raise types.InputError(
        "model: expected decode to keep what came before in the collection "
        "cache, got nothing in it. Decode with a cache, or without `decode`."
      )
    return made

  def read(
    self,
    params: types.Tree,
    memory: types.Tree,
    token: jax.Array,
    position: jax.Array,
    length: int,
  ) -> tuple[jax.Array, types.Tree]:
    """Reads a token into the cache of its row."""
    del length  # The cache has it.
    found, memory = self._read(
      params, memory, token[None, None], position[None, None]
    )
    return found[0, 0], memory

  def _read(
    self,
    params: types.Tree,
    memory: types.Tree,
    tokens: jax.Array,
    positions: jax.Array,
  ) -> tuple[Any, types.Tree]:
    assert self._decode is not None
    more = _named(self._takes, positions, None)
    more.pop("mask", None)  # All that is in the cache is read.
    given = {"params": params, **({"cache": memory} if memory else {})}
    found, made = self._apply(
      self._decode, given, tokens, mutable=["cache"], **more
    )
    return found, meta.unbox(made.get("cache", {}))

  def _init(self, key: jax.Array) -> Any:
    tokens = jnp.zeros((1, 2), jnp.int32)
    more = _named(self._takes, tokens, None)

    def both(module: Any, tokens: jax.Array, **more: jax.Array) -> None:
      self._call(module, tokens, **more)
      if self._head is not None:  # Weights of its own are made there.
        self._head(module)

    with jax.numpy_dtype_promotion("standard"):
      return self._module.init(key, tokens, method=both, **more)

  def _apply(
    self, method: Callable[..., Any], variables: Any, *args: Any, **more: Any
  ) -> Any:
    try:
      with jax.numpy_dtype_promotion("standard"):
        return self._module.apply(variables, *args, method=method, **more)
    except errors.InvalidRngError as error:
      raise types.InputError(
        _RANDOM.format(what="a module that asks for a random key")
      ) from error
    except errors.ModifyScopeVariableError as error:
      raise types.InputError(
        _STATE.format(what="variables that it writes to")
      ) from error


# ------------------------------------------------------------------------ nnx


class Nnx:
  """Functions of an nnx module, which is made anew where it is traced.

  What a trace makes of it besides its weights and cache are constants; the
  compiler drops the first weights that nobody reads.
  """

  def __init__(
    self,
    make: Callable[[flax.nnx.Rngs], Any],
    takes: tuple[str, ...],
    call: Callable[..., Any],
    *,
    decode: Callable[..., Any] | None,
    cache: Callable[..., None] | None,
    head: Callable[..., Any] | None,
  ) -> None:
    self._make, self._takes, self._call = make, takes, call
    self._decode, self._cache, self._head = decode, cache, head
    self.has_head, self.has_memory = head is not None, decode is not None

  def spec(self) -> types.Tree:
    """Declares the weights, by their names in the module."""
    return self._spec

  @functools.cached_property
  def _spec(self) -> types.Tree:
    made = jax.eval_shape(
      lambda: flax.nnx.state(self._new(jax.random.key(0)), flax.nnx.Param)
    )
    tree: dict[str, Any] = {}
    for path, variable in flax.nnx.to_flat_state(made):
      names = tuple(str(name) for name in path)
      (shape,) = jax.tree.leaves(variable)
      axes = variable.get_metadata("out_sharding", None)
      _put(tree, names, network.weight("/".join(names), shape, axes))
    return tree

  def init(self, key: jax.Array) -> types.Tree:
    """Draws first weights, in float32."""
    return _float32(_tree(self._new(key), flax.nnx.Param))

  def states(
    self,
    params: types.Tree,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
  ) -> Any:
    """Runs the module over rows of tokens."""
    model = self._new(jax.random.key(0), params)
    more = _named(self._takes, positions, mask)
    return self._run(model, self._call, tokens, **more)

  def head(self, params: types.Tree) -> Any:
    """Returns the matrix of the last layer."""
    assert self._head is not None
    return self._run(self._new(jax.random.key(0), params), self._head)

  def memory(self, length: int, dtype: str) -> types.Tree:
    """Returns the cache of a row before its first token."""
    made = _tree(self._with_cache(None, length, dtype), flax.nnx.Cache)
    if not made:
      raise types.InputError(
        "model: expected nnx.Cache variables of `cache`, got none. Keep what "
        "came before in such, or leave `decode` out."
      )
    return made

  def read(
    self,
    params: types.Tree,
    memory: types.Tree,
    token: jax.Array,
    position: jax.Array,
    length: int,
  ) -> tuple[jax.Array, types.Tree]:
    """Reads a token into the cache of its row."""
    assert self._decode is not None
    dtype = str(jax.tree.leaves(params)[0].dtype)
    model = self._with_cache(params, length, dtype)
    _set(model, flax.nnx.Cache, memory)
    more = _named(self._takes, position[None, None], None)
    more.pop("mask", None)  # All that is in the cache is read.
    found = self._run(model, self._decode, token[None, None], **more)
    return found[0, 0], _tree(model, flax.nnx.Cache)

  def _new(self, key: jax.Array, params: types.Tree = None) -> Any:
    """Makes the model, with weights if there are some already."""
    # Variables are laid out by the run, and not where they are made.
    with (
      flax.nnx.use_eager_sharding(False),
      jax.numpy_dtype_promotion("standard"),
    ):
      model = self._make(flax.nnx.Rngs(key))
    if not isinstance(model, flax.nnx.Module):
      raise types.InputError(
        f"from_flax.nnx: expected a function that makes a flax.nnx module, got "
        f"one that makes {type(model).__name__}. Return the model."
      )
    model.eval()
    known = flax.nnx.Param, flax.nnx.RngState
    rest = flax.nnx.state(model, flax.nnx.Not(flax.nnx.Any(*known)))
    for path, variable in flax.nnx.to_flat_state(rest):
      if isinstance(variable, flax.nnx.Variable):
        name = "/".join(str(part) for part in path)
        what = f"{type(variable).__name__} in {name}"
        raise types.InputError(_STATE.format(what=what))
    if params is not None:
      _set(model, flax.nnx.Param, params)
    return model

  def _with_cache(self, params: types.Tree, length: int, dtype: str) -> Any:
    assert self._cache is not None
    model = self._new(jax.random.key(0), params)
    with jax.numpy_dtype_promotion("standard"):
      self._cache(model, length, dtype)
    return model

  def _run(self, model: Any, method: Callable[..., Any], *args, **more) -> Any:
    before = jax.tree.leaves(flax.nnx.state(model, flax.nnx.RngState))
    with jax.numpy_dtype_promotion("standard"):
      found = method(model, *args, **more)
    after = jax.tree.leaves(flax.nnx.state(model, flax.nnx.RngState))
    if any(x is not y for x, y in zip(before, after, strict=True)):
      what = "a module that takes a random key of its rngs"
      raise types.InputError(_RANDOM.format(what=what))
    return found


def _tree(model: Any, kind: Any) -> types.Tree:
  """Returns the values of a model's variables of a kind, by their names."""
  tree: dict[str, Any] = {}
  for path, variable in flax.nnx.to_flat_state(flax.nnx.state(model, kind)):
    (value,) = jax.tree.leaves(variable)
    _put(tree, tuple(str(name) for name in path), value)
  return tree


def _set(model: Any, kind: Any, tree: types.Tree) -> None:
  """Gives a model's variables of a kind other values."""

  def value(path: tuple, old: Any) -> Any:
    del old
    found = tree
    for key in path[:-1]:  # The last is of the variable.
      found = found[str(key.key)]
    return found

  state = flax.nnx.state(model, kind)
  flax.nnx.update(model, jax.tree.map_with_path(value, state))
