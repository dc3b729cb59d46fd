"""Distillation over the most probable tokens of a teacher."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import types
from jaxrl_post.algos import distill, divergence
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.training import diagnostics, step
from tests.numerics import critics as batches
from tests.unit import engines as making

_VOCAB, _LENGTH = 12, 5
_NONE = {
  name: jnp.zeros(())
  for name in ("mismatch/tokens", "mismatch/mean_abs", "mismatch/kl")
}


def _tables(seed=0):
  """Draws log-probabilities of a policy and of a teacher, [1, T, V]."""
  draw = np.random.default_rng(seed)
  logits = draw.normal(0, 2, (2, 1, _LENGTH, _VOCAB))
  return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))


def _given(teacher, policy, num, mask=(1,) * _LENGTH):
  """Returns the inputs of a loss, and the ids of the teacher's best."""
  best, ids = jax.lax.top_k(teacher, num)
  zero = jnp.zeros(teacher.shape[:2])
  mask = jnp.asarray(mask, jnp.float32)[None]
  return types.LossInputs(
    logprobs=zero,
    entropy=zero,
    old_logprobs=zero,
    sampler_logprobs=zero,
    reference_logprobs=None,
    advantages=zero,
    loss_mask=mask,
    shares=mask / jnp.maximum(jnp.sum(mask), 1.0),
    segment_ids=jnp.ones_like(zero, jnp.int32),
    lag=zero,
    num_tokens=jnp.sum(mask),
    teacher_logprobs=best,
    candidate_logprobs=jnp.take_along_axis(policy, ids, axis=-1),
  )


def _slow(teacher, policy, num):
  """Writes the formula out in float64, for one place."""
  order = sorted(range(len(teacher)), key=lambda v: -teacher[v])[:num]
  p = [float(np.exp(teacher[v])) for v in order]
  q = [float(np.exp(policy[v])) for v in order]
  total = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
  if num < len(teacher):
    left, rest = 1 - sum(p), 1 - sum(q)
    total += left * np.log(left / rest)
  return total


@pytest.mark.parametrize("num", [1, 2, 5, _VOCAB - 1, _VOCAB])
def test_it_is_the_kl_of_the_best_tokens_and_one_for_the_rest(num):
  policy, teacher = _tables()
  loss, shown = distill.top(num).loss(_given(teacher, policy, num))
  tables = np.asarray(teacher, np.float64)[0], np.asarray(policy, np.float64)[0]
  each = [_slow(t, p, num) for t, p in zip(*tables, strict=True)]
  np.testing.assert_allclose(loss, np.mean(each), rtol=1e-4)
  # Never more than the whole, which it is for all tokens.
  whole = np.sum(np.exp(tables[0]) * (tables[0] - tables[1]), axis=-1)
  assert 0 < loss <= np.mean(whole) + 1e-5
  if num == _VOCAB:
    np.testing.assert_allclose(loss, np.mean(whole), rtol=1e-5)
  assert not shown["loss/clip_fraction"].any()


@pytest.mark.parametrize("num", [3, _VOCAB])
def test_its_gradient_is_that_of_the_logits_of_tokens_and_rest(num):
  _, teacher = _tables()
  logits = jnp.asarray(np.random.default_rng(1).normal(size=teacher.shape))

  def loss(logits):
    policy = jax.nn.log_softmax(logits.astype(jnp.float32))
    return distill.top(num).loss(_given(teacher, policy, num))[0]

  found = np.asarray(jax.grad(loss)(logits), np.float64)
  p = np.asarray(jax.nn.softmax(teacher), np.float64)
  q = np.asarray(jax.nn.softmax(logits), np.float64)
  # The rest is one token, whose share falls on its members as they have it.
  best = np.argsort(-p, axis=-1)[..., :num]
  among = np.zeros_like(p, bool)
  np.put_along_axis(among, best, True, axis=-1)
  left = np.sum(p * ~among, -1, keepdims=True)
  rest = np.sum(q * ~among, -1, keepdims=True)
  wanted = q - np.where(among, p, left * q / np.where(rest > 0, rest, 1))
  np.testing.assert_allclose(found, wanted / _LENGTH, atol=1e-6)


@pytest.mark.parametrize("num", [1, 4, _VOCAB])
def test_who_agrees_with_the_teacher_has_neither_loss_nor_gradient(num):
  _, teacher = _tables()

  def loss(logits):
    policy = jax.nn.log_softmax(logits)
    return distill.top(num).loss(_given(teacher, policy, num))[0]

  value, slope = jax.value_and_grad(loss)(teacher)
  np.testing.assert_allclose(value, 0, atol=1e-6)
  np.testing.assert_allclose(slope, 0, atol=1e-6)


