"""Tool calls: what each family writes is read, and all else says why not."""

import re
import time

import pytest

from jaxrl_post import types
from jaxrl_post.data import tool_calls
from tests.reference import chat_templates

Call = tool_calls.Call
MAX = tool_calls.MAX_CALLS


def hermes(*bodies: str) -> str:
  return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def gemma(code: str) -> str:
  return f"Let me see.\n```tool_code\n{code}\n```"


ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}'
ADDED = Call("add", {"a": 1, "b": [2, {"c": None}]})
WELL = [
  # Nothing was begun.
  ("hermes", "", ()),
  ("hermes", 'Take {"name": "add", "arguments": {}} of <tool> calls', ()),
  ("llama", "", ()),
  ("llama", "The answer is [1] and {2}.", ()),
  ("llama", '{"answer": 3}', ()),
  ("llama", '{"type": "circle"}', ()),
  ("llama", "[1] Source", ()),
  ("gemma", "```python\nadd(a=1)\n```", ()),
  # One and several, with words around.
  ("hermes", hermes(ADD), (ADDED,)),
  ("hermes", "I will.\n" + hermes(ADD, ADD) + "<|im_end|>", (ADDED, ADDED)),
  ("hermes", hermes(f"[{ADD}, {ADD}]"), (ADDED, ADDED)),
  ("hermes", hermes("[]"), ()),
  ("hermes", f"<tool_call>{ADD}</tool_call>", (ADDED,)),
  (
    "llama",
    '{"name": "f", "parameters": {"x": "}"}}',
    (Call("f", {"x": "}"}),),
  ),
  ("llama", ADD, (ADDED,)),
  ("llama", f"<|python_tag|>{ADD}; {ADD}<|eom_id|>", (ADDED, ADDED)),
  (
    "llama",
    '{"type": "function", "name": "f", "parameters": {}}',
    (Call("f", {}),),
  ),
  (
    "llama",
    "[f(a=1, b='x,)(]'), g.h(c=[True, None, -2.5])]<|eot_id|>",
    (
      Call("f", {"a": 1, "b": "x,)(]"}),
      Call("g.h", {"c": [True, None, -2.5]}),
    ),
  ),
  (
    "llama",
    '<|python_tag|>search.call(query="a b")',
    (Call("search.call", {"query": "a b"}),),
  ),
  (
    "gemma",
    gemma("print(f(a={'k': (1, 2)}))\ng()"),
    (Call("f", {"a": {"k": [1, 2]}}), Call("g", {})),
  ),
  ("gemma", gemma("[f(a='''x\ny''')]"), (Call("f", {"a": "x\ny"}),)),
  (
    "gemma",
    gemma("f()") + "\nthen\n" + gemma("g()"),
    (Call("f", {}), Call("g", {})),
  ),
  # Signs of the form inside of strings are text.
  (
    "hermes",
    hermes(
      '{"name": "f", "arguments": {"s": "</tool_call> <tool_call>{\\"}"}}'
    ),
    (Call("f", {"s": '</tool_call> <tool_call>{"}'}),),
  ),
  ("gemma", gemma("f(s='```tool_code')"), (Call("f", {"s": "```tool_code"}),)),
  ("llama", "[f(s='\\d')]", (Call("f", {"s": "\\d"}),)),
]


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize("style, text, calls", WELL)
def test_what_a_family_writes_is_read(style, text, calls):
  assert tool_calls.parse(text, style) == calls


BAD = [
  ("hermes", f"<tool_call>{ADD}", "expected </tool_call> behind"),
  ("hermes", hermes(ADD + "}"), "expected </tool_call> behind"),
  ("hermes", hermes("{'name': 'f'}"), "expected JSON: .* at character 2"),
  ("hermes", hermes('{"name": "f", "arguments": {"a": NaN}}'), "NaN is not"),
  ("hermes", hermes('{"name": "f"}'), "expected arguments, an object"),
  ("hermes", hermes('{"name": "f", "arguments": "{}"}'), "expected arguments"),
  ("hermes", hermes('{"name": 3, "arguments": {}}'), "expected a name"),
  ("hermes", hermes('{"name": "", "arguments": {}}'), "expected a name"),
  ("hermes", hermes("3"), "expected an object"),
  ("hermes", hermes("[[]]"), "expected an object"),
  ("hermes", hermes("[" * 10**6), "expected JSON"),
  ("hermes", hermes("1" * 10**6), "expected JSON"),
  ("hermes", "<tool_call>", "expected JSON"),
  ("llama", '{"name": "f", "parameters": ', "expected JSON"),
  ("llama", '{"name": "f", "parameters": [1]}', "expected parameters"),
  ("llama", "<|python_tag|>import os", "expected nothing but calls"),
  ("llama", "<|python_tag|>", "got nothing"),
  ("llama", "[f(1)]", "arguments by name, .* of f"),
  ("llama", "[f(**{'a': 1})]", "each argument once"),
  ("llama", "[f(a=b)]", "plain value as argument a of f"),
  ("llama", "[f(a={1, 2})]", "plain value"),
  ("llama", "[f(a=1e999)]", "plain value"),
  ("llama", "[f(a=b'x')]", "plain value"),
  ("llama", "[f(a=__import__('os'))]", "plain value"),
  ("llama", "[f(a=1) is what I call", "expected calls in Python"),
  ("llama", "[f(a=1, a=2)]", "each argument once, .* of f"),
  ("llama", "[f(" + "(" * 9999, "expected calls in Python"),
  ("llama", "[f(a=" + "-" * 60000 + "1)]", ""),
  ("llama", "[f(a=" + "1+" * 30000 + "1)]", ""),
  ("llama", "[f(a='\0')]", "expected calls in Python"),
  ("llama", "[f(a='" + "x" * 70000 + "')]", "at most 65536 characters"),
  ("gemma", "```tool_code\nf()", "expected ``` behind"),
  ("gemma", gemma("x = f()"), "nothing but calls"),
  ("gemma", gemma("f()()"), "a call of a name"),
  ("gemma", gemma("\n"), "got nothing"),
]


