"""What the families share with Hugging Face: config fields, tensor names.

A family's file says what its config may contain; `decoder` reads what all of
them contain. `tensors` says where each tensor of a checkpoint goes. GGUF files
are brought to the same names by `gguf_io`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_post import types
from jaxrl_post.models import experts, transformer, variants


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor of a checkpoint that is not read yet.

  Attributes:
    shape: as stored.
    read: returns it; its numbers come from the disk as they are looked at.
  """

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where a checkpoint's tensor goes.

  Attributes:
    leaf: path in the parameter tree.
    layer: index on the leaf's first dim; None for a leaf that is not stacked.
    shape: as stored.
    transpose: stored as [out, in], used as [in, out].
    expert: index on its second dim; None for a leaf without experts.
  """

  leaf: tuple[str, ...]
  layer: int | None
  shape: tuple[int, ...]
  transpose: bool
  expert: int | None = None

  @property
  def index(self) -> tuple[int, ...]:
    """The place of the tensor on the leaf's first dims."""
    return tuple(i for i in (self.layer, self.expert) if i is not None)

  def arrange(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a view of the stored tensor in the shape it has in the leaf."""
    return (stored.T if self.transpose else stored).reshape(shape)

  def restore(self, leaf: np.ndarray) -> np.ndarray:
    """Returns the tensor as it is stored, out of the whole leaf."""
    value = leaf[self.index]
    if not self.transpose:
      return value.reshape(self.shape)
    return value.reshape(self.shape[::-1]).T


# Name in the file, and how many of the leaf's dims a product sums over: they
# are stored last and used first. 0 is a vector, None is stored as it is used.
# In place of {} is the number of an expert: each has a tensor of its own.
_TOP = {
  "embed": ("model.embed_tokens.weight", None),
  "final_norm": ("model.norm.weight", 0),
  "head": ("lm_head.weight", 1),
}
_LAYER = {
  "attn_norm": ("input_layernorm.weight", 0),
  "q": ("self_attn.q_proj.weight", 1),
  "k": ("self_attn.k_proj.weight", 1),
  "v": ("self_attn.v_proj.weight", 1),
  "o": ("self_attn.o_proj.weight", 2),
  "q_bias": ("self_attn.q_proj.bias", 0),
  "k_bias": ("self_attn.k_proj.bias", 0),
  "v_bias": ("self_attn.v_proj.bias", 0),
  "q_norm": ("self_attn.q_norm.weight", 0),
  "k_norm": ("self_attn.k_norm.weight", 0),
  "mlp_norm": ("post_attention_layernorm.weight", 0),
  "gate": ("mlp.gate_proj.weight", 1),
  "up": ("mlp.up_proj.weight", 1),
  "down": ("mlp.down_proj.weight", 1),
  "router": ("mlp.gate.weight", 1),
  "expert_gate": ("mlp.experts.{}.gate_proj.weight", 1),
  "expert_up": ("mlp.experts.{}.up_proj.weight", 1),
  "expert_down": ("mlp.experts.{}.down_proj.weight", 1),
}
# What others call the norm before the feed-forward layer is behind attention in
# a Gemma.
_GEMMA = {
  "attn_post_norm": ("post_attention_layernorm.weight", 0),
  "mlp_norm": ("pre_feedforward_layernorm.weight", 0),
  "mlp_post_norm": ("post_feedforward_layernorm.weight", 0),
}
# What a layer without a window is called, and one with it.
LAYER_KINDS = "full_attention", "sliding_attention"


def _stored(shape: tuple[int, ...], summed: int | None) -> tuple[int, ...]:
  if summed is None:
    return shape
  if summed == 0:
    return (math.prod(shape),)
  return (math.prod(shape[summed:]), math.prod(shape[:summed]))


def tensors(cfg: transformer.Config) -> dict[str, Tensor]:
  """Lists every tensor that a checkpoint of this shape has, by its name."""
  table = {}
  spec = transformer.spec(cfg)
  names = _LAYER if cfg.gemma is None else _LAYER | _GEMMA
  for leaf, weight in spec["layers"].items():
    suffix, summed = names[leaf]
    many = "{}" in suffix
    stored = _stored(weight.shape[1 + many :], summed)
    for i in range(cfg.num_layers):
      for expert in range(weight.shape[1]) if many else (None,):
        name = f"model.layers.{i}.{suffix.format(expert)}"
        table[name] = Tensor(("layers", leaf), i, stored, bool(summed), expert)
  for leaf in spec.keys() - {"layers"}:
    name, summed = _TOP[leaf]
    stored = _stored(spec[leaf].shape, summed)
    table[name] = Tensor((leaf,), None, stored, bool(summed))
  return table


def only(hf: Mapping[str, Any], name: str, *allowed: object) -> None:
  """Refuses a checkpoint whose config sets an option that we do not compute.

  Args:
    hf: fields of the checkpoint's config; one that is missing is None.
    name: of the field.
    allowed: its supported values, the first one is named to the user.

  Raises:
    InputError: naming the field, when it has any other value.
  """
  value = hf.get(name)
  if value not in allowed:
    raise refusal(name, repr(allowed[0]), value)


def refusal(name: str, rule: str, value: object) -> types.InputError:
  """Returns the error for a field of a checkpoint's config."""
  return types.InputError(
    f"{name}: expected {rule}, got {value!r:.100}. This model "
    "cannot be computed here: take another checkpoint."
  )


# Largest size, and most layers, that are no mistake.
_MOST, _MOST_LAYERS = 2**31 - 1, 10_000


def number(
  hf: Mapping[str, Any],
  name: str,
  default: float | None = None,
  place: str = "",
) -> float:
  """Reads a positive number; `place` is what its name stands behind."""
  value: Any = hf.get(name)
  if value is None:
    value = default
  if type(value) not in {int, float} or not 0 < value < math.inf:
    raise refusal(place + name, "a positive number", value)
  return value


def integer(
  hf: Mapping[str, Any],
  name: str,
  default: int | None = None,
  place: str = "",
) -> int:
  """Reads a positive whole number, as `number`."""
  value = number(hf, name, default, place)
  if value != int(value) or value > _MOST:
    raise refusal(place + name, f"a whole number up to {_MOST}", value)
  return int(value)


def rope(
  hf: Mapping[str, Any],
) -> tuple[float, transformer.RopeScaling | None]:
  """Reads rotary positions in both spellings that `transformers` writes.

  Args:
    hf: fields of config.json: `rope_theta` and `rope_scaling` at the top, or
      all of it in `rope_parameters`. `rope_scaling` wins where it is set.

  Returns:
    The base of the wavelengths, and the scaling where configured.

  Raises:
    InputError: naming any other scaling, and rotary positions on a part of a
      head or with one setting a kind of layer.
  """
  place = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
  fields = hf.get(place) or {}
  # Settings a kind of layer are nested: none of them is at the top.
  if any(isinstance(value, Mapping) for value in fields.values()):
    raise refusal(place, "one setting for all layers", fields)
  only({**hf, **fields}, "partial_rotary_factor", 1.0, None)
  theta = number({**hf, **fields}, "rope_theta", 10000.0)
  kind = fields.get("rope_type", fields.get("type", "default"))
  if kind == "default":
    return theta, None
  if kind not in ("linear", "llama3"):
    known = "'default', 'linear' or 'llama3'"
    raise refusal(f"{place}.rope_type", known, kind)
  place += "."
  factor = number(fields, "factor", place=place)
  if kind == "linear":
    return theta, transformer.RopeScaling(factor)
  low = number(fields, "low_freq_factor", place=place)
  high = number(fields, "high_freq_factor", place=place)
  original = "original_max_position_embeddings"
  scaling = transformer.RopeScaling(
    factor=factor,
    low_factor=low,
    high_factor=high,
    original_positions=integer(fields, original, place=place),
  )
  if high <= low:
    rule = f"more than low_freq_factor {low}"
    raise refusal(f"{place}high_freq_factor", rule, high)
  return theta, scaling


def window(
  hf: Mapping[str, Any],
  kinds: Any,
  num_layers: int,
  rope_theta: float | None = None,
) -> variants.Window | None:
  """Reads which layers have a window.

  Args:
    hf: fields of config.json, of which `sliding_window` is the size.
    kinds: a list of the kind of each layer, one of `LAYER_KINDS`.
    num_layers: how many there should be.
    rope_theta: base of rotary phases in layers with a window, see
      `variants.Window`.

  Returns:
    None where no layer has one.

  Raises:
    InputError: another kind, or number of them, or no size.
  """
  if not isinstance(kinds, list) or len(kinds) != num_layers:
    raise refusal("layer_types", f"a list of {num_layers}", kinds)
  for kind in kinds:
    only({"layer_types": kind}, "layer_types", *LAYER_KINDS)
  layers = tuple(kind == LAYER_KINDS[1] for kind in kinds)
  if not any(layers):
    return None
  return variants.Window(integer(hf, "sliding_window"), layers, rope_theta)


def _window(
  hf: Mapping[str, Any], num_layers: int, windows: bool
) -> variants.Window | None:
  """Reads windows in the fields of Qwen, and refuses them in other families."""
  size, kinds = None, hf.get("layer_types")
  if hf.get("use_sliding_window"):
    size = hf.get("sliding_window", 4096)
  if not windows and size is not None:
    only(hf, "use_sliding_window", False)
  if kinds is None:
    first = hf.get("max_window_layers", 28)
    if type(first) is not int:
      raise refusal("max_window_layers", "a whole number", first)
    near = [size is not None and i >= first for i in range(num_layers)]
    kinds = [LAYER_KINDS[local] for local in near]
  return window({"sliding_window": size}, kinds, num_layers)


# What a field is, where there is one.
_KINDS = (
  ("rope_scaling", Mapping, "an object"),
  ("rope_parameters", Mapping, "an object"),
  ("layer_types", list, "a list"),
  ("max_window_layers", int, "a whole number"),
  ("tie_word_embeddings", bool, "true or false"),
  ("norm_topk_prob", bool, "true or false"),
  ("use_sliding_window", bool, "true or false"),
)


def decoder(
  hf: Mapping[str, Any],
  *,
  head_width: int | None = None,
  qkv_bias: bool = False,
  qk_norm: bool = False,
  windows: bool = False,
) -> transformer.Config:
  """Reads the fields that all families have.

  Args:
    hf: fields of config.json, with the defaults of `transformers` for those
      that are missing.
    head_width: where the config has no `head_dim`; None is width / heads.
    qkv_bias: the family has biases on queries, keys and values.
    qk_norm: the family has norms on queries and keys.
    windows: the family has layers with a window, in the fields of Qwen2; in
      others they are refused.

  Returns:
    The shape of the decoder.

  Raises:
    InputError: naming a field that is missing, wrong or not supported.
  """
  for name, kind, rule in _KINDS:
    if not isinstance(hf.get(name), kind | None):
      raise refusal(name, rule, hf[name])
  only(hf, "hidden_act", "silu", None)
  only(hf, "quantization_config", None)
  num_layers = integer(hf, "num_hidden_layers")
  if num_layers > _MOST_LAYERS:
    rule = f"at most {_MOST_LAYERS}"
    raise refusal("num_hidden_layers", rule, num_layers)
  width = integer(hf, "hidden_size")
  num_heads = integer(hf, "num_attention_heads")
  if head_width is None:
    head_width = width // num_heads
  theta, scaling = rope(hf)
  return transformer.Config(
    num_layers=num_layers,
    width=width,
    num_heads=num_heads,
    num_kv_heads=integer(hf, "num_key_value_heads", num_heads),
    head_width=integer(hf, "head_dim", head_width),
    ff_width=integer(hf, "intermediate_size"),
    vocab_size=integer(hf, "vocab_size"),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=number(hf, "rms_norm_eps", 1e-6),
    tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    qkv_bias=qkv_bias,
    qk_norm=qk_norm,
    max_positions=integer(hf, "max_position_embeddings"),
    window=_window(hf, num_layers, windows),
  )


def with_experts(
  hf: Mapping[str, Any], cfg: transformer.Config
) -> transformer.Config:
  """Reads the fields of a model that has experts in all of its layers.

  Args:
    hf: fields of config.json.
    cfg: what `decoder` reads of them.

  Returns:
    The shape with experts, and their width in place of that of a layer.

  Raises:
    InputError: naming a field that is missing or wrong.
  """
  # `transformers` 5 writes the second name.
  old, new = "num_experts", "num_local_experts"
  mixture = experts.Experts(
    num=integer(hf, old if hf.get(new) is None else new),
    per_token=integer(hf, "num_experts_per_tok"),
    normalize=bool(hf.get("norm_topk_prob", False)),
  )
  width = integer(hf, "moe_intermediate_size")
  return dataclasses.replace(cfg, ff_width=width, experts=mixture)


def fields(
  cfg: transformer.Config, model_type: str, architecture: str
) -> dict[str, Any]:
  """Writes the fields that all families have: the inverse of `decoder`.

  Args:
    cfg: the shape.
    model_type: of the family.
    architecture: its class in `transformers`.

  Returns:
    Fields of config.json. Rotary positions are in the older spelling, which
    newer releases of `transformers` read as well.
  """
  out = {
    "architectures": [architecture],
    "model_type": model_type,
    "head_dim": cfg.head_width,
    "hidden_act": "silu",
    "hidden_size": cfg.width,
    "intermediate_size": cfg.ff_width,
    "max_position_embeddings": cfg.max_positions,
    "num_attention_heads": cfg.num_heads,
    "num_hidden_layers": cfg.num_layers,
    "num_key_value_heads": cfg.num_kv_heads,
    "rms_norm_eps": cfg.norm_eps,
    "rope_scaling": _scaling_fields(cfg.rope_scaling),
    "rope_theta": cfg.rope_theta,
    "tie_word_embeddings": cfg.tie_embeddings,
    "vocab_size": cfg.vocab_size,
  }
  if cfg.window is not None:
    layers = cfg.window.layers
    out["layer_types"] = [LAYER_KINDS[local] for local in layers]
    out["sliding_window"] = cfg.window.size
    out["use_sliding_window"] = True
    # Releases that do not know layer_types take all layers from this one on.
    first = layers.index(True) if any(layers) else len(layers)
    if all(layers[first:]):
      out["max_window_layers"] = first
  return out


def _scaling_fields(
  scaling: transformer.RopeScaling | None,
) -> dict[str, Any] | None:
  if scaling is None:
    return None
  if scaling.original_positions is None:
    return {"rope_type": "linear", "factor": scaling.factor}
  return {
    "rope_type": "llama3",
    "factor": scaling.factor,
    "low_freq_factor": scaling.low_factor,
    "high_freq_factor": scaling.high_factor,
    "original_max_position_embeddings": scaling.original_positions,
  }
