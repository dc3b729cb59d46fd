"""The sampler's distribution and what it reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.sampling import pick

_PROBS = np.array([0.5, 0.3, 0.15, 0.05])


def _pick(logits, keys, *, temperature=1.0, top_k=0, top_p=1.0):
  rows = logits.shape[0]
  return pick.pick(
    jnp.asarray(logits, jnp.float32),
    keys,
    jnp.full(rows, temperature, jnp.float32),
    jnp.full(rows, top_k, jnp.int32),
    jnp.full(rows, top_p, jnp.float32),
  )


def _allowed(top_k=0, top_p=1.0):
  probs = jnp.asarray(_PROBS, jnp.float32)[None]
  found = pick.allowed(
    probs, jnp.array([top_k], jnp.int32), jnp.array([top_p], jnp.float32)
  )
  return set(np.flatnonzero(found[0]).tolist())


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_c30_temperature_divides_logits(shift):
  logits = np.tile(np.array([2.0, 1.0, 0.0]) + shift, (300, 1))
  keys = jax.random.split(jax.random.key(0), 300)
  token, logprob = _pick(logits, keys, temperature=0.5)
  expected = np.array([-0.142932, -2.142932, -4.142932])
  assert set(np.asarray(token).tolist()) == {0, 1, 2}
  np.testing.assert_allclose(logprob, expected[np.asarray(token)], atol=1e-5)


def test_c34_log_softmax_is_taken_on_float32_logits():
  logits = np.array([[12.03, 11.98, 11.90]] * 64)
  keys = jax.random.split(jax.random.key(1), 64)
  token, logprob = _pick(logits, keys)
  expected = np.array([-1.040038, -1.090038, -1.170038])
  np.testing.assert_allclose(logprob, expected[np.asarray(token)], atol=1e-5)


@pytest.mark.parametrize(
  ("top_p", "kept"),
  [
    (0.01, {0}),
    (0.49, {0}),
    (0.51, {0, 1}),
    (0.79, {0, 1}),
    (0.81, {0, 1, 2}),
    (1.0, {0, 1, 2, 3}),
  ],
)
def test_c45_top_p_keeps_tokens_with_less_than_p_before_them(top_p, kept):
  assert _allowed(top_p=top_p) == kept


@pytest.mark.parametrize(
  ("top_k", "kept"),
  [
    (1, {0}),
    (2, {0, 1}),
    (4, {0, 1, 2, 3}),
    (100, {0, 1, 2, 3}),
    (0, {0, 1, 2, 3}),
  ],
)
def test_c45_top_k_keeps_the_k_most_probable(top_k, kept):
  assert _allowed(top_k=top_k) == kept


@pytest.mark.parametrize(
  "options",
  [{"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"temperature": -1.0}],
)
def test_c45_values_out_of_range_are_refused(options):
  with pytest.raises(types.InputError, match="sampling"):
    types.SamplingParams(**options)


def test_c50_frequencies_match_the_reported_logprobs():
  num = 100_000
  logits = np.tile(np.log(_PROBS), (num, 1))
  keys = jax.random.split(jax.random.key(2), num)
  token, logprob = jax.jit(_pick)(logits, keys)
  share = np.bincount(np.asarray(token), minlength=4) / num
  four_sigma = [0.006325, 0.005797, 0.004517, 0.002757]
  assert (np.abs(share - _PROBS) < four_sigma).all()
  np.testing.assert_allclose(
    np.exp(logprob), _PROBS[np.asarray(token)], atol=1e-6
  )


def test_c32_truncated_draws_report_the_whole_distribution():
  num = 20_000
  logits = np.tile(np.log(_PROBS), (num, 1))
  keys = jax.random.split(jax.random.key(3), num)
  token, logprob = _pick(logits, keys, top_p=0.79)
  token = np.asarray(token)
  share = np.bincount(token, minlength=4) / num
  np.testing.assert_allclose(share, [0.625, 0.375, 0, 0], atol=0.02)
  np.testing.assert_allclose(logprob[token == 0], -0.693147, atol=1e-5)


def test_temperature_zero_takes_the_most_probable_token():
  logits = np.log(np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]))
  token, logprob = _pick(
    logits, jax.random.split(jax.random.key(4), 2), temperature=0.0
  )
  assert token.tolist() == [1, 0]
  np.testing.assert_allclose(logprob, np.log([0.5, 0.6]), atol=1e-6)


def test_tokens_without_probability_are_never_drawn():
  logits = np.full((5000, 6), -np.inf)
  logits[:, [1, 4]] = 0.0
  token, _ = _pick(logits, jax.random.split(jax.random.key(5), 5000))
  assert set(np.asarray(token).tolist()) == {1, 4}
