"""Runs a program that nobody has read, in a process of its own.

What a program can do, with `isolation="seccomp"` (Linux on x86_64 and aarch64,
no rights needed): compute, read files, start threads, print. The kernel refuses
it sockets, new processes, every change of a file, signals to other processes,
and root's rights; limits bound its time, memory, open files and output; and it
dies with whoever started it. It can read what its user can read, and may not
tell anybody but by what it prints.

With `isolation="limits"` (other systems) only the limits hold, and its process
group is killed at the end: it can reach networks, change files of its user, and
leave a process behind in a session of its own. That is for programs that one
would run by hand.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxrl_post import types

# Seconds for Python to start and confine itself; the program's begin after.
START_S = 30.0
_SCRIPT = pathlib.Path(__file__).with_name("inside.py")
_CHUNK = 1 << 16
# Bytes about tests that passed; more is no word of ours.
_MOST_TOLD = 1 << 20


@types.host_record
class Result:
  """What became of a program.

  Attributes:
    status: "done" when it ended by itself with exit code 0, "raised" with
      another one, "killed" by a signal (a crash; its limit of CPU time),
      "timeout" after `timeout_s`, "output" for more than `output_kb`.
    stdout: what it printed, at most `output_kb`.
    stderr: likewise; together they are no longer.
    seconds: from when it was confined to its end.
    passed: for each test whether it passed.
  """

  status: Literal["done", "raised", "killed", "timeout", "output"]
  stdout: str
  stderr: str
  seconds: float
  passed: tuple[bool, ...]


@dataclasses.dataclass
class _Heard:
  """What has been read of a program."""

  out: bytearray = dataclasses.field(default_factory=bytearray)
  err: bytearray = dataclasses.field(default_factory=bytearray)
  told: bytearray = dataclasses.field(default_factory=bytearray)
  began: float = math.nan
  verdict: Literal["", "timeout", "output"] = ""


def run(
  program: str,
  *,
  stdin: str = "",
  tests: Sequence[str] = (),
  timeout_s: float = 5.0,
  memory_mb: int = 512,
  output_kb: int = 64,
  isolation: Literal["seccomp", "limits"] = "seccomp",
) -> Result:
  """Runs a program to its end, or to its limits; leaves no process behind.

  Args:
    program: Python, for this interpreter and its packages.
    stdin: what it reads.
    tests: statements to execute after it, each with the program's names; one
      passes if it does not raise. The program's `__name__` is then not
      `"__main__"`. They share its process: a program that wants to can find
      out how to pass. It cannot by ending early.
    timeout_s: longest time for program and tests together, in seconds; about
      the same of CPU time.
    memory_mb: most address space, in MiB.
    output_kb: most that it may print, in KiB.
    isolation: what holds it, see above.

  Returns:
    What became of it.

  Raises:
    types.InputError: this system has no such isolation, or a limit is none.
    types.RunError: the sandbox itself did not start.
  """
  for holds, name, rule, value in (
    (0 < timeout_s < math.inf, "timeout_s", "> 0 seconds", timeout_s),
    (memory_mb >= 1, "memory_mb", ">= 1 MiB", memory_mb),
    (output_kb >= 1, "output_kb", ">= 1 KiB", output_kb),
    (isolation in ("seccomp", "limits"), "isolation", "a known one", isolation),
  ):
    if not holds:
      raise types.InputError(
        f"sandbox.{name}: expected {rule}, got {value!r}. Correct the value."
      )
  if isolation == "seccomp" and sys.platform != "linux":
    raise types.InputError(_refused(f"none on {sys.platform}"))
  nonce = secrets.token_hex(16)
  settings = {
    "program": program,
    "tests": list(tests),
    "cpu_s": math.ceil(timeout_s) + 1,
    "memory_mb": memory_mb,
    "isolation": isolation,
    "parent": os.getpid(),
    "nonce": nonce,
  }
  with contextlib.ExitStack() as stack:
    ours, theirs = socket.socketpair()
    stack.enter_context(ours)
    process = stack.enter_context(_started(stdin, theirs))
    heard = _listened(process, ours, json.dumps(settings), timeout_s, output_kb)
    ended = time.monotonic()
  if math.isnan(heard.began):
    _raise_not_started(heard)
  code = process.returncode
  status = heard.verdict or ("killed" if code < 0 else "raised")
  told = set(heard.told.decode(errors="replace").splitlines())
  return Result(
    status="done" if code == 0 and not heard.verdict else status,
    stdout=heard.out.decode(errors="replace"),
    stderr=heard.err.decode(errors="replace"),
    seconds=ended - heard.began,
    passed=tuple(f"{nonce} {index}" in told for index in range(len(tests))),
  )


@contextlib.contextmanager
def _started(
  stdin: str, channel: socket.socket
) -> Iterator[subprocess.Popen[bytes]]:
  """Starts Python in an empty folder; kills its process group at the end."""
  with (
    channel,
    tempfile.TemporaryFile() as given,
    tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
  ):
    given.write(stdin.encode(errors="surrogatepass"))
    given.seek(0)
    os.chmod(folder, 0o500)
    process = subprocess.Popen(
      [sys.executable, "-P", "-s", "-B", str(_SCRIPT), str(channel.fileno())],
      stdin=given,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      cwd=folder,
      # Sets print in one order; libraries start no thread a core.
      env={
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
      },
      pass_fds=(channel.fileno(),),
      start_new_session=True,
    )
    try:
      channel.close()
      yield process
    finally:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
      for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


def _listened(
  process: subprocess.Popen[bytes],
  channel: socket.socket,
  settings: str,
  timeout_s: float,
  output_kb: int,
) -> _Heard:
  """Sends the settings, and reads until the program ends or has to."""
  heard = _Heard()
  channel.settimeout(START_S)
  with contextlib.suppress(BrokenPipeError, ConnectionResetError):
    channel.sendall(settings.encode(errors="surrogatepass"))
    channel.shutdown(socket.SHUT_WR)
  deadline = time.monotonic() + START_S
  with selectors.DefaultSelector() as selector:
    outputs = ((process.stdout, heard.out), (process.stderr, heard.err))
    for source, buffer in (*outputs, (channel, heard.told)):
      assert source is not None
      selector.register(source, selectors.EVENT_READ, buffer)
    while selector.get_map():
      left = deadline - time.monotonic()
      if left <= 0:
        heard.verdict = "timeout"
        return heard
      for key, _ in selector.select(left):
        _read(selector, key)
      if math.isnan(heard.began) and heard.told.startswith(b"ready\n"):
        heard.began = time.monotonic()
        deadline = heard.began + timeout_s
      printed = len(heard.out) + len(heard.err)
      if printed > output_kb * 1024 or len(heard.told) > _MOST_TOLD:
        heard.verdict = "output"
        _cut(heard, output_kb * 1024)
        return heard
  # It may have closed all of these, and go on.
  try:
    process.wait(max(0.0, deadline - time.monotonic()))
  except subprocess.TimeoutExpired:
    heard.verdict = "timeout"
  return heard


def _read(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
  try:
    data = os.read(key.fd, _CHUNK)
  except ConnectionResetError:  # It ended before it had read its settings.
    data = b""
  key.data.extend(data)
  if not data:
    selector.unregister(key.fileobj)


def _cut(heard: _Heard, most: int) -> None:
  del heard.out[most:]
  del heard.err[most - len(heard.out) :]


def _raise_not_started(heard: _Heard) -> None:
  told = heard.told.decode(errors="replace")
  if told.startswith("refused "):
    raise types.InputError(_refused(told.removeprefix("refused ").strip()))
  words = heard.err.decode(errors="replace").split("\n")
  last = next((line for line in reversed(words) if line.strip()), "nothing")
  raise types.RunError(
    f"sandbox: expected Python to start within {START_S:g} s, got {last}"
  )


def _refused(got: str) -> str:
  return (
    f"sandbox.isolation: expected seccomp filters, got {got}. Use Linux on "
    "x86_64 or aarch64, or isolation='limits' for programs that are trusted."
  )
