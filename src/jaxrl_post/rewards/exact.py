"""A reward for tasks with one right text."""

from typing import Any

from jaxrl_post import types


def exact(rollout: types.Rollout, reference: Any) -> float:
  """Compares the completion with the reference, letter by letter.

  Returns:
    1.0 iff the two texts are equal once the space around them is stripped.
  """
  return float(rollout.text.strip() == str(reference).strip())
