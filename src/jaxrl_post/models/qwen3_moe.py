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
