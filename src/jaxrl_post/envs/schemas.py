"""JSON schemas of tools' arguments: the part of them that is checked here.

What is not checked is refused where the tool is made, so that no function gets
arguments that its schema forbids.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.rewards import combine

# They say something to the model, and nothing of what is allowed.
DESCRIPTIVE = (
  "title",
  "description",
  "default",
  "examples",
  "deprecated",
  "$comment",
  "$schema",
)
_MOST_LEVELS = 32

_KINDS: dict[str, Callable[[Any], bool]] = {
  "string": lambda x: isinstance(x, str),
  "boolean": lambda x: isinstance(x, bool),
  "number": lambda x: _is_number(x),
  "integer": lambda x: _is_number(x) and (isinstance(x, int) or x.is_integer()),
  "array": lambda x: isinstance(x, list | tuple),
  "object": lambda x: isinstance(x, Mapping),
  "null": lambda x: x is None,
}
# Of what kind of value a limit speaks, its measure, and when it holds.
_LIMITS: dict[
  str, tuple[str, Callable[[Any], Any], Callable[[Any, Any], bool]]
] = {
  "minimum": ("number", lambda x: x, lambda x, y: x >= y),
  "maximum": ("number", lambda x: x, lambda x, y: x <= y),
  "exclusiveMinimum": ("number", lambda x: x, lambda x, y: x > y),
  "exclusiveMaximum": ("number", lambda x: x, lambda x, y: x < y),
  "minLength": ("string", len, lambda x, y: x >= y),
  "maxLength": ("string", len, lambda x, y: x <= y),
  "minItems": ("array", len, lambda x, y: x >= y),
  "maxItems": ("array", len, lambda x, y: x <= y),
}
_HOLDING = ("properties", "additionalProperties", "items", "anyOf")
CHECKED = ("type", "enum", "const", *_LIMITS, "required", *_HOLDING)


def check(schema: Any, place: str) -> None:
  """Refuses the schema of a tool's arguments that cannot be checked.

  Args:
    schema: an object; of the keywords of JSON Schema it has those of `CHECKED`
      and `DESCRIPTIVE`.
    place: what it is called.

  Raises:
    types.InputError: it is no such schema; names the keyword.
  """
  is_mapping = isinstance(schema, Mapping)
  if not is_mapping or schema.get("type") != "object":
    raise _wrong(place, "a JSON schema of type object", schema)
  try:
    json.dumps(dict(schema), allow_nan=False)
  except (TypeError, ValueError, RecursionError) as error:
    raise _wrong(place, "what JSON can hold", schema) from error
  _check(schema, place, 0)


def _check(
  schema: Any, place: str, level: int, *, branch: bool = False
) -> None:
  if not isinstance(schema, Mapping):
    raise _wrong(place, "a JSON schema", schema)
  if level > _MOST_LEVELS:
    raise _wrong(place, f"at most {_MOST_LEVELS} levels", schema)
  known = (*CHECKED, *DESCRIPTIVE)
  for key, value in schema.items():
    if key not in known:
      raise types.InputError(
        f"{place}: expected no keywords but {', '.join(known)}, got "
        f"{_short(key)}, which would not be checked. Take it out, and check it "
        "in the function."
      )
    if key in _RULES and not _RULES[key][1](value):
      raise _wrong(f"{place}.{key}", _RULES[key][0], value)
  others = schema.get("additionalProperties", branch)
  closed = "properties" in schema and others is False
  for name in schema.get("required", ()) if closed else ():
    if name not in schema["properties"]:  # Every call would be refused.
      raise _wrong(f"{place}.required", "names of properties", name)
  for name, inner in _held(schema):
    branch = name.startswith("anyOf[")
    _check(inner, f"{place}.{name}", level + 1, branch=branch)


def _held(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields the schemas in a schema, and their places."""
  for name, inner in schema.get("properties", {}).items():
    yield f"properties.{name}", inner
  for number, inner in enumerate(schema.get("anyOf", ())):
    yield f"anyOf[{number}]", inner
  if "items" in schema:
    yield "items", schema["items"]
  if not isinstance(schema.get("additionalProperties", False), bool):
    yield "additionalProperties", schema["additionalProperties"]


