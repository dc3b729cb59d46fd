"""Rollouts become rows: what trains, what is padding, what does not fit."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.data import pack

ROWS, LENGTH = 5, 8


def rollout(uid: int, prompt: tuple, completion: tuple, reward: float = 1.0):
  size = len(completion)
  return types.Rollout(
    prompt=types.Prompt(uid=uid // 2, tokens=prompt, text="", reference=None),
    completion=types.Completion(
      uid=uid,
      tokens=completion,
      logprobs=tuple(-0.5 - i for i in range(size)),
      versions=tuple(7 + i for i in range(size)),
      finish="stop",
    ),
    temperature=0.5,
    text="",
    reward=reward,
  )


def group(*rollouts: types.Rollout) -> types.Group:
  return types.Group(prompt=rollouts[0].prompt, rollouts=rollouts)


def packed(*groups: types.Group) -> types.Batch:
  return pack.pack(groups, rows=ROWS, length=LENGTH)


def test_c36_the_stop_token_trains_also_when_it_is_the_padding():
  # 2 ends a completion, and padding would be 2 as well.
  batch = packed(group(rollout(0, (5, 6), (7, 8, 2))))
  assert batch.loss_mask[0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
  assert np.count_nonzero(batch.sampler_logprobs[0]) == 3
  # And a prompt that has the end token, or a completion of nothing else.
  batch = packed(group(rollout(0, (2, 0), (2,)), rollout(1, (2, 0), (0, 0))))
  assert batch.sequence[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 5]
  assert batch.loss_mask[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 0]


def test_entry_t_speaks_of_token_t():
  batch = packed(group(rollout(0, (5, 6), (7, 8, 2))))
  assert batch.tokens[0].tolist() == [5, 6, 7, 8, 2, 0, 0, 0]
  assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
  assert batch.segment_ids[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
  assert batch.policy_versions[0].tolist() == [-1, -1, 7, 8, 9, -1, -1, -1]
  assert batch.sampler_logprobs[0].tolist() == [0, 0, -0.5, -1.5, -2.5, 0, 0, 0]
  assert batch.temperature[0] == 0.5


def sampled_at(*versions: int) -> types.Group:
  made = rollout(0, (5, 6), (7,) * len(versions))
  completion = dataclasses.replace(made.completion, versions=versions)
  return group(dataclasses.replace(made, completion=completion))


@pytest.mark.parametrize(
  ("versions", "mask"),
  [
    ((3, 3, 3, 3), [1, 1, 1, 1]),
    ((3, 3, 4, 4), [0, 0, 1, 1]),
    ((2, 3, 3, 5), [0, 0, 0, 1]),
    ((0, 1), [0, 1]),
    ((0,), [1]),
  ],
)
def test_stale_tokens_are_masked_on_demand_and_stay_as_context(versions, mask):
  groups, pads = [sampled_at(*versions)], [0] * (6 - len(mask))
  plain = pack.pack(groups, rows=ROWS, length=LENGTH)
  batch = pack.pack(groups, rows=ROWS, length=LENGTH, mask_stale_tokens=True)
  assert plain.loss_mask[0].tolist() == [0, 0, *[1] * len(mask), *pads]
  assert batch.loss_mask[0].tolist() == [0, 0, *mask, *pads]
  for name, value in vars(batch).items():
    if name != "loss_mask":
      np.testing.assert_array_equal(value, vars(plain)[name])


def test_what_is_stale_is_a_matter_of_its_own_rollout():
  groups = [sampled_at(1, 1), sampled_at(1, 2), sampled_at(9)]
  batch = pack.pack(groups, rows=ROWS, length=LENGTH, mask_stale_tokens=True)
  masks = [batch.loss_mask[batch.sequence == i].tolist() for i in range(3)]
  assert masks == [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 1]]


def test_sequences_are_numbered_as_groups_and_rollouts_come():
  batch = packed(
    group(rollout(4, (1,), (3,), 0.1), rollout(5, (1,), (4,), 0.2)),
    group(rollout(2, (2,), (5,), 0.3), rollout(3, (2,), (6,), float("nan"))),
  )
  for number, answer in enumerate((3, 4, 5, 6)):
    assert batch.tokens[batch.sequence == number][-1] == answer
  np.testing.assert_array_equal(
    batch.rewards, np.array([0.1, 0.2, 0.3, np.nan, np.nan], np.float32)
  )
  assert batch.group_ids[:4].tolist() == [0, 0, 1, 1]


def test_what_is_beyond_the_rollouts_is_empty():
  batch = packed(group(rollout(0, (5,), (7,)), rollout(1, (5,), (8,))))
  assert batch.segment_ids[0].tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
  assert not batch.segment_ids[1:].any() and not batch.loss_mask[1:].any()
  assert (batch.sequence[1:] == ROWS).all()
  assert np.isnan(batch.rewards[2:]).all()
  assert 0 not in batch.group_ids[2:]
  assert batch.rollout_ids.tolist() == [0, 1, 2, 3, 4]


def many(seed: int, count: int, longest: int) -> list[types.Group]:
  """Makes groups of two rollouts of all lengths up to a longest."""
  draw = np.random.default_rng(seed)
  made = []
  for uid in range(count):
    prompt, answer = 1 + uid // 2 % 3, int(draw.integers(1, longest - 3))
    made.append(rollout(uid, (5,) * prompt, tuple(range(1, answer + 1))))
  return [group(*made[i : i + 2]) for i in range(0, count, 2)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parts", [(1, 1), (4, 1), (2, 3), (1, 6)])
def test_each_rollout_lies_whole_in_one_row_and_rows_fill_parts(seed, parts):
  microbatches, minibatches = parts
  groups = many(seed, 24, 32)
  batch = pack.pack(
    groups,
    rows=24,
    length=32,
    microbatches=microbatches,
    minibatches=minibatches,
  )
  rollouts = [r for g in groups for r in g.rollouts]
  for number, made in enumerate(rollouts):
    rows, places = np.nonzero(batch.sequence == number)
    want = (*made.prompt.tokens, *made.completion.tokens)
    assert len({*rows.tolist()}) == 1
    assert batch.tokens[rows, places].tolist() == list(want)
    assert batch.positions[rows, places].tolist() == list(range(len(want)))
    assert places.tolist() == list(range(places[0], places[0] + len(want)))
    assert len({*batch.segment_ids[rows, places].tolist()}) == 1
    assert batch.sampler_logprobs[rows, places][-1] == pytest.approx(
      made.completion.logprobs[-1]
    )
  # No two segments of a row share a number, and their order is that of places.
  for row in range(24):
    ids = batch.segment_ids[row][batch.segment_ids[row] > 0]
    assert (np.diff(ids) >= 0).all() and len({*ids.tolist()}) == len(
      {*batch.sequence[row][batch.sequence[row] < 24].tolist()}
    )
  used = batch.segment_ids.any(axis=1)
  for minibatch in range(minibatches):
    mine = used[minibatch::minibatches]
    there = batch.sequence[minibatch::minibatches]
    assert len({*there[there < 24].tolist()}) == 24 // minibatches
    counts = [int(mine[m::microbatches].sum()) for m in range(microbatches)]
    assert counts == sorted(counts, reverse=True)
    full = len(mine) // microbatches
    assert sum(0 < c < full for c in counts) <= 1
  # Never more than 11/9 of the least, and one.
  tokens = int((batch.sequence < 24).sum())
  assert used.sum() <= 11 / 9 * np.ceil(tokens / 32) + 2 * minibatches


def test_short_rollouts_leave_no_minibatch_empty():
  groups = [group(*(rollout(i, (5,), (7,)) for i in range(8)))]
  batch = pack.pack(groups, rows=8, length=32, minibatches=4)
  used = batch.segment_ids.any(axis=1).reshape(2, 4).sum(axis=0)
  assert used.tolist() == [1, 1, 1, 1]


def test_sequences_of_one_rollout_are_told_by_its_uid():
  batch = packed(group(rollout(3, (5,), (7,)), rollout(3, (5,), (7, 8))))
  assert batch.rollout_ids[:2].tolist() == [0, 0]


def test_the_trained_mask_leaves_out_what_has_no_reward_or_was_cut():
  cut = rollout(2, (5,), (7, 7))
  cut = dataclasses.replace(
    cut, completion=dataclasses.replace(cut.completion, finish="length")
  )
  batch = packed(
    group(rollout(0, (5,), (7,)), rollout(1, (5,), (8,), float("nan"))),
    group(cut),
  )
  assert batch.truncated.tolist() == [False, False, True, False, False]
  count = [
    int(pack.trained(batch, truncated=with_cut).sum())
    for with_cut in (True, False)
  ]
  assert count == [3, 1]


def test_the_shape_is_that_asked_for_whatever_comes():
  for batch in (packed(), packed(group(rollout(0, (5,) * 4, (7,) * 4)))):
    assert batch.tokens.shape == (ROWS, LENGTH)
    assert batch.rewards.shape == (ROWS,)
    kinds = {np.asarray(x).dtype.name for x in vars(batch).values()}
    assert kinds == {"int32", "float32", "bool"}


def test_what_is_too_long_is_refused_and_never_cut():
  with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
    packed(group(rollout(0, (5,) * 4, (7,) * 5)))


def test_too_many_rollouts_are_refused():
  crowd = [rollout(i, (5,), (7,)) for i in range(ROWS + 1)]
  with pytest.raises(ValueError, match="at most 5 rollouts, got 6"):
    packed(group(*crowd))


@pytest.mark.parametrize(
  ("versions", "stale", "mask"),
  [
    ((3, -1, -1, 3), False, [1, 0, 0, 1]),
    ((3, -1, 4, 4), False, [1, 0, 1, 1]),
    ((3, -1, 4, 4), True, [0, 0, 1, 1]),
    ((-1, -1), True, [0, 0]),
  ],
)
def test_c39_what_no_policy_wrote_is_context(versions, stale, mask):
  batch = pack.pack(
    [sampled_at(*versions)], rows=ROWS, length=LENGTH, mask_stale_tokens=stale
  )
  end = 2 + len(mask)
  assert batch.loss_mask[0, 2:end].tolist() == mask
  assert batch.policy_versions[0, 2:end].tolist() == list(versions)
  assert batch.tokens[0, 2:end].tolist() == [7] * len(mask)
