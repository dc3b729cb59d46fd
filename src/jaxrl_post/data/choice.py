"""Which draws of a run are asked, by what finished groups have shown.

By the pool (`difficulty`) or by levels (`curriculum`), whichever there is.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxrl_post.data import curriculum, difficulty
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.data import prompts as prompt_sets


def note(
  prompts: prompt_sets.Prompts,
  frontier: frontiers.Frontier,
  uid: int,
  rewards: Sequence[float],
) -> frontiers.Frontier:
  """Takes note of a finished group, which does not count yet.

  Args:
    prompts: of the run.
    frontier: with the evidence so far.
    uid: of the group's prompt.
    rewards: what its rollouts have earned; NaN where there is no reward.
  """
  if prompts.pool is not None:
    evidence = difficulty.note(
      prompts.pool, frontier.evidence, uid, prompts.place(uid), rewards
    )
    return dataclasses.replace(frontier, evidence=evidence)
  if prompts.ladder is not None:
    levels = curriculum.note(prompts.ladder, frontier.levels, uid, rewards)
    return dataclasses.replace(frontier, levels=levels)
  return frontier


def count(
  prompts: prompt_sets.Prompts, frontier: frontiers.Frontier
) -> frontiers.Frontier:
  """Lets all that was noted count."""
  if prompts.pool is not None:
    evidence = difficulty.count(frontier.evidence)
    return dataclasses.replace(frontier, evidence=evidence)
  if prompts.ladder is not None:
    levels = curriculum.count(prompts.ladder, frontier.levels)
    return dataclasses.replace(frontier, levels=levels)
  return frontier


def pass_over(
  prompts: prompt_sets.Prompts,
  frontier: frontiers.Frontier,
  draws: Iterable[int],
) -> tuple[int, frontiers.Frontier]:
  """Counts the draws, from the next one on, that are passed over.

  Args:
    prompts: of the run.
    frontier: with the evidence that counts.
    draws: to come, in their order; read up to the first that is to be asked.

  Returns:
    How many, and the frontier with the evidence after that; they are not
    finished in it.
  """
  if prompts.pool is not None:
    number, evidence = difficulty.pass_over(
      prompts.pool, frontier.evidence, map(prompts.place, draws)
    )
    return number, dataclasses.replace(frontier, evidence=evidence)
  if prompts.ladder is not None:
    return curriculum.pass_over(
      prompts.ladder, frontier.levels, draws
    ), frontier
  return 0, frontier
