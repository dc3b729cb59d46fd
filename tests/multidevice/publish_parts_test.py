"""Weights travel in chunks, in part, and into memory of the old ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.placement import fingerprint, publish, traffic
from jaxrl_post.placement import mesh as meshes
from tests.multidevice import publishing

TRAIN, SERVE = (1, 4, 1), (2, 2)
# Bytes of a copy in bfloat16.
EMBED, Q, NORM = 2 * 48 * 48, 2 * 2 * 48 * 8 * 4, 2 * 48


def _planned(dtype="bfloat16", **options) -> publish.Publisher:
  source, target, _, _ = publishing.placed(TRAIN, SERVE)
  shapes = publishing.shapes_of(publishing.placed(TRAIN, SERVE)[3])
  return publish.plan(source, target, shapes, dtype, **options)


def _changed(params):
  """All leaves of another value, in the same places."""
  return jax.tree.map(lambda x: x + 1, params)


# -------------------------------------------------------------------- chunks


@pytest.mark.parametrize(
  ("chunk_bytes", "chunks"),
  [
    (None, [3]),
    (EMBED + Q + NORM, [3]),
    (EMBED + Q, [2, 1]),
    (Q + NORM, [1, 2]),
    (1, [1, 1, 1]),
  ],
)
def test_a_chunk_has_at_most_that_many_bytes_or_one_leaf(
  chunk_bytes, chunks
) -> None:
  publisher = _planned(chunk_bytes=chunk_bytes)
  assert [len(way.leaves) for way in publisher.ways] == chunks
  assert publisher.bytes == _planned().bytes


def test_all_chunks_arrive() -> None:
  _, target, params, host = publishing.placed(TRAIN, SERVE)
  got, fingerprints = _planned(chunk_bytes=1)(params)
  fingerprint.verify(fingerprints)
  assert len(fingerprints[0]) == len(fingerprints[1]) == 3
  assert jax.tree.map(lambda x: x.sharding, got) == target
  publishing.assert_equal(got, publishing.cast(host, "bfloat16"))


def test_a_chunk_is_sent_when_the_one_before_has_arrived(monkeypatch) -> None:
  _, _, params, _ = publishing.placed(TRAIN, SERVE)
  publisher = _planned(chunk_bytes=1)
  events = []
  wait = jax.block_until_ready

  def waiting(x):
    events.append(("wait", len(x)))
    return wait(x)

  def sending(way):
    def send(arrays):
      events.append(("send", len(arrays)))
      return way.send(arrays)

    return send

  ways = [dataclasses.replace(way, send=sending(way)) for way in publisher.ways]
  watched = dataclasses.replace(publisher, ways=tuple(ways))
  monkeypatch.setattr(jax, "block_until_ready", waiting)
  watched(params)
  one = [("send", 1), ("wait", 1)]
  assert events == [("wait", 0), *one, *one, ("send", 1)]


def test_a_chunk_of_no_bytes_is_refused() -> None:
  with pytest.raises(types.InputError, match="chunk_bytes: .* got 0"):
    _planned(chunk_bytes=0)


# ---------------------------------------------------------------- free-first


def test_retired_weights_are_freed_and_others_are_not() -> None:
  _, _, params, host = publishing.placed(TRAIN, SERVE)
  publisher = publishing.planned(TRAIN, SERVE)
  old, _ = publisher(params)
  both, _ = publisher(params)
  assert not any(x.is_deleted() for x in jax.tree.leaves(old))
  new, fingerprints = publisher(params, retired=old)
  fingerprint.verify(fingerprints)
  assert all(x.is_deleted() for x in jax.tree.leaves(old))
  publishing.assert_equal(both, new)
  publishing.assert_equal(params, host)


def test_the_trainers_own_buffers_are_never_freed() -> None:
  _, _, params, host = publishing.placed((1, 8, 1), (8, 1))
  publisher = publishing.planned((1, 8, 1), (8, 1), "float32")
  old, _ = publisher(params)
  assert publisher.aliases
  new, _ = publisher(params, retired=old)
  publishing.assert_equal(params, host)
  publishing.assert_equal(new, host)
  deleted = {k: old[k].is_deleted() for k in ("embed", "norm")}
  assert deleted == {"embed": True, "norm": False}


def test_retired_weights_of_another_model_are_refused() -> None:
  _, _, params, _ = publishing.placed(TRAIN, SERVE)
  publisher = publishing.planned(TRAIN, SERVE)
  with pytest.raises(types.InputError, match=r"retired.*missing \['norm'\]"):
    publisher(params, retired={k: v for k, v in params.items() if k != "norm"})


# ------------------------------------------------------------------ subtrees


def test_only_chosen_subtrees_are_sent_and_the_rest_is_kept() -> None:
  _, target, params, host = publishing.placed(TRAIN, SERVE)
  publisher = publishing.planned(TRAIN, SERVE)
  old, _ = publisher(params)
  some = publisher.only(["['layers']", "['norm']"])
  got, fingerprints = some(_changed(params), kept=old)
  fingerprint.verify(fingerprints)
  assert set(fingerprints[1]) == {"['layers']['q']", "['norm']"}
  assert len(jax.tree.leaves(got)) == len(jax.tree.leaves(target))
  assert got["embed"] is old["embed"]
  right = publishing.cast(_changed(host), "bfloat16")
  publishing.assert_equal(got, {**right, "embed": np.asarray(old["embed"])})
  assert some.bytes < publisher.bytes
  assert some.bytes == sum(
    publisher.only([name]).bytes for name in ("['layers']['q']", "['norm']")
  )


def test_with_kept_ones_only_what_is_sent_anew_is_freed() -> None:
  _, _, params, _ = publishing.placed(TRAIN, SERVE)
  publisher = publishing.planned(TRAIN, SERVE)
  old, _ = publisher(params)
  got, _ = publisher.only(["['norm']"])(params, retired=old, kept=old)
  assert old["norm"].is_deleted()
  assert not any(x.is_deleted() for x in jax.tree.leaves(got))


def test_kept_aliases_forbid_donation_too() -> None:
  publisher = publishing.planned((1, 8, 1), (8, 1), "float32")
  assert publisher.aliases
  assert publisher.only(["['embed']"]).aliases


@pytest.mark.parametrize("prefix", ["['layer']", "layers", "['norm']['x']"])
def test_an_unknown_prefix_is_refused_by_name(prefix) -> None:
  publisher = publishing.planned(TRAIN, SERVE)
  with pytest.raises(types.InputError) as caught:
    publisher.only([prefix])
  assert f"got {prefix!r}" in str(caught.value)
  assert "['layers']['q']" in str(caught.value)


def test_kept_weights_are_asked_for_and_checked() -> None:
  _, _, params, _ = publishing.placed(TRAIN, SERVE)
  publisher = publishing.planned(TRAIN, SERVE)
  some = publisher.only(["['norm']"])
  with pytest.raises(types.InputError, match=r"kept weights for .*embed.*None"):
    some(params)
  with pytest.raises(
    types.InputError, match=r"\(kept\) \['embed'\]: .*float32"
  ):
    some(params, kept=params)


# ------------------------------------------------------------------- traffic


def _traffic(train, serve, size=4, **options) -> traffic.Traffic:
  """Of a [32, 16] float32 leaf, from 4 devices to 4 others."""
  devices = np.asarray(jax.devices())
  home = meshes.over(devices[:size], ("x",))
  away = meshes.over(devices[size : 2 * size], ("y",))
  publisher = publish.plan(
    {"w": jax.NamedSharding(home, train)},
    {"w": jax.NamedSharding(away, serve)},
    {"w": jax.ShapeDtypeStruct((32, 16), jnp.float32)},
    "float32",
    **options,
  )
  return traffic.traffic(publisher)


# Four devices in a ring add up one 4-byte checksum: 2 x 3/4 x 4 bytes each.
SUM = 4 * 6


@pytest.mark.parametrize(
  ("train", "serve", "crossing", "exchanged"),
  [
    # Three quarters of what each device has go to others.
    (jax.P("x"), jax.P(None, "y"), 2048, 2048 * 3 // 4 + SUM),
    # Each device needs the three quarters that others have.
    (jax.P("x"), jax.P(), 4 * 2048, 4 * 2048 * 3 // 4 + SUM),
    (jax.P(), jax.P("y"), 2048, 0),
    (jax.P("x"), jax.P("y"), 2048, SUM),
  ],
)
def test_traffic_is_what_the_layouts_need(
  train, serve, crossing, exchanged
) -> None:
  found = _traffic(train, serve)
  assert (found.crossing, found.exchanged) == (crossing, exchanged)


def test_peak_holds_at_least_what_the_program_makes() -> None:
  # A quarter on each device, and the whole leaf on each.
  assert 512 <= _traffic(jax.P("x"), jax.P(None, "y")).peak < 8192
  assert 2048 <= _traffic(jax.P("x"), jax.P()).peak < 16384


def test_an_alias_has_no_traffic() -> None:
  source, _, _, _ = publishing.placed((1, 8, 1), (8, 1))
  shapes = publishing.shapes_of(publishing.placed((1, 8, 1), (8, 1))[3])
  publisher = publish.plan(source, source, shapes, "float32")
  assert traffic.traffic(publisher) == (0, 0, 0)


LINES = """
  %a = f32[8,2]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], d
  %b = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1},{2,3}}
  %c = bf16[2]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4], to_apply=%add
  %d = u8[10]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,2}}
  %e = s32[] all-reduce(%x), replica_groups={}, to_apply=%add
  %f = f32[] add(%d, %e)
  %g = f32[4]{0} all-gather(%x), replica_groups=mesh['a'=4,'b'=2] {'b'}, dim
