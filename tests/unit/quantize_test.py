"""Weights and cache in 8 bits: how far off, and nothing else is changed."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from hypothesis import strategies as st

from jaxrl_post import config, prepare, types
from jaxrl_post.models import quantize, transformer
from jaxrl_post.sampling import attention, pages
from jaxrl_post.sampling import engine as engines
from tests.e2e import runs
from tests.unit import engines as making

_CONFIG = dataclasses.replace(
  making.CONFIG, qkv_bias=True, qk_norm=True, tie_embeddings=False
)
_SPEC = transformer.spec(_CONFIG)
_MATRICES = {"q", "k", "v", "o", "gate", "up", "down"}


_params = functools.partial(making.params, _CONFIG)


@functools.cache
def _quantized():
  return jax.jit(functools.partial(quantize.quantize, _SPEC))(_params())


@functools.cache
def _dequantized():
  return jax.jit(functools.partial(quantize.dequantize, _SPEC))(_quantized())


# -------------------------------------------------------------------- numbers


@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  shape=st.sampled_from([(1, 1), (7, 3), (64, 5), (3, 4, 5)]),
  power=st.integers(-30, 30),
  blank=st.booleans(),
)
def test_a_value_is_at_most_half_a_scale_off(seed, shape, power, blank):
  draw = np.random.default_rng(seed)
  x = (draw.standard_normal(shape) * 2.0**power).astype(np.float32)
  if blank:
    x[..., 0] = 0
  dims = tuple(range(len(shape) - 1))
  got = np.asarray(quantize.values(jnp.asarray(x), dims))
  scale = np.asarray(quantize.scales(jnp.asarray(x), dims))
  assert (got.dtype, scale.dtype) == (np.int8, np.float32)
  assert scale.shape == shape[-1:]
  assert np.abs(got.astype(int)).max() <= 127
  error = np.abs(x.astype(np.float64) - got.astype(np.float64) * scale)
  # What float32 rounds of 127 scales comes on top.
  assert np.all(error <= scale.astype(np.float64) * (0.5 + 127 * 2.0**-22))
  used = np.abs(x).max(dims) > 0
  assert np.all(np.abs(got).max(dims)[used] == 127)
  assert np.all(scale[~used] == 1)
  assert np.all(got[..., ~used] == 0)


def test_half_way_cases_go_to_the_even_integer():
  x = jnp.asarray([127.0, 0.5, 1.5, -0.5, -2.5])[:, None] * 2.0**-3
  # 127 times float32(1 / 127) is 1 exactly, so the scale is 2**-3.
  assert quantize.scales(x, (0,)).tolist() == [2.0**-3]
  assert quantize.values(x, (0,))[:, 0].tolist() == [127, 0, 2, 0, -2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(bad):
  x = jnp.asarray([[1.0, 1.0], [bad, 2.0]])
  made = quantize.Int8(
    values=quantize.values(x, (0,)), scale=quantize.scales(x, (0,))
  )
  made = quantize.product(jnp.eye(2), made, 1)
  assert not np.any(np.isfinite(np.asarray(made)[:, 0]))
  np.testing.assert_allclose(made[:, 1], [1.0, 2.0], atol=1 / 127)


# -------------------------------------------------------------------- weights


def test_the_matrices_of_layers_are_quantized_and_nothing_else():
  tree = quantize.spec(_SPEC)
  found = {k for k, w in tree["layers"].items() if quantize.is_int8(w)}
  assert found == _MATRICES
  for name in ("embed", "head", "final_norm"):
    assert tree[name] == _SPEC[name]
  assert quantize.channels(_SPEC) == {
    f"['layers']['{name}']": (1, 2) if name == "o" else (1,)
    for name in _MATRICES
  }


@pytest.mark.parametrize("name", sorted(_MATRICES))
def test_a_scale_has_the_axes_of_its_weights_outputs(name):
  weight = _SPEC["layers"][name]
  made = quantize.spec(_SPEC)["layers"][name]
  inputs = 2 if name == "o" else 1
  assert made.values == weight
  assert made.scale.shape == (2, *weight.shape[1 + inputs :])
  assert made.scale.axes == ("layers", *weight.axes[1 + inputs :])


def test_dequantized_weights_are_the_trained_ones_to_half_a_scale():
  quantized, back = _quantized(), _dequantized()
  for name in ("q_bias", "k_norm", "mlp_norm"):
    assert np.array_equal(quantized["layers"][name], _params()["layers"][name])
  for name in _MATRICES:
    scale = quantized["layers"][name].scale
    inputs = (1, 2) if name == "o" else (1,)
    bound = np.expand_dims(np.asarray(scale), inputs) * 0.501
    gap = np.abs(back["layers"][name] - _params()["layers"][name])
    assert np.all(gap <= bound)
    assert np.any(gap > 0)


# --------------------------------------------------------------------- engine


def _sampled(params, **sizes):
  """Completions of two groups, one of a prompt of several pages.

  Products are float32, whatever is quantized.
  """
  cfg = engines.Sampling(rows=6, block=4, max_tokens=12, page=4, **sizes)
  engine = making.engine(cfg, max_prompt=24, group=3, key=3, config=_CONFIG)
  sampling = types.SamplingParams(temperature=1.0, max_tokens=12)
  requests = [
    types.Request(
      prompt=tuple(range(1, 22)), uids=(0, 1, 2), sampling=sampling
    ),
    types.Request(prompt=(5,), uids=(3, 4), sampling=sampling),
  ]
  policy = types.Policy(params=params, version=0, step=0)
  return engines.generate(engine, policy, requests)


def test_int8_weights_sample_as_the_float32_weights_they_stand_for():
  got = _sampled(_quantized())
  expected = _sampled(_dequantized())
  assert [c.tokens for c in got] == [c.tokens for c in expected]
  for mine, other in zip(got, expected, strict=True):
    np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)
  plain = _sampled(_params())
  gaps = [
    abs(a - b)
    for mine, other in zip(got, plain, strict=True)
    for a, b, x, y in zip(
      mine.logprobs, other.logprobs, mine.tokens, other.tokens, strict=True
    )
    if x == y
  ]
  assert max(gaps) > 1e-4  # They are not those that were trained.


def test_unstacked_and_stacked_quantized_weights_are_the_same():
  params = _quantized()
  tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
  positions = jnp.broadcast_to(jnp.arange(6), (2, 6))

  @jax.jit
  def run(params):
    return transformer.forward(params, _CONFIG, tokens, positions)[0]

  whole, loose = run(params), run(transformer.unstack(params))
  np.testing.assert_allclose(whole, loose, atol=1e-5)


def test_products_in_bfloat16_are_scaled_in_float32():
  """A scale in bfloat16 would be off by up to 2**-9 for a whole channel."""
  draw = np.random.default_rng(0)
  x = jnp.asarray(draw.standard_normal((3, 64)), jnp.bfloat16)
  w = jnp.asarray(draw.standard_normal((64, 5)), jnp.float32)
  made = quantize.Int8(
    values=quantize.values(w, (0,)), scale=quantize.scales(w, (0,))
  )
  exact = np.asarray(x, np.float64) @ (
    np.asarray(made.values, np.float64) * np.asarray(made.scale)
  )
  got = quantize.product(x, made, 1)
  assert got.dtype == jnp.bfloat16
  # One rounding of the result, and no other.
  np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-8)


# ---------------------------------------------------------------------- cache


def test_a_cache_in_8_bits_samples_nearly_the_same():
  got = _sampled(_params(), dtype="int8_cache")
  expected = _sampled(_params())
  assert [c.tokens[0] for c in got] == [c.tokens[0] for c in expected]
  gaps = [
    abs(mine.logprobs[0] - other.logprobs[0])
    for mine, other in zip(got, expected, strict=True)
  ]
  assert 0 < max(gaps) < 0.02


def _slow(x):
  """A key or value as 8 bits hold it, in float64."""
  scale = np.abs(x).max() * np.float32(1 / 127)
  return np.rint(x / scale).astype(np.float64) * scale


def _attend_slowly(q, k, v):
  """What one row's queries [N, H] read in [S, K, H], a head at a time."""
  out = np.zeros(q.shape)
  for head in range(q.shape[0]):
    mine = head * k.shape[1] // q.shape[0]
    score = k[:, mine] @ q[head] / np.sqrt(q.shape[1])
    weight = np.exp(score - score.max())
    out[head] = weight @ v[:, mine] / weight.sum()
  return out


