"""Moves trained weights to the generation mesh, from device to device.

`jax.device_put` between differently sharded meshes copies whole arrays through
the host and blocks. Here one compiled program on the training devices casts
the weights and lays them out in the very shards that the generation devices
will hold; shards then travel in equal layouts, which JAX copies directly.

The floor: every byte of a target device's shard that the device does not hold
must reach it. That is `Publisher.bytes`, and between disjoint meshes nothing
more crosses; what the training devices exchange among themselves comes on top.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jaxrl_post import types
from jaxrl_post.placement import mesh as meshes

_Mesh = jax.sharding.Mesh
_Sharding = jax.sharding.NamedSharding
_Spec = jax.sharding.PartitionSpec
_Shards = dict[Any, jax.Array]  # by device

# Axis of copies on the source; not a name that a user's mesh can have.
_COPY = "_copy"


@types.host_record
class Leaf:
  """One weight: as trained, and (`cast`, `target`) as published."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  cast: np.dtype
  source: _Sharding
  target: _Sharding

  @property
  def is_alias(self) -> bool:
    """Says whether the trainer's own buffers are what generation needs."""
    same = self.source.is_equivalent_to(self.target, len(self.shape))
    return same and self.dtype == self.cast

  @property
  def dims(self) -> list[tuple[str, ...]]:
    """Returns the target's mesh axes of each dim, major first."""
    return _axes_of_dims(self.target.spec, len(self.shape))

  @property
  def axes(self) -> tuple[str, ...]:
    """Returns the target's mesh axes that split this leaf."""
    return tuple(itertools.chain.from_iterable(self.dims))


@types.host_record
class Publisher:
  """A planned way of all weights from one placement to another.

  Attributes:
    leaves: what is published: all leaves of the engine.
    aliases: whether some published leaf is the trainer's own buffer. While it
      is true the trainer must not donate its weights.
    bytes: bytes that target devices need and do not hold.
    structure: tree definition of what is published.
    send: lays moving leaves out on the target; also checksums of the source.
    check: computes checksums of moving leaves on the target.
  """

  leaves: tuple[Leaf, ...]
  aliases: bool
  bytes: int
  structure: Any
  send: Callable[[list[jax.Array]], tuple[list[jax.Array], types.Tree]]
  check: Callable[[list[jax.Array]], types.Tree]

  def __call__(
    self, params: types.Tree
  ) -> tuple[types.Tree, tuple[types.Tree, types.Tree]]:
    """Publishes weights; returns before devices have finished.

    Args:
      params: weights, placed as planned. They stay as they are, and may be
        donated afterwards unless `aliases`.

    Returns:
      The weights in the target's dtype and sharding, and for `verify` the
      checksums by leaf name as computed on the source and on the target. An
      alias has none.

    Raises:
      InputError: a leaf is missing, extra, or of another shape, dtype or
        sharding than planned; names it.
    """
    arrays = _as_planned(params, self.leaves)
    pairs = list(zip(arrays, self.leaves, strict=True))
    moving = [a for a, leaf in pairs if not leaf.is_alias]
    sent, before = self.send(moving) if moving else ([], {})
    after = self.check(sent) if moving else {}
    arrived = iter(sent)
    out = [
      _view(a, leaf.target) if leaf.is_alias else next(arrived)
      for a, leaf in pairs
    ]
    return jax.tree.unflatten(self.structure, out), (before, after)


def plan(
  source: types.Tree,
  target: types.Tree,
  shapes: types.Tree,
  target_dtype: jax.typing.DTypeLike,
) -> Publisher:
  """Plans the way of all weights from the training to the generation mesh.

  Args:
    source: `NamedSharding` of each leaf where it trains, all on one mesh.
    target: the same where it generates. The two meshes may share devices.
    shapes: `ShapeDtypeStruct` of each leaf as trained.
    target_dtype: dtype that generation holds floating leaves in.

  Returns:
    A publisher. It compiles on its first call only, and no array passes
    through the host. Leaves of equal dtype, devices and layout on both sides
    are published as they are, which costs nothing.

  Raises:
    InputError: a leaf is missing, extra or does not fit its sharding; names it.
  """
  leaves, structure = _join(source, target, shapes, jnp.dtype(target_dtype))
  home = _only_mesh("source", [leaf.source for leaf in leaves])
  away = _only_mesh("target", [leaf.target for leaf in leaves])
  moving = [leaf for leaf in leaves if not leaf.is_alias]
  in_place = list(home.devices.flat) == list(away.devices.flat)

  def check(arrays: list[jax.Array]) -> dict[str, jax.Array]:
    return {
      leaf.name: checksum(array, leaf.target)
      for leaf, array in zip(moving, arrays, strict=True)
    }

  return Publisher(
    leaves=leaves,
    aliases=len(moving) < len(leaves),
    bytes=sum(_missing_bytes(leaf) for leaf in leaves),
    structure=structure,
    send=(_within if in_place else _across)(home, away, moving),
    check=_compile(away, check),
  )


