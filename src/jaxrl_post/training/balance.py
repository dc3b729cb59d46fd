"""The load of experts: a loss that balances it, and numbers of it.

Both are of the trained tokens of a whole update. The loss multiplies two means
over them: of choices, and of probabilities (`experts.imbalance`). Only the
second has a gradient, so that parts of the rows add up to the gradient of the
whole, if each of them knows the choices of all. Where rows are cut into parts,
these are counted in a forward pass of their own, before the first gradient.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import experts
from jaxrl_post.training import portions

_COUNTS, _PROBS = "moe/counts", "moe/probs"
_GIVEN, _DIFFERING = "moe/given", "moe/differing"


def replayed(batch: types.Batch) -> Int[Array, "L B T X"] | None:
  """Returns where tokens are to go, by layer; None where routers choose."""
  if batch.routing is None:
    return None
  return jnp.moveaxis(batch.routing, 2, 0)


def routed(
  decoder: decoders.Decoder, params: types.Tree, batch: types.Batch
) -> tuple[Float[Array, "B T D"], experts.Routed | None]:
  """Returns the hidden state behind each token, and where trained ones went.

  Args:
    decoder: the model.
    params: its weights.
    batch: some rows.

  Returns:
    As `decoder.routed`, of which trained tokens count. Tokens go where the
    batch says, if it does.
  """
  return decoders.routed(
    decoder,
    params,
    tokens=batch.tokens,
    positions=batch.positions,
    segment_ids=batch.segment_ids,
    prefix_ids=batch.prefix_ids,
    routing=replayed(batch),
    counted=(batch.loss_mask > 0).astype(jnp.float32),
  )


def load(
  decoder: decoders.Decoder,
  params: types.Tree,
  batch: types.Batch,
  microbatches: int,
) -> Float[Array, "L E"] | None:
  """Counts the choices of all rows, where a part of them needs to know.

  Args:
    decoder: the model.
    params: its weights.
    batch: the rows of an update.
    microbatches: parts that they are cut into.

  Returns:
    How many trained tokens chose each expert; None where nothing is balanced,
    or one part has all rows.
  """
  if not decoder.balance or microbatches == 1:
    return None

  def count(part: types.Batch) -> jax.Array:
    told = routed(decoder, params, part)[1]
    assert told is not None, "balance is of experts"
    return told.counts

  return portions.total(count, batch, microbatches)


def loss(
  decoder: decoders.Decoder,
  told: experts.Routed | None,
  load: Float[Array, "L E"] | None,
  num_tokens: Float[Array, ""],
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
  """Scores the router on some rows.

  Args:
    decoder: the model.
    told: where their tokens went; None without experts.
    load: from `load`.
    num_tokens: trained tokens of the whole update.

  Returns:
    The share of these rows in `balance` times `experts.imbalance`, and sums for
    `whole`.
  """
  if told is None:
    return jnp.zeros(()), {}
  sums = {_COUNTS: told.counts, _PROBS: told.probs}
  if told.given is not None and told.differing is not None:
    sums |= {
      _GIVEN: jnp.sum(told.given),
      _DIFFERING: jnp.sum(told.differing),
    }
  if not decoder.balance:
    return jnp.zeros(()), sums
  counts = told.counts if load is None else load
  found = experts.imbalance(counts, told.probs, num_tokens)
  return decoder.balance * found, sums


def whole(
  metrics: Mapping[str, jax.Array], num_tokens: Float[Array, ""]
) -> dict[str, jax.Array]:
  """Puts numbers of the load in place of its sums over an update.

  Args:
    metrics: with the sums of `loss`, or without.
    num_tokens: trained tokens of the update.

  Returns:
    `moe/balance`, without its coefficient, `moe/most_loaded`, and with replay
    `moe/differing`, the share of given experts that the routers would not have
    chosen, beside the other metrics; NaN without tokens.
  """
  found = dict(metrics)
  if _COUNTS not in found:
    return found
  counts, probs = found.pop(_COUNTS), found.pop(_PROBS)
  if _GIVEN in found:
    found[_DIFFERING] /= found.pop(_GIVEN)  # NaN of 0 / 0.
  none = jnp.where(num_tokens > 0, 0.0, jnp.nan)
  return found | {
    "moe/balance": experts.imbalance(counts, probs, num_tokens) + none,
    "moe/most_loaded": experts.most_loaded(counts) + none,
  }
