"""Moves trained weights to the generation mesh, from device to device.

`jax.device_put` between differently sharded meshes copies whole arrays through
the host and blocks. Here one compiled program on the training devices casts or
quantizes the weights and lays them out in the very shards that the generation
devices will hold; shards then travel in equal layouts, which JAX copies
directly.

The floor: every byte of a target device's shard that the device does not hold
must reach it. That is `Publisher.bytes`, and between disjoint meshes nothing
more crosses; what the training devices exchange among themselves comes on top.

With several processes the training mesh may span all of them; the generation
mesh is each process's own, of one shape everywhere. All plan and publish in
the same order; training devices exchange what is needed, copies stay local.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import types
from jaxrl_post.models import quantize
from jaxrl_post.placement import bridge, fingerprint

_Mesh = jax.sharding.Mesh
_Sharding = jax.sharding.NamedSharding


@types.host_record
class Publisher:
  """A planned way of weights from one placement to another.

  Attributes:
    leaves: all leaves of the engine.
    trained: key paths of the weights that they are made of, and their tree.
    chosen: names of the leaves that a call publishes; the others are kept.
    aliases: whether some published leaf is the trainer's own buffer. While it
      is true the trainer must not donate its weights.
    bytes: bytes that this process's target devices need and do not hold.
    structure: tree definition of what is published.
    home: the mesh where leaves train, with Auto axes.
    away: the mesh where they generate, with Auto axes.
    chunk_bytes: as planned.
    ways: of the chosen leaves that move, one for each chunk.
  """

  leaves: tuple[bridge.Leaf, ...]
  trained: tuple[tuple[str, ...], Any]
  chosen: frozenset[str]
  aliases: bool
  bytes: int
  structure: Any
  home: _Mesh
  away: _Mesh
  chunk_bytes: int | None
  ways: tuple[bridge.Way, ...]

  def __call__(
    self,
    params: types.Tree,
    *,
    retired: types.Tree | None = None,
    kept: types.Tree | None = None,
    launching: Callable[
      [], contextlib.AbstractContextManager[Any]
    ] = contextlib.nullcontext,
  ) -> tuple[types.Tree, tuple[types.Tree, types.Tree]]:
    """Publishes weights; returns before devices have finished.

    Args:
      params: weights, placed as planned. They stay as they are, and may be
        donated afterwards unless `aliases`.
      retired: what was published before and nobody will use again; buffers of
        the leaves to send are freed first. None keeps both versions.
      kept: what was published before; the leaves that are not chosen are taken
        from it. None where all leaves are chosen.
      launching: entered around every launch, and never while devices work.

    Returns:
      The weights as planned for the target, and for `verify` the
      checksums by leaf name as computed on the source and on the target. An
      alias or a kept leaf has none. With several chunks all but the last have
      arrived.

    Raises:
      InputError: a leaf is missing, extra, or of another shape, dtype or
        sharding than planned; names it.
    """
    arrays = self._as_planned(params)
    out = self._kept(kept)
    if retired is not None:
      self._free(retired)
    for leaf in self.leaves:
      if leaf.is_alias and leaf.name in self.chosen:
        out[leaf.name] = bridge.view(arrays[leaf.weight], leaf.goal)
    before, after = {}, {}
    sent: list[jax.Array] = []
    for way in self.ways:
      # One chunk at a time on the way: memory for one.
      jax.block_until_ready(sent)
      with launching():
        sent, sums = way.send([arrays[leaf.weight] for leaf in way.leaves])
        after.update(way.check(sent))
      before.update(sums)
      names = [leaf.name for leaf in way.leaves]
      out.update(zip(names, sent, strict=True))
    flat = [out[leaf.name] for leaf in self.leaves]
    return jax.tree.unflatten(self.structure, flat), (before, after)

  def only(self, prefixes: Sequence[str]) -> "Publisher":
    """Plans the way of some subtrees, such as adapters.

    Args:
      prefixes: key paths as `jax.tree_util.keystr` writes them, as
        "['layers']['q']"; of a weight as trained or of all under it.

    Returns:
      A publisher of these leaves, to be called with `kept`. It has the
      `aliases` of all leaves: kept ones may be the trainer's buffers too.

    Raises:
      InputError: no leaf lies under a prefix; names it.
    """
    chosen = set()
    for prefix in prefixes:
      below = (f"{prefix}[", f"{prefix}.")
      names = self.trained[0]
      under = {n for n in names if n == prefix or n.startswith(below)}
      if not under:
        raise types.InputError(
          "publish.only: expected key paths of leaves or above them, got "
          f"{prefix!r}. Use one of {', '.join(names)} or a part of it."
        )
      chosen |= under
    return _publisher(
      self.leaves,
      self.trained,
      frozenset(leaf.name for leaf in self.leaves if leaf.weight in chosen),
      structure=self.structure,
      between=(self.home, self.away),
      chunk_bytes=self.chunk_bytes,
    )

  def _as_planned(self, params: types.Tree) -> dict[str, jax.Array]:
    """Checks the leaves to publish; returns all, with Auto axes."""
    arrays = _matching("publish", params, *self.trained)
    for leaf in self.leaves:
      x, plan = arrays[leaf.weight], leaf.trained
      if leaf.name not in self.chosen or x.sharding == plan.sharding:
        layout = True
      else:
        layout = x.sharding.is_equivalent_to(plan.sharding, len(plan.shape))
      if not layout or (x.shape, x.dtype) != (plan.shape, plan.dtype):
        raise types.InputError(
          f"publish {leaf.weight}: expected {plan.dtype}{list(plan.shape)} in "
          f"{plan.sharding}, got {x.dtype}{list(x.shape)} in {x.sharding}. "
          "Publish the weights that were planned."
        )
      if leaf.name in self.chosen:
        arrays[leaf.weight] = bridge.view(x, plan.sharding)
    return arrays

  @property
  def abstract(self) -> types.Tree:
    """Shapes and shardings of what is published."""
    flat = [
      jax.ShapeDtypeStruct(leaf.shape, leaf.cast, sharding=leaf.goal)
      for leaf in self.leaves
    ]
    return jax.tree.unflatten(self.structure, flat)

  @property
  def _order(self) -> tuple[str, ...]:
    """Names of the engine's leaves."""
    return tuple(leaf.name for leaf in self.leaves)

  def _kept(self, kept: types.Tree | None) -> dict[str, jax.Array]:
    """Returns what stays of the previous weights."""
    stay = [leaf for leaf in self.leaves if leaf.name not in self.chosen]
    if not stay:
      return {}
    if kept is None:
      raise types.InputError(
        f"publish: expected kept weights for {_names(stay)}, got None. Pass "
        "what was published before."
      )
    arrays = _matching("publish (kept)", kept, self._order, self.structure)
    for leaf in stay:
      x = arrays[leaf.name]
      alike = (x.shape, x.dtype) == (leaf.shape, leaf.cast)
      if not alike or x.sharding != leaf.goal:
        raise types.InputError(
          f"publish (kept) {leaf.name}: expected {leaf.cast}"
          f"{list(leaf.shape)} in {leaf.goal}, got {x.dtype}{list(x.shape)} in "
          f"{x.sharding}. Keep what this plan published."
        )
    return {leaf.name: arrays[leaf.name] for leaf in stay}

  def _free(self, retired: types.Tree) -> None:
    """Deletes what is about to be sent anew; never the trainer's buffers."""
    old = _matching("publish (retired)", retired, self._order, self.structure)
    for way in self.ways:
      for leaf in way.leaves:
        old[leaf.name].delete()


