"""Dividing devices, and how weights and batches lie on the meshes."""

import math

import jax
import jaxtyping
import numpy as np
import pytest
from absl import logging

from jaxrl_post import types
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import settings


def _spec(
  heads: int = 8,
  kv_heads: int = 4,
  vocab: int = 32,
  ff: int = 32,
  experts: int = 4,
) -> dict:
  return {
    "embed": specs.Weight((vocab, 16), ("vocab", "embed")),
    "q": specs.Weight((2, 16, heads, 4), ("layers", "embed", "heads", "head")),
    "k": specs.Weight(
      (2, 16, kv_heads, 4), ("layers", "embed", "kv_heads", "head")
    ),
    "o": specs.Weight((2, heads, 4, 16), ("layers", "heads", "head", "embed")),
    "down": specs.Weight((2, ff, 16), ("layers", "ff", "embed")),
    "mix": specs.Weight(
      (2, experts, 16, 8), ("layers", "experts", "embed", "inner")
    ),
    "norm": specs.Weight((16,), ("norm",)),
  }


def _split(training: tuple, generation: tuple, fraction: float = 0.5):
  return meshes.Placement(
    mode="split",
    generation_fraction=fraction,
    training=meshes.TrainingAxes(*training),
    generation=meshes.GenerationAxes(*generation),
  )


def sizes(mesh: jax.sharding.Mesh) -> dict[str, int]:
  """Returns the axes that split something."""
  return {name: n for name, n in mesh.shape.items() if n > 1}


def test_c111a_four_train_and_four_generate_with_two_way_tensor() -> None:
  got = meshes.split(_split((1, 4, 1), (-1, 2)), jax.devices()[:8])
  assert sizes(got.training) == {"fsdp": 4}
  assert sizes(got.generation) == {"data": 2, "tensor": 2}
  assert got.idle == 0


def test_c111b_nine_of_eight_devices_are_refused() -> None:
  with pytest.raises(types.InputError, match=r"at most 8 .* need 9\."):
    meshes.shares(_split((1, 5, 1), (4, 1)), 8)


def test_c111c_three_devices_do_not_divide_by_two() -> None:
  with pytest.raises(types.InputError, match=r"generation: .* 2, .* got 3\."):
    meshes.shares(_split((1, -1, 1), (-1, 2), fraction=3 / 8), 8)


def test_c111d_two_of_eight_devices_stay_idle_and_are_named() -> None:
  got = meshes.split(_split((1, 4, 1), (2, 1)), jax.devices()[:8])
  assert got.idle == 2
  assert "2 idle" in str(got)


def test_c111e_one_device_is_shared() -> None:
  got = meshes.split(meshes.Placement(), jax.devices()[:1])
  assert got.shared
  assert got.training.devices.flat[0] == got.generation.devices.flat[0]
  assert "1 idle" not in str(got)


def test_c111f_a_mesh_of_eight_does_not_fit_seven_devices() -> None:
  cfg = meshes.Placement(training=meshes.TrainingAxes(1, 4, 2))
  with pytest.raises(types.InputError, match=r"at most 7 .* need 8\."):
    meshes.split(cfg, jax.devices()[:7])


def test_one_device_cannot_be_split() -> None:
  with pytest.raises(types.InputError, match=r"at most 1 .* need 2\."):
    meshes.shares(meshes.Placement(mode="split"), 1)


@pytest.mark.parametrize(
  ("fraction", "expected"),
  [(0.5, (4, 4, 0)), (0.25, (6, 2, 0)), (0.01, (7, 1, 0)), (0.99, (1, 7, 0))],
)
def test_the_fraction_is_rounded_and_leaves_one_device_a_side(
  fraction, expected
) -> None:
  cfg = meshes.Placement(mode="split", generation_fraction=fraction)
  assert meshes.shares(cfg, 8) == expected


@pytest.mark.parametrize(
  ("training", "generation", "expected"),
  [
    ((1, 2, 1), (-1, 1), (2, 6, 0)),
    ((1, -1, 1), (2, 1), (6, 2, 0)),
    ((1, 2, 1), (4, 1), (2, 4, 2)),
  ],
)
def test_a_written_side_takes_its_product_and_the_other_the_rest(
  training, generation, expected
) -> None:
  assert meshes.shares(_split(training, generation), 8) == expected


