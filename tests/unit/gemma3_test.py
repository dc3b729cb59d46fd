"""Gemma 3: what its config.json says, and what is refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import (
  gemma3,
  hf_format,
  qwen2,
  qwen3,
  transformer,
  variants,
  weights,
)
from tests.reference import tiny_folder

TINY = tiny_folder.FAMILIES["gemma3"]
# Of google/gemma-3-1b-it, but for what says nothing of the shape.
ONE_B = {
  "architectures": ["Gemma3ForCausalLM"],
  "attention_bias": False,
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 1152,
  "intermediate_size": 6912,
  "max_position_embeddings": 32768,
  "model_type": "gemma3_text",
  "num_attention_heads": 4,
  "num_hidden_layers": 26,
  "num_key_value_heads": 1,
  "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06,
  "rope_local_base_freq": 10000,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": 512,
  "sliding_window_pattern": 6,
  "vocab_size": 262144,
}


def read(tmp_path, hf) -> transformer.Config:
  (tmp_path / "config.json").write_text(json.dumps(hf))
  return weights.read_config(str(tmp_path))


def test_the_config_of_a_published_model_is_read(tmp_path):
  assert read(tmp_path, ONE_B) == transformer.Config(
    num_layers=26,
    width=1152,
    num_heads=4,
    num_kv_heads=1,
    head_width=256,
    ff_width=6912,
    vocab_size=262144,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    max_positions=32768,
    window=variants.Window(
      size=512,
      layers=tuple(i not in {5, 11, 17, 23} for i in range(26)),
      rope_theta=1e4,
    ),
    gemma=variants.Gemma(query_scalar=256),
  )


def test_both_spellings_of_rotary_positions_and_layers_are_one(tmp_path):
  old = read(tmp_path, TINY)
  new = {
    name: value
    for name, value in TINY.items()
    if not name.startswith("rope") and name != "sliding_window_pattern"
  }
  new["layer_types"] = ["sliding_attention"] * 2 + ["full_attention"]
  new["rope_parameters"] = {
    "full_attention": {
      "factor": 8.0,
      "rope_theta": 10000.0,
      "rope_type": "linear",
    },
    "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
  }
  assert read(tmp_path, new) == old
  # Layers that are listed win.
  listed = {**TINY, "layer_types": ["full_attention"] * 3}
  assert read(tmp_path, listed).window is None


def test_what_is_missing_is_what_transformers_takes(tmp_path):
  few = {name: ONE_B[name] for name in ONE_B if "rope" not in name}
  for name in ("query_pre_attn_scalar", "sliding_window_pattern"):
    del few[name]
  assert read(tmp_path, few) == read(tmp_path, ONE_B)


@pytest.mark.parametrize(
  ("options", "named"),
  [
    ({"attention_bias": True}, "attention_bias"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"hidden_activation": "gelu"}, "hidden_activation"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ({"sliding_window": None}, "sliding_window"),
    ({"sliding_window_pattern": 2.5}, "sliding_window_pattern"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ({"layer_types": "full"}, "layer_types"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_parameters.rope_type"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "each kind of layer"),
    ({"rope_parameters": [1.0]}, "each kind of layer"),
    (
      {
        "rope_parameters": {
          "sliding_attention": {"factor": 2.0, "rope_type": "linear"}
        }
      },
      "rope_parameters.sliding_attention.rope_type",
    ),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"model_type": "gemma3", "architectures": None}, "text_config"),
    ({"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures"),
  ],
)
def test_an_option_that_is_not_computed_is_refused_by_name(
  tmp_path, options, named
):
  with pytest.raises(types.InputError, match=named) as caught:
    read(tmp_path, {**TINY, **options})
  assert "\n" not in str(caught.value)


def test_a_config_that_is_written_is_read_as_it_was(tmp_path):
  for hf in (TINY, ONE_B, {**TINY, "layer_types": ["full_attention"] * 3}):
    cfg = read(tmp_path, hf)
    assert read(tmp_path, gemma3.hf_config(cfg)) == cfg


@pytest.mark.parametrize(
  ("kind", "family"), [("qwen2_window", qwen2), ("qwen3_window", qwen3)]
)
def test_shared_fields_that_are_written_are_read_as_they_were(kind, family):
  own, options = tiny_folder.VARIANTS[kind]
  cfg = family.config({**tiny_folder.FAMILIES[own], **options})
  assert cfg.window is not None
  written = hf_format.fields(cfg, own, family.ARCHITECTURE)
  assert family.config(written) == cfg


def test_no_tensor_is_lost_between_a_folder_and_the_weights(tmp_path):
  tiny_folder.write(tmp_path, "gemma3", seed=2)
  cfg = weights.read_config(str(tmp_path))
  params = weights.read_params(str(tmp_path), cfg)
  stored = tiny_folder.arrays(TINY, 2)
  table = hf_format.tensors(cfg)
  assert table.keys() == stored.keys()
  for name, tensor in table.items():
    value = params
    for key in tensor.leaf:
      value = value[key]
    value = np.asarray(value if tensor.layer is None else value[tensor.layer])
    shape = tensor.shape[::-1] if tensor.transpose else tensor.shape
    value = value.reshape(shape).T if tensor.transpose else value.reshape(shape)
    np.testing.assert_array_equal(value, stored[name])


# What google/gemma-3-4b-it says of its text model; all else is missing.
FOUR_B = {
  "hidden_size": 2560,
  "intermediate_size": 10240,
  "model_type": "gemma3_text",
  "num_hidden_layers": 34,
  "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
  "sliding_window": 1024,
}


def test_the_text_model_of_a_published_one_with_images_is_read(tmp_path):
  hf = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": FOUR_B,
    "vision_config": {"model_type": "siglip_vision_model"},
  }
  assert read(tmp_path, hf) == transformer.Config(
    num_layers=34,
    width=2560,
    num_heads=8,
    num_kv_heads=4,
    head_width=256,
    ff_width=10240,
    vocab_size=262208,
    rope_theta=1e6,
    rope_scaling=transformer.RopeScaling(factor=8.0),
    norm_eps=1e-6,
    qk_norm=True,
    max_positions=131072,
    window=variants.Window(
      size=1024,
      layers=tuple(i % 6 != 5 for i in range(34)),
      rope_theta=1e4,
    ),
    gemma=variants.Gemma(query_scalar=256),
  )


@pytest.mark.parametrize("newer", [False, True])
def test_of_a_model_with_images_the_text_is_read_and_no_more(tmp_path, newer):
  alone, beside = tmp_path / "alone", tmp_path / "beside"
  tiny_folder.write(alone, "gemma3")
  beside.mkdir()
  images = np.ones((2, 2), np.float32)
  tensors = {"vision_tower.post_layernorm.weight": images[0]}
  tensors["multi_modal_projector.mm_input_projection_weight"] = images
  if newer:
    tensors = {f"model.{name}": value for name, value in tensors.items()}
  for name, value in tiny_folder.arrays(TINY).items():
    inner = name.removeprefix("model.")
    old, new = f"language_model.{name}", f"model.language_model.{inner}"
    tensors[new if newer else old] = value
  hf = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": TINY,
  }
  tiny_folder.write_weights(beside, tensors)
  cfg = read(beside, hf)
  assert cfg == weights.read_config(str(alone))
  one, other = (weights.read_params(str(p), cfg) for p in (alone, beside))
  jax.tree.map(np.testing.assert_array_equal, one, other)
  tiny_folder.write_weights(beside, tensors | {"model.audio": images})
  with pytest.raises(types.InputError, match=r"got 'model\.audio"):
    weights.check(str(beside), cfg)


def test_a_random_model_begins_with_norms_that_multiply_by_one(tmp_path):
  tree = transformer.spec(read(tmp_path, TINY))
  norms = [w for name, w in tree["layers"].items() if name.endswith("norm")]
  assert len(norms) == 6
  assert all(w.start == 0 for w in (*norms, tree["final_norm"]))


@pytest.mark.parametrize("width", [1152, 2560])
def test_the_scale_of_embeddings_is_rounded_as_weights_are(width):
  # Layers add nothing here, and the last norm divides by 2**20.
  cfg = transformer.Config(
    num_layers=1,
    width=width,
    num_heads=1,
    num_kv_heads=1,
    head_width=2,
    ff_width=1,
    vocab_size=1,
    norm_eps=2.0**40,
    qk_norm=True,
    gemma=variants.Gemma(query_scalar=2),
  )
  params = jax.tree.map(
    lambda w: jnp.zeros(w.shape, jnp.bfloat16),
    transformer.spec(cfg),
    is_leaf=lambda x: hasattr(x, "fan_in"),
  )
  draw = np.random.default_rng(0).normal(size=(1, width))
  params["embed"] = embed = jnp.asarray(draw, jnp.bfloat16)
  token = jnp.zeros((1, 1), jnp.int32)
  hidden, _ = transformer.forward(
    params,
    cfg,
    token,
    token,
    attend=lambda cache, q, k, v, local: (q, cache),
    dtype="bfloat16",
  )
  scale = np.float32(np.sqrt(width))
  right = embed * jnp.asarray(scale).astype(jnp.bfloat16)
  np.testing.assert_array_equal(hidden[0] * 2.0**20, right)
  exact = (embed.astype(jnp.float32) * scale).astype(jnp.bfloat16)
  assert np.any(exact != right)


@pytest.mark.parametrize(
  ("options", "named"),
  [
    ({"qk_norm": False}, "model.config.qk_norm"),
    (
      {"window": variants.Window(3, (True,))},
      "model.config.window.layers: expected one entry for each of 2",
    ),
  ],
)
def test_a_shape_that_does_not_fit_itself_is_refused(options, named):
  fields = dict(
    num_layers=2,
    width=8,
    num_heads=1,
    num_kv_heads=1,
    head_width=8,
    ff_width=8,
    vocab_size=8,
    qk_norm=True,
    gemma=variants.Gemma(query_scalar=8),
  )
  with pytest.raises(types.InputError, match=named):
    transformer.Config(**{**fields, **options})


def test_halves_of_records_are_refused():
  with pytest.raises(types.InputError, match="model.config.window.size"):
    variants.Window(0, (True,))
  with pytest.raises(types.InputError, match="model.config.rope_scaling"):
    transformer.RopeScaling(factor=2.0, low_factor=1.0)
