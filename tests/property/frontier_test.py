"""Whatever the order of finishing, no uid is lost and none comes twice."""

import itertools
import json

import hypothesis
from hypothesis import strategies as st

from jaxrl_post.data import frontier as frontiers

SIZE = 12


@hypothesis.given(
  order=st.permutations(range(SIZE)), taken=st.integers(0, SIZE)
)
def test_pending_is_what_has_not_finished_in_any_order(order, taken):
  frontier = frontiers.Frontier()
  for uid in order[:taken]:
    frontier = frontiers.finish(frontier, uid)
  open_uids = sorted(order[taken:])
  pending = itertools.islice(frontiers.pending(frontier), len(open_uids) + 2)
  assert list(pending) == [*open_uids, SIZE, SIZE + 1]
  assert frontier.first == min(open_uids, default=SIZE)
  assert frontier.done == {u for u in order[:taken] if u > frontier.first}


@hypothesis.given(order=st.permutations(range(SIZE)), stops=st.data())
def test_a_resume_anywhere_trains_every_uid_exactly_once(order, stops):
  frontier, trained = frontiers.Frontier(), []
  while len(trained) < SIZE:
    # A restart: all but the frontier is forgotten, in-flight uids included.
    frontier = frontiers.from_json(
      json.loads(json.dumps(frontiers.to_json(frontier)))
    )
    uids = itertools.takewhile(lambda u: u < SIZE, frontiers.pending(frontier))
    flight = sorted(uids, key=order.index)
    for uid in flight[: stops.draw(st.integers(1, len(flight)))]:
      frontier = frontiers.finish(frontier, uid)
      trained.append(uid)
  assert sorted(trained) == list(range(SIZE))
  assert frontier == frontiers.Frontier(first=SIZE)


@hypothesis.given(first=st.integers(0, 9), above=st.sets(st.integers(1, 9)))
def test_a_frontier_survives_json(first, above):
  done = frozenset(first + gap for gap in above)
  frontier = frontiers.Frontier(first=first, done=done)
  text = json.dumps(frontiers.to_json(frontier))
  assert frontiers.from_json(json.loads(text)) == frontier
