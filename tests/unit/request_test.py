"""What a request can ask for: stop strings, log-probabilities, a seed."""

import contextlib
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.envs import single_turn
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.placement import generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import prefix as prefixes
from tests.unit import engines as making

_CONFIG = dataclasses.replace(making.CONFIG, ff_width=48)
_DECODER = decoders.Decoder(_CONFIG, chunk=8)
_MAX_PROMPT, _MAX_TOKENS, _TOP = 80, 32, 3


_params = functools.partial(making.params, _CONFIG)


def _text(ids):
  return "".join(chr(ord("0") + i) for i in ids)


def _engine(rows=4, key=0, decode=_text):
  # Two prompts of 16 tokens in a call, one of 32, longer ones in chunks.
  cfg = engines.Sampling(
    rows=rows,
    block=4,
    max_tokens=_MAX_TOKENS,
    page=4,
    prefill_tokens=32,
    top_logprobs=_TOP,
  )
  return making.engine(
    cfg,
    max_prompt=_MAX_PROMPT,
    group=2,
    key=key,
    config=_CONFIG,
    steps=making.compiled(cfg, _MAX_PROMPT, 2, _DECODER),
    decode=decode,
  )


def _prompt(length, seed=0):
  draw = np.random.default_rng((seed, length))
  return tuple(draw.integers(0, 64, length).tolist())


def _request(uids, prompt=(3, 1, 4), begun=(), **sampling):
  sampling = {"max_tokens": _MAX_TOKENS} | sampling
  return types.Request(
    prompt=tuple(prompt),
    uids=tuple(uids),
    sampling=types.SamplingParams(**sampling),
    begun=tuple(begun),
  )


def _generate(*requests, engine=None):
  policy = types.Policy(params=_params(), version=0, step=0)
  return engines.generate(engine or _engine(), policy, requests)


@functools.cache
def _free(uid=0):
  """A completion that nothing stops."""
  return _generate(_request([uid]))[0]


def _begun(completion, count):
  return types.Partial(
    uid=completion.uid,
    tokens=completion.tokens[:count],
    logprobs=completion.logprobs[:count],
    versions=completion.versions[:count],
  )


# ------------------------------------------------------------ stop strings


@pytest.mark.parametrize("begin", [2, 3, 4, _MAX_TOKENS - 2])
def test_c60_a_stop_string_ends_with_the_token_that_completes_it(begin):
  free = _free()
  stop = _text(free.tokens[begin : begin + 2])
  end = _text(free.tokens).index(stop) + 2
  (made,) = _generate(_request([0], stop_strings=("never", stop)))
  # Ids, log-probabilities and versions keep the whole string.
  assert made == dataclasses.replace(
    free,
    tokens=free.tokens[:end],
    logprobs=free.logprobs[:end],
    versions=free.versions[:end],
    finish="stop",
  )


def test_a_row_that_a_stop_string_ends_is_free_before_the_next_refill():
  engine, free = _engine(rows=2), _free()
  stop = _text(free.tokens[:2])
  engine.add(_request([0], stop_strings=(stop,)))
  engine.add(_request([1]))
  engine.add(_request([2]))
  assert [c.uid for c in engine.step(_params(), 0)] == [0]
  table, space = engine._state.table, engine._space
  assert table.num_free.tolist() == [space.free(0)]
  assert table.num_prompt_free.tolist() == [space.prompt_free(0)]
  assert [row and row.uid for row in engine._rows] == [None, 1]
  done = engine.step(_params(), 0)
  assert [row and row.uid for row in engine._rows] == [2, 1]
  while engine.busy:
    done += engine.step(_params(), 0)
  # Whoever stands beside it, or after it in its row, sees nothing of it.
  assert {c.uid: c for c in done} == {1: _free(1), 2: _free(2)}


def test_tokens_before_the_minimum_complete_no_stop_string():
  free = _free()
  twice = next(t for t in free.tokens if free.tokens.count(t) > 1)
  first = free.tokens.index(twice)
  second = free.tokens.index(twice, first + 1)
  for least, end in ((first, first), (first + 1, second), (second, second)):
    request = _request([0], stop_strings=(_text([twice]),), min_tokens=least)
    (made,) = _generate(request)
    assert (made.tokens, made.finish) == (free.tokens[: end + 1], "stop")


def test_a_stop_token_and_a_stop_string_end_whichever_comes_first():
  free = _free()
  early, late = free.tokens[5], _text(free.tokens[8:10])
  request = _request([0], stop_ids=(early,), stop_strings=(late,))
  assert (
    _generate(request)[0].tokens == free.tokens[: 1 + free.tokens.index(early)]
  )
  late, early = free.tokens[9], _text(free.tokens[4:6])
  assert free.tokens.index(late) > 5
  request = _request([0], stop_ids=(late,), stop_strings=(early,))
  assert (
    len(_generate(request)[0].tokens) == _text(free.tokens).index(early) + 2
  )


