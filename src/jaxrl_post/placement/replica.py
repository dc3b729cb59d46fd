"""A replica of generation: an engine whose weights come from another process.

The trainer's process packs weights into a parcel of host arrays, with version
and checksums; a replica unpacks it while it goes on sampling with what it has.
How parcels, orders and reports travel is not decided here.
"""

import contextlib
import os
import pathlib
import queue
import threading
from collections.abc import Mapping

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import quantize, transformer
from jaxrl_post.placement import fingerprint, generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import server as servers


@types.host_record
class Recipe:
  """All that a replica must know to build its engine.

  Attributes:
    decoder: the model; its dtype is that of the engine.
    sampling: sizes of this replica's engine.
    axes: of its mesh.
    max_prompt: longest prompt, in tokens.
    group_size: completions of a group.
    seed: of the run.
    cpu_devices: virtual devices to ask for; None takes those that are there.
    cores: CPU cores to stay on; empty for any.
  """

  decoder: decoders.Decoder
  sampling: engines.Sampling
  axes: meshes.GenerationAxes
  max_prompt: int
  group_size: int
  seed: int
  cpu_devices: int | None = None
  cores: tuple[int, ...] = ()


@types.host_record
class Parcel:
  """One version of all weights, on the host.

  Attributes:
    leaves: by key path, in the engine's dtype; of quantized weights integers
      and scales.
    sums: of each leaf, as `fingerprint.checksum` has them.
    version: optimizer updates applied in these weights.
    step: batches the trainer had consumed.
  """

  leaves: Mapping[str, np.ndarray]
  sums: Mapping[str, int]
  version: int
  step: int


def check_cores(cores: tuple[int, ...]) -> None:
  """Refuses cores that this process may not use.

  Raises:
    InputError: this machine has no such core, or does not grant it.
  """
  granted = os.sched_getaffinity(0) if cores else set()
  if not set(cores) <= granted:
    raise types.InputError(
      f"placement.roles: expected CPU cores of {sorted(granted)}, got "
      f"{list(cores)}. Name others, or none."
    )


def pin(cores: tuple[int, ...]) -> None:
  """Keeps this process on these cores; to be called before JAX starts.

  Args:
    cores: numbers of CPU cores; empty changes nothing.

  Raises:
    InputError: this machine has no such core, or does not grant it.
  """
  check_cores(cores)
  if not cores:
    return
  # A thread that is there already does not follow the first one.
  for task in pathlib.Path("/proc/self/task").iterdir():
    with contextlib.suppress(ProcessLookupError):  # It has just ended.
      os.sched_setaffinity(int(task.name), cores)


