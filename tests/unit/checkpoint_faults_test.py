import contextlib
import errno
import json
import logging
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post import types
from jaxrl_post.runtime import checkpoint
from tests.unit import checkpoints


def test_c98_the_older_goes_only_after_the_newer_is_complete(
  tmp_path, monkeypatch
):
  seen = []
  write = checkpoint.folder_lib.write

  def spy(path, text):
    seen.append((path.parent.name, path.name, checkpoints.names(tmp_path)))
    write(path, text)

  monkeypatch.setattr(checkpoint.folder_lib, "write", spy)
  checkpoints.save(tmp_path, 2, 4, keep=1)
  # The manifest completes a checkpoint; up to then both are there.
  assert seen[-1] == ("4", "manifest.json", {"2", "4"})
  assert checkpoints.names(tmp_path) == {"4"}


def test_c98_a_number_for_a_name_makes_no_checkpoint(tmp_path, caplog):
  checkpoints.save(tmp_path, 2)
  (tmp_path / "7").mkdir()
  with caplog.at_level(logging.WARNING):
    found = checkpoints.restore(tmp_path)
  assert found.step == 2 and checkpoints.bits(found.state) == checkpoints.bits(
    checkpoints.make_state(2)
  )
  assert len(caplog.records) == 1 and "/7 " in caplog.text


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_c98_any_damage_falls_back_with_one_warning(tmp_path, caplog, how):
  checkpoints.save(tmp_path / "good", 2, 4)
  whole = tmp_path / "good" / "4"
  files = [p.relative_to(whole) for p in whole.rglob("*") if p.is_file()]
  assert len(files) > 8
  for file in files if how == "flipped" else files[::3]:
    if how == "truncated" and not (whole / file).stat().st_size:
      continue
    folder = tmp_path / "torn"
    shutil.copytree(tmp_path / "good", folder)
    checkpoints.damage(folder / "4" / file, how)
    caplog.clear()
    found = checkpoints.restore(folder)
    assert found.step == 2 and found.meta == {"step": 2}, file
    assert len(caplog.records) == 1 and f"{folder}/4 " in caplog.text
    shutil.rmtree(folder)
  assert checkpoints.bits(found.state) == checkpoints.bits(
    checkpoints.make_state(2)
  )


def test_damage_in_all_of_them_is_no_reason_to_start_again(tmp_path):
  checkpoints.save(tmp_path, 2, 4)
  for step in ("2", "4"):
    checkpoints.damage(tmp_path / step / "meta.json", "missing")
  with pytest.raises(types.RunError, match=r"got damage in all of them \(4, 2"):
    checkpoints.restore(tmp_path)


def test_a_run_killed_in_its_first_save_starts_again(tmp_path, caplog):
  checkpoints.save(tmp_path, 2)
  checkpoints.damage(tmp_path / "2" / "manifest.json", "missing")
  assert checkpoints.restore(tmp_path) is None
  assert "/2 " in caplog.text


def test_a_torn_step_is_written_again_and_then_counts(tmp_path):
  checkpoints.save(tmp_path, 2, 4)
  checkpoints.damage(tmp_path / "4" / "meta.json", "flipped")
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=1))
  assert store.restore(checkpoints.abstract(checkpoints.make_state())).step == 2
  store.save(4, checkpoints.make_state(4), {"again": True})
  store.close()
  found = checkpoints.restore(tmp_path)
  assert (found.meta, found.step) == ({"again": True}, 4)
  assert checkpoints.names(tmp_path) == {"4"}


def test_damaged_later_steps_do_not_push_out_good_ones(tmp_path):
  checkpoints.save(tmp_path, 2, 8)
  checkpoints.damage(tmp_path / "8" / "meta.json", "missing")
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=1))
  assert store.restore(checkpoints.abstract(checkpoints.make_state())).step == 2
  store.save(3, checkpoints.make_state(3), {})
  store.close()
  assert checkpoints.restore(tmp_path).step == 3


def test_a_checkpoint_that_is_found_damaged_takes_no_good_ones_place(tmp_path):
  checkpoints.save(tmp_path, 2, 4)
  checkpoints.damage(tmp_path / "4" / "meta.json", "flipped")
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=2))
  store.restore(checkpoints.abstract(checkpoints.make_state()))
  store.save(5, checkpoints.make_state(5), {})
  store.close()
  assert checkpoints.names(tmp_path) == {"2", "5"}


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_c98_a_damaged_file_beside_it_falls_back(tmp_path, caplog, how):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  for step in (1, 2):
    store.save(
      step, checkpoints.make_state(step), {}, {"rows.bin": b"12345678"}
    )
  store.close()
  checkpoints.damage(tmp_path / "2" / "rows.bin", how)
  found = checkpoints.restore(tmp_path)
  assert (found.step, found.files) == (1, {"rows.bin": b"12345678"})
  assert len(caplog.records) == 1 and "rows.bin" in caplog.text


@pytest.mark.parametrize(
  "text",
  ["", "{}", "[]", "null", "7", '{"leaves": {}, "files": 3}', "\x00" * 99],
)
def test_c98_a_manifest_of_garbage_falls_back(tmp_path, caplog, text):
  checkpoints.save(tmp_path, 2, 4)
  (tmp_path / "4" / "manifest.json").write_text(text)
  assert checkpoints.restore(tmp_path).step == 2
  assert len(caplog.records) == 1 and "manifest.json is damaged" in caplog.text


@pytest.mark.parametrize("part", ["files", "leaves", "checksum"])
def test_c98_a_manifest_that_lacks_an_entry_falls_back(tmp_path, caplog, part):
  checkpoints.save(tmp_path, 2, 4)
  path = tmp_path / "4" / "manifest.json"
  manifest = json.loads(path.read_text())
  if part == "checksum":
    manifest[part] += 1
  else:
    manifest[part].popitem()
  path.write_text(json.dumps(manifest))
  assert checkpoints.restore(tmp_path).step == 2
  assert "manifest.json is damaged" in caplog.text


