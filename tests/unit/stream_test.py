"""The stream: order, bounds, refills, and an end to every wait.

The engine is a script and rewards are plain functions on threads, so that who
is late is decided here.
"""

import concurrent.futures
import contextlib
import logging
import math
import threading
import time

import pytest

from jaxrl_post import types
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.data import prompts, sources
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.envs import schedule, single_turn, stream
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import clock as clocks

GROUP = 4
PATIENCE_S = 0.3
LATE_S = 20.0  # a test that waits this long has failed


class Letters:
  """A tokenizer of one token a letter."""

  def prompt_ids(self, prompt):
    return [ord(x) for x in prompt], prompt


class Engine:
  """Ends one completion a step, in the order of requests.

  Attributes:
    held: prompts, by uid, whose completions do not end for now.
    script: called at every step, before it.
    most: largest number of prompts that were ever asked for.
  """

  between, seats = "busy", ()

  def __init__(self, room: int = 64, script=lambda: None) -> None:
    self.size, self.script = room, script
    self.waiting: list[int] = []
    self.held: set[int] = set()
    self.asked: list[int] = []

  @property
  def room(self) -> int:
    return self.size - len(self.waiting)

  @property
  def busy(self) -> bool:
    return bool(self.waiting)

  def add(self, request: types.Request) -> None:
    self.waiting += request.uids
    self.asked.append(request.uids[0] // GROUP)

  def partials(self) -> tuple[types.Partial, ...]:
    return ()

  def renew(self) -> None:
    pass

  def release(self, uids) -> None:
    pass

  def step(self, params, version: int, launched) -> list[types.Completion]:
    self.script()
    free = [uid for uid in self.waiting if uid // GROUP not in self.held]
    if not free:
      return []
    self.waiting.remove(free[0])
    return [
      types.Completion(
        uid=free[0],
        tokens=(params + free[0], 1),
        logprobs=(-1.0, -1.0),
        versions=(version, version),
        finish="stop",
      )
    ]


class InThreads(pool.Pool):
  """Scores in threads of this process."""

  def __init__(self, score, workers: int = 8) -> None:
    self.score = score
    self.threads = concurrent.futures.ThreadPoolExecutor(workers, "score")

  def submit_all(self, rollouts):
    return [self.threads.submit(self._scored, rollout) for rollout in rollouts]

  def _scored(self, rollout):
    return types.Rollout(
      prompt=rollout.prompt,
      completion=rollout.completion,
      temperature=rollout.temperature,
      text=rollout.text,
      reward=self.score(rollout.completion.uid),
    )


def by_index(uid: int) -> float:
  return float(uid % GROUP)


@contextlib.contextmanager
def opened(
  engine: Engine,
  *,
  score=by_index,
  size: int = 100,
  groups: int = 2,
  max_lag: int = 0,
  verify=lambda policy: None,
  stopping=lambda: False,
  **options,
):
  """A stream of `size` prompts, begun with version 0."""
  cfg = schedule.StreamConfig(**{"stall_s": LATE_S, **options})
  data = prompts.load(
    sources.Generated(lambda i: types.Example(prompt="a", reference=i), size),
    Letters(),
    max_tokens=4,
    seed=0,
    epochs=1,
  )
  rewards = InThreads(score)
  clock = clocks.Clock(("generation", "training"))
  rollouts = stream.Stream(
    cfg,
    ledgers.start(groups, max_lag, on_stale=cfg.on_stale),
    env=single_turn.SingleTurn(GROUP, types.SamplingParams(), lambda ids: ""),
    engine=engine,
    prompts=data,
    frontier=frontiers.Frontier(),
    rewards=rewards,
    clock=clock,
    verify=verify,
    stopping=stopping,
  )
  try:
    with rollouts:
      yield rollouts
  finally:
    rewards.threads.shutdown()
    clock.close()


def policy(version: int) -> types.Policy:
  return types.Policy(params=100 * version, version=version, step=version)


def publish(rollouts: stream.Stream, version: int) -> None:
  rollouts.publish(policy(version), time.monotonic())


def taken(rollouts: stream.Stream, steps: int) -> list[list[types.Group]]:
  """Takes batches, with an update after each."""
  batches = []
  for version in range(steps):
    publish(rollouts, version)
    groups = rollouts.next()
    assert groups is not None
    batches.append(groups)
  return batches


def uids(groups) -> list[int]:
  return [group.prompt.uid for group in groups]


def rollout_threads() -> list[str]:
  return [t.name for t in threading.enumerate() if t.name.startswith("rollout")]


@pytest.fixture(name="asynchronous", params=[False, True])
def _asynchronous(request) -> bool:
  return request.param


# ------------------------------------------------------------------ what comes


def test_groups_come_by_uid_with_the_versions_that_made_them(asynchronous):
  with opened(Engine(), asynchronous=asynchronous) as rollouts:
    batches = taken(rollouts, 3)
  assert [uids(groups) for groups in batches] == [[0, 1], [2, 3], [4, 5]]
  for version, groups in enumerate(batches):
    for rollout in (r for group in groups for r in group.rollouts):
      assert rollout.completion.versions == (version, version)
      assert rollout.completion.tokens[0] == (
        100 * version + rollout.completion.uid
      )


def test_with_a_thread_or_without_the_batches_are_equal():
  both = []
  for asynchronous in (False, True):
    with opened(Engine(), asynchronous=asynchronous) as rollouts:
      both.append(taken(rollouts, 3))
  assert both[0] == both[1]


def test_c86_rewards_that_come_back_in_another_order_find_their_rollout(
  asynchronous,
):
  done = [threading.Event() for _ in range(GROUP + 1)]
  done[GROUP].set()

  def last_first(uid: int) -> float:
    assert done[uid + 1].wait(LATE_S)
    done[uid].set()
    return float(uid)

  with opened(
    Engine(), score=last_first, groups=1, asynchronous=asynchronous
  ) as rollouts:
    (group,) = taken(rollouts, 1)[0]
  assert [r.completion.uid for r in group.rollouts] == [0, 1, 2, 3]
  rewards = [r.reward for r in group.rollouts]
  assert rewards == [0, 1, 2, 3]
  mean = sum(rewards) / GROUP
  assert [r - mean for r in rewards] == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_no_more_is_begun_than_the_bound_allows(max_lag):
  engine = Engine()
  with opened(engine, max_lag=max_lag) as rollouts:
    for version, groups in enumerate(taken(rollouts, 5)):
      lags = [
        version - v
        for group in groups
        for rollout in group.rollouts
        for v in rollout.completion.versions
      ]
      assert min(lags) >= 0
      assert max(lags) <= max_lag
    assert len(engine.asked) <= (4 + max_lag + 1) * 2


def test_a_policy_is_checked_once_before_it_samples(asynchronous):
  seen = []
  with opened(
    Engine(), verify=seen.append, asynchronous=asynchronous
  ) as rollouts:
    taken(rollouts, 3)
    assert rollouts.sync_seconds["sync/latency_s"] >= 0
  assert [p.version for p in seen] == [0, 1, 2]


# ----------------------------------------------------------- what leaves early


def test_a_group_without_any_reward_is_replaced(asynchronous):
  def score(uid: int) -> float:
    return math.nan if uid // GROUP == 1 else by_index(uid)

  with opened(Engine(), score=score, asynchronous=asynchronous) as rollouts:
    (groups,) = taken(rollouts, 1)
    assert uids(groups) == [0, 2]
    assert rollouts.ledger.failed.groups == 1
    # It is done with: no resume draws it again.
    publish(rollouts, 1)
    assert rollouts.cut().frontier == frontiers.Frontier(first=3)


def test_a_group_with_one_reward_missing_stays(asynchronous):
  def score(uid: int) -> float:
    return math.nan if uid == 1 else by_index(uid)

  with opened(Engine(), score=score, asynchronous=asynchronous) as rollouts:
    (groups,) = taken(rollouts, 1)
  assert uids(groups) == [0, 1]
  assert math.isnan(groups[0].rollouts[1].reward)


def test_groups_without_signal_are_replaced_when_asked(asynchronous):
  def score(uid: int) -> float:
    return 1.0 if uid // GROUP in (0, 3) else by_index(uid)

  with opened(
    Engine(), score=score, asynchronous=asynchronous, filter_zero_signal=True
  ) as rollouts:
    batches = taken(rollouts, 2)
    assert [uids(groups) for groups in batches] == [[1, 2], [4, 5]]
    assert rollouts.ledger.filtered.groups == 2
  with opened(Engine(), score=score, asynchronous=asynchronous) as rollouts:
    assert uids(taken(rollouts, 1)[0]) == [0, 1]


def test_groups_that_never_have_signal_end_the_run(asynchronous):
  with (
    pytest.raises(types.RunError, match="max_left: .* 6 groups"),
    opened(
      Engine(),
      score=lambda uid: 1.0,
      asynchronous=asynchronous,
      filter_zero_signal=True,
      max_left=3,
    ) as rollouts,
  ):
    taken(rollouts, 1)


def test_a_late_group_is_dropped_when_that_is_allowed():
  engine = Engine()
  engine.held = {0}
  with opened(engine, groups=1, max_lag=1, on_stale="drop") as rollouts:
    batches = taken(rollouts, 2)
    assert [uids(groups) for groups in batches] == [[1], [2]]
    publish(rollouts, 2)
    engine.held = set()  # too late now
    groups = rollouts.next()
    assert groups is not None
    assert 0 not in uids(groups)
    assert rollouts.ledger.dropped.groups == 1


def test_c76_data_that_ends_ends_the_stream(asynchronous, caplog):
  with opened(Engine(), size=5, asynchronous=asynchronous) as rollouts:
    assert [uids(g) for g in taken(rollouts, 2)] == [[0, 1], [2, 3]]
    publish(rollouts, 2)
    with caplog.at_level(logging.WARNING):
      assert rollouts.next() is None
    assert rollouts.ledger.admitted == 5
  assert "data ended: 1 groups left over" in caplog.text


# ------------------------------------------------------------------ every wait


def test_a_stalled_engine_ends_the_run_in_its_time():
  release = threading.Event()
  engine = Engine(script=lambda: release.wait(LATE_S))
  began = time.monotonic()
  with (
    pytest.raises(
      types.RunError,
      match=f"training waited for queue_empty .* {PATIENCE_S} s",
    ),
    opened(engine, stall_s=PATIENCE_S) as rollouts,
  ):
    taken(rollouts, 1)
  assert PATIENCE_S <= time.monotonic() - began < LATE_S / 2
  release.set()


def test_a_stalled_engine_is_not_waited_for_at_the_end():
  inside, release, engine = threading.Event(), threading.Event(), Engine()

  def script() -> None:
    inside.set()
    release.wait(LATE_S)

  began = time.monotonic()
  with (
    pytest.raises(types.RunError),
    opened(engine, stall_s=PATIENCE_S) as rollouts,
  ):
    taken(rollouts, 1)
    engine.script = script
    publish(rollouts, 1)
    assert inside.wait(LATE_S)
  assert time.monotonic() - began < LATE_S / 2
  release.set()


def test_rewards_that_never_come_end_the_run(asynchronous):
  release = threading.Event()

  def score(uid: int) -> float:
    # The pool, which has a limit of its own, would have given up by now.
    release.wait(5 * PATIENCE_S)
    return by_index(uid)

  began = time.monotonic()
  with (
    pytest.raises(types.RunError, match="waited for reward_pending"),
    opened(
      Engine(),
      score=score,
      groups=1,
      stall_s=PATIENCE_S,
      asynchronous=asynchronous,
    ) as rollouts,
  ):
    taken(rollouts, 1)
  assert time.monotonic() - began < LATE_S
  release.set()


def test_a_trainer_that_is_slower_than_the_stall_limit_is_no_stall():
  with opened(Engine(), stall_s=PATIENCE_S) as rollouts:
    taken(rollouts, 1)
    assert rollouts._worker is not None
    late = concurrent.futures.wait([rollouts._worker], 3 * PATIENCE_S)
    assert late.not_done


def test_c73_what_the_engine_raises_reaches_the_trainer(asynchronous):
  def script() -> None:
    raise ValueError("boom")

  with (
    pytest.raises(ValueError, match="boom") as error,
    opened(Engine(script=script), asynchronous=asynchronous) as rollouts,
  ):
    taken(rollouts, 1)
  assert "script" in [entry.name for entry in error.traceback]


def test_what_a_reward_raises_reaches_the_trainer(asynchronous):
  def score(uid: int) -> float:
    raise KeyError("no such answer")

  with (
    pytest.raises(KeyError, match="no such answer"),
    opened(Engine(), score=score, asynchronous=asynchronous) as rollouts,
  ):
    taken(rollouts, 1)


def test_a_worker_that_died_unseen_is_heard_of_at_the_end():
  engine = Engine()
  with pytest.raises(ValueError, match="boom"), opened(engine) as rollouts:
    taken(rollouts, 1)

    def script() -> None:
      raise ValueError("boom")

    engine.script = script
    publish(rollouts, 1)
    assert rollouts._worker is not None
    concurrent.futures.wait([rollouts._worker], LATE_S)


def test_a_worker_that_dies_while_the_run_stops_is_no_failure(caplog):
  stops = threading.Event()

  def score(uid: int) -> float:
    # A signal to the whole job ends the reward workers, too.
    stops.set()
    raise types.RunError("reward worker: ended by SIGTERM")

  with (
    caplog.at_level(logging.WARNING),
    opened(Engine(), score=score, stopping=stops.is_set) as rollouts,
  ):
    publish(rollouts, 0)
    assert rollouts._worker is not None
    concurrent.futures.wait([rollouts._worker], LATE_S)
    publish(rollouts, 0)
    assert rollouts.next() is None
    assert len(rollouts.cut().groups) == 2
  assert "ended by SIGTERM" in caplog.text


def test_no_thread_is_left_behind():
  with opened(Engine(), max_lag=1) as rollouts:
    taken(rollouts, 2)
    assert len(rollout_threads()) == 1
  assert rollout_threads() == []


def test_lag_without_a_thread_is_refused():
  with (
    pytest.raises(types.InputError, match=r"stream\.asynchronous: .*max_lag=1"),
    opened(Engine(), max_lag=1, asynchronous=False),
  ):
    pass


@pytest.mark.parametrize("wrong", [{"stall_s": 0.0}, {"max_left": 0}])
def test_settings_out_of_range_are_refused(wrong):
  with pytest.raises(types.InputError, match="^stream: "):
    schedule.StreamConfig(**wrong)
