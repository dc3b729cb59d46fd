"""Runs every benchmark and prints each figure beside its goal.

    python bench/run_all.py [--quick] [--only NAME...] [--tunix PYTHON]
      [--torch PYTHON] [--check | --accept]

One after the other, each in a process of its own with a deadline, which ends
it with all that it has started. Its lines are shown as they come; the last one
has its figures. Then all figures stand in one table.

`bench/records/NAME.json` has the figures of the last accepted run of a
benchmark, with machine and commit. --accept writes it, --check compares with
it: a figure is worse if it met its goal and no longer does, or if its value has
moved by more than 15 % of the record's to the wrong side, both as a part of the
goal where that is measured, too. A figure of the record that is missing is
worse as well: give the interpreters that the record was made with. --quick is a
smoke test, whose figures are neither accepted nor checked.

The exit code is 1 if a benchmark failed or, with --check, a figure is worse. A
goal that is not met is shown, and is no failure.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rollout

Figures = Mapping[str, Mapping[str, Any]]

_HERE = pathlib.Path(__file__).resolve().parent
_RECORDS = _HERE / "records"
# Minutes after which a benchmark is ended, on two cores.
DEADLINES = {
  "algorithms": 180,
  "beside": 60,
  "cache": 30,
  "chaos": 180,
  "overlap": 60,
  "plan": 60,
  "publish": 60,
  "rollout": 180,
  "saving": 60,
  "step": 180,
  "update": 180,
}
_QUICK_MINUTES = 20
_PEERS = {"rollout": ("tunix", "torch")}
_PEERS |= {"step": _PEERS["rollout"], "update": _PEERS["rollout"]}
_KEYS = {"value", "goal", "peer", "met"}
_TOLERANCE = 0.15


def run(
  script: pathlib.Path, arguments: Sequence[str], deadline_s: float
) -> Figures:
  """Runs a benchmark, shows what it says and returns its figures.

  Raises:
    RuntimeError: it failed, ran past its deadline, or did not end with
      figures; says which.
  """
  command = [sys.executable, str(script), *arguments]
  process = subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
    env={**os.environ, "PYTHONUNBUFFERED": "1"},
  )
  late = threading.Event()

  def end() -> None:
    late.set()
    _end(process.pid)

  watchdog = threading.Timer(deadline_s, end)
  watchdog.start()
  try:
    last = _show(process.stdout or ())
    code = process.wait()
  finally:
    watchdog.cancel()
    _end(process.pid)  # also what it has left running
  if late.is_set():
    raise RuntimeError(f"ran past its deadline of {deadline_s:.0f} s")
  if code:
    raise RuntimeError(f"exit code {code} after {last!r}")
  return _figures(last)


def _show(lines: Iterable[str]) -> str:
  """Prints lines as they come, but for the last, which it returns."""
  last = None
  for line in lines:
    if last is not None:
      print(f"  {last}", flush=True)
    last = line.rstrip()
  return last or ""


def _end(session: int) -> None:
  """Ends a process with all that it has started."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(session, signal.SIGKILL)


def _figures(line: str) -> Figures:
  try:
    found = json.loads(line)
  except json.JSONDecodeError:
    found = None
  if isinstance(found, dict) and all(
    isinstance(figure, dict) and figure.keys() == _KEYS
    for figure in found.values()
  ):
    return found
  raise RuntimeError(f"expected figures in the last line, got {line[:60]!r}")


def worse(record: Figures, now: Figures) -> dict[str, str]:
  """Finds the figures that are worse than those of the record.

  Args:
    record: figures of an accepted run.
    now: figures of this run.

  Returns:
    What is worse about each, by its name. Which side of a goal is the good one
    is told by a value beside it and whether that met it.
  """
  found = {}
  for name, old in record.items():
    new = now.get(name)
    if new is None:
      found[name] = "is missing"
    elif old["met"] and new["met"] is False:
      found[name] = f"no longer meets its goal of {new['goal']}"
    elif None not in (old["value"], new["value"]):
      moved = _moved(old, new)
      if moved > _TOLERANCE:
        found[name] = f"is {moved:.0%} worse than {old['value']}"
  for name in now.keys() - record.keys():
    if now[name]["met"] is False:
      found[name] = f"is new and misses its goal of {now[name]['goal']}"
  return found


