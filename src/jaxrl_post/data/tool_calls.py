"""Tool calls out of a completion's text, and their results into messages.

A model asks for a tool in the form it was trained on, which is one of `STYLES`:

- "hermes": `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`, as
  often as there are calls; a list of such objects between the tags too.
  Qwen2.5, Qwen3, SmolLM2 and Hermes.
- "llama": the whole completion is `{"name": "f", "parameters": {"a": 1}}`, with
  or without `<|python_tag|>` before it and more of them behind, or
  `[f(a=1), g()]`. Llama 3.1 and later.
- "gemma": calls in Python, in a fence that begins with ```` ```tool_code ````.
  Gemma 3.

What a model writes is nobody's code: nothing is run here, and whatever cannot
be read is a record that says why.
"""

import ast
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_post import types

STYLES = ("hermes", "llama", "gemma")

MAX_CALLS = 64  # of one completion; one more record says that there were more
MAX_PYTHON = 65_536  # characters of calls in Python
_EXCERPT = 200  # characters of what could not be read, and of why

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = "<|python_tag|>"
_FENCE = re.compile(r"^```tool_code[ \t]*$\n?", re.MULTILINE)
_END_FENCE = re.compile(
  r"^[ \t]*```(?:<end_of_turn>|<eos>)?[ \t]*$", re.MULTILINE
)
_PLACE = "<tool call>"
# Python warns of "\\d" in what a model wrote: no news for the user of a run.
warnings.filterwarnings("ignore", module=_PLACE)
_SPACE = re.compile(r"\s*")
# How a Llama's completion begins that is meant as a call; other JSON is text.
_LLAMA_JSON = re.compile(r'\{\s*"(?:name"|type"\s*:\s*"function")')
_LLAMA_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_LLAMA_END = re.compile(r"<\|e(?:ot_id|om_id|nd_of_text)\|>")


@dataclasses.dataclass(frozen=True)
class Call:
  """A tool that the model asks for.

  Attributes:
    name: of the tool; whether there is one is for the caller to find out.
    arguments: by name, as JSON has them.
  """

  name: str
  arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Malformed:
  """An attempt at a call that cannot be read.

  Attributes:
    text: how it begins.
    reason: what was expected, in one line: fit to be told to the model.
  """

  text: str
  reason: str


def parse(text: str, style: str) -> tuple[Call | Malformed, ...]:
  """Reads the tool calls of a completion, in time linear in its length.

  Args:
    text: of the whole completion, with or without its special tokens.
    style: one of `STYLES`; see there.

  Returns:
    The calls in their order, with a `Malformed` where one was begun and cannot
    be read; nothing where none was begun. At most `MAX_CALLS`, and then one
    `Malformed` that says so. No text raises.

  Raises:
    InputError: for a style that is not known.
  """
  readers = {"hermes": _hermes, "llama": _llama, "gemma": _gemma}
  if style not in readers:
    raise types.InputError(
      f"style: expected one of {', '.join(STYLES)}, got {style!r}. Correct the "
      "value."
    )
  found: list[Call | Malformed] = []
  for call in readers[style](text):
    if len(found) == MAX_CALLS:
      reason = f"expected at most {MAX_CALLS} calls in one completion"
      return (*found, Malformed("", reason))
    found.append(call)
  return tuple(found)


def style_of(template: str) -> str:
  """Says how a model calls tools, from its chat template.

  Args:
    template: Jinja source.

  Returns:
    The style that the template teaches or its turns belong to.

  Raises:
    InputError: for the template of another family.
  """
  signs = (
    (_OPEN, "hermes"),
    (_TAG, "llama"),
    ("<|start_header_id|>", "llama"),
    ("<start_of_turn>", "gemma"),
    ("<|im_start|>", "hermes"),
  )
  for sign, style in signs:
    if sign in template:
      return style
  raise types.InputError(
    "style: expected a chat template with the turns of Qwen, SmolLM2, Llama "
    f"or Gemma, got {template[:60]!r}. Set one of {', '.join(STYLES)}."
  )


def results(
  answers: Sequence[tuple[str, str]], style: str
) -> tuple[dict[str, str], ...]:
  """Turns what tools answered into the messages that a template takes.

  Args:
    answers: name of the tool and its answer, in the order of the calls.
    style: of the calls.

  Returns:
    A message with the role "tool" for each; for Gemma, whose template knows no
    such role, one of the user with a fence for each. None for no answers.
  """
  if style != "gemma":
    return tuple(
      {"role": "tool", "name": name, "content": text} for name, text in answers
    )
  fences = [f"```tool_output\n{text}\n```" for _, text in answers]
  content = "\n".join(fences)
  return ({"role": "user", "content": content},) if fences else ()


# -------------------------------------------------------------------- JSON


def _no_constant(name: str) -> None:
  raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _malformed(text: str, start: int, reason: str) -> Malformed:
  line = " ".join(reason.split())
  return Malformed(text[start : start + _EXCERPT], line[:_EXCERPT])


def _value(text: str, start: int) -> tuple[Any, int, Malformed | None]:
  """Reads JSON; returns it, where reading ended, and why if it failed."""
  try:
    value, end = _DECODER.raw_decode(text, _skip_space(text, start))
  except json.JSONDecodeError as error:
    reason = f"expected JSON: {error.msg} at character {error.pos - start}"
    return None, error.pos, _malformed(text, start, reason)
  except (ValueError, RecursionError) as error:
    return None, start, _malformed(text, start, f"expected JSON: {error}")
  return value, end, None


