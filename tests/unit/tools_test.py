"""Tools: what they answer, what they refuse, and what they never run."""

import dataclasses
import json
import re
import time

import pytest

from jaxrl_post import types
from jaxrl_post.data import tool_calls
from jaxrl_post.envs import multi_turn, schemas, tools

DOCUMENTS = {
  "Cat": "A cat sleeps.",
  "Dog": "A dog and a cat.",
  "Tea": "Tea is hot, and the dog is not.",
}


def boom(x):
  raise KeyError(f"no {x}\nat all")


def refuse():
  raise types.InputError("no such system")


NUMBER = {"type": "object", "properties": {"x": {"type": "number"}}}
TOOLS = tools.Tools(
  (
    tools.calculator(),
    tools.search(DOCUMENTS, most=2),
    tools.python(timeout_s=2.0),
    tools.Tool(boom, "boom", "Raises.", NUMBER | {"required": ["x"]}),
    tools.Tool(lambda **xs: xs, "echo", "Gives back.", NUMBER),
    tools.Tool(refuse, "refuse", "Refuses.", {"type": "object"}),
  ),
  style="hermes",
)


def hermes(name, **arguments):
  call = json.dumps({"name": name, "arguments": arguments})
  return f"<tool_call>{call}</tool_call>"


def said(text, environment=TOOLS):
  """Returns what is said to a turn, and how many calls failed."""
  step = environment.step(None, text)
  assert step.messages is not None
  return [m["content"] for m in step.messages], step.errors


@pytest.mark.parametrize(
  ("expression", "value"),
  [
    ("1 + 2 * 3", "7"),
    ("-(2 ** 10) // 3", "-342"),
    ("7 % 4 - +1", "2"),
    ("1/3", "0.333333333333"),
    ("2 ** -1", "0.5"),
    ("1e3 * 2", "2000"),
    (" 12*(3+4) ", "84"),
    ("2**4095", str(2**4095)),
    ("1 ** 999999", "1"),
    ("0 ** 99999", "0"),
    ("10**-9**99", "0"),
    ("(-1) ** 99999", "-1"),
  ],
)
def test_expressions_have_these_values(expression, value):
  assert tools.calculate(expression) == value


@pytest.mark.parametrize(
  "expression",
  [
    "9**9**9",
    "9**9**9**9",
    "2**4096",
    "(2**4000)*(2**4000)",
    "1e308*10",
    "10.0**400",
    "(-1)**0.5",
    "__import__('os')",
    "().__class__",
    "abs(-1)",
    "x",
    "'a'*9",
    "True+1",
    "1j",
    "1 if 1 else 2",
    "[1]",
    "1;2",
    "",
    "(" * 250,
    "1+" * 127 + "1" * 3,
    "-" * 250 + "1+",
    "9" * 5000,
    "\x00",
  ],
)
def test_what_is_no_small_arithmetic_is_refused_at_once(expression):
  begun = time.monotonic()
  with pytest.raises(ValueError):
    tools.calculate(expression)
  assert time.monotonic() - begun < 0.5


def test_division_by_zero_is_told():
  assert said(hermes("calculator", expression="1/0")) == (
    ["error: ZeroDivisionError: division by zero"],
    1,
  )


def test_calls_of_a_turn_are_answered_in_order():
  text = "\n".join(
    [
      hermes("calculator", expression="6*7"),
      hermes("echo", x=1.5),
      hermes("search", query="dog?"),
    ]
  )
  answers, errors = said(text)
  assert errors == 0
  assert answers == [
    "42",
    '{"x": 1.5}',
    "Dog: A dog and a cat.\nTea: Tea is hot, and the dog is not.",
  ]


@pytest.mark.parametrize("text", ["", "It is 42.", "tool_call"])
def test_a_turn_without_a_call_ends_the_conversation(text):
  assert TOOLS.step(None, text) == multi_turn.Step()


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    (
      hermes("boom", x=1),
      "error: KeyError: 'no 1\\nat all'",
    ),
    (
      hermes("boom"),
      "error: arguments: expected 'x', got []",
    ),
    (
      hermes("boom", x="1"),
      "error: arguments.x: expected number, got '1'",
    ),
    (
      hermes("boom", x=True),
      "error: arguments.x: expected number, got True",
    ),
    (
      hermes("echo", y=1),
      "error: arguments: expected names of ['x'], got 'y'",
    ),
    (
      hermes("bomb"),
      "error: no tool 'bomb'; there are: calculator, search, python, boom, "
      "echo, refuse",
    ),
  ],
)
def test_what_is_wrong_with_a_call_is_the_answer_to_it(text, answer):
  assert said(text) == ([answer], 1)