def test_top_logprobs_are_cut_with_the_tokens():
  free = _free()
  stop = _text(free.tokens[4:6])
  (made,) = _generate(_request([0], stop_strings=(stop,), top_logprobs=2))
  assert len(made.top_logprobs) == len(made.tokens) == len(made.logprobs)
  assert all(len(most) == 2 for most in made.top_logprobs)


def test_stop_strings_without_decode_are_refused():
  engine = _engine(decode=None)
  with pytest.raises(types.InputError, match="no stop strings.*`decode`") as e:
    engine.add(_request([7], stop_strings=("a",)))
  assert "\n" not in str(e.value) and not engine.busy


@pytest.mark.parametrize("least", [0, 3])
def test_continued_completions_stop_where_they_would_have(least):
  free = _free()
  stop = _text(free.tokens[9:11])
  end = _text(free.tokens).index(stop) + 2
  asked = {"stop_strings": (stop,), "min_tokens": least}
  # One half of the string was made before the break.
  engine = _engine()
  (made,) = _generate(
    _request([0], begun=[_begun(free, end - 1)], **asked), engine=engine
  )
  assert (made.tokens, made.finish) == (free.tokens[:end], "stop")
  with pytest.raises(
    types.RunError, match=f"no stop string in it, got one up to token {end - 1}"
  ):
    engine.add(_request([0], begun=[_begun(free, end)], **asked))
  # Where it was passed over, it still is.
  held = dict(stop_strings=(stop,), min_tokens=end)
  engine.add(_request([0], begun=[_begun(free, end)], **held))


def test_the_text_of_a_rollout_keeps_a_stop_string_and_leaves_a_stop_token():
  env = single_turn.SingleTurn(
    1, types.SamplingParams(stop_ids=(5,), stop_strings=("12",)), _text
  )
  prompt = types.Prompt(uid=0, tokens=(1,), text="", reference=None)
  for tokens, text in (((1, 2), "12"), ((1, 5), "1")):
    completion = types.Completion(
      uid=0, tokens=tokens, logprobs=(), versions=(), finish="stop"
    )
    assert env.rollout(prompt, completion).text == text


# ------------------------------------------- log-probabilities that are asked


@jax.jit
def _table(params, ids, temperature):
  """Of every place but the first, given the tokens before it: [T - 1, V]."""
  hidden, _ = transformer.forward(
    params, _CONFIG, ids, jnp.arange(ids.shape[1])[None]
  )
  logits = transformer.logits(params, _CONFIG, hidden[0, :-1])
  return jax.nn.log_softmax(logits / temperature)


@jax.jit
def _scores(params, ids, length, temperature):
  places = jnp.arange(ids.shape[1])[None]
  logprobs, _ = decoders.logprobs(
    _DECODER,
    params,
    tokens=ids,
    positions=places,
    segment_ids=(places < length).astype(jnp.int32),
    temperature=jnp.full(ids.shape, temperature),
  )
  return logprobs[0]


def _padded(tokens):
  """One shape for all, so that one program serves them."""
  return np.array([[*tokens, *[0] * (_MAX_PROMPT - len(tokens))]], np.int32)


def _log_softmax(tokens, temperature):
  heat = np.float32(temperature or 1.0)
  return np.asarray(_table(_params(), _padded(tokens), heat))[: len(tokens) - 1]


def _teacher_forced(prompt, temperature):
  ids, length = _padded(prompt), np.int32(len(prompt))
  logprobs = _scores(_params(), ids, length, np.float32(temperature))
  return np.asarray(logprobs)[1 : len(prompt)]


def test_prompt_logprobs_are_those_of_a_teacher_forced_forward():
  lengths = (1, 2, 5, 16, 17, 32, 33, 64, 65, 80)
  heats = (0.7, 0.0, 1.0)
  requests = [
    _request(
      (2 * i, 2 * i + 1),
      _prompt(n),
      temperature=heats[i % 3],
      max_tokens=2,
      prompt_logprobs=True,
    )
    for i, n in enumerate(lengths)
  ]
  made = _generate(*requests)
  for request, pair in zip(
    requests, zip(made[::2], made[1::2], strict=True), strict=True
  ):
    expected = _teacher_forced(request.prompt, request.sampling.temperature)
    for completion in pair:
      found = completion.prompt_logprobs
      assert len(found) == len(request.prompt) - 1
      np.testing.assert_allclose(found, expected, atol=1e-5)


def test_prompts_with_and_without_scores_share_no_call():
  asked = [
    _request([i], _prompt(5, i), prompt_logprobs=i % 2 == 0, max_tokens=6)
    for i in range(4)
  ]
  plain = [_request([i], _prompt(5, i), max_tokens=6) for i in range(4)]
  engine = _engine()
  expected = _generate(*plain, engine=engine)
  assert all(c.prompt_logprobs == () for c in expected)
  mixed = _generate(*asked, engine=engine)
  for one, other, request in zip(mixed, expected, asked, strict=True):
    assert one.tokens == other.tokens
    if request.sampling.prompt_logprobs:
      scores = _teacher_forced(request.prompt, 1.0)
      np.testing.assert_allclose(one.prompt_logprobs, scores, atol=1e-5)
    else:
      assert one == other


