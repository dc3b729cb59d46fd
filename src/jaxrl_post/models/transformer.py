"""The one decoder that prefill, decode, score and update all run.

Pre-norm blocks with rotary positions, grouped-query attention and a gated
feed-forward layer: Llama (Touvron et al. 2023, arXiv 2302.13971), SmolLM2,
Qwen2.5 (with biases) and Qwen3 (with query and key norms). Layers are stacked
and scanned. Norms, rotary phases, softmax and log-softmax are float32 in any
compute dtype. In this file a suffix names the dims: `q_BTNH`.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post import types
from jaxrl_post.models import spec as specs


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's stretch of slow rotary phases (Llama 3.1 model card).

  Attributes:
    factor: how much the slowest phases are slowed.
    low_factor: wavelengths above `original_positions / low_factor` are slowed
      in full.
    high_factor: wavelengths below `original_positions / high_factor` stay.
    original_positions: context length before the stretch.
  """

  factor: float
  low_factor: float
  high_factor: float
  original_positions: int


@dataclasses.dataclass(frozen=True)
class Config:
  """Shape of a decoder, as its family's file reads it from a checkpoint."""

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


class KVCache(NamedTuple):
  """Keys and values, one slot a position: slot s holds position s of a row."""

  k: Float[Array, "L B S K H"]
  v: Float[Array, "L B S K H"]


def spec(cfg: Config) -> types.Tree:
  """Declares the weights of a decoder; stacked layers come first."""
  n, k, h = cfg.num_heads, cfg.num_kv_heads, cfg.head_width
  d, f, v = cfg.width, cfg.ff_width, cfg.vocab_size
  depth = cfg.num_layers

  def layer(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    fan_in: int | None = None,
    start: float = 1.0,
  ) -> specs.Weight:
    return specs.Weight((depth, *shape), ("layers", *axes), fan_in, start)

  layers = {
    "attn_norm": layer((d,), ("norm",)),
    "q": layer((d, n, h), ("embed", "heads", "head"), d),
    "k": layer((d, k, h), ("embed", "kv_heads", "head"), d),
    "v": layer((d, k, h), ("embed", "kv_heads", "head"), d),
    "o": layer((n, h, d), ("heads", "head", "embed"), n * h),
    "mlp_norm": layer((d,), ("norm",)),
    "gate": layer((d, f), ("embed", "ff"), d),
    "up": layer((d, f), ("embed", "ff"), d),
    "down": layer((f, d), ("ff", "embed"), f),
  }
  if cfg.qkv_bias:
    layers["q_bias"] = layer((n, h), ("heads", "head"), start=0.0)
    layers["k_bias"] = layer((k, h), ("kv_heads", "head"), start=0.0)
    layers["v_bias"] = layer((k, h), ("kv_heads", "head"), start=0.0)
  if cfg.qk_norm:
    layers["q_norm"] = layer((h,), ("head",))
    layers["k_norm"] = layer((h,), ("head",))
  tree = {
    "embed": specs.Weight((v, d), ("vocab", "embed"), d),
    "layers": layers,
    "final_norm": specs.Weight((d,), ("norm",)),
  }
  if not cfg.tie_embeddings:
    tree["head"] = specs.Weight((d, v), ("embed", "vocab"), d)
  return tree


