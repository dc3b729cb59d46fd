"""Programs in the sandbox; none of them is decent."""

import errno
import json
import os
import pathlib
import struct
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_post import types
from jaxrl_post.rewards import inside, sandbox


def test_a_program_reads_and_prints():
  made = sandbox.run("print(int(input()) * 2)", stdin="21\n")
  assert (made.status, made.stdout, made.stderr) == ("done", "42\n", "")
  assert 0 < made.seconds < 5 and made.passed == ()


def test_its_output_is_the_same_every_time():
  program = "print({'a', 'b', 'c', 'd', 'e', 'f'})"
  assert sandbox.run(program).stdout == sandbox.run(program).stdout


@pytest.mark.parametrize(
  ("program", "status", "said"),
  [
    ("raise ValueError('no')", "raised", "ValueError: no"),
    ("import sys; sys.exit(3)", "raised", ""),
    ("x = (", "raised", "SyntaxError"),
    ("import os; os.abort()", "killed", ""),
    ("x = 'x' * 10**9", "raised", "MemoryError"),
    ("def f(): f()\nf()", "raised", "RecursionError"),
    ("while True: print('x' * 1000)", "output", ""),
    ("import os\nwhile True: os.write(2, b'x' * 1000)", "output", "xxx"),
  ],
)
def test_a_program_that_fails_is_told_how(program, status, said):
  made = sandbox.run(program, timeout_s=20.0, memory_mb=300)
  assert made.status == status
  assert said in made.stderr
  assert len(made.stdout) + len(made.stderr) <= 64 * 1024


@pytest.mark.parametrize(
  "program",
  [
    "while True: pass",
    "import threading; threading.Event().wait()",
    "import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
    "while True: pass",
    "import os; os.closerange(0, 64)\nwhile True: pass",
  ],
)
def test_a_program_that_does_not_end_is_ended(program):
  began = time.monotonic()
  made = sandbox.run(program, timeout_s=0.3)
  assert made.status == "timeout"
  assert time.monotonic() - began < sandbox.START_S


# Each has to raise, with an error of this number.
REFUSED = {
  "a socket": ("import socket; socket.socket()", "EACCES"),
  "a local socket": (
    "import socket; socket.socket(socket.AF_UNIX)",
    "EACCES",
  ),
  "a datagram": (
    "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "EACCES",
  ),
  "living on": (
    "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
    "if c.prctl(1, 0): raise OSError(ctypes.get_errno(), '')",
    "EACCES",
  ),
  "a fork": ("import os; os.fork()", "EAGAIN"),
  "a shell": ("import subprocess; subprocess.run(['true'])", "EAGAIN"),
  "another program": (
    "import os, sys; os.execv(sys.executable, ['python'])",
    "EAGAIN",
  ),
  "a file here": ("open('x', 'w')", "EROFS"),
  "a file made longer": ("open('PLACE/kept', 'a')", "EROFS"),
  "a file elsewhere": ("import os; os.open('PLACE/x', os.O_CREAT)", "EROFS"),
  "a file gone": ("import os; os.unlink('PLACE/kept')", "EROFS"),
  "a file cut": ("import os; os.truncate('PLACE/kept', 0)", "EROFS"),
  "a file moved": (
    "import os; os.rename('PLACE/kept', 'PLACE/x')",
    "EROFS",
  ),
  "a folder": ("import os; os.mkdir('PLACE/x')", "EROFS"),
  "rights": ("import os; os.chmod('PLACE/kept', 0)", "EROFS"),
  "a signal to the run": ("import os; os.kill(os.getppid(), 9)", "EACCES"),
  "a signal to all": ("import os; os.kill(-1, 9)", "EACCES"),
  "limits of the run": (
    "import os, resource\n"
    "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (5, 5))",
    "EACCES",
  ),
  "a signal by a pipe": (
    "import fcntl, os\nr, w = os.pipe()\n"
    "fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())",
    "EACCES",
  ),
  "another signal by a pipe": (
    "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 10, 9)",
    "EACCES",
  ),
  "a signal by a stream": (
    "import fcntl, os, socket, struct\na, b = socket.socketpair()\n"
    "fcntl.ioctl(a, 0x8901, struct.pack('i', os.getppid()))",
    "EACCES",
  ),
  "a lock that others wait for": (
    "import fcntl\nfcntl.flock(open('PLACE/kept'), fcntl.LOCK_EX)",
    "EACCES",
  ),
  "cores of the run": (
    "import os\np = os.getppid()\n"
    "os.sched_setaffinity(p, os.sched_getaffinity(p))",
    "EACCES",
  ),
  "priority of the run": (
    "import os\np = os.getppid()\n"
    "os.setpriority(os.PRIO_PROCESS, p, os.getpriority(os.PRIO_PROCESS, p))",
    "EACCES",
  ),
  "schedule of the run": (
    "import os\np = os.getppid()\n"
    "os.sched_setscheduler(p, os.SCHED_OTHER, os.sched_param(0))",
    "EACCES",
  ),
  "memory of the run": (
    "import os; open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "EROFS",
  ),
  "a namespace": (
    "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
    "if c.unshare(0x10000000): raise OSError(ctypes.get_errno(), '')",
    "ENOSYS",
  ),
  "io_uring": (
    "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
    "if c.syscall(425, 8, 0) < 0: raise OSError(ctypes.get_errno(), '')",
    "ENOSYS",
  ),
}


