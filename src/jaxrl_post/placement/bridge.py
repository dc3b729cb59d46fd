"""The way of some leaves from one mesh to another, without the host.

One compiled program on the source casts or quantizes leaves and lays them out
on a bridge: the source's devices in the shape of the target's mesh. Arrays of
equal layouts then travel from device to device. Where several processes train
together, the bridge has one target for each of them, so that no array leaves
its process.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.placement import fingerprint, picking
from jaxrl_post.placement import mesh as meshes

_Mesh = jax.sharding.Mesh
_Sharding = jax.sharding.NamedSharding
_Shards = dict[Any, jax.Array]  # by device

# Axes of copies on the source; not names that a user's mesh can have.
_PROCESS, _COPY = "_process", "_copy"


@types.host_record
class Leaf:
  """A weight as published, or one of the two parts of a quantized one.

  Attributes:
    name: its key path.
    weight: key path of the weight as trained, which two leaves may share.
    trained: shape, dtype and sharding there; a mesh with Auto axes.
    make: computes the leaf from the weight; None where it is only cast.
    shape: as published.
    cast: dtype as published.
    source: how it lies before it travels, on the mesh of `trained`.
    target: where it generates, on a mesh with Auto axes.
    goal: `target` as the engine wrote it: its axes may be Explicit.
    is_alias: whether the trainer's own buffers are what generation needs.
  """

  name: str
  weight: str
  trained: jax.ShapeDtypeStruct
  make: Callable[[jax.Array], jax.Array] | None
  shape: tuple[int, ...]
  cast: np.dtype
  source: _Sharding
  target: _Sharding
  goal: _Sharding
  is_alias: bool

  @property
  def is_kept(self) -> bool:
    """Whether it is published as trained, neither cast nor quantized."""
    return self.make is None and self.trained.dtype == self.cast

  @property
  def dims(self) -> list[tuple[str, ...]]:
    """Returns the target's mesh axes of each dim, major first."""
    return fingerprint.axes_of_dims(self.target.spec, len(self.shape))

  @property
  def axes(self) -> tuple[str, ...]:
    """Returns the target's mesh axes that split this leaf."""
    return tuple(itertools.chain.from_iterable(self.dims))


@types.host_record
class Way:
  """How some leaves travel.

  Attributes:
    leaves: which ones.
    home: the mesh where they train.
    program: makes them, lays them out on the bridge and computes checksums; a
      jitted function of a list of arrays as trained, one for each leaf.
    send: runs the program and copies; returns arrays on the target, and
      checksums of the source by leaf name.
    check: computes checksums of arrays on the target, by leaf name.
  """

  leaves: tuple[Leaf, ...]
  home: _Mesh
  program: Any
  send: Callable[[list[jax.Array]], tuple[list[jax.Array], types.Tree]]
  check: Callable[[list[jax.Array]], types.Tree]


@types.host_record
class _Hop:
  """A copy of one shard of each leaf, between meshes of one shape."""

  pieces: tuple[tuple[int, ...], ...]  # of each leaf, place on the fine axes
  senders: tuple[_Sharding, ...]
  receivers: tuple[_Sharding, ...]


def auto(mesh: _Mesh) -> _Mesh:
  """Returns a mesh of the same devices and names, with Auto axes."""
  return meshes.over(mesh.devices, mesh.axis_names)


def view(x: jax.Array, sharding: _Sharding) -> jax.Array:
  """Returns the same buffers, or one copy of them, under another sharding.

  Args:
    x: an array; each device of `sharding` that this process has holds its
      shard.
    sharding: an equal layout of those shards.
  """
  if x.sharding == sharding:
    return x
  return _assemble(x.shape, sharding, _by_device(x))


def own_devices(mesh: _Mesh) -> list[Any]:
  """Lists the devices of a mesh that this process can read and write.

  With one process these are all, even on several hosts (Pathways).
  """
  if jax.process_count() == 1:
    return list(mesh.devices.flat)
  here = jax.process_index()
  return [d for d in mesh.devices.flat if d.process_index == here]


