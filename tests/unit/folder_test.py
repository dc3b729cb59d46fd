import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxrl_post import types
from jaxrl_post.runtime import folder

CONFIG = {
  "num_steps": 10,
  "algo": {"clip_low": 0.2, "terms": (1, 2)},
  "log": {"every": 1, "where": None},
}


def enter(path, config, may_change=()):
  with folder.open_folder(path, config, may_change) as found:
    return found


def test_a_new_folder_gets_the_configuration_sorted_and_readable(tmp_path):
  path = enter(tmp_path / "a" / "b", CONFIG)
  text = (path / "config.json").read_text()
  assert path == tmp_path / "a" / "b"
  assert json.loads(text) == json.loads(json.dumps(CONFIG))
  assert text.index('"algo"') < text.index('"log"') < text.index('"num_steps"')
  assert text.startswith('{\n  "algo"') and text.endswith("}\n")


def test_the_same_configuration_opens_it_again(tmp_path):
  enter(tmp_path, CONFIG)
  before = (tmp_path / "config.json").stat().st_mtime_ns
  enter(tmp_path, CONFIG)
  assert (tmp_path / "config.json").stat().st_mtime_ns == before


def test_another_configuration_is_refused_by_name_and_both_values(tmp_path):
  enter(tmp_path, CONFIG)
  before = (tmp_path / "config.json").read_bytes()
  other = {**CONFIG, "algo": {"clip_low": 0.3, "terms": (1, 2), "new": "x"}}
  with pytest.raises(types.InputError) as refused:
    enter(tmp_path, other)
  text = str(refused.value)
  assert "algo.clip_low=0.2 there, 0.3 now" in text
  assert 'algo.new=(absent) there, "x" now' in text
  assert "num_steps" not in text and "\n" not in text
  assert (tmp_path / "config.json").read_bytes() == before


def test_only_the_first_differences_are_named(tmp_path):
  enter(tmp_path, {f"k{i}": 0 for i in range(6)})
  with pytest.raises(types.InputError, match="k2=0 there, 1 now and 3 more"):
    enter(tmp_path, {f"k{i}": 1 for i in range(6)})


def test_c100_what_may_change_is_written_anew(tmp_path):
  enter(tmp_path, CONFIG)
  longer = {**CONFIG, "num_steps": 12, "log": {"every": 5}}
  with pytest.raises(types.InputError, match="log.every"):
    enter(tmp_path, longer, {"num_steps", "lo", "log.where"})
  enter(tmp_path, longer, {"num_steps", "log"})
  assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 12


def test_a_configuration_that_is_no_json_is_refused(tmp_path):
  (tmp_path / "config.json").write_text("{\n  oops")
  with pytest.raises(types.InputError, match="got an error at line 2"):
    enter(tmp_path, CONFIG)


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_file_is_no_folder(tmp_path, below):
  (tmp_path / "file").write_text("")
  with pytest.raises(types.InputError, match="a folder that can be written"):
    enter(tmp_path / "file" / below, CONFIG)


def test_a_place_where_nothing_can_be_written_is_refused():
  with pytest.raises(types.InputError, match="a folder that can be written"):
    enter("/proc/1/run", CONFIG)


HOLD = """
import os, sys
from jaxrl_post.runtime import folder
with folder.open_folder(sys.argv[1], {"a": 1}):
  if os.fork() == 0:
    os.read(0, 1)  # a worker that outlives the run
    os._exit(0)
  print(os.getpid(), flush=True)
  os.read(int(sys.argv[2]), 1)
"""


def test_a_folder_in_use_is_refused_until_its_run_is_killed(tmp_path):
  reader, writer = os.pipe()
  run = subprocess.Popen(
    [sys.executable, "-c", HOLD, str(tmp_path), str(reader)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    pass_fds=(reader,),
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  )
  pid = int(run.stdout.readline())
  with pytest.raises(types.InputError, match=f"in use by process {pid}"):
    enter(tmp_path, {"a": 1})
  os.kill(pid, signal.SIGKILL)
  run.wait(10)
  assert enter(tmp_path, {"a": 1}) == tmp_path
  run.stdin.close()
  for end in (reader, writer):
    os.close(end)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
  path = pathlib.Path(tmp_path / "x")
  folder.write(path, "old")
  with pytest.raises(UnicodeEncodeError):
    folder.write(path, "new\ud800")
  assert path.read_text() == "old"
  assert list(tmp_path.iterdir()) == [path]