def _moved(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
  """Returns by what part of the record a value moved to the wrong side."""
  more_is_better = {
    (figure["value"] > figure["goal"]) == figure["met"]
    for figure in (old, new)
    if figure["met"] is not None and figure["value"] != figure["goal"]
  }
  if len(more_is_better) != 1:
    return 0.0  # at the goal, or open: met or not is all that is known
  before, after = (
    figure["value"] / (figure["goal"] or 1.0) for figure in (old, new)
  )
  change = (after - before) / abs(before) if before else 0.0
  return -change if more_is_better.pop() else change


def table(found: Mapping[str, Figures]) -> str:
  """Returns all figures of all benchmarks, a line each."""
  rows = [("figure", "value", "goal", "peer", "met")]
  for bench, figures in found.items():
    for name, figure in figures.items():
      shown = name if name.startswith(f"{bench}/") else f"{bench}/{name}"
      met = {True: "yes", False: "NO", None: "open"}[figure["met"]]
      value, goal, peer = (
        _number(figure[k]) for k in ("value", "goal", "peer")
      )
      rows.append((shown, value, goal, peer, met))
  width = max(len(row[0]) for row in rows)
  return "\n".join(
    f"{name:{width}}" + "".join(f"{cell:>12}" for cell in cells)
    for name, *cells in rows
  )


def _number(value: float | None) -> str:
  return "-" if value is None else f"{value:.5g}"


def accept(name: str, figures: Figures, arguments: Sequence[str]) -> None:
  """Makes figures the record of a benchmark."""
  record = {
    "commit": _commit(),
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "machine": rollout.machine(),
    "peers": [x.partition("=")[0].lstrip("-") for x in arguments],
    "figures": figures,
  }
  _RECORDS.mkdir(exist_ok=True)
  text = json.dumps(record, indent=2, sort_keys=True) + "\n"
  (_RECORDS / f"{name}.json").write_text(text, encoding="utf-8")


def _commit() -> str:
  """Returns the commit that was measured; marked where files have changed."""
  command = ("git", "describe", "--always", "--dirty", "--exclude=*")
  done = subprocess.run(
    command, cwd=_HERE, capture_output=True, text=True, check=False
  )
  return done.stdout.strip() or "unknown"


def check(name: str, figures: Figures) -> dict[str, str]:
  """Returns what is worse than the record of a benchmark, and says so."""
  path = _RECORDS / f"{name}.json"
  if not path.exists():
    print(f"{name}: has no record; --accept makes one")
    return {}
  record = json.loads(path.read_text(encoding="utf-8"))
  if record["machine"] != rollout.machine():
    print(f"{name}: its record is of another machine, {record['machine']}")
  found = worse(record["figures"], figures)
  for figure, what in found.items():
    print(f"{name}: {figure} {what} (record of {record['commit']})")
  return found


def main(arguments: Sequence[str] | None = None) -> int:
  """Reads the command line and runs.

  Returns:
    The exit code.
  """
  chosen = _asked(arguments)
  found: dict[str, Figures] = {}
  failed, regressed = {}, False
  given: dict[str, list[str]] = {}
  for at, name in enumerate(chosen.only, 1):
    peers = [p for p in _PEERS.get(name, ()) if getattr(chosen, p)]
    given[name] = [f"--{peer}={getattr(chosen, peer)}" for peer in peers]
    minutes = _QUICK_MINUTES if chosen.quick else DEADLINES[name]
    quick = ["--quick"] if chosen.quick else []
    print(f"[{at}/{len(chosen.only)}] {name}", flush=True)
    try:
      script = _HERE / f"{name}.py"
      found[name] = run(script, [*quick, *given[name]], 60 * minutes)
    except RuntimeError as error:
      failed[name] = str(error)
      print(f"  {error}", flush=True)
  print(f"\n{table(found)}\n")
  for name, figures in found.items():
    if chosen.accept:
      accept(name, figures, given[name])
    if chosen.check:
      regressed |= bool(check(name, figures))
  for name, why in failed.items():
    print(f"{name}: failed: {why}")
  return int(bool(failed) or regressed)


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
  """Reads the command line."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument(
    "--only", nargs="+", choices=DEADLINES, default=list(DEADLINES)
  )
  parser.add_argument("--tunix", metavar="PYTHON", help="that imports tunix")
  parser.add_argument(
    "--torch", metavar="PYTHON", help="that imports transformers and llama_cpp"
  )
  what = parser.add_mutually_exclusive_group()
  what.add_argument("--check", action="store_true", help="with the records")
  what.add_argument("--accept", action="store_true", help="as the records")
  chosen = parser.parse_args(arguments)
  if chosen.quick and (chosen.check or chosen.accept):
    parser.error("--quick: its figures are neither accepted nor checked")
  return chosen


if __name__ == "__main__":
  sys.exit(main())
