"""The paged cache: who has which page, and completions that do not show it."""

import dataclasses
import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_post import types
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import pages
from tests.unit import engines as making

_LONGEST_PROMPT, _LONGEST, _GROUP = 40, 32, 3


_params = making.params


def _engine(rows=8, block=4, **sizes):
  cfg = engines.Sampling(rows=rows, block=block, max_tokens=_LONGEST, **sizes)
  return making.engine(cfg, max_prompt=_LONGEST_PROMPT, group=_GROUP, key=3)


@functools.cache
def _requests():
  """Groups of 1 to 4 with prompts of 1 to 40 and limits of 2 to 32 tokens."""
  draw = np.random.default_rng(0)
  made, uid = [], 0
  for length in (1, 40, 17, 16, 5, 33):
    count = int(draw.integers(1, 5))
    made.append(
      types.Request(
        prompt=tuple(draw.integers(0, 64, length).tolist()),
        uids=tuple(range(uid, uid + count)),
        sampling=types.SamplingParams(
          temperature=float(draw.choice([0.0, 0.7, 1.0])),
          max_tokens=int(draw.integers(2, _LONGEST + 1)),
          stop_ids=(int(draw.integers(64)),),
        ),
      )
    )
    uid += count
  return tuple(made)


def _generate(engine, requests):
  policy = types.Policy(params=_params(), version=0, step=0)
  return {c.uid: c for c in engines.generate(engine, policy, requests)}


@functools.cache
def _right():
  return _generate(_engine(), _requests())


def _assert_same(found, expected, *, exact=False):
  for uid, completion in found.items():
    other = expected[uid]
    assert completion.tokens == other.tokens
    assert completion.finish == other.finish
    if exact:
      assert completion.logprobs == other.logprobs
    else:
      np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize(
  ("rows", "block", "sizes"),
  [
    pytest.param(1, 4, {}, marks=pytest.mark.slow),
    (3, 1, {"page": 1}),
    (64, 32, {"page": 32}),
    (8, 4, {"page": 5}),
    pytest.param(
      8, 32, {"page": 8, "prefill_tokens": 16}, marks=pytest.mark.slow
    ),
    (3, 4, {"page": 8, "prefill_tokens": 7}),
  ],
)
def test_completions_do_not_depend_on_rows_blocks_pages_or_chunks(
  rows, block, sizes
):
  found = _generate(_engine(rows, block, **sizes), _requests())
  assert found.keys() == _right().keys()
  _assert_same(found, _right())


def test_order_and_neighbours_change_no_bit():
  _assert_same(_generate(_engine(), _requests()[::-1]), _right(), exact=True)
  for request in _requests():
    _assert_same(_generate(_engine(), [request]), _right(), exact=True)


def test_a_full_cache_makes_the_youngest_wait_and_changes_no_token():
  engine = _engine(page=4, cache=0.3)
  waited = []
  plain = engine._cut
  engine._cut = lambda left: waited.extend(left) or plain(left)
  found = _generate(engine, _requests())
  assert waited, "the cache was never full"
  _assert_same(found, _generate(_engine(page=4), _requests()), exact=True)
  table = engine._state.table
  assert table.num_free.tolist() == [engine._size.pages]
  assert table.num_prompt_free.tolist() == [engine._size.pool_pages]


def _text(ids):
  return "".join(chr(97 + i % 26) for i in ids)


def _rich():
  """Requests with all that is done on the host."""
  made = []
  for number, request in enumerate(_requests()):
    how = dataclasses.replace(
      request.sampling,
      temperature=1.0,
      max_tokens=_LONGEST,
      stop_ids=(),
      stop_strings=("ab", "xy", "q"),
      min_tokens=number,
      top_logprobs=2,
      prompt_logprobs=number % 2 == 0,
      seed=number if number % 3 == 0 else None,
    )
    made.append(dataclasses.replace(request, sampling=how))
  return made


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_waiting_for_pages_changes_nothing_of_a_rich_request(in_flight):
  def run(cache):
    engine = _engine(page=4, cache=cache, top_logprobs=2, in_flight=in_flight)
    engine._text = _text
    policy = types.Policy(params=_params(), version=0, step=0)
    for request in _rich():
      engine.add(request)
    done, turn = {}, 0
    while engine.busy:
      # Weights that are newer by name only, so that both runs have the same.
      turn += 1
      version = turn // 12
      done |= {c.uid: c for c in engine.step(policy.params, version)}
    return done

  whole, tight = run(1.0), run(0.3)
  assert whole.keys() == tight.keys()
  assert {c.finish for c in whole.values()} == {"stop", "length"}
  for uid, completion in whole.items():
    other = tight[uid]
    assert completion.tokens == other.tokens
    assert completion.logprobs == other.logprobs
    assert completion.finish == other.finish
    assert completion.top_logprobs == other.top_logprobs
    assert completion.prompt_logprobs == other.prompt_logprobs


