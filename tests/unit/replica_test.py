"""Weights on their way to a replica, and the replica, in one process."""

import contextlib
import dataclasses
import os
import pathlib
import re
import threading
from concurrent import futures

import jax
import numpy as np
import pytest

from jaxrl_post import config, prepare, types
from jaxrl_post.data import pack
from jaxrl_post.models import decoder, spec, transformer
from jaxrl_post.placement import fingerprint, mesh, programs, replica
from jaxrl_post.sampling import engine, server
from tests.e2e import runs

CONFIG = runs.configured().model.config
RECIPE = replica.Recipe(
  decoder=decoder.Decoder(CONFIG),
  sampling=engine.Sampling(max_tokens=4, rows=8, block=4),
  axes=mesh.GenerationAxes(data=4, tensor=2),
  max_prompt=3,
  group_size=2,
  seed=0,
)
SAMPLING = types.SamplingParams(max_tokens=4)


@pytest.fixture(autouse=True, scope="module")
def _cached():
  with runs.compile_cache():
    yield


def host(version: int) -> types.Tree:
  shapes = spec.abstract(transformer.spec(CONFIG), np.dtype("float32"))
  draw = np.random.default_rng(version)
  return jax.tree.map(
    lambda x: draw.standard_normal(x.shape).astype(np.float32), shapes
  )


@pytest.fixture(name="parts", scope="module")
def _parts():
  """All devices on one axis, and how weights lie on them."""
  devices = mesh.over(np.asarray(jax.devices()), ("part",))
  shapes = spec.abstract(transformer.spec(CONFIG), np.dtype("float32"))
  return shapes, replica.outbox(shapes, devices)


@pytest.fixture(name="seal", scope="module")
def _seal(parts):
  return fingerprint.checker(fingerprint.by_name(parts[1]))


def parcel(parts, seal, step: int) -> replica.Parcel:
  params = jax.device_put(host(step), parts[1])
  sums = seal(fingerprint.by_name(params))
  return replica.pack(
    types.Policy(
      params=params, version=step, step=step, fingerprints=(sums, sums)
    )
  )


@pytest.fixture(name="it", scope="module")
def _it(parts, seal):
  """A replica that has the weights of step 0."""
  made = replica.Replica(RECIPE)
  made.load(parcel(parts, seal, 0))
  yield made
  made._server.close()


def weights(it: replica.Replica) -> tuple[int, types.Tree]:
  """Returns what the replica samples with."""
  policy = it._server._policy
  assert policy is not None
  return policy.step, jax.device_get(policy.params)


def same(got: types.Tree, want: types.Tree) -> None:
  jax.tree.map(np.testing.assert_array_equal, got, want)


# ------------------------------------------------------------------ the way


def test_a_leaf_is_split_along_the_first_dim_that_the_devices_divide(parts):
  shapes, shardings = parts
  for shape, sharding in zip(
    jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True
  ):
    even = [i for i, n in enumerate(shape.shape) if n % 8 == 0]
    want = jax.P(*[None] * even[0], "part") if even else jax.P()
    assert sharding.spec == want
  assert {s.spec for s in jax.tree.leaves(shardings)} > {jax.P(None, "part")}


def test_a_parcel_has_every_leaf_its_checksum_and_its_version(parts, seal):
  made = parcel(parts, seal, 7)
  assert (made.version, made.step) == (7, 7)
  flat, _ = jax.tree.flatten_with_path(host(7))
  want = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
  same(dict(made.leaves), want)
  assert made.sums.keys() == want.keys()
  assert min(made.sums.values()) >= 0
  other = parcel(parts, seal, 8)
  assert all(other.sums[name] != made.sums[name] for name in want)


def test_a_replica_takes_weights_that_are_newer_and_no_older_ones(
  parts, seal, it
):
  it.load(parcel(parts, seal, 10))
  step, params = weights(it)
  assert step == 10
  same(params, host(10))
  it.load(parcel(parts, seal, 9))
  assert weights(it)[0] == 10


def test_what_is_written_to_a_parcel_later_does_not_reach_the_weights(
  parts, seal, it
):
  made = parcel(parts, seal, 20)
  leaves = {name: x.copy() for name, x in made.leaves.items()}
  it.load(dataclasses.replace(made, leaves=leaves))
  for x in leaves.values():
    x[...] = np.nan
  same(weights(it)[1], host(20))


def test_a_parcel_that_is_not_as_it_was_packed_is_refused_by_leaf(
  parts, seal, it
):
  made = parcel(parts, seal, 30)
  before, _ = weights(it)
  name = next(iter(made.leaves))
  broken = made.leaves[name].copy()
  broken.flat[-1] = np.nextafter(broken.flat[-1], np.float32(9))
  leaves = {**made.leaves, name: broken}
  with pytest.raises(types.RunError, match="version 30") as error:
    it.load(dataclasses.replace(made, leaves=leaves))
  named = [n for n in made.leaves if n in str(error.value)]
  assert named == [name]
  assert weights(it)[0] == before


def test_a_parcel_of_another_model_is_refused_by_leaf(parts, seal, it):
  made = parcel(parts, seal, 31)
  name, *rest = made.leaves
  leaves = {key: made.leaves[key] for key in rest} | {"['new']": np.zeros(2)}
  with pytest.raises(types.RunError, match="others") as error:
    it.load(dataclasses.replace(made, leaves=leaves))
  assert name in str(error.value)
  assert "['new']" in str(error.value)


