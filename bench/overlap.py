"""Times training beside generation against one after the other.

    python bench/overlap.py [--quick] [--repeats N]

On CPUs two stages that take about equally long run as roles, a trainer on one
core and one generation replica on another: in lockstep (`max_lag` 0), and with
`max_lag` 1, 2 and 4. Beside them, in turn, runs of one process that may use all
cores: in lockstep on one device and split on two, and split with the same lags;
these are the fair rivals on two cores. Before them each stage runs alone, on
its core. On GPUs or TPUs, of which JAX must find two or more, parts of one
process overlap: there all run in one process, and a stage alone has half of the
devices. On CPUs the stages also run at the same time and apart, with nothing
between them: what is slower then is the machine's doing.

Every run is `bench/balanced.py`. A run's figures are those of its steady state,
without the first steps. On CPUs it needs two cores and the extra `ray`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures

import balanced
import jax
import rollout

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.data import pack
from jaxrl_post.placement import generator, mesh, programs, replica
from jaxrl_post.runtime import history, steps, summary
from jaxrl_post.sampling import engine

_SPEED_GOAL, _WALL_GOAL = 1.6, 1 / 0.9
_DEADLINE_S = 600.0
_ROLES = ("placement.mode=roles", "placement.cpu_devices=1")
_LAGS = (0, 1, 2, 4)
_STAGES = ("training", "generation")
# The four numbers, as `steps.measure` calls them, and how they are shown.
_NUMBERS = {
  "consumed a device-hour": "{:.0f}",
  "idle part of generation": "{:.2f}",
  "idle part of training": "{:.2f}",
  "weight sync, ms": "{:.1f}",
  "mean lag, versions": "{:.2f}",
}


# ------------------------------------------------------------- a stage alone


def alone(stage: str, core: int | None, seconds: float) -> list[float]:
  """Runs one stage on one core, or without one on half of the accelerators.

  When all is compiled, it says so on stdout and waits for a line.

  Returns:
    Seconds of each step.
  """
  cfg = balanced.get_config()
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
  for number in range(2):
    step(number)
  print("ready", flush=True)
  sys.stdin.readline()
  times = []
  first = time.perf_counter()
  while (begun := time.perf_counter()) - first < seconds:
    step(2 + len(times))
    times.append(time.perf_counter() - begun)
  return times


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
  args = [f"--exp={balanced.__file__}", f"--workdir={path}"]
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


def _run_stages(
  cores: Mapping[str, int | None], seconds: float, folder: pathlib.Path
) -> dict[str, float]:
  """Runs stages at the same time, each in a process of its own.

  Returns:
    For each the median seconds of a step.
  """
  cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
  children = []
  for stage, core in cores.items():
    args = [__file__, "--stage", stage, "--seconds", str(seconds)]
    args += [] if core is None else ["--core", str(core)]
    children.append(
      subprocess.Popen(
        [sys.executable, *args],
        env=cache | _environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  late = threading.Timer(_DEADLINE_S, lambda: [c.kill() for c in children])
  late.start()
  for child in children:  # Each has compiled, and waits for a line.
    assert child.stdout is not None
    child.stdout.readline()
  with futures.ThreadPoolExecutor(len(children)) as readers:
    ends = list(readers.map(lambda c: c.communicate("go\n"), children))
  late.cancel()
  for child, (_, errors) in zip(children, ends, strict=True):
    if child.returncode:
      sys.exit(f"{child.args}: exit code {child.returncode}\n{errors}")
  times = [statistics.median(json.loads(out)) for out, _ in ends]
  return dict(zip(cores, times, strict=True))


def stages(
  cores: Sequence[int], seconds: float, folder: pathlib.Path
) -> dict[str, float]:
  """Returns the median seconds of a step of each stage, by what is run.

  Args:
    cores: one for each stage; none on accelerators.
    seconds: that each is run for.
    folder: keeps what is compiled.
  """
  chosen = dict(zip(_STAGES, cores or (None, None), strict=True))
  found = {}
  for stage, core in chosen.items():
    found |= _run_stages({stage: core}, seconds, folder)
  found = {f"{stage} alone": value for stage, value in found.items()}
  if cores:
    both = _run_stages(chosen, seconds, folder)
    found |= {f"{stage} at once": value for stage, value in both.items()}
  return found


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


def _spread(values: Sequence[float]) -> str:
  low, high = 1e3 * min(values), 1e3 * max(values)
  return f"{1e3 * statistics.median(values):7.0f} ({low:.0f}-{high:.0f})"


def measure(repeats: int, count: int, skipped: int) -> dict[str, dict]:
  """Runs all arrangements in turn, prints the table, returns the figures."""
  apart: dict[str, list[float]] = {}
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
      for name, seconds in stages(cores[:2], count / 6, folder).items():
        apart.setdefault(name, []).append(seconds)
      for arrangement, settings in plan.items():
        found[arrangement].append(whole(settings, count, skipped, folder))
  there = f"{rollout.machine()}; {devices} x {platform}"
  print(f"{there}; medians of {repeats} (spread)")
  return report(apart, found)


def report(
  times: Mapping[str, Sequence[float]],
  found: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, dict]:
  """Prints the table and returns the figures.

  Args:
    times: what `stages` returns, of each repeat, by its names.
    found: what `whole` returns, of each repeat, by arrangement.
  """
  for name, seconds in times.items():
    print(f"{name:30} {_spread(seconds):>18} ms a step")
  middle = {k: statistics.median(v) for k, v in times.items()}
  alone_s = [middle[f"{stage} alone"] for stage in _STAGES]
  longest, both = max(alone_s), sum(alone_s)
  at_once = [v for k, v in middle.items() if k.endswith("at once")]
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
  if at_once:
    print(f"the longer stage, both at once: {max(at_once) / longest:.2f} times")
  longer = longest, max(at_once, default=longest)
  return _figures(apart, wall_s, longer, min(rivals))


def _figures(
  apart: str,
  wall_s: Mapping[str, float],
  longer: tuple[float, float],
  rival: float,
) -> dict[str, dict]:
  """Returns the figures of the runs whose stages have devices of their own.

  Args:
    apart: how their names begin.
    wall_s: seconds of a step, by name.
    longer: of the longer stage: alone, and beside the other one.
    rival: the fastest of the others, in seconds.
  """
  figures, lockstep = {}, wall_s[f"{apart}, lockstep"]
  longest, at_once = longer
  lags = [lag for lag in _LAGS if lag]
  for lag in lags:
    wall = wall_s[f"{apart}, max_lag {lag}"]
    for name, value, goal, peer, meets in (
      ("speedup", lockstep / wall, _SPEED_GOAL, lockstep / rival, float.__ge__),
      ("wall", wall / longest, _WALL_GOAL, rival / longest, float.__le__),
      ("at_once", wall / at_once, _WALL_GOAL, rival / at_once, float.__le__),
    ):
      figures[f"overlap/{name}_lag_{lag}"] = rollout.figure(
        value, goal, peer, meets
      )
  best = min(wall_s[f"{apart}, max_lag {lag}"] for lag in lags)
  figures["overlap/of_rival"] = rollout.figure(rival / best, 1.0, 1.0)
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
  parser.add_argument("--seconds", type=float, default=10)
  chosen = parser.parse_args(arguments)
  if chosen.stage:
    print(json.dumps(alone(chosen.stage, chosen.core, chosen.seconds)))
    return
  repeats, count, skipped = chosen.repeats, chosen.steps, 12
  if chosen.quick:
    repeats, count, skipped = 1, 12, 4
  print(json.dumps(measure(repeats, count, skipped)))


if __name__ == "__main__":
  main()
