"""What to change in a run, and what it would bring at most.

Each gain is the time of a step now over the time it would take if the lever
did all that it can: a bound from the run's own seconds, not a promise. Devices
are taken to speed a stage up in proportion to their number.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_post.runtime import history
from jaxrl_post.runtime import window as windows

# A smaller gain is within what two runs of one kind differ by.
WORTH = 1.05
# A wait shorter than this part of the time is not worth a lever of its own.
_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Lever:
  """A change of the settings.

  Attributes:
    flags: for the command line; empty where no setting does it.
    gain: time of a step now over that with the change, at most.
    how: the gain in numbers.
    why: what the change does, in a sentence, with its price.
  """

  flags: str
  gain: float
  how: str
  why: str


def lockstep(config: Mapping[str, Any]) -> bool:
  """Says whether generation and training wait for each other."""
  return history.leaf(config, "max_lag", 0) == 0


def shared(config: Mapping[str, Any]) -> bool:
  """Says whether both stages have the same devices, in turn."""
  return history.leaf(config, "placement.mode") == "colocated"


def idle(window: windows.Window, config: Mapping[str, Any]) -> float:
  """Returns the part of the time in which devices wait.

  Returns:
    Of the stage that waits more. Where both have the same devices: in which
    neither stage works, since one's wait is the other's turn.
  """
  if not shared(config):
    return max(window.idle(stage) for stage in history.STAGES)
  held = [1.0 - window.idle(stage) for stage in history.STAGES]
  # Evaluation is charged to both stages at once.
  twice = min(window.shares[stage]["eval"] for stage in history.STAGES)
  return max(0.0, 1.0 - sum(held) + twice)


def structural(
  window: windows.Window, config: Mapping[str, Any]
) -> list[Lever]:
  """Finds the settings that would move time lost between the stages.

  Returns:
    Those worth at least `WORTH`, the best first; before them, of a run in
    lockstep, the overlap of its stages, which takes no scaling for granted.
  """
  found = [
    _spread(window, config),
    _in_turn(window, config),
    _split(window, config),
    _further_ahead(window, config),
    _rewards(window, config),
    _sync(window, config),
    _pauses(window, config),
  ]
  found = [x for x in found if x]
  found = [_ahead(window, config), *sorted(found, key=lambda x: -x.gain)]
  return [lever for lever in found if lever and lever.gain >= WORTH]


def kernels(window: windows.Window, config: Mapping[str, Any]) -> Lever:
  """Returns what makes the longer stage itself faster.

  Its gain is that of a stage twice as fast.
  """
  stage = max(history.STAGES, key=window.work_s)
  other = next(name for name in history.STAGES if name != stage)
  busy = window.shares[stage]["busy"] * window.step_s
  step = window.step_s
  left = step - busy / 2
  if not shared(config) and not lockstep(config):
    left = max(left, window.work_s(other))
  parts = history.leaf(config, "optim.microbatches", 1)
  flags = ""
  remat = history.leaf(config, "model.remat", "none")
  if stage == "training" and remat != "none":
    flags = "--set model.remat=none"
  elif stage == "training" and parts > 1:
    flags = f"--set optim.microbatches={parts // 2}"
  bench = "update" if stage == "training" else "rollout"
  return Lever(
    flags,
    step / max(left, 1e-9),
    f"{_s(step)} a step, of which {stage} {_s(busy)}, halved",
    f"{stage.capitalize()} is the longer stage, and busy: its speed counts. "
    f"bench/{bench}.py says how far it is from its limit.",
  )


def _ahead(window: windows.Window, config: Mapping[str, Any]) -> Lever | None:
  """Generation runs one version ahead of training."""
  if not lockstep(config):
    return None
  flags = "--set max_lag=1"
  if history.leaf(config, "stream.asynchronous") is False:
    flags += " --set stream.asynchronous=true"
  why = (
    "The stages run one after the other; one version of lag lets them overlap. "
    "Price: staleness of up to 1."
  )
  if shared(config):
    waits = idle(window, config)
    return Lever(flags, 1 / max(1 - waits, 1e-9), _less(waits, "waits"), why)
  times = [window.work_s(stage) for stage in history.STAGES]
  # Scoring, for which both wait in lockstep, overlaps as well.
  scoring = window.shares["generation"]["reward_pending"] * window.step_s
  gain = (sum(times) + scoring) / max(*times, 1e-9)
  parts = " + ".join(map(_s, [*times, scoring] if scoring else times))
  return Lever(flags, gain, f"({parts}) / {_s(max(times))} a step", why)


def _split(window: windows.Window, config: Mapping[str, Any]) -> Lever | None:
  """Devices go from the stage that waits to the one that is waited for."""
  if lockstep(config) or shared(config) or not window.devices:
    return None
  times = [window.work_s(stage) for stage in history.STAGES]
  devices = [window.devices[stage] for stage in history.STAGES]
  work = [t * d for t, d in zip(times, devices, strict=True)]
  held, now = window.devices["held"], max(times)
  if history.leaf(config, "placement.mode") == "roles":
    return _replica(window, config)

  def step_s(generate: int) -> float:
    return max(work[0] / generate, work[1] / (held - generate), 1e-9)

  best = min(range(1, held), key=step_s, default=0)
  if best and now / step_s(best) >= WORTH:
    sides = ("placement.generation", "placement.training")
    free = all(-1 in history.leaf(config, side, {}).values() for side in sides)
    free = free and not history.leaf(config, "placement.training_devices")
    flag = f"--set placement.generation_fraction={round(best / held, 4):g}"
    where = "" if free else ": to be written into the axes of both sides"
    return Lever(
      flag if free else "",
      now / step_s(best),
      f"{_s(now)} / max({work[0]:.3g} / {best}, {work[1]:.3g} / "
      f"{held - best}) device-seconds a step",
      f"Generation gets {best} of {held} devices, training the rest, by the "
      f"device-seconds that each needs{where}.",
    )
  return Lever(
    "--set placement.mode=colocated",
    now * held / max(sum(work), 1e-9),
    f"{_s(now)} / (({work[0]:.3g} + {work[1]:.3g}) / {held}) device-seconds "
    "a step",
    f"No division of {held} devices fits the two stages; in turn, each has "
    "all of them. Price: one memory for both.",
  )


def _replica(window: windows.Window, config: Mapping[str, Any]) -> Lever:
  """One more process generates."""
  times = [window.work_s(stage) for stage in history.STAGES]
  now = history.leaf(config, "placement.roles.generation_replicas", 1)
  then = times[0] * now / (now + 1)
  return Lever(
    f"--set placement.roles.generation_replicas={now + 1}",
    max(times) / max(then, times[1], 1e-9),
    f"{_s(max(times))} / max({_s(then)}, {_s(times[1])}) a step",
    "Generation is the longer stage; one more replica shares it. Price: its "
    "devices, which figures per device-hour count.",
  )


def _spread(window: windows.Window, config: Mapping[str, Any]) -> Lever | None:
  """Devices that are held and in no mesh get work."""
  if not shared(config) or not window.devices:
    return None
  held, used = window.devices["held"], window.devices["training"]
  return Lever(
    "--set placement.training.fsdp=-1 --set placement.generation.data=-1",
    held / used,
    f"{held} devices / {used} in use",
    f"The run holds {held} devices, and uses {used}.",
  )


def _in_turn(window: windows.Window, config: Mapping[str, Any]) -> Lever | None:
  """Both stages get the devices of both, as they never work at once."""
  apart = history.leaf(config, "placement.mode") == "split" and window.devices
  if not lockstep(config) or not apart:
    return None
  times = [window.work_s(stage) for stage in history.STAGES]
  work = sum(
    time * window.devices[stage]
    for time, stage in zip(times, history.STAGES, strict=True)
  )
  held = window.devices["held"]
  return Lever(
    "--set placement.mode=colocated",
    sum(times) * held / max(work, 1e-9),
    f"({_s(times[0])} + {_s(times[1])}) / ({work:.3g} / {held}) a step",
    "In lockstep one side's devices always wait; in turn, each stage has all. "
    "Price: one memory for both.",
  )


def _further_ahead(
  window: windows.Window, config: Mapping[str, Any]
) -> Lever | None:
  """Both stages wait at times: more lag evens out long and short steps."""
  waits = [window.idle(stage) for stage in history.STAGES]
  gated = window.shares["generation"]["lag_gate"] >= _SHARE
  starved = window.shares["training"]["queue_empty"] >= _SHARE
  if lockstep(config) or shared(config) or not (gated and starved):
    return None
  lag = history.leaf(config, "max_lag", 1) + 1
  return Lever(
    f"--set max_lag={lag}",
    1 / max(1 - min(waits), 1e-9),
    _less(min(waits), "waits of the busier stage"),
    "Each stage waits for the other at times: steps differ in length, and "
    f"more lag evens them out. Price: staleness of up to {lag}.",
  )


def _rewards(window: windows.Window, config: Mapping[str, Any]) -> Lever | None:
  """Scoring keeps both stages waiting."""
  share = min(window.shares[s]["reward_pending"] for s in history.STAGES)
  if not shared(config):
    share = window.shares["training"]["reward_pending"]
  workers = history.leaf(config, "rewards.workers", 1)
  return Lever(
    f"--set rewards.workers={2 * workers}",
    1 / max(1 - share / 2, 1e-9),
    _less(share / 2, "half of the wait for rewards"),
    "Training waits for scores. Twice the workers halve that, if there are "
    "cores for them.",
  )


def _sync(window: windows.Window, config: Mapping[str, Any]) -> Lever | None:
  """Weights take long to get to where they are sampled from."""
  share = sync(window, config)
  parts = {k: v for k, v in window.sync_parts.items() if math.isfinite(v)}
  block = history.leaf(config, "sampling.block", 1)
  gain, how = 1 / max(1 - share / 2, 1e-9), _less(share / 2, "half of the sync")
  if parts and max(parts, key=parts.__getitem__) == "swap" and block > 1:
    return Lever(
      f"--set sampling.block={block // 2}",
      gain,
      how,
      "New weights wait for the block under way: a shorter one ends sooner. "
      "Price: more dispatches a token.",
    )
  groups = 2 * history.leaf(config, "groups_per_step", 1)
  return Lever(
    f"--set groups_per_step={groups}",
    gain,
    how,
    "Weights move once a batch: a batch twice as large pays half as often. "
    "Price: half the updates a rollout.",
  )


def sync(window: windows.Window, config: Mapping[str, Any]) -> float:
  """Returns the part of the time in which a stage moves weights.

  Returns:
    Of the stage that does more of it; in lockstep at least the whole latency,
    from the end of an update to the first block sampled with it, since nothing
    else goes on meanwhile.
  """
  share = max(window.shares[stage]["sync"] for stage in history.STAGES)
  latency = window.latency_s / window.step_s
  if lockstep(config) and math.isfinite(latency):
    share = max(share, min(latency, 1.0))
  return share


def _pauses(window: windows.Window, config: Mapping[str, Any]) -> Lever | None:
  """Evaluation or checkpoints stop the training."""
  kind = max(("eval", "checkpoint"), key=window.shares["training"].__getitem__)
  share = window.shares["training"][kind]
  name = {"eval": "evaluation.every", "checkpoint": "checkpoint.every"}[kind]
  every = history.leaf(config, name, 0)
  if not every or share < _SHARE:
    return None
  return Lever(
    f"--set {name}={2 * every}",
    1 / max(1 - share / 2, 1e-9),
    _less(share / 2, f"half of the time in {kind}"),
    f"Training stands still for {kind}; half as often costs half.",
  )


def _less(share: float, what: str) -> str:
  return f"1 / (1 - {share:.2f}), without {what}"


def _s(seconds: float) -> str:
  return f"{seconds:.3g} s"
