"""From the rows of a file to examples: which field is what, and what it holds.

All sources that read files share it. A row is a JSON object or the like. A
field is named as it is in the row or, in a field of a field, with dots:
`reward_model.ground_truth`.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_post import types

Row = Mapping[str, Any]


def examples(
  rows: Iterable[tuple[str, Row]],
  *,
  path: str,
  prompt: str,
  answer: str,
  limit: int | None,
) -> tuple[types.Example, ...]:
  """Reads examples from rows.

  Args:
    rows: each with its place, for messages.
    path: of all of them, for messages.
    prompt: field with text, or with a list of {role, content} messages.
    answer: field with the reference that rewards see.
    limit: takes so many rows and no more; None takes all.

  Returns:
    One for each row, in order; at least one.

  Raises:
    types.InputError: there is no row or, by its place, one lacks a field or has
      something else in it.
  """
  found = tuple(
    _example(place, row, prompt, answer)
    for place, row in itertools.islice(rows, limit)
  )
  if not found:
    raise types.InputError(
      f"{path}: expected at least one row, got none. Fill the file."
    )
  return found


def check_limit(limit: int | None) -> None:
  """Refuses a limit that leaves nothing.

  Raises:
    types.InputError: it is below 1, or no whole number.
  """
  if limit is not None and (type(limit) is not int or limit < 1):
    raise types.InputError(
      f"source.limit: expected >= 1 or None, got {limit!r}. None reads all."
    )


def files(path: str) -> list[str]:
  """Returns the files that a path names.

  Args:
    path: a file, or a pattern such as `data/train-*.parquet`.

  Returns:
    The file itself, there or not; or those that fit, by name: at least one.

  Raises:
    types.InputError: nothing fits the pattern, or the path is a folder.
  """
  if not isinstance(path, str):
    raise types.InputError(
      f"source.path: expected text, got {short(path)}. Name a file."
    )
  place = pathlib.Path(path)
  if place.is_dir():
    raise types.InputError(
      f"source.path: expected a file, or a pattern such as train-*, got the "
      f"folder {path!r}. Add one to it."
    )
  if place.exists() or not set("*?[") & set(place.name):
    return [path]
  found = sorted(map(str, place.parent.glob(place.name)))
  if not found:
    raise types.InputError(
      f"source.path: expected a pattern that files fit, got {path!r}, which "
      "none does. Correct the path."
    )
  return found


def unreadable(path: str, error: OSError) -> types.InputError:
  """Returns what to raise for a file that the system does not give."""
  reason = os.strerror(error.errno) if error.errno else error.strerror
  return types.InputError(
    f"source.path: expected a readable file, got {path!r} ({reason}). Correct "
    "the path."
  )


def json_row(place: str, raw: bytes) -> dict[str, Any]:
  """Reads a row that is written as a JSON object.

  Raises:
    types.InputError: it is not UTF-8, or no JSON object.
  """
  try:
    row = json.loads(raw.decode("utf-8-sig"))
  except UnicodeDecodeError as error:
    raise types.InputError(
      f"{place}: expected UTF-8, got byte {raw[error.start]:#04x} at column "
      f"{error.start + 1}. Save it as UTF-8."
    ) from error
  except ValueError as error:
    reason = str(error).replace("line 1 ", "")  # the place has the line
    raise types.InputError(
      f"{place}: expected a JSON object, got {short(raw.decode())} "
      f"({reason}). Correct it."
    ) from error
  except RecursionError as error:
    raise types.InputError(
      f"{place}: expected a JSON object, got one nested too deep. Flatten it."
    ) from error
  if b"\\u" in raw:  # Escapes can write what is no text.
    _refuse_surrogates(place, row)
  if not isinstance(row, dict):
    raise types.InputError(
      f"{place}: expected a JSON object, got {short(row)}. Write one object in "
      "each row."
    )
  return row


def _refuse_surrogates(place: str, row: Any) -> None:
  try:
    json.dumps(row, ensure_ascii=False).encode("utf-8")
  except UnicodeEncodeError as error:
    raise types.InputError(
      f"{place}: expected text, got half of a character, "
      f"{error.object[error.start]!r}. Write both halves, or none."
    ) from error


def short(value: Any) -> str:
  """Returns a value as a message shows it: on one line, at most 60 long."""
  shown = repr(value)
  return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _example(place: str, row: Row, prompt: str, answer: str) -> types.Example:
  return types.Example(
    prompt=_prompt(f"{place}, field {prompt!r}", _field(place, row, prompt)),
    reference=_field(place, row, answer),
  )


def _field(place: str, row: Row, name: str) -> Any:
  if name in row:
    return row[name]
  value: Any = row
  for part in name.split("."):
    if not isinstance(value, Mapping) or part not in value:
      known = list(value) if isinstance(value, Mapping) else value
      raise types.InputError(
        f"{place}: expected a field {name!r}, got {short(known)}. Correct the "
        "row, or name the field as the source's prompt or answer, as in "
        "--set data.train.prompt=NAME."
      )
    value = value[part]
  return value


def _prompt(place: str, value: Any) -> str | tuple[dict[str, str], ...]:
  if isinstance(value, str):
    return value
  if isinstance(value, list) and value:
    messages = [_message(one) for one in value]
    if None not in messages:
      return tuple(message for message in messages if message is not None)
    value = value[messages.index(None)]
  raise types.InputError(
    f"{place}: expected text or a list of {{role, content}} messages with text "
    f"in both, got {short(value)}. Correct the row."
  )


def _message(value: Any) -> dict[str, str] | None:
  """Returns a message; None if it is none.

  Tables have every field in every message, null where it was not there.
  """
  if not isinstance(value, Mapping):
    return None
  message = {name: text for name, text in value.items() if text is not None}
  if message.keys() != {"role", "content"}:
    return None
  texts = all(isinstance(text, str) for text in message.values())
  return message if texts else None
