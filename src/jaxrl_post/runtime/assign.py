"""Edits a frozen tree of settings by names and texts, as --set gives them."""

import ast
import collections.abc
import dataclasses
import difflib
import importlib
import types as python_types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_post import types


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
    InputError: there is no such leaf, or the value is not of its type.
  """
  below: dict[str, dict[tuple[str, ...], str]] = {}
  for path, text in edits.items():
    below.setdefault(path[0], {})[path[1:]] = text
  names = [f.name for f in dataclasses.fields(node)]
  changes = {}
  for head, rest in below.items():
    place = f"--set {prefix}{head}"
    if head not in names:
      raise types.InputError(
        f"{place}: {type(node).__name__} has no field {head!r}."
        f"{near(head, names)} Fields: {', '.join(names)}."
      )
    child, hint = getattr(node, head), typing.get_type_hints(type(node))[head]
    if child is None and () not in rest:
      child = _begun(hint, {path[0] for path in rest})
    left_out = {path: text.lower() for path, text in rest.items()}
    if left_out == {(): "none"} and type(None) in typing.get_args(hint):
      changes[head] = None  # A group may be left out as a whole.
    elif dataclasses.is_dataclass(child) == (() in rest):
      raise types.InputError(_not_a_leaf(place, child))
    elif dataclasses.is_dataclass(child):
      changes[head] = replace(child, rest, f"{prefix}{head}.")
    else:
      changes[head] = _parse(rest[()], hint, place)
  return dataclasses.replace(node, **changes)


def _begun(annotation: Any, names: set[str]) -> Any:
  """Returns the defaults of a group that is left out; None if it has none.

  Of several kinds the first with fields of these names, or else the first.
  """
  kinds = [
    kind
    for kind in typing.get_args(annotation)
    if dataclasses.is_dataclass(kind)
    and all(
      field.default is not dataclasses.MISSING
      for field in dataclasses.fields(kind)
    )
  ]
  fitting = [
    kind
    for kind in kinds
    if names <= {field.name for field in dataclasses.fields(kind)}
  ]
  for kind in (*fitting, *kinds):
    # Not yet checked: what is set may be what its rules ask for.
    begun = object.__new__(typing.cast(Any, kind))
    for field in dataclasses.fields(begun):
      object.__setattr__(begun, field.name, field.default)
    return begun
  return None


def _not_a_leaf(place: str, child: Any) -> str:
  if not dataclasses.is_dataclass(child):
    return f"{place}: expected a leaf, got more. It has no fields."
  fields = ", ".join(f.name for f in dataclasses.fields(child))
  return f"{place}: expected a leaf, got a group. Set one of: {fields}."


def _parse(text: str, annotation: Any, place: str) -> Any:
  """Reads a value as its annotation says."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  error = types.InputError(
    f"{place}: expected {type_name(annotation)}, got {text!r}. Correct it."
  )
  if origin in (typing.Union, python_types.UnionType):
    if type(None) in args and text.lower() == "none":
      return None
    rest = [a for a in args if a is not type(None)]
    return _parse(text, rest[0], place)
  if origin is typing.Literal and text in args:
    return text
  if origin is tuple:
    return _parse_tuple(text, args, place, error)
  if origin is not None and origin is not collections.abc.Callable:
    raise error
  return _parse_plain(text, annotation, error)


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
