"""What makes a folder of files whole: their sizes and checksums, written last.

`manifest.json` in a folder lists every other file in it and below it, and has
a checksum of itself.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Mapping

from jaxrl_post import types
from jaxrl_post.runtime import folder as folder_lib

NAME = "manifest.json"
_CHUNK_BYTES = 1 << 24


@types.host_record
class Manifest:
  """What was written.

  Attributes:
    leaves: dtype and shape of each array, by its place in the tree.
    files: size in bytes and CRC-32 of each file, by its path from the folder.
  """

  leaves: dict[str, str]
  files: dict[str, tuple[int, int]]


def write(path: pathlib.Path, leaves: Mapping[str, str]) -> None:
  """Makes a folder whole, and all of it safe from a power cut.

  Args:
    path: the folder; every file of it is complete.
    leaves: see `Manifest`.
  """
  files = sorted(p for p in path.rglob("*") if p.is_file())
  found = {
    str(p.relative_to(path)): (p.stat().st_size, _crc(p, sync=True))
    for p in files
  }
  manifest = Manifest(leaves=dict(leaves), files=found)
  body = dataclasses.asdict(manifest)
  text = json.dumps({**body, "checksum": _own_crc(manifest)})
  folder_lib.write(path / NAME, text)


def read(path: pathlib.Path) -> Manifest:
  """Reads the manifest of a folder.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged.
  """
  text = (path / NAME).read_text(encoding="utf-8")
  try:
    found = json.loads(text)
    leaves = {str(name): str(leaf) for name, leaf in found["leaves"].items()}
    files = {
      str(name): (int(size), int(crc))
      for name, (size, crc) in found["files"].items()
    }
    manifest = Manifest(leaves=leaves, files=files)
    whole = found["checksum"] == _own_crc(manifest)
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{NAME} is damaged") from error
  if not whole:
    raise ValueError(f"{NAME} is damaged")
  return manifest


def fault(path: pathlib.Path) -> str | None:
  """Says what is missing or damaged in a folder; None when it is whole.

  Files that the manifest does not list are nobody's business.
  """
  try:
    files = read(path).files
  except FileNotFoundError:
    return f"it has no {NAME}: its save did not finish"
  except (ValueError, OSError):
    return f"{NAME} is damaged"
  faults = (_fault(path / name, name, *of) for name, of in files.items())
  return next((text for text in faults if text), None)


def _fault(file: pathlib.Path, name: str, size: int, crc: int) -> str:
  if not file.is_file():
    return f"{name} is missing"
  if file.stat().st_size != size:
    return f"{name} has {file.stat().st_size} bytes, not {size}"
  if _crc(file) != crc:
    return f"the checksum of {name} is wrong"
  return ""


def _own_crc(manifest: Manifest) -> int:
  body = dataclasses.asdict(manifest)
  return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _crc(path: pathlib.Path, *, sync: bool = False) -> int:
  total = 0
  with path.open("rb") as file:
    while chunk := file.read(_CHUNK_BYTES):
      total = zlib.crc32(chunk, total)
    if sync:
      os.fsync(file.fileno())
  return total
