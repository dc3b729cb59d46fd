"""Times rollouts beside Tunix, transformers and llama.cpp.

    python bench/rollout.py [--quick] [--workloads W1 W2] [--repeats N]
      [--tunix PYTHON] [--torch PYTHON]

Four batches of `workloads` (W1 tiny, W2 small, W3 with the shape of a real
model, W4 with completions of unequal lengths) are sampled by our engine and by
others that hold the same random weights: a sequence scored by each must come
out alike. Each system is a process of its own; they take turns, and the one
whose turn it is has the machine to itself. A rollout is timed from prompts to
lists of ids on the host; counted are sampled tokens, padding not. Medians over
the repeats, W4 about half as many. In the same turns JAX's own limits are
measured: float32 matrix products as one decode step has them, large square
ones, and reading memory.

In W4 one id of 64 ends a completion. Our engine also runs it with 32 rows that
are refilled, and in lockstep: one block, until the longest ends. All three make
the same completions, and the better of the first two counts. llama.cpp takes a
list of such lengths.

The others run in environments of their own, given by their Python; whose is
absent is left out, and so are goals against it:

    python3 -m venv tunix
    tunix/bin/pip install google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2
    python3 -m venv torch
    torch/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
    torch/bin/pip install --no-deps gguf==0.19.0 diskcache
    export CMAKE_ARGS=-DGGML_NATIVE=ON PIP_NO_BINARY=llama-cpp-python
    torch/bin/pip install --no-deps llama-cpp-python==0.3.36

The last one compiles for a quarter of an hour. `generate` of transformers is
what TRL samples with. Processes of JAX get huge pages for malloc, Tunix's best
setting and so ours. torch and llama.cpp wait in busy loops: a neighbour that
takes part of a core makes them many times slower, so turns tell what others
took. --quick is a smoke test.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import workloads

_HERE = pathlib.Path(__file__).resolve().parent
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_START_S, _TURN_S = 300.0, 300.0
_ALIKE = 1e-2
_DISTURBED = 0.1
_PEER_GOAL = {"W1": 2.2, "W2": 2.2, "W3": 1.8, "W4": 2.0}
_LLAMA_GOAL = {"W2": 1.3, "W3": 1.3}
_LOCKSTEP_GOAL, _RATE_GOAL, _GAP_GOAL = 1.6, 0.70, 0.05
# The workload whose goals are also about our own parts.
_LOOKED_INTO = "W2"
_OWN, _REFILL, _LOCKSTEP = "own", "own, 32 rows", "own, lockstep"
_LLAMA = "llama.cpp"
_PEERS = ("tunix", "transformers", "transformers, continuous")


@dataclasses.dataclass(frozen=True)
class System:
  """How to start what is measured.

  Attributes:
    name: in tables.
    command: that starts it.
    environment: what it needs beyond our own.
    warms_up: its first rollout takes longer, and is not counted.
  """

  name: str
  command: tuple[str, ...]
  environment: Mapping[str, str]
  warms_up: bool = True


def systems(
  w: workloads.Workload, chosen: argparse.Namespace
) -> tuple[System, ...]:
  """Returns what takes turns on a workload, our engine first."""
  jax_cpu = {**_HUGE_PAGES, "JAX_PLATFORMS": "cpu"}
  source = {**jax_cpu, "PYTHONPATH": str(_HERE.parent / "src")}
  found: list[System] = []

  def add(name: str, python: str | None, *command: str, **env: str) -> None:
    if python:
      script, *rest = command
      run = (python, str(_HERE / script), w.name, *rest)
      found.append(System(name, run, env))

  quick = ("--quick",) if chosen.quick else ()
  add(_OWN, sys.executable, "own.py", *quick, **source)
  if w.ragged:
    few = ("--rows=32", "--block=8")
    add(_REFILL, sys.executable, "own.py", *few, **source)
    whole = f"--block={w.max_tokens}"
    add(_LOCKSTEP, sys.executable, "own.py", whole, **source)
  add("tunix", chosen.tunix, "peer_tunix.py", **jax_cpu)
  add("transformers", chosen.torch, "peer_torch.py")
  if w.ragged:
    add(_PEERS[2], chosen.torch, "peer_torch.py", "--continuous")
  add(_LLAMA, chosen.torch, "peer_llama_cpp.py")
  # What compiles nothing needs no rollout of W4, a quarter of a minute.
  ready = ("transformers", _LLAMA) if w.ragged else ()
  return tuple(
    dataclasses.replace(system, warms_up=system.name not in ready)
    for system in found
  )


# ------------------------------------------------------------------ processes


class Process:
  """A system that runs, and answers one order at a time."""

  def __init__(self, system: System, folder: pathlib.Path) -> None:
    """Starts it and waits until it is ready."""
    self.name = system.name
    self._errors = folder / f"{system.name}.txt"
    # Of the settings outside, those that change what is measured are dropped.
    dropped = ("XLA_FLAGS", "GLIBC_TUNABLES", "OMP_NUM_THREADS")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    with self._errors.open("wb") as errors:
      self._child = subprocess.Popen(
        system.command,
        env={**kept, "HF_HUB_OFFLINE": "1", **system.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
      )
    try:
      self.ready = self._answer(_START_S)
    except BaseException:  # nothing that was started is left behind
      self.close()
      raise

  def ask(self, order: object) -> dict[str, Any]:
    """Returns the answer to an order."""
    assert self._child.stdin is not None
    self._child.stdin.write(f"{order}\n".encode())
    return self._answer(_TURN_S)

  def turn(self, step: int) -> dict[str, Any]:
    """Returns the answer to a step, and the `others` on the cores meanwhile."""
    begun, busy, own = time.monotonic(), _busy(), self._cpu()
    answer = self.ask(step)
    took = (_busy() - busy) - (self._cpu() - own)
    return {**answer, "others": max(0.0, took / (time.monotonic() - begun))}

  def close(self) -> None:
    """Ends it."""
    self._child.kill()
    self._child.wait()
    for pipe in (self._child.stdin, self._child.stdout):
      assert pipe is not None
      pipe.close()

  def _answer(self, seconds: float) -> dict[str, Any]:
    """Returns the next line that is an object; libraries print others."""
    out = self._child.stdout
    assert out is not None
    until = time.monotonic() + seconds
    while select.select([out], [], [], max(0, until - time.monotonic()))[0]:
      line = out.readline()
      if line.startswith(b"{"):
        return json.loads(line)
      if not line:
        break
    late = time.monotonic() >= until
    got = "none so far" if late else f"its end ({self._child.wait(5)})"
    said = self._errors.read_text(errors="replace")[-2000:]
    sys.exit(
      f"rollout: {self.name}: expected an answer within {seconds:.0f} s, got "
      f"{got}. It said:\n{said}"
    )

  def _cpu(self) -> float:
    fields = pathlib.Path(f"/proc/{self._child.pid}/stat").read_text()
    return _ticks(fields.rpartition(")")[2].split()[11:13])


def _busy() -> float:
  """Returns seconds that all cores of the machine have not been idle."""
  fields = pathlib.Path("/proc/stat").read_text().split(maxsplit=9)
  return _ticks(fields[1:4] + fields[6:9])


def _ticks(counts: Sequence[str]) -> float:
  return sum(map(int, counts)) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------ measuring


@dataclasses.dataclass(frozen=True)
class Measured:
  """What a workload gave, a value for each repeat.

  Attributes:
    w: the workload.
    turns: by system, the answers to its steps.
    limits: what the machine allowed, GFLOP/s and GB/s.
    gaps: our seconds outside compiled programs over seconds in them; W2 only.
    recompiled: programs compiled after the warm-up, where asked for.
  """

  w: workloads.Workload
  turns: Mapping[str, list[dict[str, Any]]]
  limits: list[dict[str, float]]
  gaps: list[float]
  recompiled: dict[str, int] | None

  def rates(self, name: str) -> list[float]:
    """Returns the tokens a second of a system; none if it was left out."""
    turns = self.turns.get(name, [])
    return [sum(turn["lengths"]) / turn["seconds"] for turn in turns]

  def rate(self, names: Sequence[str]) -> float | None:
    """Returns the best median rate of some systems, of none None."""
    medians = [statistics.median(r) for n in names if (r := self.rates(n))]
    return max(medians, default=None)

  def others(self, name: str) -> float:
    """Returns the cores that others took in a system's median turn."""
    return statistics.median(turn["others"] for turn in self.turns[name])

  def of_limit(self) -> list[float]:
    """Returns our useful operations a second over what JAX can do."""
    return [
      workloads.flops(self.w, turn["lengths"])
      / turn["seconds"]
      / (limit["decode"] * 1e9)
      for turn, limit in zip(self.turns[_OWN], self.limits, strict=True)
    ]


