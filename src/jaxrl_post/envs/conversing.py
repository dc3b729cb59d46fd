"""An engine of whole conversations, over an engine of turns.

A turn that has ended goes to the environment in a thread; its row stays in the
cache if nobody needs it, and the other rows go on. The answer comes back as a
request that goes on behind it. Whoever calls sees completions only: a group is
in the making until its last conversation has ended.
"""

import collections
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.envs import multi_turn, restore, work
from jaxrl_post.rewards import combine

# Longest wait for an answer, while nothing is sampled, before a look at others.
_TICK_S = 0.05
# Threads that may hang, as a multiple of those that may work.
_MOST_LOST = 4


@dataclasses.dataclass(eq=False)
class _Call:
  """An answer in the making.

  Attributes:
    made: the completion that is answered.
    ask: makes the answer.
    number: of calls that were asked for before it.
    begun: time.monotonic() when it began.
    over: whether it has come to its end.
    answer: if it came.
    error: what was raised, if it did not.
  """

  made: types.Completion
  ask: Callable[[], multi_turn.Answer]
  number: int = 0
  begun: float = 0.0
  over: bool = False
  answer: multi_turn.Answer | None = None
  error: BaseException | None = None


class _Desk:
  """Makes answers, so many at a time, in the order in which they are asked."""

  def __init__(self, workers: int, timeout_s: float) -> None:
    self._workers, self._timeout_s = workers, timeout_s
    self._waiting: collections.deque[_Call] = collections.deque()
    self._begun: list[_Call] = []
    self._lost: list[_Call] = []
    self._changed = threading.Condition()
    self._asked = 0

  @property
  def is_open(self) -> bool:
    """Whether some answer was not taken yet."""
    with self._changed:
      return bool(self._waiting or self._begun)

  def ask(self, call: _Call) -> None:
    """Queues a call."""
    with self._changed:
      call.number, self._asked = self._asked, self._asked + 1
      self._waiting.append(call)
      self._start()

  def take(self, wait_s: float = 0.0) -> list[_Call]:
    """Returns calls that are over, or late, in the order they were begun.

    Args:
      wait_s: longest wait for the first one.

    Raises:
      RunError: too many threads hang.
    """
    with self._changed:
      self._changed.wait_for(lambda: any(c.over for c in self._begun), wait_s)
      last = time.monotonic() - self._timeout_s
      taken = [c for c in self._begun if c.over or c.begun <= last]
      self._begun = [c for c in self._begun if c not in taken]
      self._lost += [c for c in taken if not c.over]
      most = _MOST_LOST * self._workers
      if len(self._lost) > most:
        raise types.RunError(
          f"env: expected answers that end, got {len(self._lost)} that hang, "
          f"more than {_MOST_LOST} x env.workers. Give the environment a time "
          "limit of its own."
        )
      self._start()
      return taken

  def _start(self) -> None:
    """Starts threads for those that wait; the lock is held."""
    while self._waiting and self._working() < self._workers:
      call = self._next()
      # A daemon: an answer that hangs must not keep the process alive.
      threading.Thread(
        target=self._work, args=(call,), name="environment", daemon=True
      ).start()

  def _working(self) -> int:
    return sum(not call.over for call in self._begun)

  def _next(self) -> _Call:
    call = self._waiting.popleft()
    call.begun = time.monotonic()
    self._begun.append(call)
    return call

  def _work(self, call: _Call) -> None:
    while True:
      try:
        call.answer = call.ask()
      except BaseException as error:
        call.error = error  # For whoever takes the call.
      with self._changed:
        call.over = True
        self._changed.notify_all()
        if call in self._lost:  # Another thread has its place.
          self._lost.remove(call)
          return
        if not self._waiting:
          return
        call = self._next()