def test_warming_up_compiles_no_scores():
  cfg = engines.Sampling(rows=2, block=2, max_tokens=4, prefill_tokens=128)
  mesh = meshes.build(meshes.GenerationAxes(data=1), jax.devices()[:1])
  compiled = generator.compiled(
    mesh, rules={}, decoder=_DECODER, cfg=cfg, max_prompt=8, group=1
  )
  engine = engines.Engine(
    compiled,
    cfg,
    max_prompt=8,
    vocab_size=64,
    key=jax.random.key(0),
    dispatch=contextlib.nullcontext(),
  )
  engine.warm_up(_params())
  assert compiled.prefill._cache_size() == 1
  inserts = compiled.insert._cache_size()
  _generate(_request([0], prompt_logprobs=True, max_tokens=2), engine=engine)
  assert compiled.prefill._cache_size() == 2
  assert compiled.insert._cache_size() == inserts


def test_scoring_holds_a_chunk_of_logits_at_a_time():
  def scored(params, tokens, length, temperature):
    return prefixes.prefill(
      params, tokens, length, decoder=_DECODER, temperature=temperature
    )

  program = jax.make_jaxpr(scored)(
    _params(),
    np.zeros((2, 32), np.int32),
    np.ones(2, np.int32),
    np.ones(2, "f4"),
  )
  assert "f32[1,8,64]" in str(program)
  assert "f32[2,32,64]" not in str(program)
  assert "f32[1,64,64]" not in str(program)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_top_logprobs_are_the_largest_of_a_teacher_forced_forward(temperature):
  for count, prompt in ((_TOP, _prompt(6)), (1, _prompt(40))):
    request = _request(
      [1], prompt, temperature=temperature, max_tokens=9, top_logprobs=count
    )
    (made,) = _generate(request)
    table = _log_softmax((*prompt, *made.tokens), temperature)
    places = table[len(prompt) - 1 :]
    assert len(made.top_logprobs) == len(made.tokens) == len(places)
    for most, place, token in zip(
      made.top_logprobs, places, made.tokens, strict=True
    ):
      ids, logprobs = zip(*most, strict=True)
      assert list(ids) == np.argsort(-place, kind="stable")[:count].tolist()
      np.testing.assert_allclose(logprobs, place[list(ids)], atol=1e-5)
      assert temperature or token == ids[0]


def test_more_top_logprobs_than_the_engine_computes_are_refused():
  with pytest.raises(types.InputError, match=f"at most {_TOP}, got {_TOP + 1}"):
    _engine().add(_request([0], top_logprobs=_TOP + 1))


# ------------------------------------------------------------------- seeds


def test_a_seeded_request_depends_on_nothing_but_its_seed():
  def tokens(*uids, seed=11, before=(), **where):
    request = _request(uids, _prompt(5), seed=seed, max_tokens=8)
    made = _generate(*before, request, engine=_engine(**where))
    return [c.tokens for c in made[-len(uids) :]]

  neighbours = [
    _request([50], _prompt(20), max_tokens=3),
    _request([51, 52, 53], _prompt(7), seed=11, max_tokens=5),
  ]
  expected = tokens(0, 1, 2)
  assert len({*expected}) == 3  # Members of a group differ.
  assert tokens(90, 7, 8) == expected  # Other uids,
  assert tokens(0, 1, 2, key=5) == expected  # another key of the run,
  assert tokens(0, 1, 2, before=neighbours) == expected  # neighbours,
  assert tokens(3, 4, 5, rows=2, key=1) == expected  # and rows.
  assert tokens(0, 1, 2, seed=12) != expected
  assert tokens(0, 1, 2, seed=None) != expected


# ------------------------------------------------------------------- times


def test_metrics_count_tokens_and_the_time_of_each_part():
  engine = _engine()
  assert set(engine.metrics().values()) == {0.0}
  engine.add(_request([0, 1], _prompt(40), max_tokens=8))
  before = engine.metrics()
  for prompt_tokens, made in ((32, 0), (40, 8), (40, 16)):
    engine.step(_params(), 0)
    now = engine.metrics()
    assert now["engine/prefill_tokens"] >= prompt_tokens
    assert now["engine/decode_tokens"] <= made + 8
    read = now["engine/prefill_tokens"] > before["engine/prefill_tokens"]
    # A step that reads nothing adds nothing to the time of reading.
    assert (now["engine/prefill_s"] > before["engine/prefill_s"]) == read
    assert now["engine/decode_s"] > before["engine/decode_s"]
    before = now
    if not engine.busy:
      break
  assert before["engine/prefill_tokens"] == 40
  assert before["engine/decode_tokens"] == 16
  # A chunk of the prompt a call; a token of both rows a column.
  assert before["engine/prefill_calls"] == 2
  assert before["engine/columns"] == 8
  assert 1 <= before["engine/blocks"] <= 3
  path = pathlib.Path(__file__).parents[2] / "docs" / "metrics.md"
  assert "engine/{prefill,decode}_{tokens,s}" in path.read_text()
  assert "engine/{prefill_calls,blocks,columns}" in path.read_text()
