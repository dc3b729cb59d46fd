"""A run on a virtual clock: the real ledger, and costs instead of devices.

Both stages are coroutines that yield what they do next and for how long, or
that they wait. They do what `envs.stream` and `sampling.engine` do, in the same
order: blocks of tokens, rows that are refilled between two of them, newer
weights that take effect there, groups that the ledger admits and hands out.
"""

import collections
import dataclasses
import heapq
import random
from collections.abc import Iterator

from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.planning import costs as costs_lib

# What a stage does and for how long, in seconds; None: it waits.
_Turn = tuple[str, float] | None
_STAGES = ("generation", "training")
# What is done on devices, where one stage may be in the way of the other.
_WORK = ("busy", "sync")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a setting gives, in its steady state.

  Attributes:
    step_s: seconds of a step.
    consumed_per_device_hour: trained rollouts for an hour of a device.
    generation_idle: part of the time in which generation waited.
    training_idle: likewise of training, its host's work included.
    staleness_mean: lag of trained tokens, in batches.
    staleness_max: largest such lag.
    ledger: at the end.
  """

  step_s: float
  consumed_per_device_hour: float
  generation_idle: float
  training_idle: float
  staleness_mean: float
  staleness_max: int
  ledger: ledgers.Ledger


@dataclasses.dataclass
class _Group:
  """A group in the making.

  Attributes:
    left: rollouts that have not ended.
    tokens: of those that have, by version.
  """

  left: int
  tokens: collections.Counter[int]


def simulate(
  setting: costs_lib.Setting,
  costs: costs_lib.Costs,
  *,
  steps: int = 24,
) -> Outcome:
  """Runs a setting on a virtual clock.

  Args:
    setting: the sizes.
    costs: of the parts.
    steps: that are looked at, after those in which the run gets going.

  Returns:
    What it gives. Equal arguments give equal outcomes, and lengths and fates
    are drawn from one seed in every setting.
  """
  return _Run(setting, costs).go(steps)


class _Run:
  """A run on its way."""

  def __init__(
    self, setting: costs_lib.Setting, costs: costs_lib.Costs
  ) -> None:
    self.setting, self.costs = setting, costs
    self.ledger = ledgers.start(setting.groups_per_step, setting.max_lag)
    self.random = random.Random(0)
    self.now = 0.0
    # Steps in which the run gets going; those done; seconds of either stage in
    # each kind of state.
    self.first, self.steps = setting.max_lag + 3, 0
    self.spent = collections.defaultdict[tuple[str, str], float](float)
    self.lags: collections.Counter[int] = collections.Counter()
    # Generation: versions it has sampled with and since which column; ends of
    # rows, as columns; groups that wait for rows, and prompts of them read; and
    # whether the weights have yet to be looked at.
    self.taken: list[tuple[int, int]] = [(0, 0)]
    self.unchecked = False
    self.column = self.last = self.read = 0
    self.running: list[tuple[int, int, int]] = []
    self.waiting: collections.deque[list[int]] = collections.deque()
    self.groups: dict[int, _Group] = {}
    self.due: collections.deque[tuple[float, int]] = collections.deque()
    self.batches: dict[int, collections.Counter[int]] = {}

  def go(self, steps: int) -> Outcome:
    """Runs until so many steps are done beyond the first ones."""
    begun, since = 0.0, self.spent.copy()
    stages = {"generation": self._generate(), "training": self._train()}
    # Of each stage, what it does and how long it takes alone; None: it waits.
    doing: dict[str, _Turn] = dict.fromkeys(_STAGES)
    while self.steps < self.first + steps:
      if self.steps == self.first and not begun:
        begun, since = self.now, self.spent.copy()
      for stage in _STAGES * 2:  # What one does may be what the other awaits.
        doing[stage] = doing[stage] or next(stages[stage])
      self._pass(doing)
    wall = self.now - begun
    idle = {
      stage: 1
      - sum(self.spent[stage, k] - since[stage, k] for k in _WORK) / wall
      for stage in _STAGES
    }
    tokens = sum(self.lags.values())
    hours = self.setting.devices * wall / 3600
    return Outcome(
      step_s=wall / steps,
      consumed_per_device_hour=steps * self.setting.rollouts / hours,
      generation_idle=max(0.0, idle["generation"]),
      training_idle=max(0.0, idle["training"]),
      staleness_mean=sum(k * n for k, n in self.lags.items()) / tokens,
      staleness_max=max(self.lags),
      ledger=self.ledger,
    )

  def _pass(self, doing: dict[str, _Turn]) -> None:
    """Lets time pass until something ends."""
    works = {stage: turn for stage, turn in doing.items() if turn}
    devices = [stage for stage, (kind, _) in works.items() if kind in _WORK]
    pace = self.costs.slowdown(self.setting) if len(devices) == 2 else 1.0
    ends = {stage: left * pace for stage, (_, left) in works.items()}
    # Generation enters rewards between blocks; they wake it only if it waits.
    wakes = self.due and "generation" not in works
    if wakes:
      ends["rewards"] = self.due[0][0] - self.now
    assert ends, f"both stages wait for each other: {self.ledger}"
    ending = min(ends, key=lambda name: ends[name])
    passed = max(0.0, ends[ending])
    self.now += passed
    if ending == "rewards":
      self.now = self.due[0][0]
    for stage, (kind, left) in works.items():
      self.spent[stage, kind] += passed
      rest = left - passed / pace
      doing[stage] = None if stage == ending else (kind, max(0.0, rest))

  def _apply(self, event: ledgers.Event) -> None:
    self.ledger = ledgers.apply(self.ledger, event)

  # ---------------------------------------------------------------- training

  def _train(self) -> Iterator[_Turn]:
    """Takes batch after batch, as `loop.run` does."""
    while True:
      uids = ledgers.batch(self.ledger)
      if not uids:
        yield None
        continue
      version = self.ledger.step
      self._apply(ledgers.Consume(uids))
      made = sum(map(self.batches.pop, uids), collections.Counter[int]())
      if self.steps >= self.first:
        self.lags.update({version - v: n for v, n in made.items()})
      yield "host", self.costs.pack(self.setting)
      yield "busy", self.costs.update(self.setting)
      yield "sync", self.costs.publish_s
      if self.setting.asynchronous:  # Or else nothing is sampled meanwhile.
        self._apply(ledgers.Publish(self.ledger.step))
      yield "host", self.costs.host_s
      self._apply(ledgers.Publish(self.ledger.step))
      self.steps += 1

  # -------------------------------------------------------------- generation

  def _generate(self) -> Iterator[_Turn]:
    """Makes block after block, as `Stream._pump` does."""
    while True:
      self._settle()
      newer = self.ledger.version > self.taken[-1][1]
      if newer and not (self.setting.drain and self._busy):
        self._take()
      self._admit()
      if not self._busy:
        yield None
        continue
      if self.unchecked:
        self.unchecked = False
        yield "sync", self.costs.take_s
      calls, columns = self._refill()
      seconds = columns * self.costs.column(self.setting)
      yield "busy", seconds + calls * self.costs.call(self.setting)
      ended = self._advance(columns)
      yield "host", self.costs.block_s + len(ended) * self.costs.rollout_s
      self._book(ended)

  @property
  def _busy(self) -> bool:
    return bool(self.waiting or self.running)

  def _settle(self) -> None:
    """Enters the rewards that have come."""
    while self.due and self.due[0][0] <= self.now:
      _, uid = self.due.popleft()
      if self.random.random() < self.costs.left:
        self._apply(ledgers.Filter(uid))
        del self.batches[uid]
      else:
        self._apply(ledgers.Score(uid))

  def _take(self) -> None:
    self.taken.append((self.column, self.ledger.version))
    self.unchecked = True
    self.read = 0  # What waits is read again by the newest weights.

  def _admit(self) -> None:
    """Begins groups while the window is open and a row is free."""
    if self.setting.drain and self.ledger.version > self.taken[-1][1]:
      return
    waiting = sum(len(lengths) - 1 for lengths in self.waiting)
    room = self.setting.rows - len(self.running) - waiting
    for _ in range(ledgers.window(self.ledger)):
      if room <= 0:
        return
      uid, size = self.ledger.admitted, self.setting.group_size
      self._apply(ledgers.Admit(uid))
      self.groups[uid] = _Group(size, collections.Counter())
      drawn = random.Random(uid).choices(self.costs.lengths, k=size)
      most = self.setting.max_tokens
      self.waiting.append([uid, *(min(n, most) for n in drawn)])
      room -= size

  def _refill(self) -> tuple[int, int]:
    """Fills free rows; returns calls that read prompts, and columns to come."""
    calls = 0
    while self.waiting and len(self.running) < self.setting.rows:
      if not self.read:
        calls, self.read = (
          calls + 1,
          min(self.setting.prompts, len(self.waiting)),
        )
      lengths = self.waiting[0]
      while len(lengths) > 1 and len(self.running) < self.setting.rows:
        end = self.column + lengths.pop()
        self.last = max(self.last, end)
        heapq.heappush(self.running, (end, self.column, lengths[0]))
      if len(lengths) == 1:
        self.waiting.popleft()
        self.read -= 1
    return calls, min(self.setting.block, self.last - self.column)

  def _advance(self, columns: int) -> list[tuple[int, int, int]]:
    """Makes columns; returns the rows that have ended in them."""
    self.column += columns
    ended = []
    while self.running and self.running[0][0] <= self.column:
      ended.append(heapq.heappop(self.running))
    return ended

  def _book(self, ended: list[tuple[int, int, int]]) -> None:
    """Enters completions; a group's rewards are asked for with its last one."""
    for end, begin, uid in ended:
      group = self.groups[uid]
      group.tokens.update(self._by_version(begin, end))
      group.left -= 1
      if not group.left:
        for version, tokens in sorted(group.tokens.items()):
          self._apply(ledgers.Block(uid, tokens, version))
        self._apply(ledgers.Finish(uid))
        self.batches[uid] = self.groups.pop(uid).tokens
        self.due.append((self.now + self.costs.reward_s, uid))

  def _by_version(self, begin: int, end: int) -> dict[int, int]:
    """Returns how many tokens of a row were sampled by each version."""
    counts: dict[int, int] = {}
    for since, version in reversed(self.taken):
      if since < end:
        counts[version] = end - max(since, begin)
        end = since
      if since <= begin:
        break
    return counts
