"""DAPO (Yu et al. 2025, arXiv 2503.14476), sections 3.1, 3.3 and 3.4.

Its dynamic sampling (section 3.2) is `stream.filter_zero_signal`, and the soft
penalty on long answers a reward, see `overlong_penalty`.
"""

from jaxrl_post import types
from jaxrl_post.algos import losses
from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns clip-higher and the token mean; truncated rollouts are left out."""
  return objectives.Objective(
    region=losses.Clip(low=0.2, high=0.28), mask_truncated=True
  )


def overlong_penalty(length: int, *, most: int, margin: int) -> float:
  """Returns the soft punishment of a long answer (equation 13).

  Args:
    length: of the completion, in tokens.
    most: longest that is allowed.
    margin: tokens below it over which the penalty falls from 0 to -1.

  Raises:
    InputError: the margin is not within the longest completion.
  """
  if not 0 < margin <= most:
    raise types.InputError(
      f"overlong_penalty: expected 0 < margin <= {most}, got {margin}. A fifth "
      "of the longest completion is usual."
    )
  over = length - (most - margin)
  return max(min(-over / margin, 0.0), -1.0)
