"""The steps of a run, placed on its two meshes.

Here models, training and sampling meet devices. Colocated and split differ in
the meshes only.
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import types
from jaxrl_post.algos import algorithm
from jaxrl_post.models import (
  among,
  experts,
  network,
  quantize,
  weights,
)
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import bridge, fingerprint, generator, replica
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import publish as publishing
from jaxrl_post.placement import reference as references
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import programs as sampling_programs
from jaxrl_post.training import critic as critics
from jaxrl_post.training import lora, optim, step, trained

_Lock: TypeAlias = contextlib.AbstractContextManager[Any]


@dataclasses.dataclass(frozen=True)
class Programs:
  """What the loop calls; it never asks which device.

  Attributes:
    shares: how many devices each side has, in all processes.
    meshes: the two meshes.
    trainer: compiles start, score and update, from an algorithm, its optimizer
      and the length of its schedule in steps.
    draw: draws or reads the first weights onto the training mesh.
    reference: the same for the model that is the reference; of no weights
      where that is the first weights.
    publisher: the way of the weights.
    resent: the way of those that an update may change; `publisher` if all.
    seal: leaves by name to their checksums, for those that `publish` does not
      move; None where nobody asks for them.
    merge: state to the weights of its policy, on the training mesh.
    steps: of all engines; None where other processes have them.
    engine: allocates an engine, from a random key; None likewise.
    engine_rows: completions in flight of one engine.
    free_first: whether `publish` frees the old policy before it sends.
    locks: held while weights are sent: both meshes launch programs then.
  """

  shares: meshes.Shares
  meshes: meshes.Meshes
  trainer: Callable[[algorithm.Algorithm, optim.Optim, int], trainers.Trainer]
  draw: Callable[[], types.Tree]
  reference: Callable[[], references.Reference]
  publisher: publishing.Publisher
  resent: publishing.Publisher
  seal: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] | None
  merge: Callable[[types.TrainState], types.Tree]
  steps: sampling_programs.Steps | None
  engine: Callable[[jax.Array], engines.Engine] | None
  engine_rows: int
  free_first: bool
  locks: tuple[_Lock, _Lock]

  @property
  def num_devices(self) -> dict[str, int]:
    """Devices of `training`, of `generation`, and all that are `held`."""
    share = self.shares
    sides = share.training, share.generation
    used = max(sides) if self.meshes.shared else sum(sides)
    return {
      "training": share.training,
      "generation": share.generation,
      "held": used + share.idle,
    }

  @contextlib.contextmanager
  def launching(self) -> Iterator[None]:
    """Keeps other threads from launching programs on any of the devices."""
    with self.locks[0], self.locks[1]:
      yield

  def publish(
    self, state: types.TrainState, old: types.Policy | None = None
  ) -> types.Policy:
    """Sends the weights on their way to the generation mesh.

    Args:
      state: after the update whose policy it is.
      old: the policy before. Where the placement says so its memory is freed
        first, and nobody samples from it any more. Weights that no update
        changes are taken from it and not sent again.

    Returns:
      The policy. The training devices have done their part, whatever is
      launched on them next; the copy may still be under way, and `verify` waits
      for it. For replicas it has checksums of all leaves.
    """
    with self.launching():
      merged = self.merge(state)
    way = self.publisher if old is None else self.resent
    params, fingerprints = way(
      merged,
      retired=old.params if self.free_first and old is not None else None,
      kept=None if old is None else old.params,
      launching=self.launching,
    )
    if self.seal is not None:
      before, after = fingerprints
      named = fingerprint.by_name(params)
      kept = {}
      if old is not None and old.fingerprints is not None:
        kept = {n: old.fingerprints[1][n] for n in named.keys() - way.chosen}
      rest = {n: x for n, x in named.items() if n not in {**after, **kept}}
      with self.launching():
        sums = self.seal(rest)
      fingerprints = {**before, **kept, **sums}, {**after, **kept, **sums}
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
      fingerprint.verify(policy.fingerprints)
    jax.block_until_ready(policy.params)


def check_rows(
  cfg: meshes.Placement,
  shares: meshes.Shares,
  *,
  rollouts: int,
  cut: optim.Optim,
  engine_rows: int,
  engines: int = 1,
) -> None:
  """Refuses batches that do not divide over the devices.

  Args:
    cfg: the placement.
    shares: devices of each side.
    rollouts: of a training batch.
    cut: its microbatches and minibatches.
    engine_rows: completions in flight, in all engines together.
    engines: how many there are, with equal shares of `engine_rows`.

  Raises:
    InputError: names both numbers.
  """
  training = meshes.row_parts(cfg.training, shares.training)
  if rollouts % (training * cut.microbatches * cut.minibatches):
    raise types.InputError(
      f"groups_per_step x group_size: expected a multiple of {training} "
      f"data-parallel parts x {cut.microbatches} microbatches x "
      f"{cut.minibatches} minibatches, got {rollouts} rollouts. Change it, "
      "optim.microbatches, optim.minibatches or the placement."
    )
  generation = meshes.row_parts(cfg.generation, shares.generation)
  parts = math.lcm(generation, engines)
  if engine_rows % parts:
    raise types.InputError(
      f"sampling.rows: expected a multiple of {parts} for {generation} "
      f"data-parallel parts in {engines} engines, got {engine_rows}. Change "
      "sampling.rows or the placement."
    )


def _meshes(
  cfg: meshes.Placement, devices: Sequence[Any], process: int, processes: int
) -> meshes.Meshes:
  """Returns the meshes; in mode roles the second is only an outbox."""
  if cfg.mode != "roles":
    return meshes.split(cfg, devices, process=process, processes=processes)
  training = meshes.build(cfg.training, devices)
  own = bridge.own_devices(training)
  return meshes.Meshes(
    training=training,
    generation=meshes.over(np.asarray(own), ("part",)),
    idle=0,
    shared=False,
    replicas=cfg.processes.generation_replicas,
  )


def placed_on(
  decoder: decoders.Decoder, mesh: jax.sharding.Mesh
) -> decoders.Decoder:
  """Returns the decoder for rows that lie on a training mesh."""
  spec = decoders.spec(decoder.config)
  rules, _ = meshes.fit_rules(spec, meshes.TRAINING_RULES, mesh)
  lie = meshes.token_sharding(mesh)
  read = among.on(
    lie, rules.get("heads"), backend=among.backend(mesh.devices.flat[0])
  )
  mix = experts.on(mesh, rules, lie.spec)
  return dataclasses.replace(decoder, sharding=lie, among_rows=read, mix=mix)


def _merging(
  trains: trained.Setting, home: types.Tree
) -> Callable[[types.TrainState], types.Tree]:
  """Returns what makes the policy of a state: its weights, or merged ones."""

  @jax.jit
  def merged(beneath: types.Tree, adapters: types.Tree) -> types.Tree:
    assert isinstance(trains, lora.Lora), "nothing else has adapters"
    goals = {name: home["layers"][name] for name in trains.targets}
    made = lora.merge(beneath, adapters, trains)
    return jax.lax.with_sharding_constraint(made, {"layers": goals})

  def merge(state: types.TrainState) -> types.Tree:
    if state.adapters is None:
      return state.params
    layers = state.params["layers"]
    # Without an adapter a weight stays the very same array.
    beneath = {name: layers[name] for name in state.adapters["layers"]}
    made = merged({"layers": beneath}, state.adapters)
    return {**state.params, "layers": {**layers, **made["layers"]}}

  return merge


def build(
  cfg: meshes.Placement,
  *,
  decoder: decoders.Decoder,
  path: str | None,
  sampling: engines.Sampling,
  max_prompt: int,
  group_size: int,
  key: jax.Array,
  devices: Sequence[Any],
  process: int = 0,
  processes: int = 1,
  decode: Callable[[Sequence[int]], str] | None = None,
  trains: trained.Setting = None,
  reference: references.Source | None = None,
) -> Programs:
  """Places all steps of a run.

  Args:
    cfg: which devices do what.
    decoder: the model as it is trained.
    path: its checkpoint; None draws random weights.
    sampling: sizes and dtype of engines.
    max_prompt: longest prompt, in tokens.
    group_size: completions of a prompt, that share it in the cache.
    key: the run's key.
    devices: all of them, of all processes.
    process: index of this one.
    processes: how many build the same.
    decode: ids to text, for requests with stop strings; None refuses them.
    trains: what of the model the run trains; None is all weights.
    reference: a model that is the reference policy; None is the first weights.

  Returns:
    The programs. Every process trains on its part of one mesh, and has an
    engine of its own with its part of `sampling.rows`. Nothing is compiled
    before its first use.

  Raises:
    InputError: sizes do not fit the devices, or weights not the model.
  """
  placed = _meshes(cfg, devices, process, processes)
  spec = decoders.spec(decoder.config)
  home = meshes.weight_shardings(spec, meshes.TRAINING_RULES, placed.training)
  shapes = specs.abstract(spec, jnp.dtype("float32"))
  sampled = quantize.spec(spec) if sampling.quantized else spec
  steps, engine, seal, rules = None, None, None, {}
  if cfg.mode == "roles":
    out = specs.abstract(sampled, jnp.dtype("float32"))
    away = replica.outbox(out, placed.generation)
  else:
    rules, _ = meshes.fit_rules(
      sampled, meshes.GENERATION_RULES, placed.generation
    )
    away = meshes.weight_shardings(sampled, rules, placed.generation)
  publisher = publishing.plan(
    home,
    away,
    shapes,
    sampling.compute,
    quantized=quantize.channels(spec) if sampling.quantized else None,
    chunk_bytes=cfg.publish.chunk_bytes,
  )
  if cfg.mode == "roles":
    goals = {leaf.name: leaf.goal for leaf in publisher.leaves}
    seal = fingerprint.checker(goals)
  changed = trained.changed(trains, spec)
  # One order of launches on devices that two threads share: two collectives in
  # different orders would wait for each other.
  lock = threading.RLock()
  other = lock if placed.shared or cfg.mode == "roles" else threading.RLock()

  def draw() -> types.Tree:
    if path is not None:
      return weights.read_params(path, decoder.shape, home, "float32")
    start = functools.partial(
      decoders.init, decoder.config, dtype=jnp.dtype("float32")
    )
    params = jax.jit(start, out_shardings=home)(jax.random.fold_in(key, 0))
    if isinstance(decoder.config, network.Network):
      network.probe(decoder.config, params)
    return params

  params = specs.on(shapes, home)

  judge = None
  if reference is not None:
    host = trainers.HOST if "reference" in cfg.park else None
    judging = placed_on(reference.decoder, placed.training)
    judge = references.place(
      dataclasses.replace(reference, decoder=judging),
      placed.training,
      key=key,
      host=host,
    )

  def trainer(
    algo: algorithm.Algorithm, optimizer: optim.Optim, num_steps: int
  ) -> trainers.Trainer:
    num_updates = num_steps * optimizer.updates
    return trainers.build(
      placed.training,
      params=params,
      decoder=placed_on(decoder, placed.training),
      algo=algo,
      optimizer=optim.build(optimizer, num_updates),
      critic_optimizer=critics.optimizer(algo.critic, optimizer, num_updates),
      cut=optimizer,
      key=key,
      keep_params=publisher.aliases,
      park=[part for part in cfg.park if part != "cache"],
      lock=lock,
      reference=judge if step.needs_reference(algo) else None,
    )

  local = dataclasses.replace(sampling, rows=sampling.rows // processes)
  if cfg.mode != "roles":
    steps = generator.compiled(
      placed.generation,
      rules=rules,
      decoder=dataclasses.replace(decoder, dtype=sampling.compute),
      cfg=local,
      max_prompt=max_prompt,
      group=group_size,
    )
    engine = generator.build(
      steps,
      placed.generation,
      cfg=local,
      max_prompt=max_prompt,
      vocab_size=decoder.config.vocab_size,
      lock=other,
      free_idle="cache" in cfg.park,
      decode=decode,
    )
  return Programs(
    meshes=placed,
    shares=meshes.shares(cfg, len(devices), processes),
    trainer=trainer,
    draw=draw,
    reference=references.Reference if judge is None else judge.load,
    publisher=publisher,
    resent=publisher if changed is None else publisher.only(changed),
    seal=seal,
    merge=_merging(trains, home),
    steps=steps,
    engine=engine,
    engine_rows=local.rows,
    free_first=cfg.publish.buffers == "free_first",
    locks=(lock, other),
  )
