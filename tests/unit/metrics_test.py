import dataclasses
import math

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.runtime import metrics

NAN = float("nan")


def rollout(
  length: int = 3,
  reward: float = NAN,
  finish="stop",
  **parts: float,
) -> types.Rollout:
  return types.Rollout(
    prompt=types.Prompt(uid=0, tokens=(1,), text="?", reference=None),
    completion=types.Completion(
      uid=0,
      tokens=(5,) * length,
      logprobs=(-1.0,) * length,
      versions=(0,) * length,
      finish=finish,
    ),
    temperature=1.0,
    text="",
    reward=reward,
    parts=parts,
  )


def group(*rollouts: types.Rollout) -> types.Group:
  return types.Group(prompt=rollouts[0].prompt, rollouts=rollouts)


def test_c123_length_figures_speak_of_all_rollouts():
  made = group(
    rollout(3),
    rollout(5),
    rollout(8, finish="length"),
    rollout(8, finish="length"),
  )
  got = metrics.batch_metrics([made])
  assert got["completion/mean_tokens"] == 6.0
  assert got["completion/truncated"] == 0.5
  assert got["completion/mean_tokens_finished"] == 4.0
  assert [got[f"completion/p{p}_tokens"] for p in (25, 50, 99)] == [3, 5, 8]
  assert got["completion/max_tokens"] == 8
  assert got["completion/min_tokens"] == 3


def test_rewards_are_averaged_over_those_there_are():
  groups = [
    group(rollout(reward=1.0), rollout(reward=NAN)),
    group(rollout(reward=0.0), rollout(reward=0.5)),
  ]
  got = metrics.batch_metrics(groups)
  assert got["reward/mean"] == 0.5
  assert got["reward/std"] == pytest.approx(math.sqrt(1 / 6))  # divided by n
  assert got["reward/missing"] == 1
  # Groups of means 1 and 0.25: spread 0.75 / sqrt(2), over sqrt(2) groups.
  assert got["reward/standard_error"] == pytest.approx(0.375)
  assert math.isnan(metrics.batch_metrics(groups[:1])["reward/standard_error"])


def test_a_part_is_averaged_over_the_rollouts_that_have_it():
  made = group(
    rollout(reward=1.0, format=1.0, maths=0.5),
    rollout(reward=1.0, format=0.0),
    rollout(),
  )
  got = metrics.batch_metrics([made])
  assert got["reward/part/format"] == 0.5 and got["reward/part/maths"] == 0.5


def test_a_group_has_signal_when_two_of_its_rewards_differ():
  groups = [
    group(*[rollout(reward=0.9)] * 10),
    group(rollout(reward=0.9), rollout(reward=0.8)),
    group(rollout(reward=0.9), rollout(reward=NAN)),
    group(rollout(), rollout()),
  ]
  got = metrics.batch_metrics(groups)
  assert got["signal/zero_fraction"] == 0.75
  assert metrics.batch_metrics(groups[1:2])["signal/zero_fraction"] == 0


def with_turns(made: types.Rollout, *rewards: float) -> types.Rollout:
  turns = tuple(types.Turn(end=1, reward=reward) for reward in rewards)
  completion = dataclasses.replace(made.completion, turns=turns)
  return dataclasses.replace(made, completion=completion)


def test_rewards_of_turns_are_part_of_what_a_rollout_earns():
  one, two = with_turns(rollout(reward=1.0), 0.25, 0.5), rollout(reward=1.0)
  assert (one.earned, two.earned) == (1.75, 1.0)
  assert math.isnan(with_turns(rollout(), 1.0).earned)
  got = metrics.batch_metrics([group(one, two)])
  assert got["reward/mean"] == 1.375 and got["reward/std"] == 0.375
  assert got["signal/zero_fraction"] == 0
  same = group(with_turns(rollout(reward=0.0), 1.0), two)
  assert metrics.batch_metrics([same])["signal/zero_fraction"] == 1