def test_attention_to_a_cache_in_8_bits_is_that_of_a_slow_reference():
  heads, kv, width = _CONFIG.num_heads, _CONFIG.num_kv_heads, 8
  size = pages.sizes(rows=3, group=2, page=4, max_prompt=11, max_tokens=6)
  own = pages.empty_pools(_CONFIG, size, size.pages, "int8")[0]
  prompt = pages.empty_pools(_CONFIG, size, size.pool_pages, "int8")[0]
  assert {str(x.dtype) for x in own[:2]} == {"int8"}
  table = pages.empty_table(size)
  draw = np.random.default_rng(0)

  def normal(*shape):
    return draw.standard_normal(shape).astype(np.float32)

  lengths, seen_by = [11, 11, 5], []
  for at, length in (([0, 1], 11), ([2, 3], 5)):
    k, v = normal(length, kv, width), normal(length, kv, width)
    table, where = pages.join(
      table,
      jnp.asarray([at]),
      jnp.arange(2)[None],
      jnp.uint32([length]),
      jnp.int32([length]),
      page=4,
    )
    prompt = pages.fill(
      prompt, where, jnp.asarray(k)[None], jnp.asarray(v)[None]
    )
    past = [[[_slow(h) for h in t] for t in x[:-1]] for x in (k, v)]
    seen_by += [[list(x) for x in past] for row in at if row < 3]

  @jax.jit
  def attend(table, own, position, q, k, v):
    active = jnp.ones((1, 3), bool)
    table = pages.advance(table, position, active, 4)
    groups = attention.groups(table, 4)
    view = attention.view(table, groups, position, active, 4)
    return table, *attention.attend(view, (own, prompt), q, k, v)

  for step in range(6):
    position = jnp.asarray([[n - 1 + step for n in lengths]])
    q, k, v = (normal(1, 3, n, width) for n in (heads, kv, kv))
    table, read, own = attend(table, own, position, q, k, v)
    for row, history in enumerate(seen_by):
      for past, new in zip(history, (k, v), strict=True):
        past.append([_slow(h) for h in new[0, row]])
      expected = _attend_slowly(q[0, row], *map(np.asarray, history))
      np.testing.assert_allclose(read[0, row], expected, atol=1e-5)


