"""Many servers as one engine: groups out, completions back, none lost.

A group goes to the server that owes the least, and the next turn of a
completion to the one that holds it. What a server owed when it died is asked
again: a rollout's randomness is its uid and position, so the same weights give
the same tokens, wherever they are sampled.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxrl_post import types
from jaxrl_post.sampling import server as servers

# Longest wait of one step: its caller has other work between two of them.
_TICK_S = 0.02

# An evaluation numbers its completions anew.
_Key: TypeAlias = tuple[bool, int]


@runtime_checkable
class Member(Protocol):
  """A server, here or in another process. No call waits for its work."""

  @property
  def name(self) -> str:
    """What people call it."""
    ...

  def submit(self, order: servers.Order) -> None:
    """Sends an order."""
    ...

  def publish(self, policy: types.Policy) -> None:
    """Sends weights, or word of them."""
    ...


@dataclasses.dataclass
class _Debt:
  """The uids that a member still owes, and its time in blocks."""

  orders: dict[_Key, servers.Order] = dataclasses.field(default_factory=dict)
  busy_s: float = 0.0


class Fleet:
  """Has the methods of an engine, over several members.

  Attributes:
    between: all the time of a step is taken for busy: some member has work.
    seats: none: whose rows the members have, only they know.
  """

  between = "busy"
  seats: tuple[types.Seat, ...] = ()

  def __init__(
    self, members: Sequence[Member], *, rows: int, stall_s: float
  ) -> None:
    """Nothing is sent yet.

    Args:
      members: the servers; each reports to `report` by its index.
      rows: completions in flight of each.
      stall_s: longest wait for any completion, in seconds.
    """
    self._members = tuple(members)
    self._rows, self._stall_s = rows, stall_s
    self._debts = [_Debt() for _ in members]
    self._waiting: collections.deque[types.Request] = collections.deque()
    self._done: dict[_Key, types.Completion] = {}
    # Which member holds a completion for another turn, the last ones last.
    self._homes: dict[_Key, int] = {}
    self._policy: types.Policy | None = None
    self._error: BaseException | None = None
    self._changed = threading.Condition(threading.RLock())
    self._moved = time.monotonic()
    self._sent_at: dict[int, float] = {}
    self._first: dict[str, float] = {}
    self.restarts = 0

  @property
  def room(self) -> int:
    """Rows that no completion of training has, or waits for."""
    with self._changed:
      return self._rows * len(self._members) - self._num_open()

  @property
  def busy(self) -> bool:
    """Whether some completion of training is not back yet."""
    with self._changed:
      return self._num_open() > 0

  def report(self, index: int, made: servers.Report) -> None:
    """Takes the report of a member; from any thread.

    Completions that it does not owe are left out: it was taken for dead, and
    somebody else has been asked.
    """
    with self._changed:
      debt = self._debts[index]
      for completion in made.completions:
        key = (made.evaluation, completion.uid)
        if debt.orders.pop(key, None) is not None:
          self._done[key] = completion
      debt.busy_s = made.busy_s
      self._note_first(made)
      self._moved = time.monotonic()
      if made.failure:
        name = self._members[index].name
        self._error = types.RunError(f"generation: {name}: {made.failure}")
      self._changed.notify_all()

  def resend(self, index: int, restart: Callable[[], None]) -> None:
    """Replaces a member's server by a new one, which knows nothing.

    It is sent the newest weights and all that the old one owed.

    Args:
      index: of the member.
      restart: starts the new one. Meanwhile nothing is sent to any member, so
        that no order reaches the new one twice.
    """
    with self._changed:
      restart()
      self.restarts += 1
      self._homes = {k: i for k, i in self._homes.items() if i != index}
      self._moved = time.monotonic()
      member, debt = self._members[index], self._debts[index]
      if self._policy is not None:
        member.publish(self._policy)
      uids: dict[int, list[int]] = {}
      for (_, uid), order in debt.orders.items():
        uids.setdefault(id(order), []).append(uid)
      for order in {id(o): o for o in debt.orders.values()}.values():
        left = tuple(uids[id(order)])
        begun = tuple(p for p in order.request.begun if p.uid in left)
        request = dataclasses.replace(order.request, uids=left, begun=begun)
        again = dataclasses.replace(order, request=request)
        debt.orders.update({(order.evaluation, uid): again for uid in left})
        member.submit(again)

  def metrics(self) -> dict[str, float]:
    """Returns how the members do.

    Returns:
      `fleet/members`; `fleet/restarts`, how many were replaced; `fleet/busy_s`,
      seconds that a member has spent on blocks so far, mean of the members;
      `fleet/first_s`, seconds from sending the newest weights that have been
      sampled with until the first report of them, absent before it.
    """
    with self._changed:
      busy = sum(debt.busy_s for debt in self._debts)
      return {
        "fleet/members": float(len(self._members)),
        "fleet/restarts": float(self.restarts),
        "fleet/busy_s": busy / len(self._members),
        **self._first,
      }

  def publish(self, policy: types.Policy) -> None:
    """Sends newer weights to every member; the newest of all only once."""
    with self._changed:
      if policy is not self._policy:
        self._policy = policy
        self._sent_at[policy.step] = time.monotonic()
        for member in self._members:
          member.publish(policy)

  def add(self, request: types.Request) -> None:
    """Queues a group."""
    with self._changed:
      self._waiting.append(request)

  def step(
    self,
    params: types.Tree,
    version: int,
    launched: Callable[[str, Any], None] | None = None,
  ) -> list[types.Completion]:
    """Sends what is queued and collects what has come back.

    Args:
      params: not read: members have what `publish` gave them.
      version: likewise.
      launched: likewise: their programs are not seen from here.

    Returns:
      Completions of training orders, by uid; none after a short wait.

    Raises:
      RunError: a member failed for good, or none reported for `stall_s`.
    """
    del params, version, launched
    with self._changed:
      while self._waiting:
        self._send(self._waiting.popleft(), evaluation=False)
      self._changed.wait_for(self._has_news, _TICK_S)
      self._check()
      uids = sorted(uid for evaluation, uid in self._done if not evaluation)
      return [self._done.pop((False, uid)) for uid in uids]

  def partials(self) -> tuple[types.Partial, ...]:
    """Returns nothing: what members have half made is sampled anew."""
    return ()

  def renew(self) -> None:
    """Does nothing: members tell newer weights by their version."""

  def release(self, uids: Collection[int]) -> None:
    """Forgets who holds them; members free their rows when others need one."""
    with self._changed:
      for uid in uids:
        self._homes.pop((False, uid), None)

  def generate(
    self, policy: types.Policy, requests: Sequence[types.Request]
  ) -> list[types.Completion]:
    """Samples all requests with one policy, spread over the members.

    Args:
      policy: must stay the newest one until this returns.
      requests: of an evaluation.

    Returns:
      One completion for each uid, in the order of `requests`.

    Raises:
      RunError: as `step`.
    """
    keys = [(True, uid) for request in requests for uid in request.uids]
    with self._changed:
      self.publish(policy)
      for request in requests:
        self._send(request, evaluation=True)
      while not all(key in self._done for key in keys):
        self._changed.wait(_TICK_S)
        self._check()
      return [self._done.pop(key) for key in keys]

  def _note_first(self, made: servers.Report) -> None:
    sent = self._sent_at.get(made.step)
    if sent is not None and not made.evaluation:
      self._first = {"fleet/first_s": time.monotonic() - sent}
      for step in [s for s in self._sent_at if s <= made.step]:
        del self._sent_at[step]

  def _num_open(self) -> int:
    owed = sum(not key[0] for debt in self._debts for key in debt.orders)
    waiting = sum(len(request.uids) for request in self._waiting)
    return owed + waiting + sum(not key[0] for key in self._done)

  def _has_news(self) -> bool:
    done = any(not evaluation for evaluation, _ in self._done)
    return done or self._error is not None

  def _check(self) -> None:
    if self._error is not None:
      raise self._error
    owing = [
      member.name
      for member, debt in zip(self._members, self._debts, strict=True)
      if debt.orders
    ]
    if owing and time.monotonic() - self._moved > self._stall_s:
      raise types.RunError(
        f"generation: expected completions within {self._stall_s:g} s "
        f"(stream.stall_s), got none from {', '.join(owing)}"
      )

  def _send(self, request: types.Request, *, evaluation: bool) -> None:
    assert self._policy is not None, "publish comes first"
    step = self._policy.step
    order = servers.Order(request=request, step=step, evaluation=evaluation)
    sizes = [len(debt.orders) for debt in self._debts]
    if not any(sizes):
      self._moved = time.monotonic()  # The wait begins now.
    keys = [(evaluation, uid) for uid in request.uids]
    homes = [self._homes.pop(key) for key in keys if key in self._homes]
    index = homes[0] if homes else sizes.index(min(sizes))
    if request.hold and not evaluation:
      self._homes |= dict.fromkeys(keys, index)
      # No more than these can be held.
      for key in list(self._homes)[: -self._rows * len(self._members)]:
        del self._homes[key]
    for uid in request.uids:
      self._debts[index].orders[evaluation, uid] = order
    self._members[index].submit(order)
