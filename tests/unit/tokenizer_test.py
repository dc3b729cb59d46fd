"""Ids and text: one story, one begin token, every end token."""

import dataclasses
import json
import pathlib
import pickle

import gguf
import pytest
import tokenizers as hf_tokenizers

from jaxrl_post import gguf_header, types
from jaxrl_post.data import prompts, tokenizer
from jaxrl_post.envs import single_turn
from jaxrl_post.runtime import dump
from tests.reference import tiny_folder

USER = {"role": "user", "content": "hi"}
BYTES = {c: i for c, i in tiny_folder.byte_tokenizer().get_vocab().items()}
BOS = tiny_folder.END


def refused(match: str):
  return pytest.raises(types.InputError, match=match)


def save(folder: pathlib.Path, name: str, value: object) -> None:
  (folder / name).write_text(json.dumps(value), encoding="utf-8")


def folder_of(
  folder: pathlib.Path, bos: bool = False, **settings
) -> pathlib.Path:
  """Writes the tokenizer's files only: no test here needs weights."""
  folder.mkdir(parents=True, exist_ok=True)
  tiny_folder.byte_tokenizer(bos=bos).save(str(folder / "tokenizer.json"))
  settings = {"eos_token": tiny_folder.STOP, "bos_token": BOS, **settings}
  save(folder, "tokenizer_config.json", settings)
  return folder


def load(folder: pathlib.Path) -> tokenizer.Tokenizer:
  return tokenizer.load(str(folder))


# -------------------------------------------------------------- ids and text


def test_text_comes_back_from_its_ids(tmp_path):
  tok = load(folder_of(tmp_path, bos=True))
  for text in ("plain", " two  spaces\n", "naïve 漢字 🙂", ""):
    assert tok.decode(tok.encode(text)) == text
  assert tok.encode("ab") == (BYTES["a"], BYTES["b"])
  assert tok.vocab_size == 259


def test_c105_the_end_token_is_in_the_ids_and_not_in_the_text(tmp_path):
  tok = load(folder_of(tmp_path))
  ids = (BYTES["A"], 2)
  assert tok.decode(ids) == "A"
  assert tok.decode(ids, skip_special=False) == "A<|im_end|>"
  # An end token that tokenizer.json does not call special.
  save(tmp_path, "generation_config.json", {"eos_token_id": BYTES["B"]})
  assert load(tmp_path).decode((BYTES["A"], BYTES["B"])) == "A"


def test_c105_half_a_character_does_not_raise(tmp_path):
  tok = load(folder_of(tmp_path))
  ids = tok.encode("é🙂")
  for end in range(len(ids)):
    text = tok.decode(ids[:end])
    assert text.replace("\ufffd", "") == ("é" if end >= 2 else "")
  assert tok.decode(ids[:3]) == "é\ufffd"


def test_c105_samples_on_disk_match_ids_and_logprobs_one_by_one(tmp_path):
  tok = load(folder_of(tmp_path))
  env = single_turn.SingleTurn(
    2, types.SamplingParams(stop_ids=tok.eos_ids), tok.decode
  )
  asked = types.Prompt(uid=4, tokens=(65,), text="p", reference=None)
  half = tok.encode("é🙂")[:3]
  made = [
    types.Completion(
      uid=8 + i,
      tokens=ids,
      logprobs=tuple(-float(j + 1) for j in range(len(ids))),
      versions=(0,) * len(ids),
      finish="stop" if ids[-1] == 2 else "length",
    )
    for i, ids in enumerate([(BYTES["A"], 2), half])
  ]
  group = types.Group(
    prompt=asked, rollouts=tuple(env.rollout(asked, one) for one in made)
  )
  assert [one.text for one in group.rollouts] == ["A", "é\ufffd"]
  dump.write(tmp_path / "1", [group], {})
  (found,) = dump.read(tmp_path / "1")
  for one, completion in zip(found.rollouts, made, strict=True):
    assert one.completion.tokens == completion.tokens
    assert one.completion.logprobs == completion.logprobs
    assert len(one.completion.tokens) == len(one.completion.logprobs)


