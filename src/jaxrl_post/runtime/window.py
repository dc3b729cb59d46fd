"""A run in its steady part: what its steps cost, and where the time went.

`metrics.jsonl` counts from the first admission, so its fractions hold the
compilation at the start for ever. Differences of two of its lines do not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post import types

Row = Mapping[str, Any]

STAGES = ("generation", "training")
WORK = ("busy", "sync", "checkpoint", "eval")
REASONS = (
  "queue_empty",
  "queue_full",
  "lag_gate",
  "reward_pending",
  "weights_pending",
  "host",
)
# An engine elsewhere that had nothing to do while a completion was open.
TRANSIT = "transit"
NOBODY = "unaccounted"
KINDS = (*WORK, "compile", *REASONS, TRANSIT, NOBODY)

# The first two steps compile; a program that comes later moves the start on,
# while at least half of the steps stay.
WARM_UP = 2
_KEPT = 0.5


@types.host_record
class Window:
  """The part of a run between two of its lines.

  Attributes:
    first: step after whose line it begins; 0 is the first admission.
    last: step that it ends with.
    seconds: of wall clock.
    steps: trained in it.
    shares: by stage, part of `seconds` by kind (`KINDS`): what it did, or why
      it waited. They add up to 1.
    compiled: programs built in it.
    generated: rollouts whose generation completed, by device-hour of it.
    consumed: rollouts that trained, likewise.
    sampled: tokens of completions that were made in it.
    trained: tokens that were trained in it.
    latency_s: weight-sync latency, mean of its steps; NaN if none had one.
    sync_parts: seconds of its parts (reshard, swap, copy), likewise.
    devices: `held`, and those of either stage; empty where the run's lines do
      not say.
  """

  first: int
  last: int
  seconds: float
  steps: int
  shares: Mapping[str, Mapping[str, float]]
  compiled: int
  generated: float
  consumed: float
  sampled: float
  trained: float
  latency_s: float
  sync_parts: Mapping[str, float]
  devices: Mapping[str, int]

  def idle(self, stage: str) -> float:
    """Part of the time in which a stage waited, for whatever reason."""
    return sum(self.shares[stage][reason] for reason in (*REASONS, TRANSIT))

  def work_s(self, stage: str) -> float:
    """Seconds a step in which a stage worked: all but waits and compilation."""
    parts = sum(self.shares[stage][kind] for kind in WORK)
    return parts * self.seconds / max(self.steps, 1)

  def reason(self, stage: str) -> str:
    """What a stage waited for most."""
    return max((*REASONS, TRANSIT), key=lambda why: self.shares[stage][why])


def number(row: Row, name: str) -> float:
  """Returns a value of a line; NaN where it has none."""
  value = row.get(name)
  if isinstance(value, bool) or not isinstance(value, int | float):
    return math.nan
  return float(value) if math.isfinite(value) else math.nan


def trained(rows: Sequence[Row]) -> list[Row]:
  """Returns the lines of steps that were trained and timed, in their order."""
  return [
    row
    for row in rows
    if number(row, "step") > 0 and number(row, "time/seconds") > 0
  ]


def steady(rows: Sequence[Row]) -> Window:
  """Finds the steady part of a run: without its warm-up.

  Args:
    rows: of `trained`, at least one.

  Returns:
    From the step after which no program was built, if half of the steps come
    after it; else from the end of the second step. With two steps or fewer,
    the whole run.
  """
  if len(rows) <= WARM_UP:
    return between(None, rows[-1], rows)
  counts = [number(row, "compile/count") for row in rows]
  # Fewer than before are those of another process, which compiled, too.
  moved = [i for i in range(1, len(rows)) if abs(counts[i] - counts[i - 1]) > 0]
  last = max(moved, default=0)
  late = last if len(rows) - 1 - last >= _KEPT * len(rows) else 0
  start = max(WARM_UP - 1, late)
  return between(rows[start], rows[-1], rows[start + 1 :])


def between(first: Row | None, last: Row, inside: Sequence[Row]) -> Window:
  """Measures from the end of one step to the end of another.

  Args:
    first: line of the former; None is the first admission.
    last: line of the latter.
    inside: lines after `first`, up to and with `last`.
  """
  first = first or {}
  start = max(0.0, _or_zero(number(first, "time/seconds")))
  seconds = max(number(last, "time/seconds") - start, 1e-9)

  def rise(name: str, *, rate: bool = True) -> float:
    """What a figure, a mean over T if it is a rate, grew by."""
    ends = [
      _or_zero(number(row, name)) * (time if rate else 1.0)
      for row, time in ((first, start), (last, start + seconds))
    ]
    return max(0.0, ends[1] - ends[0])

  engines = rise("fleet/busy_s", rate=False) if "fleet/busy_s" in last else None
  keys = {"held": "devices", **{name: f"devices/{name}" for name in STAGES}}
  counts = {name: number(last, key) for name, key in keys.items()}
  known = all(count > 0 for count in counts.values())
  return Window(
    first=int(_or_zero(number(first, "step"))),
    last=int(number(last, "step")),
    seconds=seconds,
    steps=len(inside),
    shares={
      stage: _shares(
        {kind: rise(key) / seconds for kind, key in _keys(stage).items()},
        engines / seconds if engines and stage == "generation" else None,
      )
      for stage in STAGES
    },
    compiled=int(rise("compile/count", rate=False)),
    generated=rise("throughput/generated_per_device_hour") / seconds,
    consumed=rise("throughput/consumed_per_device_hour") / seconds,
    sampled=rise("throughput/sampled_tokens_per_s"),
    trained=rise("throughput/trained_tokens_per_s"),
    latency_s=mean(inside, "sync/latency_s"),
    sync_parts={
      part: mean(inside, f"sync/{part}_s")
      for part in ("reshard", "swap", "copy")
    },
    devices={k: int(n) for k, n in counts.items()} if known else {},
  )


def mean(rows: Sequence[Row], name: str) -> float:
  """Returns the mean of a value over the lines that have it, or NaN."""
  values = [x for x in (number(row, name) for row in rows) if math.isfinite(x)]
  return sum(values) / len(values) if values else math.nan


def _keys(stage: str) -> dict[str, str]:
  waits = {why: f"idle/{stage}/{why}" for why in REASONS}
  extra = {
    kind: f"overhead/{stage}/{kind}"
    for kind in ("sync", "checkpoint", "eval", "compile")
  }
  return {"busy": f"busy/{stage}", **extra, **waits}


def _shares(
  shares: Mapping[str, float], engines: float | None
) -> dict[str, float]:
  """Completes the shares of a stage to 1."""
  busy = shares["busy"]
  worked = busy if engines is None else min(busy, engines)
  full = {**shares, "busy": worked, TRANSIT: busy - worked}
  return {**full, NOBODY: max(0.0, 1.0 - sum(full.values()))}


def _or_zero(value: float) -> float:
  return value if math.isfinite(value) else 0.0
