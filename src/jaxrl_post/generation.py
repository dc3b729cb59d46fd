"""Who samples, here or in every process, and the stream of what they make."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jaxrl_post import config, prepare, roles, types
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.data import prompts as prompt_sets
from jaxrl_post.envs import beside as besides
from jaxrl_post.envs import (
  conversing,
  evaluate,
  events,
  multi_turn,
  schedule,
  work,
)
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.envs import stream as streams
from jaxrl_post.placement import generator, programs
from jaxrl_post.rewards import protocol
from jaxrl_post.runtime import checkpoint
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import fleet as fleets
from jaxrl_post.sampling import server as servers

_ORDER, _REPORT = "order", "report"
_NOTHING = frontiers.Frontier()


@runtime_checkable
class Samplers(Protocol):
  """What the loop asks of whoever samples."""

  @property
  def engine(self) -> work.Engine:
    """For the stream of training rollouts; of the head only."""
    ...

  def warm_up(self, policy: types.Policy) -> None:
    """Compiles what sampling needs, before the clock starts."""
    ...

  def publish(self, policy: types.Policy) -> None:
    """Takes newer weights; no token is sampled if they did not arrive whole."""
    ...

  def generate(
    self, policy: types.Policy, requests: Sequence[types.Request]
  ) -> list[types.Completion]:
    """Samples an evaluation; one completion a uid, in order."""
    ...

  def metrics(self) -> dict[str, float]:
    """Returns what `docs/metrics.md` has under `engine/` or `fleet/`."""
    ...

  def close(self) -> None:
    """Ends threads and processes that sample."""
    ...


class Local:
  """One engine, in the thread that asks.

  Attributes:
    engine: of training.
    tester: makes an engine of an evaluation.
    lane: samples an evaluation beside training.
  """

  def __init__(self, cfg: config.Run, place: programs.Programs) -> None:
    """Makes the engine of training; its memory is taken when it is used."""
    assert place.engine is not None, "mode roles has others"
    self._place = place
    rollout_key, eval_key = generator.keys(cfg.seed)
    self.engine = place.engine(rollout_key)
    # An engine made anew for each: its cache is as large as that of training.
    self.tester = functools.partial(place.engine, eval_key)
    beside = cfg.evaluation.beside
    self.lane = besides.Lane(
      self._tester_of,
      blocks=1 if beside is None else beside.blocks,
      stall_s=cfg.stream.stall_s,
    )

  def warm_up(self, policy: types.Policy) -> None:
    """See `Samplers`."""
    self.engine.warm_up(policy.params)

  def publish(self, policy: types.Policy) -> None:
    """See `Samplers`."""
    self._place.verify(policy)

  def generate(
    self, policy: types.Policy, requests: Sequence[types.Request]
  ) -> list[types.Completion]:
    """See `Samplers`."""
    return engines.generate(self._tester_of(policy), policy, requests)

  def metrics(self) -> dict[str, float]:
    """See `Samplers`; of the engine of training."""
    return self.engine.metrics()

  def close(self) -> None:
    """See `Samplers`."""

  def _tester_of(self, policy: types.Policy) -> engines.Engine:
    self._place.verify(policy)
    return self.tester()


class Spread:
  """An engine in every process; the head hands out what they sample."""

  def __init__(
    self, cfg: config.Run, place: programs.Programs, hosts: hosts_lib.Hosts
  ) -> None:
    """Starts the server of this process; the head's fleet has all of them."""
    self._local = Local(cfg, place)
    self._hosts = hosts
    self._server = servers.Server(
      self._local.engine,
      tester=self._local.tester,
      verify=place.verify,
      report=self._report,
    )
    self._fleet: fleets.Fleet | None = None
    if hosts.is_head:
      others = [_There(hosts, i) for i in range(1, hosts.count)]
      self._fleet = fleets.Fleet(
        [_Here(self._server), *others],
        rows=place.engine_rows,
        stall_s=cfg.stream.stall_s,
      )
      hosts.on(_REPORT, self._fleet.report)
    else:
      hosts.on(_ORDER, lambda _, order: self._server.submit(order))

  @property
  def engine(self) -> work.Engine:
    """See `Samplers`."""
    assert self._fleet is not None, "the head's"
    return self._fleet

  def warm_up(self, policy: types.Policy) -> None:
    """See `Samplers`."""
    self._local.warm_up(policy)

  def publish(self, policy: types.Policy) -> None:
    """See `Samplers`. The server's own thread looks whether all arrived."""
    if self._fleet is not None:
      self._fleet.publish(policy)
    else:
      self._server.publish(policy)

  def generate(
    self, policy: types.Policy, requests: Sequence[types.Request]
  ) -> list[types.Completion]:
    """See `Samplers`."""
    assert self._fleet is not None, "the head's"
    return self._fleet.generate(policy, requests)

  def metrics(self) -> dict[str, float]:
    """See `Samplers`."""
    return {} if self._fleet is None else self._fleet.metrics()

  def close(self) -> None:
    """See `Samplers`."""
    self._server.close()

  def _report(self, made: servers.Report) -> None:
    if self._fleet is not None:
      self._fleet.report(0, made)
    else:
      self._hosts.tell(_REPORT, made, to=0)