def test_shares_add_up_to_the_devices_when_split() -> None:
  for count in range(2, 20):
    assert sum(meshes.shares(meshes.Placement(mode="split"), count)) == count


def test_colocated_sides_of_different_size_are_refused() -> None:
  cfg = meshes.Placement(
    training=meshes.TrainingAxes(1, 4, 1),
    generation=meshes.GenerationAxes(2, 1),
  )
  with pytest.raises(types.InputError, match="got 4 to train and 2 to"):
    meshes.shares(cfg, 8)


def test_colocated_written_axes_leave_the_rest_idle() -> None:
  cfg = meshes.Placement(training=meshes.TrainingAxes(1, 4, 1))
  assert meshes.shares(cfg, 8) == (4, 4, 4)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_a_fraction_outside_zero_and_one_is_refused(fraction) -> None:
  with pytest.raises(types.InputError, match="placement.generation_fraction"):
    meshes.Placement(mode="split", generation_fraction=fraction)


def test_impossible_axes_are_refused_by_name() -> None:
  with pytest.raises(types.InputError, match=r"training\.tensor: .* got 0"):
    meshes.TrainingAxes(tensor=0)
  with pytest.raises(types.InputError, match="at most one axis of -1"):
    meshes.GenerationAxes(data=-1, tensor=-1)
  for number in (0, 513):
    with pytest.raises(types.InputError, match=f"cpu_devices.* got {number}"):
      meshes.Placement(cpu_devices=number)


def test_what_is_parked_is_named_once() -> None:
  with pytest.raises(types.InputError, match="park"):
    meshes.Placement(park=("optimizer", "optimizer"))


def test_an_unknown_mode_is_refused() -> None:
  # Outside of tests nothing checks the annotation.
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    with pytest.raises(types.InputError, match="got 'shared'"):
      meshes.Placement(mode="shared")  # pyright: ignore
  finally:
    jaxtyping.config.update("jaxtyping_disable", False)


def test_the_first_devices_train_and_the_last_generate() -> None:
  devices = jax.devices()[:8]
  got = meshes.split(_split((1, 4, 1), (2, 1)), devices)
  assert list(got.training.devices.flat) == devices[:4]
  assert list(got.generation.devices.flat) == devices[6:]
  assert not got.shared


def test_colocated_meshes_list_the_same_devices_in_the_same_order() -> None:
  cfg = meshes.Placement(
    training=meshes.TrainingAxes(2, 2, 2),
    generation=meshes.GenerationAxes(-1, 4),
  )
  got = meshes.split(cfg, jax.devices()[:8])
  assert list(got.training.devices.flat) == list(got.generation.devices.flat)
  assert got.shared
  assert "also generate" in str(got)


def test_axes_are_auto() -> None:
  got = meshes.split(meshes.Placement(), jax.devices()[:8])
  for mesh in (got.training, got.generation):
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_training_splits_width_and_heads_and_generation_heads_only() -> None:
  cfg = _split((1, 2, 2), (2, 2))
  got = meshes.split(cfg, jax.devices()[:8])
  train = meshes.weight_shardings(_spec(), meshes.TRAINING_RULES, got.training)
  serve = meshes.weight_shardings(
    _spec(), meshes.GENERATION_RULES, got.generation
  )
  assert train["q"].spec == jax.P(None, "fsdp", "tensor", None)
  assert train["embed"].spec == jax.P("tensor", "fsdp")
  assert train["down"].spec == jax.P(None, "tensor", "fsdp")
  assert train["norm"].spec == jax.P(None)
  assert serve["q"].spec == jax.P(None, None, "tensor", None)
  assert serve["k"].spec == jax.P(None, None, "tensor", None)
  assert serve["embed"].spec == jax.P("tensor", None)
  assert serve["q"].mesh == got.generation


def test_heads_are_split_together_or_not_at_all(monkeypatch) -> None:
  lines = []
  monkeypatch.setattr(logging, "warning", lines.append)
  mesh = meshes.split(_split((1, 4, 1), (1, 4)), jax.devices()[:8]).generation
  spec = _spec(heads=8, kv_heads=2)
  got = meshes.weight_shardings(spec, meshes.GENERATION_RULES, mesh)
  for name in ("q", "k", "o"):
    assert got[name].is_fully_replicated
  assert got["down"].spec == jax.P(None, "tensor", None)
  assert len(lines) == 1
  assert "kv_heads 2 by tensor 4" in lines[0]