def test_a_call_that_cannot_be_read_is_answered_too():
  (answer,), errors = said("<tool_call>{not json}</tool_call>")
  assert answer.startswith("error: expected JSON") and errors == 1


@pytest.mark.parametrize(
  ("code", "answer", "errors"),
  [
    ("print(6 * 7)", "42\n", 0),
    ("x = 1", "nothing printed", 0),
    ("1 / 0", "error: RuntimeError: raised: ZeroDivisionError", 1),
    ("while True: pass", "error: RuntimeError: timeout", 1),
  ],
)
def test_programs_run_to_their_end_or_their_limit(code, answer, errors):
  (said_,), failed = said(hermes("python", code=code))
  assert said_.startswith(answer) and failed == errors


def test_a_mistake_of_the_user_ends_the_run():
  with pytest.raises(types.InputError, match="no such system"):
    said(hermes("refuse"))


def test_a_turn_has_so_many_calls_and_so_much_time():
  made = []

  def slow(s=0.0):
    made.append(s)
    time.sleep(s)
    return "done"

  schema = {"type": "object", "properties": {"s": {"type": "number"}}}
  tool = tools.Tool(slow, "slow", "Waits.", schema)
  few = tools.Tools((tool,), style="hermes", max_s=0.2)
  texts, errors = said(hermes("slow") * 11, few)
  assert len(made) == 8 and errors == 3
  left = "error: more than 8 calls or 0.2 s in a turn"
  assert texts == ["done"] * 8 + [left] * 3
  assert said(hermes("slow", s=0.3) * 3, few) == (["done", left, left], 2)
  for wrong in ({"max_calls": 0}, {"max_s": 0.0}):
    with pytest.raises(types.InputError, match="expected max_calls >= 1"):
      dataclasses.replace(few, **wrong)


def test_answers_are_cut_and_failures_worded_as_told():
  short = tools.Tools(TOOLS.tools, style="hermes", max_letters=3, failure="?")
  assert said(hermes("calculator", expression="10**9"), short) == (["100"], 0)
  assert said(hermes("nobody"), short) == (["?"], 1)
  silent = tools.Tool(str, "silent", "Says nothing.", {"type": "object"})
  silent = tools.Tools((silent,), style="hermes")
  assert said(hermes("silent"), silent) == (["nothing returned"], 0)
  (message,) = short.failed(None, "late").messages or [{}]
  assert message["content"] == "?"
  (message,) = TOOLS.failed(None, "late").messages or [{}]
  assert message["content"] == "error: late"


@pytest.mark.parametrize(
  ("style", "text", "role"),
  [
    ("hermes", hermes("echo", x=1), "tool"),
    ("llama", '{"name": "echo", "parameters": {"x": 1}}', "tool"),
    ("gemma", "```tool_code\necho(x=1)\n```", "user"),
    (lambda text: (tool_calls.Call("echo", {"x": 1}),), "anything", "tool"),
  ],
  ids=["hermes", "llama", "gemma", "own"],
)
def test_each_family_calls_and_hears_in_its_own_way(style, text, role):
  step = tools.Tools(TOOLS.tools, style=style).step(None, text)
  (message,) = step.messages or [{}]
  assert message["role"] == role and '{"x": 1}' in message["content"]


SCHEMA = {
  "type": "object",
  "properties": {
    "n": {"type": "integer"},
    "name": {"type": ["string", "null"]},
    "kind": {"enum": ["a", "b"]},
    "rows": {
      "type": "array",
      "items": {"type": "object", "required": ["id"]},
    },
    "on": {"type": "boolean"},
  },
}


