"""From logits to a token and the log-probability that is reported for it."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def pick(
  logits: Float[Array, "B V"],
  keys: jax.Array,
  temperature: Float[Array, " B"],
  top_k: Int[Array, " B"],
  top_p: Float[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
  """Draws one token a row.

  Args:
    logits: float32.
    keys: one random key a row; a row's draw depends on nothing else.
    temperature: divides the logits; 0 takes the most probable token.
    top_k: 0 keeps every token.
    top_p: 1 keeps every token.

  Returns:
    The tokens, and their log-probabilities in nats in the temperature-scaled
    distribution over the *whole* vocabulary, also where top-k or top-p drew
    from a part of it. Greedy rows report temperature 1.
  """
  scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
  logprobs = jax.nn.log_softmax(scaled, axis=-1)
  probs = jnp.exp(logprobs)
  truncated = (top_k > 0) | (top_p < 1)
  weights = jax.lax.cond(
    jnp.any(truncated & (temperature > 0)),
    lambda: jnp.where(allowed(probs, top_k, top_p), probs, 0.0),
    lambda: probs,
  )
  uniform = jax.vmap(lambda key: jax.random.uniform(key))(keys)
  drawn = _draw(weights, uniform)
  greedy = jnp.argmax(logits, axis=-1)
  token = jnp.where(temperature > 0, drawn, greedy)
  token = token.astype(jnp.int32)
  taken = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
  return token, taken


def _draw(
  weights: Float[Array, "B V"], uniform: Float[Array, " B"]
) -> Int[Array, " B"]:
  """Inverts the cumulative distribution: one random number a row, not V.

  In two levels of about sqrt(V) each: a float32 sum over a whole vocabulary
  rounds away the probability of rare tokens.
  """
  rows, vocab = weights.shape
  width = math.isqrt(vocab - 1) + 1
  weights = jnp.pad(weights, ((0, 0), (0, width * width - vocab)))
  blocks = weights.reshape(rows, width, width)
  totals = jnp.sum(blocks, axis=-1)
  ends = jnp.cumsum(totals, axis=-1)
  threshold = uniform * ends[:, -1]
  block = _first_above(ends, threshold, totals)[:, None]
  before = jnp.take_along_axis(ends - totals, block, axis=-1)[:, 0]
  inner = jnp.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
  place = _first_above(jnp.cumsum(inner, axis=-1), threshold - before, inner)
  return block[:, 0] * width + place


def _first_above(
  ends: jax.Array, threshold: jax.Array, weights: jax.Array
) -> jax.Array:
  """Finds the first entry that has weight and ends above the threshold.

  The last one with weight, where rounding left none.
  """
  has_weight = weights > 0
  hit = (ends > threshold[:, None]) & has_weight
  last = ends.shape[-1] - 1 - jnp.argmax(has_weight[:, ::-1], axis=-1)
  return jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last)


def allowed(
  probs: Float[Array, "B V"],
  top_k: Int[Array, " B"],
  top_p: Float[Array, " B"],
) -> Bool[Array, "B V"]:
  """Says which tokens top-k and top-p leave.

  Returns:
    True for the `top_k` most probable tokens (all where 0), of those that have
    less than `top_p` of probability before them. Never an empty set; of equal
    tokens the smaller id comes first.
  """
  order = jnp.argsort(-probs, axis=-1, stable=True)
  ranked = jnp.take_along_axis(probs, order, axis=-1)
  before = jnp.cumsum(ranked, axis=-1) - ranked
  rank = jnp.arange(probs.shape[-1])
  keep = (top_p[:, None] >= 1) | (before < top_p[:, None])
  keep &= (top_k[:, None] == 0) | (rank < top_k[:, None])
  keep = keep.at[:, 0].set(True)
  rows = jnp.arange(probs.shape[0])[:, None]
  return jnp.zeros(probs.shape, bool).at[rows, order].set(keep)
