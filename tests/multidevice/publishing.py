"""Weights that lie on two meshes, for the tests of their way between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models import spec as specs
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import publish

SPEC = {
  "embed": specs.Weight((48, 48), ("vocab", "embed")),
  "layers": {
    "q": specs.Weight((2, 48, 8, 4), ("layers", "embed", "heads", "head")),
  },
  "norm": specs.Weight((48,), ("norm",)),
}

# Training and generation devices: (count, axes). 8 -> 8 is colocated, sums
# above 8 overlap in part, the others are disjoint.
TRAIN = {
  1: (1, 1, 1),
  2: (1, 2, 1),
  4: (1, 2, 2),
  5: (5, 1, 1),
  6: (1, 6, 1),
  7: (7, 1, 1),
  8: (1, 8, 1),
}
SERVE = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 8: (2, 4)}
POWERS = (1, 2, 4, 8)
PAIRS = [
  ((1, 1, 1), (1, 1)),
  *((TRAIN[n], SERVE[m]) for n, m in ((4, 4), (8, 8), (6, 2), (5, 3), (7, 1))),
  # Finer, coarser and replicated targets of four and more devices.
  ((1, 2, 1), (1, 4)),
  ((1, 1, 2), (3, 2)),
  ((1, 4, 1), (4, 1)),
  ((1, 4, 1), (1, 4)),
  ((8, 1, 1), (1, 8)),
]


def training_mesh(axes) -> jax.sharding.Mesh:
  devices = np.asarray(jax.devices()[: int(np.prod(axes))])
  return meshes.over(devices.reshape(axes), ("data", "fsdp", "tensor"))


def generation_mesh(axes) -> jax.sharding.Mesh:
  devices = np.asarray(jax.devices()[8 - int(np.prod(axes)) : 8])
  return meshes.over(devices.reshape(axes), ("data", "tensor"))


@functools.cache
def placed(train, serve):
  """Shardings of both sides, the weights, and their values on the host."""
  source = meshes.weight_shardings(
    SPEC, meshes.TRAINING_RULES, training_mesh(train)
  )
  target = meshes.weight_shardings(
    SPEC, meshes.GENERATION_RULES, generation_mesh(serve)
  )
  draw = np.random.default_rng(0)
  host = jax.tree.map(
    lambda w: draw.standard_normal(w.shape).astype(np.float32),
    SPEC,
    is_leaf=lambda x: isinstance(x, specs.Weight),
  )
  return source, target, jax.device_put(host, source), host


def plan(source, target, dtype="bfloat16") -> publish.Publisher:
  return publish.plan(source, target, specs.abstract(SPEC, jnp.float32), dtype)


@functools.cache
def planned(train, serve, dtype="bfloat16") -> publish.Publisher:
  """Compiled once for all tests of one placement."""
  source, target, _, _ = placed(train, serve)
  return plan(source, target, dtype)


def assert_equal(got, expected) -> None:
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), got, expected
  )


def cast(host, dtype):
  return jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), host)


def pointers(tree) -> set:
  return {
    shard.data.unsafe_buffer_pointer()
    for leaf in jax.tree.leaves(tree)
    for shard in leaf.addressable_shards
  }


# Leaves that are split or whole on either side: how they train and generate.
WAYS = {
  "split": ((16, 16), jax.P("fsdp", "tensor"), jax.P(None, "tensor")),
  "gathered": ((8, 3), jax.P("fsdp"), jax.P()),
  "spread": ((3, 8), jax.P(), jax.P(None, "tensor")),
  "whole": ((5,), jax.P(), jax.P()),
}


def ways(train: int, serve: int, types: tuple[str, str]):
  """Shardings of `WAYS` between numbers of devices, and host values."""
  kinds = [getattr(jax.sharding.AxisType, kind) for kind in types]
  plain = (training_mesh(TRAIN[train]), generation_mesh(SERVE[serve]))
  home, away = (
    jax.sharding.Mesh(m.devices, m.axis_names, (kind,) * len(m.axis_names))
    for m, kind in zip(plain, kinds, strict=True)
  )
  source = {k: jax.NamedSharding(home, way[1]) for k, way in WAYS.items()}
  target = {k: jax.NamedSharding(away, way[2]) for k, way in WAYS.items()}
  draw = np.random.default_rng(0)
  host = {
    k: draw.standard_normal(way[0]).astype(np.float32)
    for k, way in WAYS.items()
  }
  return source, target, host


def shapes_of(host):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), host)
