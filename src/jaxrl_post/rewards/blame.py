"""Where a reward went wrong: its own traceback, and what to try it with."""

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pebble
from pebble.common import types as pebble_types

from jaxrl_post import types
from jaxrl_post.rewards import worker

_FRAME = re.compile(r'  File "([^"]+)", line \d+, in ')
# What stands between a worker's start and the function.
_OURS = (os.path.dirname(pebble.__file__), worker.__file__)


def traceback_of(error: BaseException) -> str:
  """Returns what a reward raised, as Python shows it.

  Args:
    error: that a rollout of the pool ended with.

  Returns:
    The traceback from the function on, without what called it here, and with
    an empty line behind it; empty for any other error than one of the run that
    a reward raised.
  """
  raised = error.__cause__
  where = None if raised is None else raised.__cause__
  if not isinstance(error, types.RunError) or not isinstance(
    where, pebble_types.RemoteTraceback
  ):
    return ""
  lines, drops = [], False
  for line in str(where).rstrip().split("\n"):
    frame = _FRAME.match(line)
    if frame or not line.startswith("    "):
      drops = frame is not None and frame[1].startswith(_OURS)
    if not drops:
      lines.append(line)
  return "\n".join([*lines, "", ""])


def target(function: Callable[..., Any]) -> str:
  """Returns what `rewards.check` is told to try a function: FILE:FUNCTION.

  Args:
    function: a reward; of a partial it is the function that it is made of.

  Returns:
    The file as seen from here; of a reward of this package its module.
  """
  while isinstance(function, functools.partial):
    function = function.func
  named = function if hasattr(function, "__qualname__") else type(function)
  module = sys.modules.get(named.__module__)
  file = getattr(module, "__file__", None)
  if file is None or named.__module__.startswith("jaxrl_post."):
    return f"{named.__module__}:{named.__qualname__}"
  return f"{os.path.relpath(file)}:{named.__qualname__}"
