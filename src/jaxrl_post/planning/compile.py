"""Compiles all steps of a run for a machine that is not there.

The steps are those that a run launches, built by the same code on devices that
are only described; of all arrays there are shapes alone. For TPUs it is TPUs'
own compiler that lays out and counts. For GPUs, whose compiler wants one, the
compiler for CPUs takes its place: what it says is an estimate.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxrl_post import config, prepare, types
from jaxrl_post.data import pack
from jaxrl_post.models import network
from jaxrl_post.placement import generator, programs, traffic
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.planning import chips, hlo
from jaxrl_post.sampling import reader

_TOO_MUCH = re.compile(r"([\d.]+)([KMGT]?)\)? (?:exceeds|of [\d.]+\w? hbm)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# What each program is given of what stays on the devices.
_USES = {
  "prefill": {"engine weights"},
  "extend": {"engine weights"},
  "insert": {"cache"},
  "decode": {"engine weights", "cache"},
  "score": {"parameters", "reference", "adapters", "critic"},
  "update": {"parameters", "adapters", "critic", "optimizer"},
  "publish": {"parameters"},
}


@types.host_record
class Memory:
  """Bytes of one device while a program runs; `total` is what it needs."""

  arguments: int
  outputs: int
  aliased: int
  temporaries: int

  @property
  def total(self) -> int:
    """Bytes of all, what an output takes over from an argument once."""
    return self.arguments + self.outputs - self.aliased + self.temporaries


@types.host_record
class Step:
  """One program, compiled.

  Attributes:
    name: prefill, extend, insert, decode, score, update, publish.
    generates: whether it runs on the devices that generate, or those that
      train.
    calls: how often it runs for a batch, if all prompts and completions are as
      long as they may be.
    compile_s: seconds that lowering and compiling took here.
    memory: None where the compiler refuses the program.
    refusal: what it says then.
    used: bytes that it wanted, if that is why; else 0.
    cost: None likewise.
    xla_s: seconds of a call as XLA estimates them; NaN if it does not.
  """

  name: str
  generates: bool
  calls: int
  compile_s: float
  memory: Memory | None
  refusal: str
  used: int
  cost: hlo.Cost | None
  xla_s: float

  def limits(self, chip: chips.Chip) -> dict[str, float]:
    """Returns the least seconds of a call by each limit of a device."""
    if self.cost is None:
      return {}
    sent = sum(size for _, size in self.cost.collectives.values())
    return {
      "flops": self.cost.flops / chip.flops,
      "HBM": self.cost.bytes / chip.bandwidth,
      "ICI": sent / chip.ici,
    }


@types.host_record
class Report:
  """All steps of a run on a machine.

  Attributes:
    machine: what for.
    meshes: the line that says who has which devices.
    steps: in the order of a batch.
    held: bytes of a device that stay between steps, by name, for training and
      for generation; the same, if both share devices.
    shared: whether they do.
    uses: names of what a step is given of what stays, by its name.
    absent: likewise of what is elsewhere while it runs.
    aliased: bytes of engine weights that are the trainer's own.
    knobs: setting that makes a part smaller, by the name of what is held, or of
      the step whose temporaries it is.
  """

  machine: chips.Machine
  meshes: str
  steps: tuple[Step, ...]
  held: tuple[Mapping[str, int], Mapping[str, int]]
  shared: bool
  uses: Mapping[str, frozenset[str]]
  absent: Mapping[str, frozenset[str]]
  aliased: int
  knobs: Mapping[str, str]

  def parts(self, step: Step) -> dict[str, int]:
    """Returns bytes of a device while a step runs, by what they are for."""
    uses = self.uses[step.name]
    held = {
      name: size
      for name, size in self.held[step.generates].items()
      if name not in self.absent[step.name]
    }
    if step.memory is None:
      there = sum(size for name, size in held.items() if name in uses)
      return held | {f"of {step.name}": max(0, step.used - there)}
    given = sum(held.get(name, 0) for name in uses)
    if "engine weights" in uses:
      given += self.aliased
    rest = step.memory.total - given
    return held | {f"of {step.name}": max(0, rest)}

  def worst(self, generates: bool) -> Step:
    """Returns the step that takes the most memory of a side's devices."""
    here = [s for s in self.steps if self.shared or s.generates == generates]
    return max(here, key=lambda step: sum(self.parts(step).values()))

  def fits(self, generates: bool) -> bool:
    """Whether every step of a side fits into the memory of its devices."""
    step = self.worst(generates)
    room = self.machine.chip.hbm
    here = [s for s in self.steps if self.shared or s.generates == generates]
    compiled = all(step.memory for step in here)
    return compiled and sum(self.parts(step).values()) <= room


