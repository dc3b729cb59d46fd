"""The one decoder that prefill, decode, score and update all run.

Pre-norm blocks with rotary positions, grouped-query attention and a gated
feed-forward layer: Llama (Touvron et al. 2023, arXiv 2302.13971), SmolLM2,
Qwen2.5 (with biases), Qwen3 (with query and key norms, and as a mixture of
experts) and Gemma 3 (with more norms, and windows). Layers are stacked and
scanned; which of them have a window is scanned with them. Norms, rotary phases,
the router, softmax and log-softmax are float32 in any compute dtype. In this
file a suffix names the dims: `q_BTNH`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.models import adapted, among, quantize, variants
from jaxrl_post.models import experts as mixtures
from jaxrl_post.models import spec as specs


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """A stretch of rotary phases: linear, or Llama 3's (Llama 3.1 model card).

  Attributes:
    factor: how much the slowest phases are slowed; all of them, where the rest
      is None.
    low_factor: wavelengths above `original_positions / low_factor` are slowed
      in full.
    high_factor: wavelengths below `original_positions / high_factor` stay.
    original_positions: context length before the stretch.
  """

  factor: float
  low_factor: float | None = None
  high_factor: float | None = None
  original_positions: int | None = None

  def __post_init__(self) -> None:
    rest = self.low_factor, self.high_factor, self.original_positions
    if None in rest and rest != (None,) * 3:
      raise types.InputError(
        "model.config.rope_scaling: expected low_factor, high_factor and "
        f"original_positions, all or none, got {rest}. Correct it."
      )


@dataclasses.dataclass(frozen=True)
class Config:
  """Shape of a decoder, as its family's file reads it from a checkpoint.

  With `experts`, `ff_width` is that of each expert.
  """

  num_layers: int
  width: int
  num_heads: int
  num_kv_heads: int
  head_width: int
  ff_width: int
  vocab_size: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-5
  tie_embeddings: bool = True
  qkv_bias: bool = False
  qk_norm: bool = False
  max_positions: int = 8192
  window: variants.Window | None = None
  gemma: variants.Gemma | None = None
  experts: mixtures.Experts | None = None

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and value < 1:
        raise types.InputError(
          f"model.config.{field.name}: expected >= 1, got {value}. Correct it."
        )
    if self.num_heads % self.num_kv_heads:
      raise types.InputError(
        "model.config.num_kv_heads: expected a divisor of num_heads "
        f"{self.num_heads}, got {self.num_kv_heads}. Correct one of the two."
      )
    if self.head_width % 2:
      raise types.InputError(
        "model.config.head_width: expected an even number, got "
        f"{self.head_width}. Rotary positions turn pairs."
      )
    if self.window is not None and len(self.window.layers) != self.num_layers:
      raise types.InputError(
        f"model.config.window.layers: expected one entry for each of "
        f"{self.num_layers} layers, got {len(self.window.layers)}. Correct it."
      )
    if self.gemma is not None and not self.qk_norm:
      raise types.InputError(
        "model.config.qk_norm: expected True with model.config.gemma, got "
        "False. Its queries are scaled by their norm."
      )


# What the backward pass of a layer does not make again: anything, products with
# weights, or what goes in.
Remat: TypeAlias = Literal["none", "dots", "layer"]

# What attends where there is a cache: takes a layer's cache, q [B, T, N, H],
# and k and v [B, T, K, H] of the new tokens, and whether the layer has a window
# (a bool, or an array where layers are scanned; None in a model without);
# returns what each query read, [B, T, N, H], and the cache with the new tokens.
Attend: TypeAlias = Callable[
  [Any, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]
]


_KEPT = {
  name: jax.checkpoint_policies.save_from_both_policies(
    policy, jax.checkpoint_policies.save_only_these_names(mixtures.KEPT)
  )
  for name, policy in (
    ("dots", jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    ("layer", jax.checkpoint_policies.nothing_saveable),
  )
}


def spec(cfg: Config) -> types.Tree:
  """Declares the weights of a decoder; stacked layers come first."""
  n, k, h = cfg.num_heads, cfg.num_kv_heads, cfg.head_width
  d, f, v = cfg.width, cfg.ff_width, cfg.vocab_size
  depth = cfg.num_layers
  one = 0.0 if cfg.gemma else 1.0  # What a norm's weight starts at.

  def layer(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    fan_in: int | None = None,
    start: float = one,
  ) -> specs.Weight:
    return specs.Weight((depth, *shape), ("layers", *axes), fan_in, start)

  layers = {
    "attn_norm": layer((d,), ("norm",)),
    "q": layer((d, n, h), ("embed", "heads", "head"), d),
    "k": layer((d, k, h), ("embed", "kv_heads", "head"), d),
    "v": layer((d, k, h), ("embed", "kv_heads", "head"), d),
    "o": layer((n, h, d), ("heads", "head", "embed"), n * h),
    "mlp_norm": layer((d,), ("norm",)),
  }
  if cfg.experts is None:
    layers["gate"] = layer((d, f), ("embed", "ff"), d)
    layers["up"] = layer((d, f), ("embed", "ff"), d)
    layers["down"] = layer((f, d), ("ff", "embed"), f)
  else:
    e, into = cfg.experts.num, ("experts", "embed", "ff")
    layers["router"] = layer((d, e), ("embed", "experts"), d)
    layers["expert_gate"] = layer((e, d, f), into, d)
    layers["expert_up"] = layer((e, d, f), into, d)
    layers["expert_down"] = layer((e, f, d), ("experts", "ff", "embed"), f)
  if cfg.qkv_bias:
    layers["q_bias"] = layer((n, h), ("heads", "head"), start=0.0)
    layers["k_bias"] = layer((k, h), ("kv_heads", "head"), start=0.0)
    layers["v_bias"] = layer((k, h), ("kv_heads", "head"), start=0.0)
  if cfg.qk_norm:
    layers["q_norm"] = layer((h,), ("head",))
    layers["k_norm"] = layer((h,), ("head",))
  if cfg.gemma:
    layers["attn_post_norm"] = layer((d,), ("norm",))
    layers["mlp_post_norm"] = layer((d,), ("norm",))
  tree = {
    "embed": specs.Weight((v, d), ("vocab", "embed"), d),
    "layers": layers,
    "final_norm": specs.Weight((d,), ("norm",), start=one),
  }
  if not cfg.tie_embeddings:
    tree["head"] = specs.Weight((d, v), ("embed", "vocab"), d)
  return tree


def layer_flops(cfg: Config, keys: float) -> float:
  """Returns the operations of a token in a layer, with so many keys to read.

  Those of matrix products, in the forward pass; a product and its sum are two.
  Of layers with and without a window it is the mean.
  """
  if cfg.window is not None:
    local = sum(cfg.window.layers) / cfg.num_layers
    keys = local * min(keys, cfg.window.size) + (1 - local) * keys
  heads = cfg.head_width * cfg.num_heads
  kv = cfg.head_width * cfg.num_kv_heads
  ff = 3 * cfg.ff_width
  if cfg.experts is not None:
    ff = ff * cfg.experts.per_token + cfg.experts.num
  weights = cfg.width * (2 * heads + 2 * kv + ff)
  return 2.0 * weights + 4.0 * keys * heads


def inverse_frequencies(
  cfg: Config, *, local: bool = False
) -> Float[Array, " pairs"]:
  """Returns the rotary angle per position of each pair of a head, in radians.

  Su et al. 2021 (arXiv 2104.09864), scaled where configured: linear scaling
  divides all by the factor; Llama 3's leaves short wavelengths unchanged and
  divides long ones, with a linear blend between.

  Args:
    cfg: shape of the decoder.
    local: in layers with a window.
  """
  theta, scaling = cfg.rope_theta, cfg.rope_scaling
  if local and cfg.window is not None and cfg.window.rope_theta is not None:
    theta, scaling = cfg.window.rope_theta, None
  half = jnp.arange(0, cfg.head_width, 2, dtype=jnp.float32) / cfg.head_width
  inv = 1.0 / (theta**half)
  if scaling is None:
    return inv
  low, high = scaling.low_factor, scaling.high_factor
  if low is None or high is None or scaling.original_positions is None:
    return inv / scaling.factor
  turns = scaling.original_positions * inv / (2 * math.pi)
  keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return inv * keep + inv / scaling.factor * (1 - keep)


def _rms_norm(
  cfg: Config, x: jax.Array, w: jax.Array, factor: float = 1.0
) -> jax.Array:
  """Norms the last dim, and multiplies by the weight, and by a factor."""
  x32, scale = x.astype(jnp.float32), w.astype(jnp.float32)
  if cfg.gemma is not None:
    scale = (1.0 + scale) * factor
  mean = jnp.mean(x32 * x32, -1, keepdims=True)
  x32 = x32 * jax.lax.rsqrt(mean + cfg.norm_eps)
  return (x32 * scale).astype(x.dtype)


def _rotate(x_BTNH: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Turns pairs (i, i + H/2), the layout of Hugging Face checkpoints."""
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x_BTNH.dtype)


