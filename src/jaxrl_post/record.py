"""Puts the numbers of a step together and shows them."""

import contextlib
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from jaxrl_post import config, types
from jaxrl_post.data import curriculum, pack
from jaxrl_post.envs import replay, stream, together
from jaxrl_post.runtime import (
  clock,
  dump,
  history,
  log,
  metrics,
  profile,
  progress,
  writers,
)


class Recorder:
  """Writes metrics.jsonl, rollouts.txt, the dump, and the progress line.

  Attributes:
    line: the numbers of the step that was written last; empty before it.
  """

  def __init__(
    self,
    cfg: config.Run,
    folder: pathlib.Path,
    clock: clock.Clock,
    *,
    devices: Mapping[str, int],
    sync_bytes: int,
    about: Mapping[str, Any],
    watch: writers.Watch,
  ) -> None:
    """Opens the files.

    Args:
      cfg: the run.
      folder: where to.
      clock: of both stages.
      devices: how many are `held`, and how many either stage has.
      sync_bytes: bytes that one publish has to move.
      about: where the groups of a dump are from.
      watch: who else gets the numbers, and what is captured or planned.
    """
    self._cfg, self._clock = cfg, clock
    self._devices, self._sync_bytes = devices, sync_bytes
    self._dump, self._about = folder / dump.FOLDER, about
    self._dumps = cfg.debug is not None and cfg.debug.dump
    self._planned_s = watch.planned_s
    self._progress = progress.Progress(cfg.num_steps)
    self._profile = profile.Profile(folder, watch.profile, clock)
    with contextlib.ExitStack() as stack:
      self._log = log.Log(folder)
      stack.callback(self._log.close)
      self._writers = writers.Writers(watch, folder, config.to_json(cfg))
      stack.callback(self._writers.close)
      stack.callback(self._progress.close)
      stack.callback(self._profile.close)
      self._open = stack.pop_all()
    for port in self._writers.ports:
      print(f"metrics: http://127.0.0.1:{port}/metrics", flush=True)
    self._is_trusted = True
    self._warm: tuple[int, float] | None = None
    self._first = 0
    self._consumed = self._trained = 0
    self._skipped_in_a_row = 0
    self._version = 0
    self.line: dict[str, float] = {}

  @property
  def totals(self) -> dict[str, int]:
    """What `begin` needs to count on from here; what JSON can hold."""
    return {
      "consumed": self._consumed,
      "trained_tokens": self._trained,
      "skipped_in_a_row": self._skipped_in_a_row,
    }

  def begin(
    self,
    step: int,
    version: int,
    values: Mapping[str, float],
    totals: Mapping[str, int],
  ) -> None:
    """Sets the file to the start of a run.

    Args:
      step: batches trained; later lines are cut off, to be written again.
      version: updates in the weights.
      values: an evaluation of them; written if nothing was trained yet.
      totals: as they were at that step; none at the first.
    """
    self._consumed = totals.get("consumed", 0)
    self._trained = totals.get("trained_tokens", 0)
    self._skipped_in_a_row = totals.get("skipped_in_a_row", 0)
    self._log.truncate(step + 1 if step else 0)
    if self._dumps:
      dump.cut(self._dump, step)
    self._version, self._first = version, step
    if not step and values:
      self._log.step(0, values)
      self._writers.step(0, values)

  def at_step(self, step: int) -> None:
    """Marks the beginning of a step, in the trace and for the profiler."""
    self._clock.at_step(step)
    self._profile.at_step(step)

  def took(self, step: int, groups: Sequence[types.Group]) -> None:
    """Puts a batch into the dump, if there is to be one, before it trains.

    Args:
      step: that it will be trained in.
      groups: of the batch.
    """
    if self._dumps:
      about = {**self._about, "step": step, "policy_version": self._version}
      dump.write(dump.batch(self._dump, step), groups, about)

  def step(
    self,
    step: int,
    groups: Sequence[types.Group],
    batch: types.Batch,
    values: Mapping[str, np.ndarray | float],
    rollouts: stream.Stream | replay.Replay | together.Follower,
  ) -> None:
    """Writes the line of a step.

    Args:
      step: batches trained.
      groups: of the batch.
      batch: as it was packed, on the host.
      values: what update and evaluation returned.
      rollouts: whose counters to read; no follower, as this is the head.

    Raises:
      RunError: more updates in a row were skipped than the optimizer allows.
    """
    assert not isinstance(rollouts, together.Follower), "this is the head"
    algo = self._cfg.algo
    mask = pack.trained(
      batch, truncated=not algo.mask_truncated, equal=not algo.mask_equal
    )
    env, skipped = self._cfg.env, bool(values["loss/skipped"])
    line = {
      **{name: float(value) for name, value in values.items()},
      **metrics.batch_metrics(groups),
      **({} if env is None else metrics.conversations(groups, env.max_turns)),
      **metrics.staleness(
        np.asarray(batch.policy_versions),
        mask,
        self._version,
        sequence=np.asarray(batch.sequence),
        rollout_ids=np.asarray(batch.rollout_ids),
      ),
      **metrics.masked(
        np.asarray(batch.policy_versions), np.asarray(batch.loss_mask)
      ),
      **self._clock.snapshot(),
      **rollouts.sync_seconds,
      "sync/bytes": float(self._sync_bytes),
      "devices": float(self._devices["held"]),
      "devices/generation": float(self._devices["generation"]),
      "devices/training": float(self._devices["training"]),
      **self._ledger(rollouts),
    }
    if not skipped:
      sequences = np.unique(np.asarray(batch.sequence)[mask > 0])
      self._consumed += np.unique(batch.rollout_ids[sequences]).size
      self._trained += int(mask.sum())
      self._version += 1
    line["time/seconds"] = line.pop("T")
    line["policy_version"] = float(self._version)
    counts = metrics.Counts(
      generated=rollouts.counters.generated,
      consumed=self._consumed,
      sampled_tokens=rollouts.counters.sampled_tokens,
      trained_tokens=self._trained,
    )
    line |= metrics.throughput(
      counts, self._devices["held"], line["time/seconds"]
    )
    self._check_accounts(step, line["accounting/residual"])
    line |= self._error(step, line["time/seconds"])
    self._log.step(step, line)
    self._writers.step(step, line)
    self._log.rollouts(step, groups, self._cfg.logged_groups)
    self._progress.update(step, line)
    self.line = line
    self._check_skipped(step, line)

  def evaluated(self, step: int, values: Mapping[str, float]) -> None:
    """Writes an evaluation that ended beside training, in a line of its own.

    Args:
      step: after which it began.
      values: its metrics.
    """
    self._log.step(step, values, late=True)
    self._writers.step(step, values)

  def has_evaluated(self, step: int) -> bool:
    """Says whether the evaluation of a step is on the disk."""
    return self._log.has(step, "eval/version")

  def close(self) -> None:
    """Closes files, writers and progress line: all, whichever of them fails."""
    self._open.close()

  def _ledger(
    self, rollouts: stream.Stream | replay.Replay
  ) -> dict[str, float]:
    book, counts, pool = rollouts.booked, rollouts.counters, {}
    if self._cfg.data.pool is not None:
      pool = {
        "data/pool_passed": float(book.passed),
        "data/pool_always": float(counts.always),
        "data/pool_never": float(counts.never),
      }
    return {
      **pool,
      **curriculum.metrics(counts.levels),
      "ledger/admitted": float(book.admitted),
      "ledger/outstanding": float(len(book.outstanding)),
      "ledger/trained": float(book.trained.groups),
      "ledger/filtered": float(book.filtered.groups),
      "ledger/failed": float(book.failed.groups),
      "ledger/dropped": float(book.dropped.groups),
    }

  def _check_accounts(self, step: int, residual: float) -> None:
    if residual > clock.TRUSTED and self._is_trusted:
      self._is_trusted = False
      logging.warning(
        "step %d: %.1f %% of a stage's time are in no account "
        "(accounting/residual): busy/*, idle/* and overhead/* of this run are "
        "not to be trusted",
        step,
        100 * residual,
      )

  def _error(self, step: int, seconds: float) -> dict[str, float]:
    """Compares what was planned with what there is, of throughput."""
    if self._planned_s is None:
      return {}
    if step - self._first == history.FIRST_STEPS:
      self._warm = step, seconds
    if self._warm is None or step == self._warm[0]:
      return {"plan/error": math.nan}
    measured = (seconds - self._warm[1]) / (step - self._warm[0])
    return {"plan/error": measured / self._planned_s - 1}

  def _check_skipped(self, step: int, line: Mapping[str, float]) -> None:
    bad = line["loss/bad_updates"] > 0
    if bad:
      logging.warning(
        "step %d: an update was skipped: loss %s, gradient norm %s, or the "
        "update itself is not finite",
        step,
        line["loss/policy"],
        line["loss/grad_norm"],
      )
    self._skipped_in_a_row = self._skipped_in_a_row + 1 if bad else 0
    most = self._cfg.optim.max_skipped
    if self._skipped_in_a_row > most:
      raise types.RunError(
        f"step {step}: expected a finite loss, gradient and update, got loss "
        f"{line['loss/policy']}, gradient norm {line['loss/grad_norm']} and an "
        f"update that was skipped, {self._skipped_in_a_row} times in a row "
        f"(optim.max_skipped={most}). The newest checkpoint is of good "
        "weights. Lower the learning rate, in a new folder."
      )


class Silent:
  """A recorder of a process that is not the head: the head has the files.

  Attributes:
    line: empty.
    totals: empty.
  """

  def __init__(self) -> None:
    """Opens nothing."""
    self.line: dict[str, float] = {}
    self.totals: dict[str, int] = {}

  def begin(self, *_: Any) -> None:
    """Does nothing."""

  def at_step(self, step: int) -> None:
    """Does nothing."""

  def took(self, step: int, groups: Sequence[types.Group]) -> None:
    """Does nothing."""

  def step(self, step: int, *_: Any) -> None:
    """Does nothing."""

  def evaluated(self, step: int, *_: Any) -> None:
    """Does nothing."""

  def has_evaluated(self, step: int) -> bool:
    """Says that nothing is owed: others evaluate."""
    return True

  def close(self) -> None:
    """Does nothing."""
