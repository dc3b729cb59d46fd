"""Penalties for length and repetition, to stand beside a reward with a weight.

Of a conversation they read what the policy said, and not what it was told. They
do not read the reference. A configuration gives what they need:
`functools.partial(shaping.overlong, most=1024, margin=256)`.
"""

import bisect
import itertools
from typing import Any

from jaxrl_post import types


def overlong(
  rollout: types.Rollout, reference: Any, *, most: int, margin: int
) -> float:
  """Punishes a long answer softly (DAPO, arXiv 2503.14476, equation 13).

  Args:
    rollout: what was answered.
    reference: not read.
    most: longest completion that is allowed, in tokens of the policy, of all
      rows of a rollout; `sampling.max_tokens`, which is the limit of each.
    margin: tokens below it over which the penalty falls from 0 to -1.

  Returns:
    0.0 up to `most - margin` tokens, then falling in a straight line to -1.0
    at `most` and beyond.

  Raises:
    types.InputError: the margin is not within the longest completion.
  """
  del reference
  if not 0 < margin <= most:
    raise types.InputError(
      f"reward overlong: expected 0 < margin <= {most}, got {margin}. A fifth "
      "of the longest completion is usual."
    )
  own = sum(version >= 0 for version in rollout.completion.versions)
  over = own - (most - margin)
  return max(min(-over / margin, 0.0), -1.0)


def repetition(
  rollout: types.Rollout, reference: Any, *, size: int = 4
) -> float:
  """Punishes saying the same again.

  Args:
    rollout: what was answered.
    reference: not read.
    size: tokens in a run, of which there is one from each token on.

  Returns:
    Minus the share of runs that have been there before in the same turn, in
    (-1, 0]; 0.0 for a completion whose turns are shorter than a run.

  Raises:
    types.InputError: `size` is less than 1.
  """
  del reference
  if size < 1:
    raise types.InputError(
      f"reward repetition: expected size >= 1, got {size}. 3 to 5 is usual."
    )
  made = rollout.completion
  begins = [begin for begin, _ in made.segments]
  number, different = 0, 0

  def turn(place: int) -> tuple[bool, int]:
    return made.versions[place] >= 0, bisect.bisect(begins, place)

  for (own, _), stretch in itertools.groupby(range(len(made.tokens)), turn):
    tokens = tuple(made.tokens[place] for place in stretch) if own else ()
    runs = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    number, different = number + len(runs), different + len(set(runs))
  return different / number - 1.0 if number else 0.0
