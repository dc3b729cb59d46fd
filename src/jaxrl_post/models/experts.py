"""Mixture of experts: a token goes through a few of many feed-forward layers.

Shazeer et al. 2017 (arXiv 1701.06538), as Qwen3-MoE has it: a softmax over all
experts in float32, of which the largest are taken, and no token is dropped.
Tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies each run of
them with the matrices of its expert.

Where a mesh splits the experts, a device gathers the tokens of its peers along
that axis, computes its own experts for all of them, and what they make is
summed and scattered back: an expert's weights never travel along it. Of n
parts, n - 1 times a token's width arrives. An exchange of all with all is not
less, as long as a token has n experts or more; it needs the same room, as all
tokens may want one expert; and XLA has none of ragged sizes for CPUs.

Dims, beside those of `types`: N tokens, M = N X choices, e experts of a device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_post import types

# What a backward pass keeps of routing, whatever else it makes again: a token
# that goes elsewhere the second time would have the gradient of another pass.
KEPT = "routing"
# Rows of an expert that are multiplied at a time for the gradient of a weight.
_TILE = 512


@dataclasses.dataclass(frozen=True)
class Experts:
  """How many experts a layer has, and how many a token goes through.

  Attributes:
    num: experts of a layer.
    per_token: that a token goes through.
    normalize: the weights of a token's experts add up to 1; otherwise they are
      the probabilities of the softmax over all experts.
  """

  num: int
  per_token: int
  normalize: bool = True

  def __post_init__(self) -> None:
    rules = (
      ("num", self.num, ">= 2", self.num >= 2),
      (
        "per_token",
        self.per_token,
        f"1 to {self.num}, the experts there are",
        1 <= self.per_token <= self.num,
      ),
    )
    for name, value, rule, holds in rules:
      if not holds:
        raise types.InputError(
          f"model.config.experts.{name}: expected {rule}, got {value}. Correct "
          "it."
        )

  @property
  def id_dtype(self) -> Literal["int8", "int16"]:
    """The smaller dtype that holds the number of an expert, and -1."""
    return "int8" if self.num <= 2**7 else "int16"


@dataclasses.dataclass(frozen=True)
class Balance:
  """Adds a loss that is least where all experts have as much to do.

  Attributes:
    coef: the loss is multiplied by this; `router_aux_loss_coef` of checkpoints.
  """

  coef: float = 0.001

  def __post_init__(self) -> None:
    if not 0 < self.coef <= 1:
      raise types.InputError(
        f"model.balance.coef: expected in (0, 1], got {self.coef}. 0.001 is "
        "usual; without model.balance there is no such loss."
      )


@dataclasses.dataclass(frozen=True)
class Routing:
  """Who chooses the experts of the tokens that train.

  Attributes:
    replay: the engine that sampled them: the trainer sends each token through
      the experts that the engine sent it through, weighted by its own router
      (Ma et al. 2025, arXiv 2510.11370, "R3"). False has its router choose.
  """

  replay: bool = True


class Weights(NamedTuple):
  """The weights of a layer, in the compute dtype."""

  router: jax.Array  # [D, E]
  gate: jax.Array  # [E, D, F]
  up: jax.Array  # [E, D, F]
  down: jax.Array  # [E, F, D]


@types.record
class Routed:
  """Where the tokens of a pass went, in each layer.

  Attributes:
    ids: experts of each token, the most probable first.
    counts: how many of the tokens that count chose each expert.
    probs: the router's probabilities, summed over the same tokens; these have
      a gradient.
    given: how many of the tokens that count have experts that were given, in
      place of those that the router would choose; None where none could.
    differing: the share of these that the router would not choose, see
      `differing`, summed over the same tokens.
  """

  ids: Int[Array, "*L B T X"]
  counts: Float[Array, "*L E"]
  probs: Float[Array, "*L E"]
  given: Float[Array, "*L"] | None = None
  differing: Float[Array, "*L"] | None = None


class Mixed(NamedTuple):
  """What a layer made of its tokens, and who made it."""

  made: jax.Array  # [B, T, D]
  ids: jax.Array  # [B, T, X], experts that each token went through
  probs: jax.Array  # [B, T, E], of the router
  own: jax.Array  # [B, T, X], what the router chooses, whatever was given


# Takes a layer's input [B, T, D], its weights, and the experts of each token
# [B, T, X], None to choose them, or -1 to choose a token's.
Mix: TypeAlias = Callable[
  [Experts, jax.Array, Weights, jax.Array | None], Mixed
]


class _Axes(NamedTuple):
  """Mesh axes that split weights, each None where they are whole."""

  experts: str | None
  width: str | None
  ff: str | None
  gathers: bool  # whether tokens are split along that of the experts, too


def portable(
  cfg: Experts, x: jax.Array, w: Weights, chosen: jax.Array | None
) -> Mixed:
  """Computes all experts on one device; a `Mix`."""
  feed = functools.partial(_feed, cfg, _Axes(None, None, None, False))
  return _mixed(functools.partial(_route, cfg), feed, x, w, chosen)


def on(mesh: jax.sharding.Mesh, rules: Mapping[str, str], tokens: jax.P) -> Mix:
  """Says to compute experts where their weights lie.

  Args:
    mesh: that of weights and tokens.
    rules: logical axis of a weight to mesh axis.
    tokens: how rows and positions lie.

  Returns:
    What computes them. Values and gradients are those of `portable`, but for
    rounding: sums over devices are in the dtype of what goes in.
  """

  def axis(name: str) -> str | None:
    found = rules.get(name)
    return found if found is not None and mesh.shape[found] > 1 else None

  experts = axis("experts")
  split = [name for part in tokens for name in _names(part)]
  axes = _Axes(experts, axis("embed"), axis("ff"), experts in split)
  into, out = jax.P(*axes[:3]), jax.P(experts, axes.ff, axes.width)
  shard = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

  def mix(
    cfg: Experts, x: jax.Array, w: Weights, chosen: jax.Array | None
  ) -> Mixed:
    route = shard(
      functools.partial(_route, cfg),
      in_specs=(tokens, jax.P()),
      out_specs=(tokens, tokens),
    )
    feed = shard(
      functools.partial(_feed, cfg, axes),
      in_specs=(tokens, (tokens, tokens), (into, into, out)),
      out_specs=tokens,
    )
    return _mixed(route, feed, x, w, chosen)

  return mix


def _names(part: Any) -> tuple[str, ...]:
  if part is None:
    return ()
  return (part,) if isinstance(part, str) else tuple(part)


def _mixed(
  route: Callable[..., tuple[jax.Array, jax.Array]],
  feed: Callable[..., jax.Array],
  x: jax.Array,
  w: Weights,
  chosen: jax.Array | None,
) -> Mixed:
  probs, own = route(x, w.router)
  ids = own
  if chosen is not None:
    ids = jnp.where(chosen < 0, own, chosen.astype(own.dtype))
  ids = checkpoint_name(ids, KEPT)
  return Mixed(feed(x, (probs, ids), w[1:]), ids, probs, own)


def _route(
  cfg: Experts, x: jax.Array, router: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns probabilities [B, T, E], and the experts of each token."""
  logits = jnp.einsum(
    "btd,de->bte",
    x.astype(jnp.float32),
    router.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  probs = jax.nn.softmax(logits, axis=-1)
  _, ids = jax.lax.top_k(jax.lax.stop_gradient(probs), cfg.per_token)
  return probs, ids


def _feed(
  cfg: Experts,
  axes: _Axes,
  x_BTD: jax.Array,
  where: tuple[jax.Array, jax.Array],
  matrices: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
  """Computes a device's part: its experts, for all tokens that it can see."""
  (probs, ids), (gate, up, down) = where, matrices
  x = x_BTD.reshape(-1, x_BTD.shape[-1])
  ids = ids.reshape(-1, cfg.per_token)
  weights = jnp.take_along_axis(probs.reshape(len(x), -1), ids, axis=-1)
  if cfg.normalize:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  if axes.gathers:
    x, ids, weights = (
      jax.lax.all_gather(value, axes.experts, tiled=True)
      for value in (x, ids, weights)
    )
  if axes.width:
    gate, up = (
      jax.lax.all_gather(w, axes.width, axis=1, tiled=True) for w in (gate, up)
    )
    down = jax.lax.all_gather(down, axes.width, axis=2, tiled=True)
  first = jax.lax.axis_index(axes.experts) * len(gate) if axes.experts else 0
  made = _own(x, ids - first, gate, up, down)
  made = jnp.sum(made.astype(jnp.float32) * weights[..., None], axis=1)
  made = made.astype(x.dtype)
  if axes.gathers:
    made = jax.lax.psum_scatter(made, axes.experts, tiled=True)
  elif axes.experts:
    made = jax.lax.psum(made, axes.experts)
  if axes.ff:
    made = jax.lax.psum(made, axes.ff)
  return made.reshape(x_BTD.shape)


def _own(
  x: Float[Array, "N D"],
  ids: Int[Array, "N X"],
  gate: Float[Array, "e D F"],
  up: Float[Array, "e D F"],
  down: Float[Array, "e F D"],
) -> Float[Array, "N X D"]:
  """Computes what these experts make of each choice; 0 of those of others.

  Args:
    x: tokens.
    ids: experts of each token; others than 0 to e - 1 are not here.
    gate: weights, likewise the next two.
    up: likewise.
    down: likewise.
  """
  num = len(gate)
  here = (ids >= 0) & (ids < num)
  group = jnp.where(here, ids, num).reshape(-1)  # What is not here comes last.
  order = jnp.argsort(group, stable=True)
  back = jnp.argsort(order)
  sizes = jnp.sum(group[:, None] == jnp.arange(num), axis=0, dtype=jnp.int32)
  taken = (jnp.arange(len(group)) < jnp.sum(sizes))[:, None]

  def keep(rows: jax.Array) -> jax.Array:
    # Rows of no group: nobody says what a product makes of them.
    return jnp.where(taken, rows, jnp.zeros((), rows.dtype))

  rows = keep(_spread(x, order, back))
  gated = jax.nn.silu(_product(rows, gate, sizes))
  gated = keep(gated * _product(rows, up, sizes))
  made = keep(_product(gated, down, sizes))
  return _collect(made, order, back).reshape(*ids.shape, -1)


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """Multiplies the runs of sorted rows with a matrix each: [M, i] to [M, o].

  Its backward pass is `ragged_dot` for rows, and a loop over tiles for weights:
  of those XLA would multiply every row with every expert, on TPUs too.
  """
  return jax.lax.ragged_dot(x, w, sizes)


def _product_forward(x: jax.Array, w: jax.Array, sizes: jax.Array):
  return _product(x, w, sizes), (x, w, sizes)


def _product_backward(kept: tuple[jax.Array, ...], g: jax.Array):
  x, w, sizes = kept
  back = jax.lax.ragged_dot(g, w.swapaxes(1, 2), sizes)
  return back, _by_group(x, g, sizes).astype(w.dtype), None


def _by_group(
  x: Float[Array, "M i"], g: Float[Array, "M o"], sizes: Int[Array, " e"]
) -> Float[Array, "e i o"]:
  """Returns x^T g of each run of rows, in float32."""
  tile = min(_TILE, len(x))
  ends = jnp.cumsum(sizes)
  tiles = -(-sizes // tile)
  last = jnp.cumsum(tiles)

  def add(number: jax.Array, sums: jax.Array) -> jax.Array:
    group = jnp.sum(last <= number)
    step = number - last[group] + tiles[group]
    begin = ends[group] - sizes[group] + step * tile
    at = jnp.minimum(begin, len(x) - tile)
    place = at + jnp.arange(tile)
    ours = ((place >= begin) & (place < ends[group]))[:, None]
    x_own, g_own = (
      jnp.where(ours, rows, jnp.zeros((), rows.dtype))
      for rows in (jax.lax.dynamic_slice_in_dim(y, at, tile) for y in (x, g))
    )
    made = jnp.matmul(x_own.T, g_own, preferred_element_type=jnp.float32)
    return sums.at[group].add(made)

  zeros = jnp.zeros((len(sizes), x.shape[1], g.shape[1]), jnp.float32)
  return jax.lax.fori_loop(0, last[-1], add, zeros)


@jax.custom_vjp
def _spread(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
  """Brings a copy of a token for each of its choices into order.

  Like `_collect` it has a backward pass that gathers, too: sums that scatter
  are slow on TPUs, and on GPUs in an order of their own.
  """
  del back
  return _rows(x, order // (len(order) // len(x)))


def _spread_forward(x: jax.Array, order: jax.Array, back: jax.Array):
  return _spread(x, order, back), (back, x)


def _spread_backward(kept: tuple[jax.Array, jax.Array], g: jax.Array):
  back, x = kept
  each = _rows(g, back).reshape(len(x), -1, x.shape[1])
  return jnp.sum(each.astype(jnp.float32), axis=1).astype(x.dtype), None, None


@jax.custom_vjp
def _collect(rows: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
  """Brings what was made of choices back to where they were."""
  del order
  return _rows(rows, back)


def _collect_forward(rows: jax.Array, order: jax.Array, back: jax.Array):
  return _collect(rows, order, back), order


def _collect_backward(order: jax.Array, g: jax.Array):
  return _rows(g, order), None, None


_product.defvjp(_product_forward, _product_backward)
_spread.defvjp(_spread_forward, _spread_backward)
_collect.defvjp(_collect_forward, _collect_backward)


def _rows(x: jax.Array, at: jax.Array) -> jax.Array:
  return x.at[at].get(mode="promise_in_bounds")


# -------------------------------------------------------------------- balance


def tell(
  found: Mixed,
  counted: Float[Array, "B T"],
  chosen: Int[Array, "B T X"] | None = None,
) -> Routed:
  """Sums up where the tokens of a layer went.

  Args:
    found: of the layer.
    counted: 1 on tokens that count.
    chosen: what was given in place of the router's choice, -1 where nothing
      was; None gave nothing.
  """
  ids, probs = found.ids, found.probs
  num = probs.shape[-1]
  went = jnp.sum(ids[..., None] == jnp.arange(num), axis=2, dtype=jnp.int32)
  went = went.astype(jnp.float32)
  counts, sums = (
    jnp.sum(x * counted[..., None], axis=(0, 1)) for x in (went, probs)
  )
  told = Routed(ids=ids, counts=counts, probs=sums)
  if chosen is None:
    return told
  given = jnp.where(chosen[..., 0] >= 0, counted, 0.0)
  apart = differing(ids, found.own)
  return dataclasses.replace(
    told, given=jnp.sum(given), differing=jnp.sum(apart * given)
  )


def imbalance(
  counts: Float[Array, "L E"],
  probs: Float[Array, "L E"],
  num_tokens: Float[Array, ""],
) -> Float[Array, ""]:
  """Returns how far the load of experts is from equal.

  Fedus et al. 2021 (arXiv 2101.03961), equation 4, for several experts a token:
  with f the share of tokens that chose an expert, and P its mean probability,

      E sum over experts of f P, as a mean over layers.

  `transformers` has the same of one layer; of several it takes f and P over all
  of them at once, where the loads of two layers can make up for each other.

  Args:
    counts: of `Routed`; they have no gradient.
    probs: of `Routed`, of the same tokens or of some of them: their part.
    num_tokens: how many tokens `counts` is of.

  Returns:
    X, the experts of a token, where all are chosen as often.
  """
  count = jnp.maximum(num_tokens, 1.0)
  share = jax.lax.stop_gradient(counts) / count
  return counts.shape[1] * jnp.mean(jnp.sum(share * probs / count, axis=1))


def most_loaded(counts: Float[Array, "L E"]) -> Float[Array, ""]:
  """Returns the largest share of a layer's choices that one expert has.

  Args:
    counts: of `Routed`.

  Returns:
    1 / E where all are chosen as often; 0 without tokens.
  """
  total = jnp.sum(counts, axis=1, keepdims=True)
  return jnp.max(counts / jnp.maximum(total, 1.0))


def differing(
  ids: Int[Array, "*dims X"], others: Int[Array, "*dims X"]
) -> Float[Array, "*dims"]:
  """Returns the share of each token's experts that another routing lacks.

  Args:
    ids: experts of each token; their order does not matter.
    others: those of the same tokens in another pass.
  """
  same = jnp.any(ids[..., :, None] == others[..., None, :], axis=-1)
  return 1.0 - jnp.mean(same.astype(jnp.float32), axis=-1)
