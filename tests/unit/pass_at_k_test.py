"""pass@k, majority vote and their intervals, against counting by hand."""

import itertools
import json
import math

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.envs import evaluate, pass_at_k
from jaxrl_post.runtime import summary


def rollout(text: str, reward: float) -> types.Rollout:
  """One completion with its text and reward."""
  prompt = types.Prompt(uid=0, tokens=(1,), text="?", reference=None)
  done = types.Completion(
    uid=0, tokens=(2,), logprobs=(-1.0,), versions=(0,), finish="stop"
  )
  return types.Rollout(
    prompt=prompt, completion=done, temperature=1.0, text=text, reward=reward
  )


def is_one(done: types.Rollout) -> bool:
  """Solved at reward 1."""
  return done.reward == 1.0


@pytest.mark.parametrize(
  ("number", "right", "expected"),
  [
    (4, 1, {1: 0.25, 2: 0.5, 4: 1.0}),
    (8, 2, {1: 0.25, 2: 0.464286, 4: 0.785714, 8: 1.0}),
    (5, 0, {1: 0.0, 5: 0.0}),
    (5, 5, {1: 1.0, 5: 1.0}),
  ],
)
def test_c120_pass_at_k(number, right, expected):
  for k, share in expected.items():
    assert pass_at_k.estimate(number, right, k) == pytest.approx(
      share, abs=1e-6
    )


@pytest.mark.parametrize("number", [1, 3, 6])
def test_pass_at_k_is_the_share_of_choices_with_one_that_is_right(number):
  for right, k in itertools.product(range(number + 1), range(1, number + 1)):
    chosen = list(itertools.combinations(range(number), k))
    share = sum(min(each) < right for each in chosen) / len(chosen)
    assert pass_at_k.estimate(number, right, k) == pytest.approx(share)


@pytest.mark.parametrize("given", [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_c120_more_than_was_sampled_is_refused(given):
  with pytest.raises(ValueError, match="pass@"):
    pass_at_k.estimate(*given)


def test_an_interval_holds_the_truth_95_times_of_100():
  rng, held = np.random.default_rng(0), 0
  for _ in range(500):
    chances = rng.beta(2, 3, size=60)
    shares = [rng.binomial(4, x) / 4 for x in chances]
    low, high = pass_at_k.interval(shares)
    held += low <= 0.4 <= high
  assert 0.92 * 500 <= held <= 0.98 * 500


def test_an_interval_has_a_width_when_all_agree():
  low, high = pass_at_k.interval([1.0] * 20)
  assert (low, high) == (pytest.approx(0.8389, abs=1e-4), 1.0)
  low, high = pass_at_k.interval([0.0])
  assert low == 0.0
  assert high == pytest.approx(0.7935, abs=1e-4)


@pytest.mark.parametrize(
  ("answers", "solved", "expected"),
  [
    (["7", "8", "7"], [True, False, True], True),
    (["7", "8", "8"], [True, False, False], False),
    (["8", "7", "7", "8"], [False, True, True, False], False),
    ([None, None, "7"], [False, False, True], True),
    ([None, None], [False, False], None),
  ],
)
def test_the_majority(answers, solved, expected):
  assert pass_at_k.majority(answers, solved) is expected


def test_metrics_are_means_over_prompts():
  samples = pass_at_k.Samples(4, is_one, answer=lambda text: text or None)
  groups = [
    [rollout("7", 1.0), *[rollout("8", 0.0)] * 3],
    [rollout("3", 1.0), rollout("3", 1.0), rollout("", 0.0), rollout("", 0.0)],
    [rollout("3", math.nan)] * 4,
  ]
  found = pass_at_k.metrics(samples, groups)
  assert found["pass@1"] == pytest.approx((0.25 + 0.5 + 0) / 3)
  assert found["pass@2"] == pytest.approx((0.5 + 5 / 6 + 0) / 3)
  assert found["pass@4"] == pytest.approx(2 / 3)
  assert found["majority@4"] == pytest.approx(1 / 3)
  for name in ("pass@1", "pass@2", "pass@4", "majority@4"):
    assert found[f"{name}_low"] < found[name] < found[f"{name}_high"]
  assert len(found) == 12
  shown = summary.tested(7, {f"eval/{k}": v for k, v in found.items()})
  assert len(shown.splitlines()) == 5
  last = json.loads(shown.splitlines()[-1])
  assert last == {"step": 7} | {f"eval/{k}": v for k, v in found.items()}
  assert "pass@1                                 0.25  (" in shown


def test_success_is_true_or_false():
  samples = pass_at_k.Samples(1, lambda done: done.reward)  # type: ignore
  with pytest.raises(types.RunError, match="True or False for a rollout, got"):
    pass_at_k.metrics(samples, [[rollout("", 1.0)]])


def test_several_completions_are_drawn():
  samples = pass_at_k.Samples(2, is_one)
  with pytest.raises(types.InputError, match=r"evaluation.temperature: .*> 0"):
    evaluate.Evaluation(samples=samples)
  assert evaluate.Evaluation(samples=samples, temperature=1.0).number == 2
