"""Do the accounts of a run, and its trace, say where the time went."""

import collections
import itertools
import json
import logging
import pathlib
import threading
import time

import pytest

from jaxrl_post import loop
from jaxrl_post.runtime import clock, trace, writers
from jaxrl_post.sampling import engine
from tests.e2e import runs

PAUSE_S = 0.3
STAGES = {1: "training", 2: "generation"}
# A step of the demo, `experiments/tiny.py`, on two cores.
STEP_S = 0.14
# What a span takes with its event, without the checks that tests run under.
SPAN_S = 10e-6
TRUSTED = 0.01

SPLIT = (
  "placement.mode=split",
  "placement.cpu_devices=2",
  "placement.training.fsdp=1",
)
SYNC = "stream.asynchronous=false"


def events(folder) -> list[dict]:
  text = (folder / trace.FILE).read_text()
  return json.loads(text.rstrip().rstrip(",") + "]")


def lengths(made: list[dict], begin: float, end: float) -> dict:
  """Sums up what a part of T has of each lane, by category and by name."""
  sums = collections.Counter()
  for event in made:
    if event["ph"] == "X" and event["tid"] in STAGES:
      last = min((event["ts"] + event["dur"]) / 1e6, end)
      length = max(0.0, last - max(event["ts"] / 1e6, begin))
      sums[event["tid"], "cat", event["cat"]] += length
      sums[event["tid"], "name", event["name"]] += length
  return sums


def check(folder, rows: list[dict]) -> None:
  """Holds a run's accounts and its trace to the wall clock."""
  last = rows[-1]
  assert last["accounting/residual"] < TRUSTED
  wall = last["time/seconds"]
  made = lengths(events(folder), 0.0, wall)
  for tid, stage in STAGES.items():
    parts = {"busy": last[f"busy/{stage}"], "wait": last[f"idle/{stage}"]}
    for kind in ("sync", "compile", "checkpoint", "eval"):
      parts[kind] = last[f"overhead/{stage}/{kind}"]
    assert sum(parts.values()) == pytest.approx(1, abs=TRUSTED)
    assert made[tid, "cat", "other"] / wall < TRUSTED
    for kind, part in parts.items():
      assert made[tid, "cat", kind] / wall == pytest.approx(
        part, abs=TRUSTED
      ), kind


@pytest.mark.parametrize(
  "settings",
  [
    pytest.param((*SPLIT, SYNC), id="split-sync"),
    pytest.param((*SPLIT, "max_lag=1"), id="split-async"),
  ],
)
def test_each_second_is_in_an_account_and_in_the_trace(tmp_path, settings):
  with runs.compile_cache():
    made = runs.train(tmp_path, "num_steps=4", *settings)
  check(tmp_path, list(made.metrics))
  found = events(tmp_path)
  names = {(e.get("tid"), e["name"]) for e in found if e["ph"] == "X"}
  for name in ("pack", "score", "update", "publish", "record", "save"):
    assert (1, name) in names, name
  assert {(2, "prefill"), (2, "decode"), (3, "reward")} <= names
  queue = [e["args"] for e in found if e["ph"] == "C"]
  assert max(values["outstanding"] for values in queue) >= 4
  assert max(values["ready"] for values in queue) >= 4
  steps = {e["args"]["step"] for e in found if e["name"] == "update"}
  assert steps == {1, 2, 3, 4}
  # All of it costs less than 1 % of a step, of which there is one in between.
  spans = [e["ts"] for e in found if e.get("args", {}).get("step") == 3]
  counts = [
    e for e in found if e["ph"] == "C" and min(spans) <= e["ts"] <= max(spans)
  ]
  assert (len(spans) + len(counts)) * SPAN_S < 0.01 * STEP_S


