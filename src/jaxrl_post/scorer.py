"""Who scores: functions in worker processes, a model on devices, or both."""

import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

import jax
import numpy as np
from absl import logging

from jaxrl_post import config, prepare, types
from jaxrl_post.placement import programs, reward_model
from jaxrl_post.rewards import combine, pool, protocol
from jaxrl_post.runtime import clock as clocks

# Longest wait, in seconds, for a program that is under way at the end.
_GRACE_S = 10.0


@contextlib.contextmanager
def opened(
  cfg: config.Run,
  parts: prepare.Parts,
  place: programs.Programs,
  clock: clocks.Clock,
) -> Iterator[protocol.Scorer]:
  """Starts what scores the rollouts of a run, and ends it.

  Args:
    cfg: the run.
    parts: its host half.
    place: its steps.
    clock: accounts for the programs of a reward model.

  Yields:
    The pool of its functions, or a `Judged`, whose programs are compiled.

  Raises:
    InputError: devices of a reward model are not its own, or its weights cannot
      be read.
    RunError: no worker came up.
  """
  with contextlib.ExitStack() as stack:
    functions = None
    if cfg.rewards.functions:
      functions = stack.enter_context(pool.Pool(cfg.rewards))
    if parts.judge is None:
      assert functions is not None, "one of the two"
      yield functions
      return

    def launched(made: jax.Array) -> None:
      clock.launched("generation", "reward model", made)

    placed = reward_model.place(
      parts.judge,
      place.meshes,
      jax.devices(),
      lock=place.locks[1],
      launched=launched,
    )
    judged = Judged(
      parts.judge,
      placed,
      functions,
      on_failure=cfg.rewards.on_failure,
      clock=clock,
    )
    yield stack.enter_context(judged)


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
  """A rollout that is being scored.

  `asked` is what functions say of it, `future` is who waits, and `ids` is the
  conversation once it is made.
  """

  rollout: types.Rollout
  asked: concurrent.futures.Future[types.Rollout]
  future: concurrent.futures.Future[types.Rollout]
  ids: tuple[int, ...] = ()


