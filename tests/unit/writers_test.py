import importlib.machinery
import json
import logging
import math
import pathlib
import socket
import sys
import threading
import types as python_types
import urllib.request

import pytest

from jaxrl_post import types
from jaxrl_post.runtime import writers

LINE = {"reward/mean": 0.5, "sync/copy_s": 0.25, "loss/value": math.nan}


def opened(folder: pathlib.Path, **options) -> writers.Writers:
  return writers.Writers(writers.Watch(**options), folder, {"seed": 3})


@pytest.fixture
def wandb(monkeypatch):
  """A module in the place of W&B, which is not installed for tests."""
  calls = []

  class Error(Exception):
    pass

  class Run:
    def log(self, values, step):
      calls.append((step, values))
      if step == 2:
        raise Error("disk full")

    def finish(self):
      calls.append("finish")

  made = python_types.ModuleType("wandb")
  made.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
  made.calls, made.Error, made.options = calls, Error, {}
  made.init = lambda **options: made.options.update(options) or Run()
  monkeypatch.setitem(sys.modules, "wandb", made)
  return made


def test_prometheus_is_answered_on_loopback_with_the_last_line(tmp_path):
  made = opened(tmp_path / "run-7", prometheus_port=0)
  (port,) = made.ports
  url = f"http://127.0.0.1:{port}/metrics"
  with urllib.request.urlopen(url, timeout=10) as answer:
    before = answer.read().decode()
  made.step(3, LINE)
  with urllib.request.urlopen(url, timeout=10) as answer:
    assert answer.headers["Content-Type"].startswith("text/plain")
    after = answer.read().decode().splitlines()
  made.close()
  assert "jaxrl_post_step" not in before
  assert "jaxrl_post_step 3.0" in after
  assert "jaxrl_post_reward_mean 0.5" in after
  assert "# TYPE jaxrl_post_reward_mean gauge" in after
  assert "jaxrl_post_sync_copy_seconds 0.25" in after
  assert not [line for line in after if "loss_value" in line]
  (about,) = [line for line in after if line.startswith("target_info{")]
  assert 'service_name="jaxrl_post"' in about
  assert 'service_instance_id="run-7"' in about
  with pytest.raises(OSError):  # Nobody listens any more.
    urllib.request.urlopen(url, timeout=10)


def test_a_port_that_is_taken_is_refused(tmp_path):
  first = opened(tmp_path, prometheus_port=0)
  with pytest.raises(
    types.InputError, match="--prometheus_port: expected a fr"
  ):
    opened(tmp_path, prometheus_port=first.ports[0])
  first.close()


def test_tensorboard_reads_what_was_written(tmp_path):
  loader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_file_loader"
  )
  made = opened(tmp_path, writers=("tensorboard",))
  made.step(4, LINE)
  made.step(5, {"reward/mean": 0.75})
  made.close()
  (file,) = (tmp_path / "tensorboard").iterdir()
  events = [*loader.RawEventFileLoader(str(file)).Load()]
  kind = sys.modules["tensorboard.compat.proto.event_pb2"].Event
  found = [kind.FromString(event) for event in events]
  started = [e.step for e in found if e.HasField("session_log")]
  values = [
    (event.step, value.tag, value.simple_value)
    for event in found
    for value in event.summary.value
  ]
  assert started == [4]
  assert values == [
    (4, "reward/mean", 0.5),
    (4, "sync/copy_s", 0.25),
    (5, "reward/mean", 0.75),
  ]


def test_wandb_is_offline_and_gets_the_settings(tmp_path, wandb):
  made = opened(tmp_path, writers=("wandb",))
  made.step(1, LINE)
  made.close()
  assert wandb.calls == [
    (1, {"reward/mean": 0.5, "sync/copy_s": 0.25}),
    "finish",
  ]
  assert wandb.options["mode"] == "offline"
  assert wandb.options["config"] == {"seed": 3}
  assert wandb.options["dir"] == str(tmp_path)


