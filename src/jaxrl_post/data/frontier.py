"""The data cursor: which draws are finished, so that no resume repeats one.

Groups finish out of order. A single index would skip the slow ones or train
the fast ones twice after a restart. A draw that is passed over is finished.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_post import types
from jaxrl_post.data import curriculum, difficulty


@types.host_record
class Frontier:
  """The finished uids of a run that began at uid 0.

  Attributes:
    first: smallest unfinished uid; all below it are finished.
    done: finished uids above `first`.
    evidence: what finished groups say about their items, if there is a pool.
    levels: what they say about their tasks, if there is a curriculum.
  """

  first: int = 0
  done: frozenset[int] = frozenset()
  evidence: difficulty.Evidence = difficulty.Evidence()
  levels: curriculum.Evidence = curriculum.Evidence()

  def __post_init__(self) -> None:
    if self.first < 0 or any(uid <= self.first for uid in self.done):
      raise types.RunError(
        "frontier: expected 0 <= first and finished uids above it, got first "
        f"{self.first} and {sorted(self.done)}. Resume from another checkpoint."
      )


def finish(frontier: Frontier, *uids: int) -> Frontier:
  """Marks more uids as finished.

  Returns:
    A frontier with exactly these finished uids more; `first` passes over those
    that were finished ahead of it.

  Raises:
    types.RunError: when one of `uids` is finished already.
  """
  done = set(frontier.done)
  for uid in uids:
    if uid < frontier.first or uid in done:
      raise types.RunError(
        f"frontier: expected an unfinished uid, got {uid} a second time. "
        "A draw was trained twice; report this with the run's metrics."
      )
    done.add(uid)
  first = frontier.first
  while first in done:
    first += 1
  above = frozenset(u for u in done if u > first)
  return dataclasses.replace(frontier, first=first, done=above)


def pending(frontier: Frontier) -> Iterator[int]:
  """Yields the unfinished uids in rising order, without end."""
  uids = itertools.count(frontier.first)
  return (uid for uid in uids if uid not in frontier.done)


def to_json(frontier: Frontier) -> dict[str, Any]:
  """Returns the frontier as numbers and lists, for a checkpoint."""
  return {
    "first": frontier.first,
    "done": sorted(frontier.done),
    "evidence": difficulty.to_json(frontier.evidence),
    "levels": curriculum.to_json(frontier.levels),
  }


def from_json(data: Mapping[str, Any]) -> Frontier:
  """Reads what `to_json` wrote.

  Returns:
    The frontier that was written.

  Raises:
    types.RunError: when `data` is no frontier.
  """
  match data:
    case {
      "first": int(first),
      "done": [*done],
      "evidence": evidence,
      "levels": levels,
    } if all(isinstance(uid, int) for uid in done):
      return Frontier(
        first=first,
        done=frozenset(done),
        evidence=difficulty.from_json(evidence),
        levels=curriculum.from_json(levels),
      )
  raise types.RunError(
    "frontier: expected {'first': int, 'done': [int], 'evidence': ..., "
    f"'levels': ...}}, got {data!r}. Resume from another checkpoint."
  )
