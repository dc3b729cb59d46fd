"""Replicas whose Ray is a stand-in: deaths, failures, and what is refused."""

import dataclasses
import queue
import subprocess
import sys
import threading
import time
import types as builtin_types
from concurrent import futures

import pytest

from jaxrl_post import prepare, roles, types
from jaxrl_post.placement import replica, settings
from jaxrl_post.runtime import hosts
from jaxrl_post.sampling import fleet, server
from tests.e2e import runs

SAMPLING = types.SamplingParams(max_tokens=2)


# ------------------------------------------------------------ a stand-in of Ray


class ActorError(Exception):
  actor_init_failed = False


class InitError(ActorError):
  actor_init_failed = True


class TimeoutOfGet(Exception):
  pass


class TaskError(Exception):
  pass


ERRORS = builtin_types.SimpleNamespace(
  RayActorError=ActorError,
  GetTimeoutError=TimeoutOfGet,
  RayTaskError=TaskError,
  RayError=Exception,
)


class Ray:
  """As much of Ray as a replica is reached by."""

  exceptions = ERRORS

  def __init__(self) -> None:
    self.killed: list[Actor] = []

  def get(self, ref: futures.Future, timeout: float | None = None):
    try:
      return ref.result(None if timeout is None else min(timeout, 0.3))
    except futures.TimeoutError as error:
      raise TimeoutOfGet("no answer") from error

  def wait(self, refs, *, num_returns: int, timeout: float):
    assert timeout == 0
    assert num_returns == len(refs)
    done = [ref for ref in refs if ref.done()]
    return done, [ref for ref in refs if not ref.done()]

  def kill(self, actor: "Actor") -> None:
    self.killed.append(actor)
    actor.die(ActorError("killed"))

  def cluster_resources(self):
    return {"CPU": 2.0}


class Method:
  """A method of an actor, as Ray calls it."""

  def __init__(self, call) -> None:
    self.remote = call

  def options(self, *, concurrency_group: str) -> "Method":
    assert concurrency_group
    return self


class Actor:
  """A replica that a test plays."""

  def __init__(self) -> None:
    self.orders: queue.SimpleQueue[server.Order] = queue.SimpleQueue()
    self.policies: queue.SimpleQueue[int] = queue.SimpleQueue()
    self.load_error: Exception | None = None
    self.submit_error: Exception | None = None
    self.dead: Exception | None = None
    self._reports: queue.SimpleQueue = queue.SimpleQueue()
    self.submit, self.load = Method(self._submit), Method(self._load)
    self.collect = Method(self._collect)
    self.silent = False

  def die(self, error: Exception) -> None:
    self.dead = self.dead or error
    self._reports.put(None)

  def report(self, *uids: int, **more) -> None:
    done = tuple(
      types.Completion(
        uid=uid, tokens=(1,), logprobs=(0.0,), versions=(0,), finish="stop"
      )
      for uid in uids
    )
    self._reports.put(server.Report(completions=done, **more))

  def _submit(self, order: server.Order) -> futures.Future:
    self.orders.put(order)
    return _done(None, self.submit_error)

  def _load(self, parcel: int) -> futures.Future:
    self.policies.put(parcel)
    return _done(None, self.load_error)

  def _collect(self, wait_s: float) -> futures.Future:
    ref: futures.Future = futures.Future()
    if not self.silent:
      threading.Thread(target=self._answer, args=(ref,), daemon=True).start()
    return ref

  def _answer(self, ref: futures.Future) -> None:
    try:
      made = [] if self.dead else [self._reports.get(timeout=0.02)]
    except queue.Empty:
      made = []
    if self.dead:
      ref.set_exception(self.dead)
    else:
      ref.set_result(made)


def _done(value, error: Exception | None) -> futures.Future:
  ref: futures.Future = futures.Future()
  if error is None:
    ref.set_result(value)
  else:
    ref.set_exception(error)
  return ref


