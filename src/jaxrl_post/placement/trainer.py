"""The trainer's steps, compiled for the training mesh."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import optax

from jaxrl_post import types
from jaxrl_post.algos import algorithm
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import reference as references
from jaxrl_post.training import critic as critics
from jaxrl_post.training import optim, step, trained

Metrics = dict[str, jax.Array]

# Memory of the host that a device copies to and from without a detour.
HOST = "pinned_host"


@runtime_checkable
class Score(Protocol):
  """Scores a batch, see `training.step.score`."""

  def __call__(
    self,
    state: types.TrainState,
    batch: types.Batch,
    reference: types.Tree = None,
  ) -> types.Batch:
    """Returns the batch, scored.

    Args:
      state: with the reference, where it is the run's own first weights.
      batch: from `put`.
      reference: weights of another model, where it is that.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Compiled steps; each is compiled on its first call.

  Attributes:
    abstract: shapes and shardings of the state, to restore it into.
    reference: those of the weights that `score` compares with, where it needs
      them; None where there are none, or with adapters.
    start: weights to the state before the first update.
    put: places a batch of the host, the same in every process, of which each
      keeps its own rows.
    score: see `Score`.
    update: see `training.step.update`; the state it is given is used up.
    lower: shapes of a batch to the very programs of `score` and `update`, each
      a function that lowers it. No array is needed: the devices may be those
      of a description.
  """

  abstract: types.TrainState
  reference: types.Tree
  start: Callable[[types.Tree], types.TrainState]
  put: Callable[[types.Batch], types.Batch]
  score: Score
  update: Callable[
    [types.TrainState, types.Batch], tuple[types.TrainState, Metrics]
  ]
  lower: Callable[[types.Batch], Mapping[str, Callable[[], jax.stages.Lowered]]]


def build(
  mesh: jax.sharding.Mesh,
  *,
  params: types.Tree,
  decoder: decoders.Decoder,
  algo: algorithm.Algorithm,
  optimizer: optax.GradientTransformation,
  critic_optimizer: optax.GradientTransformation | None = None,
  cut: optim.Optim,
  key: jax.Array,
  keep_params: bool,
  park: Collection[str],
  lock: contextlib.AbstractContextManager[Any],
  reference: references.Placed | None = None,
) -> Trainer:
  """Places the steps of one loss and one optimizer.

  Args:
    mesh: the training mesh.
    params: shape, dtype and sharding of each weight.
    decoder: the model.
    algo: advantages and loss.
    optimizer: from `training.optim.build`, or any optax transformation.
    critic_optimizer: from `training.critic.optimizer`, if `algo` has a critic.
    cut: microbatches, minibatches and epochs of a batch, and what trains.
    key: the run's key.
    keep_params: leave the weights alive in `update`, because the policy is an
      alias of them; otherwise their memory is used again.
    park: what waits in the host's memory while it is not needed: "optimizer",
      its state and a critic's, or "reference".
    lock: held around every launch.
    reference: a model that is the reference; None keeps a copy of the first
      weights in the state, where `algo` needs one.

  Returns:
    The steps.

  Raises:
    InputError: the devices have no such memory.
  """
  # A tree of shardings takes the record's place: not arrays, hence Any.
  whole: Any = jax.sharding.NamedSharding(mesh, jax.P())
  trains, weights = cut.trained, decoders.spec(decoder.config)
  by_adapter = _adapter_shardings(trains, weights, mesh)
  init = functools.partial(
    _init,
    algo=algo,
    optimizer=optimizer,
    critic_optimizer=critic_optimizer,
    weights=weights,
    trains=trains,
    reference=reference is None and step.needs_reference(algo),
  )
  shapes = jax.eval_shape(init, params, key)
  by_leaf = jax.tree.map(lambda x: x.sharding, params)
  by_trained = trained.choose(trains, by_leaf, by_adapter)
  shardings = types.TrainState(
    step=whole,
    version=whole,
    params=by_leaf,
    opt_state=_moments(optimizer, shapes.opt_state, by_trained, whole),
    key=whole,
    reference=None if shapes.reference is None else by_trained,
    adapters=by_adapter,
    critic=_critic_shardings(
      algo, critic_optimizer, shapes.critic, by_leaf, whole
    ),
  )

  @functools.partial(jax.jit, out_shardings=shardings)
  def start(params: types.Tree, key: jax.Array) -> types.TrainState:
    return init(params, key)

  own = _critic_weights(shardings)
  judge, by_judge = _judge(reference, shardings)

  @functools.partial(
    jax.jit,
    in_shardings=(by_leaf, by_adapter, by_judge, own, None),
    compiler_options=_options(mesh),
  )
  def score(
    params: types.Tree,
    adapters: types.Tree,
    given: types.Tree,
    critic: types.Tree,
    batch: types.Batch,
  ) -> types.Batch:
    leaves = trained.choose(trains, params, adapters)
    if judge is None:
      given = trained.reference(trains, params, given)
    scored = step.score(
      trained.weights(trains, params, leaves),
      batch,
      decoder=decoder,
      algo=algo,
      reference=given,
      reference_decoder=judge,
      critic=critic,
      microbatches=cut.microbatches * cut.minibatches,
      updates=cut.updates,
    )
    return jax.tree.map(
      lambda x: jax.lax.with_sharding_constraint(x, _lie(mesh, x)), scored
    )

  # Weights and the rest apart: only the rest may always be donated. Frozen
  # weights come back as they are: as a result they would be copied.
  by_moving, by_frozen = trained.split(trains, by_leaf)
  moves = algo.reference_moves[0] > 0
  others = _rest(shardings, moves)

  @functools.partial(
    jax.jit,
    in_shardings=(by_moving, by_frozen, others, None),
    out_shardings=(dataclasses.replace(others, params=by_moving), whole),
    donate_argnums=(2,) if keep_params else (0, 2),
    compiler_options=_options(mesh),
  )
  def update(
    moving: types.Tree,
    frozen: types.Tree,
    rest: types.TrainState,
    batch: types.Batch,
  ):
    state, metrics = step.update(
      dataclasses.replace(rest, params=trained.join(moving, frozen)),
      batch,
      decoder=decoder,
      algo=algo,
      optimizer=optimizer,
      critic_optimizer=critic_optimizer,
      microbatches=cut.microbatches,
      minibatches=cut.minibatches,
      epochs=cut.epochs,
      trains=trains,
    )
    moved, _ = trained.split(trains, state.params)
    return dataclasses.replace(state, params=moved), metrics

  resting = _parked(shardings, park, mesh)
  there = specs.on(shapes, shardings)
  weighed = there.reference if reference is None else reference.abstract

  def launch_start(params: types.Tree) -> types.TrainState:
    with lock:
      return _move(start(params, key), resting, park)

  def launch_score(
    state: types.TrainState, batch: types.Batch, reference: types.Tree = None
  ) -> types.Batch:
    with lock:
      given = state.reference if reference is None else reference
      if "reference" in park:
        given = jax.device_put(given, by_judge)
      own = _critic_weights(state)
      return score(state.params, state.adapters, given, own, batch)

  def launch_update(
    state: types.TrainState, batch: types.Batch
  ) -> tuple[types.TrainState, Metrics]:
    with lock:
      moving, frozen = trained.split(trains, state.params)
      rest = _move(_rest(state, moves), others, park)
      new, metrics = update(moving, frozen, rest, batch)
      new = dataclasses.replace(
        new,
        params=trained.join(new.params, frozen),
        reference=new.reference if moves else state.reference,
      )
      return _move(new, resting, park), metrics

  return Trainer(
    abstract=specs.on(shapes, resting),
    reference=weighed,
    start=launch_start,
    put=functools.partial(_put, mesh=mesh),
    score=launch_score,
    update=launch_update,
    lower=functools.partial(
      _lower,
      score,
      update,
      there,
      judge=weighed,
      moves=moves,
      trains=trains,
      mesh=mesh,
    ),
  )


def _options(mesh: jax.sharding.Mesh) -> dict[str, str] | None:
  """Returns what the compiler for the devices is told besides.

  That for TPUs makes a loop of a large product with a split weight: in each
  turn a part of the weight arrives, and what was summed up so far goes through
  memory once more. Of Qwen3-8B over 32 chips of v5p (docs/compile.md) it
  estimates an update to take 93 s like that, and 52 s with each weight gathered
  first; what is gathered is one matrix.
  """
  if mesh.devices.flat[0].platform != "tpu":
    return None
  return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def _adapter_shardings(
  trains: trained.Setting, weights: types.Tree, mesh: jax.sharding.Mesh
) -> types.Tree:
  """Lays adapters as their weights lie; None without."""
  # The rules that hold for all weights, whichever have an adapter.
  rules, _ = meshes.fit_rules(weights, meshes.TRAINING_RULES, mesh)
  return meshes.weight_shardings(trained.spec(trains, weights), rules, mesh)


def _judge(
  reference: references.Placed | None, shardings: types.TrainState
) -> tuple[decoders.Decoder | None, types.Tree]:
  """Returns the reference's model, None for the policy's; how weights lie."""
  if reference is None:
    return None, shardings.reference
  return reference.decoder, jax.tree.map(
    lambda x: x.sharding, reference.abstract
  )


def _rest(state: types.TrainState, moves: bool) -> types.TrainState:
  """Returns what an update takes besides weights: no reference that stays."""
  reference = state.reference if moves else None
  return dataclasses.replace(state, params=None, reference=reference)


def _put(batch: types.Batch, mesh: jax.sharding.Mesh) -> types.Batch:
  """Places a batch of the host."""
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(_lie(mesh, x), x, x.shape),
    batch,
  )


def _lie(mesh: jax.sharding.Mesh, x: Any) -> jax.sharding.NamedSharding:
  """Says how an array of a batch lies: by rows and tokens, or whole."""
  if x.ndim >= 2:
    # As tokens do, and what there is of a token not cut.
    return meshes.token_sharding(mesh)
  return jax.sharding.NamedSharding(mesh, jax.P())


def _lower(
  score: Any,
  update: Any,
  state: types.TrainState,
  batch: types.Batch,
  *,
  judge: types.Tree,
  moves: bool,
  trains: trained.Setting,
  mesh: jax.sharding.Mesh,
) -> dict[str, Callable[[], jax.stages.Lowered]]:
  """Says how to lower the two programs for shapes of all that they take."""
  rows, own = _laid(mesh, batch), _critic_weights(state)
  given = (state.params, state.adapters, judge, own, rows)
  scored = _laid(mesh, jax.eval_shape(score, *given))
  moving, frozen = trained.split(trains, state.params)
  rest = _rest(state, moves)
  return {
    "score": lambda: score.lower(*given),
    "update": lambda: update.lower(moving, frozen, rest, scored),
  }


def _laid(mesh: jax.sharding.Mesh, batch: types.Batch) -> types.Batch:
  """Returns the shapes of a batch together with how they lie."""
  return specs.on(batch, jax.tree.map(lambda x: _lie(mesh, x), batch))


def _init(
  params: types.Tree,
  key: jax.Array,
  *,
  algo: algorithm.Algorithm,
  optimizer: optax.GradientTransformation,
  critic_optimizer: optax.GradientTransformation | None,
  weights: types.Tree,
  trains: trained.Setting,
  reference: bool,
) -> types.TrainState:
  """Returns the first state, with what the algorithm needs and what trains."""
  return step.init(
    params,
    key,
    optimizer,
    reference=reference,
    critic=critics.start(params, algo.critic, critic_optimizer),
    trains=trains,
    # Names keep adapters apart from weights that the same key has drawn.
    adapters=trained.init(trains, weights, jax.random.fold_in(key, 0)),
  )


def _critic_shardings(
  algo: algorithm.Algorithm,
  optimizer: optax.GradientTransformation | None,
  critic: critics.State | None,
  by_leaf: types.Tree,
  whole: jax.sharding.NamedSharding,
) -> critics.State | None:
  """Returns how a critic lies, from its shapes and the policy's shardings."""
  if critic is None or optimizer is None:
    return None
  own = critics.shardings(by_leaf, algo.critic, whole)
  moments = _moments(optimizer, critic.opt_state, own, whole)
  return critics.State(params=own, opt_state=moments)


