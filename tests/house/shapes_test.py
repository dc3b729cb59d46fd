"""Shapes in signatures are checked here, and records stay JAX trees."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from jaxrl_post import types
from jaxrl_post.models import spec, transformer

TINY = transformer.Config(
  num_layers=1,
  width=8,
  num_heads=2,
  num_kv_heads=1,
  head_width=4,
  ff_width=8,
  vocab_size=16,
)


@pytest.fixture
def inputs() -> types.LossInputs:
  ones = jnp.ones((2, 3))
  names = [field.name for field in dataclasses.fields(types.LossInputs)]
  return types.LossInputs(**dict.fromkeys(names, ones))


def test_there_are_eight_devices_and_no_silent_promotion():
  assert jax.device_count() == 8
  with pytest.raises(jax.dtypes.TypePromotionError):
    _ = jnp.ones((2,), jnp.float32) + jnp.ones((2,), jnp.int32)


def test_a_wrong_shape_is_refused_at_the_call():
  params = spec.abstract(transformer.spec(TINY), "float32")
  ids = jax.ShapeDtypeStruct((2, 3), "int32")

  def forward(params, tokens, positions):
    return transformer.forward(params, TINY, tokens, positions)[0]

  assert jax.eval_shape(forward, params, ids, ids).shape == (2, 3, 8)
  row = jax.ShapeDtypeStruct((1, 3), "int32")
  with pytest.raises(jaxtyping.TypeCheckError, match="positions"):
    jax.eval_shape(forward, params, ids, row)


def test_an_int_will_do_for_a_float_but_no_string_will():
  assert types.SamplingParams(temperature=1).temperature == 1
  with pytest.raises(jaxtyping.TypeCheckError, match="temperature"):
    types.SamplingParams(temperature="1")  # pyright: ignore


def test_records_hold_any_leaf(inputs: types.LossInputs):
  specs = jax.tree.map(lambda _: jax.P("fsdp"), inputs)
  assert specs.logprobs == jax.P("fsdp")
  assert jax.eval_shape(lambda x: x, inputs).advantages.shape == (2, 3)


def test_records_stack_and_scan(inputs: types.LossInputs):
  two = jax.tree.map(lambda *x: jnp.stack(x), inputs, inputs)
  assert jax.vmap(lambda x: x)(two).logprobs.shape == (2, 2, 3)
  last, sums = jax.lax.scan(lambda c, x: (x, x.logprobs.sum()), inputs, two)
  assert last.logprobs.shape == (2, 3)
  assert sums.tolist() == [6.0, 6.0]


def test_records_are_frozen_and_change_by_replacement(inputs: types.LossInputs):
  with pytest.raises(dataclasses.FrozenInstanceError):
    inputs.logprobs = inputs.loss_mask  # pyright: ignore
  changed = dataclasses.replace(inputs, logprobs=inputs.logprobs * 2)
  assert changed.logprobs.sum() == 12 and inputs.logprobs.sum() == 6
