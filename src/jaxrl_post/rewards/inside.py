"""What runs in the process of a sandbox: it confines itself, then the program.

`sandbox.run` starts this file as a script, which therefore imports nothing but
the standard library. Settings come through a socket, so that nothing of them is
in a file, an argument or the environment; on it goes what `run` waits for.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any

# Linux's names for what `prctl` does.
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CAPABILITY_VERSION = 0x20080522
# Numbers of the filter's instructions: load a word, jump, return.
_LOAD, _EQUAL, _MORE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Newer calls than this are unknown here; libraries do without them.
_NEWEST = 440
# Any of these flags of `open` can change a file.
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_THREAD = 0x10000
_NO_STREAM = 0b1110
# What Python asks of descriptors. Among the rest is who gets their signals,
# which the kernel lets a program say of any process of its user.
_FCNTL = (0, 1, 2, 3, 4, 1030)  # F_DUPFD to F_SETFL, F_DUPFD_CLOEXEC
_IOCTL = (
  0x5401,  # TCGETS
  0x802C542A,  # TCGETS2
  0x5413,  # TIOCGWINSZ
  0x541B,  # FIONREAD
  0x5421,  # FIONBIO
  0x5450,  # FIONCLEX
  0x5451,  # FIOCLEX
)
# System calls that are refused: numbers on x86_64 and on aarch64.
_REFUSED = {
  errno.EACCES: {  # networks, and what talks to other processes
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
    "prctl": (157, 167),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "flock": (73, 32),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
  },
  errno.EAGAIN: {  # new processes
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
  },
  errno.EROFS: {  # changes of files
    "creat": (85, None),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
  },
  errno.ENOSYS: {  # other ways to the same
    "clone3": (435, 435),
    "openat2": (437, 437),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
  },
}


def main(descriptor: int) -> None:
  """Confines this process, runs the program, and then its tests.

  Args:
    descriptor: of the socket to `sandbox.run`.
  """
  channel = socket.socket(fileno=descriptor)
  parts = []
  while part := channel.recv(1 << 16):
    parts.append(part)
  settings = json.loads(b"".join(parts))
  try:
    _confine(settings)
  except OSError as error:
    channel.sendall(f"refused {error}\n".encode())
    sys.exit(1)
  channel.sendall(b"ready\n")
  _run(settings, channel)


def _confine(settings: dict[str, Any]) -> None:
  seconds = settings["cpu_s"]
  limits = {
    resource.RLIMIT_AS: settings["memory_mb"] * 2**20,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_CPU: seconds,
    resource.RLIMIT_FSIZE: 0,
    resource.RLIMIT_NOFILE: 64,
  }
  confines = settings["isolation"] == "seccomp"
  if sys.platform == "darwin":  # It refuses to limit the address space.
    del limits[resource.RLIMIT_AS]
  for name, most in limits.items():
    hard = resource.getrlimit(name)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(name, (most, most))
  # A write beyond RLIMIT_FSIZE then raises, as any other that is refused.
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  if not confines:
    return
  libc = ctypes.CDLL(None, use_errno=True)
  _ask(libc.prctl, _PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
  if os.getppid() != settings["parent"]:
    sys.exit(1)  # It died before this process asked to be told.
  # Root, too, is to have no rights but those over its own files.
  header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
  _ask(libc.capset, header, bytes(24))
  one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
  _ask(libc.prctl, _PR_SET_NO_NEW_PRIVS, one, zero, zero, zero)
  code = ctypes.create_string_buffer(_filter(platform.machine()))
  program = struct.pack("HP", len(code) // 8, ctypes.addressof(code))
  _ask(libc.prctl, _PR_SET_SECCOMP, ctypes.c_ulong(2), program, zero, zero)


def _ask(function: Any, *args: Any) -> None:
  if function(*args) != 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{function.__name__}: {os.strerror(number)}")


def _filter(machine: str) -> bytes:
  """Returns the program by which Linux decides on every system call."""
  if machine not in _ARCHITECTURES:
    raise OSError(errno.ENOSYS, f"no filter for {machine}")
  place = 0 if machine == "x86_64" else 1
  steps = [
    (_LOAD, 0, 0, 4),
    (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, 0),
    (_MORE, 0, 1, _NEWEST),  # those of x32, too
    (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
  ]
  for number, calls in _REFUSED.items():
    for numbers in calls.values():
      if numbers[place] is not None:
        steps.append((_EQUAL, 0, 1, numbers[place]))
        steps.append((_RETURN, 0, 0, _ERRNO | number))
  steps += _by_argument(place)
  steps.append((_RETURN, 0, 0, _ALLOW))
  return b"".join(struct.pack("HBBI", *step) for step in steps)


def _by_argument(place: int) -> list[tuple[int, int, int, int]]:
  """Returns the steps for calls that one argument decides on.

  Allowed, or refused, is a bit of it, or any of some numbers.
  """
  steps = []
  me = (os.getpid(),)
  for numbers, argument, test, allowed, values, number in (
    ((2, None), 1, _ANY_BIT, False, (_WRITES,), errno.EROFS),  # open
    ((257, 56), 2, _ANY_BIT, False, (_WRITES,), errno.EROFS),  # openat
    ((56, 220), 0, _ANY_BIT, True, (_THREAD,), errno.EAGAIN),  # clone
    ((53, 199), 1, _ANY_BIT, False, (_NO_STREAM,), errno.EACCES),  # socketpair
    ((62, 129), 0, _EQUAL, True, me, errno.EACCES),  # kill
    ((234, 131), 0, _EQUAL, True, me, errno.EACCES),  # tgkill
    ((302, 261), 0, _EQUAL, True, (0,), errno.EACCES),  # prlimit64
    ((72, 25), 1, _EQUAL, True, _FCNTL, errno.EACCES),  # fcntl
    ((16, 29), 1, _EQUAL, True, _IOCTL, errno.EACCES),  # ioctl
  ):
    if numbers[place] is None:
      continue
    # The first end is for no match, the second for any.
    ends = [_ERRNO | number, _ALLOW] if allowed else [_ALLOW, _ERRNO | number]
    most = len(values)
    steps += [
      (_EQUAL, 0, most + 3, numbers[place]),
      (_LOAD, 0, 0, 16 + 8 * argument),
      *((test, most - i, 0, value) for i, value in enumerate(values)),
      *((_RETURN, 0, 0, end) for end in ends),
    ]
  return steps


def _run(settings: dict[str, Any], channel: socket.socket) -> None:
  tests: Sequence[str] = settings["tests"]
  # A program behind `if __name__ == "__main__"` is for when there are none.
  name = "solution" if tests else "__main__"
  module = types.ModuleType(name)
  sys.modules[name] = module
  sys.argv = ["program.py"]
  program = compile(settings["program"], "program.py", "exec")
  nonce = settings.pop("nonce")
  exec(program, module.__dict__)
  for index, test in enumerate(tests):
    try:
      exec(compile(test, f"test {index}", "exec"), dict(module.__dict__))
    except BaseException:  # SystemExit too: a test that fails, whatever it does
      traceback.print_exc(limit=-3)
    else:
      channel.sendall(f"{nonce} {index}\n".encode())


if __name__ == "__main__":
  main(int(sys.argv[1]))
