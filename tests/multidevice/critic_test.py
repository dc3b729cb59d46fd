"""A critic on eight devices is that of one, and lies as the policy does."""

import contextlib
import functools

import jax
import numpy as np
import optax
import pytest

from jaxrl_post.models import transformer
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.runtime import checkpoint
from tests.numerics import critics as making

_AXES = {
  "own": meshes.TrainingAxes(data=2, fsdp=2, tensor=2),
  "head": meshes.TrainingAxes(data=2, fsdp=2, context=2),
}
_ALGORITHMS = {model: making.algorithm(model) for model in _AXES}
_PARKED = "pinned_host"


@functools.cache
def _placed(model):
  """Returns the trainer, a batch and the first state, all on eight devices."""
  mesh = meshes.build(_AXES[model], jax.devices())
  home = meshes.weight_shardings(
    transformer.spec(making.CONFIG), meshes.TRAINING_RULES, mesh
  )
  params = making.start(_ALGORITHMS[model]).params
  made = trainers.build(
    mesh,
    params=jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      params,
      home,
    ),
    decoder=making.laid(meshes.token_sharding(mesh)),
    algo=_ALGORITHMS[model],
    optimizer=making.policy_tx(),
    critic_optimizer=making.tx(_ALGORITHMS[model]),
    cut=making.SETTINGS,
    key=jax.random.key(1),
    keep_params=False,
    park=("optimizer",) if model == "own" else (),
    lock=contextlib.nullcontext(),
  )
  return made, made.put(making.packed()), jax.device_put(params, home)


@functools.cache
def _trained(model):
  """Trains two updates on eight devices; notes the state after each."""
  made, batch, params = _placed(model)
  state, found = made.start(params), []
  start = jax.device_get(state.critic)
  for _ in range(2):
    state, metrics = made.update(state, made.score(state, batch))
    # Donated, the next time.
    copy = jax.device_get((state.params, state.critic))
    found.append((*copy, jax.device_get(metrics)))
  return start, found, state


@pytest.mark.parametrize("model", _AXES)
def test_c113_a_critic_of_eight_devices_is_that_of_one(model):
  start, found, _ = _trained(model)
  algo = _ALGORITHMS[model]
  state = making.start(algo, seed=None)
  jax.tree.map(np.testing.assert_array_equal, start, state.critic)
  for params, critic, metrics in found:
    _, state, want = making.train(algo, making.packed(), state)
    for name, value in want.items():
      np.testing.assert_allclose(
        metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name
      )
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    first = (optax.tree.get(s.opt_state, "mu") for s in (critic, state.critic))
    jax.tree.map(close, *first)
    # Adam makes a step of any gradient that is not zero, noise included.
    far = functools.partial(np.testing.assert_allclose, atol=1e-3)
    jax.tree.map(far, critic.params, state.critic.params)
    jax.tree.map(far, params, state.params)


@pytest.mark.parametrize("model", _AXES)
def test_a_critic_lies_as_the_policy_and_its_head_is_whole(model):
  made, _, _ = _placed(model)
  _, _, state = _trained(model)
  for tree in (made.abstract, state):
    own = dict(tree.critic.params)
    head = own.pop(making.HEAD)
    assert head.sharding.is_fully_replicated
    assert set(own) == (set(tree.params) if model == "own" else set())
    policy = {name: tree.params[name] for name in own}
    split = 0
    for one, two in zip(*map(jax.tree.leaves, (own, policy)), strict=True):
      assert one.sharding.is_equivalent_to(two.sharding, one.ndim)
      split += not one.sharding.is_fully_replicated
    assert (split > 5) == (model == "own")
    moments = optax.tree.get(tree.critic.opt_state, "mu")
    for one, two in zip(
      *map(jax.tree.leaves, (moments, tree.critic.params)), strict=True
    ):
      assert one.sharding.spec == two.sharding.spec


@pytest.mark.parametrize("model", _AXES)
def test_moments_of_a_critic_are_parked_with_those_of_the_policy(model):
  _, _, state = _trained(model)
  kinds = {
    name: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
    for name, tree in (
      ("moments", (state.opt_state, state.critic.opt_state)),
      ("weights", (state.params, state.critic.params)),
    )
  }
  assert (kinds["moments"] == {_PARKED}) == (model == "own")
  assert _PARKED not in kinds["weights"]


@pytest.mark.parametrize("model", _AXES)
def test_a_critic_is_restored_bit_for_bit_where_it_lay(model, tmp_path):
  made, _, _ = _placed(model)
  _, _, state = _trained(model)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  store.save(2, state, {})
  store.close()
  found = checkpoint.Store(tmp_path, checkpoint.Checkpoint()).restore(
    made.abstract
  )
  assert jax.tree.structure(found.state) == jax.tree.structure(state)

  def same(one, two):
    assert one.sharding == two.sharding
    np.testing.assert_array_equal(one, two)

  jax.tree.map(same, found.state.critic, state.critic)
  jax.tree.map(same, found.state.params, state.params)
