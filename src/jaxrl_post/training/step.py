"""The trainer's pure steps: init, score, update. Jit them, or call them."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders


def init(
  params: types.Tree,
  key: jax.Array,
  optimizer: optax.GradientTransformation,
) -> types.TrainState:
  """Returns the state before the first update: step 0, version 0."""
  return types.TrainState(
    step=jnp.zeros((), jnp.int32),
    version=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    key=key,
  )


def score(
  params: types.Tree,
  batch: types.Batch,
  *,
  decoder: decoders.Decoder,
  algo: types.Algorithm,
  microbatches: int = 1,
) -> types.Batch:
  """Fills in what the update needs: old log-probabilities and advantages.

  Args:
    params: the trainer's weights before the update.
    batch: rows from `data.pack`.
    decoder: the model.
    algo: gives the advantages.
    microbatches: parts the rows are cut into; divides B.

  Returns:
    The batch with both fields set and `loss_mask` 0 on rows without a reward.
  """

  def logprobs(part: types.Batch) -> jax.Array:
    return _logprobs(decoder, params, part)[0]

  if microbatches == 1:
    old = logprobs(batch)
  else:
    old = jax.lax.map(logprobs, _cut(batch, microbatches))
    old = old.swapaxes(0, 1).reshape(batch.tokens.shape)
  valid = jnp.isfinite(batch.rewards).astype(jnp.float32)
  return dataclasses.replace(
    batch,
    old_logprobs=old,
    advantages=algo.advantages(batch.rewards, batch.group_ids),
    loss_mask=batch.loss_mask * valid[:, None],
  )


def update(
  state: types.TrainState,
  batch: types.Batch,
  *,
  decoder: decoders.Decoder,
  algo: types.Algorithm,
  optimizer: optax.GradientTransformation,
  microbatches: int = 1,
) -> tuple[types.TrainState, dict[str, jax.Array]]:
  """Takes one optimizer step on a scored batch.

  Args:
    state: weights and optimizer.
    batch: from `score`.
    decoder: the model.
    algo: gives the loss.
    optimizer: from `optim.build`, or any optax transformation.
    microbatches: parts the rows are cut into; divides B.

  Returns:
    The next state and scalar metrics. `step` is one higher. Where no token
    trains, or loss, gradient or update is not finite, weights, optimizer and
    `version` are bit for bit those of `state` and `loss/skipped` is 1;
    otherwise `version` is one higher. Loss and gradient are the same for any
    `microbatches`.
  """
  num_tokens = jnp.sum(batch.loss_mask)

  def loss_fn(params: types.Tree, part: types.Batch):
    logprobs, entropy = _logprobs(decoder, params, part)
    inputs = types.LossInputs(
      logprobs=logprobs,
      old_logprobs=part.old_logprobs,
      sampler_logprobs=part.sampler_logprobs,
      advantages=jnp.broadcast_to(part.advantages[:, None], logprobs.shape),
      loss_mask=part.loss_mask,
    )
    loss, shares = algo.loss(inputs, num_tokens)
    entropy = jnp.sum(entropy * part.loss_mask) / jnp.maximum(num_tokens, 1.0)
    return loss, {"loss/policy": loss, "loss/entropy": entropy, **shares}

  grads, metrics = _accumulate(loss_fn, state.params, batch, microbatches)
  norm = optax.tree.norm(grads)
  # A NaN that a comparison swallowed leaves the gradient finite, but not the
  # loss.
  finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss/policy"])
  with jax.numpy_dtype_promotion("standard"):  # optax mixes int and float
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  update_norm = optax.tree.norm(updates)
  applies = finite & jnp.isfinite(update_norm) & (num_tokens > 0)
  params = optax.apply_updates(state.params, updates)

  def keep(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(applies, new, old)

  new_state = types.TrainState(
    step=state.step + 1,
    version=state.version + applies.astype(jnp.int32),
    params=jax.tree.map(keep, params, state.params),
    opt_state=jax.tree.map(keep, opt_state, state.opt_state),
    key=state.key,
  )
  metrics |= {
    "loss/grad_norm": norm,
    "loss/tokens": num_tokens,
    "loss/skipped": 1.0 - applies.astype(jnp.float32),
    "loss/update_norm": jnp.where(applies, update_norm, 0.0),
    **_mismatch(state.version, batch),
  }
  return new_state, metrics


def _logprobs(
  decoder: decoders.Decoder, params: types.Tree, batch: types.Batch
) -> tuple[jax.Array, jax.Array]:
  """Scores the tokens of a batch; log-probabilities and entropies."""
  return decoders.logprobs(
    decoder,
    params,
    tokens=batch.tokens,
    positions=batch.positions,
    segment_ids=batch.segment_ids,
    temperature=batch.temperature,
  )


def _accumulate(loss_fn, params, batch, microbatches):
  """Sums gradients and metric shares over microbatches."""
  grad_fn = jax.grad(loss_fn, has_aux=True)
  if microbatches == 1:
    return grad_fn(params, batch)

  def add(total, part):
    return jax.tree.map(jnp.add, total, grad_fn(params, part)), None

  parts = _cut(batch, microbatches)
  shape = jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], parts))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
  total, _ = jax.lax.scan(add, zeros, parts)
  return total


def _cut(batch: types.Batch, microbatches: int) -> types.Batch:
  """Cuts rows into parts, as a new first dim."""

  def cut(x: jax.Array) -> jax.Array:
    # Strided, so that each part has rows of every device of the batch axis.
    x = x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:])
    return x.swapaxes(0, 1)

  return jax.tree.map(cut, batch)


def _mismatch(
  version: Int[Array, ""], batch: types.Batch
) -> dict[str, jax.Array]:
  """Compares trainer and sampler on rows whose sampled tokens all have lag 0.

  Prompt and tokens of such a row saw the trainer's very weights, so that any
  difference is numerics. NaN where there is no such row.
  """
  trained = batch.loss_mask > 0
  # Older tokens that do not train count too: the engine may have kept keys and
  # values of older weights for them.
  versions = batch.policy_versions
  older = (versions >= 0) & (versions != version)
  fresh = trained & ~jnp.any(older, axis=1, keepdims=True)
  gap = jnp.where(fresh, batch.old_logprobs - batch.sampler_logprobs, 0.0)
  count = jnp.sum(fresh.astype(jnp.float32))
  none = jnp.where(count > 0, 0.0, jnp.nan)
  count = jnp.maximum(count, 1.0)
  return {
    "mismatch/mean_abs": jnp.sum(jnp.abs(gap)) / count + none,
    "mismatch/max_abs": jnp.max(jnp.abs(gap)) + none,
    "mismatch/kl": jnp.sum(jnp.exp(gap) - gap - 1.0) / count + none,
  }
