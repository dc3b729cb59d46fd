"""Kills runs, gives them hostile rewards, and counts what was lost.

    python bench/chaos.py [--quick] [--kills N] [--hostile N] [--seed N]

Short runs of the demo, in processes of their own, are killed with all their
children (SIGKILL) at instants drawn evenly from the life of a process that
nobody disturbs, and started again with the same command: in lockstep, free
running with `max_lag` 2, and deterministic with `max_lag` 2. After at most five
kills a run may end. Then the events of its stream, every batch in its dump, its
metrics and its last weights are looked at. Free running, every group must have
been trained once or left untrained for a reason; in the other two all must
equal, bit for bit, a run that was left alone.

Then rewards raise, hang, die, kill their process, flood stdout, or return what
is no number. Masked, each must be counted and noted with its reason, and the
run must end well; otherwise the first must end the run within seconds.

The folders of runs that lost anything are kept. Seconds in the table are from a
start to the first batch that it trained; where a run was to end, from the fault
to its end.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import survival

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.rewards import pool, protocol
from jaxrl_post.runtime import checkpoint, dump

_TINY = pathlib.Path(__file__).resolve().parents[1] / "experiments" / "tiny.py"
_STEPS, _GROUPS, _GROUP_SIZE = 8, 32, 8
_SHORT = (
  f"num_steps={_STEPS}",
  "evaluation.every=0",
  "warmup.num_steps=2",
  "checkpoint.every=1",
  "debug.dump=true",
)
_ARRANGEMENTS = {
  "lockstep": ("max_lag=0", "stream.filter_zero_signal=true"),
  "lag_2": ("max_lag=2", "stream.filter_zero_signal=true"),
  "lag_2_fixed": (
    "max_lag=2",
    "stream.filter_zero_signal=true",
    "stream.deterministic=true",
    "sampling.in_flight=recompute",
  ),
}
_REPEATABLE = ("lag_2_fixed", "lockstep")
# Rollouts of evaluations have uids, too; those from here on are of training.
_FIRST_UID = 256
_MASKED_STEPS = 4
_MASKED = (
  *_SHORT,
  f"num_steps={_MASKED_STEPS}",
  "max_lag=2",
  "rewards.on_failure=mask",
)
_FAULTS_A_RUN = 22
_STOP_GOAL_S = 10.0
# What a hostile reward does, and the failure that is noted for it.
FAULTS = {
  "raise": "ValueError: hostile",
  "hang": "timeout after",
  "nan": "no reward: nan",
  "inf": "reward is inf",
  "text": "reward is 'much'",
  "exit": "worker died",
  "kill": "worker died",
  "flood": "",
}
# What ends a run that does not mask, and what the run says then.
_ENDING = {
  "raise": "ValueError: hostile",
  "hang": "timeout after",
  "inf": "got inf",
  "text": "got 'much'",
  "exit": "its worker died",
  "kill": "its worker died",
}
Losses = collections.Counter[str]


# ------------------------------------------------------------ hostile rewards


def hostile(
  rollout: types.Rollout,
  reference: str,
  *,
  faults: Mapping[int, str],
  score: protocol.Reward,
) -> Any:
  """Scores a rollout, but does one of `FAULTS` to those in `faults`, by uid."""
  fault = faults.get(rollout.completion.uid, "")
  if fault:
    pathlib.Path(f"struck-{rollout.completion.uid}").touch()
  match fault:
    case "raise":
      raise ValueError("hostile")
    case "hang":
      signal.pause()
    case "exit":
      os._exit(3)
    case "kill":
      os.kill(os.getpid(), signal.SIGKILL)
    case "flood":
      for _ in range(4):
        print("x" * 2**20)
  wrong = {"nan": math.nan, "inf": math.inf, "text": "much"}
  return wrong[fault] if fault in wrong else score(rollout, reference)


def with_faults() -> config.Run:
  """The demo, with the faults that faults.json in this folder has by uid."""
  demo = config.load(str(_TINY), _TINY.parent)
  found = json.loads(pathlib.Path("faults.json").read_text())
  faults = {int(uid): fault for uid, fault in found.items()}
  (score,) = demo.rewards.functions
  reward = functools.partial(hostile, faults=faults, score=score)
  rewards = pool.Rewards(functions=(reward,), batch=64, timeout_s=2.0)
  return dataclasses.replace(demo, rewards=rewards)


# ----------------------------------------------------------------------- tests


@dataclasses.dataclass(frozen=True)
class Tally:
  """What was done to some runs, and what came of it.

  Attributes:
    name: of what was done.
    wanted: how often it was to be done.
    done: how often it was.
    runs: to how many.
    how: how often in which way.
    lost: everything that was amiss.
    seconds: of each process that went on, until it had trained a batch; of
      each that had to stop, from the fault to its end.
  """

  name: str
  wanted: int
  done: int
  runs: int
  how: Losses
  lost: Losses
  seconds: list[float]


class Bench:
  """A folder for runs, and the instants and places to disturb them."""

  def __init__(self, folder: pathlib.Path, seed: int) -> None:
    """Keeps both; `alone` fills in what runs are compared with."""
    self._folder, self._random = folder, random.Random(seed)
    self._life_s = math.nan

  def alone(self) -> Tally:
    """Runs once, undisturbed, what others are compared with."""
    lost, seconds = Losses(), 0.0
    for name in _REPEATABLE:  # The first one compiles, the last one is timed.
      flags = survival.command(_TINY, (*_SHORT, *_ARRANGEMENTS[name]))
      (life,) = survival.survive(flags, self._folder / name, ())
      lost += self._found(self._folder / name, name, life)
      self._life_s, seconds = life.seconds, life.trained_s or life.seconds
    count = len(_REPEATABLE)
    return Tally("alone", count, count, count, Losses(), lost, [seconds])

  def killed(self, name: str, kills: int) -> Tally:
    """Kills runs of an arrangement so many times in all."""
    how, lost, seconds, runs = Losses(), Losses(), [], 0
    for run in survival.survivors(
      survival.command(_TINY, (*_SHORT, *_ARRANGEMENTS[name])),
      self._folder / f"{name}-killed",
      kills=kills,
      life_s=self._life_s,
      num_steps=_STEPS,
      draw=self._random,
    ):
      how.update(run.phases)
      seconds += [life.trained_s for life in run.lives[1:] if life.trained_s]
      lost += self._found(run.cwd, name, run.lives[-1])
      runs += 1
      _say(f"{name}: {how.total()} of {kills} kills, {runs} runs ended")
    return Tally(name, kills, how.total(), runs, how, lost, seconds)

  def masked(self, number: int) -> Tally:
    """Lets rewards of some runs fail so many times in all."""
    how, lost = Losses(), Losses()
    runs = 0
    while how.total() < number:
      cwd = self._folder / f"masked-{runs}"
      faults = self._faults(min(_FAULTS_A_RUN, number - how.total()))
      life = self._attack(cwd, faults, _MASKED)
      found = Losses({"runs failed": int(life.code != 0)})
      if not life.code:
        found += survival.losses(
          cwd / "run", num_steps=_MASKED_STEPS, max_lag=2
        )
        found += miscounted(cwd / "run", faults)
      how.update(self._struck(cwd, faults))
      lost += self._kept(cwd, found)
      runs += 1
      _say(f"masked: {how.total()} of {number} faults")
    return Tally("masked", number, how.total(), runs, how, lost, [])

  def stopped(self, number: int) -> Tally:
    """Lets the reward of so many runs fail once, which is to end them."""
    how, lost, seconds = Losses(), Losses(), []
    for fault in itertools.islice(itertools.cycle(_ENDING), number):
      cwd = self._folder / f"stopped-{len(seconds)}"
      uid = _FIRST_UID + self._random.randrange(_GROUPS * _GROUP_SIZE)
      life = self._attack(cwd, {uid: fault}, _SHORT)
      seconds.append(life.at - (cwd / f"struck-{uid}").stat().st_mtime)
      said = _ENDING[fault] in life.err and life.code == 1
      blamed = set(re.findall(r"rollout (\d+)", life.err))
      found = Losses({"not ended by it": not said or blamed != {str(uid)}})
      how.update(self._struck(cwd, {uid: fault}))
      lost += self._kept(cwd, found)
      _say(f"stopped: {how.total()} of {number} faults")
    return Tally("stopped", number, how.total(), number, how, lost, seconds)

  def _faults(self, number: int) -> dict[int, str]:
    """Chooses rollouts; if there are enough, a whole group among them."""
    uids = range(_FIRST_UID, _MASKED_STEPS * _GROUPS * _GROUP_SIZE)
    faults: dict[int, str] = {}
    if number >= 2 * _GROUP_SIZE:
      first = self._random.choice(uids[::_GROUP_SIZE])
      group = range(first, first + _GROUP_SIZE)
      faults = dict(zip(group, itertools.cycle(_ENDING), strict=False))
    rest = [uid for uid in uids if uid not in faults]
    chosen = self._random.sample(rest, number - len(faults))
    return faults | dict(zip(chosen, itertools.cycle(FAULTS), strict=False))

  def _attack(
    self,
    cwd: pathlib.Path,
    faults: Mapping[int, str],
    settings: Sequence[str],
  ) -> survival.Life:
    cwd.mkdir()
    (cwd / "faults.json").write_text(json.dumps(faults))
    flags = survival.command(f"{__file__}:with_faults", settings)
    return survival.live(flags, cwd)

  def _struck(self, cwd: pathlib.Path, faults: Mapping[int, str]) -> list[str]:
    return [f for uid, f in faults.items() if (cwd / f"struck-{uid}").exists()]

  def _found(self, cwd: pathlib.Path, name: str, life: survival.Life) -> Losses:
    """Looks at a run that has ended."""
    if life.code:
      return self._kept(cwd, Losses({"runs failed": 1}))
    run, alone = cwd / "run", self._folder / name / "run"
    lag = 0 if name == "lockstep" else 2
    found = survival.losses(run, num_steps=_STEPS, max_lag=lag)
    if name in _REPEATABLE and run != alone:
      settings = (*_SHORT, *_ARRANGEMENTS[name])
      read = functools.partial(newest, settings)
      found += survival.differences(run, alone, read)
    return self._kept(cwd, found)

  def _kept(self, cwd: pathlib.Path, found: Losses) -> Losses:
    """Says what a run lost, or deletes it."""
    found = +found
    if found:
      print(f"{cwd}: {dict(found)}", flush=True)
    elif cwd.name not in _REPEATABLE:
      shutil.rmtree(cwd)
    return found


def _say(text: str) -> None:
  """Shows how far the benchmark is."""
  print(text, file=sys.stderr, flush=True)


def miscounted(run: pathlib.Path, faults: Mapping[int, str]) -> Losses:
  """Compares what a run noted of its rewards with the faults they had."""
  found, missing = Losses(), 0
  groups = list(dump.read_all(run / "dump"))
  for rollout in itertools.chain(*(group.rollouts for group in groups)):
    reason = FAULTS[faults.get(rollout.completion.uid, "flood")]
    missing += bool(reason)
    fits = reason in rollout.failure and bool(reason) == bool(rollout.failure)
    found["faults not noted"] += not fits
  rows = survival.computed(run)[-_MASKED_STEPS:]
  found["faults not counted"] += abs(
    missing - sum(int(row["reward/missing"]) for row in rows)
  )
  trained = {rollout.completion.uid for g in groups for rollout in g.rollouts}
  untrained = {uid // _GROUP_SIZE for uid in faults if uid not in trained}
  failed = int(rows[-1]["ledger/failed"])
  found["groups not counted"] += abs(len(untrained) - failed)
  return found


def newest(settings: Sequence[str], run: pathlib.Path) -> types.TrainState:
  """Reads the newest checkpoint of a run of the demo, as arrays of the host."""
  cfg = config.override(config.load(str(_TINY), _TINY.parent), settings)
  place = loop.build(cfg, prepare.prepare(cfg))
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  store = checkpoint.Store(run / "checkpoints", cfg.checkpoint)
  restored = store.restore(trainer.abstract)
  assert restored is not None, f"no checkpoint in {run}"
  key = jax.random.key_data(restored.state.key)
  return jax.device_get(dataclasses.replace(restored.state, key=key))


# ---------------------------------------------------------------------- report


def report(tallies: Sequence[Tally]) -> dict[str, dict]:
  """Prints the table and returns the figures."""
  alone = tallies[0].seconds[0]
  print(f"{'':12} {'done':>9} {'runs':>5}   {'seconds (longest)':18} how; lost")
  figures = {}
  for tally in tallies:
    ways = ", ".join(f"{way} {n}" for way, n in sorted(tally.how.items()))
    lost = ", ".join(f"{n} {what}" for what, n in sorted(tally.lost.items()))
    middle, most, took = math.nan, math.nan, "-"
    if tally.seconds:
      middle, most = statistics.median(tally.seconds), max(tally.seconds)
      took = f"{middle:.1f} ({most:.1f})"
    print(
      f"{tally.name:12} {tally.done:4}/{tally.wanted:<4} {tally.runs:5}   "
      f"{took:18} {ways or 'left alone'}; "
      f"{lost or 'nothing'}"
    )
    name = f"chaos/{tally.name}"
    figures[f"{name}/done"] = _figure(
      tally.done, tally.wanted, None, tally.done >= tally.wanted
    )
    figures[f"{name}/lost"] = _figure(
      tally.lost.total(), 0, None, not tally.lost
    )
    if tally.name == "stopped":
      figures[f"{name}/seconds"] = _figure(
        most, _STOP_GOAL_S, None, most <= _STOP_GOAL_S
      )
    elif tally.name in _ARRANGEMENTS and tally.seconds:
      figures[f"{name}/restart_s"] = _figure(
        middle, 2 * alone, alone, middle <= 2 * alone
      )
  return figures


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line, disturbs, and prints."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--kills", type=int, default=100, help="of runs, in all")
  parser.add_argument("--hostile", type=int, default=50, help="rewards")
  parser.add_argument("--seed", type=int, default=0)
  chosen = parser.parse_args(arguments)
  kills, faults = chosen.kills, chosen.hostile
  if chosen.quick:
    kills, faults = 3, 5
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 2)
  folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
  bench = Bench(folder, chosen.seed)
  ending = min(1 if chosen.quick else len(_ENDING), faults)
  tallies = [bench.alone()]
  for number, name in enumerate(_ARRANGEMENTS):
    tallies.append(bench.killed(name, (kills + number) // len(_ARRANGEMENTS)))
  tallies += [bench.masked(faults - ending), bench.stopped(ending)]
  figures = report(tallies)
  if not any(tally.lost for tally in tallies):
    shutil.rmtree(folder)
  print(json.dumps(figures))


def _figure(
  value: float, goal: float, peer: float | None, met: bool
) -> dict[str, float | None]:
  rounded = None if peer is None else round(peer, 4)
  return {
    "value": round(value, 4),
    "goal": round(goal, 4),
    "peer": rounded,
    "met": met,
  }


if __name__ == "__main__":
  main()
