"""Which devices each side gets, where their place in the machine matters.

Boxes of a TPU slice are chosen here for real devices; the geometry is in
`placement.boxes`. How many devices each side gets is `placement.mesh`'s.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_post import types
from jaxrl_post.placement import boxes


class Side(NamedTuple):
  """What one side asks for.

  Attributes:
    devices: how many.
    tight: sizes of groups of devices that talk most, the most important first.
    loose: sizes of groups that had better be neighbours, too.
  """

  devices: int
  tight: tuple[int, ...] = ()
  loose: tuple[int, ...] = ()


def side(devices: int, *meshes: Mapping[str, int]) -> Side:
  """Says what one side asks for.

  Args:
    devices: how many.
    meshes: axis sizes, the last axis the tightest, of the meshes that lie over
      these devices; each has the product `devices`.

  Returns:
    A side whose tight groups are those of each mesh's last axis.
  """
  groups = [
    tuple(itertools.accumulate([*sizes.values()][::-1], operator.mul))
    for sizes in meshes
  ]
  return Side(
    devices,
    tight=tuple(sizes[0] for sizes in groups),
    loose=tuple(sorted(n for sizes in groups for n in sizes[1:])),
  )


def by_process(devices: Sequence[Any], processes: int) -> dict[int, list[Any]]:
  """Groups devices by the process that they belong to.

  Args:
    devices: some or all devices of a run.
    processes: how many there are.

  Returns:
    Process index to its devices, in ascending order of the index; the devices
    keep their order.

  Raises:
    InputError: not all processes have equally many; names how many.
  """
  groups: dict[int, list[Any]] = {}
  for device in devices:
    groups.setdefault(device.process_index, []).append(device)
  counts = [len(groups[index]) for index in sorted(groups)]
  if len(counts) != processes or len(set(counts)) != 1:
    raise types.InputError(
      f"placement: expected equally many devices of each of {processes} "
      f"processes, got {', '.join(map(str, counts))} of {len(counts)}. Give "
      "every process the same devices."
    )
  return {index: groups[index] for index in sorted(groups)}


def ends(
  devices: Sequence[Any], first: int, last: int, processes: int
) -> tuple[list[Any], list[Any]]:
  """Takes the first and the last devices of each process.

  Args:
    devices: all devices of the run.
    first: how many of the first, in all processes together.
    last: how many of the last, at least one of each process.
    processes: how many there are. Of one, nothing is asked about its devices:
      a single controller may drive those of many hosts.

  Returns:
    Both, process after process, in the order of `devices`.

  Raises:
    InputError: not all processes have equally many; names how many.
  """
  groups = [devices]
  if processes > 1:
    groups = [*by_process(devices, processes).values()]
  first, last = first // processes, last // processes
  return (
    [device for group in groups for device in group[:first]],
    [device for group in groups for device in group[-last:]],
  )


def rectangles(
  devices: Sequence[Any], sides: Sequence[Side]
) -> list[list[Any]] | None:
  """Gives each side boxes of TPU devices, whole slices where it can.

  Args:
    devices: all devices of the run.
    sides: the only side, or the two, the training side first.

  Returns:
    The devices of each side, slices and hosts each in one piece; the first
    side has the first slices, the second the last. Within a slice each aligned
    group of a tight size that divides the side's part is a box. None if these
    are no TPU devices, or their slices are no boxes of one shape.

  Raises:
    InputError: no boxes of these sizes fit; names the nearest that do.
  """
  slices = _slices(devices)
  if slices is None:
    return None
  size = len(devices) // len(slices)
  taken = _take(len(slices), size, [side.devices for side in sides])
  given: list[list[Any]] = [[] for _ in sides]
  for chips, counts in zip(slices, taken, strict=True):
    users = [k for k, count in enumerate(counts) if count]
    if not users:
      continue
    parts = boxes.choose(
      chips.grid, chips.host, tuple(counts[k] for k in users)
    )
    for k, part in zip(users, parts, strict=True):
      given[k] += _ordered(chips, part, sides[k])
  return given


class _Slice(NamedTuple):
  """A slice's shape, that of a host's part, and its devices by position."""

  grid: tuple[int, ...]
  host: tuple[int, ...]
  devices: dict[tuple[int, ...], Any]


def _slices(devices: Sequence[Any]) -> list[_Slice] | None:
  """Returns the slices in order; None unless all are boxes of one shape."""
  tpu = all(d.platform == "tpu" and hasattr(d, "coords") for d in devices)
  if not tpu:
    return None
  groups: dict[int, list[Any]] = {}
  for device in devices:
    groups.setdefault(getattr(device, "slice_index", 0), []).append(device)
  found = []
  for index in sorted(groups):
    points = [(*d.coords, d.core_on_chip) for d in groups[index]]
    box = boxes.bounds(points)
    if box is None:
      return None
    at = [
      tuple(x - low for x, low in zip(point, box.start, strict=True))
      for point in points
    ]
    placed = dict(zip(at, groups[index], strict=True))
    found.append(_Slice(box.shape, _host(placed), placed))
  return found if len({chips.grid for chips in found}) == 1 else None


def _host(placed: dict[tuple[int, ...], Any]) -> tuple[int, ...]:
  """Returns the shape of a host's part, single positions if they differ."""
  hosts: dict[int, list[tuple[int, ...]]] = {}
  for point, device in placed.items():
    # One controller drives all devices of Pathways: their process is the same,
    # their task is their host.
    host = getattr(device, "virtual_task_index", device.process_index)
    hosts.setdefault(host, []).append(point)
  parts = [boxes.bounds(points) for points in hosts.values()]
  shapes = {part and part.shape for part in parts}
  shape = shapes.pop()
  alone = (1,) * len(next(iter(placed)))
  return alone if shapes or shape is None else shape


def _take(slices: int, size: int, sides: list[int]) -> list[list[int]]:
  """Returns how many devices of each slice each side takes.

  The first side fills slices from the front, the second from the back: they
  meet in one slice at most, and only where there is no other.
  """
  taken = [[0] * len(sides) for _ in range(slices)]
  for k, wanted in enumerate(sides):
    left = wanted
    for counts in taken if k == 0 else reversed(taken):
      counts[k] = min(left, size - sum(counts))
      left -= counts[k]
  return taken


def _ordered(chips: _Slice, box: boxes.Box, side: Side) -> list[Any]:
  cell = tuple(
    math.gcd(start, n, h) for start, n, h in zip(*box, chips.host, strict=True)
  )
  sizes = (*side.tight, math.prod(cell), *side.loose)
  return [
    chips.devices[tuple(a + b for a, b in zip(box.start, at, strict=True))]
    for at in boxes.order(box.shape, cell, sizes)
  ]
