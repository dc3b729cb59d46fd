"""Finds the token that completes a stop string.

Text is only looked at: what a completion consists of are its ids. A look costs
as much as the new tokens and the longest stop string, whatever the length of
the completion.
"""

from collections.abc import Callable, Sequence

# Stands for bytes that are no character, or not yet: the rest of it is in the
# next token.
_HALF = "\ufffd"
# How far a look goes back, in longest stop strings. Only tokens without text
# make it go further than one.
_MOST_WINDOWS = 16


def first_stop(
  tokens: Sequence[int],
  start: int,
  stop_strings: Sequence[str],
  decode: Callable[[Sequence[int]], str],
  first: int = 0,
) -> int | None:
  """Finds the first new token that completes a stop string.

  Args:
    tokens: ids of a completion.
    start: of these, the first that has not been looked at.
    stop_strings: not empty texts, without U+FFFD.
    decode: turns ids into text as byte-level tokenizers do: the bytes of all
      tokens in a row, U+FFFD where they are no character. A token has at least
      one byte, or is left out of the text. A space at the very start may be
      left out too.
    first: the text begins with this token; what lies before it is of others.

  Returns:
    The least place in `tokens`, from `start` on, such that the text up to and
    including that token contains a stop string which the text before `start`
    does not hold whole. None where there is none. A stop string is missed if
    tokens that are left out of the text stand inside of it, and are more than
    15 times as many as the bytes of the longest one.
  """
  if not stop_strings or start >= len(tokens):
    return None
  begin = _window(tokens, start, stop_strings, decode, first)
  known = len(decode(tokens[begin:start]).rstrip(_HALF))

  def stopped(end: int) -> bool:
    text = decode(tokens[begin:end])
    return any(
      text.find(stop, max(0, known + 1 - len(stop))) >= 0
      for stop in stop_strings
    )

  if not stopped(len(tokens)):
    return None
  # Once a text contains it, each longer one does.
  low, high = start, len(tokens)
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (low, middle) if stopped(middle) else (middle, high)
  return high - 1


def _window(
  tokens: Sequence[int],
  start: int,
  stop_strings: Sequence[str],
  decode: Callable[[Sequence[int]], str],
  first: int,
) -> int:
  """Returns where to begin so that no stop string is seen in part."""
  needed = max(len(stop.encode()) for stop in stop_strings) - 1
  # Three more, so that half a character at the border seldom asks for a second
  # look.
  width = needed + 3
  while True:
    begin = max(first, start - width)
    # No stop string reaches across a U+FFFD that stays one.
    text = decode(tokens[begin:start]).replace(_HALF, "")
    enough = begin == first or len(text.encode()) >= needed
    if enough or width >= _MOST_WINDOWS * (needed + 3):
      return begin
    width *= 2
