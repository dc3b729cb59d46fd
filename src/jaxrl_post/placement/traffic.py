"""What one publish moves and holds, predicted before any weights exist.

Bytes that cross come from shapes; what the training devices exchange to lay
leaves out is read from the compiled program, and so is its memory.
"""

import math
import re
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_post.placement import bridge, publish

_DTYPE_BITS = re.compile(r"(?:pred|[a-z]+?(\d+)\w*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
  r"= (?P<out>\(.*?\)|\S+) (?P<kind>all-gather|all-reduce|all-to-all|"
  r"reduce-scatter|collective-permute)(?P<start>-start)?\((?P<rest>.*)"
)
_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_GROUPS_BY_SIZE = re.compile(
  r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_GROUPS_BY_AXES = re.compile(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


class Traffic(NamedTuple):
  """Predicted bytes of one publish.

  Attributes:
    crossing: bytes that this process's target devices need and do not hold.
    exchanged: bytes that all training devices together receive from each other
      in collectives of the compiled programs, checksums included.
    peak: temporary and output bytes on one training device while the largest
      program runs; the weights themselves come on top.
  """

  crossing: int
  exchanged: int
  peak: int


def traffic(publisher: publish.Publisher) -> Traffic:
  """Predicts the bytes of a publish; compiles its programs, moves nothing.

  Args:
    publisher: as planned; with several processes all must call.

  Returns:
    The bytes; all zero where every leaf is an alias.
  """
  exchanged, peak = 0, 0
  for way in publisher.ways:
    compiled = lower(way).compile()
    exchanged += received(compiled.as_text() or "", way.home.size)
    memory = compiled.memory_analysis()
    if memory is not None:
      size = memory.temp_size_in_bytes + memory.output_size_in_bytes
      peak = max(peak, size)
  return Traffic(publisher.bytes, exchanged, peak)


def lower(way: bridge.Way) -> jax.stages.Lowered:
  """Lowers the program that sends some leaves; no array is needed."""
  arguments = [leaf.trained for leaf in way.leaves]
  with jax.set_mesh(way.home):
    return way.program.lower(arguments)


class Collective(NamedTuple):
  """One instruction by which devices exchange data.

  Attributes:
    kind: such as all-gather.
    talk: positions in the program's order of devices: the first group of those
      that exchange; of a permute each pair of a sender and another receiver.
    received: bytes that all devices together receive from others.
  """

  kind: str
  talk: tuple[tuple[int, ...], ...]
  received: int


def received(text: str, count: int) -> int:
  """Counts bytes that devices receive from others in a program's collectives.

  Args:
    text: the program after optimization, as XLA writes it.
    count: devices that it runs on.

  Returns:
    The sum over all devices. Loops count once.
  """
  found = (collective(line, count) for line in text.splitlines())
  return sum(one.received for one in found if one)


def collective(line: str, count: int) -> Collective | None:
  """Reads a line of a program.

  With groups of g devices, of each device's result of R bytes: (g-1)/g x R for
  all-gather and all-to-all; (g-1) x R for reduce-scatter; 2(g-1)/g x R for
  all-reduce, as a ring does it; R for a permute between two devices.

  Args:
    line: an instruction as XLA writes it.
    count: devices that the program runs on.

  Returns:
    What it exchanges; None if it is no collective. Two halves of an
    asynchronous one count as one, that of the first.
  """
  found = _COLLECTIVE.search(line)
  if not found:
    return None
  kind, rest = found["kind"], found["rest"]
  sizes = [size(*shape.groups()) for shape in _SHAPE.finditer(found["out"])]
  if found["start"] and kind in ("all-gather", "collective-permute"):
    sizes = sizes[1:2]  # after the operand
  result = sum(sizes)
  if kind == "collective-permute":
    listed = _PAIRS.search(rest)
    pairs = re.findall(r"(\d+),(\d+)", listed[1] if listed else "")
    talk = tuple((int(a), int(b)) for a, b in pairs if a != b)
    return Collective(kind, talk, result * len(talk))
  group = _group(rest, count)
  g = len(group)
  times = {"all-reduce": 2 * (g - 1), "reduce-scatter": g * (g - 1)}
  return Collective(
    kind, (group,), result * count * times.get(kind, g - 1) // g
  )


def _group(rest: str, count: int) -> tuple[int, ...]:
  """Returns the first group of a collective."""
  listed, by_size = _GROUPS.search(rest), _GROUPS_BY_SIZE.search(rest)
  by_axes = _GROUPS_BY_AXES.search(rest)
  if by_axes:
    return _by_axes(by_axes[1], by_axes[2])
  if by_size:
    dims = _numbers(by_size[3])
    order = _numbers(by_size[4]) if by_size[4] else range(len(dims))
    every = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    return tuple(every.reshape(-1)[: int(by_size[2])].tolist())
  if listed:
    return tuple(_numbers(listed[1].split("}")[0].strip("{")))
  return tuple(range(count))


def _by_axes(mesh: str, axes: str) -> tuple[int, ...]:
  """Returns the group along some axes of a mesh, or along parts of them."""
  sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh)}
  names = [*sizes]
  group = np.zeros(1, int)
  for name, before, part in _AXIS.findall(axes):
    size = int(part or sizes[name])
    inner = math.prod(sizes[n] for n in names[names.index(name) + 1 :])
    stride = inner * sizes[name] // (int(before or 1) * size)
    group = (group[:, None] + np.arange(size) * stride).reshape(-1)
  return tuple(group.tolist())


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",")]


def size(dtype: str, dims: str) -> int:
  """Returns bytes of an array, from its dtype and sizes as XLA writes them."""
  bits = _DTYPE_BITS.match(dtype)
  width = max(int(bits[1] or 8), 8) // 8 if bits else 0
  return width * math.prod(int(n) for n in dims.split(",") if n)
