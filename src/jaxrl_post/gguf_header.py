"""The header of a GGUF file: metadata, and where each tensor lies.

Read here, because the `gguf` package takes seconds to list a vocabulary and
believes every count and length that a file gives. Format:
github.com/ggml-org/ggml, docs/gguf.md.
"""

import dataclasses
import mmap
import struct
from typing import Any

# Types of metadata, as `struct` writes them.
_SCALARS = {
  **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
  **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
_STRING, _ARRAY = 8, 9
_MAX_NESTED = 4  # arrays in arrays
_MAX_DIMS = 4  # of a tensor, as in ggml


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where a tensor lies.

  Attributes:
    name: in GGUF.
    shape: slowest dimension first, which is not how the file has it.
    kind: number of its type in ggml.
    start: bytes from the beginning of the file.
  """

  name: str
  shape: tuple[int, ...]
  kind: int
  start: int


@dataclasses.dataclass(frozen=True)
class Header:
  """What stands before the tensors of a GGUF file.

  Attributes:
    fields: metadata by name: numbers, strings (bytes that are no UTF-8 are
      U+FFFD), and lists of them.
    tensors: in the order of the file.
    size: bytes of the file.
  """

  fields: dict[str, Any]
  tensors: tuple[Tensor, ...]
  size: int


def read(path: str) -> Header:
  """Reads the header of a GGUF file, in time linear in its length.

  Args:
    path: of the file.

  Raises:
    OSError: if there is none.
    ValueError: if it is no GGUF of version 2 or 3, or a count, a length or a
      type in it cannot be.
  """
  with open(path, "rb") as file:
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  try:
    return _parse(memoryview(data))
  except (struct.error, OverflowError) as error:
    raise ValueError(f"{len(data)} bytes that end too early") from error


def _strings(data: memoryview, at: int, size: int) -> tuple[list[str], int]:
  """Reads strings, and says where what follows begins."""
  values = []
  for _ in range(size):
    (length,) = struct.unpack_from("<Q", data, at)
    start, at = at + 8, at + 8 + length
    if at > len(data):
      raise ValueError("a string that runs past the end of the file")
    values.append(str(data[start:at], "utf-8", "replace"))
  return values, at


def _values(
  data: memoryview, at: int, kind: int, size: int, depth: int = 0
) -> tuple[list[Any], int]:
  """Reads metadata of one type, and says where what follows begins."""
  if kind == _STRING:
    return _strings(data, at, size)
  if kind in _SCALARS:
    end = at + size * struct.calcsize("<" + _SCALARS[kind])
    if end > len(data):
      raise ValueError("an array that runs past the end of the file")
    values = struct.unpack_from(f"<{size}{_SCALARS[kind]}", data, at)
    return list(values), end
  if kind != _ARRAY:
    raise ValueError(f"metadata of unknown type {kind}")
  if depth == _MAX_NESTED:
    raise ValueError(f"arrays more than {_MAX_NESTED} deep")
  arrays = []
  for _ in range(size):
    inner, length = struct.unpack_from("<IQ", data, at)
    values, at = _values(data, at + 12, inner, length, depth + 1)
    arrays.append(values)
  return arrays, at


def _parse(data: memoryview) -> Header:
  magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", data)
  if magic != b"GGUF" or version not in {2, 3}:
    raise ValueError(f"{magic!r} version {version}, not GGUF version 2 or 3")
  at, fields = 24, {}
  for _ in range(num_fields):
    (name,), at = _strings(data, at, 1)
    (kind,) = struct.unpack_from("<I", data, at)
    (fields[name],), at = _values(data, at + 4, kind, 1)
  table = []
  for _ in range(num_tensors):
    (name,), at = _strings(data, at, 1)
    (rank,) = struct.unpack_from("<I", data, at)
    if not 1 <= rank <= _MAX_DIMS:
      raise ValueError(f"{name[:60]!r} with {rank} dimensions")
    *dims, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, at + 4)
    at += 4 + 8 * rank + 12
    if 0 in dims:
      raise ValueError(f"{name[:60]!r} of shape {dims}")
    table.append((name, tuple(dims[::-1]), kind, offset))
  align = fields.get("general.alignment", 32)
  if type(align) is not int or align <= 0 or align % 8:
    raise ValueError(f"an alignment of {str(align)[:60]!r}")
  start = -(-at // align) * align
  tensors = tuple(Tensor(n, s, k, start + offset) for n, s, k, offset in table)
  return Header(fields, tensors, len(data))
