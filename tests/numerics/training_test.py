"""The update: invariances, skipped steps, and one device against eight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import types
from jaxrl_post.algos import divergence, grpo
from jaxrl_post.data import pack
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.training import optim, step
from tests.unit import engines as making

_CONFIG = making.CONFIG
_DECODER = decoders.Decoder(_CONFIG, chunk=5)
_LENGTH = 12


_params = making.params


def _batch(prompts, completions, rewards, group_ids, *, length=_LENGTH, left=0):
  """Lays rows out by hand, with `left` pads before and the rest behind."""
  rows = len(prompts)
  ints = {
    name: np.zeros((rows, length), np.int32)
    for name in ("tokens", "positions", "segment_ids", "policy_versions")
  }
  ints["sequence"] = np.full((rows, length), rows, np.int32)
  blank = np.zeros((rows, length), np.float32)
  mask = np.zeros((rows, length), np.float32)
  # Whole sequences are the continuation of nothing else.
  ints["prefix_ids"] = ints["segment_ids"]
  for i, (prompt, completion) in enumerate(
    zip(prompts, completions, strict=True)
  ):
    n, m = len(prompt), len(completion)
    at = slice(left, left + n + m)
    ints["tokens"][i, at] = [*prompt, *completion]
    ints["positions"][i, at] = np.arange(n + m)
    ints["segment_ids"][i, at] = 1
    ints["sequence"][i, at] = i
    mask[i, left + n : left + n + m] = 1
  fields = dict(
    **ints,
    loss_mask=mask,
    sampler_logprobs=np.full((rows, length), -3.0, np.float32),
    temperature=np.ones(rows, np.float32),
    rewards=np.array(rewards, np.float32),
    group_ids=np.array(group_ids, np.int32),
    rollout_ids=np.arange(rows, dtype=np.int32),
    truncated=np.zeros(rows, bool),
    turn_rewards=blank,
    advantages=blank,
    old_logprobs=blank,
    reference_logprobs=blank,
  )
  return types.Batch(**jax.tree.map(jnp.asarray, fields))


def _ragged(rewards=(1, 0, 0.5, 1, 0, 0), **options):
  """Six rows of lengths 1 to 6, in two groups."""
  draw = np.random.default_rng(0)
  prompts = [draw.integers(0, 64, 3).tolist() for _ in range(6)]
  answers = [draw.integers(0, 64, 1 + i).tolist() for i in range(6)]
  return _batch(prompts, answers, rewards, [0, 0, 0, 1, 1, 1], **options)


def _optimizer(**options):
  cfg = optim.Optim(learning_rate=0.01, weight_decay=0.1, **options)
  return optim.build(cfg, 10)


def _state(params=None, **options):
  params = _params() if params is None else params
  return step.init(params, jax.random.key(1), _optimizer(**options))


@functools.cache
def _steps(microbatches=1, algo=None, updates=1):
  algo = algo or grpo.objective()
  score = jax.jit(
    functools.partial(
      step.score,
      decoder=_DECODER,
      algo=algo,
      microbatches=microbatches,
      updates=updates,
    )
  )
  update = jax.jit(
    functools.partial(
      step.update,
      decoder=_DECODER,
      algo=algo,
      optimizer=_optimizer(),
      microbatches=microbatches,
      minibatches=updates,
    )
  )
  return score, update


def _train(batch, microbatches=1, state=None):
  score, update = _steps(microbatches)
  state = _state() if state is None else state
  return update(state, score(state.params, batch))


def _gradient(batch):
  """Returns loss and gradient of a batch, by the parts the update is made of.

  The optimizer normalises gradients away; this is what has to be equal.
  """
  score, _ = _steps(updates=2)
  batch = score(_params(), batch)

  def loss(params):
    hidden = step._states(_DECODER, params, batch)
    logprobs, entropy = step._logprobs(_DECODER, params, batch, hidden)
    return grpo.objective().loss(_inputs(batch, logprobs, entropy))[0]

  return jax.jit(jax.value_and_grad(loss))(_params())


def _inputs(batch, logprobs, entropy, shares=None):
  """Puts together what the update gives the loss."""
  if shares is None:
    shares = grpo.objective().shares(
      batch.loss_mask, batch.sequence, batch.rollout_ids
    )
  return types.LossInputs(
    logprobs=logprobs,
    entropy=entropy,
    old_logprobs=batch.old_logprobs,
    sampler_logprobs=batch.sampler_logprobs,
    reference_logprobs=None,
    advantages=batch.advantages,
    loss_mask=batch.loss_mask,
    shares=shares,
    segment_ids=batch.segment_ids,
    lag=jnp.zeros_like(batch.loss_mask),
    num_tokens=jnp.sum(batch.loss_mask),
  )


def _close(a, b, atol):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def _equal(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), a, b)


@pytest.mark.parametrize("microbatches", [2, 3, 6])
def test_score_is_the_same_for_any_cut_into_microbatches(microbatches):
  whole, cut = (
    _steps(n, updates=2)[0](_params(), _ragged()) for n in (1, microbatches)
  )
  np.testing.assert_allclose(cut.old_logprobs, whole.old_logprobs, atol=1e-6)
  np.testing.assert_array_equal(cut.advantages, whole.advantages)
  np.testing.assert_array_equal(cut.loss_mask, whole.loss_mask)


@pytest.mark.parametrize("microbatches", [2, 3, 6])
def test_c11_splitting_into_microbatches_changes_nothing(microbatches):
  whole, m = _train(_ragged())
  parts, n = _train(_ragged(), microbatches)
  np.testing.assert_allclose(m["loss/policy"], n["loss/policy"], atol=1e-6)
  np.testing.assert_allclose(
    m["loss/grad_norm"], n["loss/grad_norm"], rtol=1e-6
  )
  _close(m, n, 1e-5)
  grads = optax.tree.get(whole.opt_state, "mu")
  _close(grads, optax.tree.get(parts.opt_state, "mu"), 1e-7)

  # Adam makes a step of any gradient that is not zero, noise included.
  def close_where_steep(grad, new, other):
    steep = np.abs(grad) > 1e-6
    np.testing.assert_allclose(new[steep], other[steep], atol=1e-5)

  jax.tree.map(close_where_steep, grads, whole.params, parts.params)


@pytest.mark.parametrize("cut", [[6], [3, 3], [1, 5], [2, 2, 2]])
def test_c11_the_loss_is_the_same_however_it_is_cut(cut):
  score, _ = _steps(updates=2)
  batch = score(_params(), _ragged())
  shares = grpo.objective().shares(
    batch.loss_mask, batch.sequence, batch.rollout_ids
  )
  edges = np.cumsum([0, *cut])
  share = 0.0
  for a, b in zip(edges, edges[1:], strict=False):
    part = jax.tree.map(lambda x, a=a, b=b: x[a:b] if x.ndim == 2 else x, batch)
    entropy = jnp.zeros_like(part.old_logprobs)
    inputs = _inputs(part, part.old_logprobs, entropy, shares[a:b])
    share += grpo.objective().loss(inputs)[0]
  _, values = _train(_ragged())
  np.testing.assert_allclose(share, values["loss/policy"], atol=1e-6)


def test_c13_a_batch_without_trained_tokens_moves_nothing():
  good, _ = _train(_ragged())  # Non-zero moments, so momentum could move.
  empty = dataclasses.replace(_ragged(), loss_mask=jnp.zeros((6, _LENGTH)))
  after, values = _train(empty, state=good)
  assert values["loss/policy"] == 0
  assert values["loss/tokens"] == 0
  assert values["loss/skipped"] == 1
  _equal(after.params, good.params)
  _equal(after.opt_state, good.opt_state)
  assert (after.version, after.step) == (good.version, good.step + 1)


def test_c13_an_empty_microbatch_changes_nothing():
  batch = _ragged()

  # Strided parts of two: the empty rows are exactly the first one.
  def widen(x):
    if x.ndim == 1:
      return x
    return jnp.stack([jnp.zeros_like(x), x], axis=1).reshape(12, -1)

  wide = jax.tree.map(widen, batch)
  plain, m = _train(batch)
  split, n = _train(wide, 2)
  np.testing.assert_allclose(m["loss/policy"], n["loss/policy"], atol=1e-6)
  _close(plain.params, split.params, 1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_c115_one_bad_gradient_is_skipped_and_leaves_no_trace(bad):
  state = _state()
  score, update = _steps()
  poisoned = dataclasses.replace(
    score(state.params, _ragged()), advantages=jnp.full((6, _LENGTH), bad)
  )
  skipped, values = update(state, poisoned)
  assert values["loss/skipped"] == 1
  _equal(skipped.params, state.params)
  _equal(skipped.opt_state, state.opt_state)
  assert skipped.version == state.version
  plain, _ = _train(_ragged(), state=state)
  after, _ = _train(_ragged(), state=skipped)
  _equal(after.params, plain.params)


def test_rows_without_a_reward_do_not_train():
  rewards = [1, np.nan, 0.5, 1, 0, 0]
  state, values = _train(_ragged(rewards))
  assert values["loss/tokens"] == 21 - 2
  batch = _ragged(rewards)
  # What the row holds does not matter.
  batch = dataclasses.replace(batch, tokens=batch.tokens.at[1, 4:].set(9))
  other, _ = _train(batch)
  _close(state.params, other.params, 1e-6)


def test_c01_groups_without_signal_give_a_zero_gradient():
  _, values = _train(_ragged([0.9] * 6))
  assert values["loss/grad_norm"] == 0


@pytest.mark.parametrize("options", [{"length": 20}, {"length": 17, "left": 5}])
def test_c41_padding_changes_neither_logprobs_nor_gradient(options):
  plain, padded = _ragged(), _ragged(**options)
  score, _ = _steps(updates=2)
  a, b = score(_params(), plain), score(_params(), padded)
  real = np.asarray(plain.loss_mask) > 0
  padded_real = np.asarray(padded.loss_mask) > 0
  np.testing.assert_allclose(
    a.old_logprobs[real], b.old_logprobs[padded_real], atol=1e-5
  )
  (x, grad), (y, other) = _gradient(plain), _gradient(padded)
  np.testing.assert_allclose(x, y, atol=1e-5)
  _close(grad, other, 1e-5)


def test_c44_row_order_changes_neither_loss_nor_gradient():
  batch = _ragged()
  order = np.random.default_rng(1).permutation(6)
  mixed = jax.tree.map(lambda x: x[order] if x.ndim == 2 else x, batch)
  (x, grad), (y, other) = _gradient(batch), _gradient(mixed)
  np.testing.assert_allclose(x, y, atol=1e-6)
  _close(grad, other, 1e-6)


def test_remat_and_chunks_change_memory_and_not_numbers():
  batch, results = _ragged(), []
  for decoder in (
    _DECODER,
    dataclasses.replace(_DECODER, remat="layer", chunk=1),
    dataclasses.replace(_DECODER, remat="dots", chunk=100),
  ):

    def total(params, decoder=decoder):
      logprobs, _ = decoders.logprobs(
        decoder,
        params,
        tokens=batch.tokens,
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        temperature=jnp.ones_like(batch.loss_mask),
      )
      return jnp.sum(logprobs * batch.loss_mask)

    results.append(jax.jit(jax.value_and_grad(total))(_params()))
  _close(results[0], results[1], 1e-5)
  _close(results[0], results[2], 1e-5)


def test_c30_temperature_divides_logits_in_the_trainer():
  batch = _ragged()
  hidden, _ = transformer.forward(
    _params(),
    _CONFIG,
    batch.tokens,
    batch.positions,
    segment_ids=batch.segment_ids,
  )
  logits = transformer.logits(_params(), _CONFIG, hidden)
  expected = jax.nn.log_softmax(logits[:, :-1] / 0.5)
  taken = np.take_along_axis(
    np.asarray(expected), np.asarray(batch.tokens[:, 1:, None]), axis=-1
  )[..., 0]
  scored = step.score(
    _params(),
    dataclasses.replace(batch, temperature=jnp.full(6, 0.5)),
    decoder=_DECODER,
    algo=grpo.objective(),
    updates=2,
  )
  real = np.asarray(batch.loss_mask[:, 1:]) > 0
  np.testing.assert_allclose(
    scored.old_logprobs[:, 1:][real], taken[real], atol=1e-5
  )


def test_c34_a_bfloat16_body_keeps_float32_logits():
  batch = _ragged()
  exact = step.score(
    _params(), batch, decoder=_DECODER, algo=grpo.objective(), updates=2
  )
  rough = step.score(
    _params(),
    batch,
    decoder=dataclasses.replace(_DECODER, dtype="bfloat16"),
    algo=grpo.objective(),
    updates=2,
  )
  assert rough.old_logprobs.dtype == jnp.float32
  mask = batch.loss_mask > 0
  gap = np.abs(rough.old_logprobs - exact.old_logprobs)[mask]
  assert 0 < gap.mean() < 0.02


def test_c119_small_updates_do_not_vanish():
  tx = optax.sgd(0.001)
  state = step.init({"embed": jnp.ones(3)}, jax.random.key(0), tx)
  params, opt_state = state.params, state.opt_state
  for _ in range(10):
    updates, opt_state = tx.update({"embed": -jnp.ones(3)}, opt_state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_allclose(params["embed"], 1.01, atol=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_rise_and_end_as_said(schedule):
  cfg = optim.Optim(learning_rate=0.5, schedule=schedule, warmup_steps=4)
  rate = optim.schedule(cfg, 12)
  assert rate(0) == 0
  np.testing.assert_allclose(rate(4), 0.5)
  np.testing.assert_allclose(
    rate(12), 0.5 if schedule == "constant" else 0.0, atol=1e-7
  )


def test_weight_decay_leaves_norms_alone():
  still = jax.tree.map(jnp.zeros_like, _params())
  tx = _optimizer()
  with jax.numpy_dtype_promotion("standard"):
    updates, _ = tx.update(still, tx.init(_params()), _params())
  norms = [updates["final_norm"], updates["layers"]["attn_norm"]]
  assert not any(np.any(u) for u in norms)
  assert np.any(updates["layers"]["q"])
  head = {"value_head": jnp.ones(4)}
  with jax.numpy_dtype_promotion("standard"):
    updates, _ = tx.update({"value_head": jnp.zeros(4)}, tx.init(head), head)
  assert not np.any(updates["value_head"])


@pytest.mark.parametrize("masked", [0, 2])
def test_mismatch_is_measured_on_rows_of_lag_zero_only(masked):
  score, update = _steps(updates=2)[0], _steps()[1]
  batch = score(_params(), _ragged())
  # Row 5 began at version 0: its later tokens saw a prompt of older weights,
  # whether or not its first ones train.
  versions = np.ones((6, _LENGTH), np.int32)
  versions[:, :3] = -1
  versions[5, 3:5] = 0
  mask = batch.loss_mask.at[5, 3 : 3 + masked].set(0)
  stale = (np.arange(6) == 5)[:, None]
  sampler = batch.old_logprobs - jnp.where(stale, 7.0, 0.25)
  batch = dataclasses.replace(
    batch,
    policy_versions=jnp.asarray(versions),
    loss_mask=mask,
    sampler_logprobs=sampler,
  )
  state = dataclasses.replace(_state(), version=jnp.int32(1))
  _, values = update(state, batch)
  np.testing.assert_allclose(values["mismatch/mean_abs"], 0.25, atol=1e-5)
  np.testing.assert_allclose(values["mismatch/max_abs"], 0.25, atol=1e-5)
  kl = np.exp(0.25) - 0.25 - 1
  np.testing.assert_allclose(values["mismatch/kl"], kl, atol=1e-5)
  state = dataclasses.replace(_state(), version=jnp.int32(9))
  _, values = update(state, batch)
  assert np.isnan(values["mismatch/mean_abs"])


def test_turns_of_a_truncated_rollout_count_for_the_others():
  score, _ = _steps(
    algo=dataclasses.replace(grpo.objective(), mask_truncated=True)
  )
  batch = _ragged(rewards=(0, 1, 1, 0, 0, 1))
  turns = np.zeros(batch.tokens.shape, np.float32)
  turns[0, 3] = 1.0  # All of the first group have earned 1.
  turns[3, 3] = 1.0
  truncated = jnp.array([True, False, False, True, False, False])
  batch = dataclasses.replace(
    batch, turn_rewards=jnp.asarray(turns), truncated=truncated
  )
  scored = score(_params(), batch)
  found = np.asarray(scored.advantages).sum(axis=1)
  assert not np.asarray(scored.loss_mask)[[0, 3]].any()
  np.testing.assert_allclose(found[:4], 0.0, atol=1e-6)
  assert found[4] < 0 < found[5]


def test_c07_turns_count_in_whether_the_rewards_of_a_group_agree():
  kl = divergence.Kl(0.1, without_signal=False)
  score, _ = _steps(algo=dataclasses.replace(grpo.objective(), kl=kl))
  # The first group has earned 1 each, in the second one rollout has.
  batch = _ragged(rewards=(1, 0, 1, 0, 0, 0))
  turns = np.zeros(batch.tokens.shape, np.float32)
  turns[[1, 4], 3] = 1.0
  batch = dataclasses.replace(batch, turn_rewards=jnp.asarray(turns))
  scored = score(_params(), batch, reference=_params())
  trains = np.asarray(scored.loss_mask).any(axis=1)
  assert trains.tolist() == [False] * 3 + [True] * 3
  np.testing.assert_array_equal(
    pack.trained(batch, equal=False), scored.loss_mask
  )
  # Two sequences of one rollout have earned together what the other has.
  rewards = jnp.array([1.0, 0, 1, 1, 0, 0])
  for ids, differ in (([0, 1, 2, 3, 4, 5], True), ([0, 1, 2, 3, 4, 4], False)):
    rows = dataclasses.replace(
      batch, rewards=rewards, rollout_ids=jnp.array(ids)
    )
    scored = score(_params(), rows, reference=_params())
    trains = np.asarray(scored.loss_mask).any(axis=1)
    assert trains.tolist() == [False] * 3 + [differ] * 3
    np.testing.assert_array_equal(
      pack.trained(rows, equal=False), scored.loss_mask
    )
