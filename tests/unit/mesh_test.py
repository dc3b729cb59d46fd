"""Dividing devices, and how weights and batches lie on the meshes."""

import jax
import jaxtyping
import pytest
from absl import logging

from jaxrl_post import types
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import mesh as meshes


def _spec(heads: int = 8, kv_heads: int = 4, vocab: int = 32) -> dict:
  return {
    "embed": specs.Weight((vocab, 16), ("vocab", "embed")),
    "q": specs.Weight((2, 16, heads, 4), ("layers", "embed", "heads", "head")),
    "k": specs.Weight(
      (2, 16, kv_heads, 4), ("layers", "embed", "kv_heads", "head")
    ),
    "o": specs.Weight((2, heads, 4, 16), ("layers", "heads", "head", "embed")),
    "down": specs.Weight((2, 32, 16), ("layers", "ff", "embed")),
    "norm": specs.Weight((16,), ("norm",)),
  }


def _split(training: tuple, generation: tuple, fraction: float = 0.5):
  return meshes.Placement(
    mode="split",
    generation_fraction=fraction,
    training=meshes.TrainingAxes(*training),
    generation=meshes.GenerationAxes(*generation),
  )


def test_c111a_four_train_and_four_generate_with_two_way_tensor() -> None:
  got = meshes.split(_split((1, 4, 1), (-1, 2)), jax.devices()[:8])
  assert dict(got.training.shape) == {"data": 1, "fsdp": 4, "tensor": 1}
  assert dict(got.generation.shape) == {"data": 2, "tensor": 2}
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
  with pytest.raises(types.InputError, match="cpu_devices"):
    meshes.Placement(cpu_devices=0)


def test_an_unknown_mode_is_refused() -> None:
  # Outside of tests nothing checks the annotation.
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    with pytest.raises(types.InputError, match="got 'roles'"):
      meshes.Placement(mode="roles")
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


def test_an_odd_vocabulary_is_replicated_and_said() -> None:
  mesh = meshes.split(_split((1, 4, 1), (2, 2)), jax.devices()[:8]).generation
  spec = _spec(vocab=33)
  kept, message = meshes.fit_rules(spec, meshes.GENERATION_RULES, mesh)
  assert "vocab" not in kept and "heads" in kept
  assert "vocab 33 by tensor 2" in message


def test_rows_are_split_over_data_and_fsdp_or_over_data() -> None:
  got = meshes.split(_split((2, 2, 1), (2, 2)), jax.devices()[:8])
  assert meshes.batch_sharding(got.training).shard_shape((8, 3)) == (2, 3)
  assert meshes.batch_sharding(got.generation).shard_shape((8, 3)) == (4, 3)
