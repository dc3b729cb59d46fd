"""Checkpoints: what a run needs to go on, written while it trains.

A checkpoint of step 12 is the folder `12`: the arrays in `state`, in the form
of `orbax.checkpoint.v1`, the host's part in `meta.json`, and `manifest.json`
with the size and checksum of every file. The manifest is written last, so a
folder without it is not a checkpoint, whatever killed its writer.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import socket
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxrl_post import types
from jaxrl_post.runtime import folder as folder_lib

_STATE = "state"
_META = "meta.json"
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 24
# Longest wait for a save, in seconds.
DEADLINE_S = 1200.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """When to save, and how much to keep.

  Attributes:
    every: steps between checkpoints; 0 saves the last step only.
    keep: newest complete checkpoints that stay on disk.
  """

  every: int = 10
  keep: int = 2

  def __post_init__(self) -> None:
    rules = (
      (self.every >= 0, "every", ">= 0 (0 saves the last step)", self.every),
      (self.keep >= 1, "keep", ">= 1", self.keep),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"checkpoint.{name}: expected {rule}, got {value}. Correct the value."
        )


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
  """The checkpoints of one run, newest `keep` of them.

  One thread calls it. In a run of several processes all of them do, in the
  same order, on a folder they share.
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
    self._folder.mkdir(parents=True, exist_ok=True)
    self._keep = cfg.keep
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    self._running: concurrent.futures.Future[None] | None = None
    self._last: int | None = None

  def save(self, step: int, state: types.Tree, meta: Mapping[str, Any]) -> None:
    """Starts to write a checkpoint, after the one before it is written.

    Args:
      step: finished steps. The step that was saved or restored last is
        complete already, and left as it is.
      state: a tree of jax arrays, random keys among them. It may be donated
        as soon as this returns.
      meta: what JSON can hold; read before this returns.

    Returns:
      Nothing, before the files are complete. Older checkpoints beyond `keep`
      are deleted once they are.

    Raises:
      RunError: the save before did not end in time.
      OSError: or whatever else made the save before this one fail.
    """
    self._settle(DEADLINE_S)
    if step == self._last:
      return
    text = json.dumps(meta)
    path = self._folder / str(step)
    if jax.process_index() == 0:
      # Left by a run that was killed while it wrote this step.
      _delete(path)
      path.mkdir()
    with self._launching():
      response = ocp.save_async(str(path / _STATE), state)
    self._running = self._worker.submit(
      self._finish, response, path, text, _describe(state)
    )
    self._last = step

  def restore(
    self, abstract_state: types.Tree
  ) -> tuple[types.Tree, dict[str, Any], int] | None:
    """Reads the newest checkpoint that is whole.

    Args:
      abstract_state: the tree of `save` with a `jax.ShapeDtypeStruct` for
        each array; its shardings need not be those of the run that saved.

    Returns:
      State, meta and step, bit for bit as saved, in the shardings asked for;
      None when nothing was ever completely saved. Each newer folder that is
      not whole is named in one warning.

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
    if not (path / _MANIFEST).exists():
      raise types.InputError(
        f"--workdir: expected a folder that all processes share, got {path} "
        f"only at the first of them, not at {socket.gethostname()}. Use a "
        "shared file system."
      )
    return self._load(path, step, abstract_state)

  def _newest(self) -> int | None:
    """Returns the newest step that is whole; warns of others on the way."""
    damaged = []
    for step in sorted(_steps(self._folder), reverse=True):
      path = self._folder / str(step)
      fault = _fault(path)
      if fault is None:
        return step
      _log.warning(
        "checkpoint %s is not whole (%s); looking for the one before it",
        path,
        fault,
      )
      if (path / _MANIFEST).exists():
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
      RunError: it did not end in time.
      OSError: or whatever else made the last save fail.
    """
    self._worker.shutdown(wait=False)
    self._settle(deadline)

  def _load(
    self, path: pathlib.Path, step: int, abstract_state: types.Tree
  ) -> tuple[types.Tree, dict[str, Any], int]:
    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    _check_leaves(path, manifest["leaves"], _describe(abstract_state))
    state = ocp.load(str(path / _STATE), abstract_state)
    meta = json.loads((path / _META).read_text(encoding="utf-8"))
    self._last = step
    return state, meta, step

  def _settle(self, deadline: float) -> None:
    running, self._running = self._running, None
    if running is None:
      return
    try:
      running.result(deadline)
    except TimeoutError as error:
      raise types.RunError(
        f"{self._folder}: expected the save of step {self._last} to end "
        f"within {deadline} s, got no answer. Check the disk."
      ) from error

  def _finish(
    self,
    response: Any,  # ocp.AsyncResponse, which cannot be checked at run time
    path: pathlib.Path,
    meta: str,
    leaves: dict[str, str],
  ) -> None:
    response.result(DEADLINE_S)
    if jax.process_index() != 0:
      return
    folder_lib.write(path / _META, meta)
    manifest = {"leaves": leaves, "files": _checksums(path)}
    folder_lib.write(path / _MANIFEST, json.dumps(manifest))
    self._prune(int(path.name))

  def _prune(self, step: int) -> None:
    older = sorted(s for s in _steps(self._folder) if s <= step)
    complete = [
      s for s in older if (self._folder / str(s) / _MANIFEST).exists()
    ]
    for s in sorted(set(older) - set(complete[-self._keep :])):
      _delete(self._folder / str(s))


def _steps(folder: pathlib.Path) -> list[int]:
  return [
    int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir()
  ]


def _delete(path: pathlib.Path) -> None:
  # Without its manifest a folder that is half deleted is no checkpoint.
  (path / _MANIFEST).unlink(missing_ok=True)
  if path.exists():
    shutil.rmtree(path)


def _describe(tree: types.Tree) -> dict[str, str]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in leaves
  }


def _check_leaves(
  path: pathlib.Path, stored: Mapping[str, str], asked: Mapping[str, str]
) -> None:
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


def _checksums(path: pathlib.Path) -> dict[str, list[int]]:
  files = sorted(p for p in path.rglob("*") if p.is_file())
  return {str(p.relative_to(path)): [p.stat().st_size, _crc(p)] for p in files}


def _crc(path: pathlib.Path) -> int:
  total = 0
  with path.open("rb") as file:
    while chunk := file.read(_CHUNK_BYTES):
      total = zlib.crc32(chunk, total)
  return total


def _fault(path: pathlib.Path) -> str | None:
  """Says what is missing or damaged in a checkpoint; None when it is whole."""
  try:
    files = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))["files"]
  except FileNotFoundError:
    return f"it has no {_MANIFEST}: its save did not finish"
  except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
    return f"{_MANIFEST} is damaged"
  for name, (size, crc) in files.items():
    file = path / name
    if not file.is_file():
      return f"{name} is missing"
    if file.stat().st_size != size:
      return f"{name} has {file.stat().st_size} bytes, not {size}"
    if _crc(file) != crc:
      return f"the checksum of {name} is wrong"
  return None
