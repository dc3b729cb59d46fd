"""Scores of reward models against stored values of `transformers`."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import classifier, decoder, transformer, weights
from tests.reference import tiny_folder

VALUES = pathlib.Path(__file__).parents[1] / "reference" / "values"
ATOL = 1e-4  # float32, three layers: sums are taken in another order.
KINDS = {
  **{family: (family, {}) for family in ("llama", "qwen2", "qwen3")},
  "without_padding": ("llama", {"pad_token_id": None}),
}
_score = jax.jit(classifier.score, static_argnums=0)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
  return dict(np.load(VALUES / "classifiers.npz"))


def write(folder: pathlib.Path, family: str, **options) -> str:
  options = tiny_folder.classifier(family, **options)
  tiny_folder.write(folder, family, shards=2, **options)
  return str(folder)


@functools.cache
def whole() -> jax.sharding.Sharding:
  return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def scores(path: str, rows: list[list[int]], length: int, pad: int):
  """Scores rows from the left of a program's tokens, the rest being `pad`."""
  found = classifier.read_config(path)
  spec = transformer.spec(found.shape)
  home = jax.tree.map(
    lambda _: whole(), spec, is_leaf=lambda x: hasattr(x, "axes")
  )
  params = classifier.read_params(
    path, found, home, whole=whole(), dtype="float32"
  )
  tokens = np.full((len(rows), length), pad, np.int32)
  for row, ids in zip(tokens, rows, strict=True):
    row[: len(ids)] = ids
  places = np.asarray([classifier.last(found, ids) for ids in rows], np.int32)
  return np.asarray(
    _score(decoder.Decoder(found.shape), params, tokens, places)
  )


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(tmp_path, stored, kind):
  family, options = KINDS[kind]
  path = write(tmp_path, family, **options)
  rows = [
    row[:n].tolist()
    for row, n in zip(stored["tokens"], stored["lengths"], strict=True)
  ]
  for length, pad in ((48, 0), (48, 77), (64, 5))[
    : 3 if family == "llama" else 1
  ]:
    got = scores(path, rows, length, pad)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, stored[kind], atol=ATOL)


def test_padding_is_known_by_its_id_alone(stored):
  # Of the last row, whose own last two tokens are what pads.
  ends = stored["tokens"][-1][: stored["lengths"][-1]]
  assert ends[-2:].tolist() == [0, 0]
  assert abs(stored["llama"][-1] - stored["without_padding"][-1]) > 0.1
  np.testing.assert_array_equal(
    stored["llama"][:-1], stored["without_padding"][:-1]
  )
  shape = transformer.Config(1, 2, 1, 1, 2, 2, 9)
  for pad, ids, place in (
    (0, (5, 0, 6, 0, 0), 2),
    (None, (5, 0, 6, 0, 0), 4),
    (7, (5, 0, 6), 2),
    (0, (0, 0), 0),
  ):
    assert classifier.last(classifier.Classifier(shape, pad), ids) == place


def _edit(**changes):
  """Changes fields of config.json; None takes one out."""

  def edit(folder: pathlib.Path) -> None:
    file = folder / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    kept = {name: x for name, x in fields.items() if x is not None}
    file.write_text(json.dumps(kept))

  return edit


def _without_score(folder: pathlib.Path) -> None:
  hf = json.loads((folder / "config.json").read_text())
  tensors = tiny_folder.arrays(hf)
  del tensors["score.weight"]
  tiny_folder.write_weights(folder, tensors, 2)


def _two_scores(folder: pathlib.Path) -> None:
  hf = json.loads((folder / "config.json").read_text())
  tensors = tiny_folder.arrays({**hf, "id2label": {"0": "a", "1": "b"}})
  tiny_folder.write_weights(folder, tensors, 2)


@pytest.mark.parametrize(
  ("spoil", "words"),
  [
    (
      _edit(architectures=["LlamaForCausalLM"]),
      r"rewards.model.path: expected architectures of one of LlamaFor.*, got "
      r"\['LlamaForCausalLM'\]",
    ),
    (_edit(architectures=None), "architectures .* got None"),
    (_edit(id2label={"0": "a", "1": "b"}), "one label, got 2 in"),
    (_edit(id2label=None), "one label, got 2 in"),
    (_edit(id2label=None, num_labels=3), "one label, got 3 in"),
    (_edit(pad_token_id="x"), "pad_token_id as an id or none, got 'x'"),
    (_edit(hidden_act="relu"), "hidden_act: expected 'silu'"),
    (_without_score, r"score.weight of shape \(1, 48\), got none"),
    (_two_scores, r"score.weight of shape \(1, 48\), got one of \(2, 48\)"),
    (_edit(num_hidden_layers=4), "expected tensor model.layers.3"),
    (_edit(num_hidden_layers=2), "expected no tensor besides"),
  ],
)
def test_what_is_no_reward_model_is_refused(tmp_path, spoil, words):
  path = write(tmp_path, "llama")
  spoil(tmp_path)
  with pytest.raises(types.InputError, match=words) as error:
    classifier.read_config(path)
  assert "\n" not in str(error.value)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
  path = str(tmp_path / "none")
  with pytest.raises(types.InputError, match="folder with config.json, got"):
    classifier.read_config(path)


def test_a_classifier_is_not_a_policy(tmp_path):
  path = write(tmp_path, "llama")
  with pytest.raises(types.InputError, match="expected .'LlamaForCausalLM'."):
    weights.read_config(path)


def test_labels_may_be_counted_instead_of_named(tmp_path):
  path = write(tmp_path, "qwen3")
  _edit(id2label=None, num_labels=1)(tmp_path)
  found = classifier.read_config(path)
  assert found.pad_id == 0 and found.shape.qk_norm