def plan(
  source: types.Tree,
  target: types.Tree,
  shapes: types.Tree,
  target_dtype: jax.typing.DTypeLike,
  *,
  quantized: Mapping[str, tuple[int, ...]] | None = None,
  chunk_bytes: int | None = None,
) -> Publisher:
  """Plans the way of all weights from the training to the generation mesh.

  Args:
    source: `NamedSharding` of each leaf where it trains, all on one mesh, with
      Auto or Explicit axes.
    target: the same where it generates; of a quantized weight, a
      `quantize.Int8` of two. The two meshes may share devices. With several
      processes, a mesh of this process's devices.
    shapes: `ShapeDtypeStruct` of each leaf as trained.
    target_dtype: dtype that generation holds floating leaves in; scales of
      quantized weights are float32 in any case.
    quantized: weights that generation holds in 8 bits, from
      `quantize.channels`; None for none. What travels are their integers and
      scales.
    chunk_bytes: most bytes, of one copy as published, that travel at once; a
      larger leaf travels alone. None sends all together.

  Returns:
    A publisher. It compiles on its first call only, and no array passes
    through the host. Leaves of equal dtype, devices and layout on both sides
    are published as they are, which costs nothing; never quantized ones.

  Raises:
    InputError: a leaf is missing, extra or does not fit its sharding, or the
      meshes do not fit the processes; names it.
  """
  if chunk_bytes is not None and chunk_bytes < 1:
    raise types.InputError(
      f"publish.chunk_bytes: expected at least 1, got {chunk_bytes}. Use None "
      "to send all leaves together."
    )
  quantized = quantized or {}
  froms, goals, wholes = map(fingerprint.by_name, (source, target, shapes))
  parts = _parts(froms, quantized, jnp.dtype(target_dtype))
  _same_names("publish (trained shardings)", goals, parts)
  _same_names("publish (trained shapes)", froms, wholes)
  home = bridge.auto(_only_mesh("source", froms))
  away = bridge.auto(_only_mesh("target", goals))
  _check_processes(home, away)
  leaves = tuple(
    _leaf(
      name,
      parts[name],
      wholes[parts[name].weight],
      spec=froms[parts[name].weight].spec,
      goal=goal,
      home=home,
      away=away,
    )
    for name, goal in goals.items()
  )
  return _publisher(
    leaves,
    (tuple(froms), jax.tree.structure(source)),
    frozenset(goals),
    structure=jax.tree.structure(target),
    between=(home, away),
    chunk_bytes=chunk_bytes,
  )


