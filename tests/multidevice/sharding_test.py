"""A changed weight reaches the engine, and every axis computes the same."""

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


# With those of modes_test.py every mesh axis there is.
AXES = (
  "placement.training.data=2",
  "placement.training.expert=2",
  "placement.training.context=2",
  "placement.generation.data=2",
  "placement.generation.expert=2",
  "placement.generation.tensor=2",
)


def test_c113_expert_and_context_axes_compute_what_one_device_does(tmp_path):
  reference = runs.train(tmp_path / "one", "num_steps=3")
  run = runs.train(tmp_path / "eight", "num_steps=3", *AXES)
  devices = jax.tree.leaves(run.state.params)[0].sharding.device_set
  assert len(devices) == 8
  for got, expected in zip(run.groups, reference.groups, strict=True):
    for one, other in zip(got, expected, strict=True):
      assert [r.completion.tokens for r in one.rollouts] == [
        r.completion.tokens for r in other.rollouts
      ]
  for got, expected in zip(run.metrics, reference.metrics, strict=True):
    for name in ("loss/policy", "loss/entropy", "loss/grad_norm"):
      assert got[name] == pytest.approx(expected[name], abs=1e-5, rel=0)
  for got, expected in zip(
    jax.tree.leaves(run.state.params),
    jax.tree.leaves(reference.state.params),
    strict=True,
  ):
    np.testing.assert_allclose(
      np.asarray(got), np.asarray(expected), atol=1e-5, rtol=0
    )