def test_the_cache_of_one_row_is_enough_for_all():
  engine = _engine(page=4, cache=0.01)
  assert engine._size.pages == _LONGEST // 4
  _assert_same(_generate(engine, _requests()), _right())


@pytest.mark.parametrize("page", [4, 32])
def test_the_host_counts_the_free_pages_of_the_devices(page):
  engine = _engine(page=page, cache=0.5)
  for request in _requests():
    engine.add(request)
  while engine.busy:
    engine.step(_params(), 0)
    table = engine._state.table
    assert table.num_free.tolist() == [engine._space.free(0)]
    assert table.num_prompt_free.tolist() == [engine._space.prompt_free(0)]


def test_a_long_prompt_is_read_between_blocks_of_the_others():
  engine = _engine(prefill_tokens=8)
  long = _requests()[1]
  first = types.SamplingParams(max_tokens=_LONGEST)
  engine.add(types.Request(prompt=(1, 2), uids=(99,), sampling=first))
  engine.step(_params(), 0)
  engine.add(long)
  begins = []
  for _ in range(5):
    engine.step(_params(), 0)
    begins.append(engine._waiting[0].begin if engine._waiting else None)
  assert begins[:4] == [8, 16, 24, 32]
  assert begins[4] is None


def test_mixed_lengths_waste_less_than_a_quarter_of_the_cache_in_use():
  page = 2
  engine = _engine(page=page)
  for uid in range(0, 32, 2):  # From 2 to 32 tokens.
    how = types.SamplingParams(max_tokens=uid + 2)
    engine.add(
      types.Request(prompt=(1,) * 9, uids=(uid, uid + 1), sampling=how)
    )
  held = live = 0
  while engine.busy:
    engine.step(_params(), 0)
    rows = [row for row in engine._rows if row is not None]
    groups = len({row.tag for row in rows})
    live += sum(row.used for row in rows) + 8 * groups
    table, size = engine._state.table, engine._size
    taken = size.pages - int(table.num_free[0])
    taken += size.pool_pages - int(table.num_prompt_free[0])
    held += taken * page
  assert live <= held <= 1.25 * live


