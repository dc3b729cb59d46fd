"""Which prompts rest, for how long, and that nobody skips one in silence."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxrl_post import types
from jaxrl_post.data import dataset, difficulty, sources
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import events, work
from jaxrl_post.envs import ledger as ledgers
from tests.unit import streams

POOL = difficulty.Pool(solved=1.0, results=2, rest=3)


def after(*groups: tuple[int, list[float]]) -> difficulty.Evidence:
  """Evidence of groups of items, each of which counts at once."""
  evidence = difficulty.Evidence()
  for draw, (item, rewards) in enumerate(groups):
    evidence = difficulty.note(POOL, evidence, draw, item, rewards)
    evidence = difficulty.count(evidence)
  return evidence


def passed(evidence: difficulty.Evidence, *items: int) -> int:
  return difficulty.pass_over(POOL, evidence, items)[0]


@pytest.mark.parametrize(
  ("rewards", "verdict"),
  [
    ([1.0, 1.0, 2.5], 1),
    ([0.0, 0.99, -1.0], -1),
    ([1.0, 0.0], 0),
    ([1.0, math.nan], 1),
    ([math.nan, 0.0], -1),
    ([math.nan], None),
    ([], None),
  ],
)
def test_a_group_says_always_never_some_or_nothing(rewards, verdict):
  assert difficulty.verdict(POOL, rewards) == verdict


def test_a_prompt_rests_after_so_many_groups_in_a_row_that_are_alike():
  never, always, some = [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]
  assert passed(after((5, never)), 5) == 0
  assert passed(after((5, never), (5, never)), 5) == 1
  assert passed(after((5, always), (5, always)), 5) == 1
  assert passed(after((5, never), (5, always)), 5) == 0
  assert passed(after((5, never), (5, some), (5, never)), 5) == 0
  assert passed(after((5, never), (4, never)), 5) == 0
  assert passed(after((5, never), (5, [math.nan] * 2), (5, never)), 5) == 1


def test_only_draws_up_to_the_first_that_is_asked_are_passed_over():
  evidence = after((5, [0.0]), (5, [0.0]), (6, [1.0]), (6, [1.0]))
  assert difficulty.sums(POOL, evidence) == (1, 1)
  assert passed(evidence, 5, 6, 5, 7, 5) == 3
  assert passed(evidence, 7, 5) == 0


def test_a_prompt_is_asked_again_after_its_rest():
  evidence = after((5, [0.0]), (5, [0.0]))
  number, evidence = difficulty.pass_over(POOL, evidence, itertools.repeat(5))
  assert number == POOL.rest
  # It stays in until a group of it counts.
  assert passed(evidence, 5) == 0
  again = difficulty.note(POOL, evidence, 9, 5, [0.0])
  assert passed(again, 5) == 0
  assert passed(difficulty.count(again), 5) == 1
  solved = difficulty.note(POOL, evidence, 9, 5, [0.0, 1.0])
  assert passed(difficulty.count(solved), 5) == 0
  assert difficulty.sums(POOL, difficulty.count(solved)) == (0, 0)


@hypothesis.given(st.permutations([(0, -1), (1, -1), (2, 1), (3, 1), (4, 0)]))
def test_the_order_in_which_groups_end_does_not_matter(groups):
  evidence = difficulty.Evidence()
  for draw, found in groups:
    rewards = {-1: [0.0, 0.0], 0: [0.0, 1.0], 1: [1.0, 1.0]}[found]
    evidence = difficulty.note(POOL, evidence, draw, 7 + draw % 2, rewards)
  text = json.dumps(difficulty.to_json(evidence))
  evidence = difficulty.count(difficulty.from_json(json.loads(text)))
  # Item 7: never, always, some. Item 8: never, always.
  assert evidence == difficulty.Evidence(seen={8: (1, 0)})


@pytest.mark.parametrize("name", ["results", "rest"])
def test_a_pool_that_never_or_for_ever_rests_is_refused(name):
  with pytest.raises(
    types.InputError, match=f"data.pool.{name}: expected >= 1"
  ):
    difficulty.Pool(**{name: 0})


def test_a_pool_that_never_hears_of_a_prompt_again_is_refused():
  source = sources.Generated(
    lambda i: types.Example(prompt="a", reference=i), 2
  )
  with pytest.raises(types.InputError, match="data.epochs: expected more"):
    dataset.Data(train=source, epochs=2, pool=POOL)
  assert dataset.Data(train=source, epochs=3, pool=POOL).epochs == 3


# ------------------------------------------------------------------- in a run


def by_item(items):
  """Scores a third of the items with 0, a third with 1, of others one half."""

  def score(rollout: types.Rollout) -> float:
    kind = items.place(rollout.prompt.uid) % 3
    return float(kind) if kind < 2 else rollout.completion.uid % streams.GROUP

  return score


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_asks_what_teaches_and_accounts_for_every_draw(
  asynchronous, tmp_path
):
  setup = streams.Setup(
    size=9,
    pool=difficulty.Pool(results=1, rest=4),
    asynchronous=asynchronous,
    filtered=True,
  )
  made = setup.run(
    tmp_path, num_steps=12, score=by_item(setup.items), due=lambda step: True
  )
  items = setup.items
  assert len(made.batches) == 12
  assert all(items.place(u) % 3 == 2 for u in streams.uids(made.batches))
  cut = cuts.from_files(
    made.cuts[12], prompts=items, rollout=streams.ENV.rollout
  )
  book, frontier = cut.ledger, cut.frontier
  # Each of six rests four draws after each time that it was asked.
  assert book.passed > book.filtered.groups > 0
  left = book.trained.groups + book.filtered.groups + book.passed
  assert left == frontier.first + len(frontier.done)
  assert (cut.counters.always, cut.counters.never) == (3, 3)
  lines = (tmp_path / events.NAME).read_text().splitlines()
  found = [json.loads(line) for line in lines]
  passed = [u for e in found if e["event"] == "Pass" for u in e["uids"]]
  asked = [e["uid"] for e in found if e["event"] == "Admit"]
  assert len(passed) == book.passed
  assert sorted(passed + asked) == list(range(len(passed + asked)))


def begun() -> work.Work:
  return work.Work(
    ledgers.start(2, 0),
    env=streams.ENV,
    prompts=streams.data(6, difficulty.Pool(results=1), epochs=None),
    frontier=frontiers.Frontier(),
    filter_zero_signal=True,
    note=lambda event: None,
  )


def end(
  at: work.Work,
  request: types.Request,
  rewards: Sequence[float],
  turns: Sequence[float] = (0.0, 0.0),
) -> None:
  """Samples and scores a group."""
  rollouts = at.book(
    types.Completion(
      uid=uid,
      tokens=(1,),
      logprobs=(-1.0,),
      versions=(0,),
      finish="length",
      turns=(types.Turn(end=1, reward=turn),),
    )
    for uid, turn in zip(request.uids, turns, strict=True)
  )
  for rollout, reward in zip(rollouts, rewards, strict=True):
    at.score(dataclasses.replace(rollout, reward=reward))
  at.settle(lambda event: True)


@pytest.mark.parametrize(
  ("rewards", "turns", "kept", "found"),
  [
    ((0.0, 0.0), (1.0, 0.0), True, 0),
    ((1.0, 0.0), (0.0, 1.0), False, 1),
    ((0.5, 0.5), (0.0, 0.0), False, -1),
  ],
)
def test_rewards_of_turns_count_in_what_a_group_says(
  rewards, turns, kept, found
):
  at = begun()
  at.publish(streams.FIRST)
  end(at, at.admit(), rewards, turns)
  states = [entry.state for entry in at.ledger.outstanding]
  assert states == ["ready"] * kept
  if kept:
    end(at, at.admit(), [0.0, 1.0])
    at.take((0, 1))
  assert at.frontier.evidence.new[0] == (0, at._prompts.place(0), found)


def test_what_was_noted_counts_with_newer_weights_not_with_a_restart():
  one = begun()
  one.publish(streams.FIRST)
  first = one.admit()
  one.admit()
  end(one, first, [0.0, 0.0])  # It leaves, and another takes its place.
  one.admit()
  cut = one.cut((), 0)
  two = begun()
  requests, _ = two.restore(cut)
  two.publish(streams.FIRST)  # What goes on gets its weights once more.
  assert two.frontier.evidence == cut.frontier.evidence
  assert two.frontier.evidence.new == ((0, two._prompts.place(0), -1),)
  for request in requests:
    end(two, request, [0.0, 1.0])
  two.take((1, 2))
  assert len(two.frontier.evidence.new) == 3
  two.publish(dataclasses.replace(streams.FIRST, version=1, step=1))
  found = difficulty.Evidence(seen={two._prompts.place(0): (-1, 0)})
  assert two.frontier.evidence == found
  assert two.counters.never == 1


def test_a_run_of_prompts_that_all_rest_goes_on_asking(tmp_path):
  setup = streams.Setup(size=2, pool=difficulty.Pool(results=1, rest=1))
  made = setup.run(tmp_path, score=lambda rollout: 0.0)
  assert len(made.batches) == streams.STEPS


def test_data_that_ends_in_draws_passed_over_has_ended(tmp_path):
  setup = streams.Setup(size=4, pool=difficulty.Pool(results=1, rest=9))
  items = streams.data(4, setup.pool, epochs=3)
  with setup.opened(
    tmp_path, items=items, score=lambda rollout: 0.0
  ) as rollouts:
    policy = streams.FIRST
    for _ in range(2):
      policy = setup.updated(policy, rollouts.next())
      rollouts.publish(policy)
    assert rollouts.next() is None
    assert rollouts.ledger.passed == 8


def test_the_ledger_counts_draws_that_were_passed_over_and_no_group():
  book = ledgers.apply(ledgers.start(1, 0), ledgers.Pass((0, 1)))
  book = ledgers.apply(book, ledgers.Admit(2))
  assert (book.passed, book.admitted) == (2, 1)
  assert ledgers.restore(book, ledgers.start(1, 0)).passed == 2
  for uids in ((), (2,), (3, 3)):
    with pytest.raises(types.RunError, match="draws not outstanding"):
      ledgers.apply(book, ledgers.Pass(uids))
