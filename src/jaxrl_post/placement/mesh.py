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

# Logical axis of a weight to mesh axis; an axis that is missing is replicated.
# Training also splits the width, which is gathered layer by layer; generation
# keeps whole widths, because a decode step is too short to hide a gather.
TRAINING_RULES: Mapping[str, str] = {
  "embed": "fsdp",
  "heads": "tensor",
  "kv_heads": "tensor",
  "ff": "tensor",
  "vocab": "tensor",
}
GENERATION_RULES: Mapping[str, str] = {
  "heads": "tensor",
  "kv_heads": "tensor",
  "ff": "tensor",
  "vocab": "tensor",
}

# Mesh axes that split the rows of a batch.
TRAINING_BATCH: tuple[str, ...] = ("data", "fsdp")
GENERATION_BATCH: tuple[str, ...] = ("data",)

# A key/value head on one device and its queries on another would send all of
# attention through the interconnect: they are split together or not at all.
_HEAD_AXES = frozenset({"heads", "kv_heads"})


def _check_axes(place: str, sizes: Mapping[str, int]) -> None:
  for name, size in sizes.items():
    if size != -1 and size < 1:
      raise types.InputError(
        f"{place}.{name}: expected at least 1, or -1 for the rest, got {size}. "
        "Correct the value."
      )
  if list(sizes.values()).count(-1) > 1:
    raise types.InputError(
      f"{place}: expected at most one axis of -1, got {dict(sizes)}. Write the "
      "others out."
    )


