"""CISPO: clipped weights, and every token keeps its gradient.

MiniMax-M1 (2025), arXiv 2506.13585.
"""

from jaxrl_post.algos import losses
from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns the score function weighed by a ratio with an upper limit."""
  return objectives.Objective(region=losses.Cispo())
