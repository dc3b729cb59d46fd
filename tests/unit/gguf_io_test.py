"""GGUF files are read as the Hugging Face folder of the same model."""

import math
import pathlib
import struct
import time

import gguf
import jax
import numpy as np
import pytest

from jaxrl_post import gguf_header, types
from jaxrl_post.models import gguf_io, transformer, weights
from tests.reference import tiny_folder


def read(path: str) -> types.Tree:
  return weights.read_params(path, weights.read_config(path))


def refused(match: str):
  return pytest.raises(types.InputError, match=match)


_GGUF_NAMES = {own: name for name, own in gguf_io._LAYER.items()}


def write_gguf(path: pathlib.Path, family: str, **options) -> dict:
  """Writes a tiny model as llama.cpp's converter does; returns its tensors."""
  divisors = options.pop("rope_freqs", None)
  hf = {**tiny_folder.FAMILIES[family], "rope_scaling": None, **options}
  head = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
  out = gguf.GGUFWriter(path, family)
  out.add_block_count(hf["num_hidden_layers"])
  out.add_embedding_length(hf["hidden_size"])
  out.add_feed_forward_length(hf["intermediate_size"])
  out.add_head_count(hf["num_attention_heads"])
  out.add_head_count_kv(hf["num_key_value_heads"])
  out.add_layer_norm_rms_eps(hf["rms_norm_eps"])
  out.add_context_length(hf["max_position_embeddings"])
  out.add_rope_freq_base(500000.0)
  out.add_key_length(head)
  out.add_token_list([str(i) for i in range(hf["vocab_size"])])
  if divisors is not None:
    out.add_tensor("rope_freqs.weight", divisors)
  tensors = tiny_folder.arrays(hf)
  for name, value in tensors.items():
    if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
      heads = value.shape[0] // head
      value = value.reshape(heads, 2, head // 2, -1).swapaxes(1, 2)
      value = value.reshape(tensors[name].shape)
    out.add_tensor(_gguf_name(name), np.ascontiguousarray(value))
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.write_tensors_to_file()
  out.close()
  return hf


def _gguf_name(name: str) -> str:
  top = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
  }
  if name in top:
    return top[name]
  _, _, layer, *middle, kind = name.split(".")
  return f"blk.{layer}.{_GGUF_NAMES['.'.join(middle)]}.{kind}"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_and_folder_of_one_model_give_the_same_weights(tmp_path, family):
  file = tmp_path / "model.gguf"
  hf = write_gguf(file, family)
  tiny_folder.write(tmp_path / "folder", **{"family": family, **hf})
  a, b = str(file), str(tmp_path / "folder")
  assert weights.read_config(a).tie_embeddings == hf["tie_word_embeddings"]
  assert weights.read_config(a).head_width == weights.read_config(b).head_width
  jax.tree.map(np.testing.assert_array_equal, read(a), read(b))


def test_a_gguf_file_cut_off_anywhere_is_refused_in_one_line(tmp_path):
  file = tmp_path / "model.gguf"
  write_gguf(file, "llama")
  whole = file.read_bytes()
  for left in (0, 3, 20, 200, 2000, len(whole) // 2, len(whole) - 64):
    file.write_bytes(whole[:left])
    with refused("expected a whole GGUF file") as caught:
      weights.read_config(str(file))
    assert "\n" not in str(caught.value)
  file.write_bytes(b"GGML" + whole[4:])
  with refused("not GGUF version 2 or 3"):
    weights.read_config(str(file))


def _string(text: str) -> bytes:
  return struct.pack("<Q", len(text)) + text.encode()


def _file(
  field: bytes = b"", tensor: bytes = b"", fields: int = 0, tensors: int = 0
) -> bytes:
  """Makes a header of what is given; numbers are added to its counts."""
  num_tensors, num_fields = tensors + bool(tensor), fields + bool(field)
  head = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_fields)
  return head + field + tensor + bytes(256)


def _field(kind: int, value: bytes, name: str = "a") -> bytes:
  return _string(name) + struct.pack("<I", kind) + value


def _array(inner: int, length: int, values: bytes = b"") -> bytes:
  return _field(9, struct.pack("<IQ", inner, length) + values)


