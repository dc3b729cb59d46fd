"""An environment of tools: functions that the policy may call in its turns.

A turn without a call ends the conversation: it is the answer. What a call
returns goes back as a message of role "tool"; so does what went wrong with it.
"""

import ast
import collections
import dataclasses
import functools
import json
import math
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxrl_post import types
from jaxrl_post.data import tool_calls
from jaxrl_post.envs import multi_turn, schemas
from jaxrl_post.rewards import combine, sandbox

# Longest expression that is calculated, and most bits of any number in it.
_MOST_LETTERS, _MOST_BITS = 256, 4096
_NAME = re.compile(r"[\w.-]{1,64}")

# A call, as far as it can be read.
_Asked: TypeAlias = tool_calls.Call | tool_calls.Malformed


@dataclasses.dataclass(frozen=True)
class Tool:
  """A function that the policy may call, with a JSON schema.

  Attributes:
    function: takes the arguments by name and returns text, or what JSON holds.
      Whatever it raises is told to the policy; so is an empty text, in words.
    name: by which it is called: letters, digits, `_`, `-` and `.`.
    description: what it does; for the policy.
    parameters: JSON schema of its arguments, an object, of the keywords that
      are checked, see `schemas.check`.
  """

  function: Callable[..., Any]
  name: str
  description: str
  parameters: Mapping[str, Any]

  def __post_init__(self) -> None:
    is_name = isinstance(self.name, str) and _NAME.fullmatch(self.name)
    for holds, rule, value in (
      (is_name, f"a name of {_NAME.pattern}", self.name),
      (callable(self.function), "a function", self.function),
      (isinstance(self.description, str), "a text", self.description),
    ):
      if not holds:
        raise types.InputError(
          f"tools.Tool({_short(self.name)}): expected {rule}, got "
          f"{_short(value)}. Correct it."
        )
    schemas.check(self.parameters, f"tools.Tool({self.name!r}).parameters")

  @property
  def schema(self) -> dict[str, Any]:
    """What chat templates are given."""
    return {
      "type": "function",
      "function": {
        "name": self.name,
        "description": self.description,
        "parameters": dict(self.parameters),
      },
    }


