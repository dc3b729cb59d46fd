"""The forms a reward may have: for one rollout or for several, plain or async.

A reward is a plain function of a rollout and the reference of its prompt
(`Single`). One that is better asked for many rollouts at once takes lists of
both and gives a list (`Batched`), and says so by the decorator `batched`.
Either may be an `async def`; its calls then wait at the same time.
"""

import concurrent.futures
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl_post import types

# The rollout and the reference of its prompt to a number, or to named parts
# that the configured weights add up. None, as NaN, is no reward.
RewardValue = float | Mapping[str, float] | None
Reward = Callable[[types.Rollout, Any], RewardValue | Awaitable[RewardValue]]


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
  ) -> RewardValue | Awaitable[RewardValue]:
    """Returns the reward of a rollout, given the reference of its prompt."""
    ...


@runtime_checkable
class Batched(Protocol):
  """Scores as many rollouts as there are, at least one."""

  def __call__(
    self, rollouts: Sequence[types.Rollout], references: Sequence[Any], /
  ) -> Sequence[RewardValue] | Awaitable[Sequence[RewardValue]]:
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


def checked(check: Callable[..., None]) -> Callable[..., Any]:
  """Returns a decorator of a function that has settings.

  Args:
    check: takes the settings by name, as a partial has given them, and raises
      `types.InputError` where one is wrong.
  """

  def mark(function: Callable[..., Any]) -> Callable[..., Any]:
    marked: Any = function
    marked.settings_check = check
    return function

  return mark


def check_settings(function: Callable[..., Any]) -> None:
  """Refuses what partials gave a function that is `checked`.

  Raises:
    types.InputError: a setting is wrong, missing, or none of the function's.
  """
  settings: dict[str, Any] = {}
  while isinstance(function, functools.partial):
    settings = {**function.keywords, **settings}
    function = function.func
  check = getattr(function, "settings_check", None)
  if check is None:
    return
  try:
    inspect.signature(check).bind(**settings)
  except TypeError as error:
    name = getattr(function, "__name__", "reward")
    raise types.InputError(
      f"rewards.functions: expected the settings of {name}, got one "
      f"that is not: {error}. Write functools.partial({name}, ...) with them."
    ) from error
  check(**settings)
