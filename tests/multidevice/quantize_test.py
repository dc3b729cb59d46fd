"""Quantized weights on their way: made once, on the training devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import quantize, transformer
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import fingerprint, publish, replica, traffic
from jaxrl_post.placement import mesh as meshes
from tests.e2e import runs
from tests.multidevice import publishing

_CONFIG = transformer.Config(
  num_layers=2,
  width=48,
  num_heads=8,
  num_kv_heads=4,
  head_width=4,
  ff_width=24,
  vocab_size=48,
)
_SPEC = transformer.spec(_CONFIG)
_PAIRS = [
  ((1, 1, 1), (1, 1)),  # disjoint, one to one
  ((1, 2, 2), (2, 2)),
  ((1, 8, 1), (2, 4)),  # in place
  ((1, 1, 2), (3, 2)),
  ((1, 2, 4), (4, 1)),  # overlapping; sums of `down` and `o` are split
]


@functools.cache
def _placed(train, serve):
  """Shardings of both sides, and the weights on the host."""
  source = meshes.weight_shardings(
    _SPEC, meshes.TRAINING_RULES, publishing.training_mesh(train)
  )
  target = meshes.weight_shardings(
    quantize.spec(_SPEC),
    meshes.GENERATION_RULES,
    publishing.generation_mesh(serve),
  )
  draw = np.random.default_rng(0)
  host = jax.tree.map(
    lambda x: draw.standard_normal(x.shape).astype(np.float32),
    specs.abstract(_SPEC, jnp.float32),
  )
  return source, target, host


def _plan(source, target, **options) -> publish.Publisher:
  return publish.plan(
    source,
    target,
    specs.abstract(_SPEC, jnp.float32),
    "bfloat16",
    quantized=quantize.channels(_SPEC),
    **options,
  )


def _by_hand(host):
  """The same in NumPy, a weight at a time."""
  out = {k: x.astype(jnp.bfloat16) for k, x in host.items() if k != "layers"}
  out["layers"] = {}
  for name, x in host["layers"].items():
    if name.endswith("norm"):
      out["layers"][name] = x.astype(jnp.bfloat16)
      continue
    dims = (1, 2) if name == "o" else (1,)
    scale = np.abs(x).max(dims, keepdims=True) * np.float32(1 / 127)
    whole = np.rint(x / scale).astype(np.int8)
    fields = dict(values=whole, scale=np.squeeze(scale, dims))
    out["layers"][name] = quantize.Int8(**fields)
  return out


@pytest.mark.parametrize(("train", "serve"), _PAIRS)
def test_quantized_weights_arrive_as_quantized_by_hand(
  train, serve, pulls
) -> None:
  source, target, host = _placed(train, serve)
  publisher = _plan(source, target)
  params = jax.device_put(host, source)
  pulls.clear()
  got, fingerprints = jax.block_until_ready(publisher(params))
  assert pulls == []
  fingerprint.verify(fingerprints)
  assert jax.tree.map(lambda x: x.sharding, got) == target
  publishing.assert_equal(got, _by_hand(host))
  publishing.assert_equal(params, host)
  names = {leaf.name for leaf in publisher.leaves}
  assert fingerprints[0].keys() == fingerprints[1].keys() == names
  assert {"['layers']['q'].values", "['layers']['q'].scale"} < names


def test_any_one_integer_and_any_one_scale_is_in_the_checksums() -> None:
  source, target, host = _placed((1, 2, 2), (2, 2))
  publisher = _plan(source, target)
  got, (before, _) = publisher(jax.device_put(host, source))
  for part in ("values", "scale"):
    name = f"['layers']['down'].{part}"
    way = next(w for w in publisher.ways if name in {x.name for x in w.leaves})
    flat = jax.tree.leaves(got)
    at = [leaf.name for leaf in publisher.leaves].index(name)
    one = (0,) * flat[at].ndim
    step = np.ones((), flat[at].dtype)
    flat[at] = flat[at].at[one].add(step)
    order = {
      leaf.name: x for leaf, x in zip(publisher.leaves, flat, strict=True)
    }
    after = way.check([order[leaf.name] for leaf in way.leaves])
    with pytest.raises(types.RunError, match=rf"down'\].{part}\."):
      fingerprint.verify((before, after))


def test_bytes_are_those_of_integers_and_scales() -> None:
  source, target, _ = _placed((1, 1, 1), (1, 1))
  layers, width, ff = 2, 48, 24
  matrices = layers * (3 * width * ff + 2 * width * 32 + 2 * width * 16)
  scales = layers * (2 * ff + width + 32 + 2 * 16 + width)
  others = 48 * width + width + 2 * layers * width
  want = matrices + 4 * scales + 2 * others
  publisher = _plan(source, target)
  assert publisher.bytes == want
  assert traffic.traffic(publisher) == traffic.Traffic(want, 0, _ANY)
  got, _ = publisher(jax.device_put(_placed((1, 1, 1), (1, 1))[2], source))
  assert sum(x.nbytes for x in jax.tree.leaves(got)) == want
  plain = publish.plan(
    source,
    meshes.weight_shardings(
      _SPEC, meshes.GENERATION_RULES, publishing.generation_mesh((1, 1))
    ),
    specs.abstract(_SPEC, jnp.float32),
    "bfloat16",
  )
  assert plain.bytes == 2 * (matrices + others)


class _Any:
  """Equal to everything."""

  def __eq__(self, other: object) -> bool:
    return True

  __hash__ = None


_ANY = _Any()


def test_only_what_is_not_quantized_may_be_an_alias() -> None:
  mesh = publishing.generation_mesh((1, 1))
  source = meshes.weight_shardings(_SPEC, meshes.GENERATION_RULES, mesh)
  target = meshes.weight_shardings(
    quantize.spec(_SPEC), meshes.GENERATION_RULES, mesh
  )
  host = _placed((1, 1, 1), (1, 1))[2]
  publisher = publish.plan(
    source,
    target,
    specs.abstract(_SPEC, jnp.float32),
    "float32",
    quantized=quantize.channels(_SPEC),
  )
  assert publisher.aliases
  aliases = {leaf.name for leaf in publisher.leaves if leaf.is_alias}
  norms = {f"['layers']['{name}_norm']" for name in ("attn", "mlp")}
  assert aliases == {"['embed']", "['final_norm']", *norms}
  got, fingerprints = publisher(jax.device_put(host, source))
  fingerprint.verify(fingerprints)
  publishing.assert_equal(got["layers"]["q"], _by_hand(host)["layers"]["q"])


def test_chunks_and_parts_of_quantized_weights_arrive() -> None:
  source, target, host = _placed((1, 2, 2), (2, 2))
  publisher = _plan(source, target, chunk_bytes=9000)
  assert len(publisher.ways) > 1
  got, fingerprints = publisher(jax.device_put(host, source))
  fingerprint.verify(fingerprints)
  publishing.assert_equal(got, _by_hand(host))
  part = publisher.only(["['layers']['q']"])
  assert part.chosen == {"['layers']['q'].values", "['layers']['q'].scale"}
  newer = jax.tree.map(lambda x: x * 2, host)
  after, _ = part(jax.device_put(newer, source), kept=got)
  want = _by_hand(host)
  want["layers"]["q"] = _by_hand(newer)["layers"]["q"]
  publishing.assert_equal(after, want)
  with pytest.raises(types.InputError, match=r"q'\]\.scale.* Use one of"):
    publisher.only(["['layers']['q'].scale"])


def test_a_replica_gets_integers_and_scales() -> None:
  mesh = meshes.over(np.asarray(jax.devices()), ("part",))
  shapes = specs.abstract(quantize.spec(_SPEC), jnp.float32)
  target = replica.outbox(shapes, mesh)
  source, _, host = _placed((1, 8, 1), (2, 4))
  publisher = _plan(source, target)
  got, fingerprints = publisher(jax.device_put(host, source))
  fingerprint.verify(fingerprints)
  policy = types.Policy(
    params=got, version=1, step=1, fingerprints=fingerprints
  )
  made = replica.pack(policy)
  want = fingerprint.by_name(_by_hand(host))
  assert made.leaves.keys() == want.keys() == made.sums.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(made.leaves[name], x)


@pytest.mark.slow
def test_a_run_reports_what_8_bits_change_and_weighs_it(tmp_path) -> None:
  with runs.compile_cache():
    run = runs.train(
      tmp_path,
      "placement.mode=split",
      "placement.training.fsdp=2",
      "placement.training.tensor=2",
      "placement.generation.data=2",
      "placement.generation.tensor=2",
      "max_lag=0",
      "num_steps=2",
      "sampling.dtype=int8_cache",
    )
  assert set(run.pulls) == {()}  # step and version
  for line in run.metrics:
    assert 1e-5 < line["mismatch/mean_abs"] < 0.1
    assert line["mismatch/kl"] > 0
    assert line["loss/importance_mean"] != 1
    assert math.isfinite(line["loss/policy"])
  assert {str(x.dtype) for x in jax.tree.leaves(run.state.params)} == {
    "float32"
  }
