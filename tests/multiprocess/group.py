"""Starts the processes of one run on loopback, and ends them for certain."""

import concurrent.futures
import contextlib
import pathlib
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence

from tests.e2e import runs

DEVICES = 8
_DEADLINE_S = 120.0


@contextlib.contextmanager
def started(
  count: int, cwd: pathlib.Path, *args: str, more: Sequence[str] = ()
) -> Iterator[list[subprocess.Popen]]:
  """Starts the program `count` times, with eight devices in all.

  One process gets no word of others; the last gets `more` arguments. All are
  killed at the end: what waits in a collective does not listen to anything
  gentler.
  """
  devices = f"--set=placement.cpu_devices={DEVICES // count}"
  with contextlib.ExitStack() as stack:
    launches = _launches(count)
    launches[-1] += more
    yield [
      stack.enter_context(runs.started(cwd, *args, devices, *flags))
      for flags in launches
    ]


def _launches(count: int) -> list[list[str]]:
  if count == 1:
    return [[]]
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  return [
    [
      f"--coordinator=127.0.0.1:{port}",
      f"--num_processes={count}",
      f"--process_id={number}",
    ]
    for number in range(count)
  ]


def ended(
  processes: Sequence[subprocess.Popen],
) -> list[runs.Outcome]:
  """Waits for all of them at once, so that each end has its own time."""
  with concurrent.futures.ThreadPoolExecutor(len(processes)) as workers:
    return list(workers.map(runs.ended, processes))


def run(count: int, cwd: pathlib.Path, *args: str) -> list[runs.Outcome]:
  """Runs the program in `count` processes to their end."""
  with started(count, cwd, *args) as processes:
    return ended(processes)


def read_plan(head: subprocess.Popen) -> None:
  """Waits until the head says where the run is: all have found each other."""
  assert head.stdout is not None
  watchdog = threading.Timer(_DEADLINE_S, head.kill)
  watchdog.start()
  try:
    found = any(line.startswith("run folder:") for line in head.stdout)
  finally:
    watchdog.cancel()
  assert found, "the head ended before it had a run folder"
