"""The engine's steps for a model of the user's own, on the generation mesh."""

import functools
import math

import jax

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import network as networks
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import network, pages, programs
from jaxrl_post.sampling import prefix as prefixes
from jaxrl_post.training import lora, trained


def check(
  model: networks.Network,
  cfg: meshes.Placement,
  sampling: engines.Sampling,
  *,
  trains: trained.Setting,
  critic: bool,
) -> None:
  """Refuses what takes a transformer of ours, with a model of the user's own.

  Args:
    model: which is run on shapes in the engine's dtype.
    cfg: the placement.
    sampling: sizes and dtype of engines.
    trains: what of the model trains.
    critic: whether the algorithm has one.

  Raises:
    InputError: names the setting, or says what the model gives.
  """
  adapters = isinstance(trains, lora.Lora)
  modes, dtypes = "colocated or split", "float32 or bfloat16"
  some, none = "all weights, or patterns of them", "one without a critic"
  for holds, name, rule, value in (
    (cfg.mode != "roles", "placement.mode", modes, cfg.mode),
    (not sampling.quantized, "sampling.dtype", dtypes, sampling.dtype),
    # There are no pages to share.
    (sampling.cache == 1, "sampling.cache", "1", sampling.cache),
    (not adapters, "optim.trained", some, "adapters"),
    (not critic, "algo.baseline", none, "one with it"),
  ):
    if not holds:
      raise types.InputError(
        f"{name}: expected {rule} with a model of your own, got {value}. "
        "Change it."
      )
  networks.check(model, sampling.compute)


def compiled(
  mesh: jax.sharding.Mesh,
  *,
  decoder: decoders.Decoder,
  cfg: engines.Sampling,
  max_prompt: int,
  group: int,
) -> programs.Steps:
  """Places the steps of sampling, as `generator.compiled` does.

  Args:
    mesh: the generation mesh.
    decoder: the model, a `Network`; its dtype is that of the engine.
    cfg: sizes of an engine.
    max_prompt: longest prompt, in tokens.
    group: most rows that share a prompt.

  Returns:
    The steps. Rows lie as a batch does, with all that they remember; prompts
    are on every device.
  """
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  rows = meshes.batch_sharding(mesh)
  room = max_prompt + cfg.max_tokens
  empty = functools.partial(
    network.empty,
    decoder,
    rows=cfg.rows,
    room=room,
    num_forced=cfg.max_tokens,
  )

  # Closures and not partials: the profiler and errors then show their names.
  def prefill(
    params: types.Tree,
    tokens: jax.Array,
    length: jax.Array,
    bucket: int,
    temperature: jax.Array | None = None,
  ):
    del bucket  # All have the room of a whole row.
    if temperature is not None:
      raise types.InputError(
        "request: expected none for log-probabilities of its prompt, which a "
        "model of your own does not give, got one. Leave prompt_logprobs out."
      )
    return network.prefill(params, tokens, length, decoder=decoder, room=room)

  def extend(
    params: types.Tree,
    prefix: prefixes.Memory,
    tokens: jax.Array,
    begin: jax.Array,
  ):
    return network.extend(
      params, prefix, tokens, begin, decoder=decoder, room=room
    )

  def decode(params: types.Tree, state: network.State, key: jax.Array):
    return network.decode(
      params,
      state,
      key,
      decoder=decoder,
      room=room,
      num_steps=cfg.block,
      num_top=cfg.top_logprobs,
    )

  shapes = jax.eval_shape(empty)
  return programs.Steps(
    # A page a row: there is always one.
    size=pages.sizes(
      rows=cfg.rows,
      group=group,
      page=room,
      max_prompt=max_prompt,
      max_tokens=cfg.max_tokens,
      parts=math.prod(mesh.shape[name] for name in meshes.GENERATION_BATCH),
    ),
    empty=jax.jit(empty, out_shardings=rows),
    layout=lambda params: params,
    prefill=jax.jit(prefill, static_argnums=3, out_shardings=whole),
    extend=jax.jit(extend, donate_argnums=1, out_shardings=whole),
    insert=jax.jit(network.insert, donate_argnums=1, out_shardings=rows),
    decode=jax.jit(decode, donate_argnums=1, out_shardings=(rows, whole)),
    cut=jax.jit(network.cut, donate_argnums=0, out_shardings=rows),
    resume=jax.jit(network.resume, donate_argnums=0, out_shardings=rows),
    state=jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), shapes
    ),
    prefix=whole,
    holds=False,
  )
