"""Chat templates: limits on what they may take, and conversations by ids."""

import json
import os
import pathlib
import threading
import time

import pytest
import tokenizers as hf_tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_post import types
from jaxrl_post.data import render_worker, template, tokenizer, tool_calls
from tests.reference import chat_templates

TOOLS = ({"name": "add", "parameters": {"type": "object", "note": "é<b>"}},)
FAMILIES = chat_templates.FAMILIES


def refused(match: str):
  return pytest.raises(types.InputError, match=match)


def make(
  name: str, shift: int = 0, source: str | None = None, **fields
) -> tokenizer.Tokenizer:
  """Makes a family's tokenizer of bytes; ids begin at `shift`."""
  family = FAMILIES[name]
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  fill = [f"<unused{i}>" for i in range(shift)]
  places = enumerate([*fill, *family.special, *letters])
  backend = hf_tokenizers.Tokenizer(models.BPE({t: i for i, t in places}, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(list(family.special))
  ids = {token: backend.token_to_id(token) for token in family.special}
  fields = {
    "pad_id": 0,
    "eos_ids": (ids[family.end],),
    "bos_id": ids[family.special[0]] if family.bos else None,
    "names": {"bos_token": family.special[0], "eos_token": family.end},
    "template": family.template if source is None else source,
    **fields,
  }
  return tokenizer.Tokenizer(backend=backend, **fields)


def talk(tok: tokenizer.Tokenizer, turns, tools=(), ended=True):
  """Holds a conversation by ids, as an engine and an environment do."""
  first, *rest = turns
  ids, _ = tok.prompt_ids(first, tools=tools)
  for answer, observation in zip(rest[::2], rest[1::2], strict=True):
    ids += tok.encode(answer) + (tok.eos_ids[:1] if ended else ())
    ids += tok.continuation(observation, ended=ended, tools=tools)
  return ids


def whole(tok: tokenizer.Tokenizer, turns, tools=()):
  """Renders the same conversation at once."""
  messages = list(turns[0])
  for answer, observation in zip(turns[1::2], turns[2::2], strict=True):
    messages += [{"role": "assistant", "content": answer}, *observation]
  return tok.prompt_ids(messages, tools=tools)[0]


def user(text: str):
  return ({"role": "user", "content": text},)


# ------------------------------------------------------------ conversations


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_by_ids_is_the_whole_one_rendered(name, tools):
  tok, style = make(name), FAMILIES[name].style
  one = tool_calls.results([("add", "3 'x' é")], style)
  two = tool_calls.results([("add", "5"), ("add", "7\n8")], style)
  turns = (user("add 1, 2"), "call", one, "again", two, "5 and 7.", user("!"))
  assert talk(tok, turns, tools) == whole(tok, turns, tools)
  assert talk(tok, turns, tools, ended=False) == whole(tok, turns, tools)
  assert tok.decode(talk(tok, turns, tools)).count("add 1, 2") == 1


def test_thoughts_stay_as_the_model_wrote_them():
  tok = make("qwen3")
  thought = "<think>\nhm\n</think>\n\nyes"
  result = tool_calls.results([("f", "ok")], "hermes")
  # Between results of tools the template keeps them as well.
  turns = (user("a"), thought, result, thought, result)
  assert talk(tok, turns) == whole(tok, turns)
  # Behind the user's next words it does not, and sampled tokens do stay.
  turns = (user("a"), thought, user("b"))
  kept, cut = tok.decode(talk(tok, turns)), tok.decode(whole(tok, turns))
  assert kept.count("<think>") == 1 and "<think>" not in cut
  assert kept.replace("<think>\nhm\n</think>\n\n", "") == cut


@pytest.mark.parametrize(
  "begin, always", [("<think>\n", ""), ("", "<think>\n</think>\n\n")]
)
def test_thoughts_that_a_template_begins_or_makes_up_change_nothing(
  begin, always
):
  # As in DeepSeek's distilled models, and in templates after Qwen3's.
  source = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ '" + always + "' }}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '" + begin + "' }}"
    "{% endif %}"
  )
  tok = make("qwen3", source=source)
  text = tok.decode(tok.continuation(user("b"), ended=True))
  assert text == "\nuser\nb\nassistant\n" + begin


