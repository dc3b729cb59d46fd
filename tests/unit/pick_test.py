"""The sampler's distribution, what narrows it, and what it reports."""

import dataclasses
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_post.sampling import pick
from tests.reference import truncation

_PROBS = np.array([0.5, 0.3, 0.15, 0.05])
_PICK = jax.jit(pick.pick, static_argnames="num_top")

# By vocabulary, temperature, top-k and top-p: the draws of 24 rows, as runs
# that were recorded have them.
_STORED = {
  (64, 1.0, 0, 1.0): (
    "47 55 50 60 12 3 55 8 55 48 31 16 6 1 52 1 2 61 21 16 24 32 54 11"
  ),
  (64, 0.7, 0, 1.0): (
    "47 55 50 59 18 0 55 15 53 51 31 16 6 1 60 1 2 61 21 27 20 5 54 24"
  ),
  (64, 0.0, 0, 1.0): (
    "47 34 17 9 36 32 21 20 28 0 41 2 6 1 14 1 2 61 17 38 9 5 54 29"
  ),
  (64, 1.0, 5, 1.0): (
    "47 55 58 53 22 0 55 20 48 48 31 17 6 1 63 1 2 61 21 27 20 5 54 29"
  ),
  (64, 1.0, 0, 0.8): (
    "47 55 50 58 12 0 55 5 53 48 31 16 6 1 60 1 2 61 21 9 20 5 54 11"
  ),
  (64, 0.7, 9, 0.9): (
    "47 55 50 58 22 0 55 20 48 48 31 10 6 1 60 1 2 61 21 27 20 5 54 29"
  ),
  (1000, 1.0, 0, 1.0): (
    "861 84 605 140 578 167 457 364 637 320 653 69 512 162 875 133 121 "
    "70 230 31 976 888 578 579"
  ),
  (1000, 0.7, 0, 1.0): (
    "872 139 664 140 673 100 471 695 637 507 586 142 574 162 860 106 "
    "314 83 329 61 976 884 446 579"
  ),
  (1000, 0.0, 0, 1.0): (
    "673 351 915 140 673 100 131 695 637 775 148 809 930 970 3 735 815 "
    "126 880 286 497 528 109 579"
  ),
  (1000, 1.0, 5, 1.0): (
    "722 111 664 140 673 100 260 610 637 775 373 315 829 162 955 98 538"
    " 83 426 61 976 986 446 630"
  ),
  (1000, 1.0, 0, 0.8): (
    "871 90 612 140 614 109 471 364 637 316 653 69 522 162 860 133 121 "
    "83 272 46 976 874 578 579"
  ),
  (1000, 0.7, 9, 0.9): (
    "877 351 664 140 673 100 532 695 637 775 373 299 829 162 757 98 538"
    " 83 397 61 976 986 109 630"
  ),
}


def _controls(rows, **fields):
  """Controls of a row each: numbers for all of them, or a value a row."""
  plain = pick.idle_controls(rows, 3, 3)
  made = {}
  for name, value in fields.items():
    value, like = np.asarray(value), np.array(getattr(plain, name))
    if like.ndim == 1:
      like[: value.size if value.ndim else None] = value
    else:
      like[: len(value) if len(value) > 1 else None, : value.shape[1]] = value
    made[name] = jnp.asarray(like)
  return dataclasses.replace(plain, **made)


def _pick(logits, keys, *, made=0, num_top=4, **fields):
  """Picks with few shapes, so that few programs are compiled."""
  rows, vocab = logits.shape
  more = (256 if rows <= 256 else 100_000) - rows
  unused = max(0, 7 - vocab)
  padded = np.pad(logits, ((0, 0), (0, unused)), constant_values=-np.inf)
  picked = _PICK(
    jnp.asarray(np.pad(padded, ((0, more), (0, 0)), mode="edge"), jnp.float32),
    keys[np.minimum(np.arange(rows + more), rows - 1)],
    _controls(rows + more, **fields),
    jnp.asarray(np.resize(made, rows + more), jnp.int32),
    num_top=num_top,
  )
  return jax.tree.map(lambda x: np.asarray(x[:rows]), picked)


def _keys(seed, rows):
  return jax.random.split(jax.random.key(seed), rows)


def _normal(seed, rows, vocab):
  return np.random.default_rng(seed).normal(size=(rows, vocab)) * 2


