"""The ledger by hand: what each event does, and what it refuses."""

import collections
import dataclasses
import heapq
import random

import pytest

from jaxrl_post import types
from jaxrl_post.envs import ledger as ledgers

Admit, Block, Finish, Score = (
  ledgers.Admit,
  ledgers.Block,
  ledgers.Finish,
  ledgers.Score,
)


def _play(book, *events):
  for event in events:
    book = ledgers.apply(book, event)
  return book


def _made(uid, version, tokens=3):
  """A group from its admission until it is ready."""
  return Admit(uid), Block(uid, tokens, version), Finish(uid), Score(uid)


# ---------------------------------------------------------------- the bound


def _finished(versions, max_lag, on_stale, step):
  entries = tuple(
    ledgers.Entry(uid, version, state="ready", tokens=3, oldest=version)
    for uid, version in enumerate(versions)
  )
  return ledgers.Ledger(
    groups_per_step=len(versions) - 1,
    max_lag=max_lag,
    on_stale=on_stale,
    version=step,
    step=step,
    outstanding=entries,
    admitted=len(entries),
    sampled=3 * len(entries),
  )


def test_c67_what_is_older_than_the_bound_is_rejected_and_counted():
  book = _finished([3, 4, 5, 5], 1, "drop", step=5)
  assert ledgers.stale(book) == (0,)
  assert ledgers.batch(book) == ()  # First it is dropped.
  book = _play(book, ledgers.Drop(0))
  assert book.dropped == ledgers.Count(groups=1, tokens=3)
  assert ledgers.batch(book) == (1, 2, 3)


def test_c67_lag_zero_takes_only_the_present_version():
  assert ledgers.stale(_finished([3, 4, 5, 5], 0, "drop", step=5)) == (0, 1)


def test_c67_a_group_may_become_stale_while_it_waits_in_the_queue():
  book = ledgers.start(1, 1, on_stale="drop")
  book = _play(book, Admit(0), *_made(1, 0), ledgers.Consume((1,)))
  book = _play(book, ledgers.Publish(1), *_made(2, 1), ledgers.Consume((2,)))
  assert ledgers.stale(book) == (0,)
  assert book.outstanding[0].state == "sampling"


# ---------------------------------------------------------- who is waited for


def _timed(book, duration):
  """Runs a ledger on a clock: 12 slots sample, a step takes one second.

  Args:
    book: a ledger with an end.
    duration: seconds that a group, by uid, is sampled.

  Returns:
    The last ledger; uid and lag of every trained group; dropped uids.
  """
  now, uid, running, trained, dropped = 0.0, 0, [], [], []
  update = None  # When the one under way ends.
  while book.step < book.num_steps or update is not None:
    while ledgers.window(book) and len(running) < 12:
      book = _play(book, Admit(uid), Block(uid, 1, book.version))
      heapq.heappush(running, (now + duration(uid), uid))
      uid += 1
    dropped += ledgers.stale(book)
    book = _play(book, *map(ledgers.Drop, ledgers.stale(book)))
    uids = ledgers.batch(book)
    if uids and update is None:
      born = {e.uid: e.oldest for e in book.outstanding}
      trained += [(u, book.step - born[u]) for u in uids]
      book, update = _play(book, ledgers.Consume(uids)), now + 1
    if update is not None and (not running or update <= running[0][0]):
      now, update = update, None
      book = _play(book, ledgers.Publish(book.step))
      continue
    now, done = heapq.heappop(running)
    if done in {e.uid for e in book.outstanding}:
      book = _play(book, Finish(done), Score(done))
  return book, trained, dropped


def _passes(groups_per_step, **options):
  """Eight prompts, prompt 3 takes three times as long; ten passes."""
  book = ledgers.start(
    groups_per_step, 2, num_steps=80 // groups_per_step, **options
  )
  return _timed(book, lambda uid: 4.5 if uid % 8 == 3 else 1.5)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_c67_no_token_of_fifty_steps_is_older_than_the_bound(max_lag):
  book = ledgers.start(4, max_lag, num_steps=50)
  book, trained, _ = _timed(book, lambda uid: uid % 7 + 1)
  assert max(lag for _, lag in trained) == max_lag
  assert book.trained == ledgers.Count(groups=200, tokens=200)


