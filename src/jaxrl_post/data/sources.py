"""Where examples come from. `load()` reads a whole source into memory.

A source is any frozen dataclass with `load() -> tuple[types.Example, ...]`.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Jsonl:
  """A file with one JSON object a line; blank lines are skipped.

  Attributes:
    path: the file.
    prompt: field with the prompt: text, or a list of {role, content} messages.
    answer: field with the reference that rewards see; any JSON value.
    limit: reads this many examples and no more; None reads all.
  """

  path: str
  prompt: str = "prompt"
  answer: str = "answer"
  limit: int | None = None

  def __post_init__(self) -> None:
    if self.limit is not None and self.limit < 1:
      raise types.InputError(
        f"data.limit: expected >= 1 or None, got {self.limit}. "
        "None reads the whole file."
      )

  def load(self) -> tuple[types.Example, ...]:
    """Reads the examples in the order of the file.

    Raises:
      types.InputError: for a file that cannot be read, and, by file and line,
        for a line that is not UTF-8, not a JSON object, or lacks a field.
    """
    try:
      with open(self.path, "rb") as file:
        examples = tuple(itertools.islice(self._read(file), self.limit))
    except OSError as error:
      raise types.InputError(
        f"data.path: expected a readable file, got {self.path!r} "
        f"({error.strerror}). Correct the path."
      ) from error
    if not examples:
      raise types.InputError(
        f"{self.path}: expected at least one line, got none. Fill the file."
      )
    return examples

  def _read(self, lines: Iterator[bytes]) -> Iterator[types.Example]:
    for number, raw in enumerate(lines, start=1):
      if raw.strip():
        yield self._example(f"{self.path}:{number}", raw)

  def _example(self, place: str, raw: bytes) -> types.Example:
    try:
      row = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
      raise types.InputError(
        f"{place}: expected UTF-8, got byte {raw[error.start]:#04x} at column "
        f"{error.start + 1}. Save the file as UTF-8."
      ) from error
    except ValueError as error:
      reason = str(error).replace("line 1 ", "")  # the place has the line
      raise types.InputError(
        f"{place}: expected a JSON object, got {_short(raw.decode())} "
        f"({reason}). Correct the line."
      ) from error
    except RecursionError as error:
      raise types.InputError(
        f"{place}: expected a JSON object, got one nested too deep. Flatten it."
      ) from error
    if not isinstance(row, dict):
      raise types.InputError(
        f"{place}: expected a JSON object, got {_short(row)}. "
        "Write one object a line."
      )
    for field in (self.prompt, self.answer):
      if field not in row:
        raise types.InputError(
          f"{place}: expected a field {field!r}, got {_short(list(row))}. "
          "Correct the line, or name the field in data.prompt or data.answer."
        )
    return types.Example(
      prompt=_prompt(f"{place}, field {self.prompt!r}", row[self.prompt]),
      reference=row[self.answer],
    )


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
        f"data.size: expected >= 1, got {self.size}. Ask for an example."
      )

  def load(self) -> tuple[types.Example, ...]:
    """Makes the examples of indices `start` to `start + size`."""
    return tuple(
      self.make(i) for i in range(self.start, self.start + self.size)
    )


def _prompt(place: str, value: Any) -> str | tuple[dict[str, str], ...]:
  if isinstance(value, str):
    return value
  if isinstance(value, list) and value:
    wrong = [message for message in value if not _is_message(message)]
    if not wrong:
      return tuple(value)
    value = wrong[0]
  raise types.InputError(
    f"{place}: expected text or a list of {{role, content}} messages with text "
    f"in both, got {_short(value)}. Correct the line."
  )


def _is_message(value: Any) -> bool:
  return (
    isinstance(value, dict)
    and value.keys() == {"role", "content"}
    and all(isinstance(text, str) for text in value.values())
  )


def _short(value: Any) -> str:
  shown = repr(value)
  return shown if len(shown) <= 60 else f"{shown[:57]}..."
