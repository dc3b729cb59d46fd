"""Reward functions in worker processes, with a time limit on every call.

A reward runs code that nobody has checked on text that a model made up: it may
hang, die, or print without end. Processes keep that away from the run. Workers
are spawned, never forked from a process with threads and devices, and see no
device themselves.
"""

import concurrent.futures
import dataclasses
import functools
import importlib
import importlib.util
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import process
from types import TracebackType
from typing import Any, Literal

import jax
import pebble
from absl import logging

from jaxrl_post import types
from jaxrl_post.rewards import combine

# Seconds for all workers to import what they need.
START_S = 120.0

_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
_PLAIN = (str, bytes, int, float, type(None))


@dataclasses.dataclass(frozen=True)
class Rewards:
  """How completions are scored.

  Attributes:
    functions: each at the top level of a module, or a `functools.partial` of
      such a function.
    weights: one for each function; empty for all 1. The reward is the sum of
      weight times value; of a function that names its parts, of their sum.
    workers: processes.
    timeout_s: longest call of one function on one rollout, in seconds.
    batch: rollouts sent to a worker at a time; more than 1 for functions that
      take microseconds, where sending is most of the work. `timeout_s` is then
      for the batch. A batch with a failure is scored again one by one, so
      that failures mean the same.
    on_failure: what a function that raises, takes too long, dies, or returns
      no finite number does. "stop" ends the run; "mask" leaves the rollout
      without reward, counted and out of the update. NaN and None are always a
      missing reward, and `types.InputError` always ends the run.
  """

  functions: tuple[types.Reward, ...]
  weights: tuple[float, ...] = ()
  workers: int = 1
  timeout_s: float = 10.0
  batch: int = 1
  on_failure: Literal["stop", "mask"] = "stop"

  def __post_init__(self) -> None:
    given, wanted = len(self.weights), len(self.functions)
    finite = all(math.isfinite(w) for w in self.weights)
    time_holds = 0 < self.timeout_s < math.inf
    policies = ("stop", "mask")
    rules = (
      (wanted > 0, "functions", "at least one", self.functions),
      (given in {0, wanted}, "weights", f"{wanted} of them", self.weights),
      (finite, "weights", "finite numbers", self.weights),
      (self.workers >= 1, "workers", ">= 1", self.workers),
      (self.batch >= 1, "batch", ">= 1", self.batch),
      (time_holds, "timeout_s", "> 0 seconds", self.timeout_s),
      (
        self.on_failure in policies,
        "on_failure",
        f"one of {policies}",
        self.on_failure,
      ),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"rewards.{name}: expected {rule}, got {value!r}. Correct the value."
        )
    for function in self.functions:
      _check_portable(function)


def _future() -> concurrent.futures.Future[types.Rollout]:
  future: concurrent.futures.Future[types.Rollout]
  future = concurrent.futures.Future()
  future.set_running_or_notify_cancel()  # nobody may cancel it half-way
  return future


@dataclasses.dataclass(frozen=True, eq=False)
class _Pending:
  """A rollout that is being scored, and who waits for it."""

  rollout: types.Rollout
  payload: bytes
  future: concurrent.futures.Future[types.Rollout] = dataclasses.field(
    default_factory=_future
  )


def _dump(rollout: types.Rollout) -> bytes:
  try:
    return pickle.dumps(rollout)
  except _UNPICKLABLE as error:
    raise types.InputError(
      "data: expected references that can be pickled, got "
      f"{rollout.prompt.reference!r} ({error}). Use numbers, text, lists."
    ) from error


