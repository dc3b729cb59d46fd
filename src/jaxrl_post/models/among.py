"""Attention among the tokens of packed rows: one meaning, several back-ends.

A token reads the earlier tokens of its own segment, and of the one that its own
continues; in a layer with a window, the nearest of them. `on` chooses what
computes it, for the devices of a mesh: XLA, cuDNN or Pallas; a shape that a
kernel does not take is XLA's (`docs/numerics.md`).
Each device has T of the queries and all S keys of its rows: all that is sent is
the keys and values of rows whose positions a mesh splits. Of rows that are too
long for that, they go round instead (`ring`).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask_info as masks,
)
from jaxtyping import Array, Bool, Int

from jaxrl_post.models import ring

# Rows up to this length have all scores at once; longer ones, those of a block
# of queries.
SHORT, _BLOCK = 512, 256
# The kernels keep which query reads which key: [S, S] for each row. Of longer
# rows whose positions are split, no device has all keys.
_MOST = 8192
_LANES = 128
# Compute capability that cuDNN's attention needs.
_AMPERE = (8, 0)
# Blocks of the TPU kernel, the largest that divides both lengths.
_TILES = (512, 256, _LANES)

Backend: TypeAlias = Literal["xla", "cudnn", "splash", "ring"]
# Takes q [B, T, N, H], k and v [B, S, K, H], and whether the layer has a window
# (None in a model without); returns what each query read.
Read: TypeAlias = Callable[..., jax.Array]


class Places(NamedTuple):
  """Where tokens are, each [B, T]."""

  order: jax.Array  # in the row
  segment: jax.Array
  prefix: jax.Array  # the segment that it continues, or its own
  # In its sequence, and of the first token that it reads where a layer has a
  # window; None in a model without.
  position: jax.Array | None = None
  first: jax.Array | None = None


class _Kernel(NamedTuple):
  """What a device does, in two parts.

  The first makes something of the places of its queries and of its keys, for
  all layers: arrays of [B, 1, a multiple of the parts of T, ...].
  """

  begin: Callable[[Places, Places], Any]
  read: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


# Takes the places of whole rows, head width and dtype; returns what each layer
# calls.
Among: TypeAlias = Callable[[Places, int, str], Read]


def places(
  segment_ids: Int[Array, "B T"] | None,
  prefix_ids: Int[Array, "B T"] | None,
  shape: tuple[int, ...],
  *,
  positions: Int[Array, "B T"] | None = None,
  window: int | None = None,
) -> Places:
  """Returns where the tokens of whole rows are.

  Args:
    segment_ids: tokens read earlier tokens of the same segment only; None
      where a row is one.
    prefix_ids: and those of this segment; None where all are whole.
    shape: B and T.
    positions: in each sequence; needed with a window.
    window: positions that a token reads in some layers, its own among them;
      None where no layer has one.
  """
  if segment_ids is None:
    segment_ids = jnp.zeros(shape, jnp.int32)
  order = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
  prefix = segment_ids if prefix_ids is None else prefix_ids
  if window is None:
    return Places(order, segment_ids, prefix)
  assert positions is not None, "a window counts them"
  first = positions - window + 1
  return Places(order, segment_ids, prefix, positions, first)


def either(local: Any, near: Any, whole: Any) -> Any:
  """Returns what a layer with a window takes, or a layer without.

  Args:
    local: which of them the layer is; an array where layers are scanned.
    near: arrays of layers with a window.
    whole: of layers without.
  """
  if isinstance(local, bool):
    return near if local else whole
  return jax.tree.map(lambda x, y: jnp.where(local, x, y), near, whole)


def seen(queries: Places, keys: Places) -> Bool[Array, "B 1 T S"]:
  """Returns which keys each query reads."""
  asks = jax.tree.map(lambda x: x[:, None, :, None], queries)
  has = jax.tree.map(lambda x: x[:, None, None, :], keys)
  same = (asks.segment == has.segment) | (asks.prefix == has.segment)
  read = same & (has.order <= asks.order)
  return read if asks.first is None else read & (has.position >= asks.first)


def attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  mask: jax.Array,
  backend: Literal["xla", "cudnn"] = "xla",
) -> jax.Array:
  """Softmax attention in float32 over keys that lie side by side.

  Args:
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    mask: [B, 1, T, S]; which keys a query reads.
    backend: what computes it.

  Returns:
    What each query read, [B, T, N, H].
  """
  with jax.numpy_dtype_promotion("standard"):  # it mixes float32 and bfloat16
    return jax.nn.dot_product_attention(
      q_BTNH, k_BSKH, v_BSKH, mask=mask, implementation=backend
    )


def portable(rows: Places, width: int, dtype: str) -> Read:
  """Reads by XLA, on one device or where the compiler wants; an `Among`."""
  del width, dtype
  if rows.order.shape[1] <= SHORT:
    return _by_layer(_Kernel(seen, _dense), rows)
  return _by_layer(_Kernel(_own, _blocks), rows)


def _by_layer(kernel: _Kernel, rows: Places) -> Read:
  """Returns what each layer calls: all is begun once, and for windows twice."""
  if rows.first is None:
    made = kernel.begin(rows, rows)
    return lambda q, k, v, local=None: kernel.read(made, q, k, v)
  free = rows._replace(first=jnp.zeros_like(rows.first))
  near, whole = kernel.begin(rows, rows), kernel.begin(free, free)
  return lambda q, k, v, local: kernel.read(either(local, near, whole), q, k, v)


def backend(device: Any) -> Backend:
  """Returns what reads fastest on such a device."""
  if device.platform == "tpu":
    return "splash"
  if device.platform == "gpu" and "NVIDIA" in device.device_kind:
    capability = tuple(map(int, device.compute_capability.split(".")))
    return "cudnn" if capability >= _AMPERE else "xla"
  return "xla"


def on(
  sharding: jax.sharding.NamedSharding,
  heads: str | None,
  *,
  backend: Backend,
  interpret: bool = False,
) -> Among:
  """Says to read rows where they lie.

  Args:
    sharding: how rows and positions lie on a mesh.
    heads: mesh axis of queries' and key heads; None where each device has all.
    backend: what reads, where it takes the shape; "ring" where positions are
      split, whatever their number.
    interpret: runs the Pallas kernel without a TPU.

  Returns:
    What reads. Values and gradients are those of `portable`.
  """
  by_row, by_place = sharding.spec
  parts = 1 if by_place is None else sharding.mesh.shape[by_place]
  mine, whole = jax.P(by_row, by_place), jax.P(by_row)
  queries = jax.P(by_row, by_place, heads)
  keys = jax.P(by_row, None, heads)
  made = jax.P(by_row, None, by_place)
  shard = functools.partial(jax.shard_map, mesh=sharding.mesh, check_vma=False)

  def among(rows: Places, width: int, dtype: str) -> Read:
    length = rows.order.shape[1]
    is_long = backend == "ring" or length > _MOST
    if by_place is not None and parts > 1 and is_long:
      around = functools.partial(ring.attend, ring.Ring(by_place, parts, seen))
      specs = (mine, queries, queries, queries)
      read = shard(around, in_specs=specs, out_specs=queries)
      return _by_layer(_Kernel(lambda mine, _: mine, read), rows)
    kernel = _Kernel(_own, _blocks)
    if backend == "splash" and _fits_splash(length, width):
      kernel = _Kernel(_tiles, functools.partial(_splash, interpret))
    elif backend == "cudnn" and _fits_cudnn(length, parts, width, dtype):
      kernel = _Kernel(seen, _cudnn)
    elif length <= SHORT:
      return portable(rows, width, dtype)
    begin = shard(kernel.begin, in_specs=(mine, whole), out_specs=made)
    read = shard(
      kernel.read, in_specs=(made, queries, keys, keys), out_specs=queries
    )
    return _by_layer(_Kernel(begin, read), rows)

  return among


# ------------------------------------------------------------------------ XLA


def _dense(
  mask: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
  return attention(q, k, v, mask)


def _own(queries: Places, keys: Places) -> tuple[Places, Places]:
  """Keeps the places; of blocks of queries a mask is made at a time."""
  return jax.tree.map(lambda x: x[:, None], (queries, keys))


def _blocks(
  own: tuple[Places, Places], q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
  """Reads with a block of queries at a time, in the backward pass once more."""
  queries, keys = jax.tree.map(lambda x: x[:, 0], own)
  num, length = q.shape[:2]
  count = -(-length // _BLOCK)

  def cut(x: jax.Array) -> jax.Array:
    x = _longer(x, _BLOCK)
    return x.reshape(num, count, _BLOCK, *x.shape[2:]).swapaxes(0, 1)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def one(k: jax.Array, v: jax.Array, asks: Places, q: jax.Array) -> jax.Array:
    return attention(q, k, v, seen(asks, keys))

  _, read = jax.lax.scan(
    lambda _, xs: (None, one(k, v, *xs)), None, jax.tree.map(cut, (queries, q))
  )
  return read.swapaxes(0, 1).reshape(num, -1, *q.shape[2:])[:, :length]


def _longer(x: jax.Array, multiple: int, fill: int = 0) -> jax.Array:
  """Pads the positions of [B, T, ...]."""
  more = ((0, 0), (0, -x.shape[1] % multiple), *((0, 0),) * (x.ndim - 2))
  return jnp.pad(x, more, constant_values=fill)


# ---------------------------------------------------------------- GPU and TPU


def _fits_cudnn(length: int, parts: int, width: int, dtype: str) -> bool:
  """Whether cuDNN has a gradient for it, on GPUs since Ampere."""
  even = length % (2 * parts) == 0
  narrow = width <= 128 and width % 8 == 0
  return dtype == "bfloat16" and even and narrow and length <= _MOST


def _cudnn(
  mask: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
  return attention(q, k, v, mask, "cudnn")


def _fits_splash(length: int, width: int) -> bool:
  return length <= _MOST and width % 64 == 0


def _tiles(queries: Places, keys: Places) -> tuple[masks.MaskInfo, ...]:
  """Returns which blocks have something to read, and what, both ways round.

  No equality of segments says what a continuation reads, so the kernel gets the
  mask itself. Blocks in which nothing is read are not computed.
  """
  mask = seen(*jax.tree.map(lambda x: _longer(x, _LANES, -1), (queries, keys)))
  tile = _tile(*mask.shape[2:])
  ways = masks.process_dynamic_mask, masks.process_dynamic_mask_dkv
  return tuple(
    jax.vmap(lambda x, way=way: _arrays(way(x, (tile, tile))[0]))(mask)
    for way in ways
  )


def _arrays(info: masks.MaskInfo) -> masks.MaskInfo:
  return info._replace(is_dynamic_mask=None)


def _tile(*lengths: int) -> int:
  return next(n for n in _TILES if not any(x % n for x in lengths))


def _splash(
  interpret: bool,
  tiles: tuple[masks.MaskInfo, ...],
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
) -> jax.Array:
  """Reads by JAX's splash attention, a row at a time."""
  length = q.shape[1]
  scale = q.shape[-1] ** -0.5  # The kernel has none of its own.
  q = (q.astype(jnp.float32) * scale).astype(q.dtype)
  q, k, v = (_longer(x, _LANES).swapaxes(1, 2) for x in (q, k, v))
  tile = _tile(q.shape[2], k.shape[2])

  sizes = splash.BlockSizes(
    block_q=tile,
    block_kv=tile,
    block_q_dkv=tile,
    block_kv_dkv=tile,
    block_q_dq=tile,
    block_kv_dq=tile,
  )

  def one(tiles: tuple[masks.MaskInfo, ...], *qkv: jax.Array) -> Any:
    rows, columns = (x._replace(is_dynamic_mask=True) for x in tiles)
    return splash.SplashAttentionKernel(
      rows,
      rows,
      columns,
      block_sizes=sizes,
      is_mqa=False,
      save_residuals=False,
      mask_value=splash.DEFAULT_MASK_VALUE,
      attn_logits_soft_cap=None,
      residual_checkpoint_name=None,
      mask_function=None,
      interpret=interpret,
    )(*qkv)

  with jax.numpy_dtype_promotion("standard"):
    read = jax.vmap(one)(tiles, q, k, v)
  return read.swapaxes(1, 2)[:, :length]
