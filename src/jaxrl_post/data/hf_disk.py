"""Examples from a folder that `datasets`' `save_to_disk` wrote (extra `data`).

Its Arrow files are read as they are; the package `datasets` is not needed.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxrl_post import types
from jaxrl_post.data import arrow, fields

try:
  import pyarrow
  from pyarrow import ipc
except ImportError:  # The extra is not installed; `load` says so.
  pyarrow = ipc = None

_KIND = "Arrow stream"
# How a stream of Arrow ends. Without it batches may be missing, which no reader
# says.
_END = b"\xff\xff\xff\xff\0\0\0\0"
_SPLITS, _STATE = "dataset_dict.json", "state.json"


@dataclasses.dataclass(frozen=True)
class HfDisk:
  """A data set of Hugging Face on disk.

  Attributes:
    path: the folder; of one split, or of several.
    split: which of several; None where there is one.
    prompt: field with the prompt: text, or a list of {role, content} messages;
      with dots for a field of a field.
    answer: field with the reference that rewards see; any value that JSON has.
    limit: reads this many examples and no more; None reads all.
  """

  path: str
  split: str | None = None
  prompt: str = "prompt"
  answer: str = "answer"
  limit: int | None = None

  def __post_init__(self) -> None:
    fields.check_limit(self.limit)

  def load(self) -> tuple[types.Example, ...]:
    """Reads the examples in the order of the rows.

    Raises:
      types.InputError: the extra is not installed, the folder is of something
        else or lacks the split, a file is damaged or lacks a column; or, by
        file and row, a value is wrong.
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
    for path in _files(self._folder()):
      yield from _file_rows(path, (self.prompt, self.answer))

  def _folder(self) -> pathlib.Path:
    """Returns the folder of the split."""
    folder = pathlib.Path(self.path)
    splits = []
    if (folder / _SPLITS).exists():
      splits = _read(folder / _SPLITS).get("splits")
      if not isinstance(splits, list) or not all(map(_is_name, splits)):
        raise types.InputError(
          f"{folder / _SPLITS}: expected names of splits, got "
          f"{fields.short(splits)}. Save the data set again."
        )
    if self.split is None and not splits:
      return folder
    if self.split not in splits:
      rule = (
        f"one of {', '.join(splits)}" if splits else "None, as there is one"
      )
      raise types.InputError(
        f"source.split: expected {rule}, got {self.split!r} for {folder}. "
        "Correct it."
      )
    return folder / str(self.split)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the Arrow files of a split, in order."""
  path = folder / _STATE
  if not path.exists():
    raise types.InputError(
      f"source.path: expected a folder that save_to_disk wrote, got {folder} "
      f"without {_STATE}. Correct the path."
    )
  state = _read(path)
  if state.get("_indices_files") or state.get("_indices_data_files"):
    raise types.InputError(
      f"{path}: expected rows in their own order, got a choice among them. "
      "Call flatten_indices() before save_to_disk."
    )
  found = state.get("_data_files")
  entries = found if isinstance(found, list) else [found]
  names = [e.get("filename") if isinstance(e, dict) else e for e in entries]
  if not all(map(_is_name, names)):
    raise types.InputError(
      f"{path}: expected names of files beside it in _data_files, got "
      f"{fields.short(found)}. Save the data set again."
    )
  return [folder / str(name) for name in names]


def _file_rows(
  path: pathlib.Path, names: tuple[str, str]
) -> Iterator[tuple[str, fields.Row]]:
  assert pyarrow is not None and ipc is not None, "load checks it"
  place = str(path)
  try:
    with path.open("rb") as file:
      file.seek(-min(len(_END), path.stat().st_size), 2)
      end = file.read()
    reader = ipc.open_stream(pyarrow.memory_map(place))
    known = reader.schema.names
  except arrow.ERRORS as error:
    raise arrow.damaged(place, _KIND, error) from error
  if end != _END:
    raise types.InputError(
      f"{place}: expected a whole {_KIND} file, got one without its end. Fetch "
      "it again."
    )
  with reader:
    wanted = arrow.columns(place, known, names)
    batches = (batch.select(wanted) for batch in reader)
    yield from arrow.rows(place, _KIND, batches)


def _is_name(value: Any) -> bool:
  """Whether this is the name of a file, and no way out of the folder."""
  if not isinstance(value, str) or value in ("", ".", ".."):
    return False
  return not set("/\\\0") & set(value)


def _read(path: pathlib.Path) -> dict[str, Any]:
  try:
    raw = path.read_bytes()
  except OSError as error:
    raise fields.unreadable(str(path), error) from error
  return fields.json_row(str(path), raw)
