"""What a recorder says, and what it closes."""

import logging

import pytest

from jaxrl_post import loop, prepare, record, types
from jaxrl_post.data import pack
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.envs import replay
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.runtime import log, profile, writers
from tests.e2e import runs
from tests.unit import clock_test as clocked
from tests.unit import metrics_test

VALUES = {
  "loss/skipped": 0.0,
  "loss/bad_updates": 0.0,
  "loss/policy": 0.0,
  "loss/grad_norm": 0.0,
}


@pytest.fixture(name="now")
def _now():
  return clocked.Time()


@pytest.fixture(name="clk")
def _clk(now):
  made = clocks.Clock(clocked.STAGES, now)
  yield made
  made.close()


def opened(folder, clk, **watch) -> record.Recorder:
  return record.Recorder(
    runs.configured(),
    folder,
    clk,
    devices={"held": 1, "generation": 1, "training": 1},
    sync_bytes=0,
    about={},
    watch=writers.Watch(**watch),
  )


def step(made: record.Recorder, clk, number: int) -> None:
  """Records a step of one group, with nobody who samples."""
  groups = [metrics_test.group(metrics_test.rollout(reward=1.0))]
  layout = pack.layout(1, 1, max_prompt=4, max_tokens=4, flops=float)
  batch = pack.pack(groups, layout)
  rollouts = replay.Replay("", ledgers.start(1, 0), clock=clk)
  made.step(number, groups, batch, VALUES, rollouts)


@pytest.mark.parametrize(("lost", "warns"), [(5.0, 1), (0.5, 0)])
def test_time_in_no_account_is_warned_of_once(
  tmp_path, clk, now, caplog, lost, warns
):
  made = opened(tmp_path, clk)
  made.begin(0, 0, {}, {})
  clk.start()
  with (
    caplog.at_level(logging.WARNING),
    clk.span("generation", "wait/lag_gate"),
    clk.span("training", "other", "loop"),
  ):
    for number in (1, 2):
      now.passes(lost)
      with clk.span("training", "wait/host", "pack"):
        now.passes(100 - lost)
        step(made, clk, number)
  assert made.line["accounting/residual"] == pytest.approx(lost / 100)
  assert caplog.text.count("not to be trusted") == warns
  made.close()


@pytest.fixture(name="closed")
def _closed(monkeypatch):
  """Notes who is closed."""
  found = []
  for kind in (log.Log, writers.Writers):

    def noting(self, close=kind.close):
      found.append(type(self))
      close(self)

    monkeypatch.setattr(kind, "close", noting)
  return found


def test_all_is_closed_whichever_fails(tmp_path, clk, closed, monkeypatch):
  def fails(self):
    raise ZeroDivisionError

  monkeypatch.setattr(profile.Profile, "close", fails)
  made = opened(tmp_path, clk)
  with pytest.raises(ZeroDivisionError):
    made.close()
  assert closed == [writers.Writers, log.Log]


def test_nothing_stays_open_where_a_port_is_taken(tmp_path, clk, closed):
  first = opened(tmp_path, clk, prometheus_port=0)
  port = first._writers.ports[0]
  with pytest.raises(types.InputError, match="--prometheus_port"):
    opened(tmp_path, clk, prometheus_port=port)
  assert closed == [log.Log]
  first.close()
  assert closed == [log.Log, writers.Writers, log.Log]


def test_a_capture_that_never_began_is_said(tmp_path, clk, caplog):
  made = opened(tmp_path, clk, profile=(3, 4))
  with caplog.at_level(logging.WARNING):
    made.at_step(2)
    assert not caplog.messages
    made.at_step(5)  # The checkpoint is of after step 4.
    made.close()
  (message,) = caplog.messages
  assert message.startswith("--profile_steps=3:4: nothing was captured")


def test_a_capture_that_begins_after_the_run_comes_before_all_else(tmp_path):
  cfg = runs.configured("num_steps=3")
  parts = prepare.prepare(cfg)
  watch = writers.Watch(profile=(4, 4))
  with pytest.raises(types.InputError, match="num_steps=3, got 4:4"):
    loop.run(cfg, parts, tmp_path, watch=watch)
  assert not list(tmp_path.iterdir())