@st.composite
def _lives(draw):
  """A story: which rows join which group, go on, or end."""
  return draw(
    st.lists(
      st.tuples(
        st.sampled_from(["join", "go", "end"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
        st.integers(1, 9),
        st.integers(1, 3),
      ),
      min_size=1,
      max_size=12,
    )
  )


_PAGE = 2
_SIZE = pages.sizes(
  rows=6, group=3, page=_PAGE, max_prompt=9, max_tokens=6, parts=2
)
_JOIN = jax.jit(functools.partial(pages.join, page=_PAGE))
_GO = jax.jit(functools.partial(pages.advance, page=_PAGE))
_END = jax.jit(pages.release)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(_lives())
def test_no_page_has_two_owners_and_none_is_lost(story):
  table = pages.empty_table(_SIZE)
  made, tags = {}, {}
  for what, rows, length, tag in story:
    mask = np.zeros((2, 3), bool)
    mask.reshape(-1)[rows] = True
    if what == "join":
      # What is left of the rows joins another group in the same call.
      groups = (rows[:2], tag, length), (rows[2:], tag % 3 + 1, 10 - length)
      at, member = np.full((2, 3), 6), np.zeros((2, 3), int)
      lengths = []
      for i, (some, tag, length) in enumerate(groups):
        length = {t: n for t, n, _ in tags.values()}.get(tag, length)
        taken = {m for t, _, m in tags.values() if t == tag}
        some = [r for r in some if r not in tags]
        members = [m for m in range(3) if m not in taken][: len(some)]
        some = some[: len(members)]
        at[i, : len(some)], member[i, : len(some)] = some, members
        lengths.append(length)
        places = zip(some, members, strict=True)
        tags |= {row: (tag, length, place) for row, place in places}
        made |= dict.fromkeys(some, 0)
      table, _ = _JOIN(
        _END(table, np.isin(np.arange(6), at).reshape(2, 3)),
        at.astype(np.int32),
        member.astype(np.int32),
        np.array([tag for _, tag, _ in groups], np.uint32),
        np.array(lengths, np.int32),
      )
    elif what == "go":
      rows = [r for r in rows if made.get(r, 6) < 6]
      mask = np.isin(np.arange(6), rows).reshape(2, 3)
      position = np.array(
        [tags[r][1] - 1 + made[r] if r in tags else 0 for r in range(6)],
        np.int32,
      ).reshape(2, 3)
      table = _GO(table, position, mask)
      for row in rows:
        made[row] += 1
    else:
      table = _END(table, mask)
      for row in rows:
        made.pop(row, None)
        tags.pop(row, None)
  _check_table(table, made, tags)


def _check_table(table, made, tags):
  for part in range(2):
    t = jax.tree.map(lambda x, part=part: np.asarray(x[part]), table)
    here = {r % 3: n for r, n in made.items() if r // 3 == part}
    held = t.pages[t.pages < _SIZE.pages]
    assert len(held) == len({*held.tolist()})
    free = t.free[: t.num_free]
    assert sorted([*held, *free]) == list(range(_SIZE.pages))
    for row in range(3):
      count = -(-here.get(row, 0) // _PAGE)
      mine = t.pages[row][t.pages[row] < _SIZE.pages]
      assert len(mine) == count
      assert (t.owner[mine] == row).all()
      assert t.place[mine].tolist() == list(range(count))
    lengths = {t_: n for r, (t_, n, _) in tags.items() if r // 3 == part}
    prompt = t.prompt[t.prompt < _SIZE.pool_pages]
    assert len(prompt) == len({*prompt.tolist()})
    assert len(prompt) == sum(-(-(n - 1) // _PAGE) for n in lengths.values())
    assert len(prompt) + t.num_prompt_free == _SIZE.pool_pages
    assert sorted(t.tag[t.tag > 0].tolist()) == sorted(lengths)
    for row, (tag, length, member) in tags.items():
      if row // 3 != part:
        continue
      group = t.group[row % 3]
      assert (t.tag[group], t.member[row % 3]) == (tag, member)
      assert t.rows[group, member] == row % 3
      assert t.start[row % 3] == t.length[group] == length - 1


def test_sizes_hold_every_row_at_its_longest():
  size = pages.sizes(rows=8, group=4, page=32, max_prompt=65, max_tokens=64)
  assert (size.row_pages, size.prompt_pages) == (2, 2)
  assert (size.pages, size.pool_pages) == (16, 16)
  half = pages.sizes(
    rows=8, group=4, page=32, max_prompt=65, max_tokens=64, share=0.5
  )
  assert (half.pages, half.pool_pages) == (8, 8)
  tiny = pages.sizes(rows=2, group=2, page=32, max_prompt=1, max_tokens=4)
  assert (tiny.page, tiny.row_pages, tiny.prompt_pages) == (4, 1, 0)


def test_rows_of_a_group_lie_side_by_side_with_their_prompt_once():
  engine = _engine(rows=8, page=4)
  engine.add(
    types.Request(
      prompt=(1, 2, 3, 4, 5, 6),
      uids=tuple(range(6)),
      sampling=types.SamplingParams(max_tokens=8),
    )
  )
  engine.step(_params(), 0)
  table = engine._state.table
  # Two tags of three rows each: a prompt of 5 positions in 2 pages, twice.
  taken = engine._size.pool_pages - int(table.num_prompt_free[0])
  assert taken == 4