def verify(fingerprints: tuple[types.Tree, types.Tree]) -> None:
  """Compares the checksums of both sides, of every copy; waits for them.

  Raises:
    RunError: some copy of a leaf is not what was trained; names the leaf.
  """
  before, after = fingerprints
  differ = []
  for name in sorted({*before, *after}):
    copies = [side[name] for side in (before, after) if name in side]
    shards = [s for copy in copies for s in copy.addressable_shards]
    values = {int(np.asarray(shard.data)[0]) for shard in shards}
    if len(copies) < 2 or len(values) > 1:
      differ.append(name)
  if differ:
    raise types.RunError(
      "publish: expected equal checksums on both meshes, got others for "
      f"{', '.join(differ)}. Do not train on what these weights sampled."
    )


def checksum(x: Array, sharding: _Sharding) -> UInt32[Array, " devices"]:
  """Sums a hash of each element's bits and place, modulo 2**32.

  Args:
    x: elements of at most 32 bits.
    sharding: how `x` lies.

  Returns:
    For each device the checksum of the copy that it holds a part of. It is the
    same in any sharding, and another one after any change of one element.
  """
  dims = _axes_of_dims(sharding.spec, x.ndim)
  axes = tuple(itertools.chain.from_iterable(dims))

  def local(block: jax.Array) -> jax.Array:
    place = jnp.zeros(block.shape, jnp.uint32)
    for dim, (names, size) in enumerate(zip(dims, x.shape, strict=True)):
      at = jax.lax.broadcasted_iota(jnp.uint32, block.shape, dim)
      if names:
        number = jax.lax.axis_index(names).astype(jnp.uint32)
        at = at + number * jnp.uint32(block.shape[dim])
      place = place * jnp.uint32(size) + at
    word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(block, word).astype(jnp.uint32)
    total = jnp.sum(_mix(bits, place), dtype=jnp.uint32)
    return (jax.lax.psum(total, axes) if axes else total)[None]

  return jax.shard_map(
    local,
    mesh=sharding.mesh,
    in_specs=jax.P(*dims),
    out_specs=jax.P(sharding.mesh.axis_names),
  )(x)


def _mix(bits: jax.Array, place: jax.Array) -> jax.Array:
  """Hashes a value at its place; one-to-one in `bits` at any one place.

  Ends as MurmurHash3 does (Appleby 2011), so that elements that change places
  change the sum like random numbers.
  """
  h = bits + place * jnp.uint32(0x9E3779B1)
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


def _compile(mesh: _Mesh, fn: Callable, **options) -> Callable:
  """Compiles `fn` for `mesh`, whatever mesh the caller has set."""
  compiled = jax.jit(fn, **options)

  def call(arrays: list[jax.Array]):
    with jax.set_mesh(mesh):
      return compiled(arrays)

  return call


def _on_source(
  home: _Mesh, leaves: list[Leaf], lay: Callable, shardings: list[_Sharding]
) -> Callable:
  """Compiles the program of the source: cast, checksum, lay out."""

  def program(arrays: list[jax.Array]):
    out, sums = [], {}
    for leaf, array in zip(leaves, arrays, strict=True):
      cast = array.astype(leaf.cast)
      sums[leaf.name] = checksum(cast, leaf.source)
      out.append(lay(cast, leaf))
    return out, sums

  # An output with a sharding of its own is never the buffer of an input.
  return _compile(home, program, out_shardings=(shardings, None))


def _within(home: _Mesh, away: _Mesh, leaves: list[Leaf]) -> Callable:
  """Casts and reshards on the devices where the weights already are."""
  goals = [leaf.target for leaf in leaves]
  return _on_source(
    home, leaves, lambda x, leaf: _halfway(x, leaf, away), goals
  )