def test_what_does_not_train_may_hold_anything():
  policy, teacher = _tables()
  mask = (1, 0, 1, 0, 0)
  given = _given(teacher, policy, 3, mask)
  bad = jnp.asarray(mask)[None, :, None] == 0

  def loss(given, found):
    return distill.top(3).loss(
      dataclasses.replace(given, candidate_logprobs=found)
    )[0]

  clean = jax.value_and_grad(loss, argnums=1)(given, given.candidate_logprobs)
  given = given.replace(
    teacher_logprobs=jnp.where(bad, jnp.nan, given.teacher_logprobs)
  )
  found = jnp.where(bad, jnp.inf, given.candidate_logprobs)
  value, slope = jax.value_and_grad(loss, argnums=1)(given, found)
  assert value == clean[0] and not np.asarray(slope)[0, [1, 3, 4]].any()
  np.testing.assert_array_equal(slope, clean[1])


@pytest.mark.parametrize("gap", [30.0, 200.0])
def test_a_policy_that_is_sure_of_something_else_has_a_finite_loss(gap):
  teacher = jax.nn.log_softmax(jnp.zeros((1, 1, _VOCAB)).at[..., 0].set(gap))
  policy = jax.nn.log_softmax(jnp.zeros((1, 1, _VOCAB)).at[..., 1].set(gap))
  for one, other in ((teacher, policy), (policy, teacher), (teacher, teacher)):
    given = _given(one, other, 2, (1,))

    def loss(found, given=given):
      return distill.top(2).loss(given.replace(candidate_logprobs=found))[0]

    value, slope = jax.value_and_grad(loss)(given.candidate_logprobs)
    assert np.isfinite(value) and np.isfinite(slope).all() and value >= -1e-6


@pytest.mark.parametrize("sure", [10.0, 16.0, 20.0])
def test_a_sure_policy_is_drawn_to_what_it_leaves_out(sure):
  """The teacher has a tenth outside of its best two, the policy nearly nothing.

  Below a millionth float32 does not know how little: there it takes long.
  """
  teacher = jnp.log(jnp.array([[[0.6, 0.3, *[0.01] * 10]]]))
  logits = jnp.zeros((1, 1, _VOCAB)).at[0, 0, :2].set([sure, sure - 0.7])

  def loss(logits):
    policy = jax.nn.log_softmax(logits)
    return distill.top(2).loss(_given(teacher, policy, 2, (1,)))[0]

  slope = jax.grad(loss)(logits)
  assert (np.asarray(slope)[0, 0, 2:] < 0).all()
  down = jax.jit(lambda x: x - jax.grad(loss)(x))
  for _ in range(500):
    logits = down(logits)
  assert (np.asarray(logits)[0, 0, 2:] > 0).all()
  assert loss(logits) < 0.01 or sure > 15


# -------------------------------------------------------------------- the step


def _teacher():
  return making.params(batches.CONFIG, seed=5)


def _steps(num, **cut):
  algo = distill.top(num)
  score = functools.partial(step.score, decoder=batches.DECODER, algo=algo)
  update = functools.partial(
    step.update,
    decoder=batches.DECODER,
    algo=algo,
    optimizer=batches.policy_tx(),
    **cut,
  )
  return jax.jit(score, static_argnames="microbatches"), jax.jit(update)


def _start():
  params = making.params(batches.CONFIG)
  return step.init(params, jax.random.key(1), batches.policy_tx())


def _tables_of(params, batch):
  """Returns log-probabilities of all ids in the place of each token."""
  logits = transformer.logits(
    params, batches.CONFIG, batches.states(params, batch)
  )
  return np.roll(np.asarray(jax.nn.log_softmax(logits), np.float64), 1, axis=1)


def test_the_step_scores_the_teachers_best_in_the_place_of_each_token():
  batch, num = batches.packed(), 5
  score, update = _steps(num)
  state = _start()
  scored = score(state.params, batch, reference=_teacher())
  tables = [_tables_of(p, batch) for p in (_teacher(), state.params)]
  keep = batch.loss_mask > 0
  best = np.argsort(-tables[0], axis=-1)[..., :num]
  np.testing.assert_array_equal(scored.teacher_ids[keep], best[keep])
  each = [
    _slow(t, p, num) for t, p in zip(*(x[keep] for x in tables), strict=True)
  ]
  _, metrics = update(state, scored)
  np.testing.assert_allclose(metrics["loss/policy"], np.mean(each), rtol=1e-4)