def _tensor(dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
  form = f"<I{len(dims)}QIQ"
  return _string("t") + struct.pack(form, len(dims), *dims, kind, offset)


ALIGN = "general.alignment"
HOSTILE = {
  "fields": _file(fields=2**60),
  "tensors": _file(tensors=2**60),
  "all": _file(fields=2**64 - 1, tensors=2**64 - 1),
  "name": _file(struct.pack("<Q", 2**60)),
  "string": _file(_field(8, struct.pack("<Q", 2**60))),
  "longest string": _file(_field(8, struct.pack("<Q", 2**64 - 1))),
  "bytes": _file(_array(0, 2**60)),
  "doubles": _file(_array(12, 2**61)),
  "most": _file(_array(10, 2**64 - 1)),
  "strings": _file(_array(8, 2**60)),
  "arrays": _file(_array(9, 2**60)),
  "deep": _file(_array(9, 1, struct.pack("<IQ", 9, 1) * 99_999)),
  "type": _file(_field(13, b"")),
  "inner type": _file(_array(99, 1)),
  "rank": _file(tensor=_string("t") + struct.pack("<I", 2**32 - 1)),
  "no rank": _file(tensor=_tensor((), 0)),
  "kind": _file(tensor=_tensor((4,), 99)),
  "dimension": _file(tensor=_tensor((2**60,), 0)),
  "dimensions": _file(tensor=_tensor((2**63, 2**63), 0)),
  "nothing": _file(tensor=_tensor((4, 0), 0)),
  "offset": _file(tensor=_tensor((4,), 0, 2**60)),
  "block": _file(tensor=_tensor((31,), 8)),
  "alignment": _file(_field(4, struct.pack("<I", 0), ALIGN)),
  "alignment's type": _file(_field(8, _string("x"), ALIGN)),
  "odd alignment": _file(_field(4, struct.pack("<I", 7), ALIGN)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_gguf_file_is_refused_in_one_line(tmp_path, case):
  file = tmp_path / "model.gguf"
  file.write_bytes(HOSTILE[case])
  begin = time.process_time()
  with refused("expected a whole GGUF file") as caught:
    weights.read_config(str(file))
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
  assert time.process_time() - begin < 5


def test_metadata_of_another_type_is_refused_by_name(tmp_path):
  cases = {
    "model_type": {"general.architecture": ["llama"]},
    "vocab_size": {"tokenizer.ggml.tokens": 3},
    "num_hidden_layers": {"llama.block_count": "3"},
    "num_attention_heads": {"llama.attention.head_count": [4, 4, 4]},
    "rms_norm_eps": {"llama.attention.layer_norm_rms_epsilon": [1e-5]},
  }
  write_gguf(tmp_path / "model.gguf", "llama")
  fields = gguf_header.read(str(tmp_path / "model.gguf")).fields
  for name, change in cases.items():
    with refused(f"{name}: expected"):
      weights.from_fields(gguf_io._config({**fields, **change}, set()))


ONLY_READ = ("Q4_K", "Q6_K", "IQ4_XS")  # The package cannot write these.
QUANTIZED = ("F16", "BF16", "Q4_0", "Q5_1", "Q8_0", *ONLY_READ)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_what_the_package_makes_of_them(tmp_path, name):
  file, kind = tmp_path / "model.gguf", gguf.GGMLQuantizationType[name]
  draw = np.random.RandomState(0)
  value = draw.standard_normal((6, 512)).astype(np.float32)
  if name in ONLY_READ:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Small bytes: as halves they are small numbers, and none is infinite.
    packed = draw.randint(0, 60, (6, 512 // block * size)).astype(np.uint8)
  else:
    packed = gguf.quantize(value, kind)
    close = gguf.dequantize(packed, kind)
    np.testing.assert_allclose(close, value, atol=0.5)
  out = gguf.GGUFWriter(file, "qwen2")
  out.add_tensor("output.weight", packed, raw_dtype=kind)
  out.add_tensor("blk.7.attn_q.weight", packed, raw_dtype=kind)
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.write_tensors_to_file()
  out.close()
  entries = gguf_io.read(str(file)).entries
  assert entries.keys() == {
    "lm_head.weight",
    "model.layers.7.self_attn.q_proj.weight",
  }
  for entry in entries.values():
    assert entry.shape == (6, 512)
    np.testing.assert_array_equal(entry.read(), gguf.dequantize(packed, kind))


def test_the_rows_of_queries_and_keys_come_back_into_order():
  rows = np.arange(4 * 8 * 3, dtype=np.float32).reshape(32, 3)
  # As convert_hf_to_gguf.py permutes: head, halves, pairs.
  there = rows.reshape(4, 2, 4, 3).swapaxes(1, 2).reshape(rows.shape)
  assert not np.array_equal(there, rows)
  np.testing.assert_array_equal(gguf_io.unpermute(there, 4), rows)


def _divisors(width: int, factor: float) -> np.ndarray:
  """Writes down the loop of llama.cpp's converter for Llama 3's table."""
  found = []
  for i in range(0, width, 2):
    wavelength = 2 * math.pi * 500000.0 ** (i / width)
    if wavelength < 8192 / 4:
      found.append(1.0)
    elif wavelength > 8192 / 1:
      found.append(factor)
    else:
      smooth = (8192 / wavelength - 1) / (4 - 1)
      found.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_in_its_table(tmp_path, factor):
  file = tmp_path / "model.gguf"
  table = _divisors(12, factor)
  write_gguf(file, "llama", rope_freqs=table)
  cfg = weights.read_config(str(file))
  assert cfg.rope_scaling == transformer.RopeScaling(
    factor=factor, low_factor=1.0, high_factor=4.0, original_positions=8192
  )
  assert "rope_freqs.weight" not in gguf_io.read(str(file)).entries
  for wrong in (table * 1.01, table[:-1], np.ones_like(table) * factor):
    write_gguf(file, "llama", rope_freqs=wrong)
    with refused("rope_freqs.weight: expected the scaling of Llama 3.1 to 3.3"):
      weights.read_config(str(file))


def test_a_gguf_architecture_that_is_not_known_is_refused(tmp_path):
  out = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.close()
  with refused("model_type: expected one of llama, qwen2, qwen3"):
    weights.read_config(str(tmp_path / "model.gguf"))


def test_a_gemma_in_a_gguf_file_is_refused(tmp_path):
  out = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.close()
  with refused("general.architecture: expected no Gemma in a GGUF file"):
    weights.read_config(str(tmp_path / "model.gguf"))


def test_without_the_gguf_package_the_error_says_what_to_install(
  tmp_path, monkeypatch
):
  (tmp_path / "model.gguf").write_bytes(b"GGUF")
  monkeypatch.setattr(gguf_io, "gguf", None)
  with refused(r"jaxrl_post\[gguf\]"):
    weights.read_config(str(tmp_path / "model.gguf"))
