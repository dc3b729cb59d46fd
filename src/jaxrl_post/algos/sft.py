"""Supervised fine-tuning: the negative log-likelihood of given completions."""

from jaxrl_post.algos import baselines, losses
from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns the token mean of -log p: every completion has reward 1."""
  return objectives.Objective(
    baseline=baselines.Batch(whiten=False),
    region=losses.Score(),
    correction=None,
  )
