"""A changed weight, whichever it is, reaches the engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import loop, prepare
from jaxrl_post.models import transformer
from tests.e2e import runs

TOKENS = np.array([[2, 3, 4, 5, 2, 1]], np.int32)


@functools.cache
def placed():
  """Builds the split placement, and a reader of logits on either side."""
  cfg = runs.configured(
    "placement.mode=split",
    "placement.training.fsdp=2",
    "placement.training.tensor=2",
    "placement.generation.data=2",
    "placement.generation.tensor=2",
  )
  parts = prepare.prepare(cfg)
  place = loop.build(cfg, parts)
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  model = parts.decoder.config

  @jax.jit
  def logits(params):
    positions = jnp.arange(TOKENS.shape[1])[None]
    hidden, _ = transformer.forward(
      params, model, jnp.asarray(TOKENS), positions
    )
    return transformer.logits(params, model, hidden)

  return place, trainer.start(place.draw()), logits


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


def names() -> list[str]:
  cfg = runs.configured()
  assert cfg.model.config is not None
  spec = transformer.spec(cfg.model.config)
  shapes = jax.tree.map(
    lambda w: np.zeros(w.shape), spec, is_leaf=lambda x: hasattr(x, "axes")
  )
  paths, _ = jax.tree_util.tree_flatten_with_path(shapes)
  return [jax.tree_util.keystr(path) for path, _ in paths]


@pytest.mark.parametrize("name", names())
def test_c61_a_change_of_any_weight_arrives(name):
  place, state, logits = placed()

  def changed(path, leaf):
    if jax.tree_util.keystr(path) != name:
      return leaf
    ramp = np.linspace(-1, 1, leaf.size, dtype=np.float32).reshape(leaf.shape)
    return jax.device_put(np.asarray(leaf) + 0.01 * ramp, leaf.sharding)

  params = jax.tree.map_with_path(changed, state.params)
  policy = place.publish(dataclasses.replace(state, params=params))
  place.verify(policy)
  before, engine, trainer = (
    np.asarray(logits(x)) for x in (state.params, policy.params, params)
  )
  np.testing.assert_allclose(engine, trainer, atol=1e-5, rtol=0)
  assert np.abs(engine - before).max() > 1e-5


def test_c61_as_many_weights_arrive_as_the_engine_has():
  place, state, _ = placed()
  arrived = place.publish(state).params
  assert jax.tree.structure(arrived) == jax.tree.structure(state.params)
  assert len(jax.tree.leaves(arrived)) == len(names())


def test_either_side_lies_where_its_mesh_is():
  place, state, _ = placed()
  for params, mesh in (
    (state.params, place.meshes.training),
    (place.publish(state).params, place.meshes.generation),
  ):
    used = {d for x in jax.tree.leaves(params) for d in x.sharding.device_set}
    assert used == set(mesh.devices.flat)
