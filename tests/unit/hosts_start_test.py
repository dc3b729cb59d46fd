"""How processes of a run find each other: flags, launchers, and strangers."""

import dataclasses
import os
import socket
import subprocess
import sys

import pytest
from absl.testing import flagsaver

from jaxrl_post import main, types
from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.runtime import links as links_lib
from tests.e2e import runs

_DEADLINE_S = 120.0

LAUNCHED = ("host:1234", 4, 3)


def test_a_launch_is_all_or_nothing():
  assert hosts_lib.Launch() == hosts_lib.Launch(None, None, None)
  assert hosts_lib.Launch(*LAUNCHED).process_id == 3
  for missing in ("coordinator", "num_processes", "process_id"):
    launch = hosts_lib.Launch(*LAUNCHED)
    with pytest.raises(types.InputError, match="all three or none") as error:
      dataclasses.replace(launch, **{missing: None})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("process_id", [-1, 4])
def test_a_process_id_out_of_range_is_refused(process_id):
  with pytest.raises(
    types.InputError, match=f"--process_id: expected 0 to 3 .* {process_id}\\."
  ):
    hosts_lib.Launch("host:1234", 4, process_id)


@pytest.mark.parametrize(
  "address", ["host", ":1234", "host:", "host:x", "host:0", "host:65536", ""]
)
def test_a_coordinator_is_host_and_port(address):
  with pytest.raises(types.InputError, match="--coordinator: expected HOST:P"):
    hosts_lib.Launch(address, 4, 3)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "[::1]:65535", "a.b:80"])
def test_a_good_address_is_taken(address):
  assert hosts_lib.Launch(address, 4, 3).coordinator == address


SLURM = {
  "SLURM_JOB_ID": "7",
  "SLURM_STEP_NODELIST": "n[1-2]",
  "SLURM_PROCID": "1",
  "SLURM_NTASKS": "2",
}


@pytest.mark.parametrize(
  "environ, name",
  [
    ({}, ""),
    (SLURM, "SLURM"),
    ({**SLURM, "SLURM_NTASKS": "1"}, ""),
    # A batch script that was not started by srun.
    ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, ""),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
    ({"OMPI_COMM_WORLD_SIZE": "1"}, ""),
    ({"OMPI_COMM_WORLD_SIZE": "many"}, ""),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU pod"),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, ""),
    ({"MEGASCALE_NUM_SLICES": "2"}, "TPU pod"),
    ({"MEGASCALE_NUM_SLICES": "1"}, ""),
  ],
)
def test_launchers_of_several_processes_are_known(environ, name):
  assert hosts_lib.launcher(environ) == name


@pytest.fixture(name="parsed", scope="module")
def _parsed():
  main.flags.FLAGS(["test"])


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize(
  "given, environ, expected",
  [
    ({}, {}, None),
    ({}, SLURM, hosts_lib.Launch()),
    ({"distributed": "off"}, SLURM, None),
    ({"distributed": "on"}, {}, hosts_lib.Launch()),
    (
      {"coordinator": "host:1234", "num_processes": 4, "process_id": 3},
      {},
      hosts_lib.Launch(*LAUNCHED),
    ),
  ],
)
def test_flags_and_environment_say_whether_there_are_others(
  given, environ, expected, monkeypatch
):
  others = ("OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES")
  for name in (*SLURM, *others, "MEGASCALE_NUM_SLICES"):
    monkeypatch.delenv(name, raising=False)
  for name, value in environ.items():
    monkeypatch.setenv(name, value)
  with flagsaver.flagsaver(**given):
    assert main._launch() == expected


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize(
  "given, words",
  [
    ({"coordinator": "host:1"}, "all three or none"),
    ({"num_processes": 2, "process_id": 0}, "all three or none"),
    (
      {"coordinator": "host:1", "num_processes": 2, "process_id": 2},
      "--process_id: expected 0 to 1",
    ),
    (
      {"coordinator": "host", "num_processes": 2, "process_id": 1},
      "--coordinator: expected HOST:PORT",
    ),
    (
      {
        "coordinator": "host:1",
        "num_processes": 2,
        "process_id": 1,
        "distributed": "off",
      },
      "--distributed=off: expected no --coordinator",
    ),
  ],
)
def test_flags_that_contradict_are_one_line_and_exit_2(given, words, capsys):
  with flagsaver.flagsaver(exp=str(runs.EXPERIMENT), **given):
    assert main.main([]) == 2
  err = capsys.readouterr().err
  assert words in err
  assert err.count("\n") == 1


def test_a_coordinator_that_never_answers_is_told_in_words():
  with socket.socket() as taken:
    # Bound and deaf: nobody else gets the port, and nobody answers.
    taken.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    script = (
      "from jaxrl_post.runtime import hosts, links\n"
      "links.START_S = 2.0\n"
      f"hosts.start(hosts.Launch({address!r}, 2, 1), 20.0)\n"
    )
    end = subprocess.run(
      [sys.executable, "-c", script],
      env={**os.environ, "PYTHONPATH": str(runs.ROOT / "src")},
      capture_output=True,
      text=True,
      timeout=_DEADLINE_S,
      check=False,
    )
  assert end.returncode == 1, end.stderr
  (line,) = end.stderr.splitlines()
  assert "error: --coordinator: expected all processes at 127.0.0.1:" in line
  assert f"{address} within 2 s, got no answer of all. " in line


# -------------------------------------------------------------------- greeting


def greeted(message: bytes) -> tuple[int, str | None]:
  here, there = socket.socketpair()
  with here, there:
    there.sendall(message)
    there.shutdown(socket.SHUT_WR)
    number, link = links_lib.greet(here, "secret", 3)
    return number, link and link.name


@pytest.fixture
def _no_tcp(monkeypatch):
  # A pair has no options of TCP.
  monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)


def framed(text: bytes) -> bytes:
  return len(text).to_bytes(8, "big") + text


@pytest.mark.parametrize(
  "message",
  [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    framed(b"guess 1 x"),
    framed(b"secret"),
    framed(b"\xff\xfe"),
    framed(b"secret 1 x")[:-1],
    (1 << 40).to_bytes(8, "big"),
  ],
)
@pytest.mark.usefixtures("_no_tcp")
def test_a_stranger_is_sent_away(message):
  assert greeted(message) == (0, None)


@pytest.mark.usefixtures("_no_tcp")
def test_a_process_that_knows_the_secret_is_taken():
  number, name = greeted(framed(b"secret 2 node7, pid 12"))
  assert (number, name) == (2, "process 2 of 3 (node7, pid 12)")


def test_a_port_that_somebody_uses_is_refused_before_jax_crashes_on_it():
  with socket.create_server(("", 0)) as taken:
    port = taken.getsockname()[1]
    launch = hosts_lib.Launch(f"127.0.0.1:{port}", 2, 0)
    with pytest.raises(types.InputError, match=f"nobody uses here, got {port}"):
      hosts_lib.start(launch, 5.0)


def test_a_run_of_no_process_is_refused_by_its_own_flag():
  with pytest.raises(types.InputError, match="--num_processes: .* got 0"):
    hosts_lib.Launch("here:1234", 0, 0)
