"""What a compiled program computes, moves and exchanges, read from its text.

XLA's own cost analysis counts the body of a loop once. Here a body counts as
often as it runs: as often as XLA has found out, or as the caller says. All
numbers are of one device.
"""

import collections
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.placement import traffic

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*)")
_OPCODE = re.compile(r"\s*([a-z][\w-]*)\((.*)")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.-]+)")
_CALLS = re.compile(
  r"(body|condition|calls|to_apply|branch_computations|true_computation|"
  r"false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
# What moves nothing by itself.
_FREE = re.compile(
  "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|"
  "after-all|partition-id|replica-id|iota|async-.*|.*-done|opt-barrier|domain"
)
_RUNS = frozenset({"fusion", "while", "call", "conditional", "async-start"})
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # operand with the part
_ONLY_A_PART = frozenset({"dynamic-slice", "slice", "gather"})


class Cost(NamedTuple):
  """What one run of a program takes on one device.

  Attributes:
    flops: products and sums of matrix products.
    bytes: read from and written to HBM, by the operands and results of what
      XLA has fused.
    cycles: XLA's own estimates of its fusions added up; 0 where it makes none.
    collectives: by kind and the mesh axes along which devices exchange, how
      often, and bytes that a device receives.
  """

  flops: float
  bytes: float
  cycles: float
  collectives: dict[tuple[str, str], tuple[float, float]]


class _Line(NamedTuple):
  """An instruction."""

  name: str
  shape: str
  opcode: str
  rest: str
  is_root: bool
  text: str

  @property
  def operands(self) -> list[str]:
    """Names of what it reads."""
    depth = 0
    for at, letter in enumerate(self.rest):
      depth += (letter == "(") - (letter == ")")
      if depth < 0:
        return _NAME.findall(self.rest[:at])
    return _NAME.findall(self.rest)


_Bodies = dict[str, dict[str, _Line]]


def cost(text: str, mesh: Mapping[str, int], trips: Sequence[int] = ()) -> Cost:
  """Reads a program.

  Args:
    text: after optimization, as XLA writes it.
    mesh: axis sizes of the mesh that it runs on, in the order of its devices.
    trips: how often loops run of which XLA does not know it: those in no other
      such loop, those in one, and so on; 1 beyond.

  Returns:
    The costs. Of a conditional the branch of no, or of 0, counts: what is rare
    is in the others.
  """
  bodies, entry = _parse(text)
  times, fused = _times(bodies, entry, trips)
  count = math.prod(mesh.values())
  flops, moved, cycles = 0.0, 0.0, 0.0
  sums: dict[tuple[str, str], tuple[float, float]] = collections.defaultdict(
    lambda: (0.0, 0.0)
  )
  for name, often in times.items():
    lines = bodies[name]
    for line in lines.values():
      flops += often * _flops(line, lines)
      exchange = _exchange(line, lines, count, name in fused)
      if exchange is not None:
        key = (exchange.kind, axes(exchange.talk, mesh))
        before = sums[key]
        share = often * exchange.received / count
        sums[key] = (before[0] + often, before[1] + share)
      if name not in fused:
        moved += often * _moved(line, lines, bodies)
        found = _CYCLES.search(line.rest)
        cycles += often * int(found[1]) if found else 0
  return Cost(flops, moved, cycles, dict(sums))


def _exchange(
  line: _Line, lines: Mapping[str, _Line], count: int, is_fused: bool
) -> traffic.Collective | None:
  """As `traffic.collective`, and knows a sum of which each keeps a part.

  TPUs' compiler writes it as a fusion of a sum for all and a slice; what is
  sent is what a reduce-scatter sends, half of an all-reduce.
  """
  found = traffic.collective(line.text, count)
  if found is None or found.kind != "all-reduce" or not is_fused:
    return found
  root = next(one for one in lines.values() if one.is_root)
  if _whole(root.shape) >= _whole(line.shape):
    return found
  half = found.received // 2
  return found._replace(kind="reduce-scatter", received=half)


def axes(talk: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> str:
  """Names the mesh axes along which some devices exchange.

  Args:
    talk: groups of positions in the order of the mesh's devices.
    mesh: axis sizes.

  Returns:
    Names joined by " x ", "none" if nobody has anyone to talk to.
  """
  found: set[str] = set()
  for group in talk:
    places = np.unravel_index(np.asarray(group), tuple(mesh.values()))
    pairs = zip(mesh, places, strict=True)
    found |= {name for name, place in pairs if len(set(place.tolist())) > 1}
  return " x ".join(name for name in mesh if name in found) or "none"


def _parse(text: str) -> tuple[_Bodies, str]:
  """Returns instructions by name, of each computation, and which is first."""
  bodies: _Bodies = {}
  entry, current = "", None
  for row in text.splitlines():
    header = _HEADER.match(row)
    if header:
      current = bodies.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
      continue
    found = _INSTRUCTION.match(row) if current is not None else None
    if not found:
      continue
    shape, rest = _cut_shape(found[3])
    opcode = _OPCODE.match(rest)
    if opcode and current is not None:
      current[found[2]] = _Line(
        found[2], shape, opcode[1], opcode[2], bool(found[1]), row
      )
  return bodies, entry


def _cut_shape(text: str) -> tuple[str, str]:
  """Cuts a shape, which may be a tuple, off what follows it."""
  depth = 0
  for at, letter in enumerate(text):
    depth += (letter in "({[") - (letter in ")}]")
    if depth == 0 and letter == " ":
      return text[:at], text[at:]
  return text, ""


def _times(
  bodies: _Bodies, entry: str, trips: Sequence[int]
) -> tuple[dict[str, float], set[str]]:
  """Returns how often each computation runs, and which are parts of fusions."""
  times: dict[str, float] = collections.defaultdict(float)
  fused: set[str] = set()

  def visit(name: str, often: float, depth: int, inside: bool) -> None:
    times[name] += often
    if inside:
      fused.add(name)
    for line in bodies[name].values():
      known = _count(line, bodies[name], bodies)
      for callee, count, below, part in _callees(line, known, depth, trips):
        if callee in bodies:
          visit(callee, often * count, below, inside or part)

  visit(entry, 1.0, 0, False)
  return dict(times), fused


def _callees(
  line: _Line, known: int | None, depth: int, trips: Sequence[int]
) -> Iterator[tuple[str, int, int, bool]]:
  """Yields what an instruction runs: name, how often, depth, if it is fused."""
  count, below = known or 1, depth
  if line.opcode == "while" and known is None:
    count, below = (trips[depth] if depth < len(trips) else 1), depth + 1
  if line.opcode not in _RUNS:
    return  # Of a sum or a sort, the function of two elements.
  for kind, names in _CALLS.findall(line.rest):
    if kind != "true_computation":
      name = re.findall(r"[\w.-]+", names)[0]
      often = 1 if kind == "condition" else count
      yield name, often, below, line.opcode == "fusion"


def _count(
  line: _Line, around: Mapping[str, _Line], bodies: _Bodies
) -> int | None:
  """Returns how often a loop runs, if that is written somewhere."""
  if line.opcode != "while":
    return None
  written = _TRIPS.search(line.rest)
  if written:
    return int(written[1])
  called = dict(_CALLS.findall(line.rest))
  test = bodies.get(called.get("condition", "").lstrip("%"), {})
  root = next((one for one in test.values() if one.is_root), None)
  if root is None or root.opcode != "compare" or "LT" not in root.rest:
    return None
  at, end = (test[name] for name in root.operands)
  start = around[line.operands[0]]
  if at.opcode != "get-tuple-element" or start.opcode != "tuple":
    return None
  place = int(at.rest.rpartition("index=")[2].split(",")[0])
  first, last = (
    _constant(around[start.operands[place]], around),
    _constant(end, test),
  )
  if first is None or last is None:
    return None
  return -(-(last - first) // _step(called.get("body", ""), place, bodies))


def _step(body: str, place: int, bodies: _Bodies) -> int:
  """Returns by how much a turn of a loop raises its number; 1 if unwritten."""
  lines = bodies.get(body.lstrip("%"), {})
  root = next((one for one in lines.values() if one.is_root), None)
  if root is None or root.opcode != "tuple":
    return 1
  raised = lines.get(root.operands[place])
  if raised is None or raised.opcode != "add":
    return 1
  terms = [lines[name] for name in raised.operands if name in lines]
  found = [n for one in terms if (n := _constant(one, lines)) is not None]
  return found[0] if found and found[0] > 0 else 1


def _constant(line: _Line, lines: Mapping[str, _Line]) -> int | None:
  """Returns the value of a number that is written out, or copied from one."""
  while line.opcode in ("copy", "bitcast") and line.operands[0] in lines:
    line = lines[line.operands[0]]
  found = re.match(r"(-?\d+)\)", line.rest)
  return int(found[1]) if line.opcode == "constant" and found else None


def _sizes(shape: str) -> list[tuple[int, bool]]:
  """Returns bytes of each array of a shape, and whether it is in HBM."""
  return [
    (traffic.size(dtype, dims), "S(" not in (lie or ""))
    for dtype, dims, lie in _SHAPE.findall(shape)
  ]


def _hbm(shape: str) -> int:
  return sum(size for size, there in _sizes(shape) if there)


def _whole(shape: str) -> int:
  return sum(size for size, _ in _sizes(shape))


def _moved(line: _Line, lines: Mapping[str, _Line], bodies: _Bodies) -> float:
  """Returns bytes that an instruction reads from HBM and writes to it."""
  if _FREE.fullmatch(line.opcode):
    return 0
  shapes = [lines[n].shape if n in lines else "" for n in line.operands]
  if line.opcode in _ONLY_A_PART:
    there = any(_hbm(shape) for shape in shapes[:1])
    return _hbm(line.shape) + (_whole(line.shape) if there else 0)
  if line.opcode in _IN_PLACE:
    part = _whole(shapes[_IN_PLACE[line.opcode]])
    return 2 * part if _hbm(line.shape) else 0
  if line.opcode in ("copy-start", "slice-start"):
    # Of a copy's tuple, the first is where it goes; of a slice's the second.
    at = line.opcode == "slice-start"
    size, there = _sizes(line.shape)[at]
    return size * (there + any(_hbm(shape) for shape in shapes))
  if line.opcode != "fusion":
    return _hbm(line.shape) + sum(_hbm(shape) for shape in shapes)
  called = _CALLS.search(line.rest)
  inner = bodies.get(called[2].lstrip("%"), {}) if called else {}
  return _of_fusion(line, shapes, inner)


def _of_fusion(
  line: _Line, shapes: Sequence[str], inner: Mapping[str, _Line]
) -> float:
  """As `_moved`: of an operand of which only a part is read, that part."""
  numbers = {
    one.name: int(one.rest.split(")")[0])
    for one in inner.values()
    if one.opcode == "parameter"
  }
  uses: dict[int, list[tuple[_Line, int]]] = collections.defaultdict(list)
  for one in inner.values():
    for at, name in enumerate(one.operands):
      if name in numbers:
        uses[numbers[name]].append((one, at))
  total, written = 0.0, _hbm(line.shape)
  for number, shape in enumerate(shapes):
    total += min(_hbm(shape), _read(shape, uses[number]))
  for one in inner.values():
    if one.opcode in _IN_PLACE and _hbm(line.shape):
      part = one.operands[_IN_PLACE[one.opcode]]
      size = _whole(inner[part].shape) if part in inner else 0
      written -= max(0, _whole(one.shape) - size)
  return total + max(written, 0)


def _read(shape: str, uses: Sequence[tuple[_Line, int]]) -> float:
  """Returns bytes of a fusion's operand that are read."""
  total = 0
  for line, at in uses:
    if line.opcode in _ONLY_A_PART and at == 0:
      total += _whole(line.shape)
    elif line.opcode not in _IN_PLACE or at != 0:
      return _hbm(shape)
  return total


def _flops(line: _Line, lines: Mapping[str, _Line]) -> float:
  """Returns the operations of a matrix product, which XLA may call another."""
  if line.opcode not in ("dot", "convolution"):
    return 0
  shapes = [lines[n].shape if n in lines else "" for n in line.operands[:2]]
  left, right = (_dims(shape) for shape in shapes)
  out = _dims(line.shape)
  if line.opcode == "dot":
    found = _CONTRACTED.search(line.rest)
    over = [int(n) for n in (found[1] if found else "").split(",") if n]
    return 2.0 * math.prod(out) * math.prod(left[i] for i in over)
  labels, window = _LABELS.search(line.rest), _WINDOW.search(line.rest)
  if labels is None:
    return 0
  options = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
  total = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")]
  total *= right[labels[2].index("i")]
  spatial = sorted(set(labels[2]) - {"i", "o"})
  for at, name in enumerate(spatial):
    sizes = (
      left[labels[1].index(name)],
      right[labels[2].index(name)],
      out[labels[3].index(name)],
    )
    total *= _meetings(sizes, _steps(options, at))
  return total


def _steps(options: Mapping[str, str], at: int) -> tuple[int, int, int, int]:
  """Returns stride, both dilations and lower padding of a spatial dim."""

  def one(name: str, default: str) -> str:
    parts = options.get(name, "").split("x")
    return parts[at] if at < len(parts) and parts[at] else default

  stride, spread, apart = (
    int(one(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")
  )
  return stride, spread, apart, int(one("pad", "0_0").split("_")[0])


@functools.cache
def _meetings(
  sizes: tuple[int, int, int], steps: tuple[int, int, int, int]
) -> int:
  """Counts pairs of a result and a place of the window that meet an input."""
  (size, window, out), (stride, spread, apart, pad) = sizes, steps
  places = np.arange(out)[:, None] * stride + np.arange(window) * apart - pad
  inside = (places >= 0) & (places <= (size - 1) * spread)
  return int((inside & (places % spread == 0)).sum())


def _dims(shape: str) -> list[int]:
  found = _SHAPE.search(shape)
  return [int(n) for n in found[2].split(",") if n] if found else []
