"""How long rewards may wait, and what may stand for one that failed."""

import functools
import math

import pytest

from jaxrl_post import types
from jaxrl_post.rewards import code, judge, limits
from jaxrl_post.rewards import http as http_reward
from jaxrl_post.rewards import pool as pools
from tests.unit import pool_test


def served(*seconds: float, **options) -> pools.Rewards:
  functions = [
    functools.partial(http_reward.scored, url="http://x", deadline_s=s)
    for s in seconds
  ]
  return pools.Rewards(functions=tuple(functions), **options)


@pytest.mark.parametrize(
  ("function", "setting"),
  [
    (
      functools.partial(
        judge.graded,
        judge=judge.Judge(url="http://x", model="m", deadline_s=30.0),
      ),
      r"judge\.deadline_s=30 of graded",
    ),
    (
      functools.partial(http_reward.scored, url="http://x", deadline_s=30),
      "deadline_s=30 of scored",
    ),
    (
      functools.partial(code.passed, timeout_s=30.0),
      "timeout_s=30 of passed",
    ),
  ],
)
def test_a_reward_may_not_wait_longer_than_the_pool_lets_it(function, setting):
  told = rf"^rewards\.timeout_s: expected more than {setting}, got "
  for timeout_s in (10.0, 30.0):
    with pytest.raises(types.InputError, match=f"{told}{timeout_s:g}\\. Raise"):
      pools.Rewards(functions=(function,), timeout_s=timeout_s)
  pools.Rewards(functions=(function,), timeout_s=30.5)


def test_functions_of_a_batch_wait_one_after_the_other():
  served(8.0, 5.0, timeout_s=10.0)
  told = (
    r"more than deadline_s=8 of scored \+ deadline_s=5 of scored_2, .*got 13"
  )
  with pytest.raises(types.InputError, match=told):
    served(8.0, 5.0, timeout_s=13.0, batch=2)
  served(8.0, 5.0, timeout_s=13.5, batch=2)


def test_a_reward_without_a_limit_of_its_own_has_none():
  for function in (len, pool_test.rollout, functools.partial(round, ndigits=2)):
    assert limits.longest(function) == ("", 0.0)
  assert limits.longest(http_reward.scored) == ("deadline_s", 8.0)


@pytest.mark.parametrize("value", [1e16, -1e16, math.inf, math.nan])
def test_a_value_for_failures_is_refused_with_its_range(value):
  told = (
    r"on_failure: expected 'stop', 'mask' or a number from -1e\+15 to 1e\+15"
  )
  with pytest.raises(types.InputError, match=told):
    served(1.0, on_failure=value)
