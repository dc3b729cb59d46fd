"""A decoder that gives a sequence one number instead of the next token.

What `transformers` calls `...ForSequenceClassification`, with one label: reward
models are kept so. Its number is read off the last token of a sequence.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import safetensors_io, transformer, weights

ARCHITECTURES = tuple(
  f"{family}ForSequenceClassification" for family in ("Llama", "Qwen2", "Qwen3")
)
_SCORE = "score.weight"


@dataclasses.dataclass(frozen=True)
class Classifier:
  """What a classifier is.

  Attributes:
    shape: of its decoder, which has no head.
    pad_id: what its config calls padding; None for nothing.
  """

  shape: transformer.Config
  pad_id: int | None


def read_config(path: str) -> Classifier:
  """Reads what a classifier is, and looks which tensors there are.

  Args:
    path: a Hugging Face folder.

  Raises:
    InputError: it is none, or not one with a single label; tensors are missing,
      of other shapes or too many; or a field is not supported.
  """
  folder = pathlib.Path(path)
  if not folder.is_dir():
    raise types.InputError(
      f"rewards.model.path: expected a folder with config.json, got none at "
      f"{path!r}. Correct the path."
    )
  hf = safetensors_io.read_json(folder / "config.json")
  _check_task(path, hf)
  # One label says nothing of heads: there is none, whatever is tied to what.
  plain = {k: v for k, v in hf.items() if k != "architectures"}
  shape = dataclasses.replace(weights.from_fields(plain), tie_embeddings=True)
  pad = hf.get("pad_token_id")
  if pad is not None and type(pad) is not int:
    raise types.InputError(
      f"{path}/config.json: expected pad_token_id as an id or none, got "
      f"{pad!r:.100}. Correct the file."
    )
  _check_score(path, shape)
  weights.check(path, shape, besides=(_SCORE,))
  return Classifier(shape, pad)


def _check_task(path: str, hf: Mapping[str, Any]) -> None:
  found = hf.get("architectures")
  if found not in [[name] for name in ARCHITECTURES]:
    raise types.InputError(
      f"rewards.model.path: expected architectures of one of "
      f"{', '.join(ARCHITECTURES)}, got {found!r:.100} in {path}/config.json. "
      "Take a reward model that is a sequence classifier."
    )
  # As `transformers` counts them: a config that says nothing has two.
  named, labels = hf.get("id2label"), hf.get("num_labels", 2)
  labels = len(named) if isinstance(named, Mapping) else labels
  if labels != 1:
    raise types.InputError(
      f"rewards.model.path: expected a classifier with one label, got "
      f"{labels!r:.100} in {path}/config.json. Take a model that gives one "
      "number."
    )


def _check_score(path: str, shape: transformer.Config) -> None:
  entry = safetensors_io.entries(pathlib.Path(path)).get(_SCORE)
  wanted = (1, shape.width)
  got = "none" if entry is None else f"one of {entry.shape}"
  if entry is None or entry.shape != wanted:
    raise types.InputError(
      f"{path}: expected tensor {_SCORE} of shape {wanted}, got {got}. Take a "
      "reward model that is a sequence classifier."
    )


def read_params(
  path: str,
  classifier: Classifier,
  shardings: types.Tree,
  *,
  whole: jax.sharding.Sharding,
  dtype: str,
) -> types.Tree:
  """Reads a classifier's weights onto devices.

  Args:
    path: its folder.
    classifier: from `read_config`.
    shardings: one for each weight of its decoder.
    whole: of what each device has a copy of.
    dtype: of the decoder's weights.

  Returns:
    `decoder`, as `transformer.spec` declares it, and `score`, a vector in
    float32.

  Raises:
    InputError: files cannot be read.
  """
  entry = safetensors_io.entries(pathlib.Path(path))[_SCORE]
  score = np.asarray(entry.read()[0], np.float32)
  return {
    "decoder": weights.read_params(
      path, classifier.shape, shardings, dtype, besides=(_SCORE,)
    ),
    "score": jax.device_put(score, whole),
  }


def last(classifier: Classifier, ids: Sequence[int]) -> int:
  """Returns the place whose state is read: of the last token but padding.

  As `transformers` finds it, by the id alone: a conversation that itself ends
  with that id is read before its end. Without any other token it is the first.
  """
  kept = [i for i, token in enumerate(ids) if token != classifier.pad_id]
  return kept[-1] if kept else 0


def score(
  decoder: decoders.Decoder,
  params: types.Tree,
  tokens: Int[Array, "B T"],
  places: Int[Array, " B"],
) -> Float[Array, " B"]:
  """Gives each row its number.

  Args:
    decoder: of the classifier's shape.
    params: from `read_params`.
    tokens: a sequence from the start of each row; what follows it is not read.
    places: from `last`.

  Returns:
    The numbers, which do not depend on other rows.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = decoders.states(
    decoder,
    params["decoder"],
    tokens=tokens,
    positions=positions,
    segment_ids=jnp.ones_like(tokens),
  )
  at = jnp.take_along_axis(hidden, places[:, None, None], axis=1)[:, 0]
  # Not a matrix product, which accelerators may round.
  return jnp.sum(at.astype(jnp.float32) * params["score"], axis=-1)
