"""Training here, generation in replicas of their own, placed by Ray.

The process that is started is the first of those that train; it has the
ledger, the rewards and the log. Ray starts the replicas, carries weights,
orders and completions through its object store, and notices who dies. A
replica that dies is started again, and what it owed is sampled again.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import runpy
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import logging

from jaxrl_post import config, prepare, types
from jaxrl_post.placement import mesh, replica, settings
from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.sampling import fleet as fleets
from jaxrl_post.sampling import server as servers

# A replica answers this often, in seconds, whether or not it made anything.
_WAIT_S = 1.0
# Deaths of one replica in a row, with nothing made in between, end the run.
_MOST_DEATHS = 3
# For a cluster to answer, and for a process to be placed and started there.
_ANSWER_S, _PLACE_S = 5.0, 300.0
# For the others to say first why they end; they know it better.
_GRACE_S = 3.0
# What a process on another machine must know of this one's environment.
_PASSED = ("JAX_", "XLA_", "PYTHONPATH")
# Threads of a replica: weights may take long, so no call waits behind them.
_LOAD, _COLLECT = "load", "collect"


def _ray() -> Any:
  if importlib.util.find_spec("ray") is None:
    raise types.InputError(
      "placement.mode=roles: expected the package ray, got none. Run pip "
      "install 'jaxrl_post[ray]', or use mode split."
    )
  return importlib.import_module("ray")


@contextlib.contextmanager
def cluster(
  cfg: mesh.Placement, launch: hosts_lib.Launch | None, argv: Sequence[str]
) -> Iterator[hosts_lib.Launch | None]:
  """Joins or starts a Ray cluster, and starts the other training processes.

  The cluster is the one at RAY_ADDRESS; without it, one of this machine that
  ends with this process.

  Args:
    cfg: the placement, of mode roles.
    launch: of a training process that another one has started; None for the
      first.
    argv: the arguments of this program, for the others.

  Yields:
    How the training processes find each other; None if there is one only.

  Raises:
    InputError: Ray, its cluster, or what the placement asks of either is not
      there; or a launcher has started several processes.
  """
  own, count = cfg.processes.training_cores, cfg.processes.training_processes
  if launch is not None:
    if not launch.process_id:
      raise types.InputError(
        "placement.mode=roles: expected one process, which starts the others, "
        "got one of several that a launcher has started. Launch one only."
      )
    replica.pin(_cores(own, launch.process_id, count))
    yield launch
    return
  ray = _ray()
  # Before this process is pinned: all that Ray starts inherits its cores.
  _join(ray, cfg.processes)
  try:
    replica.pin(_cores(own, 0, count))
    with _gang(ray, cfg, argv) as found:
      yield found
  finally:
    ray.shutdown()


def _join(ray: Any, roles: settings.Roles) -> None:
  """Joins the cluster that the environment names, or starts one."""
  address = os.environ.get("RAY_ADDRESS") or "local"
  alone = address == "local"
  passed = {k: v for k, v in os.environ.items() if k.startswith(_PASSED)}
  if alone:
    _check_private(roles)
    replica.check_cores(roles.training_cores + roles.generation_cores)
    # Nobody is told about a private cluster.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
  try:
    if not alone and address != "auto":
      _reach(address)
    # The object store has Ray's limit, a third of the memory: nothing is taken
    # before it is filled, and a few versions of the weights must fit.
    ray.init(
      address=address,
      include_dashboard=False,
      # It warns of what a user cannot change, such as its own defaults.
      logging_level="error",
      runtime_env=None if alone else {"env_vars": passed},
    )
  except ConnectionError as error:
    raise types.InputError(
      f"RAY_ADDRESS: expected HOST:PORT of a Ray cluster, or auto, or local, "
      f"got {address!r} ({_last_line(str(error))}). Start a cluster with ray "
      "start --head, or leave RAY_ADDRESS out to have one for this run."
    ) from error


def _reach(address: str) -> None:
  """Looks whether somebody answers; Ray itself would wait for minutes."""
  host, _, port = address.rpartition(":")
  try:
    socket.create_connection((host, int(port)), _ANSWER_S).close()
  except (OSError, ValueError, OverflowError) as error:
    raise ConnectionError(error) from error


def _check_private(roles: settings.Roles) -> None:
  """Refuses replicas on the very devices that this process trains on.

  Ray knows of those only if it has started this process, too.
  """
  name = roles.replica_resource
  if name:
    raise types.InputError(
      f"placement.roles.replica_resource: expected RAY_ADDRESS of a cluster, "
      f"got {name} in a private one, which does not know what this process "
      "takes. Run ray start --head, and this program by ray job submit with "
      "devices of its own: --entrypoint-num-gpus=N."
    )


def _cores(cores: tuple[int, ...], index: int, count: int) -> tuple[int, ...]:
  """Deals out cores to `count` processes; returns those of one."""
  each = len(cores) // count
  return cores[index * each : (index + 1) * each]


@contextlib.contextmanager
def _gang(
  ray: Any, cfg: mesh.Placement, argv: Sequence[str]
) -> Iterator[hosts_lib.Launch | None]:
  """Has the training processes besides this one."""
  count = cfg.processes.training_processes
  if count == 1:
    yield None
    return
  with socket.socket() as free:
    free.bind(("", 0))
    port = free.getsockname()[1]
  address = f"{ray.util.get_node_ip_address()}:{port}"
  follow = ray.remote(_follow).options(
    max_retries=0, **_resources(cfg.processes)
  )
  flags = (f"--coordinator={address}", f"--num_processes={count}")
  others = [
    follow.remote([*argv, *flags, f"--process_id={index}"], os.getcwd())
    for index in range(1, count)
  ]
  ended = threading.Event()
  watch = threading.Thread(
    target=_watch, args=(ray, others, ended), name="gang", daemon=True
  )
  watch.start()
  try:
    yield hosts_lib.Launch(address, count, 0)
    ended.set()
    # Together: the others do it as they end, and each waits for all.
    jax.distributed.shutdown()
    ray.get(others, timeout=hosts_lib.LEAVE_S)
  finally:
    ended.set()
    watch.join()


def _follow(argv: Sequence[str], cwd: str) -> None:
  """Runs this program in a worker of Ray, which ends when the cluster does.

  Raises:
    RunError: it did not end well.
  """
  os.chdir(cwd)
  sys.argv = [sys.argv[0], *argv]
  try:
    runpy.run_module("jaxrl_post.main", run_name="__main__", alter_sys=True)
  except SystemExit as end:
    if end.code:
      raise types.RunError(f"exit code {end.code}") from end
  jax.distributed.shutdown()


def _watch(ray: Any, others: list[Any], ended: threading.Event) -> None:
  """Ends this process if another training process ends before it."""
  done: list[Any] = []
  while not done:
    if ended.wait(_WAIT_S):
      return
    done, _ = ray.wait(others, timeout=0)
  reason = "too early"
  try:
    ray.get(done[0])
  except ray.exceptions.RayError as error:
    reason = _last_line(str(error))
  if not ended.wait(_GRACE_S):
    text = f"error: a training process ended: {reason}"
    print(text, file=sys.stderr, flush=True)
    # As in `hosts`: the main thread may wait for that process for ever.
    os._exit(1)


def _last_line(text: str) -> str:
  return (text.strip().splitlines() or [""])[-1][:300]


def _resources(roles: settings.Roles) -> dict[str, Any]:
  """Returns what to ask of Ray for one process."""
  name, number = roles.replica_resource, roles.replica_devices
  asked: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
  if name == "GPU":
    asked["num_gpus"] = number
  elif name:
    asked["resources"] = {name: number}
  return asked


def recipes(cfg: config.Run, parts: prepare.Parts) -> list[replica.Recipe]:
  """Returns how to build each replica; together they have `sampling.rows`."""
  roles = cfg.placement.processes
  count, devices = roles.generation_replicas, roles.replica_devices
  recipe = replica.Recipe(
    decoder=dataclasses.replace(parts.decoder, dtype=cfg.sampling.compute),
    sampling=dataclasses.replace(cfg.sampling, rows=cfg.sampling.rows // count),
    axes=mesh.local_axes(cfg.placement.generation, count * devices, count),
    max_prompt=cfg.data.max_prompt,
    group_size=cfg.group_size,
    seed=cfg.seed,
    cpu_devices=None if roles.replica_resource else devices,
  )
  return [
    dataclasses.replace(recipe, cores=_cores(roles.generation_cores, i, count))
    for i in range(count)
  ]


class Replicas:
  """Samples in replicas; has the methods of `generation.Samplers`."""

  def __init__(self, cfg: config.Run, parts: prepare.Parts) -> None:
    """Starts the replicas; they are ready after `warm_up`."""
    ray, asked = _ray(), _resources(cfg.placement.processes)
    # Out of order: an order need not wait until weights have crossed over.
    make = ray.remote(concurrency_groups={_LOAD: 1, _COLLECT: 1})(
      replica.Replica
    ).options(max_restarts=0, allow_out_of_order_execution=True, **asked)
    shipper = _Shipper(ray)
    plans = recipes(cfg, parts)
    self._members = [
      _Remote(
        ray,
        index,
        create=functools.partial(make.remote, recipe),
        ship=shipper.ship,
        asked=asked,
        silence_s=cfg.placement.peer_timeout_s,
      )
      for index, recipe in enumerate(plans)
    ]
    self.engine = fleets.Fleet(
      self._members,
      # As many again wait there: no row is idle while an order is on its way.
      rows=2 * plans[0].sampling.rows,
      stall_s=cfg.stream.stall_s,
    )
    for member in self._members:
      member.begin(self.engine)

  def warm_up(self, policy: types.Policy) -> None:
    """Waits until every replica has weights and has compiled, or has failed.

    Raises:
      RunError: one takes too long. A failure is raised by the engine's step.
    """
    self.publish(policy)
    for member in self._members:
      member.wait()

  def publish(self, policy: types.Policy) -> None:
    """Sends weights on their way; raises if they cannot be packed.

    What `sync/copy_s` counts ends here, when the weights are in Ray's store; a
    replica takes them when it has unpacked and checked them, and meanwhile
    goes on with those it has.
    """
    self.engine.publish(policy)

  def generate(
    self, policy: types.Policy, requests: Sequence[types.Request]
  ) -> list[types.Completion]:
    """Samples an evaluation; one completion a uid, in order."""
    return self.engine.generate(policy, requests)

  def metrics(self) -> dict[str, float]:
    """Returns how the replicas do, as `fleet.Fleet.metrics`."""
    return self.engine.metrics()

  def close(self) -> None:
    """Ends the replicas."""
    for member in self._members:
      member.close()


class Idle:
  """The samplers of a training process that is not the head: none."""

  engine: Any = None

  def warm_up(self, policy: types.Policy) -> None:
    """Does nothing."""

  def publish(self, policy: types.Policy) -> None:
    """Does nothing: the head sends the weights."""

  def generate(
    self, policy: types.Policy, requests: Sequence[types.Request]
  ) -> list[types.Completion]:
    """Is the head's business.

    Raises:
      RuntimeError: always.
    """
    raise RuntimeError("only the head evaluates")

  def metrics(self) -> dict[str, float]:
    """Returns nothing: the head knows."""
    return {}

  def close(self) -> None:
    """Does nothing."""


class _Shipper:
  """Puts each policy into the object store once, for all replicas."""

  def __init__(self, ray: Any) -> None:
    self._ray = ray
    self._policy: types.Policy | None = None
    self._parcel: Any = None

  def ship(self, policy: types.Policy) -> Any:
    if policy is not self._policy:
      # The one before is freed by Ray once no replica reads it.
      self._parcel = self._ray.put(replica.pack(policy))
      self._policy = policy
    return self._parcel


class _Remote:
  """One replica on Ray, and the thread that fetches what it makes."""

  def __init__(
    self,
    ray: Any,
    index: int,
    *,
    create: Callable[[], Any],
    ship: Callable[[types.Policy], Any],
    asked: dict[str, Any],
    silence_s: float,
  ) -> None:
    self.name = f"replica {index}"
    self._ray, self._index = ray, index
    self._create, self._ship, self._silence_s = create, ship, silence_s
    self._asked = asked
    self._heard = self._closed = False
    self._deaths = 0
    self._ready = threading.Event()
    self._thread: threading.Thread | None = None
    self._start()

  def submit(self, order: servers.Order) -> None:
    self._calls.append(self._actor.submit.remote(order))

  def publish(self, policy: types.Policy) -> None:
    # Ray's, and not ours, is the wait for what it refers to.
    load = self._actor.load.options(concurrency_group=_LOAD)
    self._calls.append(load.remote(self._ship(policy)))

  def wait(self) -> None:
    """Waits for the first weights to be in place, or for a failure."""
    if not self._ready.wait(hosts_lib.COLD_S):
      raise types.RunError(
        f"{self.name}: expected it to compile within {hosts_lib.COLD_S:g} s, "
        "got no answer"
      )

  def begin(self, fleet: fleets.Fleet) -> None:
    """Starts to fetch."""
    self._thread = threading.Thread(
      target=self._fetch, args=(fleet,), name=self.name, daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    self._closed = True
    self._ray.kill(self._actor)
    if self._thread is not None:
      self._thread.join(hosts_lib.LEAVE_S)

  def _start(self) -> None:
    """Has Ray start a process; called while nothing else is sent to it."""
    self._actor = self._create()
    # Kept until they are done: what they raise is found in them.
    self._calls: list[Any] = []

  def _fetch(self, fleet: fleets.Fleet) -> None:
    errors = self._ray.exceptions
    try:
      while not self._closed:
        try:
          self._fetch_once(fleet)
        except (errors.RayActorError, errors.GetTimeoutError) as error:
          self._mourn(fleet, error)
    except BaseException as error:
      # For the trainer to raise: it is the one who waits.
      if not self._closed:
        fleet.report(self._index, servers.Report(failure=str(error)))
    finally:
      self._ready.set()

  def _fetch_once(self, fleet: fleets.Fleet) -> None:
    # Ray may have to find a place for it first; later it has to answer in time.
    limit_s = self._silence_s if self._heard else _PLACE_S
    collect = self._actor.collect.options(concurrency_group=_COLLECT)
    made = self._ray.get(collect.remote(_WAIT_S), timeout=_WAIT_S + limit_s)
    self._heard = True
    self._check_calls()
    for report in made:
      self._deaths = 0
      fleet.report(self._index, report)

  def _check_calls(self) -> None:
    """Forgets the calls that are done, and raises what they raised."""
    calls = list(self._calls)
    if not calls:
      return
    done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
    for call in done:
      self._ray.get(call)
      self._calls.remove(call)
    if len(done) == len(calls):
      self._ready.set()  # Of its calls the first weights take the longest.

  def _mourn(self, fleet: fleets.Fleet, error: Any) -> None:
    """Starts the replica again; it is sent weights and orders anew."""
    if self._closed:
      return
    if isinstance(error, self._ray.exceptions.GetTimeoutError):
      if not self._heard:
        raise types.RunError(
          f"expected a place in Ray's cluster, and a start, within "
          f"{_PLACE_S:g} s, got none; it asks for {self._asked}, the cluster "
          f"has {self._ray.cluster_resources()}"
        )
      reason = f"silent for {self._silence_s:g} s (placement.peer_timeout_s)"
    elif error.actor_init_failed:
      raise error  # It would fail again.
    else:
      reason = _last_line(str(error))
    self._deaths += 1
    if self._deaths >= _MOST_DEATHS:
      raise types.RunError(
        f"lost {self._deaths} times without a completion in between: {reason}"
      ) from error
    logging.warning("%s is lost and started again: %s", self.name, reason)
    self._ray.kill(self._actor)
    self._heard = False
    fleet.resend(self._index, self._start)
