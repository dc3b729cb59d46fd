import json
import shutil

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from jaxrl_post import types
from jaxrl_post.runtime import checkpoint
from tests.unit import checkpoints


def test_every_bit_of_every_dtype_comes_back(tmp_path):
  checkpoints.save(tmp_path, 3)
  found = checkpoints.restore(tmp_path)
  assert checkpoints.bits(found.state) == checkpoints.bits(
    checkpoints.make_state(3)
  )
  assert jax.tree.structure(found.state) == jax.tree.structure(
    checkpoints.make_state(3)
  )
  assert (found.meta, found.step, found.files) == ({"step": 3}, 3, {})
  old, new = checkpoints.make_state(3).key, found.state.key
  assert jax.random.bits(old) == jax.random.bits(new)


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
  assert checkpoints.restore(tmp_path / "new") is None


def test_meta_is_read_before_save_returns_and_comes_back_equal(tmp_path):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  meta = {"ids": [1, 2, 3], "text": "ü\n", "none": None, "x": 0.1, "on": True}
  expected = json.loads(json.dumps(meta))
  store.save(1, checkpoints.make_state(1), meta)
  meta["ids"].append(4)
  store.close()
  assert checkpoints.restore(tmp_path).meta == expected


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_restores_onto_fewer_devices_and_another_sharding(tmp_path, devices):
  checkpoints.save(tmp_path, 3)
  target = checkpoints.sharding(devices, "fsdp")
  whole = checkpoints.sharding(devices)
  want = checkpoints.make_state(3)
  shardings = jax.tree.map(lambda x: target if x.ndim else whole, want)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  state = store.restore(checkpoints.abstract(want, shardings)).state
  store.close()
  assert checkpoints.bits(state) == checkpoints.bits(want)
  assert state.params["half"].sharding == target
  assert state.key.sharding.device_set == whole.device_set


def test_restores_onto_more_devices(tmp_path):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  store.save(3, checkpoints.make_state(3, devices=1), {})
  store.close()
  assert checkpoints.bits(
    checkpoints.restore(tmp_path).state
  ) == checkpoints.bits(checkpoints.make_state(3))


@jax.jit
def made(step):
  numbers = step + jnp.arange(1 << 20, dtype=jnp.int32)
  return {"a": numbers, "b": numbers.astype(jnp.bfloat16)}


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
  # On CPU the saver may hold the very buffer, which XLA then copies instead of
  # donating; explicit deletion and reuse of the memory is the harder case.
  wipe = jax.jit(lambda x: x * jnp.zeros((), x.dtype), donate_argnums=0)
  placed = {"a": checkpoints.sharding(1), "b": checkpoints.sharding(8, "fsdp")}
  jax.tree.map(wipe, jax.device_put(made(0), placed))  # compiled beforehand
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=9))
  for step in range(1, 6):
    state = jax.device_put(made(step), placed)
    asked = checkpoints.abstract(state)
    store.save(step, state, {})
    wiped = jax.tree.map(wipe, state)
    jax.tree.map(lambda x: x.is_deleted() or x.delete(), state)
    assert not wiped["a"].any()
    del state
    jax.block_until_ready([made(7) for _ in range(4)])
  store.close()
  for step in range(5, 0, -1):
    store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
    found = store.restore(asked)
    assert found.step == step and checkpoints.bits(
      found.state
    ) == checkpoints.bits(made(step))
    shutil.rmtree(tmp_path / str(step))


def test_the_newest_keep_stay(tmp_path):
  checkpoints.save(tmp_path, 2, 4, 6, 9, keep=2)
  assert checkpoints.names(tmp_path) == {"6", "9"}


def test_a_step_that_is_complete_is_left_as_it_is(tmp_path):
  checkpoints.save(tmp_path, 2)
  before = (tmp_path / "2" / "manifest.json").stat().st_mtime_ns
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  store.restore(checkpoints.abstract(checkpoints.make_state()))
  store.save(2, checkpoints.make_state(2), {"other": 1})
  store.close()
  assert (tmp_path / "2" / "manifest.json").stat().st_mtime_ns == before


def change(state, **params):
  return flax.struct.dataclasses.replace(
    state, params={**state.params, **params}
  )


