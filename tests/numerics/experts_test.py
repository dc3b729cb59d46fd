"""A mixture of experts against transformers, and against one expert a time."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post.algos import grpo
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import experts, transformer, weights
from jaxrl_post.training import balance, step
from tests.numerics import update_test as updates
from tests.reference import tiny_folder
from tests.unit import engines as making

VALUES = pathlib.Path(__file__).parents[1] / "reference" / "values"
CONFIG = dataclasses.replace(
  making.CONFIG, ff_width=24, experts=experts.Experts(num=8, per_token=2)
)
DECODER = decoders.Decoder(CONFIG, chunk=7)


@pytest.fixture(name="stored", scope="module")
def _stored() -> dict[str, np.ndarray]:
  return dict(np.load(VALUES / "mixtures.npz"))


@functools.cache
def _params():
  return making.params(CONFIG, seed=3)


# ------------------------------------------------------------ the checkpoint


@pytest.mark.parametrize("normalize", [True, False])
def test_logits_and_loads_are_those_of_transformers(
  tmp_path, stored, normalize
):
  options = {"norm_topk_prob": normalize}
  tiny_folder.write(tmp_path, "qwen3_moe", shards=2, **options)
  cfg = weights.read_config(str(tmp_path))
  assert cfg.experts == experts.Experts(8, 3, normalize)
  params = weights.read_params(str(tmp_path), cfg)
  tokens = jnp.asarray(stored["tokens"])
  decoder = decoders.Decoder(cfg)

  @jax.jit
  def forward(params):
    hidden, told = decoders.routed(
      decoder,
      params,
      tokens=tokens,
      positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
      segment_ids=jnp.ones_like(tokens),
    )
    return transformer.logits(params, cfg, hidden), told

  logits, told = forward(params)
  expected = stored[f"logits_{normalize}"]
  # Values that a wrong model would not meet by being near zero.
  assert expected.std() > 0.5
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
  # transformers has the sum of one layer; ours is the mean of all.
  found = experts.imbalance(told.counts, told.probs, jnp.float32(tokens.size))
  one_by_one = stored[f"balance_{normalize}"]
  assert np.ptp(one_by_one) > 0.01
  np.testing.assert_allclose(found, one_by_one.mean(), rtol=1e-5)
  np.testing.assert_array_equal(told.counts.sum(1), 3.0 * tokens.size)


# ------------------------------------------------------- one expert at a time


def _slow(cfg, x, w):
  """Computes every expert for every token, and adds up those that count."""
  probs = jax.nn.softmax(jnp.einsum("btd,de->bte", x, w.router))
  best = jnp.argsort(-probs, axis=-1, stable=True)[..., : cfg.per_token]
  taken = jnp.any(best[..., None] == jnp.arange(cfg.num), axis=2)
  share = jnp.where(taken, probs, 0.0)
  if cfg.normalize:
    share = share / jnp.sum(share, axis=-1, keepdims=True)
  total = jnp.zeros_like(x)
  for e in range(cfg.num):
    gated = jax.nn.silu(x @ w.gate[e]) * (x @ w.up[e])
    total = total + share[..., e, None] * (gated @ w.down[e])
  return total


def _layer(num, dtype="float32"):
  draw = np.random.default_rng(5)
  shapes = ((12, num), (num, 12, 6), (num, 12, 6), (num, 6, 12))
  made = (draw.standard_normal(s) / np.sqrt(s[-2]) for s in shapes)
  return experts.Weights(*(jnp.asarray(x, dtype) for x in made))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num", "per_token"), [(4, 1), (5, 3), (3, 3)])
def test_sorted_tokens_give_what_each_expert_gives_alone(
  num, per_token, normalize
):
  cfg, w = experts.Experts(num, per_token, normalize), _layer(num)
  x = jax.random.normal(jax.random.key(0), (2, 7, 12))

  def loss(make):
    def one(x, w):
      made = make(cfg, x, w)
      slopes = jnp.linspace(0.0, 1.0, made.size).reshape(made.shape)
      return jnp.sum(jnp.sin(made) * slopes)

    return jax.jit(jax.value_and_grad(one, argnums=(0, 1)))

  fast = loss(lambda *given: experts.portable(*given, None)[0])(x, w)
  slow = loss(_slow)(x, w)
  for got, expected in zip(
    jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True
  ):
    scale = max(np.abs(expected).max(), 1.0)
    np.testing.assert_allclose(got / scale, expected / scale, atol=1e-6)


@pytest.mark.parametrize("sizes", [(5, 0, 9, 3), (0, 0, 0, 0), (0, 20, 0, 0)])
def test_tiles_of_any_size_give_the_gradient_of_a_weight(monkeypatch, sizes):
  draw = np.random.default_rng(1)
  x, g = (draw.standard_normal((20, n)).astype(np.float32) for n in (3, 4))
  expected, begin = [], 0
  for size in sizes:
    rows = slice(begin, begin := begin + size)
    expected.append(x[rows].T @ g[rows])
  x[begin:], g[begin:] = np.nan, np.nan  # Rows of no group may be anything.
  for tile in (1, 4, 7, 512):
    monkeypatch.setattr(experts, "_TILE", tile)
    made = experts._by_group(*map(jnp.asarray, (x, g)), jnp.asarray(sizes))
    np.testing.assert_allclose(made, expected, atol=1e-5)


def test_an_expert_that_nobody_chooses_has_no_gradient():
  cfg, w = experts.Experts(4, 2), _layer(4)
  x = jax.random.normal(jax.random.key(0), (1, 5, 12))
  chosen = jnp.broadcast_to(jnp.asarray([3, 1]), (1, 5, 2))

  def loss(w):
    return jnp.sum(experts.portable(cfg, x, w, chosen)[0] ** 2)

  grad = jax.grad(loss)(w)
  used = [bool(jnp.any(g != 0)) for g in grad.gate]
  assert used == [False, True, False, True]


def test_the_router_is_float32_in_bfloat16_too():
  cfg, w = experts.Experts(64, 2), _layer(64, "bfloat16")
  x = jax.random.normal(jax.random.key(0), (4, 64, 12), jnp.bfloat16)
  made, ids, probs, _ = experts.portable(cfg, x, w, None)
  assert (made.dtype, probs.dtype) == (jnp.bfloat16, jnp.float32)
  exact = np.asarray(x, np.float64) @ np.asarray(w.router, np.float64)
  best = np.argsort(-exact, axis=-1, kind="stable")[..., :2]
  np.testing.assert_array_equal(ids, best)


# ---------------------------------------------------------------------- replay


def _tokens():
  tokens = jnp.asarray(np.random.RandomState(2).randint(0, 64, (2, 9)))
  return dict(
    tokens=tokens,
    positions=jnp.broadcast_to(jnp.arange(9), (2, 9)),
    segment_ids=jnp.ones((2, 9), jnp.int32),
  )


@pytest.mark.parametrize("loose", [False, True])
def test_a_replayed_routing_gives_the_same_states_and_another_does_not(loose):
  params = transformer.unstack(_params()) if loose else _params()
  run = jax.jit(functools.partial(decoders.routed, DECODER, **_tokens()))
  states = jax.jit(functools.partial(decoders.states, DECODER, **_tokens()))
  hidden, told = run(params)
  assert told.ids.shape == (2, 2, 9, 2)
  np.testing.assert_array_equal(states(params, routing=told.ids), hidden)
  # In any order: a token's experts are a set.
  swapped = states(params, routing=told.ids[..., ::-1])
  np.testing.assert_allclose(swapped, hidden, atol=1e-6)
  others = (told.ids + 1) % 8
  assert np.abs(states(params, routing=others) - hidden).max() > 0.01
  # Where the first pass went replays what the second one would not do.
  moved = jax.tree.map(lambda x: x * 1.5, params)
  _, then = run(moved)
  _, again = run(moved, routing=told.ids)
  assert experts.differing(then.ids, told.ids).max() > 0
  np.testing.assert_array_equal(again.ids, told.ids)


def test_a_dense_model_has_no_routing():
  dense = decoders.Decoder(making.CONFIG)
  with pytest.raises(ValueError, match="no routing without experts"):
    decoders.states(
      dense,
      making.params(),
      routing=jnp.zeros((2, 2, 9, 2), jnp.int32),
      **_tokens(),
    )
  _, told = decoders.routed(dense, making.params(), **_tokens())
  assert told is None


def test_routings_differ_by_the_experts_that_one_of_them_lacks():
  ids = jnp.asarray([[0, 1, 2, 3], [4, 5, 6, 7], [1, 3, 5, 7]])
  others = jnp.asarray([[3, 2, 1, 0], [4, 5, 0, 1], [0, 2, 4, 6]])
  assert experts.differing(ids, others).tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
  "remat", ["layer", pytest.param("dots", marks=pytest.mark.slow)]
)
def test_remat_changes_memory_and_not_numbers(remat):
  def loss(params, decoder):
    logprobs, entropy = decoders.logprobs(
      decoder, params, temperature=jnp.ones((2, 9)), **_tokens()
    )
    return jnp.sum(logprobs) + jnp.sum(entropy)

  grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  plain = grad(_params(), DECODER)
  again = grad(_params(), dataclasses.replace(DECODER, remat=remat))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), plain, again
  )


def test_a_token_goes_where_it_went_when_a_layer_is_made_again():
  def loss(params):
    hidden = decoders.states(
      dataclasses.replace(DECODER, remat="layer"), params, **_tokens()
    )
    return jnp.sum(hidden)

  text = str(jax.make_jaxpr(jax.grad(loss))(_params()))
  # The forward pass chooses; the backward pass does not.
  assert text.count("top_k") == 1


# --------------------------------------------------------------------- balance


def test_equal_loads_are_the_least():
  even = jnp.full((3, 4), 10.0)
  probs = jnp.full((3, 4), 5.0)
  # 20 tokens, two experts each.
  assert float(experts.imbalance(even, probs, jnp.float32(20))) == 2.0
  assert float(experts.most_loaded(even)) == 0.25
  counts = jnp.asarray([[20.0, 20.0, 0, 0]])
  skewed = jnp.asarray([[10.0, 10.0, 0, 0]])
  assert float(experts.imbalance(counts, skewed, jnp.float32(20))) == 4.0
  assert float(experts.most_loaded(counts)) == 0.5
  none = jnp.zeros((1, 4))
  assert float(experts.imbalance(none, none, jnp.float32(0))) == 0.0
  assert float(experts.most_loaded(none)) == 0.0


@functools.cache
def _update(coef, microbatches):
  """Returns the weights and numbers after one step of plain descent."""
  decoder = dataclasses.replace(DECODER, balance=coef)
  algo, tx = grpo.objective(), optax.sgd(1.0)

  @jax.jit
  def train(params, batch):
    batch = step.score(params, batch, decoder=decoder, algo=algo)
    state = step.init(params, jax.random.key(0), tx)
    return step.update(
      state,
      batch,
      decoder=decoder,
      algo=algo,
      optimizer=tx,
      microbatches=microbatches,
    )

  state, metrics = train(_params(), updates._packed())
  gradient = jax.tree.map(lambda a, b: a - b, _params(), state.params)
  return jax.device_get(gradient), jax.device_get(metrics)


def test_balance_adds_its_own_gradient_and_nothing_else():
  with_it, shown = _update(0.5, 1)
  without, plain = _update(0.0, 1)
  assert shown["loss/policy"] == pytest.approx(plain["loss/policy"], abs=1e-6)
  assert shown["moe/balance"] == pytest.approx(plain["moe/balance"], abs=1e-6)
  batch = jax.tree.map(jnp.asarray, updates._packed())

  def imbalance(params):
    _, told = balance.routed(DECODER, params, batch)
    tokens = jnp.sum(jnp.asarray(batch.loss_mask))
    return experts.imbalance(told.counts, told.probs, tokens)

  value, expected = jax.jit(jax.value_and_grad(imbalance))(_params())
  assert shown["moe/balance"] == pytest.approx(float(value), rel=1e-5)
  jax.tree.map(
    lambda x, y, z: np.testing.assert_allclose(x - y, 0.5 * z, atol=2e-5),
    with_it,
    without,
    expected,
  )
  assert np.abs(expected["layers"]["router"]).max() > 1e-3
  assert 1 / 8 < shown["moe/most_loaded"] <= 1 / 2


@pytest.mark.parametrize("microbatches", [2, 8])
def test_c11_balance_is_the_same_for_any_cut_into_microbatches(microbatches):
  (whole, shown), (cut, again) = (_update(0.5, n) for n in (1, microbatches))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), whole, cut
  )
  for name in ("moe/balance", "moe/most_loaded", "loss/grad_norm"):
    assert again[name] == pytest.approx(shown[name], rel=1e-5)


def test_balance_is_of_trained_tokens_only():
  batch = jax.tree.map(jnp.asarray, updates._packed())
  told = jax.jit(functools.partial(balance.routed, DECODER))(_params(), batch)
  counts = np.asarray(told[1].counts)
  trained = float(np.asarray(batch.loss_mask).sum())
  assert 0 < trained < np.asarray(batch.tokens).size
  np.testing.assert_array_equal(counts.sum(1), 2 * trained)
  np.testing.assert_allclose(told[1].probs.sum(1), trained, rtol=1e-5)
