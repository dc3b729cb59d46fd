"""Examples from ArrayRecord files, by grain's reader; each record is JSON."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import grain

from jaxrl_post import types
from jaxrl_post.data import fields

# What the reader raises for a file that is damaged or of another kind.
_ERRORS = (OSError, ValueError, RuntimeError, IndexError)


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
  """A file, or several, in which a record is a JSON object as UTF-8.

  Attributes:
    path: the file, or a pattern such as `data/train-*.array_record`, whose
      files are read by name.
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
    """Reads the examples in the order of the records.

    Raises:
      types.InputError: a file cannot be read or is damaged; or, by file and
        record, one is no JSON object, or lacks a field.
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
      for number, raw in enumerate(_records(path)):
        place = f"{path}, record {number}"
        yield place, fields.json_row(place, raw)


def _records(path: str) -> Iterator[bytes]:
  number = 0
  try:
    with open(path, "rb"):  # The reader's own message has no reason.
      pass
    reader: Any = grain.sources.ArrayRecordDataSource(path)  # `with` untyped
    with reader as source:
      for number in range(len(source)):
        yield source[number]
  except _ERRORS as error:
    if isinstance(error, OSError) and error.strerror:
      raise fields.unreadable(path, error) from error
    reason = str(error).partition("\n")[0]
    raise types.InputError(
      f"{path}: expected a whole ArrayRecord file, got one that cannot be read "
      f"from record {number} on ({reason}). Fetch it again."
    ) from error
