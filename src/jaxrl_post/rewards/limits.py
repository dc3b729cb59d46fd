"""How long rewards wait by settings of their own, against the pool's limit."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_post import types

# What our functions call it: `judge.graded`, `http.scored` and `code.passed`.
_NAMES = ("deadline_s", "timeout_s")


def longest(function: Callable[..., Any]) -> tuple[str, float]:
  """Returns the longest time that a reward gives to what it waits for.

  Args:
    function: a reward, or a partial of one. What counts is a parameter called
      `deadline_s` or `timeout_s`, its default or what a partial gives it, or
      that field of what is given, such as `judge.Judge`.

  Returns:
    What the setting is called and its seconds; "" and 0.0 where it has none.
  """
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):  # of a builtin
    return "", 0.0
  found = ("", 0.0)
  for parameter in parameters:
    name, given = parameter.name, parameter.default
    own = {f"{name}.{x}": getattr(given, x, None) for x in _NAMES}
    if name in _NAMES:
      own = {name: given}
    for setting, value in own.items():
      if isinstance(value, int | float) and value > found[1]:
        found = setting, float(value)
  return found


def check(
  functions: Sequence[Callable[..., Any]],
  names: Sequence[str],
  *,
  timeout_s: float,
  batch: int,
) -> None:
  """Refuses rewards that may wait longer than the pool lets them.

  Args:
    functions: the rewards.
    names: theirs, for people.
    timeout_s: longest call, in seconds: of one function, or of all of them
      where they share a batch.
    batch: rollouts sent to a worker at a time.

  Raises:
    types.InputError: naming what to change.
  """
  waits = [longest(function) for function in functions]
  for name, (setting, seconds) in zip(names, waits, strict=True):
    if seconds >= timeout_s:
      raise types.InputError(
        f"rewards.timeout_s: expected more than {setting}={seconds:g} of "
        f"{name}, got {timeout_s:g}. Raise rewards.timeout_s, or lower "
        f"{setting}."
      )
  total = math.fsum(seconds for _, seconds in waits)
  if batch > 1 and total >= timeout_s:
    settings = " + ".join(
      f"{setting}={seconds:g} of {name}"
      for name, (setting, seconds) in zip(names, waits, strict=True)
      if setting
    )
    raise types.InputError(
      f"rewards.timeout_s: expected more than {settings}, as rewards.batch="
      f"{batch} has one call ask all functions, got {timeout_s:g}. Raise it, "
      "or lower them."
    )
