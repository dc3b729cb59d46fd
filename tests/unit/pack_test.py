"""Rollouts become rows: what trains, what is padding, what does not fit."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.data import pack

ROWS, LENGTH = 5, 8
LAYOUT = pack.Layout(rows=ROWS, length=LENGTH)


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
  return pack.pack(groups, LAYOUT)


def test_c36_the_stop_token_trains_also_when_it_is_the_padding():
  # 2 ends a completion, and padding would be 2 as well.
  batch = packed(group(rollout(0, (5, 6), (7, 8, 2))))
  assert batch.loss_mask[0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
  assert np.count_nonzero(batch.sampler_logprobs[0]) == 3
  # And a prompt that has the end token, or a completion of nothing else.
  batch = packed(group(rollout(0, (2, 0), (2,)), rollout(1, (2, 0), (0, 0))))
  assert batch.sequence[0].tolist() == [5, 1, 1, 1, 0, 0, 5, 5]
  assert batch.loss_mask[0].tolist() == [0, 0, 1, 1, 0, 1, 0, 0]


def test_entry_t_speaks_of_token_t():
  batch = packed(group(rollout(0, (5, 6), (7, 8, 2))))
  assert batch.tokens[0].tolist() == [5, 6, 7, 8, 2, 0, 0, 0]
  assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
  assert batch.segment_ids[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
  assert batch.policy_versions[0].tolist() == [-1, -1, 7, 8, 9, -1, -1, -1]
  assert batch.sampler_logprobs[0].tolist() == [0, 0, -0.5, -1.5, -2.5, 0, 0, 0]
  assert batch.temperature[0] == 0.5


def routed(made: types.Rollout) -> types.Rollout:
  """Sends the n-th token of a rollout to experts 2 n and 2 n + 1 of a layer."""
  count = len(made.prompt.tokens) + len(made.completion.tokens) - 1
  routing = np.arange(2 * count, dtype=np.int8).reshape(count, 1, 2)
  routing[len(made.prompt.tokens) - 1 :] += np.int8(10 * made.completion.uid)
  completion = dataclasses.replace(made.completion, routing=routing)
  return dataclasses.replace(made, completion=completion)


ROUTED = dataclasses.replace(
  LAYOUT, length=9, routing=jax.ShapeDtypeStruct((1, 2), np.int8)
)


def test_experts_lie_with_their_tokens_and_those_of_a_shared_prompt_once():
  one, two = rollout(0, (5, 6, 4), (7, 8)), rollout(1, (5, 6, 4), (9, 3))
  batch = pack.pack([group(routed(one), routed(two))], ROUTED)
  assert batch.tokens[0].tolist() == [5, 6, 4, 7, 8, 4, 9, 3, 0]
  assert batch.routing.shape == (5, 9, 1, 2) and batch.routing.dtype == np.int8
  first = batch.routing[0, :, 0, 0].tolist()
  assert first == [0, 2, 4, 6, -1, 14, 16, -1, -1]
  assert batch.routing[0, :, 0, 1].tolist()[:4] == [1, 3, 5, 7]
  assert (batch.routing[1:] == -1).all()
  # Without the prompt's company all of it is the rollout's own.
  apart = dataclasses.replace(ROUTED, alone=True)
  batch = pack.pack([group(routed(one), routed(two))], apart)
  rows = [[0, 2, 4, 6, -1, -1], [0, 2, 14, 16, -1, -1]]
  assert batch.routing[:2, :6, 0, 0].tolist() == rows


def test_a_prompt_that_went_another_way_when_it_was_read_again_is_not_shared():
  one, two = rollout(0, (5, 6, 4), (7, 8)), rollout(1, (5, 6, 4), (9, 3))
  made, other = routed(one), routed(two)
  other.completion.routing[1, 0, 1] = 99
  batch = pack.pack([group(made, other)], ROUTED)
  rows = batch.routing[batch.segment_ids.any(axis=1), :6, 0, 1]
  assert rows.tolist() == [[1, 3, 5, 7, -1, -1], [1, 99, 15, 17, -1, -1]]


def test_rollouts_of_noted_experts_have_room_for_prompts_of_their_own():
  sizes = dict(max_prompt=100, max_tokens=4, flops=float)
  assert pack.layout(16, 8, **sizes).together > 1
  routing = jax.ShapeDtypeStruct((1, 2), np.int8)
  alone = pack.layout(16, 8, **sizes, routing=routing)
  assert (alone.together, alone.rows) == (1, 16)


def test_experts_are_asked_for_by_the_layout_alone():
  made = routed(rollout(0, (5,), (7, 8)))
  assert packed(group(made)).routing is None
  with pytest.raises(ValueError, match=r"experts of all but .*, got None"):
    pack.pack([group(rollout(0, (5,), (7, 8)))], ROUTED)
  short = dataclasses.replace(
    made.completion, routing=made.completion.routing[:-1]
  )
  cut = dataclasses.replace(made, completion=short)
  with pytest.raises(ValueError, match=r"\(2, 1, 2\), got \(1, 1, 2\)"):
    pack.pack([group(cut)], ROUTED)


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
  plain = pack.pack(groups, LAYOUT)
  batch = pack.pack(groups, LAYOUT, mask_stale_tokens=True)
  assert plain.loss_mask[0].tolist() == [0, 0, *[1] * len(mask), *pads]
  assert batch.loss_mask[0].tolist() == [0, 0, *mask, *pads]
  for name, value in vars(batch).items():
    if name != "loss_mask":
      np.testing.assert_array_equal(value, vars(plain)[name])


def test_what_is_stale_is_a_matter_of_its_own_rollout():
  groups = [sampled_at(1, 1), sampled_at(1, 2), sampled_at(9)]
  batch = pack.pack(groups, LAYOUT, mask_stale_tokens=True)
  masks = [batch.loss_mask[batch.sequence == i].tolist() for i in range(3)]
  assert masks == [[0, 1, 1], [0, 0, 1], [0, 0, 1]]


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
@pytest.mark.parametrize("together", [1, 2])
def test_each_rollout_lies_in_one_row_and_rows_fill_parts(
  seed, parts, together
):
  microbatches, minibatches = parts
  groups = many(seed, 24, 32)
  layout = pack.Layout(
    rows=24 // together,
    length=32 + (together - 1) * 29,
    together=together,
    microbatches=microbatches,
    minibatches=minibatches,
    unit=together,
  )
  batch = pack.pack(groups, layout)
  rollouts = [r for g in groups for r in g.rollouts]
  for number, made in enumerate(rollouts):
    rows, places = np.nonzero(batch.sequence == number)
    row = rows[0]
    assert len({*rows.tolist()}) == 1
    assert places.tolist() == list(range(places[0], places[-1] + 1))
    segments = {*batch.segment_ids[row, places].tolist()}
    prefixes = {*batch.prefix_ids[row, places].tolist()}
    assert len(segments) == len(prefixes) == 1
    # With the prefix it is prompt and completion, in order.
    whole = np.isin(batch.segment_ids[row], [*segments, *prefixes])
    want = [*made.prompt.tokens, *made.completion.tokens]
    assert batch.tokens[row, whole].tolist() == want
    assert batch.positions[row, whole].tolist() == list(range(len(want)))
    trained = batch.loss_mask[row] * (batch.sequence[row] == number) > 0
    assert trained.sum() == len(made.completion.tokens)
    assert batch.sampler_logprobs[row, trained].tolist() == pytest.approx(
      list(made.completion.logprobs)
    )
    # What predicts a token lies before it.
    before = np.flatnonzero(trained)[0] - 1
    assert batch.tokens[row, before] == made.prompt.tokens[-1]
  # No two segments of a row share a number, and their order is that of places.
  for ids in batch.segment_ids:
    ids = ids[ids > 0]
    assert set(np.diff(ids).tolist()) <= {0, 1} and (ids[:1] == 1).all()
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
  least = np.ceil((batch.segment_ids > 0).sum() / layout.length)
  assert used.sum() <= 11 / 9 * least + 2 * minibatches


def test_rollouts_of_a_row_have_their_prompt_once():
  made = [(8,), (9, 3), (4,)]
  asked = [rollout(i, (5, 6, 7), tokens) for i, tokens in enumerate(made)]
  layout = pack.Layout(rows=2, length=11, together=2, unit=2)
  batch = pack.pack([group(*asked), group(rollout(3, (5, 6), (1,)))], layout)
  assert layout.sequences == len(batch.rewards) == 4
  # Two of the group are a block, to which the third is added where it fits.
  assert batch.tokens[0].tolist() == [5, 6, 7, 8, 7, 9, 3, 7, 4, 0, 0]
  assert batch.positions[0].tolist() == [0, 1, 2, 3, 2, 3, 4, 2, 3, 0, 0]
  assert batch.segment_ids[0].tolist() == [1, 1, 2, 2, 3, 3, 3, 4, 4, 0, 0]
  assert batch.prefix_ids[0].tolist() == [1] * 9 + [0] * 2
  assert batch.sequence[0].tolist() == [4, 4, 0, 0, 1, 1, 1, 2, 2, 4, 4]
  assert batch.loss_mask[0].tolist() == [0, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0]
  # Another prompt, even one that begins like it, shares nothing.
  assert batch.tokens[1, :3].tolist() == [5, 6, 1]
  assert batch.prefix_ids[1, :3].tolist() == [1, 1, 1]


def test_rollouts_share_a_prompt_across_groups_and_a_single_token_never():
  again = [group(rollout(i, (5, 6), (7 + i,))) for i in range(2)]
  batch = packed(*again)
  assert batch.tokens[0, :5].tolist() == [5, 6, 7, 6, 8]
  single = [group(rollout(i, (5,), (7 + i,))) for i in range(2)]
  batch = packed(*single)
  assert batch.tokens[0, :4].tolist() == [5, 7, 5, 8]
  assert batch.prefix_ids[0].tolist() == batch.segment_ids[0].tolist()


def flops(keys: int) -> float:
  """Counts a layer of width 512, as of `transformer.layer_flops`."""
  return 7.6e6 + 2048 * keys


def test_the_layout_makes_the_fewest_operations():
  asked = {"max_prompt": 64, "max_tokens": 64, "flops": flops}
  made = pack.layout(64, 8, **asked)
  costs = {
    n: (63 + 65 * n) / n * flops(2 * (63 + 65 * n)) for n in (1, 2, 4, 8)
  }
  assert made.together == min(costs, key=costs.__getitem__) > 1
  assert (made.rows, made.length) == (64 // made.together, 63 + 65 * 4)
  assert made.sequences == 64
  # Long completions behind a short prompt are better off alone.
  alone = pack.layout(64, 8, **{**asked, "max_prompt": 8, "max_tokens": 900})
  assert (alone.together, alone.rows, alone.length) == (1, 64, 908)


@pytest.mark.parametrize("together", range(1, 9))
def test_rows_divide_over_all_parts(together):
  made = pack.layout(
    48,
    8,
    max_prompt=1000,
    max_tokens=20,
    flops=flops,
    microbatches=2,
    minibatches=3,
    row_parts=together,
    length_parts=16,
  )
  assert made.rows * made.together == 48
  assert made.length % 16 == 0 and made.length <= 2048
  assert made.length - 16 < 999 + 21 * made.together <= made.length
  if 48 % (6 * together) == 0:
    assert made.rows % (6 * together) == 0
  else:
    assert made.together == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_layout_has_room_for_all_that_it_was_made_for(seed):
  draw = np.random.default_rng(seed)
  size = int(draw.choice([2, 4, 6, 8]))
  longest = int(draw.integers(1, 30)), int(draw.integers(1, 30))
  layout = pack.layout(
    4 * size,
    size,
    max_prompt=longest[0],
    max_tokens=longest[1],
    flops=lambda keys: 1.0,
    minibatches=int(draw.choice([1, 2])),
  )
  groups = []
  for number in range(4):
    prompt = (number,) * int(draw.integers(1, longest[0] + 1))
    counts = draw.integers(1, longest[1] + 1, size)
    if seed % 2:
      prompt, counts = (number,) * longest[0], [longest[1]] * size
    groups.append(
      group(*(rollout(number, prompt, (9,) * int(n)) for n in counts))
    )
  batch = pack.pack(groups, layout)
  made = sum(len(r.completion.tokens) for g in groups for r in g.rollouts)
  assert batch.loss_mask.sum() == made
  assert layout.together > 1


def test_who_shares_a_minibatch_depends_on_no_device():
  groups = [
    group(
      *(
        rollout(8 * n + i, (n, n), (9,) * (1 + (5 * n + 3 * i) % 7))
        for i in range(8)
      )
    )
    for n in range(4)
  ]
  found = set()
  for row_parts, microbatches in ((1, 1), (8, 1), (1, 8), (2, 2)):
    layout = pack.layout(
      32,
      8,
      max_prompt=2,
      max_tokens=7,
      flops=lambda keys: 1.0,
      minibatches=2,
      microbatches=microbatches,
      row_parts=row_parts,
    )
    batch = pack.pack(groups, layout)
    found.add((layout.together, *_shared(batch, 2)))
  assert len({together for together, *_ in found}) > 1
  assert len({tuple(parts) for _, *parts in found}) == 1


def _shared(batch, minibatches):
  """Returns the sequences of each minibatch."""
  n = len(batch.rewards)
  return [
    frozenset(batch.sequence[k::minibatches].ravel().tolist()) - {n}
    for k in range(minibatches)
  ]


def test_short_rollouts_leave_no_minibatch_empty():
  groups = [group(*(rollout(i, (5,), (7,)) for i in range(8)))]
  batch = pack.pack(groups, pack.Layout(rows=8, length=32, minibatches=4))
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
    given = [x for x in vars(batch).values() if x is not None]
    kinds = {x.dtype.name for x in given}
    assert kinds == {"int32", "float32", "bool"}


def test_what_is_too_long_is_refused_and_never_cut():
  with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
    packed(group(rollout(0, (5,) * 4, (7,) * 5)))


@pytest.mark.parametrize("name", ["logprobs", "versions"])
def test_c26_a_token_whose_sampler_is_not_known_is_refused(name):
  made = rollout(3, (5,), (7, 8, 9))
  for values in ((), (0,), (0,) * 4):
    completion = dataclasses.replace(made.completion, **{name: values})
    odd = dataclasses.replace(made, completion=completion)
    with pytest.raises(ValueError, match=f"rollout 3: expected {name} of each"):
      packed(group(odd))


def test_too_many_rollouts_are_refused():
  crowd = [rollout(i, (5,), (7,)) for i in range(ROWS + 1)]
  with pytest.raises(ValueError, match="at most 5 sequences, got 6"):
    packed(group(*crowd))
  odd = [group(rollout(i, (i,) * 4, (7,) * 4)) for i in range(3)]
  layout = pack.Layout(rows=2, length=LENGTH, together=2, unit=2)
  with pytest.raises(ValueError, match="expected a unit of a multiple of 2"):
    pack.Layout(rows=2, length=LENGTH, together=2, unit=3)
  with pytest.raises(ValueError, match="at most 2 rows, .* got 3 of one"):
    pack.pack(odd, layout)


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
  batch = pack.pack([sampled_at(*versions)], LAYOUT, mask_stale_tokens=stale)
  end = 2 + len(mask)
  assert batch.loss_mask[0, 2:end].tolist() == mask
  assert batch.policy_versions[0, 2:end].tolist() == list(versions)
  assert batch.tokens[0, 2:end].tolist() == [7] * len(mask)


def test_rollouts_that_are_alone_have_a_row_each():
  """Also those of one prompt, and whatever room there is."""
  rollouts = [rollout(uid, (5, 6), (7, 2)) for uid in range(4)]
  shape = dict(max_prompt=2, max_tokens=9, flops=float)
  layout = pack.layout(4, 4, **shape, alone=True)
  assert (layout.rows, layout.together, layout.length) == (4, 1, 11)
  batch = pack.pack([group(*rollouts)], layout)
  assert (batch.segment_ids.max(axis=1) == 1).all()
  assert sorted(batch.sequence[:, 0].tolist()) == [0, 1, 2, 3]
  assert (batch.positions[:, :4] == [0, 1, 2, 3]).all()
  together = pack.pack([group(*rollouts)], pack.layout(4, 4, **shape))
  assert together.segment_ids.max() > 1
  with pytest.raises(ValueError, match="a row for each rollout, got one for 2"):
    pack.Layout(rows=2, length=8, together=2, unit=2, alone=True)
