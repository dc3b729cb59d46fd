"""The end of a run, for the terminal: its curve and the four numbers."""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

from jaxrl_post.runtime import log, progress

Row = Mapping[str, float | None]


def read(folder: str | os.PathLike[str]) -> list[Row]:
  """Returns the lines of a run's metrics.jsonl, oldest first."""
  path = pathlib.Path(folder) / log.METRICS_FILE
  with path.open(encoding="utf-8") as file:
    return [json.loads(line) for line in file]


def text(rows: Sequence[Row]) -> str:
  """Says how a run went.

  Args:
    rows: from `read`.

  Returns:
    The reward curve, first and last evaluation, and the four numbers: rollouts
    per device-hour, idle fraction of each stage, weight-sync latency,
    staleness. At most 80 columns.
  """
  steps = [row for row in rows if "reward/mean" in row]
  if not steps:
    return "no step was trained"
  last = steps[-1]
  rewards = [_number(row, "reward/mean") for row in steps]
  tests = [row for row in rows if row.get("eval/reward") is not None]
  lines = [
    "mean reward of the rollouts, by step",
    progress.curve(rewards, first=int(_number(steps[0], "step"))),
    "",
  ]
  if tests:
    ends = [tests[0], tests[-1]] if len(tests) > 1 else tests
    shown = ", ".join(
      f"{_number(row, 'eval/reward'):.3f} after step {row['step']}"
      for row in ends
    )
    lines.append(f"held-out reward     {shown}")
  latencies = [_number(row, "sync/latency_s") for row in steps]
  latencies = sorted(x for x in latencies if not math.isnan(x))
  middle = latencies[len(latencies) // 2] if latencies else math.nan
  lag = max(_number(row, "staleness/max") for row in steps)
  lines += [
    "rollouts per device-hour "
    f"{_number(last, 'throughput/generated_per_device_hour'):.0f} generated, "
    f"{_number(last, 'throughput/consumed_per_device_hour'):.0f} consumed",
    f"idle fraction       generation {_number(last, 'idle/generation'):.2f}, "
    f"training {_number(last, 'idle/training'):.2f}",
    f"weight sync         {1000 * middle:.1f} ms (median of steps)",
    f"staleness           mean {_number(last, 'staleness/mean'):.2f} in the "
    f"last step, max {lag:.0f} in any",
  ]
  return "\n".join(lines)


def _number(row: Row, name: str) -> float:
  value = row.get(name)
  return math.nan if value is None else float(value)
