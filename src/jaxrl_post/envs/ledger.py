"""The bounded-lag stream as a pure state machine: (ledger, event) -> ledger.

A *step* is one batch of `groups_per_step` groups; `version` counts the batches
whose update has been published. A group admitted at version v is in a step not
later than v + max_lag. Two rules give that bound and throw nothing away:

* admission: at version v at most (v + max_lag + 1) * groups_per_step groups
  have ever been admitted, those that left untrained not counted;
* consumption: earliest deadline first. A group that is not finished may be
  passed over only while every deadline, its own included, can still be kept;
  otherwise the trainer waits for it.

No clocks, threads or tokens here; `stream` runs it, the planner may too.
"""

import dataclasses
from typing import Literal

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Admit:
  """A group begins to be sampled."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Finish:
  """All rollouts of a group are sampled.

  Attributes:
    uid: the group.
    tokens: sampled in all of them.
  """

  uid: int
  tokens: int


@dataclasses.dataclass(frozen=True)
class Score:
  """A finished group has its rewards and may be trained."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Filter:
  """A scored group leaves untrained, by choice."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Fail:
  """A group leaves untrained, by fault."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Drop:
  """A group leaves untrained because it became older than the bound."""

  uid: int


@dataclasses.dataclass(frozen=True)
class Consume:
  """The trainer takes a batch."""

  uids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Publish:
  """The weights after `version` batches may be sampled from."""

  version: int


Event = Admit | Finish | Score | Filter | Fail | Drop | Consume | Publish


@dataclasses.dataclass(frozen=True)
class Entry:
  """A group that was admitted and has not left.

  Attributes:
    uid: the group.
    admitted: version at its admission; no token of it is older.
    state: what it waits for.
    tokens: sampled, once finished.
  """

  uid: int
  admitted: int
  state: Literal["sampling", "scoring", "ready"] = "sampling"
  tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Count:
  """Groups and their sampled tokens."""

  groups: int = 0
  tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Ledger:
  """Where every admitted group is.

  Attributes:
    groups_per_step: groups in a batch.
    max_lag: inclusive bound, in batches.
    on_stale: "wait" for groups at their deadline, or "drop" them.
    num_steps: batches of the run; no more is admitted than they need.
    version: newest published.
    step: batches consumed.
    outstanding: admitted and not left, in order of admission.
    admitted: ever.
    trained: left in a batch.
    filtered: left by choice.
    failed: left by fault.
    dropped: left by age.
  """

  groups_per_step: int
  max_lag: int
  on_stale: Literal["wait", "drop"] = "wait"
  num_steps: int | None = None
  version: int = 0
  step: int = 0
  outstanding: tuple[Entry, ...] = ()
  admitted: int = 0
  trained: Count = Count()
  filtered: Count = Count()
  failed: Count = Count()
  dropped: Count = Count()


def start(
  groups_per_step: int,
  max_lag: int,
  *,
  on_stale: Literal["wait", "drop"] = "wait",
  num_steps: int | None = None,
  step: int = 0,
) -> Ledger:
  """Returns the ledger of a run whose first `step` batches are trained."""
  trained = step * groups_per_step
  return Ledger(
    groups_per_step=groups_per_step,
    max_lag=max_lag,
    on_stale=on_stale,
    num_steps=num_steps,
    version=step,
    step=step,
    admitted=trained,
    trained=Count(groups=trained),
  )


def window(ledger: Ledger) -> int:
  """Returns how many groups may be admitted now."""
  n = ledger.groups_per_step
  lost = sum(c.groups for c in (ledger.filtered, ledger.failed, ledger.dropped))
  ahead = ledger.version + ledger.max_lag + 1
  if ledger.num_steps is not None:
    ahead = min(ahead, ledger.num_steps)
  return ahead * n - (ledger.admitted - lost)


def deadline(ledger: Ledger, entry: Entry) -> int:
  """Returns the last step that may train the group."""
  return entry.admitted + ledger.max_lag


def stale(ledger: Ledger) -> tuple[int, ...]:
  """Returns the groups that no step may train any more, to be dropped.

  Empty with on_stale="wait", by the two rules of the module. In general: those
  whose lag at the next step exceeds the bound.
  """
  return tuple(
    e.uid for e in ledger.outstanding if ledger.step > deadline(ledger, e)
  )


