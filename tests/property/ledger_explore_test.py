"""The ledger in every state it can reach, by every order of events.

Versions are told from the newest step, uids are forgotten: what is left of a
ledger, and decides what it will do, has finitely many values. So without an
end of the run these proofs are about runs of any length, and about any number
of losses and retries.
"""

import itertools

import pytest

from tests.property import ledger_play as play

ledgers = play.ledgers

SIZES = list(itertools.product((1, 2, 3), (0, 1, 2)))
# Places of the largest window that is explored in full.
SMALL = 4


def _key(book):
  groups = [(e.admitted - book.step, e.state) for e in book.outstanding]
  if not book.ordered:
    groups.sort()
  left = None if book.num_steps is None else book.num_steps - book.step
  return (book.step - book.version, book.stopped, left, tuple(groups))


def _explore(*books, more=play.losses, brief=False):
  """Plays every move in every state; returns one ledger for each state.

  Args:
    books: where to begin.
    more: moves besides those that a run goes on by.
    brief: groups are scored as they finish, so that no retry is seen, and no
      tokens are counted; for spaces that are too large. None of it decides
      which batches there are.
  """
  seen = {_key(book): book for book in books}
  todo = list(seen.values())
  while todo:
    book = todo.pop()
    moves = [] if play.finished(book) else play.own_moves(book)
    assert moves or _over(book), f"deadlock in {book}"
    for kind, events in dict(moves + more(book)).items():
      if brief and kind[0] == "retry":
        continue
      after = (_play_in_brief if brief else play.play)(book, events)
      if seen.setdefault(_key(after), after) is after:
        todo.append(after)
  return seen


def _play_in_brief(book, events):
  event = events[0]
  if isinstance(event, ledgers.Consume):
    play.assert_bound(book, event.uids)
  book = ledgers.apply(book, event)
  if isinstance(event, ledgers.Finish):
    book = ledgers.apply(book, ledgers.Score(event.uid))
  play.assert_sound(book)
  return book


def _over(book) -> bool:
  ready = [e for e in book.outstanding if e.state == "ready"]
  short = len(ready) == len(book.outstanding) < book.groups_per_step
  return play.finished(book) or (book.stopped and short)


def _start(groups, max_lag, mode, **options):
  on_stale = "drop" if mode == "drop" else "wait"
  ordered = mode == "ordered"
  return ledgers.start(
    groups, max_lag, on_stale=on_stale, ordered=ordered, **options
  )


@pytest.mark.parametrize("mode", ["wait", "drop", "ordered"])
@pytest.mark.parametrize(("groups", "max_lag"), SIZES)
def test_in_every_state_the_bound_holds_and_the_run_goes_on(
  groups, max_lag, mode
):
  book = _start(groups, max_lag, mode)
  seen = _explore(book, brief=groups * (max_lag + 1) > SMALL)
  steps = {after.step for after in seen.values()}
  assert max(steps) > max_lag
  most = max(len(after.outstanding) for after in seen.values())
  assert most == (max_lag + 1) * groups
  # Where the trainer waits, nothing becomes too old.
  late = any(ledgers.stale(after) for after in seen.values())
  assert late == (mode == "drop" and max_lag > 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["wait", "drop", "ordered"])
@pytest.mark.parametrize(("groups", "max_lag"), [(2, 2), (3, 1)])
def test_in_every_state_scoring_and_tokens_included(groups, max_lag, mode):
  _explore(_start(groups, max_lag, mode))


@pytest.mark.parametrize(("groups", "max_lag"), SIZES[:-1])
def test_strict_order_leaves_nothing_to_drop(groups, max_lag):
  kinds = []
  for on_stale in ("wait", "drop"):
    book = ledgers.start(groups, max_lag, on_stale=on_stale, ordered=True)
    kinds.append(_explore(book, brief=True).keys())
  assert kinds[0] == kinds[1]


def _and_stop(book):
  return [*play.losses(book), ("stop", (ledgers.Stop(),))]


@pytest.mark.parametrize("mode", ["wait", "drop", "ordered"])
@pytest.mark.parametrize(("groups", "max_lag"), [(1, 2), (2, 0), (2, 1)])
def test_every_run_ends_with_its_last_step_or_when_it_is_stopped(
  groups, max_lag, mode
):
  seen = _explore(
    _start(groups, max_lag, mode, num_steps=3), more=_and_stop, brief=True
  )
  ends = [book for book in seen.values() if play.finished(book)]
  assert {book.stopped for book in ends} == {False, True}
  for book in ends:
    # No more was admitted than the steps needed.
    assert book.outstanding == ()
    assert book.trained.groups == 3 * groups
    assert ledgers.window(book) == 0
  short = [b for b in seen.values() if b.stopped and not b.outstanding]
  assert any(book.step < 3 for book in short)


@pytest.mark.parametrize("mode", ["wait", "drop", "ordered"])
def test_from_every_state_a_run_can_be_restored_with_other_settings(mode):
  seen = _explore(_start(2, 1, mode))
  for groups, max_lag, after in itertools.product(
    (1, 2, 3), (0, 1, 2), ("wait", "drop", "ordered")
  ):
    if groups * (max_lag + 1) > SMALL:
      continue
    restored = []
    for book in seen.values():
      fresh = _start(groups, max_lag, after, step=book.step)
      held = [e.uid for e in book.outstanding]
      for keep in ((), held[::2], held):
        restored.append(ledgers.restore(book, fresh, keep))
    _explore(*restored, brief=True)
