"""Weights out: what is written, how much of it at a time, and read back."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_post import types
from jaxrl_post.models import (
  export,
  gemma3,
  hf_format,
  qwen2,
  transformer,
  variants,
  weights,
)
from jaxrl_post.training import lora
from tests.reference import tiny_folder

SHAPES = {**tiny_folder.FAMILIES, **tiny_folder.MIXTURES}
LORA = lora.Lora(rank=2, alpha=6.0, targets=("q", "o", "down"))


def params_of(folder: pathlib.Path, family: str = "qwen2", **options):
  tiny_folder.write(folder, family, **options)
  cfg = weights.read_config(str(folder))
  return cfg, weights.read_params(str(folder), cfg)


def written(
  folder: pathlib.Path, cfg: transformer.Config, params: types.Tree, **options
) -> list[str]:
  folder.mkdir()
  export.write_json(folder / "config.json", weights.hf_config(cfg))
  return export.write(folder, cfg, params, **options)


def stored(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads every tensor of a folder, by the library of the format."""
  found = {}
  for file in folder.glob("*.safetensors"):
    found |= safetensors.numpy.load_file(file)
  return found


def assert_same(one: types.Tree, other: types.Tree) -> None:
  def check(x, y):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)

  jax.tree.map(check, one, other)


# ------------------------------------------------------------------- weights


@pytest.mark.parametrize("family", sorted(SHAPES))
@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_read_back_is_what_was_there_bit_for_bit(
  tmp_path, family, shards
):
  cfg, params = params_of(tmp_path / "in", family, seed=5, shards=shards)
  made = tmp_path / "out"
  assert written(made, cfg, params) == ["model.safetensors"]
  assert weights.read_config(str(made)) == cfg
  assert_same(weights.read_params(str(made), cfg), params)
  assert_same(stored(made), tiny_folder.arrays(SHAPES[family], 5))


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_its_own_is_written_and_a_tied_one_is_not(tmp_path, tied):
  cfg, params = params_of(tmp_path / "in", tie_word_embeddings=tied)
  written(tmp_path / "out", cfg, params)
  assert ("lm_head.weight" in stored(tmp_path / "out")) != tied
  hf = json.loads((tmp_path / "out" / "config.json").read_text())
  assert hf["tie_word_embeddings"] == tied


def test_half_as_many_bytes_are_the_nearest_numbers(tmp_path):
  cfg, params = params_of(tmp_path / "in")
  written(tmp_path / "out", cfg, params, dtype="bfloat16")
  exact = tiny_folder.arrays(tiny_folder.FAMILIES["qwen2"])
  expected = {k: x.astype(ml_dtypes.bfloat16) for k, x in exact.items()}
  assert_same(stored(tmp_path / "out"), expected)
  read = weights.read_params(str(tmp_path / "out"), cfg)
  np.testing.assert_array_equal(
    read["embed"], expected["model.embed_tokens.weight"].astype(np.float32)
  )


@pytest.mark.parametrize("limit", [0, 20_000, 60_000, 10**9])
def test_no_file_is_larger_than_asked_but_for_a_single_tensor(tmp_path, limit):
  cfg, params = params_of(tmp_path / "in")
  made = tmp_path / "out"
  names = written(made, cfg, params, shard_bytes=limit)
  assert sorted(names) == sorted(
    path.name for path in made.iterdir() if path.name != "config.json"
  )
  assert_same(weights.read_params(str(made), cfg), params)
  if limit == 10**9:
    assert names == ["model.safetensors"]
    return
  index = json.loads((made / names[-1]).read_text())
  sizes = []
  for file in names[:-1]:
    tensors = safetensors.numpy.load_file(made / file)
    assert {index["weight_map"][name] for name in tensors} == {file}
    sizes.append(sum(x.nbytes for x in tensors.values()))
    assert sizes[-1] <= limit or len(tensors) == 1
  assert names[-1] == "model.safetensors.index.json"
  assert names[0] == f"model-00001-of-{len(sizes):05d}.safetensors"
  assert index["metadata"]["total_size"] == sum(sizes)
  assert index["weight_map"].keys() == hf_format.tensors(cfg).keys()
  # Not a file more than the limit asks for: two neighbours exceed it.
  pairs = zip(sizes, sizes[1:], strict=False)
  assert all(a + b > limit for a, b in pairs)


def test_weights_on_many_devices_are_written_as_those_on_one(tmp_path):
  cfg, params = params_of(tmp_path / "in")
  mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.NamedSharding(mesh, jax.P(None, "a"))
  params["layers"]["gate"] = jax.device_put(params["layers"]["gate"], split)
  written(tmp_path / "out", cfg, params)
  assert_same(
    stored(tmp_path / "out"), tiny_folder.arrays(tiny_folder.FAMILIES["qwen2"])
  )


