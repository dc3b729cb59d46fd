"""Tables of Arrow as rows: what `parquet` and `hf_disk` share.

Needs the extra `data`; without it each source says so when it is loaded.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.data import fields

try:
  import pyarrow
except ImportError:  # The extra is not installed; `check_installed` says so.
  pyarrow = None

# What pyarrow raises for a file that is damaged or of another kind.
ERRORS: tuple[type[BaseException], ...] = (
  OSError,
  ValueError,
  KeyError,
  OverflowError,
)
if pyarrow is not None:
  ERRORS = (*ERRORS, pyarrow.ArrowException)


def check_installed(path: str) -> None:
  """Refuses to read without the package.

  Raises:
    types.InputError: pyarrow is not installed.
  """
  if pyarrow is None:
    raise types.InputError(
      f"{path}: expected the package pyarrow to read it, got none. Run pip "
      "install 'jaxrl_post[data]'."
    )


def damaged(path: str, kind: str, error: BaseException) -> types.InputError:
  """Returns what to raise for a file that cannot be read.

  Args:
    path: of the file.
    kind: what it should be.
    error: one of `ERRORS`.
  """
  if isinstance(error, OSError) and error.strerror:
    return fields.unreadable(path, error)
  reason = str(error).partition("\n")[0].strip().rstrip(".")
  return types.InputError(
    f"{path}: expected a whole {kind} file, got one that cannot be read "
    f"({reason}). Fetch it again."
  )


def columns(path: str, known: Sequence[str], names: Iterable[str]) -> list[str]:
  """Returns the columns that hold some fields.

  Args:
    path: of the table, for messages.
    known: its columns.
    names: of the fields, with dots for one in a field.

  Raises:
    types.InputError: there is no such column.
  """
  found = []
  for name in names:
    column = name if name in known else name.partition(".")[0]
    if column not in known:
      raise types.InputError(
        f"{path}: expected a column {column!r}, got {fields.short([*known])}. "
        "Name it as the source's prompt or answer, as in --set "
        "data.train.prompt=NAME."
      )
    found.append(column)
  return list(dict.fromkeys(found))


def rows(
  path: str, kind: str, batches: Iterator[Any]
) -> Iterator[tuple[str, fields.Row]]:
  """Yields the rows of a file, each with its place, counted from 0.

  Args:
    path: of the file.
    kind: what it is, for messages.
    batches: its record batches, which are read one by one.

  Raises:
    types.InputError: a batch is damaged, or a value is none that JSON has.
  """
  count = 0
  while True:
    try:
      batch = next(batches, None)
      values = []
      if batch is not None:
        batch.validate(full=True)  # Or a false offset would read anything.
        values = batch.to_pylist()
    except ERRORS as error:
      raise damaged(f"{path}, row {count} or later", kind, error) from error
    if batch is None:
      return
    for row in values:
      place = f"{path}, row {count}"
      for name, value in row.items():
        _check_plain(f"{place}, field {name!r}", value)
      yield place, row
      count += 1


def _check_plain(place: str, value: Any) -> None:
  """Refuses what JSON does not have, such as dates: rewards get plain values.

  Tables are as deep as their schema, so this ends.
  """
  if isinstance(value, dict):
    for one in value.values():
      _check_plain(place, one)
  elif isinstance(value, list):
    for one in value:
      _check_plain(place, one)
  elif not isinstance(value, str | int | float | bool | None):
    raise types.InputError(
      f"{place}: expected text, numbers, or lists and objects of these, got "
      f"{fields.short(value)}. Convert the column."
    )
