"""The main loop: rollout, score, update, publish, record.

Synchronous and asynchronous, colocated and split runs are values of the
configuration; the loop never asks which. Copy `run` to do something else.
"""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import TypeAlias

import jax

from jaxrl_post import config, generation, prepare, record, roles, scorer, types
from jaxrl_post.algos import sft
from jaxrl_post.data import pack
from jaxrl_post.envs import beside as besides
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import replay, together
from jaxrl_post.envs import stream as streams
from jaxrl_post.models import decoder
from jaxrl_post.placement import programs, reference
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.rewards import protocol
from jaxrl_post.runtime import checkpoint, writers
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.runtime import trace as traces
from jaxrl_post.training import optim, warmup

# The first updates compile, in some processes for longer than in others.
_COLD_STEPS = 2
_ALONE = writers.Watch()

Rollouts: TypeAlias = streams.Stream | replay.Replay | together.Follower


def run(
  cfg: config.Run,
  parts: prepare.Parts,
  folder: pathlib.Path,
  hosts: hosts_lib.Hosts | None = None,
  *,
  watch: writers.Watch = _ALONE,
) -> types.TrainState:
  """Trains for `cfg.num_steps` batches, from the newest checkpoint if any.

  Args:
    cfg: the run.
    parts: its host half.
    folder: holds metrics, rollouts and checkpoints; all processes see it.
    hosts: the processes of the run; None is this one alone.
    watch: who looks at it, and how.

  Returns:
    The state after the last batch; it is also the last checkpoint.

  Raises:
    InputError: the checkpoint is of other data or another model, or what is to
      be looked at is beyond the run.
    RunError: or whatever a worker or a reward raised.
  """
  hosts = hosts or hosts_lib.Hosts()
  place = build(cfg, parts, hosts)
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  with contextlib.ExitStack() as stack:
    hosts.at("first weights", hosts_lib.COLD_S)
    tools = open_tools(
      cfg, parts, place, folder, hosts=hosts, watch=watch, stack=stack
    )
    state, saved, first = restore_or_start(
      cfg, parts, place, trainer, tools.store
    )
    if first >= cfg.num_steps and not tools.owes(first):
      return state
    policy = place.publish(state)
    tools.samplers.warm_up(policy)
    hosts.at("first batch", hosts_lib.COLD_S)
    tools.begin(first, policy, saved)
    rollouts = tools.start(
      open_stream(cfg, parts, tools, hosts, policy=policy, saved=saved),
      saved,
      stack,
    )
    stack.push(hosts.on_error)
    for step in range(first + 1, cfg.num_steps + 1):
      tools.notes.at_step(step)
      with tools.clock.span("training", "wait/host", "take"):
        groups = hosts.share(
          lambda: None if hosts.stopping else rollouts.next(), together.bare
        )
      if groups is None:  # The data has ended, or the run is to stop.
        break
      late_s = hosts_lib.COLD_S if step - first <= _COLD_STEPS else None
      hosts.at(f"update {step}", late_s)
      with (
        tools.clock.span("training", "wait/host", "pack"),
        jax.profiler.StepTraceAnnotation("train", step_num=step),
      ):
        tools.notes.took(step, groups)
        rows = pack.pack(
          groups, tools.layout, mask_stale_tokens=cfg.mask_stale_tokens
        )
        state, values = tools.learn(trainer, state, rows)
        hosts.at(f"end of update {step}", late_s)
        values = jax.device_get(values)
      updated = time.monotonic()
      with tools.clock.span("training", "sync", "publish"):
        policy = place.publish(state, policy)
      due = checkpoint.due(cfg.checkpoint, step, cfg.num_steps)
      with tools.clock.span("training", "wait/host", "record"):
        rollouts.publish(policy, updated, cut=due)
        hosts.at(f"end of step {step}", checkpoint.DEADLINE_S)
        values |= tools.samplers.metrics() | tools.test(policy, step)
        tools.notes.step(step, groups, rows, values, rollouts)
      tools.save(step, state, rollouts.cut, due=due)
      hosts.at(f"batch {step + 1}", late_s)
    tools.end(state, rollouts.cut)
  return state


