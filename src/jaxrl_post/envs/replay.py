"""The stream of a run that trains once more on what a dump holds."""

import itertools
import logging
import os
from typing import Self

from jaxrl_post import types
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.runtime import dump


class Replay:
  """Has the methods of `stream.Stream` that the loop calls; samples nothing.

  Attributes:
    booked: the ledger of the batches that were taken; none is outstanding.
    counters: zeros: nothing is sampled.
    sync_seconds: empty: nobody waits for weights.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    ledger: ledgers.Ledger,
    *,
    clock: clocks.Clock,
  ) -> None:
    """Prepares to read; `with` starts.

    Args:
      folder: of the dump.
      ledger: from `ledgers.start`; the batches it has trained are passed over.
      clock: accounts the time of both stages.
    """
    self.booked = ledger
    self.counters = cuts.Counters()
    self.sync_seconds: dict[str, float] = {}
    self._clock = clock
    # The queue, so to speak, is always full.
    self._idle = clock.span("generation", "wait/queue_full")
    trained = ledger.step * ledger.groups_per_step
    self._groups = itertools.islice(dump.read_all(folder), trained, None)

  def __enter__(self) -> Self:
    """Leaves generation idle."""
    self._idle.__enter__()
    return self

  def __exit__(self, *error: object) -> None:
    """Ends the accounts."""
    self._idle.__exit__(None, None, None)

  def publish(
    self,
    policy: types.Policy,
    updated_at: float | None = None,
    *,
    cut: bool = False,
  ) -> None:
    """Does nothing: nobody samples with these weights."""
    del policy, updated_at, cut

  def next(self) -> list[types.Group] | None:
    """Reads the next batch.

    Returns:
      The next `groups_per_step` groups of the dump, in its order, whatever the
      batches were that it was written in; None when it cannot fill another.

    Raises:
      InputError: the dump was damaged since the start.
    """
    count = self.booked.groups_per_step
    with self._clock.span("training", "wait/host"):
      groups = list(itertools.islice(self._groups, count))
    if len(groups) < count:
      logging.warning(
        "data ended: %d groups left over, too few for a batch of %d",
        len(groups),
        count,
      )
      return None
    self.booked = ledgers.start(
      count, self.booked.max_lag, step=self.booked.step + 1
    )
    return groups

  def cut(self) -> None:
    """Returns None: the step of a checkpoint says what was read."""
