"""The update of packed batches: several updates, a reference, algorithms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import types
from jaxrl_post.algos import (
  cispo,
  dapo,
  distill,
  divergence,
  dpo,
  dr_grpo,
  grpo,
  gspo,
  maxrl,
  objective,
  reinforce,
  reinforce_pp,
  rloo,
  sapo,
  sft,
)
from jaxrl_post.data import pack
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec, transformer
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.training import optim, step
from tests.numerics import laying
from tests.unit import engines as making

_CONFIG = making.CONFIG
_DECODER = decoders.Decoder(_CONFIG, chunk=7)
_ROWS, _LONGEST = 8, 24
ALGORITHMS = {
  "grpo": grpo.objective(),
  "dr_grpo": dr_grpo.objective(12),
  "dapo": dapo.objective(),
  "gspo": gspo.objective(),
  "gspo_token": gspo.objective("sequence_token"),
  "cispo": cispo.objective(),
  "sapo": sapo.objective(),
  "rloo": rloo.objective(),
  "reinforce": reinforce.objective(),
  "reinforce_pp": reinforce_pp.objective(),
  "reinforce_pp_baseline": reinforce_pp.objective(group=True),
  "maxrl": maxrl.objective(),
  "sft": sft.objective(),
  "distill": distill.objective(rewards=0.5),
  "dpo": dpo.objective(),
  "kl": dataclasses.replace(grpo.objective(), kl=divergence.Kl(0.1)),
  "entropy": dataclasses.replace(grpo.objective(), entropy=0.01),
}


def _groups(seed=0, rewards=(1, 0, 0.5, 1, 0, 0)):
  """Makes three groups of two rollouts, of 4 to 14 tokens."""
  draw = np.random.default_rng(seed)
  made = []
  asked = [draw.integers(0, 64, size).tolist() for size in (3, 1, 5)]
  for number, reward in enumerate(rewards):
    prompt = types.Prompt(
      uid=number // 2,
      tokens=tuple(asked[number // 2 % 3]),
      text="",
      reference=None,
    )
    size = 1 + 2 * number
    completion = types.Completion(
      uid=number,
      tokens=tuple(draw.integers(0, 64, size).tolist()),
      logprobs=tuple((-3 - draw.random(size)).tolist()),
      versions=(0,) * size,
      finish="length" if number == 2 else "stop",
    )
    made.append(
      types.Rollout(
        prompt=prompt,
        completion=completion,
        temperature=1.0 + 0.25 * (number % 3),
        text="",
        reward=float(reward),
      )
    )
  return [
    types.Group(prompt=made[i].prompt, rollouts=tuple(made[i : i + 2]))
    for i in range(0, len(made), 2)
  ]


def _apart():
  """Returns the same sequences with a row for each."""
  return laying.apart(_groups(), pack.Layout(rows=_ROWS, length=_LONGEST))


def _packed(groups=None, **cut):
  groups = _groups() if groups is None else groups
  return pack.pack(groups, pack.Layout(rows=_ROWS, length=_LONGEST, **cut))


def _optimizer(**options):
  return optim.build(optim.Optim(learning_rate=0.01, **options), 20)


@functools.cache
def _steps(algo, microbatches=1, minibatches=1, epochs=1):
  tx = _optimizer()
  score = functools.partial(
    step.score,
    decoder=_DECODER,
    algo=algo,
    microbatches=microbatches * minibatches,
    updates=minibatches * epochs,
  )
  update = functools.partial(
    step.update,
    decoder=_DECODER,
    algo=algo,
    optimizer=tx,
    microbatches=microbatches,
    minibatches=minibatches,
    epochs=epochs,
  )
  start = functools.partial(
    step.init, optimizer=tx, reference="reference" in algo.needs
  )
  return start, jax.jit(score), jax.jit(update)


def _with_old(algo):
  """Returns one update that is given old log-probabilities."""
  return jax.jit(
    functools.partial(
      step._update,
      decoder=_DECODER,
      algo=algo,
      optimizer=_optimizer(),
      microbatches=1,
      is_old=True,
    )
  )


def _train(algo, batch, state=None, **cut):
  start, score, update = _steps(algo, **cut)
  if state is None:
    state = start(making.params(_CONFIG), jax.random.key(1))
  batch = score(state.params, batch, reference=state.reference)
  return update(state, batch)


def _gradient(state):
  return optax.tree.get(state.opt_state, "mu")


def _close(a, b, atol):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_packing_changes_neither_loss_nor_gradient(name):
  batch = _packed()
  assert (batch.prefix_ids != batch.segment_ids).any()
  one, m = _train(ALGORITHMS[name], batch)
  two, n = _train(ALGORITHMS[name], _apart())
  assert m["loss/skipped"] == 0 and m["loss/grad_norm"] > 0
  assert m.keys() == n.keys()
  for key in m:
    np.testing.assert_allclose(m[key], n[key], rtol=1e-4, atol=1e-5)
  _close(_gradient(one), _gradient(two), 1e-6)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("name", ["grpo", "gspo", "kl"])
def test_microbatches_without_a_row_change_nothing(name, microbatches):
  one, m = _train(ALGORITHMS[name], _packed())
  batch = _packed(microbatches=microbatches)
  used = batch.segment_ids.any(axis=1).sum()
  assert used <= _ROWS // 2
  two, n = _train(ALGORITHMS[name], batch, microbatches=microbatches)
  for key in m:
    np.testing.assert_allclose(m[key], n[key], rtol=1e-5, atol=1e-6)
  _close(_gradient(one), _gradient(two), 1e-7)


def test_tokens_do_not_see_their_neighbours_in_a_row():
  batch = _packed()
  sibling = batch.prefix_ids != batch.segment_ids
  row = int(np.flatnonzero(sibling.any(axis=1))[0])
  number = int(batch.sequence[row, np.flatnonzero(sibling[row])[0]])
  other = dataclasses.replace(batch, tokens=batch.tokens.copy())
  first = batch.sequence[row] == number
  other.tokens[row, first] = (other.tokens[row, first] + 1) % 64

  def scored(batch):
    sequences = np.append(batch.temperature, 1.0)[batch.sequence]
    return decoders.logprobs(
      _DECODER,
      making.params(_CONFIG),
      tokens=jnp.asarray(batch.tokens),
      positions=jnp.asarray(batch.positions),
      segment_ids=jnp.asarray(batch.segment_ids),
      prefix_ids=jnp.asarray(batch.prefix_ids),
      temperature=jnp.asarray(sequences, jnp.float32),
    )[0]

  found, changed = scored(batch), scored(other)
  rest = (batch.loss_mask[row] > 0) & ~first
  assert sibling[row, rest].any()
  np.testing.assert_array_equal(found[row, rest], changed[row, rest])
  assert (
    np.asarray(found)[row, first] != np.asarray(changed)[row, first]
  ).any()


@pytest.mark.parametrize("epochs", [1, 2])
def test_several_updates_are_those_of_their_parts_one_by_one(epochs):
  algo = ALGORITHMS["grpo"]
  batch = _packed(minibatches=2)
  got, metrics = _train(algo, batch, minibatches=2, epochs=epochs)
  start, score, _ = _steps(algo, minibatches=2, epochs=epochs)
  state = start(making.params(_CONFIG), jax.random.key(1))
  scored = score(state.params, batch)
  one = _with_old(algo)
  clipped = []
  for number in [0, 1] * epochs:
    part = jax.tree.map(
      lambda x, k=number: x[k::2] if x.ndim == 2 else x, scored
    )
    state, values = one(state, part)
    clipped.append(float(values["loss/clip_fraction"]))
  _close(got.params, state.params, 1e-6)
  np.testing.assert_allclose(
    metrics["loss/clip_fraction"], np.mean(clipped), atol=1e-6
  )
  assert (got.step, got.version) == (1, 1)
  assert clipped[0] == 0 and max(clipped) > 0


def test_minibatches_that_train_nothing_leave_the_others_alone():
  batch = _packed(minibatches=2)
  mask = batch.loss_mask.copy()
  mask[1::2] = 0
  state, metrics = _train(
    ALGORITHMS["grpo"],
    dataclasses.replace(batch, loss_mask=mask),
    minibatches=2,
  )
  assert metrics["loss/skipped"] == 0 and state.version == 1
  none = dataclasses.replace(batch, loss_mask=np.zeros_like(mask))
  state, metrics = _train(ALGORITHMS["grpo"], none, minibatches=2)
  assert metrics["loss/skipped"] == 1 and (state.version, state.step) == (0, 1)


def test_old_logprobs_of_one_update_are_those_of_a_pass_before_it():
  algo = ALGORITHMS["grpo"]
  start, score, update = _steps(algo)
  state = start(making.params(_CONFIG), jax.random.key(1))
  batch = score(state.params, _packed())
  assert np.isnan(batch.old_logprobs).all()
  known = _steps(algo, minibatches=2)[1](state.params, _packed())
  assert np.isfinite(known.old_logprobs).all()
  one, m = update(state, batch)
  two, n = _with_old(algo)(state, known)
  _close(_gradient(one), _gradient(two), 1e-7)
  np.testing.assert_allclose(m["loss/policy"], n["loss/policy"], atol=1e-6)
  np.testing.assert_allclose(
    m["mismatch/mean_abs"], n["mismatch/mean_abs"], atol=1e-6
  )


def test_truncated_rollouts_are_left_out_on_demand():
  _, all_of_them = _train(ALGORITHMS["grpo"], _packed())
  _, rest = _train(ALGORITHMS["dapo"], _packed())
  cut = sum(
    len(r.completion.tokens)
    for g in _groups()
    for r in g.rollouts
    if r.completion.finish == "length"
  )
  assert all_of_them["loss/tokens"] - rest["loss/tokens"] == cut > 0


# ------------------------------------------------------------------- reference


@pytest.mark.parametrize("without_signal", [True, False])
def test_c07_a_switch_leaves_out_groups_whose_rewards_agree(without_signal):
  kl = divergence.Kl(0.1, without_signal=without_signal)
  algo = dataclasses.replace(ALGORITHMS["kl"], kl=kl)
  # Agreeing, differing, and with one reward only: nobody differs from it.
  batch = _packed(_groups(rewards=(1, 1, 0.5, 1, np.nan, 0)))
  start, score, _ = _steps(algo)
  state = start(making.params(_CONFIG), jax.random.key(1))
  scored = score(state.params, batch, reference=state.reference)
  trains = [
    bool((scored.loss_mask[scored.sequence == n] > 0).any()) for n in range(6)
  ]
  left = [without_signal] * 2
  assert trains == [*left, True, True, False, without_signal]
  np.testing.assert_array_equal(
    pack.trained(batch, equal=without_signal), scored.loss_mask
  )


def test_c118_c25_the_reference_stays_put_and_kl_begins_at_zero():
  algo = ALGORITHMS["kl"]
  start, _, _ = _steps(algo)
  state = start(making.params(_CONFIG), jax.random.key(1))
  first, found = jax.device_get(state.reference), []
  for _ in range(3):
    state, metrics = _train(algo, _packed(), state)
    found.append(float(metrics["loss/kl"]))
  assert found[0] == 0 and min(found[1:]) > 0
  jax.tree.map(np.testing.assert_array_equal, first, state.reference)
  assert (
    _steps(grpo.objective())[0](
      making.params(_CONFIG), jax.random.key(1)
    ).reference
    is None
  )


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_c118_the_reference_moves_only_if_told_and_as_told(share):
  kl = divergence.Kl(0.1, every=2, share=share)
  algo = dataclasses.replace(grpo.objective(), kl=kl)
  state = _steps(algo)[0](making.params(_CONFIG), jax.random.key(1))
  first = state.reference
  state, _ = _train(algo, _packed(), state)
  jax.tree.map(np.testing.assert_array_equal, first, state.reference)
  state, _ = _train(algo, _packed(), state)
  want = jax.tree.map(lambda a, b: a + share * (b - a), first, state.params)
  _close(state.reference, want, 1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_optimizers_are_those_of_their_names(name, moments):
  cfg = optim.Optim(
    name=name, moments=moments, learning_rate=0.1, weight_decay=0.5, b1=0.8
  )
  tx = optim.build(cfg, 10)
  # A vector would not decay.
  params, grads = {"w": jnp.full((1, 3), 2.0)}, jnp.array([[0.3, -0.4, 0.0]])
  state = tx.init(params)
  found = []
  for _ in range(2):
    with jax.numpy_dtype_promotion("standard"):
      updates, state = tx.update({"w": grads}, state, params)
    found.append(np.asarray(updates["w"][0]))
  g = np.array([0.3, -0.4, 0.0])
  direction = {
    "adamw": [np.sign(g), np.sign(g)],
    "lion": [np.sign(g), np.sign(g)],
    "sgd": [g, 1.8 * g],
  }[name]
  for got, way in zip(found, direction, strict=True):
    atol = 1e-5 if moments == "float32" else 2e-3
    np.testing.assert_allclose(got, -0.1 * (way + 0.5 * 2.0), atol=atol)
  kinds = {str(x.dtype) for x in jax.tree.leaves(state) if x.ndim}
  assert (moments in kinds) and ("float32" in kinds or name != "adamw")


def test_c118_a_donated_update_leaves_the_reference_its_memory():
  mesh = meshes.build(meshes.TrainingAxes(fsdp=1), jax.devices()[:1])
  params = making.params(_CONFIG)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, jax.P())
    ),
    params,
  )
  made = trainers.build(
    mesh,
    params=shapes,
    decoder=_DECODER,
    algo=ALGORITHMS["kl"],
    optimizer=_optimizer(),
    cut=optim.Optim(),
    key=jax.random.key(1),
    keep_params=False,
    park=(),
    lock=_Lock(),
  )
  state = made.start(jax.tree.map(jnp.copy, params))
  for _ in range(2):
    state, metrics = made.update(state, made.score(state, made.put(_packed())))
  assert metrics["loss/kl"] > 0
  jax.tree.map(np.testing.assert_array_equal, params, state.reference)


class _Lock:
  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass


def test_distillation_brings_the_policy_to_its_teacher():
  """Completions of one token each, drawn from the policy of each step."""
  rows, prompt = 64, (3, 1, 4)
  _, score, update = _steps(distill.objective())
  state = _steps(distill.objective())[0](
    making.params(_CONFIG), jax.random.key(1)
  )
  teacher = spec.init(
    transformer.spec(_CONFIG), jax.random.key(5), jnp.dtype("float32")
  )

  @jax.jit
  def predicted(params):
    tokens, order = jnp.array([prompt]), jnp.arange(3)[None]
    hidden, _ = transformer.forward(params, _CONFIG, tokens, order)
    return jax.nn.log_softmax(
      transformer.logits(params, _CONFIG, hidden[0, -1])
    )

  kls, asked = [], predicted(teacher)
  for number in range(25):
    now = predicted(state.params)
    kls.append(float(jnp.sum(jnp.exp(now) * (now - asked))))
    drawn = jax.random.categorical(jax.random.key(number), now, shape=(rows,))
    groups = []
    for uid, token in enumerate(drawn.tolist()):
      completion = types.Completion(
        uid=uid,
        tokens=(token,),
        logprobs=(float(now[token]),),
        versions=(number,),
        finish="stop",
      )
      asker = types.Prompt(uid=uid, tokens=prompt, text="", reference=None)
      made = types.Rollout(
        prompt=asker,
        completion=completion,
        temperature=1.0,
        text="",
        reward=0.0,
      )
      groups.append(types.Group(prompt=asker, rollouts=(made,)))
    batch = pack.pack(groups, pack.Layout(rows=rows, length=4))
    state, _ = update(state, score(state.params, batch, reference=teacher))
  assert np.mean(kls[-5:]) < 0.5 * kls[0]


def test_dpo_parts_the_preferred_from_the_other():
  algo, margins = dpo.objective(beta=0.5), []
  start, score, update = _steps(algo)
  state = start(making.params(_CONFIG), jax.random.key(1))
  groups = _groups(rewards=(1, 0, 0, 1, 1, 0))
  for _ in range(10):
    batch = score(state.params, _packed(groups), reference=state.reference)
    gap = (batch.old_logprobs - batch.reference_logprobs) * batch.loss_mask
    moved = np.zeros(_ROWS + 1)
    np.add.at(moved, np.asarray(batch.sequence), np.asarray(gap))
    margins.append(float(np.mean(np.array([1, -1, -1, 1, 1, -1]) * moved[:6])))
    state, _ = update(state, batch)
  assert margins[0] == 0
  losses = -np.log(1 / (1 + np.exp(-0.5 * 2 * np.array(margins))))
  assert losses[-1] < losses[0] - 0.1


def test_lag_is_told_apart():
  groups = _groups()
  group = groups[0]
  older = dataclasses.replace(
    group.rollouts[1],
    completion=dataclasses.replace(
      group.rollouts[1].completion, versions=(1,) * 3
    ),
  )
  groups[0] = dataclasses.replace(group, rollouts=(group.rollouts[0], older))
  algo = objective.Objective()
  start, score, update = _steps(algo)
  state = start(making.params(_CONFIG), jax.random.key(1))
  state = dataclasses.replace(state, version=jnp.int32(2))
  _, metrics = update(state, score(state.params, _packed(groups)))
  shares = [float(metrics[f"lag/{k}/tokens"]) for k in range(4)]
  np.testing.assert_allclose(shares, [0, 3 / 36, 33 / 36, 0], atol=1e-6)
  pulls = [float(metrics[f"lag/{k}/pull"]) for k in range(4)]
  np.testing.assert_allclose(sum(pulls), 1, atol=1e-5)
  assert pulls[1] > 0 and pulls[0] == pulls[3] == 0
  weights = [float(metrics[f"lag/{k}/importance_mean"]) for k in range(4)]
  assert np.isnan(weights[0]) and np.isnan(weights[3])
  np.testing.assert_allclose(
    weights[1] * shares[1] + weights[2] * shares[2],
    metrics["loss/importance_mean"],
    rtol=1e-5,
  )
  assert 0 < metrics["loss/ess"] <= 1
