"""The ledger under random schedules, and every order of small ones."""

import random

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxrl_post import types
from jaxrl_post.envs import ledger as ledgers


def _moves(book, next_uid, *, lossy):
  """Returns every event that may happen next, the trainer's ones included."""
  moves = []
  if ledgers.window(book) > 0:
    moves.append(ledgers.Admit(next_uid))
  for entry in book.outstanding:
    if entry.state == "sampling":
      moves.append(ledgers.Finish(entry.uid, tokens=entry.uid + 1))
    if entry.state == "scoring":
      moves.append(ledgers.Score(entry.uid))
      moves += [ledgers.Filter(entry.uid)] if lossy else []
    if lossy and entry.state != "ready":
      moves.append(ledgers.Fail(entry.uid))
  moves += [ledgers.Drop(uid) for uid in ledgers.stale(book)]
  uids = ledgers.batch(book)
  if uids:
    moves.append(ledgers.Consume(uids))
  if book.version < book.step:
    moves.append(ledgers.Publish(book.step))
  return moves


def _admitted_at(book):
  return {e.uid: e.admitted for e in book.outstanding}


def _play(seed, groups, max_lag, on_stale, steps):
  """Plays random events until some steps are trained; checks the bound."""
  draw = random.Random(seed)
  book = ledgers.start(groups, max_lag, on_stale=on_stale)
  trained, uid, lossy = [], 0, draw.random() < 0.5
  while book.step < steps:
    moves = _moves(book, uid, lossy=lossy)
    assert moves, f"deadlock in {book}"
    move = draw.choice(moves)
    if isinstance(move, ledgers.Consume):
      born = _admitted_at(book)
      for one in move.uids:
        lag = book.step - born[one]
        assert 0 <= lag <= max_lag
      trained += move.uids
    uid += isinstance(move, ledgers.Admit)
    book = ledgers.apply(book, move)
  return book, trained


@hypothesis.settings(max_examples=120)
@hypothesis.given(
  seed=st.integers(0, 2**32),
  groups=st.integers(1, 4),
  max_lag=st.integers(0, 4),
  on_stale=st.sampled_from(["wait", "drop"]),
)
def test_no_trained_group_is_older_than_the_bound(
  seed, groups, max_lag, on_stale
):
  book, trained = _play(seed, groups, max_lag, on_stale, steps=6)
  assert len(trained) == len({*trained}) == book.trained.groups == 6 * groups
  if on_stale == "wait":
    assert book.dropped.groups == 0


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_every_order_of_a_small_run_ends(max_lag):
  """Explores all reachable states of two groups a step; none is stuck."""
  seen, stack = set(), [(ledgers.start(2, max_lag), 0)]
  while stack:
    book, uid = stack.pop()
    # Groups of one age and state are alike, whatever their uids.
    kinds = sorted((e.admitted, e.state) for e in book.outstanding)
    key = (book.step, book.version, book.admitted, tuple(kinds))
    if key in seen or book.step == 3:
      continue
    seen.add(key)
    moves = _moves(book, uid, lossy=False)
    assert moves, f"deadlock in {book}"
    for move in moves:
      following = ledgers.apply(book, move)
      stack.append((following, uid + isinstance(move, ledgers.Admit)))
  assert len(seen) > 15


def _finished(versions, max_lag, on_stale, step):
  entries = tuple(
    ledgers.Entry(uid, version, state="ready", tokens=3)
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
  )


def test_c67_what_is_older_than_the_bound_is_rejected_and_counted():
  book = _finished([3, 4, 5, 5], 1, "drop", step=5)
  assert ledgers.stale(book) == (0,)
  book = ledgers.apply(book, ledgers.Drop(0))
  assert book.dropped == ledgers.Count(groups=1, tokens=3)
  assert ledgers.batch(book) == (1, 2, 3)


def test_c67_lag_zero_takes_only_the_present_version():
  assert ledgers.stale(_finished([3, 4, 5, 5], 0, "drop", step=5)) == (0, 1)


def test_c67_a_group_may_become_stale_while_it_waits_in_the_queue():
  book = ledgers.start(1, 1, on_stale="drop")
  for event in (
    ledgers.Admit(0),
    ledgers.Admit(1),
    ledgers.Finish(1, 4),
    ledgers.Score(1),
    ledgers.Consume((1,)),
    ledgers.Publish(1),
    ledgers.Admit(2),
    ledgers.Finish(2, 4),
    ledgers.Score(2),
    ledgers.Consume((2,)),
    ledgers.Publish(2),
  ):
    book = ledgers.apply(book, event)
  assert ledgers.stale(book) == (0,)


def test_c70_the_slowest_group_is_waited_for_at_its_deadline():
  book = ledgers.start(1, 1)
  for event in (
    ledgers.Admit(0),
    ledgers.Admit(1),
    ledgers.Finish(1, 4),
    ledgers.Score(1),
  ):
    book = ledgers.apply(book, event)
  assert ledgers.batch(book) == (1,)  # Group 0 may still come in step 1.
  for event in (
    ledgers.Consume((1,)),
    ledgers.Publish(1),
    ledgers.Admit(2),
    ledgers.Finish(2, 4),
    ledgers.Score(2),
  ):
    book = ledgers.apply(book, event)
  assert ledgers.batch(book) == ()  # Now it may not: the trainer waits.
  for event in (ledgers.Finish(0, 9), ledgers.Score(0)):
    book = ledgers.apply(book, event)
  assert ledgers.batch(book) == (0,)


def test_admission_at_lag_zero_is_one_batch():
  book = ledgers.start(3, 0)
  assert ledgers.window(book) == 3
  for uid in range(3):
    book = ledgers.apply(book, ledgers.Admit(uid))
  assert ledgers.window(book) == 0
  with pytest.raises(types.RunError, match="an open window"):
    ledgers.apply(book, ledgers.Admit(3))


def test_a_filtered_group_makes_room_for_another():
  book = ledgers.start(1, 0)
  for event in (ledgers.Admit(0), ledgers.Finish(0, 5), ledgers.Filter(0)):
    book = ledgers.apply(book, event)
  assert ledgers.window(book) == 1
  assert book.filtered == ledgers.Count(groups=1, tokens=5)


@pytest.mark.parametrize(
  "event",
  [
    ledgers.Finish(9, 1),
    ledgers.Score(0),
    ledgers.Consume((0,)),
    ledgers.Publish(1),
    ledgers.Drop(0),
    ledgers.Admit(0),
  ],
)
def test_an_impossible_event_is_an_error_and_not_a_lie(event):
  book = ledgers.apply(ledgers.start(1, 1), ledgers.Admit(0))
  with pytest.raises(types.RunError, match="ledger: "):
    ledgers.apply(book, event)


def test_a_resumed_ledger_counts_from_its_step():
  book = ledgers.start(4, 1, step=5)
  assert (book.step, book.version, book.trained.groups) == (5, 5, 20)
  assert ledgers.window(book) == 8


def test_no_more_is_admitted_than_the_run_needs():
  book = ledgers.start(2, 3, num_steps=2)
  assert ledgers.window(book) == 4
  book = ledgers.start(2, 3, num_steps=2, step=1)
  assert ledgers.window(book) == 2