def test_sampled_tokens_are_never_encoded_again():
  tok = make("qwen2.5")
  ids = tok.continuation(user("b"), ended=True)
  # Nothing in them depends on the answer, and its end token is not repeated.
  assert tok.decode(ids, skip_special=False) == (
    "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
  )
  assert tok.continuation(user("b"), ended=False) == (*tok.eos_ids, *ids)


def test_an_answer_may_end_with_any_end_token():
  # The tokenizer's own end token is not the one of turns, as in Gemma 3.
  tok = make("gemma3", eos_ids=(0, 2))
  assert tok.continuation(user("b"), ended=True)[0] == tok.encode("\n")[0]
  with refused("turns end with one of the end tokens"):
    make("gemma3", eos_ids=(0,)).continuation(user("b"), ended=True)
  assert make("gemma3", eos_ids=(0,)).continuation(user("b"), ended=False)


def test_room_before_the_end_token_is_not_asked_of_the_model():
  source = chat_templates.SMOLLM2.replace("+ '<|im_end|>'", "+ ' <|im_end|>'")
  tok = make("smollm2", source=source)
  with_end = tok.continuation(user("b"), ended=False)
  assert with_end[1:2] == tok.eos_ids
  assert tok.continuation(user("b"), ended=True) == with_end[2:]


MOVES_TOOLS = (
  "{% for m in messages %}{% if loop.last %}TOOLS{% endif %}"
  "{{ m.content }}<|im_end|>{% endfor %}"
)
FORGETS = "{{ messages[-1].content }}<|im_end|>"
COUNTS = (
  "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>"
  "{% endfor %}"
)
MARKS_LAST = (
  "{% for m in messages %}{{ m.content }}"
  "{{ '!' if loop.last else '<|im_end|>' }}{% endfor %}"
)
SHORTENS = (
  "{% for m in messages %}{{ m.content if loop.last else m.content[:3] }}"
  "<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
  "source",
  [MOVES_TOOLS, FORGETS, COUNTS, MARKS_LAST, SHORTENS],
  ids=lambda s: s[:20],
)
def test_a_template_that_rewrites_earlier_turns_is_refused(source):
  tok = make("qwen2.5", source=source)
  with refused("leaves earlier turns as they are"):
    tok.continuation(user("b"), ended=True)


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_c103_one_begin_token_in_a_conversation(name, shift):
  tok = make(name, shift)
  turns = (user("a"), "b", user("c"), "d", user("e"))
  ids = talk(tok, turns)
  assert tok.bos_id == shift
  assert ids.count(shift) == 1 and ids[0] == shift
  source = FAMILIES[name].template
  for wrong in ("{{ bos_token }}" + source, "{{ bos_token * 3 }}" + source):
    assert talk(make(name, shift, wrong), turns) == ids
  each = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}{% endif %}"
    "{{ m.content + eos_token }}{% endfor %}"
  )
  with refused("writes .* once, got one that begins every turn"):
    make(name, shift, each).continuation(user("c"), ended=True)
  # What a tool says is its own: it does not end the run.
  text = FAMILIES[name].special[0]
  assert tok.continuation(user(f"{text}{text}"), ended=True).count(shift) == 2


def test_without_a_template_contents_stand_as_they_are():
  tok = tokenizer.characters("ab=")
  results = tool_calls.results([("f", "a="), ("f", "b")], "hermes")
  assert tok.continuation(results, ended=True) == tok.encode("a=b")
  with refused("contents of text"):
    tok.continuation([{"role": "tool"}], ended=True)


# -------------------------------------------------------------------- tools


