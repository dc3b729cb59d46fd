"""The forms a reward may have: for one rollout or for several, plain or async.

A reward is a plain function of a rollout and the reference of its prompt
(`Single`). One that is better asked for many rollouts at once takes lists of
both and gives a list (`Batched`), and says so by the decorator `batched`.
Either may be an `async def`; its calls then wait at the same time.
"""

import concurrent.futures
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl_post import types


@runtime_checkable
class Scorer(Protocol):
  """Whoever gives rollouts their rewards, such as a `pool.Pool`."""

  def submit_all(
    self, rollouts: Sequence[types.Rollout], /
  ) -> list[concurrent.futures.Future[types.Rollout]]:
    """Scores rollouts; returns at once, with a future of each."""
    ...


@runtime_checkable
class Single(Protocol):
  """Scores a rollout."""

  def __call__(
    self, rollout: types.Rollout, reference: Any, /
  ) -> types.RewardValue | Awaitable[types.RewardValue]:
    """Returns the reward of a rollout, given the reference of its prompt."""
    ...


@runtime_checkable
class Batched(Protocol):
  """Scores as many rollouts as there are, at least one."""

  def __call__(
    self, rollouts: Sequence[types.Rollout], references: Sequence[Any], /
  ) -> Sequence[types.RewardValue] | Awaitable[Sequence[types.RewardValue]]:
    """Returns one reward for each rollout, in their order."""
    ...


def batched(function: Callable[..., Any]) -> Callable[..., Any]:
  """Marks a function as one that takes lists of rollouts and references.

  Args:
    function: `Batched`, once a partial has given it all else that it needs.

  Returns:
    The same function. The pool calls it with at most `rewards.batch` rollouts.
  """
  marked: Any = function
  marked.is_batched = True
  return marked


def is_batched(function: Callable[..., Any]) -> bool:
  """Says whether a function, or what a partial is made of, has that mark."""
  while isinstance(function, functools.partial):
    function = function.func
  return getattr(function, "is_batched", False)
