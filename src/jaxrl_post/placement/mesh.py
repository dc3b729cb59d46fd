"""Which devices train, which generate, and how weights lie on each side.

The arithmetic (`shares`) needs a count only, so a placement that does not fit
is refused in words, before a mesh is built. Moving weights between the two
sides is `placement.publish`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from absl import logging

from jaxrl_post import types
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import counts, picking, settings

# Logical axis of a weight to mesh axis; an axis that is missing is replicated.
# Training also splits the width, which is gathered layer by layer; generation
# keeps whole widths, because a decode step is too short to hide a gather.
TRAINING_RULES: Mapping[str, str] = {
  "embed": "fsdp",
  "heads": "tensor",
  "kv_heads": "tensor",
  "ff": "tensor",
  "vocab": "tensor",
  "experts": "expert",
}
GENERATION_RULES: Mapping[str, str] = {
  "heads": "tensor",
  "kv_heads": "tensor",
  "ff": "tensor",
  "vocab": "tensor",
  "experts": "expert",
}

# Mesh axes from far apart to next to each other: what talks most is last.
TRAINING_AXES: tuple[str, ...] = ("data", "expert", "fsdp", "context", "tensor")
GENERATION_AXES: tuple[str, ...] = ("data", "expert", "tensor")

# Mesh axes that split the rows of a batch.
TRAINING_BATCH: tuple[str, ...] = ("data", "expert", "fsdp")
GENERATION_BATCH: tuple[str, ...] = ("data", "expert")

# A key/value head on one device and its queries on another would send all of
# attention through the interconnect: they are split together or not at all.
_HEAD_AXES = frozenset({"heads", "kv_heads"})


@dataclasses.dataclass(frozen=True)
class TrainingAxes:
  """Axis sizes of the training mesh; one may be -1, "the rest".

  Attributes:
    data: copies of the weights, each with its own rows.
    fsdp: parts of the width that weights and optimizer state are split into;
      rows are split along it too.
    tensor: parts of heads, feed-forward width and vocabulary.
    expert: parts of the experts of a layer; rows are split along it too. A
      model without experts has copies of its weights there, as along data.
    context: parts that the positions of each row are split into.
  """

  data: int = 1
  fsdp: int = -1
  tensor: int = 1
  expert: int = 1
  context: int = 1

  def __post_init__(self) -> None:
    settings.check_axes("placement.training", dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class GenerationAxes:
  """Axis sizes of the generation mesh; one may be -1, "the rest".

  With several processes that generate, replicas included, these are the sizes
  of all their meshes together.

  Attributes:
    data: copies of the weights, each with its own rows.
    tensor: parts of heads, feed-forward width and vocabulary.
    expert: parts of the experts of a layer; rows are split along it too. A
      model without experts has copies of its weights there, as along data.
  """

  data: int = -1
  tensor: int = 1
  expert: int = 1

  def __post_init__(self) -> None:
    settings.check_axes("placement.generation", dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Placement:
  """How devices are divided between training and generation.

  Attributes:
    mode: "colocated" gives both the same devices, in turn; "split" gives each
      its own; "roles" gives each its own processes.
    generation_fraction: part of the devices that generates when split, in
      (0, 1). Read only while both sides have an axis of -1; a side with all
      sizes written out takes their product, and the other takes what is left.
    training: axes of the training mesh.
    generation: axes of the generation mesh.
    cpu_devices: virtual devices to ask for where the platform is CPU; None
      leaves the number as it is. Read before JAX starts.
    training_devices: the devices that train, in this order, as indices into
      the run's list; empty leaves the choice to the program. When colocated
      they generate, too.
    generation_devices: the devices that generate when split; listed if, and
      only if, `training_devices` is.
    roles: which processes there are in mode roles; None is one of each.
    publish: how weights travel.
    park: what gives its memory to the other side of a colocated run:
      "optimizer" moves the optimizer's state to the host's memory between
      updates; "reference" the reference's weights between batches, those of a
      model of its own likewise; "cache" frees that of an engine with no
      completion in flight.
    peer_timeout_s: longest silence of another process, in seconds, before the
      run ends.
  """

  mode: Literal["colocated", "split", "roles"] = "colocated"
  generation_fraction: float = 0.5
  training: TrainingAxes = TrainingAxes()
  generation: GenerationAxes = GenerationAxes()
  cpu_devices: int | None = None
  training_devices: tuple[int, ...] = ()
  generation_devices: tuple[int, ...] = ()
  roles: settings.Roles | None = None
  publish: settings.Publishing = settings.Publishing()
  park: tuple[str, ...] = ()
  peer_timeout_s: float = 20.0

  def __post_init__(self) -> None:
    modes = ("colocated", "split", "roles")
    settings.check(
      "mode", self.mode, "one of " + ", ".join(modes), self.mode in modes
    )
    if not 0 < self.generation_fraction < 1:
      raise types.InputError(
        "placement.generation_fraction: expected a number between 0 and 1, "
        f"got {self.generation_fraction}. Use mode colocated to share devices."
      )
    settings.check(
      "roles",
      self.roles,
      f"none in mode {self.mode}",
      self.mode == "roles" or self.roles is None,
    )
    cpus = self.cpu_devices
    holds = cpus is None or 1 <= cpus <= 512
    settings.check("cpu_devices", cpus, "1 to 512", holds)
    known = {"optimizer", "reference", "cache"}
    parks = sorted(set(self.park) & known) == sorted(self.park)
    rule = "optimizer, reference and cache, or some of them"
    settings.check("park", self.park, rule, parks)
    parks = not self.park or self.mode == "colocated"
    settings.check("park", self.park, f"nothing in mode {self.mode}", parks)
    silence = self.peer_timeout_s
    settings.check(
      "peer_timeout_s", silence, "in (0, 3600]", 0 < silence <= 3600
    )
    settings.check_lists(
      self.mode, self.training_devices, self.generation_devices
    )

  @property
  def processes(self) -> settings.Roles:
    """The processes of mode roles."""
    return self.roles or settings.Roles()


class Shares(NamedTuple):
  """Devices of each side, and those that neither side uses."""

  training: int
  generation: int
  idle: int


@types.host_record
class Meshes:
  """The two meshes of a run, as one process sees them.

  Attributes:
    training: over the training devices of all processes.
    generation: over the generation devices of this process.
    idle: devices that neither side uses, of all processes.
    shared: whether generation lies over training devices, in their order.
    replicas: how many processes have such a generation mesh.
  """

  training: jax.sharding.Mesh
  generation: jax.sharding.Mesh
  idle: int
  shared: bool
  replicas: int = 1

  def __str__(self) -> str:
    """Says in one line who has which devices."""

    def one(mesh: jax.sharding.Mesh) -> str:
      sizes = " x ".join(f"{name} {n}" for name, n in mesh.shape.items())
      return f"{mesh.size} ({sizes})"

    verb = "also generate" if self.shared else "generate"
    idle = f"; {self.idle} idle" if self.idle else ""
    train, generate = one(self.training), one(self.generation)
    if self.replicas > 1:
      generate = f"{self.replicas} x {generate}"
    return f"devices: {train} train, {generate} {verb}{idle}"


def shares(cfg: Placement, count: int, processes: int = 1) -> Shares:
  """Divides a number of devices between training and generation.

  Args:
    cfg: the placement.
    count: devices there are; in mode roles, those of the training processes.
    processes: how many processes they belong to, equally many each. Not read
      in mode roles.

  Returns:
    Devices of each side, a multiple of the product of its written axes, and of
    `processes`. When split they add up, with the idle ones, to `count`; when
    colocated both are the same devices. In mode roles all `count` train, and
    those of all replicas generate.

  Raises:
    InputError: the axes ask for more devices than there are, or do not divide
      the share; names both numbers.
  """
  training, generation = _sizes(cfg.training), _sizes(cfg.generation)
  if cfg.mode == "roles":
    replicas = cfg.processes.generation_replicas
    generate = replicas * cfg.processes.replica_devices
    counts.resolve("placement.training", training, count)
    local_axes(cfg.generation, generate, replicas)
    return Shares(count, generate, 0)
  counts.check_processes("placement", count, processes)
  if cfg.training_devices:
    counts.check_listed(cfg.training_devices + cfg.generation_devices, count)
    train = len(cfg.training_devices)
    generate = len(cfg.generation_devices) or train
  elif cfg.mode == "colocated":
    train = generate = counts.together(training, generation, count)
  else:
    train, generate = counts.apart(
      training, generation, count, cfg.generation_fraction, processes
    )
  counts.resolve("placement.training", training, train)
  counts.check_processes("placement.training", train, processes)
  local_axes(cfg.generation, generate, processes)
  used = train if cfg.mode == "colocated" else train + generate
  return Shares(train, generate, count - used)


def split(
  cfg: Placement,
  devices: Sequence[Any],
  *,
  process: int = 0,
  processes: int = 1,
) -> Meshes:
  """Builds the training and the generation mesh.

  Args:
    cfg: the placement, of a mode other than roles.
    devices: all JAX devices of the run, neighbours next to each other.
    process: index of this process; not read if it is the only one.
    processes: how many run this program; 1 also for a single controller of
      several hosts.

  Returns:
    Meshes with Auto axes. With one process and no lists: boxes of TPU chips,
    else contiguous devices, of which the first train and the last generate when
    split; the idle ones lie between. With several, this holds of the devices
    of each process; the training mesh spans all processes, one after the
    other, and the generation mesh has this process's devices only. When
    colocated both meshes list the devices in the same order.

  Raises:
    InputError: as `shares`; or no boxes of these sizes fit, or the processes
      differ in their devices.
    ValueError: in mode roles, where no process has both meshes.
  """
  if cfg.mode == "roles":
    raise ValueError("mode roles has no process with both meshes")
  share = shares(cfg, len(devices), processes)
  train, generate = _pick(cfg, share, devices, processes)
  if processes > 1:
    groups = picking.by_process(train, processes).values()
    train = [device for group in groups for device in group]
    generate = picking.by_process(generate, processes)[process]
  axes = local_axes(cfg.generation, share.generation, processes)
  return Meshes(
    training=build(cfg.training, train),
    generation=build(axes, generate),
    idle=share.idle,
    shared=cfg.mode == "colocated",
    replicas=processes,
  )


def local_axes(
  axes: GenerationAxes, devices: int, processes: int
) -> GenerationAxes:
  """Returns the axes of one process's part of the generation devices.

  Args:
    axes: of all processes, or replicas, together.
    devices: that generate, in all of them.
    processes: how many there are.

  Returns:
    Sizes written out. No collective of a decode step leaves a process: only
    data, the copies of the weights, is dealt out.

  Raises:
    InputError: a copy would lie on several processes; names both numbers.
  """
  sizes = _resolve(axes, devices)
  counts.check_processes("placement.generation", devices, processes)
  copies = sizes["data"]
  if copies % processes:
    raise types.InputError(
      "placement.generation: expected expert x tensor to divide the "
      f"{devices // processes} devices that generate in each of {processes} "
      f"processes, got {devices // copies}. Use smaller axes."
    )
  return GenerationAxes(**{**sizes, "data": copies // processes})


def row_parts(axes: TrainingAxes | GenerationAxes, devices: int) -> int:
  """Returns into how many parts a mesh of so many devices splits rows.

  Raises:
    InputError: the axes do not fit the devices; names both numbers.
  """
  sizes = _resolve(axes, devices).items()
  return math.prod(n for name, n in sizes if name in TRAINING_BATCH)


def context_parts(axes: TrainingAxes, devices: int) -> int:
  """Returns into how many parts such a mesh splits the positions of a row.

  Raises:
    InputError: the axes do not fit the devices; names both numbers.
  """
  return _resolve(axes, devices)["context"]


def fit_rules(
  spec: types.Tree, rules: Mapping[str, str], mesh: jax.sharding.Mesh
) -> tuple[dict[str, str], str]:
  """Drops the rules whose mesh axis does not divide the weights.

  Args:
    spec: the weights.
    rules: logical axis to mesh axis.
    mesh: where the weights will lie.

  Returns:
    The rules that hold for every weight, and one line that names the dropped
    ones, empty if there are none. Query and key/value heads are kept or
    dropped together.
  """
  sizes: dict[str, set[int]] = {}
  for weight in jax.tree.leaves(
    spec, is_leaf=lambda x: isinstance(x, specs.Weight)
  ):
    for axis, size in zip(weight.axes, weight.shape, strict=True):
      sizes.setdefault(axis, set()).add(size)
  reasons = {
    axis: f"{axis} {size} by {rules[axis]} {mesh.shape[rules[axis]]}"
    for axis in rules
    for size in sizes.get(axis, ())
    if size % mesh.shape[rules[axis]]
  }
  dropped = set(reasons)
  if dropped & _HEAD_AXES:
    dropped |= _HEAD_AXES
  kept = {axis: to for axis, to in rules.items() if axis not in dropped}
  if not reasons:
    return kept, ""
  return kept, (
    f"weights cannot be split evenly ({', '.join(reasons.values())}): "
    f"{', '.join(a for a in rules if a in dropped)} replicated instead"
  )


def over(devices: np.ndarray, names: Sequence[str]) -> jax.sharding.Mesh:
  """Returns the mesh of an array of devices as it stands, with Auto axes.

  Not `jax.make_mesh`: it may reorder devices, and two colocated meshes in
  different orders would make every publish a copy.
  """
  auto = jax.sharding.AxisType.Auto
  return jax.sharding.Mesh(devices, names, axis_types=(auto,) * len(names))


def weight_shardings(
  spec: types.Tree, rules: Mapping[str, str], mesh: jax.sharding.Mesh
) -> types.Tree:
  """Places every weight on a mesh.

  Args:
    spec: the weights.
    rules: `TRAINING_RULES` or `GENERATION_RULES`.
    mesh: the mesh of that side.

  Returns:
    A tree like `spec` of `NamedSharding`. What does not divide is replicated,
    and a line in the log says so.
  """
  kept, message = fit_rules(spec, rules, mesh)
  if message:
    logging.warning(message)
  parts = specs.partition(spec, kept, mesh.shape)
  return jax.tree.map(
    lambda part: jax.sharding.NamedSharding(mesh, part),
    parts,
    is_leaf=lambda x: isinstance(x, jax.P),
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Returns how rows (dim 0) lie on a training or a generation mesh."""
  training = "fsdp" in mesh.axis_names
  axes = TRAINING_BATCH if training else GENERATION_BATCH
  return jax.sharding.NamedSharding(mesh, jax.P(axes))