TRY_ALL = """
import errno, json
for name, program in json.loads(input()).items():
  try:
    exec(program, {})
  except OSError as e:
    print(name, errno.errorcode[e.errno], sep=":")
  else:
    print(name, "it may", sep=":")
"""


@pytest.fixture(name="tried", scope="module")
def _tried(tmp_path_factory) -> tuple[dict[str, str], pathlib.Path]:
  """Tries all that is refused, in a folder with a file."""
  place = tmp_path_factory.mktemp("place")
  (place / "kept").write_text("kept")
  programs = {
    name: program.replace("PLACE", str(place))
    for name, (program, _) in REFUSED.items()
  }
  made = sandbox.run(TRY_ALL, stdin=json.dumps(programs), timeout_s=20.0)
  assert made.status == "done", made.stderr
  pairs = (line.partition(":") for line in made.stdout.splitlines())
  return {name: said for name, _, said in pairs}, place


@pytest.mark.parametrize("name", REFUSED)
def test_the_kernel_refuses(name, tried):
  said, place = tried
  assert said[name] == REFUSED[name][1]
  assert [p.read_text() for p in place.iterdir()] == ["kept"]


# What the filter sees of a call: its number, architecture, and arguments.
X86, ARM = 0xC000003E, 0xC00000B7
READ_ONLY, WRITE, CREATE = 0, 1, 0o100
FORK, THREAD = 17, 0x10000 | 0x100


