"""On-policy distillation: tokens of the policy, judged by a teacher.

The reverse KL (Agarwal et al. 2024, arXiv 2306.13649) as a reward a token, or
the forward KL over the teacher's most probable tokens as a loss; the teacher is
the reference policy.
"""

from jaxrl_post.algos import baselines, divergence, losses
from jaxrl_post.algos import objective as objectives


def top(num: int = 32) -> objectives.Objective:
  """Returns the KL over the teacher's `num` most probable tokens."""
  return objectives.Objective(
    baseline=baselines.Batch(whiten=False),
    region=divergence.TopK(num),
    correction=None,
  )


def objective(rewards: float = 0.0) -> objectives.Objective:
  """Returns the score function of the teacher's log-ratio.

  Args:
    rewards: weight of the task's own advantages beside it.
  """
  return objectives.Objective(
    baseline=baselines.Teacher(rewards), region=losses.Score()
  )
