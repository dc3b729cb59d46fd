"""A transformer together with how it is computed; static, hashable."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.models import transformer


@dataclasses.dataclass(frozen=True)
class Decoder:
  """What a step needs to know of a model besides its weights.

  Attributes:
    config: shape of the transformer.
    dtype: compute dtype of its matrix products.
    remat: recompute layers in the backward pass to save memory.
    chunk: positions whose logits exist at a time.
  """

  config: transformer.Config
  dtype: Literal["float32", "bfloat16"] = "float32"
  remat: bool = False
  chunk: int = 128


@dataclasses.dataclass(frozen=True)
class Model:
  """Where a model comes from: a checkpoint, or a shape to draw at random.

  Attributes:
    path: a Hugging Face folder or a GGUF file; None draws random weights.
    config: shape of a random model; None with a path.
    dtype: compute dtype of score and update. Weights are kept in float32.
    remat: recompute layers in the backward pass to save memory.
    chunk: positions whose logits exist at a time; bounds memory by
      rows x chunk x vocabulary.
  """

  path: str | None = None
  config: transformer.Config | None = None
  dtype: Literal["float32", "bfloat16"] = "float32"
  remat: bool = False
  chunk: int = 128

  def __post_init__(self) -> None:
    if (self.path is None) == (self.config is None):
      raise types.InputError(
        "model: expected exactly one of path and config, got "
        f"path={self.path!r} and config={self.config!r}. Set one of them."
      )
    if self.chunk < 1:
      raise types.InputError(
        f"model.chunk: expected >= 1, got {self.chunk}. 128 is usual."
      )


def logprobs(
  decoder: Decoder,
  params: types.Tree,
  *,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  temperature: Float[Array, " B"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Scores every token of each row, given the tokens before it.

  Returns:
    Log-probabilities and entropies in nats, aligned with `tokens`; 0 at the
    first position, which nothing predicts.
  """
  hidden, _ = transformer.forward(
    params,
    decoder.config,
    tokens,
    positions,
    segment_ids=segment_ids,
    dtype=decoder.dtype,
    remat=decoder.remat,
  )
  taken, entropy = transformer.token_logprobs(
    params,
    decoder.config,
    hidden[:, :-1],
    tokens[:, 1:],
    temperature,
    chunk=decoder.chunk,
  )
  first = ((0, 0), (1, 0))
  return jnp.pad(taken, first), jnp.pad(entropy, first)