@pytest.mark.parametrize(
  "microbatches", [2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_microbatches_change_nothing(microbatches):
  def run(number):
    batch = batches.packed(microbatches=number)
    score, update = _steps(4, microbatches=number)
    state = _start()
    scored = score(
      state.params, batch, reference=_teacher(), microbatches=number
    )
    return update(state, scored)

  (one, m), (two, n) = run(1), run(microbatches)
  for name in m:
    np.testing.assert_allclose(m[name], n[name], rtol=1e-4, atol=1e-6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
    optax.tree.get(one.opt_state, "mu"),
    optax.tree.get(two.opt_state, "mu"),
  )


def test_its_pull_is_the_slope_by_the_teachers_best_tokens():
  policy, teacher = _tables()
  mask = (1, 1, 0, 1, 1)
  given = _given(teacher, policy, 3, mask)
  pulls = diagnostics.pulls_of(lambda x: distill.top(3).loss(x)[0], given)
  p, q = (
    np.exp(np.asarray(x, np.float64)[0])
    for x in (given.teacher_logprobs, given.candidate_logprobs)
  )
  # Of sum p (log p - log q) + left (log left - log rest) by each log q.
  left, rest = (1 - np.sum(x, axis=-1, keepdims=True) for x in (p, q))
  slopes = (-p + left * q / rest) / 4
  wanted = np.sum(slopes**2, axis=-1) * mask
  np.testing.assert_allclose(pulls[0], wanted, rtol=1e-4)
  # Two tokens of lag 1 and two of lag 0 share it.
  given = given.replace(lag=jnp.asarray([[0.0, 1.0, 0.0, 1.0, 0.0]]))
  sums = diagnostics.of_tokens(given, {}, pulls)
  found = diagnostics.whole({**sums, **_NONE}, {})
  share = wanted[[1, 3]].sum() / wanted.sum()
  np.testing.assert_allclose(found["lag/1/pull"], share, rtol=1e-4)
  np.testing.assert_allclose(found["lag/0/pull"], 1 - share, rtol=1e-4)


def test_a_policy_comes_closer_to_its_teacher():
  score, update = _steps(8)
  state, batch, losses = _start(), batches.packed(), []
  for _ in range(20):
    scored = score(state.params, batch, reference=_teacher())
    state, metrics = update(state, scored)
    losses.append(float(metrics["loss/policy"]))
  assert losses[-1] < 0.5 * losses[0]


def test_a_teacher_of_another_shape_scores_as_it_does_alone():
  """Its own forward pass over each row, by plain formulas."""
  shape = transformer.Config(
    num_layers=3,
    width=24,
    num_heads=3,
    num_kv_heads=1,
    head_width=10,
    ff_width=20,
    vocab_size=batches.CONFIG.vocab_size,
    tie_embeddings=False,
    qk_norm=True,
  )
  teacher = making.params(shape, seed=7)
  batch = batches.packed()
  hidden = decoders.states(
    decoders.Decoder(shape),
    teacher,
    tokens=jnp.asarray(batch.tokens),
    positions=jnp.asarray(batch.positions),
    segment_ids=jnp.asarray(batch.segment_ids),
    prefix_ids=jnp.asarray(batch.prefix_ids),
  )
  logits = transformer.logits(teacher, shape, hidden)
  table = np.roll(np.asarray(jax.nn.log_softmax(logits)), 1, axis=1)
  keep = np.asarray(batch.loss_mask) > 0
  alone = np.take_along_axis(
    table, np.asarray(batch.tokens)[..., None], axis=-1
  )[..., 0]
  for algo in (distill.objective(), distill.top(5)):
    scored = jax.jit(
      functools.partial(
        step.score,
        microbatches=2,
        algo=algo,
        decoder=batches.DECODER,
        reference_decoder=decoders.Decoder(shape, chunk=5),
      )
    )(making.params(batches.CONFIG), batch, reference=teacher)
    if algo.candidates:
      best = np.argsort(-table, axis=-1)[..., :5]
      np.testing.assert_array_equal(scored.teacher_ids[keep], best[keep])
      found = np.take_along_axis(table, best, axis=-1)
      np.testing.assert_allclose(
        scored.teacher_logprobs[keep], found[keep], atol=1e-5
      )
    else:
      np.testing.assert_allclose(
        scored.reference_logprobs[keep], alone[keep], atol=1e-5
      )


def test_a_step_without_a_teacher_is_refused():
  score, _ = _steps(2)
  with pytest.raises(ValueError, match="expected a reference, got none"):
    score(_start().params, batches.packed())


def test_a_kl_in_the_loss_scores_the_tokens_alone():
  algo = dataclasses.replace(distill.top(4), kl=divergence.Kl(0.1))
  batch, state = batches.packed(), _start()
  words = {"decoder": batches.DECODER, "algo": algo}
  scored = jax.jit(functools.partial(step.score, **words))(
    state.params, batch, reference=_teacher()
  )
  assert scored.reference_logprobs.shape == batch.tokens.shape
  _, metrics = jax.jit(
    functools.partial(step.update, optimizer=batches.policy_tx(), **words)
  )(state, scored)
  assert metrics["loss/kl"] > 0 and metrics["loss/skipped"] == 0