class _Context(NamedTuple):
  """What all layers of one pass share."""

  turn: tuple[jax.Array, jax.Array]  # sines and cosines
  near: tuple[jax.Array, jax.Array]  # those of layers with a window
  attend: Attend
  mix: mixtures.Mix
  counted: jax.Array | None


def _turn(positions: jax.Array, inv: jax.Array) -> tuple[jax.Array, jax.Array]:
  phase = positions[..., None].astype(jnp.float32) * inv
  return jnp.sin(phase)[:, :, None, :], jnp.cos(phase)[:, :, None, :]


def _embed(
  params: types.Tree, cfg: Config, tokens: jax.Array, dtype: str
) -> jax.Array:
  x = params["embed"].at[tokens].get(mode="fill", fill_value=jnp.nan)
  x = x.astype(dtype)
  if cfg.gemma is None:
    return x
  return x * jnp.asarray(math.sqrt(cfg.width), dtype)


def _project(
  x: jax.Array, w: jax.Array | quantize.Int8 | adapted.Adapted, num_in: int
) -> jax.Array:
  """Multiplies the last dims of x with the first `num_in` dims of w.

  As one matrix product over all tokens: XLA's CPU back-end takes twice as long
  for the gradient of a weight that is summed over two dims.
  """
  shape = w.values.shape if isinstance(w, quantize.Int8) else w.shape
  rows = x.shape[: x.ndim - num_in]
  width = math.prod(shape[:num_in])
  x = x.reshape(-1, width)
  if isinstance(w, quantize.Int8):
    out = quantize.product(x, w, num_in)
  elif isinstance(w, adapted.Adapted):
    out = adapted.product(x, w)
  else:
    out = x @ w.reshape(width, -1)
  return out.reshape(*rows, *shape[num_in:])


