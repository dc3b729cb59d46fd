"""Meshes over TPU slices that are described, not there."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from jaxrl_post import types
from jaxrl_post.placement import boxes, picking
from jaxrl_post.placement import mesh as meshes

# The library asks the machine's metadata server which TPU it has, and lets one
# process at a time load it, unless it is told not to.
QUIET = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_LOG_DIR": "disabled",
}
# Two cores a chip for v4; four chips a host, but where the last entry says so.
SLICES = [
  ("v4:2x2x1", None),
  ("v4:2x2x4", None),
  ("v5e:4x4", None),
  ("v5e:8x8", None),
  ("v5e:2x4", [2, 4, 1]),
  ("v5p:2x2x2", None),
  ("v5p:4x4x4", None),
  ("v6e:2x4", None),
  ("v6e:8x16", None),
]


@functools.cache
def slices(name: str, host: tuple | None = None, num_slices: int = 1) -> list:
  options: dict[str, Any] = {}
  if host is not None:
    options["chips_per_host_bounds"] = list(host)
  if num_slices > 1:
    options["num_slices"] = num_slices
  with pytest.MonkeyPatch.context() as patch:
    for key, value in QUIET.items():
      patch.setenv(key, value)
    return topologies.get_topology_desc(
      platform="tpu", topology_name=name, **options
    ).devices


@contextlib.contextmanager
def uncached():
  """For what is compiled without a chip: no cache can read it back."""
  before = jax.config.jax_enable_compilation_cache  # type: ignore
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", before)


def point(device: Any) -> tuple[int, ...]:
  return (*device.coords, device.core_on_chip)


def bounds(devices: Sequence[Any]) -> boxes.Box | None:
  return boxes.bounds([point(device) for device in devices])


def hosts(devices: Sequence[Any]) -> list[int]:
  """Returns the host of each run of devices of one host."""
  return [
    host for host, _ in itertools.groupby(d.process_index for d in devices)
  ]


def are_neighbours(group: Sequence[Any]) -> bool:
  """Says whether a group is a box in which everyone has a link to another."""
  if bounds(group) is None:
    return False

  def linked(one, other):
    pairs = zip(point(one), point(other), strict=True)
    return sum(abs(a - b) for a, b in pairs) == 1

  return len(group) == 1 or all(
    any(linked(one, other) for other in group) for one in group
  )


def tensor_groups(mesh: jax.sharding.Mesh) -> list[list[Any]]:
  rows = mesh.devices.reshape(-1, mesh.shape["tensor"])
  return [list(row) for row in rows]


def split(tensor: int, fraction: float = 0.5) -> meshes.Placement:
  return meshes.Placement(
    mode="split",
    generation_fraction=fraction,
    training=meshes.TrainingAxes(tensor=tensor),
    generation=meshes.GenerationAxes(tensor=tensor),
  )


@pytest.mark.parametrize(("name", "host"), SLICES)
@pytest.mark.parametrize("part", [2, 4])
def test_both_sides_are_boxes_and_tensor_groups_are_neighbours(
  name, host, part
) -> None:
  devices = slices(name, host and tuple(host))
  whole = bounds(devices)
  assert whole is not None
  if part == 4 and all(n % 4 for n in whole.shape):
    # Three quarters of a slice are a box if they are of one of its edges.
    with pytest.raises(types.InputError, match="expected sizes of boxes"):
      meshes.split(split(1, 1 / 4), devices)
    return
  count = len(devices) // part
  for tensor in (n for n in (1, 2, 4, 8) if count % n == 0):
    got = meshes.split(split(tensor, 1 / part), devices)
    train = list(got.training.devices.flat)
    serve = list(got.generation.devices.flat)
    assert len(serve) == count and len(train) == len(devices) - count
    assert bounds(train) and bounds(serve)
    assert not set(train) & set(serve)
    for mesh in (got.training, got.generation):
      assert all(map(are_neighbours, tensor_groups(mesh)))


@pytest.mark.parametrize(("name", "host"), SLICES)
def test_halves_of_several_hosts_cut_no_host(name, host) -> None:
  devices = slices(name, host and tuple(host))
  got = meshes.split(split(2), devices)
  train, serve = (
    hosts(list(m.devices.flat)) for m in (got.training, got.generation)
  )
  if len(set(train + serve)) == 1:
    return
  # Each host is one run of devices, on one side.
  assert len(set(train + serve)) == len(train) + len(serve)


@pytest.mark.parametrize(("name", "host"), SLICES)
@pytest.mark.parametrize(("train", "serve"), [(1, 1), (2, 4), (4, 2), (8, 2)])
def test_colocated_meshes_have_one_order_and_neighbours_in_both(
  name, host, train, serve
) -> None:
  devices = slices(name, host and tuple(host))
  cfg = meshes.Placement(
    training=meshes.TrainingAxes(tensor=train),
    generation=meshes.GenerationAxes(tensor=serve),
  )
  got = meshes.split(cfg, devices)
  order = list(got.training.devices.flat)
  assert order == list(got.generation.devices.flat)
  assert set(order) == set(devices)
  for mesh in (got.training, got.generation):
    assert all(map(are_neighbours, tensor_groups(mesh)))
  assert len(hosts(order)) == len(set(hosts(order)))


def test_all_inner_axes_of_a_large_slice_are_boxes() -> None:
  axes = meshes.TrainingAxes(-1, 8, tensor=2, expert=2, context=2)
  got = meshes.split(
    meshes.Placement(training=axes), slices("v5p:4x4x4")
  ).training
  order = list(got.devices.flat)
  for size in (2, 4, 32, 64):
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    assert all(map(are_neighbours, groups))
    shapes = {box.shape for group in groups if (box := bounds(group))}
    assert len(shapes) == 1


def test_a_quarter_of_sixteen_chips_is_a_row() -> None:
  got = meshes.split(split(4, 0.25), slices("v5e:4x4"))
  train, serve = (
    bounds(list(m.devices.flat)) for m in (got.training, got.generation)
  )
  assert train and sorted(train.shape) == [1, 1, 3, 4]
  assert serve and sorted(serve.shape) == [1, 1, 1, 4]


def test_three_chips_of_a_host_are_a_row_and_the_idle_ones_are_named() -> None:
  cfg = meshes.Placement(
    mode="split",
    training=meshes.TrainingAxes(1, 9, 1),
    generation=meshes.GenerationAxes(3, 1),
  )
  got = meshes.split(cfg, slices("v5e:4x4"))
  assert got.idle == 4
  for mesh, shape in (
    (got.training, [1, 1, 3, 3]),
    (got.generation, [1, 1, 1, 3]),
  ):
    box = bounds(list(mesh.devices.flat))
    assert box and sorted(box.shape) == shape


def test_sizes_that_are_no_boxes_are_refused_with_those_that_are() -> None:
  with pytest.raises(types.InputError) as refused:
    meshes.split(split(1, 0.25), slices("v5p:2x2x2"))
  line = str(refused.value)
  assert "2 x 2 x 2, got 6 and 2." in line and "4 and 2" in line
  assert "\n" not in line
  with pytest.raises(types.InputError, match=r"4 x 4, got 7\."):
    cfg = meshes.Placement(training=meshes.TrainingAxes(7, 1))
    meshes.split(cfg, slices("v5e:4x4"))


def test_listed_chips_need_be_no_box() -> None:
  cfg = meshes.Placement(
    mode="split", training_devices=(0, 1, 2, 4, 5, 6), generation_devices=(7,)
  )
  devices = slices("v5p:2x2x2")
  got = meshes.split(cfg, devices)
  assert list(got.generation.devices.flat) == [devices[7]]


def test_chips_that_fill_no_box_are_taken_as_they_are_listed() -> None:
  devices = slices("v5e:4x4")[:7]
  got = meshes.split(split(1, 3 / 7), devices)
  assert list(got.training.devices.flat) == devices[:4]
  assert list(got.generation.devices.flat) == devices[4:]


# --------------------------------------------------------------- several slices


def owners(mesh: jax.sharding.Mesh) -> list[int]:
  runs = itertools.groupby(d.slice_index for d in mesh.devices.flat)
  return [index for index, _ in runs]


@pytest.mark.parametrize(
  ("count", "fraction", "train", "serve"),
  [
    (2, 0.5, [0], [1]),
    (4, 0.25, [0, 1, 2], [3]),
    (3, 0.5, [0, 1], [1, 2]),
    (2, 0.25, [0, 1], [1]),
  ],
)
def test_a_slice_is_cut_only_where_the_shares_leave_no_choice(
  count, fraction, train, serve
) -> None:
  devices = slices("v5e:4x4", None, count)
  # The order of the list must not matter.
  got = meshes.split(split(2, fraction), devices[::-1])
  assert owners(got.training) == train
  assert owners(got.generation) == serve
  for mesh in (got.training, got.generation):
    assert all(map(are_neighbours, tensor_groups(mesh)))
    for _, part in itertools.groupby(
      mesh.devices.flat, lambda d: d.slice_index
    ):
      assert bounds(list(part))
  assert not set(got.training.devices.flat) & set(got.generation.devices.flat)


def test_parts_of_slices_do_not_share_one_while_another_is_free() -> None:
  cfg = meshes.Placement(
    mode="split",
    training=meshes.TrainingAxes(1, 8, 1),
    generation=meshes.GenerationAxes(8, 1),
  )
  got = meshes.split(cfg, slices("v5e:4x4", None, 2))
  assert owners(got.training) == [0] and owners(got.generation) == [1]
  assert got.idle == 16


def test_data_parallel_copies_lie_on_slices_of_their_own() -> None:
  cfg = meshes.Placement(training=meshes.TrainingAxes(2, -1, 2))
  mesh = meshes.split(cfg, slices("v5p:2x2x2", None, 2)).training
  for copy, devices in enumerate(mesh.devices):
    assert {d.slice_index for d in devices.flat} == {copy}


# --------------------------------------------------------------- many processes


def test_each_process_of_a_pod_has_devices_of_its_own_in_both_meshes() -> None:
  devices = slices("v5e:4x4")
  for process in range(4):
    got = meshes.split(split(2), devices, process=process, processes=4)
    assert hosts(list(got.training.devices.flat)) == [0, 1, 2, 3]
    assert hosts(list(got.generation.devices.flat)) == [process]
    assert got.training.size == 8 and got.generation.size == 2


@dataclasses.dataclass(frozen=True)
class Remote:
  """A device as a controller of many hosts sees it."""

  coords: tuple[int, ...]
  core_on_chip: int
  virtual_task_index: int
  process_index: int = 0
  slice_index: int = 0
  platform: str = "tpu"


@pytest.mark.parametrize("size", [4, 8])
def test_a_controller_of_many_hosts_does_not_cut_them(size) -> None:
  devices = [
    Remote(tuple(d.coords), d.core_on_chip, d.process_index)
    for d in slices("v5e:2x8")
  ]
  sides = [
    picking.side(16 - size, {"tensor": 2}),
    picking.side(size, {"tensor": 2}),
  ]
  found = picking.rectangles(devices, sides)
  assert found is not None
  tasks = [{d.virtual_task_index for d in side} for side in found]
  assert len(found[0]) == 16 - size and len(found[1]) == size
  assert not tasks[0] & tasks[1]
