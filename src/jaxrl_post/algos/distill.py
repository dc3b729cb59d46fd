"""On-policy distillation: tokens of the policy, judged by a teacher.

The reverse KL (Agarwal et al. 2024, arXiv 2306.13649) as a reward a token; the
teacher is the reference policy.
"""

from jaxrl_post.algos import baselines, losses
from jaxrl_post.algos import objective as objectives


def objective(rewards: float = 0.0) -> objectives.Objective:
  """Returns the score function of the teacher's log-ratio.

  Args:
    rewards: weight of the task's own advantages beside it.
  """
  return objectives.Objective(
    baseline=baselines.Teacher(rewards), region=losses.Score()
  )
