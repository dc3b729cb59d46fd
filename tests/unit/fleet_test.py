"""Many servers are one engine: groups out, completions back, none lost."""

import dataclasses
import threading

import pytest

from jaxrl_post import types
from jaxrl_post.sampling import fleet as fleets
from jaxrl_post.sampling import server as servers

_STALL_S = 60.0


class Note:
  """A member that notes what it is sent."""

  def __init__(self, name: str) -> None:
    self.name = name
    self.orders: list[servers.Order] = []
    self.policies: list[int] = []

  def submit(self, order: servers.Order) -> None:
    self.orders.append(order)

  def publish(self, policy: types.Policy) -> None:
    self.policies.append(policy.step)


def request(*uids: int) -> types.Request:
  return types.Request(
    prompt=(1,), uids=uids, sampling=types.SamplingParams(max_tokens=2)
  )


def policy(step: int = 0) -> types.Policy:
  return types.Policy(params=None, version=step, step=step)


def made(*uids: int, evaluation: bool = False, text: int = 1) -> servers.Report:
  return servers.Report(
    completions=tuple(
      types.Completion(
        uid=uid, tokens=(text,), logprobs=(0.0,), versions=(0,), finish="stop"
      )
      for uid in uids
    ),
    evaluation=evaluation,
  )


def fleet(
  *names: str, stall_s: float = _STALL_S
) -> tuple[fleets.Fleet, list[Note]]:
  """Makes a fleet of six rows a member, with first weights."""
  members = [Note(name) for name in names]
  made_of = fleets.Fleet(members, rows=6, stall_s=stall_s)
  made_of.publish(policy())
  return made_of, members


def uids(member: Note) -> list[tuple[int, ...]]:
  return [order.request.uids for order in member.orders]


def step(fleet: fleets.Fleet) -> list[int]:
  return [completion.uid for completion in fleet.step(None, 0)]


def test_room_is_what_no_completion_has_or_waits_for():
  it, _ = fleet("a", "b")
  assert (it.room, it.busy) == (12, False)
  it.add(request(0, 1))
  assert (it.room, it.busy) == (10, True)
  assert step(it) == []  # sent
  assert (it.room, it.busy) == (10, True)
  it.report(0, made(0))
  assert (it.room, it.busy) == (10, True)  # back, and not taken yet
  assert step(it) == [0]
  assert (it.room, it.busy) == (11, True)
  it.report(0, made(1))
  assert step(it) == [1]
  assert (it.room, it.busy) == (12, False)


def test_a_group_goes_whole_to_who_owes_the_least():
  it, (a, b) = fleet("a", "b")
  for group in ((0, 1), (2, 3, 4), (5, 6), (7,)):
    it.add(request(*group))
  step(it)
  assert uids(a) == [(0, 1), (5, 6)]
  assert uids(b) == [(2, 3, 4), (7,)]
  it.report(1, made(2, 3, 4))
  it.add(request(8))
  assert step(it) == [2, 3, 4]
  assert uids(b)[-1] == (8,)


def test_completions_come_by_uid_and_once():
  it, _ = fleet("a", "b")
  it.add(request(0, 1))
  it.add(request(2, 3))
  step(it)
  it.report(1, made(3))
  it.report(0, made(1, 0))
  assert step(it) == [0, 1, 3]
  assert step(it) == []


def test_what_is_not_owed_is_left_out():
  it, _ = fleet("a", "b")
  it.add(request(0))
  step(it)
  it.report(1, made(0, text=9))  # of somebody else
  it.report(0, made(5))  # never asked for
  it.report(0, made(0, evaluation=True))  # of a test that nobody runs
  assert step(it) == []
  assert it.busy
  it.report(0, made(0))
  it.report(0, made(0, text=9))  # twice
  (completion,) = it.step(None, 0)
  assert completion.tokens == (1,)
  assert not it.busy


def test_orders_ask_for_the_weights_of_the_newest_policy():
  it, (a,) = fleet("a")
  it.add(request(0))
  step(it)
  newest = policy(4)
  it.publish(newest)
  it.publish(newest)
  it.add(request(1))
  step(it)
  assert [order.step for order in a.orders] == [0, 4]
  assert not any(order.evaluation for order in a.orders)
  assert a.policies == [0, 4]


def test_a_step_without_news_is_short_and_one_with_news_does_not_wait():
  it, _ = fleet("a")
  it.add(request(0))
  assert step(it) == []
  threading.Timer(0.05, it.report, (0, made(0))).start()
  seen = []
  while not seen:
    seen += step(it)
  assert seen == [0]


# ----------------------------------------------------------------- evaluations


def answered(
  it: fleets.Fleet, *requests: types.Request, reports: list
) -> list[int]:
  """Evaluates while other threads report."""
  for index, report in reports:
    threading.Timer(0.05, it.report, (index, report)).start()
  return [c.uid for c in it.generate(policy(7), requests)]


