"""A reward for reasoning-gym tasks, by the data set's own scorer (extra `gym`).

Only experiments that use it import this module. Data: `data.gym.Gym`.
"""

import functools
from collections.abc import Callable
from typing import Any

import reasoning_gym
from reasoning_gym import utils

from jaxrl_post import types


def solved(rollout: types.Rollout, reference: Any) -> float:
  """Scores the answer by the rules of the task.

  Args:
    rollout: the answer is what stands in its last `<answer>...</answer>`, or,
      without one, all its text.
    reference: the entry of the data set, as `data.gym.Gym` gives it.

  Returns:
    The scorer's number: 1.0 for a right answer; some data sets give part of it
    for a wrong one.

  Raises:
    types.InputError: when the reference is no such entry.
  """
  match reference:
    case {"metadata": {"source_dataset": str(name)}}:
      given = utils.extract_answer(rollout.text)
      given = rollout.text.strip() if given is None else given
      return float(_scorer(name)(given, reference))
  raise types.InputError(
    "reward gym: expected an entry of reasoning-gym as the reference, got "
    f"{reference!r}. Take the data from data.gym.Gym."
  )


@functools.cache
def _scorer(name: str) -> Callable[..., float]:
  return reasoning_gym.get_score_answer_fn(name)