def mismatch(
  schema: Mapping[str, Any], value: Any, place: str, *, branch: bool = False
) -> str:
  """Says what of a value is not as its JSON schema wants it.

  Args:
    schema: of the value, as `check` lets pass.
    value: as JSON has it.
    place: what it is called.
    branch: whether the schema is one of several that `anyOf` has for the value.

  Returns:
    The first fault, by any of `CHECKED`, also in what the value holds; empty if
    there is none. Names beyond `properties` are one, unless
    `additionalProperties` allows them; in a branch only where it forbids them.
  """
  kinds = _kinds(schema)
  if kinds and not any(_KINDS[kind](value) for kind in kinds):
    return f"{place}: expected {' or '.join(kinds)}, got {_short(value)}"
  allowed = schema.get("enum", [value])
  if not any(_same(value, one) for one in allowed):
    return f"{place}: expected one of {allowed}, got {_short(value)}"
  if "const" in schema and not _same(value, schema["const"]):
    return f"{place}: expected {schema['const']!r}, got {_short(value)}"
  for key, (kind, measure, holds) in _LIMITS.items():
    given = key in schema and _KINDS[kind](value)
    if given and not holds(measure(value), schema[key]):
      return f"{place}: expected {key} {schema[key]}, got {_short(value)}"
  ways = schema.get("anyOf", ())
  faults = [mismatch(way, value, place, branch=True) for way in ways]
  if faults and all(faults):
    return faults[0] if len(faults) == 1 else f"{faults[0]}, or other forms"
  return _mismatch_inside(schema, value, place, branch=branch)


def _mismatch_inside(
  schema: Mapping[str, Any], value: Any, place: str, *, branch: bool
) -> str:
  """Says the same of what an object or an array holds."""
  if _KINDS["array"](value) and "items" in schema:
    faults = (
      mismatch(schema["items"], one, f"{place}[{i}]")
      for i, one in enumerate(value)
    )
    return next(filter(None, faults), "")
  if not isinstance(value, Mapping):
    return ""
  for name in schema.get("required", ()):
    if name not in value:
      return f"{place}: expected {name!r}, got {_short(list(value))}"
  known = schema.get("properties", {})
  # JSON Schema allows what it does not name; a function has no place for it.
  unnamed = branch or "properties" not in schema
  others = schema.get("additionalProperties", unnamed)
  for name, one in value.items():
    if name not in known and others is False:
      return f"{place}: expected names of {list(known)}, got {name!r}"
    inner = known.get(name, {} if others is True else others)
    fault = mismatch(inner, one, f"{place}.{name}")
    if fault:
      return fault
  return ""


def _kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
  kinds = schema.get("type", ())
  return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _is_number(value: Any) -> bool:
  if isinstance(value, float):
    return math.isfinite(value)
  return isinstance(value, int) and not isinstance(value, bool)


def _same(a: Any, b: Any) -> bool:
  """Whether JSON means the same: no number is true or false."""
  return a == b and isinstance(a, bool) == isinstance(b, bool)


def _are_texts(value: Any) -> bool:
  is_list = isinstance(value, list | tuple)
  return is_list and all(isinstance(one, str) for one in value)


def _are_kinds(value: Any) -> bool:
  kinds = (value,) if isinstance(value, str) else value
  return _are_texts(kinds) and bool(kinds) and all(k in _KINDS for k in kinds)


def _is_plain(value: Any) -> bool:
  return value is None or isinstance(value, str | bool) or _is_number(value)


def _is_count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list(value: Any) -> bool:
  return (
    isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
  )


# What each keyword has to be given, and whether that is so.
_RULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
  "type": (f"one of {', '.join(_KINDS)}, or some of them", _are_kinds),
  "enum": (
    "a list of texts, numbers, booleans, null",
    lambda x: _is_list(x) and all(map(_is_plain, x)),
  ),
  "const": ("a text, a number, a boolean or null", _is_plain),
  "required": ("a list of names", _are_texts),
  "properties": (
    "schemas by name",
    lambda x: isinstance(x, Mapping) and _are_texts(list(x)),
  ),
  "anyOf": ("a list of schemas", _is_list),
  **{
    key: ("a finite number", _is_number)
    if kind == "number"
    else ("a whole number >= 0", _is_count)
    for key, (kind, *_) in _LIMITS.items()
  },
}


def _wrong(place: str, rule: str, value: Any) -> types.InputError:
  return types.InputError(
    f"{place}: expected {rule}, got {_short(value)}. Correct the schema."
  )


def _short(value: Any) -> str:
  return combine.one_line(repr(value), 60)
