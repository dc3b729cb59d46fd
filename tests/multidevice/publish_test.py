"""Weights arrive bit by bit, on any devices, and never through the host."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import array as jax_array

from jaxrl_post import types
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
  *((TRAIN[n], SERVE[m]) for n, m in itertools.product(POWERS, POWERS)),
  *((TRAIN[n], SERVE[m]) for n, m in ((6, 2), (5, 3), (7, 1))),
  # Finer, coarser and replicated targets of four and more devices.
  ((1, 2, 1), (1, 4)),
  ((1, 1, 2), (3, 2)),
  ((1, 4, 1), (4, 1)),
  ((1, 4, 1), (1, 4)),
  ((8, 1, 1), (1, 8)),
]


def _training_mesh(axes) -> jax.sharding.Mesh:
  devices = np.asarray(jax.devices()[: int(np.prod(axes))])
  return meshes.over(devices.reshape(axes), ("data", "fsdp", "tensor"))


def _generation_mesh(axes) -> jax.sharding.Mesh:
  devices = np.asarray(jax.devices()[8 - int(np.prod(axes)) : 8])
  return meshes.over(devices.reshape(axes), ("data", "tensor"))


@functools.cache
def _placed(train, serve):
  """Shardings of both sides, the weights, and their values on the host."""
  source = meshes.weight_shardings(
    SPEC, meshes.TRAINING_RULES, _training_mesh(train)
  )
  target = meshes.weight_shardings(
    SPEC, meshes.GENERATION_RULES, _generation_mesh(serve)
  )
  draw = np.random.default_rng(0)
  host = jax.tree.map(
    lambda w: draw.standard_normal(w.shape).astype(np.float32),
    SPEC,
    is_leaf=lambda x: isinstance(x, specs.Weight),
  )
  return source, target, jax.device_put(host, source), host


def _plan(source, target, dtype="bfloat16") -> publish.Publisher:
  return publish.plan(source, target, specs.abstract(SPEC, jnp.float32), dtype)


@functools.cache
def _planned(train, serve, dtype="bfloat16") -> publish.Publisher:
  """Compiled once for all tests of one placement."""
  source, target, _, _ = _placed(train, serve)
  return _plan(source, target, dtype)


def _assert_equal(got, expected) -> None:
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), got, expected
  )


def _cast(host, dtype):
  return jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), host)


def _pointers(tree) -> set:
  return {
    shard.data.unsafe_buffer_pointer()
    for leaf in jax.tree.leaves(tree)
    for shard in leaf.addressable_shards
  }


@pytest.fixture(name="pulls")
def _pulls(monkeypatch):
  """Counts the arrays that are copied to the host."""
  seen = []
  value = jax_array.ArrayImpl._value.fget

  def counting(self):
    seen.append(self.shape)
    return value(self)

  monkeypatch.setattr(jax_array.ArrayImpl, "_value", property(counting))
  return seen


def test_a_plain_put_between_unlike_meshes_does_pass_through_the_host(
  pulls,
) -> None:
  train, serve = _training_mesh((1, 4, 1)), _generation_mesh((1, 4))
  x = jax.device_put(
    np.ones((8, 8), np.float32),
    jax.sharding.NamedSharding(train, jax.P("fsdp")),
  )
  to = jax.sharding.NamedSharding(serve, jax.P(None, "tensor"))
  jax.block_until_ready(jax.device_put(x, to))
  assert pulls == [(8, 8)]


@pytest.mark.parametrize(("train", "serve"), PAIRS)
def test_every_weight_arrives_and_none_through_the_host(
  train, serve, pulls
) -> None:
  _, target, params, host = _placed(train, serve)
  publisher = _planned(train, serve)
  pulls.clear()
  got, fingerprints = jax.block_until_ready(publisher(params))
  assert pulls == []
  publish.verify(fingerprints)
  assert jax.tree.map(lambda x: x.sharding, got) == target
  _assert_equal(got, _cast(host, "bfloat16"))
  _assert_equal(params, host)


@pytest.mark.parametrize("serve", [(1, 4), (4, 1), (2, 2)])
def test_devices_in_another_order_are_no_host_copy(serve, pulls) -> None:
  source, _, params, host = _placed((1, 4, 1), serve)
  devices = np.asarray(jax.devices()[3::-1]).reshape(serve)
  target = meshes.weight_shardings(
    SPEC, meshes.GENERATION_RULES, meshes.over(devices, ("data", "tensor"))
  )
  publisher = _plan(source, target, "float32")
  pulls.clear()
  got, fingerprints = jax.block_until_ready(publisher(params))
  assert pulls == []
  publish.verify(fingerprints)
  _assert_equal(got, host)


def test_the_callers_mesh_does_not_matter() -> None:
  _, _, params, host = _placed((1, 4, 1), (2, 2))
  publisher = _planned((1, 4, 1), (2, 2))
  for mesh in (_training_mesh((1, 4, 1)), _generation_mesh((2, 2))):
    with jax.set_mesh(mesh):
      got, fingerprints = publisher(params)
      publish.verify(fingerprints)
    _assert_equal(got, _cast(host, "bfloat16"))


@pytest.mark.parametrize("serve", [0, 1])
def test_c65_the_cast_is_on_the_way_out_only(serve) -> None:
  devices = jax.devices()
  values = np.asarray([0.1, 1.001, -2.3, 0.001], np.float32)
  here, there = (
    {"w": jax.sharding.NamedSharding(_mesh_of(d), jax.P())}
    for d in (devices[0], devices[serve])
  )
  shapes = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
  publisher = publish.plan(here, there, shapes, "bfloat16")
  params = jax.device_put({"w": values}, here)
  for _ in range(100):
    got, fingerprints = publisher(params)
  publish.verify(fingerprints)
  assert got["w"].astype(jnp.float32).tolist() == [
    0.10009765625,
    1.0,
    -2.296875,
    0.00099945068359375,
  ]
  assert np.asarray(params["w"]).tobytes() == values.tobytes()


def _mesh_of(device) -> jax.sharding.Mesh:
  return meshes.over(np.asarray([device]), ("data",))


@pytest.mark.parametrize("serve", [(2, 2), (2, 4)])
def test_c61_each_leaf_arrives_and_has_its_own_fingerprint(serve) -> None:
  train = (1, 8, 1) if serve == (2, 4) else (1, 4, 1)
  _, target, params, host = _placed(train, serve)
  publisher = _planned(train, serve)
  before, (base, _) = publisher(params)
  names = [leaf.name for leaf in publisher.leaves]
  assert len(names) == len(jax.tree.leaves(target)) == len(base)
  flat, tree = jax.tree.flatten(params)
  for number, name in enumerate(names):
    changed = list(flat)
    changed[number] = flat[number] + 0.01
    got, fingerprints = publisher(jax.tree.unflatten(tree, changed))
    publish.verify(fingerprints)
    for other, (x, y) in enumerate(
      zip(jax.tree.leaves(got), jax.tree.leaves(before), strict=True)
    ):
      same = np.array_equal(np.asarray(x), np.asarray(y))
      assert same == (other != number)
    sums = {n: int(v[0]) for n, v in fingerprints[0].items()}
    assert [n for n in names if sums[n] != int(base[n][0])] == [name]


def test_c61_a_missing_or_extra_leaf_is_refused_by_name() -> None:
  source, target, params, _ = _placed((1, 4, 1), (2, 2))
  short = {k: v for k, v in source.items() if k != "norm"}
  long = {**source, "bias": source["norm"]}
  with pytest.raises(types.InputError, match=r"missing \['norm'\], extra none"):
    _plan(short, target)
  with pytest.raises(types.InputError, match=r"missing none, extra \['bias'\]"):
    _plan(long, target)
  publisher = _planned((1, 4, 1), (2, 2))
  with pytest.raises(types.InputError, match=r"missing \['norm'\]"):
    publisher({k: v for k, v in params.items() if k != "norm"})
  with pytest.raises(types.InputError, match=r"extra \['bias'\]"):
    publisher({**params, "bias": params["norm"]})


def test_c61_a_wrong_shape_is_refused_by_name() -> None:
  source, target, params, _ = _placed((1, 4, 1), (2, 2))
  shapes = specs.abstract(SPEC, jnp.float32)
  shapes["embed"] = jax.ShapeDtypeStruct((45, 48), jnp.float32)
  with pytest.raises(types.InputError, match=r"\['embed'\]: .* got \[45, 48\]"):
    publish.plan(source, target, shapes, "bfloat16")
  publisher = _planned((1, 4, 1), (2, 2))
  wider = jax.device_put(jnp.zeros((64, 48)), source["embed"])
  with pytest.raises(types.InputError, match=r"float32\[64, 48\]"):
    publisher({**params, "embed": wider})
  half = params["embed"].astype(jnp.bfloat16)
  with pytest.raises(types.InputError, match=r"\['embed'\]: .* got bfloat16"):
    publisher({**params, "embed": half})
  moved = jax.device_put(params["norm"], jax.devices()[7])
  with pytest.raises(types.InputError, match=r"\['norm'\]"):
    publisher({**params, "norm": moved})


def test_leaves_on_two_meshes_are_refused() -> None:
  source, target, _, _ = _placed((1, 4, 1), (2, 2))
  with pytest.raises(types.InputError, match="source leaves on one mesh"):
    _plan({**source, "norm": target["norm"]}, target)


@pytest.mark.parametrize("count", [1, 8])
def test_equal_layouts_are_aliases_and_cost_nothing(count, pulls) -> None:
  """One device under two meshes is one layout; so is one mesh of eight."""
  source, target, params, host = _placed((1, count, 1), (1, 1))
  if count == 8:
    target = source
  else:
    mesh = meshes.over(np.asarray([jax.devices()[0:1]]), ("data", "tensor"))
    target = meshes.weight_shardings(SPEC, meshes.GENERATION_RULES, mesh)
  publisher = _plan(source, target, "float32")
  pulls.clear()
  got, fingerprints = publisher(params)
  assert publisher.aliases
  assert publisher.bytes == 0
  assert pulls == []
  assert fingerprints == ({}, {})
  publish.verify(fingerprints)
  assert _pointers(got) == _pointers(params)
  assert jax.tree.map(lambda x: x.sharding, got) == target
  _assert_equal(got, host)


def test_some_leaves_may_be_aliases_and_the_others_move() -> None:
  _, _, params, host = _placed((1, 8, 1), (8, 1))
  publisher = _planned((1, 8, 1), (8, 1), "float32")
  got, fingerprints = publisher(params)
  assert publisher.aliases
  names = {leaf.name for leaf in publisher.leaves if leaf.is_alias}
  assert names == {"['norm']"}
  assert fingerprints[0].keys() == fingerprints[1].keys()
  assert not names & fingerprints[0].keys()
  assert _pointers(got["norm"]) == _pointers(params["norm"])
  publish.verify(fingerprints)
  _assert_equal(got, host)


@pytest.mark.parametrize(
  ("train", "serve", "dtype"),
  [
    ((1, 8, 1), (2, 4), "bfloat16"),  # in place, cast
    ((1, 4, 1), (2, 2), "float32"),  # disjoint
    ((1, 1, 1), (1, 1), "float32"),  # disjoint, one to one
    ((1, 8, 1), (2, 2), "float32"),  # overlapping
  ],
)
def test_donating_what_was_published_leaves_the_policy(
  train, serve, dtype
) -> None:
  _, _, params, host = _placed(train, serve)
  publisher = _planned(train, serve, dtype)
  assert not publisher.aliases
  update = jax.jit(
    lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0
  )
  params = jax.tree.map(lambda x: x + 0, params)
  got, fingerprints = publisher(params)
  assert not _pointers(got) & _pointers(params)
  new = update(params)
  assert all(x.is_deleted() for x in jax.tree.leaves(params))
  _assert_equal(got, _cast(host, dtype))
  publish.verify(fingerprints)
  _assert_equal(new, jax.tree.map(lambda x: np.full_like(x, -1), host))


def test_an_in_place_move_in_one_dtype_is_no_alias_where_layouts_differ() -> (
  None
):
  _, _, params, _ = _placed((1, 8, 1), (2, 4))
  publisher = _planned((1, 8, 1), (2, 4), "float32")
  got, _ = publisher(params)
  for leaf, x, y in zip(
    publisher.leaves,
    jax.tree.leaves(got),
    jax.tree.leaves(params),
    strict=True,
  ):
    assert bool(_pointers(x) & _pointers(y)) == leaf.is_alias


def test_bytes_are_what_the_target_lacks() -> None:
  split = (48 * 48 + 2 * 48 * 8 * 4) // 2
  assert _planned((1, 4, 1), (2, 2)).bytes == 4 * 2 * (split + 48)
  # In place: half of the rows are there, of the half of the columns needed.
  mesh = meshes.over(np.asarray(jax.devices()[:2]), ("x",))
  rows, columns = (
    {"w": jax.sharding.NamedSharding(mesh, spec)}
    for spec in (jax.P("x"), jax.P(None, "x"))
  )
  shapes = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
  assert publish.plan(rows, columns, shapes, "float32").bytes == 2 * 4 * 4


def test_repeated_publishes_compile_once() -> None:
  compiled = []

  def listen(event: str, _: float, **__) -> None:
    if event.endswith("backend_compile_duration"):
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    for train, serve in (((1, 8, 1), (2, 4)), ((1, 2, 1), (1, 4))):
      source, target, params, _ = _placed(train, serve)
      publisher = _plan(source, target)
      compiled.clear()
      jax.block_until_ready(publisher(params))
      assert len(compiled) == 2  # one program on each side
      compiled.clear()
      for _ in range(3):
        jax.block_until_ready(publisher(params))
      assert not compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


# -------------------------------------------------------------- fingerprints


def _layouts():
  """The same array can lie in all of these ways."""
  devices = np.asarray(jax.devices()[:8])
  flat = meshes.over(devices, ("a",))
  cube = meshes.over(devices.reshape(2, 4), ("a", "b"))
  one = meshes.over(devices[:1], ("a",))
  return [
    jax.sharding.NamedSharding(one, jax.P()),
    *(
      jax.sharding.NamedSharding(flat, jax.P(*spec))
      for spec in ((), ("a",), (None, "a"), (None, None, "a"))
    ),
    *(
      jax.sharding.NamedSharding(cube, jax.P(*spec))
      for spec in (("b",), ("a", "b"), ("b", None, "a"), (None, ("b", "a")))
    ),
  ]


def _checksum(x: np.ndarray, sharding) -> int:
  placed = jax.device_put(x, sharding)
  sums = jax.jit(lambda x: publish.checksum(x, sharding))(placed)
  values = set(np.asarray(sums).tolist())
  assert len(values) == 1
  return values.pop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checksum_is_the_same_in_any_sharding(dtype) -> None:
  x = np.random.default_rng(1).standard_normal((8, 16, 8)).astype(dtype)
  assert len({_checksum(x, layout) for layout in _layouts()}) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checksum_changes_with_any_one_bit(dtype) -> None:
  x = np.random.default_rng(1).standard_normal((8, 4)).astype(dtype)
  layout = _layouts()[1]
  sums = jax.jit(lambda x: publish.checksum(x, layout)[0])
  word = np.dtype(f"uint{8 * x.dtype.itemsize}")
  seen = {int(sums(x))}
  for bit in range(8 * x.dtype.itemsize):
    for place in (0, 13, 31):
      y = x.copy()
      y.view(word).flat[place] ^= word.type(1 << bit)
      seen.add(int(sums(y)))
  assert len(seen) == 1 + 3 * 8 * x.dtype.itemsize


def test_a_checksum_changes_when_two_elements_change_places() -> None:
  x = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
  layout = _layouts()[1]
  sums = jax.jit(lambda x: publish.checksum(x, layout)[0])
  seen = {int(sums(x))}
  for i, j in itertools.combinations(range(30), 2):
    y = x.copy()
    y.flat[[i, j]] = x.flat[[j, i]]
    seen.add(int(sums(y)))
  assert len(seen) == 1 + 30 * 29 // 2


def test_verify_names_the_leaf_that_differs() -> None:
  _, _, params, _ = _placed((1, 4, 1), (2, 2))
  publisher = _planned((1, 4, 1), (2, 2))
  _, (before, after) = publisher(params)
  after["['norm']"] = after["['norm']"] + jnp.uint32(1)
  with pytest.raises(types.RunError, match=r"others for \['norm'\]\."):
    publish.verify((before, after))
  del after["['norm']"]
  with pytest.raises(types.RunError, match=r"others for \['norm'\]\."):
    publish.verify((before, after))


def test_one_corrupt_copy_on_one_device_is_found() -> None:
  _, _, params, _ = _placed((1, 4, 1), (4, 1))
  publisher = _planned((1, 4, 1), (4, 1))
  got, (before, _) = publisher(params)
  shards = [shard.data for shard in got["norm"].addressable_shards]
  shards[2] = shards[2].at[5].add(jnp.bfloat16(1))
  corrupt = jax.make_array_from_single_device_arrays(
    got["norm"].shape, got["norm"].sharding, shards
  )
  flat = jax.tree.leaves({**got, "norm": corrupt})
  with pytest.raises(types.RunError, match=r"others for \['norm'\]\."):
    publish.verify((before, publisher.check(flat)))


def test_a_fingerprint_is_of_what_was_sent_not_of_what_was_trained() -> None:
  _, _, params, _ = _placed((1, 4, 1), (2, 2))
  publisher = _planned((1, 4, 1), (2, 2))
  lossy = dataclasses.replace(
    publisher,
    send=lambda arrays: publisher.send([x * 2 for x in arrays]),
  )
  _, fingerprints = publisher(params)
  _, doubled = lossy(params)
  with pytest.raises(types.RunError, match="embed"):
    publish.verify((fingerprints[0], doubled[1]))
