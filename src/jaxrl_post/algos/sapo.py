"""Soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347)."""

from jaxrl_post.algos import losses, reducers
from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns a soft gate in place of the clip, and means of sequences."""
  return objectives.Objective(
    region=losses.Sapo(), reducer=reducers.SequenceMean()
  )
