"""Evaluation beside training: with weights of one version, while others come.

Three threads have a part. The trainer begins an evaluation and takes its
result (`Tests`). A thread of the evaluation asks, and waits for rewards. The
thread that samples for training also makes the blocks of the evaluation, in
turn with its own (`Lane`), so that one thread has the devices. The engine of an
evaluation is its own, and so are its weights: whatever is published meanwhile
it never sees, and training goes on with it as if there were no evaluation.
"""

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from jaxrl_post import types
from jaxrl_post.runtime import clock as clocks

# Seconds: longest wait before a look whether the run is to stop; for a thread
# that was told to end.
_GLANCE_S, _GRACE_S = 0.5, 1.0

# Of a policy, and of whether to end early: metrics, none if it ended early.
Score: TypeAlias = Callable[
  [types.Policy, Callable[[], bool]], dict[str, float]
]


@dataclasses.dataclass(frozen=True)
class Beside:
  """How an evaluation shares the generation devices with training.

  Attributes:
    blocks: of an evaluation, for each block of rollouts: with more of them it
      ends sooner, and rollouts are held up for longer.
  """

  blocks: int = 1

  def __post_init__(self) -> None:
    if self.blocks < 1:
      raise types.InputError(
        f"evaluation.beside.blocks: expected >= 1, got {self.blocks}. none has "
        "training wait for evaluations."
      )


def check(mode: str, max_lag: int, *, best_by: str, held_out: bool) -> None:
  """Refuses an evaluation beside training where there can be none.

  Args:
    mode: of the placement.
    max_lag: of the run.
    best_by: of its checkpoints.
    held_out: whether there are prompts for it.

  Raises:
    InputError: names the setting that does not go with it.
  """
  for holds, name, rule, value in (
    (held_out, "data.held_out", "some prompts", "none"),
    (mode == "split", "placement.mode", "split", mode),
    (max_lag > 0, "max_lag", ">= 1", max_lag),
    (
      not best_by.startswith("eval/"),
      "checkpoint.best_by",
      "no metric of an evaluation, which ends after its checkpoint",
      best_by,
    ),
  ):
    if not holds:
      raise types.InputError(
        f"{name}: expected {rule} with evaluation.beside, got {value}. Change "
        "it, or set evaluation.beside=none."
      )


@runtime_checkable
class Sampler(Protocol):
  """What a lane needs of `sampling.engine.Engine`."""

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


@dataclasses.dataclass(eq=False)
class _Task:
  """What is asked for, and what of it is there."""

  policy: types.Policy
  engine: Sampler
  done: dict[int, types.Completion] = dataclasses.field(default_factory=dict)


class Lane:
  """Has the thread that samples for training sample something else, too.

  Attributes:
    changed: the lock of what is here, and of the stream whose thread it is;
      told of all that moves.
  """

  def __init__(
    self,
    make: Callable[[types.Policy], Sampler] | None = None,
    *,
    blocks: int = 1,
    stall_s: float = 1800.0,
  ) -> None:
    """Nothing is asked for yet.

    Args:
      make: waits for a policy's weights and makes an engine; None where nobody
        will ask.
      blocks: made at a time.
      stall_s: longest wait for a block, in seconds.
    """
    self.changed = threading.Condition(threading.RLock())
    self._make, self._blocks, self._stall_s = make, blocks, stall_s
    self._task: _Task | None = None
    self._closed = False
    self._moved = 0.0

  @property
  def busy(self) -> bool:
    """Whether there is a block to make."""
    return self._task is not None

  def sample(
    self, policy: types.Policy, requests: Sequence[types.Request]
  ) -> list[types.Completion]:
    """Samples all requests with one policy; called by one thread at a time.

    Returns:
      One completion for each uid, in the order of `requests`: those that an
      engine of this policy makes alone.

    Raises:
      CancelledError: the lane was closed.
      RunError: no block was made for `stall_s`.
    """
    assert self._make is not None, "this run evaluates in turn"
    task = _Task(policy, self._make(policy))
    for request in requests:
      task.engine.add(request)
    with self.changed:
      self._moved = time.monotonic()
      self._task = task if task.engine.busy else None
      self.changed.notify_all()
      while self._task is task:
        self._check()
        self.changed.wait(_GLANCE_S)
    return [task.done[uid] for request in requests for uid in request.uids]

  @property
  def moved(self) -> float:
    """When something was asked for or made last, by time.monotonic()."""
    return self._moved

  def block(self, clock: clocks.Clock, moved: Callable[[], None]) -> None:
    """Makes the next blocks, if any; called by the thread that samples.

    Args:
      clock: accounts for them.
      moved: told of each, under `changed`.
    """
    for _ in range(self._blocks):
      task = self._task
      if task is None:
        return
      with clock.span("generation", "eval", "evaluate"):
        made = task.engine.step(task.policy.params, task.policy.version)
      with self.changed:
        # Nobody trains on these: the experts that they went through may go.
        done = [dataclasses.replace(one, routing=None) for one in made]
        task.done |= {completion.uid: completion for completion in done}
        self._moved = time.monotonic()
        moved()
        if not task.engine.busy and self._task is task:
          self._task = None
          self.changed.notify_all()

  def close(self) -> None:
    """Ends what waits: no block will be made any more."""
    with self.changed:
      self._closed = True
      self.changed.notify_all()

  def _check(self) -> None:
    late = time.monotonic() - self._moved > self._stall_s
    if not late and not self._closed:
      return
    self._task = None
    if self._closed:
      raise concurrent.futures.CancelledError
    raise types.RunError(
      f"evaluation: expected a block within {self._stall_s:g} s "
      "(stream.stall_s), got none"
    )


