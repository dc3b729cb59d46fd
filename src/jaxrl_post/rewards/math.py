r"""A reward for mathematical answers, by Math-Verify (extra `math`).

Only experiments that use it import this module. The answer must stand in the
last `\boxed{...}`, or behind `####`; text without either earns 0. Math-Verify
takes `50\%` for `50` and the other way round, and so does this reward.

Time is bounded by the pool, not here: signals work in main threads only. An
answer such as `9^{9^{9^9}}` never ends, so a run with this reward should set
`on_failure="mask"`.
"""

import logging
import re
from typing import Any

import math_verify

from jaxrl_post import types
from jaxrl_post.rewards import answer

# Every worker would warn that there is no time limit; the pool has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# No answer of a data set is longer, and parsing takes seconds beyond.
MAX_CHARS = 300
_WORD = re.compile(r"(?:\\text\w*\s*\{)?\s*\(?([A-Za-z]{3,})\)?\s*\}?")
# Forms that Math-Verify does not read, and what it does.
_REWRITES = (
  (re.compile(r"(?<=\d)\\[,!](?=\d{3})"), ""),
  (re.compile("\N{DEGREE SIGN}"), r"^\\circ"),
  (re.compile(r"^(-?\d+)\s+(\d+)/(\d+)$"), r"\1\\frac{\2}{\3}"),
  (re.compile(r"^(?:\$|\\\(|\\\[)+|(?:\$|\\\)|\\\]|(?<=\w)\.|\s)+$"), ""),
)


def correct(rollout: types.Rollout, reference: Any) -> float:
  r"""Compares the completion's answer with the reference as mathematics.

  Args:
    rollout: what was answered.
    reference: a number or LaTeX; text with a `\boxed{...}` or `####` of its own
      is read there.

  Returns:
    1.0 iff the answers are equal: letter by letter if both are words of three
    letters or more, otherwise as expressions, units left out. 0.0 for a
    completion without an answer, with an open last box, or with more than
    `MAX_CHARS` in it.

  Raises:
    types.InputError: when the reference cannot be read.
  """
  gold = answer.marked(str(reference))
  gold = _tidy(str(reference) if gold is None else gold)
  given = answer.marked(rollout.text) or ""
  given = _tidy(given) if len(given) <= MAX_CHARS else ""
  parsed_gold = _parse(gold)
  if not parsed_gold:
    raise types.InputError(
      "reward math: expected a reference in numbers or LaTeX, got "
      f"{reference!r}. Correct the data, or use rewards.exact."
    )
  if not given:
    return 0.0
  words = _WORD.fullmatch(gold), _WORD.fullmatch(given)
  if words[0] and words[1]:
    # As expressions they are products of letters: "no" would equal "on".
    return float(words[0][1].casefold() == words[1][1].casefold())
  return float(
    math_verify.verify(parsed_gold, _parse(given), timeout_seconds=None)
  )


def _parse(text: str) -> list:
  # No time limit is a documented value, though not an annotated one.
  no_limit: Any = None
  return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=no_limit)


def _tidy(text: str) -> str:
  text = text.strip()
  for pattern, plain in _REWRITES:
    text = pattern.sub(plain, text)
  return text