def build(home: _Mesh, away: _Mesh, leaves: tuple[Leaf, ...]) -> Way:
  """Builds the way of some leaves; compiles on its first use.

  Each target axis is a coarse times a fine one. On the source a device holds
  one coarse part, cut into arrays along the fine axes; array j goes to the
  target devices at place j of the fine axes, one to one.

  Args:
    home: where the leaves train; Auto axes.
    away: where they generate; Auto axes, devices of this process.
    leaves: of equal meshes, none of them an alias.

  Returns:
    The way. No array it sends shares a buffer with what was given.
  """
  groups = _by_process(home)
  splits = _split_axes(groups.shape[1], away, leaves)
  names = away.axis_names
  coarse = [splits[name][0] for name in names]
  devices = groups.reshape(len(groups), -1, *coarse)
  bridge = meshes.over(devices, (_PROCESS, _COPY, *names))
  # Between meshes that share devices a copy may be none, and the next update
  # would take the buffer away.
  apart = set(home.devices.flat).isdisjoint(away.devices.flat)
  direct = [apart and _is_direct(leaf, bridge, splits) for leaf in leaves]
  program = _program(bridge, leaves, direct, splits)
  run = _call_on(home, program)
  checking = fingerprint.checker({leaf.name: leaf.target for leaf in leaves})
  hops = _hops(bridge, away, leaves, splits)
  put = list(bridge.devices.flat) != list(away.devices.flat)
  whole = bridge.size == math.prod(coarse) and len(hops) == 1

  def send(arrays: list[jax.Array]) -> tuple[list[jax.Array], types.Tree]:
    laid, sums = run(arrays)
    made = iter(laid)
    pieces = [
      {(0,) * len(leaf.axes): x} if skip else next(made)
      for leaf, x, skip in zip(leaves, arrays, direct, strict=True)
    ]
    if whole:
      parts = [x for piece in pieces for x in piece.values()]
      goals = [leaf.goal for leaf in leaves]
      # Never `donate=True`: across devices it frees memory still in use.
      out = (
        jax.device_put(parts, goals) if put else list(map(view, parts, goals))
      )
    else:
      out = _along(hops, leaves, pieces)
    return out, sums

  def check(arrays: list[jax.Array]) -> types.Tree:
    pairs = zip(arrays, leaves, strict=True)
    return checking({leaf.name: view(x, leaf.target) for x, leaf in pairs})

  return Way(leaves=leaves, home=home, program=program, send=send, check=check)


def _by_process(home: _Mesh) -> np.ndarray:
  """Returns devices as [process, device], in one order everywhere."""
  count = jax.process_count()
  if count == 1:
    return home.devices.reshape(1, -1)
  groups = picking.by_process(list(home.devices.flat), count)
  return np.asarray([*groups.values()])


