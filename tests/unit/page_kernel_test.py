"""The TPU kernel that reads pages: its numbers, and what Mosaic makes of it.

Numbers come from Pallas' interpreters. There is no chip here; but the compiler
for it is, and says whether a program fits, and what it copies.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec as specs
from jaxrl_post.models import transformer
from jaxrl_post.placement import generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import attention, page_kernel
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import pages as paging
from tests.unit import topology_test

# Checks each access: bounds, races, and memory that nothing was written to.
_CHECKED = pltpu.InterpretParams(
  detect_races=True,
  out_of_bounds_reads="raise",
  uninitialized_memory="nan",
)
# Rows, heads, key heads, head width, page size, pages, those that somebody has.
_SHAPES = [
  (3, 4, 2, 64, 8, 5, 4),
  (5, 8, 8, 128, 16, 9, 8),
  (2, 7, 1, 64, 24, 4, 4),
  (4, 9, 3, 64, 8, 7, 5),
  (1, 32, 4, 128, 8, 3, 1),
  (2, 4, 1, 64, 8, 9, 0),
]


def _case(shape, dtype, parts=1):
  rows, heads, num_kv, width, page, num_pages, num_live = shape
  draw = np.random.default_rng(sum(shape))

  def normal(*dims):
    return jnp.asarray(draw.normal(size=(parts, *dims)), dtype)

  own = paging.Pool(
    normal(num_pages, num_kv, width, page),
    normal(num_pages, num_kv, page, width),
  )
  # Whose it was before says nothing; the engine's own mark is past all rows.
  order = draw.permuted(np.tile(np.arange(num_pages), (parts, 1)), axis=1)
  live = order < num_live
  owner = np.where(live, draw.integers(0, rows, live.shape), rows)
  limit = np.where(live, draw.integers(0, 2 * page, live.shape), -1 - order)
  return (
    normal(rows, heads, width),
    own,
    jnp.asarray(owner, jnp.int32),
    jnp.asarray(limit, jnp.int32),
  )


def _assert_close(found, case, atol):
  live = np.asarray(case[3] >= 0)
  for mine, right in zip(found, attention.read_pages(*case), strict=True):
    assert mine.shape == right.shape and mine.dtype == jnp.float32
    np.testing.assert_allclose(
      np.asarray(mine)[live], np.asarray(right)[live], atol=atol, rtol=1e-5
    )


@pytest.mark.parametrize(
  ("shape", "dtype", "together"),
  [
    (_SHAPES[0], "float32", 3),
    (_SHAPES[1], "bfloat16", 2),
    (_SHAPES[2], "float32", 1),
    (_SHAPES[3], "bfloat16", 1),
    (_SHAPES[4], "float32", 2),
    (_SHAPES[5], "bfloat16", 2),
    *(
      pytest.param(shape, dtype, together, marks=pytest.mark.slow)
      for shape in _SHAPES
      for dtype in ("float32", "bfloat16")
      for together in (1, 4, 8)
    ),
  ],
)
def test_the_kernel_reads_what_the_portable_read_does(
  shape, dtype, together, capfd
) -> None:
  case = _case(shape, dtype)
  read = functools.partial(
    page_kernel.read_pages, together=together, interpret=_CHECKED
  )
  found = jax.jit(read)(*case)
  # In bfloat16 weights are rounded, at times to the other side.
  _assert_close(found, case, 2e-5 if dtype == "float32" else 0.02)
  assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_the_kernel_reads_from_the_first_slot_on(capfd) -> None:
  case = _case(_SHAPES[1], "float32")
  limit = np.asarray(case[3])
  first = np.random.default_rng(0).integers(-16, 16, limit.shape)
  first = jnp.asarray(np.minimum(first, limit), jnp.int32)
  assert np.any((first > 0) & (limit >= 0))
  read = functools.partial(
    page_kernel.read_pages, together=3, interpret=_CHECKED
  )
  found = jax.jit(read)(*case, first)
  _assert_close(found, (*case, first), 2e-5)
  assert "RACE DETECTED" not in "".join(capfd.readouterr())


def test_a_page_that_nobody_has_is_neither_read_nor_written() -> None:
  # Its owner is past the last row: fetching the query would raise.
  case = _case((3, 4, 2, 64, 8, 6, 3), "float32")
  found = jax.jit(
    functools.partial(page_kernel.read_pages, together=2, interpret=_CHECKED)
  )(*case)
  free = np.asarray(case[3] < 0)
  assert free.sum() == 3
  for x in found:
    assert np.all(np.isnan(np.asarray(x)[free]))
    assert np.all(np.isfinite(np.asarray(x)[~free]))


def test_a_mesh_has_each_part_read_its_own_pages() -> None:
  mesh = meshes.build(
    meshes.GenerationAxes(data=2, tensor=2), jax.devices()[:4]
  )
  case = _case((3, 8, 4, 64, 8, 2, 1), "float32", parts=2)
  read = page_kernel.on(mesh, meshes.GENERATION_BATCH, "tensor", interpret=True)
  _assert_close(jax.jit(read)(*case), case, 2e-5)


def _begun(size):
  """Makes ten tokens in three rows, of which the second ends before the last.

  Returns the table, positions of the tenth, and who has one.
  """
  table = paging.empty_table(size)
  for at, tag, length in (((0, 1), 5, 12), ((2, size.rows), 6, 3)):
    table, _ = paging.join(
      table,
      jnp.asarray([at]),
      jnp.arange(2)[None],
      jnp.uint32([tag]),
      jnp.asarray([length]),
      page=size.page,
    )
  start, everyone = table.start, jnp.ones((1, size.rows), bool)
  table = jax.lax.fori_loop(
    0, 10, lambda i, t: paging.advance(t, start + i, everyone, size.page), table
  )
  ended = jnp.asarray([[False, True, False]])
  return paging.release(table, ended), start + 9, ~ended


@pytest.mark.parametrize(("window", "live"), [(None, 4), (6, 4), (2, 2)])
def test_rows_read_the_same_of_their_pages_and_never_of_others(
  window, live
) -> None:
  size = paging.sizes(rows=3, group=2, page=8, max_prompt=12, max_tokens=24)
  table, position, active = jax.jit(functools.partial(_begun, size))()
  draw = np.random.default_rng(0)

  def normal(*dims):
    return jnp.asarray(draw.normal(size=dims), jnp.float32)

  def pool(num):
    return paging.Pool(normal(1, num, 2, 64, 8), normal(1, num, 2, 8, 64))

  groups = attention.groups(table, 8)
  seen = attention.view(table, groups, position, active, 8)
  if window is not None:
    # The tenth token is the second of its page.
    seen = attention.within(seen, position, window, 8)
  assert int((seen.limit >= 0).sum()) == live < size.pages
  cache = pool(size.pages), pool(size.pool_pages)
  asked = normal(1, 3, 4, 64), normal(1, 3, 2, 64), normal(1, 3, 2, 64)
  # What is not written is NaN here, and would spread.
  read = functools.partial(
    page_kernel.read_pages, together=2, interpret=_CHECKED
  )
  right, _ = jax.jit(attention.attend)(seen, cache, *asked)
  attend = functools.partial(attention.attend, read_pages=read)
  found, _ = jax.jit(attend)(seen, cache, *asked)
  live = np.asarray(active)
  assert np.all(np.isfinite(found))
  np.testing.assert_allclose(found[live], right[live], atol=2e-6)


def test_a_page_that_does_not_fit_is_refused_with_one_that_does() -> None:
  with pytest.raises(types.InputError) as refused:
    jax.eval_shape(
      page_kernel.read_pages, *_case((1, 8, 8, 128, 1024, 2, 1), "bfloat16")
    )
  line = str(refused.value)
  assert line.startswith("sampling.page: expected <= 512 on a TPU, got 1024.")
  assert "\n" not in line


# ---------------------------------------------------------- ahead of a chip

_COPIES = re.compile(
  r"= (\(?\w+\[[\d,]*\])\S* (copy|copy-start|transpose|slice-start|all-gather"
  r"|all-gather-start|all-to-all|collective-permute)\("
)
_KERNEL = 'custom_call_target="tpu_custom_call"'


@pytest.fixture(autouse=True)
def _nothing_cached():
  with topology_test.uncached():
    yield


def _rarely(*args):
  return pytest.param(*args, marks=pytest.mark.slow)


def _moved(text, elements):
  """Lists what moves as many elements as a pool has, or more, at once."""
  found = []
  for match in _COPIES.finditer(text):
    dims = [int(n) for n in re.findall(r"\d+", match[1].partition("[")[2])]
    if dims and np.prod(dims) >= elements:
      found.append(match[0])
  return found


@pytest.mark.parametrize(
  "chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
)
@pytest.mark.parametrize(
  ("shape", "dtype"),
  [
    ((64, 32, 8, 128, 32, 512, 0), "bfloat16"),
    ((64, 14, 2, 64, 64, 512, 0), "bfloat16"),
    _rarely((64, 9, 3, 64, 16, 512, 0), "float32"),
    _rarely((64, 8, 1, 128, 8, 512, 0), "float32"),
    _rarely((256, 64, 8, 128, 512, 64, 0), "bfloat16"),
    _rarely((1024, 16, 2, 128, 32, 32768, 0), "bfloat16"),
  ],
)
def test_it_compiles_and_moves_no_pool(chip, shape, dtype) -> None:
  rows, heads, num_kv, width, page, num_pages, _ = shape
  alone = jax.sharding.SingleDeviceSharding(topology_test.slices(chip)[0])
  lie = page_kernel.formats(alone, num_kv)

  def of(dims, dtype, sharding=alone):
    return jax.ShapeDtypeStruct((1, *dims), dtype, sharding=sharding)

  own = paging.Pool(
    of((num_pages, num_kv, width, page), dtype, lie.k),
    of((num_pages, num_kv, page, width), dtype, lie.v),
  )
  table = of((num_pages,), "int32")
  text = (
    jax.jit(page_kernel.read_pages)
    .lower(of((rows, heads, width), dtype), own, table, table)
    .compile()
    .as_text()
  )
  assert _KERNEL in text
  # What was read may be moved: it is as large as a pool of tiny pages.
  size = num_pages * num_kv * page * width
  assert not [line for line in _moved(text, size) if "f32" not in line]


def _decode(chip, *, layers):
  """Compiles a decode step for four chips; returns it and its pools."""
  mesh = meshes.build(
    meshes.GenerationAxes(data=2, tensor=2), topology_test.slices(chip)[:4]
  )
  config = transformer.Config(
    num_layers=layers,
    width=512,
    num_heads=16,
    num_kv_heads=8,
    head_width=128,
    ff_width=1024,
    vocab_size=2048,
  )
  made = generator.compiled(
    mesh,
    rules=meshes.GENERATION_RULES,
    decoder=decoders.Decoder(config, "bfloat16"),
    cfg=engines.Sampling(
      rows=128, max_tokens=1024, page=30, block=8, dtype="bfloat16"
    ),
    max_prompt=257,
    group=8,
  )
  assert made.size.page == 32
  lie = made.empty.lower().compile().output_formats  # type: ignore
  state = jax.tree.map(
    lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
    jax.eval_shape(made.empty),
    lie,
  )
  spec = transformer.spec(config)
  params = jax.tree.map(
    lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
    specs.abstract(spec, "bfloat16"),
    meshes.weight_shardings(spec, meshes.GENERATION_RULES, mesh),
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)
  step = made.decode.lower(params, state, key).compile()  # type: ignore
  return step, state.own


@pytest.mark.parametrize(
  ("chip", "layers"),
  [
    ("v5e:2x2", 1),
    _rarely("v5e:2x2", 2),
    _rarely("v5p:2x2x1", 2),
    _rarely("v6e:2x2", 2),
  ],
)
def test_a_decode_step_has_the_kernel_and_pools_stay(chip, layers) -> None:
  step, own = _decode(chip, layers=layers)
  text = step.as_text()
  assert text.count(_KERNEL) == layers
  # Of own pages a device has a quarter: half the parts, half the key heads.
  here = own[0].k.size // 4
  assert not _moved(text, here)
  # All of them are donated, and updated where they are.
  memory = step.memory_analysis()
  pools = 2 * layers * here * own[0].k.dtype.itemsize
  assert memory.alias_size_in_bytes >= pools
