"""The page of a run: `report.html`, one file that loads nothing.

It has no script, and its policy forbids any: what a model wrote is shown, and
never run. Text is escaped by the template and by `draw`.
"""

import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from jaxrl_post import types
from jaxrl_post.runtime import (
  diagnose,
  draw,
  folder,
  history,
  levers,
  log,
  metrics,
  samples,
)
from jaxrl_post.runtime import window as windows

_TEMPLATE = "report.html"
_KINDS = (
  ("busy", "busy"),
  ("sync", "sync"),
  ("compile", "compile"),
  ("checkpoint", "checkpoint"),
  ("eval", "evaluation"),
  ("wait", "waiting"),
  ("unaccounted", "in no account"),
)
_WORDS = {
  **dict(_KINDS),
  "queue_empty": "waiting: no group is ready",
  "queue_full": "waiting: enough groups are ready",
  "lag_gate": "waiting: max_lag is reached",
  "reward_pending": "waiting for rewards",
  "weights_pending": "waiting for weights",
  "host": "waiting for the host",
  "transit": "open, but not worked on",
}
_LAGS = ("0", "1", "2", "3 and more")
_MOST_BARS = 24


@types.host_record
class Panel:
  """A picture with its words.

  Attributes:
    title: above it.
    svg: of `draw`; empty where there is nothing to draw.
    names: of its curves, by number of their colour; none for a single one.
    note: below it.
  """

  title: str
  svg: str
  names: Sequence[tuple[int, str]]
  note: str


def html(run: history.Run, diagnosis: diagnose.Diagnosis) -> str:
  """Returns the page of a run, with its diagnosis.

  Args:
    run: what its folder says.
    diagnosis: of it.

  Returns:
    A whole page, whose only control characters are line breaks; others that
    the folder holds, and what turns the direction of writing, are escapes.
  """
  source = importlib.resources.files("jaxrl_post.runtime")
  environment = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  template = environment.from_string(
    (source / _TEMPLATE).read_text(encoding="utf-8")
  )
  window = diagnosis.window
  rows, config = run.rows, run.config
  whole = windows.over(rows, np.ones(len(rows), bool))
  timeline = samples.typical(run.path, rows, window.where)
  text = template.render(
    title=f"Run {run.path.resolve().name}",
    about=about(rows, config, window),
    diagnosis=diagnosis,
    regime=regime(diagnosis),
    span=window.span,
    tiles=tiles(rows, window),
    stacks=[
      (window.span.capitalize(), _stack(window)),
      ("The whole run", _stack(whole)),
    ],
    kinds=_KINDS,
    stages=history.STAGES,
    shares=[
      (_WORDS[kind], [window.shares[s][kind] for s in history.STAGES])
      for kind in windows.KINDS
      if any(window.shares[s][kind] > 5e-5 for s in history.STAGES)
    ],
    timeline={"svg": _timeline(timeline), "note": timeline.note},
    charts=[
      ("Reward and loss", _curves(run.lines)),
      ("Lengths and staleness", _histograms(rows, window, config)),
    ],
    samples=samples.rollouts(run.path),
    settings=_settings(config),
  )
  return log.visible(text)  # No escape is HTML, so it may come last.


def regime(diagnosis: diagnose.Diagnosis) -> str:
  """Returns the regime in a line."""
  return {
    "composition": "Composition: the time is lost between the stages",
    "kernels": "Kernels: the time is spent inside the stages",
  }.get(diagnosis.regime, "Regime not known")


def about(
  rows: Sequence[history.Row],
  config: Mapping[str, Any],
  window: windows.Window,
) -> str:
  """Says in a line what the run was."""
  devices = window.devices
  where = f"{devices['held']} devices" if devices else "devices not recorded"
  if devices and not levers.shared(config):
    where += f" ({devices['training']} train, {devices['generation']} generate)"
  return (
    f"{len(rows)} steps in {history.number(rows[-1], 'time/seconds'):.1f} s, "
    f"{where}, placement {history.leaf(config, 'placement.mode', 'unknown')}, "
    f"max_lag {history.leaf(config, 'max_lag', 'unknown')}"
  )


def tiles(
  rows: Sequence[history.Row], window: windows.Window
) -> list[tuple[str, str, str]]:
  """Returns the four numbers: name, value, and what belongs to it."""
  lags = [history.number(row, "staleness/max") for row in rows]
  most = max((lag for lag in lags if math.isfinite(lag)), default=math.nan)
  idle = {stage: f"{window.idle(stage):.2f}" for stage in history.STAGES}
  latency = 1000 * window.latency_s
  return [
    (
      "rollouts per device-hour",
      f"{window.consumed:,.0f}",
      f"consumed; {window.generated:,.0f} generated",
    ),
    ("idle, generation", idle["generation"], window.reason("generation")),
    ("idle, training", idle["training"], window.reason("training")),
    (
      "weight-sync latency",
      f"{latency:.1f} ms" if math.isfinite(latency) else "–",
      "mean of the steps",
    ),
    (
      "staleness",
      _plain(history.mean(rows, "staleness/mean"), ".2f"),
      f"versions, mean; {_plain(most, '.0f')} at most",
    ),
  ]


def _plain(value: float, form: str) -> str:
  return format(value, form) if math.isfinite(value) else "–"


