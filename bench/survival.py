"""Runs that are killed and started again, and what they lost by it.

Used by `chaos.py` and by the tests.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.runtime import dump

Losses = collections.Counter[str]
_Uids = collections.Counter[int]

_HERE = pathlib.Path(__file__).resolve().parent
_DEADLINE_S, _GLANCE_S = 300.0, 0.05
_KILLS_A_RUN = 5
_CLOCKS = ("accounting/", "busy/", "compile/", "idle/", "overhead/", "sync/")
# What an engine has done is counted from its start.
_CLOCKS += ("throughput/", "time/", "engine/")
_TRAINED = re.compile(rb"^step \d+/", re.MULTILINE)


# ------------------------------------------------------------------ processes


@types.host_record
class Life:
  """A process from its start to its end.

  Attributes:
    code: exit code, or minus the signal that ended it.
    killed: whether it was killed here.
    seconds: it lived.
    trained_s: seconds until it had trained a batch; None if it never did.
    at: time.time() of its end.
    err: what it wrote to stderr.
  """

  code: int
  killed: bool
  seconds: float
  trained_s: float | None
  at: float
  err: str


def command(
  experiment: str | pathlib.Path, settings: Sequence[str]
) -> list[str]:
  """Returns the flags of a run in the folder `run` of where it is started."""
  flags = [f"--exp={experiment}", "--workdir=run"]
  return [*flags, *(f"--set={setting}" for setting in settings)]


@types.host_record
class Kill:
  """When a process is killed, with all its children.

  Attributes:
    seconds: after its start, or after the next.
    after: what it must have said on stderr first.
  """

  seconds: float
  after: str = ""


NEVER = Kill(seconds=math.inf)


def live(flags: Sequence[str], cwd: pathlib.Path, kill: Kill = NEVER) -> Life:
  """Runs the program in a session of its own, and waits for its end.

  Args:
    flags: from `command`.
    cwd: where; what the process says is kept there.
    kill: when it is killed.

  Returns:
    What became of it; one that outlives a deadline is killed, too.
  """
  trained_s = since = None
  begun = now = time.monotonic()
  with _started(flags, cwd) as (process, err):
    left = _DEADLINE_S
    while left > 0:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(min(left, _GLANCE_S))
        break
      said, now = err.read_bytes(), time.monotonic()
      if trained_s is None and _TRAINED.search(said):
        trained_s = now - begun
      if since is None and kill.after.encode() in said:
        since = now if kill.after else begun
      due = math.inf if since is None else since + kill.seconds
      left = min(due, begun + _DEADLINE_S) - now
    killed = process.poll() is None
    at = time.time()
  return Life(
    code=process.wait(),
    killed=killed,
    seconds=time.monotonic() - begun,
    trained_s=trained_s,
    at=at,
    err=err.read_text(errors="replace"),
  )


@contextlib.contextmanager
def _started(
  flags: Sequence[str], cwd: pathlib.Path
) -> Iterator[tuple[subprocess.Popen, pathlib.Path]]:
  """Starts the program; in the end kills what is left of it."""
  number = len(list(cwd.glob("err-*.txt")))
  out, err = (cwd / f"{name}-{number:02d}.txt" for name in ("out", "err"))
  with out.open("wb") as stdout, err.open("wb") as stderr:
    process = subprocess.Popen(
      [sys.executable, "-m", "jaxrl_post.main", *flags],
      cwd=cwd,
      env={
        "JAX_COMPILATION_CACHE_DIR": str(_HERE.parent / ".cache" / "jax"),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        **os.environ,
        "PYTHONPATH": f"{_HERE.parent / 'src'}{os.pathsep}{_HERE}",
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      },
      stdout=stdout,
      stderr=stderr,
      start_new_session=True,
    )
  try:
    yield process, err
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def survive(
  flags: Sequence[str], cwd: pathlib.Path, kills: Sequence[Kill]
) -> Iterator[Life]:
  """Starts a run again and again until it ends.

  Args:
    flags: the same for every process.
    cwd: where; made if missing.
    kills: of each process, in order; the one after them may end. One that ends
      before it is killed was the last.

  Yields:
    Each process, before the next one starts.
  """
  cwd.mkdir(parents=True, exist_ok=True)
  for kill in [*kills, NEVER]:
    yield (life := live(flags, cwd, kill))
    if not life.killed:
      return


@types.host_record
class Survivor:
  """A run that was killed some times, and has ended.

  Attributes:
    cwd: where it was started; its folder is `run` in there.
    lives: its processes.
    phases: what those that were killed did then, by `phase`.
  """

  cwd: pathlib.Path
  lives: tuple[Life, ...]
  phases: tuple[str, ...]


def survivors(
  flags: Sequence[str],
  folder: pathlib.Path,
  *,
  kills: int,
  life_s: float,
  num_steps: int,
  draw: random.Random,
) -> Iterator[Survivor]:
  """Starts runs one after the other, and kills them, `kills` times in all.

  Args:
    flags: of every run.
    folder: they get folders in it.
    kills: how many. A run that is killed more than a few times would get
      nowhere, so there are several.
    life_s: kills are drawn evenly from this age of a process.
    num_steps: batches of a run.
    draw: draws them.

  Yields:
    Each run that has ended.
  """
  done = 0
  for number in range(2 * kills + 4):  # Some may end before their time.
    if done >= kills:
      return
    cwd = folder / f"{number:02d}"
    count = min(_KILLS_A_RUN, kills - done)
    planned = [Kill(seconds=draw.uniform(0, life_s)) for _ in range(count)]
    lives, phases = [], []
    for life in survive(flags, cwd, planned):
      if life.killed and len(lives) < count:
        phases.append(phase(life, cwd / "run", num_steps))
      lives.append(life)
    done += len(phases)
    yield Survivor(cwd=cwd, lives=tuple(lives), phases=tuple(phases))


def phase(life: Life, run: pathlib.Path, num_steps: int) -> str:
  """Says what a process did when it was killed, by the folder of its run.

  Returns:
    One of "starting", until the first batch was trained; "saving"; "ending",
    after the last batch; "training".
  """
  if not _TRAINED.search(life.err.encode()):
    return "starting"
  for folder in (run / "checkpoints").glob("[0-9]*"):
    young = folder.stat().st_mtime > life.at - life.seconds
    if young and not (folder / "manifest.json").exists():
      return "saving"
  lines = _lines(run / "metrics.jsonl", Losses())
  return "ending" if lines[-1]["step"] == num_steps else "training"


# --------------------------------------------------------------- what was lost


def losses(run: pathlib.Path, *, num_steps: int, max_lag: int) -> Losses:
  """Looks whether a run that has ended did everything once.

  Args:
    run: its folder, with a dump.
    num_steps: batches it had to train.
    max_lag: bound on the lag of a trained token.

  Returns:
    By name, how often something was amiss: groups that were neither trained nor
    left with a reason, or more than once; tokens that were sampled and not
    trained with their group, or twice; batches that are missing, or whose dump
    is not what the events say; lines of events or metrics that are damaged,
    missing or too many; lines with a lag above the bound.
  """
  found = Losses()
  began, left, made = _Uids(), _Uids(), _Uids()
  batches: list[list[int]] = []
  for line in _lines(run / "events.jsonl", found):
    match line:
      case {"event": "Admit", "uid": uid}:
        began[uid] += 1
      case {"event": "Block", "uid": uid, "tokens": tokens}:
        made[uid] += tokens
      case {"event": "Consume", "uids": uids}:
        batches.append(uids)
        left.update(uids)
      case {"event": "Filter" | "Fail" | "Drop", "uid": uid}:
        left[uid] += 1
  everyone = range(max([*began, *left], default=-1) + 1)
  found["groups lost"] += sum(not (began[u] and left[u]) for u in everyone)
  for uids in (began, left):
    found["groups twice"] += sum(n > 1 for n in uids.values())
  found += _tokens(run, batches, made)
  rows = [line for line in _lines(run / "metrics.jsonl", found) if line["step"]]
  steps = _Uids(line["step"] for line in rows)
  steps.subtract(range(1, num_steps + 1))
  found["lines wrong"] += sum(map(abs, steps.values()))
  found["batches wrong"] += abs(len(batches) - num_steps)
  found["lags above"] += sum(line["staleness/max"] > max_lag for line in rows)
  return +found


def _tokens(
  run: pathlib.Path, batches: Sequence[Sequence[int]], made: _Uids
) -> Losses:
  """Compares what was trained with what the events tell."""
  found, seen, trained = Losses(), set[int](), _Uids()
  for number, uids in enumerate(batches, 1):
    try:
      groups = dump.read(dump.batch(run / "dump", number))
    except types.InputError:
      found["batches wrong"] += 1
      continue
    found["batches wrong"] += [g.prompt.uid for g in groups] != sorted(uids)
    for rollout in itertools.chain(*(g.rollouts for g in groups)):
      uid, length = rollout.completion.uid, len(rollout.completion.tokens)
      found["tokens twice"] += length * (uid in seen)
      seen.add(uid)
      trained[rollout.prompt.uid] += length
  for uid in {*itertools.chain(*batches)}:
    found["tokens lost"] += abs(made[uid] - trained[uid])
  return found


def differences(
  run: pathlib.Path,
  other: pathlib.Path,
  read: Callable[[pathlib.Path], types.Tree],
) -> Losses:
  """Compares a run with another that did the same, bit for bit.

  Args:
    run: its folder, with a dump.
    other: likewise.
    read: reads the newest checkpoint of a folder, as arrays of the host.

  Returns:
    By name, how many arrays of the state, batches, and lines of metrics without
    the readings of clocks are different.
  """
  found = Losses()
  for one, two in itertools.zip_longest(computed(run), computed(other)):
    found["lines different"] += one != two
  for batch in dump.batches(other / "dump"):
    mine = run / "dump" / batch.name
    same = mine.exists() and repr(dump.read(mine)) == repr(dump.read(batch))
    found["batches different"] += not same
  trees = [jax.tree.leaves(read(folder)) for folder in (run, other)]
  for one, two in zip(*trees, strict=True):
    found["arrays different"] += not np.array_equal(one, two)
  return +found


def computed(run: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the metrics of a run, line by line, without readings of clocks."""
  return [
    {k: v for k, v in line.items() if not k.startswith(_CLOCKS)}
    for line in _lines(run / "metrics.jsonl", Losses())
  ]


def _lines(path: pathlib.Path, found: Losses) -> list[dict[str, Any]]:
  """Reads lines of JSON; counts those that are none."""
  lines = []
  for text in path.read_bytes().split(b"\n")[:-1]:
    try:
      lines.append(json.loads(text))
    except ValueError:
      found["lines wrong"] += 1
  return lines
