"""The end of a run, for the terminal: its curve and the four numbers."""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from jaxrl_post.runtime import history, log, progress


def read(folder: str | os.PathLike[str]) -> list[history.Row]:
  """Returns a run's metrics.jsonl, from `history.joined`, oldest first."""
  path = pathlib.Path(folder) / log.METRICS_FILE
  with path.open(encoding="utf-8") as file:
    return history.joined(json.loads(line) for line in file)


def text(rows: Sequence[history.Row]) -> str:
  """Says how a run went.

  Args:
    rows: from `read`.

  Returns:
    The reward curve, first and last evaluation, and the four numbers: rollouts
    per device-hour, idle fraction of each stage, weight-sync latency,
    staleness; and how many updates were skipped, if any. At most 80 columns.
  """
  steps = [row for row in rows if "reward/mean" in row]
  if not steps:
    return "no step was trained"
  last = steps[-1]
  rewards = [history.number(row, "reward/mean") for row in steps]
  tests = [row for row in rows if row.get("eval/reward") is not None]
  lines = [
    "mean reward of the rollouts, by step",
    progress.curve(rewards, first=int(history.number(steps[0], "step"))),
    "",
  ]
  held_out = re.compile(r"eval/(.+/)?reward")
  for name in sorted({n for row in tests for n in row if held_out.match(n)}):
    ends = [tests[0], tests[-1]] if len(tests) > 1 else tests
    shown = ", ".join(
      f"{history.number(row, name):.3f} after step {row['step']}"
      for row in ends
    )
    label = f"held-out {name.removeprefix('eval/').replace('_', ' ')}"
    lines.append(f"{label:<24} {shown}")
  latencies = [history.number(row, "sync/latency_s") for row in steps]
  latencies = sorted(x for x in latencies if not math.isnan(x))
  middle = latencies[len(latencies) // 2] if latencies else math.nan
  lags = [history.number(row, "staleness/max") for row in steps]
  lag = max((x for x in lags if not math.isnan(x)), default=math.nan)
  made = history.number(last, "throughput/generated_per_device_hour")
  used = history.number(last, "throughput/consumed_per_device_hour")
  idle = [history.number(last, f"idle/{stage}") for stage in history.STAGES]
  mean = history.number(last, "staleness/mean")
  facts = {
    "rollouts per device-hour": f"{made:.0f} generated, {used:.0f} consumed",
    "idle fraction": f"generation {idle[0]:.2f}, training {idle[1]:.2f}",
    "weight sync": f"{1000 * middle:.1f} ms (median of steps)"
    if latencies
    else "not measured: no weights were sampled after an update",
    "staleness": "not measured: no token trained"
    if math.isnan(lag)
    else f"mean {mean:.2f} in the last step, max {lag:.0f} in any",
  }
  bad = sum(history.number(row, "loss/bad_updates") > 0 for row in steps)
  if bad:
    facts["skipped"] = f"updates of {bad} of {len(steps)} steps: not finite"
  lines += [f"{label:<24} {fact}" for label, fact in facts.items()]
  return "\n".join(lines)


def tested(step: int, values: Mapping[str, float]) -> str:
  """Writes an evaluation, for people and for programs.

  Args:
    step: batches that the weights were trained on.
    values: metrics, their names with `eval/`, and that of a set, before them.

  Returns:
    A line for each metric, with its interval where it has one; the last line is
    all of it as JSON, with null for what is not a number.
  """
  lines = []
  for name, value in sorted(values.items()):
    if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in values:
      continue
    ends = [values.get(f"{name}_{end}") for end in ("low", "high")]
    span = "" if None in ends else "  ({:.3f} to {:.3f})".format(*ends)
    lines.append(f"{name.removeprefix('eval/'):32} {value:10.4g}{span}")
  # JSON has no NaN, which there is where nothing could be averaged.
  finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
  last = json.dumps({"step": step, **finite}, sort_keys=True)
  return "\n".join([*lines, last])
