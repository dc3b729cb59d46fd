"""What `compile` found out, for the terminal and as JSON."""

import dataclasses
import json
import math
import pathlib
import tempfile
import textwrap
from collections.abc import Callable
from typing import Any

from jaxrl_post import config, types
from jaxrl_post.planning import chips
from jaxrl_post.planning import compile as compiles

_GIB = 2**30
_FILE = "compile.json"


def make(
  cfg: config.Run, topology: str, folder: str | None, say: Callable[[str], None]
) -> compiles.Report:
  """Compiles the steps of a run and says what they take.

  Args:
    cfg: the run.
    topology: the machine, for `chips.machine`.
    folder: gets `compile.json`; None writes nothing.
    say: takes lines, those of the progress first.

  Raises:
    InputError: from `compile.run`, or nothing can be written to `folder`.
  """
  compiles.check(cfg)
  if folder is not None:
    _probe(folder)
  chips.start(topology)
  report = compiles.run(cfg, chips.machine(topology), say)
  say(f"\n{text(report)}")
  if folder is not None:
    path = pathlib.Path(folder) / _FILE
    path.write_text(json.dumps(to_json(report), indent=1), "utf-8")
    say(f"written: {path}")
  return report


def _probe(folder: str) -> None:
  """Makes a folder, and a file in it, before minutes of compiling."""
  try:
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise types.InputError(
      f"--workdir: expected a folder to write to, got {folder} "
      f"({error.strerror}). Name another."
    ) from error


def text(report: compiles.Report) -> str:
  """Shows a report.

  Args:
    report: from `compile.run`.

  Returns:
    Lines of at most 80 columns: memory of a device of each side and what to
    turn; time of each step; collectives. All numbers are of one device.
  """
  machine = report.machine
  head = f"{machine.name}, {len(machine.devices)} {report.meshes}"
  lines = textwrap.wrap(head, 80, subsequent_indent="  ")
  if machine.is_estimate:
    lines.insert(0, "AN ESTIMATE: compiled for CPUs in place of these devices.")
  sections = [_memory(report), _times(report), _collectives(report)]
  return "\n".join(lines + [line for part in sections for line in ["", *part]])


def to_json(report: compiles.Report) -> dict[str, Any]:
  """Returns a report as JSON holds it.

  Returns:
    `topology`, `devices`, `estimate`, `chip` (its limits), and for each of
    `steps` of a batch its `calls`, `compile_s`, `xla_s`, `limits_s` by
    resource, `roofline_s`, `flops`, `hbm_bytes`, `collectives` and `memory`, or
    the compiler's `refusal`; of `memory` by side its `parts` in the `worst`
    step, `total`, `fits` and the `knob` of the largest. Bytes and seconds of
    one call on one device; null where nothing is known.
  """
  machine = report.machine
  return {
    "topology": machine.name,
    "devices": len(machine.devices),
    "estimate": machine.is_estimate,
    "chip": machine.chip._asdict(),
    "memory": {name: _side(report, side) for name, side in _sides(report)},
    "steps": [_step(report, step) for step in report.steps],
  }


def _sides(report: compiles.Report) -> list[tuple[str, bool]]:
  """Returns the sets of devices, and whether each of them generates."""
  if report.shared:
    return [("both", False)]
  return [("training", False), ("generation", True)]


def _side(report: compiles.Report, side: bool) -> dict[str, Any]:
  step = report.worst(side)
  parts = report.parts(step)
  return {
    "worst": step.name,
    "parts": parts,
    "total": sum(parts.values()),
    "fits": report.fits(side),
    "knob": _knob(report, side)[1],
  }