def test_settings_left_by_training_cut_and_pad_nothing(tmp_path):
  backend = tiny_folder.byte_tokenizer()
  backend.enable_truncation(4)
  backend.enable_padding(length=8)
  folder_of(tmp_path)
  backend.save(str(tmp_path / "tokenizer.json"))
  assert len(load(tmp_path).encode("abcdefghijkl")) == 12
  assert len(load(tmp_path).encode("ab")) == 2


def test_a_tokenizer_travels_to_another_process(tmp_path):
  tok = load(folder_of(tmp_path, chat_template=tiny_folder.CHATML))
  copy = pickle.loads(pickle.dumps(tok))
  assert copy.prompt_ids((USER,)) == tok.prompt_ids((USER,))


# -------------------------------------------------------------------- begin

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_BOS = "{{ bos_token }}" + PLAIN


@pytest.mark.parametrize("setting", [None, True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_c103_exactly_one_begin_token_on_every_path(tmp_path, bos, setting):
  options = {} if setting is None else {"add_bos_token": setting}
  begins = bos if setting is None else setting
  hi = (BYTES["h"], BYTES["i"])
  for name, template in (("with", WITH_BOS), ("without", PLAIN)):
    tok = load(
      folder_of(tmp_path / name, bos=bos, chat_template=template, **options)
    )
    expected = (0, *hi) if begins or template == WITH_BOS else hi
    ids, text = tok.prompt_ids((USER,))
    assert ids == expected
    assert text == (BOS if expected[0] == 0 else "") + "hi"
    # Whoever encodes the text of a prompt again gets its ids.
    assert tok.encode(text) == ids
    raw = ((0, *hi), BOS + "hi") if begins else (hi, "hi")
    assert tok.prompt_ids("hi") == raw
    # One that is written out already is not written twice.
    assert tok.prompt_ids(BOS + "hi") == ((0, *hi), BOS + "hi")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_c103_training_evaluation_and_raw_prompts_agree(tmp_path, place):
  # Any token may be the begin token, and the data may hold it already.
  token = tiny_folder.byte_tokenizer().id_to_token(place)
  folder_of(tmp_path, bos_token=token, add_bos_token=True, chat_template=PLAIN)
  tok = load(tmp_path)
  shown = tok.decode((place,), skip_special=False)
  prompts_of = [
    types.Example(prompt=prompt, reference=None)
    for prompt in ("hi", shown + "hi", shown * 3 + "hi", (USER,))
  ]
  source = _Examples(tuple(prompts_of))
  train = prompts.load(source, tok, max_tokens=9, seed=1, epochs=2)
  held = prompts.load(
    source, tok, max_tokens=9, seed=0, epochs=1, shuffle=False
  )
  expected = (place, BYTES["h"], BYTES["i"])
  assert {train[uid].tokens for uid in range(8)} == {expected}
  assert {held[uid].tokens for uid in range(4)} == {expected}
  assert tok.encode(held[0].text) == expected


@dataclasses.dataclass(frozen=True)
class _Examples:
  examples: tuple[types.Example, ...]

  def load(self) -> tuple[types.Example, ...]:
    return self.examples


def test_a_prompt_of_nothing_is_refused(tmp_path):
  with refused("prompt: expected at least one token, got ''"):
    load(folder_of(tmp_path)).prompt_ids("")
  tok = load(folder_of(tmp_path, bos=True))
  assert tok.prompt_ids("") == ((0,), BOS)


# ---------------------------------------------------------------------- end


@pytest.mark.parametrize(
  "generation, expected",
  [
    ({"eos_token_id": [1, 106]}, (2, 1, 106)),
    ({"eos_token_id": [2, 106]}, (2, 106)),
    ({"eos_token_id": 106}, (2, 106)),
    ({"eos_token_id": None}, (2,)),
    ({}, (2,)),
  ],
)
def test_c55_the_stop_set_is_the_union(tmp_path, generation, expected):
  folder_of(tmp_path)
  save(tmp_path, "generation_config.json", generation)
  save(tmp_path, "config.json", {"eos_token_id": 77})
  assert load(tmp_path).eos_ids == expected


def test_c55_without_a_generation_config_the_model_config_counts(tmp_path):
  folder_of(tmp_path)
  assert load(tmp_path).eos_ids == (2,)
  save(tmp_path, "config.json", {"eos_token_id": [7, 2]})
  assert load(tmp_path).eos_ids == (2, 7)
  folder_of(tmp_path, eos_token=None)
  assert load(tmp_path).eos_ids == (7, 2)


def test_the_end_of_turns_in_the_template_ends_completions(tmp_path):
  # Chat templates of base models: the configs know the end of texts alone.
  chat = tiny_folder.CHATML
  folder_of(tmp_path, eos_token=BOS, chat_template=chat)
  assert load(tmp_path).eos_ids == (0, 2)
  save(tmp_path, "generation_config.json", {"eos_token_id": [2, 0]})
  assert load(tmp_path).eos_ids == (0, 2)
  (tmp_path / "generation_config.json").unlink()
  folder_of(tmp_path, eos_token=BOS, chat_template=PLAIN)
  assert load(tmp_path).eos_ids == (0,)


@pytest.mark.parametrize("wrong", ["2", [1, None, "x"], -1, True, 1.5])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, wrong):
  folder_of(tmp_path)
  save(tmp_path, "generation_config.json", {"eos_token_id": wrong})
  with refused("generation_config.json: expected eos_token_id"):
    load(tmp_path)


def test_padding_is_the_tokenizers_own_or_an_end_token(tmp_path):
  assert load(folder_of(tmp_path, pad_token="<|im_start|>")).pad_id == 1
  assert load(folder_of(tmp_path, pad_token="[PAD]")).pad_id == 2
  assert load(folder_of(tmp_path, eos_token=None)).pad_id == 0


def test_special_tokens_are_found_in_folders_of_any_age(tmp_path):
  folder_of(tmp_path, eos_token={"content": "<|im_start|>", "lstrip": False})
  assert load(tmp_path).eos_ids == (1,)
  save(tmp_path, "tokenizer_config.json", {})
  save(tmp_path, "special_tokens_map.json", {"eos_token": "<|im_end|>"})
  assert load(tmp_path).eos_ids == (2,)
  folder_of(tmp_path, eos_token="</s>")
  with refused("eos_token: expected a token of the vocabulary, got '</s>'"):
    load(tmp_path)


def test_c110_an_id_beyond_the_models_table_is_refused(tmp_path):
  tok = load(folder_of(tmp_path))
  tokenizer.check_vocab(tok, 259)
  tokenizer.check_vocab(tok, 264)
  with refused("vocab_size 258, got id 258"):
    tokenizer.check_vocab(tok, 258)
  save(tmp_path, "generation_config.json", {"eos_token_id": 300})
  with refused("vocab_size 264, got id 300"):
    tokenizer.check_vocab(load(tmp_path), 264)


# ----------------------------------------------------------------- template


def render(folder: pathlib.Path, template: object, *messages) -> str:
  tok = load(folder_of(folder, chat_template=template))
  return tok.prompt_ids(tuple(messages) or (USER,))[1]


def test_messages_end_where_the_answer_begins(tmp_path):
  system = {"role": "system", "content": "Be brief."}
  assert render(tmp_path, tiny_folder.CHATML, system, USER) == (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
  )
  tok = load(tmp_path)
  assert tok.has_chat_template
  assert tok.prompt_ids((USER,))[0][:2] == (1, BYTES["u"])


def test_a_template_may_be_text_a_list_or_a_file(tmp_path):
  tools = {"name": "tool_use", "template": "tools"}
  both = [tools, {"name": "default", "template": PLAIN + "!"}]
  assert render(tmp_path, both) == "hi!"
  with refused(r"called default, got \['tool_use'\]"):
    render(tmp_path, [tools])
  (tmp_path / "chat_template.jinja").write_text("file:" + PLAIN)
  assert render(tmp_path, PLAIN) == "file:hi"


def test_templates_have_what_those_of_transformers_have(tmp_path):
  date = "{{ strftime_now('%Y')|length }}"
  assert render(tmp_path, date) == "4"
  assert render(tmp_path, "{{ {'b': '<é>'}|tojson }}") == '{"b": "<é>"}'
  loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
  assert render(tmp_path, loop + "{% endfor %}") == "01"
  marked = "a{%- generation %} b{% endgeneration -%} c"
  assert render(tmp_path, marked) == "a bc"
  assert render(tmp_path, "{% if tools is none %}x{% endif %}\n  y") == "x  y"
  assert render(tmp_path, "{{ eos_token }}{{ pad_token }}") == "<|im_end|>"


@pytest.mark.parametrize(
  "template",
  [
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
    "{{ absent.name }}",
    "{{ 1 + 'a' }}",
    "{% if %}",
  ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(tmp_path, template):
  with refused("that the chat template takes"):
    render(tmp_path, template)


def test_the_reason_of_a_template_is_passed_on(tmp_path):
  with refused("roles must alternate"):
    render(tmp_path, "{{ raise_exception('roles must alternate') }}")


def test_messages_need_a_template_a_role_and_a_content(tmp_path):
  tok = load(folder_of(tmp_path))
  assert not tok.has_chat_template
  with refused("has no chat template, got 1 messages"):
    tok.prompt_ids((USER,))
  with refused("messages with role and content"):
    render(tmp_path, PLAIN, {"role": "user"})


# --------------------------------------------------------------- characters


def test_characters_have_the_ids_of_their_order():
  tok = tokenizer.characters("0123+= ")
  assert tok.encode("10+2=") == (3, 2, 6, 4, 7)
  assert tok.decode((3, 2, 6, 4, 7, 1, 0)) == "10+2="
  assert (tok.pad_id, tok.eos_ids, tok.vocab_size) == (0, (1,), 9)
  assert tok.prompt_ids("1 ") == ((3, 8), "1 ")
  text = tok.decode((3, 1), skip_special=False)
  assert text == "1<eos>" and tok.encode(text) == (3, 1)


def test_a_character_without_an_id_is_refused():
  tok = tokenizer.characters("ab")
  with refused("expected characters of 'ab', got 'c' in 'abc'"):
    tok.encode("abc")
  for wrong in ("", "aba"):
    with refused("tokenizer.alphabet"):
      tokenizer.characters(wrong)


# ------------------------------------------------------------------- loading


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path):
  with refused("expected a folder with tokenizer.json or a .gguf file"):
    load(tmp_path)
  (tmp_path / "tokenizer.json").write_text('{"model": ')
  with refused("tokenizer.json: expected JSON"):
    load(tmp_path)


def write_gguf(path: pathlib.Path, pre: str, **options) -> str:
  """Writes the vocabulary of the byte tokenizer, with two merges."""
  tokens = sorted(BYTES, key=BYTES.__getitem__)
  tokens += ["in", "Ġin", "12", "<tool>"]
  kinds = [3] * 3 + [1] * (len(tokens) - 4) + [4]
  out = gguf.GGUFWriter(path, "llama")
  out.add_tokenizer_model(options.pop("model", "gpt2"))
  out.add_tokenizer_pre(pre)
  out.add_token_list(tokens)
  out.add_token_types(kinds)
  out.add_token_merges(["i n", "Ġ in", "1 2"])
  out.add_bos_token_id(0)
  out.add_eos_token_id(2)
  out.add_eot_token_id(1)
  for name, value in options.items():
    getattr(out, f"add_{name}")(value)
  out.write_header_to_file()
  out.write_kv_data_to_file()
  out.close()
  return str(path)


@pytest.mark.parametrize(
  "pre, digits, begins",
  [("smollm", 2, False), ("qwen2", 2, False), ("llama-bpe", 1, True)],
)
def test_a_gguf_tokenizer_cuts_text_as_its_model_does(
  tmp_path, pre, digits, begins
):
  tok = tokenizer.load(write_gguf(tmp_path / "t.gguf", pre))
  assert len(tok.encode("12")) == digits
  assert tok.encode(" in") == (260,)
  assert tok.encode("<tool>") == (262,)
  assert tok.decode((262,)) == "<tool>"
  assert tok.decode((260, 1, 2)) == " in"
  assert tok.encode("<|im_end|>") == (2,)
  assert tok.eos_ids == (2, 1) and tok.pad_id == 2
  assert tok.bos_id == (0 if begins else None)
  assert tok.vocab_size == 263 and not tok.has_chat_template
  for text in ("naïve 漢字 🙂", "a\n\n b  c"):
    assert tok.decode(tok.encode(text)) == text


def test_a_gguf_file_says_whether_texts_begin_with_a_token(tmp_path):
  path = write_gguf(tmp_path / "t.gguf", "smollm", add_bos_token=True)
  assert tokenizer.load(path).prompt_ids("x")[0] == (0, BYTES["x"])
  path = write_gguf(tmp_path / "u.gguf", "llama-bpe", add_bos_token=False)
  assert tokenizer.load(path).prompt_ids("x")[0] == (BYTES["x"],)
  named = [
    {"name": "default", "template": WITH_BOS},
    {"name": "tool_use", "template": "tools"},
  ]
  path = write_gguf(tmp_path / "v.gguf", "qwen2", chat_template=named)
  tok = tokenizer.load(path)
  assert tok.prompt_ids((USER,))[0][0] == 0
  assert tok.prompt_ids((USER,), tools=({},))[1] == "tools"


def test_a_gguf_tokenizer_of_another_kind_is_refused(tmp_path):
  with refused("expected byte-level BPE .* got gpt2 cut as falcon"):
    tokenizer.load(write_gguf(tmp_path / "t.gguf", "falcon"))
  with refused("got llama cut as smollm"):
    tokenizer.load(write_gguf(tmp_path / "u.gguf", "smollm", model="llama"))
  (tmp_path / "v.gguf").write_bytes(b"GGUF\x03\x00")
  with refused("expected a whole GGUF file"):
    tokenizer.load(str(tmp_path / "v.gguf"))


@pytest.mark.parametrize(
  "field, value, rule",
  [
    ("ggml.eos_token_id", 10**6, "one of 263 tokens"),
    ("ggml.bos_token_id", -1, "one of 263 tokens"),
    ("ggml.tokens", [1, 2], "a list of str"),
    ("ggml.tokens", "ab", "a list of str"),
    ("ggml.token_type", [1, 1], "a list of int, one a token"),
    ("chat_template", 7, "str"),
    ("ggml.add_bos_token", 7, "bool"),
  ],
)
def test_a_gguf_field_that_cannot_be_is_refused(
  tmp_path, monkeypatch, field, value, rule
):
  path = write_gguf(tmp_path / "t.gguf", "qwen2")
  header = gguf_header.read(path)
  fields = {**header.fields, f"tokenizer.{field}": value}
  changed = dataclasses.replace(header, fields=fields)
  monkeypatch.setattr(gguf_header, "read", lambda path: changed)
  name = field.removeprefix("ggml.")
  with refused(f"expected tokenizer.{name} as {rule}") as caught:
    tokenizer.load(path)
  assert "\n" not in str(caught.value)


def test_gguf_merges_of_unknown_tokens_are_refused(tmp_path, monkeypatch):
  path = write_gguf(tmp_path / "t.gguf", "qwen2")
  header = gguf_header.read(path)
  for merge in ("i q", "in", "i  n", ""):
    fields = {**header.fields, "tokenizer.ggml.merges": ["i n", merge]}
    changed = dataclasses.replace(header, fields=fields)
    monkeypatch.setattr(gguf_header, "read", lambda path, file=changed: file)
    with refused(f"expected pairs of tokens, got {merge!r}"):
      tokenizer.load(path)


def test_a_character_tokenizer_can_be_saved_for_other_programs(tmp_path):
  tok = tokenizer.characters("abc")
  tok.backend.save(str(tmp_path / "tokenizer.json"))
  copy = hf_tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert copy.encode("cab<eos>").ids == [4, 2, 3, 1]
