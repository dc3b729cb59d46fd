"""Which prompts teach nothing at present, by what their groups have shown.

A prompt that is solved by every rollout of a group, or by none, has no gradient
in most algorithms, and costs a group to find out. With a pool its draws are
passed over for a while: counted, never silent, and not for ever, since a policy
changes. Nothing here knows a clock; evidence counts when `count` is called,
which the stream does with each new policy.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Pool:
  """When the draws of a prompt are passed over.

  Attributes:
    solved: a rollout that earned this or more, turns included, has solved its
      prompt.
    results: groups of a prompt in a row that have to be alike, all of them
      solved by every rollout or all by none, before it rests.
    rest: how many of its draws are then passed over before it is asked again;
      one more group like those, and it rests again.
  """

  solved: float = 1.0
  results: int = 2
  rest: int = 4

  def __post_init__(self) -> None:
    for name in ("results", "rest"):
      value = getattr(self, name)
      if value < 1:
        raise types.InputError(
          f"data.pool.{name}: expected >= 1, got {value}. Correct it."
        )


@types.host_record
class Evidence:
  """What finished groups say about their items.

  Attributes:
    seen: by item, its groups in a row that were alike, positive if every
      rollout of them solved it and negative if none did; and how many of its
      draws were passed over since. Others had a mixed group last, or none.
    new: draws, items and verdicts that do not count yet.
  """

  seen: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
  new: tuple[tuple[int, int, int], ...] = ()


def verdict(pool: Pool, rewards: Sequence[float]) -> int | None:
  """Returns what the rewards of a group say about its prompt.

  Args:
    pool: says what solves it.
    rewards: what its rollouts have earned; NaN where there is no reward.

  Returns:
    1 if every rollout that has a reward solved it, -1 if none did, 0 if some
    did; None if no rollout has a reward.
  """
  solved = [r >= pool.solved for r in rewards if not math.isnan(r)]
  if not solved:
    return None
  if all(solved):
    return 1
  return 0 if any(solved) else -1


def note(
  pool: Pool, evidence: Evidence, draw: int, item: int, rewards: Sequence[float]
) -> Evidence:
  """Takes note of a finished group, which does not count yet.

  Args:
    pool: says what solves a prompt.
    evidence: so far.
    draw: uid of the group's prompt.
    item: its place in the data.
    rewards: of its rollouts.
  """
  found = verdict(pool, rewards)
  if found is None:
    return evidence
  new = (*evidence.new, (draw, item, found))
  return dataclasses.replace(evidence, new=new)


def count(evidence: Evidence) -> Evidence:
  """Lets all that was noted count, in the order of draws.

  Returns:
    Evidence without anything new, the same in whichever order it was noted.
  """
  if not evidence.new:
    return evidence
  seen = dict(evidence.seen)
  for _, item, found in sorted(evidence.new):
    streak, _ = seen.pop(item, (0, 0))
    if found:
      seen[item] = (streak + found if streak * found > 0 else found, 0)
  return Evidence(seen=seen)


def pass_over(
  pool: Pool, evidence: Evidence, items: Iterable[int]
) -> tuple[int, Evidence]:
  """Counts the draws, from the next one on, that are passed over.

  Args:
    pool: says when.
    evidence: that counts.
    items: of the draws to come, in their order; read up to the first that is
      to be asked.

  Returns:
    How many, and the evidence after that. An item is passed over at most
    `pool.rest` times until a further group of it counts, so this ends.
  """
  changed: dict[int, tuple[int, int]] = {}
  number = 0
  for item in items:
    streak, passed = changed.get(item) or evidence.seen.get(item, (0, 0))
    if abs(streak) < pool.results or passed >= pool.rest:
      break
    changed[item] = (streak, passed + 1)
    number += 1
  if not number:
    return 0, evidence
  seen = {**evidence.seen, **changed}
  return number, dataclasses.replace(evidence, seen=seen)


def sums(pool: Pool, evidence: Evidence) -> tuple[int, int]:
  """Counts items taken to be solved always, and never."""
  streaks = [streak for streak, _ in evidence.seen.values()]
  always = sum(streak >= pool.results for streak in streaks)
  never = sum(-streak >= pool.results for streak in streaks)
  return always, never


def to_json(evidence: Evidence) -> dict[str, Any]:
  """Returns the evidence as numbers and lists, for a checkpoint."""
  seen = [[item, *pair] for item, pair in sorted(evidence.seen.items())]
  return {"seen": seen, "new": [list(one) for one in evidence.new]}


def from_json(data: Any) -> Evidence:
  """Reads what `to_json` wrote.

  Returns:
    The evidence that was written.

  Raises:
    types.RunError: when `data` is no evidence.
  """
  match data:
    case {"seen": [*seen], "new": [*new]} if all(
      map(_is_triple, [*seen, *new])
    ):
      return Evidence(
        seen={item: (streak, passed) for item, streak, passed in seen},
        new=tuple((draw, item, found) for draw, item, found in new),
      )
  raise types.RunError(
    "frontier: expected evidence {'seen': [[int] * 3], 'new': [[int] * 3]}, "
    f"got {data!r}. Resume from another checkpoint."
  )


def _is_triple(value: Any) -> bool:
  return (
    isinstance(value, list)
    and len(value) == 3
    and all(type(number) is int for number in value)
  )
