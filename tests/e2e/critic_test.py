"""PPO from end to end: its critic is saved, never published, and of use."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.algos import algorithm, dpo, grpo, ppo, sft
from tests.e2e import runs

_EACH = pytest.mark.parametrize("exp", ["with_critic", "with_critic_head"])


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


def _bits(state: types.TrainState) -> list[np.ndarray]:
  state = dataclasses.replace(state, key=jax.random.key_data(state.key))
  return [np.asarray(x) for x in jax.tree.leaves(state)]


@pytest.mark.slow
@pytest.mark.parametrize("exp", ["with_critic", "with_critic_head"])
def test_a_critic_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, exp):
  whole = runs.train(tmp_path / "one", "num_steps=4", exp=exp)
  runs.train(tmp_path / "two", "num_steps=2", exp=exp)
  halves = runs.train(tmp_path / "two", "num_steps=4", exp=exp)
  assert len(halves.groups) == 2 and halves.state.step == 4
  assert jax.tree.structure(halves.state) == jax.tree.structure(whole.state)
  for one, two in zip(_bits(whole.state), _bits(halves.state), strict=True):
    np.testing.assert_array_equal(one, two)
  assert np.any(np.asarray(whole.state.critic.params["value_head"]))
  for line in whole.metrics:
    assert line["loss/value"] > 0 and line["loss/value_clip_fraction"] == 0
    assert line["loss/skipped"] == 0
  assert whole.metrics[0]["loss/explained_variance"] == 0
  assert whole.metrics[-1]["loss/explained_variance"] != 0
  with pytest.raises(types.InputError, match=r"critic.*expected no such leaf"):
    runs.train(tmp_path / "two", "num_steps=5")


@_EACH
def test_a_policy_is_published_without_its_critic(exp):
  cfg = runs.configured(exp=exp)
  place = loop.build(cfg, prepare.prepare(cfg))
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  plain = place.trainer(grpo.objective(), cfg.optim, cfg.num_steps)
  state = trainer.start(place.draw())
  policy = place.publish(state)
  place.verify(policy)
  drawn = place.draw()
  assert jax.tree.structure(policy.params) == jax.tree.structure(drawn)
  jax.tree.map(np.testing.assert_array_equal, policy.params, drawn)
  assert plain.abstract.critic is None
  assert jax.tree.structure(plain.abstract.params) == jax.tree.structure(drawn)


def _with(algo: algorithm.Algorithm, **options) -> config.Run:
  return dataclasses.replace(runs.configured(), algo=algo, **options)


@pytest.mark.parametrize(
  ("run", "assignments", "expected"),
  [
    (_with(ppo.objective()), ["algo.baseline.model=head"], "coef: expected >="),
    (_with(ppo.objective()), ["algo.baseline.coef=0.5"], "none with model=own"),
    (
      _with(ppo.objective("head")),
      ["algo.baseline.coef=none"],
      "coef: expected >= 0 with model=head, got None",
    ),
    (_with(ppo.objective()), ["algo.baseline.clip=0"], "clip: expected > 0"),
    (_with(ppo.objective()), ["algo.baseline.model=two"], "'own' or 'head'"),
    (_with(ppo.objective()), ["group_size=0"], "group_size: expected >= 1"),
    (
      _with(ppo.objective()),
      ["group_size=1", "stream.filter_zero_signal=true"],
      "expected false with group_size=1",
    ),
    (_with(grpo.objective()), ["algo.baseline.decay=1"], "no field 'decay'"),
    (_with(sft.objective()), ["algo.baseline.model=own"], "no field 'model'"),
    (
      _with(dpo.objective(), group_size=2),
      ["algo.baseline.coef=0.1"],
      "no field 'coef'",
    ),
  ],
)
def test_half_a_critic_is_refused_in_one_line(run, assignments, expected):
  with pytest.raises(types.InputError) as fault:
    config.override(run, assignments)
  message = str(fault.value)
  assert expected in message and "\n" not in message


@pytest.mark.parametrize(
  ("assignments", "found"),
  [
    (["algo.baseline.decay=0.95"], ("own", None, 0.95)),
    (
      ["algo.baseline.model=head", "algo.baseline.coef=0.5"],
      ("head", 0.5, 1.0),
    ),
  ],
)
def test_a_critic_is_set_from_the_command_line(assignments, found):
  critic = config.override(_with(ppo.objective()), assignments).algo.critic
  assert (critic.model, critic.coef, critic.decay) == found


def test_ppo_with_a_critic_learns_to_sort_letters(tmp_path):
  """A part of the demo, in turn on one device, so that it repeats itself."""
  run = config.load("tiny", runs.ROOT / "experiments")
  run = config.override(
    dataclasses.replace(run, algo=ppo.objective()),
    (
      "algo.baseline.learning_rate=1e-3",
      "checkpoint.every=0",
      "evaluation.every=0",
      "max_lag=0",
      "num_steps=32",
      "optim.schedule=constant",
      "placement.cpu_devices=8",
      "placement.generation.data=1",
      "placement.mode=colocated",
      "placement.training.fsdp=1",
      "stream.asynchronous=false",
      "warmup.num_steps=14",
    ),
  )
  loop.run(run, prepare.prepare(run), tmp_path)
  name = "reward/part/exact"
  right = [line[name] for line in runs.metrics(tmp_path) if name in line]
  assert len(right) == 32
  assert np.mean(right[-8:]) > np.mean(right[:8]) + 0.12, right
