"""How probable tokens are, without ever holding the logits of all of them.

The logits of a batch are larger than anything else of a step: they are made a
chunk of tokens at a time, and made again in the backward pass, which is written
out here and keeps a few numbers a token. Dims, beside those of `types`: P parts
of a mesh, N tokens of each, C tokens of a chunk, E targets of a token.
"""

import functools
import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post import types


@runtime_checkable
class Tied(Protocol):
  """What says which weight the head is, such as a `transformer.Config`."""

  @property
  def tie_embeddings(self) -> bool:
    """Whether it is `embed`, [V, D], and not `head`, [D, V]."""
    ...


class Untied(NamedTuple):
  """The head is a weight of its own."""

  tie_embeddings: bool = False


class _Cut(NamedTuple):
  """What is fixed when a program is traced."""

  chunk: int
  tied: bool  # the head is [V, D], the embedding, and not [D, V]
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None


class _Tokens(NamedTuple):
  """All tokens of each part, or those of a chunk."""

  hidden: jax.Array  # [P, N, D]
  targets: jax.Array  # [P, N, E]
  inverse: jax.Array  # [P, N], of the temperature


class _Order(NamedTuple):
  """Puts the tokens that are wanted first."""

  there: jax.Array  # [P, N], which token comes where
  back: jax.Array
  steps: jax.Array  # chunks that have a wanted token, in any part


class _Seen(NamedTuple):
  """What the forward pass finds out, in the order of chunks."""

  logprobs: jax.Array  # [P, N, E]
  entropy: jax.Array  # [P, N], as what follows
  log_sum: jax.Array  # of the exponentials of the logits


