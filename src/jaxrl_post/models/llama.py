"""Llama 3 and SmolLM2: the plain decoder, with Llama 3's rope scaling."""

from collections.abc import Mapping
from typing import Any

from jaxrl_post.models import hf_format, transformer

ARCHITECTURE = "LlamaForCausalLM"


def config(hf: Mapping[str, Any]) -> transformer.Config:
  """Reads the shape of a Llama from the fields of its config.json.

  Raises:
    InputError: naming a field that is missing, wrong or not supported.
  """
  hf_format.only(hf, "attention_bias", False, None)
  hf_format.only(hf, "mlp_bias", False, None)
  return hf_format.decoder(hf)


def hf_config(cfg: transformer.Config) -> dict[str, Any]:
  """Writes the fields of config.json: the inverse of `config`."""
  return hf_format.fields(cfg, "llama", ARCHITECTURE)
