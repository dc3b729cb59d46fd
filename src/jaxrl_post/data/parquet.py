"""Examples from Parquet files (extra `data`)."""

import dataclasses
from collections.abc import Iterator

from jaxrl_post import types
from jaxrl_post.data import arrow, fields

try:
  from pyarrow import parquet
except ImportError:  # The extra is not installed; `load` says so.
  parquet = None

_KIND = "Parquet"
_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Parquet:
  """A Parquet file, or several; of each only the columns that are needed.

  Attributes:
    path: the file, or a pattern such as `data/train-*.parquet`, whose files are
      read by name.
    prompt: field with the prompt: text, or a list of {role, content} messages;
      with dots for a field of a field.
    answer: field with the reference that rewards see; any value that JSON has.
    limit: reads this many examples and no more; None reads all.
  """

  path: str
  prompt: str = "prompt"
  answer: str = "answer"
  limit: int | None = None

  def __post_init__(self) -> None:
    fields.check_limit(self.limit)

  def load(self) -> tuple[types.Example, ...]:
    """Reads the examples in the order of the rows.

    Raises:
      types.InputError: the extra is not installed, a file cannot be read, is
        damaged or lacks a column; or, by file and row, a value is wrong.
    """
    arrow.check_installed(self.path)
    return fields.examples(
      self._rows(),
      path=self.path,
      prompt=self.prompt,
      answer=self.answer,
      limit=self.limit,
    )

  def _rows(self) -> Iterator[tuple[str, fields.Row]]:
    assert parquet is not None, "load checks it"
    for path in fields.files(self.path):
      try:
        file = parquet.ParquetFile(path)
        known = file.schema_arrow.names
      except arrow.ERRORS as error:
        raise arrow.damaged(path, _KIND, error) from error
      with file:
        wanted = arrow.columns(path, known, (self.prompt, self.answer))
        batches = file.iter_batches(_BATCH, columns=wanted)
        yield from arrow.rows(path, _KIND, iter(batches))
