"""Times training beside generation against one after the other.

    python bench/overlap.py [--quick] [--repeats N]

On CPUs two stages that take about equally long run as roles, a trainer on one
core and one generation replica on another: in lockstep (`max_lag` 0), and with
`max_lag` 1, 2 and 4. Beside them, in turn, runs of one process that may use all
cores: in lockstep on one device and split on two, and split with the same lags;
these are the fair rivals on two cores. Before them each stage runs alone, on
its core. On GPUs or TPUs, of which JAX must find two or more, parts of one
process overlap: there all run in one process, and a stage alone has half of the
devices.

The data, of letters drawn at random, are no task, and the reward is a constant
of the rollout: what is timed is the stages. A run's figures are those of its
steady state, without the first steps. On CPUs it needs two cores and the extra
`ray`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.data import dataset, pack, sources
from jaxrl_post.models import decoder, transformer
from jaxrl_post.placement import generator, mesh, programs, replica
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import history, steps, summary
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

_LETTERS = "".join(chr(ord("a") + i) for i in range(26))
_PROMPT = 8
_SPEED_GOAL, _WALL_GOAL = 1.6, 1 / 0.9
_DEADLINE_S = 600.0
_ROLES = ("placement.mode=roles", "placement.cpu_devices=1")
_LAGS = (0, 1, 2, 4)
# The four numbers, as `steps.measure` calls them, and how they are shown.
_NUMBERS = {
  "consumed a device-hour": "{:.0f}",
  "idle part of generation": "{:.2f}",
  "idle part of training": "{:.2f}",
  "weight sync, ms": "{:.1f}",
  "mean lag, versions": "{:.2f}",
}


def make(index: int) -> types.Example:
  """Makes a prompt of letters that mean nothing."""
  letters = random.Random(index).choices(_LETTERS, k=_PROMPT)
  return types.Example(prompt="".join(letters), reference="")


def score(rollout: types.Rollout, reference: str) -> float:
  """Scores every other rollout, at no cost."""
  return float(rollout.completion.uid % 2)


def get_config() -> config.Run:
  """Balanced stages; the vocabulary is so large that few rollouts stop.

  A token costs more to train than to sample, but a small engine samples slowly.
  """
  return config.Run(
    model=decoder.Model(
      config=transformer.Config(
        num_layers=4,
        width=128,
        num_heads=4,
        num_kv_heads=2,
        head_width=32,
        ff_width=512,
        vocab_size=512,
      )
    ),
    data=dataset.Data(
      train=sources.Generated(make, size=20_000),
      alphabet=_LETTERS,
      max_prompt=_PROMPT,
    ),
    rewards=pool.Rewards(functions=(score,), batch=64),
    optim=optim.Optim(learning_rate=1e-5),
    sampling=engine.Sampling(max_tokens=48, rows=4, block=2),
    placement=mesh.Placement(cpu_devices=1),
    num_steps=40,
    groups_per_step=8,
    group_size=4,
    max_lag=0,
  )


# ------------------------------------------------------------- a stage alone


def alone(stage: str, core: int | None, count: int) -> list[float]:
  """Runs one stage on one core, or without one on half of the accelerators.

  Returns:
    Seconds of each step; compilation is left out.
  """
  cfg = get_config()
  if core is None:
    halves = mesh.Placement(mode="split")
    cfg = dataclasses.replace(cfg, placement=halves)
  else:
    replica.pin((core,))
    jax.config.update("jax_num_cpu_devices", 1)
  parts = prepare.prepare(cfg)
  place = loop.build(cfg, parts)
  makers = {"generation": _generation, "training": _training}
  step = makers[stage](cfg, parts, place)
  times = []
  for number in range(count + 2):
    begun = time.perf_counter()
    step(number)
    times.append(time.perf_counter() - begun)
  return times[2:]


def _generation(
  cfg: config.Run, parts: prepare.Parts, place: programs.Programs
) -> Callable[[int], object]:
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  policy = place.publish(trainer.start(place.draw()))
  assert place.engine is not None
  sampler = place.engine(generator.keys(cfg.seed)[0])
  sampler.warm_up(policy.params)

  def step(number: int) -> object:
    first = number * cfg.groups_per_step
    uids = range(first, first + cfg.groups_per_step)
    asked = [parts.env.request(parts.data.train[uid]) for uid in uids]
    return engine.generate(sampler, policy, asked)

  return step


def _training(
  cfg: config.Run, parts: prepare.Parts, place: programs.Programs
) -> Callable[[int], object]:
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  state = trainer.start(place.draw())
  groups = [_group(cfg, parts, uid) for uid in range(cfg.groups_per_step)]
  layout = prepare.layout(cfg, parts.decoder.config, place.meshes.training.size)

  def step(number: int) -> object:
    nonlocal state
    rows = pack.pack(groups, layout)
    batch = trainer.score(state, trainer.put(rows))
    state, values = trainer.update(state, batch)
    return jax.device_get(values)

  return step


def _group(cfg: config.Run, parts: prepare.Parts, uid: int) -> types.Group:
  """Makes a group of rollouts of full length."""
  prompt = parts.data.train[uid]
  count = cfg.sampling.max_tokens
  rollouts = []
  for number in range(cfg.group_size):
    done = types.Completion(
      uid=number,
      tokens=(5,) * count,
      logprobs=(-7.0,) * count,
      versions=(0,) * count,
      finish="length",
    )
    rollouts.append(
      types.Rollout(
        prompt=prompt,
        completion=done,
        temperature=1.0,
        text="",
        reward=float(number % 2),
      )
    )
  return types.Group(prompt=prompt, rollouts=tuple(rollouts))


# ----------------------------------------------------------------- whole runs


def _environment() -> dict[str, str]:
  root = pathlib.Path(__file__).resolve().parents[1]
  return {
    **os.environ,
    "PYTHONPATH": str(root / "src"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }


def _machine(folder: pathlib.Path) -> tuple[str, int]:
  """Returns JAX's platform here and its devices, without taking them."""
  found = "import jax; d = jax.devices(); print(d[0].platform, len(d))"
  platform, number = _child(["-c", found], str(folder / "compiled")).split()
  return platform, int(number)


