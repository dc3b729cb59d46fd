"""The engine's steps, compiled for the generation mesh."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import experts, transformer
from jaxrl_post.models import network as networks
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import network
from jaxrl_post.sampling import (
  attention,
  page_kernel,
  programs,
  reader,
  steps,
)
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import pages as paging
from jaxrl_post.sampling import prefix as prefixes

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
  group: int,
) -> programs.Steps:
  """Places the steps of sampling.

  Args:
    mesh: the generation mesh.
    rules: logical axis to mesh axis, as the weights follow it.
    decoder: the model; its dtype is that of the engine.
    cfg: sizes of an engine.
    max_prompt: longest prompt, in tokens.
    group: most rows that share a prompt.

  Returns:
    The steps; each is compiled at its first use with arguments of a shape.
  """
  if isinstance(decoder.config, networks.Network):
    return network.compiled(
      mesh, decoder=decoder, cfg=cfg, max_prompt=max_prompt, group=group
    )
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  rows = meshes.batch_sharding(mesh)
  # Pages of every layer lie as rows do; of key heads, as the weights do.
  heads = rules.get("kv_heads")
  pages: Any = jax.sharding.NamedSharding(
    mesh, jax.P(meshes.GENERATION_BATCH, None, heads)
  )
  platform = mesh.devices.flat[0].platform
  in_kernel = platform == "tpu" and not cfg.quantized_cache
  size = paging.sizes(
    rows=cfg.rows,
    group=group,
    page=cfg.page,
    max_prompt=max_prompt,
    max_tokens=cfg.max_tokens,
    share=cfg.cache,
    parts=math.prod(mesh.shape[name] for name in meshes.GENERATION_BATCH),
    multiple=page_kernel.SUBLANES if in_kernel else 1,
  )
  empty = functools.partial(
    steps.empty,
    decoder.shape,
    size,
    dtype="int8" if cfg.quantized_cache else decoder.dtype,
    num_forced=cfg.max_tokens,
  )
  shapes = jax.eval_shape(empty)
  shardings: steps.DecodeState = dataclasses.replace(
    jax.tree.map(lambda _: rows, shapes),
    own=jax.tree.map(lambda _: pages, shapes.own),
    prompt=jax.tree.map(lambda _: pages, shapes.prompt),
  )
  read_pages = attention.read_pages
  if in_kernel:
    split = mesh.shape[heads] if heads else 1
    lie = page_kernel.formats(pages, decoder.shape.num_kv_heads // split)
    shardings = dataclasses.replace(shardings, own=(lie,) * len(shapes.own))
    read_pages = page_kernel.on(mesh, meshes.GENERATION_BATCH, heads)

  # Prompts are read by all devices at once; rows lie apart.
  reads = dataclasses.replace(decoder, mix=experts.on(mesh, rules, jax.P()))
  decoder = dataclasses.replace(
    decoder, mix=experts.on(mesh, rules, jax.P(meshes.GENERATION_BATCH))
  )

  # Closures and not partials: the profiler and errors then show their names.
  def prefill(
    params: types.Tree,
    tokens: jax.Array,
    length: jax.Array,
    bucket: int,
    temperature: jax.Array | None = None,
  ):
    return prefixes.prefill(
      params,
      tokens,
      length,
      decoder=reads,
      bucket=bucket,
      temperature=temperature,
    )

  def extend(
    params: types.Tree,
    prefix: prefixes.Prefix,
    tokens: jax.Array,
    begin: jax.Array,
  ):
    return prefixes.extend(params, prefix, tokens, begin, decoder=reads)

  def decode(params: types.Tree, state: steps.DecodeState, key: jax.Array):
    return steps.decode(
      params,
      state,
      key,
      decoder=decoder,
      num_steps=cfg.block,
      num_top=cfg.top_logprobs,
      read_pages=read_pages,
    )

  # XLA's CPU back-end copies a layer out of the stack for every product with it
  # (1.2 to 1.6 times the time of a token); others read it where it lies.
  copies = platform == "cpu"
  prompts: Any = jax.sharding.NamedSharding(
    mesh, jax.P(None, None, None, heads)
  )
  held: dict[str, Any] = dict(
    k=prompts,
    v=prompts,
    last_token=whole,
    length=whole,
    scores=whole,
    routing=whole if decoder.replays else None,
  )
  read = prefixes.Prefix(**held)
  return programs.Steps(
    size=size,
    empty=jax.jit(empty, out_shardings=shardings),
    layout=jax.jit(transformer.unstack) if copies else lambda params: params,
    prefill=jax.jit(prefill, static_argnums=3, out_shardings=read),
    extend=jax.jit(extend, donate_argnums=1, out_shardings=read),
    insert=jax.jit(steps.insert, donate_argnums=1, out_shardings=shardings),
    decode=jax.jit(decode, donate_argnums=1, out_shardings=(shardings, whole)),
    cut=jax.jit(steps.cut, donate_argnums=0, out_shardings=shardings),
    resume=jax.jit(steps.resume, donate_argnums=0, out_shardings=shardings),
    state=specs.on(shapes, shardings),
    prefix=read,
  )


def lower(
  shared: Any,
  mesh: jax.sharding.Mesh,
  params: types.Tree,
  *,
  cfg: engines.Sampling,
  max_prompt: int,
) -> dict[str, Callable[[], jax.stages.Lowered]]:
  """Lowers the very programs that an engine runs.

  Args:
    shared: from `compiled`, with the rest. The devices may be those of a
      description: no array is needed.
    mesh: the generation mesh.
    params: shapes of the weights, and how they lie.
    cfg: sizes of an engine.
    max_prompt: longest prompt, in tokens.

  Returns:
    A function for each: `prefill` of the longest prompts; `extend`, if those
    take several calls; `insert`; and `decode`, of a block.
  """
  size = shared.size
  num, chunk, room = reader.call_shape(
    max_prompt, call_tokens=cfg.prefill_tokens, most=-(-cfg.rows // size.group)
  )

  def of(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)

  tokens, length, begin = of(num, chunk), of(num), of()
  made = jax.eval_shape(
    lambda *given: shared.prefill(*given, room), params, tokens, length
  )
  prefix = specs.on(made, dataclasses.replace(shared.prefix, scores=None))
  rows = steps.rows_for(
    [],
    types.SamplingParams(),
    width=num * size.group,
    num_forced=cfg.max_tokens,
  )
  into = prefix, shared.state, of(num), of(num, size.group), rows
  key = jax.eval_shape(lambda: jax.random.key(0))
  key = specs.on(key, jax.sharding.NamedSharding(mesh, jax.P()))
  found = {
    "prefill": lambda: shared.prefill.lower(params, tokens, length, room),
    "extend": lambda: shared.extend.lower(params, prefix, tokens, begin),
    "insert": lambda: shared.insert.lower(*into),
    "decode": lambda: shared.decode.lower(params, shared.state, key),
  }
  if chunk == room:
    del found["extend"]
  return found


def build(
  shared: programs.Steps,
  mesh: jax.sharding.Mesh,
  *,
  cfg: engines.Sampling,
  max_prompt: int,
  vocab_size: int,
  lock: contextlib.AbstractContextManager[Any],
  free_idle: bool = False,
  decode: Callable[[Sequence[int]], str] | None = None,
) -> Callable[[jax.Array], engines.Engine]:
  """Places engines.

  Args:
    shared: from `compiled`, with the next three.
    mesh: the generation mesh.
    cfg: sizes of an engine.
    max_prompt: longest prompt, in tokens.
    vocab_size: ids must be below it.
    lock: held around every launch.
    free_idle: see `engine.Engine`, likewise the next one.
    decode: ids to text, for stop strings.

  Returns:
    A function of a random key that allocates an engine. All engines share the
    compiled steps.
  """
  whole = jax.sharding.NamedSharding(mesh, jax.P())

  def allocate(key: jax.Array) -> engines.Engine:
    return engines.Engine(
      shared,
      cfg,
      max_prompt=max_prompt,
      vocab_size=vocab_size,
      key=jax.device_put(key, whole),
      dispatch=lock,
      free_idle=free_idle,
      decode=decode,
    )

  return allocate
