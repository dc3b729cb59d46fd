"""The ledger survives its checkpoint, and a damaged one is told."""

import copy
import dataclasses
import itertools
import json

import pytest

from jaxrl_post import types
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.envs import ledger_json
from tests.property import ledger_schedules_test as schedules


def _book():
  """A ledger with something in most of its fields."""
  book = ledgers.start(1, 2, num_steps=9)
  for event in (
    ledgers.Admit(0),
    ledgers.Block(0, 5, 0),
    ledgers.Retry(0),
    ledgers.Admit(4),
    ledgers.Block(4, 3, 0),
    ledgers.Finish(4),
    ledgers.Score(4),
    ledgers.Consume((4,)),
    ledgers.Publish(1),
    ledgers.Block(0, 2, 1),
    ledgers.Admit(5),
    ledgers.Block(5, 7, 1),
    ledgers.Stop(),
  ):
    book = ledgers.apply(book, event)
  return book


def _text(data):
  return json.loads(json.dumps(data))


def test_what_is_written_is_read():
  book = _book()
  assert ledger_json.from_json(_text(ledger_json.to_json(book))) == book
  assert ledger_json.from_json(ledger_json.to_json(book)) == book


def test_what_is_written_at_any_moment_of_any_run_is_read():
  for seed in range(100):
    schedule = schedules.Schedule(seed)
    schedule.play(seed)
    data = _text(dataclasses.asdict(schedule.book))
    read = ledger_json.from_json(data)
    assert _text(ledger_json.to_json(read)) == data


def _leaves(data, path=()):
  """Yields the path to every value that is no container."""
  pairs = data.items() if isinstance(data, dict) else enumerate(data)
  for key, value in pairs:
    if isinstance(value, dict | list):
      yield from _leaves(value, (*path, key))
    else:
      yield (*path, key)


def _with(data, path, value):
  data = copy.deepcopy(data)
  at = data
  for key in path[:-1]:
    at = at[key]
  if value is ...:
    del at[path[-1]]
  else:
    at[path[-1]] = value
  return data


def test_no_damaged_value_is_read():
  data = _text(ledger_json.to_json(_book()))
  paths = list(_leaves(data))
  assert len(paths) == 33
  for path, value in itertools.product(
    paths, ("x", -1, 1.5, None, True, [], {}, ...)
  ):
    harmless = {"num_steps": None, "ordered": True, "stopped": True}
    if harmless.get(path[-1], ...) is not value or value is ...:
      with pytest.raises(types.RunError, match="^ledger: .*another checkpoint"):
        ledger_json.from_json(_with(data, path, value))


@pytest.mark.parametrize(
  "path_and_value",
  [
    (("version",), 2),
    (("step",), 0),
    (("outstanding", 0, "uid"), 5),
    (("outstanding", 0, "admitted"), 2),
    (("outstanding", 1, "oldest"), 0),
    (("outstanding", 1, "oldest"), 2),
    (("outstanding", 1, "tokens"), 8),
    (("outstanding", 0, "state"), "waiting"),
    (("groups_per_step",), 0),
    (("admitted",), 4),
    (("sampled",), 4),
    (("discarded", "tokens"), 4),
    (("outstanding",), []),
    (("outstanding",), 7),
    (("trained",), [1, 3]),
    (("more",), 1),
  ],
  ids=str,
)
def test_what_no_events_lead_to_is_not_read(path_and_value):
  data = _text(ledger_json.to_json(_book()))
  with pytest.raises(types.RunError, match="^ledger: "):
    ledger_json.from_json(_with(data, *path_and_value))


@pytest.mark.parametrize("data", [None, [], "x", 3, {}])
def test_something_else_is_not_read(data):
  with pytest.raises(types.RunError, match="^ledger: "):
    ledger_json.from_json(data)
