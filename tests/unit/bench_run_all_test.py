"""Benchmarks run one after the other, and are held to their records."""

import importlib
import json
import pathlib
import re
import subprocess
import sys
import threading
import time

import pytest

from bench import workloads

BENCH = pathlib.Path(workloads.__file__).parent
STUB = """
import json, subprocess, sys, time
kind = KIND
print("measuring", *sys.argv[1:], flush=True)
if kind == "fails":
  sys.exit(3)
if kind == "hangs":
  child = subprocess.Popen(["sleep", "99"])
  print(child.pid, "is the child", flush=True)
  print("waiting", flush=True)
  time.sleep(99)
figure = {"value": VALUE, "goal": 2.0, "peer": 1.5, "met": VALUE >= 2.0}
print("done" if kind == "silent" else json.dumps({"rate": figure}))
"""


@pytest.fixture(name="run_all")
def _run_all(monkeypatch, tmp_path):
  """Imports the script as it is run, with a folder of stubs for its own."""
  monkeypatch.syspath_prepend(str(BENCH))
  module = importlib.import_module("run_all")
  monkeypatch.setattr(module, "_HERE", tmp_path)
  monkeypatch.setattr(module, "_RECORDS", tmp_path / "records")
  monkeypatch.setattr(module, "DEADLINES", {"rollout": 1, "other": 1})
  return module


def stub(folder: pathlib.Path, name: str, kind="sound", value=3.0) -> None:
  text = STUB.replace("KIND", repr(kind)).replace("VALUE", repr(value))
  (folder / f"{name}.py").write_text(text)


def alive(process: str) -> bool:
  stat = pathlib.Path(f"/proc/{process}/stat")
  try:
    return stat.read_text().rpartition(")")[2].split()[0] != "Z"
  except (FileNotFoundError, ProcessLookupError):
    return False


def figure(value, goal, met, peer=None):
  return {"value": value, "goal": goal, "peer": peer, "met": met}


def test_every_figure_stands_beside_its_goal(run_all, tmp_path, capsys):
  stub(tmp_path, "rollout")
  stub(tmp_path, "other", value=1.0)
  assert run_all.main(["--quick", "--tunix=py"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "[1/2] rollout"
  assert lines[1].split() == ["measuring", "--quick", "--tunix=py"]
  assert lines[3].split() == ["measuring", "--quick"]  # has no peers
  table = {line.split()[0]: line.split()[1:] for line in lines[4:] if line}
  assert table["rollout/rate"] == ["3", "2", "1.5", "yes"]
  assert table["other/rate"] == ["1", "2", "1.5", "NO"]


@pytest.mark.parametrize(
  ("kind", "why"),
  [("fails", "exit code 3"), ("silent", "expected figures in the last line")],
)
def test_what_fails_is_said_and_the_rest_runs(
  run_all, tmp_path, capsys, kind, why
):
  stub(tmp_path, "rollout", kind)
  stub(tmp_path, "other")
  assert run_all.main([]) == 1
  out = capsys.readouterr().out
  assert f"rollout: failed: {why}" in out and "other/rate" in out


def test_a_deadline_ends_a_benchmark_with_its_children(
  run_all, tmp_path, capsys
):
  stub(tmp_path, "other", "hangs")
  begun = time.monotonic()
  with pytest.raises(RuntimeError, match="past its deadline of 2 s"):
    run_all.run(tmp_path / "other.py", [], 2.0)
  assert time.monotonic() - begun < 30
  (child,) = re.findall(r"(\d+) is the child", capsys.readouterr().out)
  patience = iter(range(200))
  while alive(child) and next(patience, None) is not None:
    threading.Event().wait(0.05)
  assert not alive(child)


def test_a_record_is_accepted_and_held_to(run_all, tmp_path, capsys):
  stub(tmp_path, "other", value=3.0)
  assert run_all.main(["--only", "other", "--check"]) == 0
  assert "other: has no record" in capsys.readouterr().out
  assert run_all.main(["--only", "other", "--accept"]) == 0
  record = json.loads((tmp_path / "records" / "other.json").read_text())
  assert record["figures"] == {"rate": figure(3.0, 2.0, True, 1.5)}
  assert {"commit", "machine", "date", "peers"} <= record.keys()
  stub(tmp_path, "other", value=2.7)  # 10 % less is noise
  assert run_all.main(["--only", "other", "--check"]) == 0
  stub(tmp_path, "other", value=2.4)
  assert run_all.main(["--only", "other", "--check"]) == 1
  assert "rate is 20% worse than 3.0" in capsys.readouterr().out


def test_quick_figures_are_no_record(run_all, capsys):
  with pytest.raises(SystemExit):
    run_all.main(["--quick", "--accept"])
  assert "neither accepted nor checked" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("old", "new", "what"),
  [
    (figure(3.0, 2.0, True), figure(3.5, 2.0, True), None),
    (figure(3.0, 2.0, True), figure(2.2, 2.0, True), "27% worse"),
    (figure(1.0, 2.0, False), figure(0.5, 2.0, False), "50% worse"),
    # Less is better: 1.0 met a goal of 2.0.
    (figure(1.0, 2.0, True), figure(1.3, 2.0, True), "30% worse"),
    (figure(1.0, 2.0, True), figure(0.5, 2.0, True), None),
    # The goal is measured too: what counts is the part of it.
    (figure(8.0, 20.0, True), figure(16.0, 40.0, True), None),
    (figure(0.0, 0.0, True), figure(3.0, 0.0, False), "no longer meets"),
    (figure(2.1, 2.0, True), figure(1.99, 2.0, False), "no longer meets"),
    # Open: others disturbed the machine, nothing can be said.
    (figure(3.0, 2.0, True), figure(2.5, 2.0, None), "17% worse"),
    (figure(3.0, 2.0, True), figure(None, 2.0, None), None),
    (figure(3.0, 2.0, True), None, "is missing"),
    (None, figure(1.0, 0.0, False), "is new and misses"),
    (None, figure(3.0, 2.0, True), None),
  ],
)
def test_worse(run_all, old, new, what):
  record, now = ({"x": x} if x else {} for x in (old, new))
  found = run_all.worse(record, now)
  assert (what in found["x"]) if what else found == {}


def test_every_benchmark_is_run():
  # What its own text says is started by hand, and prints figures.
  scripts = {path.stem: path.read_text() for path in BENCH.glob("*.py")}
  started = {
    name
    for name, text in scripts.items()
    if re.search(rf"^    python bench/{name}\.py", text, re.MULTILINE)
  }
  code = "import json, run_all; print(json.dumps(list(run_all.DEADLINES)))"
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=BENCH,
    capture_output=True,
    text=True,
    check=True,
  )
  assert set(json.loads(done.stdout)) == started - {"run_all", "curve"}
  for name in started - {"run_all", "curve"}:
    assert "--quick" in scripts[name], name
