"""A model together with how it is computed; static, hashable.

All that the stages of a run ask of a model is here, whether it is a transformer
of ours or a `network.Network`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post import types
from jaxrl_post.models import among, experts, network, scoring, transformer
from jaxrl_post.models import spec as specs

# What a model is: the shape of a transformer, or a model of the user's own.
Shape: TypeAlias = transformer.Config | network.Network


@dataclasses.dataclass(frozen=True)
class Decoder:
  """What a step needs to know of a model besides its weights.

  Attributes:
    config: what the model is.
    dtype: compute dtype of its matrix products; that of the weights of a
      `Network`.
    remat: what of a layer is kept for the backward pass: see `forward`.
    chunk: tokens whose logits a device has at a time.
    sharding: how rows and positions of what is scored lie on a mesh; None where
      all are on one device.
    among_rows: what attends among the tokens of a row: see `among.on`.
    mix: what computes experts: see `experts.on`.
    balance: coefficient of the loss that balances their load; 0 for none.
    replays: whether the engine notes which it chose, for the trainer to use.
  """

  config: Shape
  dtype: Literal["float32", "bfloat16"] = "float32"
  remat: transformer.Remat = "none"
  chunk: int = 1024
  sharding: jax.sharding.NamedSharding | None = None
  among_rows: among.Among = among.portable
  mix: experts.Mix = experts.portable
  balance: float = 0.0
  replays: bool = False

  @property
  def shape(self) -> transformer.Config:
    """The shape of the transformer, for what knows transformers only."""
    assert isinstance(self.config, transformer.Config), self.config
    return self.config

  @property
  def noted(self) -> jax.ShapeDtypeStruct | None:
    """What the engine notes of a token, [L, X]; None where it `replays` not."""
    if not self.replays:
      return None
    layers, mixture = self.shape.num_layers, self.shape.experts
    assert mixture is not None, "refused by `of`"
    return jax.ShapeDtypeStruct((layers, mixture.per_token), mixture.id_dtype)


@dataclasses.dataclass(frozen=True)
class Model:
  """Where a model comes from: a checkpoint, or a shape to draw at random.

  Attributes:
    path: a Hugging Face folder or a GGUF file; None draws random weights.
    config: shape of a random model, or a model of one's own
      (`models.from_flax`); None with a path.
    dtype: compute dtype of score and update. Weights are kept in float32,
      those of a reference, which never trains, in this dtype.
    remat: what of a layer is kept for the backward pass, the rest is made
      again: all of it (`none`), products with weights (`dots`), or nothing but
      what goes in (`layer`). Not of a reference, which has no such pass.
    chunk: tokens whose logits a device has at a time; bounds their memory by
      chunk x vocabulary, whatever the rows.
    balance: a loss that balances the load of experts; None has none.
    routing: who chooses the experts of a token that trains; None is its router.
  """

  path: str | None = None
  config: Shape | None = None
  dtype: Literal["float32", "bfloat16"] = "float32"
  remat: transformer.Remat = "none"
  chunk: int = 1024
  balance: experts.Balance | None = None
  routing: experts.Routing | None = None

  def __post_init__(self) -> None:
    if (self.path is None) == (self.config is None):
      raise types.InputError(
        "model: expected exactly one of path and config, got "
        f"path={self.path!r} and config={self.config!r}. Set one of them."
      )
    if self.chunk < 1:
      raise types.InputError(
        f"model.chunk: expected >= 1, got {self.chunk}. 1024 is usual."
      )
    if isinstance(self.config, network.Network) and self.remat != "none":
      raise types.InputError(
        f"model.remat: expected none with a model of your own, got "
        f"{self.remat}. Use flax's remat in its layers."
      )


def spec(config: Shape) -> types.Tree:
  """Declares the weights of a model, a tree of `specs.Weight`."""
  if isinstance(config, network.Network):
    return config.spec()
  return transformer.spec(config)


def init(
  config: Shape, key: jax.Array, dtype: jax.typing.DTypeLike
) -> types.Tree:
  """Draws the first weights of a model, a tree like `spec`."""
  if isinstance(config, network.Network):
    return jax.tree.map(lambda w: w.astype(dtype), config.init(key))
  return specs.init(transformer.spec(config), key, dtype)


def packs(config: Shape) -> bool:
  """Whether a row may have several sequences."""
  return not isinstance(config, network.Network) or config.packs


def layer_flops(config: Shape) -> Callable[[int], float]:
  """Returns what counts the operations of a token, by the keys it reads.

  Of a model of the user's own only those of its attention are known, but for
  a factor.
  """
  if isinstance(config, network.Network):
    return float
  return functools.partial(transformer.layer_flops, config)


def of(model: Model, shape: Shape) -> Decoder:
  """Returns the decoder of a model whose shape is known, on one device.

  Args:
    model: the settings.
    shape: read from its checkpoint, or given; or a model of the user's own.

  Raises:
    InputError: experts are to be balanced or replayed, and there are none.
  """
  balance = 0.0 if model.balance is None else model.balance.coef
  replays = model.routing is not None and model.routing.replay
  mixes = isinstance(shape, transformer.Config) and shape.experts is not None
  for name, given, value in (
    ("balance", balance, f"coef={balance}"),
    ("routing", replays, f"replay={replays}"),
  ):
    if given and not mixes:
      raise types.InputError(
        f"model.{name}: expected none for a model without experts, got "
        f"{value}. Leave it out."
      )
  return Decoder(
    shape,
    model.dtype,
    model.remat,
    model.chunk,
    balance=balance,
    replays=replays,
  )


def states(
  decoder: Decoder,
  params: types.Tree,
  *,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  prefix_ids: Int[Array, "B T"] | None = None,
  routing: Int[Array, "L B T X"] | None = None,
) -> Float[Array, "B T D"]:
  """Returns the hidden state behind each token, after the last norm.

  Of a `Network` without a head that is the logits of the next one.

  Args:
    decoder: the model.
    params: weights.
    tokens: ids.
    positions: as in `transformer.forward`, likewise those that follow.
    segment_ids: which tokens are one sequence, or a piece of one.
    prefix_ids: the piece before; None where all are whole.
    routing: experts of each token, as of `routed`; None, or -1 for a token,
      lets the router choose.
  """
  return routed(
    decoder,
    params,
    tokens=tokens,
    positions=positions,
    segment_ids=segment_ids,
    prefix_ids=prefix_ids,
    routing=routing,
  )[0]


def routed(
  decoder: Decoder,
  params: types.Tree,
  *,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  prefix_ids: Int[Array, "B T"] | None = None,
  routing: Int[Array, "L B T X"] | None = None,
  counted: Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], experts.Routed | None]:
  """Returns hidden states as `states`, and where tokens went.

  Args:
    decoder: the model.
    params: weights.
    tokens: as in `states`, likewise those that follow.
    positions: likewise.
    segment_ids: likewise.
    prefix_ids: likewise.
    routing: likewise.
    counted: 1 on tokens that count in the sums; None counts all.

  Returns:
    Hidden states, and the experts of each token; None without experts.
  """
  config = decoder.config
  if isinstance(config, network.Network):
    found = network.states(
      config,
      params,
      tokens,
      positions,
      segment_ids=segment_ids,
      prefix_ids=prefix_ids,
      dtype=decoder.dtype,
      sharding=decoder.sharding,
    )
    return found, None
  if counted is None:
    counted = jnp.ones(tokens.shape, jnp.float32)
  hidden, (_, told) = transformer.forward(
    params,
    config,
    tokens,
    positions,
    segment_ids=segment_ids,
    prefix_ids=prefix_ids,
    among_rows=decoder.among_rows,
    mix=decoder.mix,
    routing=routing,
    counted=counted,
    dtype=decoder.dtype,
    remat=decoder.remat,
    sharding=decoder.sharding,
  )
  return hidden, told


def logprobs(
  decoder: Decoder,
  params: types.Tree,
  *,
  tokens: Int[Array, "B T"],
  temperature: Float[Array, "B T"],
  wanted: Bool[Array, "B T"] | None = None,
  **places: jax.Array,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Scores every token of each row, given the tokens before it.

  Args:
    decoder: the model.
    params: weights.
    tokens: ids.
    temperature: that each token was sampled at; 0 counts as 1.
    wanted: which tokens are scored; None for all. What is not wanted costs no
      logits.
    **places: positions, segment_ids, prefix_ids and routing, as in `states`.

  Returns:
    As `score`.
  """
  hidden = states(decoder, params, tokens=tokens, **places)
  return score(
    decoder, params, hidden, tokens, temperature=temperature, wanted=wanted
  )


