"""Runs that are killed at any instant lose nothing and do nothing twice."""

import collections
import functools
import json
import pathlib
import random
import shutil

import pytest

from bench import survival
from jaxrl_post.envs import events
from jaxrl_post.envs import ledger as ledgers
from tests.e2e import runs

STEPS = 10
SHORT = (f"num_steps={STEPS}", "checkpoint.every=1", "debug.dump=true")
LOCKSTEP = (*SHORT, "max_lag=0")
LAG = (*SHORT, "max_lag=2")
FIXED = (*LAG, "stream.deterministic=true", "sampling.in_flight=recompute")
# Both in the midst of it, wherever the random part of a second ends.
TWICE = tuple(
  survival.Kill(seconds=random.Random(seed).uniform(0, 0.5), after=after)
  for seed, after in enumerate(("step 2/", "step 6/"))
)


def flags(settings):
  return survival.command(f"{runs.EXPERIMENT}:get_config", settings)


def survived(cwd, settings, kills=()):
  """Runs to the end; tells how often it was killed on the way."""
  lives = list(survival.survive(flags(settings), cwd, kills))
  assert lives[-1].code == 0, lives[-1].err
  return len(lives) - 1


def losses(cwd, max_lag):
  return survival.losses(cwd / "run", num_steps=STEPS, max_lag=max_lag)


def differences(cwd, other, settings):
  read = functools.partial(runs.state, cfg=runs.configured(*settings))
  return survival.differences(cwd / "run", other / "run", read)


@pytest.fixture(name="alone", scope="module")
def _alone(tmp_path_factory):
  cwd = tmp_path_factory.mktemp("alone")
  assert survived(cwd, LOCKSTEP) == 0
  return cwd


def test_two_kills_in_lockstep_change_no_bit(alone, tmp_path):
  assert survived(tmp_path, LOCKSTEP, TWICE) >= 1
  assert losses(tmp_path, 0) == {}
  assert differences(tmp_path, alone, LOCKSTEP) == {}


def test_two_kills_at_lag_two_lose_no_group_and_train_none_twice(tmp_path):
  assert survived(tmp_path, LAG, TWICE) >= 1
  assert losses(tmp_path, 2) == {}
  kinds = collections.Counter(
    json.loads(line)["event"]
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
  )
  assert kinds["Consume"] == STEPS and kinds["Restore"] >= 1


def edited(cwd: pathlib.Path, to: pathlib.Path, edit) -> pathlib.Path:
  """Copies a run with other lines in its events."""
  shutil.copytree(cwd, to)
  path = to / "run" / "events.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  path.write_text("".join(f"{json.dumps(line)}\n" for line in edit(lines)))
  return to


@pytest.mark.parametrize(
  ("edit", "found"),
  [
    (lambda lines: lines, {}),
    (
      lambda lines: [x for x in lines if x.get("uids") != [36, 37, 38, 39]],
      {"groups lost": 4, "batches wrong": 1},
    ),
    (
      lambda lines: [*lines, {"event": "Filter", "uid": 7}],
      {"groups twice": 1},
    ),
    (
      lambda lines: [*lines, {"event": "Block", "uid": 7, "tokens": 3}],
      {"tokens lost": 3},
    ),
    (
      lambda lines: [x for x in lines if x != {"event": "Admit", "uid": 7}],
      {"groups lost": 1},
    ),
  ],
)
def test_what_a_history_lacks_is_found(alone, tmp_path, edit, found):
  assert losses(edited(alone, tmp_path / "copy", edit), 0) == found


def test_what_a_folder_lacks_is_found(alone, tmp_path):
  cwd = edited(alone, tmp_path / "copy", lambda lines: lines)
  run = cwd / "run"
  shutil.rmtree(run / "dump" / "00000003")
  shutil.rmtree(run / "checkpoints" / str(STEPS))
  lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
  (run / "metrics.jsonl").write_text("".join([*lines[:4], "{", *lines[4:]]))
  found = losses(cwd, -1)
  assert found["batches wrong"] == 1
  assert found["lines wrong"] == 2  # One is no JSON, so its step is missing.
  assert found["lags above"] == STEPS - 1
  found = differences(cwd, alone, LOCKSTEP)
  assert found["batches different"] == 1 and found["lines different"] >= 1
  assert found["arrays different"] > 1


def test_no_event_waits_in_memory_for_a_kill(tmp_path):
  log = events.Log(tmp_path / "events.jsonl")
  written = (ledgers.Consume((1,)), ledgers.Publish(1), ledgers.Filter(7))
  for count, event in enumerate(written, 1):
    log.write(event)
    text = (tmp_path / "events.jsonl").read_bytes()
    assert text.count(b"\n") == log.count == count
  log.close()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("settings", "max_lag", "repeatable"),
  [(LOCKSTEP, 0, True), (LAG, 2, False), (FIXED, 2, True)],
  ids=["lockstep", "lag", "fixed"],
)
def test_twenty_kills_at_any_instant_lose_nothing(
  tmp_path, settings, max_lag, repeatable
):
  calm, kills = tmp_path / "calm", 0
  survived(tmp_path / "first", settings)  # It compiles.
  (life,) = survival.survive(flags(settings), calm, ())
  for run in survival.survivors(
    flags(settings),
    tmp_path / "killed",
    kills=20,
    life_s=life.seconds,
    num_steps=STEPS,
    draw=random.Random(20),
  ):
    assert run.lives[-1].code == 0, run.lives[-1].err
    assert losses(run.cwd, max_lag) == {}
    if repeatable:
      assert differences(run.cwd, calm, settings) == {}
    kills += len(run.phases)
  assert kills == 20
