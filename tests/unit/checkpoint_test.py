import contextlib
import json
import logging
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_post import types
from jaxrl_post.runtime import checkpoint

AUTO = jax.sharding.AxisType.Auto


def sharding(devices: int, *axes: str | None) -> jax.sharding.NamedSharding:
  mesh = jax.make_mesh(
    (devices,), ("fsdp",), (AUTO,), devices=jax.devices()[:devices]
  )
  return jax.sharding.NamedSharding(mesh, jax.P(*axes))


def make_state(step: int = 3, size: int = 16, devices: int = 8):
  rows, whole = sharding(devices, "fsdp"), sharding(devices)
  rng = np.random.default_rng(step)
  params = {
    "half": jnp.asarray(rng.normal(size=(size, 4)), jnp.bfloat16),
    "full": jnp.asarray(rng.normal(size=(size,)), jnp.float32),
    "bits": jnp.asarray(rng.integers(0, 2**32, size, np.uint32)),
    "odd": jnp.array([np.nan, -0.0, np.inf] + [1e-45] * (size - 3), np.float32),
  }
  params = jax.device_put(params, rows)
  opt_state = jax.device_put(optax.adamw(1e-3).init(params), whole)
  return types.TrainState(
    step=jax.device_put(jnp.int32(step), whole),
    version=jax.device_put(jnp.int32(step - 1), whole),
    params=params,
    opt_state=opt_state,
    key=jax.device_put(jax.random.key(step), whole),
  )


def abstract(state, shardings=None):
  if shardings is None:
    shardings = jax.tree.map(lambda x: x.sharding, state)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    state,
    shardings,
  )


def bits(tree) -> list[bytes]:
  def raw(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    return str(x.dtype).encode() + np.asarray(x).tobytes()

  return [raw(x) for x in jax.tree.leaves(tree)]


def save(folder, *steps: int, keep: int = 10) -> None:
  store = checkpoint.Store(folder, checkpoint.Checkpoint(keep=keep))
  for step in steps:
    store.save(step, make_state(step), {"step": step})
  store.close()


def names(folder: pathlib.Path) -> set[str]:
  return {path.name for path in folder.iterdir()}


def restore(folder):
  store = checkpoint.Store(folder, checkpoint.Checkpoint())
  found = store.restore(abstract(make_state()))
  store.close()
  return found


def test_every_bit_of_every_dtype_comes_back(tmp_path):
  save(tmp_path, 3)
  state, meta, step = restore(tmp_path)
  assert bits(state) == bits(make_state(3))
  assert jax.tree.structure(state) == jax.tree.structure(make_state(3))
  assert (meta, step) == ({"step": 3}, 3)
  old, new = make_state(3).key, state.key
  assert jax.random.bits(old) == jax.random.bits(new)


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
  assert restore(tmp_path / "new") is None


def test_meta_is_read_before_save_returns_and_comes_back_equal(tmp_path):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  meta = {"ids": [1, 2, 3], "text": "ü\n", "none": None, "x": 0.1, "on": True}
  expected = json.loads(json.dumps(meta))
  store.save(1, make_state(1), meta)
  meta["ids"].append(4)
  store.close()
  assert restore(tmp_path)[1] == expected


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_restores_onto_fewer_devices_and_another_sharding(tmp_path, devices):
  save(tmp_path, 3)
  target = sharding(devices, "fsdp")
  whole = sharding(devices)
  want = make_state(3)
  shardings = jax.tree.map(lambda x: target if x.ndim else whole, want)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  state, _, _ = store.restore(abstract(want, shardings))
  store.close()
  assert bits(state) == bits(want)
  assert state.params["half"].sharding == target
  assert state.key.sharding.device_set == whole.device_set


def test_restores_onto_more_devices(tmp_path):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  store.save(3, make_state(3, devices=1), {})
  store.close()
  assert bits(restore(tmp_path)[0]) == bits(make_state(3))


@jax.jit
def made(step):
  numbers = step + jnp.arange(1 << 20, dtype=jnp.int32)
  return {"a": numbers, "b": numbers.astype(jnp.bfloat16)}


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
  # On CPU the saver may hold the very buffer, which XLA then copies instead of
  # donating; explicit deletion and reuse of the memory is the harder case.
  wipe = jax.jit(lambda x: x * jnp.zeros((), x.dtype), donate_argnums=0)
  placed = {"a": sharding(1), "b": sharding(8, "fsdp")}
  jax.tree.map(wipe, jax.device_put(made(0), placed))  # compiled beforehand
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=9))
  for step in range(1, 6):
    state = jax.device_put(made(step), placed)
    asked = abstract(state)
    store.save(step, state, {})
    wiped = jax.tree.map(wipe, state)
    jax.tree.map(lambda x: x.is_deleted() or x.delete(), state)
    assert not wiped["a"].any()
    del state
    jax.block_until_ready([made(7) for _ in range(4)])
  store.close()
  for step in range(5, 0, -1):
    store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
    state, _, found = store.restore(asked)
    assert found == step and bits(state) == bits(made(step))
    shutil.rmtree(tmp_path / str(step))


