"""Writes tiny random models as Hugging Face folders.

Everything follows from the family, the options and a seed, so that stored
values of another library need no stored weights. Needs neither jax nor the
package under test: names and shapes are written down a second time here.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

VOCAB = 264  # 256 bytes, 3 special tokens, and rows that no token uses.
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
  "{% for message in messages %}"
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
  "{{ '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHAPE = {
  "hidden_act": "silu",
  "hidden_size": 48,
  "intermediate_size": 80,
  "max_position_embeddings": 512,
  "num_attention_heads": 4,
  "num_hidden_layers": 3,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": True,
  "vocab_size": VOCAB,
}
FAMILIES: dict[str, dict[str, Any]] = {
  "llama": {
    **_SHAPE,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 500000.0,
    # Short enough that 40 positions meet all three kinds of wavelength.
    "rope_scaling": {
      "rope_type": "llama3",
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 64,
    },
  },
  "qwen2": {
    **_SHAPE,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": 32,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
  },
  "qwen3": {
    **_SHAPE,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,  # Not hidden_size / num_attention_heads.
    "model_type": "qwen3",
    "rope_scaling": None,
    "rope_theta": 1000000.0,
  },
  "gemma3": {
    **{name: _SHAPE[name] for name in _SHAPE if name != "hidden_act"},
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 24,  # Not head_dim.
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 10000.0,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
  },
}
# More models of these families: the family, and fields that are otherwise.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
  "qwen2_window": (
    "qwen2",
    {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
  ),
  "qwen3_window": (
    "qwen3",
    {
      "sliding_window": 9,
      "use_sliding_window": True,
      "layer_types": ["sliding_attention", "full_attention"] * 2,
      "num_hidden_layers": 4,
      "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
    },
  ),
}
# Besides the families that have one feed-forward layer in each block.
MIXTURES: dict[str, dict[str, Any]] = {
  "qwen3_moe": {
    **_SHAPE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
  },
}


def classifier(family: str, **options: Any) -> dict[str, Any]:
  """Returns the options of `write` for a classifier with one label."""
  name = FAMILIES[family]["architectures"][0].replace(
    "ForCausalLM", "ForSequenceClassification"
  )
  own = {"architectures": [name], "id2label": {"0": "LABEL_0"}}
  return {**own, "pad_token_id": 0, **options}


def shapes(hf: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every tensor of a checkpoint, by name."""
  width, ff = hf["hidden_size"], hf["intermediate_size"]
  heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
  head = hf.get("head_dim") or width // heads
  out: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (hf["vocab_size"], width),
    "model.norm.weight": (width,),
  }
  if hf["architectures"][0].endswith("ForSequenceClassification"):
    out["score.weight"] = (len(hf["id2label"]), width)
  elif not hf["tie_word_embeddings"]:
    out["lm_head.weight"] = (hf["vocab_size"], width)
  for i in range(hf["num_hidden_layers"]):
    at = f"model.layers.{i}."
    out[at + "input_layernorm.weight"] = (width,)
    out[at + "post_attention_layernorm.weight"] = (width,)
    out[at + "self_attn.q_proj.weight"] = (heads * head, width)
    out[at + "self_attn.k_proj.weight"] = (kv_heads * head, width)
    out[at + "self_attn.v_proj.weight"] = (kv_heads * head, width)
    out[at + "self_attn.o_proj.weight"] = (width, heads * head)
    parts, size = ["mlp."], ff
    if hf["model_type"] in MIXTURES:
      parts = [f"mlp.experts.{e}." for e in range(hf["num_experts"])]
      size = hf["moe_intermediate_size"]
      out[at + "mlp.gate.weight"] = (hf["num_experts"], width)
    for part in parts:
      out[at + part + "gate_proj.weight"] = (size, width)
      out[at + part + "up_proj.weight"] = (size, width)
      out[at + part + "down_proj.weight"] = (width, size)
    if hf["model_type"] == "qwen2":
      out[at + "self_attn.q_proj.bias"] = (heads * head,)
      out[at + "self_attn.k_proj.bias"] = (kv_heads * head,)
      out[at + "self_attn.v_proj.bias"] = (kv_heads * head,)
    if hf["model_type"] == "gemma3_text":
      out[at + "pre_feedforward_layernorm.weight"] = (width,)
      out[at + "post_feedforward_layernorm.weight"] = (width,)
    if hf["model_type"] in {"qwen3", "qwen3_moe", "gemma3_text"}:
      out[at + "self_attn.q_norm.weight"] = (head,)
      out[at + "self_attn.k_norm.weight"] = (head,)
  return out


