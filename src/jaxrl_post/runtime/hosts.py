"""The processes of a run: how they find each other, talk, and end together.

Process 0 is the head; the others each hold one connection to it. Whoever is
lost, silent, stuck or fails ends all of them, with its name and the reason:
a process that is left alone in a collective would wait for ever.
"""

import contextlib
import dataclasses
import os
import pickle
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import jax
from jax._src import distributed  # its key-value store has no public name

from jaxrl_post import types
from jaxrl_post.runtime import links as links_lib

_T = TypeVar("_T")

_QUIET_S = 10.0  # of waiting for the others, before it is said
LEAVE_S = 60.0  # for all processes to be done
# A process that has not compiled its programs yet may be this late, seconds.
COLD_S = 1800.0

# Kinds of messages that are for this module.
_BEAT, _AT, _FAIL, _BYE, _SHARE = "beat", "at", "fail", "bye", "share"


@dataclasses.dataclass(frozen=True)
class Launch:
  """How this process finds the others.

  Attributes:
    coordinator: HOST:PORT of process 0; None lets JAX ask the launcher, as it
      does the other two.
    num_processes: how many there are.
    process_id: which of them this one is.
  """

  coordinator: str | None = None
  num_processes: int | None = None
  process_id: int | None = None

  def __post_init__(self) -> None:
    given = (self.coordinator, self.num_processes, self.process_id)
    if None in given:
      if given != (None, None, None):
        raise types.InputError(
          "--coordinator, --num_processes, --process_id: expected all three "
          f"or none, got {given}. Give the missing ones."
        )
      return
    assert self.num_processes is not None
    assert self.process_id is not None
    if self.num_processes < 1:
      raise types.InputError(
        f"--num_processes: expected at least 1, got {self.num_processes}. "
        "Count this one, too."
      )
    if not 0 <= self.process_id < self.num_processes:
      raise types.InputError(
        f"--process_id: expected 0 to {self.num_processes - 1} of "
        f"{self.num_processes} processes, got {self.process_id}. Number them "
        "from 0."
      )
    host, _, port = str(self.coordinator).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
      raise types.InputError(
        f"--coordinator: expected HOST:PORT, got {self.coordinator!r}. Name "
        "the host of process 0 and a free port of it."
      )


def launcher(environ: Mapping[str, str]) -> str:
  """Names the launcher that started this process as one of several.

  Args:
    environ: the process's environment.

  Returns:
    "SLURM", "Open MPI" or "TPU pod" where its variables tell of two or more
    processes; otherwise "".
  """
  slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
  tasks = _number(environ, "SLURM_NTASKS")
  if tasks > 1 and all(name in environ for name in slurm):
    return "SLURM"
  if _number(environ, "OMPI_COMM_WORLD_SIZE") > 1:
    return "Open MPI"
  slices = _number(environ, "MEGASCALE_NUM_SLICES")
  if slices > 1 or "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
    return "TPU pod"
  return ""


def _number(environ: Mapping[str, str], name: str) -> int:
  text = environ.get(name, "")
  return int(text) if text.isdecimal() else 0


