"""Experts that the engine chose, noted for the trainer to use (R3).

The router's columns are nearly equal in pairs, so that rounding decides between
experts: what computes in another order goes elsewhere, with the same weights.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import types
from jaxrl_post.algos import grpo
from jaxrl_post.data import pack
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import experts
from jaxrl_post.sampling import engine as engines
from jaxrl_post.training import balance, step
from tests.unit import engines as making

CONFIG = dataclasses.replace(
  making.CONFIG,
  ff_width=24,
  qk_norm=True,
  experts=experts.Experts(num=8, per_token=3),
)
DECODER = decoders.Decoder(CONFIG, chunk=64, replays=True)
# Prompts of up to 16 tokens share a call, longer ones take several of 32.
SIZES = engines.Sampling(
  rows=6, block=4, max_tokens=14, prefill_tokens=32, page=4, cache=0.5
)
MAX_PROMPT, GROUP = 40, 2
LAYOUT = pack.Layout(
  rows=12, length=70, together=2, unit=2, routing=DECODER.noted
)
PROMPTS = [
  tuple(np.random.RandomState(n).randint(0, 64, n).tolist())
  for n in (5, 37, 1, 12, 16)
]


@functools.cache
def _params(seed=3):
  params = making.params(CONFIG, seed=seed)
  router = np.array(params["layers"]["router"])
  router[..., 1::2] = router[..., ::2] * (1 + 3e-7)
  return params | {"layers": params["layers"] | {"router": jnp.asarray(router)}}


def _engine(in_flight="keep", decode=None):
  return making.engine(
    dataclasses.replace(SIZES, in_flight=in_flight),
    max_prompt=MAX_PROMPT,
    group=GROUP,
    key=7,
    config=CONFIG,
    steps=making.compiled(SIZES, MAX_PROMPT, GROUP, DECODER),
    decode=decode,
  )


def _request(number, uids, begun=(), hold=False, **sampling):
  return types.Request(
    prompt=PROMPTS[number],
    uids=tuple(uids),
    sampling=types.SamplingParams(**{"max_tokens": 14} | sampling),
    begun=tuple(begun),
    hold=hold,
  )


def _finish(engine, version=0, params=None):
  params, done = _params() if params is None else params, {}
  while engine.busy:
    done |= {c.uid: c for c in engine.step(params, version)}
  return done


def _groups(done, prompts):
  """Joins completions to groups, by what each uid was asked."""
  groups = []
  for number in sorted(set(prompts.values())):
    asked = types.Prompt(
      uid=number, tokens=PROMPTS[number], text="", reference=None
    )
    rollouts = tuple(
      types.Rollout(
        prompt=asked,
        completion=done[uid],
        temperature=1.0,
        text="",
        reward=float(uid % 2),
      )
      for uid, prompt in prompts.items()
      if prompt == number
    )
    groups.append(types.Group(prompt=asked, rollouts=rollouts))
  return groups


@jax.jit
def _forward(params, batch):
  """Returns log-probabilities, experts [B, T, L, X], and the share apart."""
  hidden, told = balance.routed(DECODER, params, batch)
  assert told is not None
  found, _ = step._logprobs(DECODER, params, batch, hidden)
  _, sums = balance.loss(DECODER, told, None, jnp.sum(batch.loss_mask))
  shown = balance.whole(sums, jnp.sum(batch.loss_mask))
  return found, jnp.moveaxis(told.ids, 0, 2), shown


def _trainer(batch, params=None, *, replay=True):
  routing = batch.routing if replay else np.full_like(batch.routing, -1)
  batch = dataclasses.replace(batch, routing=routing)
  found = _forward(_params() if params is None else params, batch)
  return jax.device_get(found)


def _gap(batch, found, version=None):
  """Returns the largest difference to the engine, on tokens of a version."""
  mask = np.asarray(batch.loss_mask) > 0
  if version is not None:
    mask &= np.asarray(batch.policy_versions) == version
  assert mask.any()
  return np.abs(found - np.asarray(batch.sampler_logprobs))[mask].max()


@pytest.fixture(name="sampled", scope="module")
def _sampled():
  """Several groups in an engine that is too small for all at once."""
  engine, prompts, uid = _engine(), {}, 0
  for number, size in ((0, 3), (1, 4), (2, 2), (3, 2), (4, 4)):
    uids = range(uid, uid + size)
    engine.add(_request(number, uids))
    prompts |= dict.fromkeys(uids, number)
    uid += size
  return _finish(engine), prompts, engine.metrics()


@pytest.fixture(name="batch", scope="module")
def _batch(sampled):
  done, prompts, _ = sampled
  return pack.pack(_groups(done, prompts), LAYOUT)


def test_every_token_that_was_read_has_its_experts(sampled):
  done, prompts, metrics = sampled
  for uid, made in done.items():
    size = len(PROMPTS[prompts[uid]]) + len(made.tokens)
    assert made.routing.shape == (size - 1, 2, 3)
    assert made.routing.dtype == np.int8
    each = np.sort(made.routing, axis=-1)
    assert each.min() >= 0 and each.max() < 8
    assert (np.diff(each, axis=-1) > 0).all()  # No expert twice.
  # Prompts were read in parts, and completions made again.
  tokens = sum(len(made.tokens) for made in done.values())
  assert metrics["engine/decode_tokens"] > tokens
  assert metrics["engine/prefill_tokens"] > sum(map(len, PROMPTS))


def test_the_trainer_goes_where_the_engine_went_and_finds_what_it_found(batch):
  """In packed rows that share prompts, of prompts in one call or several."""
  found, ids, shown = _trainer(batch)
  given = batch.routing[..., 0, 0] >= 0
  np.testing.assert_array_equal(ids[given], batch.routing[given])
  assert _gap(batch, found) <= 1e-5
  own, chosen, alone = _trainer(batch, replay=False)
  # Rounding alone sends some elsewhere, which is no small matter.
  assert (np.sort(chosen[given]) != np.sort(batch.routing[given])).any()
  assert _gap(batch, own) > 1e-3
  assert shown["moe/differing"] > 0
  assert np.isnan(alone["moe/differing"])


def test_all_but_the_last_token_of_a_rollout_is_given(sampled, batch):
  done, prompts, _ = sampled
  given = (batch.routing[..., 0, 0] >= 0).sum()
  tokens = (batch.segment_ids > 0).sum()
  assert given == tokens - len(done)
  assert (batch.routing[batch.segment_ids == 0] == -1).all()
  # A shared prompt stands once, and fewer tokens than all are in the rows.
  whole = sum(len(PROMPTS[prompts[u]]) + len(c.tokens) for u, c in done.items())
  assert tokens < whole


def test_a_wrong_place_would_be_seen(batch):
  """Experts of the token before are not those of the token."""
  moved = np.where(
    batch.routing >= 0, np.roll(batch.routing, 1, axis=1), batch.routing
  )
  found, *_ = _trainer(dataclasses.replace(batch, routing=moved))
  assert _gap(batch, found) > 1e-2


def test_ties_apart_the_experts_are_those_of_the_same_weights():
  """With no near ties, and with other weights in the engine."""
  engine, params = _engine(), making.params(CONFIG, seed=3)
  engine.add(_request(1, (0, 1)))
  done = _finish(engine, params=params)
  batch = pack.pack(_groups(done, {0: 1, 1: 1}), LAYOUT)
  _, ids, _ = _trainer(batch, params, replay=False)
  given = batch.routing[..., 0, 0] >= 0
  np.testing.assert_array_equal(ids[given], batch.routing[given])
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params
  )
  engine = _engine()
  engine.add(_request(1, (0, 1)))
  done = _finish(engine, params=rounded)
  batch = pack.pack(_groups(done, {0: 1, 1: 1}), LAYOUT)
  found, *_ = _trainer(batch, rounded)
  assert _gap(batch, found) <= 1e-5
  _, ids, shown = _trainer(batch, params)
  given = batch.routing[..., 0, 0] >= 0
  np.testing.assert_array_equal(ids[given], batch.routing[given])
  assert shown["moe/differing"] > 0


@pytest.mark.parametrize("hold", [True, False])
def test_later_turns_and_words_of_tools_have_experts_too(hold):
  engine = _engine()
  engine.add(_request(0, (0,), hold=hold, max_tokens=5))
  first = _finish(engine)[0]
  said = (9, 8, 7)
  begun = types.Partial(
    uid=0,
    tokens=(*first.tokens, *said),
    logprobs=(*first.logprobs, 0.0, 0.0, 0.0),
    versions=(*first.versions, -1, -1, -1),
  )
  engine.add(_request(0, (0,), [begun]))
  done = _finish(engine)
  read = engine.metrics()["engine/decode_tokens"]
  assert read == 14 if hold else read == 5 + 14
  batch = pack.pack(_groups(done, {0: 0}), LAYOUT)
  found, *_ = _trainer(batch)
  assert _gap(batch, found) <= 1e-5
  assert done[0].routing.shape == (5 + 14 - 1, 2, 3)


def test_what_is_behind_a_stop_string_has_none():
  plain = _engine()
  plain.add(_request(0, (0,)))
  whole = _finish(plain)[0]
  engine = _engine(decode=lambda ids: "".join(chr(48 + i) for i in ids))
  text = "".join(chr(48 + i) for i in whole.tokens[4:6])
  engine.add(_request(0, (0,), stop_strings=(text,)))
  made = _finish(engine)[0]
  assert made.tokens == whole.tokens[:6] and made.finish == "stop"
  np.testing.assert_array_equal(made.routing, whole.routing[: 5 + 6 - 1])


def test_what_newer_weights_read_again_goes_where_they_sent_it():
  engine = _engine(in_flight="recompute")
  engine.add(_request(1, (0, 1)))
  done = {c.uid: c for c in engine.step(_params(), 0)}
  assert not done
  newer = _params(seed=4)
  done = _finish(engine, version=1, params=newer)
  batch = pack.pack(_groups(done, {0: 1, 1: 1}), LAYOUT)
  found, *_ = _trainer(batch, newer)
  assert _gap(batch, found, version=1) <= 1e-5
  assert _gap(batch, found, version=0) > 1e-2  # Those were of others.


def test_old_and_new_logprobs_both_follow_the_engine(batch):
  """Score and update; and an update moves the router."""
  algo, tx = grpo.objective(), optax.sgd(1.0)

  @jax.jit
  def train(params, batch):
    # As if there were two updates: only then old ones are found beforehand.
    scored = step.score(params, batch, decoder=DECODER, algo=algo, updates=2)
    state = step.init(params, jax.random.key(0), tx)
    state, metrics = step.update(
      state, scored, decoder=DECODER, algo=algo, optimizer=tx
    )
    return scored, state.params, metrics

  scored, params, metrics = train(_params(), batch)
  assert _gap(scored, np.asarray(scored.old_logprobs)) <= 1e-5
  assert float(metrics["mismatch/max_abs"]) <= 1e-5
  assert float(metrics["loss/ess"]) == pytest.approx(1.0, abs=1e-4)
  moved = params["layers"]["router"] - _params()["layers"]["router"]
  assert float(jnp.abs(moved).max()) > 1e-6
  assert 0 < float(metrics["moe/differing"]) < 1


def test_the_share_apart_is_of_trained_tokens_that_have_a_record():
  probs = jnp.asarray([[[0.4, 0.3, 0.2, 0.1]] * 5])
  own = jnp.asarray([[[0, 1]] * 5])
  # Of the fifth token there is no record, the
  # fourth does not train.
  given = jnp.asarray([[[1, 0], [0, 2], [3, 2], [2, 3], [-1, -1]]])
  went = jnp.where(given < 0, own, given)
  found = experts.Mixed(jnp.zeros((1, 5, 3)), went, probs, own)
  trained = jnp.asarray([[1.0, 1.0, 1.0, 0.0, 1.0]])
  told = experts.tell(found, trained, given)
  assert float(told.given) == 3.0
  assert float(told.differing) == 0.5 + 1.0
  assert told.counts.tolist() == [3.0, 2.0, 2.0, 1.0]
  layers = jax.tree.map(lambda *x: jnp.stack(x), told, told)
  _, sums = balance.loss(DECODER, layers, None, jnp.float32(4))
  shown = balance.whole(sums, jnp.float32(4))
  assert float(shown["moe/differing"]) == 0.5
  assert "moe/given" not in shown
  plain = experts.tell(found, trained)
  assert plain.given is None and plain.differing is None


def test_gates_of_given_experts_have_a_gradient():
  cfg, draw = experts.Experts(4, 2), np.random.default_rng(0)
  shapes = ((3, 4), (4, 3, 2), (4, 3, 2), (4, 2, 3))
  w = experts.Weights(*(jnp.asarray(draw.normal(size=s), "f") for s in shapes))
  x = jnp.asarray(draw.normal(size=(1, 6, 3)), "f")
  chosen = jnp.broadcast_to(jnp.asarray([3, 1], jnp.int8), (1, 6, 2))

  def loss(router):
    made, ids, *_ = experts.portable(cfg, x, w._replace(router=router), chosen)
    assert ids.dtype == jnp.int32
    return jnp.sum(made**2)

  slope = jax.jit(jax.grad(loss))(w.router)
  # Two weights that add up to 1: what one gains, the other loses.
  np.testing.assert_allclose(slope[:, 3], -slope[:, 1], rtol=1e-4)
  assert np.abs(slope[:, 3]).min() > 1e-3
  assert np.abs(slope[:, [0, 2]]).max() < 1e-5
