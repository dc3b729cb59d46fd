"""The rows of a batch, one sequence in each."""

from collections.abc import Sequence

import numpy as np

from jaxrl_post import types
from jaxrl_post.data import pack


def apart(groups: Sequence[types.Group], layout: pack.Layout) -> types.Batch:
  """Lays each rollout in a row of its own, prompt and all."""
  fields = {
    name: np.array(x)
    for name, x in vars(pack.pack(groups, layout)).items()
    if x is not None
  }
  alone = pack.Layout(rows=1, length=layout.length)
  rollouts = [r for group in groups for r in group.rollouts]
  empty = vars(pack.pack((), layout))
  wide = [name for name, x in fields.items() if x.ndim == 2]
  for name in wide:
    fields[name] = empty[name]
  for number, rollout in enumerate(rollouts):
    group = types.Group(prompt=rollout.prompt, rollouts=(rollout,))
    one = vars(pack.pack([group], alone))
    for name in wide:
      fields[name][number] = one[name][0]
    there = one["sequence"][0] == 0
    fields["sequence"][number] = np.where(there, number, layout.sequences)
  return types.Batch(**fields)