def test_rules_that_fit_are_kept_without_a_word() -> None:
  mesh = meshes.split(_split((1, 4, 1), (2, 2)), jax.devices()[:8]).generation
  kept, message = meshes.fit_rules(_spec(), meshes.GENERATION_RULES, mesh)
  assert kept == dict(meshes.GENERATION_RULES)
  assert message == ""


@pytest.mark.parametrize(
  ("odd", "dropped", "words"),
  [
    ({"vocab": 33}, {"vocab"}, "vocab 33 by tensor 4"),
    ({"ff": 30}, {"ff"}, "ff 30 by tensor 4"),
    ({"heads": 6}, {"heads", "kv_heads"}, "heads 6 by tensor 4"),
    (
      {"heads": 4, "kv_heads": 1},
      {"heads", "kv_heads"},
      "kv_heads 1 by tensor 4",
    ),
    ({"experts": 3}, {"experts"}, "experts 3 by expert 2"),
  ],
)
def test_what_does_not_divide_is_replicated_and_said_with_numbers(
  odd, dropped, words
) -> None:
  axes = meshes.GenerationAxes(1, tensor=4, expert=2)
  mesh = meshes.build(axes, jax.devices()[:8])
  spec = _spec(**odd)
  kept, message = meshes.fit_rules(spec, meshes.GENERATION_RULES, mesh)
  assert set(meshes.GENERATION_RULES) - set(kept) == dropped
  assert words in message
  values = jax.tree.map(
    lambda w: np.arange(math.prod(w.shape), dtype=np.float32).reshape(w.shape),
    spec,
    is_leaf=lambda x: isinstance(x, specs.Weight),
  )
  placed = jax.device_put(
    values, meshes.weight_shardings(spec, meshes.GENERATION_RULES, mesh)
  )
  jax.tree.map(np.testing.assert_array_equal, placed, values)


def test_experts_are_split_on_either_side() -> None:
  devices = jax.devices()[:8]
  train = meshes.build(meshes.TrainingAxes(expert=4), devices)
  serve = meshes.build(meshes.GenerationAxes(expert=4), devices)
  for mesh, rules, width in (
    (train, meshes.TRAINING_RULES, "fsdp"),
    (serve, meshes.GENERATION_RULES, None),
  ):
    got = meshes.weight_shardings(_spec(), rules, mesh)
    assert got["mix"].spec == jax.P(None, "expert", width, None)


def test_rows_are_split_over_all_axes_but_tensor_and_context() -> None:
  axes = meshes.TrainingAxes(1, 2, 1, expert=2, context=2)
  train = meshes.build(axes, jax.devices()[:8])
  serve = meshes.build(meshes.GenerationAxes(2, 2, expert=2), jax.devices()[:8])
  assert meshes.batch_sharding(train).shard_shape((8, 6)) == (2, 6)
  assert meshes.batch_sharding(serve).shard_shape((8, 6)) == (2, 6)
  assert meshes.token_sharding(train).shard_shape((8, 6)) == (2, 3)
  assert meshes.row_parts(axes, 8) == 4
  assert meshes.context_parts(axes, 8) == 2
  assert meshes.row_parts(meshes.GenerationAxes(-1, 2, expert=2), 8) == 4


def test_parts_count_the_rest() -> None:
  assert meshes.row_parts(meshes.TrainingAxes(2, -1, 2, context=2), 16) == 4
  assert meshes.row_parts(meshes.TrainingAxes(2, 1, -1), 16) == 2
  assert meshes.context_parts(meshes.TrainingAxes(2, 1, context=-1), 16) == 8
  with pytest.raises(types.InputError, match=r"together 3, divide, got 8\."):
    meshes.row_parts(meshes.TrainingAxes(data=3), 8)


def test_tensor_groups_are_next_to_each_other_and_copies_far_apart() -> None:
  devices = jax.devices()[:8]
  axes = meshes.TrainingAxes(data=2, fsdp=1, tensor=2, expert=1, context=2)
  train = meshes.build(axes, devices)
  assert train.axis_names == ("data", "expert", "fsdp", "context", "tensor")
  assert list(train.devices[0, 0, 0].flat) == devices[:4]
  assert list(train.devices[1, 0, 0, 1]) == devices[6:]
  serve = meshes.build(meshes.GenerationAxes(2, 2, 2), devices)
  assert serve.axis_names == ("data", "expert", "tensor")
  assert list(serve.devices[0, 1]) == devices[2:4]