class Tests:
  """At most one evaluation beside training; called by the trainer.

  Attributes:
    due: whether the state after a step is evaluated.
  """

  def __init__(
    self,
    lane: Lane,
    score: Score,
    *,
    due: Callable[[int], bool],
    log: Callable[[int, Mapping[str, float]], None],
    clock: clocks.Clock,
    stopping: Callable[[], bool],
    patience_s: float,
  ) -> None:
    """Begins nothing.

    Args:
      lane: that `score` samples by.
      score: evaluates a policy; called in a thread of its own.
      due: whether the state after a step is evaluated.
      log: takes step and metrics of an evaluation that has ended.
      clock: accounts for the waits of training.
      stopping: whether the run was asked to stop.
      patience_s: longest time in which nothing of an evaluation moves, its
        rewards included.
    """
    self._lane, self._score, self.due = lane, score, due
    self._patience_s = patience_s
    self._log, self._clock, self._stopping = log, clock, stopping
    self._open: tuple[int, concurrent.futures.Future] | None = None
    self._thread: threading.Thread | None = None
    self._closed = False

  def __call__(self, policy: types.Policy, step: int) -> dict[str, float]:
    """Logs what has ended; begins an evaluation if it is due.

    The one before ends first, and training waits for it.

    Args:
      policy: of the state after `step`.
      step: batches trained.

    Returns:
      Nothing: the metrics go to `log`, once they are there.

    Raises:
      RunError: the one before took too long.
      Exception: whatever it raised.
    """
    self._collect()
    if self.due(step):
      self._wait()
      if self._open is None and not self._stopping():
        self._begin(policy, step)
    return {}

  def finish(self) -> None:
    """Waits for what is under way, and logs it; not once the run is to stop.

    What is abandoned then is not logged. Raises as a call does.
    """
    self._wait()
    if self._open is not None:
      _say_abandoned(self._open[0])
      self.close()

  def close(self) -> None:
    """Abandons what is under way, and waits a moment for its thread."""
    self._closed, self._open = True, None
    self._lane.close()
    if self._thread is not None:
      self._thread.join(_GRACE_S)

  def _begin(self, policy: types.Policy, step: int) -> None:
    future = concurrent.futures.Future()
    # A daemon: an environment that hangs must not keep the process alive.
    self._thread = threading.Thread(
      target=self._work, args=(policy, future), name="evaluation", daemon=True
    )
    self._open = step, future
    self._thread.start()

  def _work(
    self, policy: types.Policy, future: concurrent.futures.Future
  ) -> None:
    try:
      future.set_result(self._score(policy, self._ends))
    except concurrent.futures.CancelledError:
      future.set_result({})  # Why, the thread that samples says.
    except BaseException as error:
      future.set_exception(error)  # For the trainer to raise.

  def _ends(self) -> bool:
    return self._closed or self._stopping()

  def _wait(self) -> None:
    """Waits for the end of what is under way, or for the run to stop.

    Raises:
      RunError: nothing of it moved for so long that it hangs.
    """
    if self._open is None:
      return
    step, future = self._open
    begun = time.monotonic()
    with self._clock.span("training", "eval", "await"):
      while not future.done() and not self._stopping():
        concurrent.futures.wait([future], _GLANCE_S)
        still = time.monotonic() - max(begun, self._lane.moved)
        if still > self._patience_s and not future.done():
          raise types.RunError(
            f"evaluation of step {step}: expected a block or its rewards "
            f"within {self._patience_s:g} s (stream.stall_s + "
            "evaluation.timeout_s), got none"
          )
    self._collect()

  def _collect(self) -> None:
    """Logs what has ended; raises what it raised."""
    if self._open is None or not self._open[1].done():
      return
    (step, future), self._open = self._open, None
    # A signal may have ended the reward workers, too.
    failed = future.exception() is not None
    if self._stopping() and (failed or not future.result()):
      _say_abandoned(step)
    elif values := future.result():
      self._log(step, values)


def _say_abandoned(step: int) -> None:
  logging.warning(
    "evaluation of step %d: abandoned, as the run is to stop; the same command "
    "makes it again if it continues from a checkpoint of that step",
    step,
  )