@pytest.mark.parametrize("groups_per_step", [1, 2, 4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_c70_the_slow_prompt_is_trained_as_often_as_the_others(
  groups_per_step, ordered
):
  _, trained, dropped = _passes(groups_per_step, ordered=ordered)
  counts = collections.Counter(uid % 8 for uid, _ in trained)
  assert counts == dict.fromkeys(range(8), 10)
  assert dropped == []


@pytest.mark.parametrize("groups_per_step", [1, 2])
def test_c70_who_is_missing_where_that_is_allowed_was_dropped(groups_per_step):
  book, trained, dropped = _passes(groups_per_step, on_stale="drop")
  left = [uid for uid, _ in trained] + dropped
  left += [entry.uid for entry in book.outstanding]
  assert sorted(left) == list(range(book.admitted))
  assert book.dropped == ledgers.Count(groups=len(dropped), tokens=len(dropped))
  # With this setting it is who is slower than the bound.
  assert {uid % 8 for uid in dropped} == {3}


def test_c70_the_slowest_group_is_waited_for_at_its_deadline():
  book = _play(ledgers.start(1, 1), Admit(0), *_made(1, 0))
  assert ledgers.batch(book) == (1,)  # Group 0 may still come in step 1.
  book = _play(book, ledgers.Consume((1,)), ledgers.Publish(1), *_made(2, 1))
  assert ledgers.batch(book) == ()  # Now it may not: the trainer waits.
  book = _play(book, Finish(0), Score(0))
  assert ledgers.batch(book) == (0,)


def test_in_strict_order_nobody_is_passed_over():
  book = ledgers.start(1, 1, ordered=True)
  book = _play(book, Admit(0), *_made(1, 0))
  assert ledgers.batch(book) == ()
  book = _play(book, Finish(0), Score(0))
  assert ledgers.batch(book) == (0,)


@pytest.mark.parametrize("seed", range(20))
def test_c72_at_lag_zero_the_batches_are_those_of_the_synchronous_loop(seed):
  draw, batches, uid = random.Random(seed), [], 0
  book = ledgers.start(3, 0)
  while book.step < 5:
    states = {e.uid: e.state for e in book.outstanding}
    sampling = [u for u, state in states.items() if state == "sampling"]
    moves = [Finish(u) for u in sampling]
    moves += [Score(u) for u, state in states.items() if state == "scoring"]
    moves += [Admit(uid)] * ledgers.window(book)
    uids = ledgers.batch(book)
    if uids:
      batches.append(uids)
      moves = [ledgers.Consume(uids)]
    if book.version < book.step:
      moves = [ledgers.Publish(book.step)]
    move = draw.choice(moves)
    uid += isinstance(move, Admit)
    book = _play(book, move)
  assert batches == [tuple(range(3 * i, 3 * i + 3)) for i in range(5)]


# ----------------------------------------------------------- who is admitted


def test_admission_at_lag_zero_is_one_batch():
  book = ledgers.start(3, 0)
  assert ledgers.window(book) == 3
  book = _play(book, Admit(0), Admit(1), Admit(2))
  assert ledgers.window(book) == 0
  with pytest.raises(types.RunError, match="an open window"):
    ledgers.apply(book, Admit(3))


def test_no_more_is_admitted_than_the_run_needs():
  book = ledgers.start(2, 3, num_steps=2)
  assert ledgers.window(book) == 4
  book = ledgers.start(2, 3, num_steps=2, step=1)
  assert ledgers.window(book) == 2


def test_a_run_that_starts_later_counts_from_its_step():
  book = ledgers.start(4, 1, step=5)
  assert (book.step, book.version) == (5, 5)
  assert book.trained == ledgers.Count(groups=20, tokens=0)
  assert ledgers.window(book) == 8


def test_after_stop_nothing_is_admitted_and_the_rest_may_be_trained():
  book = _play(ledgers.start(1, 3), Admit(0), Admit(1), ledgers.Stop())
  assert ledgers.window(book) == 0
  with pytest.raises(types.RunError, match="an open window"):
    ledgers.apply(book, Admit(2))
  book = _play(book, Block(1, 2, 0), Finish(1), Score(1))
  book = _play(book, ledgers.Consume((1,)), ledgers.Publish(1))
  book = _play(book, ledgers.Retry(0), Block(0, 5, 0), Finish(0), Score(0))
  assert ledgers.batch(book) == (0,)
  assert _play(book, ledgers.Stop()) == book


def test_c76_what_is_left_when_the_data_ends_is_accounted_for():
  book, uid = ledgers.start(4, 1), 0
  for version in range(2):
    while ledgers.window(book) and uid < 10:
      book = _play(book, *_made(uid, version))
      uid += 1
    book = _play(book, ledgers.Consume(ledgers.batch(book)))
    book = _play(book, ledgers.Publish(version + 1))
  assert ledgers.batch(book) == ()
  assert (book.admitted, book.trained.groups) == (10, 8)
  assert [e.uid for e in book.outstanding] == [8, 9]


# ------------------------------------------------------------------ the events


def test_tokens_come_in_any_number_of_blocks_and_the_oldest_counts():
  book = _play(ledgers.start(1, 2), Admit(0), *_made(1, 0))
  book = _play(book, ledgers.Consume((1,)), ledgers.Publish(1))
  assert book.outstanding == (ledgers.Entry(0, 0),)
  book = _play(book, Block(0, 4, 1))
  assert book.outstanding[0].oldest == 1
  book = _play(book, Block(0, 2, 0), Block(0, 1, 1))
  assert book.outstanding == (ledgers.Entry(0, 0, tokens=7, oldest=0),)
  assert book.sampled == 10


def test_filtered_and_failed_groups_make_room_for_others():
  book = _play(ledgers.start(2, 0), Admit(0), Block(0, 5, 0), Finish(0))
  book = _play(book, *_made(1, 0, tokens=7))
  assert ledgers.window(book) == 0
  for filtered in (0, 1):  # Before and after its score.
    after = _play(book, ledgers.Filter(filtered))
    tokens = 7 if filtered else 5
    assert after.filtered == ledgers.Count(groups=1, tokens=tokens)
    assert ledgers.window(after) == 1
  after = _play(book, ledgers.Fail(0))
  assert after.failed == ledgers.Count(groups=1, tokens=5)
  assert ledgers.window(after) == 1


@pytest.mark.parametrize("events", [(), (Finish(0),)])
def test_a_retry_starts_again_in_its_place(events):
  book = _play(ledgers.start(1, 1), Admit(0), *_made(1, 0))
  book = _play(book, ledgers.Consume((1,)), ledgers.Publish(1))
  book = _play(book, Block(0, 5, 0), *events, ledgers.Retry(0), Admit(2))
  assert book.discarded == ledgers.Count(groups=1, tokens=5)
  # It is first in line still, and due in step 1 as before.
  assert book.outstanding[0] == ledgers.Entry(0, 0, retries=1)
  assert ledgers.deadline(book, book.outstanding[0]) == 1
  assert book.admitted == 3
  book = _play(book, Block(0, 2, 1), Finish(0), Score(0))
  book = _play(book, ledgers.Consume((0,)))
  assert book.trained == ledgers.Count(groups=2, tokens=5)
  assert book.sampled == 10


@pytest.mark.parametrize(
  "event",
  [
    Admit(0),
    Block(0, 0, 1),
    Block(0, 1, 2),
    Block(1, 1, 0),
    Block(9, 1, 1),
    Block(2, 1, 1),
    Finish(9),
    Finish(2),
    Score(0),
    Score(3),
    ledgers.Filter(0),
    ledgers.Fail(3),
    ledgers.Retry(3),
    ledgers.Drop(0),
    ledgers.Consume(()),
    ledgers.Consume((0,)),
    ledgers.Consume((0, 3)),
    ledgers.Publish(0),
    ledgers.Publish(2),
  ],
  ids=str,
)
def test_an_impossible_event_is_an_error_and_not_a_lie(event):
  # At version 1: 0 and 1 are sampled, 2 is scored, 3 is ready.
  book = _play(ledgers.start(2, 1), *_made(8, 0), *_made(7, 0), Admit(0))
  book = _play(book, ledgers.Consume((8, 7)), ledgers.Publish(1))
  book = _play(book, Admit(1), Admit(2), Finish(2))
  book = ledgers.apply(dataclasses.replace(book, max_lag=2), Admit(3))
  book = _play(book, Finish(3), Score(3))
  with pytest.raises(types.RunError, match="^ledger: .*: expected .*, got "):
    ledgers.apply(book, event)


@pytest.mark.parametrize(
  "lie",
  [
    {"admitted": 9},
    {"sampled": 9},
    {"outstanding": ()},
    {"failed": ledgers.Count(groups=1)},
    {"discarded": ledgers.Count(tokens=1)},
  ],
  ids=str,
)
def test_what_is_lost_or_counted_twice_is_an_error(lie):
  book = _play(ledgers.start(1, 0), Admit(0), Block(0, 5, 0))
  ledgers.check(book)
  wrong = dataclasses.replace(book, **lie)
  with pytest.raises(types.RunError, match="accounted for"):
    ledgers.check(wrong)
  with pytest.raises(types.RunError, match="accounted for"):
    ledgers.apply(wrong, ledgers.Stop())


# ----------------------------------------------------------------- continuing


def _half_way(**options):
  """At step 1: groups 1 ready, 2 scored, 3 and 4 sampled, 5 filtered."""
  book = _play(ledgers.start(2, 2, **options), *_made(0, 0), *_made(1, 0))
  book = _play(book, *_made(5, 0), Admit(2), Admit(3), Block(3, 4, 0), Admit(4))
  book = _play(book, ledgers.Filter(5), Block(2, 6, 0), *_made(6, 0))
  book = _play(book, Finish(2), Block(4, 8, 0), ledgers.Stop())
  return _play(book, ledgers.Consume((0, 1)), ledgers.Publish(1))


def test_restored_with_equal_settings_only_what_was_not_kept_starts_again():
  book = _half_way()
  assert [e.state for e in book.outstanding] == [
    "scoring",
    "sampling",
    "sampling",
    "ready",
  ]
  after = ledgers.restore(book, ledgers.start(2, 2, step=1), keep=[3])
  assert not after.stopped
  assert after.outstanding == (
    ledgers.Entry(2, 0),
    book.outstanding[1],
    ledgers.Entry(4, 0),
    book.outstanding[3],
  )
  assert after.discarded == ledgers.Count(groups=0, tokens=6 + 8)
  same = ("admitted", "sampled", "trained", "filtered", "failed", "dropped")
  for name in same:
    assert getattr(after, name) == getattr(book, name)
  everything = ledgers.restore(book, ledgers.start(2, 2, step=1), [2, 3, 4])
  assert everything == dataclasses.replace(book, stopped=False)


def test_restored_with_less_lag_who_has_no_place_is_as_if_never_admitted():
  book = _half_way()
  after = ledgers.restore(book, ledgers.start(2, 1, step=1), [2, 3, 4])
  # All were admitted at 0 and are due in step 1 now, which has two places.
  assert [e.uid for e in after.outstanding] == [2, 3]
  assert after.admitted == book.admitted - 2
  assert after.discarded == ledgers.Count(groups=0, tokens=8 + 3)
  assert ledgers.window(after) == 2
  none = ledgers.restore(book, ledgers.start(2, 0, step=1), [2, 3, 4])
  assert none.outstanding == ()
  assert none.admitted == 3


def test_restored_with_an_earlier_end_what_it_does_not_need_is_missing():
  fresh = ledgers.start(2, 2, on_stale="drop", num_steps=2, step=1)
  after = ledgers.restore(_half_way(on_stale="drop"), fresh)
  assert [e.uid for e in after.outstanding] == [2, 3]
  assert ledgers.window(after) == 0


@pytest.mark.parametrize(("step", "keep"), [(2, []), (1, [9])])
def test_the_ledger_of_another_run_is_refused(step, keep):
  with pytest.raises(types.RunError, match="Resume from another checkpoint"):
    ledgers.restore(_half_way(), ledgers.start(2, 2, step=step), keep)


def test_a_ledger_is_told_in_one_line():
  assert str(_half_way()) == (
    "step 1, version 1, groups {'scoring': 1, 'sampling': 2, 'ready': 1}, "
    "{'trained': 2, 'filtered': 1, 'failed': 0, 'dropped': 0}"
  )
