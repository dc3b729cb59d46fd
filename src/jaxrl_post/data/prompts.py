"""Examples to prompts: token ids, in the order of the run.

A prompt's identity is its draw (`uid`), not its text or its place in the data:
the same item drawn twice is two prompts.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
from absl import logging

from jaxrl_post import types
from jaxrl_post.data import curriculum as curricula
from jaxrl_post.data import difficulty, mixture, sources


@runtime_checkable
class Tokenizer(Protocol):
  """The part of a tokenizer that prompts need."""

  def prompt_ids(
    self, prompt: str | tuple[Mapping[str, str], ...]
  ) -> tuple[list[int] | tuple[int, ...], str]:
    """Returns the ids of a prompt and the text that they stand for."""
    ...


@types.host_record
class Prompts:
  """The prompts of a run by uid; built by `load`.

  Attributes:
    items: each kept example once; its uid here is its place among them.
    order: place of the item that the uid-th draw takes.
    dropped: examples left out because they were too long.
    digest: SHA-256 over ids and references; tells other data on resume.
    sizes: items of each source of a mixture, or of each level of each task, in
      the order of `items`; of one source all of them.
    pool: when an item's draws are passed over; None never.
    ladder: the levels of tasks; None without a curriculum.
  """

  items: tuple[types.Prompt, ...]
  order: grain.MapDataset | mixture.Order
  dropped: int
  digest: str
  sizes: tuple[int, ...]
  pool: difficulty.Pool | None = None
  ladder: curricula.Ladder | None = None

  @property
  def size(self) -> int:
    """The number of items kept, which is the length of an epoch."""
    return len(self.items)

  def __len__(self) -> int:
    """Counts the draws of all epochs; `sys.maxsize` when they never end."""
    return len(self.order)

  def __getitem__(self, uid: int) -> types.Prompt:
    """Returns the uid-th draw; any uid, in any order.

    Raises:
      IndexError: outside [0, len).
    """
    return dataclasses.replace(self.items[self.place(uid)], uid=uid)

  def place(self, uid: int) -> int:
    """Returns the place in `items` of the uid-th draw.

    Raises:
      IndexError: outside [0, len).
    """
    if not 0 <= uid < len(self):
      raise IndexError(f"uid {uid} of {len(self)} draws")
    place: Any = self.order[uid]  # grain's elements have no type
    return place


def load(
  source: sources.Source,
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  seed: int,
  epochs: int | None,
  shuffle: bool = True,
  system: str | None = None,
  pool: difficulty.Pool | None = None,
  curriculum: curricula.Curriculum | None = None,
) -> Prompts:
  """Reads a source, encodes it and sets the order of the run.

  Args:
    source: the examples.
    tokenizer: encodes them.
    max_tokens: longest prompt; longer ones are dropped whole, never cut, and
      counted in one line of the log.
    seed: of the order; not negative.
    epochs: passes over the data; None never ends.
    shuffle: takes another permutation each epoch, and from a mixture by its
      weights; False keeps the source's order, for evaluation.
    system: a system message put before every prompt.
    pool: when an item's draws are passed over; kept for who draws.
    curriculum: when the tasks of a `curriculum.Tasks` change their level; the
      draws are then those of `curriculum.ladder`.

  Returns:
    Prompts in which each epoch holds every kept item exactly once; of a mixture
    see `mixture.order`. Equal seeds give equal orders, and uids 0, 1, ... name
    the draws.

  Raises:
    types.InputError: for a setting out of range, a prompt without tokens, or
      when no prompt of a source is short enough.
  """
  _check(max_tokens=max_tokens, seed=seed, epochs=epochs)
  names, parts = _parts(source, curriculum)
  encoded: list[types.Prompt] = []
  sizes = []
  for part in parts:
    first = len(encoded)
    encoded += [
      _encode(e, i, tokenizer, system) for i, e in enumerate(part, first)
    ]
    sizes.append(_count_kept(encoded[first:], max_tokens))
  kept = tuple(item for item in encoded if len(item.tokens) <= max_tokens)
  dropped = len(encoded) - len(kept)
  if dropped:
    logging.warning(
      "data: %d of %d prompts dropped, longer than max_prompt=%d.",
      dropped,
      len(encoded),
      max_tokens,
    )
  ladder = None
  if curriculum is not None and isinstance(source, curricula.Tasks):
    ladder = curricula.ladder(curriculum, names, source.weights)
    order = mixture.laid_out(ladder.pattern, sizes, seed=seed, epochs=epochs)
  elif shuffle and isinstance(source, mixture.Mixture):
    order = mixture.order(sizes, source.weights, seed=seed, epochs=epochs)
  else:
    order = grain.MapDataset.source(range(len(kept))).seed(seed)
    order = (order.shuffle() if shuffle else order).repeat(epochs)
  return Prompts(
    items=kept,
    order=order,
    dropped=dropped,
    digest=_digest(kept, sizes),
    sizes=tuple(sizes),
    pool=pool,
    ladder=ladder,
  )


def _parts(
  source: sources.Source, curriculum: curricula.Curriculum | None
) -> tuple[Sequence[str], Sequence[Sequence[types.Example]]]:
  """Returns examples by source, or by level with the task of each."""
  if curriculum is not None and isinstance(source, curricula.Tasks):
    names, parts = zip(*source.parts(), strict=True)
    return names, parts
  if isinstance(source, mixture.Mixture):
    return (), source.parts()
  return (), (source.load(),)


def _count_kept(encoded: Sequence[types.Prompt], max_tokens: int) -> int:
  """Counts what of a source is short enough; refuses to go without any."""
  lengths = [len(item.tokens) for item in encoded]
  kept = sum(length <= max_tokens for length in lengths)
  if not kept:
    raise types.InputError(
      f"data.max_prompt: expected a prompt of at most {max_tokens} tokens, got "
      f"{len(lengths)} examples, the shortest of {min(lengths, default=0)}. "
      "Raise the limit."
    )
  return kept


def _check(*, max_tokens: int, seed: int, epochs: int | None) -> None:
  rules = (
    (max_tokens >= 1, "max_prompt", ">= 1", max_tokens),
    (seed >= 0, "seed", ">= 0", seed),
    (epochs is None or epochs >= 1, "epochs", ">= 1 or None", epochs),
  )
  for holds, name, rule, value in rules:
    if not holds:
      raise types.InputError(
        f"data.{name}: expected {rule}, got {value}. Correct the value."
      )


def _encode(
  example: types.Example, index: int, tokenizer: Tokenizer, system: str | None
) -> types.Prompt:
  prompt = with_system(example.prompt, index, system)
  ids, text = tokenizer.prompt_ids(prompt)
  if not ids:
    raise types.InputError(
      f"data: expected a prompt with tokens, got none in example {index} "
      f"({prompt!r}). Remove the example."
    )
  if isinstance(prompt, str):
    prompt = ({"role": "user", "content": prompt},)
  return types.Prompt(
    uid=index,
    tokens=tuple(ids),
    text=text,
    reference=example.reference,
    messages=tuple(prompt),
  )


def with_system(
  prompt: str | tuple[Mapping[str, str], ...], index: int, system: str | None
) -> str | tuple[Mapping[str, str], ...]:
  """Returns what the tokenizer gets of an example.

  Args:
    prompt: of the example.
    index: its number, for messages.
    system: a message put before it; None leaves the prompt as it is.

  Raises:
    types.InputError: it has a system message of its own.
  """
  if system is None:
    return prompt
  if isinstance(prompt, str):
    prompt = ({"role": "user", "content": prompt},)
  if prompt and prompt[0]["role"] == "system":
    raise types.InputError(
      f"data.system: expected prompts without a system message, got one in "
      f"example {index}. Leave data.system out, or take it from the data."
    )
  return ({"role": "system", "content": system}, *prompt)


def _digest(items: tuple[types.Prompt, ...], sizes: Sequence[int]) -> str:
  digest = hashlib.sha256()
  for item in items:
    digest.update(_canonical((item.tokens, item.reference)).encode())
  if len(sizes) > 1:  # An item of another source comes at another time.
    digest.update(_canonical(sizes).encode())
  return digest.hexdigest()


def _canonical(value: Any) -> str:
  """Writes a value in a way that is the same in every process."""
  if isinstance(value, Mapping):
    pairs = (f"{_canonical(k)}:{_canonical(v)}" for k, v in value.items())
    return "{" + ",".join(sorted(pairs)) + "}"
  if isinstance(value, list | tuple):
    return "[" + ",".join(map(_canonical, value)) + "]"
  if isinstance(value, set | frozenset):
    return "<" + ",".join(sorted(map(_canonical, value))) + ">"
  if type(value).__repr__ is object.__repr__:
    return type(value).__qualname__  # the default repr holds an address
  return repr(value)
