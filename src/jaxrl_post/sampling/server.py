"""An engine in a thread of its own, which samples for whoever sends orders."""

import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxrl_post import types


@types.host_record
class Order:
  """A group to sample, and how new the weights must be.

  Attributes:
    request: what to sample.
    step: batches the trainer has consumed; older weights than that step's do
      not sample a token of it.
    evaluation: whether it is for a test, and not for training.
  """

  request: types.Request
  step: int
  evaluation: bool = False


@types.host_record
class Report:
  """What a server has made in one block, or how it failed.

  Attributes:
    completions: those that ended.
    evaluation: which orders they answer.
    step: of the weights that the block took.
    busy_s: seconds this server has spent on blocks since it was made.
    failure: why there will be no more; empty while all is well.
  """

  completions: tuple[types.Completion, ...] = ()
  evaluation: bool = False
  step: int = 0
  busy_s: float = 0.0
  failure: str = ""


@runtime_checkable
class Sampler(Protocol):
  """What a server needs of `engine.Engine`."""

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


class Server:
  """Samples orders with the newest weights it was given."""

  def __init__(
    self,
    sampler: Sampler,
    *,
    tester: Callable[[], Sampler],
    verify: Callable[[types.Policy], None],
    report: Callable[[Report], None],
  ) -> None:
    """Starts the thread.

    Args:
      sampler: answers the orders of training.
      tester: makes an engine for an evaluation; it is dropped afterwards.
      verify: raises if a policy's weights did not arrive whole; called once a
        policy, before its first block.
      report: takes what was made; called on the server's thread, which ends
        after a report of failure.
    """
    self._sampler, self._make_tester = sampler, tester
    self._verify, self._report = verify, report
    self._orders: list[Order] = []
    self._policy: types.Policy | None = None
    self._verified: types.Policy | None = None
    self._tester: Sampler | None = None
    self._closed = False
    self._changed = threading.Condition()
    self._busy_s = 0.0
    # A daemon: a block that hangs must not keep the process alive.
    self._thread = threading.Thread(
      target=self._work, name="server", daemon=True
    )
    self._thread.start()

  def submit(self, order: Order) -> None:
    """Queues an order; it waits until weights of its step are there."""
    with self._changed:
      self._orders.append(order)
      self._changed.notify_all()

  def publish(self, policy: types.Policy) -> None:
    """Hands over newer weights; sampling takes them at its next block."""
    with self._changed:
      self._policy = policy
      self._changed.notify_all()

  def close(self, deadline_s: float = 60.0) -> None:
    """Ends the thread after its block; orders that are left are dropped.

    Raises:
      RunError: the block did not end in time.
    """
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._thread.join(deadline_s)
    if self._thread.is_alive():
      raise types.RunError(
        f"server: expected the block to end within {deadline_s:g} s, got no end"
      )

  def _work(self) -> None:
    try:
      while self._turn():
        pass
    except BaseException as error:
      self._report(Report(failure=f"{type(error).__name__}: {error}"))
      raise

  def _turn(self) -> bool:
    """Waits for work and does a block of it; False once it is closed."""
    with self._changed:
      self._changed.wait_for(lambda: self._closed or self._has_work())
      if self._closed:
        return False
      policy = self._policy
      assert policy is not None, "without weights there is no work"
      ready = [order for order in self._orders if self._is_due(order)]
      self._orders = [o for o in self._orders if not self._is_due(o)]
    if policy is not self._verified:
      self._verify(policy)
      self._verified = policy
    for order in ready:
      self._engine_of(order).add(order.request)
    self._block(self._sampler, policy, evaluation=False)
    if self._tester is not None:
      self._block(self._tester, policy, evaluation=True)
      # Dropped when it is done: its cache is as large as that of training.
      self._tester = self._tester if self._tester.busy else None
    return True

  def _engine_of(self, order: Order) -> Sampler:
    if not order.evaluation:
      return self._sampler
    if self._tester is None:
      self._tester = self._make_tester()
    return self._tester

  def _has_work(self) -> bool:
    busy = self._sampler.busy or self._tester is not None
    return busy or any(self._is_due(order) for order in self._orders)

  def _is_due(self, order: Order) -> bool:
    return self._policy is not None and self._policy.step >= order.step

  def _block(
    self, sampler: Sampler, policy: types.Policy, *, evaluation: bool
  ) -> None:
    if not sampler.busy:
      return
    begun = time.monotonic()
    done = sampler.step(policy.params, policy.version)
    self._busy_s += time.monotonic() - begun
    if done:
      self._report(
        Report(
          completions=tuple(done),
          evaluation=evaluation,
          step=policy.step,
          busy_s=self._busy_s,
        )
      )
