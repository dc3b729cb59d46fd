"""What the clock writes into the trace, and what that costs."""

import collections
import json
import os
import subprocess
import sys

import pytest

from jaxrl_post.runtime import clock, trace
from tests.house import source
from tests.unit import clock_test as clocked


@pytest.fixture
def now():
  return clocked.Time()


def events(folder) -> list[dict]:
  text = (folder / trace.FILE).read_text()
  return json.loads(text.rstrip().rstrip(",") + "]")


def seconds(events: list[dict]) -> dict:
  """Sums up lengths by lane and category."""
  sums = collections.Counter()
  for event in events:
    if event["ph"] == "X":
      sums[event["tid"], event["cat"]] += event["dur"] / 1e6
  return dict(sums)


def test_the_trace_has_the_seconds_of_the_accounts(tmp_path, now):
  clk = clock.Clock(clocked.STAGES, now, trace.Trace(tmp_path))
  clk.start({"T": 7.0, "stages": {}})
  update = clocked.Program()
  idle = clk.span("generation", "wait/weights_pending")
  with idle, clk.span("training", "wait/host", "pack"):
    clk.at_step(3)
    now.passes(1)
    clocked.compiles(now, 0.25, clocked.TRACE)
    clocked.compiles(now, 2)
    clk.launched("training", "update", update)
    now.passes(3)
    clocked.ends(clk, "training", update)
    with clk.span("generation", "eval"), clk.span("training", "eval"):
      now.passes(0.5)
    now.passes(0.125)
    totals = clk.totals()["stages"]
  clk.close()
  made = events(tmp_path)
  wanted = collections.Counter()
  for tid, stage in ((1, "training"), (2, "generation")):
    for kind, length in totals[stage].items():
      wanted[tid, kind.partition("/")[0]] += length
  found = seconds(made)
  assert found == {key: s for key, s in wanted.items() if s}
  assert found[1, "compile"] == 2.25 and found[1, "busy"] == 3
  lane = [e for e in made if e["ph"] == "X" and e["tid"] == 1]
  names = [e["name"] for e in lane]
  assert names == ["pack", "compile", "update", "eval", "pack"]
  assert {e["args"]["step"] for e in lane} == {3}
  # One behind the other, from T on.
  assert lane[0]["ts"] == 7e6
  ends_at = [e["ts"] + e["dur"] for e in lane]
  assert ends_at[:-1] == [e["ts"] for e in lane[1:]]
  (wait, _, _) = [e for e in made if e["ph"] == "X" and e["tid"] == 2]
  assert (wait["name"], wait["cat"]) == ("weights_pending", "wait")


def test_calls_have_lanes_beside_each_other_and_the_queue_a_counter(
  tmp_path, now
):
  clk = clock.Clock(clocked.STAGES, now, trace.Trace(tmp_path))
  clk.start()
  first = clk.calls("reward", 2)
  now.passes(1)
  second = clk.calls("reward", 1)
  clk.count(lambda: {"outstanding": 4, "ready": 1})
  first(None)
  now.passes(1)
  second(None)
  first(None)
  third = clk.calls("reward", 1)
  now.passes(1)
  third(None)
  clk.close()
  made = events(tmp_path)
  calls = [e for e in made if e.get("cat") == "busy"]
  assert [(e["tid"], e["ts"] / 1e6, e["dur"] / 1e6) for e in calls] == [
    (3_000_001, 1, 1),
    (3, 0, 2),
    (3, 2, 1),
  ]
  assert [e["args"]["calls"] for e in calls] == [1, 2, 1]
  (count,) = [e for e in made if e["ph"] == "C"]
  assert (count["name"], count["ts"]) == ("queue", 1e6)
  assert count["args"] == {"outstanding": 4, "ready": 1}


def test_nothing_is_counted_without_a_trace(now):
  clk = clock.Clock(clocked.STAGES, now)
  clk.start()
  clk.count(lambda: pytest.fail("nobody asked"))
  clk.close()


def test_what_no_account_explains_is_other_in_the_trace(tmp_path, now):
  clk = clock.Clock(clocked.STAGES, now, trace.Trace(tmp_path))
  clk.start()
  with clk.span("training", "other", "loop"):
    now.passes(1)
    with clk.span("training", "wait/host", "pack"):
      now.passes(2)
  clk.close()
  assert seconds(events(tmp_path)) == {(1, "other"): 1, (1, "wait"): 2}


@pytest.mark.parametrize("slots", [True, False])
def test_rows_have_lanes_on_request(tmp_path, now, slots):
  clk = clock.Clock(clocked.STAGES, now, trace.Trace(tmp_path, slots=slots))
  clk.start()
  begun = now()
  now.passes(2)
  clk.seats([(4, 17, begun, 12)])
  clk.close()
  found = [e for e in events(tmp_path) if e.get("cat") == "note"]
  assert len(found) == slots
  for event in found:
    assert (event["tid"], event["ts"], event["dur"]) == (2_000_005, 0, 2e6)
    assert event["args"]["gen_ai.usage.output_tokens"] == 12


COST = """
import sys, time
from jaxrl_post.runtime import clock, trace

clk = clock.Clock(("training",), trace=trace.Trace(sys.argv[1]))
clk.start()
costs = []
for _ in range(50):
  begun = time.thread_time()
  for _ in range(60):
    with clk.span("training", "wait/host", "pack"):
      pass
  costs.append((time.thread_time() - begun) / 60)
clk.close()
print(min(costs))
"""


def test_a_span_with_its_event_costs_less_than_50_microseconds(tmp_path):
  # In a process of its own: here every call has its types checked. It is about
  # 10 microseconds; a machine that does other things takes longer.
  done = subprocess.run(
    [sys.executable, "-c", COST, str(tmp_path)],
    capture_output=True,
    check=True,
    env={**os.environ, "PYTHONPATH": str(source.PACKAGE.parent)},
    text=True,
    timeout=60,
  )
  assert float(done.stdout) < 50e-6
  assert len(events(tmp_path)) > 3000


def test_calls_of_what_a_checkpoint_left_begin_where_it_ends(tmp_path, now):
  clk = clock.Clock(clocked.STAGES, now, trace.Trace(tmp_path))
  done = clk.calls("reward", 1)  # Sent before T goes on.
  clk.start({"T": 7.0, "stages": {}})
  now.passes(1)
  done(None)
  clk.close()
  (call,) = [e for e in events(tmp_path) if e.get("name") == "reward"]
  assert (call["ts"], call["dur"]) == (7e6, 1e6)