"""


@pytest.mark.parametrize(
  ("number", "count", "right"),
  [
    (0, 8, 8 * 64 * 3 // 4),
    (1, 4, 4 * 32 // 2),
    (2, 4, 4 * 4 * 3),
    (3, 4, 2 * 10),
    (4, 4, 2 * 3 * 4),
    (5, 4, 0),
    (6, 8, 8 * 16 // 2),
  ],
)
def test_each_collective_counts_by_its_formula(number, count, right) -> None:
  line = LINES.strip("\n").splitlines()[number]
  assert traffic.received(line, count) == right
  assert traffic.received(LINES, 8) > right


# ------------------------------------------------------------------ donation


def test_a_large_copy_is_whole_though_its_source_is_donated_at_once() -> None:
  """Leaves that keep dtype and layout are copied with no program between."""
  devices = jax.devices()
  here, there = (
    jax.NamedSharding(meshes.over(np.asarray([d]), ("x",)), jax.P())
    for d in devices[:2]
  )
  shapes = {"w": jax.ShapeDtypeStruct((2**22,), jnp.float32)}
  publisher = publish.plan({"w": here}, {"w": there}, shapes, "float32")
  assert not publisher.aliases
  update = jax.jit(
    lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
  )
  params = {"w": jax.device_put(jnp.zeros(2**22), here)}
  published = []
  for _ in range(8):
    got, fingerprints = publisher(params)
    params = update(params)
    published.append((got, fingerprints))
  for number, (got, fingerprints) in enumerate(published):
    fingerprint.verify(fingerprints)
    assert np.all(np.asarray(got["w"]) == number)
