"""Several processes train together; each publishes to its own devices."""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import pytest

SCRIPT = pathlib.Path(__file__).with_name("publish_run.py")
SOURCE = pathlib.Path(__file__).resolve().parents[2] / "src"
DEADLINE_S = 120.0
COUNTS = (pytest.param(2, marks=pytest.mark.slow), 4)


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


@functools.cache
def _outcomes(processes: int) -> list[dict]:
  """Runs the script in each of some processes; returns what they wrote."""
  port = _free_port()
  env = {**os.environ, "PYTHONPATH": str(SOURCE)}
  with tempfile.TemporaryDirectory() as folder:
    errors = [pathlib.Path(folder, str(i)) for i in range(processes)]
    # Nothing else ends a process under jax.distributed: it ignores SIGTERM.
    running = [
      subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, (port, i, processes))],
        stdout=subprocess.PIPE,
        stderr=errors[i].open("w", encoding="utf-8"),
        env=env,
        text=True,
      )
      for i in range(processes)
    ]
    try:
      end = time.monotonic() + DEADLINE_S
      outs = [
        p.communicate(timeout=max(end - time.monotonic(), 0.1))[0]
        for p in running
      ]
    finally:
      for process in running:
        process.kill()
        process.wait()
    for process, error in zip(running, errors, strict=True):
      assert process.returncode == 0, error.read_text(encoding="utf-8")[-3000:]
  return [json.loads(out.splitlines()[-1]) for out in outs]


def _runs(processes: int) -> list[dict]:
  return [run for out in _outcomes(processes) for run in out["runs"]]


@pytest.mark.parametrize("processes", COUNTS)
def test_each_process_gets_all_weights_and_none_through_the_host(
  processes,
) -> None:
  """Values, shardings and checksums are asserted in the processes."""
  runs = _runs(processes)
  assert len(runs) == 4 * processes
  assert {run["pulls"] for run in runs} == {0}
  modes = {(run["mode"], run["kind"], run["dtype"]) for run in runs}
  assert len(modes) == 4


@pytest.mark.parametrize("processes", COUNTS)
def test_every_leaf_that_moves_has_a_fingerprint(processes) -> None:
  names = ["['bias']", "['layers']['o']", "['layers']['q']", "['norm']"]
  names = [*names, "['rows']"]
  for run in _runs(processes):
    assert run.get("chunks", 2) > 1
    if not run["aliases"]:
      assert run["fingerprints"] == names
    else:
      assert set(names) - set(run["fingerprints"]) <= {"['bias']", "['norm']"}


@pytest.mark.parametrize("processes", COUNTS)
def test_a_corrupt_copy_is_found_by_the_process_that_has_it(processes) -> None:
  found = 0
  for number, out in enumerate(_outcomes(processes)):
    for run in out["runs"]:
      if not run["aliases"]:
        assert ("others for ['norm']" in run["refused"]) == (number == 1)
        found += number == 1
  assert found


@pytest.mark.parametrize("processes", COUNTS)
def test_a_generation_mesh_of_another_process_is_refused(processes) -> None:
  for out in _outcomes(processes):
    assert "expected a generation mesh of this process's own" in out["foreign"]
