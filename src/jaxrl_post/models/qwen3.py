"""Qwen3 (dense): norms on queries and keys, heads of their own width."""

from collections.abc import Mapping
from typing import Any

from jaxrl_post.models import hf_format, transformer

ARCHITECTURE = "Qwen3ForCausalLM"


def config(hf: Mapping[str, Any]) -> transformer.Config:
  """Reads the shape of a Qwen3 from the fields of its config.json.

  Raises:
    InputError: naming a field that is missing, wrong or not supported.
  """
  hf_format.only(hf, "attention_bias", False, None)
  return hf_format.decoder(hf, head_width=128, qk_norm=True, windows=True)


def hf_config(cfg: transformer.Config) -> dict[str, Any]:
  """Writes the fields of config.json: the inverse of `config`."""
  return hf_format.fields(cfg, "qwen3", ARCHITECTURE)
