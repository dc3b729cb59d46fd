"""The stream of a process that does not lead.

The head has the ledger. Every batch it takes is given to all, so that each
process trains its own rows of the same batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

from jaxrl_post import types


def bare(groups: list[types.Group] | None) -> list[types.Group] | None:
  """Returns groups with what a training row needs, and nothing else.

  References belong to the user, and need not survive the way to another
  process; texts are for people, who read them at the head.
  """
  if groups is None:
    return None
  return [
    types.Group(
      prompt=_bare(group.prompt),
      rollouts=tuple(
        dataclasses.replace(
          rollout, prompt=_bare(rollout.prompt), text="", conversation=""
        )
        for rollout in group.rollouts
      ),
    )
    for group in groups
  ]


def _bare(prompt: types.Prompt) -> types.Prompt:
  return dataclasses.replace(prompt, reference=None, text="", messages=())


class Follower:
  """Has the methods of `stream.Stream` that the loop calls.

  Its `next` is never called: the head's batch is shared.
  """

  def __init__(self, publish: Callable[[types.Policy], None]) -> None:
    """Takes the function that gives weights to the engine of this process."""
    self._publish = publish

  def __enter__(self) -> Self:
    """Does nothing: the head admits."""
    return self

  def __exit__(self, *_: object) -> None:
    """Does nothing: the head stops."""

  def publish(
    self,
    policy: types.Policy,
    updated_at: float | None = None,
    *,
    cut: bool = False,
  ) -> None:
    """Hands over the newest weights; all else is for the head."""
    del updated_at, cut
    self._publish(policy)

  def next(self) -> list[types.Group] | None:
    """Is the head's business.

    Raises:
      RuntimeError: always.
    """
    raise RuntimeError("only the head takes batches")

  def cut(self) -> None:
    """Returns None: the head writes the stream into checkpoints."""
