"""From logits to a token and the log-probabilities that are reported for it.

The vocabulary is seen as blocks of about its square root: their maxima and
their sums are the only passes over it where no row truncates, biases or masks.
A row's result depends on its own logits, key and controls, never on other
rows: what these need besides is computed apart and chosen row by row.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl_post import types


@types.record
class Controls:
  """How each row is sampled.

  Attributes:
    temperature: divides the logits; 0 takes the most probable token.
    top_k: see `types.SamplingParams`; likewise the next two.
    top_p: 1 keeps all.
    min_p: 0 keeps all.
    stop_ids: padded with -1.
    min_tokens: tokens of the completion before a stop id may be drawn.
    bias_ids: tokens whose logits change, none twice; padded with -1. One that
      the vocabulary does not have changes nothing.
    bias: added to their logits; -inf forbids a token.
  """

  temperature: Float[Array, " B"]
  top_k: Int[Array, " B"]
  top_p: Float[Array, " B"]
  min_p: Float[Array, " B"]
  stop_ids: Int[Array, "B M"]
  min_tokens: Int[Array, " B"]
  bias_ids: Int[Array, "B Q"]
  bias: Float[Array, "B Q"]


@types.record
class Picked:
  """One token a row, and what is reported with it.

  Attributes:
    token: the tokens.
    logprob: of each, in nats, in the temperature-scaled distribution over the
      *whole* vocabulary.
    top_ids: the most probable tokens of that distribution, in falling order;
      of equal ones the smaller id comes first (-0 counts as less than 0).
    top_logprobs: of these, in nats.
  """

  token: Int[Array, " B"]
  logprob: Float[Array, " B"]
  top_ids: Int[Array, "B N"]
  top_logprobs: Float[Array, "B N"]


def controls_for(
  sampling: types.SamplingParams,
  width: int,
  num_stop_ids: int,
  num_bias: int,
) -> Controls:
  """Returns the controls of rows that are sampled alike.

  Args:
    sampling: how all of them are sampled.
    width: rows.
    num_stop_ids: M, at least the number of stop ids in `sampling`.
    num_bias: Q, at least the biased and forbidden ids of `sampling` together.

  Returns:
    NumPy arrays; the step that takes them places them. A token that is both
    biased and forbidden is forbidden.
  """
  bias = dict(sampling.logit_bias)
  bias |= dict.fromkeys(sampling.forbidden_ids, -math.inf)
  stop_ids = np.full((width, num_stop_ids), -1, np.int32)
  stop_ids[:, : len(sampling.stop_ids)] = sampling.stop_ids
  bias_ids = np.full((width, num_bias), -1, np.int32)
  bias_ids[:, : len(bias)] = list(bias)
  added = np.zeros((width, num_bias), np.float32)
  added[:, : len(bias)] = list(bias.values())
  fields: dict[str, Any] = dict(
    temperature=np.full(width, sampling.temperature, np.float32),
    top_k=np.full(width, min(sampling.top_k, 2**31 - 1), np.int32),
    top_p=np.full(width, sampling.top_p, np.float32),
    min_p=np.full(width, sampling.min_p, np.float32),
    stop_ids=stop_ids,
    min_tokens=np.full(width, sampling.min_tokens, np.int32),
    bias_ids=bias_ids,
    bias=added,
  )
  return Controls(**fields)


def idle_controls(rows: int, num_stop_ids: int, num_bias: int) -> Controls:
  """Returns the controls of rows that are not in use: nothing is truncated.

  Args:
    rows: B.
    num_stop_ids: M.
    num_bias: Q; with 0 no bias is compiled into `pick`.

  Returns:
    Arrays that share no buffer, since one that is shared cannot be donated.
  """
  return Controls(
    temperature=jnp.ones(rows, jnp.float32),
    top_k=jnp.zeros(rows, jnp.int32),
    top_p=jnp.ones(rows, jnp.float32),
    min_p=jnp.zeros(rows, jnp.float32),
    stop_ids=jnp.full((rows, num_stop_ids), -1, jnp.int32),
    min_tokens=jnp.zeros(rows, jnp.int32),
    bias_ids=jnp.full((rows, num_bias), -1, jnp.int32),
    bias=jnp.zeros((rows, num_bias), jnp.float32),
  )


def pick(
  logits: Float[Array, "B V"],
  keys: jax.Array,
  controls: Controls,
  made: Int[Array, " B"],
  *,
  num_top: int,
) -> Picked:
  """Draws one token a row.

  The draw is from the logits with their bias, stop ids masked while `made` is
  below `min_tokens`, then scaled by temperature, then truncated by min-p, top-k
  and top-p. Temperature 0 takes the most probable token of the biased and
  masked logits. Where all tokens are forbidden or masked, bias and masks are
  passed over and the most probable token is taken: a row is never without one.

  Args:
    logits: float32.
    keys: one random key a row; a row's draw depends on nothing else.
    controls: how each row is sampled.
    made: tokens that each completion has before this one.
    num_top: N, most probable tokens to report; at most V.

  Returns:
    The tokens, and log-probabilities in the temperature-scaled distribution
    over the whole vocabulary, *without* bias, masks and truncation, whatever
    the draw was from: that is the distribution which the trainer's loss
    computes again. Greedy rows report temperature 1.
  """
  hot, scale = _scale(controls)
  rate = 1.0 / scale
  blocks = _blocked(logits, -jnp.inf)
  peaks = jnp.max(blocks, axis=-1)
  peak = jnp.max(peaks, axis=-1)

  def weigh(x: jax.Array) -> jax.Array:
    dims = (slice(None), *[None] * (x.ndim - 1))
    return jnp.exp((x - peak[dims]) * rate[dims])

  totals = jnp.sum(weigh(blocks), axis=-1)
  uniform = jax.vmap(lambda key: jax.random.uniform(key))(keys)
  drawn = _draw(totals, lambda block: weigh(_take(blocks, block)), uniform)
  token = jnp.where(hot, drawn, _most_probable(blocks, peaks))

  masked = made < controls.min_tokens
  masked &= jnp.any(controls.stop_ids >= 0, axis=-1)
  changed = masked | jnp.any(controls.bias_ids >= 0, axis=-1)
  changed |= hot & _truncates(controls)
  token = jax.lax.cond(
    jnp.any(changed),
    lambda: jnp.where(
      changed, _changed(logits, controls, masked, uniform, token), token
    ),
    lambda: token,
  )
  # Only a row of NaN points beyond the vocabulary; its log-probability shows.
  token = jnp.minimum(token, logits.shape[-1] - 1)

  log_total = jnp.log(jnp.sum(totals, axis=-1))
  taken = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
  values, ids = _top(blocks, peaks, num_top)
  return Picked(
    token=token,
    logprob=(taken - peak) / scale - log_total,
    top_ids=ids,
    top_logprobs=(values - peak[:, None]) / scale[:, None] - log_total[:, None],
  )


def allowed(
  weights: Float[Array, "B V"],
  top_k: Int[Array, " B"],
  top_p: Float[Array, " B"],
  min_p: Float[Array, " B"],
) -> Bool[Array, "B V"]:
  """Says which tokens min-p, top-k and top-p leave.

  Args:
    weights: probabilities times any factor of the row.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    min_p: 0 keeps all.

  Returns:
    True for the `top_k` most probable tokens (all where 0), of those that have
    less than `top_p` of probability before them, and at least `min_p` times
    that of the most probable one. Each rule reads the probabilities given,
    none those that another has left. Never an empty set; of equal tokens the
    smaller id comes first. Tokens without weight are left out.
  """
  vocab = weights.shape[-1]
  limit = jnp.where(top_k > 0, top_k, vocab + 1)
  total = jnp.sum(weights, axis=-1)
  mass = jnp.where(top_p < 1, top_p * total, jnp.inf)
  # A sort would order all that is then cut off. Floats that are not negative
  # are in the order of their bits, so each row's least value is found bit by
  # bit: sums over the vocabulary, 31 of them.
  bits = jax.lax.bitcast_convert_type(weights, jnp.int32)

  def count(place: jax.Array) -> jax.Array:
    return jnp.sum(bits > place[:, None], axis=-1, dtype=jnp.int32)

  def before(place: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(bits > place[:, None], weights, 0.0), axis=-1)

  most = jnp.max(bits, axis=-1)
  floor = jnp.maximum(
    jax.lax.cond(
      jnp.any(top_k > 0),
      lambda: _least(lambda place: count(place) < limit, most),
      lambda: jnp.full_like(most, -1),
    ),
    jax.lax.cond(
      jnp.any(top_p < 1),
      lambda: _least(lambda place: before(place) < mass, most),
      lambda: jnp.full_like(most, -1),
    ),
  )
  value = jax.lax.bitcast_convert_type(floor, jnp.float32)
  # Of the tokens that all weigh the least that is kept, some may be too many.
  share = jnp.ceil((mass - before(floor)) / value)
  share = jnp.where((top_p < 1) & (floor > 0), share, jnp.inf)
  room = jnp.minimum(share, jnp.float32(vocab)).astype(jnp.int32)
  # At least one, also where `top_p` is so small that its mass rounds to none.
  room = jnp.maximum(jnp.minimum(room, limit - count(floor)), 1)
  has_weight = weights > 0
  least = (bits == floor[:, None]) & has_weight
  least = jax.lax.cond(
    jnp.any(jnp.sum(least, axis=-1, dtype=jnp.int32) > room),
    lambda: least & (_rank(least) <= room[:, None]),
    lambda: least,
  )
  keep = (bits > floor[:, None]) & has_weight
  enough = weights >= (min_p * jnp.max(weights, axis=-1))[:, None]
  return (keep | least) & enough


def _least(
  fits: Callable[[jax.Array], jax.Array], most: Int[Array, " B"]
) -> Int[Array, " B"]:
  """Finds the least number from -1 to `most` that fits, as all above it do."""

  def halve(_: jax.Array, ends: tuple[jax.Array, jax.Array]):
    low, high = ends
    middle = low + (high - low) // 2
    fit = fits(middle)
    return jnp.where(fit, low, middle), jnp.where(fit, middle, high)

  return jax.lax.fori_loop(0, 31, halve, (jnp.full_like(most, -1), most))[1]


def _changed(
  logits: Float[Array, "B V"],
  controls: Controls,
  masked: Bool[Array, " B"],
  uniform: Float[Array, " B"],
  plain: Int[Array, " B"],
) -> Int[Array, " B"]:
  """Draws the tokens of rows that bias, mask or truncate."""
  vocab, free = logits.shape[-1], logits
  # The padding is moved behind the vocabulary, where a write is dropped: a
  # negative index would count from the end.
  if controls.bias_ids.shape[-1]:
    ids = jnp.where(controls.bias_ids < 0, vocab, controls.bias_ids)
    add = jax.vmap(lambda x, at, by: x.at[at].add(by, mode="drop"))
    logits = add(logits, ids, controls.bias)
  if controls.stop_ids.shape[-1]:
    use = masked[:, None] & (controls.stop_ids >= 0)
    ids = jnp.where(use, controls.stop_ids, vocab)
    mask = jax.vmap(lambda x, at: x.at[at].set(-jnp.inf, mode="drop"))
    logits = mask(logits, ids)

  peak = jnp.max(logits, axis=-1)
  hot, scale = _scale(controls)
  weights = jnp.exp((logits - peak[:, None]) * (1.0 / scale)[:, None])
  weights = jax.lax.cond(
    jnp.any(hot & _truncates(controls)),
    lambda: jnp.where(
      allowed(weights, controls.top_k, controls.top_p, controls.min_p),
      weights,
      0.0,
    ),
    lambda: weights,
  )
  blocks = _blocked(weights, 0.0)
  drawn = _draw(
    jnp.sum(blocks, axis=-1), lambda block: _take(blocks, block), uniform
  )

  def greedy(logits: jax.Array) -> jax.Array:
    blocks = _blocked(logits, -jnp.inf)
    return _most_probable(blocks, jnp.max(blocks, axis=-1))

  best = jax.lax.cond(jnp.any(~hot), lambda: greedy(logits), lambda: plain)
  nothing = peak == -jnp.inf
  token = jnp.where(hot, drawn, best)
  return jax.lax.cond(
    jnp.any(nothing),
    lambda: jnp.where(nothing, greedy(free), token),
    lambda: token,
  )


def _scale(controls: Controls) -> tuple[Bool[Array, " B"], Float[Array, " B"]]:
  """Says which rows are random, and by what their logits are divided."""
  # The reciprocal of a smaller number is infinite.
  hot = controls.temperature >= jnp.finfo(jnp.float32).tiny
  return hot, jnp.where(hot, controls.temperature, 1.0)


def _truncates(controls: Controls) -> Bool[Array, " B"]:
  cut = (controls.top_k > 0) | (controls.top_p < 1)
  return cut | (controls.min_p > 0)


def _rank(found: Bool[Array, "B V"]) -> Int[Array, "B V"]:
  """Counts what is true in each row, up to each place."""
  inside = jnp.cumsum(_blocked(found.astype(jnp.int32), 0), axis=-1)
  totals = inside[..., -1]
  before = jnp.cumsum(totals, axis=-1) - totals
  rank = inside + before[..., None]
  return rank.reshape(len(found), -1)[:, : found.shape[-1]]


def _blocked(x: Num[Array, "B V"], fill: float) -> Num[Array, "B N W"]:
  """Cuts the vocabulary into blocks of about its square root.

  Their number is a power of two where the vocabulary has one as a divisor that
  makes blocks of at most 16 times that: filling up the last block copies all of
  them, and where a mesh splits the vocabulary, each part has whole blocks, and
  no logits are gathered. In other vocabularies of an odd size they are.
  """
  rows, vocab = x.shape
  width = math.isqrt(vocab - 1) + 1
  even = math.gcd(vocab, 1 << (width - 1).bit_length())
  width = vocab // even if 16 * even >= width else width
  x = jnp.pad(x, ((0, 0), (0, -vocab % width)), constant_values=fill)
  return x.reshape(rows, -1, width)


def _take(
  blocks: Float[Array, "B N W"], block: Int[Array, " B"]
) -> Float[Array, "B W"]:
  return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _draw(
  totals: Float[Array, "B N"],
  inside: Callable[[jax.Array], jax.Array],
  uniform: Float[Array, " B"],
) -> Int[Array, " B"]:
  """Inverts the cumulative distribution: one random number a row, not V.

  In two levels: a float32 sum over a whole vocabulary rounds away rare tokens.
  The one uniform number has 23 bits, so what is rarer than that is drawn a
  little more or less often than it should be.

  Args:
    totals: weight of each block.
    inside: gives the weights inside of one block a row.
    uniform: in [0, 1).

  Returns:
    The tokens; none of them without weight.
  """
  ends = jnp.cumsum(totals, axis=-1)
  threshold = uniform * ends[:, -1]
  block = _first_above(ends, threshold, totals)
  before = jnp.take_along_axis(ends - totals, block[:, None], axis=-1)[:, 0]
  inner = inside(block)
  place = _first_above(jnp.cumsum(inner, axis=-1), threshold - before, inner)
  return block * inner.shape[-1] + place


def _first_above(
  ends: jax.Array, threshold: jax.Array, weights: jax.Array
) -> Int[Array, " B"]:
  """Finds the first entry that has weight and ends above the threshold.

  The last one with weight, where rounding left none.
  """
  has_weight = weights > 0
  place = jnp.arange(ends.shape[-1], dtype=jnp.int32)
  last = jnp.max(jnp.where(has_weight, place, -1), axis=-1)
  last = jnp.where(last < 0, ends.shape[-1] - 1, last)
  hit = (ends > threshold[:, None]) & has_weight
  return jnp.minimum(_first(hit), last)


def _first(found: Bool[Array, "B N"]) -> Int[Array, " B"]:
  """Returns the first place that is true, N where none is."""
  # XLA's argmax on a CPU goes entry by entry; this does not.
  num = found.shape[-1]
  place = jnp.arange(num, dtype=jnp.int32)
  return jnp.min(jnp.where(found, place, num), axis=-1)


def _most_probable(
  blocks: Float[Array, "B N W"], peaks: Float[Array, "B N"]
) -> Int[Array, " B"]:
  peak = jnp.max(peaks, axis=-1)[:, None]
  block = jnp.minimum(_first(peaks == peak), peaks.shape[-1] - 1)
  return block * blocks.shape[-1] + _first(_take(blocks, block) == peak)


def _top(
  blocks: Float[Array, "B N W"], peaks: Float[Array, "B N"], num: int
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
  """Finds the largest entries and their places.

  The first `num` entries lie in the first `num` blocks by their maxima, if
  equal ones are ordered by place in both.
  """
  rows, num_blocks, width = blocks.shape
  if num == 0:
    return jnp.zeros((rows, 0)), jnp.zeros((rows, 0), jnp.int32)
  _, chosen = jax.lax.top_k(peaks, min(num, num_blocks))
  chosen = jnp.sort(chosen, axis=-1)
  inside = jnp.take_along_axis(blocks, chosen[..., None], axis=1)
  values, at = jax.lax.top_k(inside.reshape(rows, -1), num)
  ids = chosen[..., None] * width + jnp.arange(width, dtype=chosen.dtype)
  return values, jnp.take_along_axis(ids.reshape(rows, -1), at, axis=-1)
