"""Listed devices, and the devices of several processes."""

import dataclasses

import jax
import pytest

from jaxrl_post import types
from jaxrl_post.placement import mesh as meshes


def _split(training: tuple, generation: tuple) -> meshes.Placement:
  return meshes.Placement(
    mode="split",
    training=meshes.TrainingAxes(*training),
    generation=meshes.GenerationAxes(*generation),
  )


def sizes(mesh: jax.sharding.Mesh) -> dict[str, int]:
  """Returns the axes that split something."""
  return {name: n for name, n in mesh.shape.items() if n > 1}


# ------------------------------------------------------------- listed devices


def test_listed_devices_are_used_in_their_order() -> None:
  cfg = meshes.Placement(
    mode="split",
    generation_fraction=0.9,
    training_devices=(6, 0),
    generation_devices=(3, 2, 1),
  )
  devices = jax.devices()[:8]
  got = meshes.split(cfg, devices)
  assert list(got.training.devices.flat) == [devices[6], devices[0]]
  assert list(got.generation.devices.flat) == [devices[i] for i in (3, 2, 1)]
  assert got.idle == 3 and not got.shared


def test_colocated_sides_share_the_listed_devices() -> None:
  got = meshes.split(
    meshes.Placement(training_devices=(5, 2)), jax.devices()[:8]
  )
  for mesh in (got.training, got.generation):
    assert [device.id for device in mesh.devices.flat] == [5, 2]
  assert got.shared and got.idle == 6


@pytest.mark.parametrize(
  ("mode", "train", "generate", "words"),
  [
    ("split", (0, 0), (1,), r"training_devices: .* got \(0, 0\)"),
    ("split", (0,), (-1,), r"generation_devices: .* got \(-1,\)"),
    ("split", (0, 1), (2, 1), r"generation_devices: .* got \[1\]"),
    ("split", (0, 1), (), "generation_devices: expected a list if"),
    ("split", (), (1,), "generation_devices: expected a list if"),
    ("colocated", (0,), (1,), "nothing in mode colocated"),
    ("roles", (0,), (), "training_devices: expected nothing in mode roles"),
  ],
)
def test_lists_that_no_run_can_use_are_refused(
  mode, train, generate, words
) -> None:
  with pytest.raises(types.InputError, match=words):
    meshes.Placement(
      mode=mode, training_devices=train, generation_devices=generate
    )


def test_lists_that_do_not_fit_are_refused_with_both_numbers() -> None:
  cfg = meshes.Placement(
    mode="split",
    training=meshes.TrainingAxes(fsdp=2),
    generation=meshes.GenerationAxes(tensor=2),
    training_devices=(0, 9),
    generation_devices=(1, 2, 3),
  )
  with pytest.raises(types.InputError, match=r"below the 8 .* got 9\."):
    meshes.shares(cfg, 8)
  with pytest.raises(types.InputError, match=r"generation: .* 2, .* got 3\."):
    meshes.shares(cfg, 10)
  cfg = dataclasses.replace(
    cfg, training_devices=(0, 4, 5), generation_devices=(1, 2)
  )
  with pytest.raises(types.InputError, match="3 devices, got a product of 2"):
    meshes.shares(cfg, 8)


# ----------------------------------------------------------- several processes


@dataclasses.dataclass(frozen=True)
class Device:
  """A device of some process, as far as a mesh asks."""

  id: int
  process_index: int
  platform: str = "cpu"