class _Part(NamedTuple):
  """How a leaf comes from a weight; `over` are dims that it does not have."""

  weight: str
  cast: np.dtype
  make: Callable[[jax.Array], jax.Array] | None = None
  over: tuple[int, ...] = ()


def _parts(
  trained: Mapping[str, Any],
  quantized: Mapping[str, tuple[int, ...]],
  cast: np.dtype,
) -> dict[str, _Part]:
  """Says what each weight is published as, by the names of the leaves."""
  out = {}
  for name in trained:
    over = quantized.get(name)
    if over is None:
      out[name] = _Part(name, cast)
      continue
    values = functools.partial(quantize.values, dims=over)
    scales = functools.partial(quantize.scales, dims=over)
    out[f"{name}.values"] = _Part(name, jnp.dtype(jnp.int8), values)
    out[f"{name}.scale"] = _Part(name, jnp.dtype(jnp.float32), scales, over)
  return out


def _publisher(
  leaves: tuple[bridge.Leaf, ...],
  trained: tuple[tuple[str, ...], Any],
  chosen: frozenset[str],
  *,
  structure: Any,
  between: tuple[_Mesh, _Mesh],
  chunk_bytes: int | None,
) -> Publisher:
  home, away = between
  sent = [leaf for leaf in leaves if leaf.name in chosen]
  moving = [leaf for leaf in sent if not leaf.is_alias]
  chunks = _chunks(moving, chunk_bytes)
  return Publisher(
    leaves=leaves,
    trained=trained,
    chosen=chosen,
    aliases=any(leaf.is_alias for leaf in leaves),
    bytes=sum(_missing_bytes(leaf) for leaf in sent),
    structure=structure,
    home=home,
    away=away,
    chunk_bytes=chunk_bytes,
    ways=tuple(bridge.build(home, away, tuple(chunk)) for chunk in chunks),
  )


