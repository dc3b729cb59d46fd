"""Rollouts of several rows: each counts once, in batches and in the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.algos import baselines, losses, reducers, sequences
from jaxrl_post.algos import objective as objectives
from jaxrl_post.data import pack, segments
from tests.reference import objectives as reference
from tests.unit import renewal_test as anew

# ------------------------------------------------------- a rollout counts once


def _inputs(batch, turn_rewards=True, **rest) -> types.AdvantageInputs:
  turns = jnp.asarray(batch.turn_rewards)
  names = ("rewards", "group_ids", "rollout_ids", "sequence", "segment_ids")
  return types.AdvantageInputs(
    **{name: jnp.asarray(getattr(batch, name)) for name in names},
    loss_mask=jnp.asarray(batch.loss_mask),
    turn_rewards=turns if turn_rewards else 0 * turns,
    penalty=0 * turns,
    old_logprobs=jnp.asarray(rest.pop("old", batch.sampler_logprobs)),
    **rest,
  )


def _shares(algo, batch) -> jax.Array:
  tables = batch.loss_mask, batch.sequence, batch.rollout_ids
  return jax.jit(algo.shares)(*map(jnp.asarray, tables))


@pytest.mark.parametrize(
  ("baseline", "first", "second"),
  [
    (baselines.Group(), 0.707107, -0.707107),
    (baselines.Group(scale="none"), 0.5, -0.5),
    (baselines.LeaveOneOut(), 1.0, -1.0),
    (baselines.Batch(), 0.707107, -0.707107),
    (baselines.Batch(whiten=False), 1.0, 0.0),
  ],
  ids=repr,
)
def test_c06_a_rollout_of_three_rows_is_one_of_its_group(
  baseline, first, second
):
  env, done = anew.pair()
  layout = pack.layout(
    2, 2, max_prompt=12, max_tokens=13, flops=lambda n: 1.0, most_rows=3
  )
  assert (layout.rows, layout.together, layout.sequences) == (6, 1, 6)
  group = anew.group_of(anew.rollouts_of(env, done, 1.0, 0.0))
  batch = pack.pack([group], layout)
  assert batch.rollout_ids.tolist() == [0, 0, 0, 3, 4, 5]
  found = jax.jit(baseline.advantages)(_inputs(batch, turn_rewards=False))
  mask, whole = batch.loss_mask > 0, np.append(batch.rollout_ids, 9)
  for rollout, value in ((0, first), (3, second)):
    own = mask & (whole[batch.sequence] == rollout)
    np.testing.assert_allclose(np.asarray(found)[own], value, atol=1e-5)
  assert not np.asarray(found)[~mask].any()


def test_what_turns_earn_adds_up_over_the_rows_of_a_rollout():
  env, done = anew.pair()
  layout = pack.Layout(rows=4, length=32)
  group = anew.group_of(anew.rollouts_of(env, done, 0.5, 0.25))
  batch = pack.pack([group], layout)
  inputs = _inputs(batch)
  made = jax.jit(sequences.rollouts)(inputs, inputs.turn_rewards)
  # Each has earned 1 + 2 + 8 in its turns.
  assert made.rewards[0] == 11.5 and made.rewards[3] == 11.25
  assert jnp.isnan(made.rewards[1:3]).all()
  assert [r.earned for r in group.rollouts] == [11.5, 11.25]
  assert pack.trained(batch, equal=False).sum() == batch.loss_mask.sum() == 15
  # Equal in all: no signal, though the rows differ.
  first, second = anew.rollouts_of(env, done, 0.5, 1.5)
  turns = (*second.completion.turns[:-1], types.Turn(end=12, reward=7.0))
  second = dataclasses.replace(
    second, completion=dataclasses.replace(second.completion, turns=turns)
  )
  batch = pack.pack([anew.group_of([first, second])], layout)
  assert not pack.trained(batch, equal=False).any()
  assert not np.any(jax.jit(baselines.Group().advantages)(_inputs(batch)))


def test_a_pair_of_dpo_adds_up_the_rows_of_each_rollout():
  env, done = anew.pair()
  group = anew.group_of(anew.rollouts_of(env, done, 0.25, 1.0))
  batch = pack.pack([group], pack.Layout(rows=4, length=32))
  rng = np.random.default_rng(3)
  old, known = (
    -rng.uniform(0.2, 2.0, batch.tokens.shape).astype(np.float32)
    for _ in range(2)
  )
  inputs = _inputs(batch, old=old, reference_logprobs=jnp.asarray(known))
  found = jax.jit(baselines.Preference(0.3).advantages)(inputs)
  rollout = batch.rollout_ids[np.minimum(batch.sequence, 3)]
  mask = batch.loss_mask > 0
  moved = [float((old - known)[mask & (rollout == of)].sum()) for of in (0, 3)]
  pull = 2 * 0.3 / (1 + np.exp(0.3 * (moved[1] - moved[0])))
  for of, side in ((0, -1), (3, 1)):
    np.testing.assert_allclose(
      np.asarray(found)[mask & (rollout == of)], side * pull, rtol=1e-5
    )


@pytest.mark.parametrize(
  ("reducer", "right"),
  [
    (reducers.TokenMean(), 1.333333),
    (reducers.SequenceMean(), 1.375),
    (reducers.SequenceSum(), 4.0),
    (reducers.Constant(8), 0.5),
  ],
  ids=repr,
)
def test_c09_rows_of_a_rollout_share_its_denominator(reducer, right):
  count, share = jax.jit(reducers.count), jax.jit(reducer.shares)
  # The second rollout of C09, 0.5 0.5 1.5 2.5: in two rows, and in one.
  apart = [[1, 2, 0, 0], [0.5, 0.5, 0, 0], [1.5, 2.5, 0, 0]]
  whole = [[1, 2, 0, 0], [0.5, 0.5, 1.5, 2.5], [0, 0, 0, 0]]
  for losses_of, rollouts in ((apart, [0, 1, 1]), (whole, [0, 1, 2])):
    token = jnp.array(losses_of)
    mask = (token > 0).astype(jnp.float32)
    sequence = jnp.where(token > 0, jnp.arange(3)[:, None], 3)
    counts = count(mask, sequence, jnp.array(rollouts))
    loss = jnp.sum(token * share(counts))
    assert float(loss) == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_loss_of_three_rows_is_that_of_the_reference(ratio):
  env, done = anew.pair()
  group = anew.group_of(anew.rollouts_of(env, done, 1.0, 0.25))
  batch = pack.pack([group], pack.Layout(rows=4, length=32))
  rng = np.random.default_rng(2)
  shape = batch.tokens.shape
  new, old = (
    -rng.uniform(0.2, 2.0, shape).astype(np.float32) for _ in range(2)
  )
  algo = objectives.Objective(
    ratio=ratio, correction=None, reducer=reducers.SequenceMean()
  )
  scored = jax.jit(algo.advantages)(_inputs(batch, old=old))
  shares = _shares(algo, batch)

  def loss(logprobs):
    inputs = types.LossInputs(
      logprobs=logprobs,
      entropy=jnp.zeros(shape),
      old_logprobs=jnp.asarray(old),
      sampler_logprobs=jnp.asarray(batch.sampler_logprobs),
      reference_logprobs=None,
      advantages=scored,
      loss_mask=jnp.asarray(batch.loss_mask),
      shares=shares,
      segment_ids=jnp.asarray(batch.segment_ids),
      lag=jnp.zeros(shape),
      num_tokens=jnp.sum(batch.loss_mask),
    )
    return algo.loss(inputs)[0]

  value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(new))
  places = [(batch.sequence == n) & (batch.loss_mask > 0) for n in range(4)]
  numbers = [
    reference.Sampled(
      new=tuple(map(float, new[at])),
      old=tuple(map(float, old[at])),
      turn_rewards=tuple(map(float, batch.turn_rewards[at])),
      reward=float(batch.rewards[n]),
      group=0,
      rollout=int(batch.rollout_ids[n]),
      **dict.fromkeys(
        ("sampler", "reference", "entropy", "lag", "values"),
        (0.0,) * int(at.sum()),
      ),
    )
    for n, at in enumerate(places)
  ]
  region = losses.Clip()
  settings = reference.Settings(
    advantages=reference.group,
    ratio=ratio,
    region=("clip", {"low": region.low, "high": region.high}),
  )
  right, slopes = reference.loss_and_gradient(
    numbers, settings, shares=reference.shares(numbers, "sequence_mean")
  )
  assert float(value) == pytest.approx(right, abs=1e-5)
  for at, row in zip(places, slopes, strict=True):
    np.testing.assert_allclose(np.asarray(gradient)[at], row, atol=1e-5)


# -------------------------------------------------------------------- batches


def _many(seed: int, most: int, groups: int = 4, size: int = 4):
  """Makes groups of rollouts of one to `most` rows, some as long as may be."""
  draw = np.random.default_rng(seed)
  found = []
  for uid in range(groups):
    prompt = types.Prompt(
      uid=uid, tokens=(uid + 1,) * 4, text="", reference=None
    )
    made = []
    for member in range(size):
      count = int(draw.integers(1, most + 1)) if seed else most
      ends = [int(draw.integers(1, 9)) if seed else 8 for _ in range(count)]
      begins = np.cumsum([0, *ends])
      made.append(
        types.Rollout(
          prompt=prompt,
          completion=types.Completion(
            uid=uid * size + member,
            tokens=tuple(range(int(begins[-1]))),
            logprobs=(-1.0,) * int(begins[-1]),
            versions=(0,) * int(begins[-1]),
            finish="stop",
            segments=tuple(
              (int(b), (100 + uid * size + member,) * (4 if not seed else 2))
              for b in begins[1:-1]
            ),
          ),
          temperature=1.0,
          text="",
          reward=float(draw.integers(0, 3)),
        )
      )
    found.append(types.Group(prompt=prompt, rollouts=tuple(made)))
  return found


def _layout(**options):
  return pack.layout(
    16, 4, max_prompt=4, max_tokens=8, flops=lambda n: 1.0 + n, **options
  )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parts", [(1, 1), (2, 2), (4, 1), (16, 1)])
@pytest.mark.parametrize("alone", [False, True])
def test_rows_of_a_rollout_stay_in_one_minibatch_and_always_find_room(
  seed, parts, alone
):
  minibatches, microbatches = parts
  layout = _layout(
    minibatches=minibatches,
    microbatches=microbatches,
    most_rows=3,
    alone=alone,
  )
  groups = _many(seed, 3)  # Of seed 0 all are as long as can be.
  batch = pack.pack(groups, layout)
  made = [r for group in groups for r in group.rollouts]
  number, homes = 0, []
  for rollout in made:
    completion, rows = rollout.completion, segments.split(rollout)
    parts_of = set()
    for row in rows:
      at = batch.sequence == number
      own = batch.tokens[at][-(row.end - row.begin) :]
      assert own.tolist() == [*completion.tokens[row.begin : row.end]]
      assert (batch.loss_mask * at).sum() == row.end - row.begin
      parts_of |= {int(i) % minibatches for i in np.nonzero(at)[0]}
      number += 1
    homes.append(parts_of)
  assert all(len(home) == 1 for home in homes)
  assert batch.loss_mask.sum() == sum(len(r.completion.tokens) for r in made)


def test_one_row_each_gives_what_a_batch_without_renewal_has_bit_for_bit():
  groups = _many(1, 1)
  plain = pack.pack(groups, _layout(alone=True))
  roomy = pack.pack(groups, _layout(alone=True, most_rows=3))
  rows, spare = len(plain.tokens), 2 * len(plain.tokens)
  assert len(roomy.tokens) == rows + spare
  for name in ("tokens", "positions", "loss_mask", "turn_rewards"):
    assert (getattr(roomy, name)[:rows] == getattr(plain, name)).all()
    assert not getattr(roomy, name)[rows:].any()
  algo = objectives.Objective(reducer=reducers.SequenceMean())
  for find in (
    lambda b: jax.jit(algo.advantages)(_inputs(b)),
    lambda b: _shares(algo, b),
  ):
    assert (np.asarray(find(roomy))[:rows] == np.asarray(find(plain))).all()
  # And what it was before rollouts were counted: a table of sequences.
  table = jax.jit(baselines.group_advantages)(
    jnp.asarray(plain.rewards), jnp.asarray(plain.group_ids)
  )
  right = np.append(table, 0.0)[plain.sequence] * plain.loss_mask
  found = jax.jit(algo.advantages)(_inputs(plain))
  assert (np.asarray(found) == right).all() and right.any()


def test_only_the_newest_version_of_the_whole_rollout_trains_where_told():
  env = anew.env_of(anew.Says(), anew.RETELL)
  _, done = anew.talk(env, {0: anew.THINKS})
  batch = pack.pack(
    [anew.group_of(anew.rollouts_of(env, done, 1.0))],
    pack.Layout(rows=3, length=16),
    mask_stale_tokens=True,
  )
  masks = [sum(anew.row_of(batch, number)["loss_mask"]) for number in range(3)]
  assert masks == [0, 0, 3]
  # What earlier rows have earned is at the first token that trains.
  assert anew.row_of(batch, 2)["turn_rewards"][-3:] == [3.0, 0.0, 8.0]
  assert (batch.turn_rewards * batch.loss_mask).sum() == 11