def _log_softmax(x):
  x = np.asarray(x, np.float64)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _weights(logits, *, made=0, **fields):
  """What a row is drawn from, in float64: the slow and obvious way."""
  x = np.array(logits, np.float64)
  for token, value in zip(
    fields.get("bias_ids", ()), fields.get("bias", ()), strict=True
  ):
    if token >= 0:
      x[token] += value
  if made < fields.get("min_tokens", 0):
    x[[t for t in fields.get("stop_ids", ()) if t >= 0]] = -np.inf
  probs = np.exp((x - x.max()) / fields.get("temperature", 1.0))
  kept = truncation.allowed(
    probs,
    fields.get("top_k", 0),
    fields.get("top_p", 1.0),
    fields.get("min_p", 0.0),
  )
  probs = np.where([t in kept for t in range(len(x))], probs, 0.0)
  return probs / probs.sum()


def _check_draws(tokens, keys, weights):
  """Each token is where its row's random number meets the distribution."""
  uniform = np.asarray(jax.vmap(jax.random.uniform)(keys), np.float64)
  for token, number, row in zip(tokens, uniform, weights, strict=True):
    assert row[token] > 0
    end = np.cumsum(row)[token]
    assert end - row[token] - 1e-5 <= number <= end + 1e-5


@pytest.mark.parametrize(("vocab", "temperature", "top_k", "top_p"), _STORED)
def test_draws_stay_those_of_earlier_runs(vocab, temperature, top_k, top_p):
  stored = _STORED[vocab, temperature, top_k, top_p].split()
  picked = _pick(
    _normal(vocab, 24, vocab),
    _keys(vocab, 24),
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
  )
  assert picked.token.tolist() == [int(token) for token in stored]


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_c30_temperature_divides_logits(shift):
  logits = np.tile(np.array([2.0, 1.0, 0.0]) + shift, (300, 1))
  picked = _pick(logits, _keys(0, 300), temperature=0.5)
  expected = np.array([-0.142932, -2.142932, -4.142932])
  token = np.asarray(picked.token)
  assert set(token.tolist()) == {0, 1, 2}
  np.testing.assert_allclose(picked.logprob, expected[token], atol=1e-5)


def test_c34_log_softmax_is_taken_on_float32_logits():
  logits = np.array([[12.03, 11.98, 11.90]] * 64)
  picked = _pick(logits, _keys(1, 64))
  expected = np.array([-1.040038, -1.090038, -1.170038])
  token = np.asarray(picked.token)
  np.testing.assert_allclose(picked.logprob, expected[token], atol=1e-5)


def test_c45_top_k_1_is_greedy():
  logits = _normal(8, 200, 64)
  picked = _pick(logits, _keys(8, 200), top_k=1, temperature=3.0)
  assert picked.token.tolist() == logits.argmax(-1).tolist()


def test_c50_frequencies_match_the_reported_logprobs():
  num = 100_000
  logits = np.tile(np.log(_PROBS), (num, 1))
  picked = _pick(logits, _keys(2, num))
  token = np.asarray(picked.token)
  share = np.bincount(token, minlength=4) / num
  four_sigma = [0.006325, 0.005797, 0.004517, 0.002757]
  assert (np.abs(share - _PROBS) < four_sigma).all()
  np.testing.assert_allclose(np.exp(picked.logprob), _PROBS[token], atol=1e-6)


_UNREPORTED = [
  {"top_p": 0.79},
  {"top_k": 2},
  {"min_p": 0.59},
  {"stop_ids": [[2, 3]], "min_tokens": 1},
  {"bias_ids": [[3, -1, 2]], "bias": [[-np.inf, 5.0, -np.inf]]},
]


@pytest.mark.parametrize("options", _UNREPORTED)
def test_c32_what_narrows_the_draw_is_not_reported(options):
  num = 100_000
  logits = np.tile(np.log(_PROBS), (num, 1))
  picked = _pick(logits, _keys(3, num), **options)
  token = np.asarray(picked.token)
  share = np.bincount(token, minlength=4) / num
  np.testing.assert_allclose(share, [0.625, 0.375, 0, 0], atol=0.02)
  np.testing.assert_allclose(picked.logprob, np.log(_PROBS)[token], atol=1e-6)
  np.testing.assert_allclose(
    picked.top_logprobs, np.tile(np.log(_PROBS), (num, 1)), atol=1e-6
  )


def test_bias_is_added_before_temperature():
  num = 100_000
  logits = np.tile(np.log(_PROBS), (num, 1))
  picked = _pick(
    logits,
    _keys(4, num),
    temperature=2.0,
    bias_ids=[[1]],
    bias=[[1.0]],
  )
  weights = np.sqrt(_PROBS * np.exp([0, 1.0, 0, 0]))
  share = np.bincount(np.asarray(picked.token), minlength=4) / num
  np.testing.assert_allclose(share, weights / weights.sum(), atol=0.015)
  reported = np.sqrt(_PROBS) / np.sqrt(_PROBS).sum()
  np.testing.assert_allclose(
    np.exp(picked.logprob), reported[np.asarray(picked.token)], atol=1e-6
  )


