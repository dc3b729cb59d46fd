"""Machines that are not there: how many chips, and what each does at most."""

import math
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxrl_post import types

# Or the library asks a server which TPU the machine has, and lets one process
# at a time load it.
_NO_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_LOG_DIR": "disabled",
}
_MOST = 2**16
_FORM = re.compile(r"([a-z]\w*):(\d+(?:x\d+){0,2})")


class Chip(NamedTuple):
  """Limits of one chip.

  Attributes:
    flops: products and sums a second in bfloat16, without sparsity.
    hbm: bytes of memory that programs can have. Of TPUs what libtpu 0.0.42 lets
      them have, a little below what the maker says (16 GiB of a v5e).
    bandwidth: bytes a second from and to memory.
    ici: bytes a second that it receives from other chips, over all links. Half
      of what makers give for both directions together.
    clock: cycles a second, in which XLA estimates; 0 where it does not. Of TPUs
      `flops` by those of a cycle: 2**17 of a core of v4 and of v5e, 2**18 of
      v5p, 2**19 of v6e and of a core of tpu7x.
    source: where its maker says so; not `hbm` and `clock`.
    is_tpu: whether there is a compiler for it that needs no chip.
  """

  flops: float
  hbm: float
  bandwidth: float
  ici: float
  clock: float
  source: str
  is_tpu: bool = True


_GIB = 2**30
_DOCS = "docs.cloud.google.com/tpu/docs"
_SHEET = "NVIDIA, data sheet of the"

CHIPS: dict[str, Chip] = {
  # Its interconnect: six links of 50 GB/s, Jouppi et al. 2023, table 4.
  "v4": Chip(
    275e12,
    30.5 * _GIB,
    1200e9,
    300e9,
    1.05e9,
    f"{_DOCS}/v4, arXiv 2304.01433",
  ),
  "v5e": Chip(197e12, 15.75 * _GIB, 819e9, 200e9, 1.5e9, f"{_DOCS}/v5e"),
  "v5p": Chip(459e12, 95.74 * _GIB, 2765e9, 600e9, 1.75e9, f"{_DOCS}/v5p"),
  "v6e": Chip(918e12, 31.25 * _GIB, 1638e9, 400e9, 1.75e9, f"{_DOCS}/v6e"),
  "tpu7x": Chip(2307e12, 192 * _GIB, 7380e9, 600e9, 2.2e9, f"{_DOCS}/tpu7x"),
  "h100": Chip(989e12, 80e9, 3350e9, 450e9, 0, f"{_SHEET} H100 SXM", False),
  "h200": Chip(989e12, 141e9, 4800e9, 450e9, 0, f"{_SHEET} H200 SXM", False),
}


@types.host_record
class Machine:
  """Devices to compile for.

  Attributes:
    name: as asked for.
    devices: only described, if they are TPUs; else this machine's own, as many.
    chip: limits of one device.
    is_estimate: whether a compiler for other devices takes the place of theirs.
  """

  name: str
  devices: tuple[Any, ...]
  chip: Chip
  is_estimate: bool


def start(name: str) -> None:
  """Readies JAX to compile for a machine, before its first use.

  Args:
    name: as for `machine`.

  Raises:
    InputError: there is no such machine.
  """
  chip, count = _asked(name)
  # No chip of this machine is touched, and what is compiled without one cannot
  # be read back from a cache.
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_enable_compilation_cache", False)
  if not chip.is_tpu:
    jax.config.update("jax_num_cpu_devices", count)


def _asked(name: str) -> tuple[Chip, int]:
  """Returns the chip of a machine, and how many there are."""
  found = _FORM.fullmatch(name)
  if found is None or found[1] not in CHIPS:
    raise types.InputError(
      f"--topology: expected CHIP:SHAPE with one of {', '.join(CHIPS)}, "
      f"got {name!r}. For example v5p:4x4x4, v6e:16x16 or h100:8."
    )
  count = math.prod(int(n) for n in found[2].split("x"))
  if not 1 <= count <= _MOST:
    raise types.InputError(
      f"--topology: expected 1 to {_MOST} chips, got {count} in {name!r}. "
      "Correct it."
    )
  return CHIPS[found[1]], count


def machine(name: str) -> Machine:
  """Describes a machine; touches none.

  Args:
    name: chip and shape of a slice, such as v5p:4x4x4; or a GPU and how many,
      such as h100:8.

  Raises:
    InputError: there is no such machine, or nothing here to describe it.
  """
  chip, count = _asked(name)
  if not chip.is_tpu:
    devices = tuple(jax.devices("cpu")[:count])
    if len(devices) < count:
      raise types.InputError(
        f"--topology={name}: expected at most the {len(devices)} devices that "
        f"JAX was started with, got {count}. Call start first."
      )
    return Machine(name=name, devices=devices, chip=chip, is_estimate=True)
  try:
    described = _described(name)
  except (RuntimeError, ValueError) as error:
    raise types.InputError(
      f"--topology: expected a slice that libtpu knows, got {name!r}: "
      f"{first_line(error)}. See the shapes of docs.cloud.google.com/tpu."
    ) from error
  # Some chips are two devices, which share their limits.
  cores = len(described) // len({tuple(d.coords) for d in described})
  chip = chip._replace(
    flops=chip.flops / cores,
    hbm=chip.hbm / cores,
    bandwidth=chip.bandwidth / cores,
    ici=chip.ici / cores,
  )
  devices = tuple(described)
  return Machine(name=name, devices=devices, chip=chip, is_estimate=False)


def _described(name: str) -> list[Any]:
  """Asks libtpu for the devices of a slice."""
  before = dict(os.environ)
  os.environ.update(_NO_TPU | before)
  try:
    return topologies.get_topology_desc(
      platform="tpu", topology_name=name
    ).devices
  finally:
    for key in _NO_TPU.keys() - before.keys():
      del os.environ[key]


def first_line(error: BaseException) -> str:
  """Returns the first line of what an error says."""
  return (str(error).strip() or type(error).__name__).split("\n")[0][:200]
