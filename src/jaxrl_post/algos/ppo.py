"""Proximal policy optimisation with a critic (Schulman et al. 2017).

arXiv 1707.06347: the clipped surrogate (equation 7) on generalised advantages
(equation 11), with the clipped value loss of its reference code. Two defaults
are those of language models and not of control: an episode is one answer with
one reward at its end, so nothing is discounted, and lambda is 1. With less,
what the end says reaches a token k places before it as lambda^k only (0.95^100
is 0.006), and the rest is the word of a critic that begins at 0 (Yuan et al.
2025, arXiv 2503.01491). The paper's 0.95 has less variance, once the critic is
good.
"""

from jaxrl_post.algos import baselines
from jaxrl_post.algos import objective as objectives


def objective(
  model: baselines.CriticModel = "own", *, decay: float = 1.0
) -> objectives.Objective:
  """Returns PPO; other settings of its critic are `algo.baseline.*`.

  Args:
    model: "own" has a second transformer as the critic, "head" a second head on
      the policy's, whose gradient enters the policy's weights at a tenth.
    decay: lambda.
  """
  coef = None if model == "own" else 0.1
  return objectives.Objective(
    baseline=baselines.Critic(decay=decay, model=model, coef=coef)
  )
