"""Runs the ledger: prompts in, groups of scored rollouts out, lag bounded.

`Stream` owns the engine of the training rollouts. Synchronously it pumps the
engine inside `next`; asynchronously one worker thread pumps it all the time.
Both run the same `_pump` under the same ledger, so at `max_lag=0` both train
the same tokens. What may happen when is the schedule's to say.
"""

import collections
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from jaxrl_post import types
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.data import prompts as prompt_sets
from jaxrl_post.envs import beside, events, schedule, work
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.rewards import protocol
from jaxrl_post.runtime import clock as clocks

# Why generation waits for the trainer.
_TRAINERS_TURN = ("lag_gate", "queue_full", "weights_pending")
# Seconds: least time for the worker to end its block; longest wait before
# looking whether the run is to stop.
_GRACE_S, _GLANCE_S = 1.0, 0.5


class Stream:
  """Groups of scored rollouts, none older than the bound when trained.

  Attributes:
    booked: the ledger when the newest batch was taken; in a deterministic run,
      when the engine took the weights before it.
  """

  def __init__(
    self,
    cfg: schedule.StreamConfig,
    ledger: ledgers.Ledger,
    *,
    env: work.Env,
    engine: work.Engine,
    prompts: prompt_sets.Prompts,
    frontier: frontiers.Frontier,
    rewards: protocol.Scorer,
    clock: clocks.Clock,
    verify: Callable[[types.Policy], None],
    plan: schedule.Schedule | None = None,
    log: events.Log | None = None,
    lane: beside.Lane | None = None,
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
      plan: when what may happen; None: as soon as it can.
      log: takes every event; `with` closes it.
      lane: what else the worker thread samples; None is nothing.
      stopping: whether the run was asked to stop; looked at twice a second.

    Raises:
      InputError: max_lag above 0 without the worker thread.
    """
    if ledger.max_lag and not cfg.asynchronous:
      raise types.InputError(
        f"stream.asynchronous: expected true with max_lag={ledger.max_lag}, "
        "got false. Set max_lag=0 or stream.asynchronous=true."
      )
    self._cfg, self._engine, self._rewards = cfg, engine, rewards
    self._clock, self._verify, self._stopping = clock, verify, stopping
    self._launched = functools.partial(clock.launched, "generation")
    self._plan, self._log = plan or schedule.Free(), log
    self._work = work.Work(
      ledger,
      env=env,
      prompts=prompts,
      frontier=frontier,
      filter_zero_signal=cfg.filter_zero_signal,
      note=self._note,
    )
    self._scored = collections.deque[concurrent.futures.Future]()
    self._current: work.Published | None = None
    self._newest: work.Published | None = None
    self._verified: types.Policy | None = None
    self._cut: cuts.Cut | None = None
    self._cut_due = False
    self._sync: dict[str, float] = {}
    self._progress = time.monotonic()
    self._closed = self._warned = False
    self._lane = lane or beside.Lane()
    self._changed = self._lane.changed
    self._worker: concurrent.futures.Future[None] | None = None
    self._stack = contextlib.ExitStack()
    self.booked = ledger

  def restore(self, cut: cuts.Cut) -> None:
    """Goes on from a cut, of the ledger's step; before weights come."""
    requests, rollouts = self._work.restore(cut)
    for request in requests:
      self._engine.add(request)
    self._submit(rollouts)

  def __enter__(self) -> Self:
    """Starts the worker thread, if there is one."""
    if self._log is not None:
      self._stack.callback(self._log.close)
    if self._cfg.asynchronous:
      # A daemon: a block that hangs must not keep the process alive.
      thread = threading.Thread(target=self._run, name="rollout", daemon=True)
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
      Exception: what the worker raised, likewise; logged if the run stops.
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
      failure = self._worker.exception()
      if failure is not None and not self._stopping():
        raise failure
      if failure is not None:  # A signal may have ended the reward workers too.
        logging.warning("stream: while the run was stopped: %s", failure)

  def publish(
    self,
    policy: types.Policy,
    updated_at: float | None = None,
    *,
    cut: bool = False,
  ) -> None:
    """Hands over the newest weights; sampling takes them at its next block.

    Args:
      policy: replaces the one before.
      updated_at: time.monotonic() when its update had finished; None for
        weights that no update of this process made.
      cut: whether `cut` will be called for these weights. Without the word it
        may have to wait for a block.
    """
    event = ledgers.Publish(policy.step)
    with self._changed:
      self._await(
        "training",
        lambda: "weights_pending",
        lambda: self._plan.allows(event) or self._dead(),
      )
      self._raise_if_dead()
      if not self._plan.defers:
        self._work.publish(policy)
      self._newest = work.Published(policy, updated_at, time.monotonic())
      self._cut, self._cut_due = None, cut
      self._moved()

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
    while True:
      with self._changed:
        if self._stopping():
          self._stop_admitting()
          return None
        self._raise_if_dead()
        for event in self._drops():
          self._work.leave(event)
          self._moved()
          self._clock.count(self._work.queue)
        if self._work.ended:
          logging.warning(
            "data ended: %d groups left over, too few for a batch of %d",
            len(self.ledger.outstanding),
            self.ledger.groups_per_step,
          )
          return None
        uids = self._batch()
        if uids:
          return self._take(uids)
        if self._cfg.asynchronous:
          self._await("training", self._work.awaited, self._batch_ready)
          continue
      with self._clock.span("training", "wait/queue_empty"):
        self._pump()

  def cut(self) -> cuts.Cut:
    """Returns what is needed to go on after the newest batch that was trained.

    The weights of that batch must have been published, and no batch taken
    since. The engine's cache is not in it.

    Raises:
      RunError: the worker did not come to the end of its block for `stall_s`.
      Exception: whatever the worker raised.
    """
    with self._changed:
      newest = self._newest
      assert newest is not None and newest.policy.step == self.ledger.step
      if self._dead() or not self._cfg.asynchronous:
        self._take_newest()
        if not self._plan.defers:
          self._make_cut()
      elif self._cut is None and not self._plan.defers:
        self._cut_due = True
        self._changed.notify_all()
      self._await(
        "training",
        lambda: "host",
        lambda: self._cut is not None or self._dead(),
      )
      if self._cut is None and self._worker is not None:
        self._worker.result()
      assert self._cut is not None
      return self._cut

  @property
  def ledger(self) -> ledgers.Ledger:
    """Where every admitted group is."""
    return self._work.ledger

  @property
  def counters(self) -> cuts.Counters:
    """What was made since the run began."""
    return self._work.counters

  @property
  def sync_seconds(self) -> dict[str, float]:
    """Seconds that the newest sampled weights took, by metric name.

    `sync/latency_s` is from the end of their update to their first block. Its
    parts: `sync/reshard_s` until `publish`, `sync/swap_s` until the block under
    way had ended, `sync/copy_s` until they were checked. At first empty.
    """
    with self._changed:
      return dict(self._sync)

  def _take(self, uids: tuple[int, ...]) -> list[types.Group]:
    groups = self._work.take(uids)
    # What no clock decides, if that is asked for.
    fixed = self._cut if self._plan.defers else None
    self.booked = self.ledger if fixed is None else fixed.ledger
    self._moved()
    self._clock.count(self._work.queue)
    return groups

  def _batch(self) -> tuple[int, ...]:
    """Returns the next batch if it may be taken now."""
    uids = ledgers.batch(self.ledger)
    return uids if self._plan.allows(ledgers.Consume(uids)) else ()

  def _batch_ready(self) -> bool:
    over = self._dead() or self._stopping() or self._work.ended
    return over or bool(self._batch() or self._drops())

  def _run(self) -> None:
    assert self._worker is not None
    try:
      with self._clock.span("generation", "other", "worker"):
        while not self._closed:
          self._pump()
    except BaseException as error:
      self._worker.set_exception(error)  # For the trainer to raise.
    else:
      self._worker.set_result(None)
    self._lane.close()

  def _pump(self) -> None:
    """Moves everything on by at most one block."""
    with self._clock.span("generation", "wait/host"):
      self._lane.block(self._clock, self._moved)
      rollouts = self._arrived()
      with self._changed:
        for rollout in rollouts:
          self._work.score(rollout)
        self._settle()
        self._take_newest()
        if self._cut_due and self._work.up_to_date:
          self._make_cut()
        self._admit()
        self._clock.count(self._work.queue)
        runs = self._may_run()
        if not runs and not self._lane.busy:
          why = functools.partial(self._work.idles_for, self._current)
          self._await("generation", why, self._has_work)
      if runs:
        self._block()

  def _facts(self) -> schedule.Facts:
    return self._work.facts(self._current, self._newest, self._engine)

  def _arrived(self) -> list[types.Rollout]:
    """Returns the rewards that have come back; raises what they raised."""
    rollouts = []
    while self._scored:
      rollout: types.Rollout = self._scored.popleft().result()
      rollouts.append(rollout)
      if rollout.failure and not self._warned:
        self._warned = True
        uid, why = rollout.completion.uid, rollout.failure
        text = "rollout %d has reward %g: %s (more: reward/missing, /replaced)"
        logging.warning(text, uid, rollout.reward, why)
    return rollouts

  def _may_settle(self, event: ledgers.Event) -> bool:
    return self._plan.settles(self._facts(), event)

  def _settle(self) -> None:
    """Enters outcomes; ends a run that would sample for ever."""
    before = self.ledger
    reasons = self._work.settle(self._may_settle)
    if self.ledger is not before:
      self._moved()
    most = self._cfg.max_left * self.ledger.groups_per_step
    if reasons and self.counters.left_in_step > most:
      raise types.RunError(
        f"stream.max_left: expected to train one of {most} groups "
        f"(stream.max_left x groups_per_step), got none; the last one left "
        f"for: {reasons[-1]}. Look at the reward, and at the difficulty of the "
        "task."
      )

  def _may_take(self) -> bool:
    is_new = self._newest is not None and self._newest is not self._current
    return is_new and self._plan.takes(self._facts())

  def _take_newest(self) -> None:
    """Lets the engine go over to the newest weights, if it is time."""
    if self._may_take():
      self._current = self._newest
      assert self._current is not None
      policy = self._current.policy
      if self._plan.defers:
        self._work.publish(policy)
        self._engine.renew()  # As one that goes on from the cut has to.
      self._note(events.Take(policy.step))
      if self._plan.defers:
        self._make_cut()
      self._moved()

  def _make_cut(self) -> None:
    count = 0 if self._log is None else self._log.count
    self._cut = self._work.cut(self._engine.partials(), count)
    self._cut_due = False
    self._changed.notify_all()

  def _may_admit(self) -> bool:
    if self._current is None:
      return False
    facts = self._facts()
    possible = facts.window > 0 and facts.room > 0
    return possible and self._plan.admits(facts, self._work.next_uid)

  def _admit(self) -> None:
    """Fills the engine as far as the window allows."""
    before = self.ledger
    while self._may_admit():
      self._engine.add(self._work.admit())
    if self.ledger is not before:
      self._moved()

  def _may_run(self) -> bool:
    can = self._current is not None and self._engine.busy
    return can and self._plan.runs(self._facts())

  def _block(self) -> None:
    current = self._current
    assert current is not None
    policy = current.policy
    if policy is not self._verified:
      begun = time.monotonic()
      with self._clock.span("generation", "sync", "verify"):
        self._verify(policy)
        with self._changed:
          self._sync = current.sync_seconds(begun) or self._sync
      self._verified = policy
    with self._clock.span("generation", self._engine.between, "block"):
      completions = self._engine.step(
        policy.params, policy.version, self._launched
      )
    if completions is None:
      return
    with self._clock.span("generation", "wait/host", "book"):
      self._clock.seats(self._engine.seats)
      with self._changed:
        self._note(events.Run())
        rollouts = self._work.book(completions)
        self._moved()
      self._submit(rollouts)

  def _submit(self, rollouts: list[types.Rollout]) -> None:
    answered = self._clock.calls("reward", len(rollouts))
    for future in self._rewards.submit_all(rollouts):
      future.add_done_callback(answered)
      future.add_done_callback(self._on_scored)

  def _on_scored(self, future: concurrent.futures.Future) -> None:
    with self._changed:
      self._scored.append(future)
      self._changed.notify_all()

  def _has_work(self) -> bool:
    settled = not self._cfg.asynchronous and self._batch_ready()
    cut = self._cut_due and self._work.up_to_date
    moves = self._may_take() or self._may_admit() or self._may_run()
    enters = any(map(self._may_settle, self._work.held))
    news = self._closed or bool(self._scored) or self._lane.busy
    return news or settled or cut or moves or enters

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
      if why in _TRAINERS_TURN and stage == "generation":
        # It may compile or evaluate for long, and ends the stream when it ends.
        patience = self._cfg.stall_s
      if patience <= 0:
        raise types.RunError(
          f"stream: {stage} waited for {why} and nothing moved for "
          f"{self._cfg.stall_s:g} s (stream.stall_s); {self.ledger}"
        )
      with self._clock.span(stage, f"wait/{why}"):
        self._changed.wait(min(patience, _GLANCE_S))

  def _join(self, thread: threading.Thread) -> None:
    """Waits for the worker to end its block, as long as for any progress."""
    patience = self._progress + self._cfg.stall_s - time.monotonic()
    thread.join(max(patience, _GRACE_S))
    if thread.is_alive():
      logging.error("stream: the rollout worker hangs in a block; left behind")

  def _dead(self) -> bool:
    return self._worker is not None and self._worker.done()

  def _raise_if_dead(self) -> None:
    if self._worker is not None and self._dead() and not self._stopping():
      self._worker.result()

  def _stop_admitting(self) -> None:
    if not self._plan.defers:  # Its cut has yet to come in its time.
      self._work.stop()

  def _drops(self) -> list[ledgers.Drop]:
    drops = map(ledgers.Drop, ledgers.stale(self.ledger))
    return [drop for drop in drops if self._plan.allows(drop)]

  def _note(self, event: events.Event) -> None:
    self._plan.applied(event)
    if self._log is not None:
      self._log.write(event)

  def _moved(self) -> None:
    self._progress = time.monotonic()
    self._changed.notify_all()
