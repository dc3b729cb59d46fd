"""Edits a frozen tree of settings by names and texts, as --set gives them."""

import ast
import collections.abc
import contextlib
import dataclasses
import difflib
import importlib
import types as python_types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_post import types


def is_group(value: Any) -> bool:
  """Says whether a value has settings below it: a record, and not its class."""
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def near(name: str, known: Sequence[str]) -> str:
  """Returns a question whether another name was meant, or nothing."""
  close = difflib.get_close_matches(name, known, 1)
  return f" Did you mean {close[0]!r}?" if close else ""


def replace(
  node: Any, edits: dict[tuple[str, ...], str], prefix: str = ""
) -> Any:
  """Rebuilds a node with edits of its fields and of what is below them.

  Args:
    node: a frozen dataclass of leaves and of others like it.
    edits: the text of a value for each path of names.
    prefix: names above this node, with dots; for messages.

  Returns:
    A new node, checked by its own rules. A group that may be left out is None
    for the text "none", and has its defaults below an edit of what is in it.

  Raises:
    InputError: there is no such leaf, or the value is not of its type; or a
      group is edited as a whole, which is made in Python.
  """
  below: dict[str, dict[tuple[str, ...], str]] = {}
  for path, text in edits.items():
    below.setdefault(path[0], {})[path[1:]] = text
  names = [f.name for f in dataclasses.fields(node)]
  changes = {}
  for head, rest in below.items():
    name = f"{prefix}{head}"
    place = f"--set {name}"
    if head not in names:
      meant = "" if prefix else _below(node, head, min(rest))
      raise types.InputError(
        f"{place}: {type(node).__name__} has no field {head!r}."
        f"{meant or near(head, names)} Fields: {', '.join(names)}."
      )
    child, hint = getattr(node, head), typing.get_type_hints(type(node))[head]
    if child is None and () not in rest:
      child = _begun(hint, {path[0] for path in rest})
    left_out = {path: text.lower() for path, text in rest.items()}
    if left_out == {(): "none"} and type(None) in typing.get_args(hint):
      changes[head] = None  # A group may be left out as a whole.
    elif () in rest and (is_group(child) or len(rest) > 1):
      raise types.InputError(_not_whole(name, rest[()], child, hint))
    elif is_group(child):
      changes[head] = replace(child, rest, f"{name}.")
    elif () in rest:
      changes[head] = _parse(rest[()], hint, place)
    else:
      raise types.InputError(_nothing_below(name, rest, hint))
  return dataclasses.replace(node, **changes)


# Where a user reads how to write what no text can say.
_FILE = "in the experiment file (docs/running.md, Settings)"


def _below(node: Any, head: str, path: tuple[str, ...]) -> str:
  """Returns a question whether a name was meant that stands below others."""
  found = [
    ".".join((name, *path))
    for name in _names(node)
    if name.rpartition(".")[2] == head
  ]
  return f" Did you mean {' or '.join(found[:3])}?" if found else ""


def _names(node: Any, prefix: str = "") -> Iterator[str]:
  """Yields the dotted name of each setting and group."""
  for field in dataclasses.fields(node):
    value, name = getattr(node, field.name), f"{prefix}{field.name}"
    yield name
    if is_group(value):
      yield from _names(value, f"{name}.")


def _parts(annotation: Any) -> tuple[Any, ...]:
  """Returns the classes of settings that a type allows, also in a tuple."""
  protocol = getattr(annotation, "_is_protocol", False)
  if isinstance(annotation, type) and (
    protocol or dataclasses.is_dataclass(annotation)
  ):
    return (annotation,)
  if typing.get_origin(annotation) is collections.abc.Callable:
    return ()  # Classes of what it takes and returns are no settings.
  return tuple(p for a in typing.get_args(annotation) for p in _parts(a))


def _with_defaults(annotation: Any) -> list[Any]:
  """Returns those that can be made without a word."""
  return [
    kind
    for kind in _parts(annotation)
    if dataclasses.is_dataclass(kind)
    and all(
      field.default is not dataclasses.MISSING
      for field in dataclasses.fields(kind)
    )
  ]


def _begun(annotation: Any, names: set[str]) -> Any:
  """Returns the defaults of a group that is left out; None if it has none.

  Of several kinds the first with fields of these names, or else the first.
  """
  kinds = _with_defaults(annotation)
  fitting = [
    kind
    for kind in kinds
    if names <= {field.name for field in dataclasses.fields(kind)}
  ]
  for kind in (*fitting, *kinds):
    # Not yet checked: what is set may be what its rules ask for.
    begun = object.__new__(kind)
    for field in dataclasses.fields(begun):
      object.__setattr__(begun, field.name, field.default)
    return begun
  return None


def _not_whole(name: str, text: str, child: Any, annotation: Any) -> str:
  """Refuses an edit of a group as a whole, or of leaf and group at once."""
  if not is_group(child):
    return (
      f"--set {name}: expected a value or settings in it, got {text!r} and "
      "settings in it. Leave one of them out."
    )
  fields = ", ".join(f.name for f in dataclasses.fields(child))
  fixed = annotation is type(child)
  return (
    f"--set {name}: expected the name of a setting in it, got {text!r} for all "
    f"of it. Set one of: {fields}.{'' if fixed else f' Write another {_FILE}.'}"
  )


