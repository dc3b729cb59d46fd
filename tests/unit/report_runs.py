"""Runs for the report to read, made by hand: every second is known."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

COMPILE_S = 5.0
# What must stay text.
HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"&"


def lines(
  generation: Mapping[str, float],
  training: Mapping[str, float],
  *,
  steps: int = 12,
  devices: tuple[int, int, int] = (2, 1, 1),
  tokens: float = 1000.0,
  **more: float | None,
) -> list[dict[str, Any]]:
  """Returns the lines of a run whose steps take a second each.

  Args:
    generation: keys of metrics.jsonl, less the stage, to seconds a step.
    training: likewise.
    steps: how many; the first compiles for `COMPILE_S` before.
    devices: held, training, generation.
    tokens: sampled, and trained, a step.
    more: other keys of every line, with `__` for a slash.
  """
  found = []
  for step in range(1, steps + 1):
    seconds = COMPILE_S + step
    line: dict[str, Any] = {
      "step": step,
      "time/seconds": seconds,
      "compile/count": 7.0,
      "devices": devices[0],
      "devices/training": devices[1],
      "devices/generation": devices[2],
      "throughput/sampled_tokens_per_s": tokens * step / seconds,
      "throughput/trained_tokens_per_s": tokens * step / seconds,
      "loss/tokens": tokens,
    }
    for stage, kinds in (("generation", generation), ("training", training)):
      line[f"overhead/{stage}/compile"] = COMPILE_S / seconds
      for kind, each in kinds.items():
        head, _, tail = kind.partition("/")
        key = f"{head}/{stage}/{tail}".rstrip("/")
        line[key] = each * step / seconds
    line |= {key.replace("__", "/"): value for key, value in more.items()}
    found.append(line)
  return found


def config(**changes: Any) -> dict[str, Any]:
  """Returns a config.json, with what the report reads of it."""
  tree: dict[str, Any] = {
    "max_lag": 0,
    "groups_per_step": 8,
    "model": {"remat": "none", "path": "some/model"},
    "optim": {"microbatches": 4},
    "placement": {
      "mode": "split",
      "generation_fraction": 0.5,
      "training": {"fsdp": -1},
      "generation": {"data": -1},
      "training_devices": [],
    },
    "rewards": {"workers": 2},
    "sampling": {"block": 8, "max_tokens": 8},
    "stream": {"asynchronous": True},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 50},
  }
  for name, value in changes.items():
    *parents, leaf = name.split("__")
    node = tree
    for parent in parents:
      node = node[parent]
    node[leaf] = value
  return tree


def write(
  folder: pathlib.Path,
  rows: Sequence[Mapping[str, Any]],
  settings: Mapping[str, Any],
) -> pathlib.Path:
  """Writes a run folder; returns it."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(settings))
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "metrics.jsonl").write_text(text)
  return folder


def trace(folder: pathlib.Path, steps: int) -> None:
  """Adds a trace of steps of a second, whose last line is torn."""
  events: list[dict[str, Any]] = []
  for step in range(1, steps + 1):
    start = 1e6 * (COMPILE_S + step - 1)
    for tid, cat, name, at, length in (
      (2, "busy", "prefill", 0.0, 0.05),
      (2, "busy", "decode", 0.05, 0.55),
      (2, "wait", "weights_pending", 0.6, 0.4),
      (1, "wait", "queue_empty", 0.0, 0.65),
      (1, "busy", "update", 0.65, 0.3),
      (1, "sync", "publish", 0.95, 0.05),
      (3, "busy", "score", 0.6, 0.05),
      (2001, "busy", "completion", 0.0, 0.6),
    ):
      events.append(
        {
          "name": name,
          "cat": cat,
          "ph": "X",
          "ts": start + 1e6 * at,
          "dur": 1e6 * length,
          "pid": 1,
          "tid": tid,
          "args": {"step": step},
        }
      )
    for at, outstanding, ready in ((0.0, 8, 0), (0.6, 8, 8), (0.65, 0, 0)):
      args = {"outstanding": outstanding, "ready": ready}
      events.append(
        {"name": "queue", "ph": "C", "ts": start + 1e6 * at, "args": args}
      )
  lines_of = "".join(json.dumps(event) + ",\n" for event in events)
  (folder / "trace.json").write_text("[\n" + lines_of + '{"name":"upd')


def full(folder: pathlib.Path, steps: int = 12) -> pathlib.Path:
  """Writes a run with all that a page can show; returns its folder."""
  rows = lines(
    {"busy": 0.6, "idle/weights_pending": 0.4},
    {"busy": 0.35, "overhead/sync": 0.05, "idle/queue_empty": 0.6},
    steps=steps,
    sync__latency_s=0.05,
    reward__mean=0.5,
    loss__policy=None,
    staleness__max=1.0,
    lag__0__tokens=0.75,
    lag__1__tokens=0.25,
    lag__2__tokens=None,
    completion__min_tokens=1.0,
    completion__max_tokens=8.0,
    **{
      f"completion__p{q}_tokens": length
      for q, length in ((10, 2), (25, 2), (50, 4), (75, 6), (90, 8), (99, 8))
    },
  )
  settings = config(model__path=HOSTILE)
  run = write(folder, [{"step": 0, "eval/reward": 0.1}, *rows], settings)
  trace(run, steps)
  (run / "rollouts.txt").write_text(
    f"step 1 prompt 0 ---\n    {HOSTILE}\n\n"
    "step 1 prompt 1 ---\n    not shown\n\n"
    f"step 12 prompt 7 ---\n    newest\n\x0c    {HOSTILE}\n"
  )
  return run