class Hosts:
  """All processes of a run, seen from one of them; alone without arguments.

  Attributes:
    index: of this process.
    count: of all processes.
    stopping: what asked one of them to stop; "" for nothing. Set it to ask for
      it: the head learns of it within a second.
    heeds_stop: whether this process looks at it; the loop says so.
  """

  def __init__(
    self,
    index: int = 0,
    links: "Mapping[int, links_lib.Link] | None" = None,
    *,
    count: int = 1,
    silence_s: float = 20.0,
  ) -> None:
    """Begins to listen to the others.

    Args:
      index: of this process.
      links: connections by index of the other process: of the head to all, of
        the others to the head.
      count: processes.
      silence_s: longest silence of another process, in seconds; and how long
        one may stay behind the others.
    """
    self.index, self.count = index, count
    self._links = dict(links or {})
    self._silence_s, self._beat_s = silence_s, min(1.0, silence_s / 4)
    self._shared: queue.Queue[Any] = queue.Queue()
    self._lock = threading.Lock()
    self._handlers: dict[str, Callable[[int, Any], None]] = {}
    self._early: list[tuple[int, str, Any]] = []
    self._places = {i: _Place() for i in range(count)}
    self._byes: set[int] = set()
    self._gone = threading.Condition()
    self._ending = threading.Event()
    self.stopping, self.heeds_stop = "", False
    for number, link in self._links.items():
      for work in (self._read, self._beat):
        name = f"{work.__name__}-{number}"
        threading.Thread(
          target=work, args=(number, link), name=name, daemon=True
        ).start()
    if self.is_head and self._links:
      threading.Thread(target=self._watch, name="watch", daemon=True).start()

  @property
  def is_head(self) -> bool:
    """Whether this process has the ledger, the rewards and the log."""
    return self.index == 0

  def __enter__(self) -> Self:
    """Does nothing; the end of the block is what counts."""
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    _: Any,
  ) -> None:
    """Leaves together with the others; after an error ends all of them.

    Raises:
      RunError: the others did not come to their end.
    """
    self.on_error(kind, error)
    if self.count > 1:
      self._leave()

  def on_error(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    *_: Any,
  ) -> None:
    """Ends all processes if there is an error.

    For `ExitStack.push`, innermost: whoever cleans up first might wait for the
    others, while they wait for this process.
    """
    del kind
    if self.count > 1 and error is not None:
      self._fail(error)

  def share(
    self, make: Callable[[], _T], send: Callable[[_T], _T] = lambda x: x
  ) -> _T:
    """Gives all processes a value of the head. Every process calls it.

    Args:
      make: called by the head only.
      send: what of the value goes to the others; it can be pickled.

    Returns:
      The value at the head, elsewhere what was sent. Who waits is ended if
      the head is.
    """
    if not self.is_head:
      return self._shared.get()
    value = make()
    if self._links:
      self.tell(_SHARE, send(value))
    return value

  def tell(self, kind: str, value: Any, to: int | None = None) -> None:
    """Sends a message: to one process, or to all that are connected.

    Args:
      kind: which handler of the other process gets it.
      value: can be pickled.
      to: index; None for all.
    """
    data = pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL)
    for number, link in self._links.items():
      if to in (None, number):
        link.send(data)

  def on(self, kind: str, handler: Callable[[int, Any], None]) -> None:
    """Calls `handler(index, value)` for each message, early ones included.

    It runs on the thread that reads the connection, so it must be quick.
    """
    with self._lock:
      self._handlers[kind] = handler
      early = [m for m in self._early if m[1] == kind]
      self._early = [m for m in self._early if m[1] != kind]
      for number, _, value in early:
        handler(number, value)

  def at(self, place: str, limit_s: float | None = None) -> None:
    """Notes how far this process is. All processes pass the same places.

    Args:
      place: what comes next, for a message.
      limit_s: how long this process may stay here once another one has left,
        in seconds; None for `silence_s`.
    """
    limit_s = self._silence_s if limit_s is None else limit_s
    self._arrived(self.index, (place, limit_s))
    if not self.is_head:
      self.tell(_AT, (place, limit_s))

  def _read(self, number: int, link: "links_lib.Link") -> None:
    try:
      while True:
        kind, value = pickle.loads(link.receive())
        self._take(number, kind, value)
    except OSError as error:
      if number not in self._byes:
        self.end(f"{link.name} was lost: {error}")

  def _take(self, number: int, kind: str, value: Any) -> None:
    if kind == _FAIL:
      reason, code = value
      self.end(reason, code=code)
    elif kind == _AT:
      self._arrived(number, value)
    elif kind == _SHARE:
      self._shared.put(value)
    elif kind == _BYE:
      with self._gone:
        self._byes.add(number)
        self._gone.notify_all()
    elif kind == _BEAT:
      self.stopping = self.stopping or value
    else:
      with self._lock:
        handler = self._handlers.get(kind)
        if handler is None:
          self._early.append((number, kind, value))
          return
      try:
        handler(number, value)
      except BaseException as error:
        self._fail(error)  # Nobody else would ever hear of it.

  def _beat(self, number: int, link: "links_lib.Link") -> None:
    """Says that this process lives, and listens whether the other does."""
    while not self._ending.wait(self._beat_s):
      with contextlib.suppress(OSError):  # The reader has the reason.
        if not link.busy:
          link.send(pickle.dumps((_BEAT, self.stopping)))
      silent = time.monotonic() - link.heard
      if silent > self._silence_s and number not in self._byes:
        self.end(
          f"{link.name} was silent for {silent:.0f} s "
          f"(placement.peer_timeout_s={self._silence_s:g})"
        )

  def _arrived(self, number: int, value: tuple[str, float]) -> None:
    place, limit_s = value
    with self._lock:
      old = self._places[number]
      self._places[number] = _Place(place, old.count + 1, limit_s)

  def _watch(self) -> None:
    """Looks for a process that stays behind."""
    while not self._ending.wait(self._beat_s):
      with self._lock:
        places = dict(self._places)
      most = max(p.count for p in places.values())
      left = [p.since for p in places.values() if p.count == most]
      for number, place in places.items():
        waited = time.monotonic() - min(left)
        behind = place.count < most and waited > place.limit_s
        if behind and not self._is_silent(number):
          self.end(
            f"{self._name(number)} is stuck in {place.name!r}: another one "
            f"left it {waited:.0f} s ago (placement.peer_timeout_s)"
          )

  def _is_silent(self, number: int) -> bool:
    """Whether beats are missing; `_beat` then says so, which is more."""
    link = self._links.get(number)
    late_s = 3 * self._beat_s
    return link is not None and time.monotonic() - link.heard > late_s

  def _name(self, number: int) -> str:
    if number == self.index:
      return f"process {number} of {self.count} (this one)"
    return self._links[number].name

  def _leave(self) -> None:
    """Waits until all are done, so that nobody's end looks like a loss."""
    if self.is_head:
      self._await_byes()
      self.tell(_BYE, None)
    else:
      self.tell(_BYE, None)
      self._await_byes()
    self._ending.set()

  def _await_byes(self) -> None:
    # The head has the last checkpoint to complete.
    limit_s = LEAVE_S if self.is_head else COLD_S
    with self._gone:
      done = self._gone.wait_for(
        lambda: self._byes >= self._links.keys(), limit_s
      )
    if not done:
      late = ", ".join(
        self._links[i].name for i in sorted(self._links.keys() - self._byes)
      )
      self.end(f"{late} did not end within {limit_s:g} s of the others")

  def _fail(self, error: BaseException) -> None:
    """Tells the others why this process ends, and ends it."""
    if not isinstance(error, types.InputError | KeyboardInterrupt):
      # A collective fails as soon as a peer is gone, and with it whatever needs
      # one, as a checkpoint; who is gone is known a moment later, and says
      # more.
      self._ending.wait(3.0)
    first = (str(error).splitlines() or [""])[0]
    me = f"process {self.index} of {self.count} ({links_lib.me()})"
    if isinstance(error, types.InputError):
      self.end(f"{me} failed: {first}", f"error: {error}", code=2)
    elif isinstance(error, KeyboardInterrupt):
      self.end(f"{me} was interrupted")
    else:
      traceback.print_exception(error)
      self.end(f"{me} failed: {type(error).__name__}: {first}")

  def end(self, reason: str, line: str = "", code: int = 1) -> None:
    """Ends this process at once; the head ends all others with it.

    Args:
      reason: for the others.
      line: what is printed here; "" makes one of the reason.
      code: exit code of all; 2 is an input that was wrong.
    """
    with self._lock:
      first = not self._ending.is_set()
      self._ending.set()
    if not first:
      # Another thread is about to end the process.
      threading.Event().wait(LEAVE_S)
    data = pickle.dumps((_FAIL, (reason, code)))
    for link in self._links.values():
      with contextlib.suppress(OSError):
        link.last_words(data)
    advice = "; started again, they continue from the newest checkpoint, if any"
    if code == 2:
      advice = ""  # It would fail again.
    line = line or f"error: {reason}. All processes end{advice}."
    with contextlib.suppress(OSError, ValueError):  # The terminal is gone.
      print(line, file=sys.stderr)
      sys.stdout.flush()
      sys.stderr.flush()
    # Nothing gentler: threads of this process may wait in a collective for
    # ever, and so would the clean-up of JAX.
    os._exit(code)