def _split_axes(
  count: int, away: _Mesh, leaves: tuple[Leaf, ...]
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


def _is_direct(
  leaf: Leaf, bridge: _Mesh, splits: Mapping[str, tuple[int, int]]
) -> bool:
  """Says whether a leaf lies on the bridge already, as it is published."""
  is_cut = any(splits[name][1] > 1 for name in leaf.axes)
  if is_cut or not leaf.is_kept:
    return False
  laid = _Sharding(bridge, leaf.target.spec)
  here = leaf.source.devices_indices_map(leaf.shape)
  return here == laid.devices_indices_map(leaf.shape)


def _program(
  bridge: _Mesh,
  leaves: tuple[Leaf, ...],
  direct: list[bool],
  splits: Mapping[str, tuple[int, int]],
) -> Any:
  """Writes the program of the source: cast or quantize, checksum, lay out."""

  def program(arrays: list[jax.Array]):
    out, sums = [], {}
    for leaf, array, skip in zip(leaves, arrays, direct, strict=True):
      made = _made(array, leaf)
      sums[leaf.name] = fingerprint.checksum(made, leaf.source)
      if not skip:
        out.append(_cut(_halfway(made, leaf, bridge), leaf, bridge, splits))
    return out, sums

  # An output with a sharding of its own is never the buffer of an input.
  shardings = [
    _Sharding(bridge, leaf.target.spec)
    for leaf, skip in zip(leaves, direct, strict=True)
    if not skip
  ]
  return jax.jit(program, out_shardings=(shardings, None))


def _made(array: jax.Array, leaf: Leaf) -> jax.Array:
  """Returns a weight as it is published, still where it trains."""
  if leaf.make is None:
    return array.astype(leaf.cast)
  made = jax.lax.with_sharding_constraint(leaf.make(array), leaf.source)
  # Computed once: a value between two integers must not be rounded to one for
  # the checksum and to the other for the way.
  return jax.lax.optimization_barrier(made)


def _call_on(mesh: _Mesh, program: Callable) -> Callable:
  """Calls a program on its mesh, whatever mesh the caller has set."""

  def call(arrays: list[jax.Array]):
    with jax.set_mesh(mesh):
      return program(arrays)

  return call


def _hops(
  bridge: _Mesh,
  away: _Mesh,
  leaves: tuple[Leaf, ...],
  splits: Mapping[str, tuple[int, int]],
) -> list[_Hop]:
  """Lists the copies to make, one for each place on the fine axes."""
  names = away.axis_names
  mine = set(own_devices(bridge))
  rows = bridge.devices.reshape(-1, *bridge.devices.shape[2:])
  senders = [meshes.over(row, names) for row in rows if row.flat[0] in mine]
  fine = away.devices.reshape([n for name in names for n in splits[name]])
  hops = []
  places = itertools.product(*(range(splits[name][1]) for name in names))
  for number, at in enumerate(places):
    # Copies on the source take turns, so that no device sends everything.
    sender = senders[number % len(senders)]
    index = tuple(i for n in at for i in (slice(None), n))
    receiver = meshes.over(fine[index], names)
    place = dict(zip(names, at, strict=True))
    specs = [leaf.target.spec for leaf in leaves]
    hops.append(
      _Hop(
        pieces=tuple(
          tuple(place[name] for name in leaf.axes) for leaf in leaves
        ),
        senders=tuple(_Sharding(sender, spec) for spec in specs),
        receivers=tuple(_Sharding(receiver, spec) for spec in specs),
      )
    )
  return hops


def _along(
  hops: list[_Hop],
  leaves: tuple[Leaf, ...],
  pieces: list[dict[tuple, jax.Array]],
) -> list[jax.Array]:
  """Copies pieces along all hops at once and joins what arrived."""
  parts, goals = [], []
  for hop in hops:
    for piece, own, sender in zip(pieces, hop.pieces, hop.senders, strict=True):
      parts.append(view(piece[own], sender))
    goals += hop.receivers
  there = jax.device_put(parts, goals)
  out = []
  for number, leaf in enumerate(leaves):
    shards: _Shards = {}
    for part in there[number :: len(leaves)]:
      shards.update(_by_device(part))
    out.append(_assemble(leaf.shape, leaf.goal, shards))
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
  old = fingerprint.axes_of_dims(leaf.source.spec, x.ndim)
  for dim, names in enumerate(old):
    free = names and not leaf.dims[dim]
    if leaf.axes and free and x.shape[dim] % parts == 0:
      layout = [*leaf.dims]
      layout[dim] = tuple(spare)
      to = _Sharding(mesh, jax.P(*layout))
      return jax.lax.with_sharding_constraint(x, to)
  return x


def _by_device(x: jax.Array) -> _Shards:
  return {shard.device: shard.data for shard in x.addressable_shards}


def _assemble(
  shape: tuple[int, ...], sharding: _Sharding, shards: _Shards
) -> jax.Array:
  here = [shards[device] for device in sharding.addressable_devices]
  return jax.make_array_from_single_device_arrays(shape, sharding, here)
