"""The trainer's pure steps: init, score, update. Jit them, or call them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.algos import algorithm, baselines, sequences
from jaxrl_post.models import decoder as decoders
from jaxrl_post.training import balance, diagnostics, portions, trained
from jaxrl_post.training import critic as critics


def init(
  params: types.Tree,
  key: jax.Array,
  optimizer: optax.GradientTransformation,
  *,
  reference: bool = False,
  critic: critics.State | None = None,
  trains: trained.Setting = None,
  adapters: types.Tree = None,
) -> types.TrainState:
  """Returns the state before the first update: step 0, version 0.

  Args:
    params: the first weights.
    key: random key of the rollouts.
    optimizer: from `optim.build`, or any optax transformation.
    reference: keep a copy of what trains as the reference policy; not needed,
      and not made, with adapters.
    critic: from `critic.start`; None where the algorithm has none.
    trains: what of the model trains; None is all weights.
    adapters: from `lora.init`, if it is those.
  """
  leaves = trained.choose(trains, params, adapters)
  copied = reference and adapters is None
  return types.TrainState(
    step=jnp.zeros((), jnp.int32),
    version=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(leaves),
    key=key,
    # A copy: the update uses the memory of the weights again.
    reference=jax.tree.map(jnp.copy, leaves) if copied else None,
    critic=critic,
    adapters=adapters,
  )


def needs_old(algo: algorithm.Algorithm, updates: int) -> bool:
  """Whether the old log-probabilities take a pass of their own.

  Before the only update of a batch they are the ones that the update computes
  anyway, by the same function of the same weights.
  """
  return "old" in algo.needs or (updates > 1 and "start" in algo.needs)


def needs_reference(algo: algorithm.Algorithm) -> bool:
  """Whether the weights of a reference policy, or of a teacher, are needed."""
  return not algo.needs.isdisjoint({"reference", "candidates"})


def score(
  params: types.Tree,
  batch: types.Batch,
  *,
  decoder: decoders.Decoder,
  algo: algorithm.Algorithm,
  reference: types.Tree = None,
  reference_decoder: decoders.Decoder | None = None,
  critic: types.Tree = None,
  microbatches: int = 1,
  updates: int = 1,
) -> types.Batch:
  """Fills in what the update needs: advantages, and log-probabilities.

  Args:
    params: the trainer's weights before the update, of `trained.weights` where
      not all of them train.
    batch: rows from `data.pack`.
    decoder: the model.
    algo: gives the advantages.
    reference: weights of the reference policy, if `algo` needs them.
    reference_decoder: its model, of the same vocabulary; None is `decoder`.
    critic: weights of the critic, likewise.
    microbatches: parts the rows are cut into; divides B.
    updates: that the batch will have.

  Returns:
    The batch with advantages, with old and reference log-probabilities, a
    teacher's candidates, and values and returns, where they are needed, and
    with `loss_mask` 0 on sequences without a reward, and on truncated ones and
    those of groups whose rewards agree if the algorithm leaves them out.
  """
  valid = jnp.isfinite(batch.rewards)
  if algo.mask_equal:
    turns = batch.turn_rewards * batch.loss_mask
    made = sequences.rollouts(batch, turns)
    apart = baselines.differ(*made, jnp.isfinite(made.rewards))
    valid = valid & apart[batch.rollout_ids]
  if algo.mask_truncated:
    valid = valid & ~batch.truncated
  valid = sequences.gather(valid.astype(jnp.float32), batch.sequence)
  sampled = batch.loss_mask
  batch = dataclasses.replace(batch, loss_mask=sampled * valid)
  if algo.critic is not None and critic is None:
    raise ValueError("score: expected a critic, got none")
  with_old = needs_old(algo, updates)
  heads = algo.critic is not None and algo.critic.model == "head"
  if with_old or heads:
    find = _scored(decoder, params, critic if heads else None, replays=True)
    old, values = portions.each(find, batch, microbatches)
    batch = dataclasses.replace(
      batch, old_logprobs=old if with_old else batch.old_logprobs, values=values
    )
  known = None
  if needs_reference(algo) and reference is None:
    raise ValueError("score: expected a reference, got none")
  judge = reference_decoder or decoder
  if "reference" in algo.needs:
    find = _scored(judge, reference)
    known, _ = portions.each(find, batch, microbatches)
    batch = dataclasses.replace(batch, reference_logprobs=known)
  if algo.candidates:
    find = _probable(judge, reference, algo.candidates)
    ids, found = portions.each(find, batch, microbatches)
    batch = dataclasses.replace(batch, teacher_ids=ids, teacher_logprobs=found)
  if algo.critic is not None and not heads:
    values = portions.each(_valued(decoder, critic), batch, microbatches)
    batch = dataclasses.replace(batch, values=values)
  inputs = types.AdvantageInputs(
    rewards=batch.rewards,
    group_ids=batch.group_ids,
    rollout_ids=batch.rollout_ids,
    sequence=batch.sequence,
    segment_ids=batch.segment_ids,
    loss_mask=batch.loss_mask,
    turn_rewards=batch.turn_rewards,
    penalty=jnp.zeros_like(batch.loss_mask),
    old_logprobs=batch.old_logprobs,
    reference_logprobs=known,
    values=batch.values,
    sampled=sampled,
  )
  if algo.critic is not None:
    batch = dataclasses.replace(batch, returns=algo.returns(inputs))
  return dataclasses.replace(batch, advantages=algo.advantages(inputs))


def update(
  state: types.TrainState,
  batch: types.Batch,
  *,
  decoder: decoders.Decoder,
  algo: algorithm.Algorithm,
  optimizer: optax.GradientTransformation,
  critic_optimizer: optax.GradientTransformation | None = None,
  microbatches: int = 1,
  minibatches: int = 1,
  epochs: int = 1,
  trains: trained.Setting = None,
) -> tuple[types.TrainState, dict[str, jax.Array]]:
  """Takes the optimizer steps of a scored batch.

  Args:
    state: weights and optimizer.
    batch: from `score`, with `updates` = minibatches x epochs.
    decoder: the model.
    algo: gives the loss.
    optimizer: from `optim.build`, or any optax transformation.
    critic_optimizer: likewise from `critic.optimizer`, if `algo` has a critic.
    microbatches: parts the rows of an update are cut into. Parts at the end
      that no token trains in are left out.
    minibatches: updates that share the rows; with `microbatches` divides B.
    epochs: how often each row is trained.
    trains: as for `init`; gradient and its norm are of that only.

  Returns:
    The next state and scalar metrics, see `diagnostics.over_updates`. `step` is
    one higher. An update in which no token trains, or of which loss, gradient
    or update is not finite, the policy's or the critic's, leaves the weights
    and optimizers of both bit for bit as they were; `loss/skipped` is 1 and
    `version` stays if all are such, otherwise `version` is one higher. Loss and
    gradient are the same for any `microbatches`. The reference policy is as
    before, or moved as the algorithm says.
  """
  updates = minibatches * epochs
  if algo.critic is not None and (not state.critic or not critic_optimizer):
    raise ValueError("update: expected a critic and its optimizer, got none")
  if algo.reference_moves[0] and state.adapters is not None:
    raise ValueError("update: expected a reference that stays, with adapters")
  one = functools.partial(
    _update,
    decoder=decoder,
    algo=algo,
    optimizer=optimizer,
    critic_optimizer=critic_optimizer,
    microbatches=microbatches,
    is_old=needs_old(algo, updates),
    trains=trains,
  )
  version = state.version
  if updates == 1:
    state, metrics = one(state, batch)
  else:
    parts = portions.split(batch, minibatches)

    def again(state: types.TrainState, number: jax.Array):
      return one(state, portions.take(batch, parts, number))

    state, metrics = jax.lax.scan(
      again, state, jnp.arange(updates) % minibatches
    )
    metrics = diagnostics.over_updates(metrics)
  if algo.critic is not None:
    metrics["loss/explained_variance"] = critics.explained(batch)
  applied = 1 - metrics["loss/skipped"].astype(jnp.int32)
  state = dataclasses.replace(
    state, step=state.step + 1, version=version + applied
  )
  every, share = algo.reference_moves
  if every:
    due = state.step % every == 0
    moved = jax.tree.map(
      lambda old, new: jnp.where(due, old + share * (new - old), old),
      state.reference,
      trained.choose(trains, state.params, state.adapters),
    )
    state = dataclasses.replace(state, reference=moved)
  return state, metrics


def _update(
  state: types.TrainState,
  batch: types.Batch,
  *,
  decoder: decoders.Decoder,
  algo: algorithm.Algorithm,
  optimizer: optax.GradientTransformation,
  critic_optimizer: optax.GradientTransformation | None = None,
  microbatches: int,
  is_old: bool,
  trains: trained.Setting = None,
) -> tuple[types.TrainState, dict[str, jax.Array]]:
  """Takes one optimizer step; neither `step` nor `version` changes."""
  num_tokens = jnp.sum(batch.loss_mask)
  shares = algo.shares(batch.loss_mask, batch.sequence, batch.rollout_ids)
  critic = None if algo.critic is None else state.critic

  leaves = trained.choose(trains, state.params, state.adapters)
  loads = balance.load(
    decoder, trained.weights(trains, state.params, leaves), batch, microbatches
  )

  def loss_fn(weights: types.Tree, part: types.Batch, shares: jax.Array):
    leaves, own = weights
    params = trained.weights(trains, state.params, leaves)
    hidden, told = balance.routed(decoder, params, part)
    inputs = _loss_inputs(
      algo,
      part,
      _logprobs(decoder, params, part, hidden),
      version=state.version,
      is_old=is_old,
      shares=shares,
      num_tokens=num_tokens,
    )
    loss, shown = algo.loss(inputs)
    pulls = diagnostics.pulls_of(lambda x: algo.loss(x)[0], inputs)
    sums = {"loss/policy": loss, **diagnostics.of_tokens(inputs, shown, pulls)}
    apart, most = diagnostics.mismatch(
      inputs, part.policy_versions, state.version
    )
    even, counts = balance.loss(decoder, told, loads, num_tokens)
    loss, sums = loss + even, sums | apart | counts
    if algo.critic is not None:
      if algo.critic.model == "own":
        hidden = _states(decoder, own, part)
      worth, shown = critics.loss(algo.critic, own, hidden, part, num_tokens)
      loss, sums = loss + worth, sums | shown
    return loss, jax.lax.stop_gradient((sums, most))

  weights = leaves, None if critic is None else critic.params
  (grads, own), sums, most = portions.accumulate(
    loss_fn, weights, batch, shares, microbatches
  )
  metrics = balance.whole(diagnostics.whole(sums, most), num_tokens)
  norm = optax.tree.norm(grads)
  # A NaN that a comparison swallowed leaves the gradient finite, but not the
  # loss.
  losses = metrics["loss/policy"] + metrics.get("loss/value", 0.0)
  finite = jnp.isfinite(norm) & jnp.isfinite(losses)
  with jax.numpy_dtype_promotion("standard"):  # optax mixes int and float
    updates, opt_state = optimizer.update(grads, state.opt_state, leaves)
  update_norm = optax.tree.norm(updates)
  new_critic, learns = critics.propose(critic, own, critic_optimizer)
  applies = finite & learns & jnp.isfinite(update_norm) & (num_tokens > 0)
  stepped = optax.apply_updates(leaves, updates)

  def keep(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(applies, new, old)

  new_state = dataclasses.replace(
    trained.put(trains, state, jax.tree.map(keep, stepped, leaves)),
    opt_state=jax.tree.map(keep, opt_state, state.opt_state),
    critic=state.critic
    if critic is None
    else jax.tree.map(keep, new_critic, critic),
  )
  metrics |= {
    "loss/grad_norm": norm,
    "loss/tokens": num_tokens,
    "loss/skipped": 1.0 - applies.astype(jnp.float32),
    "loss/bad_updates": ((num_tokens > 0) & ~applies).astype(jnp.float32),
    "loss/update_norm": jnp.where(applies, update_norm, 0.0),
  }
  return new_state, metrics


def _loss_inputs(
  algo: algorithm.Algorithm,
  part: types.Batch,
  scores: tuple[Float[Array, "B T *num"], Float[Array, "B T"]],
  *,
  version: Int[Array, ""],
  is_old: bool,
  **whole: jax.Array,
) -> types.LossInputs:
  """Puts together what the loss sees of some rows; `whole` is of the step."""
  logprobs, entropy = scores
  candidates = None
  if part.teacher_ids is not None:
    logprobs, candidates = logprobs[..., 0], logprobs[..., 1:]
  old = part.old_logprobs if is_old else jax.lax.stop_gradient(logprobs)
  lag = jnp.maximum(version - part.policy_versions, 0)
  lag = jnp.where(part.loss_mask > 0, lag, 0)
  known = part.reference_logprobs if "reference" in algo.needs else None
  return types.LossInputs(
    logprobs=logprobs,
    entropy=entropy,
    old_logprobs=old,
    sampler_logprobs=part.sampler_logprobs,
    reference_logprobs=known,
    advantages=part.advantages,
    loss_mask=part.loss_mask,
    segment_ids=part.segment_ids,
    lag=lag.astype(jnp.float32),
    teacher_logprobs=part.teacher_logprobs,
    candidate_logprobs=candidates,
    **whole,
  )


def _states(
  decoder: decoders.Decoder,
  params: types.Tree,
  batch: types.Batch,
  *,
  replays: bool = False,
) -> Float[Array, "B T D"]:
  """Returns the hidden state behind each token.

  With `replays` tokens go where the batch says: it speaks of the policy.
  """
  return decoders.states(
    decoder,
    params,
    tokens=batch.tokens,
    positions=batch.positions,
    segment_ids=batch.segment_ids,
    prefix_ids=batch.prefix_ids,
    routing=balance.replayed(batch) if replays else None,
  )


def _logprobs(
  decoder: decoders.Decoder,
  params: types.Tree,
  batch: types.Batch,
  hidden: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T *num"], Float[Array, "B T"]]:
  """Scores the tokens that train; log-probabilities and entropies, else 0.

  Where a teacher's candidates are known, they are scored behind each token.
  """
  tokens = batch.tokens
  if batch.teacher_ids is not None:
    tokens = jnp.concatenate([tokens[..., None], batch.teacher_ids], axis=-1)
  return decoders.score(
    decoder,
    params,
    hidden,
    tokens,
    temperature=sequences.gather(batch.temperature, batch.sequence, fill=1.0),
    wanted=batch.loss_mask > 0,
  )


def _scored(
  decoder: decoders.Decoder,
  params: types.Tree,
  head: types.Tree = None,
  *,
  replays: bool = False,
) -> portions.OfRows:
  """Returns what finds log-probabilities of rows, and a second head's values.

  Values are None without the head. With `replays` as of `_states`.
  """

  def find(part: types.Batch) -> tuple[jax.Array, jax.Array | None]:
    hidden = _states(decoder, params, part, replays=replays)
    found, _ = _logprobs(decoder, params, part, hidden)
    if head is None:
      return found, None
    return found, critics.values(head, hidden, part.loss_mask > 0)

  return find


def _probable(
  decoder: decoders.Decoder, teacher: types.Tree, num: int
) -> portions.OfRows:
  """Returns what finds a teacher's most probable tokens for some rows."""
  return lambda part: decoders.most_probable(
    decoder,
    teacher,
    _states(decoder, teacher, part),
    num,
    temperature=sequences.gather(part.temperature, part.sequence, fill=1.0),
    wanted=part.loss_mask > 0,
  )


def _valued(decoder: decoders.Decoder, critic: types.Tree) -> portions.OfRows:
  """Returns what finds the values of some rows, by a critic of its own."""
  return lambda part: critics.values(
    critic, _states(decoder, critic, part), part.loss_mask > 0
  )