@dataclasses.dataclass(frozen=True)
class TrainingAxes:
  """Axis sizes of the training mesh; one may be -1, "the rest".

  Attributes:
    data: copies of the weights, each with its own rows.
    fsdp: parts of the width that weights and optimizer state are split into;
      rows are split along it too.
    tensor: parts of heads, feed-forward width and vocabulary.
  """

  data: int = 1
  fsdp: int = -1
  tensor: int = 1

  def __post_init__(self) -> None:
    _check_axes("placement.training", dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class GenerationAxes:
  """Axis sizes of the generation mesh; one may be -1, "the rest".

  Attributes:
    data: copies of the weights, each with its own rows.
    tensor: parts of heads, feed-forward width and vocabulary.
  """

  data: int = -1
  tensor: int = 1

  def __post_init__(self) -> None:
    _check_axes("placement.generation", dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Placement:
  """How devices are divided between training and generation.

  Attributes:
    mode: "colocated" gives both the same devices, in turn; "split" gives each
      its own.
    generation_fraction: part of the devices that generates when split, in
      (0, 1). Read only while both sides have an axis of -1; a side with all
      sizes written out takes their product, and the other takes what is left.
    training: axes of the training mesh.
    generation: axes of the generation mesh.
    cpu_devices: virtual devices to ask for where the platform is CPU; None
      leaves the number as it is. Read before JAX starts.
  """

  mode: Literal["colocated", "split"] = "colocated"
  generation_fraction: float = 0.5
  training: TrainingAxes = TrainingAxes()
  generation: GenerationAxes = GenerationAxes()
  cpu_devices: int | None = None

  def __post_init__(self) -> None:
    if self.mode not in ("colocated", "split"):
      raise types.InputError(
        'placement.mode: expected "colocated" or "split", got '
        f"{self.mode!r}. Choose one of the two."
      )
    if not 0 < self.generation_fraction < 1:
      raise types.InputError(
        "placement.generation_fraction: expected a number between 0 and 1, "
        f"got {self.generation_fraction}. Use mode colocated to share devices."
      )
    if self.cpu_devices is not None and self.cpu_devices < 1:
      raise types.InputError(
        "placement.cpu_devices: expected at least 1, got "
        f"{self.cpu_devices}. Leave it out to keep the platform's own number."
      )


class Shares(NamedTuple):
  """Devices of each side, and those that neither side uses."""

  training: int
  generation: int
  idle: int


@types.host_record
class Meshes:
  """The two meshes of a run.

  Attributes:
    training: axes data, fsdp, tensor.
    generation: axes data, tensor.
    idle: devices that neither mesh uses.
    shared: whether both meshes lie over the same devices, in one order.
  """

  training: jax.sharding.Mesh
  generation: jax.sharding.Mesh
  idle: int
  shared: bool

  def __str__(self) -> str:
    """Says in one line who has which devices."""

    def one(mesh: jax.sharding.Mesh) -> str:
      sizes = " x ".join(f"{name} {n}" for name, n in mesh.shape.items())
      return f"{mesh.size} ({sizes})"

    verb = "also generate" if self.shared else "generate"
    idle = f"; {self.idle} idle" if self.idle else ""
    train, generate = one(self.training), one(self.generation)
    return f"devices: {train} train, {generate} {verb}{idle}"


def shares(cfg: Placement, count: int) -> Shares:
  """Divides a number of devices between training and generation.

  Args:
    cfg: the placement.
    count: devices there are.

  Returns:
    Devices of each side, a multiple of the product of its written axes. When
    split they add up, with the idle ones, to `count`; when colocated both are
    the same devices.

  Raises:
    InputError: the axes ask for more devices than there are, or do not divide
      the share; names both numbers.
  """
  train, generate = _fixed(cfg.training), _fixed(cfg.generation)
  if cfg.mode == "colocated":
    if train and generate and train != generate:
      raise types.InputError(
        "placement: expected equally many devices in both meshes when "
        f"colocated, got {train} to train and {generate} to generate. Change "
        "one of them, or use mode split."
      )
    used = train or generate or count
    _check_room("placement", used, count)
    found = Shares(used, used, count - used)
  else:
    least = _product(cfg.training) + _product(cfg.generation)
    _check_room("placement (mode split)", least, count)
    if train is None and generate is None:
      wanted = round(cfg.generation_fraction * count)
      generate = min(max(wanted, 1), count - 1)
    if generate is None:
      generate = count - (train or 0)
    if train is None:
      train = count - generate
    found = Shares(train, generate, count - train - generate)
  _check_divides("placement.training", cfg.training, found.training)
  _check_divides("placement.generation", cfg.generation, found.generation)
  return found


def split(cfg: Placement, devices: Sequence[Any]) -> Meshes:
  """Builds the training and the generation mesh.

  Args:
    cfg: the placement.
    devices: all JAX devices of the run, neighbours next to each other.

  Returns:
    Meshes of contiguous devices, with Auto axes. When split the first devices
    train and the last generate, the idle ones lie between. When colocated both
    meshes list the same devices in the same order.

  Raises:
    InputError: as `shares`.
  """
  share = shares(cfg, len(devices))
  shared = cfg.mode == "colocated"
  # Arrays without a sharding land on the first device. The trainer owns it, so
  # a stray one never delays a decode step.
  first = 0 if shared else len(devices) - share.generation
  return Meshes(
    training=_build(cfg.training, devices[: share.training]),
    generation=_build(
      cfg.generation, devices[first : first + share.generation]
    ),
    idle=share.idle,
    shared=shared,
  )


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


_Axes = TrainingAxes | GenerationAxes


def _sizes(axes: _Axes) -> dict[str, int]:
  return dataclasses.asdict(axes)


def _product(axes: _Axes) -> int:
  return math.prod(n for n in _sizes(axes).values() if n != -1)


def _fixed(axes: _Axes) -> int | None:
  """Returns the devices the axes ask for; None if one of them is the rest."""
  return None if -1 in _sizes(axes).values() else _product(axes)


def _check_room(place: str, needed: int, count: int) -> None:
  if needed > count:
    raise types.InputError(
      f"{place}: expected axes for at most {count} devices, got axes that need "
      f"{needed}. Use smaller axes or more devices."
    )


def _check_divides(place: str, axes: _Axes, share: int) -> None:
  written = _product(axes)
  if share % written:
    raise types.InputError(
      f"{place}: expected a number of devices that its written axes, together "
      f"{written}, divide, got {share}. Change the axes or the share."
    )


def _build(axes: _Axes, devices: Sequence[Any]) -> jax.sharding.Mesh:
  sizes = _sizes(axes)
  rest = len(devices) // _product(axes)
  shape = [rest if n == -1 else n for n in sizes.values()]
  return over(np.asarray(devices).reshape(shape), tuple(sizes))
