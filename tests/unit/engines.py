"""Engines of a tiny model on one device, as tests of sampling make them."""

import contextlib
import functools

import jax
import jax.numpy as jnp

from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec, transformer
from jaxrl_post.placement import generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import engine as engines

CONFIG = transformer.Config(
  num_layers=2,
  width=32,
  num_heads=4,
  num_kv_heads=2,
  head_width=8,
  ff_width=64,
  vocab_size=64,
)


@functools.cache
def params(config=CONFIG, seed=0):
  tree = transformer.spec(config)
  return spec.init(tree, jax.random.key(seed), jnp.dtype("float32"))


@functools.cache
def compiled(cfg, max_prompt, group, decoder):
  return generator.compiled(
    meshes.build(meshes.GenerationAxes(data=1), jax.devices()[:1]),
    rules={},
    decoder=decoder,
    cfg=cfg,
    max_prompt=max_prompt,
    group=group,
  )


def engine(
  cfg, *, max_prompt, group, key=0, config=CONFIG, steps=None, decode=None
):
  """Returns an engine; `steps` are compiled ones, of other settings."""
  steps = steps or compiled(cfg, max_prompt, group, decoders.Decoder(config))
  return engines.Engine(
    steps,
    cfg,
    max_prompt=max_prompt,
    vocab_size=config.vocab_size,
    key=jax.random.key(key),
    dispatch=contextlib.nullcontext(),
    decode=decode,
  )