def measure(
  w: workloads.Workload,
  chosen: argparse.Namespace,
  repeats: int,
  folder: pathlib.Path,
) -> Measured:
  """Runs a workload: all systems in turn, as often as it is repeated."""
  running: list[Process] = []
  turns: dict[str, list[dict[str, Any]]] = {}
  limits, recompiled = [], None
  try:
    for system in systems(w, chosen):
      process = Process(system, folder)
      running.append(process)
      same_model(w, process.name, [p.ready["check"] for p in running])
      print(f"{w.name} {process.name}: {process.ready['version']}", flush=True)
      if system.warms_up:
        process.ask(repeats)
      turns[system.name] = []
    own = running[0]
    if w.name == chosen.workloads[0]:
      recompiled = own.ask("compilations")
    gaps = _gaps(own, repeats) if w.name == _LOOKED_INTO else []
    for step in range(repeats):
      limits.append(own.ask("limits"))
      for process in running:
        turns[process.name].append(process.turn(step))
  finally:
    for process in running:
      process.close()
  return Measured(w, turns, limits, gaps, recompiled)


def repeats(w: workloads.Workload, chosen: argparse.Namespace) -> int:
  """Returns how often a workload is repeated that samples."""
  return (chosen.repeats + 1) // 2 if w.ragged else chosen.repeats


