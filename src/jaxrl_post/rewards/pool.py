"""Reward functions in worker processes, with a time limit on every call.

A reward runs code that nobody has checked on text that a model made up: it may
hang, die, or print without end. Processes keep that away from the run. Workers
are spawned, never forked from a process with threads and devices, and see no
device themselves.
"""

import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import process
from types import TracebackType
from typing import Any, Literal

import pebble
from absl import logging

from jaxrl_post import types
from jaxrl_post.rewards import blame, combine, limits, protocol, worker
from jaxrl_post.rewards import model as models

# Beyond the time of an async call, until its worker has said so itself.
_GRACE_S = 1.0
_POLICIES = f"'stop', 'mask' or a number {combine.RANGE}"
_GO_ON = "or set rewards.on_failure=mask to go on without its reward."


@dataclasses.dataclass(frozen=True)
class Rewards:
  """How completions are scored.

  Attributes:
    functions: each at the top level of a module, or a `functools.partial` of
      such a function.
    weights: one for each function; empty for all 1. The reward is the sum of
      weight times value; of a function that names its parts, of their sum.
    workers: processes.
    timeout_s: longest call of one function on one rollout, in seconds; more
      than the function itself waits for a server or a program.
    batch: rollouts sent to a worker at a time; more than 1 for functions that
      take microseconds, where sending is most of the work, for those that are
      `protocol.batched`, and for async ones, whose calls then wait at the same
      time. `timeout_s` is then for the batch. What fails in a batch is asked
      again rollout by rollout, so that failures mean the same.
    on_failure: what a function that raises, takes too long, dies, or returns
      no number from -1e15 to 1e15 does. "stop" ends the run; "mask" leaves the
      rollout without reward, counted and out of the update; a number is taken
      in place of what the function gave, and counted. NaN and None are always
      a missing reward, and `types.InputError` always ends the run.
    retries: how often a function that failed on a rollout is asked again
      before that is its failure.
    memory_mb: how much address space calls may add to what a worker has once
      it is ready, in MiB; None for no limit. Linux only. Beyond it Python
      raises MemoryError, and other code may die.
    model: a reward model, whose score is added to what functions say. With one
      there may be no functions.
  """

  functions: tuple[protocol.Reward, ...]
  weights: tuple[float, ...] = ()
  workers: int = 1
  timeout_s: float = 10.0
  batch: int = 1
  on_failure: Literal["stop", "mask"] | float = "stop"
  retries: int = 0
  memory_mb: int | None = None
  model: models.Model | None = None

  def __post_init__(self) -> None:
    given, wanted = len(self.weights), len(self.functions)
    finite = all(math.isfinite(w) for w in self.weights)
    time_holds = 0 < self.timeout_s < math.inf
    memory, policy = self.memory_mb, self.on_failure
    bounded = memory is None or (memory >= 1 and sys.platform == "linux")
    known = policy in ("stop", "mask")
    if not isinstance(policy, str):
      known = abs(policy) <= combine.LARGEST  # and so no NaN
    rules = (
      (
        wanted > 0 or self.model is not None,
        "functions",
        "at least one, or rewards.model",
        self.functions,
      ),
      (given in {0, wanted}, "weights", f"{wanted} of them", self.weights),
      (finite, "weights", "finite numbers", self.weights),
      (self.workers >= 1, "workers", ">= 1", self.workers),
      (self.batch >= 1, "batch", ">= 1", self.batch),
      (time_holds, "timeout_s", "> 0 seconds", self.timeout_s),
      (known, "on_failure", _POLICIES, policy),
      (self.retries >= 0, "retries", ">= 0", self.retries),
      (bounded, "memory_mb", ">= 1 MiB, on Linux, or None", memory),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"rewards.{name}: expected {rule}, got {value!r}. Correct the value."
        )
    for function in self.functions:
      worker.check_portable(function)
    limits.check(
      self.functions,
      combine.names(self.functions),
      timeout_s=self.timeout_s,
      batch=self.batch,
    )


def _future() -> concurrent.futures.Future[types.Rollout]:
  future: concurrent.futures.Future[types.Rollout]
  future = concurrent.futures.Future()
  future.set_running_or_notify_cancel()  # nobody may cancel it half-way
  return future


@dataclasses.dataclass(frozen=True, eq=False)
class _Pending:
  """A rollout that is being scored, and who waits for it.

  `outcomes` has a score and an error a function, None where none has come.
  """

  rollout: types.Rollout
  payload: bytes
  outcomes: list[tuple[combine.Score, BaseException | None] | None]
  future: concurrent.futures.Future[types.Rollout] = dataclasses.field(
    default_factory=_future
  )


def _dump(rollout: types.Rollout) -> bytes:
  # Experts are more bytes than all else, and no reward's business.
  made = dataclasses.replace(rollout.completion, routing=None)
  try:
    return pickle.dumps(dataclasses.replace(rollout, completion=made))
  except worker.UNPICKLABLE as error:
    raise types.InputError(
      "data: expected references that can be pickled, got "
      f"{rollout.prompt.reference!r} ({error}). Use numbers, text, lists."
    ) from error


