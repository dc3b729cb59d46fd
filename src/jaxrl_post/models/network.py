"""A language model of the user's own, as the stages of a run see it.

`models.decoder` does with a `Network` what it does with a transformer's shape:
declare, draw, run and score. `models.from_flax` makes one of a flax module;
whoever has something else fills in the functions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post import types
from jaxrl_post.models import among
from jaxrl_post.models import spec as specs

# What a dim of a weight may be called, and the logical axis that it then is:
# ours, or the axes of the training mesh that a model is most often cut along.
AXES = {
  **{name: name for name in ("embed", "heads", "kv_heads", "ff", "vocab")},
  "experts": "experts",
  "fsdp": "embed",
  "tensor": "ff",
}

# What may differ, as a share of the largest number: two rows of one program;
# and two programs, whose matrix products an accelerator rounds.
_SAME, _ROUNDING = 1e-3, 0.05


@dataclasses.dataclass(frozen=True)
class Network:
  """A causal language model, as functions of its weights.

  Weights are a tree of nested dicts with names as keys.

  Attributes:
    about: what it is. Runs are continued by models of the same line.
    vocab_size: how many ids it knows.
    max_positions: longest sequence.
    packs: whether rows may have several sequences: `states` goes by the
      positions and the mask that it is given.
    spec: returns the tree of its weights, of `specs.Weight`.
    init: a random key to its first weights.
    states: weights, tokens [B, T], positions [B, T] and which keys a query
      reads [B, 1, T, T] (None unless it packs) to the logits of the next token
      behind each, [B, T, V]; with `head` to what that multiplies, [B, T, D].
    head: weights to a matrix [D, V]; None where `states` are logits.
    memory: positions and dtype of the weights to what a row with room for so
      many remembers before its first token; None for a model that reads all
      tokens of a row again for each new one.
    read: weights, memory, a token, its position and the positions that the
      memory has room for, to the state behind the token, [V] or [D], and the
      memory with it. Of one row; None without `memory`.
  """

  about: str
  vocab_size: int
  max_positions: int
  packs: bool
  spec: Callable[[], types.Tree]
  init: Callable[[jax.Array], types.Tree]
  states: Callable[..., jax.Array]
  head: Callable[[types.Tree], jax.Array] | None = None
  memory: Callable[[int, str], types.Tree] | None = None
  read: Callable[..., tuple[jax.Array, types.Tree]] | None = None

  def __post_init__(self) -> None:
    for name in ("vocab_size", "max_positions"):
      if getattr(self, name) < 2:
        raise types.InputError(
          f"model.config.{name}: expected >= 2, got {getattr(self, name)}. "
          "Correct it."
        )
    if (self.memory is None) != (self.read is None):
      raise types.InputError(
        "model.config.memory, model.config.read: expected both or none, got "
        "one. A cache is made, and then read and written."
      )


def weight(
  name: str, given: jax.ShapeDtypeStruct, names: Sequence[str | None] | None
) -> specs.Weight:
  """Declares a weight of the user's own model.

  Args:
    name: for messages.
    given: its shape and dtype.
    names: of its first dims, of `AXES`, or None for a dim that is not split.
      None instead of names lets the mesh split the largest dim that it divides.

  Raises:
    InputError: it is not of real numbers, or a name is not known.
  """
  if not jnp.issubdtype(given.dtype, jnp.floating):
    raise types.InputError(
      f"model: expected weights of floating point, got {given.dtype} in "
      f"{name}. Keep what does not train out of the parameters."
    )
  if names is None:
    return specs.Weight(given.shape, (specs.ANY,) * len(given.shape))
  if len(names) > len(given.shape):
    raise types.InputError(
      f"model: expected a name for each of the {len(given.shape)} dims of "
      f"{name}, got {tuple(names)}. Leave out what is too many."
    )
  axes = (*names, *(None,) * (len(given.shape) - len(names)))
  for axis in axes:
    if axis is not None and axis not in tuple(AXES):
      raise types.InputError(
        f"model: expected names of {', '.join(AXES)} for the dims of {name}, "
        f"got {axis!r}. Use one of them, or None."
      )
  return specs.Weight(
    given.shape, tuple("" if axis is None else AXES[axis] for axis in axes)
  )


def cast(params: types.Tree, dtype: str) -> types.Tree:
  """Returns weights in the dtype of the products."""
  return jax.tree.map(lambda w: w.astype(dtype), params)


def states(
  network: Network,
  params: types.Tree,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  *,
  segment_ids: Int[Array, "B T"] | None = None,
  prefix_ids: Int[Array, "B T"] | None = None,
  dtype: str = "float32",
  sharding: jax.sharding.NamedSharding | None = None,
) -> Float[Array, "B T D"]:
  """Runs the model over tokens.

  Args:
    network: the model.
    params: its weights.
    tokens: ids. Rows of one sequence, from the left, unless it packs.
    positions: place of each token in its own sequence.
    segment_ids: tokens attend to earlier tokens of the same segment only. Read
      where the model packs, as the next.
    prefix_ids: and to those of this segment.
    dtype: that the weights are cast to.
    sharding: how rows and positions lie on a mesh.

  Returns:
    What `Network.states` gives: with a head D is its width, else V.
  """
  mask = None
  if network.packs:
    places = among.places(segment_ids, prefix_ids, tokens.shape)
    mask = among.seen(places, places)
  found = network.states(cast(params, dtype), tokens, positions, mask)
  if sharding is None:
    return found
  return jax.lax.with_sharding_constraint(found, sharding)


def logits(
  network: Network, params: types.Tree, found: Float[Array, "*dims D"]
) -> Float[Array, "*dims V"]:
  """Returns the logits of states, in float32."""
  if network.head is None:
    return found.astype(jnp.float32)
  head = network.head(cast(params, str(found.dtype)))
  return jnp.dot(found, head, preferred_element_type=jnp.float32)


def token_logprobs(
  given: Float[Array, "B T V"],
  targets: Int[Array, "B T *E"],
  temperature: Float[Array, "B T"],
  *,
  wanted: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T *E"], Float[Array, "B T"]]:
  """Scores targets by logits that are all there, see `scoring.token_logprobs`.

  Args:
    given: logits.
    targets: ids; of a position, or a last dim of them.
    temperature: divides the logits; 0 counts as 1.
    wanted: which positions are scored; None for all.

  Returns:
    Log-probabilities and entropies in nats; 0 where not wanted.
  """
  each = _logprobs(given, temperature)
  several = targets.reshape(*temperature.shape, -1)
  taken = jnp.take_along_axis(each, several, axis=-1)
  entropy = -jnp.sum(jnp.exp(each) * each, axis=-1)
  if wanted is not None:
    taken = jnp.where(wanted[..., None], taken, 0.0)
    entropy = jnp.where(wanted, entropy, 0.0)
  return taken.reshape(targets.shape), entropy


def most_probable(
  given: Float[Array, "B T V"],
  temperature: Float[Array, "B T"],
  *,
  num: int,
  wanted: Bool[Array, "B T"] | None = None,
) -> tuple[Int[Array, "B T {num}"], Float[Array, "B T {num}"]]:
  """Returns the `num` most probable ids of each position, the most first.

  Args:
    given: logits.
    temperature: divides them.
    num: how many.
    wanted: which positions are asked.

  Returns:
    Ids and their log-probabilities, without a gradient; 0 where not wanted.
  """
  each = jax.lax.stop_gradient(_logprobs(given, temperature))
  best, ids = jax.lax.top_k(each, num)
  if wanted is not None:
    best = jnp.where(wanted[..., None], best, 0.0)
    ids = jnp.where(wanted[..., None], ids, 0)
  return ids, best


def _logprobs(given: jax.Array, temperature: jax.Array) -> jax.Array:
  divisor = jnp.where(temperature > 0, temperature, 1.0)
  return jax.nn.log_softmax(given.astype(jnp.float32) / divisor[..., None])


# --------------------------------------------------------------------- checks


def check(network: Network, dtype: str) -> None:
  """Refuses a model that does not give what it should; runs it on shapes only.

  Args:
    network: the model.
    dtype: that its weights are cast to.

  Raises:
    InputError: says what was expected, and what the model gives.
  """
  params = specs.abstract(network.spec(), jnp.dtype(dtype))
  tokens, width = _tokens(network), network.vocab_size
  what = "logits" if network.head is None else "states"
  found = jax.eval_shape(
    lambda params: network.states(params, *_whole(network)), params
  )
  if network.head is not None:
    width = found.shape[-1] if getattr(found, "shape", ()) else 0
    head = jax.eval_shape(network.head, params)
    _expect("the head", head, (width, network.vocab_size))
  _expect(what, found, (*tokens.shape, width))
  if network.memory is not None:
    read = jax.eval_shape(
      lambda params: _step_by_step(network, params, dtype), params
    )
    _expect(f"{what} of decode", read, (tokens.shape[1], width))


def _expect(what: str, found: Any, shape: tuple[int, ...]) -> None:
  """Refuses what is not one array of such a shape, of floating point."""
  if not isinstance(found, jax.ShapeDtypeStruct):
    raise types.InputError(
      f"model: expected an array {list(shape)} as {what}, got "
      f"{type(found).__name__}. Give `call` to choose it."
    )
  if found.shape != shape or not jnp.issubdtype(found.dtype, jnp.floating):
    raise types.InputError(
      f"model: expected {what} of floating point and shape {list(shape)}, got "
      f"{found.dtype} {list(found.shape)}. Correct the model, or vocab_size."
    )


def probe(network: Network, params: types.Tree) -> None:
  """Refuses a model that looks ahead, or that a cache makes another one.

  Args:
    network: the model.
    params: weights of it, on any devices.

  Raises:
    InputError: says by how much.
  """

  @jax.jit
  def differences(params: types.Tree) -> tuple[jax.Array, ...]:
    # Weights that begin as zeros would hide what reads them.
    params = _moved(params)
    one, other = network.states(params, *_whole(network))
    ahead = jnp.max(jnp.abs(one[:-1] - other[:-1]))
    apart = jnp.zeros(())
    if network.memory is not None:
      read = _step_by_step(network, params, "float32")
      apart = jnp.max(jnp.abs(one - read))
    return ahead, apart, jnp.max(jnp.abs(one))

  ahead, apart, most = (float(x) for x in differences(params))
  if ahead > _SAME * most:
    raise types.InputError(
      "model: expected a causal model, got outputs that a later token changes "
      f"by {ahead:.3g} (the largest is {most:.3g}). Mask its attention."
    )
  if apart > _ROUNDING * most:
    raise types.InputError(
      "model: expected decode to give what the whole sequence gives, got "
      f"outputs that differ by {apart:.3g} (the largest is {most:.3g}). See "
      "that positions and cache follow the token."
    )


def _moved(params: types.Tree) -> types.Tree:
  """Returns weights that are all a little off."""
  flat, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(0), len(flat))
  moved = [
    w + 0.02 * jax.random.normal(key, w.shape, w.dtype)
    for w, key in zip(flat, keys, strict=True)
  ]
  return jax.tree.unflatten(tree, moved)


def _tokens(network: Network) -> np.ndarray:
  """Returns two rows that differ in their last token."""
  count = min(5, network.max_positions)
  first = np.arange(count, dtype=np.int32) % network.vocab_size
  other = first.copy()
  other[-1] = (first[-1] + 1) % network.vocab_size
  return np.stack([first, other])


def _whole(network: Network) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Returns what `Network.states` takes for those rows, while it is traced."""
  tokens = jnp.asarray(_tokens(network))
  order = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  places = among.places(None, None, tokens.shape)
  return tokens, order, among.seen(places, places) if network.packs else None


def _step_by_step(
  network: Network, params: types.Tree, dtype: str
) -> jax.Array:
  """Returns the states of the first row, read through its memory."""
  assert network.memory is not None
  assert network.read is not None
  tokens = jnp.asarray(_tokens(network)[0])
  memory, found = network.memory(len(tokens), dtype), []
  for i in range(len(tokens)):
    position = jnp.asarray(i, jnp.int32)
    state, memory = network.read(
      params, memory, tokens[i], position, len(tokens)
    )
    found.append(state)
  return jnp.stack(found)
