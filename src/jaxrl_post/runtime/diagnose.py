"""Is a run held up between its stages or inside them, and what moves it?

Pure: lines of `metrics.jsonl` and a `config.json`, of one run or of two, to
signs, a regime and levers. The five signs are those of a structural bottleneck,
one that a faster kernel does not remove.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post import types
from jaxrl_post.runtime import clock, history, levers
from jaxrl_post.runtime import window as windows

# Below it, stages that never wait would make the run 1 / 0.7 = 1.4 times as
# fast: more than most kernels have left.
UTILISATION = 0.70
# A stage that waits for a fifth of its time could do a quarter more.
IDLE = 0.20
# Weights that moved in no time would bring 1 / 0.9 = 1.11 times.
SYNC = 0.10
# At least half of what a stage gained is to be seen by the wall clock.
REACHED = 0.50
# A stage that is less than this many times as fast is within the noise.
FASTER = 1.10
# Twice the devices are to bring 1.6 times the tokens at least.
SCALING = 0.80


@dataclasses.dataclass(frozen=True)
class Sign:
  """One sign of a structural bottleneck.

  Attributes:
    name: of the sign.
    figure: what was measured; None where it is not known.
    rule: what makes it fire, such as "< 0.70".
    fires: None where it is not known.
    why: the figure in words, or what is missing.
  """

  name: str
  figure: float | None
  rule: str
  fires: bool | None
  why: str


@types.host_record
class Diagnosis:
  """What a run says about itself.

  Attributes:
    window: the part that figures are of.
    signs: the five, in order.
    regime: "composition", "kernels", or "not known".
    because: why it is that one.
    levers: the best first; one at least where the regime is known.
    notes: what else to know before the figures are trusted.
  """

  window: windows.Window
  signs: Sequence[Sign]
  regime: str
  because: str
  levers: Sequence[levers.Lever]
  notes: Sequence[str]


def diagnose(
  rows: Sequence[history.Row],
  config: Mapping[str, Any],
  earlier: tuple[Sequence[history.Row], Mapping[str, Any]] | None = None,
) -> Diagnosis:
  """Diagnoses a run.

  Args:
    rows: lines of its trained steps, at least one.
    config: its config.json.
    earlier: the same of another run, with slower kernels or fewer devices; the
      last two signs compare with it.

  Returns:
    Figures of the steps that count; with fewer than `window.LEAST_STEPS` of
    them those of all steps, and all signs unknown. The regime is "composition"
    if any sign fires, "kernels" if the first three are known and none fires.
  """
  steady = windows.steady(rows)
  window = steady or windows.over(rows, np.ones(len(rows), bool))
  signs = [
    _utilisation(window, config),
    _idle(window, config),
    _sync(window, config),
    *_compared(window, config, earlier),
  ]
  if steady is None:
    why = (
      f"needs {windows.LEAST_STEPS} steps that count, got "
      f"{history.counted(rows).sum()} of {len(rows)}"
    )
    signs = [Sign(sign.name, None, sign.rule, None, why) for sign in signs]
  fired = [str(i) for i, sign in enumerate(signs, 1) if sign.fires]
  unknown = [sign for sign in signs[:3] if sign.fires is None]
  if fired:
    regime = "composition"
    which = f"sign{'s' if len(fired) > 1 else ''} {', '.join(fired)}"
    because = f"{which}: time is lost between the stages"
  elif unknown:
    regime, because = "not known", unknown[0].why
  else:
    regime = "kernels"
    because = "no sign fires: time is spent inside the stages"
  found = levers.structural(window, config) if fired else []
  if regime != "not known" and not found:
    found = [levers.kernels(window, config)]
  return Diagnosis(
    window=window,
    signs=signs,
    regime=regime,
    because=because,
    levers=found,
    notes=_notes(window, rows),
  )


def utilisation(
  window: windows.Window, config: Mapping[str, Any]
) -> float | None:
  """Returns the part of the devices' time in which a program ran.

  Returns:
    Over all devices held; None where it is not known how many each stage has,
    and they are not the same.
  """
  busy = {stage: window.shares[stage]["busy"] for stage in history.STAGES}
  if levers.shared(config):
    held = window.devices.get("held", 1)
    part = window.devices.get("training", 1) / held
    return part * min(1.0, sum(busy.values()))
  if not window.devices:
    return None
  used = sum(share * window.devices[stage] for stage, share in busy.items())
  return used / window.devices["held"]


def _utilisation(window: windows.Window, config: Mapping[str, Any]) -> Sign:
  name, rule = "utilisation of tuned stages", f"< {UTILISATION:.2f}"
  figure = utilisation(window, config)
  if figure is None:
    why = "needs devices/* in metrics.jsonl, which newer runs have"
    return Sign(name, None, rule, None, why)
  busy = ", ".join(
    f"{stage} busy {window.shares[stage]['busy']:.2f}"
    for stage in history.STAGES
  )
  why = f"{busy}; nothing compiles"
  return Sign(name, figure, rule, figure < UTILISATION, why)


def _idle(window: windows.Window, config: Mapping[str, Any]) -> Sign:
  figure = levers.idle(window, config)
  stage = max(history.STAGES, key=window.idle)
  reason = window.reason(stage)
  why = f"{stage} waits, {window.shares[stage][reason]:.2f} for {reason}"
  if levers.shared(config):
    why = f"devices on which neither stage works; {why}"
  rule = f"> {IDLE:.2f}"
  return Sign("idle-wait of a stage", figure, rule, figure > IDLE, why)


def _sync(window: windows.Window, config: Mapping[str, Any]) -> Sign:
  figure = levers.sync(window, config)
  latency = (
    "latency not measured"
    if math.isnan(window.latency_s)
    else f"latency {1000 * window.latency_s:.1f} ms"
  )
  rule = f"> {SYNC:.2f}"
  why = f"{latency}, a step {1000 * window.step_s:.0f} ms"
  return Sign("sync and transfer", figure, rule, figure > SYNC, why)


def _compared(
  window: windows.Window,
  config: Mapping[str, Any],
  earlier: tuple[Sequence[history.Row], Mapping[str, Any]] | None,
) -> tuple[Sign, Sign]:
  """Returns the two signs that need an earlier run."""
  names = "part of a kernel's gain that arrived", "gain from more devices"
  rules = f"< {REACHED:.2f}", f"< {SCALING:.2f}"
  why = ""
  before = None if earlier is None else windows.steady(earlier[0])
  if earlier is None:
    why = "needs an earlier run: --mode=report RUN EARLIER"
  elif before is None:
    why = "needs an earlier run with more steps"
  elif any(
    history.leaf(earlier[1], name) != history.leaf(config, name)
    for name in ("model.path", "model.config")
  ):
    why = "needs an earlier run of the same model"
  elif not (window.devices and before.devices):
    why = "needs devices/* in metrics.jsonl of both runs"
  elif not all(w.sampled and w.trained for w in (window, before)):
    why = "needs trained tokens in both runs"
  if why or before is None:
    one, two = (Sign(names[i], None, rules[i], None, why) for i in (0, 1))
    return one, two
  wall = (window.trained / window.seconds) / (before.trained / before.seconds)
  grown = window.devices["held"] / before.devices["held"]
  return (
    _arrived(names[0], rules[0], _faster(window, before), wall / grown),
    _scaled(names[1], rules[1], grown, wall),
  )


def _faster(
  window: windows.Window, before: windows.Window
) -> tuple[str, float]:
  """Returns the stage that gained most, and how many times as fast it is.

  By busy device-seconds a token, so that neither longer completions nor more
  devices count.
  """
  gains = {}
  for stage, tokens in (("generation", "sampled"), ("training", "trained")):
    cost = [
      w.shares[stage]["busy"]
      * w.seconds
      * w.devices[stage]
      / getattr(w, tokens)
      for w in (before, window)
    ]
    gains[stage] = cost[0] / max(cost[1], 1e-12)
  return max(gains.items(), key=lambda item: item[1])


def _arrived(
  name: str, rule: str, best: tuple[str, float], wall: float
) -> Sign:
  stage, gain = best
  if gain < FASTER:
    why = f"no stage is {FASTER:.2f} times as fast as in the earlier run"
    return Sign(name, None, rule, False, why)
  figure = (wall - 1) / (gain - 1)
  why = f"{stage} {gain:.2f} times as fast, the run {wall:.2f} times"
  return Sign(name, figure, rule, figure < REACHED, why)


def _scaled(name: str, rule: str, grown: float, wall: float) -> Sign:
  if grown <= 1:
    why = "needs an earlier run with fewer devices"
    return Sign(name, None, rule, None, why)
  why = f"{grown:.2f} times the devices, {wall:.2f} times the trained tokens"
  return Sign(name, wall / grown, rule, wall / grown < SCALING, why)


def _notes(window: windows.Window, rows: Sequence[history.Row]) -> list[str]:
  """Says what stands between the figures and trust in them."""
  notes = []
  residual = max(window.shares[s][windows.NOBODY] for s in history.STAGES)
  if residual > clock.TRUSTED:
    notes.append(
      f"{residual:.3f} of a stage's time is in no account (limit "
      f"{clock.TRUSTED:.2f}): trust no finer difference."
    )
  bad = sum(history.number(row, "loss/bad_updates") > 0 for row in rows)
  if bad:
    notes.append(f"updates of {bad} of {len(rows)} steps were not finite.")
  return notes
