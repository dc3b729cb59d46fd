"""Rewards for short answers in words, whatever their case and articles.

As the SQuAD evaluation has it (Rajpurkar et al. 2016, arXiv 1606.05250).
"""

import collections
import re
import string
import unicodedata
from typing import Any

from jaxrl_post import types
from jaxrl_post.rewards import answer

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
  """Returns a text in lower case, without punctuation, articles, and space.

  Letters that only look different, as of full width, become the same (NFKC).
  """
  text = unicodedata.normalize("NFKC", text).casefold()
  text = _ARTICLES.sub(" ", text.translate(_PUNCTUATION))
  return " ".join(text.split())


def same(rollout: types.Rollout, reference: Any) -> float:
  r"""Compares answers as normalised texts.

  Args:
    rollout: the answer is in its last `\boxed{...}` or behind `####`, or,
      without either, all its text.
    reference: a text, or a list of texts of which any is right.

  Returns:
    1.0 iff the answer is equal to one of them.

  Raises:
    types.InputError: the reference is no text, or nothing is left of it.
  """
  given = _given(rollout)
  return float(any(given == right for right in _right(reference)))


def overlap(rollout: types.Rollout, reference: Any) -> float:
  """Compares answers as bags of words.

  Args:
    rollout: as in `same`.
    reference: as in `same`.

  Returns:
    F1 of the words, with the reference that fits best: twice the words in
    common, divided by the words of both. In [0, 1].

  Raises:
    types.InputError: as `same`.
  """
  given = collections.Counter(_given(rollout).split())
  best = 0.0
  for right in _right(reference):
    words = collections.Counter(right.split())
    both = (given & words).total()
    best = max(best, 2 * both / (given.total() + words.total()))
  return best


def _given(rollout: types.Rollout) -> str:
  marked = answer.marked(rollout.text)
  return normalised(rollout.text if marked is None else marked)


def _right(reference: Any) -> list[str]:
  texts = reference if isinstance(reference, list | tuple) else [reference]
  found = [
    normalised(str(t)) for t in texts if isinstance(t, str | int | float)
  ]
  if not texts or len(found) < len(texts) or "" in found:
    raise types.InputError(
      "reward text: expected a reference with words, or a list of such, got "
      f"{str(reference)[:80]!r}. Correct the data, or use rewards.exact."
    )
  return found