def _gaps(own: Process, repeats: int) -> list[float]:
  """Returns our seconds outside compiled programs over those in them."""
  answers = [own.ask("gap") for _ in range(repeats + 1)]
  return [
    spent["seconds"] / sum(spent["programs"].values()) - 1
    for spent in answers[1:]  # the first one warms up
  ]


def same_model(
  w: workloads.Workload, name: str, checks: Sequence[float]
) -> None:
  """Ends the run when the newest system scores a sequence otherwise.

  Args:
    w: the workload.
    name: of the newest system.
    checks: log-probability of the checked sequence by each system.
  """
  ours, theirs = checks[0], checks[-1]
  if not abs(theirs - ours) <= _ALIKE * abs(ours):
    sys.exit(
      f"{w.name}, {name}: expected a sequence's "
      f"log-probability of {ours:.2f} within {_ALIKE:.0%}, got {theirs:.2f}. "
      "It is not the same model."
    )


# ------------------------------------------------------------------ reporting


def report(seen: Measured) -> dict[str, dict]:
  """Prints a workload's table and returns the figures that have goals."""
  w = seen.w
  load = " ".join(f"{x:.2f}" for x in os.getloadavg())
  print(f"\n{w.name}, medians of {len(seen.limits)} (spread); load {load}")
  print(f"{'':24} {'tokens/s':>24}   own is   mean  longest  other cores")
  ours = seen.rate((_OWN,))
  assert ours is not None
  for name, turns in seen.turns.items():
    rates = seen.rates(name)
    made = [count for turn in turns for count in turn["lengths"]]
    others = seen.others(name)
    print(
      f"{name:24} {spread(rates, '.0f'):>24} "
      f"{ours / statistics.median(rates):7.2f}x {statistics.mean(made):6.1f} "
      f"{max(made):8} {others:10.2f}{' !' if others > _DISTURBED else ''}"
    )
  for name, unit in (("decode", "GFLOP/s"), ("square", "GFLOP/s")):
    found = [limit[name] for limit in seen.limits]
    print(f"limit, {name + ' products':17} {spread(found, '.0f'):>24} {unit}")
  found = [limit["read"] for limit in seen.limits]
  print(f"limit, {'memory read':17} {spread(found, '.1f'):>24} GB/s")
  print(f"{'own, of decode products':24} {spread(seen.of_limit(), '.3f'):>24}")
  if seen.gaps:
    print(f"{'own, outside programs':24} {spread(seen.gaps, '.3f'):>24}")
  if any(seen.others(name) > _DISTURBED for name in seen.turns):
    print("! was disturbed by others: no goal of this workload is judged")
  if seen.recompiled:
    count, asked = seen.recompiled["compilations"], seen.recompiled["prompts"]
    print(f"programs compiled by {asked} random prompts: {count}")
  return figures(seen)