@pytest.mark.parametrize(
  ("value", "fault"),
  [
    ({}, ""),
    ({"n": 3, "name": None, "kind": "b", "rows": [{"id": 1}], "on": False}, ""),
    ({"n": 3.0}, ""),
    ({"n": 3.5}, "x.n: expected integer, got 3.5"),
    ({"n": True}, "x.n: expected integer, got True"),
    ({"name": 1}, "x.name: expected string or null, got 1"),
    ({"kind": "c"}, "x.kind: expected one of ['a', 'b'], got 'c'"),
    ({"rows": {}}, "x.rows: expected array, got {}"),
    ({"rows": [{"id": 1}, {}]}, "x.rows[1]: expected 'id', got []"),
    ({"on": 0}, "x.on: expected boolean, got 0"),
    ([], "x: expected object, got []"),
  ],
)
def test_arguments_are_as_their_schema_says(value, fault):
  assert schemas.mismatch(SCHEMA, value, "x") == fault


def test_names_beyond_the_schema_may_be_allowed():
  open_ = SCHEMA | {"additionalProperties": True}
  assert schemas.mismatch(open_, {"other": 1}, "x") == ""
  texts = SCHEMA | {"additionalProperties": {"type": "string"}}
  assert schemas.mismatch(texts, {"other": "1"}, "x") == ""
  fault = "x.other: expected string, got 1"
  assert schemas.mismatch(texts, {"n": 1, "other": 1}, "x") == fault
  alone = {"type": "object", "additionalProperties": False}
  assert schemas.mismatch(alone, {}, "x") == ""
  assert "names of []" in schemas.mismatch(alone, {"other": 1}, "x")


@pytest.mark.parametrize(
  ("schema", "right", "wrong"),
  [
    ({"minimum": 2}, (2, 3.5, "a", True), (1, -5)),
    ({"maximum": 2.5}, (2, -1e9), (2.6, 10**400)),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, (0.5,), (0, 1)),
    ({"minLength": 1, "maxLength": 2}, ("a", "ab", 5), ("", "abc")),
    ({"minItems": 1, "maxItems": 2}, ([1], [1, 2], "abc"), ([], [1, 2, 3])),
    ({"enum": [1, "a", None]}, (1, 1.0, "a", None), (True, "b", 0)),
    ({"const": 0}, (0,), (False, None, 1)),
    ({"type": "number"}, (1, 0.5), (float("nan"), float("inf"), True, "1")),
    (
      {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
      (1, None),
      (0, "1"),
    ),
  ],
)
def test_each_keyword_is_checked(schema, right, wrong):
  whole = {"type": "object", "properties": {"x": schema}}
  schemas.check(whole, "a place")
  for value in right:
    assert schemas.mismatch(whole, {"x": value}, "args") == ""
  for value in wrong:
    fault = schemas.mismatch(whole, {"x": value}, "args")
    assert fault.startswith("args.x: expected ") and "\n" not in fault


@pytest.mark.parametrize(
  ("inner", "said"),
  [
    *[
      ({word: 1}, f"got '{re.escape(word)}', which would not be checked")
      for word in ("pattern", "format", "$ref", "oneOf", "not", "minimun")
    ],
    ({"type": "int"}, ".type: expected one of string, .*, got 'int'"),
    ({"type": []}, ".type: expected one of"),
    ({"type": ["string", 5]}, ".type: expected one of"),
    ({"enum": "abc"}, ".enum: expected a list"),
    ({"enum": []}, ".enum: expected a list"),
    ({"enum": [[1]]}, ".enum: expected a list"),
    ({"minimum": "3"}, ".minimum: expected a finite number, got '3'"),
    ({"minimum": True}, ".minimum: expected a finite number"),
    ({"maxLength": -1}, ".maxLength: expected a whole number >= 0, got -1"),
    ({"minItems": 1.5}, ".minItems: expected a whole number"),
    ({"properties": ["a"]}, ".properties: expected schemas by name"),
    ({"properties": {"a": True}}, ".properties.a: expected a JSON schema"),
    ({"properties": {}, "required": ["a"]}, ".required: expected names of pr"),
    ({"required": "a"}, ".required: expected a list of names"),
    ({"items": [{}]}, ".items: expected a JSON schema"),
    ({"anyOf": {}}, ".anyOf: expected a list"),
    ({"items": {"anyOf": [{"x": 1}]}}, "items.anyOf.0.: .*got 'x'"),
    ({"additionalProperties": 1}, ".additionalProperties: expected a JSON sc"),
  ],
)
def test_schemas_that_would_not_be_checked_are_refused(inner, said):
  whole = {"type": "object", "properties": {"x": inner}}
  with pytest.raises(types.InputError, match=said) as caught:
    tools.Tool(boom, "f", "", whole)
  assert str(caught.value).startswith("tools.Tool('f').parameters.properties.x")
  assert "\n" not in str(caught.value)


