"""Adapters and frozen weights: what trains, and that nothing else does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.algos import grpo
from jaxrl_post.models import adapted, spec, transformer
from jaxrl_post.models import decoder as decoders
from jaxrl_post.training import lora, optim, step, trained
from tests.numerics import update_test as batches
from tests.unit import engines as making

CONFIG = making.CONFIG
TREE = transformer.spec(CONFIG)
DECODER = decoders.Decoder(CONFIG, chunk=7)
LORA = lora.Lora(rank=3, alpha=6.0)
SOME = lora.Lora(rank=2, alpha=1.0, targets=("q", "o", "down"))
ONLY = trained.Only(("layers/q", "layers/*norm"))


@functools.cache
def adapters(cfg=LORA, seed=3):
  """Draws adapters of which both factors are far from zero."""
  made = lora.init(TREE, jax.random.key(seed), cfg)
  leaves, structure = jax.tree.flatten(made)
  draw = np.random.default_rng(seed)
  return jax.tree.unflatten(
    structure,
    [
      jnp.asarray(0.2 * draw.standard_normal(x.shape), jnp.float32)
      for x in leaves
    ],
  )


def matrices(name, w, a, b):
  """Returns a layer's weight and factors as matrices, in float64."""
  num_in = a[0].size // a.shape[-1]
  shapes = (num_in, -1), (num_in, a.shape[-1]), (b.shape[1], -1)
  return [
    np.asarray(x, np.float64).reshape(len(x), *shape)
    for x, shape in zip((w, a, b), shapes, strict=True)
  ]


@functools.cache
def update(setting, algo=None, microbatches=1, minibatches=1):
  return jax.jit(
    functools.partial(
      step.update,
      decoder=DECODER,
      algo=algo or grpo.objective(),
      optimizer=batches._optimizer(weight_decay=0.1),
      trains=setting,
      microbatches=microbatches,
      minibatches=minibatches,
    )
  )


def start(setting, **options):
  changes = None
  if isinstance(setting, lora.Lora):
    changes = lora.init(TREE, jax.random.key(0), setting)
  return step.init(
    making.params(),
    jax.random.key(1),
    batches._optimizer(weight_decay=0.1),
    trains=setting,
    adapters=changes,
    **options,
  )


@functools.cache
def _score(setting, algo, updates):
  @jax.jit
  def score(state, batch):
    leaves = trained.choose(setting, state.params, state.adapters)
    return step.score(
      trained.weights(setting, state.params, leaves),
      batch,
      decoder=DECODER,
      algo=algo,
      reference=trained.reference(setting, state.params, state.reference),
      updates=updates,
    )

  return score


def scored(state, setting, algo=None, updates=1):
  algo = algo or grpo.objective()
  return _score(setting, algo, updates)(state, batches._packed())


# ------------------------------------------------------------------- the change


@pytest.mark.parametrize("cfg", [LORA, SOME])
def test_merge_adds_the_scaled_product_of_each_layer(cfg):
  params, change = making.params(), adapters(cfg)
  merged = lora.merge(params, change, cfg)
  for name, w in params["layers"].items():
    if name not in cfg.targets:
      assert merged["layers"][name] is w
      continue
    a, b = change["layers"][name]["a"], change["layers"][name]["b"]
    whole, left, right = matrices(name, w, a, b)
    expected = np.stack(
      [
        w1 + cfg.alpha / cfg.rank * (a1 @ b1)
        for w1, a1, b1 in zip(whole, left, right, strict=True)
      ]
    ).reshape(w.shape)
    np.testing.assert_allclose(merged["layers"][name], expected, atol=1e-6)
    assert np.abs(expected - w).max() > 0.01
  assert merged["embed"] is params["embed"]


def test_factors_have_the_sides_and_axes_of_their_weight():
  tree = lora.spec(TREE, LORA)["layers"]
  heads, head, width = CONFIG.num_heads, CONFIG.head_width, CONFIG.width
  assert tree["q"]["a"].shape == (2, width, 3)
  assert tree["q"]["b"].shape == (2, 3, heads, head)
  assert tree["o"]["a"].shape == (2, heads, head, 3)
  assert tree["o"]["b"].axes == ("layers", "rank", "embed")
  assert tree["down"]["a"].axes == ("layers", "ff", "rank")