def test_a_continued_run_has_one_trace_with_captures_and_rows(
  tmp_path, monkeypatch, caplog
):
  cfg = runs.configured("num_steps=3", SYNC)
  watch = writers.Watch(profile=(2, 2), slots=True)
  # As if the accounts had lost some of the time.
  monkeypatch.setattr(clock, "TRUSTED", -1.0)
  with runs.compile_cache(), caplog.at_level(logging.WARNING, "absl"):
    loop.run(cfg, loop.prepare.prepare(cfg), tmp_path, watch=watch)
    before = events(tmp_path)
    assert caplog.text.count("not to be trusted") == 1
    made = runs.train(tmp_path, "num_steps=4", SYNC)
  check(tmp_path, list(made.metrics))
  last = made.metrics[-1]
  # One stage at a time on one device: they are never busy together.
  assert last["busy/training"] + last["busy/generation"] <= 1

  found = events(tmp_path)
  updates = [e for e in found if e["name"] == "update"]
  assert {e["args"]["step"] for e in updates} == {1, 2, 3, 4}
  # What was under way at the checkpoint's T ends there, so not their ends.
  earlier = [e["ts"] for e in before if e["name"] == "update"]
  begun = [e["ts"] for e in updates]
  assert earlier == begun[: len(earlier)] != begun
  (link,) = [e for e in found if e["name"] == "jax.profiler"]
  assert link["args"]["steps"] == [2, 2]
  assert list((tmp_path / link["args"]["folder"]).glob("*.xplane.pb"))
  inside = [
    e["args"]["step"]
    for e in updates
    if link["ts"] <= e["ts"] < link["ts"] + link["dur"]
  ]
  assert set(inside) == {2}
  rollouts = [e for e in found if e["name"].startswith("rollout ")]
  assert {e["tid"] for e in rollouts} <= {
    2_000_001 + row for row in range(cfg.sampling.rows)
  }
  assert len(rollouts) == 3 * cfg.rows


@pytest.fixture(scope="module", name="paused")
def _paused(tmp_path_factory):
  """A run that pauses in each stage; from when to when in T, by stage."""
  folder = tmp_path_factory.mktemp("paused")
  pack, step, start = loop.pack.pack, engine.Engine.step, clock.Clock.start
  packs, blocks = itertools.count(1), itertools.count(1)
  pauses: dict[str, tuple[float, float]] = {}
  began: list[float] = []

  def pause(stage: str) -> None:
    begun = time.monotonic()
    threading.Event().wait(PAUSE_S)
    pauses[stage] = begun, time.monotonic()

  def sleeping_pack(*args, **options):
    if next(packs) == 3:
      pause("trainer")
    return pack(*args, **options)

  def sleeping_step(*args, **options):
    if next(blocks) == 5:  # A block makes all completions of a step.
      pause("generation")
    return step(*args, **options)

  def noting_start(*args):
    start(*args)
    began.append(time.monotonic())

  with runs.compile_cache(), pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    patch.setattr(loop.pack, "pack", sleeping_pack)
    patch.setattr(engine.Engine, "step", sleeping_step)
    patch.setattr(clock.Clock, "start", noting_start)
    made = runs.train(folder, exp="with_slow")
  begun, ended = pathlib.Path(folder / "slow.txt").read_text().split()
  pauses["reward"] = float(begun), float(ended)
  in_t = {
    name: tuple(at - began[0] for at in pause) for name, pause in pauses.items()
  }
  return folder, made.metrics, in_t


@pytest.mark.parametrize(
  ("where", "number", "training", "generation"),
  [
    pytest.param("trainer", 3, "host", "lag_gate", id="trainer"),
    pytest.param("reward", 4, *["reward_pending"] * 2, id="reward"),
    pytest.param("generation", 5, "queue_empty", "host", id="generation"),
  ],
)
def test_a_pause_of_300_ms_is_idle_time_of_both_stages_for_its_reason(
  paused, where, number, training, generation
):
  folder, rows, pauses = paused
  begin, end = pauses[where]
  made = lengths(events(folder), begin, end)
  before, after = rows[number - 2], rows[number - 1]
  assert before["time/seconds"] < begin < end < after["time/seconds"]
  names = {"pack": "host", "block": "host", "book": "host"}
  for tid, stage, reason in (
    (1, "training", training),
    (2, "generation", generation),
  ):
    # Without the pause the stage would not have waited for these seconds.
    assert made[tid, "cat", "wait"] == pytest.approx(PAUSE_S, rel=0.05)
    words = [reason, *(w for w, r in names.items() if r == reason)]
    because = sum(made[tid, "name", word] for word in words)
    assert because == pytest.approx(PAUSE_S, rel=0.05)
    rise = (
      after[f"idle/{stage}/{reason}"] * after["time/seconds"]
      - before[f"idle/{stage}/{reason}"] * before["time/seconds"]
    )
    assert rise > 0.95 * PAUSE_S


def test_a_run_with_pauses_accounts_for_all_of_its_time(paused):
  folder, rows, _ = paused
  check(folder, list(rows))
