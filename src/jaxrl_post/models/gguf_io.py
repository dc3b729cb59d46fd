"""Opens a GGUF file as if it were a Hugging Face checkpoint.

Metadata become the fields of config.json and tensors get their Hugging Face
names. The `gguf` package turns quantized blocks into numbers; the header is
read here, because the package takes seconds to list a vocabulary that only the
tokenizer needs. Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

import dataclasses
import functools
import math
import mmap
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_post import types
from jaxrl_post.models import hf_format

try:
  import gguf
except ImportError:  # The extra is not installed: `_package` says so.
  gguf = None

# Types of metadata, as `struct` writes them.
_SCALARS = {
  **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
  **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
_STRING, _ARRAY = 8, 9

_FIELDS = {
  "num_hidden_layers": "block_count",
  "hidden_size": "embedding_length",
  "intermediate_size": "feed_forward_length",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
  "rope_theta": "rope.freq_base",
  "max_position_embeddings": "context_length",
}
_TOP = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_LAYER = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class File:
  """A GGUF file: config.json's fields, and tensors by Hugging Face name."""

  config: dict[str, Any]
  entries: dict[str, hf_format.Entry]


def _strings(data: memoryview, at: int, size: int) -> tuple[list[str], int]:
  """Reads strings, and says where what follows begins."""
  values = []
  for _ in range(size):
    (length,) = struct.unpack_from("<Q", data, at)
    start, at = at + 8, at + 8 + length
    if at > len(data):
      raise ValueError("a string that runs past the end of the file")
    values.append(str(data[start:at], "utf-8", "replace"))
  return values, at


def _values(
  data: memoryview, at: int, kind: int, size: int
) -> tuple[list[Any], int]:
  """Reads metadata of one type, and says where what follows begins."""
  if kind == _STRING:
    return _strings(data, at, size)
  if kind in _SCALARS:
    form = f"<{size}{_SCALARS[kind]}"
    values = struct.unpack_from(form, data, at)
    return list(values), at + struct.calcsize(form)
  if kind != _ARRAY:
    raise ValueError(f"metadata of unknown type {kind}")
  arrays = []
  for _ in range(size):
    inner, length = struct.unpack_from("<IQ", data, at)
    values, at = _values(data, at + 12, inner, length)
    arrays.append(values)
  return arrays, at