class Conversing:
  """Has the methods of `work.Engine`, for conversations.

  Attributes:
    seats: of the turns that ended in the last step.
  """

  def __init__(
    self,
    engine: work.Engine,
    env: multi_turn.MultiTurn,
    prompts: Callable[[int], types.Prompt],
    *,
    lockstep: bool,
  ) -> None:
    """Takes over an engine.

    Args:
      engine: samples turns.
      env: says how conversations go.
      prompts: by uid, of the requests to come.
      lockstep: sample nothing while an answer is in the making, so that no
        clock decides what is sampled when.
    """
    self._engine, self._env, self._prompts = engine, env, prompts
    self._lockstep = lockstep
    # By the uid under which the engine samples the newest row.
    self._talks: dict[int, multi_turn.Talk] = {}
    self._asked: dict[int, types.Completion] = {}
    self._desk = _Desk(env.cfg.workers, env.cfg.timeout_s)
    self._warned = False
    self._over: list[int] = []  # Rows that nothing more comes of.
    self.seats: Sequence[types.Seat] = ()

  @property
  def between(self) -> str:
    """State of generation in a step while no program of it runs."""
    return self._engine.between if self._engine.busy else "wait/host"

  @property
  def room(self) -> int:
    """Rows that are free; a conversation that waits for an answer has none."""
    return self._engine.room

  @property
  def busy(self) -> bool:
    """Whether some conversation has not ended."""
    return bool(self._talks)

  def add(self, request: types.Request) -> None:
    """Queues a group; begun conversations go on where `partials` had them."""
    prompt = self._prompts(self._env.owner(request.uids[0]))
    request = dataclasses.replace(request, hold=self._env.cfg.max_turns > 1)
    for partial in request.begun:
      if partial.talk is not None:
        self._resume(prompt, request, partial)
    left = tuple(uid for uid in request.uids if uid not in self._talks)
    if not left:
      return
    first = tuple(p for p in request.begun if p.talk is None)
    request = dataclasses.replace(request, uids=left, begun=first)
    for uid in left:
      self._talks[uid] = self._env.begin(prompt, request)
    self._engine.add(request)

  def _resume(
    self, prompt: types.Prompt, request: types.Request, begun: types.Partial
  ) -> None:
    """Has a conversation go on, if it can; else it is left to begin anew."""
    talk = restore.resumed(self._env, prompt, request, begun)
    if talk is None:
      return
    self._talks[begun.uid] = talk
    if not begun.talk.asked:
      self._engine.add(talk.request)
      return
    self._heard(
      types.Completion(
        uid=begun.uid,
        tokens=begun.tokens,
        logprobs=begun.logprobs,
        versions=begun.versions,
        finish="stop",
      )
    )

  def step(
    self,
    params: types.Tree,
    version: int,
    launched: Callable[[str, Any], None] = lambda name, result: None,
  ) -> list[types.Completion] | None:
    """Makes one block, if there is something to sample, and takes answers.

    Returns:
      The conversations that have ended; None if there was nothing to sample
      and no answer came for a moment.

    Raises:
      InputError: what the environment raised.
      RunError: likewise; or too many answers hang.
    """
    ended, self.seats, self._over = [], (), []
    samples = self._engine.busy
    if samples:
      made = self._engine.step(params, version, launched) or ()
      self.seats = self._engine.seats
      ended += [c for c in map(self._heard, made) if c is not None]
    calls = self._answers()
    if not samples and not calls:
      return None
    for call in calls:
      done = self._go_on(call)
      ended += [] if done is None else [done]
    self._engine.release(self._over)
    return ended

  def partials(self) -> tuple[types.Partial, ...]:
    """Returns the conversations that have begun and can go on.

    Those whose turn an engine elsewhere has half made are as they were before
    it. Those of which turns were answered need a `restore.Restorable`, and
    must be in their first row without `retell`; those that wait for an answer,
    no experts that are noted.
    """
    half = {partial.uid: partial for partial in self._engine.partials()}
    found = [self._partial(uid, half.get(uid)) for uid in sorted(self._talks)]
    return tuple(partial for partial in found if partial is not None)

  def _partial(
    self, uid: int, half: types.Partial | None
  ) -> types.Partial | None:
    """Returns a conversation, whose turn may be half made, for a checkpoint."""
    talk, made = self._talks[uid], self._asked.get(uid)
    if made is None and not talk.turns:
      return half
    if made is not None and made.routing is not None:  # They are not kept.
      return None
    if made is not None:
      half = types.Partial(
        uid=uid,
        tokens=made.tokens,
        logprobs=made.logprobs,
        versions=made.versions,
      )
    kept = restore.kept(self._env, talk, asked=made is not None)
    if kept is None:
      return None
    return dataclasses.replace(half or talk.request.begun[0], talk=kept)

  def renew(self) -> None:
    """Has the next step take its weights for newer ones."""
    self._engine.renew()

  def release(self, uids: Collection[int]) -> None:
    """Does nothing: the rows of conversations that ended are free."""

  def _heard(self, made: types.Completion) -> types.Completion | None:
    """Has a turn answered; returns a conversation that no token is left for."""
    talk = self._talks[made.uid]
    if made.finish == "length":
      del self._talks[made.uid]
      self._over.append(made.uid)
      last = types.Turn(end=len(made.tokens), whole=False)
      return self._env.ended(talk, made, last)
    self._asked[made.uid] = made
    self._desk.ask(
      _Call(made, functools.partial(restore.ask, self._env, talk, made))
    )
    return None

  def _answers(self) -> list[_Call]:
    """Returns the calls that are over; in lockstep all, as they were asked."""
    if not self._lockstep:
      waits = self._desk.is_open and not self._engine.busy
      return self._desk.take(_TICK_S if waits else 0.0)
    calls: list[_Call] = []
    while self._desk.is_open:
      calls += self._desk.take(_TICK_S)
    return sorted(calls, key=lambda call: call.number)

  def _go_on(self, call: _Call) -> types.Completion | None:
    """Asks for the next turn; returns a conversation that has ended."""
    uid = call.made.uid
    talk, _ = self._talks.pop(uid), self._asked.pop(uid)
    answer = call.answer or self._excuse(call, talk)
    after = self._env.answered(talk, call.made, answer)
    if isinstance(after, types.Completion):
      self._over.append(uid)
      return after
    (again,) = after.request.uids
    if again != uid:
      self._over.append(uid)
    self._talks[again] = after
    self._engine.add(after.request)
    return None

  def _excuse(self, call: _Call, talk: multi_turn.Talk) -> multi_turn.Answer:
    """Returns what stands for an answer that did not come."""
    error, late = call.error, call.error is None
    if isinstance(error, types.InputError | types.RunError):
      raise error
    reason = f"no answer within {self._env.cfg.timeout_s:g} s"
    if not late:
      reason = combine.one_line(f"{type(error).__name__}: {error}")
    if not self._warned:
      self._warned = True
      logging.warning(
        "conversation %d: %s (further ones: env/tool_errors)",
        call.made.uid,
        reason,
      )
    answer = self._env.excuse(talk, call.made, reason, late=late)
    return dataclasses.replace(answer, saved=restore.saved(self._env, answer))


