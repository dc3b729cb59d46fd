"""Sources and prompts: what is read, what is refused, and in which order."""

import json
import sys

import pytest
from absl import logging
from absl.testing import absltest

from jaxrl_post import types
from jaxrl_post.data import gym, prompts, sources


class Letters:
  """A tokenizer with one token a letter and a template in brackets."""

  def prompt_ids(self, prompt):
    if not isinstance(prompt, str):
      prompt = "".join(f"[{m['role']}]{m['content']}" for m in prompt)
    return [ord(letter) for letter in prompt], prompt


def example(i: int) -> types.Example:
  return types.Example(prompt=f"item {i}", reference=i)


def load(source=None, **options):
  defaults = {"max_tokens": 100, "seed": 0, "epochs": 1}
  source = source or sources.Generated(make=example, size=10)
  return prompts.load(source, Letters(), **(defaults | options))


def written(tmp_path, *lines: str | bytes):
  path = tmp_path / "data.jsonl"
  raw = [x if isinstance(x, bytes) else x.encode() for x in lines]
  path.write_bytes(b"\n".join(raw) + b"\n")
  return str(path)


# ------------------------------------------------------------------- sources


def test_jsonl_reads_text_and_messages_in_order(tmp_path):
  messages = [{"role": "user", "content": "b"}]
  path = written(
    tmp_path,
    json.dumps({"prompt": "a", "answer": 1}),
    "",
    json.dumps({"prompt": messages, "answer": {"x": [2]}, "more": 0}),
  )
  assert sources.Jsonl(path).load() == (
    types.Example(prompt="a", reference=1),
    types.Example(prompt=tuple(messages), reference={"x": [2]}),
  )


def test_jsonl_takes_other_fields_and_stops_at_the_limit(tmp_path):
  rows = [json.dumps({"q": str(i), "a": i}) for i in range(5)]
  path = written(tmp_path, *rows, "broken")
  source = sources.Jsonl(path, prompt="q", answer="a", limit=2)
  assert [e.reference for e in source.load()] == [0, 1]


@pytest.mark.parametrize(
  ("line", "told"),
  [
    ('{"prompt": "a", ', "expected a JSON object"),
    ("[1]", r"expected a JSON object, got \[1\]"),
    ("1" * 5000, "expected a JSON object"),
    ('{"prompt": "a"}', r"expected a field 'answer', got \['prompt'\]"),
    ('{"answer": 1}', r"expected a field 'prompt', got \['answer'\]"),
    ('{"prompt": 3, "answer": 1}', "field 'prompt': expected text.*got 3"),
    ('{"prompt": [], "answer": 1}', r"expected text.*got \[\]"),
    ('{"prompt": ["a"], "answer": 1}', "expected text.*got 'a'"),
    ('{"prompt": [{"role": "user"}], "answer": 1}', "got {'role': 'user'}"),
    (
      '{"prompt": [{"role": "user", "content": null}], "answer": 1}',
      "got {'role': 'user', 'content': None}",
    ),
    (
      '{"prompt": "\\ud83d 1", "answer": 1}',
      "got half of a character, '.ud83d'",
    ),
    ('{"prompt": "a", "answer": ["\\uDE00"]}', "got half of a character"),
    (b'{"prompt": "\xff", "answer": 1}', "expected UTF-8, got byte 0xff at"),
  ],
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path, line, told):
  path = written(tmp_path, '{"prompt": "a", "answer": 1}', line)
  with pytest.raises(types.InputError, match=f"{path}:2.*{told}") as raised:
    sources.Jsonl(path).load()
  assert "\n" not in str(raised.value)


def test_both_halves_of_a_character_are_text(tmp_path):
  path = written(tmp_path, '{"prompt": "\\ud83d\\ude00", "answer": 1}')
  (found,) = sources.Jsonl(path).load()
  assert found.prompt == "\N{GRINNING FACE}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
  for path in (str(tmp_path / "missing.jsonl"), str(tmp_path)):
    with pytest.raises(types.InputError, match="source.path: expected"):
      sources.Jsonl(path).load()