def test_the_start_is_the_policy_without_adapters():
  made = lora.init(TREE, jax.random.key(0), LORA)
  jax.tree.map(
    np.testing.assert_array_equal,
    lora.merge(making.params(), made, LORA),
    making.params(),
  )
  for name, change in made["layers"].items():
    a = np.asarray(change["a"])
    inputs = a[0].size // LORA.rank
    assert np.std(a) * np.sqrt(inputs) == pytest.approx(1.0, rel=0.35), name
    assert np.all(np.asarray(change["b"]) == 0)
  other = lora.init(TREE, jax.random.key(1), LORA)
  assert np.any(other["layers"]["q"]["a"] != made["layers"]["q"]["a"])


def test_a_trainer_draws_the_adapters_of_its_setting_and_no_others():
  key = jax.random.key(0)
  jax.tree.map(
    np.testing.assert_array_equal,
    trained.init(SOME, TREE, key),
    lora.init(TREE, key, SOME),
  )
  assert trained.init(None, TREE, key) is trained.init(ONLY, TREE, key) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_with_adapters_is_that_of_the_merged_weights(dtype):
  tokens = jnp.arange(12).reshape(2, 6)
  order = jnp.broadcast_to(jnp.arange(6), (2, 6))

  def hidden(params):
    return transformer.forward(params, CONFIG, tokens, order, dtype=dtype)[0]

  beside = hidden(lora.attach(making.params(), adapters(), LORA))
  merged = hidden(lora.merge(making.params(), adapters(), LORA))
  scale = 1e-5 if dtype == "float32" else 1e-2
  np.testing.assert_allclose(
    np.asarray(beside, np.float32), np.asarray(merged, np.float32), atol=scale
  )
  plain = np.asarray(hidden(making.params()), np.float32)
  assert np.abs(np.asarray(beside, np.float32) - plain).max() > 0.1


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("cfg", [LORA, SOME])
def test_gradients_are_the_chain_rule_of_the_whole_ones(cfg):
  """Of W + s A B, dA = s dW B^T and dB = s A^T dW."""
  batch = jax.tree.map(jnp.asarray, batches._packed())

  def loss(params):
    hidden = step._states(DECODER, params, batch)
    found, _ = step._logprobs(DECODER, params, batch, hidden)
    return jnp.sum(found * jnp.cos(jnp.arange(found.shape[1])))

  params, change = making.params(), adapters(cfg)
  whole = jax.grad(loss)(lora.merge(params, change, cfg))
  thin = jax.grad(lambda x: loss(lora.attach(params, x, cfg)))(change)
  for name in cfg.targets:
    a, b = change["layers"][name]["a"], change["layers"][name]["b"]
    d, left, right = matrices(name, whole["layers"][name], a, b)
    scale = cfg.alpha / cfg.rank
    expected = {
      "a": scale * d @ right.swapaxes(1, 2),
      "b": scale * left.swapaxes(1, 2) @ d,
    }
    for part, x in expected.items():
      got = thin["layers"][name][part]
      size = np.abs(x).max()
      np.testing.assert_allclose(
        got, x.reshape(got.shape), atol=1e-5 * size, rtol=1e-5
      )


def test_a_product_has_the_gradient_of_its_sum_in_bfloat16_too():
  draw = np.random.default_rng(0)
  x, w, a, b, g = (
    jnp.asarray(draw.standard_normal(shape), jnp.float32)
    for shape in ((7, 6), (6, 4, 2), (6, 3), (3, 4, 2), (7, 8))
  )

  def through(x, a, b):
    return adapted.product(x, adapted.Adapted(weight=w, a=a, b=b))

  for dtype, atol in (("float32", 1e-5), ("bfloat16", 0.3)):
    _, pull = jax.vjp(through, x.astype(dtype), a, b)
    dx, da, db = pull(g.astype(dtype))
    assert (dx.dtype, da.dtype, db.dtype) == (dtype, "float32", "float32")
    whole = np.asarray(w).reshape(6, 8) + a @ b.reshape(3, 8)
    dw = np.asarray(x).T @ np.asarray(g)
    for got, expected in (
      (dx, g @ whole.T),
      (da, dw @ b.reshape(3, 8).T),
      (db, (a.T @ dw).reshape(3, 4, 2)),
    ):
      got = np.asarray(got, np.float32)
      np.testing.assert_allclose(got, expected, atol=atol)


