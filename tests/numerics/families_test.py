"""Logits of every family against stored values of `transformers`."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import transformer, weights
from tests.reference import tiny_folder

VALUES = pathlib.Path(__file__).parents[1] / "reference" / "values"
ATOL = 1e-4  # float32, three layers: sums are taken in another order.


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
  return dict(np.load(VALUES / "families.npz"))


def logits_of(path: str, tokens: np.ndarray) -> np.ndarray:
  cfg = weights.read_config(path)
  params = weights.read_params(path, cfg)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

  @jax.jit
  def forward(params, tokens):
    hidden, _ = transformer.forward(params, cfg, tokens, positions)
    return transformer.logits(params, cfg, hidden)

  return np.asarray(forward(params, jnp.asarray(tokens)))


MODELS = {
  **{family: (family, {}) for family in tiny_folder.FAMILIES},
  **tiny_folder.VARIANTS,
}


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_logits_are_those_of_transformers(tmp_path, stored, kind):
  family, options = MODELS[kind]
  tiny_folder.write(tmp_path, family, shards=2, **options)
  got = logits_of(str(tmp_path), stored["tokens"])
  # Values that a wrong model would not meet by being near zero.
  assert stored[kind].std() > 0.5
  np.testing.assert_allclose(got, stored[kind], rtol=0, atol=ATOL)


@pytest.mark.parametrize(
  ("kind", "options"),
  [
    ("gemma3", {"sliding_window": 6}),
    ("gemma3", {"rope_local_base_freq": 10000.0}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3", {"query_pre_attn_scalar": 16}),
    ("qwen2_window", {"max_window_layers": 2}),
  ],
)
def test_every_field_of_a_window_counts(tmp_path, stored, kind, options):
  family, own = MODELS[kind]
  tiny_folder.write(tmp_path, family, **{**own, **options})
  got = logits_of(str(tmp_path), stored["tokens"])
  assert np.abs(got - stored[kind]).max() > 100 * ATOL


def test_c107_without_its_scaling_llama_is_another_model(tmp_path, stored):
  tiny_folder.write(tmp_path, "llama", rope_scaling=None)
  got = logits_of(str(tmp_path), stored["tokens"])
  assert np.abs(got - stored["llama"]).max() > 100 * ATOL
