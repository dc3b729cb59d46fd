"""A reward for the form of a completion, whatever it says."""

import re
from typing import Any

from jaxrl_post import types


def matches(rollout: types.Rollout, reference: Any, *, pattern: str) -> float:
  """Matches the whole completion against a pattern.

  A configuration gives the pattern: `functools.partial(format.matches,
  pattern=r"<think>.*</think>.*")`.

  Args:
    rollout: what was answered.
    reference: not read.
    pattern: a regular expression in which `.` matches a new line too.

  Returns:
    1.0 iff the completion, stripped, matches from its first to its last letter.
  """
  del reference
  return float(bool(re.fullmatch(pattern, rollout.text.strip(), re.DOTALL)))
