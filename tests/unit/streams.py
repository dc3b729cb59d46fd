"""Runs of a stream without any device, for tests of what they repeat.

The engine is a model of the real one: rows, blocks of columns, tokens that
depend on uid, place and weights alone, and a column for each token that is read
again. The weights are a hash of all that they were trained on.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import threading
import time
import zlib

from jaxrl_post import types
from jaxrl_post.data import difficulty, prompts, sources
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import events, schedule, single_turn, stream
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.sampling import rows as rows_lib

GROUP, BATCH, STEPS = 2, 2, 6
LATE_S = 10.0  # a test that waits this long has failed
FIRST = types.Policy(params=0, version=0, step=0)
ENV = single_turn.SingleTurn(GROUP, types.SamplingParams(), lambda ids: "")


def mixed(*numbers: int) -> int:
  """A number that all of the numbers decide, in one order."""
  return zlib.crc32(repr(numbers).encode()) & 0xFFFF


class Letters:
  """A tokenizer of one token a letter."""

  def prompt_ids(self, prompt):
    return [ord(x) for x in prompt], prompt


def data(
  size: int = 100, pool: difficulty.Pool | None = None, epochs: int | None = 1
) -> prompts.Prompts:
  return prompts.load(
    sources.Generated(lambda i: types.Example(prompt="a", reference=i), size),
    Letters(),
    max_tokens=4,
    seed=0,
    epochs=epochs,
    pool=pool,
  )


@dataclasses.dataclass
class Row:
  """A completion in the making; `behind` tokens are to be read again.

  Its turn began behind `turn` tokens.
  """

  uid: int
  tokens: list
  logprobs: list
  versions: list
  behind: int
  turn: int = 0


def any_length(uid: int) -> int:
  return 1 + mixed(uid) % 13


class Engine:
  """Rows in blocks, as `sampling.engine` has them.

  Attributes:
    script: called before each block.
    finish: how turns end.
  """

  between, seats = "busy", ()

  def __init__(
    self, *, recompute=False, rows: int = 5, length=any_length, finish="length"
  ):
    self.recompute, self.rows, self.length = recompute, rows, length
    self.finish = finish
    self.queue: list[Row] = []  # The first `rows` of them are in a row.
    self.version: int | None = None
    self.script = lambda: None

  @property
  def room(self) -> int:
    return self.rows - len(self.queue)

  @property
  def busy(self) -> bool:
    return bool(self.queue)

  def add(self, request: types.Request) -> None:
    begun = {p.uid: p for p in request.begun}
    for uid in request.uids:
      was = begun.get(uid)
      kept = (
        [list(x) for x in (was.tokens, was.logprobs, was.versions)]
        if was
        else [[], [], []]
      )
      turn = rows_lib.turn_of(kept[2])
      self.queue.append(Row(uid, *kept, behind=len(kept[0]), turn=turn))

  def partials(self) -> tuple[types.Partial, ...]:
    return tuple(
      types.Partial(
        uid=row.uid,
        tokens=tuple(row.tokens),
        logprobs=tuple(row.logprobs),
        versions=tuple(row.versions),
      )
      for row in self.queue
      if row.tokens
    )

  def renew(self) -> None:
    self.version = None

  def release(self, uids) -> None:
    pass

  def step(self, params, version: int, _=None) -> list[types.Completion]:
    self.script()
    if version != self.version and self.recompute:
      for row in self.queue[: self.rows]:
        row.behind = len(row.tokens)
    self.version = version
    done = []
    for row in self.queue[: self.rows]:
      for _ in range(3):
        self._column(row, params, version)
      if len(row.tokens) == row.turn + self.length(row.uid):
        done.append(row)
    self.queue = [row for row in self.queue if not any(row is d for d in done)]
    return [
      types.Completion(
        uid=row.uid,
        tokens=tuple(row.tokens),
        logprobs=tuple(row.logprobs),
        versions=tuple(row.versions),
        finish=self.finish,
      )
      for row in done
    ]

  def _column(self, row: Row, params: int, version: int) -> None:
    if row.behind:
      row.behind -= 1
    elif len(row.tokens) < row.turn + self.length(row.uid):
      row.tokens.append(mixed(params, row.uid, len(row.tokens)))
      row.logprobs.append(-0.5 * len(row.tokens))
      row.versions.append(version)


class InThreads(pool.Pool):
  """Scores in threads, so in any order; some late."""

  def __init__(self, score) -> None:
    self.score = score
    self.threads = concurrent.futures.ThreadPoolExecutor(8, "score")

  def submit_all(self, rollouts):
    return [self.threads.submit(self._scored, rollout) for rollout in rollouts]

  def _scored(self, rollout):
    threading.Event().wait(time.monotonic_ns() % 3 * 2e-4)
    reward = self.score(rollout)
    failure = "" if math.isfinite(reward) else "none"
    return dataclasses.replace(rollout, reward=reward, failure=failure)


def by_index(rollout: types.Rollout) -> float:
  return float(rollout.completion.uid % GROUP)


def some_leave(rollout: types.Rollout) -> float:
  """Fails a sixth of the groups, and gives another third no signal."""
  uid = rollout.prompt.uid
  if uid % 6 == 1:
    return math.nan
  return 0.0 if uid % 3 == 2 else float(rollout.completion.uid % GROUP)


@dataclasses.dataclass(frozen=True)
class Made:
  """What a run trained, in order, and its checkpoints by step."""

  batches: list
  cuts: dict
  policies: dict
  params: int

  def at(self, step: int) -> tuple[types.Policy, dict[str, bytes]]:
    return self.policies[step], self.cuts[step]


@dataclasses.dataclass(frozen=True)
class Setup:
  """A run's settings."""

  max_lag: int = 0
  fixed: bool = False
  in_flight: str = "keep"
  on_stale: str = "wait"
  filtered: bool = False
  asynchronous: bool = True
  skips: tuple[int, ...] = ()
  size: int = 100
  pool: difficulty.Pool | None = None

  @property
  def items(self) -> prompts.Prompts:
    """Of one epoch; with a pool without end."""
    return data(self.size, self.pool, 1 if self.pool is None else None)

  @property
  def cfg(self) -> schedule.StreamConfig:
    return schedule.StreamConfig(
      asynchronous=self.asynchronous,
      on_stale=self.on_stale,
      filter_zero_signal=self.filtered,
      deterministic=self.fixed,
      stall_s=LATE_S,
    )

  def engine(self) -> Engine:
    return Engine(recompute=self.in_flight == "recompute")

  @contextlib.contextmanager
  def opened(self, folder, *, first=None, plan=None, engine=None, **options):
    """A stream that is new, or goes on from a policy and a cut's files."""
    policy, files = first or (FIRST, None)
    items = options.pop("items", None) or self.items
    env = options.pop("env", ENV)
    cut = None
    if files is not None:
      cut = cuts.from_files(files, prompts=items, rollout=env.rollout)
    log = events.Log(folder / events.NAME, 0 if cut is None else cut.events)
    log.write(
      events.Begin("") if cut is None else events.Restore(cut.ledger.step)
    )
    rewards = InThreads(options.pop("score", some_leave))
    clock = clocks.Clock(("generation", "training"))
    drain = self.in_flight == "drain"
    rollouts = stream.Stream(
      self.cfg,
      ledgers.start(
        BATCH,
        self.max_lag,
        on_stale=self.on_stale,
        ordered=self.fixed,
        num_steps=None if plan else options.pop("num_steps", STEPS),
        step=policy.step,
      ),
      env=env,
      engine=engine or self.engine(),
      prompts=items,
      frontier=frontiers.Frontier(),
      rewards=rewards,
      clock=clock,
      verify=lambda policy: None,
      plan=plan or schedule.build(self.cfg, drain=drain),
      log=log,
      lane=options.pop("lane", None),
      stopping=options.pop("stopping", lambda: False),
    )
    try:
      if cut is not None:
        rollouts.restore(cut)
      rollouts.publish(policy)
      with rollouts:
        yield rollouts
    finally:
      rewards.threads.shutdown()
      clock.close()

  def updated(self, policy: types.Policy, groups) -> types.Policy:
    """Trains on a batch; some updates are skipped."""
    step = policy.step + 1
    if step in self.skips:
      return dataclasses.replace(policy, step=step)
    tokens = [
      (r.completion.tokens, r.reward) for g in groups for r in g.rollouts
    ]
    params = mixed(policy.params, repr(tokens))
    return types.Policy(params=params, version=policy.version + 1, step=step)

  def run(
    self, folder, *, first=None, due=lambda step: True, **options
  ) -> Made:
    """Trains up to the last step, with a checkpoint where one is due."""
    folder.mkdir(exist_ok=True)
    policy = first[0] if first else FIRST
    batches, saved, policies = [], {}, {}
    with self.opened(folder, first=first, **options) as rollouts:
      while policy.step < options.get("num_steps", STEPS):
        groups = rollouts.next()
        if groups is None:
          break
        batches.append(groups)
        policy = self.updated(policy, groups)
        rollouts.publish(policy, time.monotonic(), cut=due(policy.step))
        if due(policy.step):
          saved[policy.step] = cuts.to_files(rollouts.cut())
          policies[policy.step] = policy
          copy = folder / f"events-{policy.step}"
          copy.write_bytes((folder / events.NAME).read_bytes())
    return Made(batches, saved, policies, policy.params)

  def resumed(self, folder, made: Made, step: int, **options) -> Made:
    """Goes on from a checkpoint, with what was on the disk when it was made."""
    copy = folder / f"from-{step}"
    copy.mkdir()
    kept = (folder / f"events-{step}").read_bytes()
    (copy / events.NAME).write_bytes(kept)
    return self.run(copy, first=made.at(step), **options)


def uids(batches) -> list[int]:
  return [group.prompt.uid for groups in batches for group in groups]


def repeated(one: list, other: list) -> bool:
  """Whether batches are equal; NaN is equal to NaN."""
  return repr(one) == repr(other)