def test_tools_are_shown_by_the_template_made_for_them(tmp_path):
  make("qwen2.5").backend.save(str(tmp_path / "tokenizer.json"))
  named = [
    {"name": "default", "template": "plain"},
    {"name": "tool_use", "template": "{{ tools | tojson }}"},
  ]
  settings = tmp_path / "tokenizer_config.json"
  settings.write_text(json.dumps({"chat_template": named}))
  tok = tokenizer.load(str(tmp_path))
  assert tok.prompt_ids(user("a"))[1] == "plain"
  shown = tok.prompt_ids(user("a"), tools=TOOLS)[1]
  assert json.loads(shown) == list(TOOLS) and "é<b>" in shown
  with refused("expected messages, which can show 1 tools"):
    tok.prompt_ids("text", tools=TOOLS)
  # Of several places, the newer one wins.
  settings.write_text("{}")
  (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
  assert tokenizer.load(str(tmp_path)).prompt_ids(user("a"))[1] == "old"
  (tmp_path / "chat_template.jinja").write_text("new")
  more = tmp_path / "additional_chat_templates"
  more.mkdir()
  (more / "tool_use.jinja").write_text("tools")
  tok = tokenizer.load(str(tmp_path))
  assert tok.prompt_ids(user("a"))[1] == "new"
  assert tok.prompt_ids(user("a"), tools=TOOLS)[1] == "tools"


@pytest.mark.parametrize("wrong", [7, [7], [{"name": "default"}]])
def test_what_is_no_template_is_refused(wrong):
  with refused("expected chat_template as text or a list"):
    template.find(pathlib.Path("folder"), {"chat_template": wrong})


def test_calls_in_earlier_turns_are_rendered():
  call = {"name": "add", "arguments": {"a": 1}}
  turns = [
    *user("a"),
    {"role": "assistant", "tool_calls": [{"function": call}]},
    {"role": "tool", "content": "1"},
  ]
  text = make("qwen2.5").prompt_ids(turns)[1]
  assert tool_calls.parse(text, "hermes") == (tool_calls.Call("add", {"a": 1}),)
  with refused("messages with role and content"):
    make("qwen2.5").prompt_ids([{"role": "assistant"}])


# ------------------------------------------------------------------- limits

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
HOSTILE = {
  "loops": (LOOP + "{% endfor %}", "more than 1 s of computing"),
  "power": ("{{ 9 ** (9 ** 9) }}", "more than 1 s of computing"),
  "range": ("{{ range(10 ** 9) | list }}", "Range too big"),
  "memory": ("{{ 'a' * 10 ** 11 }}", "MemoryError"),
  "output": (
    "{{ messages[0].content * 10 ** 8 }}",
    "more than 16777216 characters",
  ),
  "source": ("a" * (2**24 + 1), "a template of 16777217 characters"),
  "calls": (
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion",
  ),
  "nesting": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "recursion"),
  "divide": ("{{ 1 // 0 }}", "division"),
  "lines": ("{{ raise_exception('a\nb') }}", "a b"),
  "file": ("{% include '/etc/passwd' %}", "no loader"),
  "write": ("{{ messages[0].update({'role': 'x'}) }}", "unsafe|not safe"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_ends_in_one_line(case):
  source, match = HOSTILE[case]
  with refused(f"(?i)that the chat template takes.*({match})") as caught:
    template.render(source, {"messages": list(user("a"))})
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
  # The next one is answered, as itself.
  (text,) = template.render(
    "{{ messages[0].content }}", {"messages": user("b")}
  )
  assert text == "b"


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Etc/GMT+12"])
def test_a_date_is_that_of_no_day_and_no_place(monkeypatch, zone):
  source = "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f %Z') }}"
  expected = "2024-07-26 00:00:00.000000 UTC"
  assert template.render(source, {}, {}) == [expected, expected]
  # The renderer may have been started in another time zone.
  request = {"source": source, "calls": [{}], "now": template.NOW_S}
  with monkeypatch.context() as patch:
    patch.setenv("TZ", zone)
    time.tzset()
    found = render_worker.answer(request)
  time.tzset()
  assert found == {"texts": [expected]}


def test_a_prompt_of_llama_has_the_date_that_docs_tell():
  _, text = make("llama3").prompt_ids(({"role": "user", "content": "hi"},))
  assert "Today: 26 Jul 2024<|eot_id|>" in text
  docs = pathlib.Path(__file__).parents[2] / "docs"
  told = (docs / "data.md").read_text(encoding="utf-8")
  assert "26 July 2024, in UTC" in told


def test_answers_are_not_mixed_up():
  found = {}

  def ask(i: int) -> None:
    for j in range(20):
      found[i, j] = template.render("{{ x }}", {"x": i * 100 + j})[0]

  threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert found == {
    (i, j): str(i * 100 + j) for i in range(4) for j in range(20)
  }


def test_a_renderer_that_was_killed_is_started_again():
  assert template.render("a", {}) == ["a"]
  template._process(os.getpid()).kill()
  with refused("the renderer's end with code -9"):
    template.render("a", {})
  assert template.render("a", {}) == ["a"]


def test_messages_that_json_cannot_hold_are_refused():
  with refused("takes, got .*no JSON: Object of type object"):
    template.render("a", {"messages": [{"role": object()}]})