def test_what_only_describes_is_allowed():
  x = {"title": "X", "description": "a\nb", "default": 3, "examples": [1]}
  tool = tools.Tool(boom, "f", "", {"type": "object", "properties": {"x": x}})
  assert tool.schema["function"]["parameters"]["properties"]["x"] == x


def _around():
  made = {"type": "object", "properties": {}}
  made["properties"]["again"] = made
  return made


def _deep():
  made = {"type": "object"}
  for _ in range(50):
    made = {"type": "object", "properties": {"a": made}}
  return made


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"function": 5}, "expected a function, got 5"),
    ({"description": None}, "expected a text, got None"),
    *[
      ({"name": name}, "expected a name of")
      for name in ("", "a b", "a\nb", "x" * 65, 5, None)
    ],
    *[
      ({"parameters": given}, "parameters: expected a JSON schema of type obj")
      for given in ("nonsense", [], {}, None, {"type": "string"})
    ],
    ({"parameters": _around()}, "expected what JSON can hold"),
    ({"parameters": {"type": "object", "default": {1}}}, "JSON can hold"),
    ({"parameters": _deep()}, "expected at most 32 levels"),
  ],
)
def test_a_tool_that_is_none_is_refused_in_a_line(fields, said):
  tool = tools.Tool(boom, "f", "", {"type": "object"})
  for name, value in fields.items():  # A run has nobody who checks types.
    object.__setattr__(tool, name, value)
  with pytest.raises(types.InputError, match=said) as caught:
    tool.__post_init__()
  assert "\n" not in str(caught.value)


def test_rare_words_find_more_than_common_ones():
  assert tools.find("a hot dog", DOCUMENTS, 1).startswith("Tea")
  assert tools.find("nothing of it", DOCUMENTS, 1).startswith("nothing found")
  assert tools.find("CAT", DOCUMENTS, 3).split("\n") == [
    "Cat: A cat sleeps.",
    "Dog: A dog and a cat.",
  ]


def test_tools_that_are_none_are_refused():
  none = tools.Tools(TOOLS.tools, style="hermes")
  object.__setattr__(none, "tools", (boom,))
  with pytest.raises(types.InputError, match=r"expected tools.Tool\(\.\.\.\)"):
    none.__post_init__()
  for given in ((), (TOOLS.tools[0], TOOLS.tools[0])):
    with pytest.raises(types.InputError, match="tools of different names"):
      tools.Tools(given, style="hermes")
  with pytest.raises(types.InputError, match="style: expected one of"):
    tools.Tools(TOOLS.tools, style="own")


def test_names_are_closed_by_the_schema_of_the_value_and_not_by_a_branch():
  ways = [
    {"properties": {name: {"type": "string"}}, "required": [name]}
    for name in ("a", "b")
  ]
  schema = {
    "type": "object",
    "properties": {"a": {}, "b": {}},
    "anyOf": [*ways, {"properties": {"a": {}}, "required": ["b"]}],
  }
  schemas.check(schema, "x")
  assert not schemas.mismatch(schema, {"a": "1", "b": "2"}, "x")
  assert "expected 'a'" in schemas.mismatch(schema, {}, "x")
  assert "got 'c'" in schemas.mismatch(schema, {"a": "1", "c": 1}, "x")
  # A branch that forbids other names does.
  shut = {**ways[0], "additionalProperties": False}
  schema = {**schema, "anyOf": [shut]}
  assert "got 'b'" in schemas.mismatch(schema, {"a": "1", "b": "2"}, "x")
  # Anything is allowed by {}, which closes nothing.
  free = {
    "type": "object",
    "properties": {},
    "required": ["q"],
    "additionalProperties": {},
  }
  schemas.check(free, "x")
  assert not schemas.mismatch(free, {"q": 1}, "x")