class _Rounds:
  """Samples all turns that are open at once; has what `Conversing` needs."""

  between, room, seats = "wait/host", 0, ()

  def __init__(
    self, sample: Callable[[list[types.Request]], list[types.Completion]]
  ) -> None:
    self._sample, self._open = sample, list[types.Request]()

  @property
  def busy(self) -> bool:
    return bool(self._open)

  def add(self, request: types.Request) -> None:
    self._open.append(dataclasses.replace(request, hold=False))

  def step(
    self, params: types.Tree, version: int, launched: Callable[[str, Any], None]
  ) -> list[types.Completion]:
    del params, version, launched
    requests, self._open = self._open, []
    return self._sample(requests)

  def partials(self) -> tuple[types.Partial, ...]:
    return ()

  def renew(self) -> None:
    pass

  def release(self, uids: Collection[int]) -> None:
    pass


def generate(
  sample: Callable[[list[types.Request]], list[types.Completion]],
  requests: Sequence[types.Request],
  *,
  env: multi_turn.MultiTurn,
  prompts: Callable[[int], types.Prompt],
) -> list[types.Completion]:
  """Has conversations in rounds: all their turns, then all the answers.

  Args:
    sample: requests to completions, in any order.
    requests: first turns.
    env: says how conversations go.
    prompts: by uid.

  Returns:
    One conversation for each uid, in the order of `requests`.
  """
  engine = Conversing(_Rounds(sample), env, prompts, lockstep=True)
  for request in requests:
    engine.add(request)
  done: dict[int, types.Completion] = {}
  while engine.busy:
    done |= {made.uid: made for made in engine.step(None, 0) or ()}
  return [done[uid] for request in requests for uid in request.uids]
