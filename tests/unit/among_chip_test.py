"""Attention among packed rows, compiled for devices that are not here.

The TPU's compiler says whether a program fits; of cuDNN only the call is seen.
Numbers: `among_test.py`.
"""

import contextlib
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxrl_post.algos import grpo
from jaxrl_post.data import pack
from jaxrl_post.models import among, transformer
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import programs
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.training import optim
from tests.unit import topology_test

_KERNEL = 'custom_call_target="tpu_custom_call"'


@pytest.fixture(autouse=True)
def _nothing_cached():
  with topology_test.uncached():
    yield


def _on(devices, backend):
  mesh = meshes.build(meshes.TrainingAxes(fsdp=1), devices)
  return among.on(meshes.token_sharding(mesh), None, backend=backend)


def _rarely(*args):
  return pytest.param(*args, marks=pytest.mark.slow)


def _of(shape, dtype, sharding=None):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@pytest.mark.parametrize(
  "chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
)
@pytest.mark.parametrize(
  ("length", "heads", "kv_heads", "width", "dtype"),
  [
    (640, 9, 3, 64, "float32"),
    _rarely(2048, 16, 8, 128, "bfloat16"),
    _rarely(8192, 14, 2, 64, "bfloat16"),
    _rarely(100, 8, 1, 256, "bfloat16"),
  ],
)
def test_the_kernel_compiles_with_its_gradient(
  chip, length, heads, kv_heads, width, dtype
):
  devices = topology_test.slices(chip)[:1]
  among_rows = _on(devices, among.backend(devices[0]))
  lie = jax.sharding.SingleDeviceSharding(devices[0])

  def total(ids, *qkv):
    rows = among.places(*ids, ids[0].shape)
    return jnp.sum(among_rows(rows, width, dtype)(*qkv).astype(jnp.float32))

  ids = _of((2, length), "int32", lie)
  q, k = (_of((2, length, n, width), dtype, lie) for n in (heads, kv_heads))
  with jax.numpy_dtype_promotion("standard"):
    made = jax.jit(jax.grad(total, (1, 2, 3))).lower((ids, ids), q, k, k)
  # Forward, by queries, and by keys.
  assert made.compile().as_text().count(_KERNEL) == 3


@pytest.mark.parametrize(
  "chip", ["v5e:2x2", *map(_rarely, ["v5p:2x2x1", "v6e:2x2"])]
)
def test_keys_of_a_long_row_go_round_a_slice(chip):
  devices, length = topology_test.slices(chip)[:4], 4 * among._MOST
  mesh = meshes.build(meshes.TrainingAxes(fsdp=1, context=4), devices)
  lie = meshes.token_sharding(mesh)
  among_rows = among.on(lie, None, backend=among.backend(devices[0]))

  def total(ids, *qkv):
    rows = among.places(*ids, ids[0].shape)
    return jnp.sum(among_rows(rows, 128, "bfloat16")(*qkv).astype(jnp.float32))

  ids = _of((1, length), "int32", lie)
  q, k = (_of((1, length, n, 128), "bfloat16", lie) for n in (8, 2))
  with jax.numpy_dtype_promotion("standard"):
    made = jax.jit(jax.grad(total, (1, 2, 3))).lower((ids, ids), q, k, k)
  text = made.compile().as_text()
  assert "collective-permute" in text
  assert "all-gather" not in text


def _update(chip, remat):
  """Compiles an update for four chips, rows of 512 tokens in each."""
  config = transformer.Config(
    num_layers=4,
    width=256,
    num_heads=4,
    num_kv_heads=2,
    head_width=64,
    ff_width=512,
    vocab_size=2048,
  )
  mesh = meshes.build(
    meshes.TrainingAxes(fsdp=2, tensor=2), topology_test.slices(chip)[:4]
  )
  spec = transformer.spec(config)
  params = jax.tree.map(
    lambda x, to: _of(x.shape, x.dtype, to),
    specs.abstract(spec, jnp.dtype("float32")),
    meshes.weight_shardings(spec, meshes.TRAINING_RULES, mesh),
  )
  decoder = decoders.Decoder(config, "bfloat16", remat)
  trainer = trainers.build(
    mesh,
    params=params,
    decoder=programs.placed_on(decoder, mesh),
    algo=grpo.objective(),
    optimizer=optax.adamw(1e-3),
    cut=optim.Optim(),
    key=jax.random.key(0),
    keep_params=False,
    park=False,
    lock=contextlib.nullcontext(),
  )
  batch = jax.tree.map(
    lambda x: _of(x.shape, x.dtype),
    pack.pack([], pack.Layout(rows=4, length=512)),
  )
  with jax.numpy_dtype_promotion("standard"):
    return trainer.lower(batch)["update"]().compile()


@pytest.mark.parametrize(
  ("chip", "remat"),
  [
    _rarely("v5e:2x2", "layer"),
    _rarely("v5p:2x2x1", "dots"),
    _rarely("v6e:2x2", "none"),
  ],
)
def test_an_update_has_the_kernel(chip, remat):
  text = _update(chip, remat).as_text()
  # One scanned layer forward and one backward, which reads once more.
  assert text.count(_KERNEL) == (3 if remat == "none" else 4)
  assert "f32[2,2,512,512]" not in text


# ------------------------------------------------------------------ GPU: cuDNN


def _lowered(monkeypatch, length, width, dtype):
  """Lowers a gradient for CUDA; the machine has no cuDNN to ask."""
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
  among_rows = _on(jax.devices()[:1], "cudnn")

  def total(ids, *qkv):
    rows = among.places(*ids, ids[0].shape)
    return jnp.sum(among_rows(rows, width, dtype)(*qkv).astype(jnp.float32))

  ids = _of((2, length), "int32")
  q, k = (_of((2, length, n, width), dtype) for n in (4, 2))
  with jax.numpy_dtype_promotion("standard"):
    made = jax.jit(jax.grad(total, (1, 2, 3))).trace((ids, ids), q, k, k)
    return made.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
  ("length", "width", "dtype", "taken"),
  [
    (640, 64, "bfloat16", True),
    (640, 64, "float32", False),
    (641, 64, "bfloat16", False),
    (640, 256, "bfloat16", False),
  ],
)
def test_cudnn_is_called_where_it_takes_the_shape(
  monkeypatch, length, width, dtype, taken
):
  text = _lowered(monkeypatch, length, width, dtype)
  assert ("__cudnn$fmha" in text) == taken


def test_the_device_says_what_reads():
  tpu, cpu = topology_test.slices("v5e:2x2")[0], jax.devices()[0]
  assert among.backend(tpu) == "splash" and among.backend(cpu) == "xla"
  gpu, old = (
    types.SimpleNamespace(
      platform="gpu",
      device_kind=f"NVIDIA {name}",
      compute_capability=capability,
    )
    for name, capability in (("H200", "9.0"), ("Tesla T4", "7.5"))
  )
  amd = types.SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X")
  assert among.backend(gpu) == "cudnn"
  assert among.backend(amd) == among.backend(old) == "xla"