def _child(args: Sequence[str], cache: str) -> str:
  """Runs Python to its end, and returns what it printed."""
  end = subprocess.run(
    [sys.executable, *args],
    env={"JAX_COMPILATION_CACHE_DIR": cache, **_environment()},
    capture_output=True,
    text=True,
    timeout=_DEADLINE_S,
    check=False,
  )
  if end.returncode:
    sys.exit(f"{' '.join(args)}: exit code {end.returncode}\n{end.stderr}")
  return end.stdout


def run(
  path: pathlib.Path, settings: Sequence[str], count: int, folder: pathlib.Path
) -> pathlib.Path:
  """Runs the program once.

  Args:
    path: of the run.
    settings: each as `--set` takes it.
    count: steps of the run.
    folder: keeps what is compiled, for other runs.

  Returns:
    The path.
  """
  chosen = [*settings, f"num_steps={count}", "checkpoint.every=0"]
  args = [f"--exp={__file__}", f"--workdir={path}"]
  args += [f"--set={setting}" for setting in chosen]
  _child(["-m", "jaxrl_post.main", *args], str(folder / "compiled"))
  return path


def whole(
  settings: Sequence[str], count: int, skipped: int, folder: pathlib.Path
) -> dict[str, float]:
  """Runs the program once.

  Returns:
    `seconds` of a step in the steady state, and the four numbers there.
  """
  with tempfile.TemporaryDirectory(dir=folder) as name:
    path = run(pathlib.Path(name) / "run", settings, count, folder)
    measured = steps.measure(history.read(path))
    ends = [row["time/seconds"] or 0.0 for row in summary.read(path)]
  seconds = (ends[-1] - ends[skipped - 1]) / (count - skipped)
  return {"seconds": seconds} | {k: measured[k].value for k in _NUMBERS}


def stage_alone(
  name: str, core: int | None, count: int, folder: pathlib.Path
) -> float:
  """Returns the median seconds of a step of one stage by itself."""
  args = [__file__, "--stage", name, "--steps", str(count)]
  args += [] if core is None else ["--core", str(core)]
  times = json.loads(_child(args, str(folder / "compiled")))
  return statistics.median(times)


def arrangements(cores: Sequence[int]) -> dict[str, tuple[str, ...]]:
  """Returns the settings of each run by its name.

  Args:
    cores: two to pin roles to; none on accelerators, where parts of one process
      overlap.
  """
  one, two = ("placement.cpu_devices=1",), ("placement.cpu_devices=2",)
  one, two = (one, two) if cores else ((), ())
  found = {"colocated, lockstep": ("placement.mode=colocated", *one)}
  found["colocated, lockstep"] += ("max_lag=0",)
  split = ("placement.mode=split", *two)
  for lag in _LAGS:
    name = f"max_lag {lag}" if lag else "lockstep"
    found[f"split, {name}"] = (*split, f"max_lag={lag}")
    if cores:
      found[f"roles, a core each, {name}"] = (
        *_ROLES,
        f"placement.roles.training_cores={cores[0]}",
        f"placement.roles.generation_cores={cores[1]}",
        f"max_lag={lag}",
      )
  return found


def _name() -> str:
  lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  models = [line.partition(":")[2].strip() for line in lines if "name" in line]
  cores = len(os.sched_getaffinity(0))
  return f"{models[0] if models else 'unknown CPU'}, {cores} cores granted"


