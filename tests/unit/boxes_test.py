"""Boxes in a grid: checked against every box there is, on small grids."""

import functools
import itertools
import math

import pytest

from jaxrl_post import types
from jaxrl_post.placement import boxes

GRIDS = [
  ((6,), (2,)),
  ((3, 4), (1, 2)),
  ((4, 4), (2, 2)),
  ((2, 2, 2), (2, 2, 1)),
  ((4, 2, 1, 2), (2, 2, 1, 2)),
  ((2, 3, 2), (2, 1, 1)),
]


@functools.cache
def positions(box: boxes.Box) -> frozenset[tuple[int, ...]]:
  edges = zip(*box, strict=True)
  return frozenset(itertools.product(*(range(a, a + n) for a, n in edges)))


@functools.cache
def every_box(grid: tuple[int, ...]) -> dict[int, list[boxes.Box]]:
  """Finds all boxes of a grid, by size."""
  found: dict[int, list[boxes.Box]] = {}
  spans = [
    [(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in grid
  ]
  for sides in itertools.product(*spans):
    start, shape = zip(*sides, strict=True)
    box = boxes.Box(start, shape)
    found.setdefault(math.prod(shape), []).append(box)
  return found


def cost(chosen, host) -> tuple[int, int, int]:
  """Counts shared hosts, cut hosts and edges, position by position."""

  def owner(at):
    return tuple(x // h for x, h in zip(at, host, strict=True))

  touched = [{owner(at) for at in positions(box)} for box in chosen]
  cut = sum(
    sum(owner(at) == one for at in positions(box)) < math.prod(host)
    for box, owners in zip(chosen, touched, strict=True)
    for one in owners
  )
  shared = len(set.intersection(*touched)) if len(chosen) > 1 else 0
  return shared, cut, sum(sum(box.shape) for box in chosen)


@pytest.mark.parametrize(("grid", "host"), GRIDS)
def test_two_boxes_are_the_best_there_are_or_are_refused(grid, host) -> None:
  total = math.prod(grid)
  found = every_box(grid)
  fitted = 0
  for sizes in itertools.product(range(1, total), repeat=2):
    if sum(sizes) > total:
      continue
    pairs = itertools.product(*(found.get(size, ()) for size in sizes))
    apart = [p for p in pairs if not positions(p[0]) & positions(p[1])]
    if not apart:
      words = f"got {sizes[0]} and {sizes[1]}\\."
      with pytest.raises(types.InputError, match=words):
        boxes.choose(grid, host, sizes)
      continue
    got = boxes.choose(grid, host, sizes)
    fitted += 1
    assert got in apart
    assert cost(got, host) == min(cost(pair, host) for pair in apart)
  assert fitted


@pytest.mark.parametrize(("grid", "host"), GRIDS)
def test_one_box_is_the_best_there_is_or_is_refused(grid, host) -> None:
  for size in range(1, math.prod(grid) + 1):
    fitting = every_box(grid).get(size)
    if fitting is None:
      with pytest.raises(types.InputError, match=f"got {size}\\."):
        boxes.choose(grid, host, (size,))
      continue
    got = boxes.choose(grid, host, (size,))
    assert got[0] in fitting and len(got) == 1
    assert cost(got, host) == min(cost((box,), host) for box in fitting)


def test_the_first_box_is_at_the_origin_and_the_second_at_the_end() -> None:
  first, second = boxes.choose((4, 4), (2, 2), (8, 4))
  assert first == ((0, 0), (2, 4))
  assert second == ((2, 2), (2, 2))


def test_a_refusal_names_the_grid_and_sizes_that_fit() -> None:
  with pytest.raises(types.InputError) as refused:
    boxes.choose((4, 4, 1), (2, 2, 1), (11, 5))
  line = str(refused.value)
  assert "slice of 4 x 4, got 11 and 5." in line
  near = line.split("nearest are ")[1].split("; or")[0].split("; ")
  pairs = [tuple(map(int, pair.split(" and "))) for pair in near]
  assert (12, 4) in pairs and len(pairs) == 3
  for pair in pairs:
    assert len(boxes.choose((4, 4, 1), (2, 2, 1), pair)) == 2


def test_hosts_that_do_not_tile_the_grid_are_left_out() -> None:
  assert boxes.choose((3, 2), (2, 2), (2,)) == boxes.choose(
    (3, 2), (1, 1), (2,)
  )


def groups(order: list[tuple[int, ...]], size: int) -> list[boxes.Box | None]:
  """Returns the box of each aligned group, None where it is no box."""
  starts = range(0, len(order), size)
  return [boxes.bounds(order[i : i + size]) for i in starts]


def kept(total: int, sizes: tuple[int, ...]) -> list[int]:
  found = [1]
  for size in sizes:
    nests = all(size % n == 0 or n % size == 0 for n in found)
    if nests and total % size == 0:
      found.append(size)
  return found


@pytest.mark.parametrize(("grid", "cell"), GRIDS)
def test_an_order_has_every_position_once_and_kept_groups_are_boxes(
  grid, cell
) -> None:
  total = math.prod(grid)
  everywhere = sorted(positions(boxes.Box((0,) * len(grid), grid)))
  divisors = [n for n in range(1, total + 1) if total % n == 0]
  numbers = [*divisors, 5, 2 * total]
  for sizes in itertools.product(numbers, [math.prod(cell)], numbers):
    order = boxes.order(grid, cell, sizes)
    assert sorted(order) == everywhere
    for size in kept(total, sizes):
      found = groups(order, size)
      assert None not in found
      assert len({box.shape for box in found if box}) == 1


@pytest.mark.parametrize(("grid", "cell"), GRIDS)
def test_a_cell_whose_volume_is_kept_stays_in_one_piece(grid, cell) -> None:
  volume = math.prod(cell)
  for size in range(1, math.prod(grid) + 1):
    if volume not in kept(math.prod(grid), (size, volume)):
      continue
    found = groups(boxes.order(grid, cell, (size, volume)), volume)
    for box in found:
      assert box is not None and box.shape == cell
      assert all(a % h == 0 for a, h in zip(box.start, cell, strict=True))


@pytest.mark.parametrize(("grid", "host"), GRIDS)
def test_the_first_size_that_divides_makes_the_most_compact_tiles(
  grid, host
) -> None:
  alone = (1,) * len(grid)
  for size in range(1, math.prod(grid) + 1):
    if math.prod(grid) % size:
      continue
    tiles = [
      box.shape
      for box in every_box(grid).get(size, ())
      if not any(n % m for n, m in zip(grid, box.shape, strict=True))
    ]
    got = groups(boxes.order(grid, alone, (size,)), size)[0]
    assert got is not None and sum(got.shape) == min(map(sum, tiles))


def test_two_groups_that_do_not_nest_leave_the_first() -> None:
  order = boxes.order((4, 3), (1, 1), (4, 6))
  assert {box.shape for box in groups(order, 4) if box} == {(4, 1)}
  assert None in groups(order, 6)


def test_cores_of_a_chip_are_the_nearest_neighbours() -> None:
  order = boxes.order((2, 2, 1, 2), (2, 2, 1, 2), (2, 8))
  pairs = zip(order[::2], order[1::2], strict=True)
  assert all(one[:3] == other[:3] for one, other in pairs)


@pytest.mark.parametrize(
  ("points", "expected"),
  [
    ([(2, 3)], ((2, 3), (1, 1))),
    ([(0, 1), (1, 1), (1, 2), (0, 2)], ((0, 1), (2, 2))),
    ([(0, 0), (1, 1)], None),
    ([(0, 0), (0, 1), (1, 0)], None),
    ([(0, 0), (0, 0)], None),
    ([(0, 0), (0, 0), (0, 2)], None),
  ],
)
def test_bounds_are_a_box_that_the_points_fill_or_nothing(
  points, expected
) -> None:
  assert boxes.bounds(points) == expected