def score(
  decoder: Decoder,
  params: types.Tree,
  hidden: Float[Array, "B T D"],
  tokens: Int[Array, "B T *num"],
  *,
  temperature: Float[Array, "B T"],
  wanted: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T *num"], Float[Array, "B T"]]:
  """Scores what stands, or could stand, in the place of each token.

  Args:
    decoder: the model.
    params: weights.
    hidden: what `states` returns for the tokens.
    tokens: ids; of a place, or a last dim of them.
    temperature: that each token was sampled at; 0 counts as 1.
    wanted: which places are scored; None for all.

  Returns:
    Log-probabilities and entropies in nats, aligned with `tokens`; 0 where not
    wanted, and at the first position, which nothing predicts. The first token
    of a later segment is scored by the segment before it, which means nothing.
  """
  # Hidden states stay as they lie on the devices; what the last ones predict
  # is dropped.
  targets, temperature, wanted = jax.tree.map(
    lambda x: jnp.roll(x, -1, axis=1), (tokens, temperature, wanted)
  )
  if _gives_logits(decoder.config):
    found = network.token_logprobs(hidden, targets, temperature, wanted=wanted)
  else:
    found = scoring.token_logprobs(
      *_head(decoder, params, hidden),
      hidden,
      targets,
      temperature,
      chunk=decoder.chunk,
      wanted=wanted,
      sharding=decoder.sharding,
    )
  taken, entropy = (_aligned(x) for x in found)
  return taken, entropy


def most_probable(
  decoder: Decoder,
  params: types.Tree,
  hidden: Float[Array, "B T D"],
  num: int,
  *,
  temperature: Float[Array, "B T"],
  wanted: Bool[Array, "B T"] | None = None,
) -> tuple[Int[Array, "B T {num}"], Float[Array, "B T {num}"]]:
  """Finds what is most probable in the place of each token.

  Args:
    decoder: the model.
    params: weights.
    hidden: what `states` returns for the tokens.
    num: how many ids.
    temperature: that each token was sampled at.
    wanted: which places are asked.

  Returns:
    Ids, the most probable first, and their log-probabilities, aligned with
    tokens; without a gradient, and 0 where not wanted.
  """
  temperature, wanted = jax.tree.map(
    lambda x: jnp.roll(x, -1, axis=1), (temperature, wanted)
  )
  if _gives_logits(decoder.config):
    ids, found = network.most_probable(
      hidden, temperature, num=num, wanted=wanted
    )
  else:
    ids, found = scoring.most_probable(
      *_head(decoder, params, hidden),
      hidden,
      temperature,
      num=num,
      chunk=decoder.chunk,
      wanted=wanted,
      sharding=decoder.sharding,
    )
  return _aligned(ids), _aligned(found)


def _gives_logits(config: Shape) -> bool:
  return isinstance(config, network.Network) and config.head is None


def _head(
  decoder: Decoder, params: types.Tree, hidden: jax.Array
) -> tuple[types.Tree, scoring.Tied]:
  """Returns what `scoring` takes for the head of a model."""
  config = decoder.config
  if not isinstance(config, network.Network):
    return params, config
  assert config.head is not None
  return {"head": config.head(params)}, scoring.Untied()


def _aligned(x: jax.Array) -> jax.Array:
  """Moves what each position predicts to the token it is about."""
  return jnp.pad(x[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (x.ndim - 2)))