class Pool:
  """Scores rollouts in worker processes while it is entered.

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
    self._weights = cfg.weights or (1.0,) * len(cfg.functions)
    self._pending: dict[concurrent.futures.Future, _Pending] = {}
    self._workers: pebble.ProcessPool | None = None

  def __enter__(self) -> "Pool":
    context = multiprocessing.get_context("spawn")
    functions = pickle.dumps(self._cfg.functions)
    everyone = context.Barrier(self._cfg.workers)
    self._workers = pebble.ProcessPool(
      max_workers=self._cfg.workers,
      initializer=_start_worker,
      initargs=(_modules(self._cfg.functions), functions, everyone),
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
      and a NaN reward when there is none. Under "stop" it raises what the
      function raised, with the worker's traceback as its cause; if that is no
      built-in exception, or there is none, a `types.RunError`.

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
      entries = [_Pending(rollout, _dump(rollout)) for rollout in part]
      futures += [entry.future for entry in entries]
      self._pending |= {entry.future: entry for entry in entries}
      self._send(entries)
    if self._workers is None:  # closed meanwhile, by another thread
      self._give_up()
    return futures

  def _send(self, entries: "Sequence[_Pending]") -> None:
    """Sends rollouts to a worker; a single one to each function apart."""
    names = tuple(self._names)
    if len(entries) > 1:
      payloads = [entry.payload for entry in entries]
      call = self._schedule(_call_all, (names, payloads))
      call.add_done_callback(functools.partial(self._arrived_all, entries))
      return
    (entry,) = entries
    calls = tuple(
      self._schedule(_call, (index, name, entry.payload))
      for index, name in enumerate(names)
    )
    for call in calls:
      call.add_done_callback(functools.partial(self._arrived, entry, calls))

  def _schedule(
    self, function: Callable[..., Any], args: tuple[Any, ...]
  ) -> concurrent.futures.Future[Any]:
    if self._workers is None:
      raise types.RunError("reward pool: submit() outside of its `with` block")
    try:
      return self._workers.schedule(
        function, args=args, timeout=self._cfg.timeout_s
      )
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
    pings = [workers.schedule(_ping) for _ in range(self._cfg.workers)]
    done, late = concurrent.futures.wait(pings, START_S)
    errors = [ping.exception() for ping in done if ping.exception()]
    if late or errors:
      raise types.RunError(
        f"reward pool: expected {self._cfg.workers} workers within {START_S:g} "
        f"s, got {len(done) - len(errors)}. What a worker raised stands above."
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
    call: concurrent.futures.Future[list[list[combine.Score]]],
  ) -> None:
    """Settles a batch, or sends it again one by one; on the pool's threads."""
    failed = call.exception() is not None
    if not failed and not any(s.fault for row in call.result() for s in row):
      for entry, scores in zip(entries, call.result(), strict=True):
        self._settle(entry, scores, [])
      return
    if self._workers is None:  # closing: whoever waits is told by `_give_up`
      return
    for entry in entries:
      try:
        self._send([entry])
      except types.RunError as error:  # An exception in a callback is lost.
        if self._pending.pop(entry.future, None) is not None:
          entry.future.set_exception(error)

  def _arrived(
    self,
    entry: "_Pending",
    calls: "tuple[concurrent.futures.Future[combine.Score], ...]",
    call: concurrent.futures.Future[combine.Score],
  ) -> None:
    """Settles a rollout once its last call is done; on the pool's threads."""
    del call
    if not all(call.done() for call in calls):
      return
    uid = entry.rollout.completion.uid
    scores: list[combine.Score] = []
    errors: list[BaseException] = []
    for name, call in zip(self._names, calls, strict=True):
      score, error = self._outcome(name, uid, call)
      scores.append(score)
      errors += [error] if error is not None else []
    self._settle(entry, scores, errors)

  def _settle(
    self,
    entry: "_Pending",
    scores: list[combine.Score],
    errors: list[BaseException],
  ) -> None:
    future = entry.future
    if self._pending.pop(future, None) is None:
      return  # the other of the last two calls was faster, or the pool closed
    if self._cfg.on_failure == "mask":
      errors = [e for e in errors if isinstance(e, types.InputError)]
    if errors:
      future.set_exception(errors[0])
      return
    try:
      scored = combine.combine(entry.rollout, scores, self._weights)
    except types.InputError as error:
      future.set_exception(error)
      return
    future.set_result(scored)

  def _outcome(
    self,
    name: str,
    uid: int,
    call: concurrent.futures.Future[combine.Score],
  ) -> tuple[combine.Score, BaseException | None]:
    """Returns a call's score, and what to raise under "stop"."""
    place = f"reward {name}, rollout {uid}"
    error = call.exception()
    if error is None:
      score = call.result()
      if not score.fault:
        return score, None
      got = score.fault.removeprefix("reward is ")
      fault = f"{place}: expected a number {combine.RANGE}, got {got}"
      return score, types.RunError(fault)
    if isinstance(error, pebble.ProcessExpired):
      reason = "worker died"
      code = f"exit code {error.exitcode}"
      raised = types.RunError(f"{place}: its worker died, {code}")
    elif isinstance(error, process.BrokenProcessPool):
      reason = "worker died"
      raised = types.RunError(f"{place}: the pool lost its workers")
    elif isinstance(error, TimeoutError) and error.__cause__ is None:
      # One that the function itself raised has the worker's traceback.
      reason = f"timeout after {self._cfg.timeout_s:g} s"
      raised = types.RunError(f"{place}: {reason}")
    else:
      reason = combine.one_line(f"{type(error).__name__}: {error}")
      error.add_note(f"in {place}")
      return combine.Score(fault=reason), error
    raised.__cause__ = error
    return combine.Score(fault=reason), raised


