"""MaxRL (Tajwar et al. 2026, arXiv 2602.02710).

Advantages over the mean of the group, for rewards of 0 and 1.
"""

from jaxrl_post.algos import baselines
from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns GRPO with the mean as the scale: rare successes weigh more."""
  return objectives.Objective(baseline=baselines.Group(scale="mean"))
