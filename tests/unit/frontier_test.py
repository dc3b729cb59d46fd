"""The data cursor on examples; tests/property has any order."""

import itertools

import pytest

from jaxrl_post import types
from jaxrl_post.data import frontier as frontiers

NOTHING = frontiers.to_json(frontiers.Frontier())


def finished(*uids: int) -> frontiers.Frontier:
  frontier = frontiers.Frontier()
  for uid in uids:
    frontier = frontiers.finish(frontier, uid)
  return frontier


def test_finishing_ahead_is_remembered_until_the_gap_closes():
  assert finished(2, 1) == frontiers.Frontier(first=0, done=frozenset({1, 2}))
  assert finished(2, 1, 0) == frontiers.Frontier(first=3)
  assert finished(0, 2) == frontiers.Frontier(first=1, done=frozenset({2}))


def test_pending_yields_the_unfinished_in_order():
  first = itertools.islice(frontiers.pending(finished(0, 2, 3)), 4)
  assert list(first) == [1, 4, 5, 6]


@pytest.mark.parametrize("uid", [0, 2])
def test_a_uid_finishes_once(uid):
  with pytest.raises(types.RunError, match=f"got {uid} a second time"):
    frontiers.finish(finished(0, 2), uid)


@pytest.mark.parametrize(
  "data",
  [
    {},
    {**NOTHING, "first": "1"},
    {**NOTHING, "done": ["2"]},
    {"first": 1, "done": []},
    {**NOTHING, "evidence": {"seen": []}},
    {**NOTHING, "evidence": {"seen": [[1, 2]], "new": []}},
    {**NOTHING, "evidence": {"seen": [], "new": [[1, 2, "3"]]}},
  ],
)
def test_what_is_no_frontier_is_refused(data):
  with pytest.raises(types.RunError, match="Resume from another checkpoint"):
    frontiers.from_json(data)


def test_a_frontier_behind_what_it_finished_is_refused():
  with pytest.raises(types.RunError, match="got first 3"):
    frontiers.from_json({**NOTHING, "first": 3, "done": [3]})
