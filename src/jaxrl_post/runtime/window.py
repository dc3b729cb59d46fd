"""What the steps of a run cost, and where the time of its stages went."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool

from jaxrl_post import types
from jaxrl_post.runtime import clock, history

WORK = ("busy", *(kind for kind in clock.OVERHEADS if kind != "compile"))
REASONS = tuple(kind.removeprefix("wait/") for kind in clock.WAITS)
# An engine elsewhere that had nothing to do while a completion was open.
TRANSIT = "transit"
NOBODY = "unaccounted"
KINDS = (*WORK, "compile", *REASONS, TRANSIT, NOBODY)
# Fewer steps say nothing about the next.
LEAST_STEPS = 3


@types.host_record
class Window:
  """Some steps of a run.

  Attributes:
    where: of the lines of its trained steps, those that are in it.
    first: its first step.
    last: its last step.
    seconds: of wall clock.
    shares: by stage, part of `seconds` by kind (`KINDS`): what it did, or why
      it waited. They add up to 1.
    generated: rollouts whose generation completed, by device-hour of it.
    consumed: rollouts that trained, likewise.
    sampled: tokens of completions that were made in it.
    trained: tokens that were trained in it.
    latency_s: weight-sync latency, mean of its steps; NaN if none had one.
    sync_parts: seconds of its parts (reshard, swap, copy), likewise.
    devices: `held`, and those of either stage; empty where the run's lines do
      not say.
  """

  where: Bool[np.ndarray, " N"]
  first: int
  last: int
  seconds: float
  shares: Mapping[str, Mapping[str, float]]
  generated: float
  consumed: float
  sampled: float
  trained: float
  latency_s: float
  sync_parts: Mapping[str, float]
  devices: Mapping[str, int]

  @property
  def steps(self) -> int:
    """How many it has."""
    return int(self.where.sum())

  @property
  def step_s(self) -> float:
    """Seconds of a step."""
    return self.seconds / self.steps

  @property
  def span(self) -> str:
    """Names its steps."""
    between = f"steps {self.first} to {self.last}"
    whole = self.last - self.first + 1 == self.steps
    return between if whole else f"{self.steps} of {between}"

  def idle(self, stage: str) -> float:
    """Part of the time in which a stage waited, for whatever reason."""
    return sum(self.shares[stage][reason] for reason in (*REASONS, TRANSIT))

  def work_s(self, stage: str) -> float:
    """Seconds a step in which a stage worked: all but waits and compilation."""
    return sum(self.shares[stage][kind] for kind in WORK) * self.step_s

  def reason(self, stage: str) -> str:
    """What a stage waited for most."""
    return max((*REASONS, TRANSIT), key=lambda why: self.shares[stage][why])


def steady(rows: Sequence[history.Row]) -> Window | None:
  """Measures the steps that count; None if fewer than `LEAST_STEPS` do.

  Args:
    rows: of trained steps.
  """
  ok = history.counted(rows)
  return over(rows, ok) if ok.sum() >= LEAST_STEPS else None


def over(rows: Sequence[history.Row], where: Bool[np.ndarray, " N"]) -> Window:
  """Measures some steps of a run.

  Args:
    rows: of trained steps.
    where: which of them; at least one.
  """
  wall = history.column(rows, "time/seconds")
  seconds = max(float(history.added(wall)[where].sum()), 1e-9)

  def rise(name: str, scale: np.ndarray | float = wall) -> float:
    """What a figure grew by in these steps; a mean over T by default."""
    each = history.added(history.column(rows, name) * scale)[where]
    return max(0.0, float(np.nansum(each)))

  inside = [row for row, ok in zip(rows, where, strict=True) if ok]
  engines = rise("fleet/busy_s", 1.0) if "fleet/busy_s" in inside[-1] else None
  keys = {
    "held": "devices",
    **{name: f"devices/{name}" for name in history.STAGES},
  }
  counts = {k: history.number(inside[-1], key) for k, key in keys.items()}
  known = all(count > 0 for count in counts.values())
  return Window(
    where=where,
    first=int(inside[0]["step"]),
    last=int(inside[-1]["step"]),
    seconds=seconds,
    shares={
      stage: _shares(
        {kind: rise(key) / seconds for kind, key in _keys(stage).items()},
        engines / seconds if engines and stage == "generation" else None,
      )
      for stage in history.STAGES
    },
    generated=rise("throughput/generated_per_device_hour") / seconds,
    consumed=rise("throughput/consumed_per_device_hour") / seconds,
    sampled=rise("throughput/sampled_tokens_per_s"),
    trained=rise("throughput/trained_tokens_per_s"),
    latency_s=history.mean(inside, "sync/latency_s"),
    sync_parts={
      part: history.mean(inside, f"sync/{part}_s")
      for part in ("reshard", "swap", "copy")
    },
    devices={k: int(n) for k, n in counts.items()} if known else {},
  )


def _keys(stage: str) -> dict[str, str]:
  waits = {why: f"idle/{stage}/{why}" for why in REASONS}
  extra = {kind: f"overhead/{stage}/{kind}" for kind in clock.OVERHEADS}
  return {"busy": f"busy/{stage}", **extra, **waits}


def _shares(
  shares: Mapping[str, float], engines: float | None
) -> dict[str, float]:
  """Completes the shares of a stage to 1."""
  busy = shares["busy"]
  worked = busy if engines is None else min(busy, engines)
  full = {**shares, "busy": worked, TRANSIT: busy - worked}
  return {**full, NOBODY: max(0.0, 1.0 - sum(full.values()))}
