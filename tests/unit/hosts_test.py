"""Processes talk, notice who is lost, and end together.

Here they are several `Hosts` in one process, over socket pairs; what would end
the process is noted, and ends the thread that asked for it.
"""

import concurrent.futures
import contextlib
import os
import queue
import socket
import threading
import time

import pytest

from jaxrl_post import types
from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.runtime import links as links_lib

# An end is raised where it is asked for, in threads of a connection.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
# Two beats of a quarter of it may be late by as much on a busy machine.
SILENCE_S = 2.0
_DEADLINE_S = 60.0


class World:
  """A head and others; `codes` has the exit code of whoever ended."""

  def __init__(self) -> None:
    self.codes: queue.Queue[int] = queue.Queue()
    self.sockets: list[socket.socket] = []
    self.hosts: list[hosts_lib.Hosts] = []

  def link(self, a: int, b: int) -> tuple[links_lib.Link, links_lib.Link]:
    """Connects two; each link has the name of the other end."""
    pair = socket.socketpair()
    self.sockets += pair
    one, two = (
      links_lib.Link(sock, f"process {number} of 3 (host {number})")
      for sock, number in zip(pair, (b, a), strict=True)
    )
    return one, two

  def lone(
    self, index: int = 0, silence_s: float = SILENCE_S
  ) -> tuple[hosts_lib.Hosts, links_lib.Link]:
    """Makes one process; the test plays the other, by its end of the link."""
    peer = 1 - index
    mine, theirs = self.link(index, peer)
    links = {peer: mine}
    hosts = hosts_lib.Hosts(index, links, count=2, silence_s=silence_s)
    self.hosts = [hosts]
    return hosts, theirs

  def three(self, silence_s: float = SILENCE_S) -> list[hosts_lib.Hosts]:
    """Makes a head and two others."""
    pairs = [self.link(0, number) for number in (1, 2)]
    to_all = {1: pairs[0][0], 2: pairs[1][0]}
    options = {"count": 3, "silence_s": silence_s}
    self.hosts = [
      hosts_lib.Hosts(0, to_all, **options),
      hosts_lib.Hosts(1, {0: pairs[0][1]}, **options),
      hosts_lib.Hosts(2, {0: pairs[1][1]}, **options),
    ]
    return self.hosts

  def cut(self) -> None:
    """Closes every connection."""
    for sock in self.sockets:
      with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

  def end(self) -> int:
    """Waits until somebody ended, and returns the code."""
    return self.codes.get(timeout=_DEADLINE_S)


@pytest.fixture(name="world")
def _world(monkeypatch, capsys):
  del capsys  # Here first: what threads say last is captured, too.
  before = set(threading.enumerate())
  world = World()

  def ends(code: int) -> None:
    world.codes.put(code)
    raise EOFError(f"the end of this process, {code}")

  monkeypatch.setattr(os, "_exit", ends)
  # For the second thread that wants to end the same process.
  monkeypatch.setattr(hosts_lib, "LEAVE_S", 0.2)
  yield world
  for hosts in world.hosts:
    hosts._byes.update(hosts._links)  # So that no thread sees a loss.
    hosts._ending.set()
  world.cut()
  for thread in set(threading.enumerate()) - before:
    thread.join(_DEADLINE_S)
    assert not thread.is_alive(), thread.name


def said(capsys, *words: str) -> str:
  """Waits until stderr has a line with all words, and returns it."""
  seen, deadline = "", time.monotonic() + _DEADLINE_S
  while time.monotonic() < deadline:
    seen += capsys.readouterr().err
    for line in seen.splitlines():
      if all(word in line for word in words):
        return line
    threading.Event().wait(0.02)
  raise AssertionError(f"no {words} in: {seen}")


# ----------------------------------------------------------------------- alone


def test_alone_a_value_is_what_was_made_and_no_place_is_late():
  with hosts_lib.Hosts() as hosts:
    assert hosts.is_head
    assert (hosts.index, hosts.count) == (0, 1)
    assert hosts.share(lambda: 7, lambda _: 8) == 7
    hosts.at("update 1")
    hosts.tell("order", 1)


def test_alone_an_error_is_nobody_elses_business():
  with pytest.raises(ValueError, match="boom"), hosts_lib.Hosts():
    raise ValueError("boom")


