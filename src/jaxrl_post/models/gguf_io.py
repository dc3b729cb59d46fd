"""Opens a GGUF file as if it were a Hugging Face checkpoint.

Metadata become the fields of config.json and tensors get their Hugging Face
names. `gguf_header` reads what stands before the tensors; the `gguf` package
turns quantized blocks into numbers.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_post import gguf_header, types
from jaxrl_post.models import hf_format

try:
  import gguf
except ImportError:  # The extra is not installed: `_package` says so.
  gguf = None

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
# What the scalings of Llama 3.1, 3.2 and 3.3 share; their factors are 8 and 32.
_LOW, _HIGH, _POSITIONS = 1.0, 4.0, 8192
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


def _config(metadata: dict[str, Any], names: set[str]) -> dict[str, Any]:
  kind, vocab = (
    metadata.get(name)
    for name in ("general.architecture", "tokenizer.ggml.tokens")
  )
  if kind == "gemma3":
    # It says 1 + w for w, and which layers have a window not at all.
    rule = "no Gemma in a GGUF file"
    raise hf_format.refusal("general.architecture", rule, kind)
  own = f"{kind}."
  get = {
    name.removeprefix(own): value
    for name, value in metadata.items()
    if name.startswith(own)
  }.get
  hf = {name: get(field) for name, field in _FIELDS.items()}
  hf["model_type"] = kind
  hf["vocab_size"] = len(vocab) if isinstance(vocab, list) else None
  hf["tie_word_embeddings"] = "output.weight" not in names
  heads, width = hf["num_attention_heads"], hf["hidden_size"]
  if isinstance(heads, int) and isinstance(width, int) and heads > 0:
    hf["head_dim"] = get("attention.key_length") or width // heads
    for field in ("attention.value_length", "rope.dimension_count"):
      if get(field) not in (None, hf["head_dim"]):
        rule = f"the head width {hf['head_dim']}"
        raise hf_format.refusal(f"{kind}.{field}", rule, get(field))
  if get("expert_count"):
    raise hf_format.refusal(f"{kind}.expert_count", "none", get("expert_count"))
  if get("rope.scaling.type") not in (None, "none"):
    hf["rope_scaling"] = {
      "rope_type": get("rope.scaling.type"),
      "factor": get("rope.scaling.factor"),
    }
  return hf


def _scaling(
  divisors: np.ndarray, theta: object, width: object
) -> dict[str, Any]:
  """Finds Llama 3's scaling in the table that GGUF has instead of its numbers.

  Args:
    divisors: what each rotary frequency is divided by.
    theta: base of the wavelengths.
    width: of a head.

  Returns:
    The fields of `rope_scaling` that make the table.

  Raises:
    InputError: for any other table.
  """
  factor, half = float(divisors.max()), divisors.size
  if isinstance(theta, float | int) and theta > 0 and width == 2 * half:
    turns = _POSITIONS / math.tau * float(theta) ** -(np.arange(half) / half)
    keep = np.clip((turns - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
    made = 1.0 / (keep + (1.0 - keep) / factor)
    if np.allclose(divisors, made, rtol=1e-4):
      return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _POSITIONS,
      }
  raise hf_format.refusal(
    "rope_freqs.weight", "the scaling of Llama 3.1 to 3.3", "another table"
  )


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
    header = gguf_header.read(path)
    places = [_place(package, tensor, header.size) for tensor in header.tensors]
  except (OSError, ValueError) as error:
    raise types.InputError(
      f"{path}: expected a whole GGUF file, got {error}. Fetch it again."
    ) from error
  config = _config(header.fields, {tensor.name for tensor in header.tensors})
  entries = {}
  for place, tensor in zip(places, header.tensors, strict=True):
    own, shape = tensor.name, tensor.shape
    load = functools.partial(_read, path, place, shape)
    if own == "rope_freqs.weight":
      config["rope_scaling"] = _scaling(
        load(), config["rope_theta"], config.get("head_dim")
      )
      continue
    if config["model_type"] == "llama":
      load = _unpermuted(load, own, config)
    entries[_name(own)] = hf_format.Entry(shape, load)
  return File(config, entries)


def _place(
  package: Any, tensor: gguf_header.Tensor, size: int
) -> tuple[str, int, int, int]:
  """Returns a tensor's name, type, first byte and bytes; `size` is the file's.

  Raises:
    ValueError: for an unknown type, and for what the file does not hold.
  """
  block, width = package.GGML_QUANT_SIZES[
    package.GGMLQuantizationType(tensor.kind)
  ]
  shape, name = tensor.shape, tensor.name[:60]
  if shape[-1] % block:
    raise ValueError(f"{name!r} with rows of {shape[-1]}, in blocks of {block}")
  length = math.prod(shape) // block * width
  if tensor.start + length > size:
    raise ValueError(f"{size} bytes without all of {name}")
  return tensor.name, tensor.kind, tensor.start, length


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