@dataclasses.dataclass(frozen=True)
class _Here:
  """The server of this process."""

  server: servers.Server
  name: str = "process 0 (this one)"

  def submit(self, order: servers.Order) -> None:
    self.server.submit(order)

  def publish(self, policy: types.Policy) -> None:
    self.server.publish(policy)


@dataclasses.dataclass(frozen=True)
class _There:
  """The server of another process, which takes its weights by itself."""

  hosts: hosts_lib.Hosts
  index: int

  @property
  def name(self) -> str:
    return f"process {self.index}"

  def submit(self, order: servers.Order) -> None:
    self.hosts.tell(_ORDER, order, to=self.index)

  def publish(self, policy: types.Policy) -> None:
    pass


def samplers(
  cfg: config.Run,
  parts: prepare.Parts,
  place: programs.Programs,
  hosts: hosts_lib.Hosts,
) -> Samplers:
  """Returns who samples in this run."""
  if cfg.placement.mode == "roles":
    return roles.Replicas(cfg, parts) if hosts.is_head else roles.Idle()
  if hosts.count == 1:
    return Local(cfg, place)
  return Spread(cfg, place, hosts)


def book(cfg: config.Run, step: int = 0) -> ledgers.Ledger:
  """Returns the ledger of a run of which `step` batches are trained."""
  return ledgers.start(
    cfg.groups_per_step,
    cfg.max_lag,
    on_stale=cfg.stream.on_stale,
    ordered=cfg.stream.deterministic,
    # Who follows a run admits as that run did.
    num_steps=None if cfg.stream.follow else cfg.num_steps,
    step=step,
  )


def stream(
  cfg: config.Run,
  parts: prepare.Parts,
  sampling: Samplers,
  ledger: ledgers.Ledger,
  *,
  rewards: protocol.Scorer,
  clock: clocks.Clock,
  stopping: Callable[[], bool],
  frontier: frontiers.Frontier = _NOTHING,
  log: events.Log | None = None,
  digest: str = "",
) -> streams.Stream:
  """Returns the stream of what is sampled for training; `with` starts it.

  Args:
    cfg: the run.
    parts: its host half.
    sampling: who samples.
    ledger: from `book`.
    rewards: scores.
    clock: accounts the time of both stages.
    stopping: whether the run was asked to stop.
    frontier: which prompts are done already.
    log: takes the events; None for nobody.
    digest: of `prepare.digest`, to follow another run.
  """
  drain, engine = cfg.sampling.in_flight == "drain", sampling.engine
  if isinstance(parts.env, multi_turn.MultiTurn):
    engine = conversing.Conversing(
      engine,
      parts.env,
      parts.data.train.__getitem__,
      lockstep=cfg.stream.deterministic,
    )
  return streams.Stream(
    cfg.stream,
    ledger,
    env=parts.env,
    engine=engine,
    prompts=parts.data.train,
    frontier=frontier,
    rewards=rewards,
    clock=clock,
    verify=sampling.publish,
    plan=schedule.build(cfg.stream, drain=drain, digest=digest),
    log=log,
    lane=sampling.lane if isinstance(sampling, Local) else None,
    stopping=stopping,
  )


def check_goes_on(cfg: config.Run, step: int) -> None:
  """Refuses to follow a run from anywhere but its beginning.

  Args:
    cfg: the run.
    step: of the checkpoint it would go on from.

  Raises:
    InputError: it is to follow another one.
  """
  if cfg.stream.follow:
    raise types.InputError(
      "--workdir: expected a folder without checkpoints with stream.follow, "
      f"which begins at the first event, got one of step {step}. Name another."
    )


