"""An evaluation waits for rewards, but not longer than it should."""

import concurrent.futures
import dataclasses
import time

import pytest

from jaxrl_post import types
from jaxrl_post.envs import evaluate, single_turn
from jaxrl_post.rewards import pool
from tests.e2e import experiment


def evaluated(monkeypatch, **options) -> dict[str, float]:
  """Evaluates with one reward that never comes."""
  rewards = pool.Pool(pool.Rewards(functions=(experiment.score,)))
  never = concurrent.futures.Future()
  monkeypatch.setattr(rewards, "submit_all", lambda rollouts: [never])
  # Without prompts nobody asks it anything.
  env = object.__new__(single_turn.SingleTurn)
  return evaluate.evaluate(
    [], env=env, generate=lambda requests: [], rewards=rewards, **options
  )


def test_rewards_of_turns_are_part_of_the_mean():
  completion = types.Completion(
    uid=0,
    tokens=(1,),
    logprobs=(0.0,),
    versions=(0,),
    finish="stop",
    turns=(types.Turn(end=1, reward=0.25),),
  )
  prompt = types.Prompt(uid=0, tokens=(1,), text="?", reference="")

  class Rewards(pool.Pool):
    """Gives each its index, at once."""

    def __init__(self):
      pass

    def submit_all(self, rollouts):
      futures = [concurrent.futures.Future() for _ in rollouts]
      for i, future in enumerate(futures):
        future.set_result(dataclasses.replace(rollouts[i], reward=float(i)))
      return futures

  got = evaluate.evaluate(
    [prompt],
    env=single_turn.SingleTurn(2, types.SamplingParams(), lambda ids: ""),
    generate=lambda requests: [completion] * 2,
    rewards=Rewards(),
    timeout_s=5.0,
  )
  assert got["reward"] == 0.75 and got["missing"] == 0


def test_a_run_that_is_to_stop_does_not_wait_for_rewards(monkeypatch):
  answers = iter([False, True])
  begun = time.monotonic()
  got = evaluated(monkeypatch, timeout_s=600.0, stopping=lambda: next(answers))
  assert got == {}
  assert time.monotonic() - begun < 5


def test_rewards_that_are_late_end_the_run(monkeypatch):
  with pytest.raises(types.RunError, match=r"within 0\.1 s .*got 0 of 1"):
    evaluated(monkeypatch, timeout_s=0.1)
