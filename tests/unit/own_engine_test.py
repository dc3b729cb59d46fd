"""An engine of a model of the user's own keeps the promises of ours."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post import types
from jaxrl_post.models import decoder
from jaxrl_post.sampling import engine as engine_lib
from tests.e2e import own_models as own
from tests.unit import engines

CFG = engine_lib.Sampling(max_tokens=5, rows=4, block=2, top_logprobs=2)
PROMPT = (3, 2, 4)
MODELS = [own.linen_plain, own.nnx_cached]


@functools.cache
def built(make):
  """Returns the decoder and its weights."""
  model = make().model
  made = decoder.Decoder(model.config)
  return made, decoder.init(model.config, jax.random.key(1), "float32")


def new(make, text=None, cfg=CFG):
  """Returns an engine of the model."""
  made, _ = built(make)
  steps = engines.compiled(cfg, len(PROMPT), 2, made)
  return engines.engine(
    cfg, max_prompt=3, group=2, config=made.config, steps=steps, decode=text
  )


def run(make, *requests, engine=None, cut=None):
  """Returns completions by uid; with `cut`, partials after so many steps."""
  engine, (_, params) = engine or new(make), built(make)
  for one in requests:
    engine.add(one)
  done, count = {}, 0
  while engine.busy:
    done |= {c.uid: c for c in engine.step(params, 0)}
    count += 1
    if count == cut:
      return engine.partials()
  return done


def request(*uids, prompt=PROMPT, begun=(), hold=False, **sampling):
  given = types.SamplingParams(**{"max_tokens": 5, **sampling})
  return types.Request(
    prompt=prompt, uids=uids, sampling=given, begun=begun, hold=hold
  )


@pytest.mark.parametrize("make", MODELS)
def test_it_reports_the_log_probabilities_of_the_trainer(make):
  made, params = built(make)
  done = run(
    make,
    request(7, 8, temperature=0.6, top_logprobs=2),
    request(9, prompt=(5,), temperature=0.0),
  )
  for uid, prompt, temperature in ((7, PROMPT, 0.6), (9, (5,), 1.0)):
    tokens = jnp.array([[*prompt, *done[uid].tokens]], jnp.int32)
    found, _ = decoder.logprobs(
      made,
      params,
      tokens=tokens,
      temperature=jnp.full(tokens.shape, temperature),
      positions=jnp.arange(tokens.shape[1])[None],
      segment_ids=jnp.ones_like(tokens),
    )
    assert done[uid].logprobs == pytest.approx(
      found[0, len(prompt) :].tolist(), abs=1e-5
    )
  # Greedy takes the most probable token, which is reported as the first.
  assert len(done[7].top_logprobs) == 5
  ids, scores = zip(*done[7].top_logprobs[0], strict=True)
  assert scores[0] >= scores[1] and len({*ids}) == 2


@pytest.mark.parametrize("make", MODELS)
def test_a_completion_does_not_depend_on_its_neighbours_or_a_break(make):
  alone = run(make, request(8))[8]
  many = run(make, *(request(uid, uid + 1) for uid in (8, 20, 30, 40)))
  assert many[8].tokens == alone.tokens
  assert many[8].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
  half = run(make, request(8), cut=1)
  assert len(half[0].tokens) == 2
  again = run(make, request(8, begun=half))[8]
  assert again.tokens == alone.tokens
  assert len({c.tokens for c in many.values()}) > 4


@pytest.mark.parametrize("make", MODELS)
def test_neither_rows_nor_blocks_nor_chunks_change_a_token(make):
  sizes = dict(rows=2, block=3, prefill_tokens=1)
  other = new(make, cfg=dataclasses.replace(CFG, **sizes))
  requests = [request(uid, uid + 1) for uid in (8, 20, 30)]
  one, two = run(make, *requests), run(make, *requests, engine=other)
  assert one.keys() == two.keys()
  for uid, made in one.items():
    assert two[uid].tokens == made.tokens
    assert two[uid].logprobs == pytest.approx(made.logprobs, abs=1e-5)


def test_a_cache_changes_no_token():
  requests = [request(8, 9), request(20, prompt=(5,))]
  one, two = (run(make, *requests) for make in (own.nnx_cached, own.nnx_plain))
  for uid, made in one.items():
    assert two[uid].tokens == made.tokens
    assert two[uid].logprobs == pytest.approx(made.logprobs, abs=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_a_turn_goes_on_from_what_is_not_held(make):
  """It is made again, whether the request asked to hold it or not."""
  found = []
  for hold in (True, False):
    engine = new(make, lambda ids: "".join(map(str, ids)))
    begun = request(8, hold=hold, max_tokens=3, stop_strings=("2",))
    first = run(make, begun, engine=engine)[8]
    told = types.Partial(
      uid=8,
      tokens=(*first.tokens, 4),
      logprobs=(*first.logprobs, 0.0),
      versions=(*first.versions, -1),
    )
    more = request(8, begun=(told,), hold=hold)
    found.append(run(make, more, engine=engine)[8])
  assert found[0] == found[1]
  assert found[0].tokens[: len(told.tokens)] == told.tokens
  assert found[0].versions.count(-1) == 1


def test_a_prompt_is_not_scored():
  with pytest.raises(types.InputError, match="^request: expected none for"):
    run(own.nnx_cached, request(8, prompt_logprobs=True))
