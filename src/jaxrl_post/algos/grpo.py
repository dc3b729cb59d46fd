"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300).

With two settings of DAPO that became the norm, the token mean over the whole
step and an upper clip of its own; without a KL term, which needs a reference.
"""

from jaxrl_post.algos import objective as objectives


def objective() -> objectives.Objective:
  """Returns GRPO with a capped importance weight for lag and numerics."""
  return objectives.Objective()
