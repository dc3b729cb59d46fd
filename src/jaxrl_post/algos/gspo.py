"""Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071)."""

from typing import Literal

from jaxrl_post.algos import losses, reducers
from jaxrl_post.algos import objective as objectives


def objective(
  ratio: Literal["sequence", "sequence_token"] = "sequence",
) -> objectives.Objective:
  """Returns ratios of whole sequences, in the paper's narrow band.

  Args:
    ratio: "sequence_token" is GSPO-token, which lets advantages differ within
      a sequence.
  """
  return objectives.Objective(
    ratio=ratio,
    region=losses.Clip(low=3e-4, high=4e-4),
    reducer=reducers.SequenceMean(),
  )