def test_temperature_zero_takes_the_most_probable_token():
  logits = np.log(np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]))
  picked = _pick(logits, _keys(4, 2), temperature=0.0)
  assert picked.token.tolist() == [1, 0]
  np.testing.assert_allclose(picked.logprob, np.log([0.5, 0.6]), atol=1e-6)
  np.testing.assert_allclose(
    picked.top_logprobs[:, :2], np.log([[0.5, 0.3], [0.6, 0.3]]), atol=1e-6
  )


def test_temperature_zero_takes_the_smallest_of_equal_ids():
  logits = np.zeros((2, 64))
  logits[1, [13, 31]] = 1.0
  assert _pick(logits, _keys(4, 2), temperature=0.0).token.tolist() == [0, 13]


def test_temperature_zero_obeys_bias_and_masks_alone():
  logits = np.tile(np.log(_PROBS), (4, 1))
  picked = _pick(
    logits,
    _keys(5, 4),
    temperature=0.0,
    top_k=1,
    top_p=0.1,
    min_p=0.9,
    stop_ids=[[0, -1]] * 4,
    min_tokens=[0, 1, 1, 1],
    bias_ids=[[-1, -1], [-1, -1], [3, -1], [1, 3]],
    bias=[[0, 0], [0, 0], [9.0, 0], [-np.inf, 1.0]],
  )
  assert picked.token.tolist() == [0, 1, 3, 2]
  expected = np.log(_PROBS[[0, 1, 3, 2]])
  np.testing.assert_allclose(picked.logprob, expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-42])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
  logits = _normal(6, 8, 64)
  picked = _pick(logits, _keys(6, 8), temperature=temperature)
  assert picked.token.tolist() == logits.argmax(-1).tolist()
  assert np.isfinite(picked.logprob).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_id_is_drawn_from_min_tokens_on(temperature):
  logits = np.tile([9.0, 0.0, 8.0], (6, 1))
  picked = _pick(
    logits,
    _keys(7, 6),
    temperature=temperature,
    made=np.arange(6),
    min_tokens=[3] * 6,
    stop_ids=[[2, 0, -1]] * 6,
  )
  assert picked.token.tolist()[:3] == [1, 1, 1]
  assert set(picked.token.tolist()[3:]) <= {0, 2}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}])
def test_without_any_token_left_the_most_probable_is_taken(options):
  logits = np.tile(np.log(_PROBS), (40, 1))[:, [1, 0, 2, 3]]
  picked = _pick(
    logits,
    _keys(9, 40),
    bias_ids=[[0, 1, 2]],
    bias=[[-np.inf] * 3],
    stop_ids=[[3]],
    min_tokens=1,
    made=np.arange(40) % 2,
    **options,
  )
  assert picked.token.tolist() == [1, 3] * 20


def test_ids_beyond_the_vocabulary_and_padding_change_nothing():
  logits = _normal(10, 30, 64)
  plain = _pick(logits, _keys(10, 30))
  other = _pick(
    logits,
    _keys(10, 30),
    bias_ids=[[64, -1, 65]],
    bias=[[50.0, 50.0, -np.inf]],
    stop_ids=[[-1, 64]],
    min_tokens=1,
  )
  assert plain.token.tolist() == other.token.tolist()


def test_tokens_without_probability_are_never_drawn():
  logits = np.full((5000, 7), -np.inf)
  logits[:, [1, 4]] = 0.0
  for options in ({}, {"top_k": 5}, {"top_p": 0.999999}, {"min_p": 1e-9}):
    picked = _pick(logits, _keys(5, 5000), **options)
    assert set(np.asarray(picked.token).tolist()) == {1, 4}


def test_a_row_of_nan_shows_in_its_logprob_and_nowhere_else():
  logits = _normal(11, 4, 331)
  keys = _keys(11, 4)
  plain = _pick(logits, keys)
  logits[2, 7] = np.nan
  for top_p in (1.0, 0.9):
    options = [1.0, 1.0, top_p, 1.0]
    picked = _pick(logits, keys, top_p=options)
    assert np.isnan(picked.logprob[2]) and 0 <= picked.token[2] < 331
    for field in ("token", "logprob", "top_ids", "top_logprobs"):
      for row in (0, 1, 3):
        assert (getattr(picked, field)[row] == getattr(plain, field)[row]).all()


