"""A checksum is the same in any layout, and another one after any change."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.placement import fingerprint
from jaxrl_post.placement import mesh as meshes
from tests.multidevice import publishing


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
  sums = jax.jit(lambda x: fingerprint.checksum(x, sharding))(placed)
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
  sums = jax.jit(lambda x: fingerprint.checksum(x, layout)[0])
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
  sums = jax.jit(lambda x: fingerprint.checksum(x, layout)[0])
  seen = {int(sums(x))}
  for i, j in itertools.combinations(range(30), 2):
    y = x.copy()
    y.flat[[i, j]] = x.flat[[j, i]]
    seen.add(int(sums(y)))
  assert len(seen) == 1 + 30 * 29 // 2


def test_verify_names_the_leaf_that_differs() -> None:
  _, _, params, _ = publishing.placed((1, 4, 1), (2, 2))
  publisher = publishing.planned((1, 4, 1), (2, 2))
  _, (before, after) = publisher(params)
  after["['norm']"] = after["['norm']"] + jnp.uint32(1)
  with pytest.raises(types.RunError, match=r"others for \['norm'\]\."):
    fingerprint.verify((before, after))
  del after["['norm']"]
  with pytest.raises(types.RunError, match=r"others for \['norm'\]\."):
    fingerprint.verify((before, after))


def test_one_corrupt_copy_on_one_device_is_found() -> None:
  _, _, params, _ = publishing.placed((1, 4, 1), (4, 1))
  publisher = publishing.planned((1, 4, 1), (4, 1))
  got, (before, _) = publisher(params)
  shards = [shard.data for shard in got["norm"].addressable_shards]
  shards[2] = shards[2].at[5].add(jnp.bfloat16(1))
  corrupt = jax.make_array_from_single_device_arrays(
    got["norm"].shape, got["norm"].sharding, shards
  )
  flat = jax.tree.leaves({**got, "norm": corrupt})
  with pytest.raises(types.RunError, match=r"others for \['norm'\]\."):
    fingerprint.verify((before, publisher.ways[0].check(flat)))


def test_a_fingerprint_is_of_what_was_sent_not_of_what_was_trained() -> None:
  _, _, params, _ = publishing.placed((1, 4, 1), (2, 2))
  publisher = publishing.planned((1, 4, 1), (2, 2))
  (way,) = publisher.ways
  doubling = dataclasses.replace(
    way, send=lambda arrays: way.send([x * 2 for x in arrays])
  )
  lossy = dataclasses.replace(publisher, ways=(doubling,))
  _, fingerprints = publisher(params)
  _, doubled = lossy(params)
  with pytest.raises(types.RunError, match="embed"):
    fingerprint.verify((fingerprints[0], doubled[1]))


# Large enough to be summed in slabs, on one device and on eight.
_LARGE = (8, 384, 96)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_checksum_is_the_same_in_any_sharding(dtype) -> None:
  x = np.random.default_rng(2).standard_normal(_LARGE).astype(dtype)
  with np.errstate(over="ignore"):
    word = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = x.view(word).astype(np.uint32).ravel()
    place = np.arange(bits.size, dtype=np.uint32)
    right = int(_hashes(bits, place).sum(dtype=np.uint32))
  assert {_checksum(x, layout) for layout in _layouts()} == {right}


def _hashes(bits: np.ndarray, place: np.ndarray) -> np.ndarray:
  h = bits + place * np.uint32(0x9E3779B1)
  h = (h ^ (h >> np.uint32(15))) * np.uint32(0x85EBCA6B)
  return h ^ (h >> np.uint32(16))


@functools.cache
def _sums_of(shape: tuple[int, ...], dtype: str):
  layout = jax.sharding.NamedSharding(
    meshes.over(np.asarray(jax.devices()[:2]), ("a",)), jax.P(None, "a")
  )
  return jax.jit(lambda x: fingerprint.checksum(x, layout)[0])


def _changed(x: np.ndarray, at: np.ndarray, to: np.ndarray) -> np.ndarray:
  y = x.copy()
  y.flat[at] = to
  return y


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  dtype=st.sampled_from(["float32", "bfloat16"]),
  large=st.booleans(),
  power=st.integers(0, 17),
  start=st.integers(0, 2**31),
  value=st.floats(-4, 4, width=16, allow_subnormal=False),
  bit=st.integers(0, 15),
)
def test_a_checksum_sees_one_change_and_any_swap(
  dtype, large, power, start, value, bit
) -> None:
  """Swaps of x and -x at distances of a power of two among them."""
  shape = _LARGE if large else (4, 6)
  size = int(np.prod(shape))
  x = np.random.default_rng(3).standard_normal(shape).astype(dtype)
  sums = _sums_of(shape, dtype)
  i = start % size
  j = (i + 2**power) % size
  y = x.copy()
  y.view(f"uint{8 * x.dtype.itemsize}").flat[i] ^= 1 << bit
  assert int(sums(y)) != int(sums(x))
  pair = np.asarray([value, -value], x.dtype)
  if i != j and value:
    there, back = _changed(x, [i, j], pair), _changed(x, [i, j], pair[::-1])
    assert int(sums(there)) != int(sums(back))