def test_a_file_that_is_there_is_never_written_over(tmp_path):
  cfg, params = params_of(tmp_path / "in")
  with pytest.raises(FileExistsError):
    export.write(tmp_path / "in", cfg, params)


def test_a_shape_of_no_family_is_refused():
  odd = transformer.Config(
    num_layers=1,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_width=4,
    ff_width=32,
    vocab_size=8,
    qkv_bias=True,
    qk_norm=True,
  )
  with pytest.raises(types.InputError, match=r"expected the shape of one of"):
    weights.hf_config(odd)


# ------------------------------------------------------------------ adapters


def adapters_of(cfg: transformer.Config) -> types.Tree:
  spec = lora.spec(transformer.spec(cfg), LORA)
  draw = np.random.default_rng(1)
  return jax.tree.map(
    lambda w: jnp.asarray(draw.standard_normal(w.shape), jnp.float32), spec
  )


def test_adapters_are_merged_into_what_is_written(tmp_path):
  cfg, params = params_of(tmp_path / "in", "qwen3")
  adapters = adapters_of(cfg)
  written(tmp_path / "out", cfg, lora.attach(params, adapters, LORA))
  read = weights.read_params(str(tmp_path / "out"), cfg)
  expected = lora.merge(params, adapters, LORA)
  for got, wanted in zip(
    jax.tree.leaves(read), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(read["layers"]["up"], params["layers"]["up"])
  assert np.abs(read["layers"]["q"] - params["layers"]["q"]).max() > 1


def test_adapters_alone_make_the_same_weights_by_the_rule_of_peft(tmp_path):
  """Its rule: W + alpha / r * B A, of modules by their names."""
  cfg, params = params_of(tmp_path / "in", "qwen3")
  adapters = adapters_of(cfg)
  made = tmp_path / "out"
  made.mkdir()
  names = export.write_adapter(
    made, cfg, adapters, alpha=LORA.alpha, base="some/model"
  )
  assert names == ["adapter_model.safetensors", "adapter_config.json"]
  about = json.loads((made / "adapter_config.json").read_text())
  assert about["peft_type"] == "LORA" and about["task_type"] == "CAUSAL_LM"
  assert about["base_model_name_or_path"] == "some/model"
  assert about["target_modules"] == ["down_proj", "o_proj", "q_proj"]
  assert (about["r"], about["lora_alpha"]) == (2, 6.0)
  tensors = stored(made)
  base = stored(tmp_path / "in")
  written(tmp_path / "merged", cfg, lora.attach(params, adapters, LORA))
  merged = stored(tmp_path / "merged")
  suffixes = (".q_proj.weight", ".o_proj.weight", ".down_proj.weight")
  adapted = [name for name in base if name.endswith(suffixes)]
  assert len(tensors) == 2 * len(adapted) == 2 * 3 * cfg.num_layers
  for name in adapted:
    head = f"base_model.model.{name.removesuffix('.weight')}"
    a, b = (tensors[f"{head}.lora_{part}.weight"] for part in "AB")
    assert a.shape[0] == b.shape[1] == 2
    whole = base[name] + about["lora_alpha"] / about["r"] * (b @ a)
    np.testing.assert_allclose(merged[name], whole, rtol=1e-5, atol=1e-5)


def test_adapters_beneath_images_are_of_the_text_models_modules(tmp_path):
  """As `transformers` names them in a Gemma 3 that also reads images."""
  cfg, _ = params_of(tmp_path / "in", "gemma3")
  hf = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": SHAPES["gemma3"],
  }
  assert weights.module_prefix(str(tmp_path / "in")) == "model."
  (tmp_path / "in" / "config.json").write_text(json.dumps(hf))
  prefix = weights.module_prefix(str(tmp_path / "in"))
  adapters = adapters_of(cfg)
  for name, options in (("text", {}), ("beside", {"prefix": prefix})):
    (tmp_path / name).mkdir()
    export.write_adapter(
      tmp_path / name, cfg, adapters, alpha=1.0, base="", **options
    )
  text, beside = stored(tmp_path / "text"), stored(tmp_path / "beside")
  head = "base_model.model.model."
  longer = {
    f"{head}language_model.{name.removeprefix(head)}": value
    for name, value in text.items()
  }
  assert_same(beside, longer)
  # `peft` adapts modules whose whole name fits; a tower's end alike.
  about = json.loads((tmp_path / "beside" / "adapter_config.json").read_text())
  at = "model.language_model.layers.12."
  for module, adapted in (
    (f"{at}self_attn.q_proj", True),
    (f"{at}mlp.down_proj", True),
    (f"{at}self_attn.k_proj", False),
    (f"{at}self_attnXq_proj", False),
    ("model.vision_tower.encoder.layers.1.self_attn.q_proj", False),
  ):
    found = re.fullmatch(about["target_modules"], module)
    assert bool(found) == adapted, module