# -------------------------------------------------------------------- messages


def test_the_others_get_what_the_head_made_and_do_not_make_it(world):
  head, one, two = world.three()
  for value in ("a", None):
    # What is made stays: it need not survive pickling.
    made = (value, threading.Lock())
    assert head.share(lambda: made, lambda x: x[:1]) is made  # noqa: B023
    assert one.share(lambda: 1 / 0) == (value,)
    assert two.share(lambda: 1 / 0) == (value,)


def test_early_messages_wait_for_their_handler_in_order(world):
  head, one, two = world.three()
  seen: queue.Queue[tuple[int, str]] = queue.Queue()
  head.tell("order", "first")
  head.tell("order", "for one", to=1)
  head.share(lambda: "mark")
  assert one.share(str) == two.share(str) == "mark"
  one.on("order", lambda index, value: seen.put((index, f"one: {value}")))
  two.on("order", lambda index, value: seen.put((index, f"two: {value}")))
  head.tell("order", "last", to=1)
  got = [seen.get(timeout=_DEADLINE_S) for _ in range(4)]
  assert got[:3] == [(0, "one: first"), (0, "one: for one"), (0, "two: first")]
  assert got[3] == (0, "one: last")
  assert seen.empty()


def test_the_head_knows_who_spoke(world):
  head, one, two = world.three()
  seen: queue.Queue[tuple[int, str]] = queue.Queue()
  head.on("report", lambda index, value: seen.put((index, value)))
  one.tell("report", "x", to=0)
  two.tell("report", "y", to=0)
  got = {seen.get(timeout=_DEADLINE_S) for _ in range(2)}
  assert got == {(1, "x"), (2, "y")}


def test_the_wish_to_stop_reaches_the_head_and_then_all(world):
  head, one, two = world.three()
  two.stopping = "SIGTERM"
  deadline = time.monotonic() + _DEADLINE_S
  while not head.stopping == one.stopping == "SIGTERM":
    assert time.monotonic() < deadline
    threading.Event().wait(0.02)


# ------------------------------------------------------------------- good ends


def leaving(hosts: hosts_lib.Hosts, after_s: float) -> str:
  with hosts:
    threading.Event().wait(after_s)
  return "left"


def test_all_leave_together_and_nobody_looks_lost(world, monkeypatch):
  monkeypatch.setattr(hosts_lib, "LEAVE_S", _DEADLINE_S)
  all_three = world.three()
  with concurrent.futures.ThreadPoolExecutor(3) as workers:
    # The first to be done waits for the last.
    delays = (0.0, 0.2, 0.4)
    ends = list(workers.map(leaving, all_three, delays, timeout=_DEADLINE_S))
  world.cut()
  assert ends == ["left"] * 3
  assert world.codes.empty()


def test_the_head_may_be_long_at_its_last_checkpoint(world):
  with concurrent.futures.ThreadPoolExecutor(3) as workers:
    delays = (4 * hosts_lib.LEAVE_S, 0.0, 0.0)
    ends = workers.map(leaving, world.three(), delays, timeout=_DEADLINE_S)
    assert list(ends) == ["left"] * 3
  assert world.codes.empty()


def test_who_does_not_end_with_the_head_is_named(world, capsys):
  head, _, _ = world.three()
  with pytest.raises(EOFError):
    head.__exit__(None, None, None)
  said(capsys, "process 1 of 3 (host 1), process 2 of 3", "did not end within")
  assert {world.end() for _ in range(3)} == {1}


def test_a_process_that_is_lost_while_others_leave_ends_them(world, capsys):
  head, theirs = world.lone()
  with concurrent.futures.ThreadPoolExecutor(1) as workers:
    left = workers.submit(leaving, head, 0.0)
    theirs._sock.shutdown(socket.SHUT_RDWR)
    said(capsys, "process 1 of 3 (host 1) was lost")
    with pytest.raises(EOFError):
      left.result(_DEADLINE_S)
  assert world.end() == 1


# -------------------------------------------------------------------- bad ends


def test_a_lost_process_ends_all_with_its_name(world, capsys):
  _, _, two = world.three()
  two._links[0]._sock.shutdown(socket.SHUT_RDWR)
  # The head tells the first what it knows of the second.
  said(capsys, "error: process 2 of 3 (host 2) was lost: its connection closed")
  assert {world.end() for _ in range(3)} == {1}