@dataclasses.dataclass
class Case:
  ray: Ray
  actors: list[Actor]
  member: roles._Remote
  fleet: fleet.Fleet

  def until(self, count: int) -> Actor:
    """Waits for the `count`-th actor, and returns it."""
    end = time.monotonic() + 10
    while len(self.actors) < count or self.fleet.restarts < count - 1:
      assert time.monotonic() < end
      threading.Event().wait(0.005)
    return self.actors[-1]

  def step(self) -> list[int]:
    """Steps until something comes, or is raised."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
      done = self.fleet.step(None, 0)
      if done:
        return [completion.uid for completion in done]
    raise AssertionError("nothing came")


@pytest.fixture(name="case")
def _case(request):
  """One replica; with a parameter, one that nobody hears of."""
  ray, actors = Ray(), []

  def create() -> Actor:
    actors.append(Actor())
    actors[-1].silent = hasattr(request, "param")
    return actors[-1]

  member = roles._Remote(
    ray,
    0,
    create=create,
    ship=lambda policy: policy.step,
    asked={"num_gpus": 1},
    silence_s=0.2,
  )
  made = fleet.Fleet([member], rows=4, stall_s=20.0)
  member.begin(made)
  yield Case(ray, actors, member, made)
  member.close()


def policy(step: int) -> types.Policy:
  return types.Policy(params=None, version=step, step=step)


def group(*uids: int) -> types.Request:
  return types.Request(prompt=(1,), uids=uids, sampling=SAMPLING)


# -------------------------------------------------------------------- replicas


def test_completions_come_back(case):
  case.fleet.publish(policy(0))
  case.fleet.add(group(1, 2))
  case.actors[0].report(1)
  case.actors[0].report(2)
  found: list[int] = []
  while len(found) < 2:
    found += case.step()
  assert found == [1, 2]
  case.member.wait()


def test_a_death_restarts_the_replica_which_gets_all_that_was_owed_once(case):
  case.fleet.publish(policy(3))
  case.fleet.add(group(1, 2))
  case.fleet.step(None, 0)
  case.actors[0].report(1)
  assert case.step() == [1]
  case.actors[0].die(ActorError("the process died\nby signal 9"))
  new = case.until(2)
  case.fleet.add(group(3))
  case.fleet.step(None, 0)
  assert new.policies.get(timeout=5) == 3
  got = [new.orders.get(timeout=5).request.uids for _ in range(2)]
  assert got == [(2,), (3,)]
  assert new.orders.empty()
  assert new.policies.empty()
  assert case.ray.killed == [case.actors[0]]


def test_a_replica_that_dies_three_times_in_a_row_ends_the_run(case):
  case.fleet.publish(policy(0))
  case.fleet.add(group(1))
  for count in (1, 2, 3):
    case.until(count).die(ActorError("it died\nof signal 9"))
  with pytest.raises(
    types.RunError, match="replica 0: lost 3 times .* of signal 9"
  ):
    case.step()
  assert len(case.actors) == 3


def test_a_completion_in_between_starts_the_count_of_deaths_anew(case):
  case.fleet.publish(policy(0))
  case.fleet.add(group(*range(5)))
  case.fleet.step(None, 0)
  for count in range(1, 5):
    actor = case.until(count)
    actor.report(count)
    assert case.step() == [count]
    actor.die(ActorError("gone"))
  case.until(5)


def test_a_replica_that_cannot_be_built_is_not_built_again(case):
  case.actors[0].die(InitError("InputError: expected CPU cores"))
  case.fleet.publish(policy(0))
  case.fleet.add(group(1))
  with pytest.raises(types.RunError, match="replica 0: .*expected CPU cores"):
    case.step()
  assert len(case.actors) == 1


def test_a_silent_replica_is_started_again(case, caplog):
  case.fleet.publish(policy(0))
  case.member.wait()
  case.actors[0].silent = True
  case.until(2)
  assert "silent for 0.2 s" in caplog.text


@pytest.mark.parametrize("case", ["silent"], indirect=True)
def test_a_replica_without_a_place_ends_the_run_and_says_what_it_asks(case):
  case.fleet.publish(policy(0))
  case.fleet.add(group(1))
  with pytest.raises(types.RunError, match="'num_gpus': 1.*'CPU': 2.0"):
    case.step()
  case.member.wait()
  assert len(case.actors) == 1


@pytest.mark.parametrize("call", ["load_error", "submit_error"])
def test_what_a_call_raises_in_the_replica_ends_the_run(case, call):
  setattr(case.actors[0], call, TaskError("checksums for ['norm']"))
  case.fleet.publish(policy(0))
  case.fleet.add(group(1))
  with pytest.raises(types.RunError, match=r"replica 0: checksums for \['nor"):
    case.step()
  case.member.wait()


def test_whatever_else_breaks_in_fetching_ends_the_run(case):
  case.fleet.publish(policy(0))
  case.fleet.add(group(1))
  case.actors[0].die(KeyError("odd"))
  with pytest.raises(types.RunError, match="replica 0: .*odd"):
    case.step()


def test_weights_are_put_into_the_store_once_for_all_replicas(monkeypatch):
  packed, stored = [], []
  monkeypatch.setattr(
    replica, "pack", lambda p: packed.append(p.step) or p.step
  )
  ray = builtin_types.SimpleNamespace(
    put=lambda parcel: stored.append(parcel) or f"ref {parcel}"
  )
  shipper = roles._Shipper(ray)
  first, second = policy(1), policy(2)
  refs = [shipper.ship(p) for p in (first, first, second)]
  assert refs == ["ref 1", "ref 1", "ref 2"]
  assert packed == stored == [1, 2]


def test_rows_and_cores_are_dealt_out_to_the_replicas():
  cfg = runs.configured(
    "placement.mode=roles",
    "placement.roles.generation_replicas=2",
    "placement.roles.generation_cores=2,3,4,5",
    "placement.roles.replica_devices=2",
    "placement.generation.data=-1",
  )
  one, other = roles.recipes(cfg, prepare.prepare(cfg))
  assert one.sampling.rows == other.sampling.rows == 16
  assert (one.cores, other.cores) == ((2, 3), (4, 5))
  assert one.cpu_devices == one.axes.data == 2


# --------------------------------------------------------------------- clusters


def cluster(*assignments: str, launch: hosts.Launch | None = None) -> None:
  cfg = runs.configured("placement.mode=roles", *assignments)
  with roles.cluster(cfg.placement, launch, []):
    raise AssertionError("it has no cluster")


@pytest.fixture(name="untouched")
def _untouched(monkeypatch):
  """Lets nobody start Ray."""

  def start(**_) -> None:
    raise AssertionError("Ray was started")

  fake = builtin_types.SimpleNamespace(init=start, exceptions=ERRORS)
  monkeypatch.setattr(roles, "_ray", lambda: fake)
  monkeypatch.delenv("RAY_ADDRESS", raising=False)


HIDDEN = """
import runpy, sys
sys.modules["ray"] = None
sys.argv = ["main", *sys.argv[1:]]
try:
  runpy.run_module("jaxrl_post.main", run_name="__main__", alter_sys=True)