@pytest.mark.parametrize(
  ("machine", "call", "answer"),
  [
    ("x86_64", (0, X86), "allow"),  # read
    ("x86_64", (0, ARM), "kill"),
    ("x86_64", (0x40000000, X86), "ENOSYS"),  # read, by x32
    ("x86_64", (441, X86), "ENOSYS"),
    ("x86_64", (41, X86), "EACCES"),  # socket
    ("x86_64", (2, X86, 0, READ_ONLY), "allow"),  # open
    ("x86_64", (2, X86, 0, CREATE), "EROFS"),
    ("x86_64", (257, X86, 0, 0, WRITE), "EROFS"),  # openat
    ("x86_64", (56, X86, FORK), "EAGAIN"),  # clone
    ("x86_64", (56, X86, THREAD), "allow"),
    ("x86_64", (72, X86, 0, 1030), "allow"),  # fcntl, F_DUPFD_CLOEXEC
    ("x86_64", (72, X86, 0, 8), "EACCES"),  # F_SETOWN
    ("x86_64", (72, X86, 0, 15), "EACCES"),  # F_SETOWN_EX
    ("x86_64", (72, X86, 0, 1026), "EACCES"),  # F_NOTIFY
    ("x86_64", (16, X86, 0, 0x5401), "allow"),  # ioctl, TCGETS
    ("x86_64", (16, X86, 0, 0x5451), "allow"),  # FIOCLEX, the last
    ("x86_64", (16, X86, 0, 0x5412), "EACCES"),  # TIOCSTI
    ("aarch64", (25, ARM, 0, 10), "EACCES"),  # fcntl, F_SETSIG
    ("aarch64", (25, ARM, 0, 4), "allow"),  # F_SETFL
    ("aarch64", (29, ARM, 0, 0x8902), "EACCES"),  # ioctl, SIOCSPGRP
    ("aarch64", (122, ARM), "EACCES"),  # sched_setaffinity
    ("aarch64", (63, ARM), "allow"),  # read
    ("aarch64", (63, X86), "kill"),
    ("aarch64", (198, ARM), "EACCES"),  # socket
    ("aarch64", (199, ARM, 1, 2), "EACCES"),  # socketpair of datagrams
    ("aarch64", (199, ARM, 1, 1), "allow"),
    ("aarch64", (35, ARM), "EROFS"),  # unlinkat
    ("aarch64", (56, ARM, 0, 0, READ_ONLY), "allow"),  # openat
    ("aarch64", (56, ARM, 0, 0, WRITE), "EROFS"),
    ("aarch64", (220, ARM, FORK), "EAGAIN"),  # clone
    ("aarch64", (220, ARM, THREAD), "allow"),
    ("aarch64", (221, ARM), "EAGAIN"),  # execve
    ("aarch64", (129, ARM, os.getpid()), "allow"),  # kill
    ("aarch64", (129, ARM, 1), "EACCES"),
    ("aarch64", (261, ARM, 1), "EACCES"),  # prlimit64
    ("aarch64", (435, ARM), "ENOSYS"),  # clone3
  ],
)
def test_the_filter_decides_by_number_and_argument(machine, call, answer):
  number, architecture, *arguments = call
  arguments += [0] * (6 - len(arguments))
  seen = struct.pack("IIQ6Q", number, architecture, 0, *arguments)
  steps = list(struct.iter_unpack("HBBI", inside._filter(machine)))
  word, place = 0, 0
  while steps[place][0] != inside._RETURN:
    kind, yes, no, value = steps[place]
    place += 1
    if kind == inside._LOAD:
      (word,) = struct.unpack_from("I", seen, value)
      continue
    holds = {
      inside._EQUAL: word == value,
      inside._MORE: word > value,
      inside._ANY_BIT: bool(word & value),
    }[kind]
    place += yes if holds else no
  verdict = steps[place][3]
  names = {inside._ALLOW: "allow", inside._KILL: "kill"}
  refused = errno.errorcode.get(verdict & 0xFFFF)
  assert names.get(verdict, refused) == answer


def test_another_machine_has_no_filter():
  with pytest.raises(OSError, match="no filter for riscv64"):
    inside._filter("riscv64")


