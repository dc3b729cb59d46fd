"""A reward model: conversations to numbers, on devices that do not train.

It reads a conversation as its own chat template writes it and its own tokenizer
cuts it, whatever the policy's are. A program reads a fixed number of
conversations of a fixed length, one of a few; which one it is depends on the
conversation alone, so that its neighbours do not change its number.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxrl_post import types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.models import classifier as classifiers
from jaxrl_post.models import decoder as decoders
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import programs
from jaxrl_post.rewards import model as settings

# So many programs at most, and none for shorter conversations than these.
_LENGTHS, _SHORTEST = 4, 64


@dataclasses.dataclass(frozen=True)
class Source:
  """Which model it is, before any device is touched.

  Attributes:
    cfg: its settings.
    classifier: its shape.
    tokenizer: its own.
  """

  cfg: settings.Model
  classifier: classifiers.Classifier
  tokenizer: tokenizers.Tokenizer

  def conversation(self, prompt: types.Prompt, text: str) -> tuple[int, ...]:
    """Returns what the model is given of a prompt and its answer.

    Args:
      prompt: its messages are read, and not its tokens.
      text: of the answer.

    Raises:
      InputError: its chat template refuses them.
    """
    answer = {"role": "assistant", "content": text}
    return self.tokenizer.conversation_ids((*prompt.messages, answer))


@dataclasses.dataclass(frozen=True)
class Placed:
  """The model on its devices.

  Attributes:
    lengths: of conversations that programs read, in tokens, ascending.
    score: launches the program for a length on at most `cfg.batch`
      conversations that are no longer, and returns a number of each row, those
      of the conversations first; on devices, so that nobody waits for it.
  """

  lengths: tuple[int, ...]
  score: Callable[[Sequence[Sequence[int]], int], Float[jax.Array, " batch"]]


def read(
  cfg: settings.Model | None,
  placement: meshes.Placement,
  asked: Sequence[types.Prompt],
  *,
  talks: bool,
) -> Source | None:
  """Reads what a reward model is, but no weights.

  Args:
    cfg: its settings; None for a run without one.
    placement: of the run.
    asked: prompts that its chat template must take.
    talks: whether the policy talks to an environment.

  Returns:
    The model; None without one.

  Raises:
    InputError: it is none, or one that the run has no place for.
  """
  if cfg is None:
    return None
  rules = (
    (placement.mode != "roles", "placement.mode colocated or split", "roles"),
    (not talks, "a run without env, whose turns it would not see", "one"),
  )
  for holds, rule, value in rules:
    if not holds:
      raise types.InputError(
        f"rewards.model: expected {rule}, got {value}. Leave one of them out."
      )
  classifier = classifiers.read_config(cfg.path)
  most = classifier.shape.max_positions
  if cfg.max_tokens > most:
    raise types.InputError(
      f"rewards.model.max_tokens: expected at most {most} positions of the "
      f"model, got {cfg.max_tokens}. Lower it."
    )
  tokenizer = tokenizers.load(cfg.path)
  tokenizers.check_vocab(tokenizer, classifier.shape.vocab_size)
  source = Source(cfg, classifier, tokenizer)
  for prompt in asked:
    source.conversation(prompt, "An answer.")
  return source


def check(
  cfg: settings.Model | None,
  placement: meshes.Placement,
  shares: meshes.Shares,
  *,
  processes: int,
) -> None:
  """Checks a reward model against a number of devices.

  Args:
    cfg: its settings; None for a run without one.
    placement: of the run.
    shares: devices of each side.
    processes: of the run.

  Raises:
    InputError: it does not fit; names both numbers.
  """
  if cfg is None:
    return
  if processes > 1:
    raise types.InputError(
      f"rewards.model: expected one process, got {processes}. Leave it out, or "
      "serve the model and ask it over HTTP (rewards.http)."
    )
  count = shares.training + shares.idle
  if placement.mode == "split":
    count += shares.generation
  rows = meshes.row_parts(placement.generation, shares.generation)
  if cfg.devices:
    rows = len(cfg.devices) // (cfg.tensor or 1)
  rules = (
    (
      len(cfg.devices) <= shares.idle,
      "devices",
      f"at most the {shares.idle} that neither train nor generate",
      cfg.devices,
    ),
    (
      max(cfg.devices, default=0) < count,
      "devices",
      f"indices below {count}",
      cfg.devices,
    ),
    (
      cfg.batch % rows == 0,
      "batch",
      f"a multiple of its {rows} data-parallel parts",
      cfg.batch,
    ),
  )
  for holds, name, rule, value in rules:
    if not holds:
      raise types.InputError(
        f"rewards.model.{name}: expected {rule}, got {value}. Change it, or "
        "the placement."
      )


def lengths(max_tokens: int) -> tuple[int, ...]:
  """Returns the lengths that conversations are padded to.

  Returns:
    At most 4, ascending: `max_tokens` and what is half as long as the next, as
    far as that is no less than 64.
  """
  halves = {-(-max_tokens // 2**k) for k in range(_LENGTHS)}
  return tuple(sorted(n for n in halves if n >= min(_SHORTEST, max_tokens)))


def place(
  source: Source,
  placed: meshes.Meshes,
  devices: Sequence[Any],
  *,
  lock: contextlib.AbstractContextManager[Any],
  launched: Callable[[jax.Array], None],
) -> Placed:
  """Reads the weights onto devices.

  Args:
    source: the model.
    placed: the meshes of the run.
    devices: all of the run.
    lock: that the engine holds around its launches. It is held here, too, where
      the model lies on devices that generate: programs of two threads that
      communicate would else wait for each other.
    launched: is told of each program that runs on devices that generate.

  Returns:
    The model. Each program is compiled on its first call.

  Raises:
    InputError: its devices are not its own, or files cannot be read.
  """
  cfg = source.cfg
  mesh = _mesh(cfg, placed, devices)
  order = contextlib.nullcontext() if cfg.devices else lock
  tell = (lambda made: None) if cfg.devices else launched
  shape = source.classifier.shape
  decoder = programs.placed_on(decoders.Decoder(shape, cfg.dtype), mesh)
  rows = meshes.batch_sharding(mesh)
  params = classifiers.read_params(
    cfg.path,
    source.classifier,
    meshes.weight_shardings(decoders.spec(shape), meshes.TRAINING_RULES, mesh),
    whole=jax.sharding.NamedSharding(mesh, jax.P()),
    dtype=cfg.dtype,
  )

  @functools.partial(jax.jit, out_shardings=rows)
  def reward_model(
    params: types.Tree, tokens: jax.Array, places: jax.Array
  ) -> jax.Array:
    return classifiers.score(decoder, params, tokens, places)

  def score(conversations: Sequence[Sequence[int]], length: int) -> jax.Array:
    tokens = np.zeros((cfg.batch, length), np.int32)
    places = np.zeros(cfg.batch, np.int32)
    for row, ids in enumerate(conversations):
      tokens[row, : len(ids)] = ids
      places[row] = classifiers.last(source.classifier, ids)
    with order:
      made = reward_model(params, *jax.device_put((tokens, places), rows))
      tell(made)
    return made

  return Placed(lengths(cfg.max_tokens), score)


def _mesh(
  cfg: settings.Model, placed: meshes.Meshes, devices: Sequence[Any]
) -> jax.sharding.Mesh:
  """Returns where it lies; with the axes of training, as it keeps no cache."""
  generation = placed.generation
  there, tensor = [*generation.devices.flat], generation.shape["tensor"]
  if cfg.devices:
    there, tensor = [devices[i] for i in cfg.devices], cfg.tensor or 1
    others = {*placed.training.devices.flat, *generation.devices.flat}
    shared = [i for i in cfg.devices if devices[i] in others]
    if shared:
      raise types.InputError(
        "rewards.model.devices: expected devices that neither train nor "
        f"generate, got {shared[0]}, which does. Name others, or none to lie "
        "on those that generate."
      )
  axes = meshes.TrainingAxes(data=-1, fsdp=1, tensor=tensor)
  return meshes.build(axes, there)
