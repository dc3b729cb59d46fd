"""What a configuration is made of, as text that every process writes alike.

A run is continued by a configuration of the same text, so nothing in it may
change from process to process: no address of an object, no order of a set.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import flax.linen

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


def text(value: Any) -> str:
  """Writes a value in one line.

  Args:
    value: a module of flax, a function, a partial of one, or anything else;
      also in tuples, lists, dicts and sets, or as a field of a module.

  Returns:
    Functions and classes as `module:name`; modules and partials as a call; the
    rest as its `repr`, without addresses. Sets are sorted. Two objects that
    differ in their address alone have the same text.
  """
  if isinstance(value, flax.linen.Module):
    names = [f.name for f in dataclasses.fields(value) if f.init]
    fields = ", ".join(
      f"{name}={text(getattr(value, name))}"
      for name in names
      if name not in ("parent", "name")
    )
    return f"{text(type(value))}({fields})"
  if isinstance(value, functools.partial):
    extra = {**dict(enumerate(value.args)), **value.keywords}
    fields = ", ".join(f"{k}={text(v)}" for k, v in extra.items())
    return f"{text(value.func)}({fields})"
  if callable(value) and hasattr(value, "__qualname__"):
    # A method of a builtin, such as str.strip, is of no module.
    module = getattr(value, "__module__", None) or "builtins"
    return f"{module}:{value.__qualname__}"
  return _items(value) or _ADDRESS.sub("", " ".join(repr(value).split()))


def _items(value: Any) -> str:
  """Writes a container by what is in it; nothing of any other value."""
  if isinstance(value, Mapping):
    pairs = (f"{text(k)}: {text(v)}" for k, v in value.items())
    return f"{{{', '.join(pairs)}}}"
  if isinstance(value, set | frozenset):
    return f"{type(value).__name__}({', '.join(sorted(map(text, value)))})"
  if isinstance(value, list):
    return f"[{', '.join(map(text, value))}]"
  if type(value) is tuple:
    comma = "," if len(value) == 1 else ""
    return f"({', '.join(map(text, value))}{comma})"
  return ""
