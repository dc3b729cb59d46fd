"""From logits to a token and the log-probability that is reported for it."""

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
  # One uniform number a row and the inverse of the cumulative distribution:
  # V times fewer random bits than a Gumbel draw.
  cumulative = jnp.cumsum(weights, axis=-1)
  uniform = jax.vmap(lambda key: jax.random.uniform(key))(keys)
  threshold = uniform * cumulative[:, -1]
  # The first token whose cumulative weight is above the threshold has weight.
  # Rounding may lift the threshold onto the total; then the last such token.
  drawn = jnp.sum(cumulative <= threshold[:, None], axis=-1)
  last = jnp.argmax(cumulative >= cumulative[:, -1:], axis=-1)
  greedy = jnp.argmax(logits, axis=-1)
  token = jnp.where(temperature > 0, jnp.minimum(drawn, last), greedy)
  token = token.astype(jnp.int32)
  taken = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
  return token, taken


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
