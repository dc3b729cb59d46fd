"""Schedules: what may happen, by the facts alone."""

import collections
import dataclasses

import pytest

from jaxrl_post import types
from jaxrl_post.envs import events, schedule
from jaxrl_post.envs import ledger as ledgers

# The engine samples with version 3 while the trainer has published 4.
OPEN = schedule.Facts(
  current=3,
  newest=4,
  window=2,
  room=8,
  busy=True,
  scoring=0,
  held=0,
  complete=True,
)
GATE = dataclasses.replace(OPEN, window=0)
FULL = dataclasses.replace(GATE, room=0)
LEAVES = (ledgers.Filter(1), ledgers.Fail(1))


def but(facts: schedule.Facts, **changes) -> schedule.Facts:
  return dataclasses.replace(facts, **changes)


@pytest.mark.parametrize("facts", [OPEN, GATE, FULL])
def test_free_does_all_at_once(facts):
  free = schedule.Free()
  assert not free.defers
  assert free.takes(facts) and free.admits(facts, 1) and free.runs(facts)
  assert free.settles(facts, ledgers.Filter(1))
  assert free.allows(ledgers.Publish(4))


def test_free_that_drains_waits_for_the_engine_to_end():
  drain = schedule.Free(drain=True)
  assert not drain.takes(OPEN)
  assert not drain.admits(OPEN, 1)
  assert drain.runs(OPEN)
  assert drain.takes(but(OPEN, busy=False))
  assert drain.admits(but(OPEN, current=4), 1)
  # Completions of a run before this one must not keep the first weights out.
  assert drain.takes(but(OPEN, current=None))


@pytest.mark.parametrize("drain", [False, True])
def test_fixed_goes_on_with_its_weights_up_to_the_gate(drain):
  fixed = schedule.Fixed(drain)
  assert fixed.defers
  for facts in (OPEN, FULL):
    assert not fixed.takes(facts)
    assert fixed.runs(facts)
    assert not any(fixed.settles(facts, event) for event in LEAVES)
    # That a group may train opens no window.
    assert fixed.settles(facts, ledgers.Score(1))
  assert fixed.takes(but(OPEN, current=None, complete=False))


def test_fixed_waits_at_the_gate_for_rewards_then_for_weights():
  fixed = schedule.Fixed()
  waiting = but(GATE, scoring=1)
  assert not fixed.takes(waiting) and not fixed.runs(waiting)
  assert not any(fixed.settles(waiting, event) for event in LEAVES)
  settling = but(GATE, held=1)
  assert not fixed.takes(settling) and not fixed.runs(settling)
  assert all(fixed.settles(settling, event) for event in LEAVES)
  assert fixed.takes(GATE) and not fixed.runs(GATE)


def test_fixed_runs_at_the_gate_while_the_next_batch_lacks_groups():
  lacking = but(GATE, complete=False)
  assert schedule.Fixed().runs(lacking)
  assert not schedule.Fixed().takes(lacking)


def test_fixed_that_drains_has_its_gate_where_nothing_is_left_to_do():
  drain = schedule.Fixed(drain=True)
  assert drain.runs(GATE) and not drain.takes(GATE)
  assert drain.takes(but(GATE, busy=False))


def test_again_allows_the_next_event_only():
  took = [
    ledgers.Publish(0),
    events.Take(0),
    ledgers.Admit(0),
    events.Run(),
    ledgers.Filter(0),
  ]
  again = schedule.Again(collections.deque(took))
  facts = but(OPEN, current=None, newest=0)
  for event in took:
    asked = {
      ledgers.Publish(0): again.allows(ledgers.Publish(0)),
      events.Take(0): again.takes(facts),
      ledgers.Admit(0): again.admits(facts, 0),
      events.Run(): again.runs(facts),
      ledgers.Filter(0): again.settles(facts, ledgers.Filter(0)),
    }
    assert [one for one, may in asked.items() if may] == [event]
    assert not again.takes(but(facts, newest=1))
    again.applied(event)
  assert not again.runs(facts)


def test_again_refuses_another_course():
  again = schedule.Again(collections.deque([ledgers.Admit(0)]))
  with pytest.raises(types.RunError, match="event 1 to be Admit.*got Finish"):
    again.applied(ledgers.Finish(0))


@pytest.mark.parametrize(
  ("head", "event", "refused"),
  [
    (ledgers.Consume((0, 1)), ledgers.Consume((0, 2)), True),
    (ledgers.Publish(1), ledgers.Publish(2), True),
    (ledgers.Admit(1), ledgers.Admit(2), True),
    (ledgers.Score(1), ledgers.Filter(1), True),
    (ledgers.Fail(1), ledgers.Score(1), True),
    # Its turn may come.
    (ledgers.Score(1), ledgers.Score(2), False),
    (ledgers.Admit(1), ledgers.Consume((0, 2)), False),
    (events.Run(), ledgers.Publish(2), False),
  ],
)
def test_again_does_not_wait_for_what_cannot_come(head, event, refused):
  again = schedule.Again(collections.deque([head]))
  if refused:
    with pytest.raises(types.RunError, match="expected event 1 to be"):
      again.allows(event)
  else:
    assert not again.allows(event)


def test_the_settings_choose(tmp_path):
  log = events.Log(tmp_path / "events.jsonl")
  log.write(events.Begin("ours"))
  log.write(ledgers.Publish(0))
  log.close()
  cfg = schedule.StreamConfig
  assert schedule.build(cfg(), drain=True) == schedule.Free(drain=True)
  fixed = schedule.build(cfg(deterministic=True), drain=False)
  assert fixed == schedule.Fixed(drain=False)
  follow = schedule.build(cfg(follow=str(log.path)), drain=False, digest="ours")
  assert follow.allows(ledgers.Publish(0))


@pytest.mark.parametrize(
  "wrong", [{"follow": "a"}, {"on_stale": "drop"}, {"stall_s": 0.0}]
)
def test_settings_that_exclude_each_other_are_refused(wrong):
  with pytest.raises(types.InputError, match=r"^stream(\.deterministic)?: "):
    schedule.StreamConfig(deterministic=True, **wrong)