def test_a_mesh_is_refused_that_does_not_fit_its_devices() -> None:
  devices = jax.devices()[:6]
  with pytest.raises(types.InputError, match="6 devices, got a product of 4"):
    meshes.build(meshes.TrainingAxes(2, 2), devices)
  with pytest.raises(types.InputError, match=r"together 4, divide, got 6\."):
    meshes.build(meshes.GenerationAxes(tensor=4), devices)


# ----------------------------------------------------- roles, publish and park


def test_in_mode_roles_all_devices_train_and_replicas_bring_their_own() -> None:
  cfg = meshes.Placement(
    mode="roles",
    training=meshes.TrainingAxes(tensor=2),
    generation=meshes.GenerationAxes(tensor=4),
    roles=settings.Roles(generation_replicas=3, replica_devices=4),
  )
  assert meshes.shares(cfg, 8) == (8, 12, 0)
  with pytest.raises(ValueError, match="roles"):
    meshes.split(cfg, jax.devices()[:8])


@pytest.mark.parametrize(
  ("training", "generation", "words"),
  [
    ((1, 4, 1), (-1, 1), "the 8 devices, got a product of 4"),
    ((1, -1, 3), (-1, 1), r"together 3, divide, got 8\."),
    ((1, -1, 1), (-1, 4), r"divide the 2 devices .* got 4\."),
    ((1, -1, 1), (3, 1), "the 4 devices, got a product of 3"),
  ],
)
def test_roles_that_do_not_fit_are_refused_with_both_numbers(
  training, generation, words
) -> None:
  cfg = meshes.Placement(
    mode="roles",
    training=meshes.TrainingAxes(*training),
    generation=meshes.GenerationAxes(*generation),
    roles=settings.Roles(generation_replicas=2, replica_devices=2),
  )
  with pytest.raises(types.InputError, match=words):
    meshes.shares(cfg, 8)


@pytest.mark.parametrize(
  ("setting", "words"),
  [
    ({"generation_replicas": 0}, "generation_replicas: .* got 0"),
    ({"training_processes": 0}, "training_processes: .* got 0"),
    ({"replica_devices": 0}, "replica_devices: .* got 0"),
    ({"training_cores": (0, 0)}, r"training_cores: .* got \(0, 0\)"),
    ({"generation_cores": (-1,)}, r"generation_cores: .* got \(-1,\)"),
    (
      {"training_cores": (0, 1, 2), "training_processes": 2},
      "equally many cores for each of 2 processes, got 3",
    ),
    (
      {"generation_cores": (0,), "generation_replicas": 2},
      "equally many cores for each of 2 processes, got 1",
    ),
    (
      {"training_cores": (0, 1), "generation_cores": (1, 2)},
      r"generation_cores: .* got \[1\]",
    ),
  ],
)
def test_impossible_roles_are_refused_by_name(setting, words) -> None:
  with pytest.raises(types.InputError, match=rf"placement\.roles\..*{words}"):
    settings.Roles(**setting)


def test_parking_needs_sides_that_take_turns() -> None:
  assert meshes.Placement(park=("optimizer", "cache")).park
  with pytest.raises(types.InputError, match="park: .* got .*'weights'"):
    meshes.Placement(park=("weights",))
  with pytest.raises(types.InputError, match="park: expected nothing in mode"):
    meshes.Placement(mode="split", park=("cache",))


def test_impossible_publishing_is_refused_by_name() -> None:
  with pytest.raises(types.InputError, match=r"publish\.chunk_bytes: .* got 0"):
    settings.Publishing(chunk_bytes=0)
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    with pytest.raises(types.InputError, match=r"publish\.buffers: .*'both'"):
      settings.Publishing(buffers="both")  # pyright: ignore
  finally:
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("silence", [0.0, -1.0, 3601.0, float("nan")])
def test_a_silence_of_peers_outside_an_hour_is_refused(silence) -> None:
  with pytest.raises(types.InputError, match="peer_timeout_s"):
    meshes.Placement(peer_timeout_s=silence)