@pytest.mark.parametrize(
  ("vocab", "num"), [(7, 0), (7, 4), (7, 7), (64, 4), (331, 4), (331, 40)]
)
def test_the_top_n_are_the_largest_in_falling_order(vocab, num):
  # Many are equal. Adding 0 leaves no -0.
  logits = np.round(_normal(vocab, 6, vocab) * 2) / 2 + 0.0
  order = np.argsort(-logits, axis=-1, kind="stable")[:, :num]
  logprobs = _log_softmax(logits / 0.7)
  logprobs = np.take_along_axis(logprobs, order, axis=-1)
  picked = _pick(logits, _keys(12, 6), temperature=0.7, num_top=num)
  assert picked.top_ids.shape == picked.top_logprobs.shape == (6, num)
  assert picked.top_ids.tolist() == order.tolist()
  np.testing.assert_allclose(picked.top_logprobs, logprobs, atol=2e-6)


_MIXED = [
  {},
  {"temperature": 0.6},
  {"temperature": 0.0},
  {"top_k": 7},
  {"top_p": 0.8},
  {"min_p": 0.05},
  {"min_tokens": 4, "stop_ids": [3, 60, -1]},
  {"min_tokens": 2, "stop_ids": [3, 60, -1]},
  {"bias_ids": [5, -1], "bias": [4.0, 0.0]},
  {"bias_ids": [5, 9], "bias": [-math.inf, 1.5], "temperature": 0.0},
  {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
  {
    "temperature": 0.8,
    "top_k": 12,
    "top_p": 0.95,
    "min_tokens": 4,
    "stop_ids": [1, 2, 3],
    "bias_ids": [8, 1],
    "bias": [-math.inf, 3.0],
  },
]


def _mixed(order):
  """Controls whose i-th row is `_MIXED[order[i]]`."""
  plain = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop_ids": [-1] * 3,
    "min_tokens": 0,
    "bias_ids": [-1] * 2,
    "bias": [0.0] * 2,
  }
  rows = [plain | _MIXED[i] for i in order]
  return {name: [row[name] for row in rows] for name in plain}


def test_mixed_rows_draw_from_their_own_distributions():
  order = np.arange(20 * len(_MIXED)) % len(_MIXED)
  logits = _normal(13, len(order), 64)
  keys = _keys(13, len(order))
  picked = _pick(logits, keys, made=3, **_mixed(order))
  random = [r for r, i in enumerate(order) if _MIXED[i].get("temperature", 1)]
  weights = [_weights(logits[r], made=3, **_MIXED[order[r]]) for r in random]
  _check_draws(
    np.asarray(picked.token)[random], keys[np.array(random)], weights
  )
  temperature = np.array(
    [_MIXED[i].get("temperature", 1.0) or 1 for i in order]
  )
  logprobs = _log_softmax(logits / temperature[:, None])
  np.testing.assert_allclose(
    picked.logprob,
    logprobs[np.arange(len(order)), np.asarray(picked.token)],
    atol=3e-6,
  )


@pytest.mark.parametrize("vocab", [64, 331])
def test_c48_a_row_is_the_same_bit_by_bit_among_any_others(vocab):
  num = len(_MIXED)
  logits, keys = _normal(14, num, vocab), _keys(14, num)
  others = np.random.default_rng(15).permuted(
    np.tile(np.arange(num), (num, 1)), axis=1
  )
  seen = {}
  for batch in range(num):
    # A plain batch of one kind first, then each row with eleven others.
    for order in (np.full(num, batch), others[batch]):
      picked = _pick(logits[order], keys[order], made=3, **_mixed(order))
      for place, row in enumerate(order):
        bits = [np.asarray(x[place]).tobytes() for x in jax.tree.leaves(picked)]
        assert seen.setdefault(int(row), bits) == bits
  assert len(seen) == num


@hypothesis.given(
  seed=st.integers(0, 2**16),
  temperature=st.sampled_from([0.3, 1.0, 2.5]),
  top_k=st.integers(0, 40),
  top_p=st.floats(0.05, 1.0),
  min_p=st.floats(0.0, 0.5),
  made=st.integers(0, 2),
  bias=st.lists(
    st.tuples(st.integers(-1, 63), st.floats(-20, 20) | st.just(-math.inf)),
    min_size=2,
    max_size=2,
    unique_by=lambda pair: pair[0],
  ),
)
@hypothesis.settings(max_examples=100)
def test_draws_meet_the_distribution_of_the_slow_reference(
  seed, temperature, top_k, top_p, min_p, made, bias
):
  ids, added = zip(*bias, strict=True)
  fields = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
  per_row = dict(stop_ids=[4, 5], bias_ids=ids, bias=added, min_tokens=1)
  logits, keys = _normal(seed, 16, 64), _keys(seed, 16)
  wide = {
    name: [value] * 16 if name == "min_tokens" else [list(value)] * 16
    for name, value in per_row.items()
  }
  picked = _pick(logits, keys, made=made, **fields, **wide)
  logits = np.asarray(jnp.asarray(logits, jnp.float32))
  weights = [_weights(row, made=made, **fields, **per_row) for row in logits]
  _check_draws(np.asarray(picked.token), keys, weights)