@pytest.mark.parametrize("style, text, why", BAD, ids=range(len(BAD)))
def test_what_cannot_be_read_says_why_in_one_line(style, text, why, recwarn):
  (found,) = tool_calls.parse(text, style)
  assert isinstance(found, tool_calls.Malformed)
  assert re.search(why, found.reason)
  assert "\n" not in found.reason and 0 < len(found.reason) <= 200
  assert len(found.text) <= 200
  assert not recwarn.list


def test_reading_goes_on_behind_a_call_that_cannot_be_read():
  bad, good = tool_calls.parse(hermes("{oops}", ADD), "hermes")
  assert isinstance(bad, tool_calls.Malformed) and good == ADDED
  good, bad = tool_calls.parse(ADD + " and so on", "llama")
  assert good == ADDED
  assert bad == tool_calls.Malformed(
    "and so on", "expected nothing behind the calls"
  )
  # A tag inside of one that is not closed does not smuggle in another call.
  text = '<tool_call>{"name": "f", x "<tool_call>' + ADD + "</tool_call>"
  (bad,) = tool_calls.parse(text, "hermes")
  assert isinstance(bad, tool_calls.Malformed)


def test_a_completion_has_a_limited_number_of_calls():
  found = tool_calls.parse(hermes(*[ADD] * (MAX + 5)), "hermes")
  assert found[:MAX] == (ADDED,) * MAX and len(found) == MAX + 1
  assert isinstance(found[MAX], tool_calls.Malformed)
  assert len(tool_calls.parse(hermes(*[ADD] * MAX), "hermes")) == MAX


HUGE = [
  ("hermes", "<tool_call>"),
  ("hermes", '<tool_call>{"'),
  ("hermes", '<tool_call>["a", "'),
  ("hermes", "<tool_call> \n</tool_call>"),
  ("hermes", "<tool_call>[[{}], "),
  ("hermes", "</tool_call>"),
  ("llama", '{"name": "f", "parameters": {}};'),
  ("llama", '{"name": "'),
  ("llama", "[f(a=1),"),
  ("gemma", "```tool_code\n"),
  ("gemma", "```tool_code\nf()\n```\n"),
  ("gemma", "\n "),
  ("gemma", "``` "),
]


@pytest.mark.parametrize("style, unit", HUGE, ids=range(len(HUGE)))
def test_time_is_linear_in_the_length(style, unit):
  text = unit * (4_000_000 // len(unit))
  begin = time.process_time()
  tool_calls.parse(text, style)
  # Looking at each pair of places would take hours.
  assert time.process_time() - begin < 5


def test_the_style_follows_from_the_template():
  for family in chat_templates.FAMILIES.values():
    assert tool_calls.style_of(family.template) == family.style
  with pytest.raises(types.InputError, match="Set one of hermes, llama, gemma"):
    tool_calls.style_of("{{ messages }}")
  with pytest.raises(types.InputError, match="style: expected one of hermes"):
    tool_calls.parse("", "xml")


def test_answers_become_the_messages_that_the_template_takes():
  answers = [("f", "1"), ("g", "two\nlines")]
  for style in ("hermes", "llama"):
    assert tool_calls.results(answers, style) == (
      {"role": "tool", "name": "f", "content": "1"},
      {"role": "tool", "name": "g", "content": "two\nlines"},
    )
  (message,) = tool_calls.results(answers, "gemma")
  assert message == {
    "role": "user",
    "content": "```tool_output\n1\n```\n```tool_output\ntwo\nlines\n```",
  }
  assert tool_calls.results((), "gemma") == ()