def _not_text(name: str, annotation: Any, text: str) -> str:
  """Refuses a text where a part is wanted, or several."""
  kinds = " or ".join(kind.__name__ for kind in _parts(annotation))
  several = typing.get_origin(annotation) is tuple
  rule = f"nothing, as in --set {name}=, " if several else "none, "
  made = "; ".join(
    ", ".join(
      f"{name}.{field.name}={_written(field.default)}"
      for field in dataclasses.fields(kind)
    )
    + f" ({kind.__name__})"
    for kind in _with_defaults(annotation)
  )
  also = f", or set one of these, which makes it with the rest: {made}"
  return (
    f"--set {name}: expected {rule}or {kinds} {_FILE}, got {text!r}. Write "
    f"it there{also if made else ''}."
  )


def _written(value: Any) -> str:
  """Returns a value as --set takes it."""
  if isinstance(value, tuple):
    return ",".join(map(_written, value))
  plain = isinstance(value, bool) or value is None
  return str(value).lower() if plain else str(value)


def _nothing_below(
  name: str, edits: dict[tuple[str, ...], str], annotation: Any
) -> str:
  """Refuses an edit below what is a leaf, or a part that is left out."""
  path = min(edits)
  own, *deeper = path
  place = f"--set {'.'.join((name, *path))}"
  if not _parts(annotation):
    return (
      f"{place}: expected no name below {name}, got {own!r}. It has no fields."
    )
  rule = f"{place}: expected a run with {name}, got one without."
  for kind in _parts(annotation):
    fields = {f.name: f.default for f in _fields(kind)}
    if own not in fields or deeper:
      continue
    needs = [x for x, v in fields.items() if v is dataclasses.MISSING]
    given = {x: "..." for x in needs} | {own: edits[path]}
    shown = ", ".join(f"{x}={v}" for x, v in given.items())
    module = kind.__module__.rpartition(".")[2]
    end = f"{name.rpartition('.')[2]}={module}.{kind.__name__}({shown})"
    return f"{rule} Write {end} {_FILE}; then --set changes it."
  return f"{rule} Write one {_FILE}; it has no defaults to begin with."


def _fields(kind: Any) -> tuple[dataclasses.Field, ...]:
  return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _parse(text: str, annotation: Any, place: str) -> Any:
  """Reads a value as its annotation says."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  error = types.InputError(
    f"{place}: expected {type_name(annotation)}, got {text!r}. Correct it."
  )
  if origin in (typing.Union, python_types.UnionType):
    if type(None) in args and text.lower() == "none":
      return None
    rest = [a for a in args if a is not type(None) and not _parts(a)]
    if rest:
      return _parse_any(text, rest, place, error)
  if _parts(annotation) and (origin is not tuple or text.strip()):
    name = place.removeprefix("--set ")
    raise types.InputError(_not_text(name, annotation, text))
  if origin is typing.Literal and text in args:
    return text
  if origin is tuple:
    return _parse_tuple(text, args, place, error)
  if origin is not None and origin is not collections.abc.Callable:
    raise error
  return _parse_plain(text, annotation, error)


def _parse_any(
  text: str, kinds: Sequence[Any], place: str, error: types.InputError
) -> Any:
  """Reads a value as the first of several types that it fits."""
  for kind in kinds[:-1]:
    with contextlib.suppress(types.InputError):
      return _parse(text, kind, place)
  try:
    return _parse(text, kinds[-1], place)
  except types.InputError as cause:
    raise (cause if len(kinds) == 1 else error) from cause.__cause__


def _parse_plain(text: str, annotation: Any, error: types.InputError) -> Any:
  if annotation is str:
    return text
  if annotation is bool:
    if text.lower() not in ("true", "false"):
      raise error
    return text.lower() == "true"
  if annotation in (int, float):
    try:
      return annotation(text)
    except ValueError as cause:
      raise error from cause
  return _parse_function(text, error)


def _parse_tuple(
  text: str, args: tuple[Any, ...], place: str, error: types.InputError
) -> tuple[Any, ...]:
  if args[-1] is not Ellipsis or typing.get_origin(args[0]) is tuple:
    try:
      value = ast.literal_eval(text)
    except (ValueError, SyntaxError) as cause:
      raise error from cause
    if not isinstance(value, tuple):
      raise error
    return value
  parts = [part.strip() for part in text.split(",") if part.strip()]
  return tuple(_parse(part, args[0], place) for part in parts)


def _parse_function(text: str, error: types.InputError) -> Callable[..., Any]:
  module, _, name = text.partition(":")
  try:
    value = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as cause:
    raise error from cause
  if not callable(value):
    raise error
  return value


def type_name(annotation: Any) -> str:
  """Returns what a type is called in a message."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Literal:
    return " or ".join(repr(a) for a in args)
  if origin in (typing.Union, python_types.UnionType):
    return " or ".join(type_name(a) for a in args)
  if annotation is type(None):
    return "none"
  if annotation is bool:
    return "true or false"
  if isinstance(annotation, type) and origin is None:
    return annotation.__name__
  return "module:name of a function" if origin is not tuple else "a tuple"