def check(cfg: config.Run) -> None:
  """Refuses a run whose steps cannot be compiled in one program.

  Raises:
    InputError: names the setting.
  """
  if isinstance(cfg.model.config, network.Network):
    raise types.InputError(
      "model: expected a transformer of this project with --mode=compile, got "
      "a model of your own. Run it on the machine itself."
    )
  if cfg.placement.mode == "roles":
    raise types.InputError(
      "placement.mode: expected colocated or split with --mode=compile, got "
      "roles. Compile each side with colocated."
    )


def run(
  cfg: config.Run, machine: chips.Machine, say: Callable[[str], None]
) -> Report:
  """Compiles the steps of a run; there is no array of the model at any time.

  Args:
    cfg: the run. Neither weights nor prompts are read.
    machine: what for.
    say: told of each step when it is compiled.

  Returns:
    What they take. A step that the compiler refuses is among them, with what
    it says.

  Raises:
    InputError: the run does not fit the number of devices.
  """
  check(cfg)
  shaped = prepare.model(cfg)
  devices = machine.devices
  _, layout = prepare.fit(cfg, shaped.config, len(devices))
  place = programs.build(
    cfg.placement,
    decoder=shaped,
    path=cfg.model.path,
    sampling=cfg.sampling,
    max_prompt=cfg.data.max_prompt,
    group_size=cfg.group_size,
    key=jax.random.key(cfg.seed),
    devices=devices,
    trains=cfg.optim.trained,
    reference=prepare.reference(cfg, shaped.config),
  )
  say(f"compiling for {machine.name}: {place.meshes}")
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  steps = []
  for name, lower in _lowered(cfg, place, trainer, layout):
    step = _compile(
      name, lower, cfg=cfg, place=place, layout=layout, machine=machine
    )
    steps.append(step)
    how = "compiled" if step.memory else f"REFUSED ({step.refusal})"
    say(f"{name}: {how} in {step.compile_s:.1f} s")
  leaves = place.publisher.leaves
  beside = cfg.evaluation.beside is not None
  held = _held(place, trainer, beside=beside)
  shared = place.meshes.shared
  if shared:
    held = held[0] | held[1], held[0] | held[1]
  return Report(
    machine=machine,
    meshes=str(place.meshes),
    steps=tuple(steps),
    held=held,
    shared=shared,
    uses={step.name: _uses(step.name, cfg) for step in steps},
    absent={step.name: _absent(step.name, cfg) for step in steps},
    aliased=sum(
      _bytes(leaf.trained) for leaf in leaves if leaf.is_alias and shared
    ),
    knobs=_knobs(cfg, place.meshes),
  )


def _lowered(
  cfg: config.Run,
  place: programs.Programs,
  trainer: trainers.Trainer,
  layout: pack.Layout,
) -> Iterator[tuple[str, Callable[[], jax.stages.Lowered]]]:
  """Yields how to lower each program of a batch, in its order."""
  assert place.steps is not None, "not in mode roles"
  yield from generator.lower(
    place.steps,
    place.meshes.generation,
    place.publisher.abstract,
    cfg=cfg.sampling,
    max_prompt=cfg.data.max_prompt,
  ).items()
  sizes = (layout.sequences,), (layout.rows, layout.length)
  rows = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (*sizes[min(x.ndim, 2) - 1], *x.shape[2:]), x.dtype
    ),
    pack.pack((), pack.Layout(rows=1, length=1, routing=layout.routing)),
  )
  yield from trainer.lower(rows).items()
  for way in place.resent.ways:
    yield "publish", lambda way=way: traffic.lower(way)


def _compile(
  name: str,
  lower: Callable[[], jax.stages.Lowered],
  *,
  cfg: config.Run,
  place: programs.Programs,
  layout: pack.Layout,
  machine: chips.Machine,
) -> Step:
  generates = name in ("prefill", "extend", "insert", "decode")
  mesh = place.meshes.generation if generates else place.meshes.training
  begun = time.monotonic()
  memory, cost, refusal, xla_s = None, None, "", math.nan
  try:
    made = lower().compile()
  except jax.errors.JaxRuntimeError as error:
    refusal = chips.first_line(error)
  else:
    memory, cost = (
      _memory(made),
      hlo.cost(
        made.as_text() or "", mesh.shape, _trips(name, cfg, layout, mesh)
      ),
    )
    clock = machine.chip.clock
    xla_s = cost.cycles / clock if clock else math.nan
  return Step(
    name=name,
    generates=generates,
    calls=_calls(cfg)[name],
    compile_s=time.monotonic() - begun,
    memory=memory,
    refusal=refusal,
    used=_wanted(refusal),
    cost=cost,
    xla_s=xla_s,
  )


def _wanted(refusal: str) -> int:
  """Returns bytes of which the compiler says that they are too many, or 0."""
  found = _TOO_MUCH.search(refusal)
  return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _memory(made: jax.stages.Compiled) -> Memory:
  found: Any = made.memory_analysis()
  return Memory(
    arguments=found.argument_size_in_bytes,
    outputs=found.output_size_in_bytes,
    aliased=found.alias_size_in_bytes,
    temporaries=found.temp_size_in_bytes,
  )


