"""Scores of tokens, and their gradients, against the plain formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import workloads
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import scoring, transformer
from jaxrl_post.models import spec as specs

_ROWS, _LENGTH, _WIDTH, _VOCAB = 2, 7, 8, 32


def _config(**sizes) -> transformer.Config:
  given = dict(
    num_layers=1,
    width=_WIDTH,
    num_heads=2,
    num_kv_heads=1,
    head_width=4,
    ff_width=8,
    vocab_size=_VOCAB,
  )
  return transformer.Config(**(given | sizes))


def _inputs(rows=_ROWS, length=_LENGTH):
  """Returns hidden, targets and temperatures, one of which is 0."""
  draw = np.random.default_rng(0)
  hidden = draw.normal(size=(rows, length, _WIDTH)).astype(np.float32)
  targets = draw.integers(0, _VOCAB, (rows, length))
  temperature = draw.uniform(0.5, 2.0, (rows, length)).astype(np.float32)
  temperature[0, 1] = 0.0
  return (
    jnp.asarray(hidden),
    jnp.asarray(targets, jnp.int32),
    jnp.asarray(temperature),
  )


def _head(tied: bool):
  shape = (_VOCAB, _WIDTH) if tied else (_WIDTH, _VOCAB)
  drawn = np.random.default_rng(1).normal(size=shape).astype(np.float32)
  return {"embed" if tied else "head": jnp.asarray(drawn)}


def _plain(params, cfg, hidden, targets, temperature):
  """The formulas, with all logits at once."""
  logits = transformer.logits(params, cfg, hidden)
  logits = logits / jnp.where(temperature > 0, temperature, 1.0)[..., None]
  table = jax.nn.log_softmax(logits)
  taken = jnp.take_along_axis(table, targets[..., None], axis=-1)[..., 0]
  return taken, -jnp.sum(jnp.exp(table) * table, axis=-1)


def _weighted(score, hidden, targets, temperature, params):
  """Returns both results, and the gradient of a sum of them."""
  draw = np.random.default_rng(2)
  weights = draw.normal(size=(2, *targets.shape)).astype(np.float32)

  def total(params, hidden):
    found = score(params, hidden, targets, temperature)
    return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True)), (
      found
    )

  grads, found = jax.jit(jax.grad(total, (0, 1), has_aux=True))(params, hidden)
  return found, grads


def _close(got, wanted, atol):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      np.asarray(x, np.float32), np.asarray(y, np.float32), atol=atol
    ),
    got,
    wanted,
  )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
@pytest.mark.parametrize("chunk", [1, 3, _LENGTH, 5 * _LENGTH])
def test_scores_and_gradients_are_those_of_the_plain_formulas(chunk, tied):
  cfg, params = _config(tie_embeddings=tied), _head(tied)
  inputs = _inputs()

  def ours(params, hidden, targets, temperature):
    return scoring.token_logprobs(
      params, cfg, hidden, targets, temperature, chunk=chunk
    )

  def plain(params, hidden, targets, temperature):
    return _plain(params, cfg, hidden, targets, temperature)

  got = _weighted(ours, *inputs, params)
  wanted = _weighted(plain, *inputs, params)
  assert all(x.dtype == jnp.float32 for x in got[0])
  _close(got, wanted, 1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
@pytest.mark.parametrize("masked", [False, True])
def test_several_targets_of_a_position_score_as_each_alone(tied, masked):
  cfg, params = _config(tie_embeddings=tied), _head(tied)
  hidden, targets, temperature = _inputs()
  several = (targets[..., None] + jnp.asarray([0, 3, 0, 9])) % _VOCAB
  weights = jnp.asarray(np.random.default_rng(4).normal(size=several.shape))
  wanted = jnp.asarray(np.random.default_rng(3).random(targets.shape) < 0.5)
  wanted = wanted if masked else None

  def together(params, hidden):
    found, entropy = scoring.token_logprobs(
      params, cfg, hidden, several, temperature, chunk=3, wanted=wanted
    )
    return jnp.sum(weights * found) + jnp.sum(entropy), (found, entropy)

  def alone(params, hidden):
    found = [
      scoring.token_logprobs(
        params,
        cfg,
        hidden,
        several[..., i],
        temperature,
        chunk=3,
        wanted=wanted,
      )
      for i in range(4)
    ]
    entropy = found[0][1]
    found = jnp.stack([x for x, _ in found], axis=-1)
    return jnp.sum(weights * found) + jnp.sum(entropy), (found, entropy)

  one, other = (
    jax.jit(jax.grad(f, (0, 1), has_aux=True))(params, hidden)
    for f in (together, alone)
  )
  _close(one, other, 1e-5)


@pytest.mark.parametrize("num", [1, 5, _VOCAB])
def test_the_most_probable_ids_are_those_of_all_logits(num):
  cfg, params = _config(), _head(True)
  hidden, _, temperature = _inputs()
  wanted = jnp.asarray(np.random.default_rng(3).random(temperature.shape) < 0.5)
  ids, found = scoring.most_probable(
    params, cfg, hidden, temperature, num=num, chunk=3, wanted=wanted
  )
  logits = transformer.logits(params, cfg, hidden)
  logits = logits / jnp.where(temperature > 0, temperature, 1.0)[..., None]
  best, at = jax.lax.top_k(jax.nn.log_softmax(logits), num)
  keep = np.asarray(wanted)
  np.testing.assert_array_equal(np.asarray(ids)[keep], np.asarray(at)[keep])
  np.testing.assert_allclose(found[keep], best[keep], atol=1e-5)
  assert not np.asarray(ids)[~keep].any() and not found[~keep].any()


def test_what_is_not_wanted_is_zero_and_has_no_gradient():
  cfg, params = _config(), _head(True)
  inputs = _inputs()
  wanted = jnp.asarray(np.random.default_rng(3).random(inputs[1].shape) < 0.4)
  assert wanted.any() and not wanted.all()

  def ours(params, *args):
    return scoring.token_logprobs(params, cfg, *args, chunk=3, wanted=wanted)

  def plain(params, *args):
    found = _plain(params, cfg, *args)
    return tuple(jnp.where(wanted, x, 0.0) for x in found)

  got = _weighted(ours, *inputs, params)
  _close(got, _weighted(plain, *inputs, params), 1e-5)
  for x in (*got[0], got[1][1]):
    assert not np.any(np.asarray(x)[~np.asarray(wanted)])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
def test_bfloat16_is_close_and_adds_up_in_float32(tied):
  cfg, params = _config(tie_embeddings=tied), _head(tied)
  hidden, targets, temperature = _inputs()

  def ours(params, hidden, targets, temperature):
    return scoring.token_logprobs(
      params, cfg, hidden, targets, temperature, chunk=3
    )

  half = hidden.astype(jnp.bfloat16)
  got = _weighted(ours, half, targets, temperature, params)
  wanted = _weighted(ours, hidden, targets, temperature, params)
  assert all(x.dtype == jnp.float32 for x in got[0])
  assert jax.tree.leaves(got[1][0])[0].dtype == jnp.float32
  assert got[1][1].dtype == jnp.bfloat16
  _close(got[0], wanted[0], 0.05)
  _close(got[1], wanted[1], 0.15)


def test_the_gradient_of_entropy_is_that_of_finite_differences():
  cfg, params = _config(), _head(True)
  hidden, targets, temperature = _inputs()

  def entropy(hidden):
    found = scoring.token_logprobs(
      params, cfg, hidden, targets, temperature, chunk=3
    )
    return jnp.sum(found[1])

  value = jax.jit(entropy)
  slope = np.asarray(jax.jit(jax.grad(entropy))(hidden))
  assert np.abs(slope).max() > 0.1
  for place in ((0, 0, 0), (0, 1, 3), (1, 4, 5), (1, 6, 7)):
    step = np.zeros(hidden.shape, np.float32)
    step[place] = 1e-2
    rise = (float(value(hidden + step)) - float(value(hidden - step))) / 2e-2
    np.testing.assert_allclose(slope[place], rise, atol=5e-3)


def test_the_temperature_has_no_gradient():
  params, (hidden, targets, temperature) = _head(True), _inputs()

  def total(temperature):
    found = scoring.token_logprobs(
      params, _config(), hidden, targets, temperature, chunk=3
    )
    return jnp.sum(found[0] + found[1])

  assert not np.any(jax.jit(jax.grad(total))(temperature))


@pytest.mark.parametrize("weight", [None, 0.0], ids=["unused", "masked"])
def test_entropy_that_does_not_count_adds_nothing_to_the_gradient(weight):
  cfg, params = _config(), _head(True)
  hidden, targets, temperature = _inputs()

  def gradient(weight):
    def total(params, hidden):
      logprobs, entropy = scoring.token_logprobs(
        params, cfg, hidden, targets, temperature, chunk=3
      )
      taken = jnp.sum(logprobs)
      return taken if weight is None else taken + jnp.sum(weight * entropy)

    return jax.jit(jax.grad(total, (0, 1)))(params, hidden)

  def plain(params, hidden):
    return jnp.sum(_plain(params, cfg, hidden, targets, temperature)[0])

  _close(
    gradient(weight), jax.jit(jax.grad(plain, (0, 1)))(params, hidden), 1e-5
  )
  for got, one in zip(
    jax.tree.leaves(gradient(weight)),
    jax.tree.leaves(gradient(None)),
    strict=True,
  ):
    np.testing.assert_array_equal(got, one)


@pytest.mark.parametrize("count", [0, 3, 4])
def test_chunks_without_a_wanted_token_are_not_computed(count):
  """Their states may be anything: no product ever meets them."""
  params = _head(True)
  hidden, targets, temperature = _inputs(1, 7)
  wanted = np.isin(np.arange(7), (6, 0, 4, 2)[:count])[None]
  # What fills up the last chunk has to be finite, as any state is.
  free = np.flatnonzero(~wanted[0])[(-count) % 3 :]
  hidden = hidden.at[0, free].set(jnp.nan)

  def total(params, hidden):
    found = scoring.token_logprobs(
      params,
      _config(),
      hidden,
      targets,
      temperature,
      chunk=3,
      wanted=jnp.asarray(wanted),
    )
    return sum(map(jnp.sum, found)), found

  grads, found = jax.jit(jax.grad(total, (0, 1), has_aux=True))(params, hidden)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, found)))
  assert np.any(grads[0]["embed"]) == (count > 0)
  np.testing.assert_array_equal(np.any(grads[1], axis=-1), wanted)


def test_logprobs_are_aligned_with_tokens_and_their_temperature():
  cfg = _config()
  params = specs.init(
    transformer.spec(cfg), jax.random.key(0), jnp.dtype("float32")
  )
  _, tokens, temperature = _inputs()
  places = jnp.broadcast_to(jnp.arange(_LENGTH), tokens.shape)
  segments = jnp.ones_like(tokens)
  hidden, _ = transformer.forward(
    params, cfg, tokens, places, segment_ids=segments
  )
  wanted = _plain(
    params, cfg, hidden[:, :-1], tokens[:, 1:], temperature[:, 1:]
  )
  got = decoders.logprobs(
    decoders.Decoder(cfg, chunk=4),
    params,
    tokens=tokens,
    positions=places,
    segment_ids=segments,
    temperature=temperature,
  )
  for x, y in zip(got, wanted, strict=True):
    np.testing.assert_allclose(x[:, 1:], y, atol=1e-5)
    np.testing.assert_array_equal(x[:, 0], 0.0)


# --------------------------------------------------------------------- memory


@functools.cache
def _memory(layers: int, vocab: int, **more) -> int:
  """Returns temporary bytes of loss and gradient over 4096 tokens of W3."""
  w = workloads.WORKLOADS["W3"]
  cfg = transformer.Config(
    num_layers=layers,
    width=w.width,
    num_heads=w.heads,
    num_kv_heads=w.kv_heads,
    head_width=w.head_width,
    ff_width=w.ff,
    vocab_size=vocab,
  )

  def loss(params, tokens, temperature):
    found = decoders.logprobs(
      decoders.Decoder(cfg, **more),
      params,
      tokens=tokens,
      positions=tokens,
      segment_ids=tokens,
      temperature=temperature,
    )
    return sum(map(jnp.sum, found))

  params = specs.abstract(transformer.spec(cfg), jnp.dtype("float32"))
  ids = jax.ShapeDtypeStruct((32, 128), jnp.int32)
  program = jax.jit(jax.value_and_grad(loss)).lower(
    params, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32)
  )
  return program.compile().memory_analysis().temp_size_in_bytes


def test_memory_hardly_grows_with_the_vocabulary():
  """All temporaries, with one head's gradient that is not yet in its sum."""
  vocab = workloads.WORKLOADS["W3"].vocab
  small, large = _memory(30, vocab), _memory(30, 2 * vocab)
  assert small < large < 1.05 * small


def test_two_chunks_of_logits_are_held_and_no_more():
  w = workloads.WORKLOADS["W3"]
  few, many = (_memory(1, w.vocab, chunk=chunk) for chunk in (1024, 2048))
  row = w.vocab * 4
  assert many > 2 * 2048 * row  # The peak is there.
  assert many - few <= 2 * 1024 * row * 1.02


def test_each_choice_of_remat_keeps_less_than_the_one_before():
  vocab = workloads.WORKLOADS["W3"].vocab
  none, dots, layer = (
    _memory(30, vocab, **more)
    for more in ({}, {"remat": "dots"}, {"remat": "layer"})
  )
  assert none > 1.2 * dots > 1.2 * 1.2 * layer
