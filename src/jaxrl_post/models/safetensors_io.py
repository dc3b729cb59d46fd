"""Opens a Hugging Face folder: its config, and its tensors in safetensors.

Tensors are mapped into memory and not read: what is looked at comes from the
disk, page by page, and what is not looked at never does. A folder may come from
anywhere: nothing in it is run, and no file outside it is opened.
"""

import functools
import json
import os
import pathlib
import re
import struct
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from jaxrl_post import types
from jaxrl_post.models import hf_format

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
  "F64": np.dtype(np.float64),
}

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_PLAIN = re.compile(r"[^/\\\0]+\.safetensors")
_FAULTS = (OSError, ValueError, RecursionError)
_CAUSE_CHARS = 200


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a file that holds one JSON object, each of its keys once.

  Raises:
    InputError: where there is no such file, or something else in it.
  """
  try:
    value = _object(path.read_bytes())
  except _FAULTS as error:
    raise types.InputError(
      f"{path}: expected a JSON file, got {_cause(error)}. Fetch the "
      "checkpoint again."
    ) from error
  if not isinstance(value, dict):
    raise types.InputError(
      f"{path}: expected a JSON object, got {type(value).__name__}. Fetch the "
      "checkpoint again."
    )
  return value


def _object(text: bytes) -> Any:
  return json.loads(text.decode(), object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Makes an object, of which two readers could not read two things."""
  found = {}
  for name, value in pairs:
    if name in found:
      raise ValueError(f"{name!r} twice")
    found[name] = value
  return found


def _cause(error: BaseException) -> str:
  """Says in one line what went wrong, whatever the file made of it."""
  line = " ".join(f"{type(error).__name__}: {error}".split())
  line = "".join(c if c.isprintable() else "?" for c in line)
  return line[:_CAUSE_CHARS].rstrip(". ")


def contained(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the path of a file of a folder.

  Args:
    folder: of a checkpoint.
    name: of a file in it. It may be a link within the folder, or to `blobs` two
      folders above, as in the hub's cache.

  Raises:
    InputError: there is no such file, or it lies elsewhere.
  """
  root = pathlib.Path(os.path.realpath(folder))
  file = pathlib.Path(os.path.realpath(folder / name))
  if not any(map(file.is_relative_to, (root, root.parent.parent / "blobs"))):
    raise types.InputError(
      f"{folder / name}: expected a file in its own folder, got a link to "
      f"{str(file)!r}. Do not load this checkpoint, or put the file there."
    )
  if not file.is_file():
    raise types.InputError(
      f"{folder / name}: expected a file, got none. Fetch the checkpoint again."
    )
  return folder / name


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Finds the files with weights, none of them outside the folder."""
  index = folder / INDEX
  if not index.exists():
    if (folder / SINGLE).exists():
      return [contained(folder, SINGLE)]
    pickles = [p.name for pattern in _PICKLES for p in folder.glob(pattern)]
    got = "no weights"
    if pickles:
      got = f"{sorted(pickles)[0]}, a pickle that may run code"
    raise types.InputError(
      f"{folder}: expected {SINGLE} or {INDEX}, got {got}. Convert the "
      "checkpoint to safetensors."
    )
  names = read_json(contained(folder, INDEX)).get("weight_map")
  if not isinstance(names, dict) or not names:
    raise types.InputError(
      f"{index}: expected a weight_map, got {type(names).__name__}. Fetch it "
      "again."
    )
  for name in names.values():
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
      raise types.InputError(
        f"{index}: expected names of files in its own folder, got "
        f"{name!r:.100}. Do not load this checkpoint."
      )
  return [contained(folder, name) for name in sorted(set(names.values()))]


def _read(
  path: pathlib.Path, kind: str, shape: tuple[int, ...], offset: int
) -> np.ndarray:
  # As a plain array: each of the many views of a memmap costs microseconds.
  return np.asarray(np.memmap(path, FLOATS[kind], "r", offset, shape))


def _header(path: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
  """Returns type and shape of each tensor of a file, and where it begins."""
  try:
    # Refuses sizes, offsets and types that do not fit each other or the file.
    with safetensors.safe_open(path, "np"):
      pass
    with path.open("rb") as file:
      (size,) = struct.unpack("<Q", file.read(8))
      header = _object(file.read(size))
  except (*_FAULTS, safetensors.SafetensorError) as error:
    raise types.InputError(
      f"{path}: expected a whole safetensors file, got {_cause(error)}. Fetch "
      "it again."
    ) from error
  header.pop("__metadata__", None)
  return {
    name: (of["dtype"], tuple(of["shape"]), 8 + size + of["data_offsets"][0])
    for name, of in header.items()
  }


def entries(folder: pathlib.Path) -> dict[str, hf_format.Entry]:
  """Lists the tensors of a folder by name, without reading them.

  Raises:
    InputError: in one line, where weights are missing, cut off, in a pickle,
      outside the folder, twice in it, or of a type that is not a float.
  """
  found: dict[str, hf_format.Entry] = {}
  for path in _files(folder):
    for name, (kind, shape, offset) in _header(path).items():
      if name in found:
        raise types.InputError(
          f"{path}: expected each tensor once, got {name!r} again. Fetch the "
          "checkpoint again."
        )
      if kind not in FLOATS:
        raise types.InputError(
          f"{path}: expected {name!r} as one of {', '.join(FLOATS)}, got "
          f"{kind}. Take a checkpoint that is not quantized."
        )
      read = functools.partial(_read, path, kind, shape, offset)
      found[name] = hf_format.Entry(shape, read)
  return found
