"""When the parts of a stream may move: as they come, fixed, or as before.

A schedule is asked before anything whose time matters: newer weights for the
engine, an admission, a block, the outcome of a group, a batch. It answers from
the facts it is given, and never waits.
"""

import collections
import dataclasses
import threading
from typing import Literal, NoReturn, Protocol, runtime_checkable

from jaxrl_post import types
from jaxrl_post.envs import events
from jaxrl_post.envs import ledger as ledgers


@dataclasses.dataclass(frozen=True)
class StreamConfig:
  """How generation may run beside training.

  Attributes:
    asynchronous: generate in a thread of its own; needed for max_lag > 0.
    on_stale: "wait" for a group that reaches its deadline; or "drop" it,
      counted, and go on.
    filter_zero_signal: leave out groups whose rewards all agree and sample
      other prompts instead.
    max_left: most groups that may leave untrained, filtered or without any
      reward, per group of a batch; beyond it the run ends, since it would
      sample for ever.
    stall_s: seconds without any progress after which the wait for rollouts or
      rewards ends the run.
    deterministic: train in order of admission, and change weights at points
      that no clock decides, so that two runs are equal at any max_lag.
    follow: the events.jsonl of a run to repeat, in the order of its events;
      empty for none.
  """

  asynchronous: bool = True
  on_stale: Literal["wait", "drop"] = "wait"
  filter_zero_signal: bool = False
  max_left: int = 20
  stall_s: float = 1800.0
  deterministic: bool = False
  follow: str = ""

  def __post_init__(self) -> None:
    # A longer wait is more than threads can count.
    in_range = 0 < self.stall_s <= threading.TIMEOUT_MAX
    if not in_range or self.max_left < 1:
      raise types.InputError(
        f"stream: expected stall_s in (0, {threading.TIMEOUT_MAX:g}] and "
        f"max_left >= 1, got {self.stall_s} and {self.max_left}. Correct the "
        "value."
      )
    if self.deterministic and (self.follow or self.on_stale == "drop"):
      raise types.InputError(
        "stream.deterministic: expected neither stream.follow nor "
        f"on_stale=drop, got {self.follow!r} and {self.on_stale}. Choose one."
      )


@dataclasses.dataclass(frozen=True)
class Facts:
  """What a schedule may look at.

  Attributes:
    current: version that the engine samples with; None before the first.
    newest: newest version that the trainer has handed over.
    window: groups that may be admitted; 0 when the data has ended.
    room: rows of the engine that are free.
    busy: whether the engine has anything to do.
    scoring: rollouts whose rewards have not come back.
    held: outcomes that `settles` held back.
    complete: whether the batch that needs no newer weights than `current` is
      ready, or taken.
  """

  current: int | None
  newest: int | None
  window: int
  room: int
  busy: bool
  scoring: int
  held: int
  complete: bool


