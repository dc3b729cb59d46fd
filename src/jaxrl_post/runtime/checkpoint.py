"""Checkpoints: what a run needs to go on, written while it trains.

A checkpoint of step 12 is the folder `12`: the arrays in `state`, in the form
of `orbax.checkpoint.v1`, the host's part in `meta.json` and files beside it,
and `manifest.json` with the size and checksum of every file. The manifest is
written last, so a folder without it is not a checkpoint, whatever killed its
writer.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxrl_post import types
from jaxrl_post.runtime import folder as folder_lib
from jaxrl_post.runtime import manifest as manifests

STATE = "state"
_META = "meta.json"
# Longest wait for a save, in seconds; and how long one may keep the trainer
# waiting before that is said.
DEADLINE_S, _QUIET_S = 1200.0, 10.0
# What may be the best of: metrics that say how good a policy is.
_BEST_BY = ("completion/", "eval/", "loss/", "mismatch/", "reward/", "signal/")
# What a disk that is full or broken makes of a save; Orbax turns the error of
# the system into one of the other two.
_DISK = (OSError, ValueError, RuntimeError)
_CAUSE_CHARS = 300

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """When to save, and how much to keep.

  Attributes:
    every: steps between checkpoints; 0 saves the last step only.
    keep: newest complete checkpoints that stay on disk.
    keep_every: checkpoints of its multiples stay, too; 0 for none.
    keep_best: so many more that stay, the best by `best_by`.
    best_by: name of a metric of `metrics.jsonl`, higher is better. A checkpoint
      after a step without it, or where it is not finite, is no candidate.
  """

  every: int = 10
  keep: int = 2
  keep_every: int = 0
  keep_best: int = 0
  best_by: str = ""

  def __post_init__(self) -> None:
    every, multiple = self.every, self.keep_every
    fits = multiple == 0 or (every > 0 and multiple % every == 0)
    prefixes = ", ".join(f"{prefix}..." for prefix in _BEST_BY)
    known = self.best_by.startswith(_BEST_BY) and self.best_by[-1] != "/"
    rules = (
      (every >= 0, "every", ">= 0 (0 saves the last step)"),
      (self.keep >= 1, "keep", ">= 1"),
      (multiple >= 0, "keep_every", ">= 0 (0 keeps none of them)"),
      (fits, "keep_every", f"0, or a multiple of checkpoint.every={every}"),
      (self.keep_best >= 0, "keep_best", ">= 0"),
      (
        known or not self.keep_best,
        "best_by",
        f"a metric ({prefixes}) with keep_best={self.keep_best}",
      ),
      (self.keep_best or not self.best_by, "best_by", "'' with keep_best=0"),
    )
    for holds, name, rule in rules:
      if not holds:
        raise types.InputError(
          f"checkpoint.{name}: expected {rule}, got {getattr(self, name)!r}. "
          "Correct the value."
        )


@types.host_record
class Restored:
  """What a checkpoint held.

  Attributes:
    state: the tree of arrays.
    meta: as saved.
    step: finished steps.
    files: content by name, as saved.
  """

  state: types.Tree
  meta: dict[str, Any]
  step: int
  files: dict[str, bytes]


def due(cfg: Checkpoint, step: int, num_steps: int) -> bool:
  """Says whether a checkpoint follows the step that was just finished.

  Args:
    cfg: the interval.
    step: finished steps, counted from 1.
    num_steps: finished steps at the end of the run.

  Returns:
    True at multiples of `cfg.every` and at the last step.
  """
  return step == num_steps or (cfg.every > 0 and step % cfg.every == 0)


class Store:
  """The checkpoints of one run, as many as the settings keep.

  One thread calls it. In a run of several processes all of them do, in the
  same order, on a folder they share.

  A save that fails, or does not end within `DEADLINE_S`, ends the run: the next
  call raises a RunError of one line with folder and cause. What was complete
  before stays: nothing is deleted before the newer one is complete.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    cfg: Checkpoint,
    agree: Callable[[Callable[[], int | None]], int | None] = lambda f: f(),
    launching: Callable[
      [], contextlib.AbstractContextManager[Any]
    ] = contextlib.nullcontext,
  ) -> None:
    """Opens the folder, or makes it; reads and deletes nothing.

    Args:
      folder: that all processes see.
      cfg: how much to keep.
      agree: gives every process what the function returns in the first one.
      launching: entered while a save begins: with several processes, Orbax
        launches programs on all devices then.
    """
    self._agree, self._launching = agree, launching
    self._folder = pathlib.Path(folder).absolute()
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
      raise types.InputError(
        f"{self._folder}: expected a folder of checkpoints, got a file. Move "
        "it away."
      ) from error
    self._cfg = cfg
    self._running: concurrent.futures.Future[None] | None = None
    self._thread: threading.Thread | None = None
    self._last: int | None = None
    # Steps with a manifest that were found not to be whole.
    self._damaged: set[int] = set()

  def save(
    self,
    step: int,
    state: types.Tree,
    meta: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
  ) -> None:
    """Starts to write a checkpoint, after the one before it is written.

    Args:
      step: finished steps. The step that was saved or restored last is
        complete already, and left as it is.
      state: a tree of jax arrays, random keys among them. It may be donated
        as soon as this returns.
      meta: what JSON can hold; read before this returns, as are the files.
        Numbers by name under "metrics", if there are any, decide which
        checkpoints are the best.
      files: content by name, for files beside it.

    Returns:
      Nothing, before the files are complete. Older checkpoints are deleted
      once they are, but for those that the settings keep. Only the first
      process writes meta and files.

    Raises:
      RunError: this save cannot begin, or the one before failed or did not end
        in time.
      ValueError: a name is no plain one, or taken.
    """
    self._settle(DEADLINE_S)
    if step == self._last:
      return
    content = {_META: json.dumps(meta).encode(), **_copies(files or {})}
    path = self._folder / str(step)
    try:
      if jax.process_index() == 0:
        # Left by a run that was killed while it wrote this step.
        _delete(path)
        path.mkdir()
      with self._launching():
        response = ocp.save_async(str(path / STATE), state)
    except _DISK as error:
      raise self._failure(step, error) from error
    self._start(step, response, path, content, describe(state))

  def check(self) -> None:
    """Looks whether the running save has failed; does not wait for it.

    Raises:
      RunError: it has.
    """
    if self._running is not None and self._running.done():
      self._settle(0.0)

  def restore(self, abstract_state: types.Tree) -> Restored | None:
    """Reads the newest checkpoint that is whole.

    Args:
      abstract_state: the tree of `save` with a `jax.ShapeDtypeStruct` for
        each array; its shardings need not be those of the run that saved.

    Returns:
      What was saved, bit for bit, in the shardings asked for; None when
      nothing was ever completely saved. Each newer folder that is not whole is
      named in one warning.

    Raises:
      InputError: a leaf is missing, too many, or of another shape or dtype.
      RunError: there are complete checkpoints and all of them are damaged.
    """
    self._settle(DEADLINE_S)
    # A disk that one process sees later than another must not split them.
    step = self._agree(self._newest)
    if step is None:
      return None
    path = self._folder / str(step)
    if not (path / manifests.NAME).exists():
      raise types.InputError(
        f"--workdir: expected a folder that all processes share, got {path} "
        f"only at the first of them, not at {socket.gethostname()}. Use a "
        "shared file system."
      )
    return self._load(path, step, abstract_state)

  def _newest(self) -> int | None:
    """Returns the newest step that is whole; warns of others on the way."""
    damaged = []
    for step in sorted(steps(self._folder), reverse=True):
      path = self._folder / str(step)
      fault = manifests.fault(path)
      if fault is None:
        return step
      _log.warning(
        "checkpoint %s is not whole (%s); looking for the one before it",
        path,
        fault,
      )
      if (path / manifests.NAME).exists():
        self._damaged.add(step)
        damaged.append(str(step))
    if damaged:
      raise types.RunError(
        f"{self._folder}: expected a checkpoint that is whole, got damage in "
        f"all of them ({', '.join(damaged)}). Repair the disk, or move the "
        "folder away to start again from the first step."
      )
    return None

  def close(self, deadline: float = DEADLINE_S) -> None:
    """Waits for the running save.

    Args:
      deadline: longest wait, in seconds.

    Returns:
      Nothing; the checkpoint of the last `save` is then complete.

    Raises:
      RunError: the save failed, or did not end in time.
    """
    self._settle(deadline)

  def _load(
    self, path: pathlib.Path, step: int, abstract_state: types.Tree
  ) -> Restored:
    manifest = manifests.read(path)
    check_leaves(path, manifest.leaves, describe(abstract_state))
    state = ocp.load(str(path / STATE), abstract_state)
    meta = json.loads((path / _META).read_text(encoding="utf-8"))
    files = {
      name: (path / name).read_bytes()
      for name in manifest.files
      if "/" not in name and name != _META
    }
    self._last = step
    return Restored(state=state, meta=meta, step=step, files=files)

  def _start(self, step: int, *job: Any) -> None:
    """Lets a thread of its own finish a save."""
    self._running = concurrent.futures.Future()
    # A daemon: a disk that hangs must not keep the process alive.
    self._thread = threading.Thread(
      target=self._work, args=(self._running, *job), daemon=True
    )
    self._thread.name = f"checkpoint-{step}"
    self._last = step
    self._thread.start()

  def _work(self, done: concurrent.futures.Future[None], *job: Any) -> None:
    try:
      self._finish(*job)
    except BaseException as error:
      done.set_exception(error)  # For the thread that saves to raise.
    else:
      done.set_result(None)

  def _settle(self, deadline: float) -> None:
    """Waits for the running save, and raises what became of it."""
    running, self._running = self._running, None
    if running is None or self._thread is None or self._last is None:
      return
    try:
      error = self._await(running, deadline)
    except TimeoutError:
      error = TimeoutError(f"no end of it within {deadline:g} s")
    else:
      self._thread.join()
    if error is None:
      return
    failure = self._failure(self._last, error)
    if not isinstance(error, _DISK):
      failure.__cause__ = error
    raise failure

  def _await(
    self, running: concurrent.futures.Future[None], deadline: float
  ) -> BaseException | None:
    if deadline > _QUIET_S:
      with contextlib.suppress(TimeoutError):
        return running.exception(_QUIET_S)
      _log.warning(
        "checkpoint %s: training waits for its save to end; a larger "
        "checkpoint.every, or a faster disk, avoids that",
        self._folder / str(self._last),
      )
    return running.exception(deadline)

  def _failure(self, step: int, error: BaseException) -> types.RunError:
    """Says in one line that a save failed, why, and what there is instead."""
    whole = "there is none before it"
    with contextlib.suppress(OSError):  # The disk may be gone altogether.
      before = [s for s in self._complete() if s < step]
      if before:
        whole = f"the newest whole one is of step {max(before)}"
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:_CAUSE_CHARS]
    return types.RunError(
      f"checkpoint {self._folder / str(step)}: expected to save it, got {cause}"
      f"; {whole}. Make room or repair the disk, and start the same command "
      "again."
    )

  def _finish(
    self,
    response: Any,  # ocp.AsyncResponse, which cannot be checked at run time
    path: pathlib.Path,
    content: dict[str, bytes],
    leaves: dict[str, str],
  ) -> None:
    head = jax.process_index() == 0
    try:
      response.result(DEADLINE_S)
      if head:
        for name, data in content.items():
          folder_lib.write(path / name, data)
        manifests.write(path, leaves)
    except BaseException:
      if head:  # Torn, and on a disk that may be full.
        shutil.rmtree(path, ignore_errors=True)
      raise
    if head:
      self._damaged.discard(int(path.name))
      self._prune(int(path.name))

  def _prune(self, step: int) -> None:
    """Deletes what is older than a complete checkpoint and not to be kept."""
    older = sorted(s for s in steps(self._folder) if s <= step)
    complete = [s for s in self._complete() if s <= step]
    kept = {*complete[-self._cfg.keep :], *self._best(complete)}
    if self._cfg.keep_every:
      kept |= {s for s in complete if s % self._cfg.keep_every == 0}
    for s in sorted(set(older) - kept):
      _delete(self._folder / str(s))

  def _complete(self) -> list[int]:
    """Returns the steps that are saved, in order."""
    return [
      s
      for s in sorted(steps(self._folder))
      if s not in self._damaged
      and (self._folder / str(s) / manifests.NAME).exists()
    ]

  def _best(self, steps: list[int]) -> list[int]:
    """Returns the best of some steps; of two that are equal, the later."""
    if not self._cfg.keep_best:
      return []
    name = self._cfg.best_by
    values = [(_metric(self._folder / str(s), name), s) for s in steps]
    found = sorted((v, s) for v, s in values if v is not None)
    return [s for _, s in found[-self._cfg.keep_best :]]