def test_no_gradient_of_the_size_of_a_weight_is_made():
  """Nothing of the size of a stacked weight is computed in the whole step."""

  def program(trains):
    update = functools.partial(
      step.update,
      decoder=DECODER,
      algo=grpo.objective(),
      optimizer=batches._optimizer(),
      trains=trains,
    )
    state = start(trains)
    return str(jax.make_jaxpr(update)(state, scored(state, trains)))

  text, full = program(LORA), program(None)
  stacked = f"f32[2,{CONFIG.width},{CONFIG.ff_width}]"

  def made(text):
    lines = [x for x in text.splitlines() if f":{stacked} =" in x]
    return [x for x in lines if "stop_gradient" not in x]

  assert made(full)
  assert made(text) == []


# ------------------------------------------------------------------ the update


def sizes(tree):
  return sum(x.size for x in jax.tree.leaves(tree) if x.ndim)


@pytest.mark.parametrize("setting", [LORA, SOME, ONLY])
def test_the_optimizer_has_two_moments_of_what_trains_only(setting):
  state = start(setting, reference=True)
  leaves = trained.choose(setting, state.params, state.adapters)
  assert sizes(state.opt_state) == 2 * sizes(leaves)
  assert 0 < sizes(leaves) < 0.5 * sizes(state.params)
  if setting == ONLY:
    assert sizes(state.reference) == sizes(leaves)
    assert sizes(leaves) == sum(
      state.params["layers"][x].size for x in ("q", "attn_norm", "mlp_norm")
    )
  else:
    assert state.reference is None


@pytest.mark.parametrize(
  ("setting", "cut"), [(LORA, (1, 1)), (LORA, (2, 2)), (ONLY, (1, 1))]
)
def test_frozen_weights_are_bit_for_bit_what_they_were(setting, cut):
  state, before = start(setting), start(setting)
  for _ in range(3):
    batch = scored(state, setting, updates=cut[1])
    state, metrics = update(setting, None, *cut)(state, batch)
    assert metrics["loss/skipped"] == 0
  moved = trained.changed(
    setting if setting == ONLY else trained.Only(("none",)), TREE
  )
  for path, x in jax.tree.leaves_with_path(state.params):
    name = jax.tree_util.keystr(path)
    old = functools.reduce(lambda t, k: t[k.key], path, before.params)
    assert np.array_equal(x, old) == (name not in moved), name
  if setting != ONLY:
    jax.tree.map(
      lambda new, old: np.testing.assert_equal(np.array_equal(new, old), False),
      state.adapters,
      before.adapters,
    )
  assert (int(state.step), int(state.version)) == (3, 3)


def test_microbatches_change_neither_gradient_nor_state():
  state = start(LORA)
  batch = scored(state, LORA)
  one, shown = update(LORA)(state, batch)
  two, parts = update(LORA, None, 4)(state, batch)
  assert shown["loss/grad_norm"] > 0
  np.testing.assert_allclose(
    shown["loss/grad_norm"], parts["loss/grad_norm"], rtol=1e-4
  )
  for x, y in zip(
    jax.tree.leaves(one.adapters), jax.tree.leaves(two.adapters), strict=True
  ):
    np.testing.assert_allclose(x, y, atol=2e-4)


def test_norms_are_of_what_trains():
  every = trained.Only()
  batch = scored(start(None), None)
  all_of_them, full = update(None)(start(None), batch)
  _, some = update(ONLY)(start(ONLY), batch)
  assert 0 < some["loss/grad_norm"] < full["loss/grad_norm"]
  assert 0 < some["loss/update_norm"] < full["loss/update_norm"]
  # A pattern for all weights is the same as none.
  same, _ = update(every)(start(every), batch)
  same = (same.params, same.opt_state)
  whole = (all_of_them.params, all_of_them.opt_state)
  jax.tree.map(np.testing.assert_array_equal, same, whole)