def test_nothing_to_average_is_nan():
  got = metrics.batch_metrics([group(rollout(4, finish="length"))])
  assert math.isnan(got["reward/mean"])
  assert math.isnan(got["completion/mean_tokens_finished"])
  assert got["reward/missing"] == 1 and got["completion/truncated"] == 1
  assert math.isnan(metrics.batch_metrics([])["completion/mean_tokens"])


def test_lag_is_of_trained_tokens_and_the_head_is_the_first_of_a_row():
  versions = np.array([[0, 3, 4, 5], [0, 0, 5, 5], [9, 9, 9, 9]])
  mask = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], np.float32)
  rows = np.broadcast_to(np.arange(3)[:, None], (3, 4))
  got = metrics.staleness(
    versions, mask, 5, sequence=rows, rollout_ids=np.arange(4)
  )
  assert got == {
    "staleness/mean": (2 + 1 + 0 + 0) / 4,
    "staleness/max": 2,
    "staleness/head": (2 + 0) / 2,
  }
  # Two sequences in one row have a first token each.
  got = metrics.staleness(
    versions[:1],
    mask[:1],
    5,
    sequence=np.array([[0, 0, 1, 1]]),
    rollout_ids=np.arange(2),
  )
  assert got["staleness/head"] == (2 + 1) / 2


def test_the_head_of_a_rollout_of_several_rows_is_in_its_first():
  # Its second sequence, 1, lies in an earlier row than its first.
  versions = np.array([[4, 5], [1, 3], [2, 2]])
  sequence = np.array([[1, 1], [0, 0], [2, 2]])
  got = metrics.staleness(
    versions,
    np.ones((3, 2), np.float32),
    5,
    sequence=sequence,
    rollout_ids=np.array([0, 0, 2]),
  )
  assert got["staleness/head"] == (4 + 3) / 2


def test_masked_tokens_are_a_share_of_those_that_were_sampled():
  versions = np.array([[-1, 3, 3, 4], [-1, 0, -1, -1], [-1, -1, -1, -1]])
  mask = np.array([[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], np.float32)
  assert metrics.masked(versions, mask) == {"staleness/masked_tokens": 0.5}
  assert metrics.masked(versions, mask + 1) == {"staleness/masked_tokens": 0}
  none = metrics.masked(versions[2:], mask[2:])
  assert math.isnan(none["staleness/masked_tokens"])


def test_a_batch_that_trains_nothing_has_no_lag():
  none = np.zeros((2, 3), int)
  got = metrics.staleness(
    none, np.zeros((2, 3)), 1, sequence=none, rollout_ids=none[0]
  )
  assert all(math.isnan(value) for value in got.values())


def test_throughput_is_per_device_held():
  counts = metrics.Counts(
    generated=60, consumed=45, sampled_tokens=5400, trained_tokens=3600
  )
  # 4 devices for half an hour are 2 device-hours.
  assert metrics.throughput(counts, 4, 1800.0) == {
    "throughput/generated_per_device_hour": 30.0,
    "throughput/consumed_per_device_hour": 22.5,
    "throughput/yield": 0.75,
    "throughput/sampled_tokens_per_s": 3.0,
    "throughput/trained_tokens_per_s": 2.0,
  }


def test_throughput_of_no_time_is_nan():
  counts = metrics.Counts(
    generated=0, consumed=0, sampled_tokens=0, trained_tokens=0
  )
  got = metrics.throughput(counts, 4, 0.0)
  assert all(math.isnan(value) for value in got.values())


def test_percentiles_are_lengths_that_so_many_percent_do_not_exceed():
  lengths = (3, 5, 8, 8)
  got = metrics.batch_metrics([group(*map(rollout, lengths))])
  for percent, length in ((10, 3), (25, 3), (50, 5), (75, 8), (99, 8)):
    assert got[f"completion/p{percent}_tokens"] == length
  assert math.isnan(metrics.batch_metrics([])["completion/p50_tokens"])
