"""The run folder: who may write in it, and with which configuration.

`open_folder` is held for the whole run. `write` replaces a small file at once,
so that no reader and no kill ever sees half of it.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import tempfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxrl_post import types

CONFIG_FILE = "config.json"
_LOCK_FILE = ".lock"
ABSENT = "(absent)"


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
  """Replaces a file in one step, on disk before it returns.

  Args:
    path: the file; its folder must exist.
    content: the whole new content; text becomes UTF-8.

  Returns:
    Nothing. A reader sees the old content or the new, never a part, even if
    the process is killed in between.
  """
  path = pathlib.Path(path)
  data = content.encode() if isinstance(content, str) else content
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
  try:
    with os.fdopen(handle, "wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    # mkstemp makes the file private; a run folder is read by others too.
    os.chmod(name, 0o644)
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise
  sync(path.parent)


def sync(path: str | os.PathLike[str]) -> None:
  """Saves the names in a folder from a power cut.

  Args:
    path: the folder.
  """
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


@contextlib.contextmanager
def open_folder(
  workdir: str | os.PathLike[str],
  config_json: Mapping[str, Any],
  may_change: Collection[str] = (),
) -> Iterator[pathlib.Path]:
  """Makes a run folder ours until the `with` block, or the process, ends.

  Args:
    workdir: made with its parents when it does not exist.
    config_json: the resolved configuration, ready for JSON.
    may_change: dotted names of settings that a resumed run may change, with
      everything below them.

  Returns:
    The folder. Its `config.json` holds `config_json`, sorted by key.

  Raises:
    InputError: the folder cannot be written, another live process runs in it,
      or it holds a run whose configuration differs where it must not.
  """
  path = pathlib.Path(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
    lock = open(path / _LOCK_FILE, "a+")  # noqa: SIM115 (closed below)
  except OSError as error:
    raise types.InputError(
      f"--workdir: expected a folder that can be written, got {path} "
      f"({error.strerror}). Choose another."
    ) from error
  with lock:
    _claim(lock, path)
    _settle_config(path / CONFIG_FILE, config_json, may_change)
    yield path


def find_folder(
  workdir: str | os.PathLike[str],
  config_json: Mapping[str, Any],
  may_change: Collection[str] = (),
) -> pathlib.Path:
  """Finds a run folder to read from; changes nothing in it.

  Args:
    workdir: the folder of a run.
    config_json: as for `open_folder`; likewise the next.
    may_change: settings that may differ from those of the run.

  Returns:
    The folder.

  Raises:
    InputError: it holds no run, or one of another configuration.
  """
  path = pathlib.Path(workdir)
  try:
    old = (path / CONFIG_FILE).read_text(encoding="utf-8")
  except OSError as error:
    raise types.InputError(
      f"--workdir: expected the folder of a run, got {path} without a "
      f"{CONFIG_FILE} ({error.strerror}). Name the folder of a run."
    ) from error
  _refuse_other(path / CONFIG_FILE, old, config_json, may_change)
  return path


def _claim(lock: Any, path: pathlib.Path) -> None:
  # A record lock and not flock: children made by fork (reward workers) inherit
  # the latter, and one that outlives a killed run would keep its folder locked.
  try:
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError) as error:
    lock.seek(0)
    owner = lock.read().strip() or "unknown"
    raise types.InputError(
      f"--workdir: expected a folder no other run is using, got {path}, in "
      f"use by process {owner}. Stop that run or choose another folder."
    ) from error
  lock.seek(0)
  lock.truncate()
  lock.write(f"{os.getpid()}\n")
  lock.flush()


def _settle_config(
  path: pathlib.Path,
  config_json: Mapping[str, Any],
  may_change: Collection[str],
) -> None:
  text = json.dumps(config_json, indent=2, sort_keys=True) + "\n"
  try:
    old = path.read_text(encoding="utf-8")
  except FileNotFoundError:
    if (path.parent / "metrics.jsonl").exists():
      raise types.InputError(
        f"--workdir: expected {path.name} beside the metrics of a run, got "
        f"none in {path.parent}. Put it back, or choose another folder."
      ) from None
    write(path, text)
    return
  _refuse_other(path, old, config_json, may_change)
  if old != text:
    write(path, text)


def _refuse_other(
  path: pathlib.Path,
  old: str,
  config_json: Mapping[str, Any],
  may_change: Collection[str],
) -> None:
  try:
    before = leaves(json.loads(old))
  except json.JSONDecodeError as error:
    raise types.InputError(
      f"{path}: expected JSON, got an error at line {error.lineno}. Repair the "
      "file or choose another --workdir."
    ) from error
  # By way of JSON, so that tuples and lists compare equal.
  now = leaves(json.loads(json.dumps(config_json)))
  differ = [
    f"{name}={before.get(name, ABSENT)} there, {now.get(name, ABSENT)} now"
    for name in sorted(before.keys() | now.keys())
    if before.get(name, ABSENT) != now.get(name, ABSENT)
    and not _covered(name, may_change)
  ]
  if differ:
    more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    raise types.InputError(
      f"--workdir: expected the configuration of the run in {path.parent}, got "
      f"{'; '.join(differ[:3])}{more}. Undo the change or choose another "
      "folder."
    )


def leaves(tree: Any, prefix: str = "") -> dict[str, str]:
  """Returns the leaves of what config.json holds.

  Args:
    tree: read from JSON.
    prefix: goes before every name.

  Returns:
    The JSON of each leaf, by its dotted name.
  """
  if not isinstance(tree, dict) or not tree:
    return {prefix: json.dumps(tree)}
  found = {}
  for name, value in tree.items():
    found.update(leaves(value, f"{prefix}.{name}" if prefix else name))
  return found


def _covered(name: str, prefixes: Collection[str]) -> bool:
  return any(name == p or name.startswith(f"{p}.") for p in prefixes)