@dataclasses.dataclass(frozen=True)
class Tools:
  """Answers the calls of a turn, one after the other.

  Attributes:
    tools: that there are.
    style: how the model calls them, see `tool_calls.parse`; or a function from
      the text of a turn to its calls.
    failure: what is said of a call that failed; `{reason}` is why.
    max_letters: longest answer of a call; the rest is cut off.
    max_calls: calls of a turn that are made; others are told that they are not.
    max_s: seconds of a turn after which no call begins any more; likewise.
  """

  tools: tuple[Tool, ...]
  style: str | Callable[[str], Sequence[_Asked]]
  failure: str = "error: {reason}"
  max_letters: int = 4000
  max_calls: int = 8
  max_s: float = 10.0

  def __post_init__(self) -> None:
    for tool in self.tools:
      if not isinstance(tool, Tool):
        raise types.InputError(
          f"tools: expected tools.Tool(...), got {_short(tool)}. Make it one."
        )
    names = [tool.name for tool in self.tools]
    if not names or len(set(names)) < len(names):
      raise types.InputError(
        f"tools: expected tools of different names, got {names}. Name them."
      )
    if not callable(self.style) and self.style not in tool_calls.STYLES:
      raise types.InputError(
        f"tools.style: expected one of {tool_calls.STYLES} or a "
        f"function, got {self.style!r}. Correct the value."
      )
    if self.max_calls < 1 or not 0 < self.max_s < math.inf:
      raise types.InputError(
        "tools: expected max_calls >= 1 and max_s > 0 seconds, got "
        f"{self.max_calls} and {self.max_s}. Correct the value."
      )

  @property
  def schemas(self) -> tuple[dict[str, Any], ...]:
    """See `multi_turn.Environment`."""
    return tuple(tool.schema for tool in self.tools)

  def reset(self, prompt: types.Prompt) -> None:
    """See `multi_turn.Environment`; nothing is remembered."""

  def step(self, state: None, text: str) -> multi_turn.Step:
    """See `multi_turn.Environment`."""
    if callable(self.style):
      calls = self.style(text)
    else:
      calls = tool_calls.parse(text, self.style)
    if not calls:
      return multi_turn.Step()
    last = time.monotonic() + self.max_s
    answers = [
      self._answer(call)
      if number < self.max_calls and time.monotonic() < last
      else self._left(call)
      for number, call in enumerate(calls)
    ]
    return multi_turn.Step(
      messages=self._said([(name, text) for name, text, _ in answers]),
      calls=len(answers),
      errors=sum(failed for *_, failed in answers),
    )

  def failed(self, state: None, reason: str) -> multi_turn.Step:
    """See `multi_turn.Environment`."""
    return multi_turn.Step(messages=self._said([("", self._failure(reason))]))

  def save(self, state: None) -> None:
    """See `restore.Restorable`; nothing is remembered."""

  def restore(self, prompt: types.Prompt, saved: None) -> None:
    """See `restore.Restorable`."""

  def _answer(self, call: _Asked) -> tuple[str, str, bool]:
    """Returns who answers a call, what, and whether it failed."""
    if isinstance(call, tool_calls.Malformed):
      return "", self._failure(call.reason), True
    tool = {tool.name: tool for tool in self.tools}.get(call.name)
    if tool is None:
      known = ", ".join(tool.name for tool in self.tools)
      fault = f"no tool {_short(call.name)}; there are: {known}"
    else:
      fault = schemas.mismatch(tool.parameters, call.arguments, "arguments")
    if tool is None or fault:
      return call.name, self._failure(fault), True
    try:
      made = tool.function(**call.arguments)
      text = made if isinstance(made, str) else json.dumps(made)
    except types.InputError:  # A mistake of the user, not of the policy.
      raise
    except BaseException as error:  # Tools may raise anything, and it is told.
      reason = combine.one_line(f"{type(error).__name__}: {error}")
      return call.name, self._failure(reason), True
    return call.name, text or "nothing returned", False

  def _left(self, call: _Asked) -> tuple[str, str, bool]:
    """Returns the same for a call that is not made."""
    name = "" if isinstance(call, tool_calls.Malformed) else call.name
    reason = f"more than {self.max_calls} calls or {self.max_s:g} s in a turn"
    return name, self._failure(reason), True

  def _failure(self, reason: str) -> str:
    return self.failure.replace("{reason}", reason)

  def _said(
    self, answers: Sequence[tuple[str, str]]
  ) -> tuple[multi_turn.Message, ...]:
    style = "hermes" if callable(self.style) else self.style
    cut = [(name, text[: self.max_letters]) for name, text in answers]
    return tool_calls.results(cut, style)


def _short(value: Any) -> str:
  return combine.one_line(repr(value), 60)


# ------------------------------------------------------------------ the tools


def calculator() -> Tool:
  """Returns a tool that calculates, see `calculate`."""
  return Tool(
    function=calculate,
    name="calculator",
    description="Calculates an arithmetic expression: + - * / // % ** ( ).",
    parameters={
      "type": "object",
      "properties": {"expression": {"type": "string"}},
      "required": ["expression"],
    },
  )


def calculate(expression: str) -> str:
  """Returns the value of an arithmetic expression; nothing else is run.

  Args:
    expression: of at most 256 letters: numbers, + - * / // % ** and brackets.

  Returns:
    The number; whole ones exactly, others with 12 digits.

  Raises:
    ValueError: it is no such expression, or a number in it has more than 4,096
      bits or is not finite.
    ZeroDivisionError: naturally.
  """
  if len(expression) > _MOST_LETTERS:
    raise ValueError(f"expected at most {_MOST_LETTERS} letters")
  try:
    tree = ast.parse(expression.strip(), mode="eval")
  except (SyntaxError, RecursionError, MemoryError) as error:
    raise ValueError("expected an arithmetic expression") from error
  value = _value(tree.body)
  return str(value) if isinstance(value, int) else f"{value:.12g}"


