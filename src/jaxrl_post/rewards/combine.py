"""From what reward functions return to the reward of a rollout; pure."""

import dataclasses
import functools
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post import types

# Squares of larger rewards leave float32, and with them the group's deviation.
LARGEST = 1e15
RANGE = f"from -{LARGEST:g} to {LARGEST:g}"
# More are a mistake, and each is a column of the metrics.
MAX_PARTS = 100
_MAX_NAME = 100


@types.host_record
class Score:
  """What one function said about one rollout.

  Attributes:
    parts: the finite numbers it gave, by name.
    missing: "nan" or "None" if it gave no reward; a decision, not a fault.
    fault: why its answer cannot be used; empty otherwise.
    replaced: the fault of an answer in whose place stands a value of the user.
  """

  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  missing: str = ""
  fault: str = ""
  replaced: str = ""


def names(functions: Sequence[Callable[..., Any]]) -> tuple[str, ...]:
  """Names functions for people.

  Returns:
    Distinct names in order: `__name__`, of the inner function for a partial,
    and `name_2` for the second function of that name.
  """
  found: list[str] = []
  for function in functions:
    inner = function
    while isinstance(inner, functools.partial):
      inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    taken, number = name, 1
    while taken in found:
      number += 1
      taken = f"{name}_{number}"
    found.append(taken)
  return tuple(found)


def read(name: str, value: Any) -> Score:
  """Reads what a function returned.

  Args:
    name: of the function; names its part if it gave a bare number.
    value: a number, or numbers by name. NaN or None is no reward.

  Returns:
    A score whose parts are finite, and 0.0 where they are -0.0. Anything else
    is said in `missing` (NaN, None, or no part at all) or in `fault` (beyond
    `LARGEST`, not a number, more than `MAX_PARTS` or with a name as long).
  """
  named = value if isinstance(value, Mapping) else {name: value}
  if len(named) > MAX_PARTS:
    return Score(fault=f"reward is {len(named)} parts")
  parts: dict[str, float] = {}
  missing = "" if named else "{}"
  fault = ""
  for key, item in named.items():
    number = _number(item)
    if item is None:
      missing = missing or "None"
    elif number is None:
      fault = fault or f"reward is {one_line(reprlib.repr(item))}"
    elif len(str(key)) > _MAX_NAME:
      fault = fault or f"reward is of a part named {reprlib.repr(key)}"
    elif math.isnan(number):
      missing = missing or "nan"
    elif abs(number) > LARGEST:
      fault = fault or f"reward is {number}"
    else:
      parts[str(key)] = number + 0.0
  return Score(parts=parts, missing=missing, fault=fault)


def replaced(name: str, score: Score, value: float) -> Score:
  """Puts a value in the place of what a function did not give.

  Returns:
    The score itself if it has no fault; otherwise one whose only part is the
    value, by the name of the function.
  """
  if not score.fault:
    return score
  return Score(parts={name: value}, replaced=score.fault)


def combine(
  rollout: types.Rollout, scores: Sequence[Score], weights: Sequence[float]
) -> types.Rollout:
  """Gives a rollout its reward.

  Args:
    rollout: not scored yet.
    scores: one for each function.
    weights: one for each function, for the sum of its parts.

  Returns:
    The rollout with the weighted sum and every part, unweighted. Its reward is
    NaN and `failure` says why if any function gave none; where a value stands
    for an answer, `failure` says why, too.

  Raises:
    types.InputError: when two functions name a part alike, or weights make a
      reward beyond `LARGEST`.
  """
  parts: dict[str, float] = {}
  for score in scores:
    twice = parts.keys() & score.parts.keys()
    if twice:
      raise types.InputError(
        "rewards.functions: expected distinct names of parts, got "
        f"{min(twice)!r} from two functions. Rename it in one of them."
      )
    parts |= score.parts
  faults = [s.fault for s in scores if s.fault]
  faults += [f"no reward: {s.missing}" for s in scores if s.missing]
  pairs = zip(weights, scores, strict=True)
  terms = [w * v for w, s in pairs for v in s.parts.values()]
  large = [x for x in terms if not abs(x) <= LARGEST]
  total = large[0] if large else math.fsum(terms)
  if not abs(total) <= LARGEST:
    raise types.InputError(
      f"rewards.weights: expected weighted rewards {RANGE}, and such a sum, "
      f"got {total:g}. Lower the weights, or what the functions give."
    )
  return dataclasses.replace(
    rollout,
    reward=math.nan if faults else total,
    parts=parts,
    failure=next(iter(faults + [s.replaced for s in scores if s.replaced]), ""),
  )


def add(rollout: types.Rollout, score: Score, weight: float) -> types.Rollout:
  """Adds to a reward what one more has said about the rollout.

  Args:
    rollout: that the others have scored, as `combine` gives it.
    score: of the one more.
    weight: of its parts, for the sum.

  Returns:
    The rollout as `combine` gives it of all of them. Without a reward it stays
    without, and says why as before.

  Raises:
    types.InputError: when another has named a part alike, or the sum is beyond
      `LARGEST`.
  """
  alone = combine(rollout, [score], [weight])
  twice = rollout.parts.keys() & score.parts.keys()
  if twice:
    raise types.InputError(
      f"rewards.model.name: expected a name that no other part has, got "
      f"{min(twice)!r} as of a function. Choose another."
    )
  total = math.fsum((rollout.reward, alone.reward))
  if abs(total) > LARGEST:
    raise types.InputError(
      f"rewards.model.weight: expected a sum of all rewards {RANGE}, got "
      f"{total:g}. Lower it, or what the functions give."
    )
  # Why there is no reward comes before what stands for an answer.
  said = sorted((rollout, alone), key=lambda r: not math.isnan(r.reward))
  return dataclasses.replace(
    rollout,
    reward=total,
    parts={**rollout.parts, **score.parts},
    failure=next((r.failure for r in said if r.failure), ""),
  )


def one_line(text: str, limit: int = 200) -> str:
  """Returns the words of a text on one line of at most `limit` characters.

  What is not printable, and could write to a terminal what nobody said, is
  U+FFFD instead.
  """
  text = " ".join(text.split())
  text = text if len(text) <= limit else f"{text[: limit - 3]}..."
  return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _number(value: Any) -> float | None:
  is_scalar = isinstance(value, numbers.Real | np.bool_)
  # Zero-dimensional arrays, of JAX for example, are numbers too.
  if is_scalar or getattr(value, "shape", None) == ():
    try:
      return float(value)
    except OverflowError:  # an int of more than 308 digits
      return math.inf
  return None
