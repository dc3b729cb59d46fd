"""Baselines, reducers and penalties against hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.algos import (
  baselines,
  distill,
  divergence,
  dpo,
  grpo,
  losses,
  maxrl,
  reducers,
  rloo,
  sft,
)
from jaxrl_post.algos import objective as objectives
from jaxrl_post.training import diagnostics
from tests.reference import objectives as reference
from tests.unit import objective_inputs as small


def _row(x):
  return jnp.asarray(x, jnp.float32)[None]


def _advantages(groups, **options):
  rewards = jnp.array([r for g in groups for r in g], jnp.float32)
  ids = jnp.array([i for i, g in enumerate(groups) for _ in g])
  return np.asarray(baselines.group_advantages(rewards, ids, **options))


def _scored(rewards, **given):
  """Lays two tokens of each sequence in a row; there are always four rows."""
  more = 4 - len(rewards)
  mask = np.pad(np.ones((len(rewards), 2), np.float32), ((0, more), (0, 0)))
  fields = {
    "loss_mask": mask,
    "turn_rewards": 0 * mask,
    "penalty": 0 * mask,
    "old_logprobs": -mask,
    "reference_logprobs": -mask,
  }
  for name, x in given.items():
    fields[name] = np.pad(x, ((0, more), (0, 0)), constant_values=np.nan)
  rewards = np.pad(rewards, (0, more), constant_values=np.nan)
  rows = np.arange(4, dtype=np.int32)
  return types.AdvantageInputs(
    rewards=jnp.asarray(rewards, jnp.float32),
    group_ids=jnp.zeros(4, jnp.int32),
    rollout_ids=jnp.arange(4),
    sequence=jnp.asarray(np.where(mask > 0, rows[:, None], 4)),
    segment_ids=jnp.ones((4, 2), jnp.int32),
    **{name: jnp.asarray(x, jnp.float32) for name, x in fields.items()},
  )


# ------------------------------------------------------------------ baselines


@pytest.mark.parametrize(
  "rewards", [[1.0] * 4, [0.0] * 4, [0.9] * 10, [0.35] * 8, [136.7] * 3]
)
@pytest.mark.parametrize("jit", [False, True])
def test_c01_equal_rewards_carry_no_signal(rewards, jit):
  fn = baselines.group_advantages
  fn = jax.jit(fn) if jit else fn
  ids = jnp.zeros(len(rewards), jnp.int32)
  found = fn(jnp.array(rewards, jnp.float32), ids)
  assert np.array_equal(found, np.zeros(len(rewards)))


def test_c01_loss_and_gradient_of_equal_rewards_are_zero():
  scored = grpo.objective().advantages(_scored([0.9, 0.9]))
  old, sampler = jnp.full((2, 2), -2.0), jnp.full((2, 2), -1.5)
  value, gradient, _ = small.of(
    grpo.objective(),
    jnp.full((2, 2), -1.0),
    old_logprobs=old,
    sampler_logprobs=sampler,
    advantages=scored[:2],
  )
  assert value == 0
  assert not gradient.any()


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
  alone = _advantages([[0.7], [1.0, 0.0]], scale="none", leave_one_out=True)
  np.testing.assert_allclose(alone, [0, 1, -1], atol=1e-6)


@pytest.mark.parametrize("missing", [np.nan, np.inf, -np.inf])
def test_c84_a_missing_reward_is_left_out_of_the_statistics(missing):
  found = _advantages([[1.0, missing, 0.0, 1.0]])
  expected = [0.577350, 0.0, -1.154701, 0.577350]
  np.testing.assert_allclose(found, expected, atol=2e-4)
  inputs = _scored([1.0, missing, 0.0])
  for baseline in (baselines.Batch(), baselines.Batch(whiten=False)):
    assert np.array_equal(baseline.advantages(inputs)[1], [0, 0])


def test_c91_two_draws_of_one_prompt_are_two_groups():
  assert np.array_equal(_advantages([[1.0, 1.0], [0.0, 0.0]]), np.zeros(4))


def test_c44_row_order_carries_no_meaning():
  rewards = jnp.array([1, 0, 0.5, 0.25, 3, 2, 2, 7], jnp.float32)
  ids = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])
  order = np.random.default_rng(0).permutation(8)
  plain = baselines.group_advantages(rewards, ids)
  mixed = baselines.group_advantages(rewards[order], ids[order])
  np.testing.assert_allclose(mixed, np.asarray(plain)[order], atol=1e-6)


def test_rloo_compares_with_the_mean_of_the_others():
  found = rloo.objective().advantages(_scored([1.0, 0.0, 0.5]))
  np.testing.assert_allclose(found[:3, 0], [0.75, -0.75, 0], atol=1e-6)


def test_maxrl_divides_by_the_mean():
  found = maxrl.objective().advantages(_scored([1.0, 0.0, 0.0, 0.0]))
  np.testing.assert_allclose(found[:, 1], [3, -1, -1, -1], atol=1e-4)


def test_whitening_over_the_batch_has_mean_0_and_deviation_1():
  found = baselines.Batch().advantages(_scored([1.0, 2.0, 3.0]))
  np.testing.assert_allclose(found[:3, 0], [-1, 0, 1], atol=1e-5)
  rewards = baselines.Batch(whiten=False).advantages(_scored([1.0, 2.0, 3.0]))
  np.testing.assert_allclose(rewards[:3, 0], [1, 2, 3])


def test_turn_rewards_and_penalties_count_for_the_sequence():
  turns = np.array([[0.5, 0.0], [0.0, 0.0]])
  inputs = _scored([0.0, 1.0], turn_rewards=turns, penalty=turns / 5)
  found = baselines.Group(scale="none").advantages(inputs)
  np.testing.assert_allclose(found[:2, 0], [-0.3, 0.3], atol=1e-6)


# Two sequences in a row; the first has two tokens of a tool in its middle.
_MASK = [0, 1, 1, 0, 0, 1, 0, 1, 1, 0]
_IDS = [1, 1, 1, 1, 1, 1, 2, 2, 2, 0]
_OWN = [[1, 2, 5], [7, 8]]


def _one_row(rewards, **given):
  zeros = jnp.zeros((1, 10))
  row = {name: _row(x) for name, x in given.items()}
  ids = jnp.asarray(_IDS)[None]
  fields = {"turn_rewards": zeros, "penalty": zeros, "old_logprobs": zeros}
  return types.AdvantageInputs(
    rewards=jnp.asarray(rewards, jnp.float32),
    group_ids=jnp.zeros(2, jnp.int32),
    rollout_ids=jnp.arange(2),
    sequence=jnp.where(ids > 0, ids - 1, 2),
    segment_ids=ids,
    loss_mask=_row(_MASK),
    **{**fields, **row},
  )


@pytest.mark.parametrize(("gamma", "decay"), [(1, 0.95), (0.9, 0.8), (1, 0)])
def test_generalised_advantages_agree_with_the_double_sum(gamma, decay):
  values = np.random.default_rng(0).normal(size=10)
  values[np.array(_MASK) == 0] = np.nan
  turns = np.zeros(10)
  turns[1] = 0.25
  inputs = _one_row([1.0, -2.0], values=values, turn_rewards=turns)
  critic = baselines.Critic(gamma, decay, whiten=False)
  found = critic.advantages(inputs)[0]
  for own, rewards in zip(_OWN, ([0.25, 0, 1.0], [0, -2.0]), strict=True):
    expected = reference.gae(rewards, values[own], gamma=gamma, decay=decay)
    np.testing.assert_allclose(found[np.array(own)], expected, atol=1e-5)
  assert np.all(found[np.array(_MASK) == 0] == 0)
  white = baselines.Critic(gamma, decay).advantages(inputs)[0]
  trained = np.asarray(white)[np.array(_MASK) == 1]
  np.testing.assert_allclose(trained.mean(), 0, atol=1e-5)
  np.testing.assert_allclose(trained.std(ddof=1), 1, atol=1e-4)


def test_a_critic_is_scored_by_the_worse_of_two_squares():
  values = jnp.array([[1.0, 3.0, jnp.nan]])
  old, returns = jnp.array([[1.0, 1.0, 0.0]]), jnp.array([[0.0, 4.0, 0.0]])
  mask = jnp.array([[1.0, 1.0, 0.0]])
  loss, clipped = losses.value_losses(values, old, returns, mask, clip=0.5)
  np.testing.assert_allclose(loss, [[0.5, 0.5 * 2.5**2, 0]])
  np.testing.assert_allclose(clipped, [[0, 1, 0]])
  free, never = losses.value_losses(values, old, returns, mask, clip=None)
  np.testing.assert_allclose(free, [[0.5, 0.5, 0]])
  assert not never.any()


def test_reinforce_pp_returns_follow_with_kl_in_the_reward():
  kl = divergence.Kl(0.5, estimator="k1", place="reward")
  old = [9, -1, -2, 9, 9, -1, 9, -2, -1, 9]
  known = [5, -1.2, -1.5, 5, 5, -1, 5, -2, -3, 5]
  inputs = _one_row([1.0, 2.0], old_logprobs=old, reference_logprobs=known)
  # Penalties 0.1, -0.25, 0; and 0, 1.
  returns = np.array([1.15, 1.25, 1.0, 1.0, 1.0])
  objective = objectives.Objective(baseline=baselines.Returns(), kl=kl)
  expected = (returns - returns.mean()) / returns.std(ddof=1)
  found = np.asarray(objective.advantages(inputs))[0]
  np.testing.assert_allclose(found[sum(_OWN, [])], expected, atol=1e-4)
  assert np.all(found[np.array(_MASK) == 0] == 0)


def test_reinforce_pp_baseline_takes_the_mean_of_the_group_first():
  found = baselines.Returns(group=True).advantages(_one_row([1.0, 2.0]))[0]
  returns = np.array([-0.5, -0.5, -0.5, 0.5, 0.5])
  expected = (returns - returns.mean()) / returns.std(ddof=1)
  np.testing.assert_allclose(
    found[np.array(sum(_OWN, []))], expected, atol=1e-5
  )


def test_discounted_sums_skip_tokens_of_tools():
  rewards = jnp.arange(1.0, 11.0)[None]
  ids = jnp.asarray(_IDS)[None]
  found = baselines.discounted(rewards, _row(_MASK), ids, decay=0.5)[0]
  np.testing.assert_allclose(found[jnp.array([1, 2, 5])], [5, 6, 6])
  np.testing.assert_allclose(found[jnp.array([7, 8])], [12.5, 9])
  endless = rewards.at[0, 8].set(jnp.inf)
  apart = baselines.discounted(endless, _row(_MASK), ids, decay=0.5)[0]
  np.testing.assert_array_equal(apart[:6], found[:6])


def test_distillation_scores_by_the_log_ratio_to_the_teacher():
  known = np.array([[-1.5, -0.5], [-1.0, -1.0]])
  inputs = _scored([1.0, 0.0], reference_logprobs=known)
  found = distill.objective().advantages(inputs)
  np.testing.assert_allclose(found[:2], [[-0.5, 0.5], [0, 0]], atol=1e-6)
  mixed = distill.objective(0.5).advantages(inputs)
  more = 0.5 * 0.707107
  np.testing.assert_allclose(mixed[1], [-more, -more], atol=1e-4)


def test_the_gradient_of_dpo_is_that_of_its_loss():
  rng = np.random.default_rng(0)
  new, known = (jnp.asarray(rng.normal(-1, 0.5, (4, 3))) for _ in range(2))
  new, known = new.astype(jnp.float32), known.astype(jnp.float32)
  mask = jnp.array([[1, 1, 0], [1, 1, 1], [1, 0, 1], [1, 0, 0.0]])
  beta = 0.3

  def direct(new):
    moved = jnp.sum((new - known) * mask, axis=1)
    apart = jnp.stack([moved[0] - moved[1], moved[3] - moved[2]])
    return -jnp.mean(jax.nn.log_sigmoid(beta * apart))

  algo = dpo.objective(beta)
  scored = algo.advantages(
    types.AdvantageInputs(
      rewards=jnp.array([1.0, 0.0, -1.0, 0.5]),
      group_ids=jnp.array([0, 0, 1, 1]),
      rollout_ids=jnp.arange(4),
      sequence=jnp.broadcast_to(jnp.arange(4)[:, None], (4, 3)),
      segment_ids=jnp.ones((4, 3), jnp.int32),
      loss_mask=mask,
      turn_rewards=jnp.zeros((4, 3)),
      penalty=jnp.zeros((4, 3)),
      old_logprobs=new,
      reference_logprobs=known,
    )
  )
  found = small.of(
    algo, new, mask=mask, advantages=scored, reducer=algo.reducer
  )[1]
  np.testing.assert_allclose(found, jax.grad(direct)(new), atol=1e-6)


@pytest.mark.parametrize(
  "rewards", [[1.0, 1.0], [1.0, np.nan], [1.0, 0.0, 0.5], [1.0]]
)
def test_dpo_needs_two_rollouts_with_different_rewards(rewards):
  found = dpo.objective().advantages(_scored(rewards))
  assert np.all(found == 0)


def test_supervised_tuning_is_the_negative_log_likelihood():
  algo = sft.objective()
  scored = algo.advantages(_scored([1.0, 1.0]))[:2]
  value, gradient, _ = small.of(
    algo, [[-1.0, -2.0], [-3.0, -2.0]], advantages=scored
  )
  assert value == 2.0
  np.testing.assert_allclose(gradient, np.full((2, 2), -0.25))


# ------------------------------------------------------------------- reducers

_TABLE = [[1.0, 2.0, 9.0, 9.0], [0.5, 0.5, 1.5, 2.5]]
_TABLE_MASK = [[1, 1, 0, 0], [1, 1, 1, 1]]
_FOUR = [
  (reducers.TokenMean(), 1.333333),
  (reducers.SequenceMean(), 1.375),
  (reducers.SequenceSum(), 4.0),
  (reducers.Constant(8), 0.5),
]


def _own(log_ratio, inputs):
  return inputs.advantages + 0 * log_ratio


def _reduced(reducer, table, mask):
  inputs = small.inputs(table, advantages=table, mask=mask, reducer=reducer)
  return small.plain(region=_own).loss(inputs)[0]


@pytest.mark.parametrize(("reducer", "expected"), _FOUR)
@pytest.mark.parametrize("pad", [0, 2])
def test_c09_four_ways_to_aggregate(reducer, expected, pad):
  table, mask = (np.pad(x, ((0, 0), (0, pad))) for x in (_TABLE, _TABLE_MASK))
  found = _reduced(reducer, table, mask)
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_c11_cutting_into_microbatches_changes_nothing(size):
  new = -np.arange(36.0).reshape(6, 6) / 36
  mask = np.tril(np.ones((6, 6)))
  whole = small.inputs(new, mask=mask, old_logprobs=2 * new)
  algo, ids = grpo.objective(), jnp.arange(6)
  sequence = jnp.broadcast_to(ids[:, None], mask.shape)
  shares = jnp.stack(
    [r.shares(reducers.count(whole.loss_mask, sequence, ids)) for r, _ in _FOUR]
  )

  @jax.jit
  def of(begin):
    def loss(new, shares):
      rows = whole.replace(logprobs=new, shares=shares)
      part = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, begin, size) if x.ndim else x,
        rows,
      )
      return algo.loss(part)[0]

    every = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))
    return every(whole.logprobs, shares)

  def loss(new, shares):
    return algo.loss(whole.replace(logprobs=new, shares=shares))[0]

  every = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))
  expected, slopes = every(whole.logprobs, shares)
  parts = [of(n) for n in range(0, 6, size)]
  found = sum(part[0] for part in parts)
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  total = sum(part[1] for part in parts)
  np.testing.assert_allclose(total, slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("reducer", [r for r, _ in _FOUR])
def test_c13_without_trained_tokens_nothing_is_nan(reducer):
  nothing = np.zeros((2, 4))
  assert _reduced(reducer, _TABLE, nothing) == 0
  value, gradient, shown = small.of(
    grpo.objective(), _TABLE, mask=nothing, reducer=reducer, advantages=np.nan
  )
  assert value == 0 and not gradient.any()
  assert not any(np.asarray(x).any() for x in shown.values())
  # Rows of nothing leave the others as they are.
  more = [*_TABLE, *np.full((2, 4), np.nan)]
  found = _reduced(reducer, more, [*_TABLE_MASK, *nothing])
  assert found == _reduced(reducer, _TABLE, _TABLE_MASK)


@pytest.mark.parametrize(
  ("reducer", "expected"),
  [
    (reducers.TokenMean(), 0.5),
    (reducers.SequenceMean(), 0.0),
    (reducers.Constant(4), 0.25),
  ],
)
def test_c15_unequal_lengths_at_ratio_one(reducer, expected):
  table = [[-1.0, 0, 0], [1.0, 1.0, 1.0]]
  mask = [[1, 0, 0], [1, 1, 1]]
  found = _reduced(reducer, table, mask)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_two_sequences_of_one_rollout_count_once():
  mask = jnp.array([[1.0, 1, 0], [1, 1, 1]])
  sequence = jnp.array([[0, 1, 3], [2, 2, 2]])
  rollouts = jnp.array([0, 0, 2])
  mean = reducers.SequenceMean().shares(
    reducers.count(mask, sequence, rollouts)
  )
  expected = [[1 / 4, 1 / 4, 0], [1 / 6, 1 / 6, 1 / 6]]
  np.testing.assert_allclose(mean, expected, atol=1e-6)
  total = reducers.SequenceSum().shares(
    reducers.count(mask, sequence, rollouts)
  )
  np.testing.assert_allclose(total, mask / 2)
  constant = reducers.Constant(5).shares(
    reducers.count(mask, sequence, rollouts)
  )
  np.testing.assert_allclose(constant, mask / 10)


def test_c39_tokens_of_a_tool_are_not_in_the_mean():
  table, mask = [[1.0, 9, 9, 2]], [[1, 0, 0, 1]]
  for reducer in (reducers.TokenMean(), reducers.SequenceMean()):
    np.testing.assert_allclose(_reduced(reducer, table, mask), 1.5, atol=1e-6)
  objective = objectives.Objective(kl=divergence.Kl(0.1), entropy=0.1)
  shown = small.of(
    objective,
    table,
    mask=mask,
    old_logprobs=[0, 0, 0, 9],
    entropy=[1, 1, 1, 1],
  )[2]
  for name, x in shown.items():
    assert not np.asarray(x)[0, 1:3].any(), name
  np.testing.assert_allclose(shown["loss/entropy"], mask)


# ----------------------------------------------------------------- divergence


_KL = {
  "k1": ([0.2, -0.5, 0], -0.1),
  "k2": ([0.02, 0.125, 0], 0.048333),
  "k3": ([0.018731, 0.148721, 0], 0.055817),
}


@pytest.mark.parametrize("estimator", list(_KL))
def test_c22_three_estimates_on_three_tokens(estimator):
  each, mean = _KL[estimator]
  logprobs, known = [-1.0, -2.0, -0.5], [-1.2, -1.5, -0.5]
  pair, mask = (_row(logprobs), _row(known)), jnp.ones((1, 3))
  found = divergence.estimate(*pair, mask, estimator=estimator)
  np.testing.assert_allclose(found[0], each, atol=1e-6)
  np.testing.assert_allclose(found.mean(), mean, atol=1e-6)
  if estimator == "k3":
    swapped = divergence.estimate(*pair[::-1], mask, estimator="k3")
    np.testing.assert_allclose(swapped.mean(), 0.042644, atol=1e-6)
    two = mask.at[0, 2].set(0)
    found = divergence.estimate(*pair, two, estimator="k3")
    np.testing.assert_allclose(found.sum() / 2, 0.083726, atol=1e-6)


@pytest.mark.parametrize("estimator", list(_KL))
def test_the_unbiased_gradient_is_that_of_k2(estimator):
  logprobs, known = _row([-1.0, -2.0]), _row([-1.2, -1.5])

  def total(new, **words):
    return divergence.estimate(new, known, jnp.ones((1, 2)), **words).sum()

  unbiased = {"estimator": estimator, "gradient": "unbiased"}
  value, slope = jax.value_and_grad(total)(logprobs, **unbiased)
  np.testing.assert_allclose(slope, [[0.2, -0.5]], atol=1e-6)
  own = total(logprobs, estimator=estimator)
  np.testing.assert_allclose(value, own, atol=1e-6)


def test_c25_kl_is_the_mean_over_tokens_and_0_at_the_reference():
  objective = objectives.Objective(kl=divergence.Kl(0.1, estimator="k1"))
  new = np.full((4, 2), -1.0)
  mask = np.array([[1, 1], [0, 0], [1, 1], [0, 0]])
  whole = small.inputs(new, mask=mask, reference_logprobs=-2.0)
  shown = 0.0
  for row in range(4):
    part = jax.tree.map(lambda x, n=row: x[n : n + 1] if x.ndim else x, whole)
    found, pulls = objective.loss(part)[1], jnp.zeros_like(part.logprobs)
    shown += diagnostics.of_tokens(part, found, pulls)["loss/kl"]
  np.testing.assert_allclose(shown, 1.0, atol=1e-6)
  for estimator in _KL:
    kl = divergence.Kl(0.1, estimator=estimator)
    same = small.inputs(new, reference_logprobs=new)
    assert not kl.estimate(same).any()


def test_an_entropy_bonus_lowers_the_loss_by_the_mean_entropy():
  given = {"entropy": [1.0, 3.0, np.nan], "mask": [1, 1, 0]}
  plain, bonus = (
    small.of(small.plain(entropy=factor), [-1.0, -1.0, -1.0], **given)[0]
    for factor in (0.0, 0.5)
  )
  np.testing.assert_allclose(plain - bonus, 1.0, atol=1e-6)