@dataclasses.dataclass(frozen=True)
class Tools:
  """What the loop uses besides the steps.

  Attributes:
    clock: accounts the time of both stages.
    rewards: scores rollouts; of the head only, and not in a replay.
    samplers: who makes rollouts.
    store: checkpoints.
    notes: metrics, rollouts to read, progress.
    test: policy and step to `eval/` metrics; none when it is not due, or when
      it is made beside training, and tells `notes` later.
    frozen: a model that is the reference; of no weights where it is none.
    layout: of a batch.
    data: identifies the training prompts.
    run: identifies what decides what is sampled and trained.
    folder: of the run.
  """

  clock: clocks.Clock
  rewards: protocol.Scorer | None
  samplers: generation.Samplers
  store: checkpoint.Store
  notes: record.Recorder | record.Silent
  test: Callable[[types.Policy, int], dict[str, float]] | besides.Tests
  frozen: reference.Reference
  layout: pack.Layout
  data: str
  run: str
  folder: pathlib.Path

  def owes(self, step: int) -> bool:
    """Says whether weights that a run begins with are to be evaluated.

    Those of a checkpoint only if their evaluation beside training did not end.
    """
    due = isinstance(self.test, besides.Tests) and self.test.due(step)
    return not step or (due and not self.notes.has_evaluated(step))

  def begin(
    self, step: int, policy: types.Policy, saved: checkpoint.Restored | None
  ) -> None:
    """Sets metrics to where a checkpoint, or the run, begins, and evaluates.

    Raises:
      InputError: the checkpoint is of another run.
    """
    meta = {"totals": {}} if saved is None else saved.meta
    for name, value, what in (
      ("run", self.run, "settings"),
      ("reference", self.frozen.digest, "weights of its reference"),
    ):
      if saved is not None and meta.get(name) != value:
        raise types.InputError(
          "--workdir: expected checkpoints of this run, got one of step "
          f"{step} of another, with other {what}. Restore the right ones."
        )
    values = self.test(policy, step) if self.owes(step) else {}
    self.notes.begin(step, policy.version, values, meta["totals"])

  def start(
    self,
    stream: Rollouts,
    saved: checkpoint.Restored | None,
    stack: contextlib.ExitStack,
  ) -> Rollouts:
    """Starts the clock and then the stream, which begins to admit."""
    self.clock.start({} if saved is None else saved.meta["seconds"])
    stack.enter_context(self.clock.span("training", "other", "loop"))
    return stack.enter_context(stream)

  def learn(
    self, trainer: trainers.Trainer, state: types.TrainState, rows: types.Batch
  ) -> tuple[types.TrainState, trainers.Metrics]:
    """Scores a batch and updates on it; launches both, waits for neither."""
    batch = trainer.score(state, trainer.put(rows), self.frozen.params)
    self.clock.launched("training", "score", batch)
    state, values = trainer.update(state, batch)
    self.clock.launched("training", "update", values)
    return state, values

  def save(
    self,
    step: int,
    state: types.TrainState,
    cut: Callable[[], cuts.Cut | None],
    *,
    due: bool = True,
  ) -> None:
    """Starts to write a checkpoint, with the metrics of its step.

    Args:
      step: batches trained.
      state: after them.
      cut: of the stream; gives None where the head has it.
      due: false only looks how the save before gets on.

    Raises:
      RunError: a save failed.
    """
    if not due:
      self.store.check()
      return
    with self.clock.span("training", "checkpoint", "save"):
      with self.clock.span("training", "wait/host", "cut"):
        made = cut()
      line = self.notes.line
      meta = {
        "data": self.data,
        "run": self.run,
        "reference": self.frozen.digest,
        "metrics": {k: v for k, v in line.items() if math.isfinite(v)},
        "totals": self.notes.totals,
        "seconds": self.clock.totals(),
      }
      files = {} if made is None else cuts.to_files(made)
      self.store.save(step, state, meta, files)

  def end(
    self, state: types.TrainState, cut: Callable[[], cuts.Cut | None]
  ) -> None:
    """Saves the last state, and waits for an evaluation that is under way."""
    self.save(int(state.step), state, cut)
    if isinstance(self.test, besides.Tests):
      self.test.finish()