def test_an_order_waits_for_its_weights_and_is_answered_by_them(
  parts, seal, it
):
  request = types.Request(prompt=(1, 2), uids=(4, 5), sampling=SAMPLING)
  it.submit(server.Order(request=request, step=40))
  assert it.collect(0.2) == []
  it.load(parcel(parts, seal, 40))
  (made,) = it.collect(30.0)
  assert made.failure == ""
  assert made.step == 40
  assert {c.uid for c in made.completions} == {4, 5}
  assert {v for c in made.completions for v in c.versions} == {40}


def test_the_same_weights_give_the_same_tokens_in_another_replica(
  parts, seal, it
):
  other = replica.Replica(RECIPE)
  request = types.Request(prompt=(3,), uids=(8, 9), sampling=SAMPLING)
  made = []
  for one in (it, other):
    one.load(parcel(parts, seal, 50))
    one.submit(server.Order(request=request, step=50))
    made.append(one.collect(60.0)[0].completions)
  other._server.close()
  assert made[0] == made[1]


# ------------------------------------------------------ while training goes on


def on_one_device(cfg: config.Run) -> programs.Programs:
  return programs.build(
    cfg.placement,
    decoder=prepare.prepare(cfg).decoder,
    path=None,
    sampling=cfg.sampling,
    max_prompt=cfg.data.max_prompt,
    group_size=cfg.group_size,
    key=jax.random.key(0),
    devices=jax.devices()[:1],
  )


def batch_of(cfg: config.Run) -> types.Batch:
  """Makes a batch whose rewards differ."""
  empty = pack.pack((), pack.Layout(rows=cfg.rows, length=cfg.length))
  return dataclasses.replace(
    empty,
    tokens=np.ones_like(empty.tokens),
    segment_ids=np.ones_like(empty.segment_ids),
    sequence=np.tile(
      np.arange(cfg.rows, dtype=np.int32)[:, None], (1, cfg.length)
    ),
    loss_mask=np.ones_like(empty.loss_mask),
    rewards=np.arange(cfg.rows, dtype=np.float32),
    group_ids=np.arange(cfg.rows, dtype=np.int32) // cfg.group_size,
  )


def test_weights_that_are_packed_beside_an_update_are_those_before_it():
  """On one device what is published is the trainer's own memory."""
  cfg = runs.configured("placement.mode=roles")
  place = on_one_device(cfg)
  assert place.publisher.aliases
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  batch = trainer.put(batch_of(cfg))
  state = trainer.start(place.draw())
  with futures.ThreadPoolExecutor(1) as worker:
    for _ in range(3):
      before = jax.device_get(jax.tree.map(lambda x: x.copy(), state.params))
      made = worker.submit(replica.pack, place.publish(state))
      state, _ = trainer.update(state, trainer.score(state, batch))
      now = jax.device_get(state.params)
      flat, _ = jax.tree.flatten_with_path(before)
      want = {jax.tree_util.keystr(path): x for path, x in flat}
      same(dict(made.result().leaves), want)
      changed = jax.tree.map(lambda x, y: bool((x != y).any()), before, now)
      assert any(jax.tree.leaves(changed))


def test_packing_does_not_wait_for_what_the_trainer_does_next():
  cfg = runs.configured("placement.mode=roles")
  place = on_one_device(cfg)
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  policy = place.publish(trainer.start(place.draw()))

  @jax.jit
  def long(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 100, lambda _, x: 1e-3 * (x @ x), x)

  ones = jax.device_put(
    np.ones((1024, 1024), np.float32), place.meshes.training.devices.flat[0]
  )
  update = long.lower(ones).compile()(ones)
  replica.pack(policy)
  assert not update.is_ready()
  jax.block_until_ready(update)


def test_a_leaf_that_is_not_what_was_trained_is_not_packed(parts, seal):
  params = jax.device_put(host(3), parts[1])
  sums = seal(fingerprint.by_name(params))
  name = next(iter(sums))
  policy = types.Policy(
    params=params,
    version=3,
    step=3,
    fingerprints=({**sums, name: sums[name] + 1}, sums),
  )
  with pytest.raises(types.RunError, match=re.escape(name)):
    replica.pack(policy)


# ---------------------------------------------------------------------- cores


@pytest.fixture(name="granted")
def _granted():
  """Gives this process its cores back."""
  before = os.sched_getaffinity(0)
  yield before
  for task in pathlib.Path("/proc/self/task").iterdir():
    with contextlib.suppress(ProcessLookupError):  # It has just ended.
      os.sched_setaffinity(int(task.name), before)


def test_pinning_holds_for_every_thread_that_there_is(granted):
  core = max(granted)
  go, found = threading.Event(), []

  def look() -> None:
    go.wait(30)
    found.append(os.sched_getaffinity(0))

  old = threading.Thread(target=look)
  old.start()
  replica.pin((core,))
  go.set()
  old.join()
  found.append(os.sched_getaffinity(0))
  assert found == [{core}, {core}]


def test_no_cores_change_nothing(granted):
  replica.pin(())
  assert os.sched_getaffinity(0) == granted


def test_cores_that_are_not_there_are_refused_in_words(granted):
  with pytest.raises(types.InputError, match=r"expected CPU cores of .*4096"):
    replica.pin((min(granted), 4096))
  assert os.sched_getaffinity(0) == granted


def test_copies_that_differ_are_named_and_have_no_checksum():
  sums = {
    name: jax.numpy.asarray(found, "uint32")
    for name, found in (("['a']", [7, 7]), ("['b']", [7, 8]))
  }
  with pytest.raises(types.RunError, match=r"got others of \['b'\]"):
    replica._numbers(sums)
  assert replica._numbers({"['a']": sums["['a']"]}) == {"['a']": 7}