def inverse_frequencies(cfg: Config) -> Float[Array, " pairs"]:
  """Returns the rotary angle per position of each pair of a head, in radians.

  Su et al. 2021 (arXiv 2104.09864), with Llama 3's scaling where configured:
  short wavelengths unchanged, long ones divided by the factor, a linear blend
  between.
  """
  half = jnp.arange(0, cfg.head_width, 2, dtype=jnp.float32) / cfg.head_width
  inv = 1.0 / (cfg.rope_theta**half)
  scaling = cfg.rope_scaling
  if scaling is None:
    return inv
  turns = scaling.original_positions * inv / (2 * math.pi)
  keep = (turns - scaling.low_factor) / (
    scaling.high_factor - scaling.low_factor
  )
  keep = jnp.clip(keep, 0.0, 1.0)
  return inv * keep + inv / scaling.factor * (1 - keep)


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  x32 = x.astype(jnp.float32)
  x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
  return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def _rotate(x_BTNH: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Turns pairs (i, i + H/2), the layout of Hugging Face checkpoints."""
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x_BTNH.dtype)


class _Context(NamedTuple):
  """What all layers of one pass share."""

  sin: jax.Array
  cos: jax.Array
  mask: jax.Array
  positions: jax.Array


def _attend(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: jax.Array
) -> jax.Array:
  """Softmax attention in float32; the one place a back-end is chosen."""
  with jax.numpy_dtype_promotion("standard"):  # it mixes float32 and bfloat16
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask=mask)


def _project(x: jax.Array, w: jax.Array, num_in: int) -> jax.Array:
  """Multiplies the last dims of x with the first `num_in` dims of w.

  As one matrix product over all tokens: XLA's CPU back-end takes twice as long
  for the gradient of a weight that is summed over two dims.
  """
  rows = x.shape[: x.ndim - num_in]
  width = math.prod(w.shape[:num_in])
  out = x.reshape(-1, width) @ w.reshape(width, -1)
  return out.reshape(*rows, *w.shape[num_in:])


def _block(
  cfg: Config,
  x: jax.Array,
  w: dict[str, jax.Array],
  ctx: _Context,
  cached: tuple[KVCache, jax.Array] | None,
) -> tuple[jax.Array, KVCache | None]:
  h = _rms_norm(x, w["attn_norm"], cfg.norm_eps)
  q, k, v = (_project(h, w[name], 1) for name in ("q", "k", "v"))
  if cfg.qkv_bias:
    q, k, v = q + w["q_bias"], k + w["k_bias"], v + w["v_bias"]
  if cfg.qk_norm:
    q = _rms_norm(q, w["q_norm"], cfg.norm_eps)
    k = _rms_norm(k, w["k_norm"], cfg.norm_eps)
  q, k = _rotate(q, ctx.sin, ctx.cos), _rotate(k, ctx.sin, ctx.cos)
  cache = None
  if cached is not None:
    cache, index = cached
    rows = jnp.arange(k.shape[0])[:, None]
    # A position past the cache is dropped, never clamped onto the last slot.
    at = (index, rows, ctx.positions)
    cache = KVCache(
      cache.k.at[at].set(k, mode="drop"), cache.v.at[at].set(v, mode="drop")
    )
    k, v = cache.k[index], cache.v[index]
  x = x + _project(_attend(q, k, v, ctx.mask), w["o"], 2)
  h = _rms_norm(x, w["mlp_norm"], cfg.norm_eps)
  gated = jax.nn.silu(_project(h, w["gate"], 1)) * _project(h, w["up"], 1)
  return x + _project(gated, w["down"], 1), cache


def forward(
  params: types.Tree,
  cfg: Config,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  *,
  segment_ids: Int[Array, "B T"] | None = None,
  cache: KVCache | None = None,
  dtype: Literal["float32", "bfloat16"] = "float32",
  remat: bool = False,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
  """Runs the decoder over tokens.

  Args:
    params: weights as `spec` declares them.
    cfg: shape of the decoder.
    tokens: ids below `cfg.vocab_size`; a larger id gives NaN, not a neighbour.
    positions: place of each token in its own sequence, from 0. With a cache it
      is also the slot that the token's key and value are written to; a slot
      past the end is not written.
    segment_ids: tokens attend to earlier tokens of the same segment only.
      Ignored with a cache, where a row is one sequence.
    cache: earlier keys and values, attended to up to each token's position.
    dtype: compute dtype of matrix products; norms and softmax are float32.
    remat: recompute each layer in the backward pass instead of keeping it.

  Returns:
    Hidden states after the last norm, and the cache with these tokens in it.
  """
  phase = positions[..., None].astype(jnp.float32) * inverse_frequencies(cfg)
  sin, cos = jnp.sin(phase)[:, :, None, :], jnp.cos(phase)[:, :, None, :]
  ctx = _Context(sin, cos, _mask(positions, segment_ids, cache), positions)
  x = params["embed"].at[tokens].get(mode="fill", fill_value=jnp.nan)
  x = x.astype(dtype)

  def layer(carry, xs):
    x, kv = carry
    weights, index = xs
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    x, kv = _block(cfg, x, weights, ctx, None if kv is None else (kv, index))
    return (x, kv), None

  if remat:
    layer = jax.checkpoint(layer, prevent_cse=False)
  index = jnp.arange(cfg.num_layers)
  (x, cache), _ = jax.lax.scan(layer, (x, cache), (params["layers"], index))
  return _rms_norm(x, params["final_norm"], cfg.norm_eps), cache


def _mask(
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"] | None,
  cache: KVCache | None,
) -> Bool[Array, "B 1 T S"]:
  if cache is not None:
    slots = jnp.arange(cache.k.shape[2])
    return (slots <= positions[..., None])[:, None]
  order = jnp.arange(positions.shape[1])
  mask = (order[None, :] <= order[:, None])[None]
  if segment_ids is not None:
    mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
  return jnp.broadcast_to(mask, (positions.shape[0], *mask.shape[1:]))[:, None]


def logits(
  params: types.Tree, cfg: Config, hidden: Float[Array, "*dims D"]
) -> Float[Array, "*dims V"]:
  """Projects hidden states to next-token logits, accumulated in float32."""
  head = params["embed"].T if cfg.tie_embeddings else params["head"]
  head = head.astype(hidden.dtype)
  return jnp.dot(hidden, head, preferred_element_type=jnp.float32)


def token_logprobs(
  params: types.Tree,
  cfg: Config,
  hidden: Float[Array, "B T D"],
  targets: Int[Array, "B T"],
  temperature: Float[Array, " B"],
  *,
  chunk: int = 128,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Scores one target a position without ever holding [B, T, V].

  Args:
    params: weights.
    cfg: shape of the decoder.
    hidden: states that predict `targets`.
    targets: ids.
    temperature: divides the logits of its row, as in the sampler. Rows at 0
      (greedy) are scored at temperature 1, as the sampler reports them.
    chunk: positions whose logits exist at a time, in forward and backward.

  Returns:
    The log-probability of each target and the entropy of its distribution, in
    nats. The entropy carries no gradient.
  """
  length = targets.shape[1]
  chunk = min(chunk, length)
  pad = -length % chunk
  hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
  targets = jnp.pad(targets, ((0, 0), (0, pad)))
  inverse = 1.0 / jnp.where(temperature > 0, temperature, 1.0)

  @jax.checkpoint
  def score(_, xs):
    hidden_BCD, targets_BC = xs
    z = logits(params, cfg, hidden_BCD) * inverse[:, None, None]
    log_z = jax.nn.logsumexp(z, axis=-1)
    taken = jnp.take_along_axis(z, targets_BC[..., None], axis=-1)[..., 0]
    z = jax.lax.stop_gradient(z - log_z[..., None])
    entropy = -jnp.sum(jnp.exp(z) * z, axis=-1)
    return None, (taken - log_z, entropy)

  def split(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return x.swapaxes(0, 1)

  _, out = jax.lax.scan(score, None, (split(hidden), split(targets)))
  logprobs, entropy = (
    x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :length] for x in out
  )
  return logprobs, entropy


def empty_cache(cfg: Config, rows: int, slots: int, dtype: str) -> KVCache:
  """Returns a cache of zeros: `rows` sequences of up to `slots` positions."""
  shape = (cfg.num_layers, rows, slots, cfg.num_kv_heads, cfg.head_width)
  # Two buffers: one shared by both could not be donated.
  return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
