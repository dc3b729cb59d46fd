"""The ledger under random schedules: who is late is drawn, and what fails.

What happened to every token is written down here as well, and compared.
"""

import dataclasses
import random

import pytest

from tests.property import ledger_play as play

ledgers = play.ledgers


@dataclasses.dataclass
class Story:
  """A group, as it is seen from outside.

  Attributes:
    admitted: version then.
    versions: of each of its tokens that may still be trained.
    lost: tokens that will not be, since it started again.
    fate: how it left.
  """

  admitted: int
  versions: list[int] = dataclasses.field(default_factory=list)
  lost: int = 0
  fate: str = "outstanding"


class Schedule:
  """A run of a few steps whose every choice is drawn."""

  def __init__(self, seed: int) -> None:
    draw = self.draw = random.Random(seed)
    self.settings = {
      "groups_per_step": draw.randint(1, 3),
      "max_lag": draw.choice([0, 1, 1, 2, 3]),
      "on_stale": draw.choice(["wait", "drop"]),
      "ordered": draw.random() < 0.3,
      "num_steps": draw.choice([3, 6]),
    }
    self.loss = draw.choice([0, 0.02, 0.2])
    self.stop = draw.choice([0, 0, 0.01])
    self.slow = draw.choice([1, 3, 10**6])
    self.book = ledgers.start(**self.settings)
    self.stories: dict[int, Story] = {}

  def play(self, most: int = 10**6) -> None:
    """Plays until the last step, or until it was stopped and nothing is left.

    Checks every event, the bound on every trained token, and the totals.

    Args:
      most: turns to be played.
    """
    for _ in range(most):
      if play.finished(self.book):
        break
      events = self._next()
      if not events:
        ready = [e for e in self.book.outstanding if e.state == "ready"]
        assert self.book.stopped and len(ready) < self.book.groups_per_step
        break
      for event in events:
        self._tell(event)
        self.book = play.play(self.book, [event])
      if self.draw.random() < self.loss / 10:
        self._restart()
    self._compare()

  def _next(self):
    """Draws what happens next; one in `slow` groups is late if it can be."""
    draw, book = self.draw, self.book
    moves = [events[:1] for _, events in play.own_moves(book)]
    if ledgers.window(book):
      moves[0] = [ledgers.Admit(len(self.stories))]
    if not moves:
      return []
    other = draw.random()
    if other < self.stop:
      return [ledgers.Stop()]
    if other < self.stop + self.loss and not book.stopped:
      losses = [events[:1] for _, events in play.losses(book)]
      return draw.choice(losses or moves)
    sampling = [e for e in book.outstanding if e.state == "sampling"]
    if sampling and draw.random() < 0.4:
      entry = draw.choice(sampling)
      version = draw.randint(entry.admitted, book.version)
      return [ledgers.Block(entry.uid, draw.randint(1, 9), version)]
    soon = [m for m in moves if getattr(m[0], "uid", 1) % self.slow]
    return draw.choice(soon or moves)

  def _tell(self, event) -> None:
    kind = type(event)
    if kind is ledgers.Consume:
      for uid in event.uids:
        story = self.stories[uid]
        lags = [self.book.step - v for v in (story.admitted, *story.versions)]
        assert 0 <= min(lags) <= max(lags) <= self.book.max_lag
        self._leave(uid, "trained")
    elif kind is ledgers.Admit:
      self.stories[event.uid] = Story(self.book.version)
    elif kind is ledgers.Block:
      self.stories[event.uid].versions += [event.version] * event.tokens
    elif kind is ledgers.Retry:
      self._again(event.uid)
    elif kind in _FATES:
      self._leave(event.uid, _FATES[kind])

  def _leave(self, uid: int, fate: str) -> None:
    story = self.stories[uid]
    assert story.fate == "outstanding"
    late = 0 if play.waits(self.book) else 1
    assert self.book.step <= story.admitted + self.book.max_lag + late
    story.fate = fate

  def _again(self, uid: int) -> None:
    story = self.stories[uid]
    story.lost += len(story.versions)
    story.versions = []

  def _restart(self) -> None:
    before = self.book
    keep = [e.uid for e in before.outstanding if self.draw.random() < 0.5]
    fresh = ledgers.start(**self.settings, step=before.step)
    self.book = ledgers.restore(before, fresh, keep)
    for was, entry in zip(
      before.outstanding, self.book.outstanding, strict=True
    ):
      if was.state == "ready" or was.uid in keep:
        assert entry == was
      else:
        self._again(was.uid)
        assert entry == ledgers.Entry(
          was.uid, was.admitted, retries=was.retries
        )
    play.assert_sound(self.book)

  def _compare(self) -> None:
    book = self.book
    told = {}
    for story in self.stories.values():
      groups, tokens = told.get(story.fate, (0, 0))
      told[story.fate] = (groups + 1, tokens + len(story.versions))
    for fate in ("trained", "filtered", "failed", "dropped"):
      assert told.get(fate, (0, 0)) == dataclasses.astuple(getattr(book, fate))
    left = (len(book.outstanding), sum(e.tokens for e in book.outstanding))
    assert told.get("outstanding", (0, 0)) == left
    assert book.discarded.tokens == sum(s.lost for s in self.stories.values())
    assert book.admitted == len(self.stories)
    for entry in book.outstanding:
      versions = self.stories[entry.uid].versions
      assert entry.oldest == min(versions, default=None)
    if play.finished(book):
      assert book.trained.groups == book.num_steps * book.groups_per_step
      assert left == (0, 0)
    if play.waits(book):
      assert book.dropped.groups == 0


_FATES = {
  ledgers.Filter: "filtered",
  ledgers.Fail: "failed",
  ledgers.Drop: "dropped",
}


def test_of_any_run_every_token_is_accounted_for_and_none_is_too_old():
  for seed in range(2000):
    Schedule(seed).play()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_of_a_hundred_thousand_runs_likewise(part):
  for seed in range(10_000 * part, 10_000 * (part + 1)):
    Schedule(10**6 + seed).play()