def token_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Returns how rows and positions (dims 0 and 1) lie on a training mesh."""
  return jax.sharding.NamedSharding(mesh, jax.P(TRAINING_BATCH, "context"))


def _sizes(axes: TrainingAxes | GenerationAxes) -> dict[str, int]:
  training = isinstance(axes, TrainingAxes)
  names = TRAINING_AXES if training else GENERATION_AXES
  return {name: getattr(axes, name) for name in names}


def _resolve(
  axes: TrainingAxes | GenerationAxes, devices: int
) -> dict[str, int]:
  side = "training" if isinstance(axes, TrainingAxes) else "generation"
  return counts.resolve(f"placement.{side}", _sizes(axes), devices)


def _pick(
  cfg: Placement, share: Shares, devices: Sequence[Any], processes: int
) -> tuple[list[Any], list[Any]]:
  """Returns the devices of all processes that train, and that generate."""
  if cfg.training_devices:
    train = [devices[i] for i in cfg.training_devices]
    return train, [devices[i] for i in cfg.generation_devices] or train
  if processes == 1:
    found = picking.rectangles(devices, _sides(cfg, share))
    if found is not None:
      return found[0], found[-1]
  # Arrays without a sharding land on the first device. The trainer owns it, so
  # a stray one never delays a decode step.
  train, generate = picking.ends(
    devices, share.training, share.generation, processes
  )
  return train, train if cfg.mode == "colocated" else generate


def _sides(cfg: Placement, share: Shares) -> list[picking.Side]:
  """Says which devices had better be neighbours, for each set of devices."""
  training = _resolve(cfg.training, share.training)
  generation = _resolve(cfg.generation, share.generation)
  if cfg.mode == "colocated":
    return [picking.side(share.training, training, generation)]
  both = (share.training, training), (share.generation, generation)
  return [picking.side(devices, sizes) for devices, sizes in both]


def build(
  axes: TrainingAxes | GenerationAxes, devices: Sequence[Any]
) -> jax.sharding.Mesh:
  """Builds the mesh of one side over all these devices, in their order.

  Raises:
    InputError: the axes do not fit the devices; names both numbers.
  """
  sizes = _resolve(axes, len(devices))
  shape = tuple(sizes.values())
  return over(np.asarray(devices).reshape(shape), tuple(sizes))