def token_logprobs(
  params: types.Tree,
  cfg: Tied,
  hidden: Float[Array, "B T D"],
  targets: Int[Array, "B T *E"],
  temperature: Float[Array, "B T"],
  *,
  chunk: int,
  wanted: Bool[Array, "B T"] | None = None,
  sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[Float[Array, "B T *E"], Float[Array, "B T"]]:
  """Scores one target a position, or several; [B, T, V] never exists.

  Args:
    params: weights.
    cfg: shape of the decoder: which weight its head is.
    hidden: states that predict `targets`, in the dtype of the products.
    targets: ids; of a position, or a last dim of them.
    temperature: divides the logits of its position, as in the sampler. At 0
      (greedy) it counts as 1, as the sampler reports such tokens. It has no
      gradient.
    chunk: tokens of each part of the mesh whose logits exist at a time, in
      forward and backward.
    wanted: which positions are scored; None scores all. Chunks are filled with
      them first, and what they leave over is not computed.
    sharding: how rows and positions lie on a mesh, which divides them evenly;
      None where all are on one device. Tokens are scored where they lie, and
      each part sums its own gradient of the head: nothing is sent between
      parts but the head, and the sum of these, once.

  Returns:
    The log-probability of each target and the entropy of its distribution, in
    nats, float32; 0 where not wanted. Both have the gradient of the plain
    formulas.
  """
  places = temperature.shape
  cut, head, tokens, order = _begin(
    params,
    cfg,
    (hidden, targets.reshape(*places, -1), temperature),
    chunk=chunk,
    wanted=wanted,
    sharding=sharding,
  )
  logprobs, entropy = jax.tree.map(
    lambda x: _finish(x, places, wanted, sharding),
    _score(cut, head, tokens, order),
  )
  return logprobs.reshape(targets.shape), entropy


def most_probable(
  params: types.Tree,
  cfg: Tied,
  hidden: Float[Array, "B T D"],
  temperature: Float[Array, "B T"],
  *,
  num: int,
  chunk: int,
  wanted: Bool[Array, "B T"] | None = None,
  sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[Int[Array, "B T {num}"], Float[Array, "B T {num}"]]:
  """Returns the `num` most probable ids of each position, the most first.

  Args:
    params: as in `token_logprobs`, likewise the rest.
    cfg: shape of the decoder: which weight its head is.
    hidden: states that predict.
    temperature: divides the logits.
    num: at most the vocabulary.
    chunk: tokens whose logits exist at a time.
    wanted: which positions are asked.
    sharding: how rows and positions lie on a mesh.

  Returns:
    Ids and their log-probabilities in nats, float32, without a gradient; 0
    where not wanted.
  """
  places = temperature.shape
  ids = jnp.zeros((*places, 1), jnp.int32)
  cut, head, tokens, order = _begin(
    params,
    cfg,
    (hidden, ids, temperature),
    chunk=chunk,
    wanted=wanted,
    sharding=sharding,
  )
  head, tokens = jax.lax.stop_gradient((head, tokens))
  found = _top(cut, head, tokens, order, num)
  return jax.tree.map(lambda x: _finish(x, places, wanted, sharding), found)


def _begin(
  params: types.Tree,
  cfg: Tied,
  given: tuple[jax.Array, jax.Array, jax.Array],
  *,
  chunk: int,
  wanted: jax.Array | None,
  sharding: jax.sharding.NamedSharding | None,
) -> tuple[_Cut, jax.Array, _Tokens, _Order | None]:
  """Lays out hidden states, targets and temperatures for chunks."""
  hidden, targets, temperature = given
  inverse = 1.0 / jnp.where(temperature > 0, temperature, 1.0)
  tokens = _Tokens(hidden, targets, inverse.astype(jnp.float32))
  tied, parts = cfg.tie_embeddings, _parts(sharding)
  head = params["embed"] if tied else params["head"]
  tokens = _Tokens(*(_gather(x, parts) for x in tokens))
  length = tokens.inverse.shape[1]
  chunk = -(-length // -(-length // chunk))  # as many chunks, of equal size
  order = None if wanted is None else _order(_gather(wanted, parts), chunk)
  mesh = None if sharding is None else sharding.mesh
  return _Cut(chunk, tied, mesh), head, tokens, order


def _finish(
  x: jax.Array,
  places: tuple[int, ...],
  wanted: jax.Array | None,
  sharding: jax.sharding.NamedSharding | None,
) -> jax.Array:
  """Lays out a result as rows and positions; 0 where it is not wanted."""
  x = _return(x, _parts(sharding), places)
  if wanted is None:
    return x
  wanted = wanted.reshape(*wanted.shape, *(1,) * (x.ndim - 2))
  return jnp.where(wanted, x, jnp.zeros((), x.dtype))


# --------------------------------------------------------------------- layout


def _parts(sharding: jax.sharding.NamedSharding | None) -> tuple[int, int]:
  """Returns into how many parts a mesh splits rows, and positions."""
  if sharding is None:
    return 1, 1
  rows, places = sharding.spec

  def size(axes: str | tuple[str, ...]) -> int:
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(sharding.mesh.shape[name] for name in names)

  return size(rows), size(places)


def _gather(x: jax.Array, parts: tuple[int, int]) -> jax.Array:
  """Lays the tokens of a part side by side: [B, T, ...] to [P, N, ...]."""
  (rows, places), (num, length, *rest) = parts, x.shape
  x = x.reshape(rows, num // rows, places, length // places, *rest)
  return x.swapaxes(1, 2).reshape(rows * places, -1, *rest)


def _return(
  x: jax.Array, parts: tuple[int, int], shape: tuple[int, ...]
) -> jax.Array:
  """Undoes `_gather`."""
  (rows, places), (num, length), rest = parts, shape, x.shape[2:]
  x = x.reshape(rows, places, num // rows, length // places, *rest)
  return x.swapaxes(1, 2).reshape(*shape, *rest)


def _order(wanted: jax.Array, chunk: int) -> _Order:
  """Sorts the tokens of each part: first those that are wanted."""
  there = jnp.argsort(~wanted, axis=1, stable=True)
  most = jnp.max(jnp.sum(wanted, axis=1))
  return _Order(there, jnp.argsort(there, axis=1), -(-most // chunk))


def _put(x: jax.Array, order: _Order | None, chunk: int) -> jax.Array:
  """Brings tokens into the order of chunks, of which the last is padded."""
  rest = x.ndim - 2
  if order is not None:
    at = order.there.reshape(*order.there.shape, *(1,) * rest)
    x = jnp.take_along_axis(x, at, axis=1, mode="clip")
  return jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk), *((0, 0),) * rest))


def _take_back(x: jax.Array, order: _Order | None, length: int) -> jax.Array:
  """Undoes `_put`."""
  if order is None:
    return x[:, :length]
  at = order.back.reshape(*order.back.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, at, axis=1, mode="clip")


def _part(tree: types.Tree, begin: jax.Array, chunk: int) -> types.Tree:
  """Returns the tokens of a chunk."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_slice_in_dim(x, begin, chunk, axis=1), tree
  )


def _write(tree: types.Tree, part: types.Tree, begin: jax.Array) -> types.Tree:
  """Undoes `_part`."""
  return jax.tree.map(
    lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, begin, axis=1),
    tree,
    part,
  )


def _steps(tokens: _Tokens, order: _Order | None, chunk: int) -> jax.Array:
  """Returns how many chunks there are to score."""
  if order is not None:
    return order.steps
  return jnp.asarray(-(-tokens.inverse.shape[1] // chunk))


# --------------------------------------------------------------------- chunks


def _whole(cut: _Cut, head: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Casts the head, and gathers its width: once, and not for each chunk."""
  head = head.astype(dtype)
  if cut.mesh is None:
    return head
  free = jax.P.UNCONSTRAINED
  lie = jax.P(free, None) if cut.tied else jax.P(None, free)
  return jax.lax.with_sharding_constraint(
    head, jax.sharding.NamedSharding(cut.mesh, lie)
  )


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies in the dtype of its inputs, and adds up in float32."""
  return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)


def _logits(cut: _Cut, head: jax.Array, xs: _Tokens) -> jax.Array:
  """Multiplies as `transformer.logits`, with the head as it lies in memory."""
  dims = "pcd,vd->pcv" if cut.tied else "pcd,dv->pcv"
  return _product(dims, xs.hidden, head) * xs.inverse[..., None]


def _add(x: types.Tree, y: types.Tree) -> types.Tree:
  return jax.tree.map(jnp.add, x, y)


def _forward(
  cut: _Cut, head: jax.Array, tokens: _Tokens, order: _Order | None
) -> _Seen:
  head = _whole(cut, head, tokens.hidden.dtype)
  chunked = _Tokens(*(_put(x, order, cut.chunk) for x in tokens))

  def one(step: jax.Array, seen: _Seen) -> _Seen:
    begin = step * cut.chunk
    xs = _part(chunked, begin, cut.chunk)
    z = _logits(cut, head, xs)
    top = jnp.max(z, axis=-1)
    below = z - top[..., None]
    weight = jnp.exp(below)
    # Two sums in one pass: XLA would write the exponentials to memory for them.
    total, mean = jax.lax.reduce(
      (weight, weight * below), (0.0, 0.0), _add, dimensions=(z.ndim - 1,)
    )
    log_sum = jnp.log(total)
    taken = jnp.take_along_axis(z, xs.targets, axis=-1)
    logprobs = taken - (top + log_sum)[..., None]
    here = _Seen(logprobs, log_sum - mean / total, top + log_sum)
    return _write(seen, here, begin)

  zeros = jnp.zeros_like(chunked.inverse)
  none = jnp.zeros(chunked.targets.shape, zeros.dtype)
  steps = _steps(tokens, order, cut.chunk)
  return jax.lax.fori_loop(0, steps, one, _Seen(none, zeros, zeros))


def _top(
  cut: _Cut, head: jax.Array, tokens: _Tokens, order: _Order | None, num: int
) -> tuple[jax.Array, jax.Array]:
  """Returns ids and log-probabilities, [P, N, num]."""
  head = _whole(cut, head, tokens.hidden.dtype)
  chunked = _Tokens(*(_put(x, order, cut.chunk) for x in tokens))

  def one(step: jax.Array, seen: tuple[jax.Array, jax.Array]):
    begin = step * cut.chunk
    z = _logits(cut, head, _part(chunked, begin, cut.chunk))
    best, ids = jax.lax.top_k(z, num)
    total = jax.nn.logsumexp(z, axis=-1, keepdims=True)
    return _write(seen, (ids, best - total), begin)

  shape = (*chunked.inverse.shape, num)
  none = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
  found = jax.lax.fori_loop(0, _steps(tokens, order, cut.chunk), one, none)
  length = tokens.inverse.shape[1]
  return jax.tree.map(lambda x: _take_back(x, order, length), found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(
  cut: _Cut, head: jax.Array, tokens: _Tokens, order: _Order | None
) -> tuple[jax.Array, jax.Array]:
  return _score_forward(cut, head, tokens, order)[0]


def _score_forward(
  cut: _Cut, head: jax.Array, tokens: _Tokens, order: _Order | None
):
  seen = _forward(cut, head, tokens, order)
  length = tokens.inverse.shape[1]
  logprobs = _take_back(seen.logprobs, order, length)
  entropy = _take_back(seen.entropy, order, length)
  return (logprobs, entropy), (head, tokens, order, seen)


def _score_backward(cut: _Cut, kept, grads: tuple[jax.Array, jax.Array]):
  """Returns the gradients of the head and of hidden."""
  head, tokens, order, seen = kept
  cast = _whole(cut, head, tokens.hidden.dtype)
  chunked, grads = jax.tree.map(
    lambda x: _put(x, order, cut.chunk), (tokens, grads)
  )

  def one(step: jax.Array, sums: tuple[jax.Array, jax.Array]):
    begin = step * cut.chunk
    xs = _part((chunked, seen, grads), begin, cut.chunk)
    dz, hidden = _slope(cut, cast, xs), xs[0].hidden
    if cut.tied:
      d_hidden = _product("pcv,vd->pcd", dz, cast)
      d_head = _product("pcv,pcd->pvd", dz, hidden)
    else:
      d_hidden = _product("pcv,dv->pcd", dz, cast)
      d_head = _product("pcd,pcv->pdv", hidden, dz)
    d_hidden = d_hidden.astype(hidden.dtype)
    return sums[0] + d_head, _write(sums[1], d_hidden, begin)

  zeros = jnp.zeros((len(tokens.targets), *head.shape), jnp.float32)
  d_head, d_hidden = jax.lax.fori_loop(
    0,
    _steps(tokens, order, cut.chunk),
    one,
    (zeros, jnp.zeros_like(chunked.hidden)),
  )
  d_head = jnp.sum(d_head, axis=0).astype(head.dtype)
  d_hidden = _take_back(d_hidden, order, tokens.inverse.shape[1])
  # None stands for zeros.
  nothing = tokens._replace(hidden=d_hidden, targets=None, inverse=None)
  return d_head, nothing, None


def _slope(cut: _Cut, head: jax.Array, xs) -> jax.Array:
  """Returns the gradient of the logits of a chunk, for the products it goes to.

  With p the probabilities, the logarithm of the target's has the slope
  onehot - p, and the entropy H has -p (log p + H).
  """
  tokens, seen, (by_logprob, by_entropy) = xs
  z = _logits(cut, head, tokens) - seen.log_sum[..., None]
  share = jnp.sum(by_logprob, axis=-1, keepdims=True)
  share = share + by_entropy[..., None] * (z + seen.entropy[..., None])
  dz = -jnp.exp(z) * share
  if tokens.targets.shape[-1] == 1:
    hit = jnp.arange(z.shape[-1]) == tokens.targets
    dz = jnp.where(hit, by_logprob, 0.0) + dz
  else:
    one = jax.vmap(jax.vmap(lambda x, at, by: x.at[at].add(by)))
    dz = one(dz, tokens.targets, by_logprob)
  dz = dz * tokens.inverse[..., None]
  return dz.astype(tokens.hidden.dtype)


_score.defvjp(_score_forward, _score_backward)