@pytest.mark.parametrize(
  ("wanted", "message"),
  [
    (
      {"half": checkpoints.like((16, 4), jnp.float32)},
      r"\['half'\]: expected float32\[16, 4\], got bfloat16\[16, 4\]",
    ),
    (
      {"full": checkpoints.like((8,), jnp.float32)},
      r"\['full'\]: expected float32\[8\], got float32\[16\]",
    ),
    (
      {"new": checkpoints.like((2,), jnp.float32)},
      r"\['new'\]: expected float32\[2\], got no such leaf",
    ),
  ],
)
def test_another_dtype_shape_or_tree_is_refused(tmp_path, wanted, message):
  checkpoints.save(tmp_path, 2, 4)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  with pytest.raises(types.InputError, match=message):
    store.restore(
      change(checkpoints.abstract(checkpoints.make_state()), **wanted)
    )
  store.close()


def test_a_leaf_too_many_in_the_checkpoint_is_refused(tmp_path):
  checkpoints.save(tmp_path, 2)
  asked = checkpoints.abstract(checkpoints.make_state())
  del asked.params["odd"]
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  with pytest.raises(types.InputError, match=r"expected no such leaf, got flo"):
    store.restore(asked)
  store.close()


# ------------------------------------------------------------ what is kept


def scored(folder, cfg, values, **more) -> set[str]:
  """Saves a step for each value; a new store each time, as after a restart."""
  for step, value in values.items():
    store = checkpoint.Store(folder, cfg)
    meta = {"metrics": {} if value is None else {"eval/reward": value}}
    store.save(step, {"x": jnp.arange(2)}, meta, **more)
    store.close()
  return checkpoints.names(folder)


def test_multiples_of_keep_every_stay(tmp_path):
  cfg = checkpoint.Checkpoint(every=1, keep=1, keep_every=3)
  assert scored(tmp_path, cfg, dict.fromkeys(range(1, 9))) == {"3", "6", "8"}


def test_the_best_stay_over_restarts_and_the_later_of_two_equals(tmp_path):
  cfg = checkpoint.Checkpoint(keep=1, keep_best=2, best_by="eval/reward")
  values = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.5, 5: None, 6: 0.2}
  assert scored(tmp_path, cfg, values) == {"2", "4", "6"}
  assert scored(tmp_path, cfg, {7: 0.8, 8: 0.0}) == {"2", "7", "8"}


def test_nan_infinity_and_none_are_never_the_best(tmp_path):
  cfg = checkpoint.Checkpoint(keep=1, keep_best=1, best_by="eval/reward")
  odd = {1: -2.0, 2: float("nan"), 3: float("inf"), 4: "high", 5: None}
  assert scored(tmp_path, cfg, odd) == {"1", "5"}


@pytest.mark.parametrize(
  ("wrong", "name"),
  [
    ({"keep_every": -1}, "keep_every"),
    ({"every": 4, "keep_every": 6}, "keep_every"),
    ({"every": 0, "keep_every": 6}, "keep_every"),
    ({"keep_best": -1, "best_by": "eval/reward"}, "keep_best"),
    ({"keep_best": 1}, "best_by"),
    ({"keep_best": 1, "best_by": "reward"}, "best_by"),
    ({"keep_best": 1, "best_by": "reward/"}, "best_by"),
    ({"keep_best": 1, "best_by": "evals/reward"}, "best_by"),
    ({"best_by": "eval/reward"}, "best_by"),
  ],
)
def test_what_can_keep_nothing_is_refused(wrong, name):
  with pytest.raises(types.InputError, match=f"checkpoint.{name}: ") as error:
    checkpoint.Checkpoint(**wrong)
  assert "\n" not in str(error.value)


# ------------------------------------------------------------- files beside it


def test_files_come_back_as_they_were_at_the_call(tmp_path):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  files = {"rows.bin": b"\x00\xff\n", "empty": b""}
  store.save(1, checkpoints.make_state(1), {}, files)
  files |= {"rows.bin": b"late", "late": b"x"}
  store.close()
  (tmp_path / "1" / "stray").write_text("of nobody")
  assert checkpoints.restore(tmp_path).files == {
    "rows.bin": b"\x00\xff\n",
    "empty": b"",
  }


@pytest.mark.parametrize(
  "name",
  ["", ".", "..", "a/b", "/a", ".a", "state", "meta.json", "manifest.json"],
)
def test_a_name_that_is_no_plain_one_is_refused(tmp_path, name):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  with pytest.raises(ValueError, match="expected the name of a file"):
    store.save(1, {"x": jnp.arange(2)}, {}, {name: b""})
  assert checkpoints.names(tmp_path) == set()


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
