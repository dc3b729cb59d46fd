"""The engine: the same completions whatever the neighbours, and honest ends."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import reader
from tests.unit import engines as making

_CONFIG = making.CONFIG
_DECODER = decoders.Decoder(_CONFIG)
_params = making.params


def _engine(
  rows=4, block=4, max_tokens=16, max_prompt=16, key=0, width=2, **sizes
):
  cfg = engines.Sampling(rows=rows, block=block, max_tokens=max_tokens, **sizes)
  return making.engine(cfg, max_prompt=max_prompt, group=width, key=key)


def _request(prompt, uids, **sampling):
  return types.Request(
    prompt=tuple(prompt),
    uids=tuple(uids),
    sampling=types.SamplingParams(**sampling),
  )


def _policy(params=None, version=3):
  params = _params() if params is None else params
  return types.Policy(params=params, version=version, step=version)


def _prompt(length, seed=0):
  draw = np.random.default_rng((seed, length))
  return tuple(draw.integers(0, 64, length).tolist())


def test_c51_more_requests_than_rows_equal_each_alone():
  lengths, limits = (1, 9, 3, 6, 2), (7, 2, 5, 3, 6)
  requests = [
    _request(_prompt(n), [i], temperature=0.0, max_tokens=m, stop_ids=(5,))
    for i, (n, m) in enumerate(zip(lengths, limits, strict=True))
  ]
  together = engines.generate(_engine(rows=2), _policy(), requests)
  alone = [
    engines.generate(_engine(rows=2), _policy(), [r])[0] for r in requests
  ]
  for a, b, request in zip(together, alone, requests, strict=True):
    assert (a.uid, a.tokens, a.finish) == (b.uid, b.tokens, b.finish)
    assert a.uid == request.uids[0]
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize(("rows", "block"), [(1, 4), (3, 1), (8, 32)])
def test_completions_do_not_depend_on_rows_or_block(rows, block):
  requests = [
    _request(_prompt(3 + i), [4 * i, 4 * i + 1, 4 * i + 2], max_tokens=9)
    for i in range(3)
  ]
  expected = engines.generate(_engine(rows=8, block=4), _policy(), requests)
  found = engines.generate(
    _engine(rows=rows, block=block), _policy(), requests[::-1]
  )
  by_uid = {c.uid: c for c in found}
  for completion in expected:
    other = by_uid[completion.uid]
    assert completion.tokens == other.tokens
    np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-5)


def test_c48_groups_differ_steps_differ_and_reruns_agree():
  uniform = jax.tree.map(jnp.zeros_like, _params())
  policy = _policy(uniform)

  def group(first, others=()):
    uids = range(first, first + 8)
    ask = [_request((1, 2), uids, max_tokens=16)]
    ask += [_request((3,), [uid], max_tokens=16) for uid in others]
    made = engines.generate(_engine(rows=4), policy, ask)
    return [c.tokens for c in made[:8]]

  a, b = group(0), group(8)
  assert len({*a}) == 8
  assert not {*a} & {*b}
  assert group(0) == a
  assert group(0, others=range(100, 107)) == a
  np.testing.assert_allclose(
    engines.generate(_engine(), policy, [_request((1,), [0], max_tokens=4)])[
      0
    ].logprobs,
    -np.log(64),
    rtol=1e-5,
  )


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_a_teacher_forced_forward(temperature):
  requests = [
    _request(_prompt(n), [n, 20 + n], temperature=temperature, max_tokens=12)
    for n in (1, 5, 16)
  ]
  made = engines.generate(_engine(), _policy(), requests)
  prompts = [r.prompt for r in requests for _ in r.uids]
  for prompt, completion in zip(prompts, made, strict=True):
    tokens = jnp.array([[*prompt, *completion.tokens]])
    positions = jnp.arange(tokens.shape[1])[None]
    logprobs, _ = decoders.logprobs(
      _DECODER,
      _params(),
      tokens=tokens,
      positions=positions,
      segment_ids=jnp.ones_like(tokens),
      temperature=jnp.full(tokens.shape, temperature),
    )
    np.testing.assert_allclose(
      completion.logprobs, logprobs[0, len(prompt) :], atol=1e-5, rtol=1e-5
    )


def test_c55_any_of_several_stop_tokens_ends_and_stays():
  free = engines.generate(
    _engine(), _policy(), [_request(_prompt(4), [7], max_tokens=8)]
  )[0]
  assert free.finish == "length"
  assert len(free.tokens) == 8
  for place in (0, 3):
    stop = free.tokens[place]
    first = free.tokens.index(stop)
    request = _request(
      _prompt(4), [7], max_tokens=8, stop_ids=(63 if stop != 63 else 62, stop)
    )
    ended = engines.generate(_engine(), _policy(), [request])[0]
    assert ended.tokens == free.tokens[: first + 1]
    assert ended.finish == "stop"
    assert len(ended.logprobs) == first + 1


def test_c53_what_does_not_fit_the_cache_is_refused_and_the_limit_fits():
  small = _engine(max_prompt=5, max_tokens=3)
  with pytest.raises(types.InputError, match="max_tokens of at most 3, got 5"):
    small.add(_request(_prompt(5), [0], max_tokens=5))
  with pytest.raises(
    types.InputError, match="number of prompt tokens of at most 5"
  ):
    small.add(_request(_prompt(6), [0], max_tokens=1))
  ask = _request(_prompt(5), [0], temperature=0.0, max_tokens=3)
  large = _request(_prompt(5), [0], temperature=0.0, max_tokens=8)
  full = engines.generate(small, _policy(), [ask])[0]
  whole = engines.generate(_engine(max_tokens=64), _policy(), [large])[0]
  assert full.tokens == whole.tokens[:3]
  assert full.finish == "length"


def test_c64_the_version_is_stamped_when_the_token_is_made():
  engine = _engine(block=4)
  engine.add(_request(_prompt(3), [0], max_tokens=12))
  assert engine.step(_params(), 7) == []
  (completion,) = [c for _ in range(2) for c in engine.step(_params(), 8)]
  assert completion.versions == (7,) * 4 + (8,) * 8


def test_new_weights_take_effect_between_two_blocks():
  engine, other = _engine(block=4), _engine(block=4)
  for e in (engine, other):
    e.add(_request(_prompt(3), [0], max_tokens=8))
  changed = jax.tree.map(lambda x: -x, _params())
  engine.step(_params(), 0)
  other.step(_params(), 0)
  (kept,) = engine.step(_params(), 1)
  (swapped,) = other.step(changed, 1)
  assert kept.tokens[:4] == swapped.tokens[:4]
  assert kept.tokens[4:] != swapped.tokens[4:]


def test_a_group_is_prefilled_once(monkeypatch):
  engine = _engine(rows=2)
  calls = []
  plain = engine._reader._prefill
  monkeypatch.setattr(
    engine._reader, "_prefill", lambda *args: calls.append(1) or plain(*args)
  )
  engines.generate(
    engine, _policy(), [_request(_prompt(4), range(9), max_tokens=5)]
  )
  assert len(calls) == 1


def test_a_step_tells_of_its_programs_and_of_the_rows_that_ended():
  engine, seen = _engine(), []
  engine.add(_request((1, 2), [4, 5], max_tokens=2, temperature=0.0))
  begun = time.monotonic()
  done = engine.step(_params(), 0, lambda name, result: seen.append(name))
  assert seen == ["prefill", "decode"]
  ended = [(row, uid, tokens) for row, uid, _, tokens in engine.seats]
  lengths = [(c.uid, len(c.tokens)) for c in done]
  assert ended == [(row, *pair) for row, pair in enumerate(lengths)]
  assert len(ended) == 2
  now = time.monotonic()
  assert all(begun <= since <= now for _, _, since, _ in engine.seats)
  engine.add(_request((3,), [6], max_tokens=16))
  engine.step(_params(), 0)
  assert engine.seats == []


def test_a_prompt_the_model_cannot_read_is_refused():
  engine = _engine()
  with pytest.raises(types.InputError, match="prompt tokens of at most 63"):
    engine.add(_request((64,), [0], max_tokens=4))
  with pytest.raises(types.InputError, match="at least one token"):
    engine.add(_request((), [0], max_tokens=4))


def test_c127_programs_are_bounded_by_buckets_whatever_the_lengths():
  engine = _engine(rows=5, max_prompt=64, max_tokens=32)
  engine.warm_up(_params())
  steps_of = engine._steps
  programs = [steps_of.prefill, steps_of.insert, steps_of.decode]
  before = [p._cache_size() for p in programs]
  assert (before[0], before[2]) == (len(reader.buckets(64)), 1)
  draw = np.random.default_rng(0)
  requests = [
    _request(
      _prompt(int(draw.integers(1, 65)), i),
      range(10 * i, 10 * i + int(draw.integers(1, 5))),
      max_tokens=int(draw.integers(1, 33)),
    )
    for i in range(20)
  ]
  engines.generate(engine, _policy(), requests)
  assert [p._cache_size() for p in programs] == before


def test_a_request_without_completions_or_with_a_negative_id_is_refused():
  engine = _engine()
  with pytest.raises(types.InputError, match="at least one uid, got none"):
    engine.add(_request((1,), [], max_tokens=4))
  with pytest.raises(types.InputError, match=r"in \[0, 64\), got -1"):
    engine.add(_request((3, -1), [0], max_tokens=4))
  assert not engine.busy


def test_a_launch_that_failed_is_not_taken_for_an_empty_cache():
  engine = _engine()
  engine.add(_request(_prompt(4), [0], max_tokens=8))
  engine.step(_params(), 0)

  def fail(*args):
    raise RuntimeError("out of memory")

  plain = engine._steps
  engine._steps = dataclasses.replace(plain, decode=fail)
  with pytest.raises(RuntimeError, match="out of memory"):
    engine.step(_params(), 0)
  engine._steps = plain
  with pytest.raises(types.RunError, match="a launch has failed before"):
    engine.step(_params(), 0)


def test_c127_chunks_of_long_prompts_compile_nothing_more():
  engine = _engine(rows=5, max_prompt=64, max_tokens=32, prefill_tokens=24)
  engine.warm_up(_params())
  steps_of = engine._steps
  names = ("prefill", "extend", "insert", "decode", "cut", "resume")
  programs = [getattr(steps_of, name) for name in names]
  before = [p._cache_size() for p in programs]
  requests = [
    _request(_prompt(n, n), [n], max_tokens=4) for n in (1, 20, 24, 40, 64)
  ]
  held = dataclasses.replace(requests[1], hold=True)
  (made,) = engines.generate(engine, _policy(), [held])
  turn = types.Partial(
    uid=made.uid,
    tokens=(*made.tokens, 9),
    logprobs=(*made.logprobs, 0.0),
    versions=(*made.versions, -1),
  )
  longer = dataclasses.replace(held.sampling, max_tokens=8)
  again = dataclasses.replace(held, begun=(turn,), sampling=longer)
  engines.generate(engine, _policy(), [again])
  engines.generate(engine, _policy(), requests)
  assert [p._cache_size() for p in programs] == before


def test_buckets_end_at_the_limit():
  assert reader.buckets(64) == (16, 32, 64)
  assert reader.buckets(40) == (16, 32, 40)
  assert reader.buckets(7) == (7,)