def _moments(
  optimizer: optax.GradientTransformation,
  opt_state: types.Tree,
  by_leaf: types.Tree,
  whole: jax.sharding.NamedSharding,
) -> types.Tree:
  """Returns how an optimizer's state lies: as the weights that it is of."""
  return optax.tree.map_params(
    optimizer,
    lambda _, sharding: sharding,
    opt_state,
    by_leaf,
    transform_non_params=lambda _: whole,
  )


def _critic_weights(state: types.TrainState) -> types.Tree:
  return None if state.critic is None else state.critic.params


def _parts(
  state: types.TrainState, park: Collection[str]
) -> tuple[types.Tree, types.Tree, types.Tree]:
  """Returns what is parked: states of both optimizers, and the reference."""
  moments, critic = "optimizer" in park, state.critic
  return (
    state.opt_state if moments else None,
    critic.opt_state if moments and critic is not None else None,
    state.reference if "reference" in park else None,
  )


def _replace(
  state: types.TrainState,
  parts: tuple[types.Tree, types.Tree, types.Tree],
  park: Collection[str],
) -> types.TrainState:
  """Puts back what `_parts` took out."""
  if "reference" in park:
    state = dataclasses.replace(state, reference=parts[2])
  if "optimizer" not in park:
    return state
  state, critic = dataclasses.replace(state, opt_state=parts[0]), state.critic
  if critic is None:
    return state
  critic = dataclasses.replace(critic, opt_state=parts[1])
  return dataclasses.replace(state, critic=critic)


def _move(
  state: types.TrainState, to: types.TrainState, park: Collection[str]
) -> types.TrainState:
  """Brings what is parked to its place for the next stage."""
  there = jax.device_put(_parts(state, park), _parts(to, park))
  return _replace(state, there, park)


def _parked(
  shardings: types.TrainState, park: Collection[str], mesh: jax.sharding.Mesh
) -> types.TrainState:
  """Returns shardings with what is parked in the host's memory."""
  if not park:
    return shardings
  device = mesh.local_mesh.devices.flat[0]
  kinds = sorted(memory.kind for memory in device.addressable_memories())
  if HOST not in kinds:
    raise types.InputError(
      f"placement.park: expected devices with {HOST} memory, got "
      f"{device.platform} with {', '.join(kinds)}. Leave optimizer and "
      "reference out."
    )
  resting = jax.tree.map(
    lambda s: s.with_memory_kind(HOST), _parts(shardings, park)
  )
  return _replace(shardings, resting, park)
