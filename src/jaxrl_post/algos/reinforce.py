"""REINFORCE (Williams 1992), rewards whitened over the step."""

from jaxrl_post.algos import baselines, losses
from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns the score function, with the step as baseline."""
  return objectives.Objective(baseline=baselines.Batch(), region=losses.Score())
