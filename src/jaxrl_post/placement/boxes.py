"""Boxes of chips in a grid: where they fit, and in which order to list them.

Integers only, no devices. A grid is the shape of a TPU slice, a host the shape
of one host's part of it; both have the same number of dims.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxrl_post import types


class Box(NamedTuple):
  """A box of positions, `start[i] <= position[i] < start[i] + shape[i]`."""

  start: tuple[int, ...]
  shape: tuple[int, ...]


def bounds(points: Sequence[tuple[int, ...]]) -> Box | None:
  """Returns the box that the points fill, or None.

  Args:
    points: at least one, in any order.

  Returns:
    A box that has every point once and no other position; None if there is
    none.
  """
  columns = list(zip(*points, strict=True))
  start = tuple(min(column) for column in columns)
  shape = tuple(max(c) - low + 1 for c, low in zip(columns, start, strict=True))
  fills = math.prod(shape) == len(points) == len(set(points))
  return Box(start, shape) if fills else None


def choose(
  grid: tuple[int, ...], host: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[Box, ...]:
  """Chooses one box, or two that share no position.

  Args:
    grid: shape that the boxes lie in.
    host: shape of one host's part of it; a part that does not tile the grid
      counts as single positions.
    sizes: positions of each box, one or two numbers.

  Returns:
    A box of each size. Among all boxes of these sizes they share the fewest
    hosts, then cut the fewest, then have the shortest edges. The first begins
    at the grid's origin, the second ends at the opposite corner.

  Raises:
    InputError: no such boxes fit; names the nearest sizes that do.
  """
  if any(n % h for n, h in zip(grid, host, strict=True)):
    host = (1,) * len(grid)
  found = [
    (_cost(boxes, host), boxes)
    for boxes in (_corners(grid, shapes) for shapes in _fitting(grid, sizes))
  ]
  if not found:
    near = "; ".join(_words(sizes) for sizes in _nearest(grid, sizes))
    shape = " x ".join(str(n) for n in grid if n > 1)
    raise types.InputError(
      f"placement: expected sizes of boxes in a TPU slice of {shape}, got "
      f"{_words(sizes)}. Choose sizes that fit, the nearest are {near}; or "
      "list the devices."
    )
  return min(found)[1]


def order(
  shape: tuple[int, ...], cell: tuple[int, ...], sizes: Sequence[int]
) -> list[tuple[int, ...]]:
  """Lists the positions of a box so that groups of them are boxes, too.

  Args:
    shape: of the box; positions start at zero.
    cell: shape of the parts of hosts that tile the box.
    sizes: of groups, the most important first. A size is dropped unless it
      divides the box, and divides or is divided by each that is kept before
      it. The cell stays in one piece if its volume is a size that is kept.

  Returns:
    Every position once. For each kept size n the positions 0 to n - 1, n to
    2 n - 1 and so on are boxes of one shape.
  """
  total, volume = math.prod(shape), math.prod(cell)
  kept = [1]
  for size in sizes:
    nests = all(not max(size, k) % min(size, k) for k in kept)
    if nests and total % size == 0:
      kept.append(size)
  shapes = [shape]
  for size in sorted(set(kept), reverse=True):
    # Larger groups are made of whole cells, smaller ones lie in a cell.
    whole = volume in kept and size >= volume
    unit = cell if whole else (1,) * len(shape)
    shapes.append(_tile(shapes[-1], unit, size))
  positions = [(0,) * len(shape)]
  for inner, outer in itertools.pairwise(reversed(shapes)):
    steps = zip(outer, inner, strict=True)
    tiles = itertools.product(*(range(0, n, step) for n, step in steps))
    positions = [
      tuple(a + b for a, b in zip(tile, position, strict=True))
      for tile in tiles
      for position in positions
    ]
  return positions


def _shapes(size: int, limits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
  """Yields the shapes of a size that are within limits."""
  if not limits:
    if size == 1:
      yield ()
    return
  first, *rest = limits
  for n in range(1, min(first, size) + 1):
    if size % n == 0:
      for tail in _shapes(size // n, tuple(rest)):
        yield (n, *tail)


def _tile(
  shape: tuple[int, ...], unit: tuple[int, ...], size: int
) -> tuple[int, ...]:
  """Returns the box of shortest edges that tiles another and is tiled by unit.

  Between equals the last dims are the longest: there lie the cores of a chip.
  """
  limits = tuple(n // u for n, u in zip(shape, unit, strict=True))
  fitting = (
    tuple(n * u for n, u in zip(tile, unit, strict=True))
    for tile in _shapes(size // math.prod(unit), limits)
    if not any(n % t for n, t in zip(limits, tile, strict=True))
  )
  return min(fitting, key=lambda tile: (sum(tile), tile))


def _fitting(
  grid: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], ...]]:
  """Yields the shapes of boxes that lie side by side in the grid.

  Two boxes that share no position have a plane between them. So they fit if in
  some dim their lengths add up to the grid's at most.
  """
  for shapes in itertools.product(*(_shapes(size, grid) for size in sizes)):
    lengths = zip(grid, *shapes, strict=True)
    if len(shapes) == 1 or any(n >= a + b for n, a, b in lengths):
      yield shapes


def _corners(
  grid: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]
) -> tuple[Box, ...]:
  first = Box((0,) * len(grid), shapes[0])
  if len(shapes) == 1:
    return (first,)
  start = tuple(n - m for n, m in zip(grid, shapes[1], strict=True))
  return (first, Box(start, shapes[1]))


def _cost(boxes: tuple[Box, ...], host: tuple[int, ...]) -> tuple[int, ...]:
  """Returns hosts that boxes share, hosts that they cut, length of edges."""
  touched = [_touched(box, host) for box in boxes]
  shared = math.prod(
    max(0, min(r.stop for r in ranges) - max(r.start for r in ranges))
    for ranges in zip(*touched, strict=True)
  )
  inside = (_inside(box, host) for box in boxes)
  cut = sum(map(_volume, touched)) - sum(map(_volume, inside))
  edges = sum(sum(box.shape) for box in boxes)
  return (shared if len(boxes) > 1 else 0, cut, edges)


def _touched(box: Box, host: tuple[int, ...]) -> list[range]:
  """Returns along each dim the hosts of which the box has a position."""
  return [
    range(start // h, -(-(start + n) // h))
    for start, n, h in zip(*box, host, strict=True)
  ]


def _inside(box: Box, host: tuple[int, ...]) -> list[range]:
  """Returns along each dim the hosts of which the box has all positions."""
  return [
    range(-(-start // h), (start + n) // h)
    for start, n, h in zip(*box, host, strict=True)
  ]


def _volume(ranges: list[range]) -> int:
  return math.prod(map(len, ranges))


def _nearest(
  grid: tuple[int, ...], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
  """Returns at least one and at most three tuples of sizes that fit."""
  found: list[tuple[int, ...]] = []
  distance = 0
  while len(found) < 3 and distance < math.prod(grid):
    distance += 1
    near = [
      tuple(n + change for n, change in zip(sizes, changes, strict=True))
      for changes in itertools.product(
        range(-distance, distance + 1), repeat=len(sizes)
      )
      if sum(map(abs, changes)) == distance
    ]
    near.sort(key=sum, reverse=True)
    found += [n for n in near if min(n) > 0 and any(_fitting(grid, n))]
  return found[:3]


def _words(sizes: tuple[int, ...]) -> str:
  return " and ".join(map(str, sizes))