def _across(home: _Mesh, away: _Mesh, leaves: list[Leaf]) -> Callable:
  """Casts and reshards on the source, then copies shard by shard.

  Each target axis is a coarse times a fine one. On the source a device holds
  one coarse part, cut into arrays along the fine axes; array j goes to the
  target devices at place j of the fine axes, one to one.
  """
  splits = _split_axes(home.size, away, leaves)
  names = away.axis_names
  coarse = [splits[name][0] for name in names]
  bridge = meshes.over(home.devices.reshape(-1, *coarse), (_COPY, *names))
  senders = [meshes.over(devices, names) for devices in bridge.devices]
  receivers = _receivers(away, splits)

  program = _on_source(
    home,
    leaves,
    lambda x, leaf: _cut(_halfway(x, leaf, bridge), leaf, bridge, splits),
    [_Sharding(bridge, leaf.target.spec) for leaf in leaves],
  )

  def send(arrays: list[jax.Array]) -> tuple[list[jax.Array], types.Tree]:
    pieces, sums = program(arrays)
    arrived: list[_Shards] = [{} for _ in leaves]
    for number, (place, receiver) in enumerate(receivers):
      # Copies on the source take turns, so that no device sends everything.
      sender = senders[number % len(senders)]
      parts, goals = [], []
      for leaf, piece in zip(leaves, pieces, strict=True):
        own = tuple(place[name] for name in leaf.axes)
        parts.append(_view(piece[own], _Sharding(sender, leaf.target.spec)))
        goals.append(_Sharding(receiver, leaf.target.spec))
      # Never `donate=True`: across devices it frees memory still in use.
      there = jax.device_put(parts, goals)
      for shards, part in zip(arrived, there, strict=True):
        shards.update(_by_device(part))
    out = [
      _assemble(leaf.shape, leaf.target, shards)
      for leaf, shards in zip(leaves, arrived, strict=True)
    ]
    return out, sums

  return send


