"""A transformer together with how it is computed; static, hashable."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post import types
from jaxrl_post.models import scoring, transformer


@dataclasses.dataclass(frozen=True)
class Decoder:
  """What a step needs to know of a model besides its weights.

  Attributes:
    config: shape of the transformer.
    dtype: compute dtype of its matrix products.
    remat: recompute layers in the backward pass to save memory.
    chunk: tokens whose logits a device has at a time.
    sharding: how rows and positions of what is scored lie on a mesh; None where
      all are on one device.
  """

  config: transformer.Config
  dtype: Literal["float32", "bfloat16"] = "float32"
  remat: bool = False
  chunk: int = 1024
  sharding: jax.sharding.NamedSharding | None = None


@dataclasses.dataclass(frozen=True)
class Model:
  """Where a model comes from: a checkpoint, or a shape to draw at random.

  Attributes:
    path: a Hugging Face folder or a GGUF file; None draws random weights.
    config: shape of a random model; None with a path.
    dtype: compute dtype of score and update. Weights are kept in float32.
    remat: recompute layers in the backward pass to save memory.
    chunk: tokens whose logits a device has at a time; bounds their memory by
      chunk x vocabulary, whatever the rows.
  """

  path: str | None = None
  config: transformer.Config | None = None
  dtype: Literal["float32", "bfloat16"] = "float32"
  remat: bool = False
  chunk: int = 1024

  def __post_init__(self) -> None:
    if (self.path is None) == (self.config is None):
      raise types.InputError(
        "model: expected exactly one of path and config, got "
        f"path={self.path!r} and config={self.config!r}. Set one of them."
      )
    if self.chunk < 1:
      raise types.InputError(
        f"model.chunk: expected >= 1, got {self.chunk}. 1024 is usual."
      )


def logprobs(
  decoder: Decoder,
  params: types.Tree,
  *,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  temperature: Float[Array, "B T"],
  wanted: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Scores every token of each row, given the tokens before it.

  Args:
    decoder: the model.
    params: weights.
    tokens: ids.
    positions: as in `transformer.forward`, likewise `segment_ids`.
    segment_ids: which tokens are one sequence.
    temperature: that each token was sampled at; 0 counts as 1.
    wanted: which tokens are scored; None for all. What is not wanted costs no
      logits.

  Returns:
    Log-probabilities and entropies in nats, aligned with `tokens`; 0 where not
    wanted, and at the first position, which nothing predicts. The first token
    of a later segment is scored by the segment before it, which means nothing.
  """
  hidden, _ = transformer.forward(
    params,
    decoder.config,
    tokens,
    positions,
    segment_ids=segment_ids,
    dtype=decoder.dtype,
    remat=decoder.remat,
    sharding=decoder.sharding,
  )
  # Hidden states stay as they lie on the devices; what the last ones predict
  # is dropped.
  targets, temperature, wanted = jax.tree.map(
    lambda x: jnp.roll(x, -1, axis=1), (tokens, temperature, wanted)
  )
  found = scoring.token_logprobs(
    params,
    decoder.config,
    hidden,
    targets,
    temperature,
    chunk=decoder.chunk,
    wanted=wanted,
    sharding=decoder.sharding,
  )
  taken, entropy = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in found)
  return taken, entropy
