"""A decode step over several devices: what travels between them."""

import functools
import math
import re

import jax
import jax.numpy as jnp

from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec as specs
from jaxrl_post.models import transformer
from jaxrl_post.placement import generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import engine as engines

_CONFIG = transformer.Config(
  num_layers=2,
  width=64,
  num_heads=4,
  num_kv_heads=2,
  head_width=16,
  ff_width=128,
  # As those of real models, several times a power of two, and odd beyond it.
  vocab_size=8 * 19,
)
# Kind, dims and origin; what only rows with a bias or a top-k take is left out.
_COLLECTIVE = re.compile(
  r"= \w+\[([\d,]*)\]\S* "
  r"(all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\("
  r'.*?op_name="([^"]*)"'
)


@functools.cache
def _compiled(axes):
  mesh = meshes.build(axes, jax.devices()[: axes.data * axes.tensor])
  spec = transformer.spec(_CONFIG)
  rules, _ = meshes.fit_rules(spec, meshes.GENERATION_RULES, mesh)
  steps = generator.compiled(
    mesh,
    rules=rules,
    decoder=decoders.Decoder(_CONFIG),
    cfg=engines.Sampling(rows=16, max_tokens=64, block=4),
    max_prompt=65,
    group=4,
  )
  weights = jax.device_put(
    specs.init(spec, jax.random.key(0), jnp.dtype("float32")),
    meshes.weight_shardings(spec, rules, mesh),
  )
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  key = jax.device_put(jax.random.key(0), whole)
  return (
    steps.decode.lower(steps.layout(weights), steps.empty(), key)
    .compile()
    .as_text()
  )


def _sizes(text, branches=False):
  """Lists what travels: the kind of each collective and its elements."""
  return [
    (kind, math.prod(int(n) for n in dims.split(",") if n))
    for dims, kind, origin in _COLLECTIVE.findall(text)
    if branches or "cond/branch" not in origin
  ]


def test_no_page_travels_and_a_layer_reduces_twice():
  travels = _sizes(_compiled(meshes.GenerationAxes(data=2, tensor=2)))
  rows_of_a_part, width = 8, _CONFIG.width
  hidden = [kind for kind, size in travels if size == rows_of_a_part * width]
  # After attention and the feed-forward of each layer; and the embedding.
  assert hidden.count("all-reduce") == 2 * _CONFIG.num_layers + 1
  # Pages of a layer have 16384 elements a device; nothing comes near it.
  assert max(size for _, size in travels) <= 16 * 64 * 2


def test_rows_of_a_part_need_no_other_part():
  travels = _sizes(_compiled(meshes.GenerationAxes(data=4, tensor=1)))
  # Whether any row goes on, and the longest prompt: numbers, not arrays.
  assert max(size for _, size in travels) <= 4


def test_no_logits_are_gathered_where_the_vocabulary_is_split():
  text = _compiled(meshes.GenerationAxes(data=2, tensor=2))
  rows_of_a_part, blocks = 8, 8
  gathered = [n for kind, n in _sizes(text, True) if kind == "all-gather"]
  # Of the sums of each block, and not of what is in them.
  assert gathered and max(gathered) <= rows_of_a_part * blocks