def test_whoever_started_a_program_lives_on():
  # The kernel asks no more of whom a pipe signals than to have the same user.
  program = (
    "import fcntl, os\n"
    "def ask(*a):\n"
    "  try: fcntl.fcntl(*a)\n"
    "  except OSError: pass\n"
    "r, w = os.pipe()\n"
    "ask(r, fcntl.F_SETOWN, os.getppid())\n"
    "ask(r, 10, 9)\n"
    "ask(r, fcntl.F_SETFL, os.O_ASYNC)\n"
    "os.write(w, b'x')\n"
  )
  script = (
    "from jaxrl_post.rewards import sandbox\n"
    f"print(sandbox.run({program!r}, timeout_s=20.0).status, 'lives')\n"
  )
  source = str(pathlib.Path(sandbox.__file__).parents[2])
  made = subprocess.run(
    [sys.executable, "-c", script],
    env=os.environ | {"PYTHONPATH": source},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert (made.returncode, made.stdout) == (0, "done lives\n"), made.stderr


def test_what_a_program_may():
  made = sandbox.run(
    "import asyncio, os, threading, numpy\n"
    "asyncio.run(asyncio.sleep(0))\n"
    "seen = []\n"
    "t = threading.Thread(target=seen.append, args=(1,)); t.start(); t.join()\n"
    "print(seen, numpy.arange(3).sum(), os.listdir(), sorted(os.environ))\n"
    "print(open('/proc/self/status').read().split('CapEff:')[1].split()[0])\n"
    "os.kill(os.getpid(), 0)\n"
    "os.set_blocking(1, True); os.set_inheritable(os.dup(1), False)\n",
    memory_mb=1000,
  )
  assert made.status == "done", made.stderr
  first, rights = made.stdout.splitlines()
  assert first.startswith("[1] 3 [] ['HOME', 'LANG', ")
  assert "KEY" not in first
  assert int(rights, 16) == 0


def test_a_fork_bomb_makes_no_process():
  before = set(os.listdir("/proc"))
  made = sandbox.run(
    "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    timeout_s=0.5,
  )
  assert made.status == "timeout"
  born = {p for p in set(os.listdir("/proc")) - before if p.isdigit()}
  parents = {p: _parent(p) for p in born}
  assert str(os.getpid()) not in parents.values()


def _parent(process: str) -> str:
  try:
    text = pathlib.Path(f"/proc/{process}/stat").read_text()
  except OSError:
    return ""
  return text.rpartition(")")[2].split()[1]


def test_a_program_ends_with_the_one_who_started_it(tmp_path):
  script = (
    "from jaxrl_post.rewards import sandbox\n"
    "sandbox.run('import os\\nprint(os.getpid(), flush=True)\\nwhile 1: pass',"
    " timeout_s=60.0)\n"
  )
  reader, writer = os.pipe()
  child = os.posix_spawn(
    sys.executable,
    [sys.executable, "-c", script],
    os.environ | {"PYTHONPATH": str(pathlib.Path(sandbox.__file__).parents[2])},
    file_actions=[(os.POSIX_SPAWN_DUP2, writer, 9)],
  )
  os.close(writer)
  os.close(reader)
  deadline = time.monotonic() + 60
  found: list[str] = []
  while not found and time.monotonic() < deadline:
    found = [p for p in os.listdir("/proc") if _is_busy(p, child)]
    threading.Event().wait(0.05)
  assert found
  os.kill(child, 9)
  os.waitpid(child, 0)
  while _parent(found[0]) and time.monotonic() < deadline:
    if _state(found[0]) == "Z":
      break
    threading.Event().wait(0.05)
  assert _state(found[0]) in ("", "Z")


def _state(process: str) -> str:
  try:
    text = pathlib.Path(f"/proc/{process}/stat").read_text()
  except OSError:
    return ""
  return text.rpartition(")")[2].split()[0]


def _is_busy(process: str, parent: int) -> bool:
  """Says whether it is a child of `parent` that has been confined."""
  if not process.isdigit() or _parent(process) != str(parent):
    return False
  text = pathlib.Path(f"/proc/{process}/status").read_text()
  return "Seccomp:\t2" in text


def test_without_a_filter_the_group_is_killed():
  program = (
    "import os, sys\n"
    "if os.fork() == 0:\n  while True: pass\n"
    "print(os.getpid(), flush=True)\n"
  )
  made = sandbox.run(program, isolation="limits", timeout_s=1.0)
  # The child holds the pipe, so the end of its parent is not the end.
  assert made.status == "timeout"
  session = int(made.stdout)
  # Others than its parent only hear of its end when the kernel is done.
  deadline = time.monotonic() + 30
  while (left := _living(session)) and time.monotonic() < deadline:
    threading.Event().wait(0.05)
  assert left == []


def _living(session: int) -> list[str]:
  processes = [p for p in os.listdir("/proc") if p.isdigit()]
  return [
    p
    for p in processes
    if _session(p) == session and _state(p) not in ("Z", "")
  ]


def _session(process: str) -> int:
  try:
    text = pathlib.Path(f"/proc/{process}/stat").read_text()
  except OSError:
    return 0
  return int(text.rpartition(")")[2].split()[3])


@pytest.mark.parametrize(
  ("fields", "place"),
  [
    ({"timeout_s": 0.0}, "sandbox.timeout_s"),
    ({"memory_mb": 0}, "sandbox.memory_mb"),
    ({"output_kb": 0}, "sandbox.output_kb"),
  ],
)
def test_a_limit_that_is_none_is_refused(fields, place):
  with pytest.raises(types.InputError, match=f"^{place}: expected"):
    sandbox.run("", **fields)


def test_a_system_without_filters_is_refused(monkeypatch):
  monkeypatch.setattr(sys, "platform", "darwin")
  with pytest.raises(types.InputError, match="got none on darwin"):
    sandbox.run("")


def test_a_sandbox_that_does_not_start_is_no_fault_of_the_program(monkeypatch):
  monkeypatch.setattr(sandbox, "_SCRIPT", pathlib.Path("none.py"))
  with pytest.raises(types.RunError, match=r"to start.*none\.py"):
    sandbox.run("")
