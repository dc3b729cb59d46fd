"""The prompts of a run and the tokenizer that reads them."""

import dataclasses

from jaxrl_post import types
from jaxrl_post.data import prompts, tokenizer


@dataclasses.dataclass(frozen=True)
class Data:
  """What is asked in training and in evaluation.

  Attributes:
    train: the source of training prompts.
    held_out: the source of evaluation prompts; None goes without.
    tokenizer: a Hugging Face folder or GGUF file; None takes the model's.
    alphabet: instead of a tokenizer file, one token for each character.
    system: a system message put before every prompt.
    max_prompt: longest prompt in tokens; longer ones are dropped at load.
    epochs: passes over the training prompts; None never ends.
  """

  train: prompts.Source
  held_out: prompts.Source | None = None
  tokenizer: str | None = None
  alphabet: str | None = None
  system: str | None = None
  max_prompt: int = 64
  epochs: int | None = None

  def __post_init__(self) -> None:
    if self.max_prompt < 1:
      raise types.InputError(
        f"data.max_prompt: expected >= 1, got {self.max_prompt}. Correct it."
      )
    if self.tokenizer is not None and self.alphabet is not None:
      raise types.InputError(
        "data: expected one of tokenizer and alphabet, got both. Drop one."
      )


@types.host_record
class Dataset:
  """What `load` made of it."""

  tokenizer: tokenizer.Tokenizer
  train: prompts.Prompts
  held_out: prompts.Prompts | None


def load(
  cfg: Data, *, model_path: str | None, vocab_size: int, seed: int
) -> Dataset:
  """Reads tokenizer and prompts; touches no device.

  Args:
    cfg: what to read.
    model_path: whose tokenizer to take by default.
    vocab_size: rows of the model's embedding table.
    seed: of the order of the training prompts.

  Returns:
    The dataset; every id in it is below `vocab_size`.

  Raises:
    InputError: a file is missing or malformed, no tokenizer is given, or it
      has ids that the model lacks.
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
  train = prompts.load(
    cfg.train,
    encoder,
    max_tokens=cfg.max_prompt,
    seed=seed,
    epochs=cfg.epochs,
    system=cfg.system,
  )
  held_out = None
  if cfg.held_out is not None:
    held_out = prompts.load(
      cfg.held_out,
      encoder,
      max_tokens=cfg.max_prompt,
      seed=seed,
      epochs=1,
      shuffle=False,
      system=cfg.system,
    )
  return Dataset(tokenizer=encoder, train=train, held_out=held_out)
