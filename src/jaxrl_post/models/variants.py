"""What some families do otherwise: records of `transformer.Config`."""

import dataclasses

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Window:
  """Layers in which a token reads the nearest positions only.

  Attributes:
    size: positions that it reads, its own among them.
    layers: which layers these are, each in its place.
    rope_theta: base of their rotary phases, which are then not scaled; None
      turns them as in all other layers.
  """

  size: int
  layers: tuple[bool, ...]
  rope_theta: float | None = None

  def __post_init__(self) -> None:
    if self.size < 1:
      raise types.InputError(
        f"model.config.window.size: expected >= 1, got {self.size}. Correct it."
      )


@dataclasses.dataclass(frozen=True)
class Gemma:
  """What Gemma 3 does otherwise (Gemma Team 2025, arXiv 2503.19786).

  Norms multiply by 1 + w, and there are two more of them in a block, of what
  attention and the feed-forward layer give; this one's gate is a GELU in its
  tanh form; embeddings are multiplied by sqrt(D), rounded to the compute dtype.

  Attributes:
    query_scalar: scores are divided by its root, and not by that of the head
      width.
  """

  query_scalar: float
