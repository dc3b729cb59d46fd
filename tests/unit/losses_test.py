"""Trust regions and corrections against hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algos import (
  cispo,
  corrections,
  dapo,
  divergence,
  grpo,
  gspo,
  losses,
  reducers,
  sapo,
)
from jaxrl_post.algos import objective as objectives
from tests.unit import objective_inputs as small

# -------------------------------------------------------------- trust regions


@pytest.mark.parametrize(
  ("advantage", "expected", "fraction"),
  [
    (1.0, [-0.5, -0.9, -1.0, -1.28, -1.28], 0.4),
    (-1.0, [0.8, 0.9, 1.0, 1.3, 2.0], 0.2),
  ],
)
def test_c16_clip_table_with_asymmetric_bounds(advantage, expected, fraction):
  ratios = jnp.array([0.5, 0.9, 1.0, 1.3, 2.0])
  inputs = small.inputs(jnp.log(ratios), old_logprobs=0.0, advantages=advantage)
  log_ratio = losses.log_ratio(inputs)
  loss, clipped = dapo.objective().region.losses(log_ratio, inputs)
  np.testing.assert_allclose(loss[0, :5], expected, atol=1e-5)
  np.testing.assert_allclose(clipped.sum() / 5, fraction, atol=1e-6)


def test_c19_on_policy_the_loss_is_zero_and_the_gradient_is_not():
  def loss(t):
    z = jax.nn.log_softmax(jnp.stack([t, jnp.float32(0)]))
    new = made.logprobs.at[0, :2].set(z)
    return grpo.objective().loss(made.replace(logprobs=new))

  half = jnp.log(jnp.array([0.5, 0.5]))
  made = small.inputs(half, advantages=[1.0, -1.0])

  (value, shown), grad = jax.value_and_grad(loss, has_aux=True)(jnp.float32(0))
  assert value == 0
  np.testing.assert_allclose(grad, -0.5, atol=1e-6)
  assert not shown["loss/clip_fraction"].any()
  assert np.array_equal(shown["loss/importance_mean"][0, :2], [1, 1])


# With the loss of a token of log-probability -1, advantage 1 and ratio 1.
_REGIONS = [
  (losses.Clip(), -1),
  (losses.Clip(dual=3.0), -1),
  (losses.Cispo(), 1),
  (losses.Sapo(), -2),
  (losses.Dppo(), -1),
  (losses.Score(), 1),
]


@pytest.mark.parametrize(("region", "expected"), _REGIONS)
def test_c20_c29_masked_positions_leave_no_trace(region, expected):
  """One program for all fields: garbage in one, and in all at once."""
  algo = objectives.Objective(region=region, kl=divergence.Kl(0.1), entropy=0.1)
  names = ["logprobs", "old_logprobs", "sampler_logprobs", "entropy"]
  names += ["reference_logprobs", "advantages", "lag"]
  inputs = small.inputs([-1.0, -1.0], mask=[1, 0], reference_logprobs=-1.0)

  @jax.jit
  def of(bad):
    spoilt = {
      name: getattr(inputs, name).at[0, 1].set(bad[i])
      for i, name in enumerate(names)
    }

    def loss(new):
      return algo.loss(inputs.replace(**{**spoilt, "logprobs": new}))[0]

    return jax.value_and_grad(loss)(spoilt["logprobs"])

  fine = jnp.full(len(names), -1.0)
  value, grad = of(fine)
  for garbage in (-200.0, -np.inf, np.nan, np.inf, 1e30):
    each = [fine.at[i].set(garbage) for i in range(len(names))]
    for bad in [*each, jnp.full(len(names), garbage)]:
      found, slope = of(bad)
      assert found == value
      assert np.array_equal(slope, grad) and slope[0, 1] == 0
  np.testing.assert_allclose(value, expected, atol=1e-6)
  np.testing.assert_allclose(grad[0, :2], [-1, 0], atol=1e-6)


def test_a_region_alone_bears_garbage_too():
  inputs = small.inputs([-1.0, np.nan], mask=[1, 0], advantages=[1.0, np.nan])
  for region, _ in _REGIONS:
    for level in ("token", "sequence", "sequence_token"):
      found = region.losses(losses.log_ratio(inputs, level), inputs)
      assert np.all(np.isfinite(found)) and not found[0][0, 1]


def test_the_dual_clip_bounds_the_loss_of_bad_tokens():
  new = jnp.log(jnp.array([5.0, 2.0, 5.0]))
  value, gradient, shown = small.of(
    small.plain(region=losses.Clip(dual=3.0)),
    new,
    old_logprobs=0.0,
    advantages=[-1.0, -1.0, 1.0],
  )
  np.testing.assert_allclose(value, (3 + 2 - 1.2) / 3, atol=1e-6)
  np.testing.assert_allclose(gradient, [[0, 2 / 3, 0]], atol=1e-6)
  np.testing.assert_allclose(shown["loss/clip_fraction"], [[1, 0, 1]])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
  new = jnp.log(jnp.array([0.5, 8.0, 8.0]))
  value, gradient, shown = small.of(
    small.plain(region=cispo.objective().region),
    new,
    old_logprobs=0.0,
    advantages=[1.0, 1.0, 0.0],
  )
  weights = np.array([0.5, 5.0, 0.0])
  np.testing.assert_allclose(gradient[0], -weights / 3, atol=1e-6)
  np.testing.assert_allclose(value, -(weights * new).sum() / 3, atol=1e-5)
  np.testing.assert_allclose(shown["loss/clip_fraction"], [[0, 1, 0]])


def test_sapo_has_gradient_1_at_ratio_1_and_less_on_both_sides():
  algo = small.plain(region=sapo.objective().region)

  def pull(ratio, advantage):
    new = jnp.log(jnp.array([ratio]))
    gradient = small.of(algo, new, old_logprobs=0.0, advantages=advantage)[1]
    return float(gradient[0, 0]) / ratio  # by the ratio, not its logarithm

  for advantage in (2.0, -2.0):
    np.testing.assert_allclose(pull(1.0, advantage), -advantage, atol=1e-6)
    assert abs(pull(0.5, advantage)) < abs(advantage)
    assert abs(pull(2.0, advantage)) < abs(advantage)
  # 4 sigmoid(tau)(1 - sigmoid(tau)) with tau 1, and 1.05.
  np.testing.assert_allclose(pull(2.0, 1.0), -0.786448, atol=1e-5)
  np.testing.assert_allclose(pull(2.0, -1.0), 0.768110, atol=1e-5)


def test_dppo_leaves_out_tokens_that_moved_too_far():
  new = jnp.log(jnp.array([0.5, 0.5, 0.5, 0.5, 0.5]))
  sampler = jnp.log(jnp.array([0.2, 0.2, 0.9, 0.9, 0.9]))
  advantages = [1.0, -1.0, 1.0, -1.0, 0.0]
  value, gradient, shown = small.of(
    small.plain(region=losses.Dppo(0.2, 0.2), proximal="sampler"),
    new,
    sampler_logprobs=sampler,
    advantages=advantages,
  )
  expected = np.array([0, 2.5, -0.5 / 0.9, 0, 0]) / 5
  np.testing.assert_allclose(gradient[0], expected, atol=1e-6)
  np.testing.assert_allclose(value, expected.sum(), atol=1e-6)
  np.testing.assert_allclose(shown["loss/clip_fraction"], [[1, 0, 0, 1, 0]])


def test_gspo_is_the_formula_of_its_sequences():
  new = jnp.array([[-1.0, -2.0, -0.5], [-1.0, -1.5, 7.0]])
  old = jnp.array([[-1.1, -2.2, -0.5], [-1.2, -1.4, 9.0]])
  mask = jnp.array([[1, 1, 1], [1, 1, 0.0]])
  advantages = np.array([[-1.0], [2.0]])
  wide = losses.Clip(0.2, 0.2)
  given = {"old_logprobs": old, "mask": mask}
  given["advantages"] = advantages
  found = {
    ratio: small.of(
      small.plain(region=wide, ratio=ratio),
      new,
      reducer=reducers.SequenceMean(),
      **given,
    )
    for ratio in ("sequence", "sequence_token")
  }
  s = np.exp([0.3 / 3, 0.1 / 2])
  expected = np.mean(-advantages[:, 0] * s)
  by_row = -advantages[:, 0] * s / np.array([3, 2]) / 2
  for value, gradient, _ in found.values():
    np.testing.assert_allclose(value, expected, atol=1e-6)
    # Of equal advantages GSPO-token has the gradient of GSPO.
    np.testing.assert_allclose(gradient, by_row[:, None] * mask, atol=1e-6)
  assert gspo.objective().ratio == "sequence"
  # Its own band is so narrow that both sequences are beyond it.
  value, gradient, shown = small.of(gspo.objective(), new, **given)
  assert np.array_equal(shown["loss/clip_fraction"][1], [1, 1, 0])
  assert not gradient[1].any() and gradient[0].all()


# ---------------------------------------------------------------- corrections


_SAMPLER = [-1.2, -2.0, -2.5]
_TOKEN = [1.221403, 4.481689, 0.606531]


def test_c26_truncated_weights_scale_loss_and_gradient():
  old = jnp.array([-1.0, -0.5, -3.0])
  sampler = jnp.array([-1.2, -2.0, -2.5])
  given = {"old_logprobs": old, "sampler_logprobs": sampler}
  value, gradient, shown = small.of(grpo.objective(), old, **given)
  np.testing.assert_allclose(value, -1.275978, atol=1e-5)
  weights = np.array([1.221403, 2.0, 0.606531])
  np.testing.assert_allclose(gradient[0], -weights / 3, atol=1e-5)
  np.testing.assert_allclose(
    shown["loss/importance_mean"][0], weights, atol=1e-5
  )
  squared = shown["loss/importance_squared"][0]
  np.testing.assert_allclose(squared, weights**2, atol=1e-5)
  assert np.array_equal(shown["loss/importance_capped"], [[0, 1, 0]])
  made = small.inputs(old, **given)
  raw, _ = corrections.Importance(high=1e9).weights(made)
  np.testing.assert_allclose(raw[0, :3], _TOKEN, atol=1e-5)


@pytest.mark.parametrize("filler", [0.0, 1.0, -200.0, np.nan])
def test_c29_fillers_of_untrained_tokens_are_not_in_the_weights(filler):
  given = {
    "old_logprobs": [-1.0, -1.5, -7.0],
    "sampler_logprobs": [-1.2, -1.0, filler],
    "mask": [1, 1, 0],
  }
  value, gradient, shown = small.of(
    grpo.objective(), [-1.0, -1.5, -7.0], **given
  )
  found = np.asarray(shown["loss/importance_mean"])[0]
  np.testing.assert_allclose(found[:2].mean(), 0.913967, atol=1e-6)
  np.testing.assert_allclose(value, -0.913967, atol=1e-6)
  assert found[2] == 0 and gradient[0, 2] == 0


_PRODUCT, _GEOMETRIC = 3.320117, 1.491825


@pytest.mark.parametrize(
  ("level", "action", "bounds", "expected"),
  [
    ("token", "truncate", (0.9, 2.0), [1.221403, 2.0, 0.9]),
    ("token", "mask", (0.9, 2.0), [1.221403, 0, 0]),
    ("token", "reject", (0.9, 2.0), [1, 0, 0]),
    ("sequence", "truncate", (0.0, 9.0), [_PRODUCT] * 3),
    ("sequence", "truncate", (0.0, 2.0), [2.0] * 3),
    ("sequence", "mask", (0.0, 9.0), [_PRODUCT] * 3),
    ("sequence", "reject", (0.0, 3.0), [0] * 3),
    ("geometric", "truncate", (0.0, 2.0), [_GEOMETRIC] * 3),
    ("geometric", "reject", (0.5, 2.0), [1] * 3),
    ("geometric", "reject", (0.999, 1.001), [0] * 3),
  ],
)
def test_importance_weights_by_level_and_action(
  level, action, bounds, expected
):
  low, high = bounds
  inputs = small.inputs(
    [-1.0, -0.5, -3.0, -9.0],
    sampler_logprobs=[*_SAMPLER, 5.0],
    mask=[1, 1, 1, 0],
  )
  made = corrections.Importance(level, action, low=low, high=high)
  found, changed = made.weights(inputs)
  np.testing.assert_allclose(found[0, :4], [*expected, 0], atol=1e-5)
  raw = {
    "token": _TOKEN,
    "sequence": [_PRODUCT] * 3,
    "geometric": [_GEOMETRIC] * 3,
  }[level]
  outside = [float(not low <= w <= high) for w in raw]
  np.testing.assert_array_equal(changed[0, :4], [*outside, 0])


def test_a_sequence_weight_does_not_leave_its_segment_of_the_row():
  inputs = small.inputs(
    [-1.0, -0.5, -3.0],
    sampler_logprobs=_SAMPLER,
    segment_ids=[1, 1, 2],
  )
  made = corrections.Importance("sequence", high=9.0)
  expected = [_TOKEN[0] * _TOKEN[1]] * 2 + [_TOKEN[2]]
  found = made.weights(inputs)[0][0, :3]
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_off_policy_mask_drops_bad_sequences_that_became_unlikely():
  inputs = small.inputs(
    [[-2.0, -1.0, 0.0], [-2.0, -1.0, 0.0], [-0.9, -1.0, 9.0]],
    sampler_logprobs=[[-1.0, -1.0, 9.0]] * 3,
    advantages=np.array([[-1.0], [1.0], [-1.0]]),
    mask=[[1, 1, 0]] * 3,
  )
  found, dropped = corrections.OffPolicyMask().weights(inputs)
  found, dropped = found[:3, :3], dropped[:3, :3]
  np.testing.assert_array_equal(found, [[0, 0, 0], [1, 1, 0], [1, 1, 0]])
  np.testing.assert_array_equal(dropped, [[1, 1, 0], [0, 0, 0], [0, 0, 0]])
  # The fall of the first is 0.5 nats a token.
  kept, _ = corrections.OffPolicyMask(0.6).weights(inputs)
  np.testing.assert_array_equal(kept[0, :3], [1, 1, 0])


def test_filters_multiply():
  sampler = jnp.array(_SAMPLER)
  objective = objectives.Objective(
    filters=(corrections.Importance("token", "reject", low=0.7, high=9.0),)
  )
  shown = small.of(objective, [-1.0, -0.5, -3.0], sampler_logprobs=sampler)[2]
  found = shown["loss/importance_mean"][0]
  np.testing.assert_allclose(found, [1.221403, 2.0, 0], atol=1e-5)
  assert np.array_equal(shown["loss/importance_capped"], [[0, 1, 1]])


@pytest.mark.parametrize(("lag", "share"), [(0, 0), (1, 1 / 2), (3, 3 / 4)])
def test_the_loglinear_proximal_policy_weighs_by_lag(lag, share):
  new, sampler = jnp.array([-1.0]), jnp.array([-1.8])
  objective = objectives.Objective(
    proximal="loglinear",
    region=losses.Clip(0.9, 9.0),
    correction=corrections.Importance(high=9.0),
  )
  value, gradient, shown = small.of(
    objective, new, sampler_logprobs=sampler, old_logprobs=np.nan, lag=lag
  )
  weight = np.exp(share * 0.8)
  np.testing.assert_allclose(shown["loss/importance_mean"], weight, atol=1e-5)
  # Together they are the whole ratio, in value; the gradient sees its own part.
  np.testing.assert_allclose(value, -np.exp(0.8), atol=1e-5)
  np.testing.assert_allclose(gradient, -np.exp(0.8), atol=1e-5)


def test_with_the_sampler_as_the_proximal_policy_the_old_one_is_not_read():
  value, _, _ = small.of(
    small.plain(proximal="sampler", region=losses.Clip(0.9, 9.0)),
    [-1.0],
    sampler_logprobs=[-1.8],
    old_logprobs=np.nan,
  )
  np.testing.assert_allclose(value, -np.exp(0.8), atol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_c26_no_gradient_goes_through_a_weight(level):
  made = small.inputs([-1.0, -0.5], sampler_logprobs=[-1.2, -1.0])

  def total(new):
    inputs = made.replace(logprobs=new, old_logprobs=new)
    weights, _ = corrections.Importance(level, high=9.0).weights(inputs)
    dropped, _ = corrections.OffPolicyMask().weights(inputs)
    return weights.sum() + dropped.sum()

  assert not jax.grad(total)(made.logprobs).any()


def test_c20_a_loss_of_ones_own_sees_0_off_the_mask():
  def own(log_ratio, inputs):
    return -inputs.advantages * jnp.exp(log_ratio + inputs.sampler_logprobs)

  given = {"mask": [1, 0], "advantages": [1.0, np.nan]}
  given |= {"sampler_logprobs": [0.0, np.inf], "old_logprobs": [-1.0, np.nan]}
  algo = small.plain(region=own, ratio="sequence")
  value, gradient, _ = small.of(algo, [-1.0, np.nan], **given)
  np.testing.assert_allclose(value, -1.0)
  np.testing.assert_allclose(gradient, [[-1.0, 0.0]])


def test_c07_a_group_without_signal_is_drawn_to_the_reference_or_not():
  """One token of advantage 0, by its loss and by its place in the mask."""
  algo = objectives.Objective(kl=divergence.Kl(0.1))
  for mask, loss, slope in ((1.0, 0.001873, 0.018127), (0.0, 0.0, 0.0)):
    value, gradient, _ = small.of(
      algo, [-1.0], reference_logprobs=[-1.2], advantages=0.0, mask=[mask]
    )
    np.testing.assert_allclose(value, loss, atol=1e-6)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)