def _parse(
  data: memoryview,
) -> tuple[dict[str, Any], list[tuple[str, list[int], int, int]]]:
  """Returns the metadata, and name, shape, type and place of each tensor."""
  magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", data)
  if magic != b"GGUF" or version not in {2, 3}:
    raise ValueError(f"{magic!r} version {version}, not GGUF version 2 or 3")
  at, metadata = 24, {}
  for _ in range(num_fields):
    (name,), at = _strings(data, at, 1)
    (kind,) = struct.unpack_from("<I", data, at)
    (metadata[name],), at = _values(data, at + 4, kind, 1)
  table = []
  for _ in range(num_tensors):
    (name,), at = _strings(data, at, 1)
    (rank,) = struct.unpack_from("<I", data, at)
    *dims, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, at + 4)
    at += 4 + 8 * rank + 12
    table.append((name, dims[::-1], kind, offset))
  align = metadata.get("general.alignment", 32)
  start = -(-at // align) * align
  return metadata, [(n, s, k, start + offset) for n, s, k, offset in table]


def _config(metadata: dict[str, Any], names: set[str]) -> dict[str, Any]:
  kind = metadata.get("general.architecture")
  own = f"{kind}."
  get = {
    name.removeprefix(own): value
    for name, value in metadata.items()
    if name.startswith(own)
  }.get
  hf = {name: get(field) for name, field in _FIELDS.items()}
  hf["model_type"] = kind
  hf["vocab_size"] = len(metadata.get("tokenizer.ggml.tokens", ()))
  hf["tie_word_embeddings"] = "output.weight" not in names
  heads, width = hf["num_attention_heads"], hf["hidden_size"]
  if isinstance(heads, int) and isinstance(width, int) and heads > 0:
    hf["head_dim"] = get("attention.key_length") or width // heads
    for field in ("attention.value_length", "rope.dimension_count"):
      if get(field) not in {None, hf["head_dim"]}:
        rule = f"the head width {hf['head_dim']}"
        raise hf_format.refusal(f"{kind}.{field}", rule, get(field))
  if get("expert_count"):
    raise hf_format.refusal(f"{kind}.expert_count", "none", get("expert_count"))
  if get("rope.scaling.type") not in {None, "none"}:
    hf["rope_scaling"] = {"rope_type": get("rope.scaling.type")}
  if "rope_freqs.weight" in names:
    # Llama 3's scaling as a table: the numbers it came from are not stored.
    raise hf_format.refusal(
      "rope_freqs.weight", "no scaled rotary positions in a GGUF file", "one"
    )
  return hf


def _name(name: str) -> str:
  """Returns the Hugging Face name; a tensor we do not know keeps its own."""
  found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
  if found and found[2] in _LAYER:
    return f"model.layers.{found[1]}.{_LAYER[found[2]]}.{found[3]}"
  return _TOP.get(name, name)


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """Undoes the order of rows that GGUF gives queries and keys of a Llama.

  Args:
    weight: [out, in]. In each head, rows 2i and 2i + 1 turn together.
    num_heads: heads in the rows.

  Returns:
    The rows in Hugging Face's order, where i and i + head_width / 2 turn
    together.
  """
  half = weight.shape[0] // num_heads // 2
  rows = weight.reshape(num_heads, half, 2, weight.shape[1])
  return rows.swapaxes(1, 2).reshape(weight.shape)


def _package(path: str) -> Any:
  if gguf is None:
    raise types.InputError(
      f"{path}: expected the package gguf to read it, got none. Run pip "
      "install 'jaxrl_post[gguf]'."
    )
  return gguf


def _read(
  path: str, place: tuple[str, int, int, int], shape: tuple[int, ...]
) -> np.ndarray:
  """Reads a tensor as float32."""
  name, kind, start, size = place
  package = _package(path)
  # As a plain array: each of the many views of a memmap costs microseconds.
  raw = np.asarray(np.memmap(path, np.uint8, "r", start, (size,)))
  rows = raw.reshape(*shape[:-1], size // math.prod(shape[:-1]))
  try:
    numbers = package.dequantize(rows, package.GGMLQuantizationType(kind))
  except NotImplementedError as error:
    raise types.InputError(
      f"{path}: expected {name} in a known quantization, got {error}. Take "
      "the model as Q8_0 or F16."
    ) from error
  return np.asarray(numbers, np.float32).reshape(shape)


def read(path: str) -> File:
  """Opens a GGUF file; tensors are read later, one by one.

  Raises:
    InputError: in one line, where the file is no GGUF, is cut off, or holds
      something that cannot be computed here.
  """
  package = _package(path)
  try:
    with open(path, "rb") as file:
      data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    metadata, table = _parse(memoryview(data))
    places = []
    for name, shape, kind, start in table:
      block = package.GGML_QUANT_SIZES[package.GGMLQuantizationType(kind)]
      size = math.prod(shape) // block[0] * block[1]
      places.append((name, kind, start, size))
      if start + size > len(data):
        raise ValueError(f"{len(data)} bytes without all of {name}")
  except (OSError, ValueError, struct.error) as error:
    raise types.InputError(
      f"{path}: expected a whole GGUF file, got {error}. Fetch it again."
    ) from error
  config = _config(metadata, {row[0] for row in table})
  entries = {}
  for place, (own, shape, _, _) in zip(places, table, strict=True):
    load = functools.partial(_read, path, place, tuple(shape))
    if config["model_type"] == "llama":
      load = _unpermuted(load, own, config)
    entries[_name(own)] = hf_format.Entry(tuple(shape), load)
  return File(config, entries)


def _unpermuted(
  load: Callable[[], np.ndarray], own: str, config: dict[str, Any]
) -> Callable[[], np.ndarray]:
  """Puts the rows of a Llama's queries and keys in order, after loading."""
  heads = config["num_attention_heads"]
  if own.endswith("attn_k.weight"):
    heads = config["num_key_value_heads"] or heads
  elif not own.endswith("attn_q.weight"):
    return load
  return lambda: unpermute(load(), heads)