def open_tools(
  cfg: config.Run,
  parts: prepare.Parts,
  place: programs.Programs,
  folder: pathlib.Path,
  *,
  hosts: hosts_lib.Hosts,
  watch: writers.Watch,
  stack: contextlib.ExitStack,
) -> Tools:
  """Opens what the loop uses; `stack` closes it."""
  watch.check(cfg.num_steps)
  trace = traces.Trace(folder, slots=watch.slots) if hosts.is_head else None
  clock = clocks.Clock(("generation", "training"), trace=trace)
  stack.callback(clock.close)
  rewards, notes = None, record.Silent()
  if hosts.is_head:
    if cfg.replay is None:
      scores = scorer.opened(cfg, parts, place, clock)
      rewards = stack.enter_context(scores)
    notes = record.Recorder(
      cfg,
      folder,
      clock,
      devices=place.num_devices,
      sync_bytes=place.resent.bytes,
      about=prepare.about(cfg, parts),
      watch=watch,
    )
  stack.callback(notes.close)
  store = checkpoint.Store(
    folder / "checkpoints",
    cfg.checkpoint,
    hosts.share,
    place.launching if hosts.count > 1 else contextlib.nullcontext,
  )
  stack.callback(store.close)
  if cfg.replay is None:
    samplers = generation.samplers(cfg, parts, place, hosts)
    test = generation.tester(
      cfg,
      parts,
      samplers,
      rewards=rewards,
      clock=clock,
      hosts=hosts,
      log=notes.evaluated,
    )
  else:
    samplers, test = roles.Idle(), lambda policy, step: {}
  stack.callback(samplers.close)
  if isinstance(test, besides.Tests):
    stack.callback(test.close)
  return Tools(
    clock=clock,
    rewards=rewards,
    samplers=samplers,
    store=store,
    notes=notes,
    test=test,
    frozen=place.reference(),
    layout=prepare.layout(
      cfg, parts.decoder.config, place.meshes.training.size
    ),
    data=parts.data.train.digest,
    run=prepare.digest(cfg, parts, placed=False),
    folder=folder,
  )


def open_stream(
  cfg: config.Run,
  parts: prepare.Parts,
  tools: Tools,
  hosts: hosts_lib.Hosts,
  *,
  policy: types.Policy,
  saved: checkpoint.Restored | None,
) -> Rollouts:
  """Returns the stream, which starts with `policy`.

  From now on a signal asks `hosts` to stop; before, it ends the process.
  """
  hosts.heeds_stop = True
  if not hosts.is_head:
    rollouts = together.Follower(tools.samplers.publish)
    rollouts.publish(policy)
    return rollouts
  book = generation.book(cfg, policy.step)
  if cfg.replay is not None:
    return replay.Replay(cfg.replay, book, clock=tools.clock)
  assert tools.rewards is not None, "the head's"
  if saved is not None:
    generation.check_goes_on(cfg, saved.step)
  cut = generation.cut(parts, saved)
  digest = prepare.digest(cfg, parts, placed=True)
  rollouts = generation.stream(
    cfg,
    parts,
    tools.samplers,
    book,
    rewards=tools.rewards,
    clock=tools.clock,
    stopping=lambda: bool(hosts.stopping),
    log=generation.open_log(tools.folder, cut, digest),
    digest=digest,
  )
  if cut is not None:
    rollouts.restore(cut)
  rollouts.publish(policy)
  return rollouts


def build(
  cfg: config.Run, parts: prepare.Parts, hosts: hosts_lib.Hosts | None = None
) -> programs.Programs:
  """Places the steps of a run on all devices of all its processes."""
  hosts = hosts or hosts_lib.Hosts()
  return programs.build(
    cfg.placement,
    decoder=parts.decoder,
    path=cfg.model.path,
    sampling=cfg.sampling,
    max_prompt=cfg.data.max_prompt,
    group_size=cfg.group_size,
    key=jax.random.key(cfg.seed),
    devices=jax.devices(),
    process=hosts.index,
    processes=hosts.count,
    decode=parts.data.tokenizer.decode,
    trains=cfg.optim.trained,
    reference=parts.reference,
  )