# ------------------------------------------------------------------- settings


@pytest.mark.parametrize(
  ("dtype", "compute", "weights", "cache"),
  [
    ("float32", "float32", False, False),
    ("bfloat16", "bfloat16", False, False),
    ("int8", "bfloat16", True, False),
    ("int8_cache", "bfloat16", True, True),
  ],
)
def test_a_dtype_says_what_is_quantized(dtype, compute, weights, cache):
  cfg = engines.Sampling(dtype=dtype)
  assert cfg.compute == compute
  assert (cfg.quantized, cfg.quantized_cache) == (weights, cache)


@pytest.mark.parametrize("dtype", ["int8", "int8_cache"])
def test_quantized_rollouts_without_their_correction_are_refused(dtype):
  with pytest.raises(
    types.InputError, match=f"algo.correction: .*dtype={dtype}.* got none"
  ):
    runs.configured(f"sampling.dtype={dtype}", "algo.correction=none")
  assert runs.configured(f"sampling.dtype={dtype}").sampling.dtype == dtype


def test_an_unknown_dtype_is_refused():
  with pytest.raises(types.InputError, match="'int8_cache', got 'int4'"):
    runs.configured("sampling.dtype=int4")


def test_rounding_that_nothing_corrects_is_warned_of(monkeypatch):
  lines = []
  monkeypatch.setattr(
    logging, "warning", lambda text, *args: lines.append(text % args)
  )
  for settings, count in (
    (["algo.correction=none"], 0),
    (["sampling.dtype=bfloat16"], 0),
    (["sampling.dtype=bfloat16", "algo.correction=none"], 1),
  ):
    lines.clear()
    prepare.prepare(runs.configured(*settings))
    assert len([line for line in lines if "algo.correction" in line]) == count


def test_the_dtype_is_no_setting_that_a_continued_run_may_change():
  run = runs.configured("sampling.dtype=int8")
  assert not [n for n in config.may_change(run) if n.startswith("sampling")]
  assert dataclasses.replace(run.sampling, dtype="float32").compute == "float32"
