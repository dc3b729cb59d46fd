"""The critic: what it expects behind each token, and how it learns that.

The value of a token is what is expected before the token is known: it is read
from the position before it, and stands where the token stands, as the token's
log-probability does. So the value of a completion's first token is that of its
prompt, and there is none behind its last one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxrl_post import types
from jaxrl_post.algos import baselines
from jaxrl_post.training import optim

_HEAD = "value_head"
# Of a policy's weights, what no critic reads.
_UNUSED = "head"


@types.record
class State:
  """Everything an update changes of a critic.

  Attributes:
    params: with `Critic.model` "own" the weights of a transformer, and with
      either the vector that is its head.
    opt_state: of the critic's own optimizer.
  """

  params: types.Tree
  opt_state: types.Tree


def optimizer(
  critic: baselines.Critic | None, cfg: optim.Optim, num_updates: int
) -> optax.GradientTransformation | None:
  """Returns the optimizer of a critic: the policy's, at its own rate.

  Args:
    critic: of the algorithm; None has no optimizer.
    cfg: settings of the policy's optimizer.
    num_updates: length of the schedule.
  """
  if critic is None:
    return None
  own = dataclasses.replace(cfg, learning_rate=critic.learning_rate)
  return optim.build(own, num_updates)


def start(
  params: types.Tree,
  critic: baselines.Critic | None,
  optimizer: optax.GradientTransformation | None,
) -> State | None:
  """Returns a critic before its first update, which values everything at 0.

  Args:
    params: the policy's weights.
    critic: of the algorithm; None makes none.
    optimizer: from `optimizer`.

  Returns:
    Copies of weights: an update uses the memory of the policy's again.

  Raises:
    ValueError: a critic without an optimizer.
  """
  if critic is None:
    return None
  if optimizer is None:
    raise ValueError("start: expected an optimizer with a critic, got none")
  own = _weights(params, critic, jnp.zeros_like(params["final_norm"]))
  own = jax.tree.map(jnp.copy, own)
  return State(params=own, opt_state=optimizer.init(own))


def shardings(
  by_leaf: types.Tree, critic: baselines.Critic, whole: jax.sharding.Sharding
) -> types.Tree:
  """Returns how a critic's weights lie: as the policy's; its head is whole.

  Args:
    by_leaf: shardings of the policy's weights.
    critic: of the algorithm.
    whole: of what each device has a copy of.
  """
  return _weights(by_leaf, critic, whole)


def _weights(tree: types.Tree, critic: baselines.Critic, head) -> types.Tree:
  if critic.model == "head":
    return {_HEAD: head}
  return {k: x for k, x in tree.items() if k != _UNUSED} | {_HEAD: head}


def values(
  params: types.Tree,
  hidden: Float[Array, "B T D"],
  wanted: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
  """Predicts what follows, from the position before each token.

  Args:
    params: of `State`.
    hidden: state behind each token, of the critic's own transformer or of the
      policy's.
    wanted: tokens that have a value. The first token of a sequence has none.

  Returns:
    Values aligned with tokens, in the unit of the rewards; 0 where not wanted.
  """
  head = params[_HEAD].astype(jnp.float32)
  found = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head)
  before = jnp.pad(found[:, :-1], ((0, 0), (1, 0)))
  return jnp.where(wanted, before, 0.0)


def loss(
  critic: baselines.Critic,
  params: types.Tree,
  hidden: Float[Array, "B T D"],
  part: types.Batch,
  num_tokens: Float[Array, ""],
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
  """Scores the critic on some rows: PPO's value loss, as a mean over tokens.

  With v the value under `params`, and V and R value and return before the
  update:

      L = 1 / num_tokens sum over trained tokens of
          1/2 max((v - R)^2, (V + clip(v - V, -clip, clip) - R)^2)

  Args:
    critic: of the algorithm.
    params: of `State`; gradients reach them as they are.
    hidden: as in `values`. With `critic.model` "head" the gradient that reaches
      them is `critic.coef` times that of the loss.
    part: rows with values and returns.
    num_tokens: trained tokens of the whole step, whatever the reducer.

  Returns:
    The share of these rows in the loss, and metrics that add up.
  """
  if critic.model == "head":
    # The same numbers, bit for bit.
    assert critic.coef is not None
    fixed = jax.lax.stop_gradient(hidden)
    hidden = fixed + critic.coef * (hidden - fixed)
  mask = part.loss_mask
  found = values(params, hidden, mask > 0)
  assert part.values is not None
  assert part.returns is not None
  each, clipped = critic.losses(found, part.values, part.returns, mask)
  count = jnp.maximum(num_tokens, 1.0)
  total = jnp.sum(each) / count
  shown = {
    "loss/value": total,
    "loss/value_clip_fraction": jnp.sum(clipped) / count,
  }
  return total, shown


def propose(
  state: State | None,
  grads: types.Tree,
  optimizer: optax.GradientTransformation | None,
) -> tuple[State | None, Bool[Array, ""]]:
  """Takes an optimizer step, for the caller to keep or to throw away.

  Args:
    state: of the critic; None has nothing to learn.
    grads: of its weights.
    optimizer: from `optimizer`.

  Returns:
    The next state, and whether gradient and update are finite.
  """
  if state is None:
    return None, jnp.array(True)
  assert optimizer is not None, "start has asked for one"
  with jax.numpy_dtype_promotion("standard"):  # optax mixes int and float
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  norms = optax.tree.norm(grads), optax.tree.norm(updates)
  finite = jnp.isfinite(norms[0]) & jnp.isfinite(norms[1])
  params = optax.apply_updates(state.params, updates)
  return State(params=params, opt_state=opt_state), finite


def explained(batch: types.Batch) -> Float[Array, ""]:
  """Returns how much of the returns the values before the update explain.

  Returns:
    1 - Var(returns - values) / Var(returns) over the trained tokens of the
    batch: 1 predicts all, 0 as much as a constant, and less is worse than that.
    NaN where returns do not vary.
  """
  assert batch.values is not None
  assert batch.returns is not None
  mask = batch.loss_mask
  count = jnp.maximum(jnp.sum(mask), 1.0)

  def variance(x: jax.Array) -> jax.Array:
    x = jnp.where(mask > 0, x, 0.0)
    centred = jnp.where(mask > 0, x - jnp.sum(x) / count, 0.0)
    return jnp.sum(jnp.square(centred)) / count

  of_returns = variance(batch.returns)
  left = variance(batch.returns - batch.values)
  varies = of_returns > 0
  share = left / jnp.where(varies, of_returns, 1.0)
  return jnp.where(varies, 1.0 - share, jnp.nan)