def batch(ledger: Ledger) -> tuple[int, ...]:
  """Returns the groups the next step trains, or () when it has to wait.

  Returns:
    `groups_per_step` uids of ready groups, earliest deadline first, such that
    the groups left behind can all keep theirs; or nothing.
  """
  if ledger.version < ledger.step or stale(ledger):
    return ()
  n = ledger.groups_per_step
  ready = [e for e in ledger.outstanding if e.state == "ready"]
  ready = sorted(ready, key=lambda e: (deadline(ledger, e), e.uid))[:n]
  if len(ready) < n:
    return ()
  chosen = {e.uid for e in ready}
  left = [e for e in ledger.outstanding if e.uid not in chosen]
  if ledger.on_stale == "wait" and not _feasible(ledger, left):
    return ()
  return tuple(e.uid for e in ready)


def _feasible(ledger: Ledger, left: list[Entry]) -> bool:
  """Whether steps after the next one can train all of `left` in time."""
  due = sorted(deadline(ledger, e) for e in left)
  # The i-th group by deadline leaves, at best, in step + 1 + i // n.
  first, n = ledger.step + 1, ledger.groups_per_step
  return all(first + i // n <= d for i, d in enumerate(due))


def apply(ledger: Ledger, event: Event) -> Ledger:
  """Moves the ledger by one event.

  Returns:
    The next ledger. Conserved: admitted = trained + filtered + failed +
    dropped + outstanding, in groups.

  Raises:
    RunError: the event is not possible in this state; the ledger would lie.
  """
  match event:
    case Admit(uid):
      _require(window(ledger) > 0, ledger, event, "an open window")
      taken = any(e.uid == uid for e in ledger.outstanding)
      _require(not taken, ledger, event, "a uid that is not outstanding")
      entry = Entry(uid, ledger.version)
      result = dataclasses.replace(
        ledger,
        admitted=ledger.admitted + 1,
        outstanding=(*ledger.outstanding, entry),
      )
    case Finish(uid, tokens):
      _find(ledger, event, uid, "sampling")
      result = _set(ledger, uid, state="scoring", tokens=tokens)
    case Score(uid):
      _find(ledger, event, uid, "scoring")
      result = _set(ledger, uid, state="ready")
    case Consume(uids):
      _require(uids == batch(ledger) != (), ledger, event, "the next batch")
      result = _leave(ledger, uids, "trained")
      result = dataclasses.replace(result, step=ledger.step + 1)
    case Publish(version):
      in_order = ledger.version <= version <= ledger.step
      _require(in_order, ledger, event, "a version in order")
      result = dataclasses.replace(ledger, version=version)
    case _:
      result = _depart(ledger, event)
  _conserved(result)
  return result


def _depart(ledger: Ledger, event: Filter | Fail | Drop) -> Ledger:
  match event:
    case Filter(uid):
      _find(ledger, event, uid, "scoring", "ready")
      return _leave(ledger, (uid,), "filtered")
    case Fail(uid):
      _find(ledger, event, uid, "sampling", "scoring")
      return _leave(ledger, (uid,), "failed")
    case Drop(uid):
      _require(uid in stale(ledger), ledger, event, "a stale group")
      return _leave(ledger, (uid,), "dropped")


def _leave(ledger: Ledger, uids: tuple[int, ...], why: str) -> Ledger:
  gone = [e for e in ledger.outstanding if e.uid in uids]
  count: Count = getattr(ledger, why)
  count = Count(
    count.groups + len(gone), count.tokens + sum(e.tokens for e in gone)
  )
  left = tuple(e for e in ledger.outstanding if e.uid not in uids)
  return dataclasses.replace(ledger, outstanding=left, **{why: count})


def _set(ledger: Ledger, uid: int, **changes: int | str) -> Ledger:
  entries = tuple(
    dataclasses.replace(e, **changes) if e.uid == uid else e
    for e in ledger.outstanding
  )
  return dataclasses.replace(ledger, outstanding=entries)


def _find(ledger: Ledger, event: Event, uid: int, *states: str) -> None:
  found = [e.state for e in ledger.outstanding if e.uid == uid]
  rule = f"an outstanding uid that is {' or '.join(states)}"
  _require(bool(found) and found[0] in states, ledger, event, rule)


def _require(holds: bool, ledger: Ledger, event: Event, rule: str) -> None:
  if not holds:
    raise types.RunError(f"ledger: {event}: expected {rule}, got {ledger}")


def _conserved(ledger: Ledger) -> None:
  left = (ledger.trained, ledger.filtered, ledger.failed, ledger.dropped)
  total = sum(c.groups for c in left) + len(ledger.outstanding)
  if total != ledger.admitted:
    raise types.RunError(
      f"ledger: expected {ledger.admitted} groups accounted for, got {total} "
      f"in {ledger}"
    )
