"""What a reward is wrapped in while it is checked, see `rewards.check`.

It runs in a worker, which says little of what a call prints, and tells of a
batch that failed where a run would go on and ask rollout by rollout.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.rewards import protocol, worker

# Bytes that a call may print; the rest is counted, and said.
MAX_OUTPUT = 400

# Why the batch before failed, if it did; the only state.
_failed: list[str] = []


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns what takes the place of a function."""
  batched = protocol.is_batched(function)
  return functools.partial(rewards if batched else reward, function=function)


def reward(
  rollout: types.Rollout, reference: Any, *, function: Callable[..., Any]
) -> Any:
  """Asks a function about a rollout; returns what it returns."""
  worker.limit_output(MAX_OUTPUT)
  return function(rollout, reference)


@protocol.batched
def rewards(
  rollouts: Sequence[types.Rollout],
  references: Sequence[Any],
  *,
  function: Callable[..., Any],
) -> Any:
  """Asks a function about several rollouts; returns what it returns.

  Raises:
    types.RunError: it gives not one for each; or it is asked about one alone
      after it had failed for several.
  """
  worker.limit_output(MAX_OUTPUT)
  number = len(rollouts)
  if number == 1 and _failed:
    raise types.RunError(f"of several at once: {_failed[0]}")
  _failed[:] = ["it ended in between"] if number > 1 else []
  try:
    values = function(rollouts, references)
    if inspect.isawaitable(values):
      return _later(values, number)
    return _kept(values, number)
  except BaseException as error:
    _fail(error, number)
    raise


async def _later(values: Awaitable[Any], number: int) -> Any:
  try:
    return _kept(await values, number)
  except BaseException as error:
    _fail(error, number)
    raise


def _kept(values: Any, number: int) -> Any:
  values = worker.listed(values, number)
  _failed.clear()
  return values


def _fail(error: BaseException, number: int) -> None:
  if number > 1:
    _failed[:] = [f"{type(error).__name__}: {error}"]