def test_an_update_without_tokens_leaves_adapters_and_moments():
  state = start(LORA)
  batch = scored(state, LORA)
  empty = dataclasses.replace(batch, loss_mask=0 * batch.loss_mask)
  after, metrics = update(LORA)(state, empty)
  assert (metrics["loss/skipped"], int(after.version)) == (1, 0)
  same = (after.adapters, after.opt_state), (state.adapters, state.opt_state)
  jax.tree.map(np.testing.assert_array_equal, *same)


# --------------------------------------------------------------- the reference


@pytest.mark.parametrize("setting", [LORA, ONLY])
def test_the_reference_is_the_policy_of_the_start(setting):
  algo = batches.ALGORITHMS["kl"]
  first = start(setting, reference=True)
  plain = start(None, reference=True)
  expected = scored(plain, None, algo).reference_logprobs
  state = first
  for _ in range(2):
    batch = scored(state, setting, algo)
    np.testing.assert_array_equal(batch.reference_logprobs, expected)
    state, metrics = update(setting, algo)(state, batch)
  assert metrics["loss/kl"] > 0


def test_a_moving_reference_follows_what_trains():
  algo = batches.ALGORITHMS["kl"]
  algo = dataclasses.replace(
    algo, kl=dataclasses.replace(algo.kl, every=1, share=0.5)
  )
  state = start(ONLY, reference=True)
  first = state.params
  after, _ = update(ONLY, algo)(state, scored(state, ONLY, algo))
  whole = trained.reference(ONLY, after.params, after.reference)
  jax.tree.map(
    lambda x, old, new: np.testing.assert_allclose(
      x, (old + new) / 2, atol=1e-6
    ),
    whole,
    first,
    after.params,
  )


# ------------------------------------------------------------- wrong settings


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: lora.Lora(rank=0), r"trained\.rank: expected >= 1, got 0"),
    (lambda: lora.Lora(alpha=0.0), r"trained\.alpha: expected in \(0, 1e30\]"),
    (
      lambda: lora.Lora(alpha=float("nan")),
      r"trained\.alpha: expected in \(0, 1e30\]",
    ),
    (lambda: lora.Lora(targets=()), r"trained\.targets: expected names"),
    (lambda: lora.Lora(targets=("q", "q")), r"trained\.targets: .*once"),
    (lambda: trained.Only(()), r"trained\.patterns: expected one or more"),
    (
      lambda: trained.check(lora.Lora(targets=("query",)), TREE),
      r"trained\.targets: expected names among q, k, v, o, gate, up, down, got",
    ),
    (
      lambda: trained.check(lora.Lora(targets=("attn_norm",)), TREE),
      r"trained\.targets: .*got 'attn_norm'",
    ),
    (
      lambda: trained.check(lora.Lora(rank=17), TREE),
      r"trained\.rank: expected at most 16, .* of k \(32 x 16\), got 17",
    ),
    (
      lambda: trained.check(trained.Only(("layers/q", "head")), TREE),
      r"trained\.patterns: expected .*layers/gate.*, got 'head'",
    ),
  ],
)
def test_what_cannot_be_meant_is_one_line(make, message):
  with pytest.raises(types.InputError, match=message) as error:
    make()
  assert "\n" not in str(error.value)


def test_what_fits_the_model_passes():
  for setting in (LORA, SOME, ONLY, trained.Only(), None):
    trained.check(setting, TREE)
  trained.check(lora.Lora(rank=16), TREE)


def test_the_changed_weights_are_named_as_publish_names_them():
  names = [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree.leaves_with_path(
      spec.abstract(TREE, jnp.dtype("float32"))
    )
  ]
  assert trained.changed(None, TREE) is None
  assert trained.changed(SOME, TREE) == tuple(
    f"['layers']['{name}']" for name in ("down", "o", "q")
  )
  assert trained.changed(trained.Only(), TREE) == tuple(names)


def test_optim_says_what_trains():
  assert optim.Optim().trained is None
  assert optim.Optim(trained=LORA).trained.scale == 2.0
