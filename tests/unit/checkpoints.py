"""Makes checkpoints, damages them, and reads them back."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_post import types
from jaxrl_post.runtime import checkpoint

AUTO = jax.sharding.AxisType.Auto


def sharding(devices: int, *axes: str | None) -> jax.sharding.NamedSharding:
  mesh = jax.make_mesh(
    (devices,), ("fsdp",), (AUTO,), devices=jax.devices()[:devices]
  )
  return jax.sharding.NamedSharding(mesh, jax.P(*axes))


def make_state(step: int = 3, size: int = 16, devices: int = 8):
  rows, whole = sharding(devices, "fsdp"), sharding(devices)
  rng = np.random.default_rng(step)
  params = {
    "half": jnp.asarray(rng.normal(size=(size, 4)), jnp.bfloat16),
    "full": jnp.asarray(rng.normal(size=(size,)), jnp.float32),
    "bits": jnp.asarray(rng.integers(0, 2**32, size, np.uint32)),
    "odd": jnp.array([np.nan, -0.0, np.inf] + [1e-45] * (size - 3), np.float32),
  }
  params = jax.device_put(params, rows)
  opt_state = jax.device_put(optax.adamw(1e-3).init(params), whole)
  return types.TrainState(
    step=jax.device_put(jnp.int32(step), whole),
    version=jax.device_put(jnp.int32(step - 1), whole),
    params=params,
    opt_state=opt_state,
    key=jax.device_put(jax.random.key(step), whole),
  )


def abstract(state, shardings=None):
  if shardings is None:
    shardings = jax.tree.map(lambda x: x.sharding, state)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    state,
    shardings,
  )


def bits(tree) -> list[bytes]:
  def raw(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    return str(x.dtype).encode() + np.asarray(x).tobytes()

  return [raw(x) for x in jax.tree.leaves(tree)]


def save(folder, *steps: int, keep: int = 10) -> None:
  store = checkpoint.Store(folder, checkpoint.Checkpoint(keep=keep))
  for step in steps:
    store.save(step, make_state(step), {"step": step})
  store.close()


def names(folder: pathlib.Path) -> set[str]:
  return {path.name for path in folder.iterdir()}


def restore(folder):
  store = checkpoint.Store(folder, checkpoint.Checkpoint())
  found = store.restore(abstract(make_state()))
  store.close()
  return found


def damage(path: pathlib.Path, how: str) -> None:
  data = path.read_bytes()
  middle = len(data) // 2
  if how == "missing":
    path.unlink()
  elif how == "truncated":
    path.write_bytes(data[:middle])
  else:
    other = bytes([data[middle] ^ 255]) if data else b"x"
    path.write_bytes(data[:middle] + other + data[middle + 1 :])


def like(shape, dtype):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(8))