def _split_axes(
  count: int, away: _Mesh, leaves: list[Leaf]
) -> dict[str, tuple[int, int]]:
  """Splits target axes into (coarse, fine); the coarse ones divide `count`.

  Axes that split weights go first: a source device then holds the least.
  """
  used = {name for leaf in leaves for name in leaf.axes}
  splits = {}
  for name in sorted(away.axis_names, key=lambda name: name not in used):
    coarse = math.gcd(away.shape[name], count)
    splits[name] = (coarse, away.shape[name] // coarse)
    count //= coarse
  return splits


def _receivers(
  away: _Mesh, splits: Mapping[str, tuple[int, int]]
) -> list[tuple[dict[str, int], _Mesh]]:
  """Lists each place on the fine axes with its mesh of the coarse shape."""
  names = away.axis_names
  devices = away.devices.reshape([n for name in names for n in splits[name]])
  out = []
  for at in itertools.product(*(range(splits[name][1]) for name in names)):
    index = tuple(i for n in at for i in (slice(None), n))
    place = dict(zip(names, at, strict=True))
    out.append((place, meshes.over(devices[index], names)))
  return out


def _cut(
  x: jax.Array,
  leaf: Leaf,
  bridge: _Mesh,
  splits: Mapping[str, tuple[int, int]],
) -> dict[tuple, jax.Array]:
  """Cuts a leaf along the fine axes: place on `leaf.axes` to an array."""
  shape, layout, small = [], [], []
  for size, names in zip(x.shape, leaf.dims, strict=True):
    both = [n for name in names for n in splits[name]]
    shape += [*both, size // math.prod(both)]
    layout += [part for name in names for part in (name, None)] + [None]
    small.append(size // math.prod(splits[name][1] for name in names))
  x = x.reshape(shape)
  x = jax.lax.with_sharding_constraint(x, _Sharding(bridge, jax.P(*layout)))
  out = {}
  for at in itertools.product(*(range(splits[n][1]) for n in leaf.axes)):
    place = iter(at)
    index = []
    for names in leaf.dims:
      index += [i for _ in names for i in (slice(None), next(place))]
      index.append(slice(None))
    out[at] = x[tuple(index)].reshape(small)
  return out


def _halfway(x: jax.Array, leaf: Leaf, mesh: _Mesh) -> jax.Array:
  """Lets XLA split a leaf the new way before it gathers the old way.

  From one split dim straight to another, XLA gathers the whole leaf on each
  device. In between, axes that will hold copies go on splitting the old dim.
  """
  spare = [name for name in mesh.axis_names if name not in leaf.axes]
  parts = math.prod(mesh.shape[name] for name in spare)
  old = _axes_of_dims(leaf.source.spec, x.ndim)
  for dim, names in enumerate(old):
    free = names and not leaf.dims[dim]
    if leaf.axes and free and x.shape[dim] % parts == 0:
      layout = [*leaf.dims]
      layout[dim] = tuple(spare)
      to = _Sharding(mesh, jax.P(*layout))
      return jax.lax.with_sharding_constraint(x, to)
  return x


def _axes_of_dims(spec: _Spec, ndim: int) -> list[tuple[str, ...]]:
  entries = (*spec, *(None,) * (ndim - len(spec)))
  return [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]


def _by_device(x: jax.Array) -> _Shards:
  return {shard.device: shard.data for shard in x.addressable_shards}


def _assemble(
  shape: tuple[int, ...], sharding: _Sharding, shards: _Shards
) -> jax.Array:
  here = [shards[device] for device in sharding.addressable_devices]
  return jax.make_array_from_single_device_arrays(shape, sharding, here)


def _view(x: jax.Array, sharding: _Sharding) -> jax.Array:
  """Returns the same buffers, or one copy of them, under another sharding."""
  if x.sharding == sharding:
    return x
  return _assemble(x.shape, sharding, _by_device(x))


def _missing_bytes(leaf: Leaf) -> int:
  """Counts bytes of target shards that their devices do not hold."""
  have = leaf.source.devices_indices_map(leaf.shape)
  total = 0
  for device, box in leaf.target.devices_indices_map(leaf.shape).items():
    needed, held = 1, int(device in have)
    pairs = zip(leaf.shape, box, have.get(device, box), strict=True)
    for size, goal, old in pairs:
      (low, high, _), (first, last, _) = goal.indices(size), old.indices(size)
      needed *= high - low
      held *= max(0, min(high, last) - max(low, first))
    total += needed - held
  return total * leaf.cast.itemsize


def _join(
  source: types.Tree,
  target: types.Tree,
  shapes: types.Tree,
  target_dtype: np.dtype,
) -> tuple[tuple[Leaf, ...], Any]:
  """Joins three trees by leaf name, or says which leaf has no partner."""
  goals, froms, wholes = map(_by_name, (target, source, shapes))
  _same_names("publish (trained shardings)", goals, froms)
  _same_names("publish (trained shapes)", goals, wholes)
  leaves = []
  for name, goal in goals.items():
    shape, dtype = wholes[name].shape, wholes[name].dtype
    cast = target_dtype if jnp.issubdtype(dtype, jnp.floating) else dtype
    for sharding in (froms[name], goal):
      _fits(name, shape, sharding)
    leaves.append(
      Leaf(
        name=name,
        shape=shape,
        dtype=dtype,
        cast=cast,
        source=froms[name],
        target=goal,
      )
    )
  return tuple(leaves), jax.tree.structure(target)


def _by_name(tree: types.Tree) -> dict:
  flat, _ = jax.tree.flatten_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def _same_names(place: str, engine: Mapping, given: Mapping) -> None:
  missing = ", ".join(sorted(engine.keys() - given.keys())) or "none"
  extra = ", ".join(sorted(given.keys() - engine.keys())) or "none"
  if engine.keys() != given.keys():
    raise types.InputError(
      f"{place}: expected the engine's {len(engine)} leaves, got {len(given)}: "
      f"missing {missing}, extra {extra}. Use one model on both sides."
    )


def _fits(name: str, shape: tuple[int, ...], sharding: _Sharding) -> None:
  try:
    sharding.shard_shape(shape)
  except ValueError as error:
    raise types.InputError(
      f"publish {name}: expected a shape that {sharding.spec} over "
      f"{dict(sharding.mesh.shape)} divides, got {list(shape)}. Use one model "
      "on both sides."
    ) from error


def _only_mesh(kind: str, shardings: list[_Sharding]) -> _Mesh:
  mesh = shardings[0].mesh
  if isinstance(mesh, _Mesh) and all(s.mesh == mesh for s in shardings):
    return mesh
  raise types.InputError(
    f"publish: expected all {kind} leaves on one mesh of devices, got "
    f"{len({s.mesh for s in shardings})} meshes. Place the whole tree on one."
  )


def _as_planned(
  params: types.Tree, leaves: tuple[Leaf, ...]
) -> list[jax.Array]:
  arrays = _by_name(params)
  _same_names("publish", {leaf.name: leaf for leaf in leaves}, arrays)
  for leaf in leaves:
    x = arrays[leaf.name]
    alike = (x.shape, x.dtype) == (leaf.shape, leaf.dtype)
    if not (alike and x.sharding.is_equivalent_to(leaf.source, x.ndim)):
      raise types.InputError(
        f"publish {leaf.name}: expected {leaf.dtype}{list(leaf.shape)} in "
        f"{leaf.source}, got {x.dtype}{list(x.shape)} in {x.sharding}. Publish "
        "the weights that were planned."
      )
  return [arrays[leaf.name] for leaf in leaves]