def arrays(hf: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
  """Draws every tensor: each from its own seed, none at a trivial value."""
  out, one = {}, 0.0 if hf["model_type"] == "gemma3_text" else 1.0
  for i, (name, shape) in enumerate(sorted(shapes(hf).items())):
    draw = np.random.RandomState(seed * 1000 + i).standard_normal(shape)
    if len(shape) == 2:
      fan_in = 1 if "embed" in name else shape[1]
      out[name] = draw / np.sqrt(fan_in)
    else:
      out[name] = 0.3 * draw + (one if "norm" in name else 0.0)
  return {name: x.astype(np.float32) for name, x in out.items()}


def byte_tokenizer(*, bos: bool = False) -> tokenizers.Tokenizer:
  """Makes a tokenizer of one id a byte, after the special tokens 0, 1, 2.

  Args:
    bos: it begins every text with `END`.
  """
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: i for i, token in enumerate((END, START, STOP, *letters))}
  out = tokenizers.Tokenizer(models.BPE(vocab, []))
  out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  out.decoder = decoders.ByteLevel()
  out.add_special_tokens([END, START, STOP])
  if bos:
    out.post_processor = processors.TemplateProcessing(
      single=f"{END} $A", special_tokens=[(END, 0)]
    )
  return out


def _write_json(path: pathlib.Path, value: object) -> None:
  path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def write(
  folder: pathlib.Path,
  family: str = "llama",
  *,
  seed: int = 0,
  shards: int = 1,
  template: str | None = CHATML,
  bos: bool = False,
  **options: Any,
) -> dict[str, Any]:
  """Writes a folder as `save_pretrained` would.

  Args:
    folder: made if it is not there.
    family: of `FAMILIES` or `MIXTURES`.
    seed: of the weights.
    shards: number of safetensors files; more than one come with an index.
    template: chat template; None leaves it out.
    bos: the tokenizer begins every text with `END`.
    options: replace fields of config.json.

  Returns:
    The fields of config.json.
  """
  folder.mkdir(parents=True, exist_ok=True)
  hf = {
    **(FAMILIES | MIXTURES)[family],
    "bos_token_id": 0,
    "eos_token_id": 2,
    **options,
  }
  _write_json(folder / "config.json", hf)
  write_weights(folder, arrays(hf, seed), shards)
  byte_tokenizer(bos=bos).save(str(folder / "tokenizer.json"))
  settings = {"eos_token": STOP, "pad_token": END}
  if family == "gemma3":
    # Else `transformers` makes it one of Gemma's, whose vocabulary it is not.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
  if bos:
    settings["bos_token"] = END
  if template is not None:
    settings["chat_template"] = template
  _write_json(folder / "tokenizer_config.json", settings)
  _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})
  return hf


def write_weights(
  folder: pathlib.Path, tensors: Mapping[str, np.ndarray], shards: int = 1
) -> None:
  """Writes safetensors, in one file or in several with their index."""
  if shards == 1:
    file = folder / "model.safetensors"
    safetensors.numpy.save_file(dict(tensors), file, {"format": "pt"})
    return
  names, where = sorted(tensors), {}
  for i in range(shards):
    file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
    part = {name: tensors[name] for name in names[i::shards]}
    safetensors.numpy.save_file(part, folder / file, {"format": "pt"})
    where |= dict.fromkeys(part, file)
  index = {"metadata": {}, "weight_map": where}
  _write_json(folder / "model.safetensors.index.json", index)