def restore_or_start(
  cfg: config.Run,
  parts: prepare.Parts,
  place: programs.Programs,
  trainer: trainers.Trainer,
  store: checkpoint.Store,
) -> tuple[types.TrainState, checkpoint.Restored | None, int]:
  """Returns state, its checkpoint's rest if any, and batches trained so far."""
  restored = store.restore(trainer.abstract)
  if restored is None:
    params = warm_up(cfg, parts, place, place.draw())
    return trainer.start(params), None, 0
  if restored.meta["data"] != parts.data.train.digest:
    raise types.InputError(
      f"--workdir: expected the prompts that step {restored.step} was trained "
      "on, got others. Restore the data, or start in another folder."
    )
  if restored.step != int(restored.state.step):
    raise types.InputError(
      f"--workdir: expected the state of step {restored.step} in the "
      f"checkpoint of that name, got that of step {int(restored.state.step)}. "
      "Give the folder its name back."
    )
  # Or what is not donated, such as aliased weights, would stay for ever.
  rest = dataclasses.replace(restored, state=None)
  return restored.state, rest, restored.step


def test_newest(
  cfg: config.Run,
  parts: prepare.Parts,
  folder: pathlib.Path | None,
  hosts: hosts_lib.Hosts | None = None,
) -> tuple[int, dict[str, float]]:
  """Evaluates the newest checkpoint of a folder; without one, first weights.

  Returns:
    Batches that the weights were trained on, and the `eval/` metrics.

  Raises:
    InputError: the experiment has no held-out prompts, or the folder no
      checkpoint.
  """
  if not parts.data.held_out:
    raise types.InputError(
      "--mode=eval: expected an experiment with data.held_out, got none. Add "
      "held-out prompts to it."
    )
  if folder is not None and not any((folder / "checkpoints").glob("*")):
    raise types.InputError(
      f"--workdir: expected a run folder with a checkpoint, got {folder} "
      "without any. Leave it out to test the first weights."
    )
  hosts = hosts or hosts_lib.Hosts()
  place = build(cfg, parts, hosts)
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  with contextlib.ExitStack() as stack:
    clock = clocks.Clock(("generation", "training"))
    stack.callback(clock.close)
    rewards = None
    if hosts.is_head:
      rewards = stack.enter_context(scorer.opened(cfg, parts, place, clock))
    samplers = generation.samplers(cfg, parts, place, hosts)
    stack.callback(samplers.close)
    test = generation.tester(
      cfg, parts, samplers, rewards=rewards, clock=clock, hosts=hosts
    )
    if folder is None:
      params = warm_up(cfg, parts, place, place.draw())
      return 0, test(place.publish(trainer.start(params)), 0)
    store = checkpoint.Store(
      folder / "checkpoints", cfg.checkpoint, hosts.share
    )
    stack.callback(store.close)
    state, _, step = restore_or_start(cfg, parts, place, trainer, store)
    return step, test(place.publish(state), 0)


def warm_up(
  cfg: config.Run,
  parts: prepare.Parts,
  place: programs.Programs,
  params: types.Tree,
) -> types.Tree:
  """Trains weights on reference answers for `cfg.warmup.num_steps` steps."""
  if not cfg.warmup.num_steps:
    return params
  settings = optim.Optim(
    learning_rate=cfg.warmup.learning_rate, microbatches=cfg.optim.microbatches
  )
  teacher = place.trainer(sft.objective(), settings, cfg.warmup.num_steps)
  state, rows = teacher.start(params), cfg.rows
  layout = pack.layout(
    rows,
    1,  # Each answer has a prompt of its own.
    max_prompt=cfg.data.max_prompt,
    max_tokens=cfg.sampling.max_tokens,
    flops=float,
    microbatches=settings.microbatches,
    length_parts=place.meshes.training.shape["context"],
    alone=not decoder.packs(parts.decoder.config),
  )
  prompts, tokenizer = parts.data.train, parts.data.tokenizer
  for step in range(cfg.warmup.num_steps):
    uids = range(step * rows, (step + 1) * rows)
    groups = warmup.demonstrations(
      [prompts[uid % len(prompts)] for uid in uids],
      encode=tokenizer.encode,
      stop_id=tokenizer.eos_ids[0],
    )
    batch = teacher.score(state, teacher.put(pack.pack(groups, layout)))
    state, _ = teacher.update(state, batch)
  return state.params
