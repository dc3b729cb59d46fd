"""Settings of a reward that is a model on devices; `placement` runs it."""

import dataclasses
import math
from typing import Literal

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Model:
  """A reward model: it reads a whole conversation and gives one number.

  Attributes:
    path: a Hugging Face folder of a sequence classifier with one label, with
      its own tokenizer and chat template.
    weight: of its score in the reward of a rollout.
    name: of its score among the parts of the reward.
    devices: where it lies, as indices into the run's list of devices that
      neither train nor generate. Empty: on those that generate, between their
      blocks of tokens.
    tensor: over how many of `devices` one copy of its weights is split; None is
      1. Those that generate are cut as `placement.generation` says.
    dtype: of its weights and matrix products; the score itself is float32.
    batch: conversations that one program reads.
    max_tokens: longest conversation, in tokens of its own tokenizer. A longer
      one has no score: a failure, for `rewards.on_failure`.
  """

  path: str = ""
  weight: float = 1.0
  name: str = "model"
  devices: tuple[int, ...] = ()
  tensor: int | None = None
  dtype: Literal["float32", "bfloat16"] = "float32"
  batch: int = 8
  max_tokens: int = 1024

  def __post_init__(self) -> None:
    owned, split = self.devices, self.tensor
    distinct = len(set(owned)) == len(owned) and min(owned, default=0) >= 0
    divides = split is None or (split >= 1 and len(owned) % split == 0)
    rules = (
      (bool(self.path), "path", "a folder", self.path),
      (math.isfinite(self.weight), "weight", "a finite number", self.weight),
      (0 < len(self.name) <= 100, "name", "1 to 100 characters", self.name),
      (distinct, "devices", "distinct indices from 0 on", owned),
      (split is None or bool(owned), "tensor", "none without devices", split),
      (divides, "tensor", f"a divisor of {len(owned)} devices", split),
      (self.batch >= 1, "batch", ">= 1", self.batch),
      (self.max_tokens >= 1, "max_tokens", ">= 1", self.max_tokens),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"rewards.model.{name}: expected {rule}, got {value!r}. Correct the "
          "value."
        )