def cluster(processes: int, each: int) -> list[Device]:
  return [Device(i, i // each) for i in range(processes * each)]


@pytest.mark.parametrize("process", [0, 1])
def test_each_process_trains_with_its_first_devices_and_generates_with_its_last(
  process,
) -> None:
  cfg = meshes.Placement(mode="split", generation_fraction=0.25)
  devices = cluster(2, 4)
  # The order in which the devices are listed decides within a process only.
  mixed = [*devices[::2], *devices[1::2]]
  got = meshes.split(cfg, mixed, process=process, processes=2)
  assert [d.id for d in got.training.devices.flat] == [0, 2, 1, 4, 6, 5]
  assert [d.id for d in got.generation.devices.flat] == [[3], [7]][process]
  assert got.replicas == 2 and got.idle == 0 and not got.shared
  assert "2 x 1 (" in str(got)


def test_written_generation_axes_are_those_of_all_processes_together() -> None:
  cfg = _split((1, 4, 1), (4, 1))
  got = meshes.split(cfg, cluster(2, 4), process=1, processes=2)
  assert sizes(got.training) == {"fsdp": 4}
  assert sizes(got.generation) == {"data": 2}
  assert [d.id for d in got.generation.devices.flat] == [6, 7]
  local = meshes.local_axes(meshes.GenerationAxes(-1, 2), 8, 2)
  assert local == meshes.GenerationAxes(2, 2, 1)


def test_colocated_processes_generate_with_their_own_training_devices() -> None:
  got = meshes.split(
    meshes.Placement(training=meshes.TrainingAxes(2, 2)),
    cluster(2, 4),
    process=1,
    processes=2,
  )
  assert [d.id for d in got.training.devices.flat] == [0, 1, 4, 5]
  assert [d.id for d in got.generation.devices.flat] == [4, 5]
  assert got.shared and got.idle == 4


def test_listed_devices_are_grouped_by_process() -> None:
  cfg = meshes.Placement(
    mode="split", training_devices=(5, 1, 0, 4), generation_devices=(7, 2)
  )
  got = meshes.split(cfg, cluster(2, 4), process=0, processes=2)
  assert [d.id for d in got.training.devices.flat] == [1, 0, 5, 4]
  assert [d.id for d in got.generation.devices.flat] == [2]
  cfg = dataclasses.replace(cfg, training_devices=(0, 1, 3, 4))
  with pytest.raises(types.InputError, match=r"2 processes, got 3, 1 of 2\."):
    meshes.split(cfg, cluster(2, 4), process=0, processes=2)


@pytest.mark.parametrize(
  ("cfg", "count", "processes", "words"),
  [
    (meshes.Placement(), 6, 4, r"4 processes divide, got 6\."),
    (_split((1, 3, 1), (-1, 1)), 8, 2, r"training: .* 2 .* got 3\."),
    (_split((1, 2, 1), (3, 1)), 8, 2, r"generation: .* 2 .* got 3\."),
    (_split((1, -1, 1), (1, 4)), 8, 2, r"divide the 2 devices .* got 4\."),
    (_split((1, -1, 1), (1, -1)), 8, 2, r"divide the 2 devices .* got 4\."),
    (_split((1, -1, 1), (-1, 1)), 4, 4, r"each of 4 processes, got 4 in all"),
    (
      meshes.Placement(training=meshes.TrainingAxes(3, 1)),
      8,
      2,
      r"2 processes divide, got 3\.",
    ),
  ],
)
def test_what_processes_do_not_divide_is_refused_with_numbers(
  cfg, count, processes, words
) -> None:
  with pytest.raises(types.InputError, match=words):
    meshes.shares(cfg, count, processes)


def test_processes_with_different_devices_are_refused() -> None:
  devices = [*cluster(2, 3), Device(6, 0), Device(7, 0)]
  with pytest.raises(types.InputError, match=r"2 processes, got 5, 3 of 2\."):
    meshes.split(meshes.Placement(), devices, process=0, processes=2)
  with pytest.raises(types.InputError, match="of 4 processes, got 4, 4 of 2"):
    meshes.split(meshes.Placement(), cluster(2, 4), process=0, processes=4)


def test_a_single_controller_takes_no_device_to_be_its_own() -> None:
  devices = cluster(4, 2)
  cfg = meshes.Placement(mode="split", training=meshes.TrainingAxes(1, 5))
  got = meshes.split(cfg, devices)
  assert list(got.training.devices.flat) == devices[:5]
  assert list(got.generation.devices.flat) == devices[5:]
  assert got.replicas == 1
