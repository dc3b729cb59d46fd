"""What the proofs of the ledger share: its moves, and what must always hold.

They make millions of events, so they run the ledger without the checker of
argument types that the other tests run it with.
"""

import importlib.util
import sys

from jaxrl_post.envs import ledger as checked


def _plain():
  spec = importlib.util.spec_from_file_location("plain_ledger", _path())
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # Where dataclasses look for it.
  spec.loader.exec_module(module)
  return module


def _path() -> str:
  assert checked.__file__ is not None
  return checked.__file__


ledgers = _plain()


def waits(book) -> bool:
  """Whether the trainer waits, and nothing becomes stale."""
  return book.ordered or book.on_stale == "wait"


def finished(book) -> bool:
  return book.step == book.num_steps


def own_moves(book):
  """Returns what may happen next but losses: the run goes on by these alone.

  Each is a kind, which says all that the ledger may depend on, and events. A
  group begins with a token of the oldest version that it may have.
  """
  moves = []
  if ledgers.window(book) > 0:
    uid = 1 + max((e.uid for e in book.outstanding), default=0)
    begun = (ledgers.Admit(uid), ledgers.Block(uid, uid % 5 + 1, book.version))
    moves.append(("admit", begun))
  for at, entry in enumerate(book.outstanding):
    kind = (entry.admitted, at if book.ordered else 0)
    if entry.state == "sampling":
      moves.append((("finish", kind), (ledgers.Finish(entry.uid),)))
    if entry.state == "scoring":
      moves.append((("score", kind), (ledgers.Score(entry.uid),)))
    if entry.admitted + book.max_lag < book.step:
      moves.append((("drop", entry.state, kind), (ledgers.Drop(entry.uid),)))
  uids = ledgers.batch(book)
  if uids:
    moves.append(("consume", (ledgers.Consume(uids),)))
  if book.version < book.step:
    moves.append(("publish", (ledgers.Publish(book.version + 1),)))
  return moves


def losses(book):
  """Returns what else may happen to a group, likewise."""
  moves = []
  for at, entry in enumerate(book.outstanding):
    uid, kind = entry.uid, (entry.admitted, at if book.ordered else 0)
    if entry.state != "sampling":
      moves.append((("filter", entry.state, kind), (ledgers.Filter(uid),)))
    if entry.state != "ready":
      again = (ledgers.Retry(uid), ledgers.Block(uid, 2, entry.admitted))
      moves.append((("fail", entry.state, kind), (ledgers.Fail(uid),)))
      moves.append((("retry", entry.state, kind), again))
  return moves


def play(book, events):
  """Applies events; checks what each does, the bound, and the outcome."""
  for event in events:
    before, book = book, ledgers.apply(book, event)
    assert _change(before, book) == _effect(before, event), (before, event)
    if isinstance(event, ledgers.Consume):
      assert_bound(before, event.uids)
  assert_sound(book)
  return book


def assert_bound(book, uids) -> None:
  """Checks the groups that the next step trains, and that it may begin."""
  assert book.version == book.step
  n = book.groups_per_step
  line = book.outstanding[:n] if book.ordered else book.outstanding
  ready = [e for e in line if e.state == "ready"]
  assert uids == tuple(e.uid for e in ready[:n])
  assert len(uids) == len({*uids}) == n
  for e in ready[:n]:
    assert e.oldest is None or e.admitted <= e.oldest <= book.step
    # Then no token's lag is larger: none is older than the admission.
    assert 0 <= book.step - e.admitted <= book.max_lag, (book, uids)


def assert_sound(book) -> None:
  """Checks what holds in every state."""
  n, lag = book.groups_per_step, book.max_lag
  places = (book.version + lag + 1 - book.step) * n
  assert 0 <= ledgers.window(book) <= (0 if book.stopped else places)
  assert len(book.outstanding) <= places + n * (book.step - book.version)
  stale = ledgers.stale(book)
  if waits(book):
    assert not stale
    for at, entry in enumerate(book.outstanding):
      # The i-th to be trained, n in a step from now on, is still in time.
      assert book.step + at // n <= entry.admitted + lag
  else:
    # Nothing starves: who is late leaves before the next step, others do not.
    late = [e for e in book.outstanding if book.step > e.admitted + lag]
    assert [e.uid for e in late] == [*stale]
    assert not (stale and ledgers.batch(book))


_NAMES = ("trained", "filtered", "failed", "dropped", "discarded")


def _totals(book) -> list[int]:
  counts = [getattr(book, name) for name in _NAMES]
  held = [len(book.outstanding), sum(e.tokens for e in book.outstanding)]
  flat = [x for c in counts for x in (c.groups, c.tokens)]
  return [book.admitted, book.sampled, book.step, book.version, *held, *flat]


def _change(before, after) -> list[int]:
  pairs = zip(_totals(after), _totals(before), strict=True)
  return [a - b for a, b in pairs]


def _effect(book, event) -> list[int]:
  """Returns by how much an event changes each of the totals."""
  name = type(event).__name__.lower()
  uids = getattr(event, "uids", (getattr(event, "uid", None),))
  entries = [e for e in book.outstanding if e.uid in uids]
  tokens = sum(e.tokens for e in entries)
  by = dict.fromkeys(("admitted", "sampled", "step", "version", "groups"), 0)
  by |= {"tokens": 0, **{x: 0 for n in _NAMES for x in (n, f"{n} tokens")}}
  fates = {"filter": "filtered", "fail": "failed", "drop": "dropped"}
  fates |= {"consume": "trained"}
  if name == "admit":
    by |= {"admitted": 1, "groups": 1}
  elif name == "block":
    by |= {"sampled": event.tokens, "tokens": event.tokens}
  elif name == "publish":
    by |= {"version": event.version - book.version}
  elif name == "retry":
    by |= {"discarded": 1, "discarded tokens": tokens, "tokens": -tokens}
  elif name in fates:
    fate = fates[name]
    by |= {fate: len(entries), f"{fate} tokens": tokens}
    by |= {"groups": -len(entries), "tokens": -tokens}
  if name == "consume":
    by |= {"step": 1}
  return list(by.values())
