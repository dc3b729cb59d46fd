"""Runs of flax models of the user's own, from the settings to the weights."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_post import config, loop, prepare, serve, types
from jaxrl_post.planning import compile as compile_lib
from jaxrl_post.planning import costs
from tests.e2e import runs

FILE = pathlib.Path(__file__).with_name("own_models.py")
SPLIT = ("placement.mode=split", "stream.asynchronous=false")
# Ways to the same numbers differ by their last bits.
CLOSE = 1e-5


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory):
  """Makes each run once, when it is first asked for."""

  @functools.cache
  def made(exp: str, *assignments: str) -> runs.Trained:
    return train(tmp_path_factory.mktemp("run"), exp, *assignments)

  with runs.compile_cache():
    yield made


def configured(exp, *assignments):
  run = config.load(f"{FILE}:{exp}", FILE.parent)
  return config.override(run, assignments)


def train(folder, exp, *assignments):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      runs, "configured", lambda *given, exp: configured(exp, *given)
    )
    return runs.train(folder, *assignments, exp=exp)


def sampled(run: runs.Trained):
  return [
    [r.completion.tokens for group in batch for r in group.rollouts]
    for batch in run.groups
  ]


def same_losses(one: runs.Trained, other: runs.Trained):
  for x, y in zip(one.metrics, other.metrics, strict=True):
    assert x["loss/policy"] == pytest.approx(y["loss/policy"], abs=CLOSE)
    assert x["loss/grad_norm"] == pytest.approx(y["loss/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
  ("exp", "more"),
  [
    ("linen_plain", ()),
    pytest.param("linen_plain", SPLIT, marks=pytest.mark.slow),
    pytest.param("linen_cached", (), marks=pytest.mark.slow),
    pytest.param("nnx_cached", (), marks=pytest.mark.slow),
    ("nnx_cached", SPLIT),
  ],
)
def test_a_model_of_ones_own_trains(exp, more, made):
  """Weights move, and engine and trainer agree on every one of them."""
  run = made(exp, *more)
  assert [line["policy_version"] for line in run.metrics] == [1, 2]
  for line in run.metrics:
    assert line["loss/update_norm"] > 0
    assert line["mismatch/max_abs"] <= CLOSE
    assert line["loss/skipped"] == 0


@pytest.mark.parametrize(
  "exp", [pytest.param("linen_plain", marks=pytest.mark.slow), "nnx_cached"]
)
def test_split_samples_what_colocated_does(exp, made):
  one, other = made(exp), made(exp, *SPLIT)
  assert sampled(one) == sampled(other)


@pytest.mark.parametrize(
  ("exp", "alone"),
  [("linen_plain", True), ("nnx_cached", True), ("linen_cached", False)],
)
def test_rows_of_several_rollouts_are_for_a_model_with_a_mask(exp, alone):
  cfg = configured(exp)
  layout = prepare.layout(cfg, prepare.model(cfg).config, 1)
  assert layout.alone is alone


def test_it_learns_to_say_a(made):
  run = made("linen_plain", "num_steps=16", "optim.learning_rate=3e-2")
  rewards = [line["reward/mean"] for line in run.metrics]
  assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_for_bit(made, tmp_path):
  exp = "linen_plain"
  whole = made(exp, "num_steps=3", "checkpoint.every=1")
  train(tmp_path, exp, "num_steps=2", "checkpoint.every=1")
  again = train(tmp_path, exp, "num_steps=3", "checkpoint.every=1")
  assert len(again.groups) == 1
  for x, y in zip(
    jax.tree.leaves((whole.state.params, whole.state.opt_state)),
    jax.tree.leaves((again.state.params, again.state.opt_state)),
    strict=True,
  ):
    np.testing.assert_array_equal(x, y)


def test_a_mesh_trains_as_one_device_does(made):
  """Named weights and others are cut, and the numbers stay."""
  exp = "linen_plain"
  axes = ("training.fsdp=2", "training.data=2", "generation.data=4")
  run = made(exp, *(f"placement.{size}" for size in axes))
  one = made(exp)
  assert sampled(run) == sampled(one)
  specs = {tuple(x.sharding.spec) for x in jax.tree.leaves(run.state.params)}
  assert any("fsdp" in spec for spec in specs)
  same_losses(run, one)


def test_weights_that_are_not_finite_end_the_run(tmp_path):
  cfg = configured("with_nan")
  with pytest.raises(types.RunError, match="got NaN from weights of version 0"):
    loop.run(cfg, prepare.prepare(cfg), tmp_path)


def test_the_command_line_trains_it(tmp_path):
  done = runs.run(tmp_path, f"--exp={FILE}:nnx_cached", "--workdir=run")
  assert done.code == 0, done.err
  assert "model.config.about = 'nnx " in done.out
  assert "16 rollouts -> 1 x 16 rows" in done.out
  assert len(runs.metrics(tmp_path / "run")) == 2


def test_a_wrong_model_is_said_in_one_line(tmp_path):
  done = runs.run(tmp_path, f"--exp={FILE}:with_dropout")
  assert done.code == 2
  assert "draws no random numbers when it is run" in done.err
  assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
  ("setting", "place"),
  [
    ("placement.mode=roles", "placement.mode"),
    ("sampling.dtype=int8", "sampling.dtype"),
    ("sampling.cache=0.5", "sampling.cache"),
    ("optim.trained.rank=2", "optim.trained"),
    ("model.remat=layer", "model.remat"),
    ("sampling.max_tokens=6", "data.max_prompt"),
  ],
)
def test_what_takes_a_transformer_of_ours_is_refused(setting, place):
  with pytest.raises(types.InputError, match=f"^{place}"):
    prepare.prepare(configured("linen_plain", setting))


def test_modes_that_know_transformers_of_ours_only_are_refused():
  cfg = configured("linen_plain")
  with pytest.raises(types.InputError, match="--mode=serve, got a model of"):
    serve.check(cfg)
  with pytest.raises(types.InputError, match="--mode=compile, got a model of"):
    compile_lib.check(cfg)
  with pytest.raises(types.InputError, match="--mode=plan: .* of linen "):
    costs._key_cost(config.to_json(cfg)["model"])
