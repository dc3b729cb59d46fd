"""Conversations of several turns: what is in the cache is not read again."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.envs import conversing, multi_turn, single_turn
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import fleet as fleets
from jaxrl_post.sampling import rows as rows_lib
from jaxrl_post.sampling import stop_strings
from tests.unit import engines as making

_PROMPT, _TURN, _TURNS, _SAID = (3, 1, 4, 1, 5), 9, 3, (7, 7, 2)
# All that a conversation can come to.
_MOST = _TURNS * (_TURN + len(_SAID))
_params = making.params


def _engine(*, rows=4, block=4, group=2, free_idle=False, **settings):
  cfg = engines.Sampling(rows=rows, block=block, max_tokens=_MOST, **settings)
  made = making.engine(
    cfg, max_prompt=8, group=group, key=7, decode=_text(making.CONFIG)
  )
  made._free_idle = free_idle
  return made


def _text(config):
  letters = [chr(ord("!") + i) for i in range(config.vocab_size)]
  return lambda ids: "".join(letters[i] for i in ids)


def _request(uids, begun=(), hold=False, prompt=_PROMPT, **sampling):
  done = max((len(p.tokens) for p in begun), default=0)
  sampling = {"max_tokens": done + _TURN} | sampling
  return types.Request(
    prompt=tuple(prompt),
    uids=tuple(uids),
    sampling=types.SamplingParams(**sampling),
    begun=tuple(begun),
    hold=hold,
  )


def _answered(completion, said=_SAID):
  """Returns a turn that ended, and what a tool said to it."""
  count = len(said)
  return types.Partial(
    uid=completion.uid,
    tokens=(*completion.tokens, *said),
    logprobs=(*completion.logprobs, *[0.0] * count),
    versions=(*completion.versions, *[-1] * count),
  )


def _run(engine, requests, version=0, params=None):
  """Steps until nothing is in flight; returns completions by uid."""
  params = _params() if params is None else params
  for request in requests:
    engine.add(request)
  done = {}
  while engine.busy:
    done |= {c.uid: c for c in engine.step(params, version)}
  return done


def _converse(engine, uids=(10, 11), *, hold, turns=_TURNS, **sampling):
  """Returns the last turn of each; every turn is a request of its own."""
  done = _run(engine, [_request(uids, hold=hold, **sampling)])
  for _ in range(turns - 1):
    # The tool answers the later one first.
    requests = [
      _request([uid], [_answered(done[uid])], hold, **sampling)
      for uid in reversed(uids)
    ]
    done = _run(engine, requests)
  return done


def _free(engine):
  """Returns own pages, pages of prompts and groups that nobody has."""
  table = engine._state.table
  groups = int((np.asarray(table.tag) == 0).sum())
  return int(table.num_free[0]), int(table.num_prompt_free[0]), groups


@pytest.mark.parametrize(
  "settings",
  [{}, {"page": 1}, {"page": 5, "block": 1}, {"rows": 8, "block": 32}],
  ids=str,
)
@pytest.mark.parametrize(
  "sampling",
  # 2 is among what the tool says, and must not end a turn.
  [{}, {"stop_ids": (1, 2, 3, 5, 8, 13, 21)}, {"seed": 5}],
  ids=str,
)
def test_turns_from_the_cache_are_those_that_are_read_again(settings, sampling):
  held, plain = _engine(**settings), _engine(**settings)
  one = _converse(held, hold=True, **sampling)
  two = _converse(plain, hold=False, **sampling)
  assert one == two
  for completion in one.values():
    turns = [v < 0 for v in completion.versions]
    assert not turns[-1] and turns.count(True) == (_TURNS - 1) * len(_SAID)
  fed = {k: e.metrics() for k, e in (("held", held), ("plain", plain))}
  # The prompt once, and of what was said before each turn the answers only.
  assert fed["held"]["engine/prefill_tokens"] == len(_PROMPT)
  whole = sum(len(c.tokens) for c in one.values())
  assert fed["held"]["engine/decode_tokens"] == whole
  assert fed["plain"]["engine/decode_tokens"] > 1.3 * whole
  assert fed["plain"]["engine/prefill_tokens"] == len(_PROMPT) * (
    1 + 2 * (_TURNS - 1)
  )


def test_tokens_of_a_tool_are_of_no_version_and_as_they_were_given():
  done = _converse(_engine(), hold=True, turns=2)
  for completion in done.values():
    said = [i for i, v in enumerate(completion.versions) if v < 0]
    assert said == [_TURN, _TURN + 1, _TURN + 2]
    assert completion.tokens[_TURN : _TURN + 3] == _SAID
    assert completion.logprobs[_TURN : _TURN + 3] == (0.0,) * 3
    assert len(completion.tokens) == 2 * _TURN + 3


@pytest.mark.parametrize(
  "page", [1, 3, pytest.param(64, marks=pytest.mark.slow)]
)
def test_a_turn_that_a_stop_string_ends_is_held_up_to_it(page):
  first = _run(_engine(page=page), [_request((10, 11))])
  # Where the first turn of one of them is cut in the middle of a block.
  stop = _text(making.CONFIG)(first[10].tokens[1:3])
  found = {}
  for hold in (True, False):
    engine = _engine(page=page, block=8)
    found[hold] = _converse(engine, hold=hold, stop_strings=(stop,))
    if hold:
      fed = engine.metrics()["engine/decode_tokens"]
  assert found[True] == found[False]
  # A block goes on behind the string; nothing is fed twice.
  whole = sum(len(c.tokens) for c in found[True].values())
  assert whole <= fed <= whole + 2 * _TURNS * 8


def test_a_stop_string_does_not_begin_in_what_a_tool_said():
  decode = _text(making.CONFIG)
  first = _run(_engine(), [_request((10,))])[10]
  free = _run(_engine(), [_request([10], [_answered(first)])])[10]
  across = decode([_SAID[-1], free.tokens[_TURN + 3]])
  again = _request([10], [_answered(first)], stop_strings=(across,))
  assert across not in decode(free.tokens[_TURN + 3 :])
  assert _run(_engine(), [again])[10] == free


@pytest.mark.parametrize("page", [1, 2, 5])
def test_a_turn_that_ends_twice_in_a_block_keeps_what_it_may(page):
  # By a stop string, and behind it by its length, in one block.
  first = _run(_engine(page=page, block=32), [_request((10, 11))])
  stop = _text(making.CONFIG)(first[10].tokens[1:3])
  engine = _engine(page=page, block=32)
  sampling = {"stop_strings": (stop,)}
  one = _converse(engine, hold=True, **sampling)
  plain = _engine(page=page, block=32)
  assert one == _converse(plain, hold=False, **sampling)
  assert len(one[10].tokens) < _MOST - len(_SAID)
  table, size = engine._state.table, engine._size
  held = sum(-(-row.used // page) for row in engine._rows if row)
  assert int(table.num_free[0]) == size.pages - held
  owned = np.asarray(table.pages)[np.asarray(table.pages) < size.pages]
  assert len({*owned.tolist()}) == len(owned) == held
  assert int((np.asarray(table.owner) < size.rows).sum()) == held


def test_a_completion_is_continued_once_however_often_it_is_asked_for():
  engine = _engine()
  done = _run(engine, [_request((10,), hold=True)])
  one, two = (_answered(done[10], said) for said in ((7,), (8, 8)))
  engine.add(_request((10,), [one]))
  engine.add(_request((10,), [two]))
  ended = []
  while engine.busy:
    ended += engine.step(_params(), 0)
  assert sorted(len(c.tokens) for c in ended) == [2 * _TURN + 1, 2 * _TURN + 2]
  assert not any(engine._rows)
  # The first one is not what is held, the second is.
  done = _run(engine, [_request((20,), hold=True)])
  other = dataclasses.replace(
    _answered(done[20]), tokens=(9, *done[20].tokens[1:], *_SAID)
  )
  engine.add(_request((20,), [other]))
  engine.add(_request((20,), [_answered(done[20])]))
  ended = []
  while engine.busy:
    ended += engine.step(_params(), 0)
  assert len(ended) == 2 and not any(engine._rows)
  assert int(engine._state.table.num_free[0]) == engine._size.pages


def test_a_turn_that_its_length_has_ended_goes_on_without_new_words():
  whole = _run(_engine(), [_request((10,), max_tokens=2 * _TURN)])[10]
  engine = _engine()
  first = _run(engine, [_request((10,), hold=True)])[10]
  got = _run(engine, [_request((10,), [_answered(first, ())])])[10]
  assert got == whole
  assert engine.metrics()["engine/decode_tokens"] == 2 * _TURN


@pytest.mark.parametrize("cache", [1.0, 0.3])
@pytest.mark.parametrize(
  "rows", [1, 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_others_take_held_rows_and_change_nothing(rows, cache):
  others = [
    _request((100 + i, 200 + i), prompt=(i % 7, 2), max_tokens=20)
    for i in range(6)
  ]
  settings = {"rows": rows, "cache": cache, "page": 4}
  plain = _run(_engine(**settings), others)
  uids = tuple(range(10, 14))
  want = _converse(_engine(**settings), uids, hold=False, turns=2)
  engine = _engine(**settings)
  first = _run(engine, [_request(uids, hold=True)])
  got = _run(engine, others)
  assert got == plain
  turns = [_request([uid], [_answered(first[uid])], True) for uid in uids]
  got = _run(engine, [*others, *turns])
  assert {uid: got[uid] for uid in uids} == want
  assert got == plain | want


def test_a_row_is_held_for_as_long_as_it_takes_to_make_it_again():
  engine = _engine(rows=2, block=1)
  engine.add(_request((10,), hold=True))
  engine.add(_request((20,), max_tokens=_MOST))
  params = _params()
  done = []
  while not done:
    done = engine.step(params, 0)
  assert done[0].uid == 10 and engine.room == 1
  for _ in range(_TURN):  # Nobody waits: that costs nothing.
    engine.step(params, 0)
  engine.add(_request((30,)))
  rows = []
  for _ in range(_TURN + 1):
    engine.step(params, 0)
    rows.append({row.uid for row in engine._rows})
  assert rows == [{10, 20}] * _TURN + [{30, 20}]


def test_weights_that_come_in_the_middle_of_turns_rebuild_them_in_any_cache():
  newer = making.params(making.CONFIG, 1)
  found = []
  for cache in (1.0, 0.5):
    engine = _engine(in_flight="recompute", cache=cache, page=4, group=4)
    uids = (10, 11, 12, 13)
    done = _run(engine, [_request(uids, hold=True)])
    for uid in uids:
      engine.add(_request((uid,), [_answered(done[uid])], True))
    got = {c.uid: c for c in engine.step(_params(), 0)}
    got |= _run(engine, [], version=1, params=newer)
    found.append({uid: got[uid].tokens for uid in uids})
  assert found[0] == found[1]


def test_nothing_waits_for_held_rows_when_nothing_else_runs():
  engine = _engine(rows=2, block=1)
  _run(engine, [_request((10, 11), hold=True)])
  engine.add(_request((30, 31)))
  engine.step(_params(), 0)
  assert {row.uid for row in engine._rows} == {30, 31}


def test_what_was_held_leaves_no_page_behind():
  engine = _engine(page=2, rows=4)
  _converse(engine, hold=False)
  free = _free(engine)
  _converse(engine, (20, 21, 22, 23), hold=True)
  assert np.all(np.array(_free(engine)) < np.array(free))
  # The last turn is not held.
  engine = _engine(page=2, rows=4)
  done = _run(engine, [_request((10, 11), hold=True)])
  _run(engine, [_request([u], [_answered(done[u])]) for u in (10, 11)])
  assert _free(engine) == free


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "drain"])
def test_newer_weights_go_on_over_old_keys_only_where_told(in_flight):
  engine = _engine(in_flight=in_flight)
  newer = making.params(making.CONFIG, 1)
  done = _run(engine, [_request((10,), hold=True)])
  turn = _request((10,), [_answered(done[10])], True)
  got = _run(engine, [turn], version=1, params=newer)[10]
  fresh = _run(_engine(), [turn], version=1, params=newer)[10]
  assert got.versions == fresh.versions
  assert (got == fresh) == (in_flight != "keep")


def test_a_completion_that_differs_from_what_is_held_is_read_again():
  engine = _engine()
  done = _run(engine, [_request((10, 11), hold=True)])
  other = dataclasses.replace(
    _answered(done[10]), tokens=(9, *done[10].tokens[1:], *_SAID)
  )
  want = _run(_engine(), [_request((10,), [other])])
  assert _run(engine, [_request((10,), [other])]) == want
  assert [row and row.uid for row in engine._rows].count(10) == 0
  # And without the tokens: the uid begins again.
  assert _run(engine, [_request((11,))]) == _run(_engine(), [_request((11,))])
  assert not any(engine._rows)


def test_prompt_scores_are_those_of_the_first_turn():
  engine, asked = _engine(), {"prompt_logprobs": True}
  done = _run(engine, [_request((10,), hold=True, **asked)])
  turn = _request((10,), [_answered(done[10])], **asked)
  got = _run(engine, [turn])[10]
  assert got.prompt_logprobs == done[10].prompt_logprobs
  assert len(got.prompt_logprobs) == len(_PROMPT) - 1
  assert engine.metrics()["engine/prefill_tokens"] == len(_PROMPT)


@pytest.mark.parametrize("change", ["asked", "not asked", "temperature"])
def test_prompts_that_are_scored_otherwise_are_read_again(change):
  one = {"prompt_logprobs": change != "asked"}
  two = {"prompt_logprobs": change != "not asked"}
  if change == "temperature":
    two["temperature"] = 0.5
  engine = _engine()
  done = _run(engine, [_request((10,), hold=True, **one)])
  turn = _request((10,), [_answered(done[10])], **two)
  assert _run(engine, [turn]) == _run(_engine(), [turn])
  assert engine.metrics()["engine/prefill_tokens"] == 2 * len(_PROMPT)


def test_a_cache_that_is_given_back_holds_nothing():
  engine = _engine(free_idle=True)
  got = _converse(engine, hold=True)
  assert got == _converse(_engine(), hold=False)
  assert engine._state is None and not any(engine._rows)


def test_a_turn_goes_on_behind_words_of_others_only():
  first = _run(_engine(), [_request((10,), stop_ids=tuple(range(64)))])[10]
  assert first.finish == "stop" and len(first.tokens) == 1
  engine = _engine()
  engine.check(_request((10,), [_answered(first)], stop_ids=tuple(range(64))))
  alone = types.Partial(
    uid=10,
    tokens=first.tokens,
    logprobs=first.logprobs,
    versions=first.versions,
  )
  with pytest.raises(types.RunError, match="no stop token in its last turn"):
    engine.check(_request((10,), [alone], stop_ids=tuple(range(64))))


@pytest.mark.parametrize(
  "versions, turn", [((), 0), ((3, 3), 0), ((3, -1), 2), ((-1, 2, -1, 4), 3)]
)
def test_the_last_turn_begins_behind_the_last_word_of_others(versions, turn):
  assert rows_lib.turn_of(versions) == turn


def test_a_stop_string_is_looked_for_from_the_first_token_on():
  decode = _text(making.CONFIG)
  stop = (decode([5, 6]),)
  assert stop_strings.first_stop([5, 6], 1, stop, decode) == 1
  assert stop_strings.first_stop([5, 6], 1, stop, decode, 1) is None
  assert stop_strings.first_stop([5, 5, 6], 1, stop, decode, 1) == 2


class _Member:
  """A server of a fleet that only notes what it is sent."""

  def __init__(self, name):
    self.name, self.orders = name, []

  def publish(self, policy):
    pass

  def submit(self, order):
    self.orders.append(order.request)


def test_a_fleet_sends_a_turn_where_the_last_one_is_held():
  members = [_Member("a"), _Member("b")]
  fleet = fleets.Fleet(members, rows=4, stall_s=60.0)
  fleet._policy = types.Policy(params=None, version=0, step=0)
  for uids in ((1, 2), (3,), (4,)):
    fleet._send(_request(uids, hold=True), evaluation=False)
  assert [[r.uids for r in m.orders] for m in members] == [
    [(1, 2)],
    [(3,), (4,)],
  ]
  for uid, hold in ((3, True), (3, False), (2, True)):
    fleet._send(_request([uid], hold=hold), evaluation=False)
  assert [len(m.orders) for m in members] == [2, 4]
  assert 3 not in {uid for _, uid in fleet._homes}
  for uid in range(10, 40):
    fleet._send(_request([uid], hold=True), evaluation=False)
  assert len(fleet._homes) == 8
  fleet._send(_request([50], hold=True), evaluation=True)
  assert (True, 50) not in fleet._homes
  fleet._homes = {(False, 60): 0, (False, 61): 1}
  fleet.resend(0, lambda: None)
  assert fleet._homes == {(False, 61): 1}


def test_more_words_than_a_completion_may_have_are_the_users_mistake():
  engine = _engine()
  first = _run(engine, [_request((10,))])[10]
  with pytest.raises(types.InputError, match="goes on from of at most 8"):
    engine.check(_request((10,), [_answered(first)], max_tokens=_TURN))


@dataclasses.dataclass(frozen=True)
class _Pays:
  """Answers two turns and pays for the third; a `restore.Restorable`."""

  asked: list = dataclasses.field(default_factory=list)
  schemas = ()

  def reset(self, prompt):
    return 0

  def step(self, state, text):
    self.asked.append(state)
    if state == 2:
      return multi_turn.Step(reward=float(len(text)))
    message = {"role": "tool", "content": text}
    return multi_turn.Step(state=state + 1, messages=(message,), reward=0.5)

  def failed(self, state, reason):
    raise AssertionError(reason)

  def save(self, state):
    return state

  def restore(self, prompt, saved):
    return saved


def _talking(env, begun=(), done=()):
  """Returns conversations about one prompt, of an engine of its own.

  They go on from those that had begun, without those that had ended.
  """
  sampling = types.SamplingParams(
    max_tokens=_MOST, stop_ids=(1, 2, 3, 5, 8, 13, 21)
  )
  talks = multi_turn.MultiTurn(
    single_turn.SingleTurn(2, sampling, _text(making.CONFIG)),
    multi_turn.Conversation(environment=lambda: env, max_turns=_TURNS),
    env,
    lambda messages, ended: _SAID,
  )
  prompt = types.Prompt(uid=5, tokens=_PROMPT, text="", reference=None)
  engine = conversing.Conversing(
    _engine(), talks, lambda uid: prompt, lockstep=True
  )
  request = talks.request(prompt)
  left = tuple(uid for uid in request.uids if uid not in done)
  engine.add(dataclasses.replace(request, uids=left, begun=begun))
  return engine


def test_c95_killed_in_any_turn_a_conversation_ends_as_if_it_had_not_been():
  def on(talks, blocks):
    done = {}
    while talks.busy and blocks:
      done |= {c.uid: c for c in talks.step(_params(), 0) or ()}
      blocks -= 1
    return done

  env = _Pays()
  whole = on(_talking(env), 99)
  assert {len(made.turns) for made in whole.values()} == {_TURNS}
  assert len(env.asked) == 2 * _TURNS
  seen = set()
  for blocks in range(1, 99):
    first, rest = _Pays(), _Pays()
    talks = _talking(first)
    done = on(talks, blocks)
    begun = talks.partials()
    if not begun:
      break
    seen |= {len(p.talk.turns) for p in begun if p.talk is not None}
    assert done | on(_talking(rest, begun, done), 99) == whole
    # No turn that was answered is answered again.
    assert sorted(first.asked + rest.asked) == sorted(env.asked)
  assert seen == {1, 2}