@runtime_checkable
class Schedule(Protocol):
  """Says what may happen now."""

  @property
  def defers(self) -> bool:
    """Whether weights count as published only when the engine takes them."""
    ...

  def takes(self, facts: Facts) -> bool:
    """Whether the engine may go over to the newest weights."""
    ...

  def admits(self, facts: Facts, uid: int) -> bool:
    """Whether a group may begin; the window is open, and there is room."""
    ...

  def runs(self, facts: Facts) -> bool:
    """Whether the engine, which has weights and work, may make a block."""
    ...

  def settles(self, facts: Facts, event: ledgers.Event) -> bool:
    """Whether the outcome of a group may be entered."""
    ...

  def allows(self, event: ledgers.Event) -> bool:
    """Whether the trainer may publish, drop, or take a batch."""
    ...

  def applied(self, event: events.Event) -> None:
    """Takes note of what has happened.

    Raises:
      RunError: something else had to happen.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Free:
  """Everything as soon as it can: the fastest, in no fixed order.

  Attributes:
    drain: whether completions end with the weights they began with.
  """

  drain: bool = False
  defers: bool = False

  def takes(self, facts: Facts) -> bool:
    """See `Schedule`."""
    # The first weights may find completions of a run before this one.
    return facts.current is None or not (self.drain and facts.busy)

  def admits(self, facts: Facts, uid: int) -> bool:
    """See `Schedule`."""
    del uid
    return not self.drain or facts.newest == facts.current

  def runs(self, facts: Facts) -> bool:
    """See `Schedule`."""
    del facts
    return True

  def settles(self, facts: Facts, event: ledgers.Event) -> bool:
    """See `Schedule`."""
    del facts, event
    return True

  def allows(self, event: ledgers.Event) -> bool:
    """See `Schedule`."""
    del event
    return True

  def applied(self, event: events.Event) -> None:
    """See `Schedule`."""


@dataclasses.dataclass(frozen=True)
class Fixed:
  """The same in every run of the same settings, however long anything takes.

  The engine goes on with its weights, and groups that leave untrained are not
  replaced, until it comes to its gate: the window is closed and there is room.
  There it waits for all rewards that are due; then, if the next batch is
  complete, for the weights that follow. What it does up to the gate depends on
  nothing but tokens and rewards.

  Attributes:
    drain: the gate is where the engine has nothing left to do.
  """

  drain: bool = False
  defers: bool = True

  def takes(self, facts: Facts) -> bool:
    """See `Schedule`."""
    if facts.current is None:
      return True
    return self._at_gate(facts) and facts.complete and not self._owed(facts)

  def admits(self, facts: Facts, uid: int) -> bool:
    """See `Schedule`."""
    del facts, uid
    return True

  def runs(self, facts: Facts) -> bool:
    """See `Schedule`."""
    if not self._at_gate(facts):
      return True
    return not self._owed(facts) and not facts.complete

  def settles(self, facts: Facts, event: ledgers.Event) -> bool:
    """See `Schedule`. Only departures open the window."""
    if isinstance(event, ledgers.Score):
      return True
    return self._at_gate(facts) and not facts.scoring

  def allows(self, event: ledgers.Event) -> bool:
    """See `Schedule`."""
    del event
    return True

  def applied(self, event: events.Event) -> None:
    """See `Schedule`."""

  def _at_gate(self, facts: Facts) -> bool:
    free = not facts.busy if self.drain else facts.room > 0
    return facts.window == 0 and free

  def _owed(self, facts: Facts) -> bool:
    return facts.scoring > 0 or facts.held > 0


class Again:
  """What another run did, in the same order."""

  defers = False

  def __init__(self, log: collections.deque[events.Event]) -> None:
    """Takes the events of that run; `events.read` reads them."""
    self._log = log
    self._done = 0

  def takes(self, facts: Facts) -> bool:
    """See `Schedule`."""
    head = self._head()
    return isinstance(head, events.Take) and head.version == facts.newest

  def admits(self, facts: Facts, uid: int) -> bool:
    """See `Schedule`."""
    del facts
    return self.allows(ledgers.Admit(uid))

  def runs(self, facts: Facts) -> bool:
    """See `Schedule`."""
    del facts
    return self._head() == events.Run()

  def settles(self, facts: Facts, event: ledgers.Event) -> bool:
    """See `Schedule`."""
    del facts
    return self.allows(event)

  def allows(self, event: ledgers.Event) -> bool:
    """See `Schedule`.

    Raises:
      RunError: it is the turn of an event like this one, and not of this one;
        or that run did not come so far.
    """
    head = self._head()
    if head != event and _alike(head, event):
      self._refuse(event)
    return head == event

  def applied(self, event: events.Event) -> None:
    """See `Schedule`."""
    if event != self._head():
      self._refuse(event)
    self._log.popleft()
    self._done += 1

  def _refuse(self, event: events.Event) -> NoReturn:
    if not self._log:
      raise types.RunError(
        f"stream.follow: expected a run that ends with the {self._done} events "
        f"of that one, got {event}. Set num_steps to what that run trained."
      )
    raise types.RunError(
      f"stream.follow: expected event {self._done + 1} to be {self._head()}, "
      f"got {event}. The model, the rewards or the machine are others than in "
      "that run."
    )

  def _head(self) -> events.Event | None:
    return self._log[0] if self._log else None


def _alike(head: events.Event | None, event: events.Event) -> bool:
  """Whether an event can only have come instead of another one."""
  outcomes = (ledgers.Score, ledgers.Filter, ledgers.Fail)
  if isinstance(head, outcomes) and isinstance(event, outcomes):
    return head.uid == event.uid
  if head is None:  # What the trainer waits for; the worker may go on asking.
    return isinstance(event, ledgers.Consume | ledgers.Publish)
  kinds = (ledgers.Admit, ledgers.Consume, ledgers.Publish)
  return isinstance(event, kinds) and type(head) is type(event)


def build(cfg: StreamConfig, *, drain: bool, digest: str = "") -> Schedule:
  """Returns the schedule that the settings ask for.

  Args:
    cfg: the settings.
    drain: whether completions end with the weights they began with.
    digest: of all that decides what is sampled and trained; to follow.

  Raises:
    InputError: `cfg.follow` is no file of events that can be followed.
  """
  if cfg.follow:
    return Again(events.read(cfg.follow, digest))
  return Fixed(drain) if cfg.deterministic else Free(drain)