def _skip_space(text: str, at: int) -> int:
  found = _SPACE.match(text, at)
  return found.end() if found else at


def _call(value: Any, text: str, start: int, key: str) -> Call | Malformed:
  """Checks that JSON is a call whose arguments are under one of two keys."""
  if not isinstance(value, dict):
    return _malformed(text, start, "expected an object with a name")
  name = value.get("name")
  if not isinstance(name, str) or not name:
    return _malformed(text, start, "expected a name, a string")
  arguments = value.get(key, value.get("arguments"))
  if not isinstance(arguments, dict):
    return _malformed(text, start, f"expected {key}, an object")
  return Call(name, arguments)


def _hermes(text: str) -> Iterator[Call | Malformed]:
  at = text.find(_OPEN)
  while at >= 0:
    start = at + len(_OPEN)
    value, end, wrong = _value(text, start)
    # A closing tag inside a string of the call is text: look behind the call.
    end = _skip_space(text, end)
    if wrong is None and not text.startswith(_CLOSE, end):
      wrong = _malformed(text, start, f"expected {_CLOSE} behind the call")
    if wrong is not None:
      yield wrong
    else:
      for one in value if isinstance(value, list) else (value,):
        yield _call(one, text, start, "arguments")
    close = text.find(_CLOSE, end)
    if close < 0:
      return
    at = text.find(_OPEN, close)


def _llama(text: str) -> Iterator[Call | Malformed]:
  at = _skip_space(text, 0)
  tagged = text.startswith(_TAG, at)
  if tagged:
    at = _skip_space(text, at + len(_TAG))
  if text.startswith("{", at) and (tagged or _LLAMA_JSON.match(text, at)):
    yield from _llama_json(text, at)
  elif tagged or _LLAMA_PYTHON.match(text, at):
    # Without the tokens that end a turn, if they were decoded.
    code = text[at : at + MAX_PYTHON + 1]
    yield from _python(_LLAMA_END.split(code, maxsplit=1)[0])


def _llama_json(text: str, at: int) -> Iterator[Call | Malformed]:
  """Reads objects, one behind the other, with or without ";" between."""
  while text.startswith("{", at):
    value, end, wrong = _value(text, at)
    yield wrong or _call(value, text, at, "parameters")
    if wrong is not None:
      return
    at = _skip_space(text, end)
    if text.startswith((";", ",", _TAG), at):
      at = _skip_space(text, at + (len(_TAG) if text[at] == "<" else 1))
  if at < len(text) and not text.startswith("<|", at):
    yield _malformed(text, at, "expected nothing behind the calls")


# ------------------------------------------------------------------ Python


def _gemma(text: str) -> Iterator[Call | Malformed]:
  begin = _FENCE.search(text)
  while begin is not None:
    end = _END_FENCE.search(text, begin.end())
    if end is None:
      yield _malformed(text, begin.end(), "expected ``` behind the calls")
      return
    yield from _python(text[begin.end() : end.start()])
    begin = _FENCE.search(text, end.end())


def _python(code: str) -> Iterator[Call | Malformed]:
  """Reads expressions that are calls, lists of calls, or calls printed."""
  if len(code) > MAX_PYTHON:
    reason = f"expected at most {MAX_PYTHON} characters of calls"
    yield _malformed(code, 0, reason)
    return
  try:
    body = ast.parse(code.strip(), _PLACE).body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    reason = error.msg if isinstance(error, SyntaxError) else str(error)
    yield _malformed(code, 0, f"expected calls in Python: {reason}")
    return
  if not body:
    yield _malformed(code, 0, "expected a call, got nothing")
  for statement in body:
    value = statement.value if isinstance(statement, ast.Expr) else None
    for node in value.elts if isinstance(value, ast.List) else (value,):
      yield _python_call(node, code)


def _python_call(node: ast.expr | None, code: str) -> Call | Malformed:
  if not isinstance(node, ast.Call):
    return _malformed(code, 0, "expected nothing but calls")
  name = _dotted(node.func)
  if name == "print" and len(node.args) == 1 and not node.keywords:
    return _python_call(node.args[0], code)
  if name is None:
    return _malformed(code, 0, "expected a call of a name")
  try:
    return Call(name, _python_arguments(node))
  except ValueError as error:
    return _malformed(code, 0, f"expected {error} of {name}")


def _python_arguments(node: ast.Call) -> dict[str, Any]:
  """Returns the arguments of a call as JSON has them.

  Raises:
    ValueError: saying what was expected.
  """
  arguments = {}
  for keyword in node.keywords:
    if keyword.arg is None or keyword.arg in arguments:
      raise ValueError("each argument once, as in f(a=1),")
    try:
      # Tuples become lists; sets, bytes and infinity are refused.
      literal = ast.literal_eval(keyword.value)
      arguments[keyword.arg] = json.loads(json.dumps(literal, allow_nan=False))
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
      rule = f"a plain value as argument {keyword.arg}"
      raise ValueError(rule) from error
  if node.args:
    raise ValueError("the arguments by name, as in f(a=1),")
  return arguments


def _dotted(node: ast.expr) -> str | None:
  """Returns the name `a.b.c` that an expression is; None for any other."""
  parts = []
  while isinstance(node, ast.Attribute):
    parts.append(node.attr)
    node = node.value
  if not isinstance(node, ast.Name):
    return None
  return ".".join((node.id, *reversed(parts)))