def _trips(
  name: str, cfg: config.Run, layout: pack.Layout, mesh: jax.sharding.Mesh
) -> tuple[int, ...]:
  """Returns how often those loops run whose end depends on data, at most."""
  if name == "decode":
    return (cfg.sampling.block,)
  if name not in ("score", "update"):
    return ()
  both = layout.microbatches * layout.minibatches
  portions = both if name == "score" else layout.microbatches
  parts = both * math.prod(mesh.shape[n] for n in meshes.TRAINING_BATCH)
  parts *= mesh.shape["context"]
  chunks = math.ceil(layout.rows * layout.length / parts / cfg.model.chunk)
  return (portions, chunks) if portions > 1 else (chunks,)


def _calls(cfg: config.Run) -> dict[str, int]:
  """Returns how often each program runs for a batch of the longest rollouts."""
  sampling = cfg.sampling
  num, chunk, room = reader.call_shape(
    cfg.data.max_prompt,
    call_tokens=sampling.prefill_tokens,
    most=-(-sampling.rows // cfg.group_size),
  )
  prefills = math.ceil(cfg.groups_per_step / num)
  blocks = math.ceil(sampling.max_tokens / sampling.block)
  return {
    "prefill": prefills,
    "extend": prefills * (room // chunk - 1),
    "insert": prefills,
    "decode": blocks * math.ceil(cfg.rows / sampling.rows),
    "score": 1,
    "update": 1,
    "publish": 1,
  }


def _held(
  place: programs.Programs, trainer: trainers.Trainer, *, beside: bool
) -> tuple[dict[str, int], dict[str, int]]:
  """Returns bytes that stay on a training and on a generating device.

  With an evaluation `beside` training, which has weights and a cache of its
  own.
  """
  assert place.steps is not None, "not in mode roles"
  state = trainer.abstract
  training = {
    "parameters": _bytes(state.params),
    "optimizer": _bytes(state.opt_state),
    "reference": _bytes(trainer.reference),
    "adapters": _bytes(state.adapters),
    "critic": _bytes(state.critic),
  }
  leaves = place.publisher.leaves
  own = [leaf for leaf in leaves if not leaf.is_alias]
  weights = sum(
    _bytes(jax.ShapeDtypeStruct(leaf.shape, leaf.cast, sharding=leaf.goal))
    for leaf in own
  )
  generation = {"engine weights": weights}
  if not place.meshes.shared and not place.free_first:
    generation["next weights"] = weights
  cache = place.steps.state
  generation["cache"] = _bytes((cache.own, cache.prompt))
  if beside:
    generation["evaluated weights"] = weights
    generation["cache of evaluation"] = generation["cache"]
  return (
    {name: size for name, size in training.items() if size},
    generation,
  )


def _uses(name: str, cfg: config.Run) -> frozenset[str]:
  """Returns what a step is given: an update, a reference only if it moves."""
  moves = name == "update" and cfg.algo.reference_moves[0] > 0
  return frozenset(_USES[name] | ({"reference"} if moves else set()))


def _absent(name: str, cfg: config.Run) -> frozenset[str]:
  """Returns what is not on the devices while a step runs."""
  absent = set(cfg.placement.park) - _uses(name, cfg)
  if name == "publish" and cfg.placement.publish.buffers == "free_first":
    absent.add("engine weights")
  return frozenset(absent)


def _bytes(tree: types.Tree) -> int:
  """Returns bytes of one device's shards."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _knobs(cfg: config.Run, placed: meshes.Meshes) -> dict[str, str]:
  """Says which setting makes which part of the memory smaller."""
  split = f"raise placement.training.fsdp ({placed.training.shape['fsdp']})"
  park = "set placement.park=optimizer"
  can_park = placed.shared and "optimizer" not in cfg.placement.park
  cut = f"raise optim.microbatches ({cfg.optim.microbatches})"
  remat = "set model.remat=layer" if cfg.model.remat == "none" else cut
  tensor = placed.generation.shape["tensor"]
  fewer = f"lower sampling.rows ({cfg.sampling.rows})"
  call = f"lower sampling.prefill_tokens ({cfg.sampling.prefill_tokens})"
  return {
    "parameters": split,
    "optimizer": park if can_park else split,
    "reference": split,
    "adapters": split,
    "critic": split,
    "engine weights": f"raise placement.generation.tensor ({tensor})",
    "next weights": "set placement.publish.buffers=free_first",
    "cache": f"{fewer} or sampling.cache",
    "of prefill": call,
    "of extend": call,
    "of insert": call,
    "of decode": fewer,
    "of score": cut,
    "of update": remat,
    "of publish": "lower placement.publish.chunk_bytes",
  }