def _figure(value: float, goal: float, peer: float, met: bool) -> dict:
  return {
    "value": round(value, 4),
    "goal": round(goal, 4),
    "peer": round(peer, 4),
    "met": bool(met),
  }


def _spread(values: Sequence[float]) -> str:
  low, high = 1e3 * min(values), 1e3 * max(values)
  return f"{1e3 * statistics.median(values):7.0f} ({low:.0f}-{high:.0f})"


def measure(repeats: int, count: int, skipped: int) -> dict[str, dict]:
  """Runs all arrangements in turn, prints the table, returns the figures."""
  stages: dict[str, list[float]] = {"training": [], "generation": []}
  with tempfile.TemporaryDirectory(prefix="overlap-") as name:
    folder = pathlib.Path(name)
    platform, devices = _machine(folder)
    cores = sorted(os.sched_getaffinity(0)) if platform == "cpu" else []
    parts = len(cores) if platform == "cpu" else devices
    if parts < 2:
      sys.exit(
        f"overlap: expected two cores or accelerators, got {parts}. Nothing "
        "can overlap on it."
      )
    plan = arrangements(cores[:2])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in plan}
    for _ in range(repeats):
      for stage, core in zip(stages, cores or (None, None), strict=False):
        stages[stage].append(stage_alone(stage, core, count // 2, folder))
      for arrangement, settings in plan.items():
        found[arrangement].append(whole(settings, count, skipped, folder))
  print(f"{_name()}; {devices} x {platform}; medians of {repeats} (spread)")
  return report(stages, found)


def report(
  stages: Mapping[str, Sequence[float]],
  found: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, dict]:
  """Prints the table and returns the figures.

  Args:
    stages: seconds of a step of each alone, of each repeat.
    found: what `whole` returns, of each repeat, by arrangement.
  """
  for stage, seconds in stages.items():
    print(f"{stage + ' alone':30} {_spread(seconds):>18} ms a step")
  alone_s = {k: statistics.median(v) for k, v in stages.items()}
  longest, both = max(alone_s.values()), sum(alone_s.values())
  wall_s = {
    name: statistics.median(each["seconds"] for each in runs)
    for name, runs in found.items()
  }
  apart = next((name for name in found if "roles" in name), "split")
  apart = apart.partition(", lockstep")[0].partition(", max")[0]
  lockstep = wall_s[f"{apart}, lockstep"]
  heads = "consumed/dev-h", "idle gen", "idle train", "sync ms", "lag"
  print(
    f"{'':30} {'ms a step (spread)':>18} of lockstep of longer"
    + "".join(f" {head:>{max(8, len(head))}}" for head in heads)
  )
  for name, runs in found.items():
    wall = wall_s[name]
    shown = _spread([each["seconds"] for each in runs])
    cells = [
      form.format(statistics.median(each[key] for each in runs))
      for key, form in _NUMBERS.items()
    ]
    print(
      f"{name:30} {shown:>18} {lockstep / wall:10.2f}x {wall / longest:9.2f}"
      + "".join(
        f" {cell:>{max(8, len(head))}}"
        for cell, head in zip(cells, heads, strict=True)
      )
    )
  print(f"ideal, from the stages alone: {both / longest:.2f}x of lockstep")
  rivals = [wall for name, wall in wall_s.items() if not name.startswith(apart)]
  return _figures(apart, wall_s, longest, min(rivals))


def _figures(
  apart: str, wall_s: Mapping[str, float], longest: float, rival: float
) -> dict[str, dict]:
  """Returns the figures of the runs whose stages have devices of their own."""
  figures, lockstep = {}, wall_s[f"{apart}, lockstep"]
  lags = [lag for lag in _LAGS if lag]
  for lag in lags:
    wall = wall_s[f"{apart}, max_lag {lag}"]
    speed, over = lockstep / wall, wall / longest
    figures[f"overlap/speedup_lag_{lag}"] = _figure(
      speed, _SPEED_GOAL, lockstep / rival, speed >= _SPEED_GOAL
    )
    figures[f"overlap/wall_lag_{lag}"] = _figure(
      over, _WALL_GOAL, rival / longest, over <= _WALL_GOAL
    )
  best = min(wall_s[f"{apart}, max_lag {lag}"] for lag in lags)
  figures["overlap/of_rival"] = _figure(rival / best, 1.0, 1.0, best <= rival)
  return figures


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line, measures and prints."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--stage", choices=("training", "generation"))
  parser.add_argument("--core", type=int)
  chosen = parser.parse_args(arguments)
  if chosen.stage:
    print(json.dumps(alone(chosen.stage, chosen.core, chosen.steps)))
    return
  repeats, count, skipped = chosen.repeats, chosen.steps, 12
  if chosen.quick:
    repeats, count, skipped = 1, 12, 4
  print(json.dumps(measure(repeats, count, skipped)))


if __name__ == "__main__":
  main()