def test_the_newest_keep_stay(tmp_path):
  save(tmp_path, 2, 4, 6, 9, keep=2)
  assert names(tmp_path) == {"6", "9"}


def test_c98_the_older_goes_only_after_the_newer_is_complete(
  tmp_path, monkeypatch
):
  seen = []
  write = checkpoint.folder_lib.write

  def spy(path, text):
    seen.append((path.parent.name, path.name, names(tmp_path)))
    write(path, text)

  monkeypatch.setattr(checkpoint.folder_lib, "write", spy)
  save(tmp_path, 2, 4, keep=1)
  # The manifest completes a checkpoint; up to then both are there.
  assert seen[-1] == ("4", "manifest.json", {"2", "4"})
  assert names(tmp_path) == {"4"}


def test_c98_a_number_for_a_name_makes_no_checkpoint(tmp_path, caplog):
  save(tmp_path, 2)
  (tmp_path / "7").mkdir()
  with caplog.at_level(logging.WARNING):
    state, _, step = restore(tmp_path)
  assert step == 2 and bits(state) == bits(make_state(2))
  assert len(caplog.records) == 1 and "/7 " in caplog.text


def damage(path: pathlib.Path, how: str) -> None:
  data = path.read_bytes()
  middle = len(data) // 2
  if how == "missing":
    path.unlink()
  elif how == "truncated":
    path.write_bytes(data[:middle])
  else:
    other = bytes([data[middle] ^ 255]) if data else b"x"
    path.write_bytes(data[:middle] + other + data[middle + 1 :])


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_c98_any_damage_falls_back_with_one_warning(tmp_path, caplog, how):
  save(tmp_path / "good", 2, 4)
  whole = tmp_path / "good" / "4"
  files = [p.relative_to(whole) for p in whole.rglob("*") if p.is_file()]
  assert len(files) > 8
  for file in files if how == "flipped" else files[::3]:
    if how == "truncated" and not (whole / file).stat().st_size:
      continue
    folder = tmp_path / "torn"
    shutil.copytree(tmp_path / "good", folder)
    damage(folder / "4" / file, how)
    caplog.clear()
    state, meta, step = restore(folder)
    assert step == 2 and meta == {"step": 2}, file
    assert len(caplog.records) == 1 and f"{folder}/4 " in caplog.text
    shutil.rmtree(folder)
  assert bits(state) == bits(make_state(2))


def test_damage_in_all_of_them_is_no_reason_to_start_again(tmp_path):
  save(tmp_path, 2, 4)
  for step in ("2", "4"):
    damage(tmp_path / step / "meta.json", "missing")
  with pytest.raises(types.RunError, match=r"got damage in all of them \(4, 2"):
    restore(tmp_path)


def test_a_run_killed_in_its_first_save_starts_again(tmp_path, caplog):
  save(tmp_path, 2)
  damage(tmp_path / "2" / "manifest.json", "missing")
  assert restore(tmp_path) is None
  assert "/2 " in caplog.text


def test_a_torn_step_is_written_again_and_then_counts(tmp_path):
  save(tmp_path, 2, 4)
  damage(tmp_path / "4" / "meta.json", "flipped")
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=1))
  assert store.restore(abstract(make_state()))[2] == 2
  store.save(4, make_state(4), {"again": True})
  store.close()
  assert restore(tmp_path)[1:] == ({"again": True}, 4)
  assert names(tmp_path) == {"4"}


def test_damaged_later_steps_do_not_push_out_good_ones(tmp_path):
  save(tmp_path, 2, 8)
  damage(tmp_path / "8" / "meta.json", "missing")
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=1))
  assert store.restore(abstract(make_state()))[2] == 2
  store.save(3, make_state(3), {})
  store.close()
  assert restore(tmp_path)[2] == 3


def test_a_step_that_is_complete_is_left_as_it_is(tmp_path):
  save(tmp_path, 2)
  before = (tmp_path / "2" / "manifest.json").stat().st_mtime_ns
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  store.restore(abstract(make_state()))
  store.save(2, make_state(2), {"other": 1})
  store.close()
  assert (tmp_path / "2" / "manifest.json").stat().st_mtime_ns == before


def change(state, **params):
  return flax.struct.dataclasses.replace(
    state, params={**state.params, **params}
  )


def like(shape, dtype):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(8))


