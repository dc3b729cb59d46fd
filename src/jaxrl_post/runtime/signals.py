"""SIGTERM and Ctrl-C: the first asks a run to stop, the second ends it.

Python runs the handler of a signal in the main thread, between two of its own
instructions: not while that thread compiles or waits for a device. Here a
thread of its own listens, and acts at once.
"""

import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Callable

from jaxrl_post.runtime import hosts as hosts_lib

# Python's process that removes the semaphores of one that ended at once warns
# of them; it takes its filters from here.
_QUIET = "ignore:resource_tracker:UserWarning"

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


def listen(heard: Callable[[str], None]) -> None:
  """Has SIGTERM and Ctrl-C call a function, from now to the process's end.

  To be called in the main thread, once.

  Args:
    heard: gets "SIGTERM" or "Ctrl-C", on a thread of its own.
  """
  sys.warnoptions.append(_QUIET)
  reader, writer = socket.socketpair()
  writer.setblocking(False)
  signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
  threading.Thread(
    target=_listen, args=(reader, heard), name="signals", daemon=True
  ).start()
  take()


def take() -> None:
  """Takes both signals back from a library that has taken them meanwhile."""
  for number in NAMES:
    # A handler of Python's must be there, or nothing is heard.
    signal.signal(number, lambda *_: None)


def _listen(reader: socket.socket, heard: Callable[[str], None]) -> None:
  while data := reader.recv(1):
    if data[0] in NAMES:
      heard(NAMES[signal.Signals(data[0])])


class Stopper:
  """What the signals do to this process.

  Attributes:
    hosts: the processes of the run, once they are known.
  """

  def __init__(self, advice: str, work: str = "this step") -> None:
    """Prepares for the first signal.

    Args:
      advice: ends the line that is printed when the process ends at once.
      work: what is finished before a run stops.
    """
    self._work = work
    self.hosts: hosts_lib.Hosts | None = None
    self._advice = advice
    self._asked = False

  def heard(self, name: str) -> None:
    """Asks the run to stop, the first time; ends the process otherwise.

    A run that has not begun to train is ended the first time, too: it has
    nothing to save, and may compile for long.

    Args:
      name: of the signal.
    """
    first, self._asked = not self._asked, True
    hosts = self.hosts
    if first and hosts is not None and hosts.heeds_stop:
      hosts.stopping = hosts.stopping or name
      _say(f"stopping after {self._work}; once more to exit now")
      return
    # They would see that this one is gone, but late, or stuck in C not at all.
    for child in _descendants(os.getpid()):
      with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    line = f"ended at once by {name}{self._advice}"
    if hosts is None:
      _say(line)
      os._exit(1)
    hosts.end(f"process {hosts.index} was ended by {name}", line)


def _say(text: str) -> None:
  # A terminal that is gone must not keep the process from its end.
  with contextlib.suppress(OSError, ValueError):
    print(text, file=sys.stderr, flush=True)


def _descendants(pid: int) -> list[int]:
  """Returns what a process has started, and what those have; on Linux."""
  parents = {}
  for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):  # It has ended meanwhile.
      after_name = file.read_text().rpartition(")")[2].split()
      parents[int(file.parent.name)] = int(after_name[1])
  found, new = [], [pid]
  while new:
    new = [child for child, parent in parents.items() if parent in new]
    found += new
  return found
