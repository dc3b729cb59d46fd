"""Text to ids and back, and messages to the text a chat model was trained on.

A tokenizer comes from the model's own folder or GGUF file, or is one id a
character. Ids are the truth: text is decoded for people and rewards, and is
never encoded again.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_post import types

try:
  import gguf
except ImportError:  # The extra is not installed; `load` says so.
  gguf = None

PAD, EOS = "<pad>", "<eos>"

# How each `tokenizer.ggml.pre` cuts text before the merges, as in the
# tokenizer.json of the model it is named after.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
  "smollm": None,
  "qwen2": _WORDS.replace("DIGITS", ""),
  "llama-bpe": _WORDS.replace("DIGITS", "{1,3}"),
}


# A special token's name in GGUF, and in templates.
_GGUF_IDS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
  """A model's tokenizer with its chat template.

  Attributes:
    backend: what cuts text into ids.
    pad_id: for places that no mask lets through.
    eos_ids: every id that ends a completion: the tokenizer's own, then those
      of the model's generation config.
    bos_id: the begin token where prompts start with one, else None.
    template: Jinja source that turns messages into text; None without chat.
    names: special tokens by the names that templates use.
    alphabet: the only characters that have ids; None where all have.
  """

  backend: tokenizers.Tokenizer
  pad_id: int
  eos_ids: tuple[int, ...]
  bos_id: int | None = None
  template: str | None = None
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
    self, prompt: str | tuple[Mapping[str, str], ...]
  ) -> tuple[tuple[int, ...], str]:
    """Turns a prompt into what the model is given.

    Args:
      prompt: text, given as it is; or messages with `role` and `content`, put
        through the model's chat template up to where its answer begins.

    Returns:
      The ids and their text: `encode(text)` gives the same ids. Where the
      tokenizer begins texts with a token, exactly one stands at the front,
      whether the template writes it or not.

    Raises:
      InputError: for messages without a template or that the template refuses,
        and for a prompt with nothing in it.
    """
    text = prompt if isinstance(prompt, str) else self._render(prompt)
    ids = self.encode(text)
    if self.bos_id is not None and ids[:1] != (self.bos_id,):
      text = self.names["bos_token"] + text
      ids = (self.bos_id, *ids)
    if not ids:
      raise types.InputError(
        f"prompt: expected at least one token, got {prompt!r}. Remove it from "
        "the data."
      )
    return ids, text

  def _render(self, messages: tuple[Mapping[str, str], ...]) -> str:
    if self.template is None:
      raise types.InputError(
        "prompt: expected text, as this tokenizer has no chat template, got "
        f"{len(messages)} messages. Use prompts of plain text, or a chat model."
      )
    for message in messages:
      if {"role", "content"} - message.keys():
        raise types.InputError(
          f"prompt: expected messages with role and content, got {message!r}. "
          "Correct the data."
        )
    try:
      return _compiled(self.template).render(
        self.names,
        messages=[dict(message) for message in messages],
        add_generation_prompt=True,
        tools=None,
        documents=None,
      )
    except (jinja2.TemplateError, TypeError) as error:
      raise types.InputError(
        f"prompt: expected messages that the chat template takes, got "
        f"{messages!r}: {error}. Correct the data."
      ) from error


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
  # Jinja's own filter escapes for HTML, which no model was trained on.
  return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
  """Compiles a template, which may come from anywhere, in a sandbox.

  Same environment as in `transformers`, so that templates written for it give
  the same text.
  """
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )
  environment.filters["tojson"] = _tojson
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = _strftime_now
  # Marks around the assistant's words: blocks that change nothing here.
  source = re.sub(
    r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source
  )
  source = re.sub(
    r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source
  )
  return environment.from_string(source)


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


def _template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
  file = folder / "chat_template.jinja"
  if file.is_file():
    return file.read_text(encoding="utf-8")
  found = settings.get("chat_template")
  if not isinstance(found, list):
    return found
  templates = {entry["name"]: entry["template"] for entry in found}
  if "default" not in templates:
    raise types.InputError(
      f"{folder}/tokenizer_config.json: expected a chat template called "
      f"default, got {sorted(templates)}. Put the one to use into "
      "chat_template.jinja."
    )
  return templates["default"]


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
  backend = tokenizers.Tokenizer.from_file(str(file))
  # Files saved while training keep a length that prompts would be cut to.
  backend.no_truncation()
  backend.no_padding()
  settings = _json(folder / "tokenizer_config.json")
  names = _names(folder, settings)
  bos = _id_of(backend, names, "bos_token")
  adds_bos = settings.get("add_bos_token")
  if adds_bos is None:
    adds_bos = bos is not None and backend.encode("").ids[:1] == [bos]
  eos = _id_of(backend, names, "eos_token")
  ends = (() if eos is None else (eos,)) + _end_ids(folder)
  # A padding token that the vocabulary lacks is one the model never had.
  pad = backend.token_to_id(names.get("pad_token", ""))
  return Tokenizer(
    backend=backend,
    pad_id=next(i for i in (pad, *ends, 0) if i is not None),
    eos_ids=tuple(dict.fromkeys(ends)),
    bos_id=bos if adds_bos else None,
    template=_template(folder, settings),
    names=names,
  )


# -------------------------------------------------------------------- GGUF


def _read_metadata(path: str) -> dict[str, Any]:
  if gguf is None:
    raise types.InputError(
      f"{path}: expected the package gguf to read it, got none. Run pip "
      "install 'jaxrl_post[gguf]'."
    )
  try:
    fields = gguf.GGUFReader(path).fields
  except (ValueError, IndexError, KeyError, OSError) as error:
    raise types.InputError(
      f"{path}: expected a whole GGUF file, got {error}. Fetch it again."
    ) from error
  head = "tokenizer."
  return {
    name.removeprefix(head).removeprefix("ggml."): field.contents()
    for name, field in fields.items()
    if name.startswith(head)
  }


def _backend(path: str, fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Builds byte-level BPE from a GGUF file's vocabulary and merges."""
  pre = fields.get("pre")
  if fields.get("model") != "gpt2" or pre not in _SPLITS:
    raise types.InputError(
      f"{path}: expected byte-level BPE cut as one of {', '.join(_SPLITS)}, "
      f"got {fields.get('model')} cut as {pre}. Use the model's Hugging Face "
      "folder."
    )
  tokens: list[str] = fields["tokens"]
  merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
  vocab = {token: i for i, token in enumerate(tokens)}
  backend = tokenizers.Tokenizer(
    models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe")
  )
  split = _SPLITS[pre]
  if split is None:
    first = pre_tokenizers.Digits(individual_digits=True)
  else:
    first = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      first,
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None),
    ]
  )
  if pre == "qwen2":
    backend.normalizer = tokenizers.normalizers.NFC()
  backend.decoder = decoders.ByteLevel()
  # Types of tokens: 3 is control, 4 is defined by the user.
  kinds = list(zip(tokens, fields["token_type"], strict=True))
  plain = functools.partial(tokenizers.AddedToken, normalized=False)
  special = [plain(token, special=True) for token, k in kinds if k == 3]
  backend.add_special_tokens(special)
  backend.add_tokens([plain(token) for token, k in kinds if k == 4])
  return backend


def _from_gguf(path: str) -> Tokenizer:
  fields = _read_metadata(path)
  backend = _backend(path, fields)
  ids = {name: fields.get(f"{name}_token_id") for name in _GGUF_IDS}
  names = {
    f"{_GGUF_IDS[name]}_token": fields["tokens"][i]
    for name, i in ids.items()
    if i is not None
  }
  ends = tuple(
    fields[name]
    for name in ("eos_token_id", "eot_token_id", "eom_token_id")
    if name in fields
  )
  adds_bos = fields.get("add_bos_token", fields["pre"] == "llama-bpe")
  pad = ids["padding"]
  return Tokenizer(
    backend=backend,
    pad_id=next(i for i in (pad, *ends, 0) if i is not None),
    eos_ids=tuple(dict.fromkeys(ends)),
    bos_id=ids["bos"] if adds_bos else None,
    template=fields.get("chat_template"),
    names=names,
  )
