"""Rollouts without training: sampled, scored, and written to a dump."""

import contextlib
import dataclasses
import math
import pathlib

from jaxrl_post import config, generation, loop, prepare, scorer, types
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.envs import stream
from jaxrl_post.placement import programs
from jaxrl_post.runtime import checkpoint, dump, metrics, progress
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.runtime import hosts as hosts_lib


@types.host_record
class Collected:
  """What came of it.

  Attributes:
    trained: batches that the weights were trained on.
    batches: how many are in the dump.
    rollouts: in all of them.
    rewarded: those that have a reward.
    reward: its mean; NaN without any.
  """

  trained: int
  batches: int
  rollouts: int
  rewarded: int
  reward: float


def run(
  cfg: config.Run,
  parts: prepare.Parts,
  folder: pathlib.Path,
  target: pathlib.Path,
  hosts: hosts_lib.Hosts | None = None,
) -> Collected:
  """Samples `cfg.num_steps` batches with one policy, as a run would.

  Args:
    cfg: the run.
    parts: its host half.
    folder: of the run. The policy is its newest checkpoint, and the prompts
      are those that were not trained or left then; the first weights, and all
      prompts, if there is no checkpoint.
    target: the dump; each batch is in it as soon as it is scored.
    hosts: this process, and what asks it to stop.

  Returns:
    A summary of the dump, which has fewer batches if the data ended or the run
    was to stop.

  Raises:
    InputError: the checkpoint is of other data or another model.
    RunError: or whatever a worker or a reward raised.
  """
  hosts = hosts or hosts_lib.Hosts()
  place = loop.build(cfg, parts, hosts)
  rewards: list[float] = []
  step = 0
  with contextlib.ExitStack() as stack:
    trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
    store = checkpoint.Store(folder / "checkpoints", cfg.checkpoint)
    state, saved, trained = loop.restore_or_start(
      cfg, parts, place, trainer, store
    )
    policy = dataclasses.replace(place.publish(state), step=0)
    del state  # The optimizer's part of it is not needed.
    samplers = generation.samplers(cfg, parts, place, hosts)
    stack.callback(samplers.close)
    samplers.warm_up(policy)
    rollouts = _stream(
      cfg, parts, saved, samplers, place=place, hosts=hosts, stack=stack
    )
    rollouts.publish(policy)
    about = {**prepare.about(cfg, parts), "policy_version": policy.version}
    shown = progress.Progress(cfg.num_steps)
    stack.callback(shown.close)
    while step < cfg.num_steps:
      groups = rollouts.next()
      if groups is None:  # The data has ended, or the run is to stop.
        break
      step += 1
      dump.write(dump.batch(target, step), groups, {**about, "step": step})
      # To the ledger, each batch is trained.
      rollouts.publish(dataclasses.replace(policy, step=step))
      shown.update(step, metrics.batch_metrics(groups))
      rewards += [r.earned for group in groups for r in group.rollouts]
  valid = [reward for reward in rewards if math.isfinite(reward)]
  return Collected(
    trained=trained,
    batches=step,
    rollouts=len(rewards),
    rewarded=len(valid),
    reward=sum(valid) / len(valid) if valid else math.nan,
  )


def _stream(
  cfg: config.Run,
  parts: prepare.Parts,
  saved: checkpoint.Restored | None,
  samplers: generation.Samplers,
  *,
  place: programs.Programs,
  hosts: hosts_lib.Hosts,
  stack: contextlib.ExitStack,
) -> stream.Stream:
  """Opens the stream, and all it needs; `stack` closes them."""
  clock = clocks.Clock(("generation", "training"))
  stack.callback(clock.close)
  rewards = stack.enter_context(scorer.opened(cfg, parts, place, clock))
  # Groups that were under way are sampled from their start, by this policy.
  replayed = saved is not None and not saved.files  # It drew no prompts.
  made = None if replayed else generation.cut(parts, saved)
  rollouts = generation.stream(
    cfg,
    parts,
    samplers,
    generation.book(cfg),
    rewards=rewards,
    clock=clock,
    stopping=lambda: bool(hosts.stopping),
    frontier=frontiers.Frontier() if made is None else made.frontier,
  )
  hosts.heeds_stop = True
  return stack.enter_context(rollouts)