class Pool:
  """Scores rollouts by functions in worker processes while it is entered.

  Calls wait in a queue without limit: whoever submits bounds what is
  outstanding. Entering waits until every worker has imported its functions, so
  that no reward's time limit pays for that; leaving ends the workers, and
  fails what they had not finished.

  Attributes:
    start_s: seconds until every worker was ready.
    worker_bytes: peak memory of the largest worker once it was ready.
  """

  def __init__(self, cfg: Rewards) -> None:
    self.start_s = math.nan
    self.worker_bytes = 0
    self._cfg = cfg
    self._names = combine.names(cfg.functions)
    self._advice = [
      "Mend the function (python -m jaxrl_post.rewards.check "
      f"{blame.target(function)} tries it), {_GO_ON}"
      for function in cfg.functions
    ]
    self._weights = cfg.weights or (1.0,) * len(cfg.functions)
    self._pending: dict[concurrent.futures.Future, _Pending] = {}
    self._workers: pebble.ProcessPool | None = None

  def __enter__(self) -> "Pool":
    context = multiprocessing.get_context("spawn")
    functions = pickle.dumps(self._cfg.functions)
    everyone = context.Barrier(self._cfg.workers)
    self._workers = pebble.ProcessPool(
      max_workers=self._cfg.workers,
      initializer=worker.start,
      initargs=(
        worker.modules(self._cfg.functions),
        functions,
        everyone,
        self._cfg.memory_mb,
      ),
      context=context,
    )
    try:
      self._wait_for(self._workers)
    except BaseException:
      self.__exit__(None, None, None)
      raise
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    if self._workers is None:
      return
    workers, self._workers = self._workers, None
    workers.stop()
    workers.join()
    self._give_up()

  def submit(
    self, rollout: types.Rollout
  ) -> concurrent.futures.Future[types.Rollout]:
    """Scores a rollout; returns at once. Any thread may call it.

    Args:
      rollout: not scored yet.

    Returns:
      A future of this very rollout with `reward` and `parts`; with `failure`
      and a NaN reward when there is none; with `failure` and a reward when
      `on_failure` is a number. Under "stop" it raises a `types.RunError` of one
      line, whose cause is what the function raised, with the worker's
      traceback. What a function raises as `types.InputError` stays that.

    Raises:
      types.InputError: when the rollout's reference cannot be pickled.
      types.RunError: when the pool is not entered, or lost its workers.
    """
    return self.submit_all([rollout])[0]

  def submit_all(
    self, rollouts: Sequence[types.Rollout]
  ) -> list[concurrent.futures.Future[types.Rollout]]:
    """Scores rollouts, `batch` of them at a time; otherwise as `submit`."""
    futures = []
    for start in range(0, len(rollouts), self._cfg.batch):
      part = rollouts[start : start + self._cfg.batch]
      entries = [
        _Pending(rollout, _dump(rollout), [None] * len(self._names))
        for rollout in part
      ]
      futures += [entry.future for entry in entries]
      self._pending |= {entry.future: entry for entry in entries}
      self._send(entries)
    if self._workers is None:  # closed meanwhile, by another thread
      self._give_up()
    return futures

  def _send(self, entries: "Sequence[_Pending]") -> None:
    """Sends rollouts to a worker; a single one to each function apart."""
    if len(entries) > 1:
      payloads = [entry.payload for entry in entries]
      limit = self._cfg.timeout_s
      call = self._schedule(
        worker.call_all,
        (tuple(self._names), payloads, limit),
        timeout_s=limit + _GRACE_S,
      )
      call.add_done_callback(functools.partial(self._arrived_all, entries))
      return
    for index in range(len(self._names)):
      self._ask(entries[0], index, self._cfg.retries)

  def _ask(self, entry: "_Pending", index: int, retries: int) -> None:
    """Asks one function about one rollout."""
    call = self._schedule(
      worker.call,
      (index, self._names[index], entry.payload),
      timeout_s=self._cfg.timeout_s,
    )
    call.add_done_callback(
      functools.partial(self._arrived, entry, index, retries)
    )

  def _schedule(
    self,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    timeout_s: float,
  ) -> concurrent.futures.Future[Any]:
    if self._workers is None:
      raise types.RunError("reward pool: submit() outside of its `with` block")
    try:
      return self._workers.schedule(function, args=args, timeout=timeout_s)
    except RuntimeError as error:
      raise types.RunError("reward pool: its workers are gone") from error

  def _give_up(self) -> None:
    """Fails what the workers will never finish."""
    for future in tuple(self._pending):
      pending = self._pending.pop(future, None)
      if pending is not None:
        uid = pending.rollout.completion.uid
        future.set_exception(
          types.RunError(f"reward pool: closed before rollout {uid} was scored")
        )

  def _wait_for(self, workers: pebble.ProcessPool) -> None:
    began = time.monotonic()
    pings = [workers.schedule(worker.ping) for _ in range(self._cfg.workers)]
    done, late = concurrent.futures.wait(pings, worker.START_S)
    errors = [ping.exception() for ping in done if ping.exception()]
    if late or errors:
      raise types.RunError(
        f"reward pool: expected {self._cfg.workers} workers within "
        f"{worker.START_S:g} s, got {len(done) - len(errors)}. What a worker "
        "raised stands above."
      ) from (errors[0] if errors else None)
    self.start_s = time.monotonic() - began
    self.worker_bytes = max(ping.result() for ping in pings)
    logging.info(
      "rewards: %d workers ready in %.1f s, at most %d MiB each.",
      self._cfg.workers,
      self.start_s,
      self.worker_bytes // 2**20,
    )

  def _arrived_all(
    self,
    entries: "Sequence[_Pending]",
    call: concurrent.futures.Future[list[list[combine.Score | None]]],
  ) -> None:
    """Settles a batch, or asks again for what failed; on the pool's threads."""
    if call.cancelled():  # closing: whoever waits is told by `_give_up`
      return
    if call.exception() is None:
      rows = call.result()
    else:
      rows = [[None] * len(self._names) for _ in entries]
    for entry, row in zip(entries, rows, strict=True):
      for index, score in enumerate(row):
        if score is not None:
          entry.outcomes[index] = score, None
      self._finish(entry)
      for index, score in enumerate(row):
        if score is None:
          self._ask_again(entry, index, self._cfg.retries)

  def _arrived(
    self,
    entry: "_Pending",
    index: int,
    retries: int,
    call: concurrent.futures.Future[combine.Score],
  ) -> None:
    """Takes the outcome of a call, or tries again; on the pool's threads."""
    if call.cancelled():
      return
    uid = entry.rollout.completion.uid
    score, error = self._outcome(index, uid, call)
    if error and retries and not isinstance(error, types.InputError):
      self._ask_again(entry, index, retries - 1)
      return
    entry.outcomes[index] = score, error
    self._finish(entry)

  def _ask_again(self, entry: "_Pending", index: int, retries: int) -> None:
    if self._workers is None:  # closing: whoever waits is told by `_give_up`
      return
    try:
      self._ask(entry, index, retries)
    except types.RunError as error:  # An exception in a callback is lost.
      if self._pending.pop(entry.future, None) is not None:
        entry.future.set_exception(error)

  def _finish(self, entry: "_Pending") -> None:
    """Settles a rollout once the last of its functions has answered."""
    outcomes = [outcome for outcome in entry.outcomes if outcome is not None]
    if len(outcomes) < len(self._names):
      return
    future, policy = entry.future, self._cfg.on_failure
    if self._pending.pop(future, None) is None:
      return  # the other of the last two calls was faster, or the pool closed
    errors = [error for _, error in outcomes if error is not None]
    if policy != "stop":
      errors = [e for e in errors if isinstance(e, types.InputError)]
    if errors:
      future.set_exception(errors[0])
      return
    scores = [score for score, _ in outcomes]
    if not isinstance(policy, str):
      named = zip(self._names, scores, strict=True)
      scores = [combine.replaced(name, score, policy) for name, score in named]
    try:
      scored = combine.combine(entry.rollout, scores, self._weights)
    except types.InputError as error:
      future.set_exception(error)
      return
    future.set_result(scored)

  def _outcome(
    self,
    index: int,
    uid: int,
    call: concurrent.futures.Future[combine.Score],
  ) -> tuple[combine.Score, BaseException | None]:
    """Returns a call's score, and what to raise under "stop"."""
    place = f"reward {self._names[index]}, rollout {uid}"
    advice = self._advice[index]
    error = call.exception()
    if error is None:
      score = call.result()
      if not score.fault:
        return score, None
      got = score.fault.removeprefix("reward is ")
      fault = f"{place}: expected a number {combine.RANGE}, got {got}. {advice}"
      return score, types.RunError(fault)
    if isinstance(error, types.InputError):
      error.add_note(f"in {place}")
      return combine.Score(fault=combine.one_line(str(error))), error
    if isinstance(error, pebble.ProcessExpired):
      reason = "worker died"
      told = f"its worker died, exit code {error.exitcode}"
    elif isinstance(error, process.BrokenProcessPool):
      reason = "worker died"
      told = "the pool lost its workers"
    elif isinstance(error, TimeoutError) and error.__cause__ is None:
      # One that the function itself raised has the worker's traceback.
      reason = told = f"timeout after {self._cfg.timeout_s:g} s"
      advice = f"Raise rewards.timeout_s, {_GO_ON}"
    else:
      kind = f"{type(error).__name__}: "
      kind = "" if isinstance(error, types.RunError) else kind
      reason = told = combine.one_line(f"{kind}{error}").rstrip(" :")
    raised = types.RunError(f"{place}: {told.rstrip('.')}. {advice}")
    raised.__cause__ = error
    return combine.Score(fault=reason), raised
