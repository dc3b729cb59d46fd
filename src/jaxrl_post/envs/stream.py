"""Runs the ledger: prompts in, groups of scored rollouts out, lag bounded.

`Stream` owns the engine of the training rollouts. Synchronously it pumps the
engine inside `next`; asynchronously one worker thread pumps it all the time.
Both run the same `_pump` under the same ledger, so at `max_lag=0` both train
the same tokens.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol, Self, runtime_checkable

from jaxrl_post import types
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.data import prompts as prompt_sets
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.envs import single_turn
from jaxrl_post.rewards import pool as pools
from jaxrl_post.runtime import clock as clocks

# Reasons for which generation waits for the trainer.
_TRAINERS_TURN = ("lag_gate", "queue_full", "weights_pending")

# Seconds: least time for the worker to end its block; longest wait before
# looking whether the run is to stop.
_GRACE_S, _GLANCE_S = 1.0, 0.5


@dataclasses.dataclass(frozen=True)
class StreamConfig:
  """How generation may run beside training.

  Attributes:
    asynchronous: generate in a thread of its own; needed for max_lag > 0.
    on_stale: "wait" for a group that reaches its deadline; or "drop" it,
      counted, and go on.
    filter_zero_signal: leave out groups whose rewards all agree and sample
      other prompts instead.
    max_left: most groups that may leave untrained, filtered or without any
      reward, per group of a batch; beyond it the run ends, since it would
      sample for ever.
    stall_s: seconds without any progress after which the wait for rollouts or
      rewards ends the run.
  """

  asynchronous: bool = True
  on_stale: Literal["wait", "drop"] = "wait"
  filter_zero_signal: bool = False
  max_left: int = 20
  stall_s: float = 1800.0

  def __post_init__(self) -> None:
    # A longer wait is more than threads can count.
    in_range = 0 < self.stall_s <= threading.TIMEOUT_MAX
    if not in_range or self.max_left < 1:
      raise types.InputError(
        f"stream: expected stall_s in (0, {threading.TIMEOUT_MAX:g}] and "
        f"max_left >= 1, got {self.stall_s} and {self.max_left}. Correct the "
        "value."
      )


@runtime_checkable
class Engine(Protocol):
  """What the stream needs of `sampling.engine.Engine`."""

  @property
  def room(self) -> int:
    """Rows that are free."""
    ...

  @property
  def busy(self) -> bool:
    """Whether a step would make tokens."""
    ...

  def add(self, request: types.Request) -> None:
    """Queues a group."""
    ...

  def step(self, params: types.Tree, version: int) -> list[types.Completion]:
    """Makes one block and returns what ended in it."""
    ...


@dataclasses.dataclass
class Counters:
  """What the stream has made since it was opened."""

  generated: int = 0
  sampled_tokens: int = 0
  left_in_step: int = 0


class Stream:
  """Groups of scored rollouts, none older than the bound when trained."""

  def __init__(
    self,
    cfg: StreamConfig,
    ledger: ledgers.Ledger,
    *,
    env: single_turn.SingleTurn,
    engine: Engine,
    prompts: prompt_sets.Prompts,
    frontier: frontiers.Frontier,
    rewards: pools.Pool,
    clock: clocks.Clock,
    verify: Callable[[types.Policy], None],
    stopping: Callable[[], bool] = lambda: False,
  ) -> None:
    """Prepares a stream; `with` starts it.

    Args:
      cfg: how to run.
      ledger: from `ledgers.start`.
      env: prompts to requests, completions to rollouts.
      engine: samples.
      prompts: what to ask, by uid.
      frontier: which uids are done already.
      rewards: scores.
      clock: accounts the time of both stages.
      verify: raises if a policy's weights did not arrive whole; called once a
        policy, before its first block.
      stopping: whether the run was asked to stop; looked at twice a second.

    Raises:
      InputError: max_lag above 0 without the worker thread.
    """
    if ledger.max_lag and not cfg.asynchronous:
      raise types.InputError(
        f"stream.asynchronous: expected true with max_lag={ledger.max_lag}, "
        "got false. Set max_lag=0 or stream.asynchronous=true."
      )
    self._cfg, self._env, self._engine = cfg, env, engine
    self._prompts, self._rewards, self._clock = prompts, rewards, clock
    self._verify, self._stopping = verify, stopping
    self._ledger, self._frontier = ledger, frontier
    self._uids = frontiers.pending(frontier)
    self._exhausted = False
    self._groups: dict[int, _Assembly] = {}
    self._scored: collections.deque[concurrent.futures.Future] = (
      collections.deque()
    )
    self._policy: types.Policy | None = None
    self._verified: types.Policy | None = None
    self._updated_at: float | None = None
    self._published_at = math.nan
    self._sync: dict[str, float] = {}
    self._progress = time.monotonic()
    self._closed = self._warned = False
    self._changed = threading.Condition()
    self._worker: concurrent.futures.Future[None] | None = None
    self._stack = contextlib.ExitStack()
    self.counters = Counters()

  def __enter__(self) -> Self:
    """Starts the worker thread, if there is one."""
    if self._cfg.asynchronous:
      # A daemon: a block that hangs must not keep the process alive.
      thread = threading.Thread(target=self._work, name="rollout", daemon=True)
      self._stack.callback(self._join, thread)
      self._worker = concurrent.futures.Future()
      thread.start()
    else:
      self._stack.enter_context(
        self._clock.span("generation", "wait/weights_pending")
      )
    return self

  def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
    """Stops admitting, ends the worker after its block, and joins it.

    Raises:
      RunError: the worker hangs, unless another error is on its way.
      Exception: what the worker raised, likewise.
    """
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._stack.close()
    if error is None and self._worker is not None:
      if not self._worker.done():
        raise types.RunError(
          "stream: expected the rollout worker to end its block, got no end "
          f"within {self._cfg.stall_s:g} s (stream.stall_s)"
        )
      self._worker.result()

  def publish(
    self, policy: types.Policy, updated_at: float | None = None
  ) -> None:
    """Hands over the newest weights; sampling takes them at its next block.

    Args:
      policy: replaces the one before.
      updated_at: time.monotonic() when its update had finished; None for
        weights that no update of this process made.
    """
    with self._changed:
      self._policy, self._updated_at = policy, updated_at
      self._published_at = time.monotonic()
      self._apply(ledgers.Publish(policy.step))

  def next(self) -> list[types.Group] | None:
    """Waits for the next batch.

    Returns:
      `groups_per_step` groups by uid, none of whose tokens is older than
      `max_lag` at the trainer's present version; or None when the run is to
      stop, or the data has ended and cannot fill another batch.

    Raises:
      RunError: nothing moved for `stall_s`; the message says what waits.
      Exception: whatever the worker or a reward raised.
    """
    with self._changed:
      self.counters.left_in_step = 0
    while True:
      with self._changed:
        self._raise_if_dead()
        if self._stopping():
          return None
        self._drop_stale()
        uids = ledgers.batch(self._ledger)
        if uids:
          return self._take(uids)
        if self._ended():
          logging.warning(
            "data ended: %d groups left over, too few for a batch of %d",
            len(self._ledger.outstanding),
            self._ledger.groups_per_step,
          )
          return None
        if self._cfg.asynchronous:
          self._await("training", self._training_reason, self._batch_ready)
          continue
      with self._clock.span("training", "wait/queue_empty"):
        self._pump()

  @property
  def ledger(self) -> ledgers.Ledger:
    """Where every admitted group is."""
    return self._ledger

  @property
  def frontier(self) -> frontiers.Frontier:
    """Which uids have left, by whatever way."""
    with self._changed:
      return self._frontier

  @property
  def sync_seconds(self) -> dict[str, float]:
    """Seconds that the newest sampled weights took, by metric name.

    `sync/latency_s` is from the end of their update to their first block. Its
    parts: `sync/reshard_s` until `publish`, `sync/swap_s` until the block that
    was under way had ended, `sync/copy_s` until they had arrived and were
    checked. Empty before the first update.
    """
    with self._changed:
      return dict(self._sync)

  def _batch_ready(self) -> bool:
    dead = self._worker is not None and self._worker.done()
    over = dead or self._stopping() or self._ended()
    return over or bool(ledgers.batch(self._ledger))

  def _take(self, uids: tuple[int, ...]) -> list[types.Group]:
    self._apply(ledgers.Consume(uids))
    for uid in uids:
      self._frontier = frontiers.finish(self._frontier, uid)
    return [self._groups.pop(uid).group() for uid in sorted(uids)]

  def _ended(self) -> bool:
    short = len(self._ledger.outstanding) < self._ledger.groups_per_step
    return self._exhausted and short

  def _training_reason(self) -> str:
    # Of the groups that the next batch waits for; others are always sampled.
    due = self._ledger.outstanding[: self._ledger.groups_per_step]
    states = {e.state for e in due} - {"ready"}
    return "reward_pending" if states == {"scoring"} else "queue_empty"

  def _work(self) -> None:
    assert self._worker is not None
    try:
      while not self._closed:
        self._pump()
    except BaseException as error:
      self._worker.set_exception(error)  # For the trainer to raise.
    else:
      self._worker.set_result(None)
    self._notify()

  def _pump(self) -> None:
    """Moves everything on by at most one block."""
    with self._clock.span("generation", "wait/host"):
      self._collect()
      policy = self._admit()
      if policy is not None and self._engine.busy:
        self._block(policy)
      else:
        with self._changed:
          self._await("generation", self._generation_reason, self._has_work)

  def _collect(self) -> None:
    """Books the rewards that have arrived; raises what they raised."""
    while self._scored:
      rollout: types.Rollout = self._scored.popleft().result()
      uid = rollout.prompt.uid
      if rollout.failure and not self._warned:
        self._warned = True
        logging.warning(
          "rollout %d has no reward: %s (further ones: reward/missing)",
          rollout.completion.uid,
          rollout.failure,
        )
      with self._changed:
        group = self._groups.get(uid)
        if group is None:
          continue
        group.scored[rollout.completion.uid] = rollout
        if len(group.scored) == self._env.group_size:
          self._settle(uid, group)

  def _settle(self, uid: int, group: "_Assembly") -> None:
    rewards = [r.reward for r in group.scored.values()]
    valid = [r for r in rewards if math.isfinite(r)]
    if not valid:
      self._leave(ledgers.Fail(uid))
      self._count_left(next(iter(group.scored.values())).failure)
    elif self._cfg.filter_zero_signal and max(valid) == min(valid):
      self._leave(ledgers.Filter(uid))
      self._count_left(f"all rewards {valid[0]:g}")
    else:
      self._apply(ledgers.Score(uid))

  def _count_left(self, reason: str) -> None:
    """Ends a run that would sample for ever."""
    self.counters.left_in_step += 1
    most = self._cfg.max_left * self._ledger.groups_per_step
    if self.counters.left_in_step > most:
      raise types.RunError(
        f"stream.max_left: expected to train one of {most} groups "
        f"(stream.max_left x groups_per_step), got none; the last one left "
        f"for: {reason}. Look at the reward, and at the difficulty of the task."
      )

  def _admit(self) -> types.Policy | None:
    """Fills the engine as far as the window allows."""
    with self._changed:
      policy = self._policy
      while (
        policy is not None
        and self._engine.room > 0
        and ledgers.window(self._ledger) > 0
        and not self._exhausted
      ):
        uid = next(self._uids)
        if uid >= len(self._prompts):
          self._exhausted = True
          self._changed.notify_all()
          break
        prompt = self._prompts[uid]
        self._engine.add(self._env.request(prompt))
        self._groups[uid] = _Assembly(prompt)
        self._apply(ledgers.Admit(uid))
    return policy

  def _block(self, policy: types.Policy) -> None:
    if policy is not self._verified:
      with self._changed:
        updated, published = self._updated_at, self._published_at
      begun = time.monotonic()
      with self._clock.span("generation", "sync"):
        self._verify(policy)
      self._verified = policy
      if updated is not None:
        now = time.monotonic()
        self._sync = {
          "sync/latency_s": now - updated,
          "sync/reshard_s": published - updated,
          "sync/swap_s": begun - published,
          "sync/copy_s": now - begun,
        }
    with self._clock.span("generation", "busy"):
      completions = self._engine.step(policy.params, policy.version)
    self._progress = time.monotonic()
    rollouts = [self._book(completion) for completion in completions]
    kept = [rollout for rollout in rollouts if rollout is not None]
    for future in self._rewards.submit_all(kept):
      future.add_done_callback(self._on_scored)

  def _book(self, completion: types.Completion) -> types.Rollout | None:
    """Enters a completion; returns its rollout, if its group is still here."""
    uid = self._env.owner(completion.uid)
    with self._changed:
      self.counters.generated += 1
      self.counters.sampled_tokens += len(completion.tokens)
      group = self._groups.get(uid)
      if group is None:  # Dropped while it was sampled.
        return None
      group.sampled += 1
      group.tokens += len(completion.tokens)
      if group.sampled == self._env.group_size:
        self._apply(ledgers.Finish(uid, group.tokens))
    return self._env.rollout(group.prompt, completion)

  def _on_scored(self, future: concurrent.futures.Future) -> None:
    with self._changed:
      self._scored.append(future)
      self._changed.notify_all()

  def _has_work(self) -> bool:
    can_admit = self._policy is not None and not self._exhausted
    can_admit = can_admit and ledgers.window(self._ledger) > 0
    settled = not self._cfg.asynchronous and self._batch_ready()
    return self._closed or bool(self._scored) or can_admit or settled

  def _generation_reason(self) -> str:
    if self._policy is None:
      return "weights_pending"
    states = {e.state for e in self._ledger.outstanding}
    if "scoring" in states:
      return "reward_pending"
    full = ledgers.batch(self._ledger)
    return "queue_full" if full else "lag_gate"

  def _await(
    self,
    stage: str,
    reason: Callable[[], str],
    ready: Callable[[], bool],
  ) -> None:
    """Waits for `ready` under the condition, with a deadline and a reason."""
    while not ready():
      why = reason()  # Anew after each event: it may be another one by now.
      patience = self._progress + self._cfg.stall_s - time.monotonic()
      if why in _TRAINERS_TURN:
        # The trainer may compile or evaluate for long. It is in this process:
        # when it ends, for whatever reason, it closes the stream.
        patience = self._cfg.stall_s
      if patience <= 0:
        raise types.RunError(
          f"stream: {stage} waited for {why} and nothing moved for "
          f"{self._cfg.stall_s:g} s (stream.stall_s); {self._ledger}"
        )
      with self._clock.span(stage, f"wait/{why}"):
        self._changed.wait(min(patience, _GLANCE_S))

  def _join(self, thread: threading.Thread) -> None:
    """Waits for the worker to end its block, as long as for any progress."""
    patience = self._progress + self._cfg.stall_s - time.monotonic()
    thread.join(max(patience, _GRACE_S))
    if thread.is_alive():
      logging.error("stream: the rollout worker hangs in a block; left behind")

  def _raise_if_dead(self) -> None:
    if self._worker is not None and self._worker.done():
      self._worker.result()

  def _drop_stale(self) -> None:
    for uid in ledgers.stale(self._ledger):
      self._leave(ledgers.Drop(uid))

  def _leave(self, event: ledgers.Filter | ledgers.Fail | ledgers.Drop) -> None:
    self._apply(event)
    self._groups.pop(event.uid)
    self._frontier = frontiers.finish(self._frontier, event.uid)

  def _apply(self, event: ledgers.Event) -> None:
    self._ledger = ledgers.apply(self._ledger, event)
    self._progress = time.monotonic()
    self._changed.notify_all()

  def _notify(self) -> None:
    with self._changed:
      self._changed.notify_all()


@dataclasses.dataclass
class _Assembly:
  """A group while its rollouts come in, in any order."""

  prompt: types.Prompt
  sampled: int = 0
  tokens: int = 0
  scored: dict[int, types.Rollout] = dataclasses.field(default_factory=dict)

  def group(self) -> types.Group:
    rollouts = tuple(self.scored[uid] for uid in sorted(self.scored))
    return types.Group(prompt=self.prompt, rollouts=rollouts)