def test_a_lost_head_ends_the_others_with_its_name(world, capsys):
  _, theirs = world.lone(index=1)
  theirs._sock.shutdown(socket.SHUT_RDWR)
  said(capsys, "process 0 of 3 (host 0) was lost")
  assert world.end() == 1


def test_a_silent_process_ends_all_after_its_time(world, capsys):
  begun = time.monotonic()
  world.lone(silence_s=0.4)
  line = said(capsys, "process 1 of 3 (host 1) was silent for")
  assert "(placement.peer_timeout_s=0.4)" in line
  assert time.monotonic() - begun > 0.4
  assert world.end() == 1


def test_a_silent_head_ends_the_others_after_its_time(world, capsys):
  world.lone(index=1, silence_s=0.4)
  said(capsys, "process 0 of 3 (host 0) was silent for")
  assert world.end() == 1


def test_processes_that_beat_are_not_silent(world):
  world.three(silence_s=SILENCE_S)
  threading.Event().wait(1.5 * SILENCE_S)
  assert world.codes.empty()


@pytest.mark.parametrize("stuck", [0, 1, 2])
def test_a_process_that_stays_behind_is_named(stuck, world, capsys):
  all_three = world.three(silence_s=1.0)
  for hosts in all_three:
    hosts.at("update 1")
  for hosts in all_three:
    if hosts.index != stuck:
      hosts.at("end of update 1")
  name = "process 0 of 3 (this one)" if stuck == 0 else f"(host {stuck})"
  line = said(capsys, name, "is stuck in 'update 1'")
  assert "(placement.peer_timeout_s)" in line
  assert {world.end() for _ in range(3)} == {1}


def test_a_place_may_have_a_limit_of_its_own(world):
  all_three = world.three(silence_s=1.0)
  for hosts in all_three:
    hosts.at("end of step 1", hosts_lib.COLD_S)
  all_three[0].at("update 2")
  threading.Event().wait(2.0)
  assert world.codes.empty()


def test_all_may_be_in_one_place_for_long(world):
  for hosts in world.three(silence_s=0.5):
    hosts.at("update 1")
  threading.Event().wait(1.5)
  assert world.codes.empty()


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(
  "error, code, words",
  [
    (types.RunError("no\nmore"), 1, "failed: RunError: no. All processes end"),
    (types.InputError("x: expected y"), 2, "failed: x: expected y. All"),
  ],
)
def test_what_one_fails_of_ends_all_with_its_code(
  error, code, words, where, world, capsys
):
  all_three = world.three()
  with pytest.raises(EOFError), all_three[where]:
    raise error
  assert [world.end() for _ in range(3)] == [code] * 3
  world.cut()
  err = capsys.readouterr().err
  # Who had a wrong input says that and no more.
  others = 3 if code == 1 else 2
  assert err.count(f"error: process {where} of 3 (") >= others
  assert (f"error: {error}\n" in err) == (code == 2)
  assert words in err
  # The user's own mistake needs no traceback.
  assert ("Traceback" in err) == (code == 1)


def test_an_error_ends_all_before_anybody_cleans_up(world):
  head, _, _ = world.three()
  with pytest.raises(EOFError), contextlib.ExitStack() as stack:
    stack.callback(world.codes.put, 7)
    stack.push(head.on_error)
    raise types.RunError("no")
  assert world.end() == 1


def test_without_an_error_nothing_ends(world):
  head, _, _ = world.three()
  with contextlib.ExitStack() as stack:
    stack.push(head.on_error)
  assert world.codes.empty()


@pytest.mark.parametrize("kind", [ValueError, types.RunError])
def test_a_peer_that_is_lost_is_named_rather_than_what_it_broke(
  kind, world, capsys
):
  head, theirs = world.lone()
  with concurrent.futures.ThreadPoolExecutor(1) as workers:

    def broken() -> None:
      with head:
        raise kind("a collective failed")

    failed = workers.submit(broken)
    theirs._sock.shutdown(socket.SHUT_RDWR)
    assert world.end() == 1
    said(capsys, "process 1 of 3 (host 1) was lost")
    with pytest.raises(EOFError):
      failed.result(_DEADLINE_S)