class Judged:
  """Scores rollouts by a model and, besides, by functions; while entered.

  One thread makes conversations of rollouts and has the model read them, as
  many at a time as are there and fit into a program, whichever groups they are
  of. Like a pool it does not bound what waits.
  """

  def __init__(
    self,
    source: reward_model.Source,
    placed: reward_model.Placed,
    functions: protocol.Scorer | None,
    *,
    on_failure: str | float,
    clock: clocks.Clock,
  ) -> None:
    """Prepares; `with` compiles and starts.

    Args:
      source: the model.
      placed: it on its devices.
      functions: score besides; None where the model is all there is.
      on_failure: see `pool.Rewards`.
      clock: has the model's calls in its trace.
    """
    self._source, self._placed, self._functions = source, placed, functions
    self._policy, self._clock = on_failure, clock
    self._arrived: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
    self._pending: dict[concurrent.futures.Future, _Entry] = {}
    self._over: BaseException | None = types.RunError(
      "reward model: submit() outside of its `with` block"
    )
    self._thread = threading.Thread(
      target=self._run, name="reward model", daemon=True
    )

  def __enter__(self) -> "Judged":
    for length in self._placed.lengths:
      jax.block_until_ready(self._placed.score([], length))
    self._over = None
    self._thread.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self._arrived.put(None)
    self._thread.join(_GRACE_S)
    if self._thread.is_alive():
      logging.error("reward model: it hangs in a program; left behind")
    self._end(types.RunError("reward model: closed before all were scored"))

  def submit_all(
    self, rollouts: Sequence[types.Rollout]
  ) -> list[concurrent.futures.Future[types.Rollout]]:
    """Scores rollouts; returns at once. Any thread may call it.

    Args:
      rollouts: not scored yet.

    Returns:
      A future of each, as of `pool.Pool.submit`, with the model's score among
      the parts, and weighted in the reward.

    Raises:
      Exception: what ended the model's thread, or that it has not begun.
    """
    if self._over is not None:
      raise self._over
    if self._functions is None:
      scored = [combine.combine(rollout, (), ()) for rollout in rollouts]
      asked = [_done(rollout) for rollout in scored]
    else:
      asked = self._functions.submit_all(rollouts)
    entries = [
      _Entry(rollout, base, concurrent.futures.Future())
      for rollout, base in zip(rollouts, asked, strict=True)
    ]
    self._pending |= {entry.future: entry for entry in entries}
    for entry in entries:
      self._arrived.put(entry)
    if self._over is not None:  # It has ended meanwhile.
      self._end(self._over)
    return [entry.future for entry in entries]

  def _run(self) -> None:
    waiting: list[_Entry] = []
    try:
      while self._gather(waiting):
        self._score(waiting)
    except BaseException as error:  # For whoever waits for a score.
      self._end(error)

  def _gather(self, waiting: list[_Entry]) -> bool:
    """Takes what has arrived, and waits for it if nothing else is to be done.

    Returns:
      Whether to go on.
    """
    while not waiting or not self._arrived.empty():
      entry = self._arrived.get()
      if entry is None:
        return False
      self._prepare(entry, waiting)
    return True

  def _prepare(self, entry: _Entry, waiting: list[_Entry]) -> None:
    """Makes the conversation of a rollout, and lets it wait for the model."""
    rollout, cfg = entry.rollout, self._source.cfg
    try:
      ids = self._source.conversation(rollout.prompt, rollout.text)
    except types.InputError as error:
      self._fail(entry, error)
      return
    if len(ids) <= cfg.max_tokens:
      waiting.append(dataclasses.replace(entry, ids=ids))
      return
    limit = f"at most {cfg.max_tokens} tokens (rewards.model.max_tokens)"
    fault = f"a conversation of {len(ids)} tokens, {limit}"
    self._settle(entry, combine.Score(fault=fault))

  def _score(self, waiting: list[_Entry]) -> None:
    """Has the model read those that have waited longest, of one length."""
    length = self._length(waiting[0])
    fitting = [e for e in waiting if self._length(e) == length]
    batch = fitting[: self._source.cfg.batch]
    waiting[:] = [e for e in waiting if e not in batch]
    answered = self._clock.calls("reward model", len(batch))
    made = self._placed.score([entry.ids for entry in batch], length)
    numbers = np.asarray(made)[: len(batch)].tolist()
    for entry, number in zip(batch, numbers, strict=True):
      answered(entry)
      self._settle(entry, combine.read(self._source.cfg.name, number))

  def _length(self, entry: _Entry) -> int:
    return next(n for n in self._placed.lengths if n >= len(entry.ids))

  def _settle(self, entry: _Entry, score: combine.Score) -> None:
    """Gives a rollout its reward, once functions have said theirs."""
    name, policy = self._source.cfg.name, self._policy
    error = None
    if score.fault and policy == "stop":
      uid = entry.rollout.completion.uid
      error = types.RunError(
        f"reward {name}, rollout {uid}: expected a number {combine.RANGE}, got "
        f"{score.fault.removeprefix('reward is ')}. Mend what it is given, or "
        "set rewards.on_failure=mask to go on without its reward."
      )
    if not isinstance(policy, str):
      score = combine.replaced(name, score, policy)

    def finish(asked: concurrent.futures.Future[types.Rollout]) -> None:
      failure = asked.exception() or error
      if failure is not None:
        self._fail(entry, failure)
        return
      try:
        made = combine.add(asked.result(), score, self._source.cfg.weight)
      except types.InputError as clash:
        self._fail(entry, clash)
        return
      if self._pending.pop(entry.future, None) is not None:
        entry.future.set_result(made)

    entry.asked.add_done_callback(finish)

  def _fail(self, entry: _Entry, error: BaseException) -> None:
    if self._pending.pop(entry.future, None) is not None:
      entry.future.set_exception(error)

  def _end(self, error: BaseException) -> None:
    """Fails what will never be scored, and what is submitted from now on."""
    self._over = error
    for entry in tuple(self._pending.values()):
      self._fail(entry, error)


def _done(
  rollout: types.Rollout,
) -> concurrent.futures.Future[types.Rollout]:
  future: concurrent.futures.Future[types.Rollout]
  future = concurrent.futures.Future()
  future.set_result(rollout)
  return future
