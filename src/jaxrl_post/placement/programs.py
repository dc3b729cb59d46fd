"""The steps of a run, placed on its two meshes.

Here models, training and sampling meet devices. Colocated and split differ in
the meshes only.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec as specs
from jaxrl_post.models import transformer, weights
from jaxrl_post.placement import generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import publish as publishing
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.sampling import engine as engines
from jaxrl_post.training import optim

_Lock: TypeAlias = contextlib.AbstractContextManager[Any]


@dataclasses.dataclass(frozen=True)
class Programs:
  """What the loop calls; it never asks which device.

  Attributes:
    meshes: the two meshes.
    trainer: compiles start, score and update, from an algorithm, its optimizer
      and the length of its schedule in steps.
    draw: draws or reads the first weights onto the training mesh.
    publisher: the way of the weights.
    engine: allocates an engine, from a random key and a group size.
    locks: held while weights are sent: both meshes launch programs then.
  """

  meshes: meshes.Meshes
  trainer: Callable[[types.Algorithm, optim.Optim, int], trainers.Trainer]
  draw: Callable[[], types.Tree]
  publisher: publishing.Publisher
  engine: Callable[[jax.Array, int], engines.Engine]
  locks: tuple[_Lock, _Lock]

  @property
  def num_devices(self) -> int:
    """Devices the run holds: of both meshes, and the idle ones."""
    used = self.meshes.training.size
    if not self.meshes.shared:
      used += self.meshes.generation.size
    return used + self.meshes.idle

  def publish(self, state: types.TrainState) -> types.Policy:
    """Sends the weights on their way to the generation mesh.

    Args:
      state: after the update whose policy it is.

    Returns:
      The policy. The training devices have done their part; the copy may still
      be under way, and `verify` waits for it.
    """
    with self.locks[0], self.locks[1]:
      params, fingerprints = self.publisher(state.params)
    jax.block_until_ready(fingerprints[0])
    return types.Policy(
      params=params,
      version=int(state.version),
      step=int(state.step),
      fingerprints=fingerprints,
    )

  def verify(self, policy: types.Policy) -> None:
    """Waits for a policy's weights and compares the checksums of both sides.

    Raises:
      RunError: some leaf did not arrive as it was sent.
    """
    if policy.fingerprints is not None:
      publishing.verify(policy.fingerprints)
    jax.block_until_ready(policy.params)


def check_rows(
  cfg: meshes.Placement,
  shares: meshes.Shares,
  *,
  rows: int,
  microbatches: int,
  engine_rows: int,
  rows_name: str = "groups_per_step x group_size",
) -> None:
  """Refuses batches that do not divide over the devices.

  Args:
    cfg: the placement.
    shares: devices of each side.
    rows: of a training batch.
    microbatches: parts it is cut into.
    engine_rows: completions in flight.
    rows_name: the setting that `rows` comes from.

  Raises:
    InputError: names both numbers.
  """
  training = _parts(cfg.training, shares.training)
  if rows % (training * microbatches):
    raise types.InputError(
      f"{rows_name}: expected a multiple of {training} data-parallel parts x "
      f"{microbatches} microbatches, got {rows} rows. Change it, the "
      "microbatches or the placement."
    )
  generation = _parts(cfg.generation, shares.generation)
  if engine_rows % generation:
    raise types.InputError(
      f"sampling.rows: expected a multiple of {generation} data-parallel "
      f"parts, got {engine_rows}. Change sampling.rows or the placement."
    )


def _parts(
  axes: meshes.TrainingAxes | meshes.GenerationAxes, devices: int
) -> int:
  """Returns into how many parts rows are split."""
  if axes.tensor != -1:
    return devices // axes.tensor
  sizes = dataclasses.asdict(axes)
  sizes.pop("tensor")
  return functools.reduce(lambda a, b: a * b, sizes.values())


def build(
  cfg: meshes.Placement,
  *,
  decoder: decoders.Decoder,
  path: str | None,
  sampling: engines.Sampling,
  max_prompt: int,
  key: jax.Array,
  devices: Sequence[Any],
) -> Programs:
  """Places all steps of a run.

  Args:
    cfg: which devices do what.
    decoder: the model as it is trained.
    path: its checkpoint; None draws random weights.
    sampling: sizes and dtype of engines.
    max_prompt: longest prompt, in tokens.
    key: the run's key.
    devices: all of them.

  Returns:
    The programs. Nothing is compiled before its first use.

  Raises:
    InputError: sizes do not fit the devices, or weights not the model.
  """
  placed = meshes.split(cfg, devices)
  spec = transformer.spec(decoder.config)
  home = meshes.weight_shardings(spec, meshes.TRAINING_RULES, placed.training)
  rules, _ = meshes.fit_rules(spec, meshes.GENERATION_RULES, placed.generation)
  away = meshes.weight_shardings(spec, rules, placed.generation)
  shapes = specs.abstract(spec, jnp.dtype("float32"))
  publisher = publishing.plan(home, away, shapes, sampling.dtype)
  # One order of launches on devices that two threads share: two collectives in
  # different orders would wait for each other.
  lock = threading.RLock()
  other = lock if placed.shared else threading.RLock()

  def draw() -> types.Tree:
    if path is not None:
      return weights.read_params(path, decoder.config, home, "float32")
    start = functools.partial(specs.init, spec, dtype=jnp.dtype("float32"))
    return jax.jit(start, out_shardings=home)(jax.random.fold_in(key, 0))

  params = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    home,
  )

  def trainer(
    algo: types.Algorithm, cfg: optim.Optim, num_steps: int
  ) -> trainers.Trainer:
    return trainers.build(
      placed.training,
      params=params,
      decoder=decoder,
      algo=algo,
      optimizer=optim.build(cfg, num_steps),
      microbatches=cfg.microbatches,
      key=key,
      keep_params=publisher.aliases,
      lock=lock,
    )

  return Programs(
    meshes=placed,
    trainer=trainer,
    draw=draw,
    publisher=publisher,
    engine=generator.build(
      placed.generation,
      rules=rules,
      decoder=dataclasses.replace(decoder, dtype=sampling.dtype),
      cfg=sampling,
      max_prompt=max_prompt,
      lock=other,
    ),
    locks=(lock, other),
  )