def figures(seen: Measured) -> dict[str, dict]:
  """Returns the figures of a workload by name.

  Returns:
    A `value`, the `goal`, what it is a ratio to (`peer`), and whether the goal
    is `met`; null what was not measured, and what others have disturbed.
  """
  name = seen.w.name
  ours = seen.rate((_OWN, _REFILL))
  peers = _PEERS if seen.w.ragged else _PEERS[:2]
  absent = [peer for peer in peers if not seen.rates(peer)]
  peer = None if absent else seen.rate(peers)
  found = {
    f"{name}/of_best_peer": figure(_over(ours, peer), _PEER_GOAL[name], peer)
  }
  if name in _LLAMA_GOAL:
    peer = seen.rate((_LLAMA,))
    found[f"{name}/of_llama_cpp"] = figure(
      _over(ours, peer), _LLAMA_GOAL[name], peer
    )
  if seen.w.ragged:
    peer = seen.rate((_LOCKSTEP,))
    found[f"{name}/of_lockstep"] = figure(
      _over(ours, peer), _LOCKSTEP_GOAL, peer
    )
  if name == _LOOKED_INTO:
    limit = statistics.median(limit["decode"] for limit in seen.limits)
    part, gap = map(statistics.median, (seen.of_limit(), seen.gaps))
    found[f"{name}/of_decode_products"] = figure(part, _RATE_GOAL, limit)
    found[f"{name}/outside_programs"] = figure(
      gap, _GAP_GOAL, None, lambda value, goal: value < goal
    )
  if any(seen.others(name) > _DISTURBED for name in seen.turns):
    found = {name: {**figure, "met": None} for name, figure in found.items()}
  if seen.recompiled:
    count = float(seen.recompiled["compilations"])
    found[f"{name}/compilations"] = figure(
      count, 0.0, None, lambda value, goal: value <= goal
    )
  return found


def _over(value: float | None, peer: float | None) -> float | None:
  return None if value is None or peer is None else value / peer


def figure(
  value: float | None,
  goal: float,
  peer: float | None,
  meets: Callable[[float, float], bool] = float.__ge__,
) -> dict[str, Any]:
  """Returns a figure as the last line has it; no value leaves it open."""
  return {
    "value": None if value is None else round(value, 4),
    "goal": goal,
    "peer": None if peer is None else round(peer, 4),
    "met": None if value is None else meets(value, goal),
  }


def spread(values: Sequence[float], digits: str) -> str:
  """Returns the median, and the least and the largest behind it."""
  low, middle, high = (
    format(f(values), digits) for f in (min, statistics.median, max)
  )
  return f"{middle} ({low}..{high})"


def machine() -> str:
  """Says what the figures were measured on."""
  lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  models = [line.partition(":")[2].strip() for line in lines if "name" in line]
  return f"{(models or ['unknown CPU'])[0]}, {workloads.cores()} cores granted"


def run(
  bench: Callable[
    [workloads.Workload, argparse.Namespace, pathlib.Path], dict[str, dict]
  ],
  about: str | None,
  arguments: Sequence[str] | None,
) -> None:
  """Runs a bench that measures beside others, and prints a line of JSON.

  Args:
    bench: measures a workload as the command line asks, with a folder for what
      the systems say; prints a table and returns the figures that have goals.
    about: what it does; the first line is shown.
    arguments: of the command line; None for this process's own.
  """
  chosen = _asked(about, arguments)
  found: dict[str, dict] = {}
  with tempfile.TemporaryDirectory(prefix="bench-") as folder:
    for name in chosen.workloads:
      w = workloads.WORKLOADS[name]
      found |= bench(w, chosen, pathlib.Path(folder))
  print(json.dumps(found))


def _asked(
  about: str | None, arguments: Sequence[str] | None
) -> argparse.Namespace:
  """Reads the command line."""
  first = (about or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=first)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument(
    "--workloads",
    nargs="+",
    choices=sorted(workloads.WORKLOADS),
    default=sorted(workloads.WORKLOADS),
  )
  parser.add_argument("--tunix", metavar="PYTHON", help="that imports tunix")
  parser.add_argument(
    "--torch",
    metavar="PYTHON",
    help="that imports transformers, and llama_cpp for rollouts",
  )
  chosen = parser.parse_args(arguments)
  if chosen.quick:
    chosen.workloads, chosen.repeats = ["W1"], 1
  print(machine())
  for name in ("tunix", "torch"):
    if not getattr(chosen, name):
      print(f"--{name} is not given: its systems are left out")
  return chosen


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line and runs."""

  def bench(
    w: workloads.Workload, chosen: argparse.Namespace, folder: pathlib.Path
  ) -> dict[str, dict]:
    return report(measure(w, chosen, repeats(w, chosen), folder))

  run(bench, __doc__, arguments)


if __name__ == "__main__":
  main()
