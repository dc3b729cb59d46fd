"""Experts that lie on several devices compute what one device does."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import experts, transformer
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import programs
from tests.e2e import runs
from tests.unit import engines as making

CONFIG = dataclasses.replace(
  making.CONFIG, ff_width=24, experts=experts.Experts(num=8, per_token=3)
)
SPEC = transformer.spec(CONFIG)
TRAINING = (
  meshes.TrainingAxes(expert=4, fsdp=2),
  meshes.TrainingAxes(expert=2, fsdp=1, tensor=2, context=2),
  # Three parts of eight experts: all devices have all of them.
  meshes.TrainingAxes(expert=3, fsdp=2),
)


@functools.cache
def _params():
  return making.params(CONFIG, seed=3)


def _batch(rows):
  draw = np.random.RandomState(2)
  given = np.argsort(draw.rand(rows, 8, 2, 8))[..., :3].astype(np.int8)
  # Half of the tokens go where the router sends them.
  given[draw.rand(rows, 8) < 0.5] = -1
  return dict(
    tokens=jnp.asarray(draw.randint(0, 64, (rows, 8))),
    positions=jnp.broadcast_to(jnp.arange(8), (rows, 8)),
    segment_ids=jnp.ones((rows, 8), jnp.int32),
    counted=jnp.asarray(draw.randint(0, 2, (rows, 8)), jnp.float32),
    routing=jnp.asarray(given),
  )


def _loss(decoder, params, batch):
  """Sums up something of each state, and of the loads."""
  routing = jnp.moveaxis(batch["routing"], 2, 0)
  hidden, told = decoders.routed(
    decoder, params, **{**batch, "routing": routing}
  )
  angles = jnp.arange(float(hidden.size)).reshape(hidden.shape)
  total = jnp.sum(hidden * jnp.cos(angles)) / 8
  even = experts.imbalance(told.counts, told.probs, jnp.sum(batch["counted"]))
  return total + even, (hidden, told)


def _program(decoder, **options):
  grad = jax.value_and_grad(functools.partial(_loss, decoder), has_aux=True)
  return jax.jit(grad, **options)


@functools.cache
def _one():
  return jax.device_get(
    _program(decoders.Decoder(CONFIG))(_params(), _batch(24))
  )


def _on(axes, **options):
  count = np.prod([max(1, n) for n in dataclasses.asdict(axes).values()])
  mesh = meshes.build(axes, jax.devices()[:count])
  home = meshes.weight_shardings(SPEC, meshes.TRAINING_RULES, mesh)
  decoder = decoders.Decoder(CONFIG, **options)
  decoder = programs.placed_on(decoder, mesh)
  rows = jax.sharding.NamedSharding(mesh, decoder.sharding.spec)
  return decoder, home, rows


@pytest.mark.parametrize("axes", TRAINING, ids=str)
def test_c113_a_mesh_gives_the_numbers_of_one_device(axes):
  decoder, home, rows = _on(axes)
  batch = _batch(24)
  params = jax.device_put(_params(), home)
  placed = jax.device_put(batch, rows)
  program = _program(decoder, out_shardings=None)
  got = jax.device_get(program(params, placed))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5),
    got,
    _one(),
  )


_GATHER = re.compile(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(")


def test_no_device_gets_the_experts_of_another():
  decoder, home, rows = _on(
    meshes.TrainingAxes(expert=4, fsdp=2), remat="layer"
  )
  here = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    (_params(), _batch(24)),
    (home, jax.tree.map(lambda _: rows, _batch(24))),
  )
  program = _program(decoder, out_shardings=((None, None), home))
  text = program.lower(*here).compile().as_text()
  found = {
    tuple(int(n) for n in dims.split(",") if n not in ("", "1"))
    for dims in _GATHER.findall(text)
  }
  # Two of the eight, of whole width, as fully sharded training has it.
  assert (2, 32, 24) in found and (2, 24, 32) in found
  # No eight of them, and no two layers at once.
  assert [s for s in found if len(s) > 2 and s[-3] != 2 or len(s) > 3] == []


@pytest.mark.parametrize("split", [False, True])
def test_the_engine_side_gives_the_numbers_of_one_device(split):
  axes = meshes.GenerationAxes(data=2, expert=2, tensor=2)
  mesh = meshes.build(axes, jax.devices()[:8])
  rules, _ = meshes.fit_rules(SPEC, meshes.GENERATION_RULES, mesh)
  tokens = jax.P(meshes.GENERATION_BATCH) if split else jax.P()
  mix = experts.on(mesh, rules, tokens)
  layer = {name: x[0] for name, x in _params()["layers"].items()}
  names = ("router", "expert_gate", "expert_up", "expert_down")
  w = experts.Weights(*(layer[name] for name in names))
  x = jax.random.normal(jax.random.key(1), (4, 1, 32))
  expected = experts.portable(CONFIG.experts, x, w, None)
  got = jax.jit(functools.partial(mix, CONFIG.experts, chosen=None))(x, w=w)
  for one, other in zip(got, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


EIGHT = (
  "placement.training.data=2",
  "placement.training.expert=2",
  "placement.training.fsdp=2",
  "placement.generation.data=2",
  "placement.generation.expert=2",
  "placement.generation.tensor=2",
  "optim.microbatches=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("model.routing.replay=true",)])
def test_c113_a_run_over_eight_devices_is_that_of_one(more, tmp_path):
  more = ("num_steps=2", *more)
  with runs.compile_cache():
    one = runs.train(tmp_path / "one", *more, exp="moe")
    run = runs.train(tmp_path / "eight", *more, *EIGHT, exp="moe")
  gate = run.state.params["layers"]["expert_gate"]
  assert gate.sharding.shard_shape(gate.shape) == (1, 2, 8, 16)
  for got, expected in zip(run.groups, one.groups, strict=True):
    for here, there in zip(got, expected, strict=True):
      assert [r.completion.tokens for r in here.rollouts] == [
        r.completion.tokens for r in there.rollouts
      ]
  for got, expected in zip(run.metrics, one.metrics, strict=True):
    assert got["mismatch/max_abs"] <= 1e-5
    for name in (
      "loss/policy",
      "loss/grad_norm",
      "moe/balance",
      "moe/most_loaded",
    ):
      assert got[name] == pytest.approx(expected[name], abs=1e-5, rel=0)
  moved = jax.tree.leaves(run.state.params)
  for x, y in zip(moved, jax.tree.leaves(one.state.params), strict=True):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5, rtol=0)
  for name in ("moe/balance", "moe/most_loaded"):
    assert all(np.isfinite(line[name]) for line in run.metrics)