def test_a_file_without_examples_is_refused(tmp_path):
  with pytest.raises(types.InputError, match="at least one row, got none"):
    sources.Jsonl(written(tmp_path, "")).load()


def test_generated_examples_are_those_of_the_indices():
  source = sources.Generated(make=example, size=2, start=5)
  assert source.load() == (example(5), example(6))


@pytest.mark.parametrize("made", [None, "a prompt", ("a", "b")])
def test_what_a_function_makes_is_an_example(made):
  source = sources.Generated(make=lambda i: made, size=3, start=7)
  with pytest.raises(types.InputError, match="Example of index 7, got"):
    source.load()


def test_sizes_below_one_are_refused():
  with pytest.raises(
    types.InputError, match="source.size: expected >= 1, got 0"
  ):
    sources.Generated(make=example, size=0)
  with pytest.raises(types.InputError, match="source.limit: expected >= 1"):
    sources.Jsonl("data.jsonl", limit=0)
  with pytest.raises(
    types.InputError, match="source.size: expected >= 1, got 0"
  ):
    gym.Gym(name="basic_arithmetic", size=0, seed=0)


def test_gym_gives_questions_with_the_whole_entry_as_reference():
  source = gym.Gym(
    name="basic_arithmetic", size=3, seed=1, options=(("max_terms", 2),)
  )
  found = source.load()
  assert len(found) == 3
  assert found[0].prompt == found[0].reference["question"]
  assert {"answer", "metadata"} <= found[0].reference.keys()
  assert found == source.load()
  other = gym.Gym(name="basic_arithmetic", size=3, seed=2)
  assert found != other.load()


def test_gym_writes_messages_when_asked():
  plain = gym.Gym(name="basic_arithmetic", size=1, seed=0).load()[0].prompt
  user = {"role": "user", "content": plain}
  chat = gym.Gym(name="basic_arithmetic", size=1, seed=0, chat=True)
  assert chat.load()[0].prompt == (user,)
  both = gym.Gym(
    name="basic_arithmetic", size=1, seed=0, chat=True, system="Be brief."
  )
  system = {"role": "system", "content": "Be brief."}
  assert both.load()[0].prompt == (system, user)


def test_an_unknown_gym_is_refused_with_the_nearest_name():
  with pytest.raises(types.InputError, match="Did you mean 'basic_arithmetic'"):
    gym.Gym(name="basic_arithmetics", size=1, seed=0)


@pytest.mark.parametrize("option", [("min_terms", 0), ("no_such", 1)])
def test_an_option_that_the_gym_refuses_is_told(option):
  source = gym.Gym(name="basic_arithmetic", size=1, seed=0, options=(option,))
  with pytest.raises(types.InputError, match=f"source.options.*{option[0]}"):
    source.load()


# ------------------------------------------------------------------- prompts


def test_a_prompt_holds_its_uid_ids_text_reference_and_messages():
  loaded = load(shuffle=False)
  assert loaded[3] == types.Prompt(
    uid=3,
    tokens=tuple(ord(letter) for letter in "item 3"),
    text="item 3",
    reference=3,
    messages=({"role": "user", "content": "item 3"},),
  )


def test_without_shuffling_one_epoch_is_the_source():
  loaded = load(shuffle=False)
  assert len(loaded) == loaded.size == 10
  assert [p.reference for p in loaded] == list(range(10))


def test_c57_long_prompts_are_dropped_whole_counted_and_told_once():
  texts = {0: "abc", 1: "abcd", 2: "abcdef"}
  source = sources.Generated(
    make=lambda i: types.Example(prompt=texts[i], reference=i), size=3
  )
  with absltest.TestCase().assertLogs(logging.get_absl_logger()) as log:
    loaded = load(source, max_tokens=4, shuffle=False)
  assert len(log.records) == 1
  assert "1 of 3 prompts dropped" in log.records[0].getMessage()
  assert (loaded.size, loaded.dropped) == (2, 1)
  assert [(p.text, p.reference) for p in loaded] == [("abc", 0), ("abcd", 1)]


