"""Times training beside generation against one after the other.

    python bench/overlap.py [--quick] [--repeats N]

Two stages that take about equally long run as roles, a trainer on one core and
one generation replica on another: in lockstep (`max_lag` 0), and with `max_lag`
1 and 2. Beside them, in turn, runs of one process that may use all cores: in
lockstep on one device, and split on two with the same lags; the latter is the
fair rival on two cores. Before them each stage runs alone, on its core.

The data, of letters drawn at random, are no task, and the reward is a constant
of the rollout: what is timed is the stages. A run's time per step is that of
its steady state, without the first steps. Needs two cores and the extra `ray`.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import jax

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.data import dataset, pack, sources
from jaxrl_post.models import decoder, transformer
from jaxrl_post.placement import generator, mesh, programs, replica
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import summary
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

_LETTERS = "".join(chr(ord("a") + i) for i in range(26))
_PROMPT = 8
_SPEED_GOAL, _WALL_GOAL = 1.6, 1 / 0.9
_DEADLINE_S = 600.0
_ROLES = ("placement.mode=roles", "placement.cpu_devices=1")
_ONE = ("placement.mode=colocated", "placement.cpu_devices=1")
_SPLIT = ("placement.mode=split", "placement.cpu_devices=2")


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


def alone(stage: str, core: int, steps: int) -> list[float]:
  """Runs one stage on one core.

  Returns:
    Seconds of each step; compilation is left out.
  """
  replica.pin((core,))
  cfg = get_config()
  jax.config.update("jax_num_cpu_devices", 1)
  parts = prepare.prepare(cfg)
  place = loop.build(cfg, parts)
  makers = {"generation": _generation, "training": _training}
  step = makers[stage](cfg, parts, place)
  times = []
  for number in range(steps + 2):
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
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }


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
  path: pathlib.Path, settings: Sequence[str], steps: int, folder: pathlib.Path
) -> pathlib.Path:
  """Runs the program once.

  Args:
    path: of the run.
    settings: each as `--set` takes it.
    steps: of the run.
    folder: keeps what is compiled, for other runs.

  Returns:
    The path.
  """
  chosen = [*settings, f"num_steps={steps}", "checkpoint.every=0"]
  args = [f"--exp={__file__}", f"--workdir={path}"]
  args += [f"--set={setting}" for setting in chosen]
  _child(["-m", "jaxrl_post.main", *args], str(folder / "compiled"))
  return path


def whole(
  settings: Sequence[str], steps: int, skipped: int, folder: pathlib.Path
) -> float:
  """Runs the program once.

  Returns:
    Seconds of a step in the steady state.
  """
  with tempfile.TemporaryDirectory(dir=folder) as name:
    rows = summary.read(
      run(pathlib.Path(name) / "run", settings, steps, folder)
    )
  ends = [row["time/seconds"] or 0.0 for row in rows]
  return (ends[-1] - ends[skipped - 1]) / (steps - skipped)


def stage_alone(
  name: str, core: int, steps: int, folder: pathlib.Path
) -> float:
  """Returns the median seconds of a step of one stage on its core."""
  args = [__file__, "--stage", name, "--core", str(core), "--steps", str(steps)]
  times = json.loads(_child(args, str(folder / "compiled")))
  return statistics.median(times)


def arrangements(cores: Sequence[int]) -> dict[str, tuple[str, ...]]:
  """Returns the settings of each run by its name."""
  pinned = (
    *_ROLES,
    f"placement.roles.training_cores={cores[0]}",
    f"placement.roles.generation_cores={cores[1]}",
  )
  return {
    "roles, a core each, lockstep": (*pinned, "max_lag=0"),
    "roles, a core each, max_lag 1": (*pinned, "max_lag=1"),
    "roles, a core each, max_lag 2": (*pinned, "max_lag=2"),
    "one process, lockstep": (*_ONE, "max_lag=0"),
    "one process, split, max_lag 1": (*_SPLIT, "max_lag=1"),
    "one process, split, max_lag 2": (*_SPLIT, "max_lag=2"),
  }


def _machine() -> str:
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


def measure(repeats: int, steps: int, skipped: int) -> dict[str, dict]:
  """Runs all arrangements in turn, prints the table, returns the figures."""
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < 2:
    sys.exit("overlap: expected two cores, got one. Nothing can overlap on it.")
  plan = arrangements(cores)
  stages: dict[str, list[float]] = {"training": [], "generation": []}
  times: dict[str, list[float]] = {name: [] for name in plan}
  with tempfile.TemporaryDirectory(prefix="overlap-") as name:
    folder = pathlib.Path(name)
    for _ in range(repeats):
      for stage, core in zip(stages, cores, strict=False):
        stages[stage].append(stage_alone(stage, core, steps // 2, folder))
      for arrangement, settings in plan.items():
        times[arrangement].append(whole(settings, steps, skipped, folder))
  return report(stages, times)


def report(
  stages: dict[str, list[float]], times: dict[str, list[float]]
) -> dict[str, dict]:
  """Prints the table and returns the figures."""
  print(f"{_machine()}; medians of {len(stages['training'])} (spread)")
  for stage, seconds in stages.items():
    print(
      f"{stage + ' alone, on its core':32} {_spread(seconds):>20} ms a step"
    )
  alone_s = {k: statistics.median(v) for k, v in stages.items()}
  wall_s = {k: statistics.median(v) for k, v in times.items()}
  lockstep, lag_1, lag_2, one, split_1, split_2 = wall_s.values()
  longest = max(alone_s.values())
  print(f"{'':32} {'ms a step (spread)':>20}   of lockstep   of the longer")
  for arrangement, seconds in times.items():
    wall = wall_s[arrangement]
    print(
      f"{arrangement:32} {_spread(seconds):>20} {lockstep / wall:12.2f}x "
      f"{wall / longest:14.2f}"
    )
  ideal = sum(alone_s.values()) / longest
  print(f"ideal, from the stages alone: {ideal:.2f}x")
  best, rival = min(lag_1, lag_2), min(one, split_1, split_2)
  figures = {}
  for lag, wall in (("1", lag_1), ("2", lag_2)):
    speed, over = lockstep / wall, wall / longest
    figures[f"overlap/speedup_lag_{lag}"] = _figure(
      speed, _SPEED_GOAL, lockstep / rival, speed >= _SPEED_GOAL
    )
    figures[f"overlap/wall_lag_{lag}"] = _figure(
      over, _WALL_GOAL, rival / longest, over <= _WALL_GOAL
    )
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
  parser.add_argument("--core", type=int, default=0)
  chosen = parser.parse_args(arguments)
  if chosen.stage:
    print(json.dumps(alone(chosen.stage, chosen.core, chosen.steps)))
    return
  repeats, steps, skipped = chosen.repeats, chosen.steps, 12
  if chosen.quick:
    repeats, steps, skipped = 1, 12, 4
  print(json.dumps(measure(repeats, steps, skipped)))


if __name__ == "__main__":
  main()