def _cast(w: jax.Array | quantize.Int8 | adapted.Adapted, dtype: str) -> Any:
  """Casts a weight for products; one of several parts where it is used."""
  is_array = not isinstance(w, quantize.Int8 | adapted.Adapted)
  return w.astype(dtype) if is_array else w


def _block(
  cfg: Config,
  x: jax.Array,
  w: dict[str, jax.Array],
  ctx: _Context,
  kept: tuple[Any, Any, jax.Array | None],
) -> tuple[jax.Array, tuple[Any, mixtures.Routed | None]]:
  """Runs a layer: on its cache, with a window or not, and chosen experts."""
  cache, local, chosen = kept
  h = _rms_norm(cfg, x, w["attn_norm"])
  q, k, v = (_project(h, w[name], 1) for name in ("q", "k", "v"))
  if cfg.qkv_bias:
    q, k, v = q + w["q_bias"], k + w["k_bias"], v + w["v_bias"]
  if cfg.qk_norm:
    q = _rms_norm(cfg, q, w["q_norm"], _query_factor(cfg))
    k = _rms_norm(cfg, k, w["k_norm"])
  turn = ctx.turn if local is None else among.either(local, ctx.near, ctx.turn)
  q, k = _rotate(q, *turn), _rotate(k, *turn)
  read, cache = ctx.attend(cache, q, k, v, local)
  out = _project(read, w["o"], 2)
  if cfg.gemma is not None:
    out = _rms_norm(cfg, out, w["attn_post_norm"])
  x = x + out
  h = _rms_norm(cfg, x, w["mlp_norm"])
  out, told = _feed_forward(cfg, h, w, ctx, chosen)
  if cfg.gemma is not None:
    out = _rms_norm(cfg, out, w["mlp_post_norm"])
  return x + out, (cache, told)


def _query_factor(cfg: Config) -> float:
  """Returns what queries are multiplied by: attention divides by sqrt(H)."""
  if cfg.gemma is None:
    return 1.0
  return math.sqrt(cfg.head_width / cfg.gemma.query_scalar)


def _feed_forward(
  cfg: Config,
  h: jax.Array,
  w: dict[str, jax.Array],
  ctx: _Context,
  chosen: jax.Array | None,
) -> tuple[jax.Array, mixtures.Routed | None]:
  """Returns what a layer makes of each token by itself, and who made it."""
  if cfg.experts is None:
    act = jax.nn.silu if cfg.gemma is None else jax.nn.gelu  # tanh by default
    gated = act(_project(h, w["gate"], 1)) * _project(h, w["up"], 1)
    return _project(gated, w["down"], 1), None
  names = ("router", "expert_gate", "expert_up", "expert_down")
  weights = mixtures.Weights(*(w[name] for name in names))
  found = ctx.mix(cfg.experts, h, weights, chosen)
  if ctx.counted is None:
    return found.made, None
  return found.made, mixtures.tell(found, ctx.counted, chosen)


