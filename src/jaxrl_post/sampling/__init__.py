"""Prompts to completions: prefill, insert, decode, pick.

`load` takes a model from a folder and samples from it without a run. It stands
above this room, in `standalone`, and is loaded when it is used.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
  """Loads `load` on its first use."""
  if name != "load":
    raise AttributeError(f"jaxrl_post.sampling has no {name!r}")
  return importlib.import_module("jaxrl_post.standalone").load
