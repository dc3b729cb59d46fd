"""What a worker of the pool is started with, and what runs in it.

Workers are spawned. Nothing here is called in the process of the run but what
stands before the spawn.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from jaxrl_post import types
from jaxrl_post.rewards import combine, protocol

# Seconds for all workers to import what they need.
START_S = 120.0
# Bytes a call may print; what is more is counted, and said.
MAX_OUTPUT = 64 * 1024
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)

_PLAIN = (str, bytes, int, float, type(None))
# Letters of an exception's message that travel.
_MAX_MESSAGE = 2000

# ------------------------------------------------------------ before the spawn


def check_portable(function: Callable[..., Any]) -> None:
  """Refuses a function that a worker could not load, or not call.

  Raises:
    types.InputError: it is not at the top level of a module or file, or its
      settings are wrong, see `protocol.checked`.
  """
  protocol.check_settings(function)
  reason = ""
  try:
    pickle.dumps(function)
  except UNPICKLABLE as error:
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


def modules(
  functions: Sequence[Callable[..., Any]],
) -> tuple[tuple[str, str], ...]:
  """Returns the modules of functions, each with its file."""
  found: dict[str, str] = {}
  for function in functions:
    for leaf in _leaves(function):
      name = leaf.__module__
      file = getattr(sys.modules.get(name), "__file__", None)
      if file is not None and name != "__main__":  # spawn brings that one along
        found[name] = os.path.abspath(file)
  return tuple(found.items())


def _leaves(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
  """Yields the functions that a partial is made of, or the one given."""
  if not isinstance(function, functools.partial):
    yield function
    return
  for inner in (function.func, *function.args, *function.keywords.values()):
    if callable(inner):
      yield from _leaves(inner)


# -------------------------------------------------------------- in the workers

# What a worker was started with, and what its call may still print; the only
# state it has.
_functions: list[protocol.Reward] = []
_everyone: list[Any] = []
_output = {"left": MAX_OUTPUT, "lost": 0, "told": 2}


def start(
  named: tuple[tuple[str, str], ...],
  functions: bytes,
  everyone: Any,
  memory_mb: int | None,
) -> None:
  """Imports the functions; pebble has made the worker deaf to Ctrl-C.

  Args:
    named: modules and their files, as `modules` has them.
    functions: pickled.
    everyone: a barrier of all workers.
    memory_mb: address space that calls may add to what there is then, in MiB.
  """
  jax.config.update("jax_platforms", "cpu")
  threading.Thread(target=_end_with_parent, daemon=True).start()
  for name, file in named:
    _load(name, file)
  _functions[:] = pickle.loads(functions)
  _everyone[:] = [everyone]
  _cap_output()
  if memory_mb is not None:
    with open("/proc/self/statm", encoding="ascii") as file:
      pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def ping() -> int:
  """Waits until every worker is here; returns the peak memory in bytes."""
  _everyone[0].wait(START_S)
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def call(index: int, name: str, payload: bytes) -> combine.Score:
  """Asks one function about one rollout.

  Args:
    index: of the function.
    name: of the function.
    payload: the rollout, pickled.

  Returns:
    What it said.

  Raises:
    Exception: what it raised, as an exception that the parent can rebuild.
  """
  with _Portable(), _Printing():
    rollout = pickle.loads(payload)
    return combine.read(name, _one(_functions[index], rollout))


def call_all(
  names: tuple[str, ...], payloads: Sequence[bytes], limit_s: float
) -> list[list[combine.Score | None]]:
  """Asks every function about several rollouts.

  Args:
    names: of the functions.
    payloads: the rollouts, pickled.
    limit_s: longest wait for one rollout of an async function, in seconds.

  Returns:
    For each rollout one score a function; None where that failed, so that the
    function is to be asked again about this rollout alone.
  """
  with _Printing():
    rollouts = [pickle.loads(payload) for payload in payloads]
    columns = [
      _column(function, name, rollouts, limit_s)
      for function, name in zip(_functions, names, strict=True)
    ]
  return [list(row) for row in zip(*columns, strict=True)]


def _one(function: protocol.Reward, rollout: types.Rollout) -> Any:
  reference = rollout.prompt.reference
  if not protocol.is_batched(function):
    return _waited(function(rollout, reference))
  asked: Any = function
  return listed(_waited(asked([rollout], [reference])), 1)[0]


def _column(
  function: protocol.Reward,
  name: str,
  rollouts: Sequence[types.Rollout],
  limit_s: float,
) -> list[combine.Score | None]:
  asked: Any = function
  references = [rollout.prompt.reference for rollout in rollouts]
  try:
    if protocol.is_batched(function):
      values = listed(_waited(asked(rollouts, references)), len(rollouts))
    else:
      values = [
        _tried(asked, rollout, reference)
        for rollout, reference in zip(rollouts, references, strict=True)
      ]
      if any(inspect.isawaitable(value) for value in values):
        values = asyncio.run(_gathered(values, limit_s))
    scores = [
      None if isinstance(value, BaseException) else combine.read(name, value)
      for value in values
    ]
  except BaseException:  # Each is asked again alone, and is told of there.
    return [None] * len(rollouts)
  return [None if score is None or score.fault else score for score in scores]


def _tried(function: Callable[..., Any], *args: Any) -> Any:
  try:
    return function(*args)
  except BaseException as error:  # Asked again alone, and is told of there.
    return error


async def _gathered(values: Sequence[Any], limit_s: float) -> list[Any]:
  """Waits for what is to be waited for, all at the same time."""
  threads = concurrent.futures.ThreadPoolExecutor(len(values))
  asyncio.get_running_loop().set_default_executor(threads)
  waiting = {
    place: asyncio.ensure_future(value)
    for place, value in enumerate(values)
    if inspect.isawaitable(value)
  }
  done = await asyncio.gather(
    *(asyncio.wait_for(value, limit_s) for value in waiting.values()),
    return_exceptions=True,
  )
  found = dict(zip(waiting, done, strict=True))
  return [found.get(place, value) for place, value in enumerate(values)]


def _waited(value: Any) -> Any:
  async def wait() -> Any:
    return await value

  return asyncio.run(wait()) if inspect.isawaitable(value) else value


def listed(values: Any, number: int) -> list[Any]:
  """Returns what a batched function gave as a list.

  Raises:
    types.RunError: it is none of so many rewards.
  """
  listed = hasattr(values, "__len__") and not isinstance(
    values, str | bytes | Mapping
  )
  if not listed or len(values) != number:
    got = f"{len(values)}" if listed else f"a {type(values).__name__}"
    raise types.RunError(f"expected {number} rewards in a list, got {got}")
  return list(values)


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


def _cap_output() -> None:
  """Puts a pipe between what this process prints and where that goes."""
  for descriptor in (1, 2):
    target, (source, end) = os.dup(descriptor), os.pipe()
    os.dup2(end, descriptor)
    os.close(end)
    threading.Thread(
      target=_forward, args=(source, target), daemon=True
    ).start()
  _output["told"] = target


def limit_output(most: int) -> None:
  """Lets the call under way print so many bytes, all of them to stderr."""
  with contextlib.suppress(OSError):  # a call has closed it
    os.dup2(2, 1)
  _output["left"] = min(_output["left"], most)


def _forward(source: int, target: int) -> None:
  while data := _read(source):
    kept = data[: _output["left"]]
    _output["left"] -= len(kept)
    _output["lost"] += len(data) - len(kept)
    _write(target, kept)


def _read(source: int) -> bytes:
  while True:
    with contextlib.suppress(MemoryError):  # a call's, which ends soon
      return os.read(source, MAX_OUTPUT)


def _write(target: int, data: bytes) -> None:
  try:
    while data:
      data = data[os.write(target, data) :]
  except OSError:  # Nobody reads it any more, and a reward goes on.
    return


class _Printing:
  """Lets a call print `MAX_OUTPUT` bytes, and tells how many it did not."""

  def __enter__(self) -> None:
    _output.update(left=MAX_OUTPUT, lost=0)

  def __exit__(self, *_: object) -> None:
    for stream in (sys.stdout, sys.stderr):
      if stream is not None and not stream.closed:
        stream.flush()
    if _output["lost"]:
      text = f"rewards: {_output['lost']} bytes that a call printed left out\n"
      _write(_output["told"], text.encode())


class _Portable:
  """Replaces exceptions that the parent may not be able to rebuild.

  An exception that fails to unpickle there would take the whole pool down, a
  SystemExit would end the wrong process, and a message may be of any size.
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
    is_plain = all(
      isinstance(a, _PLAIN)
      and (not isinstance(a, str | bytes) or len(a) <= _MAX_MESSAGE)
      for a in error.args
    )
    if isinstance(error, Exception) and is_known and is_plain:
      return
    text = f"{kind.__name__}: {str(error)[:_MAX_MESSAGE]}"
    raise types.RunError(text).with_traceback(trace) from None
