"""Supervised warm-up: show a model from scratch what an answer looks like."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Warmup:
  """A few supervised steps before the first rollout.

  Attributes:
    num_steps: updates of all weights, each on as many demonstrations as a
      batch has rollouts; 0 goes without.
    learning_rate: of its own AdamW; the run's optimizer starts afresh after it.
  """

  num_steps: int = 0
  learning_rate: float = 1e-3

  def __post_init__(self) -> None:
    if self.num_steps < 0:
      raise types.InputError(
        f"warmup.num_steps: expected >= 0, got {self.num_steps}. Correct the "
        "value."
      )
    if not 0 <= self.learning_rate < math.inf:
      raise types.InputError(
        f"warmup.learning_rate: expected >= 0, got {self.learning_rate}. "
        "Correct the value."
      )


def demonstrations(
  prompts: Sequence[types.Prompt],
  *,
  encode: Callable[[str], Sequence[int]],
  stop_id: int,
) -> list[types.Group]:
  """Makes a rollout of each prompt and its own reference answer.

  Args:
    prompts: whose references are the text of a right answer.
    encode: text to ids, without special tokens.
    stop_id: ends each answer.

  Returns:
    A group of one for each prompt, as if it had been sampled at temperature 1.
  """
  groups = []
  for prompt in prompts:
    tokens = (*encode(str(prompt.reference)), stop_id)
    completion = types.Completion(
      uid=prompt.uid,
      tokens=tokens,
      logprobs=(0.0,) * len(tokens),
      versions=(0,) * len(tokens),
      finish="stop",
    )
    rollout = types.Rollout(
      prompt=prompt,
      completion=completion,
      temperature=1.0,
      text=str(prompt.reference),
      reward=1.0,
    )
    groups.append(types.Group(prompt=prompt, rollouts=(rollout,)))
  return groups