@dataclasses.dataclass(frozen=True)
class _Place:
  """How far a process is, and since when."""

  name: str = "the start"
  count: int = 0
  limit_s: float = COLD_S
  since: float = dataclasses.field(default_factory=time.monotonic)


# ---------------------------------------------------------------------- start


def start(launch: Launch, silence_s: float) -> Hosts:
  """Joins the other processes; no device is touched.

  Args:
    launch: how to find them.
    silence_s: see `Hosts`.

  Returns:
    All processes; `jax.distributed` is initialized. If not all of them come
    within five minutes, this process ends with one line and exit code 1.

  Raises:
    InputError: somebody uses the coordinator's port.
    RunError: JAX or the launcher refuses.
  """
  _check_port(launch)
  address = launch.coordinator or "the address of the launcher"
  rule = (
    f"--coordinator: expected all processes at {address} within "
    f"{links_lib.START_S:g} s"
  )
  # JAX would abort, with a stack of C++ and no word of what is missing.
  late = threading.Timer(links_lib.START_S, _give_up, [rule])
  patience = f"waiting for the others at {address}, {links_lib.START_S:g} s"
  to = {"file": sys.stderr, "flush": True}
  waiting = threading.Timer(_QUIET_S, print, [patience], to)
  for timer in (late, waiting):
    timer.daemon = True
    timer.start()
  try:
    jax.distributed.initialize(
      launch.coordinator,
      launch.num_processes,
      launch.process_id,
      # With all three given there is nothing to detect; under SLURM, JAX would
      # take one device a process for itself.
      cluster_detection_method="deactivate" if launch.coordinator else None,
      initialization_timeout=int(2 * links_lib.START_S),
      shutdown_timeout_seconds=int(LEAVE_S),
    )
  except (RuntimeError, ValueError) as error:
    raise types.RunError(f"{rule}, got: {error}") from error
  finally:
    late.cancel()
    waiting.cancel()
  world = distributed.global_state
  # JAX leaves these unset until it is initialized.
  client: Any = world.client
  count, address = int(world.num_processes), str(world.coordinator_address)
  if count == 1:
    return Hosts()
  if world.process_id == 0:
    links = links_lib.listen(client, count)
  else:
    links = {0: links_lib.connect(client, world.process_id, count, address)}
  return Hosts(world.process_id, links, count=count, silence_s=silence_s)


def _check_port(launch: Launch) -> None:
  """Refuses a port that somebody listens on; JAX would crash on it."""
  if launch.process_id != 0 or launch.coordinator is None:
    return
  port = int(launch.coordinator.rpartition(":")[2])
  try:
    socket.create_server(("", port)).close()
  except OSError as error:
    raise types.InputError(
      f"--coordinator: expected a port that nobody uses here, got {port} "
      f"({error.strerror}). Choose another, or wait for the run that has it."
    ) from error


def _give_up(rule: str) -> None:
  print(
    f"error: {rule}, got no answer of all. Look whether each was started, with "
    "this address and a --process_id of its own, and can reach it.",
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)
