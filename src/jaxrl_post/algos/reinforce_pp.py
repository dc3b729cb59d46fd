"""REINFORCE++ and its baseline variant (Hu 2025, arXiv 2501.03262)."""

from jaxrl_post.algos import baselines
from jaxrl_post.algos import objective as objectives


def objective(*, group: bool = False) -> objectives.Objective:
  """Returns PPO's clip on returns that are whitened over the step.

  Args:
    group: take the group's mean off first: REINFORCE++-baseline.
  """
  return objectives.Objective(baseline=baselines.Returns(group=group))
