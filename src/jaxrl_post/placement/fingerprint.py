"""Proves that weights arrived: an integer of each leaf, equal on both sides.

The integer is a sum over elements, so each device sums what it holds, in any
sharding, and a sum of the devices' sums is all that they exchange.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from jaxrl_post import types

# Elements from which an array is cut into slabs, and into how many. More of
# them make a loop too long for XLA to fuse, and five times slower.
_LARGE = 2**14
_SLABS = 8


def verify(fingerprints: tuple[types.Tree, types.Tree]) -> None:
  """Compares the checksums of both sides, of every copy; waits for them.

  Each process looks at the copies on its own devices.

  Args:
    fingerprints: checksums by leaf name, on the source and on the target.

  Raises:
    RunError: some copy of a leaf is not what was trained; names the leaf.
  """
  shards = {
    name: [
      [shard.data for shard in side[name].addressable_shards]
      for side in fingerprints
      if name in side
    ]
    for name in sorted({key for side in fingerprints for key in side})
  }
  differ = []
  for name, sides in jax.device_get(shards).items():
    values = {int(value[0]) for side in sides for value in side}
    if len(sides) < 2 or len(values) > 1:
      differ.append(name)
  if differ:
    raise types.RunError(
      "publish: expected equal checksums on both meshes, got others for "
      f"{', '.join(differ)}. Do not train on what these weights sampled."
    )


def checksum(
  x: Array, sharding: jax.sharding.NamedSharding
) -> UInt32[Array, " devices"]:
  """Sums a hash of each element's bits and place, modulo 2**32.

  Args:
    x: elements of at most 32 bits.
    sharding: how `x` lies, on a mesh with Auto axes.

  Returns:
    For each device the checksum of the copy that it holds a part of. It is the
    same in any sharding, and another one after any change of one element.
  """
  dims = axes_of_dims(sharding.spec, x.ndim)
  axes = tuple(itertools.chain.from_iterable(dims))

  def local(block: jax.Array) -> jax.Array:
    total = _sum_of_block(block, x.shape, dims)
    return (jax.lax.psum(total, axes) if axes else total)[None]

  return jax.shard_map(
    local,
    mesh=sharding.mesh,
    in_specs=jax.P(*dims),
    out_specs=jax.P(sharding.mesh.axis_names),
  )(x)


def by_name(tree: types.Tree) -> dict[str, Any]:
  """Returns the leaves of a tree by key path, as checksums are named."""
  flat, _ = jax.tree.flatten_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def checker(
  shardings: Mapping[str, jax.sharding.NamedSharding],
) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
  """Compiles the checksums of arrays by name, on its first call.

  Args:
    shardings: how each lies, all on one mesh, with Auto axes.

  Returns:
    A function of arrays by name to their checksums by name, whatever mesh the
    caller has set.
  """
  mesh: Any = next(iter(shardings.values())).mesh

  @jax.jit
  def check(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: checksum(x, shardings[name]) for name, x in arrays.items()}

  def call(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    with jax.set_mesh(mesh):
      return check(arrays)

  return call


def axes_of_dims(spec: jax.P, ndim: int) -> list[tuple[str, ...]]:
  """Returns the mesh axes that split each dim, major first."""
  entries = (*spec, *(None,) * (ndim - len(spec)))
  return [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]


def _sum_of_block(
  block: jax.Array, shape: tuple[int, ...], dims: list[tuple[str, ...]]
) -> jax.Array:
  """Sums the hashes of a device's block of an array of `shape`."""
  small, whole, starts = _runs(block.shape, shape, dims)
  strides = [math.prod(whole[i + 1 :]) for i in range(len(whole))]
  place = jnp.zeros((), jnp.uint32)
  for start, stride in zip(starts, strides, strict=True):
    place = place + start * _word(stride)
  word = jnp.dtype(f"uint{8 * block.dtype.itemsize}")
  bits = jax.lax.bitcast_convert_type(block.reshape(small), word)

  slabs = _slabs(bits)
  for dim, stride in enumerate(strides):
    iota = jax.lax.broadcasted_iota(jnp.uint32, slabs[0][1].shape, dim)
    place = place + iota * _word(stride)
  parts = [
    _mix(
      slab.astype(jnp.uint32),
      place + _word(sum(map(operator.mul, corner, strides))),
    )
    for corner, slab in slabs
  ]
  total = functools.reduce(operator.add, parts)
  return jnp.sum(jax.lax.optimization_barrier(total), dtype=jnp.uint32)


def _slabs(x: jax.Array) -> list[tuple[list[int], jax.Array]]:
  """Cuts a large array into a few equal ones; tells where each one starts.

  XLA's CPU compiler turns the sum of arrays into vector code, but not the sum
  of an array's elements, which takes ten times as long.
  """

  def count(dim: int) -> int:
    return max(n for n in range(1, _SLABS + 1) if x.shape[dim] % n == 0)

  dim = max(range(x.ndim), key=lambda dim: (count(dim), x.shape[dim]))
  step = x.shape[dim] // (count(dim) if x.size >= _LARGE else 1)
  out = []
  for start in range(0, x.shape[dim], step):
    corner = [start if other == dim else 0 for other in range(x.ndim)]
    slab = jax.lax.slice_in_dim(x, start, start + step, axis=dim)
    out.append((corner, slab))
  return out


def _runs(
  block: tuple[int, ...], shape: tuple[int, ...], dims: list[tuple[str, ...]]
) -> tuple[list[int], list[int], list[jax.Array]]:
  """Joins each dim that is not split to the one before it.

  Returns:
    Of each joined dim its size in the block, its size in the array, and where
    the block starts in it. Few long loops are faster than many short ones.
  """
  small, whole, starts = [1], [1], [jnp.zeros((), jnp.uint32)]
  for part, size, names in zip(block, shape, dims, strict=True):
    if names:
      number = jax.lax.axis_index(names).astype(jnp.uint32)
      small.append(part)
      whole.append(size)
      starts.append(number * _word(part))
    else:
      small[-1] *= part
      whole[-1] *= size
      starts[-1] = starts[-1] * _word(size)
  return small, whole, starts


def _word(number: int) -> jax.Array:
  return jnp.uint32(number % 2**32)


def _mix(bits: jax.Array, place: jax.Array) -> jax.Array:
  """Hashes a value at its place; one-to-one in `bits` at any one place.

  One round of the finalizer of MurmurHash3 (Appleby 2011), which makes elements
  that change places change the sum like random numbers; a second round takes
  as long again.
  """
  h = bits + place * jnp.uint32(0x9E3779B1)
  h = (h ^ (h >> 15)) * jnp.uint32(0x85EBCA6B)
  return h ^ (h >> 16)