def test_c98_stray_files_and_folders_are_left_alone(tmp_path):
  checkpoints.save(tmp_path, 2)
  for name in ("notes", "9.orbax-checkpoint-tmp", "-3", "4x"):
    (tmp_path / name).mkdir()
  (tmp_path / "11").write_text("a file")
  assert checkpoints.restore(tmp_path).step == 2
  checkpoints.save(tmp_path, 3, keep=1)
  strays = {"notes", "9.orbax-checkpoint-tmp", "-3", "4x", "11"}
  assert checkpoints.names(tmp_path) == {"3", *strays}


@pytest.fixture
def small_files():
  """Makes writes beyond 256 KiB a file fail, as on a full disk."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
  yield
  resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def one_line(error: BaseException, folder: pathlib.Path, step: int) -> str:
  text = str(error)
  assert "\n" not in text
  assert text.startswith(
    f"checkpoint {folder / str(step)}: expected to save it"
  )
  return text


@pytest.mark.parametrize("where", ["save", "check", "close"])
def test_c98_a_save_that_failed_in_the_background_raises(
  tmp_path, small_files, where
):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=1))
  small = {"x": jnp.arange(8)}
  noise = jax.random.bits(jax.random.key(0), (1 << 20,))
  store.save(2, small, {"step": 2})
  store.save(4, {"x": noise}, {"step": 4})  # returns; fails behind our back
  store._thread.join()
  calls = {
    "save": lambda: store.save(6, small, {}),
    "check": store.check,
    "close": store.close,
  }
  with pytest.raises(types.RunError, match="(?i)too large|EFBIG") as error:
    calls[where]()
  text = one_line(error.value, tmp_path, 4)
  assert "the newest whole one is of step 2" in text
  # Nothing else is to be told, so that one line is all that is printed.
  assert error.value.__cause__ is error.value.__context__ is None
  store.close()
  # The torn one would only fill the disk.
  assert checkpoints.names(tmp_path) == {"2"}
  found = checkpoint.Store(tmp_path, checkpoint.Checkpoint()).restore(
    checkpoints.abstract(small)
  )
  assert found.meta == {"step": 2} and checkpoints.bits(
    found.state
  ) == checkpoints.bits(small)


@pytest.mark.parametrize("file", ["meta.json", "rows.bin", "manifest.json"])
def test_c98_no_space_left_keeps_the_one_before(tmp_path, monkeypatch, file):
  write = checkpoint.folder_lib.write

  def full(path, content):
    if path.parent.name == "4" and path.name == file:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    write(path, content)

  monkeypatch.setattr(checkpoint.folder_lib, "write", full)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint(keep=1))
  for step in (2, 4):
    store.save(step, {"x": jnp.arange(8)}, {}, {"rows.bin": b"1"})
  with pytest.raises(types.RunError, match="No space left on device") as error:
    store.close()
  one_line(error.value, tmp_path, 4)
  assert checkpoints.names(tmp_path) == {"2"}


def test_c98_a_folder_that_cannot_be_made_is_told_at_once(
  tmp_path, monkeypatch
):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())

  def refused(path):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

  monkeypatch.setattr(pathlib.Path, "mkdir", refused)
  with pytest.raises(types.RunError, match="Read-only file system") as error:
    store.save(1, {"x": jnp.arange(2)}, {})
  assert "there is none before it" in one_line(error.value, tmp_path, 1)


def test_what_is_no_fault_of_the_disk_keeps_its_traceback(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(checkpoint.manifests, "write", lambda: None)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  store.save(1, {"x": jnp.arange(2)}, {})
  with pytest.raises(types.RunError, match="TypeError") as error:
    store.close()
  assert isinstance(error.value.__cause__, TypeError)


def test_check_does_not_wait_for_a_save(tmp_path, monkeypatch):
  reader, writer = os.pipe()
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  monkeypatch.setattr(store, "_finish", lambda *_: os.read(reader, 1))
  store.check()
  store.save(1, {"x": jnp.arange(3)}, {})
  store.check()
  os.write(writer, b"x")
  store.close()


def test_a_save_that_keeps_training_waiting_is_told(
  tmp_path, monkeypatch, caplog
):
  reader, writer = os.pipe()
  monkeypatch.setattr(checkpoint, "_QUIET_S", 0.05)
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  monkeypatch.setattr(store, "_finish", lambda *_: os.read(reader, 1))
  store.save(1, {"x": jnp.arange(3)}, {})
  threading.Timer(0.3, os.write, (writer, b"x")).start()
  store.close()
  assert "training waits for its save" in caplog.text


def test_close_does_not_wait_beyond_its_deadline(tmp_path, monkeypatch):
  store = checkpoint.Store(tmp_path, checkpoint.Checkpoint())
  reader, writer = os.pipe()
  monkeypatch.setattr(
    store, "_finish", lambda *_: os.read(reader, 1), raising=True
  )
  store.save(1, {"x": jnp.arange(3)}, {})
  with pytest.raises(types.RunError, match="no end of it within 0.1 s") as got:
    store.close(deadline=0.1)
  one_line(got.value, tmp_path, 1)
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
    asked = {n: checkpoints.like((1 << 19,), jnp.uint32) for n in "abcdefgh"}
    found = store.restore(asked)
    step = found.step
    # The save before was complete when this one was begun.
    assert begun - 1 <= step <= begun + 1 and found.meta == {"step": step}
    assert all(bool((x == step).all()) for x in found.state.values())