def _metric(path: pathlib.Path, name: str) -> float | None:
  """Returns a metric of a checkpoint; None if it is no finite number."""
  try:
    meta = json.loads((path / _META).read_text(encoding="utf-8"))
    value = float(meta["metrics"][name])
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return value if math.isfinite(value) else None


def _copies(files: Mapping[str, bytes]) -> dict[str, bytes]:
  for name in files:
    plain = name == os.path.basename(name) and not name.startswith(".")
    if not plain or name in ("", STATE, _META, manifests.NAME):
      raise ValueError(f"checkpoint: expected the name of a file, got {name!r}")
  return {name: bytes(data) for name, data in files.items()}


def steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps that have a folder, whole or not."""
  return [
    int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir()
  ]


def _delete(path: pathlib.Path) -> None:
  # Without its manifest a folder that is half deleted is no checkpoint.
  (path / manifests.NAME).unlink(missing_ok=True)
  if path.exists():
    shutil.rmtree(path)


def describe(tree: types.Tree) -> dict[str, str]:
  """Returns dtype and shape of each array, by its place in the tree."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in leaves
  }


def check_leaves(
  path: pathlib.Path, stored: Mapping[str, str], asked: Mapping[str, str]
) -> None:
  """Refuses to read one tree as another: see `describe`."""
  # Orbax would cast or cut without a word.
  for name in sorted(stored.keys() | asked.keys()):
    have, want = (
      stored.get(name, "no such leaf"),
      asked.get(name, "no such leaf"),
    )
    if have != want:
      raise types.InputError(
        f"checkpoint {path}, leaf {name}: expected {want}, got {have}. Resume "
        "with the configuration that wrote it, or choose another --workdir."
      )
