"""Opens a Hugging Face folder: its config, and its tensors in safetensors."""

import functools
import json
import pathlib
import re
from typing import Any

import numpy as np
import safetensors

from jaxrl_post import types
from jaxrl_post.models import hf_format

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_PLAIN = re.compile(r"[^/\\]+\.safetensors")
_FLOATS = ("F32", "F16", "BF16", "F64")


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a file that holds one JSON object.

  Raises:
    InputError: where there is no such file, or something else in it.
  """
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise types.InputError(
      f"{path}: expected a JSON file, got {type(error).__name__}: {error}. "
      "Fetch the checkpoint again."
    ) from error
  if not isinstance(value, dict):
    raise types.InputError(
      f"{path}: expected a JSON object, got {type(value).__name__}. Fetch the "
      "checkpoint again."
    )
  return value


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Finds the files with weights, none of them outside the folder."""
  index = folder / _INDEX
  if not index.is_file():
    single = folder / "model.safetensors"
    if single.is_file():
      return [single]
    pickles = [p.name for pattern in _PICKLES for p in folder.glob(pattern)]
    got = "no weights"
    if pickles:
      got = f"{sorted(pickles)[0]}, a pickle that may run code"
    raise types.InputError(
      f"{folder}: expected model.safetensors or {_INDEX}, got {got}. Convert "
      "the checkpoint to safetensors."
    )
  names = read_json(index).get("weight_map")
  if not isinstance(names, dict) or not names:
    raise types.InputError(
      f"{index}: expected a weight_map, got {names!r}. Fetch it again."
    )
  for name in names.values():
    # A plain name: the file itself may be a link, as in the hub's cache.
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
      raise types.InputError(
        f"{index}: expected names of files in its own folder, got {name!r}. "
        "Do not load this checkpoint."
      )
  return [folder / name for name in sorted(set(names.values()))]


def _read(path: pathlib.Path, name: str) -> np.ndarray:
  with safetensors.safe_open(path, "np") as file:
    return file.get_tensor(name)


def _header(path: pathlib.Path) -> dict[str, tuple[list[int], str]]:
  """Returns shape and type of each tensor of a file."""
  try:
    with safetensors.safe_open(path, "np") as file:
      names = file.keys()
      parts = {name: file.get_slice(name) for name in names}
      return {n: (p.get_shape(), p.get_dtype()) for n, p in parts.items()}
  except (OSError, safetensors.SafetensorError) as error:
    raise types.InputError(
      f"{path}: expected a whole safetensors file, got {error}. Fetch it again."
    ) from error


def entries(folder: pathlib.Path) -> dict[str, hf_format.Entry]:
  """Lists the tensors of a folder by name, without reading them.

  Raises:
    InputError: in one line, where weights are missing, cut off, in a pickle,
      outside the folder, twice in it, or of a type that is not a float.
  """
  found: dict[str, hf_format.Entry] = {}
  for path in _files(folder):
    for name, (shape, kind) in _header(path).items():
      if name in found:
        raise types.InputError(
          f"{path}: expected each tensor once, got {name} again. Fetch the "
          "checkpoint again."
        )
      if kind not in _FLOATS:
        raise types.InputError(
          f"{path}: expected {name} as one of {', '.join(_FLOATS)}, got "
          f"{kind}. Take a checkpoint that is not quantized."
        )
      read = functools.partial(_read, path, name)
      found[name] = hf_format.Entry(tuple(shape), read)
  return found
