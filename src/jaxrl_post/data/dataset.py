"""The prompts of a run and the tokenizer that reads them."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from jaxrl_post import types
from jaxrl_post.data import curriculum as curricula
from jaxrl_post.data import difficulty, prompts, sources, tokenizer

_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Sets:
  """Several sets of evaluation prompts, each with metrics of its own.

  Attributes:
    names: of the sets; letters, digits, `.`, `-` and `_`.
    sources: of each, in the same order.
  """

  names: tuple[str, ...]
  sources: tuple[sources.Source, ...]

  def __post_init__(self) -> None:
    names = self.names
    for holds, rule in (
      (len(names) == len(self.sources) > 0, "a name for each of the sources"),
      (len(set(names)) == len(names), "names that differ"),
      (all(map(_NAME.fullmatch, names)), "letters, digits, '.', '-' and '_'"),
    ):
      if not holds:
        raise types.InputError(
          f"data.held_out.names: expected {rule}, got {names} for "
          f"{len(self.sources)} sources. Correct the names."
        )


@dataclasses.dataclass(frozen=True)
class Data:
  """What is asked in training and in evaluation.

  Attributes:
    train: the source of training prompts, or a `mixture.Mixture` of several.
    held_out: the source of evaluation prompts, or several with a name each;
      None goes without.
    tokenizer: a Hugging Face folder or GGUF file; None takes the model's.
    alphabet: instead of a tokenizer file, one token for each character.
    system: a system message put before every prompt.
    max_prompt: longest prompt in tokens; longer ones are dropped at load.
    epochs: passes over the training prompts; None never ends.
    pool: passes over the draws of prompts that are always or never solved; None
      asks them all.
    curriculum: asks each task of a `curriculum.Tasks` at a level that follows
      what was solved; None asks all levels alike.
  """

  train: sources.Source
  held_out: sources.Source | Sets | None = None
  tokenizer: str | None = None
  alphabet: str | None = None
  system: str | None = None
  max_prompt: int = 64
  epochs: int | None = None
  pool: difficulty.Pool | None = None
  curriculum: curricula.Curriculum | None = None

  def __post_init__(self) -> None:
    several = sources.Source | Sets | None
    for name, kinds in (("train", sources.Source), ("held_out", several)):
      if not isinstance(getattr(self, name), kinds):
        raise types.InputError(
          f"data.{name}: expected a source, such as sources.Jsonl(path), got "
          f"{getattr(self, name)!r:.100}. Correct the experiment."
        )
    if self.max_prompt < 1:
      raise types.InputError(
        f"data.max_prompt: expected >= 1, got {self.max_prompt}. Correct it."
      )
    if self.tokenizer is not None and self.alphabet is not None:
      raise types.InputError(
        "data: expected one of tokenizer and alphabet, got both. Drop one."
      )
    weighted = isinstance(self.train, curricula.Tasks) and self.train.weights
    if weighted and self.curriculum is None:
      raise types.InputError(
        "data.train.weights: expected None without data.curriculum, which "
        f"alone goes by them, got {weighted}. Leave one out, or set the other."
      )
    if self.curriculum is not None:
      self._check_levels()
    least = 0 if self.pool is None else self.pool.results
    if self.epochs is not None and self.epochs <= least:
      raise types.InputError(
        f"data.epochs: expected more than the {least} of data.pool.results, or "
        f"none, got {self.epochs}: no prompt would be passed over. Leave the "
        "pool out, or raise it."
      )

  def _check_levels(self) -> None:
    if not isinstance(self.train, curricula.Tasks):
      raise types.InputError(
        "data.curriculum: expected data.train to be a curriculum.Tasks, whose "
        f"tasks have levels, got {type(self.train).__name__}. Leave it out."
      )
    if self.pool is not None:
      raise types.InputError(
        "data.curriculum: expected no data.pool beside it, which would pass "
        f"over draws of a level, got {self.pool}. Choose one."
      )


@types.host_record
class Dataset:
  """What `load` made of it.

  Attributes:
    tokenizer: reads and writes the text.
    train: training prompts.
    held_out: evaluation prompts by the name of their set; that of a single
      source is empty.
    tools: JSON schemas of functions that prompts of messages speak of.
  """

  tokenizer: tokenizer.Tokenizer
  train: prompts.Prompts
  held_out: Mapping[str, prompts.Prompts]
  tools: Sequence[Mapping[str, Any]] = ()

  def prompt_ids(
    self, prompt: str | tuple[Mapping[str, str], ...]
  ) -> tuple[tuple[int, ...], str]:
    """Returns the ids and the text of a prompt, as `load` has them."""
    return _Told(self.tokenizer, self.tools).prompt_ids(prompt)


def tokenizer_of(
  cfg: Data, *, model_path: str | None, vocab_size: int
) -> tokenizer.Tokenizer:
  """Reads or makes the tokenizer of a run.

  Args:
    cfg: says which one.
    model_path: whose tokenizer to take by default.
    vocab_size: rows of the model's embedding table.

  Returns:
    The tokenizer; every id of it is below `vocab_size`.

  Raises:
    InputError: there is none, it is malformed, or has ids that the model lacks.
  """
  path = cfg.tokenizer or model_path
  if cfg.alphabet is not None:
    encoder = tokenizer.characters(cfg.alphabet)
  elif path is not None:
    encoder = tokenizer.load(path)
  else:
    raise types.InputError(
      "data.tokenizer: expected a folder, a GGUF file or data.alphabet for a "
      "model that is drawn at random, got none. Set one of them."
    )
  tokenizer.check_vocab(encoder, vocab_size)
  return encoder


def load(
  cfg: Data,
  *,
  model_path: str | None,
  vocab_size: int,
  seed: int,
  tools: Sequence[Mapping[str, Any]] = (),
) -> Dataset:
  """Reads tokenizer and prompts; touches no device.

  Args:
    cfg: what to read.
    model_path: whose tokenizer to take by default.
    vocab_size: rows of the model's embedding table.
    seed: of the order of the training prompts.
    tools: JSON schemas of functions that the chat template shows to the model
      in every prompt of messages.

  Returns:
    The dataset; every id in it is below `vocab_size`.

  Raises:
    InputError: a file is missing or malformed, no tokenizer is given, or it
      has ids that the model lacks.
  """
  encoder = tokenizer_of(cfg, model_path=model_path, vocab_size=vocab_size)
  reader = _Told(encoder, tools)
  train = prompts.load(
    cfg.train,
    reader,
    max_tokens=cfg.max_prompt,
    seed=seed,
    epochs=cfg.epochs,
    system=cfg.system,
    pool=cfg.pool,
    curriculum=cfg.curriculum,
  )
  held_out = {
    name: prompts.load(
      source,
      reader,
      max_tokens=cfg.max_prompt,
      seed=seed,
      epochs=1,
      shuffle=False,
      system=cfg.system,
    )
    for name, source in _sets(cfg.held_out).items()
  }
  return Dataset(tokenizer=encoder, train=train, held_out=held_out, tools=tools)


def _sets(
  held_out: sources.Source | Sets | None,
) -> Mapping[str, sources.Source]:
  if held_out is None:
    return {}
  if isinstance(held_out, Sets):
    return dict(zip(held_out.names, held_out.sources, strict=True))
  return {"": held_out}


def leaked(data: Dataset) -> int:
  """Counts held-out prompts that are training prompts, too.

  Returns:
    How many items of all sets of `data.held_out` have the ids of one of
    `data.train`, whatever their references.
  """
  train = {item.tokens for item in data.train.items}
  held_out = [x for asked in data.held_out.values() for x in asked.items]
  return sum(item.tokens in train for item in held_out)


def warn_leaked(data: Dataset) -> None:
  """Says so where the policy is tested on what it is trained on."""
  count = leaked(data)
  if count:
    logging.warning(
      "data: %d of %d held-out prompts are training prompts, too: eval/* will "
      "count what was learnt by heart. Take them out of one of the two.",
      count,
      sum(asked.size for asked in data.held_out.values()),
    )


@dataclasses.dataclass(frozen=True)
class _Told:
  """A tokenizer whose prompts of messages speak of tools."""

  tokenizer: tokenizer.Tokenizer
  tools: Sequence[Mapping[str, Any]]

  def prompt_ids(
    self, prompt: str | tuple[Mapping[str, str], ...]
  ) -> tuple[tuple[int, ...], str]:
    tools = () if isinstance(prompt, str) else self.tools
    return self.tokenizer.prompt_ids(prompt, tools=tools)
