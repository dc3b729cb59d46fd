"""Half-made completions: taken out, continued, and met by newer weights."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.sampling import engine as engines
from tests.unit import engines as making

_CONFIG = dataclasses.replace(making.CONFIG, tie_embeddings=False)
_DECODER = decoders.Decoder(_CONFIG)
_ROWS, _MAX_PROMPT, _MAX_TOKENS = 4, 8, 128
_PROMPT = (3, 1, 4, 1, 5)
_LENGTH = 12


_params = functools.partial(making.params, _CONFIG)


def _engine(block=4, in_flight="keep"):
  cfg = engines.Sampling(
    rows=_ROWS,
    block=block,
    max_tokens=_MAX_TOKENS,
    in_flight=in_flight,
  )
  # What newer weights mean is the host's business: one set of programs.
  plain = dataclasses.replace(cfg, in_flight="keep")
  return making.engine(
    cfg,
    max_prompt=_MAX_PROMPT,
    group=2,
    key=7,
    config=_CONFIG,
    steps=making.compiled(plain, _MAX_PROMPT, 2, _DECODER),
  )


def _request(uids, prompt=_PROMPT, begun=(), **sampling):
  sampling = {"max_tokens": _LENGTH} | sampling
  return types.Request(
    prompt=tuple(prompt),
    uids=tuple(uids),
    sampling=types.SamplingParams(**sampling),
    begun=tuple(begun),
  )


def _finish(engine, version=0, params=None):
  """Steps until nothing is in flight; returns completions by uid."""
  params = _params() if params is None else params
  done = {}
  while engine.busy:
    done |= {c.uid: c for c in engine.step(params, version)}
  return done


@functools.cache
def _whole(block=4):
  engine = _engine(block)
  engine.add(_request((10, 11)))
  return _finish(engine)


def _first(completion, count, version=None):
  versions = completion.versions if version is None else [version] * count
  return types.Partial(
    uid=completion.uid,
    tokens=completion.tokens[:count],
    logprobs=completion.logprobs[:count],
    versions=tuple(versions[:count]),
  )


def _teacher_forced(params, tokens):
  """Log-probabilities of all tokens after the first, in one forward pass."""
  ids = jnp.array([tokens])
  logprobs, _ = decoders.logprobs(
    _DECODER,
    params,
    tokens=ids,
    positions=jnp.arange(ids.shape[1])[None],
    segment_ids=jnp.ones_like(ids),
    temperature=jnp.ones(ids.shape),
  )
  return np.asarray(logprobs[0])


@pytest.mark.parametrize("block", [1, 4, 32])
@pytest.mark.parametrize("made", range(_LENGTH))
def test_c95_interrupted_at_any_token_equals_uninterrupted(made, block):
  whole = _whole()
  engine = _engine(block)
  # Neighbours of other prompts, in the slots and at the places of before.
  engine.add(_request([90 + made], prompt=(made, 2), max_tokens=20))
  engine.add(_request([80], prompt=(9,) * 8, max_tokens=3))
  begun = [_first(whole[10], made), _first(whole[11], _LENGTH - 1 - made)]
  engine.add(_request((10, 11), begun=begun))
  done = _finish(engine)
  assert done[10] == whole[10]
  assert done[11] == whole[11]


def test_other_rows_do_not_notice_that_one_is_continued():
  whole = _whole()
  engine = _engine()
  engine.add(_request([10], begun=[_first(whole[10], 7)]))
  engine.add(_request([11]))
  assert _finish(engine) == whole


@pytest.mark.parametrize("block", [1, 4])
def test_partials_are_the_tokens_so_far(block):
  whole = _whole()
  engine = _engine(block)
  engine.add(_request((10, 11)))
  assert engine.partials() == ()
  for blocks in range(1, -(-_LENGTH // block)):
    engine.step(_params(), 0)
    assert engine.partials() == tuple(
      _first(whole[uid], blocks * block) for uid in (10, 11)
    )
  engine.step(_params(), 0)
  assert engine.partials() == ()


def test_partials_have_what_waits_to_be_continued_and_do_not_change():
  whole = _whole()
  engine = _engine(4)
  engine.add(_request(range(4), max_tokens=5))  # All rows.
  begun = _first(whole[11], 6)
  engine.add(_request((10, 11), begun=[begun, _first(whole[10], 0)]))
  assert engine.partials() == (begun,)
  engine.step(_params(), 0)
  taken = engine.partials()
  assert [len(p.tokens) for p in taken] == [4, 4, 4, 4, 6]
  assert taken[-1] == begun
  before = repr(taken)
  engine.step(_params(), 0)
  engine.step(_params(), 0)
  # The row is still at its forced tokens, all of which it had already.
  assert [p for p in engine.partials() if p.uid == 11] == [begun]
  assert repr(taken) == before
  done = _finish(engine)
  assert (done[10], done[11]) == (whole[10], whole[11])


def test_a_continued_completion_still_ends_at_a_stop_token():
  whole = _whole()[10]
  place = next(
    i for i in range(6, 11) if whole.tokens[i] not in whole.tokens[:i]
  )
  stop = whole.tokens[place]
  engine = _engine()
  request = _request([10], begun=[_first(whole, 5)], stop_ids=(stop,))
  engine.add(request)
  done = _finish(engine)[10]
  assert done.tokens == whole.tokens[: place + 1]
  assert done.logprobs == whole.logprobs[: place + 1]
  assert done.finish == "stop"


def test_continued_by_newer_weights_reads_all_of_it_anew():
  newer, made = _params(1), 5
  whole = _whole()[10]
  engine = _engine()
  engine.add(_request([10], begun=[_first(whole, made, version=2)]))
  done = _finish(engine, version=3, params=newer)[10]
  assert done.tokens[:made] == whole.tokens[:made]
  assert done.logprobs[:made] == whole.logprobs[:made]
  assert done.versions == (2,) * made + (3,) * (_LENGTH - made)
  expected = _teacher_forced(newer, (*_PROMPT, *done.tokens))
  expected = expected[len(_PROMPT) + made :]
  np.testing.assert_allclose(done.logprobs[made:], expected, atol=1e-5)


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "drain"])
def test_newer_weights_meet_rows_in_flight(in_flight):
  newer = _params(1)
  engine = _engine(4, in_flight)
  engine.add(_request((10, 11, 13)))  # More than one insert fills.
  engine.add(_request([12], prompt=(6,)))
  engine.step(_params(), 0)
  kept = {p.uid: p for p in engine.partials()}
  done = _finish(engine, version=1, params=newer)
  for uid in (10, 11, 12, 13):
    prompt = (6,) if uid == 12 else _PROMPT
    completion = done[uid]
    assert completion.versions == (0,) * 4 + (1,) * 8
    assert _first(completion, 4) == kept[uid]
    expected = _teacher_forced(newer, (*prompt, *completion.tokens))
    expected = expected[len(prompt) + 4 :]
    gap = np.abs(np.subtract(completion.logprobs[4:], expected)).max()
    # Older keys and values show in what is sampled over them.
    assert gap < 1e-5 if in_flight == "recompute" else gap > 1e-2


def test_drain_is_to_the_engine_what_keep_is():
  done = []
  for in_flight in ("keep", "drain"):
    engine = _engine(4, in_flight)
    engine.add(_request((10, 11)))
    engine.step(_params(), 0)
    done.append(_finish(engine, version=1, params=_params(1)))
  assert done[0] == done[1]


@pytest.mark.parametrize("block", [1, 4])
def test_recomputing_with_equal_weights_changes_no_bit(block):
  requests = [
    _request(range(10 * i, 10 * i + 3), prompt=(i + 1,) * (i + 1))
    for i in range(4)
  ]
  plain, engine = _engine(block), _engine(block, "recompute")
  for each in (plain, engine):
    for request in requests:
      each.add(request)
  expected, done = _finish(plain), {}
  for version in range(10_000):
    if not engine.busy:
      break
    # Newer ones come while rows are still at the tokens of before.
    for c in engine.step(_params(), version // (16 // block)):
      done[c.uid] = dataclasses.replace(c, versions=(0,) * len(c.versions))
  assert done == expected
  assert version > 10


@pytest.mark.parametrize("made", [4, 8])
def test_renewed_weights_are_read_as_by_an_engine_that_continues(made):
  engine, other = (_engine(4, "recompute") for _ in range(2))
  engine.add(_request((10, 11)))
  for _ in range(made // 4):
    engine.step(_params(), 0)
  begun = engine.partials()
  other.add(_request((10, 11), begun=begun))
  engine.renew()
  while engine.busy:
    # Block by block: what else is sampled meanwhile must be the same, too.
    assert engine.step(_params(), 0) == other.step(_params(), 0)
    assert engine.partials() == other.partials()
  assert not other.busy


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_c64_57_sevens_then_71_eights_whatever_is_in_flight(in_flight):
  engine = _engine(1, in_flight)
  engine.add(_request([10], max_tokens=128))
  for _ in range(57):
    engine.step(_params(), 7)
  (done,) = _finish(engine, version=8, params=_params(1)).values()
  assert done.versions == (7,) * 57 + (8,) * 71


def test_c127_continuing_and_recomputing_compile_nothing():
  engine = _engine(4, "recompute")
  engine.warm_up(_params())
  compiled = engine._steps
  programs = (compiled.prefill, compiled.insert, compiled.decode)
  before = [program._cache_size() for program in programs]
  whole = _whole()
  engine.add(_request((10, 11), begun=[_first(whole[11], 9)]))
  engine.step(_params(), 0)
  _finish(engine, version=1)
  assert [program._cache_size() for program in programs] == before


def _damaged(**changes):
  return dataclasses.replace(_first(_whole()[10], 4), **changes)


@pytest.mark.parametrize(
  ("begun", "expected"),
  [
    (lambda: [_damaged(uid=12)], r"a uid of \(10, 11\), got 12"),
    (lambda: [_damaged(), _damaged()], r"each uid once, got \[10, 10\]"),
    (
      lambda: [_damaged(logprobs=(-1.0,))],
      r"as many log-probabilities and versions, got \[4, 1, 4\]",
    ),
    (lambda: [_damaged(versions=())], r"got \[4, 4, 0\]"),
    (lambda: [_damaged(tokens=(1, 64, 2, -1))], r"\[0, 64\), got \[64, -1\]"),
    (lambda: [_damaged(versions=(0, 0, -2, 0))], r"versions >= -1, got"),
    (
      lambda: [_damaged(tokens=(1, 2, 63, 3))],
      r"no stop token in its last turn, got \[63\]",
    ),
  ],
)
def test_what_the_request_cannot_have_begun_is_refused(begun, expected):
  engine = _engine()
  with pytest.raises(types.RunError, match=expected) as error:
    engine.add(_request((10, 11), begun=begun(), stop_ids=(63,)))
  assert "\n" not in str(error.value)
  assert not engine.busy


def test_more_than_the_request_may_have_is_refused():
  engine = _engine()
  begun = [_first(_whole()[10], _LENGTH)]
  with pytest.raises(types.InputError, match="from of at most 11, got 12"):
    engine.add(_request((10, 11), begun=begun))
  assert not engine.busy
