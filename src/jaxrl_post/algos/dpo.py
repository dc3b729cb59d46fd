"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

from jaxrl_post.algos import baselines, losses, reducers
from jaxrl_post.algos import objective as objectives


def objective(beta: float = 0.1) -> objectives.Objective:
  """Returns DPO on prompts with two rollouts each.

  Args:
    beta: how much the reference binds.
  """
  return objectives.Objective(
    baseline=baselines.Preference(beta),
    region=losses.Score(),
    reducer=reducers.SequenceSum(),
    correction=None,
  )
