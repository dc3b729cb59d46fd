"""Qwen3-MoE: the attention of Qwen3, and experts in every layer."""

from collections.abc import Mapping
from typing import Any

from jaxrl_post.models import hf_format, transformer

ARCHITECTURE = "Qwen3MoeForCausalLM"


def config(hf: Mapping[str, Any]) -> transformer.Config:
  """Reads the shape of a Qwen3-MoE from the fields of its config.json.

  Raises:
    InputError: naming a field that is missing, wrong or not supported: layers
      without experts are not.
  """
  hf_format.only(hf, "attention_bias", False, None)
  hf_format.only(hf, "decoder_sparse_step", 1, None)
  hf_format.only(hf, "mlp_only_layers", [], None)
  return hf_format.with_experts(hf, hf_format.decoder(hf, qk_norm=True))


def hf_config(cfg: transformer.Config) -> dict[str, Any]:
  """Writes the fields of config.json: the inverse of `config`."""
  hf = hf_format.fields(cfg, "qwen3_moe", ARCHITECTURE)
  mixture = cfg.experts
  if mixture is None:
    return hf
  return hf | {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": cfg.ff_width,
    "norm_topk_prob": mixture.normalize,
    "num_experts": mixture.num,
    "num_experts_per_tok": mixture.per_token,
  }