def outbox(shapes: types.Tree, mesh: jax.sharding.Mesh) -> types.Tree:
  """Lays weights out for the way to the host: in even parts, once.

  Args:
    shapes: of the weights.
    mesh: devices of this process, on one axis "part".

  Returns:
    A tree of shardings. A leaf is split along its first dim that the devices
    divide; one without such a dim is on all of them.
  """

  def one(x: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
    even = [i for i, n in enumerate(x.shape) if n % mesh.size == 0]
    layout = [None] * even[0] + ["part"] if even else []
    return jax.sharding.NamedSharding(mesh, jax.P(*layout))

  return jax.tree.map(one, shapes)


def pack(policy: types.Policy) -> Parcel:
  """Copies weights to the host, and waits for them.

  It launches nothing: a program launched now would wait on the training devices
  until the update that they have begun meanwhile has ended.

  Args:
    policy: in its outbox, with checksums of all leaves.

  Raises:
    RunError: a leaf is not what was trained, or copies of it differ; names it.
  """
  assert policy.fingerprints is not None, "published for replicas"
  fingerprint.verify(policy.fingerprints)
  return Parcel(
    leaves=jax.device_get(fingerprint.by_name(policy.params)),
    sums=_numbers(policy.fingerprints[1]),
    version=policy.version,
    step=policy.step,
  )


class Replica:
  """An engine, its server, and the newest weights that have arrived."""

  def __init__(self, recipe: Recipe) -> None:
    """Takes devices and cores of this process, and starts the server."""
    pin(recipe.cores)
    if recipe.cpu_devices is not None:
      # Whatever this machine has besides is not for this replica.
      jax.config.update("jax_platforms", "cpu")
      jax.config.update("jax_num_cpu_devices", recipe.cpu_devices)
    mesh = meshes.build(recipe.axes, jax.local_devices())
    spec = transformer.spec(recipe.decoder.shape)
    if recipe.sampling.quantized:
      spec = quantize.spec(spec)
    rules, _ = meshes.fit_rules(spec, meshes.GENERATION_RULES, mesh)
    shardings = meshes.weight_shardings(spec, rules, mesh)
    self._shardings = fingerprint.by_name(shardings)
    self._structure = jax.tree.structure(shardings)
    self._lock = threading.RLock()
    self._check = fingerprint.checker(self._shardings)
    cfg, max_prompt = recipe.sampling, recipe.max_prompt
    steps = generator.compiled(
      mesh,
      rules=rules,
      decoder=recipe.decoder,
      cfg=cfg,
      max_prompt=max_prompt,
      group=recipe.group_size,
    )
    make = generator.build(
      steps,
      mesh,
      cfg=cfg,
      max_prompt=max_prompt,
      vocab_size=recipe.decoder.config.vocab_size,
      lock=self._lock,
    )
    rollout_key, eval_key = generator.keys(recipe.seed)
    self._engine = make(rollout_key)
    self._loading = threading.Lock()
    self._newest = -1
    self._reports: queue.SimpleQueue[servers.Report] = queue.SimpleQueue()
    self._server = servers.Server(
      self._engine,
      tester=lambda: make(eval_key),
      verify=lambda policy: None,  # `load` has.
      report=self._reports.put,
    )

  def load(self, parcel: Parcel) -> None:
    """Takes newer weights; sampling goes on until they are here and whole.

    Raises:
      RunError: a leaf is missing, too many, or not as it was packed; names it.
    """
    with self._loading:
      if parcel.step <= self._newest:
        return  # Calls may overtake each other.
      params = self._unpack(parcel)
      if self._newest < 0:
        self._engine.warm_up(params)  # Nobody samples before the first.
      self._newest = parcel.step
      self._server.publish(
        types.Policy(params=params, version=parcel.version, step=parcel.step)
      )

  def submit(self, order: servers.Order) -> None:
    """Queues an order."""
    self._server.submit(order)

  def collect(self, wait_s: float) -> list[servers.Report]:
    """Returns what was made since the last call; none after `wait_s`."""
    try:
      made = [self._reports.get(timeout=wait_s)]
    except queue.Empty:
      return []
    while not self._reports.empty():
      made.append(self._reports.get())
    return made

  def _unpack(self, parcel: Parcel) -> types.Tree:
    if parcel.leaves.keys() != self._shardings.keys():
      differ = sorted(parcel.leaves.keys() ^ self._shardings.keys())
      raise types.RunError(
        f"replica: expected the leaves of its model, got others: {differ}"
      )
    leaves = {
      name: _place(parcel.leaves[name], sharding)
      for name, sharding in self._shardings.items()
    }
    with self._lock:
      sums = self._check(leaves)
    found = _numbers(sums)
    differ = [n for n, number in found.items() if number != parcel.sums[n]]
    if differ:
      raise types.RunError(
        f"replica: expected weights of version {parcel.version} as they were "
        f"packed, got other checksums for {', '.join(differ)}"
      )
    return jax.tree.unflatten(self._structure, list(leaves.values()))


def _place(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
  # A copy: on CPU, JAX would use the very memory that the parcel came in, and
  # whoever owns that may write to it.
  return jax.make_array_from_callback(
    x.shape, sharding, lambda index: np.array(x[index])
  )


def _numbers(sums: Mapping[str, jax.Array]) -> dict[str, int]:
  """Returns the checksum of each leaf, equal in all of its copies."""
  values = {name: set(np.asarray(x).tolist()) for name, x in sums.items()}
  differ = [name for name, found in values.items() if len(found) > 1]
  if differ:
    raise types.RunError(
      f"replica: expected equal copies of each leaf, got others of "
      f"{', '.join(differ)}"
    )
  return {name: found.pop() for name, found in values.items()}
