r"""Where a completion states its answer: the last `\boxed{...}` or `#### ...`.

Not a reward; `number` and `math` read answers with it.
"""

import re

_MARK = re.compile(r"\\f?boxed\s*(?=\{)|####")
# A line this long holds more than an answer.
_MAX_LINE = 60
_LEADING = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:\\?%)?")
# After a number: the end, a stop, or a word; not the rest of a formula.
_END = re.compile(r"\s*(?:$|[.,;:!?]|\s[A-Za-z])")


def marked(text: str) -> str | None:
  r"""Finds the answer behind the last mark of a text.

  Args:
    text: a completion, or a reference written like one.

  Returns:
    What follows the last mark. For `\boxed`, all between its braces; empty
    when they never close. For `####`, the number that begins the line, or the
    whole line if that is a formula. None when the text has no mark.
  """
  marks = list(_MARK.finditer(text))
  if not marks:
    return None
  rest = text[marks[-1].end() :]
  if marks[-1].group() != "####":
    return _inside_braces(rest).strip()
  line = rest.partition("\n")[0].strip()
  number = _LEADING.match(line)
  if number is None:
    return line
  is_alone = len(line) > _MAX_LINE or _END.match(line, number.end())
  return number.group() if is_alone else line


def _inside_braces(text: str) -> str:
  depth = 0
  for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
    depth += {"{": 1, "}": -1}.get(match.group(), 0)  # \{ and \} do not count
    if depth == 0:
      return text[1 : match.start()]
  return ""
