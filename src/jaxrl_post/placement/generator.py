"""The engine's steps, compiled for the generation mesh."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import steps

# Uses of the run's key; the weights are drawn with number 0.
_ROLLOUT_KEY, _EVAL_KEY = 1, 2


def keys(seed: int) -> tuple[jax.Array, jax.Array]:
  """Returns the random keys of a run's rollouts and of its evaluations."""
  key = jax.random.key(seed)
  return (
    jax.random.fold_in(key, _ROLLOUT_KEY),
    jax.random.fold_in(key, _EVAL_KEY),
  )


def compiled(
  mesh: jax.sharding.Mesh,
  *,
  rules: Mapping[str, str],
  decoder: decoders.Decoder,
  cfg: engines.Sampling,
  max_prompt: int,
) -> engines.Steps:
  """Places the steps of sampling.

  Args:
    mesh: the generation mesh.
    rules: logical axis to mesh axis, as the weights follow it.
    decoder: the model; its dtype is that of the engine.
    cfg: sizes of an engine.
    max_prompt: longest prompt, in tokens.

  Returns:
    The steps; each is compiled at its first use with arguments of a shape.
  """
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  rows = meshes.batch_sharding(mesh)
  cache: Any = jax.sharding.NamedSharding(
    mesh,
    jax.P(None, meshes.GENERATION_BATCH, None, rules.get("kv_heads"), None),
  )
  empty = functools.partial(
    steps.empty,
    decoder.config,
    rows=cfg.rows,
    slots=max_prompt + cfg.max_tokens,
    num_stop_ids=cfg.max_stop_ids,
    dtype=cfg.dtype,
    num_forced=cfg.max_tokens,
  )
  shardings: steps.DecodeState = dataclasses.replace(
    jax.tree.map(lambda _: rows, jax.eval_shape(empty)),
    cache=transformer.KVCache(cache, cache),
  )

  # Closures and not partials: the profiler and errors then show their names.
  def prefill(params: types.Tree, tokens: jax.Array, length: jax.Array):
    return steps.prefill(params, tokens, length, decoder=decoder)

  def decode(params: types.Tree, state: steps.DecodeState, key: jax.Array):
    return steps.decode(
      params, state, key, decoder=decoder, num_steps=cfg.block
    )

  return engines.Steps(
    empty=jax.jit(empty, out_shardings=shardings),
    prefill=jax.jit(prefill),
    insert=jax.jit(steps.insert, donate_argnums=1, out_shardings=shardings),
    decode=jax.jit(decode, donate_argnums=1, out_shardings=(shardings, whole)),
  )


def build(
  shared: engines.Steps,
  mesh: jax.sharding.Mesh,
  *,
  cfg: engines.Sampling,
  max_prompt: int,
  vocab_size: int,
  lock: contextlib.AbstractContextManager[Any],
  free_idle: bool = False,
) -> Callable[[jax.Array, int], engines.Engine]:
  """Places engines.

  Args:
    shared: from `compiled`, with the next three.
    mesh: the generation mesh.
    cfg: sizes of an engine.
    max_prompt: longest prompt, in tokens.
    vocab_size: ids must be below it.
    lock: held around every launch.
    free_idle: see `engine.Engine`.

  Returns:
    A function of a random key and a group size that allocates an engine. All
    engines share the compiled steps.
  """
  whole = jax.sharding.NamedSharding(mesh, jax.P())

  def allocate(key: jax.Array, group_size: int) -> engines.Engine:
    return engines.Engine(
      shared,
      cfg,
      max_prompt=max_prompt,
      vocab_size=vocab_size,
      key=jax.device_put(key, whole),
      insert_width=group_size,
      dispatch=lock,
      free_idle=free_idle,
    )

  return allocate
