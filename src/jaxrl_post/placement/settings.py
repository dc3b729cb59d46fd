"""Settings of a placement that are no mesh, and how settings are checked."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_post import types


def check_axes(place: str, sizes: Mapping[str, int]) -> None:
  """Refuses sizes below 1 other than one -1, "the rest"."""
  for name, size in sizes.items():
    if size != -1 and size < 1:
      raise types.InputError(
        f"{place}.{name}: expected at least 1, or -1 for the rest, got {size}. "
        "Correct the value."
      )
  if list(sizes.values()).count(-1) > 1:
    raise types.InputError(
      f"{place}: expected at most one axis of -1, got {dict(sizes)}. Write the "
      "others out."
    )


def check(name: str, value: Any, rule: str, holds: bool) -> None:
  """Refuses a setting of the placement whose rule does not hold."""
  if not holds:
    raise types.InputError(
      f"placement.{name}: expected {rule}, got {value!r}. Correct the value."
    )


def check_numbers(name: str, numbers: tuple[int, ...]) -> None:
  """Refuses what are no indices, or not each once."""
  holds = len(set(numbers)) == len(numbers) and min(numbers, default=0) >= 0
  check(name, numbers, "numbers from 0, each once", holds)


def check_apart(name: str, one: Sequence[int], other: Sequence[int]) -> None:
  """Refuses numbers that both sides have."""
  both = sorted(set(one) & set(other))
  check(name, both, "none of the numbers of the training side", not both)


def check_lists(
  mode: str, train: tuple[int, ...], generate: tuple[int, ...]
) -> None:
  """Refuses listed devices that no placement of the mode can use."""
  check_numbers("training_devices", train)
  check_numbers("generation_devices", generate)
  check_apart("generation_devices", train, generate)
  if mode == "split":
    rule = "a list if, and only if, training_devices is one"
    both = bool(train) == bool(generate)
    check("generation_devices", generate, rule, both)
    return
  check("generation_devices", generate, f"nothing in mode {mode}", not generate)
  if mode == "roles":
    check("training_devices", train, "nothing in mode roles", not train)


@dataclasses.dataclass(frozen=True)
class Roles:
  """Training and generation in processes of their own. Read in mode roles.

  Attributes:
    generation_replicas: processes that generate, each with its own engine.
    training_processes: processes that train together.
    training_cores: CPU cores that the training processes are pinned to, dealt
      out in order, equally many each; empty leaves them free.
    generation_cores: the same for the replicas.
    replica_devices: devices of each replica.
    replica_resource: Ray's name of what `replica_devices` counts, such as
      "GPU" or "TPU"; empty for virtual devices of the CPU.
  """

  generation_replicas: int = 1
  training_processes: int = 1
  training_cores: tuple[int, ...] = ()
  generation_cores: tuple[int, ...] = ()
  replica_devices: int = 1
  replica_resource: str = ""

  def __post_init__(self) -> None:
    for name in (
      "generation_replicas",
      "training_processes",
      "replica_devices",
    ):
      number = getattr(self, name)
      check(f"roles.{name}", number, "at least 1", number >= 1)
    for name, processes in (
      ("training_cores", self.training_processes),
      ("generation_cores", self.generation_replicas),
    ):
      cores = getattr(self, name)
      check_numbers(f"roles.{name}", cores)
      rule = f"equally many cores for each of {processes} processes"
      check(f"roles.{name}", len(cores), rule, len(cores) % processes == 0)
    check_apart(
      "roles.generation_cores", self.training_cores, self.generation_cores
    )


@dataclasses.dataclass(frozen=True)
class Publishing:
  """How weights travel from the training to the generation mesh.

  Attributes:
    chunk_bytes: most bytes of weights, of one copy as published, under way at
      once; a larger weight travels alone. None sends all at once.
    buffers: "double" keeps the old weights until the new ones have arrived, so
      that generation goes on; "free_first" frees them before, for want of
      memory.
  """

  chunk_bytes: int | None = None
  buffers: Literal["double", "free_first"] = "double"

  def __post_init__(self) -> None:
    chunk, kinds = self.chunk_bytes, ("double", "free_first")
    holds = chunk is None or chunk >= 1
    check("publish.chunk_bytes", chunk, "at least 1, or none", holds)
    known = self.buffers in kinds
    check("publish.buffers", self.buffers, " or ".join(kinds), known)
