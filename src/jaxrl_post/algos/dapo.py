"""DAPO (Yu et al. 2025, arXiv 2503.14476), sections 3.1, 3.3 and 3.4.

Its dynamic sampling (section 3.2) is `stream.filter_zero_signal`, and the soft
penalty on long answers the reward `rewards.shaping.overlong`.
"""

from jaxrl_post.algos import losses
from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns clip-higher and the token mean; truncated rollouts are left out."""
  return objectives.Objective(
    region=losses.Clip(low=0.2, high=0.28), mask_truncated=True
  )