@pytest.mark.parametrize(
  ("wanted", "message"),
  [
    (
      {"half": like((16, 4), jnp.float32)},
      r"\['half'\]: expected float32\[16, 4\], got bfloat16\[16, 4\]",
    ),
    (
      {"full": like((8,), jnp.float32)},
      r"\['full'\]: expected float32\[8\], got float32\[16\]",
    ),
    (
      {"new": like((2,), jnp.float32)},
      r"\['new'\]: expected float32\[2\], got no such leaf",
    ),
  ],
)
def test_another_dtype_shape_or_tree_is_refused(tmp_path, wanted, message):
  save(tmp_path, 2, 4)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  with pytest.raises(types.InputError, match=message):
    store.restore(change(abstract(make_state()), **wanted))
  store.close()


def test_a_leaf_too_many_in_the_checkpoint_is_refused(tmp_path):
  save(tmp_path, 2)
  asked = abstract(make_state())
  del asked.params["odd"]
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  with pytest.raises(types.InputError, match=r"expected no such leaf, got flo"):
    store.restore(asked)
  store.close()


@pytest.fixture
def small_files():
  """Makes writes beyond 256 KiB a file fail, as on a full disk."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
  yield
  resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("where", ["save", "close"])
def test_c98_a_save_that_failed_in_the_background_raises(
  tmp_path, small_files, where
):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=1))
  small = {"x": jnp.arange(8)}
  noise = jax.random.bits(jax.random.key(0), (1 << 20,))
  store.save(2, small, {"step": 2})
  store.save(4, {"x": noise}, {"step": 4})  # returns; fails behind our back
  with pytest.raises((OSError, ValueError), match="(?i)too large|EFBIG"):
    store.save(6, small, {}) if where == "save" else store.close()
  store.close()
  state, meta, step = checkpoint.Store(
    tmp_path, checkpoint.Checkpoint()
  ).restore(abstract(small))
  assert step == 2 and meta == {"step": 2} and bits(state) == bits(small)


def test_close_does_not_wait_beyond_its_deadline(tmp_path, monkeypatch):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  reader, writer = os.pipe()
  monkeypatch.setattr(
    store, "_finish", lambda *_: os.read(reader, 1), raising=True
  )
  store.save(1, {"x": jnp.arange(3)}, {})
  with pytest.raises(types.RunError, match="step 1 to end within 0.1 s"):
    store.close(deadline=0.1)
  os.write(writer, b"x")


# Saves steps 1, 2, 3, ..., of which every number tells the step, until killed.
CHILD = """
import sys
import jax.numpy as jnp
from jaxrl_post.runtime import checkpoint
store = checkpoint.Store(sys.argv[1], checkpoint.Checkpoint(every=1, keep=1))
step = 0
while True:
  step += 1
  state = {n: jnp.full((1 << 19,), step, jnp.uint32) for n in "abcdefgh"}
  store.save(step, state, {"step": step})
  print(step, flush=True)
"""


def test_c98_killed_at_any_instant_of_a_save_the_run_goes_on(tmp_path):
  runs = {
    delay: subprocess.Popen(
      [sys.executable, "-c", CHILD, str(tmp_path / str(delay))],
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    for delay in (0.0, 0.02, 0.05)
  }
  for delay, run in runs.items():
    for _ in range(3):
      run.stdout.readline()
    with contextlib.suppress(subprocess.TimeoutExpired):
      run.wait(delay)
    run.send_signal(signal.SIGKILL)
  for delay, run in runs.items():
    # Not communicate: it would not see the lines that readline read ahead.
    begun = max([3, *map(int, run.stdout.read().split())])
    run.wait(30)
    store = checkpoint.Store(tmp_path / str(delay), checkpoint.Checkpoint())
    asked = {n: like((1 << 19,), jnp.uint32) for n in "abcdefgh"}
    state, meta, step = store.restore(asked)
    # The save before was complete when this one was begun.
    assert begun - 1 <= step <= begun + 1 and meta == {"step": step}
    assert all(bool((x == step).all()) for x in state.values())


def test_c100_the_last_step_is_due_though_no_multiple():
  cfg = checkpoint.Checkpoint(every=4)
  assert [s for s in range(1, 11) if checkpoint.due(cfg, s, 10)] == [4, 8, 10]
  last = checkpoint.Checkpoint(every=0)
  assert [s for s in range(1, 11) if checkpoint.due(last, s, 10)] == [10]


@pytest.mark.parametrize("wrong", [{"every": -1}, {"keep": 0}])
def test_settings_without_a_meaning_are_refused(wrong):
  (name,) = wrong
  with pytest.raises(types.InputError, match=f"checkpoint.{name}: expected"):
    checkpoint.Checkpoint(**wrong)