except SystemExit as end:
  from jax._src import xla_bridge
  print("devices touched:", bool(xla_bridge._backends))
  raise
"""


def test_without_ray_there_is_one_line_before_any_device_is_touched(tmp_path):
  chosen = runs.settings("placement.mode=roles")
  args = [runs.experiment(), f"--workdir={tmp_path / 'run'}", *chosen]
  end = subprocess.run(
    [sys.executable, "-c", HIDDEN, *args],
    cwd=runs.ROOT / "src",
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
  )
  assert end.returncode == 2, end.stderr
  (line,) = end.stderr.splitlines()
  assert line.startswith("error: placement.mode=roles: expected the package")
  assert end.stdout == "devices touched: False\n"
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "address", ["127.0.0.1:1", "ray://nowhere", "nowhere", "127.0.0.1:99999"]
)
def test_a_cluster_that_does_not_answer_is_refused_in_seconds(
  address, untouched, monkeypatch
):
  monkeypatch.setenv("RAY_ADDRESS", address)
  begun = time.monotonic()
  with pytest.raises(types.InputError, match="RAY_ADDRESS: expected") as error:
    cluster()
  assert repr(address) in str(error.value)
  assert "\n" not in str(error.value)
  assert time.monotonic() - begun < 10


@pytest.mark.parametrize("side", ["training", "generation"])
def test_cores_that_are_not_there_are_refused_before_ray_starts(
  side, untouched
):
  with pytest.raises(types.InputError, match=r"expected CPU cores .*\[4096\]"):
    cluster(f"placement.roles.{side}_cores=4096")


@pytest.mark.parametrize(
  "launch", [hosts.Launch(), hosts.Launch("here:1234", 2, 0)]
)
def test_processes_of_a_launcher_are_refused(launch, untouched):
  with pytest.raises(types.InputError, match="got one of several"):
    cluster(launch=launch)


def test_a_process_that_another_has_started_only_takes_its_cores(
  untouched, monkeypatch
):
  pinned = []
  monkeypatch.setattr(replica, "pin", pinned.append)
  cfg = runs.configured(
    "placement.mode=roles",
    "placement.roles.training_processes=2",
    "placement.roles.training_cores=0,1,2,3",
  )
  launch = hosts.Launch("here:1234", 2, 1)
  with roles.cluster(cfg.placement, launch, []) as found:
    assert found is launch
  assert pinned == [(2, 3)]


def test_replicas_on_the_devices_of_the_trainer_are_refused(monkeypatch):
  monkeypatch.delenv("RAY_ADDRESS", raising=False)
  cfg = runs.configured(
    "placement.mode=roles", "placement.roles.replica_resource=GPU"
  )
  with (
    pytest.raises(types.InputError, match="expected RAY_ADDRESS .* got GPU in"),
    roles.cluster(cfg.placement, None, []),
  ):
    raise AssertionError("no cluster was to start")


def test_a_replica_asks_for_what_ray_calls_its_devices():
  asked = [
    roles._resources(settings.Roles(replica_resource=name, replica_devices=4))
    for name in ("", "GPU", "TPU")
  ]
  kinds = [
    {k: v for k, v in a.items() if k in ("num_gpus", "resources")}
    for a in asked
  ]
  assert kinds == [{}, {"num_gpus": 4}, {"resources": {"TPU": 4}}]


# ---------------------------------------------- others that train with this


def watched(monkeypatch, error: Exception | None, *, over: bool) -> list[int]:
  """Watches one other that has ended; returns the codes of this one's exit."""
  codes: list[int] = []
  monkeypatch.setattr(roles.os, "_exit", codes.append)
  monkeypatch.setattr(roles, "_WAIT_S", 0.01)
  monkeypatch.setattr(roles, "_GRACE_S", 0.01)
  ended = threading.Event()
  if over:
    ended.set()
  ray = builtin_types.SimpleNamespace(
    wait=lambda refs, timeout: (refs, []), get=Ray().get, exceptions=ERRORS
  )
  roles._watch(ray, [_done(None, error)], ended)
  return codes


def test_one_that_ends_before_the_run_does_ends_the_run(monkeypatch, capsys):
  error = TaskError("a traceback\nRunError: exit code 2")
  assert watched(monkeypatch, error, over=False) == [1]
  said = capsys.readouterr().err
  assert said == "error: a training process ended: RunError: exit code 2\n"


def test_one_that_ends_with_the_run_is_no_fault(monkeypatch, capsys):
  assert watched(monkeypatch, None, over=True) == []
  assert capsys.readouterr().err == ""
