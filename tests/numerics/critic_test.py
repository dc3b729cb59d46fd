"""The critic against a slow one, and what may not change it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import types
from jaxrl_post.algos import baselines, divergence, grpo, reinforce_pp, sft
from jaxrl_post.algos import objective as objectives
from jaxrl_post.models import transformer
from jaxrl_post.training import critic as critics
from jaxrl_post.training import step
from tests.numerics import critics as making
from tests.reference import critics as reference

_MODELS = pytest.mark.parametrize("model", ["own", "head"])


def _close(a, b, atol):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def _equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def _gradients(state):
  """Returns those of the policy and of the critic, after a first update."""
  moments = state.opt_state, state.critic.opt_state
  return [
    jax.tree.map(lambda x: 10.0 * x, optax.tree.get(m, "mu")) for m in moments
  ]


# ------------------------------------------ one sequence after the other, alone


def _sequences():
  """Returns tokens, places that train, and the reward of each sequence."""
  found = []
  for group in making.groups():
    for rollout in group.rollouts:
      prompt, made = rollout.prompt.tokens, rollout.completion
      places = [len(prompt) + i for i, v in enumerate(made.versions) if v >= 0]
      found.append((np.array([*prompt, *made.tokens]), places, rollout.reward))
  return found


def _hidden(trunk, tokens):
  order = jnp.arange(len(tokens))[None]
  found = transformer.forward(
    trunk, making.CONFIG, jnp.asarray(tokens, jnp.int32)[None], order
  )
  return found[0][0]


def _slow_values(trunk, head):
  return [
    reference.read(np.asarray(_hidden(trunk, tokens), float), head, places)
    for tokens, places, _ in _sequences()
  ]


def _slow_gradient(trunk, head, slopes):
  """Brings slopes by values back to the weights, each sequence by itself."""

  def values(trunk, head):
    return [
      _hidden(trunk, tokens)[jnp.asarray(places) - 1] @ head
      for tokens, places, _ in _sequences()
    ]

  _, back = jax.vjp(values, trunk, head)
  return back([jnp.asarray(row, jnp.float32) for row in slopes])


def _rows(x, batch):
  """Takes [B, T] apart into the trained tokens of sequences, in order."""
  x = np.asarray(x)
  return [x[making.trained(batch, n)].tolist() for n in range(making.NUM)]


def _trunk(state):
  own = dict(making.own(state))
  head = np.asarray(own.pop(making.HEAD), float)
  return (own or state.params), head


@_MODELS
def test_a_value_is_read_from_the_position_before_its_token(model):
  algo = making.algorithm(model)
  state, batch = making.start(algo), making.packed()
  assert int(batch.segment_ids.max()) > 1
  assert (np.asarray(batch.loss_mask)[:, 0] == 0).all()
  scored = making.steps(algo)[0](state.params, batch, critic=making.own(state))
  expected = _slow_values(*_trunk(state))
  assert min(map(len, expected)) == 1
  for got, want in zip(_rows(scored.values, batch), expected, strict=True):
    np.testing.assert_allclose(got, want, atol=1e-5)
  off = np.asarray(batch.loss_mask) == 0
  assert np.all(np.asarray(scored.values)[off] == 0)
  assert np.all(np.asarray(scored.returns)[off] == 0)


@pytest.mark.parametrize(("gamma", "decay"), [(1, 1), (1, 0.9), (0.9, 0.5)])
def test_returns_go_back_from_0_behind_the_end_and_over_tools(gamma, decay):
  algo = making.algorithm(gamma=gamma, decay=decay)
  state, batch = making.start(algo), making.packed()
  scored = making.steps(algo)[0](state.params, batch, critic=making.own(state))
  values = _rows(scored.values, batch)
  tooled = {len(r) for r in values}
  assert tooled == {1, 3, 5, 7, 9}  # Of 1, 3, 5, 7, 9 and 11 tokens.
  for got, advantages, own, (_, places, reward) in zip(
    _rows(scored.returns, batch),
    _rows(scored.advantages, batch),
    values,
    _sequences(),
    strict=True,
  ):
    rewards = [0.0] * (len(places) - 1) + [reward]
    want = reference.targets(rewards, own, gamma=gamma, decay=decay)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(
      advantages, np.array(want) - np.array(own), atol=1e-5
    )


@_MODELS
def test_value_loss_and_gradient_agree_with_the_slow_ones(model):
  algo = making.algorithm(model)
  state, batch = making.start(algo), making.packed()
  score, update = making.steps(algo)
  scored = score(state.params, batch, critic=making.own(state))
  # As if weights had moved since: some values are beyond the clip, either way.
  moved = np.random.default_rng(1).normal(0, 0.4, scored.values.shape)
  scored = dataclasses.replace(
    scored, values=scored.values + jnp.asarray(moved, jnp.float32)
  )
  after, metrics = update(state, scored)
  trunk, head = _trunk(state)
  slow = [
    reference.Scored(*row)
    for row in zip(
      _slow_values(trunk, head),
      _rows(scored.values, batch),
      _rows(scored.returns, batch),
      strict=True,
    )
  ]
  loss, slopes, clipped = reference.loss(slow, algo.critic.clip)
  np.testing.assert_allclose(metrics["loss/value"], loss, atol=1e-5)
  np.testing.assert_allclose(
    metrics["loss/value_clip_fraction"], clipped, atol=1e-6
  )
  assert 0 < clipped < 1
  by_trunk, by_head = _slow_gradient(trunk, head.astype(np.float32), slopes)
  policy, own = _gradients(after)
  np.testing.assert_allclose(own.pop(making.HEAD), by_head, atol=1e-5)
  if model == "own":
    _close(own, by_trunk, 1e-5)
    return
  # The policy's own gradient is what is left where none of the critic enters.
  apart = making.algorithm(model, coef=0.0)
  alone, _ = making.steps(apart)[1](state, scored)
  alone, own = _gradients(alone)
  np.testing.assert_allclose(own[making.HEAD], by_head, atol=1e-5)
  _close(policy, jax.tree.map(lambda a, b: a + 0.1 * b, alone, by_trunk), 1e-5)
  assert optax.tree.norm(by_trunk) > 0.01


def test_a_second_model_leaves_the_policy_its_gradient():
  """And a head without coef: both are those of the same advantages."""
  found = {}
  for model in ("own", "head"):
    algo = making.algorithm(model, **({"coef": 0.0} if model == "head" else {}))
    state = making.start(algo)
    _, after, _ = making.train(algo, making.packed(), state)
    found[model] = _gradients(after)[0]
  _close(found["own"], found["head"], 1e-6)


# ------------------------------------------------------------ what changes none


@_MODELS
def test_packing_changes_no_gradient_of_a_critic(model):
  algo = making.algorithm(model)
  batch = making.packed()
  one = making.train(algo, batch)
  two = making.train(algo, making.apart())
  assert one[2].keys() == two[2].keys()
  for key in one[2]:
    np.testing.assert_allclose(one[2][key], two[2][key], rtol=1e-4, atol=1e-5)
  _close(_gradients(one[1]), _gradients(two[1]), 1e-5)


@pytest.mark.parametrize(
  ("model", "microbatches"),
  [pytest.param("own", 8, marks=pytest.mark.slow), ("head", 2)],
)
def test_c11_microbatches_change_no_gradient_of_a_critic(model, microbatches):
  algo = making.algorithm(model)
  scored, one, m = making.train(algo, making.packed())
  batch = making.packed(microbatches=microbatches)
  cut, two, n = making.train(algo, batch, microbatches=microbatches)
  for key in m:
    np.testing.assert_allclose(m[key], n[key], rtol=1e-5, atol=1e-5)
  _close(_gradients(one), _gradients(two), 1e-5)
  for name in ("values", "returns"):
    _close(
      _rows(getattr(scored, name), making.packed()),
      _rows(getattr(cut, name), batch),
      1e-5,
    )


@pytest.mark.parametrize(
  "model", ["own", pytest.param("head", marks=pytest.mark.slow)]
)
def test_updates_of_a_batch_are_those_of_its_parts_one_by_one(model):
  algo = making.algorithm(model, clip=0.02)
  batch = making.packed(minibatches=2)
  scored, got, metrics = making.train(algo, batch, minibatches=2, epochs=2)
  one = jax.jit(
    functools.partial(
      step._update,
      decoder=making.DECODER,
      algo=algo,
      optimizer=making.policy_tx(),
      critic_optimizer=making.tx(algo),
      microbatches=1,
      is_old=True,
    )
  )
  state, found = making.start(algo), []
  for number in (0, 1, 0, 1):
    part = jax.tree.map(
      lambda x, k=number: x[k::2] if x.ndim == 2 else x, scored
    )
    state, values = one(state, part)
    found.append(values)
  _close(got.params, state.params, 1e-5)
  _close(got.critic, state.critic, 1e-5)
  clipped = [float(v["loss/value_clip_fraction"]) for v in found]
  assert clipped[0] == 0 < clipped[-1]  # Old values are those before them all.
  for name in ("loss/value", "loss/value_clip_fraction"):
    mean = np.mean([float(v[name]) for v in found])
    np.testing.assert_allclose(metrics[name], mean, atol=1e-6)


@_MODELS
def test_values_do_not_see_their_neighbours_in_a_row(model):
  algo = making.algorithm(model)
  batch, state = making.packed(), making.start(algo)
  follows = batch.prefix_ids != batch.segment_ids
  row = int(np.flatnonzero(follows.any(axis=1))[0])
  first = batch.sequence[row] == batch.sequence[row, follows[row].argmax()]
  other = dataclasses.replace(batch, tokens=batch.tokens.copy())
  other.tokens[row, first] = (other.tokens[row, first] + 1) % 64
  score = making.steps(algo)[0]
  found, changed = (
    np.asarray(score(state.params, x, critic=making.own(state)).values)[row]
    for x in (batch, other)
  )
  np.testing.assert_array_equal(found[~first], changed[~first])
  assert (found[first] != changed[first]).any()


@_MODELS
def test_sequences_without_a_reward_leave_no_trace_in_a_critic(model):
  algo = making.algorithm(model)
  rewards = (1.0, float("nan"), 0.5, 2.0, 0.0, -1.0)
  batch = making.packed(making.groups(rewards))
  other = dataclasses.replace(batch, tokens=batch.tokens.copy())
  other.tokens[batch.sequence == 1] = 9
  one, two = (making.train(algo, x) for x in (batch, other))
  _close(_gradients(one[1]), _gradients(two[1]), 1e-6)
  assert one[2]["loss/tokens"] == sum(map(len, _rows(batch.tokens, batch))) - 3
  assert np.all(np.asarray(one[0].values)[batch.sequence == 1] == 0)


def test_the_first_critic_is_the_policy_with_a_head_of_0():
  algo = making.algorithm()
  untied = dataclasses.replace(making.CONFIG, tie_embeddings=False)
  for config in (making.CONFIG, untied):
    params = making.making.params(config)
    state = critics.start(params, algo.critic, making.tx(algo))
    own = dict(state.params)
    np.testing.assert_array_equal(own.pop(making.HEAD), np.zeros(config.width))
    _equal(own, {k: x for k, x in params.items() if k != "head"})
  state = making.start(algo, seed=None)
  scored = making.steps(algo)[0](
    state.params, making.packed(), critic=making.own(state)
  )
  assert not np.any(scored.values)
  assert set(making.start(making.algorithm("head")).critic.params) == {
    making.HEAD
  }


# ------------------------------------------------------------------ identities


def test_without_values_a_token_is_worth_its_reward():
  """Lambda and gamma 1: what is left of PPO is REINFORCE, and REINFORCE++."""
  batch = jax.tree.map(jnp.asarray, making.packed())
  for whiten, plain in (
    (False, baselines.Batch(whiten=False)),
    (True, baselines.Returns()),
  ):
    algo = making.algorithm(whiten=whiten)
    state = making.start(algo, seed=None)
    found = making.steps(algo)[0](state.params, batch, critic=making.own(state))
    other = objectives.Objective(baseline=plain)
    want = step.score(state.params, batch, decoder=making.DECODER, algo=other)
    np.testing.assert_allclose(found.advantages, want.advantages, atol=1e-5)
    rewards = np.append(batch.rewards, 0)[np.asarray(batch.sequence)]
    np.testing.assert_allclose(
      found.returns, np.nan_to_num(rewards) * batch.loss_mask, atol=1e-6
    )


def test_a_critic_that_knows_the_mean_of_a_group_is_grpo_without_its_scale():
  batch = making.packed()
  means = np.repeat(
    [np.mean(making.REWARDS[:3]), np.mean(making.REWARDS[3:])], 3
  )
  table = np.append(means, np.zeros(making.ROWS - making.NUM + 1))
  inputs = types.AdvantageInputs(
    rewards=jnp.asarray(batch.rewards),
    group_ids=jnp.asarray(batch.group_ids),
    rollout_ids=jnp.asarray(batch.rollout_ids),
    sequence=jnp.asarray(batch.sequence),
    segment_ids=jnp.asarray(batch.segment_ids),
    loss_mask=jnp.asarray(batch.loss_mask),
    turn_rewards=jnp.zeros_like(batch.loss_mask),
    penalty=jnp.zeros_like(batch.loss_mask),
    old_logprobs=jnp.zeros_like(batch.loss_mask),
    values=jnp.asarray(table[batch.sequence], jnp.float32),
  )
  critic = baselines.Critic(decay=1.0, whiten=False)
  group = baselines.Group(scale="none")
  np.testing.assert_allclose(
    critic.advantages(inputs), group.advantages(inputs), atol=1e-6
  )


def test_a_kl_in_the_reward_is_in_the_returns_too():
  kl = divergence.Kl(0.5, estimator="k1", place="reward")
  algo = dataclasses.replace(making.algorithm(), kl=kl)
  assert {"values", "reference", "old"} < algo.needs
  mask, ids = jnp.ones((1, 3)), jnp.ones((1, 3), jnp.int32)
  inputs = types.AdvantageInputs(
    rewards=jnp.array([2.0]),
    group_ids=jnp.zeros(1, jnp.int32),
    rollout_ids=jnp.zeros(1, jnp.int32),
    sequence=ids - 1,
    segment_ids=ids,
    loss_mask=mask,
    turn_rewards=0 * mask,
    penalty=0 * mask,
    old_logprobs=jnp.array([[-1.0, -1.0, -1.0]]),
    reference_logprobs=jnp.array([[-1.0, -2.0, -1.5]]),
    values=jnp.array([[0.25, 0.5, 0.75]]),
  )
  # Penalties 0, 0.5 and 0.25.
  returns = np.array([[1.25, 1.25, 1.75]])
  np.testing.assert_allclose(algo.returns(inputs), returns, atol=1e-6)
  np.testing.assert_allclose(
    algo.advantages(inputs), returns - inputs.values, atol=1e-6
  )


# ------------------------------------------------------------------ the update


@_MODELS
@pytest.mark.parametrize("field", ["advantages", "returns"])
def test_c115_one_bad_side_skips_both(model, field):
  algo = making.algorithm(model)
  _, good, _ = making.train(algo, making.packed())  # Moments that could move.
  score, update = making.steps(algo)
  scored = score(good.params, making.packed(), critic=making.own(good))
  bad = jnp.full_like(scored.loss_mask, jnp.nan)
  after, metrics = update(good, dataclasses.replace(scored, **{field: bad}))
  assert metrics["loss/skipped"] == 1 == metrics["loss/bad_updates"]
  assert (after.step, after.version) == (good.step + 1, good.version)
  for name in ("params", "opt_state", "critic"):
    _equal(getattr(after, name), getattr(good, name))


@_MODELS
def test_c13_a_batch_without_trained_tokens_moves_no_critic(model):
  algo = making.algorithm(model)
  _, good, _ = making.train(algo, making.packed())
  empty = making.packed()
  empty = dataclasses.replace(empty, loss_mask=np.zeros_like(empty.loss_mask))
  _, after, metrics = making.train(algo, empty, good)
  assert metrics["loss/value"] == 0 and metrics["loss/skipped"] == 1
  assert np.isnan(metrics["loss/explained_variance"])
  _equal(after.critic, good.critic)
  _equal(after.params, good.params)


@_MODELS
def test_explained_variance_is_of_values_before_the_update(model):
  algo = making.algorithm(model)
  scored, _, metrics = making.train(algo, making.packed())
  returns, values = (
    sum(_rows(x, scored), []) for x in (scored.returns, scored.values)
  )
  want = reference.explained_variance(returns, values)
  np.testing.assert_allclose(
    metrics["loss/explained_variance"], want, atol=1e-4
  )
  perfect = dataclasses.replace(scored, values=scored.returns)
  assert critics.explained(perfect) == 1
  level = dataclasses.replace(scored, returns=scored.loss_mask)
  assert np.isnan(critics.explained(level))


@_MODELS
def test_a_critic_learns_what_its_batch_returns(model):
  algo = making.algorithm(model)
  state, explained, losses = making.start(algo, seed=None), [], []
  for _ in range(80):
    _, state, metrics = making.train(algo, making.packed(), state)
    explained.append(float(metrics["loss/explained_variance"]))
    losses.append(float(metrics["loss/value"]))
  assert explained[0] == 0
  # All but what no critic knows: which of a group's first tokens is to come.
  scored, *_ = making.train(algo, making.packed(), state)
  batch = jax.tree.map(np.asarray, making.packed())
  returns = np.asarray(scored.returns)
  first = [returns[making.trained(batch, n)][0] for n in range(making.NUM)]
  unknown = sum(
    np.sum((g - np.mean(g)) ** 2) for g in np.split(np.array(first), 2)
  )
  kept = returns[batch.loss_mask > 0]
  most = 1 - unknown / np.sum((kept - kept.mean()) ** 2)
  assert most - 0.1 < explained[-1] < most + 1e-3 < 1


def test_an_algorithm_without_a_critic_leaves_one_alone():
  algo = making.algorithm()
  state = making.start(algo)
  update = making.steps(sft.objective())[1]
  score = making.steps(sft.objective())[0]
  after, metrics = update(state, score(state.params, making.packed()))
  _equal(after.critic, state.critic)
  assert not [name for name in metrics if "value" in name]


def test_what_a_critic_lacks_is_said():
  algo = making.algorithm()
  state, batch = making.start(algo), making.packed()
  batch = jax.tree.map(jnp.asarray, batch)
  words = {"decoder": making.DECODER, "algo": algo}
  with pytest.raises(ValueError, match="score: expected a critic, got none"):
    step.score(state.params, batch, **words)
  with pytest.raises(ValueError, match="start: expected an optimizer with a"):
    critics.start(state.params, algo.critic, None)
  for critic, tx in ((None, making.tx(algo)), (state.critic, None)):
    with pytest.raises(ValueError, match="expected a critic and its optimizer"):
      step.update(
        dataclasses.replace(state, critic=critic),
        batch,
        optimizer=making.policy_tx(),
        critic_optimizer=tx,
        **words,
      )
  assert critics.start(state.params, None, None) is None
  assert critics.optimizer(grpo.objective().critic, making.SETTINGS, 3) is None
  assert reinforce_pp.objective().critic is None