# ------------------------------------------------------------ before the spawn


def _check_portable(function: Callable[..., Any]) -> None:
  reason = ""
  try:
    pickle.dumps(function)
  except _UNPICKLABLE as error:
    reason = combine.one_line(str(error))
  main = sys.modules["__main__"]
  if any(f.__module__ == "__main__" for f in _leaves(function)) and not hasattr(
    main, "__file__"
  ):
    reason = "it was typed in, and is in no file"
  if reason:
    raise types.InputError(
      "rewards.functions: expected functions that another process can load, got"
      f" {function!r} ({reason}). Define it at the top level of a file."
    )


def _leaves(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
  """Yields the functions that a partial is made of, or the one given."""
  if not isinstance(function, functools.partial):
    yield function
    return
  for inner in (function.func, *function.args, *function.keywords.values()):
    if callable(inner):
      yield from _leaves(inner)


def _modules(
  functions: Sequence[Callable[..., Any]],
) -> tuple[tuple[str, str], ...]:
  """Names the modules of functions, with their files."""
  found: dict[str, str] = {}
  for function in functions:
    for leaf in _leaves(function):
      name = leaf.__module__
      file = getattr(sys.modules.get(name), "__file__", None)
      if file is not None and name != "__main__":  # spawn brings that one along
        found[name] = os.path.abspath(file)
  return tuple(found.items())


# -------------------------------------------------------------- in the workers

# What a worker was started with; the only state it has.
_functions: list[types.Reward] = []
_everyone: list[Any] = []


def _start_worker(
  modules: tuple[tuple[str, str], ...], functions: bytes, everyone: Any
) -> None:
  """Imports the functions; pebble has made the worker deaf to Ctrl-C."""
  jax.config.update("jax_platforms", "cpu")
  threading.Thread(target=_end_with_parent, daemon=True).start()
  for name, file in modules:
    _load(name, file)
  _functions[:] = pickle.loads(functions)
  _everyone[:] = [everyone]


def _end_with_parent() -> None:
  """Ends this process when the one that started it is gone, even killed."""
  parent = multiprocessing.parent_process()
  assert parent is not None, "a worker was spawned"
  multiprocessing.connection.wait([parent.sentinel])
  os._exit(1)


def _load(name: str, file: str) -> None:
  """Imports a module by name, or from its file if that name means another."""
  try:
    spec = importlib.util.find_spec(name)
  except ModuleNotFoundError:  # a dotted name without its package
    spec = None
  if spec is not None and spec.origin == file:
    importlib.import_module(name)
    return
  spec = importlib.util.spec_from_file_location(name, file)
  assert spec is not None and spec.loader is not None, f"{file} was imported"
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)


def _ping() -> int:
  """Waits until every worker is here; returns the peak memory in bytes."""
  _everyone[0].wait(START_S)
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _call(index: int, name: str, payload: bytes) -> combine.Score:
  with _Portable():
    rollout = pickle.loads(payload)
    value = _functions[index](rollout, rollout.prompt.reference)
    return combine.read(name, value)


def _call_all(
  names: tuple[str, ...], payloads: Sequence[bytes]
) -> list[list[combine.Score]]:
  return [
    [_call(index, name, payload) for index, name in enumerate(names)]
    for payload in payloads
  ]


class _Portable:
  """Replaces exceptions that the parent may not be able to rebuild.

  An exception that fails to unpickle there would take the whole pool down, and
  a SystemExit would end the wrong process.
  """

  def __enter__(self) -> None:
    return

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    if kind is None or error is None:
      return
    is_known = kind.__module__ in {"builtins", types.__name__}
    is_plain = all(isinstance(a, _PLAIN) for a in error.args)
    if isinstance(error, Exception) and is_known and is_plain:
      return
    raise types.RunError(f"{kind.__name__}: {error}") from error