def _power(base: float, exponent: float) -> Any:
  bits = base.bit_length() - 1 if isinstance(base, int) else 0
  # Before it is made, which could take for ever.
  if isinstance(exponent, int) and exponent * bits >= _MOST_BITS:
    raise ValueError(f"expected numbers of at most {_MOST_BITS} bits")
  return base**exponent


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: _power,
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
}


def _value(node: ast.AST) -> int | float:
  if isinstance(node, ast.Constant):
    value = node.value
  elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    sides = _value(node.left), _value(node.right)
    value = _applied(type(node.op), *sides)
  elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
    value = _applied(type(node.op), _value(node.operand))
  else:
    raise ValueError(f"expected arithmetic, got {type(node).__name__}")
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f"expected numbers, got {type(value).__name__}")
  if isinstance(value, int) and value.bit_length() > _MOST_BITS:
    raise ValueError(f"expected numbers of at most {_MOST_BITS} bits")
  if not isinstance(value, int) and not math.isfinite(value):
    raise ValueError("expected finite numbers")
  return value


def _applied(kind: type[ast.AST], *sides: int | float) -> Any:
  try:
    return _OPERATORS[kind](*sides)
  except OverflowError as error:
    raise ValueError("expected finite numbers") from error


def python(timeout_s: float = 5.0, memory_mb: int = 512) -> Tool:
  """Returns a tool that runs programs in the sandbox, see `rewards.sandbox`.

  Args:
    timeout_s: longest time for a program; below `env.timeout_s`.
    memory_mb: most address space, in MiB.
  """
  return Tool(
    function=functools.partial(
      run_program, timeout_s=timeout_s, memory_mb=memory_mb
    ),
    name="python",
    description="Runs a Python program and returns what it prints.",
    parameters={
      "type": "object",
      "properties": {"code": {"type": "string"}},
      "required": ["code"],
    },
  )


def run_program(code: str, timeout_s: float, memory_mb: int) -> str:
  """Runs a program to its end.

  Args:
    code: Python.
    timeout_s: longest time.
    memory_mb: most address space, in MiB.

  Returns:
    What it printed; words for it if that is nothing.

  Raises:
    RuntimeError: it did not end well; says how, and the last line of stderr.
  """
  made = sandbox.run(code, timeout_s=timeout_s, memory_mb=memory_mb)
  if made.status == "done":
    return made.stdout or "nothing printed"
  last = made.stderr.strip().rpartition("\n")[2]
  raise RuntimeError(f"{made.status}: {last}" if last else made.status)


def search(documents: Mapping[str, str], most: int = 3) -> Tool:
  """Returns a tool that finds documents, as a stand-in for a real one.

  Args:
    documents: texts by title.
    most: documents that it returns.
  """
  return Tool(
    function=functools.partial(find, documents=documents, most=most),
    name="search",
    description="Finds documents by the words of a query.",
    parameters={
      "type": "object",
      "properties": {"query": {"type": "string"}},
      "required": ["query"],
    },
  )


def find(query: str, documents: Mapping[str, str], most: int) -> str:
  """Finds documents by words.

  Args:
    query: words.
    documents: texts by title.
    most: documents to return.

  Returns:
    Titles and texts of those that have the most of the words, each rare word
    counting for more than a common one; equal ones in the order given.
  """
  wanted = set(_words(query))
  bags = {
    title: set(_words(f"{title} {text}")) for title, text in documents.items()
  }
  counts = collections.Counter(word for bag in bags.values() for word in bag)
  scores = {
    title: sum(1 / counts[word] for word in sorted(wanted & bag))
    for title, bag in bags.items()
  }
  found = sorted((t for t in scores if scores[t]), key=lambda t: -scores[t])
  texts = [f"{title}: {documents[title]}" for title in found[:most]]
  return "\n".join(texts) or "nothing found"


def _words(text: str) -> list[str]:
  return re.findall(r"\w+", text.lower())
