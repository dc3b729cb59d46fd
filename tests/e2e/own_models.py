"""Runs of models of one's own, tiny ones; and of some that are wrong.

The task is to say the letter "a", and only that.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jaxrl_post import config, types
from jaxrl_post.data import dataset, sources
from jaxrl_post.models import decoder, from_flax
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

LETTERS = "abcd"
VOCAB, WIDTH, LONGEST = 6, 16, 8


def make(index: int) -> types.Example:
  """Makes the example of an index: two letters."""
  first, second = divmod(index % 16, 4)
  return types.Example(prompt=LETTERS[first] + LETTERS[second], reference="a")


def score(rollout: types.Rollout, reference: str) -> float:
  """Scores the share of the letter that is asked for."""
  text = rollout.text
  return text.count(reference) / max(len(text), 1)


class Plain(nn.Module):
  """A layer of attention that reads tokens and nothing else."""

  width: int = WIDTH
  dropout: float = 0.0
  deterministic: bool = True

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    split = nn.with_partitioning(nn.initializers.normal(0.3), (None, "embed"))
    x = nn.Embed(VOCAB, self.width, embedding_init=split, name="embed")(tokens)
    x = x + nn.Embed(LONGEST, self.width)(jnp.arange(tokens.shape[1]))
    seen = nn.make_causal_mask(tokens)
    x = x + nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=seen)
    x = nn.Dropout(self.dropout, deterministic=self.deterministic)(x)
    return nn.Dense(VOCAB)(nn.LayerNorm()(x))


class Step(nn.Module):
  """One that decodes: its attention keeps a cache when it is asked to."""

  shift: int = 0

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    mask: jax.Array | None = None,
    decode: bool = False,
  ) -> jax.Array:
    places = jnp.arange(tokens.shape[1]) if positions is None else positions
    places = places + (self.shift if decode else 0)
    x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
    x = x + nn.Embed(LONGEST, WIDTH, name="place")(places)
    attend = nn.MultiHeadDotProductAttention(2, decode=decode, name="attend")
    x = x + attend(x, mask=mask)
    return nn.Dense(VOCAB, name="out")(nn.LayerNorm()(x))


def step(module: Step, tokens: jax.Array, positions: jax.Array) -> jax.Array:
  """Reads one token into the cache of a `Step`."""
  return module(tokens, positions, decode=True)


class Small(nnx.Module):
  """A layer of attention, of nnx."""

  def __init__(
    self,
    rngs: nnx.Rngs,
    *,
    causal: bool = True,
    dropout: float = 0.0,
    norm: Any = nnx.LayerNorm,
    out: int = VOCAB,
  ) -> None:
    self.causal, self.fixed = causal, dropout == 0
    drawn = nnx.initializers.normal(0.3)
    split = nnx.with_partitioning(drawn, (None, "fsdp"))
    self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=split, rngs=rngs)
    self.place = nnx.Embed(LONGEST, WIDTH, embedding_init=drawn, rngs=rngs)
    self.attend = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
    self.drop = nnx.Dropout(dropout, rngs=rngs)
    self.norm = norm(WIDTH, rngs=rngs)
    self.out = nnx.Linear(WIDTH, out, rngs=rngs)

  def __call__(
    self, tokens: jax.Array, positions: jax.Array, decode: bool = False
  ) -> jax.Array:
    x = self.embed(tokens) + self.place(positions)
    mask = None
    if self.causal and not decode:
      mask = nnx.make_causal_mask(tokens)
    x = x + self.attend(x, mask=mask, decode=decode)
    x = x if self.fixed else self.drop(x, deterministic=False)
    return self.out(self.norm(x))


def small_step(
  model: Small, tokens: jax.Array, positions: jax.Array
) -> jax.Array:
  """Reads one token into the cache of a `Small`."""
  return model(tokens, positions, decode=True)


def small_cache(model: Small, length: int, dtype: str) -> None:
  """Makes that cache; what `nnx.Embed` gives is float32 in any dtype."""
  del dtype
  model.attend.init_cache((1, length, WIDTH), jnp.float32)


SIZES: dict[str, Any] = dict(vocab_size=VOCAB, max_positions=LONGEST)


def of(model: decoder.Model, **changes: Any) -> config.Run:
  """Four prompts a step, four rollouts each, on the first device."""
  run = config.Run(
    model=model,
    data=dataset.Data(
      train=sources.Generated(make, size=64), alphabet=LETTERS, max_prompt=3
    ),
    rewards=pool.Rewards(functions=(score,)),
    optim=optim.Optim(learning_rate=1e-2),
    sampling=engine.Sampling(max_tokens=4, rows=16, block=2),
    placement=mesh.Placement(
      training=mesh.TrainingAxes(fsdp=1),
      generation=mesh.GenerationAxes(data=1),
      cpu_devices=8,
    ),
    checkpoint=checkpoint.Checkpoint(every=0),
    num_steps=2,
    groups_per_step=4,
    group_size=4,
    max_lag=0,
  )
  return dataclasses.replace(run, **changes)


def linen_plain() -> config.Run:
  """Tokens to logits; every token takes the whole row."""
  return of(from_flax.linen(Plain(), **SIZES))


def linen_cached() -> config.Run:
  """One that keeps keys and values, and takes rows of several rollouts."""
  takes = ("positions", "mask")
  return of(from_flax.linen(Step(), takes=takes, decode=step, **SIZES))


def nnx_cached() -> config.Run:
  """The same of nnx, but for the mask."""
  return of(
    from_flax.nnx(
      Small,
      takes=("positions",),
      decode=small_step,
      cache=small_cache,
      **SIZES,
    )
  )


def nnx_plain() -> config.Run:
  """The model of `nnx_cached`, read without its cache."""
  return of(from_flax.nnx(Small, takes=("positions",), **SIZES))


def with_dropout() -> config.Run:
  """Dropout is on."""
  return of(from_flax.linen(Plain(dropout=0.5, deterministic=False), **SIZES))


def with_nan() -> config.Run:
  """The first weights are not finite."""

  def broken(rngs: nnx.Rngs) -> Small:
    model = Small(rngs)
    model.out.bias[...] = jnp.full(VOCAB, jnp.nan)
    return model

  return of(from_flax.nnx(broken, takes=("positions",), **SIZES))
