"""Mixtures: shares of every prefix, passes of every source, refusals."""

import collections
import dataclasses
import fractions
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxrl_post import config, types
from jaxrl_post.data import mixture, prompts, sources
from jaxrl_post.runtime import assign
from tests.house import source as house
from tests.unit import streams

WEIGHTS = [
  (1.0, 1.0),
  (0.7, 0.3),
  (0.1, 0.2, 0.7),
  (1, 1, 1, 1, 1),
  (5, 1, 1, 1, 1, 1, 1),
  (97, 2, 1),
  (0.05, 0.05, 0.45, 0.45),
]


def check_shares(weights, sizes, draws: int) -> None:
  order = mixture.order(sizes, weights, seed=0, epochs=None)
  exact = [fractions.Fraction(str(w)) for w in weights]
  shares = [w / sum(exact) for w in exact]
  counts = [0] * len(sizes)
  for n in range(1, draws + 1):
    counts[order.pattern[(n - 1) % len(order.pattern)]] += 1
    for count, share in zip(counts, shares, strict=True):
      assert abs(count - n * share) < 1, (n, counts)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_prefix_has_the_shares_to_within_one(weights):
  check_shares(weights, [3 + i for i in range(len(weights))], 500)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.lists(st.integers(1, 30), min_size=1, max_size=7))
def test_any_weights_are_kept_to_within_one(weights):
  check_shares(weights, [2] * len(weights), 3 * sum(weights))


def test_c89_each_pass_of_a_source_has_every_item_once_in_a_new_order():
  sizes, weights = (5, 7, 10), (2, 3, 1)
  order = mixture.order(sizes, weights, seed=0, epochs=None)
  passes = collections.defaultdict(list)
  for n in range(200):
    place = order[n]
    source = sum(place >= first for first in order.first[1:])
    assert source == order.pattern[n % len(order.pattern)]
    passes[source].append(place - order.first[source])
  for source, size in enumerate(sizes):
    drawn = passes[source]
    whole = [drawn[i : i + size] for i in range(0, len(drawn) - size, size)]
    assert len(whole) > 2
    assert all(sorted(one) == list(range(size)) for one in whole)
    assert len({tuple(one) for one in whole}) == len(whole)


