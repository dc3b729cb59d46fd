"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740)."""

from jaxrl_post.algos import baselines, losses, reducers
from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns the score function of sequences against the other rollouts."""
  return objectives.Objective(
    baseline=baselines.LeaveOneOut(),
    region=losses.Score(),
    reducer=reducers.SequenceSum(),
  )
