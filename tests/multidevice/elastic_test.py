"""A checkpoint goes on on other devices, in another placement, bit for bit."""

import jax
import numpy as np
import pytest

from jaxrl_post import loop, prepare, types
from jaxrl_post.runtime import checkpoint
from tests.e2e import runs

# Four devices train, fsdp 2 x tensor 2, and four sample.
EIGHT = (
  "placement.mode=split",
  "placement.training.fsdp=2",
  "placement.training.tensor=2",
  "placement.generation.data=2",
  "placement.generation.tensor=2",
)
# Two do both, in turn.
TWO = ("placement.training.fsdp=2", "placement.generation.data=2")


def abstract(*settings: str) -> types.TrainState:
  cfg = runs.configured(*settings)
  place = loop.build(cfg, prepare.prepare(cfg))
  return place.trainer(cfg.algo, cfg.optim, cfg.num_steps).abstract


def filled(shapes: types.TrainState) -> types.TrainState:
  """Returns a state of which no two numbers are alike."""
  rng = np.random.default_rng(0)

  def leaf(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.device_put(jax.random.key(7), x.sharding)
    values = rng.normal(size=x.shape) * 1000
    return jax.device_put(values.astype(x.dtype), x.sharding)

  return jax.tree.map(leaf, shapes)


def host(state: types.TrainState) -> list[np.ndarray]:
  def pull(x):
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)

  return [pull(x) for x in jax.tree.leaves(state)]


def equal(a: types.TrainState, b: types.TrainState) -> None:
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(host(a), host(b), strict=True):
    assert x.dtype == y.dtype
    assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize(
  ("before", "after"), [(EIGHT, TWO), (TWO, EIGHT)], ids=["fewer", "more"]
)
def test_a_state_is_restored_into_another_placement(tmp_path, before, after):
  state, asked = filled(abstract(*before)), abstract(*after)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  store.save(1, state, {})
  found = store.restore(asked)
  store.close()
  assert found is not None
  equal(found.state, state)
  wanted = jax.tree.map(lambda x: x.sharding, asked)
  assert jax.tree.map(lambda x: x.sharding, found.state) == wanted
  devices = [len(x.sharding.device_set) for x in jax.tree.leaves(found.state)]
  assert set(devices) == {len(set(asked.step.sharding.device_set))}


@pytest.mark.slow  # Eight devices and two are compiled for.
def test_a_run_goes_on_on_two_of_eight_devices(tmp_path):
  with runs.compile_cache():
    first = runs.train(tmp_path, "num_steps=1", *EIGHT)
    equal_to = runs.state(tmp_path, runs.configured(*TWO))
    equal(equal_to, jax.device_get(first.state))
    second = runs.train(tmp_path, "num_steps=2", *TWO)
  assert int(second.state.step) == int(second.state.version) == 2
  assert len(second.state.step.sharding.device_set) == 2
  assert [line["step"] for line in second.metrics] == [1, 2]
  # The prompts go on where they were.
  assert [g.prompt.uid for g in second.groups[0]] == [4, 5, 6, 7]
