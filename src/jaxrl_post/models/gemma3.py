"""Gemma 3 (text): more norms, embeddings scaled, most layers with a window.

A norm's weight is kept as it is stored: it multiplies by 1 + w.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_post import types
from jaxrl_post.models import hf_format, transformer, variants

ARCHITECTURE = "Gemma3ForCausalLM"

# What `transformers` takes for a field that is missing.
_DEFAULTS = {
  "head_dim": 256,
  "hidden_size": 2304,
  "intermediate_size": 9216,
  "max_position_embeddings": 131072,
  "num_attention_heads": 8,
  "num_hidden_layers": 26,
  "num_key_value_heads": 4,
  "query_pre_attn_scalar": 256,
  "rope_local_base_freq": 10000.0,
  "rope_theta": 1000000.0,
  "sliding_window": 4096,
  "sliding_window_pattern": 6,
  "tie_word_embeddings": True,
  "vocab_size": 262208,
}
_NULLED = ("sliding_window",)
# Fields of other families.
_NOT_ITS = {"hidden_act", "max_window_layers", "use_sliding_window"}
# What is read here and not with the fields of all families.
_OWN = {"hidden_act", "layer_types", "rope_scaling", "rope_theta"}


def config(hf: Mapping[str, Any]) -> transformer.Config:
  """Reads the shape of a Gemma 3 from the fields of its config.json.

  Raises:
    InputError: naming a field that is missing, wrong or not supported.
  """
  hf_format.only(hf, "attention_bias", False, None)
  hf_format.only(hf, "attn_logit_softcapping", None)
  hf_format.only(hf, "final_logit_softcapping", None)
  hf_format.only(hf, "hidden_activation", "gelu_pytorch_tanh", None)
  hf_format.only(hf, "use_bidirectional_attention", False, None)
  # A field that is null has its default, as one that is missing; a window that
  # is null would be none.
  given = {k: v for k, v in hf.items() if v is not None or k in _NULLED}
  hf = {**_DEFAULTS, **given}
  near, whole = _rotary(hf)
  shared = {name: value for name, value in hf.items() if name not in _OWN}
  cfg = hf_format.decoder({**shared, "rope_parameters": whole}, qk_norm=True)
  theta, scaling = hf_format.rope({"rope_parameters": near})
  if scaling is not None:
    place = "rope_parameters.sliding_attention.rope_type"
    raise hf_format.refusal(place, "'default'", "one that scales")
  kinds = hf.get("layer_types")
  if kinds is None:
    every = hf_format.integer(hf, "sliding_window_pattern")
    kinds = [
      hf_format.LAYER_KINDS[(i + 1) % every > 0] for i in range(cfg.num_layers)
    ]
  return dataclasses.replace(
    cfg,
    window=hf_format.window(hf, kinds, cfg.num_layers, theta),
    gemma=variants.Gemma(hf_format.number(hf, "query_pre_attn_scalar")),
  )


def _rotary(hf: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns settings of layers with a window, and of those without.

  In both spellings that `transformers` writes: one setting a kind of layer in
  `rope_parameters`, or fields at the top.
  """
  given = hf.get("rope_parameters") or {}
  nested = [given, *given.values()] if isinstance(given, Mapping) else [given]
  scaling = hf.get("rope_scaling") or {}
  if not all(isinstance(value, Mapping) for value in (*nested, scaling)):
    rule = "one setting for each kind of layer"
    raise hf_format.refusal("rope_parameters", rule, (given, scaling))
  whole, near = (given.get(kind, {}) for kind in hf_format.LAYER_KINDS)
  return (
    {"rope_theta": hf["rope_local_base_freq"], **near},
    {"rope_theta": hf["rope_theta"], **whole, **scaling},
  )


def explicit(cfg: transformer.Config) -> transformer.Config:
  """Returns a Gemma's shape as its config.json can say it.

  Args:
    cfg: the shape; of another family it is returned as it is.

  Returns:
    A shape of the same function, in which layers with a window have a base of
    rotary phases of their own.

  Raises:
    InputError: those layers have the scaling of the others, which no
      config.json of a Gemma can say.
  """
  window = cfg.window
  if cfg.gemma is None or window is None or window.rope_theta is not None:
    return cfg
  if cfg.rope_scaling is not None:
    raise types.InputError(
      "model.config.window.rope_theta: expected a number for a Gemma with "
      "model.config.rope_scaling, got None, which scales layers with a window, "
      "too. Nothing else can load that: take its weights from the checkpoint."
    )
  own = dataclasses.replace(window, rope_theta=cfg.rope_theta)
  return dataclasses.replace(cfg, window=own)


def hf_config(cfg: transformer.Config) -> dict[str, Any]:
  """Writes the fields of config.json: the inverse of `config`."""
  fields = hf_format.fields(cfg, "gemma3_text", ARCHITECTURE)
  window, gemma = cfg.window, cfg.gemma
  if gemma is None:
    return fields
  shared = {k: v for k, v in fields.items() if k not in _NOT_ITS}
  out = {
    "layer_types": [hf_format.LAYER_KINDS[0]] * cfg.num_layers,
    **shared,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": gemma.query_scalar,
  }
  if window is not None:
    out["rope_local_base_freq"] = window.rope_theta
  return out
