"""What one publish moves and holds, predicted before any weights exist.

Bytes that cross come from shapes; what the training devices exchange to lay
leaves out is read from the compiled program, and so is its memory.
"""

import math
import re
from typing import NamedTuple

import jax

from jaxrl_post.placement import bridge, publish

_DTYPE_BITS = re.compile(r"(?:pred|[a-z]+?(\d+)\w*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
  r"= (?P<out>\(.*?\)|\S+) (?P<kind>all-gather|all-reduce|all-to-all|"
  r"reduce-scatter|collective-permute)(?P<start>-start)?\((?P<rest>.*)"
)
_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_GROUPS_BY_SIZE = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_GROUPS_BY_AXES = re.compile(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}")
_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
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
    compiled = _compile(way)
    exchanged += received(compiled.as_text() or "", way.home.size)
    memory = compiled.memory_analysis()
    if memory is not None:
      size = memory.temp_size_in_bytes + memory.output_size_in_bytes
      peak = max(peak, size)
  return Traffic(publisher.bytes, exchanged, peak)


def received(text: str, count: int) -> int:
  """Counts bytes that devices receive from others in a program's collectives.

  With groups of g devices, of each device's result of R bytes: (g-1)/g x R for
  all-gather and all-to-all; (g-1) x R for reduce-scatter; 2(g-1)/g x R for
  all-reduce, as a ring does it; R for a permute between two devices.

  Args:
    text: the program after optimization, as XLA writes it.
    count: devices that it runs on.

  Returns:
    The sum over all devices. Loops count once.
  """
  total = 0
  for line in text.splitlines():
    found = _COLLECTIVE.search(line)
    if found:
      total += _received_by(found, count)
  return total


def _received_by(found: re.Match, count: int) -> int:
  kind, rest = found["kind"], found["rest"]
  sizes = [_bytes(*shape.groups()) for shape in _SHAPE.finditer(found["out"])]
  if found["start"] and kind in ("all-gather", "collective-permute"):
    sizes = sizes[1:2]  # after the operand
  result = sum(sizes)
  if kind == "collective-permute":
    listed = _PAIRS.search(rest)
    pairs = re.findall(r"(\d+),(\d+)", listed[1] if listed else "")
    return result * sum(a != b for a, b in pairs)
  group = _group_size(rest, count)
  times = {"all-reduce": 2 * (group - 1), "reduce-scatter": group * (group - 1)}
  return result * count * times.get(kind, group - 1) // group


def _group_size(rest: str, count: int) -> int:
  listed, by_size = _GROUPS.search(rest), _GROUPS_BY_SIZE.search(rest)
  by_axes = _GROUPS_BY_AXES.search(rest)
  if by_axes:
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", by_axes[1]))
    parts = _AXIS.findall(by_axes[2])
    return math.prod(int(part or sizes[name]) for name, part in parts)
  if by_size:
    return int(by_size[2])
  if listed:
    return len(listed[1].split("}")[0].strip("{").split(","))
  return count


def _bytes(dtype: str, dims: str) -> int:
  bits = _DTYPE_BITS.match(dtype)
  width = max(int(bits[1] or 8), 8) // 8 if bits else 0
  return width * math.prod(int(n) for n in dims.split(",") if n)


def _compile(way: bridge.Way) -> jax.stages.Compiled:
  arguments = [leaf.trained for leaf in way.leaves]
  with jax.set_mesh(way.home):
    return way.program.lower(arguments).compile()
