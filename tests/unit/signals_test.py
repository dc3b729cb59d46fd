"""What a first and a second signal do; e2e/stop_test.py sends real ones."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.runtime import signals


class _Ended(BaseException):
  """Stands for the end of the process."""


@pytest.fixture(name="ended", autouse=True)
def _ended(monkeypatch):
  def end(code):
    raise _Ended(code)

  monkeypatch.setattr(os, "_exit", end)
  # Those of the test runner may live on.
  monkeypatch.setattr(signals, "_descendants", lambda pid: [])


def stopper(*, heeds_stop: bool) -> signals.Stopper:
  found = signals.Stopper("; go on")
  found.hosts = hosts_lib.Hosts()
  found.hosts.heeds_stop = heeds_stop
  return found


def test_the_first_asks_and_the_second_of_either_kind_ends(capsys):
  both = stopper(heeds_stop=True)
  both.heard("Ctrl-C")
  assert both.hosts.stopping == "Ctrl-C"
  assert capsys.readouterr().err.startswith("stopping after this step; ")
  with pytest.raises(_Ended, match="1"):
    both.heard("SIGTERM")
  assert capsys.readouterr().err == "ended at once by SIGTERM; go on\n"
  other = signals.Stopper("", "the work")
  other.hosts = both.hosts
  other.heard("SIGTERM")
  assert capsys.readouterr().err.startswith("stopping after the work; ")


def test_the_wish_of_another_process_is_no_first_signal_of_this_one(capsys):
  one = stopper(heeds_stop=True)
  one.hosts.stopping = "SIGTERM"
  one.heard("Ctrl-C")
  assert one.hosts.stopping == "SIGTERM"
  assert capsys.readouterr().err.startswith("stopping after this step; ")


def test_a_run_that_does_not_train_yet_ends_at_the_first(capsys):
  early = stopper(heeds_stop=False)
  with pytest.raises(_Ended, match="1"):
    early.heard("SIGTERM")
  assert early.hosts.stopping == ""
  assert capsys.readouterr().err == "ended at once by SIGTERM; go on\n"


def test_before_the_others_are_known_the_first_ends_too(capsys):
  with pytest.raises(_Ended, match="1"):
    signals.Stopper("").heard("Ctrl-C")
  assert capsys.readouterr().err == "ended at once by Ctrl-C\n"


# A process with a child and a child of that, which outlives its own parent.
CODE = """
import subprocess, sys
from jaxrl_post.runtime import signals
child = [sys.executable, "-c", "import subprocess as s; s.run(['cat'])"]
subprocess.Popen(child, stdin=subprocess.PIPE)
while len(found := signals._descendants(signals.os.getpid())) < 2:
  pass
print(*found, flush=True)
signals.Stopper("").heard("SIGTERM")
"""


def test_what_a_process_has_started_ends_with_it():
  env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  end = subprocess.run(
    [sys.executable, "-c", CODE],
    env=env,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert (end.returncode, end.stderr) == (1, "ended at once by SIGTERM\n")
  deadline = time.monotonic() + 10
  for pid in end.stdout.split():
    stat = pathlib.Path(f"/proc/{pid}/stat")
    while (
      stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    ):
      assert time.monotonic() < deadline
      threading.Event().wait(0.02)


@pytest.mark.parametrize("hosts", [None, hosts_lib.Hosts()])
def test_a_terminal_that_is_gone_keeps_no_process(monkeypatch, hosts):
  last = signals.Stopper("")
  last.hosts = hosts
  with open(os.devnull, encoding="utf-8") as gone:  # It cannot be written to.
    monkeypatch.setattr(sys, "stderr", gone)
    with pytest.raises(_Ended, match="1"):
      last.heard("Ctrl-C")
