"""GGUF files are read as the Hugging Face folder of the same model."""

import pathlib

import gguf
import jax
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import gguf_io, weights
from tests.reference import tiny_folder


def read(path: str) -> types.Tree:
  return weights.read_params(path, weights.read_config(path))


def refused(match: str):
  return pytest.raises(types.InputError, match=match)


_GGUF_NAMES = {own: name for name, own in gguf_io._LAYER.items()}


def write_gguf(path: pathlib.Path, family: str, **options) -> dict:
  """Writes a tiny model as llama.cpp's converter does; returns its tensors."""
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


@pytest.mark.parametrize("family", sorted(tiny_folder.FAMILIES))
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


def test_a_gguf_architecture_that_is_not_known_is_refused(tmp_path):
  out = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.close()
  with refused("model_type: expected one of llama, qwen2, qwen3, got 'mamba'"):
    weights.read_config(str(tmp_path / "model.gguf"))


def test_without_the_gguf_package_the_error_says_what_to_install(
  tmp_path, monkeypatch
):
  (tmp_path / "model.gguf").write_bytes(b"GGUF")
  monkeypatch.setattr(gguf_io, "gguf", None)
  with refused(r"jaxrl_post\[gguf\]"):
    weights.read_config(str(tmp_path / "model.gguf"))
