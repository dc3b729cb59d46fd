"""Weights out: a parameter tree to the files that `transformers` reads.

Tensors are written one by one, so that beside the tree no more than one of them
is in memory. The numbers are those of the tree, cast to what is asked for.
"""

import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import types
from jaxrl_post.models import adapted, hf_format, safetensors_io, transformer

SHARD_BYTES = 5 * 10**9
Dtype: TypeAlias = Literal["float32", "bfloat16"]

# A tensor in a file: its shape, and what makes it.
_Job: TypeAlias = tuple[tuple[int, ...], Callable[[], np.ndarray]]
_CODES = {str(dtype): code for code, dtype in safetensors_io.FLOATS.items()}


def write(
  folder: pathlib.Path,
  cfg: transformer.Config,
  params: types.Tree,
  *,
  dtype: Dtype = "float32",
  shard_bytes: int = SHARD_BYTES,
) -> list[str]:
  """Writes weights as safetensors, in as many files as their size asks for.

  Args:
    folder: that is there, and has no such files.
    cfg: the shape.
    params: as `transformer.spec(cfg)` declares them, or adapted
      (`lora.attach`), on devices of this process or in the host's memory;
      what is adapted is merged.
    dtype: of the files.
    shard_bytes: most bytes of tensors in a file; one that is larger has a file
      of its own.

  Returns:
    The names of the files: `model.safetensors`, or several and their index.

  Raises:
    OSError: the disk is full, or broken.
  """
  jobs: dict[str, _Job] = {}
  table = hf_format.tensors(cfg)
  for name, tensor in sorted(table.items(), key=_order):
    leaf = params
    for key in tensor.leaf:
      leaf = leaf[key]
    jobs[name] = (tensor.shape, _stored(tensor, leaf))
  shards = list(_shards(jobs, np.dtype(dtype).itemsize, shard_bytes))
  if len(shards) == 1:
    _write_file(folder / safetensors_io.SINGLE, jobs, dtype)
    return [safetensors_io.SINGLE]
  where, total = {}, len(shards)
  for i, names in enumerate(shards, 1):
    file = f"model-{i:05d}-of-{total:05d}.safetensors"
    _write_file(folder / file, {name: jobs[name] for name in names}, dtype)
    where |= dict.fromkeys(names, file)
  size = sum(math.prod(shape) for shape, _ in jobs.values())
  metadata = {"total_size": size * np.dtype(dtype).itemsize}
  write_json(
    folder / safetensors_io.INDEX, {"metadata": metadata, "weight_map": where}
  )
  return [*dict.fromkeys(where.values()), safetensors_io.INDEX]


def write_adapter(
  folder: pathlib.Path,
  cfg: transformer.Config,
  adapters: types.Tree,
  *,
  alpha: float,
  base: str,
  prefix: str = "model.",
  dtype: Dtype = "float32",
) -> list[str]:
  """Writes adapters as the package `peft` keeps them.

  Args:
    folder: as for `write`, likewise the next.
    cfg: the shape of the model beneath.
    adapters: as `lora.spec` declares them.
    alpha: a change is multiplied by alpha / rank.
    base: where the model beneath is found.
    prefix: of its modules, from `weights.module_prefix`. Where that is another
      than "model.", adapted modules are told by their whole names, as images
      may be read by modules that end alike.
    dtype: of the file.

  Returns:
    The names of the files.

  Raises:
    OSError: the disk is full, or broken.
  """
  jobs: dict[str, _Job] = {}
  modules, rank = [], 0
  for name, tensor in hf_format.tensors(cfg).items():
    change = adapters["layers"].get(tensor.leaf[-1])
    if tensor.layer is None or change is None:
      continue
    rank = change["a"].shape[-1]
    module = prefix + name.removeprefix("model.").removesuffix(".weight")
    modules.append(module)
    num_out, num_in = tensor.shape
    for part, factor, inner, outer in (
      ("A", change["a"], num_in, rank),
      ("B", change["b"], rank, num_out),
    ):
      wide = hf_format.Tensor(tensor.leaf, tensor.layer, (outer, inner), True)
      own = f"base_model.model.{module}.lora_{part}.weight"
      jobs[own] = (wide.shape, _stored(wide, factor))
  _write_file(folder / "adapter_model.safetensors", jobs, dtype)
  settings = {
    "base_model_name_or_path": base,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_alpha": alpha,
    "lora_dropout": 0.0,
    "peft_type": "LORA",
    "r": rank,
    "target_modules": _targets(modules, prefix),
    "task_type": "CAUSAL_LM",
  }
  write_json(folder / "adapter_config.json", settings)
  return ["adapter_model.safetensors", "adapter_config.json"]


def _targets(modules: Sequence[str], prefix: str) -> list[str] | str:
  """Returns which modules `peft` adapts: ends of their names, or a pattern."""
  if prefix == "model.":
    return sorted({name.rpartition(".")[2] for name in modules})
  patterns = {re.sub(r"\d+", r"\\d+", re.escape(name)) for name in modules}
  return "|".join(sorted(patterns))


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes one JSON object, its keys in order."""
  text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
  path.write_text(f"{text}\n", encoding="utf-8")


def _order(item: tuple[str, hf_format.Tensor]) -> tuple[int, str]:
  """Orders tensors layer by layer, after what belongs to none."""
  name, tensor = item
  return -1 if tensor.layer is None else tensor.layer, name


def _stored(tensor: hf_format.Tensor, leaf: Any) -> Callable[[], np.ndarray]:
  """Returns what makes a tensor out of its leaf, once it is asked."""

  def plain() -> np.ndarray:
    return tensor.restore(np.asarray(leaf))

  def merged() -> np.ndarray:
    # Of one layer: the whole leaf may be larger than a file.
    weight = adapted.merged(
      jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[tensor.index]), leaf)
    )
    alone = hf_format.Tensor(tensor.leaf, None, tensor.shape, tensor.transpose)
    return alone.restore(np.asarray(weight))

  return merged if isinstance(leaf, adapted.Adapted) else plain


def _shards(
  jobs: Mapping[str, _Job], itemsize: int, limit: int
) -> Iterator[list[str]]:
  """Cuts tensors into files, in their order."""
  names: list[str] = []
  size = 0
  for name, (shape, _) in jobs.items():
    num_bytes = math.prod(shape) * itemsize
    if names and size + num_bytes > limit:
      yield names
      names, size = [], 0
    names.append(name)
    size += num_bytes
  yield names


def _write_file(
  path: pathlib.Path, jobs: Mapping[str, _Job], dtype: Dtype
) -> None:
  """Writes one safetensors file, tensor by tensor."""
  kind = np.dtype(dtype)
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, (shape, _) in jobs.items():
    begin, end = end, end + math.prod(shape) * kind.itemsize
    header[name] = {
      "dtype": _CODES[dtype],
      "shape": list(shape),
      "data_offsets": [begin, end],
    }
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # Numbers begin where a machine likes them.
  with path.open("xb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for _, make in jobs.values():
      file.write(_bytes(make(), kind))


def _bytes(value: np.ndarray, kind: np.dtype) -> memoryview:
  """Returns the numbers of a tensor as they stand in a file."""
  return np.asarray(value, kind, order="C").reshape(-1).view(np.uint8).data
