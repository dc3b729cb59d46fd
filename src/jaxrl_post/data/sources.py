"""Where examples come from. `load()` reads a whole source into memory.

A source is any frozen dataclass with `load() -> tuple[types.Example, ...]`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from jaxrl_post import types
from jaxrl_post.data import fields


@runtime_checkable
class Source(Protocol):
  """What a configuration names as its data."""

  def load(self) -> tuple[types.Example, ...]:
    """Reads the examples."""
    ...


@dataclasses.dataclass(frozen=True)
class Jsonl:
  """A file with one JSON object a line; blank lines are skipped.

  Attributes:
    path: the file, or a pattern of several.
    prompt: field with the prompt: text, or a list of {role, content} messages;
      with dots for a field of a field.
    answer: field with the reference that rewards see; any JSON value.
    limit: reads this many examples and no more; None reads all.
  """

  path: str
  prompt: str = "prompt"
  answer: str = "answer"
  limit: int | None = None

  def __post_init__(self) -> None:
    fields.check_limit(self.limit)

  def load(self) -> tuple[types.Example, ...]:
    """Reads the examples in the order of the file.

    Raises:
      types.InputError: for a file that cannot be read, and, by file and line,
        for a line that is not UTF-8, not a JSON object, or lacks a field.
    """
    return fields.examples(
      self._rows(),
      path=self.path,
      prompt=self.prompt,
      answer=self.answer,
      limit=self.limit,
    )

  def _rows(self) -> Iterator[tuple[str, fields.Row]]:
    for path in fields.files(self.path):
      for number, raw in enumerate(_lines(path), start=1):
        if raw.strip():
          place = f"{path}:{number}"
          yield place, fields.json_row(place, raw)


@dataclasses.dataclass(frozen=True)
class Generated:
  """Examples that a function makes from their index.

  Attributes:
    make: index to example; the same index always gives the same example.
    size: how many.
    start: the first index. Train and evaluation sets take disjoint ranges.
  """

  make: Callable[[int], types.Example]
  size: int
  start: int = 0

  def __post_init__(self) -> None:
    if self.size < 1:
      raise types.InputError(
        f"source.size: expected >= 1, got {self.size}. Ask for an example."
      )

  def load(self) -> tuple[types.Example, ...]:
    """Makes the examples of indices `start` to `start + size`.

    Raises:
      types.InputError: `make` returns something else; names the index.
    """
    return tuple(
      self._made(i) for i in range(self.start, self.start + self.size)
    )

  def _made(self, index: int) -> types.Example:
    made = self.make(index)
    if not isinstance(made, types.Example):
      raise types.InputError(
        f"source.make: expected a types.Example of index {index}, got "
        f"{fields.short(made)}. Correct the function."
      )
    return made


def _lines(path: str) -> Iterator[bytes]:
  try:
    with open(path, "rb") as file:
      yield from file
  except OSError as error:
    raise fields.unreadable(path, error) from error
