"""Starts runs, in this process or in one of their own, and reads them."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest
from jax._src import array as jax_array
from jax._src import compilation_cache

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.placement import programs
from jaxrl_post.runtime import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPERIMENT = pathlib.Path(__file__).with_name("experiment.py")
_DEADLINE_S = 120.0


# ------------------------------------------------------ in a process of its own


@types.host_record
class Outcome:
  """What a process left behind.

  Attributes:
    code: its exit code, or minus the signal that ended it.
    out: what it wrote to stdout.
    err: and to stderr, from where reading began.
    at: time.time() when it had ended.
    survivors: processes of its session that live on.
  """

  code: int
  out: str
  err: str
  at: float
  survivors: tuple[int, ...]


@functools.cache
def _cache() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory(prefix="compiled-")


def _cache_folder() -> str:
  return os.environ.get("JAX_COMPILATION_CACHE_DIR") or _cache().name


@contextlib.contextmanager
def compile_cache() -> Iterator[None]:
  """Lets this process and the started ones compile each program once."""
  before = jax.config.values["jax_compilation_cache_dir"]
  least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
  jax.config.update("jax_compilation_cache_dir", _cache_folder())
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def started(cwd: pathlib.Path, *args: str) -> Iterator[subprocess.Popen]:
  """Starts the program in a session of its own; ends it at the latest."""
  env = {
    **os.environ,
    "PYTHONPATH": str(ROOT / "src"),
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": _cache_folder(),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  process = subprocess.Popen(
    [sys.executable, "-m", "jaxrl_post.main", *args],
    cwd=cwd,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  try:
    yield process
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait(_DEADLINE_S)


def read_until(process: subprocess.Popen, text: str) -> str:
  """Reads what a process says to stderr, up to the line with `text`."""
  assert process.stderr is not None
  seen = []
  watchdog = threading.Timer(_DEADLINE_S, process.kill)
  watchdog.start()
  try:
    for line in process.stderr:
      seen.append(line)
      if text in line:
        return "".join(seen)
  finally:
    watchdog.cancel()
  raise AssertionError(f"no {text!r} in: {''.join(seen)}")


def ended(process: subprocess.Popen) -> Outcome:
  """Waits for a process to end, and a moment longer for what it started."""
  out, err = process.communicate(timeout=_DEADLINE_S)
  at = time.time()
  patience = iter(range(100))
  while members(process.pid) and next(patience, None) is not None:
    threading.Event().wait(0.05)
  return Outcome(
    code=process.returncode,
    out=out,
    err=err,
    at=at,
    survivors=members(process.pid),
  )


def run(cwd: pathlib.Path, *args: str) -> Outcome:
  """Runs the program to its end."""
  with started(cwd, *args) as process:
    return ended(process)


def experiment(function: str = "get_config") -> str:
  """Writes the flag that chooses a variant of the experiment."""
  return f"--exp={EXPERIMENT}:{function}"


def settings(*assignments: str) -> list[str]:
  """Writes each assignment as a --set."""
  return [f"--set={assignment}" for assignment in assignments]


def members(session: int) -> tuple[int, ...]:
  """Returns the living processes of a session, zombies left out."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
      text = path.read_text()
    except (FileNotFoundError, ProcessLookupError):
      continue
    state, _, _, sid = text.rpartition(")")[2].split()[:4]
    if int(sid) == session and state != "Z":
      found.append(int(path.parent.name))
  return tuple(found)


# ------------------------------------------------------------- in this process


@types.host_record
class Trained:
  """A run that was made here.

  Attributes:
    state: what it returned.
    groups: of each batch.
    metrics: the lines of its log.
    pulls: shapes of the arrays that `publish` copied to the host.
  """

  state: types.TrainState
  groups: tuple[tuple[types.Group, ...], ...]
  metrics: tuple[dict[str, Any], ...]
  pulls: tuple[tuple[int, ...], ...]


def configured(*assignments: str, exp: str = "get_config") -> config.Run:
  """Loads the experiment and edits it."""
  run = config.load(f"{EXPERIMENT}:{exp}", ROOT / "experiments")
  return config.override(run, assignments)


def train(
  folder: pathlib.Path, *assignments: str, exp: str = "get_config"
) -> Trained:
  """Runs the loop here and notes what it trains on."""
  cfg = configured(*assignments, exp=exp)
  folder.mkdir(parents=True, exist_ok=True)
  groups: list[tuple[types.Group, ...]] = []
  pack = loop.pack.pack

  def noting(batch: Sequence[types.Group], *layout, **rest) -> types.Batch:
    groups.append(tuple(batch))
    return pack(batch, *layout, **rest)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.pack, "pack", noting)
    pulls = _watch_publish(patch)
    state = loop.run(cfg, prepare.prepare(cfg), folder)
  return Trained(
    state=state,
    groups=tuple(groups),
    metrics=tuple(metrics(folder)),
    pulls=tuple(pulls),
  )


def _watch_publish(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
  """Notes the arrays that are copied to the host inside of `publish`."""
  pulls: list[tuple[int, ...]] = []
  here = threading.local()
  value: Callable = jax_array.ArrayImpl._value.fget
  publish = programs.Programs.publish

  def counting(self: jax.Array) -> Any:
    if getattr(here, "publishes", False):
      pulls.append(self.shape)
    return value(self)

  def flagged(self: programs.Programs, *args: Any) -> types.Policy:
    here.publishes = True
    try:
      return publish(self, *args)
    finally:
      here.publishes = False

  patch.setattr(jax_array.ArrayImpl, "_value", property(counting))
  patch.setattr(programs.Programs, "publish", flagged)
  return pulls


# ------------------------------------------------------------------ on the disk


def metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Reads the lines of a run's log."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps that have a checkpoint."""
  return sorted(int(p.name) for p in (folder / "checkpoints").glob("[0-9]*"))


def state(folder: pathlib.Path, cfg: config.Run) -> types.TrainState:
  """Reads the newest checkpoint of a run, as arrays of the host."""
  place = loop.build(cfg, prepare.prepare(cfg))
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  store = checkpoint.Store(folder / "checkpoints", cfg.checkpoint)
  try:
    restored = store.restore(trainer.abstract)
  finally:
    store.close()
  assert restored is not None, f"no checkpoint in {folder}"
  found = restored.state
  key = jax.random.key_data(found.key)
  return jax.device_get(dataclasses.replace(found, key=key))
