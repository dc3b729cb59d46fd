"""Attention among packed rows: each back-end against all scores at once.

There is neither a TPU nor a GPU here: numbers of the TPU kernel come from
Pallas' interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import among
from jaxrl_post.placement import mesh as meshes


def _rows(num, length, seed=0):
  """Draws packed rows: prompts that some share, and padding at the end."""
  draw = np.random.default_rng(seed)
  segments, prefixes = np.zeros((2, num, length), np.int32)
  for row in range(num):
    at, number = 0, 1
    while at < length - length // 8:
      first, members = number, draw.integers(0, 4)
      for member in range(1 + members):
        end = min(at + draw.integers(1, length // 4), length - length // 8)
        segments[row, at:end] = number
        prefixes[row, at:end] = first if member else number
        at, number = end, number + 1
  return jnp.asarray(segments), jnp.asarray(prefixes)


def _case(num, length, heads, kv_heads, width, dtype="float32"):
  draw = np.random.default_rng(length)

  def normal(n):
    x = draw.normal(size=(num, length, n, width))
    return jnp.asarray(x, jnp.float32).astype(dtype)

  return _rows(num, length), (normal(heads), normal(kv_heads), normal(kv_heads))


def _positions(ids):
  """Counts in each sequence: what continues a segment goes on from its end."""
  found = np.zeros(ids[0].shape, np.int32)
  for row in range(len(found)):
    segments, prefixes = (np.asarray(x[row]) for x in ids)
    for number in np.unique(segments):
      mine = segments == number
      before = prefixes[mine][0]
      begin = 0 if before == number else np.sum(segments == before)
      found[row, mine] = begin + np.arange(np.sum(mine))
  return jnp.asarray(found)


def _dense(ids, q, k, v, at=None, reach=None):
  """Says the rule once more, of every pair."""
  segments, prefixes = ids
  order = jnp.arange(segments.shape[1])
  has = segments[:, None, :]
  same = (segments[:, :, None] == has) | (prefixes[:, :, None] == has)
  mask = same & (order[None, None, :] <= order[None, :, None])
  if reach is not None:
    mask &= at[:, :, None] - at[:, None, :] < reach
  groups = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
  score = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
  share = jax.nn.softmax(jnp.where(mask[:, None], score, -jnp.inf))
  return jnp.einsum("bnts,bsnh->btnh", share, v)


def _with_gradients(read):
  """Returns what was read, and gradients of a sum that weighs each number."""

  def total(q, k, v):
    x = read(q, k, v)
    by = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return jnp.sum(x * by), x

  def both(*qkv):
    (_, x), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*qkv)
    return x, *grads

  return jax.jit(both)


def _assert_same(among_rows, ids, qkv, dtype="float32"):
  segments, prefixes = ids

  def read(*qkv):
    rows = among.places(segments, prefixes, segments.shape)
    return among_rows(rows, qkv[0].shape[-1], dtype)(*qkv)

  found = _with_gradients(read)(*qkv)
  right = _with_gradients(functools.partial(_dense, ids))(*qkv)
  for mine, other in zip(found, right, strict=True):
    np.testing.assert_allclose(mine, other, atol=1e-5, rtol=1e-5)


def _assert_same_with_windows(among_rows, ids, qkv, window):
  """Compares layers with and without a window, of one program."""
  at = _positions(ids)

  def read(local, *qkv):
    rows = among.places(*ids, ids[0].shape, positions=at, window=window)
    return among_rows(rows, qkv[0].shape[-1], "float32")(*qkv, local)

  def right(local, *qkv):
    return _dense(ids, *qkv, at=at, reach=jnp.where(local, window, 1 << 20))

  def total(read, local, *qkv):
    x = read(local, *qkv)
    by = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return jnp.sum(x * by), x

  mine, other = (
    jax.jit(
      jax.value_and_grad(functools.partial(total, f), (1, 2, 3), has_aux=True)
    )
    for f in (read, right)
  )
  found = {}
  for local in (True, False):
    ((_, found[local]), grads), ((_, x), slopes) = (
      f(jnp.asarray(local), *qkv) for f in (mine, other)
    )
    for a, b in zip((found[local], *grads), (x, *slopes), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
  assert np.abs(found[True] - found[False]).max() > 0.1


def _on(devices, **options):
  options.setdefault("backend", "xla")
  axes = options.pop("axes", meshes.TrainingAxes(fsdp=1))
  mesh = meshes.build(axes, devices)
  heads = options.pop("heads", None)
  return among.on(meshes.token_sharding(mesh), heads, **options)


def test_ids_draw_what_the_tests_are_about():
  segments, prefixes = (np.asarray(x) for x in _rows(2, 192))
  assert np.any(segments != prefixes) and np.all(segments[:, -24:] == 0)
  assert segments.max() > 4


@pytest.mark.parametrize("length", [24, among.SHORT + 41])
def test_long_rows_read_what_short_ones_do(length):
  _assert_same(among.portable, *_case(2, length, 4, 2, 8))


@pytest.mark.parametrize("length", [48, among.SHORT + 41])
def test_a_window_counts_positions_of_the_sequence(length):
  # Some continue a prompt that lies far before them in the row.
  _assert_same_with_windows(among.portable, *_case(2, length, 4, 2, 8), 5)


def test_rows_without_ids_are_whole():
  _, qkv = _case(2, 12, 2, 1, 8)
  rows = among.places(None, None, (2, 12))
  ones = jnp.ones((2, 12), jnp.int32)
  np.testing.assert_allclose(
    among.portable(rows, 8, "float32")(*qkv), _dense((ones, ones), *qkv), 1e-5
  )


def test_scores_of_long_rows_never_exist_at_once():
  ids, qkv = _case(1, 2048, 4, 2, 8)

  def memory(read):
    program = _with_gradients(read).lower(*qkv).compile()
    return program.memory_analysis().temp_size_in_bytes

  def blocks(*qkv):
    rows = among.places(*ids, ids[0].shape)
    return among.portable(rows, 8, "float32")(*qkv)

  dense, scores = memory(functools.partial(_dense, ids)), 4 * 2048 * 2048 * 4
  assert memory(blocks) < scores < dense
  assert memory(blocks) < dense / 4


# -------------------------------------------------------------- TPU: splash


@pytest.mark.parametrize(
  ("length", "heads", "kv_heads"), [(256, 4, 2), (200, 2, 2)]
)
def test_the_tpu_kernel_reads_what_xla_does(length, heads, kv_heads):
  read = _on(jax.devices()[:1], backend="splash", interpret=True)
  _assert_same(read, *_case(2, length, heads, kv_heads, 64))


def test_the_tpu_kernel_reads_windows_as_xla_does():
  read = _on(jax.devices()[:1], backend="splash", interpret=True)
  _assert_same_with_windows(read, *_case(1, 200, 2, 1, 64), 37)


def test_the_tpu_kernel_rounds_as_xla_does_in_bfloat16():
  ids, qkv = _case(2, 128, 4, 2, 64, "bfloat16")
  read = _on(jax.devices()[:1], backend="splash", interpret=True)

  @jax.jit
  def both(*qkv):
    rows = among.places(*ids, ids[0].shape)
    return [f(rows, 64, "bfloat16")(*qkv) for f in (read, among.portable)]

  mine, other = both(*qkv)
  assert mine.dtype == other.dtype == jnp.bfloat16
  exact = _dense(ids, *(x.astype(jnp.float32) for x in qkv))
  for found in (mine, other):
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.02)


@pytest.mark.parametrize(
  ("backend", "heads"),
  [("splash", "tensor"), ("xla", None), ("ring", "tensor"), ("ring", None)],
)
def test_a_mesh_reads_what_one_device_does(backend, heads):
  axes = meshes.TrainingAxes(fsdp=2, context=2, tensor=2)
  length = 200 if backend == "splash" else among.SHORT + 128
  read = _on(
    jax.devices(), axes=axes, heads=heads, backend=backend, interpret=True
  )
  _assert_same(read, *_case(2, length, 4, 2, 64))


# --------------------------------------------------------------------- ring


@pytest.mark.parametrize(
  ("parts", "length", "dtype"),
  [(8, 200, "float32"), (2, 1200, "float32"), (4, 256, "bfloat16")],
)
def test_keys_that_go_round_are_read_as_if_they_were_here(parts, length, dtype):
  axes = meshes.TrainingAxes(fsdp=1, context=parts)
  read = _on(jax.devices()[:parts], axes=axes, backend="ring")
  ids, qkv = _case(1, length, 4, 2, 8, dtype)
  if dtype == "float32":
    return _assert_same(read, ids, qkv)
  rows = among.places(*ids, ids[0].shape)
  found = jax.jit(lambda *qkv: read(rows, 8, dtype)(*qkv))(*qkv)
  assert found.dtype == jnp.bfloat16
  exact = _dense(ids, *(x.astype(jnp.float32) for x in qkv))
  np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.02)


def test_no_device_has_all_keys_of_a_row_that_is_too_long():
  length, parts = 2 * among._MOST, 8
  ids, qkv = _case(1, length, 2, 1, 8)
  axes = meshes.TrainingAxes(fsdp=1, context=parts)
  read = _on(jax.devices(), axes=axes)

  def around(*qkv):
    return read(among.places(*ids, ids[0].shape), 8, "float32")(*qkv)

  mesh = meshes.build(axes, jax.devices())
  lie = jax.sharding.NamedSharding(mesh, jax.P(None, "context"))
  program = _with_gradients(around)
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie) for x in qkv]
  made = program.lower(*shapes).compile()
  text = made.as_text()
  assert "collective-permute" in text
  for line in text.splitlines():
    assert f"[1,{length},1,8]" not in line.partition(" = ")[2] or (
      "parameter" in line
    ), line
  # Scores of all its queries and of one part of the keys are so many bytes, and
  # a gradient needs some copies of what it has of them.
  scores = 2 * (length // parts) ** 2 * 4
  assert made.memory_analysis().temp_size_in_bytes < scores


@pytest.mark.parametrize("backend", ["xla", "ring"])
def test_a_window_reaches_over_the_parts_of_a_row(backend):
  axes = meshes.TrainingAxes(fsdp=2, context=2, tensor=2)
  read = _on(jax.devices(), axes=axes, heads="tensor", backend=backend)
  case = _case(2, among.SHORT + 128, 4, 2, 8)
  _assert_same_with_windows(read, *case, 100)
