"""The text model within a Gemma 3 that also reads images: no image is read."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_post.models import gemma3, hf_format, transformer

ARCHITECTURE = "Gemma3ForConditionalGeneration"

# Of its modules in `transformers` since 4.52.
PREFIX = "model.language_model."

# Of published checkpoints, and as newer releases of `transformers` write them.
_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_TEXT = re.compile(r"^language_model\.(?=model\.|lm_head\.)")
_NEWER = re.compile(r"^model\.language_model\.")


def config(hf: Mapping[str, Any]) -> transformer.Config:
  """Reads the shape of the text model from the fields of config.json.

  Raises:
    InputError: naming a field that is missing, wrong or not supported.
  """
  text = hf.get("text_config")
  if not isinstance(text, Mapping):
    raise hf_format.refusal("text_config", "an object", text)
  hf_format.only(hf, "quantization_config", None)
  tied = hf.get("tie_word_embeddings", True)
  return gemma3.config({**text, "tie_word_embeddings": tied})


def hf_config(cfg: transformer.Config) -> dict[str, Any]:
  """Writes the fields of config.json of the text model alone."""
  return gemma3.hf_config(cfg)


def text(
  entries: Mapping[str, hf_format.Entry],
) -> dict[str, hf_format.Entry]:
  """Returns the tensors of the text model, by the names it has alone."""
  return {
    _NEWER.sub("model.", _TEXT.sub("", name)): entry
    for name, entry in entries.items()
    if not _IMAGES.match(name)
  }
