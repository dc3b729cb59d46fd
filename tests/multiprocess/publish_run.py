"""One of several processes that train together and each publish to themselves.

    python publish_run.py PORT PROCESS PROCESSES

Writes one line of JSON: what it did, by mode and dtype.
"""

import json
import sys

import jax
import numpy as np
from jax._src import array as jax_array

from jaxrl_post import types
from jaxrl_post.placement import fingerprint, publish

DEVICES = 8
SHAPES = {
  "rows": (8, 48),
  "layers": {"q": (2, 16, 8, 4), "o": (2, 8, 4, 16)},
  "bias": (24,),
  "norm": (5,),
}
# How each leaf trains and generates: all ways of split and whole.
TRAINED = {
  "rows": jax.P("fsdp", None),
  "layers": {
    "q": jax.P(None, "fsdp", "tensor"),
    "o": jax.P(None, "tensor", None, "fsdp"),
  },
  "bias": jax.P(),
  "norm": jax.P(),
}
SERVED = {
  "rows": jax.P(None, "tensor"),
  "layers": {"q": jax.P(None, None, "tensor"), "o": jax.P()},
  "bias": jax.P("tensor"),
  "norm": jax.P(),
}


def _is_spec(x: object) -> bool:
  return isinstance(x, jax.P)


def _placed(mesh: jax.sharding.Mesh, specs: types.Tree) -> types.Tree:
  return jax.tree.map(
    lambda spec: jax.sharding.NamedSharding(mesh, spec), specs, is_leaf=_is_spec
  )


def _mesh(devices: np.ndarray, names: tuple[str, ...], kind: str):
  axis_type = getattr(jax.sharding.AxisType, kind)
  return jax.sharding.Mesh(devices, names, axis_types=(axis_type,) * len(names))


def _meshes(mode: str, kind: str) -> tuple:
  """Returns the training mesh of all and the generation mesh of this one."""
  devices = np.asarray(jax.devices()).reshape(jax.process_count(), -1)
  mine = devices[jax.process_index()]
  half = devices.shape[1] // 2
  train, serve = devices, mine
  if mode == "split":
    train, serve = devices[:, :half], mine[half:]
  fsdp = max(train.size // 2, jax.process_count())
  home = _mesh(train.reshape(1, fsdp, -1), ("data", "fsdp", "tensor"), kind)
  tensor = min(2, serve.size)
  return home, _mesh(serve.reshape(-1, tensor), ("data", "tensor"), kind)


def _host(version: int) -> types.Tree:
  draw = np.random.default_rng(version)
  return jax.tree.map(
    lambda shape: draw.standard_normal(shape).astype(np.float32),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def _trained(host: types.Tree, source: types.Tree) -> types.Tree:
  return jax.tree.map(
    lambda x, s: jax.make_array_from_callback(x.shape, s, lambda at: x[at]),
    host,
    source,
  )


def _same(got: types.Tree, host: types.Tree, dtype: str) -> None:
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(
      np.asarray(x), y.astype(jax.numpy.dtype(dtype))
    ),
    got,
    host,
  )


def _corrupt_here(got: jax.Array) -> jax.Array:
  """Changes one element of one copy, in process 1 only."""
  shards = [shard.data for shard in got.addressable_shards]
  if jax.process_index() == 1:
    shards[-1] = shards[-1].at[0].add(np.ones((), shards[-1].dtype))
  return jax.make_array_from_single_device_arrays(
    got.shape, got.sharding, shards
  )


def _refused(way, before: types.Tree, got: types.Tree) -> str:
  """Says what `verify` says of a corrupt copy."""
  flat = jax.tree.leaves({**got, "norm": _corrupt_here(got["norm"])})
  try:
    fingerprint.verify((before, way.check(flat)))
  except types.RunError as error:
    return str(error)
  return ""


def run(mode: str, kind: str, dtype: str, pulls: list) -> dict:
  """Publishes a version, and on Auto axes another one in chunks."""
  home, away = _meshes(mode, kind)
  source, target = _placed(home, TRAINED), _placed(away, SERVED)
  host = _host(0)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), host)
  publisher = publish.plan(source, target, shapes, dtype)
  params = _trained(host, source)
  pulls.clear()
  got, fingerprints = jax.block_until_ready(publisher(params))
  pulled = len(pulls)
  fingerprint.verify(fingerprints)
  assert jax.tree.map(lambda x: x.sharding, got) == target
  _same(got, host, dtype)
  refused = ""
  if not publisher.aliases:
    refused = _refused(publisher.ways[0], fingerprints[0], got)

  done = {
    "mode": mode,
    "kind": kind,
    "dtype": dtype,
    "pulls": pulled,
    "refused": refused,
    "aliases": publisher.aliases,
    "fingerprints": sorted(fingerprints[1]),
  }
  if kind == "Explicit":
    return done

  chunked = publish.plan(source, target, shapes, dtype, chunk_bytes=1500)
  later = _host(1)
  params = _trained(later, source)
  pulls.clear()
  got, fingerprints = chunked(params)
  jax.block_until_ready((got, fingerprints))
  pulled += len(pulls)
  fingerprint.verify(fingerprints)
  _same(got, later, dtype)
  return {
    **done,
    "pulls": pulled,
    "chunks": len(chunked.ways),
  }


def _foreign() -> str:
  """Says how a generation mesh of another process's devices is refused."""
  home, _ = _meshes("split", "Auto")
  devices = np.asarray(jax.devices()).reshape(jax.process_count(), -1)
  other = devices[(jax.process_index() + 1) % jax.process_count()]
  away = _mesh(other[-1:].reshape(1, 1), ("data", "tensor"), "Auto")
  shapes = {"norm": jax.ShapeDtypeStruct((5,), np.float32)}
  places = [{"norm": _placed(m, jax.P())} for m in (home, away)]
  try:
    publish.plan(places[0], places[1], shapes, "float32")
  except types.InputError as error:
    return str(error)
  return ""


def main() -> None:
  """Joins the others and publishes in every mode."""
  port, process, processes = map(int, sys.argv[1:])
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES // processes)
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  jax.distributed.initialize(
    f"localhost:{port}", processes, process, initialization_timeout=60
  )
  pulls: list = []
  value = jax_array.ArrayImpl._value.fget

  def counting(self):
    pulls.append(self.shape)
    return value(self)

  setattr(jax_array.ArrayImpl, "_value", property(counting))  # noqa: B010
  cases = [
    ("split", "Auto", "bfloat16"),
    ("split", "Explicit", "float32"),
    ("colocated", "Auto", "float32"),
    ("colocated", "Explicit", "bfloat16"),
  ]
  done = [run(*case, pulls) for case in cases]
  print(json.dumps({"runs": done, "foreign": _foreign()}), flush=True)


if __name__ == "__main__":
  main()
