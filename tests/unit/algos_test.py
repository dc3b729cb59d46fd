"""Advantages and losses against hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.algos import advantages, grpo, losses


def _advantages(groups, **options):
  rewards = jnp.array([r for g in groups for r in g], jnp.float32)
  ids = jnp.array([i for i, g in enumerate(groups) for _ in g])
  return np.asarray(advantages.group_advantages(rewards, ids, **options))


def _inputs(new, old, advantage, mask=None, sampler=None):
  new, old = jnp.asarray(new, jnp.float32), jnp.asarray(old, jnp.float32)
  mask = jnp.ones_like(new) if mask is None else jnp.asarray(mask, jnp.float32)
  return types.LossInputs(
    logprobs=new[None],
    old_logprobs=old[None],
    sampler_logprobs=(old if sampler is None else jnp.asarray(sampler))[None],
    advantages=jnp.broadcast_to(jnp.float32(advantage), new.shape)[None],
    loss_mask=mask[None],
  )


@pytest.mark.parametrize(
  "rewards", [[1.0] * 4, [0.0] * 4, [0.9] * 10, [0.35] * 8, [136.7] * 3]
)
@pytest.mark.parametrize("jit", [False, True])
def test_c01_equal_rewards_carry_no_signal(rewards, jit):
  fn = advantages.group_advantages
  fn = jax.jit(fn) if jit else fn
  ids = jnp.zeros(len(rewards), jnp.int32)
  found = fn(jnp.array(rewards, jnp.float32), ids)
  assert np.array_equal(found, np.zeros(len(rewards)))


def test_c01_loss_and_gradient_of_equal_rewards_are_zero():
  algo = grpo.Grpo()
  zeros = algo.advantages(jnp.full(2, 0.9), jnp.zeros(2, jnp.int32))

  def loss(new):
    inputs = types.LossInputs(
      logprobs=new,
      old_logprobs=jnp.full((2, 3), -2.0),
      sampler_logprobs=jnp.full((2, 3), -1.5),
      advantages=jnp.broadcast_to(zeros[:, None], (2, 3)),
      loss_mask=jnp.ones((2, 3)),
    )
    return algo.loss(inputs, jnp.float32(6))[0]

  value, grad = jax.value_and_grad(loss)(jnp.full((2, 3), -1.0))
  assert value == 0
  assert np.array_equal(grad, np.zeros((2, 3)))


def test_c03_sample_standard_deviation_and_mean_only():
  groups = [[2, 0, 1, 5], [0.2, 0.9, 0.4, 0.5]]
  mean_only = [0, -2, -1, 3, -0.3, 0.4, -0.1, 0]
  found = _advantages(groups, scale="none")
  np.testing.assert_allclose(found, mean_only, atol=1e-5)
  scaled = [0, -0.925820, -0.462910, 1.388730]
  scaled += [-1.019049, 1.358732, -0.339683, 0]
  np.testing.assert_allclose(_advantages(groups), scaled, atol=2e-4)


def test_c06_a_group_of_one_has_no_advantage():
  found = _advantages([[0.7], [1.0, 0.0]])
  np.testing.assert_allclose(found, [0, 0.707107, -0.707107], atol=2e-4)


@pytest.mark.parametrize("missing", [np.nan, np.inf, -np.inf])
def test_c84_a_missing_reward_is_left_out_of_the_statistics(missing):
  found = _advantages([[1.0, missing, 0.0, 1.0]])
  expected = [0.577350, 0.0, -1.154701, 0.577350]
  np.testing.assert_allclose(found, expected, atol=2e-4)


def test_c91_two_draws_of_one_prompt_are_two_groups():
  assert np.array_equal(_advantages([[1.0, 1.0], [0.0, 0.0]]), np.zeros(4))


def test_c44_row_order_carries_no_meaning():
  rewards = jnp.array([1, 0, 0.5, 0.25, 3, 2, 2, 7], jnp.float32)
  ids = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])
  order = np.random.default_rng(0).permutation(8)
  plain = advantages.group_advantages(rewards, ids)
  mixed = advantages.group_advantages(rewards[order], ids[order])
  np.testing.assert_allclose(mixed, np.asarray(plain)[order], atol=1e-6)


@pytest.mark.parametrize(
  ("advantage", "expected", "fraction"),
  [
    (1.0, [-0.5, -0.9, -1.0, -1.28, -1.28], 0.4),
    (-1.0, [0.8, 0.9, 1.0, 1.3, 2.0], 0.2),
  ],
)
def test_c16_clip_table_with_asymmetric_bounds(advantage, expected, fraction):
  ratios = jnp.array([0.5, 0.9, 1.0, 1.3, 2.0])
  inputs = _inputs(jnp.log(ratios), jnp.zeros(5), advantage)
  loss, clipped = losses.clipped(inputs, clip_low=0.2, clip_high=0.28)
  np.testing.assert_allclose(loss[0], expected, atol=1e-5)
  np.testing.assert_allclose(clipped.mean(), fraction, atol=1e-6)


def test_c19_on_policy_the_loss_is_zero_and_the_gradient_is_not():
  def loss(t):
    z = jax.nn.log_softmax(jnp.stack([t, jnp.float32(0)]))
    inputs = types.LossInputs(
      logprobs=z[None],
      old_logprobs=jax.lax.stop_gradient(z)[None],
      sampler_logprobs=jax.lax.stop_gradient(z)[None],
      advantages=jnp.array([[1.0, -1.0]]),
      loss_mask=jnp.ones((1, 2)),
    )
    total, shares = grpo.Grpo().loss(inputs, jnp.float32(2))
    return total, shares

  (value, shares), grad = jax.value_and_grad(loss, has_aux=True)(jnp.float32(0))
  assert value == 0
  np.testing.assert_allclose(grad, -0.5, atol=1e-6)
  assert shares["loss/clip_fraction"] == 0
  assert shares["loss/importance_mean"] == 1


@pytest.mark.parametrize("garbage", [-200.0, -np.inf, np.nan, np.inf])
@pytest.mark.parametrize("where", ["old_logprobs", "sampler_logprobs"])
def test_c20_c29_masked_positions_leave_no_trace(garbage, where):
  algo = grpo.Grpo()

  @jax.jit
  def loss(new):
    bad = jnp.array([-1.0, garbage], jnp.float32)
    fine = jnp.array([-1.0, -1.0])
    old, sampler = (bad, fine) if where == "old_logprobs" else (fine, bad)
    inputs = _inputs(new, old, 1.0, [1, 0], sampler)
    return algo.loss(inputs, jnp.float32(1))[0]

  value, grad = jax.value_and_grad(loss)(jnp.array([-1.0, -1.0]))
  np.testing.assert_allclose(value, -1, atol=1e-6)
  np.testing.assert_allclose(grad, [-1, 0], atol=1e-6)


def test_c26_truncated_weights_scale_loss_and_gradient():
  old = jnp.array([-1.0, -0.5, -3.0])
  sampler = jnp.array([-1.2, -2.0, -2.5])
  algo = grpo.Grpo(importance_cap=2.0)

  def loss(new):
    inputs = _inputs(new, old, 1.0, sampler=sampler)
    return algo.loss(inputs, jnp.float32(3))

  (value, shares), grad = jax.value_and_grad(loss, has_aux=True)(old)
  np.testing.assert_allclose(value, -1.275978, atol=1e-5)
  weights = np.array([1.221403, 2.0, 0.606531])
  np.testing.assert_allclose(grad, -weights / 3, atol=1e-5)
  np.testing.assert_allclose(shares["loss/importance_capped"], 1 / 3, atol=1e-6)
  inputs = _inputs(old, old, 1.0, sampler=sampler)
  raw, _ = losses.truncated_weight(inputs, cap=1e9)
  np.testing.assert_allclose(raw[0], [1.221403, 4.481689, 0.606531], atol=1e-5)


@pytest.mark.parametrize(
  ("setting", "value"),
  [("clip_low", 0.0), ("clip_high", -1.0), ("importance_cap", 0.5)],
)
def test_impossible_settings_are_refused_by_name(setting, value):
  with pytest.raises(types.InputError, match=f"algo.{setting}: expected"):
    grpo.Grpo(**{setting: value})
