"""Qwen2 and Qwen2.5: the plain decoder with biases on queries, keys, values."""

from collections.abc import Mapping
from typing import Any

from jaxrl_post.models import hf_format, transformer

ARCHITECTURE = "Qwen2ForCausalLM"


def config(hf: Mapping[str, Any]) -> transformer.Config:
  """Reads the shape of a Qwen2 from the fields of its config.json.

  Raises:
    InputError: naming a field that is missing, wrong or not supported.
  """
  return hf_format.decoder(hf, qkv_bias=True, windows=True)


def hf_config(cfg: transformer.Config) -> dict[str, Any]:
  """Writes the fields of config.json: the inverse of `config`."""
  return hf_format.fields(cfg, "qwen2", ARCHITECTURE)