def _stack(
  window: windows.Window,
) -> list[tuple[str, list[tuple[str, str, float]]]]:
  """Returns, by stage, the parts of its bar."""
  named = {kind for kind, _ in _KINDS}
  return [
    (
      stage,
      [
        (kind if kind in named else "wait", _WORDS[kind], share)
        for kind, share in window.shares[stage].items()
        if share > 5e-4
      ],
    )
    for stage in history.STAGES
  ]


def _timeline(found: samples.Timeline) -> str:
  if not found.spans:
    return ""
  return draw.timeline(
    "what each stage did in a typical step",
    found.lanes,
    found.spans,
    seconds=found.seconds,
    levels=found.levels,
  )


def _curves(rows: Sequence[history.Row]) -> list[Panel]:
  panels = (
    ("Reward", ("reward/mean", "eval/reward"), "by step; dots: held-out"),
    ("Loss", ("loss/policy", "loss/kl", "loss/value"), "by step"),
    ("Entropy", ("loss/entropy",), "nats a token, by step"),
    ("Gradient norm", ("loss/grad_norm",), "before clipping, by step"),
    (
      "Completion length",
      ("completion/mean_tokens", "completion/max_tokens"),
      "tokens, by step",
    ),
    ("Staleness", ("staleness/mean", "staleness/max"), "versions, by step"),
  )
  found = []
  for title, names, note in panels:
    lines = [
      draw.Curve(
        name=name,
        points=[
          (history.number(row, "step"), history.number(row, name))
          for row in rows
        ],
        dots=name.startswith("eval/"),
      )
      for name in names
    ]
    shown = [
      (i, line.name)
      for i, line in enumerate(lines)
      if any(math.isfinite(x) and math.isfinite(y) for x, y in line.points)
    ]
    svg = draw.curves(f"{title}, {note}", lines)
    found.append(
      Panel(
        title=title,
        svg=svg,
        names=shown if len(shown) > 1 else [],
        note=note if svg else "no figure in metrics.jsonl",
      )
    )
  return found


def _histograms(
  rows: Sequence[history.Row],
  window: windows.Window,
  config: Mapping[str, Any],
) -> list[Panel]:
  inside = [row for row, ok in zip(rows, window.where, strict=True) if ok]
  lengths = length_shares(
    inside, int(history.leaf(config, "sampling.max_tokens", 0) or 0)
  )
  lags = lag_shares(inside)
  where = window.span
  return [
    Panel(
      title="Completion lengths",
      svg=draw.bars("lengths of completions", lengths),
      names=[],
      note=f"share of completions by tokens, {where}; from the percentiles of "
      "each step, even in between"
      if lengths
      else "no completion/p50_tokens in metrics.jsonl",
    ),
    Panel(
      title="Staleness",
      svg=draw.bars("lags of trained tokens", lags),
      names=[],
      note=f"share of trained tokens by lag in versions, {where}"
      if lags
      else "no lag/0/tokens in metrics.jsonl",
    ),
  ]


def length_shares(
  rows: Sequence[history.Row], most: int
) -> list[tuple[str, float]]:
  """Estimates the distribution of lengths from the percentiles of each step.

  Args:
    rows: steps with as many completions each.
    most: longest completion.

  Returns:
    Label and share of at most `_MOST_BARS` equally wide ranges from one token
    to `most`; empty if no step has percentiles.
  """
  steps = [found for found in map(_percentiles, rows) if found]
  if not steps or most < 1:
    return []
  width = math.ceil(most / _MOST_BARS)
  edges = list(range(0, most + width, width))
  below = [
    sum(_below(found, edge) for found in steps) / len(steps) for edge in edges
  ]
  return [
    (str(high) if width == 1 else f"{low + 1}–{high}", max(0.0, after - before))
    for low, high, before, after in zip(
      edges, edges[1:], below, below[1:], strict=False
    )
  ]


def _percentiles(row: history.Row) -> list[tuple[float, float]]:
  """Returns lengths of a step and the share that does not exceed each."""
  found = [(history.number(row, x), p) for x, p in metrics.LENGTHS.items()]
  known = all(math.isfinite(length) for length, _ in found)
  return found if known else []


def _below(found: Sequence[tuple[float, float]], length: float) -> float:
  """Returns the share of completions of at most so many tokens."""
  if length < found[0][0]:
    return 0.0
  share = 0.0
  for (low, before), (high, after) in zip(found, found[1:], strict=False):
    if length >= high:
      share = after
    elif length >= low:
      share = before + (after - before) * (length - low) / (high - low)
  return share


def lag_shares(rows: Sequence[history.Row]) -> list[tuple[str, float]]:
  """Returns lag and share of the trained tokens of all steps that have it.

  Returns:
    Empty if no step has any.
  """
  totals = dict.fromkeys(_LAGS, 0.0)
  for row in rows:
    tokens = history.number(row, "loss/tokens")
    for i, label in enumerate(_LAGS):
      part = history.number(row, f"lag/{i}/tokens") * tokens
      totals[label] += part if math.isfinite(part) else 0.0
  whole = sum(totals.values())
  return [(label, x / whole) for label, x in totals.items()] if whole else []


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns names and values; of text without its quotes."""
  found = folder.leaves(config)
  texts = {name: json.loads(value) for name, value in found.items()}
  return [
    (name, texts[name] if isinstance(texts[name], str) else value)
    for name, value in found.items()
  ]
