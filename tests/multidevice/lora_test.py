"""Adapters over eight devices lie and train as on one."""

import jax
import numpy as np
import pytest

from jaxrl_post import loop, prepare
from tests.e2e import runs

LORA = ("optim.trained.rank=2", "optim.trained.alpha=8", "num_steps=3")
EIGHT = (
  "placement.training.data=2",
  "placement.training.fsdp=2",
  "placement.training.tensor=2",
  "placement.generation.data=4",
  "placement.generation.tensor=2",
  "optim.microbatches=2",
)


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


def test_factors_lie_as_the_sides_of_their_weight():
  cfg = runs.configured(*LORA, *EIGHT)
  place = loop.build(cfg, prepare.prepare(cfg))
  state = place.trainer(cfg.algo, cfg.optim, cfg.num_steps).abstract

  def lies(x):
    layout = x.sharding.spec
    return (*layout, *(None,) * (len(x.shape) - len(layout)))

  for name, num_in in (("q", 1), ("k", 1), ("o", 2), ("up", 1), ("down", 1)):
    weight = lies(state.params["layers"][name])
    change = state.adapters["layers"][name]
    assert lies(change["a"]) == (*weight[: 1 + num_in], None), name
    assert lies(change["b"]) == (weight[0], None, *weight[1 + num_in :]), name
    assert {"fsdp", "tensor"} <= {*lies(change["a"]), *lies(change["b"])}, name
  # And so do the moments.
  shards = {x.sharding.spec for x in jax.tree.leaves(state.opt_state)}
  factors = {x.sharding.spec for x in jax.tree.leaves(state.adapters)}
  assert factors <= shards


def test_c113_adapters_over_eight_devices_train_as_on_one(tmp_path):
  one = runs.train(tmp_path / "one", *LORA)
  run = runs.train(tmp_path / "eight", *LORA, *EIGHT)
  for x in jax.tree.leaves(run.state.adapters):
    assert len(x.sharding.device_set) == 8
  for got, expected in zip(run.groups, one.groups, strict=True):
    for here, there in zip(got, expected, strict=True):
      assert [r.completion.tokens for r in here.rollouts] == [
        r.completion.tokens for r in there.rollouts
      ]
  for got, expected in zip(run.metrics, one.metrics, strict=True):
    assert got["mismatch/max_abs"] <= 1e-4
    for name in ("loss/policy", "loss/entropy", "loss/grad_norm"):
      assert got[name] == pytest.approx(expected[name], abs=1e-5, rel=0)
  for got, expected in zip(
    jax.tree.leaves((run.state.adapters, run.state.params)),
    jax.tree.leaves((one.state.adapters, one.state.params)),
    strict=True,
  ):
    np.testing.assert_allclose(
      np.asarray(got), np.asarray(expected), atol=1e-5, rtol=0
    )
