r"""A reward for multiple choice: one of the letters A to J.

The letter counts where it is said to be the answer: in the last `\boxed{...}`,
behind `####`, after the last "answer is" or "answer:", or alone. A letter in
the midst of a sentence is no answer.
"""

import re
from typing import Any

from jaxrl_post import types
from jaxrl_post.rewards import answer

# Nothing of it is given back (`*+`), as a text may be nothing but dress.
_DRESS = r"(?:\\(?:text|mathrm|mathbf|textbf)\s*\{|[\s*_$({\[])*+"
_LETTER = rf"{_DRESS}([A-Ja-j])(?![\w'])[\s.)}}\]:*_$]*"
# In a marked answer words may follow: `(B) Paris`, `B. Paris`, but not `a dog`.
_MARKED = re.compile(rf"{_DRESS}(?:([A-J])(?![\w'])|([A-Ja-j])[).}}\]:]).*")
_ALONE = re.compile(_LETTER)
_SAID = re.compile(
  r"answer(?:\s+is|\s*[:=])+"
  rf"{_DRESS}(?:(?:option|choice)\s*)?{_DRESS}"
  r"([A-J])(?=[\s*_]*(?:$|[\n).,:;!?}\]$]|because|since|as\b))",
  re.IGNORECASE,
)


def chosen(text: str) -> str | None:
  """Finds the letter that a text chooses, in upper case; None without one."""
  marked = answer.marked(text)
  if marked is not None:
    found = _ALONE.fullmatch(marked) or _MARKED.fullmatch(marked)
    letters = [g for g in found.groups() if g] if found else []
    return letters[0].upper() if letters else None
  said = list(_SAID.finditer(text))
  if said:
    return said[-1][1].upper()
  alone = _ALONE.fullmatch(text.strip())
  return alone[1].upper() if alone else None


def choice(rollout: types.Rollout, reference: Any) -> float:
  """Compares the letter that was chosen with the right one.

  Args:
    rollout: what was answered.
    reference: a letter from A to J, with or without brackets; or its place in
      that order, from 0.

  Returns:
    1.0 iff the completion chooses that letter. 0.0 for one without a letter.

  Raises:
    types.InputError: the reference is no such letter or place.
  """
  right = None
  if isinstance(reference, int) and 0 <= reference < 10:
    right = "ABCDEFGHIJ"[reference]
  elif isinstance(reference, str):
    found = _ALONE.fullmatch(reference.strip())
    right = found[1].upper() if found else None
  if right is None:
    raise types.InputError(
      "reward choice: expected a letter from A to J, or its place from 0, as "
      f"the reference, got {str(reference)[:80]!r}. Correct the data."
    )
  return float(chosen(rollout.text) == right)
