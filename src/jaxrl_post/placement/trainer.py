"""The trainer's steps, compiled for the training mesh."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.training import step

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Compiled steps; each is compiled on its first call.

  Attributes:
    abstract: shapes and shardings of the state, to restore it into.
    start: weights to the state before the first update.
    score: see `training.step.score`.
    update: see `training.step.update`; the state it is given is used up.
  """

  abstract: types.TrainState
  start: Callable[[types.Tree], types.TrainState]
  score: Callable[[types.TrainState, types.Batch], types.Batch]
  update: Callable[
    [types.TrainState, types.Batch], tuple[types.TrainState, Metrics]
  ]


def build(
  mesh: jax.sharding.Mesh,
  *,
  params: types.Tree,
  decoder: decoders.Decoder,
  algo: types.Algorithm,
  optimizer: optax.GradientTransformation,
  microbatches: int,
  key: jax.Array,
  keep_params: bool,
  lock: contextlib.AbstractContextManager[Any],
) -> Trainer:
  """Places the steps of one loss and one optimizer.

  Args:
    mesh: the training mesh.
    params: shape, dtype and sharding of each weight.
    decoder: the model.
    algo: advantages and loss.
    optimizer: from `training.optim.build`, or any optax transformation.
    microbatches: parts that score and update cut the rows into.
    key: the run's key.
    keep_params: leave the weights alive in `update`, because the policy is an
      alias of them; otherwise their memory is used again.
    lock: held around every launch.

  Returns:
    The steps.
  """
  # A tree of shardings takes the record's place: not arrays, hence Any.
  whole: Any = jax.sharding.NamedSharding(mesh, jax.P())
  rows = meshes.batch_sharding(mesh)
  shapes = jax.eval_shape(
    functools.partial(step.init, optimizer=optimizer), params, key
  )
  by_leaf = jax.tree.map(lambda x: x.sharding, params)
  shardings = types.TrainState(
    step=whole,
    version=whole,
    params=by_leaf,
    opt_state=optax.tree.map_params(
      optimizer,
      lambda _, sharding: sharding,
      shapes.opt_state,
      by_leaf,
      transform_non_params=lambda _: whole,
    ),
    key=whole,
  )

  @functools.partial(jax.jit, out_shardings=shardings)
  def start(params: types.Tree, key: jax.Array) -> types.TrainState:
    return step.init(params, key, optimizer)

  @functools.partial(jax.jit, in_shardings=(by_leaf, rows), out_shardings=rows)
  def score(params: types.Tree, batch: types.Batch) -> types.Batch:
    return step.score(
      params, batch, decoder=decoder, algo=algo, microbatches=microbatches
    )

  # Weights and the rest apart: only the rest may always be donated.
  @functools.partial(
    jax.jit,
    in_shardings=(by_leaf, dataclasses.replace(shardings, params=None), rows),
    out_shardings=(shardings, whole),
    donate_argnums=(1,) if keep_params else (0, 1),
  )
  def update(params: types.Tree, rest: types.TrainState, batch: types.Batch):
    return step.update(
      dataclasses.replace(rest, params=params),
      batch,
      decoder=decoder,
      algo=algo,
      optimizer=optimizer,
      microbatches=microbatches,
    )

  def launch(program: Callable[..., Any], *args: Any) -> Any:
    with lock:
      return program(*args)

  return Trainer(
    abstract=jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      shardings,
    ),
    start=lambda params: launch(start, params, key),
    score=lambda state, batch: launch(score, state.params, batch),
    update=lambda state, batch: launch(
      update, state.params, dataclasses.replace(state, params=None), batch
    ),
  )