def test_data_of_long_prompts_only_is_refused():
  with pytest.raises(types.InputError, match="10 examples, the shortest of 6"):
    load(max_tokens=5)


def test_a_prompt_without_tokens_is_refused():
  source = sources.Generated(
    make=lambda i: types.Example(prompt="" if i else "a", reference=i), size=2
  )
  with pytest.raises(types.InputError, match="got none in example 1"):
    load(source)


def test_c89_each_epoch_is_another_permutation_and_the_seed_sets_it():
  def order(seed):
    return [p.reference for p in load(seed=seed, epochs=3)]

  found = order(0)
  epochs = [found[:10], found[10:20], found[20:]]
  assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  assert order(0) == found
  assert order(1) != found


def test_draws_come_out_the_same_in_any_order():
  loaded = load(epochs=2)
  forward = [loaded[uid] for uid in range(20)]
  assert [loaded[uid] for uid in reversed(range(20))] == forward[::-1]
  with pytest.raises(IndexError):
    _ = loaded[20]
  with pytest.raises(IndexError):
    _ = loaded[-1]


def test_epochs_none_never_ends():
  loaded = load(epochs=None)
  assert len(loaded) == sys.maxsize
  assert loaded[10**9].uid == 10**9
  limited = load(epochs=3)
  assert [loaded[u] for u in range(30)] == [limited[u] for u in range(30)]


def test_c91_the_same_item_twice_in_a_batch_has_two_uids():
  source = sources.Generated(make=example, size=3)
  batch = [load(source, epochs=2)[uid] for uid in range(4)]
  references = [p.reference for p in batch]
  assert len(set(references)) < 4
  assert len({p.uid for p in batch}) == 4


def test_a_system_message_goes_before_text_and_messages():
  def make(i):
    messages = ({"role": "user", "content": "q"},)
    return types.Example(prompt=messages if i else "q", reference=i)

  loaded = load(sources.Generated(make=make, size=2), system="s", shuffle=False)
  assert [p.text for p in loaded] == ["[system]s[user]q"] * 2
  said = [[m["content"] for m in p.messages] for p in loaded]
  assert said == [["s", "q"]] * 2


def test_a_second_system_message_is_refused():
  message = {"role": "system", "content": "s"}
  source = sources.Generated(
    make=lambda i: types.Example(prompt=(message,), reference=i), size=1
  )
  with pytest.raises(types.InputError, match="one in example 0"):
    load(source, system="t")


def test_c101_the_digest_tells_other_data():
  def digest(make=example, **options):
    return load(sources.Generated(make=make, size=3), **options).digest

  first = digest()
  assert digest() == first
  assert digest(seed=5, epochs=7, shuffle=False) == first
  assert digest(lambda i: example(i + 1)) != first
  assert (
    digest(lambda i: types.Example(prompt=f"item {i}", reference=-i)) != first
  )
  assert digest(lambda i: example(2 - i)) != first


def test_the_digest_sees_into_references_but_not_their_address():
  class Thing:
    pass

  def digest(reference):
    source = sources.Generated(
      make=lambda i: types.Example(prompt="q", reference=reference), size=1
    )
    return load(source).digest

  assert digest(Thing()) == digest(Thing())
  assert digest({"a": 1, "b": {"x", "y"}}) == digest({"b": {"y", "x"}, "a": 1})
  assert digest({"a": 1}) != digest({"a": 2})
  assert digest([1, [2]]) != digest([[1], 2])


@pytest.mark.parametrize(
  ("options", "place"),
  [
    ({"max_tokens": 0}, "data.max_prompt"),
    ({"seed": -1}, "data.seed"),
    ({"epochs": 0}, "data.epochs"),
  ],
)
def test_a_setting_out_of_range_is_refused(options, place):
  with pytest.raises(types.InputError, match=f"{place}: expected"):
    load(**options)
