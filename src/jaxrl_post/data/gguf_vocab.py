"""The tokenizer in a GGUF file: what cuts text into ids, and its settings."""

import functools
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_post import gguf_header, types

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

# Fields that are lists, and of what; a file must have them.
_LISTS = {"tokens": str, "merges": str, "token_type": int}
_PLAIN = {
  "add_bos_token": bool,
  "chat_template": str,
  "chat_template.tool_use": str,
  "model": str,
  "pre": str,
}


def read(path: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """Reads byte-level BPE from a GGUF file.

  Args:
    path: of the file; needs no package.

  Returns:
    The tokenizer, and the fields of the file whose names begin with
    "tokenizer.", without that and "ggml.": ids are places of `tokens`, and
    templates are text.

  Raises:
    InputError: in one line, for a file that is cut off, a field that cannot
      be, and a tokenizer of another kind.
  """
  try:
    header = gguf_header.read(path)
  except (ValueError, OSError) as error:
    raise types.InputError(
      f"{path}: expected a whole GGUF file, got {error}. Fetch it again."
    ) from error
  head = "tokenizer."
  fields = {
    name.removeprefix(head).removeprefix("ggml."): value
    for name, value in header.fields.items()
    if name.startswith(head)
  }
  pre = fields.get("pre")
  if fields.get("model") != "gpt2" or pre not in tuple(_SPLITS):
    raise types.InputError(
      f"{path}: expected byte-level BPE cut as one of {', '.join(_SPLITS)}, "
      f"got {fields.get('model')} cut as {pre}. Use the model's Hugging Face "
      "folder."
    )
  for name in (*_LISTS, *fields):
    rule = _broken(name, fields)
    if rule is not None:
      raise types.InputError(
        f"{path}: expected tokenizer.{name} as {rule}, got "
        f"{repr(fields.get(name))[:60]}. Fetch it again."
      )
  return _backend(fields), fields


def _broken(name: str, fields: Mapping[str, Any]) -> str | None:
  """Returns the rule that a field breaks."""
  value, tokens = fields.get(name), fields.get("tokens")
  size = len(tokens) if isinstance(tokens, list) else 0
  if name in _LISTS:
    kind = _LISTS[name]
    right = isinstance(value, list) and all(type(x) is kind for x in value)
    if isinstance(value, list) and name == "token_type":
      right = right and len(value) == size
    return None if right else f"a list of {kind.__name__}, one a token"
  if name.endswith("_token_id"):
    right = type(value) is int and 0 <= value < size
    return None if right else f"one of {size} tokens"
  if name in _PLAIN and not isinstance(value, _PLAIN[name]):
    return _PLAIN[name].__name__
  return None


def _backend(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Builds byte-level BPE from a vocabulary and merges."""
  pre, tokens = fields["pre"], fields["tokens"]
  vocab = {token: i for i, token in enumerate(tokens)}
  pairs = [merge.partition(" ") for merge in fields["merges"]]
  wrong = [a + s + b for a, s, b in pairs if not {a, b, a + b} <= vocab.keys()]
  if wrong:
    raise types.InputError(
      "tokenizer.ggml.merges: expected pairs of tokens, got "
      f"{wrong[0][:60]!r}. Fetch the file again."
    )
  merges = [(a, b) for a, _, b in pairs]
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
