"""Weights arrive bit by bit, on any devices, and never through the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import fingerprint, publish
from jaxrl_post.placement import mesh as meshes
from tests.multidevice import publishing


def test_a_plain_put_between_unlike_meshes_does_pass_through_the_host(
  pulls,
) -> None:
  train, serve = (
    publishing.training_mesh((1, 4, 1)),
    publishing.generation_mesh((1, 4)),
  )
  x = jax.device_put(
    np.ones((8, 8), np.float32),
    jax.sharding.NamedSharding(train, jax.P("fsdp")),
  )
  to = jax.sharding.NamedSharding(serve, jax.P(None, "tensor"))
  jax.block_until_ready(jax.device_put(x, to))
  assert pulls == [(8, 8)]


@pytest.mark.parametrize(("train", "serve"), publishing.PAIRS)
def test_every_weight_arrives_and_none_through_the_host(
  train, serve, pulls
) -> None:
  _, target, params, host = publishing.placed(train, serve)
  publisher = publishing.planned(train, serve)
  pulls.clear()
  got, fingerprints = jax.block_until_ready(publisher(params))
  assert pulls == []
  fingerprint.verify(fingerprints)
  assert jax.tree.map(lambda x: x.sharding, got) == target
  publishing.assert_equal(got, publishing.cast(host, "bfloat16"))
  publishing.assert_equal(params, host)


def _arrives(train, serve, kinds, dtype, pulls) -> None:
  source, target, host = publishing.ways(train, serve, kinds)
  shapes = publishing.shapes_of(host)
  publisher = publish.plan(source, target, shapes, dtype)
  params = jax.device_put(host, source)
  pulls.clear()
  got, fingerprints = jax.block_until_ready(publisher(params))
  assert pulls == []
  fingerprint.verify(fingerprints)
  assert jax.tree.map(lambda x: x.sharding, got) == target
  moving = {leaf.name for leaf in publisher.leaves if not leaf.is_alias}
  assert fingerprints[0].keys() == fingerprints[1].keys() == moving
  publishing.assert_equal(got, publishing.cast(host, dtype))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("serve", publishing.POWERS)
@pytest.mark.parametrize("train", publishing.POWERS)
def test_split_and_whole_leaves_arrive_on_either_kind_of_axes(
  train, serve, kind, pulls
) -> None:
  _arrives(train, serve, (kind, kind), "float32", pulls)


@pytest.mark.parametrize(("train", "serve"), [(1, 1), (2, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("kinds", [("Auto", "Explicit"), ("Explicit", "Auto")])
def test_axes_may_be_of_another_kind_on_the_other_side(
  train, serve, kinds, pulls
) -> None:
  _arrives(train, serve, kinds, "bfloat16", pulls)


@pytest.mark.parametrize("serve", [(1, 4), (4, 1), (2, 2)])
def test_devices_in_another_order_are_no_host_copy(serve, pulls) -> None:
  source, _, params, host = publishing.placed((1, 4, 1), serve)
  devices = np.asarray(jax.devices()[3::-1]).reshape(serve)
  target = meshes.weight_shardings(
    publishing.SPEC,
    meshes.GENERATION_RULES,
    meshes.over(devices, ("data", "tensor")),
  )
  publisher = publishing.plan(source, target, "float32")
  pulls.clear()
  got, fingerprints = jax.block_until_ready(publisher(params))
  assert pulls == []
  fingerprint.verify(fingerprints)
  publishing.assert_equal(got, host)


def test_the_callers_mesh_does_not_matter() -> None:
  _, _, params, host = publishing.placed((1, 4, 1), (2, 2))
  publisher = publishing.planned((1, 4, 1), (2, 2))
  for mesh in (
    publishing.training_mesh((1, 4, 1)),
    publishing.generation_mesh((2, 2)),
  ):
    with jax.set_mesh(mesh):
      got, fingerprints = publisher(params)
      fingerprint.verify(fingerprints)
    publishing.assert_equal(got, publishing.cast(host, "bfloat16"))


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
  fingerprint.verify(fingerprints)
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
  _, target, params, host = publishing.placed(train, serve)
  publisher = publishing.planned(train, serve)
  before, (base, _) = publisher(params)
  names = [leaf.name for leaf in publisher.leaves]
  assert len(names) == len(jax.tree.leaves(target)) == len(base)
  flat, tree = jax.tree.flatten(params)
  for number, name in enumerate(names):
    changed = list(flat)
    changed[number] = flat[number] + 0.01
    got, fingerprints = publisher(jax.tree.unflatten(tree, changed))
    fingerprint.verify(fingerprints)
    for other, (x, y) in enumerate(
      zip(jax.tree.leaves(got), jax.tree.leaves(before), strict=True)
    ):
      same = np.array_equal(np.asarray(x), np.asarray(y))
      assert same == (other != number)
    sums = {n: int(v[0]) for n, v in fingerprints[0].items()}
    assert [n for n in names if sums[n] != int(base[n][0])] == [name]


def test_c61_a_missing_or_extra_leaf_is_refused_by_name() -> None:
  source, target, params, _ = publishing.placed((1, 4, 1), (2, 2))
  short = {k: v for k, v in source.items() if k != "norm"}
  long = {**source, "bias": source["norm"]}
  with pytest.raises(types.InputError, match=r"missing \['norm'\], extra none"):
    publishing.plan(short, target)
  with pytest.raises(types.InputError, match=r"missing none, extra \['bias'\]"):
    publishing.plan(long, target)
  publisher = publishing.planned((1, 4, 1), (2, 2))
  with pytest.raises(types.InputError, match=r"missing \['norm'\]"):
    publisher({k: v for k, v in params.items() if k != "norm"})
  with pytest.raises(types.InputError, match=r"extra \['bias'\]"):
    publisher({**params, "bias": params["norm"]})


def test_c61_a_wrong_shape_is_refused_by_name() -> None:
  source, target, params, _ = publishing.placed((1, 4, 1), (2, 2))
  shapes = specs.abstract(publishing.SPEC, jnp.float32)
  shapes["embed"] = jax.ShapeDtypeStruct((45, 48), jnp.float32)
  with pytest.raises(types.InputError, match=r"\['embed'\]: .* got \[45, 48\]"):
    publish.plan(source, target, shapes, "bfloat16")
  publisher = publishing.planned((1, 4, 1), (2, 2))
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
  source, target, _, _ = publishing.placed((1, 4, 1), (2, 2))
  with pytest.raises(types.InputError, match="source leaves on one mesh"):
    publishing.plan({**source, "norm": target["norm"]}, target)


@pytest.mark.parametrize("count", [1, 8])
def test_equal_layouts_are_aliases_and_cost_nothing(count, pulls) -> None:
  """One device under two meshes is one layout; so is one mesh of eight."""
  source, target, params, host = publishing.placed((1, count, 1), (1, 1))
  if count == 8:
    target = source
  else:
    mesh = meshes.over(np.asarray([jax.devices()[0:1]]), ("data", "tensor"))
    target = meshes.weight_shardings(
      publishing.SPEC, meshes.GENERATION_RULES, mesh
    )
  publisher = publishing.plan(source, target, "float32")
  pulls.clear()
  got, fingerprints = publisher(params)
  assert publisher.aliases
  assert publisher.bytes == 0
  assert pulls == []
  assert fingerprints == ({}, {})
  fingerprint.verify(fingerprints)
  assert publishing.pointers(got) == publishing.pointers(params)
  assert jax.tree.map(lambda x: x.sharding, got) == target
  publishing.assert_equal(got, host)


def test_some_leaves_may_be_aliases_and_the_others_move() -> None:
  _, _, params, host = publishing.placed((1, 8, 1), (8, 1))
  publisher = publishing.planned((1, 8, 1), (8, 1), "float32")
  got, fingerprints = publisher(params)
  assert publisher.aliases
  names = {leaf.name for leaf in publisher.leaves if leaf.is_alias}
  assert names == {"['norm']"}
  assert fingerprints[0].keys() == fingerprints[1].keys()
  assert not names & fingerprints[0].keys()
  assert publishing.pointers(got["norm"]) == publishing.pointers(params["norm"])
  fingerprint.verify(fingerprints)
  publishing.assert_equal(got, host)


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
  _, _, params, host = publishing.placed(train, serve)
  publisher = publishing.planned(train, serve, dtype)
  assert not publisher.aliases
  update = jax.jit(
    lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0
  )
  params = jax.tree.map(lambda x: x + 0, params)
  got, fingerprints = publisher(params)
  assert not publishing.pointers(got) & publishing.pointers(params)
  new = update(params)
  assert all(x.is_deleted() for x in jax.tree.leaves(params))
  publishing.assert_equal(got, publishing.cast(host, dtype))
  fingerprint.verify(fingerprints)
  publishing.assert_equal(
    new, jax.tree.map(lambda x: np.full_like(x, -1), host)
  )


def test_an_in_place_move_in_one_dtype_is_no_alias_where_layouts_differ() -> (
  None
):
  _, _, params, _ = publishing.placed((1, 8, 1), (2, 4))
  publisher = publishing.planned((1, 8, 1), (2, 4), "float32")
  got, _ = publisher(params)
  for leaf, x, y in zip(
    publisher.leaves,
    jax.tree.leaves(got),
    jax.tree.leaves(params),
    strict=True,
  ):
    assert (
      bool(publishing.pointers(x) & publishing.pointers(y)) == leaf.is_alias
    )


def test_bytes_are_what_the_target_lacks() -> None:
  split = (48 * 48 + 2 * 48 * 8 * 4) // 2
  assert publishing.planned((1, 4, 1), (2, 2)).bytes == 4 * 2 * (split + 48)
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
      source, target, params, _ = publishing.placed(train, serve)
      publisher = publishing.plan(source, target)
      compiled.clear()
      jax.block_until_ready(publisher(params))
      assert len(compiled) == 2  # one program on each side
      compiled.clear()
      for _ in range(3):
        jax.block_until_ready(publisher(params))
      assert not compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