def test_an_evaluation_has_its_completions_in_the_order_of_its_requests():
  it, (a, b) = fleet("a", "b")
  got = answered(
    it,
    request(1),
    request(0),
    request(2),
    reports=[(0, made(2, 1, evaluation=True)), (1, made(0, evaluation=True))],
  )
  assert got == [1, 0, 2]
  assert (uids(a), uids(b)) == ([(1,), (2,)], [(0,)])
  assert all(order.evaluation for order in a.orders + b.orders)
  assert {order.step for order in a.orders} == {7}
  assert a.policies == b.policies == [0, 7]


def test_evaluation_and_training_number_their_completions_apart():
  it, (a,) = fleet("a")
  it.add(request(0, 1))
  step(it)
  got = answered(
    it,
    request(0),
    reports=[(0, made(0, text=5)), (0, made(0, evaluation=True, text=6))],
  )
  assert got == [0]
  assert it.room == 4  # an evaluation takes none of it
  (completion,) = it.step(None, 0)
  assert completion.tokens == (5,)
  assert [order.evaluation for order in a.orders] == [False, True]


# -------------------------------------------------------------------- failures


def test_a_failure_is_raised_with_the_name_of_its_member():
  it, _ = fleet("process 0", "process 1")
  it.add(request(0))
  step(it)
  it.report(1, servers.Report(failure="ValueError: bang"))
  with pytest.raises(
    types.RunError, match="generation: process 1: ValueError: bang"
  ):
    step(it)


def test_a_failure_ends_an_evaluation_too():
  it, _ = fleet("process 0")
  with pytest.raises(types.RunError, match="generation: process 0: no"):
    answered(it, request(0), reports=[(0, servers.Report(failure="no"))])


def test_a_stall_is_raised_with_the_names_of_those_who_owe():
  it, _ = fleet("a", "b", stall_s=0.2)
  step(it)
  threading.Event().wait(0.3)
  # Nothing was asked for until now: the wait has just begun.
  it.add(request(0))
  assert step(it) == []
  threading.Event().wait(0.3)
  with pytest.raises(
    types.RunError, match=r"within 0\.2 s \(stream\.stall_s\), got none from a$"
  ):
    step(it)


def test_a_report_of_anybody_ends_the_wait():
  it, _ = fleet("a", "b", stall_s=0.5)
  it.add(request(0))
  it.add(request(1))
  step(it)
  for _ in range(4):
    threading.Event().wait(0.2)
    it.report(0, servers.Report())
    assert step(it) == []


def test_what_a_dead_member_owed_is_asked_again():
  it, (a, b) = fleet("a", "b")
  for group in ((0, 1), (2, 3), (4, 5)):
    it.add(request(*group))
  step(it)
  it.publish(policy(3))
  it.report(0, made(1))
  # It starts knowing nothing: what it is sent comes after.
  it.resend(0, a.orders.clear)
  assert it.restarts == 1
  # Only what is missing, of the step that it was asked for.
  assert uids(a) == [(0,), (4, 5)]
  assert [order.step for order in a.orders] == [0, 0]
  assert (a.policies, b.policies) == ([0, 3, 3], [0, 3])
  assert uids(b) == [(2, 3)]
  it.report(0, made(0, 4, 5))
  it.report(1, made(2, 3))
  assert step(it) == [0, 1, 2, 3, 4, 5]
  assert not it.busy


def test_what_is_missing_goes_on_from_where_it_was_continued():
  it, (a,) = fleet("a")
  begun = tuple(
    types.Partial(uid=uid, tokens=(5,), logprobs=(-1.0,), versions=(0,))
    for uid in (0, 1)
  )
  it.add(dataclasses.replace(request(0, 1, 2), begun=begun))
  step(it)
  it.report(0, made(1))
  it.resend(0, a.orders.clear)
  assert [order.request.uids for order in a.orders] == [(0, 2)]
  assert [order.request.begun for order in a.orders] == [begun[:1]]


def test_a_member_may_die_twice_and_owe_a_test():
  it, (a,) = fleet("a")
  it.add(request(0, 1))
  step(it)

  def die() -> None:
    for _ in range(2):
      it.resend(0, a.orders.clear)
    it.report(0, made(0, evaluation=True))

  threading.Timer(0.05, die).start()
  assert [c.uid for c in it.generate(policy(), [request(0)])] == [0]
  assert uids(a) == [(0, 1), (0,)]
  assert [order.evaluation for order in a.orders] == [False, True]
  it.report(0, made(0, 1))
  assert step(it) == [0, 1]


def test_a_server_that_cannot_be_replaced_ends_whoever_asked():
  it, (a,) = fleet("a")

  def fails() -> None:
    raise types.RunError("no more restarts")

  with pytest.raises(types.RunError, match="no more restarts"):
    it.resend(0, fails)
  assert (a.policies, it.restarts) == ([0], 0)
