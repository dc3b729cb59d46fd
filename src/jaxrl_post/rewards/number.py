r"""A reward for answers that are one number, as in grade-school maths.

Reads `#### 42` and `\boxed{42}`; without either, the last number of the text.
Fractions, powers and other formulas are not read: `rewards.math` does that.
"""

import decimal
import re
from typing import Any

from jaxrl_post import types
from jaxrl_post.rewards import answer

# A minus after a letter, digit or bracket takes away; it is no sign.
_NUMBER = re.compile(
  r"(?P<sign>(?<![\w)}])-)?\$?"
  r"(?P<size>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
  r"(?P<formula>(?:[/^]\{?|[eE][-+]?)\d+)?",
  re.ASCII,
)
# Commands around a number that do not change it.
_DRESS = re.compile(
  r"\^?\\circ|\\(?:text|mathrm|textbf|mathbf)\b|\\(?=[$% ,!])"
)


def number(rollout: types.Rollout, reference: Any) -> float:
  """Compares the completion's number with the reference's.

  Args:
    rollout: what was answered.
    reference: a number, or text with one, a whole GSM8K solution for example.

  Returns:
    1.0 iff both are the same number, whatever their leading zeros, closing
    zeros after the point, commas of thousands, dollar signs and units. 0.0 for
    a completion without a number, or with an open last box.

  Raises:
    types.InputError: when the reference holds no number.
  """
  if isinstance(reference, float):
    reference = f"{decimal.Decimal(str(reference)):f}"  # 0.0000001, not 1e-07
  right = _read(str(reference))
  if right is None:
    raise types.InputError(
      f"reward number: expected a reference with a number, got {reference!r}. "
      "Correct the data, or use rewards.math or rewards.exact."
    )
  return float(_read(rollout.text) == right)


def _read(text: str) -> decimal.Decimal | None:
  found = answer.marked(text)
  plain = _plain(text if found is None else found)
  numbers = list(_NUMBER.finditer(plain))
  if not numbers or (found is not None and "\\" in plain):
    return None
  # Behind a mark the answer comes first; in free text it comes last.
  chosen = numbers[-1] if found is None else numbers[0]
  if chosen["formula"]:
    return None
  size = decimal.Decimal(chosen["size"].replace(",", ""))
  return size.copy_negate() if chosen["sign"] else size


def _plain(text: str) -> str:
  """Writes LaTeX and Unicode forms of a number in ASCII."""
  text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
  text = re.sub(r"(?<=\d)\\[,!](?=\d{3})", ",", text)
  return _DRESS.sub("", text)