def _leaf(
  name: str,
  part: _Part,
  whole: jax.ShapeDtypeStruct,
  *,
  spec: jax.P,
  goal: _Sharding,
  home: _Mesh,
  away: _Mesh,
) -> bridge.Leaf:
  """Joins what is known of a leaf."""
  layout = (*spec, *(None,) * (len(whole.shape) - len(spec)))
  kept = [i for i in range(len(whole.shape)) if i not in part.over]
  shape = tuple(whole.shape[i] for i in kept)
  trained, target = _Sharding(home, spec), _Sharding(away, goal.spec)
  source = trained
  if part.over:
    source = _Sharding(home, jax.P(*(layout[i] for i in kept)))
  for sizes, sharding in ((whole.shape, trained), (shape, target)):
    _fits(name, sizes, sharding)
  # Other processes' devices hold parts that this one's target does not need.
  boxes = source.devices_indices_map(shape)
  held = {device: boxes[device] for device in bridge.own_devices(home)}
  is_alias = held == target.devices_indices_map(shape)
  floating = jnp.issubdtype(whole.dtype, jnp.floating)
  leaf = bridge.Leaf(
    name=name,
    weight=part.weight,
    trained=jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=trained),
    make=part.make,
    shape=shape,
    cast=part.cast if floating else whole.dtype,
    source=source,
    target=target,
    goal=goal,
    is_alias=is_alias,
  )
  return dataclasses.replace(leaf, is_alias=is_alias and leaf.is_kept)


def _chunks(
  leaves: list[bridge.Leaf], chunk_bytes: int | None
) -> list[list[bridge.Leaf]]:
  """Groups leaves, in their order, into as few chunks as bytes allow."""
  chunks, room = [], 0
  for leaf in leaves:
    size = int(np.prod(leaf.shape)) * leaf.cast.itemsize
    if not chunks or (chunk_bytes is not None and size > room):
      chunks.append([])
      room = chunk_bytes or 0
    chunks[-1].append(leaf)
    room -= size
  return chunks


def _missing_bytes(leaf: bridge.Leaf) -> int:
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


def _names(leaves: Sequence[bridge.Leaf]) -> str:
  return ", ".join(leaf.name for leaf in leaves)


def _matching(
  place: str,
  tree: types.Tree,
  names: tuple[str, ...],
  structure: Any,
) -> dict[str, jax.Array]:
  """Returns the arrays of a tree by name, which must be the planned ones."""
  flat, given = jax.tree.flatten(tree)
  if given == structure:
    return dict(zip(names, flat, strict=True))
  arrays = fingerprint.by_name(tree)
  _same_names(place, dict.fromkeys(names), arrays)
  return arrays


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


def _only_mesh(kind: str, shardings: Mapping[str, _Sharding]) -> _Mesh:
  found = {sharding.mesh for sharding in shardings.values()}
  mesh = next(iter(found))
  if len(found) == 1 and isinstance(mesh, _Mesh):
    return mesh
  raise types.InputError(
    f"publish: expected all {kind} leaves on one mesh of devices, got "
    f"{len(found)} meshes. Place the whole tree on one."
  )


def _check_processes(home: _Mesh, away: _Mesh) -> None:
  """Refuses meshes between which a copy would leave its process."""
  if not bridge.own_devices(home):
    raise types.InputError(
      "publish: expected training devices in every process that publishes, got "
      f"none in process {jax.process_index()}. Train on devices of all."
    )
  foreign = len(away.devices.flat) - len(bridge.own_devices(away))
  if foreign:
    raise types.InputError(
      "publish: expected a generation mesh of this process's own devices, got "
      f"{foreign} of others. Give each process a generation mesh of its own."
    )