def forward(
  params: types.Tree,
  cfg: Config,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  *,
  segment_ids: Int[Array, "B T"] | None = None,
  prefix_ids: Int[Array, "B T"] | None = None,
  cache: Any = None,
  attend: Attend | None = None,
  among_rows: among.Among = among.portable,
  mix: mixtures.Mix = mixtures.portable,
  routing: Int[Array, "L B T X"] | None = None,
  counted: Float[Array, "B T"] | None = None,
  dtype: Literal["float32", "bfloat16"] = "float32",
  remat: Remat = "none",
  sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
  """Runs the decoder over tokens.

  Args:
    params: weights as `spec` declares them, or quantized (`quantize.spec`), or
      adapted (`lora.attach`), or as `unstack` returns any of these. In the last
      case layers are unrolled and not scanned: compiling takes longer, and no
      step copies a layer's weights out of the stack.
    cfg: shape of the decoder.
    tokens: ids from 0, below `cfg.vocab_size`; a larger id gives NaN, not a
      neighbour.
    positions: place of each token in its own sequence, from 0.
    segment_ids: tokens attend to earlier tokens of the same segment only.
      Ignored with `attend`, as is what follows.
    prefix_ids: and to those of this segment, of which theirs is the
      continuation. Needs `segment_ids`.
    cache: what `attend` keeps of each layer: a tree with layers as the first
      dim, or a tuple of them if the weights are unstacked.
    attend: attends where a token has keys outside of `tokens`; None for
      attention among them.
    among_rows: what attends among them, see `among.on`.
    mix: what computes experts, see `experts.on`.
    routing: the experts of each token, in place of those that the router
      chooses, and -1 where it does; their weights are its own.
    counted: asks where tokens went: 1 on those that count in the sums.
    dtype: compute dtype of matrix products; norms and softmax are float32.
    remat: what of each layer is kept for the backward pass: all that it needs
      ("none"), products with weights ("dots"), or nothing but what goes in
      ("layer"). The rest is made again.
    sharding: how rows and positions lie on a mesh. Hidden states are held to
      it, so that split weights are gathered layer by layer; otherwise the
      compiler may as well split the states like the weights, and send those.

  Returns:
    Hidden states after the last norm, and the cache as `attend` left it; with
    `counted` a pair of that and `experts.Routed`, None without experts.
  """
  if routing is not None and cfg.experts is None:
    raise ValueError("forward: expected no routing without experts, got one")
  if attend is None:
    rows = among.places(
      segment_ids,
      prefix_ids,
      tokens.shape,
      positions=positions,
      window=None if cfg.window is None else cfg.window.size,
    )
    attend = _without_cache(among_rows(rows, cfg.head_width, dtype))
  turn, near = (
    _turn(positions, inverse_frequencies(cfg, local=local))
    for local in (False, True)
  )
  ctx = _Context(turn, near, attend, mix, counted)
  x = _embed(params, cfg, tokens, dtype)

  def lay(x: jax.Array) -> jax.Array:
    if sharding is None:
      return x
    return jax.lax.with_sharding_constraint(x, sharding)

  def layer(x, xs):
    weights, kept = xs
    weights = {name: _cast(w, dtype) for name, w in weights.items()}
    return _block(cfg, lay(x), weights, ctx, kept)

  if remat != "none":
    layer = jax.checkpoint(layer, prevent_cse=False, policy=_KEPT[remat])
  if isinstance(params["layers"], tuple):
    made = []
    none = (None,) * cfg.num_layers
    local = None if cfg.window is None else cfg.window.layers
    kept = (none if y is None else tuple(y) for y in (cache, local, routing))
    for xs in zip(params["layers"], zip(*kept, strict=True), strict=True):
      x, found = layer(x, xs)
      made.append(found)
    caches, told = zip(*made, strict=True)
    cache = None if cache is None else caches
    told = None if told[0] is None else jax.tree.map(_stack, *told)
  else:
    local = None if cfg.window is None else jnp.asarray(cfg.window.layers)
    xs = params["layers"], (cache, local, routing)
    x, (cache, told) = jax.lax.scan(layer, x, xs)
  hidden = _rms_norm(cfg, lay(x), params["final_norm"])
  return hidden, cache if counted is None else (cache, told)


def _stack(*layers: jax.Array) -> jax.Array:
  return jnp.stack(layers)


def _without_cache(read: among.Read) -> Attend:
  return lambda cache, q, k, v, local: (read(q, k, v, local), cache)


def unstack(params: types.Tree) -> types.Tree:
  """Returns the weights with a tuple of layers instead of stacked ones."""
  stacked = params["layers"]
  depth = jax.tree.leaves(stacked)[0].shape[0]
  layers = tuple(
    jax.tree.map(lambda w, i=i: w[i], stacked) for i in range(depth)
  )
  return {**params, "layers": layers}


def logits(
  params: types.Tree, cfg: Config, hidden: Float[Array, "*dims D"]
) -> Float[Array, "*dims V"]:
  """Projects hidden states to next-token logits, accumulated in float32."""
  head = params["embed"].T if cfg.tie_embeddings else params["head"]
  head = head.astype(hidden.dtype)
  return jnp.dot(hidden, head, preferred_element_type=jnp.float32)