def test_a_draw_depends_on_its_number_and_the_seed_alone():
  def draws(seed, numbers):
    order = mixture.order((10, 10), (1, 2), seed=seed, epochs=None)
    return [order[n] for n in numbers]

  forward = draws(0, range(40))
  assert draws(0, reversed(range(40))) == forward[::-1]
  assert draws(1, range(40)) != forward
  # Sources of one size are not in one order.
  first, second = ([p % 10 for p in forward if p // 10 == i] for i in (0, 1))
  assert len(first) > 10 and first[:10] != second[:10]


def test_by_size_every_item_comes_once_an_epoch():
  for sizes in ((10, 20), (3, 7, 5), (4,)):
    order = mixture.order(sizes, None, seed=0, epochs=2)
    assert len(order) == 2 * sum(sizes)
    drawn = collections.Counter(order[n] for n in range(len(order)))
    assert drawn == dict.fromkeys(range(sum(sizes)), 2)


@pytest.mark.parametrize("weights", [(1, 1), (9, 1), (0.25, 0.75)])
def test_draws_end_before_a_source_begins_another_pass(weights):
  order = mixture.order((6, 10), weights, seed=0, epochs=3)
  again = mixture.order((6, 10), weights, seed=0, epochs=None)
  drawn = collections.Counter(order[n] for n in range(len(order)))
  assert max(drawn.values()) <= 3
  assert drawn[again[len(order)]] == 3
  assert len(again) == sys.maxsize


def made(head: str, size: int) -> sources.Generated:
  def make(i: int) -> types.Example:
    return types.Example(prompt=f"{head}{i}", reference=i)

  return sources.Generated(make, size)


def load(*parts: sources.Source, weights=None, **options) -> prompts.Prompts:
  mixed = mixture.Mixture(parts, weights)
  defaults = {"max_tokens": 3, "seed": 0, "epochs": 1}
  return prompts.load(mixed, streams.Letters(), **(defaults | options))


def test_c91_a_prompt_of_two_sources_is_two_draws():
  loaded = load(made("a", 3), made("a", 3), weights=(1, 1))
  batch = [loaded[uid] for uid in range(6)]
  assert sorted(prompt.text for prompt in batch) == sorted(
    2 * ["a0", "a1", "a2"]
  )
  assert len({prompt.uid for prompt in batch}) == 6


def test_c93_a_mixture_of_prompts_leaves_none_out():
  loaded = load(made("a", 4), made("bb", 7))
  assert loaded.sizes == (4, 7)
  texts = sorted(loaded[uid].text for uid in range(len(loaded)))
  assert texts == sorted(item.text for item in loaded.items)
  assert len(texts) == 11
  held_out = load(made("a", 4), made("bb", 7), weights=(9, 1), shuffle=False)
  in_order = [f"a{i}" for i in range(4)] + [f"bb{i}" for i in range(7)]
  assert [held_out[uid].text for uid in range(11)] == in_order


def test_what_is_too_long_has_no_place_in_the_order():
  loaded = load(made("a", 12), made("b", 101), epochs=2)
  assert loaded.sizes == (12, 100) and loaded.dropped == 1
  assert {loaded[uid].text[0] for uid in range(len(loaded))} == {"a", "b"}
  with pytest.raises(types.InputError, match="the shortest of 5"):
    load(made("a", 4), made("long", 3))


def test_c101_the_digest_sees_which_source_an_item_is_of():
  one = sources.Generated(made("a", 3).make, 3)
  head = sources.Generated(one.make, 2)
  tail = sources.Generated(one.make, 1, start=2)
  rest = sources.Generated(one.make, 2, start=1)
  first = sources.Generated(one.make, 1)
  digests = {
    prompts.load(
      source, streams.Letters(), max_tokens=3, seed=0, epochs=1
    ).digest
    for source in (
      one,
      mixture.Mixture((head, tail)),
      mixture.Mixture((first, rest)),
    )
  }
  assert len(digests) == 3
  assert load(one).digest in digests  # One source alone is that source.


@pytest.mark.parametrize(
  ("parts", "weights", "told"),
  [
    ((), None, "sources: expected at least one"),
    ((made("a", 2),), (1, 2), "weights: expected one for each of 1"),
    ((made("a", 2),) * 2, (1, 0), "weights: expected numbers above 0"),
    ((made("a", 2),) * 2, (1, float("nan")), "numbers above 0"),
    ((mixture.Mixture((made("a", 2),)),), None, "no mixture in a mixture"),
  ],
)
def test_a_mixture_that_makes_no_sense_is_refused(parts, weights, told):
  with pytest.raises(types.InputError, match=told):
    mixture.Mixture(parts, weights)


def test_weights_that_cannot_be_kept_exactly_are_refused():
  with pytest.raises(types.InputError, match="within 1000000 draws"):
    mixture.order((2, 2), (0.3333333, 0.6666667), seed=0, epochs=None)


def test_weights_are_settings_and_a_source_shows_no_address():
  mixed = mixture.Mixture((made("a", 2), sources.Jsonl("x.jsonl")))
  changed = assign.replace(mixed, {("weights",): "0.5, 2"})
  assert changed.weights == (0.5, 2.0)
  run = config.load("tiny", house.ROOT / "experiments")
  data = dataclasses.replace(run.data, train=mixed)
  run = dataclasses.replace(run, data=data)
  (line,) = [
    line
    for line in config.describe(run).split("\n")
    if line.startswith("data.train.sources = ")
  ]
  assert "Jsonl('x.jsonl', 'prompt', 'answer', None)" in line
  assert " at 0x" not in line
