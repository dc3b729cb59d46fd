"""The groups of a stream between admission and batch; no threads, no waits.

Whoever calls holds the stream's lock.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxrl_post import types
from jaxrl_post.data import choice, curriculum, difficulty
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.data import prompts as prompt_sets
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import events, multi_turn, schedule, single_turn
from jaxrl_post.envs import ledger as ledgers

# Prompts to requests, completions to rollouts.
Env: TypeAlias = single_turn.SingleTurn | multi_turn.MultiTurn


@runtime_checkable
class Engine(Protocol):
  """What the stream needs of `sampling.engine.Engine`."""

  @property
  def between(self) -> str:
    """State of generation in a step while no program of it runs."""
    ...

  @property
  def room(self) -> int:
    """Rows that are free."""
    ...

  @property
  def busy(self) -> bool:
    """Whether a step would make tokens."""
    ...

  @property
  def seats(self) -> Sequence[types.Seat]:
    """Rows of the completions of the last step; not of those elsewhere."""
    ...

  def add(self, request: types.Request) -> None:
    """Queues a group."""
    ...

  def step(
    self,
    params: types.Tree,
    version: int,
    launched: Callable[[str, Any], None],
  ) -> list[types.Completion] | None:
    """Makes one block and returns what ended in it; tells of its programs.

    Returns:
      None if it made no block, and waited for others in vain.
    """
    ...

  def partials(self) -> tuple[types.Partial, ...]:
    """Returns the completions that are half made and can be continued."""
    ...

  def renew(self) -> None:
    """Has the next step take its weights for newer ones, whatever they are."""
    ...

  def release(self, uids: Collection[int]) -> None:
    """Frees what is held of completions that will not go on."""
    ...


@dataclasses.dataclass(frozen=True)
class Published:
  """Weights, and when they came: time.monotonic()."""

  policy: types.Policy
  updated_at: float | None
  at: float

  def sync_seconds(self, begun: float) -> dict[str, float]:
    """Returns `Stream.sync_seconds`, now that they have arrived.

    Args:
      begun: when the engine began to look.
    """
    if self.updated_at is None:
      return {}
    now = time.monotonic()
    return {
      "sync/latency_s": now - self.updated_at,
      "sync/reshard_s": self.at - self.updated_at,
      "sync/swap_s": begun - self.at,
      "sync/copy_s": now - begun,
    }


@dataclasses.dataclass
class _Group:
  """A group while its rollouts come in, in any order.

  Attributes:
    prompt: that they answer.
    sampled: rollouts without reward yet, by uid.
    scored: those that have come back.
  """

  prompt: types.Prompt
  sampled: dict[int, types.Rollout] = dataclasses.field(default_factory=dict)
  scored: dict[int, types.Rollout] = dataclasses.field(default_factory=dict)

  def whole(self) -> types.Group:
    """Returns the group with its rollouts by uid."""
    rollouts = tuple(self.scored[uid] for uid in sorted(self.scored))
    return types.Group(prompt=self.prompt, rollouts=rollouts)


class Work:
  """Ledger, frontier and groups, moved together.

  Attributes:
    ledger: where every group is.
    frontier: which draws have left, or were passed over.
    counters: what was made.
    next_uid: the draw that is admitted next, if the data has not ended.
    held: outcomes of groups that are known, and not entered yet, in order.
  """

  def __init__(
    self,
    ledger: ledgers.Ledger,
    *,
    env: Env,
    prompts: prompt_sets.Prompts,
    frontier: frontiers.Frontier,
    filter_zero_signal: bool,
    note: Callable[[events.Event], None],
  ) -> None:
    """Starts without any group.

    Args:
      ledger: from `ledgers.start`.
      env: prompts to requests, completions to rollouts.
      prompts: what to ask, by uid.
      frontier: which uids are done already.
      filter_zero_signal: whether groups whose rewards all agree leave.
      note: called with each event that is applied.
    """
    self._env, self._prompts, self._note = env, prompts, note
    self._filters = filter_zero_signal
    self._groups: dict[int, _Group] = {}
    self._steps: dict[int, int] = {}
    self.held: list[ledgers.Score | ledgers.Filter | ledgers.Fail] = []
    self._reasons: dict[int, str] = {}
    self.ledger, self.frontier = ledger, frontier
    self.counters = cuts.Counters()
    self._sum()
    self._begin()

  @property
  def exhausted(self) -> bool:
    """Whether the data has ended."""
    return self.next_uid >= len(self._prompts)

  @property
  def ended(self) -> bool:
    """Whether the data has ended and cannot fill another batch."""
    short = len(self.ledger.outstanding) < self.ledger.groups_per_step
    return self.exhausted and short

  @property
  def window(self) -> int:
    """Groups that may be admitted; 0 when the data has ended."""
    return 0 if self.exhausted else ledgers.window(self.ledger)

  @property
  def up_to_date(self) -> bool:
    """Whether the weights of the newest batch have been handed over."""
    return self.ledger.version == self.ledger.step

  def awaited(self) -> str:
    """Says why the next batch is not ready."""
    states = self._states_of_next() - {"ready"}
    return "reward_pending" if states == {"scoring"} else "queue_empty"

  def idles_for(self, current: Published | None) -> str:
    """Says what generation waits for when it has nothing to sample.

    Args:
      current: weights that the engine samples with.
    """
    if current is None:
      return "weights_pending"
    states = {e.state for e in self.ledger.outstanding}
    if "scoring" in states:
      return "reward_pending"
    full = ledgers.batch(self.ledger)
    return "queue_full" if full else "lag_gate"

  def queue(self) -> dict[str, float]:
    """Returns how many groups are `outstanding`, and `ready` to be trained."""
    entries = self.ledger.outstanding
    ready = sum(entry.state == "ready" for entry in entries)
    return {"outstanding": len(entries), "ready": ready}

  def facts(
    self, current: Published | None, newest: Published | None, engine: Engine
  ) -> schedule.Facts:
    """Returns what a schedule may look at.

    Args:
      current: weights that the engine samples with.
      newest: weights that the trainer has handed over.
      engine: that samples.
    """
    book, n = self.ledger, self.ledger.groups_per_step
    ready = len(book.outstanding) >= n and self._states_of_next() == {"ready"}
    return schedule.Facts(
      current=None if current is None else current.policy.step,
      newest=None if newest is None else newest.policy.step,
      window=self.window,
      room=engine.room,
      busy=engine.busy,
      scoring=sum(len(group.sampled) for group in self._groups.values()),
      held=len(self.held),
      complete=book.step > book.version or ready,
    )

  def apply(self, event: ledgers.Event) -> None:
    """Moves the ledger."""
    self.ledger = ledgers.apply(self.ledger, event)
    self._note(event)

  def stop(self) -> None:
    """Admits nothing more; no event, since it is of no other run."""
    self.ledger = ledgers.apply(self.ledger, ledgers.Stop())

  def publish(self, policy: types.Policy) -> None:
    """Enters newer weights."""
    newer = policy.step > self.ledger.version
    self._steps[policy.version] = policy.step
    self.apply(ledgers.Publish(policy.step))
    waiting = self.ledger.outstanding
    oldest = waiting[0].admitted if waiting else policy.step
    self._steps = {v: s for v, s in self._steps.items() if s >= oldest}
    if newer:
      self._learn()
    self._pass_over()

  def admit(self) -> types.Request:
    """Begins the next group; returns what to sample."""
    prompt = self._prompts[self.next_uid]
    self.apply(ledgers.Admit(prompt.uid))
    self._groups[prompt.uid] = _Group(prompt)
    self.next_uid = next(self._uids)
    self._pass_over()
    return self._env.request(prompt)

  def book(
    self, completions: Iterable[types.Completion]
  ) -> list[types.Rollout]:
    """Enters completions; returns the rollouts of groups that are still here.

    Returns:
      Those that are to be scored.
    """
    rollouts = []
    for completion in completions:
      self.counters.generated += 1
      made = sum(version >= 0 for version in completion.versions)
      self.counters.sampled_tokens += made
      uid = self._env.owner(completion.uid)
      group = self._groups.get(uid)
      if group is None:  # Dropped while it was sampled.
        continue
      for step, tokens in self._by_step(completion).items():
        self.apply(ledgers.Block(uid, tokens, step))
      rollout = self._env.rollout(group.prompt, completion)
      group.sampled[completion.uid] = rollout
      if len(group.sampled) + len(group.scored) == self._env.group_size:
        self.apply(ledgers.Finish(uid))
      rollouts.append(rollout)
    return rollouts

  def score(self, rollout: types.Rollout) -> None:
    """Takes a rollout with its reward; the last one of a group settles it."""
    uid = rollout.prompt.uid
    group = self._groups.get(uid)
    if group is None:
      return
    del group.sampled[rollout.completion.uid]
    group.scored[rollout.completion.uid] = rollout
    if len(group.scored) == self._env.group_size:
      self.held.append(self._outcome(uid, group))

  def settle(self, allows: Callable[[ledgers.Event], bool]) -> list[str]:
    """Enters the outcomes that are known, as far as it is allowed.

    Returns:
      Of each group that left untrained, why.
    """
    reasons = []
    for event in [*self.held]:
      if event.uid not in self._groups:  # Dropped meanwhile.
        self.held.remove(event)
        self._reasons.pop(event.uid, None)
      elif allows(event):
        self.held.remove(event)
        if isinstance(event, ledgers.Score):
          self.apply(event)
        else:
          reasons.append(self._reasons.pop(event.uid))
          self.leave(event)
    return reasons

  def leave(self, event: ledgers.Filter | ledgers.Fail | ledgers.Drop) -> None:
    """Lets a group go untrained."""
    self.apply(event)
    self._finish(self._groups.pop(event.uid))
    self.counters.left_in_step += 1

  def take(self, uids: tuple[int, ...]) -> list[types.Group]:
    """Hands out a batch, by uid."""
    self.apply(ledgers.Consume(uids))
    self.counters.left_in_step = 0
    groups = [self._groups.pop(uid) for uid in sorted(uids)]
    for group in groups:
      self._finish(group)
    return [group.whole() for group in groups]

  def cut(self, partials: Iterable[types.Partial], events: int) -> cuts.Cut:
    """Returns all that is needed to go on from here.

    Args:
      partials: completions that the engine has half made.
      events: written so far.
    """
    begun: dict[int, list[types.Partial]] = {}
    for partial in partials:
      begun.setdefault(self._env.owner(partial.uid), []).append(partial)
    groups = [
      cuts.Open(
        uid=uid,
        begun=tuple(begun.get(uid, ())),
        sampled=tuple(r.completion for r in group.sampled.values()),
        scored=tuple(group.scored.values()),
      )
      for uid, group in self._groups.items()
    ]
    return cuts.Cut(
      ledger=self.ledger,
      frontier=self.frontier,
      groups=tuple(groups),
      steps=dict(self._steps),
      counters=dataclasses.replace(self.counters),
      events=events,
    )

  def restore(
    self, cut: cuts.Cut
  ) -> tuple[list[types.Request], list[types.Rollout]]:
    """Goes on from a cut, instead of starting.

    Returns:
      What is left to sample, and the rollouts that are to be scored.
    """
    saved = cut.ledger
    kept = {e.uid for e in saved.outstanding if e.state != "ready"}
    self.ledger = ledgers.restore(saved, self.ledger, kept)
    self.frontier = cut.frontier
    # A run that ended by `max_left` must not end at once each time.
    self.counters = dataclasses.replace(cut.counters, left_in_step=0)
    self._steps = dict(cut.steps)
    here = {entry.uid for entry in self.ledger.outstanding}
    requests, rollouts = [], []
    for was in cut.groups:
      if was.uid in here:
        group = _Group(self._prompts[was.uid])
        self._groups[was.uid] = group
        requests += self._rest(group, was)
        rollouts += group.sampled.values()
    self._begin()
    self._pass_over()
    return requests, rollouts

  def _begin(self) -> None:
    """Goes to the first draw that has not begun."""
    self._uids = self._pending()
    self.next_uid = next(self._uids)

  def _pass_over(self) -> None:
    """Goes on to the next draw whose prompt does not rest."""
    if self.exhausted:
      return
    draws = len(self._prompts)
    coming = itertools.takewhile(lambda uid: uid < draws, self._pending())
    number, after = choice.pass_over(self._prompts, self.frontier, coming)
    if not number:
      return
    uids = tuple(itertools.islice(self._pending(), number))
    self.apply(ledgers.Pass(uids))
    self.frontier = frontiers.finish(after, *uids)
    self._uids = self._pending()
    self.next_uid = next(self._uids)

  def _finish(self, group: _Group) -> None:
    """Marks a draw as done, and notes what a whole group says about it."""
    uid = group.prompt.uid
    self.frontier = frontiers.finish(self.frontier, uid)
    rewards = [rollout.earned for rollout in group.scored.values()]
    if len(rewards) == self._env.group_size:
      self.frontier = choice.note(self._prompts, self.frontier, uid, rewards)

  def _learn(self) -> None:
    """Lets what was noted count: with new weights, which no clock decides."""
    self.frontier = choice.count(self._prompts, self.frontier)
    self._sum()

  def _sum(self) -> None:
    """Counts what is known of prompts and tasks."""
    pool, ladder = self._prompts.pool, self._prompts.ladder
    if pool is not None:
      always, never = difficulty.sums(pool, self.frontier.evidence)
      self.counters.always, self.counters.never = always, never
    if ladder is not None:
      self.counters.levels = curriculum.sums(ladder, self.frontier.levels)

  def _rest(self, group: _Group, was: cuts.Open) -> list[types.Request]:
    """Fills a group from a cut; returns what of it is left to sample."""
    for completion in was.sampled:
      rollout = self._env.rollout(group.prompt, completion)
      group.sampled[completion.uid] = rollout
    group.scored = {r.completion.uid: r for r in was.scored}
    whole = self._env.request(group.prompt)
    done = group.sampled.keys() | group.scored.keys()
    uids = tuple(uid for uid in whole.uids if uid not in done)
    entries = {e.uid: e.state for e in self.ledger.outstanding}
    if entries[was.uid] == "scoring" and not group.sampled:
      self.held.append(self._outcome(was.uid, group))
    if not uids:
      return []
    return [dataclasses.replace(whole, uids=uids, begun=was.begun)]

  def _outcome(
    self, uid: int, group: _Group
  ) -> ledgers.Score | ledgers.Filter | ledgers.Fail:
    rewards = [rollout.earned for rollout in group.scored.values()]
    valid = [reward for reward in rewards if math.isfinite(reward)]
    if not valid:
      self._reasons[uid] = next(iter(group.scored.values())).failure
      return ledgers.Fail(uid)
    if self._filters and max(valid) == min(valid):
      self._reasons[uid] = f"all rewards {valid[0]:g}"
      return ledgers.Filter(uid)
    return ledgers.Score(uid)

  def _by_step(self, completion: types.Completion) -> Mapping[int, int]:
    """Counts tokens by the ledger's version of the weights that made them.

    An update that was skipped leaves the policy version as it was; the newest
    batch with these weights is theirs.
    """
    counts: dict[int, int] = {}
    for version in (v for v in completion.versions if v >= 0):
      step = self._steps[version]
      counts[step] = counts.get(step, 0) + 1
    return counts

  def _states_of_next(self) -> set[str]:
    due = self.ledger.outstanding[: self.ledger.groups_per_step]
    return {entry.state for entry in due}

  def _pending(self) -> Iterator[int]:
    """Yields the draws that have not begun."""
    taken = {entry.uid for entry in self.ledger.outstanding}
    uids = frontiers.pending(self.frontier)
    return (uid for uid in uids if uid not in taken)