def open_log(
  folder: pathlib.Path, cut: cuts.Cut | None, digest: str
) -> events.Log:
  """Opens the events of a run, as far as a checkpoint knows them.

  Args:
    folder: of the run.
    cut: of the checkpoint; None begins anew.
    digest: of `prepare.digest`.
  """
  log = events.Log(folder / events.NAME, 0 if cut is None else cut.events)
  if cut is None:
    log.write(events.Begin(digest))
  else:
    log.write(events.Restore(cut.ledger.step))
  return log


def cut(
  parts: prepare.Parts, saved: checkpoint.Restored | None
) -> cuts.Cut | None:
  """Reads the stream of a checkpoint, if there is one.

  Raises:
    RunError: the stream is missing or damaged.
  """
  if saved is None:
    return None
  return cuts.from_files(
    saved.files, prompts=parts.data.train, rollout=parts.env.rollout
  )


def _asking(
  parts: prepare.Parts,
  generate: Callable[[Sequence[types.Request]], list[types.Completion]],
  prompts: prompt_sets.Prompts,
) -> Callable[[Sequence[types.Request]], list[types.Completion]]:
  """Returns who answers held-out prompts, in one turn or in several."""
  if not isinstance(parts.eval_env, multi_turn.MultiTurn):
    return generate
  return functools.partial(
    conversing.generate,
    generate,
    env=parts.eval_env,
    prompts=prompts.__getitem__,
  )


def _scored(
  cfg: config.Run,
  parts: prepare.Parts,
  generate: Callable[
    [types.Policy, Sequence[types.Request]], list[types.Completion]
  ],
  rewards: protocol.Scorer,
) -> besides.Score:
  """Returns what evaluates a policy on all sets of held-out prompts."""

  def scored(
    policy: types.Policy, ends: Callable[[], bool]
  ) -> dict[str, float]:
    held_out = parts.data.held_out
    found = {"eval/version": float(policy.version)}
    for name, asked in held_out.items():
      values = evaluate.evaluate(
        [asked[uid] for uid in range(len(asked))],
        env=parts.eval_env,
        generate=_asking(parts, functools.partial(generate, policy), asked),
        rewards=rewards,
        timeout_s=cfg.evaluation.timeout_s,
        samples=cfg.evaluation.samples,
        stopping=ends,
      )
      if not values:
        return {}
      place = f"eval/{name}/" if name else "eval/"
      found |= {f"{place}{key}": value for key, value in values.items()}
    if "eval/reward" not in found:
      each = [found[f"eval/{name}/reward"] for name in held_out]
      found["eval/reward"] = sum(each) / len(each)
    return found

  return scored


def tester(
  cfg: config.Run,
  parts: prepare.Parts,
  samplers: Samplers,
  *,
  rewards: protocol.Scorer | None,
  clock: clocks.Clock,
  hosts: hosts_lib.Hosts,
  log: Callable[[int, Mapping[str, float]], None] | None = None,
) -> Callable[[types.Policy, int], dict[str, float]] | besides.Tests:
  """Returns a function of policy and step that evaluates when it is due.

  Every process calls it. Without rewards, which the head has, one only provides
  the weights, and stays until its engine is no longer asked.

  Args:
    cfg: the run.
    parts: its host half.
    samplers: who samples.
    rewards: scores; None elsewhere than at the head.
    clock: accounts for the time of an evaluation.
    hosts: the processes of the run.
    log: takes step and metrics of what `cfg.evaluation.beside` has made beside
      training; None evaluates in turn, whatever that says.
  """
  if not parts.data.held_out:
    return lambda policy, step: {}
  if log is not None and cfg.evaluation.beside is not None:
    assert isinstance(samplers, Local) and rewards is not None, "one process"
    return besides.Tests(
      samplers.lane,
      _scored(cfg, parts, samplers.lane.sample, rewards),
      due=lambda step: cfg.evaluation.due(step, cfg.num_steps),
      log=log,
      clock=clock,
      stopping=lambda: bool(hosts.stopping),
      patience_s=cfg.stream.stall_s + cfg.evaluation.timeout_s,
    )

  def scored(policy: types.Policy) -> dict[str, float]:
    assert rewards is not None, "the head's"
    if hosts.stopping:
      return {}  # A checkpoint is worth more than a number.
    score = _scored(cfg, parts, samplers.generate, rewards)
    with (
      clock.span("training", "eval"),
      clock.span("generation", "eval"),
    ):
      return score(policy, lambda: bool(hosts.stopping))

  def test(policy: types.Policy, step: int) -> dict[str, float]:
    if not cfg.evaluation.due(step, cfg.num_steps):
      return {}
    if rewards is None:
      samplers.publish(policy)
    return hosts.share(functools.partial(scored, policy))

  return test