# ------------------------------------------------------------ what config says


def first_of(*layers: bool) -> int | None:
  shape = dataclasses.replace(
    qwen2.config(SHAPES["qwen2"]),
    num_layers=len(layers),
    window=variants.Window(5, layers),
  )
  return weights.hf_config(shape).get("max_window_layers")


def test_releases_without_layer_types_are_told_where_windows_begin():
  """They take layers i >= max_window_layers, 28 where it is not told."""
  assert first_of(False, True, True) == 1
  assert first_of(True, True) == 0
  assert first_of(False, False, False, True) == 3
  # No such number says these.
  assert first_of(True, False) is None
  assert first_of(False, True, False) is None
  gemma = weights.hf_config(gemma3.config(SHAPES["gemma3"]))
  assert "max_window_layers" not in gemma


def test_windows_are_read_back_by_either_field():
  own = {"sliding_window": 5, "use_sliding_window": True}
  for first in range(3):
    hf = {**SHAPES["qwen2"], **own, "max_window_layers": first}
    shape = qwen2.config(hf)
    assert shape.window == variants.Window(
      5, tuple(i >= first for i in range(3))
    )
    written = weights.hf_config(shape)
    assert qwen2.config(written) == shape
    del written["layer_types"]
    assert qwen2.config(written) == shape


def test_a_base_that_a_gemmas_windows_share_is_spelled_out():
  near = gemma3.config(SHAPES["gemma3"])
  shared = dataclasses.replace(
    near,
    window=dataclasses.replace(near.window, rope_theta=None),
    rope_scaling=None,
  )
  hf = weights.hf_config(shared)
  assert hf["rope_local_base_freq"] == hf["rope_theta"] == near.rope_theta
  # The same function: all layers turn alike.
  read = gemma3.config(hf)
  assert read.window.layers == near.window.layers
  for local in (False, True):
    one, other = (
      transformer.inverse_frequencies(cfg, local=local)
      for cfg in (read, shared)
    )
    np.testing.assert_array_equal(one, other)
  scaled = dataclasses.replace(shared, rope_scaling=near.rope_scaling)
  with pytest.raises(types.InputError, match=r"^model\.config\.window\.rope_t"):
    weights.hf_config(scaled)


# -------------------------------------------------------------------- memory

# Prints the bytes that reading and writing take beside the model.
MEASURE = """
import pathlib, re, sys
import jax, numpy as np
from jaxrl_post.models import export, weights

def peak(field):
  text = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(re.search(field + r":\\s+(\\d+)", text)[1])

def beside(do, kept):
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  before = peak("VmRSS")
  value = do()
  print(peak("VmHWM") - before - kept)
  return value

def read(folder):
  cfg = weights.read_config(folder)
  return cfg, jax.block_until_ready(weights.read_params(folder, cfg))

def write(cfg, params, out):
  pathlib.Path(out).mkdir()
  export.write(pathlib.Path(out), cfg, params, shard_bytes=10**8)

small, large, *outs = sys.argv[1:]
write(*read(small), outs[0])  # what is loaded once and for all
size = pathlib.Path(large, "model.safetensors").stat().st_size
model = beside(lambda: read(large), size)
beside(lambda: write(*model, outs[1]), 0)
"""


def test_reading_and_writing_hold_one_tensor_beside_the_model(tmp_path):
  sizes = {
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "vocab_size": 8192,
  }
  hf = {**tiny_folder.FAMILIES["llama"], **sizes}
  draw = np.random.default_rng(0)
  tensors = {
    name: draw.random(shape, np.float32)
    for name, shape in tiny_folder.shapes(hf).items()
  }
  tiny_folder.write(tmp_path / "small")
  (tmp_path / "large").mkdir()
  (tmp_path / "large" / "config.json").write_text(json.dumps(hf))
  tiny_folder.write_weights(tmp_path / "large", tensors)
  folders = [str(tmp_path / name) for name in ("small", "large", "a", "b")]
  done = subprocess.run(
    [sys.executable, "-c", MEASURE, *folders],
    capture_output=True,
    check=True,
    text=True,
    timeout=120,
  )
  total = sum(x.nbytes for x in tensors.values())
  largest = max(x.nbytes for x in tensors.values())
  assert total > 7 * largest
  read, wrote = map(int, done.stdout.split())
  # At least one is seen: else nothing was measured.
  assert 0.5 * largest < read < 1.2 * largest
  assert 0.5 * largest < wrote < 1.2 * largest
  assert_same(stored(tmp_path / "b"), tensors)
