"""Dr.GRPO: no division that favours short or easy (arXiv 2503.20783)."""

from jaxrl_post.algos import baselines, reducers
from jaxrl_post.algos import objective as objectives


def objective(longest: int) -> objectives.Objective:
  """Returns GRPO without the deviation and without lengths.

  Args:
    longest: the constant divisor, in tokens: the longest completion.
  """
  return objectives.Objective(
    baseline=baselines.Group(scale="none"),
    reducer=reducers.Constant(longest),
  )
