"""A server samples orders with the newest weights that it was given."""

import queue
import threading

import pytest

from jaxrl_post import types
from jaxrl_post.sampling import server as servers

# A thread of the server ends with what made it fail, after it told so.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
_DEADLINE_S = 60.0


def request(*uids: int) -> types.Request:
  return types.Request(
    prompt=(1,), uids=uids, sampling=types.SamplingParams(max_tokens=2)
  )


def order(*uids: int, step: int = 0, evaluation: bool = False) -> servers.Order:
  return servers.Order(request=request(*uids), step=step, evaluation=evaluation)


def policy(step: int) -> types.Policy:
  return types.Policy(params={"w": step}, version=step, step=step)


class Scripted:
  """Ends one completion a block, with the version it was sampled at."""

  def __init__(self) -> None:
    self.uids: list[int] = []
    self.blocks: list[tuple[dict, int]] = []
    self.may_go = threading.Event()
    self.may_go.set()
    self.error: Exception | None = None

  @property
  def busy(self) -> bool:
    return bool(self.uids)

  def add(self, request: types.Request) -> None:
    self.uids += request.uids

  def step(self, params: dict, version: int) -> list[types.Completion]:
    self.blocks.append((params, version))
    assert self.may_go.wait(_DEADLINE_S)
    if self.error is not None:
      raise self.error
    return [
      types.Completion(
        uid=self.uids.pop(0),
        tokens=(1,),
        logprobs=(0.0,),
        versions=(version,),
        finish="stop",
      )
    ]


class Bench:
  """A server with all that it calls."""

  def __init__(self) -> None:
    self.sampler = Scripted()
    self.testers: list[Scripted] = []
    self.verified: list[types.Policy] = []
    self.reports: queue.Queue[servers.Report] = queue.Queue()
    self.server = servers.Server(
      self.sampler,
      tester=self.tester,
      verify=self.verify,
      report=self.reports.put,
    )

  def tester(self) -> Scripted:
    self.testers.append(Scripted())
    return self.testers[-1]

  def verify(self, policy: types.Policy) -> None:
    if policy.step < 0:
      raise types.RunError("weights: a bit is wrong")
    self.verified.append(policy)

  def next(self) -> servers.Report:
    return self.reports.get(timeout=_DEADLINE_S)


@pytest.fixture(name="bench")
def _bench():
  bench = Bench()
  yield bench
  bench.sampler.may_go.set()
  bench.server.close()


def test_an_order_is_sampled_with_the_weights_that_are_there(bench):
  bench.server.publish(policy(3))
  bench.server.submit(order(7, 8, step=3))
  first, second = bench.next(), bench.next()
  assert [c.uid for r in (first, second) for c in r.completions] == [7, 8]
  assert first.completions[0].versions == (3,)
  assert (first.step, first.evaluation, first.failure) == (3, False, "")
  assert 0 <= first.busy_s <= second.busy_s
  assert bench.sampler.blocks == [({"w": 3}, 3)] * 2


def test_an_order_waits_for_weights_of_its_step(bench):
  bench.server.submit(order(1, step=2))
  bench.server.publish(policy(1))
  bench.server.submit(order(0, step=1))
  # The one that is due overtakes; nothing of the other was sampled.
  assert bench.next().completions[0].uid == 0
  assert bench.sampler.blocks == [({"w": 1}, 1)]
  assert not bench.sampler.busy
  bench.server.publish(policy(2))
  late = bench.next()
  assert (late.completions[0].uid, late.completions[0].versions) == (1, (2,))
  assert late.step == 2


def test_newer_weights_than_asked_for_will_do(bench):
  bench.server.publish(policy(5))
  bench.server.submit(order(1, step=2))
  assert bench.next().completions[0].versions == (5,)


def test_newer_weights_are_taken_at_the_next_block(bench):
  bench.sampler.may_go.clear()
  bench.server.publish(policy(1))
  bench.server.submit(order(1, 2, step=1))
  while not bench.sampler.blocks:
    threading.Event().wait(0.01)
  bench.server.publish(policy(2))
  bench.sampler.may_go.set()
  versions = [bench.next().completions[0].versions for _ in range(2)]
  assert versions == [(1,), (2,)]


def test_each_policy_is_verified_once_before_its_first_block(bench):
  for step in (1, 2):
    bench.server.publish(policy(step))
    bench.server.submit(order(step, 10 + step, step=step))
    bench.next()
    assert [p.step for p in bench.verified] == list(range(1, step + 1))
    bench.next()
  assert [p.step for p in bench.verified] == [1, 2]


def test_weights_that_did_not_arrive_are_a_failure_and_sample_nothing():
  bench = Bench()
  bench.server.publish(policy(-1))
  bench.server.submit(order(1, step=-1))
  end = bench.next()
  bench.server.close()
  assert end.failure == "RunError: weights: a bit is wrong"
  assert end.completions == ()
  assert bench.sampler.blocks == []


def test_a_block_that_raises_is_reported_and_ends_the_thread():
  bench = Bench()
  bench.sampler.error = ValueError("bang")
  bench.server.publish(policy(0))
  bench.server.submit(order(1))
  assert bench.next().failure == "ValueError: bang"
  bench.server.close()
  assert bench.reports.empty()


def test_an_evaluation_has_an_engine_of_its_own_while_it_lasts(bench):
  bench.server.publish(policy(0))
  assert bench.testers == []
  bench.server.submit(order(0, 1, evaluation=True))
  ends = [bench.next() for _ in range(2)]
  assert [c.uid for end in ends for c in end.completions] == [0, 1]
  assert all(end.evaluation for end in ends)
  assert bench.sampler.blocks == []
  bench.server.submit(order(5))
  assert not bench.next().evaluation
  assert len(bench.testers) == 1
  # It was dropped: the next evaluation has another one.
  bench.server.submit(order(0, evaluation=True))
  assert bench.next().evaluation
  assert len(bench.testers) == 2
  assert [tester.busy for tester in bench.testers] == [False, False]


def test_training_goes_on_beside_an_evaluation(bench):
  bench.sampler.may_go.clear()
  bench.server.publish(policy(0))
  bench.server.submit(order(1, 2, 3))
  while not bench.sampler.blocks:
    threading.Event().wait(0.01)
  bench.server.submit(order(1, 2, evaluation=True))
  bench.sampler.may_go.set()
  kinds = [bench.next().evaluation for _ in range(5)]
  assert kinds == [False, False, True, False, True]


def test_close_ends_the_thread_and_drops_what_is_left():
  bench = Bench()
  bench.server.submit(order(1, step=9))
  bench.server.close()
  bench.server.publish(policy(9))
  bench.server.close()
  assert bench.reports.empty()
  assert "server" not in [t.name for t in threading.enumerate()]


def test_a_block_that_does_not_end_is_told_in_words():
  bench = Bench()
  bench.sampler.may_go.clear()
  bench.server.publish(policy(0))
  bench.server.submit(order(1))
  while not bench.sampler.blocks:
    threading.Event().wait(0.01)
  with pytest.raises(types.RunError, match=r"server: .*within 0\.1 s"):
    bench.server.close(0.1)
  bench.sampler.may_go.set()
  bench.server.close()