def _step(report: compiles.Report, step: compiles.Step) -> dict[str, Any]:
  limits, cost = step.limits(report.machine.chip), step.cost
  shown = {
    "name": step.name,
    "side": "generation" if step.generates else "training",
    "calls": step.calls,
    "compile_s": step.compile_s,
    "xla_s": None if math.isnan(step.xla_s) else step.xla_s,
    "limits_s": limits,
    "roofline_s": max(limits.values(), default=None),
  }
  if cost is None or step.memory is None:
    return shown | {"refusal": step.refusal, "memory": {"total": step.used}}
  memory = dataclasses.asdict(step.memory)
  return shown | {
    "flops": cost.flops,
    "hbm_bytes": cost.bytes,
    "memory": memory | {"total": step.memory.total},
    "collectives": [
      {"kind": kind, "axes": axes, "count": often, "bytes": size}
      for (kind, axes), (often, size) in cost.collectives.items()
    ],
  }


def _knob(report: compiles.Report, side: bool) -> tuple[str, str]:
  """Returns the largest part of a side's memory, and what makes it smaller."""
  parts = report.parts(report.worst(side))
  largest = max(parts, key=lambda name: parts[name])
  return largest, report.knobs[largest]


def _memory(report: compiles.Report) -> list[str]:
  sides = _sides(report)
  columns = [report.parts(report.worst(side)) for _, side in sides]
  names = list(dict.fromkeys(name for parts in columns for name in parts))
  names.sort(key=lambda name: name.startswith("of "))
  room = report.machine.chip.hbm

  def row(label: str, *cells: str) -> str:
    return f"{label:<26}" + "".join(f"{cell:>14}" for cell in cells)

  lines = [row("memory of a device, GiB", *(name for name, _ in sides))]
  for name in names:
    sizes = [parts.get(name) for parts in columns]
    lines.append(row(name, *("" if n is None else _gib(n) for n in sizes)))
  totals = [sum(parts.values()) for parts in columns]
  lines.append(row("together", *map(_gib, totals)))
  shares = [f"{100 * total / room:.0f} %" for total in totals]
  lines.append(row(f"of the chip's {_gib(room)}", *shares))
  fits = ["yes" if report.fits(side) else "NO" for _, side in sides]
  lines.append(row("fits", *fits))
  for name, side in sides:
    largest, knob = _knob(report, side)
    lines.append(f"{name}, largest: {largest}; {knob}")
  return lines


def _times(report: compiles.Report) -> list[str]:
  lines = [
    f"{'a call of':<9}{'calls':>7}{'TFLOP':>10}{'HBM GB':>10}{'ICI GB':>9}"
    f"{'XLA s':>10}{'limit s':>10}  {'by':<6}{'share':>6}"
  ]
  for step in report.steps:
    if step.cost is None:
      why = f"it needs {_gib(step.used)} GiB" if step.used else step.refusal
      lines.append(f"{step.name:<9}{step.calls:>7}  refused: {why}"[:80])
      continue
    limits = step.limits(report.machine.chip)
    by = max(limits, key=lambda name: limits[name])
    sent = sum(size for _, size in step.cost.collectives.values())
    known = not math.isnan(step.xla_s)
    share = f"{100 * limits[by] / step.xla_s:.0f} %" if known else ""
    lines.append(
      f"{step.name:<9}{step.calls:>7}{step.cost.flops / 1e12:>10.3g}"
      f"{step.cost.bytes / 1e9:>10.3g}{sent / 1e9:>9.3g}"
      f"{_seconds(step.xla_s):>10}{_seconds(limits[by]):>10}  {by:<6}{share:>6}"
    )
  return lines


def _collectives(report: compiles.Report) -> list[str]:
  lines = [f"{'collectives':<12}{'kind':<20}{'axes':<28}{'times':>8}{'GB':>12}"]
  for step in report.steps:
    found = step.cost.collectives if step.cost else {}
    order = sorted(found.items(), key=lambda item: -item[1][1])
    for (kind, axes), (often, size) in order:
      lines.append(
        f"{step.name:<12}{kind:<20}{axes:<28}{often:>8.0f}{size / 1e9:>12.3g}"
      )
  return lines if len(lines) > 1 else ["no collectives"]


def _gib(size: float) -> str:
  return f"{size / _GIB:.2f}"


def _seconds(value: float) -> str:
  return "-" if math.isnan(value) else f"{value:.3g}"