def test_wandb_gets_a_late_evaluation_with_the_newest_step(tmp_path, wandb):
  made = opened(tmp_path, writers=("wandb",))
  for step, value in ((3, 0.3), (1, 0.1), (4, 0.4)):
    made.step(step, {"eval/reward": value})
  made.close()
  assert wandb.calls == [
    (3, {"eval/reward": 0.3}),
    (3, {"eval/reward": 0.1}),
    (4, {"eval/reward": 0.4}),
    "finish",
  ]


def test_a_writer_that_fails_is_said_and_counted(tmp_path, wandb, caplog):
  made = opened(tmp_path, writers=("wandb",))
  with caplog.at_level(logging.WARNING):
    for step in (1, 2, 2, 3):
      made.step(step, LINE)
    made.close()
  assert [call[0] for call in wandb.calls[:-1]] == [1, 2, 2, 3]
  assert made.failures == {"wandb": 2}
  assert caplog.text.count("was not written: disk full") == 1
  assert "wandb: 2 steps were not written" in caplog.text


def test_a_writer_that_cannot_be_opened_is_said_and_counted(
  tmp_path, wandb, monkeypatch, caplog
):
  pytest.importorskip("tensorboard.summary.writer.event_file_writer")

  def refused(**options):
    raise wandb.Error("no room")

  monkeypatch.setattr(wandb, "init", refused)
  (tmp_path / "tensorboard").write_text("in the way")
  with caplog.at_level(logging.WARNING):
    made = opened(tmp_path, writers=writers.NAMES, prometheus_port=0)
    for step in (1, 2):
      made.step(step, LINE)
    (port,) = made.ports
    with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
      assert "jaxrl_post_step 2.0" in answer.read().decode()
    made.close()
  assert made.failures == {"tensorboard": 2, "wandb": 2}
  assert "wandb: could not be opened: no room" in caplog.text
  assert "tensorboard: could not be opened: " in caplog.text
  assert "wandb: 2 steps were not written" in caplog.text


def test_nothing_stays_open_when_opening_ends_a_run(
  tmp_path, wandb, monkeypatch
):
  def bug(**options):
    raise ZeroDivisionError

  monkeypatch.setattr(wandb, "init", bug)
  with pytest.raises(ZeroDivisionError):
    opened(tmp_path, writers=("wandb",), prometheus_port=0)
  assert not [t for t in threading.enumerate() if "serve_forever" in t.name]


@pytest.mark.parametrize(
  ("module", "options"),
  [
    (
      "tensorboard.summary.writer.event_file_writer",
      {"writers": ("tensorboard",)},
    ),
    ("wandb", {"writers": ("wandb",)}),
    ("prometheus_client", {"prometheus_port": 0}),
  ],
)
def test_a_package_that_is_missing_is_told(monkeypatch, module, options):
  monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(types.InputError) as error:
    writers.Watch(**options)
  assert "pip install 'jaxrl_post[" in str(error.value)


def test_an_unknown_writer_is_refused():
  with pytest.raises(types.InputError, match="some of tensorboard, wandb, got"):
    writers.Watch(writers=("csv",))


def test_steps_of_a_capture_are_read():
  assert writers.steps("3:4") == (3, 4)
  for wrong in ("3", "4:3", "0:2", "a:b", "1:2:3", ""):
    with pytest.raises(types.InputError, match="--profile_steps"):
      writers.steps(wrong)


def test_a_capture_after_the_run_is_refused():
  watch = writers.Watch(profile=(4, 9))
  watch.check(4)
  with pytest.raises(types.InputError, match="got 4:9. Name steps") as error:
    watch.check(3)
  assert "\n" not in str(error.value)
  writers.Watch().check(0)


def test_a_port_that_is_taken_is_refused_before_the_run():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    with pytest.raises(types.InputError, match=f"a free port, got {port} "):
      writers.Watch(prometheus_port=port).check(1)
  writers.Watch(prometheus_port=port).check(1)
  writers.Watch(prometheus_port=0).check(1)


def test_every_name_is_one_that_prometheus_takes():
  assert writers.prometheus_name("idle/generation/lag_gate") == (
    "jaxrl_post_idle_generation_lag_gate"
  )
  assert json.dumps(writers.prometheus_name("eval/pass@4")) == (
    '"jaxrl_post_eval_pass_4"'
  )
