"""Text to ids and back, and messages to the text a chat model was trained on.

A tokenizer comes from the model's own folder or GGUF file, or is one id a
character. Ids are the truth: text is decoded for people and rewards, and is
never encoded again.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models

from jaxrl_post import types
from jaxrl_post.data import gguf_vocab
from jaxrl_post.data import template as templates

PAD, EOS = "<pad>", "<eos>"

# A special token's name in GGUF, and in templates.
_GGUF_IDS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_GGUF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

# What ends a turn, of which not every generation config tells.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
  """A model's tokenizer with its chat template.

  Attributes:
    backend: what cuts text into ids.
    pad_id: for places that no mask lets through.
    eos_ids: every id that ends a completion: the tokenizer's own, those of the
      model's generation config, and that which ends turns in the template.
    bos_id: the begin token where prompts start with one, else None.
    template: Jinja source that turns messages into text; None without chat.
    tool_template: the one for conversations with tools, if it is another.
    names: special tokens by the names that templates use.
    alphabet: the only characters that have ids; None where all have.
  """

  backend: tokenizers.Tokenizer
  pad_id: int
  eos_ids: tuple[int, ...]
  bos_id: int | None = None
  template: str | None = None
  tool_template: str | None = None
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  alphabet: frozenset[str] | None = None

  @functools.cached_property
  def vocab_size(self) -> int:
    """The largest id, plus 1."""
    return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

  @functools.cached_property
  def digest(self) -> str:
    """A SHA-256 that tells tokenizers which read or end a text differently."""
    text = f"{self.backend.to_str()}{self.eos_ids}{self.bos_id}"
    return hashlib.sha256(text.encode()).hexdigest()

  @property
  def has_chat_template(self) -> bool:
    """Whether a prompt may be messages."""
    return self.template is not None

  def encode(self, text: str) -> tuple[int, ...]:
    """Turns text into ids as it stands: adds nothing, cuts nothing off.

    Raises:
      InputError: naming a character that a character tokenizer does not have.
    """
    if self.alphabet is not None:
      plain = text.replace(PAD, "").replace(EOS, "")
      unknown = sorted(set(plain) - self.alphabet)
      if unknown:
        known = "".join(sorted(self.alphabet))
        raise types.InputError(
          f"tokenizer: expected characters of {known!r}, got {unknown[0]!r} in "
          f"{text!r}. Add it to the alphabet."
        )
    return tuple(self.backend.encode(text, add_special_tokens=False).ids)

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Turns ids into text.

    Args:
      ids: below `vocab_size`.
      skip_special: leave out special tokens and all that end a completion.

    Returns:
      The text. Half a character becomes U+FFFD; nothing raises.
    """
    if skip_special:
      ids = [i for i in ids if i not in self.eos_ids]
    return self.backend.decode(list(ids), skip_special_tokens=skip_special)

  def prompt_ids(
    self,
    prompt: str | Sequence[templates.Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> tuple[tuple[int, ...], str]:
    """Turns a prompt into what the model is given.

    Args:
      prompt: text, given as it is; or messages with `role` and `content`, put
        through the model's chat template up to where its answer begins. Those
        of an assistant may have `tool_calls`.
      tools: JSON schemas of the functions that the model may call, shown to it
        by the template.

    Returns:
      The ids and their text: `encode(text)` gives the same ids. Where the
      tokenizer begins texts with a token, exactly one stands at the front,
      however often the template or the text writes it there.

    Raises:
      InputError: for messages without a template or that the template refuses,
        for tools without messages, and for a prompt with nothing in it.
    """
    text = prompt if isinstance(prompt, str) else self._render(prompt, tools)
    if tools and isinstance(prompt, str):
      raise types.InputError(
        f"prompt: expected messages, which can show {len(tools)} tools, got "
        f"{prompt[:100]!r}. Give messages, or leave the tools out."
      )
    ids = self.encode(text)
    if self.bos_id is not None:
      begin = self.names["bos_token"]
      while ids[:2] == (self.bos_id, self.bos_id):
        ids, text = ids[1:], text.replace(begin, "", 1)
      if ids[:1] != (self.bos_id,):
        ids, text = (self.bos_id, *ids), begin + text
    if not ids:
      raise types.InputError(
        f"prompt: expected at least one token, got {prompt!r}. Remove it from "
        "the data."
      )
    return ids, text

  def conversation_ids(
    self, messages: Sequence[templates.Message]
  ) -> tuple[int, ...]:
    """Turns a conversation that has ended into ids, for a model that judges it.

    Args:
      messages: with `role` and `content`, the last answer included. Text in
        them that reads as a special token becomes one.

    Returns:
      The ids of the chat template's text, without the beginning of another
      answer; where texts begin with a token, exactly one at the front.

    Raises:
      InputError: the template refuses, or there is none.
    """
    if self.template is None:
      raise types.InputError(
        "conversation: expected a tokenizer with a chat template, got none. "
        "Put chat_template.jinja into its folder."
      )
    text = templates.whole(self.template, messages, names=self.names)
    return self.prompt_ids(text)[0]

  def continuation(
    self,
    messages: Sequence[templates.Message],
    *,
    ended: bool,
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> tuple[int, ...]:
    """Returns the ids between a completion and the next one.

    The conversation goes on as prompt + completion + these ids: tokens that
    were sampled are kept and never rendered or encoded again, whatever the
    template would do to their text (`template.next_turn`).

    Args:
      messages: what came after the completion: the results of tools, or a
        user's words. Text in them that reads as a special token becomes one.
      ended: the completion's last token is an end token; the template's own
        is then left out, whichever of them it was.
      tools: as in `prompt_ids` of this conversation.

    Returns:
      Ids up to where the next answer begins: the rest of the answer's turn
      (with `ended` without its end token), the messages, and the generation
      prompt. No begin token but what the messages hold. Without a template,
      the messages' contents as they stand.

    Raises:
      InputError: for messages that the template refuses, and for a template
        that rewrites earlier turns, begins each turn with the begin token, or
        ends turns with something that is no end token.
    """
    if self.template is None:
      contents: list[Any] = [message.get("content") for message in messages]
      if not all(isinstance(content, str) for content in contents):
        raise types.InputError(
          "messages: expected contents of text, as this tokenizer has no chat "
          f"template, got {contents!r:.200}. Correct the environment."
        )
      return self.encode("".join(contents))
    source = self._source(tools)
    text = templates.next_turn(source, messages, names=self.names, tools=tools)
    ids = self.encode(text)
    begin = self.names.get("bos_token", "") if self.bos_id is not None else ""
    if begin and ids.count(self.bos_id) > repr(messages).count(begin):
      raise types.InputError(
        f"messages: expected a chat template that writes {begin!r} once, got "
        "one that begins every turn with it. Take another template."
      )
    if not ended:
      return ids
    ends = [place for place, i in enumerate(ids) if i in self.eos_ids]
    if not ends or self.decode(ids[: ends[0]]).strip():
      raise types.InputError(
        "messages: expected a chat template whose turns end with one of the "
        f"end tokens {self.eos_ids}, got {text[:40]!r}. Add the turn's end to "
        "eos_token_id of generation_config.json."
      )
    return ids[ends[0] + 1 :]

  def _source(self, tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the template of a conversation that has one."""
    assert self.template is not None
    return (self.tool_template if tools else None) or self.template

  def _render(
    self,
    messages: Sequence[templates.Message],
    tools: Sequence[Mapping[str, Any]],
  ) -> str:
    if self.template is None:
      raise types.InputError(
        "prompt: expected text, as this tokenizer has no chat template, got "
        f"{len(messages)} messages. Use prompts of plain text, or a chat model."
      )
    return templates.messages_to_text(
      self._source(tools), messages, names=self.names, tools=tools
    )


def check_vocab(tokenizer: Tokenizer, model_vocab_size: int) -> None:
  """Refuses a tokenizer with an id that has no row in the model's table.

  Args:
    tokenizer: of the run.
    model_vocab_size: rows of the embedding; more of them than ids is common.

  Raises:
    InputError: with both sizes.
  """
  largest = max(tokenizer.vocab_size - 1, tokenizer.pad_id, *tokenizer.eos_ids)
  if largest >= model_vocab_size:
    raise types.InputError(
      f"tokenizer: expected ids below the model's vocab_size "
      f"{model_vocab_size}, got id {largest}. Use the tokenizer of the model."
    )


def characters(alphabet: str) -> Tokenizer:
  """Makes a tokenizer of one id a character, for models trained from nothing.

  Args:
    alphabet: each character once.

  Returns:
    A tokenizer where 0 is padding, 1 ends a completion, and the characters
    follow in the order of `alphabet`.

  Raises:
    InputError: for an alphabet that is empty or names a character twice.
  """
  if not alphabet or len(set(alphabet)) != len(alphabet):
    raise types.InputError(
      f"tokenizer.alphabet: expected each character once, got {alphabet!r}. "
      "Remove the ones that repeat."
    )
  vocab = {token: i for i, token in enumerate((PAD, EOS, *alphabet))}
  backend = tokenizers.Tokenizer(models.BPE(vocab, []))
  backend.decoder = decoders.Fuse()  # Others put spaces between tokens.
  backend.add_special_tokens([PAD, EOS])
  return Tokenizer(
    backend=backend, pad_id=0, eos_ids=(1,), alphabet=frozenset(alphabet)
  )


def load(path: str) -> Tokenizer:
  """Reads the tokenizer of a model.

  Args:
    path: a Hugging Face folder with tokenizer.json, or a GGUF file.

  Raises:
    InputError: naming the file or field that is missing or not supported.
  """
  place = pathlib.Path(path)
  if place.suffix == ".gguf" and place.is_file():
    return _from_gguf(path)
  return _from_folder(place)


# ------------------------------------------------------------------ folder


def _json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object; a file that is not there is an empty one."""
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise types.InputError(
      f"{path}: expected JSON, got {error}. Fetch the checkpoint again."
    ) from error
  if not isinstance(value, dict):
    raise types.InputError(
      f"{path}: expected a JSON object, got {type(value).__name__}. Fetch the "
      "checkpoint again."
    )
  return value


def _names(folder: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, str]:
  """Returns the special tokens by name, from a folder of any age."""
  fields = {**_json(folder / "special_tokens_map.json"), **settings}
  names = {}
  for name, token in fields.items():
    content = token.get("content") if isinstance(token, Mapping) else token
    if name.endswith("_token") and isinstance(content, str):
      names[name] = content
  return names


def _end_ids(folder: pathlib.Path) -> tuple[int, ...]:
  """Returns the end tokens of the model: a list, one or none in the file."""
  file = folder / "generation_config.json"
  if not file.is_file():
    file = folder / "config.json"
  found = _json(file).get("eos_token_id")
  ids = found if isinstance(found, list) else [found]
  ids = [i for i in ids if i is not None]
  if not all(type(i) is int and i >= 0 for i in ids):
    raise types.InputError(
      f"{file}: expected eos_token_id as an id, a list of ids or none, got "
      f"{found!r}. Correct the file."
    )
  return tuple(ids)


def _turn_ends(
  backend: tokenizers.Tokenizer, *sources: str | None
) -> tuple[int, ...]:
  """Returns the tokens that end a turn in templates, by their known names."""
  names = [
    name for name in _TURN_ENDS if any(name in (text or "") for text in sources)
  ]
  ids = (backend.token_to_id(name) for name in names)
  return tuple(i for i in ids if i is not None)


def _id_of(
  backend: tokenizers.Tokenizer, names: Mapping[str, str], name: str
) -> int | None:
  token = names.get(name)
  if token is None:
    return None
  found = backend.token_to_id(token)
  if found is None:
    raise types.InputError(
      f"tokenizer.{name}: expected a token of the vocabulary, got {token!r}. "
      "Correct tokenizer_config.json."
    )
  return found


def _from_folder(folder: pathlib.Path) -> Tokenizer:
  file = folder / "tokenizer.json"
  if not _json(file):
    raise types.InputError(
      f"tokenizer.path: expected a folder with tokenizer.json or a .gguf file, "
      f"got {str(folder)!r}. Save the tokenizer with transformers' "
      "save_pretrained."
    )
  try:
    backend = tokenizers.Tokenizer.from_file(str(file))
  except BaseException as error:  # Purpose: it raises Exception itself.
    if type(error) is not Exception:
      raise
    raise types.InputError(
      f"{file}: expected a tokenizer, got one that cannot be read ({error}). "
      "Save it anew, or update the package tokenizers."
    ) from error
  # Files saved while training keep a length that prompts would be cut to.
  backend.no_truncation()
  backend.no_padding()
  settings = {
    **_json(folder / "chat_template.json"),
    **_json(folder / "tokenizer_config.json"),
  }
  chat, with_tools = templates.find(folder, settings)
  names = _names(folder, settings)
  bos = _id_of(backend, names, "bos_token")
  adds_bos = settings.get("add_bos_token")
  if adds_bos is None:
    adds_bos = bos is not None and backend.encode("").ids[:1] == [bos]
  eos = _id_of(backend, names, "eos_token")
  ends = (
    *(() if eos is None else (eos,)),
    *_end_ids(folder),
    *_turn_ends(backend, chat, with_tools),
  )
  # A padding token that the vocabulary lacks is one the model never had.
  pad = backend.token_to_id(names.get("pad_token", ""))
  return Tokenizer(
    backend=backend,
    pad_id=next(i for i in (pad, *ends, 0) if i is not None),
    eos_ids=tuple(dict.fromkeys(ends)),
    bos_id=bos if adds_bos else None,
    template=chat,
    tool_template=with_tools,
    names=names,
  )


# -------------------------------------------------------------------- GGUF


def _from_gguf(path: str) -> Tokenizer:
  backend, fields = gguf_vocab.read(path)
  ids = {name: fields.get(f"{name}_token_id") for name in _GGUF_IDS}
  names = {
    f"{_GGUF_IDS[name]}_token": fields["tokens"][i]
    for name, i in ids.items()
    if i is not None
  }
  chat, with_tools = (
    fields.get(name) for name in ("chat_template", "chat_template.tool_use")
  )
  ends = (
    *(fields[name] for name in _GGUF_ENDS if name in fields),
    *_turn_ends(backend, chat, with_tools),
  )
  adds_bos = fields.get("add_bos_token", fields["pre"] == "llama-bpe")
  pad = ids["padding"]
  return Tokenizer(
    backend=backend,
    pad_id=next(i for i in (pad, *ends, 0) if i is not None),
    eos_ids=tuple(dict.fromkeys(ends)),
    bos_id=ids["bos"] if adds_bos else None,
    template=chat,
    tool_template=with_tools,
    names=names,
  )
