import json
import logging

import pytest

from jaxrl_post.runtime import trace


def event(begin: float, end: float, name: str = "update") -> trace.Event:
  return trace.Event("training", "busy", name, begin, end)


def written(folder, *events: trace.Event, at: float = 0.0) -> None:
  made = trace.Trace(folder)
  made.start(at)
  for each in events:
    made.add(each)
  made.close()


def read(folder) -> list[dict]:
  text = (folder / trace.FILE).read_text()
  assert text.startswith("[\n") and text.endswith(",\n")
  return json.loads(text[:-2] + "]")


def spans(folder) -> list[tuple[str, float, float]]:
  return [
    (e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
    for e in read(folder)
    if e["ph"] == "X"
  ]


def test_lanes_have_names_and_an_order(tmp_path):
  written(tmp_path, event(0, 1))
  names = {
    e["tid"]: e["args"]["name"]
    for e in read(tmp_path)
    if e["name"] == "thread_name"
  }
  assert names == {1: "training", 2: "generation", 3: "rewards"}
  (made,) = [e for e in read(tmp_path) if e["ph"] == "X"]
  assert made == {
    "name": "update",
    "cat": "busy",
    "ph": "X",
    "ts": 0.0,
    "dur": 1e6,
    "pid": 1,
    "tid": 1,
    "args": {"step": 0},
  }


def test_a_resumed_run_goes_on_from_its_t(tmp_path):
  written(tmp_path, event(0, 2, "a"), event(2, 4, "b"), event(4, 5, "c"))
  written(tmp_path, event(3, 6, "d"), at=3.0)
  # What was under way at T ends there; what came later was lost, and is gone.
  assert spans(tmp_path) == [("a", 0, 2), ("b", 2, 3), ("d", 3, 6)]


def test_a_new_run_in_the_folder_begins_anew(tmp_path):
  written(tmp_path, event(0, 2))
  written(tmp_path)
  assert spans(tmp_path) == []


@pytest.mark.parametrize("torn", ['{"name":"upd', "]\n", '{"ts":1}', ""])
def test_a_torn_end_is_mended(tmp_path, torn):
  written(tmp_path, event(0, 2))
  with (tmp_path / trace.FILE).open("a") as file:
    file.write(torn)
  written(tmp_path, event(5, 6), at=5.0)
  assert [s[1:] for s in spans(tmp_path)] == [(0, 2), (5, 6)]


def test_a_full_trace_ends_and_says_so(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(trace, "MAX_BYTES", 4000)
  events = [event(i, i + 1) for i in range(100)]
  with caplog.at_level(logging.WARNING):
    written(tmp_path, *events)
    written(tmp_path, event(200, 201), at=150.0)
  assert (tmp_path / trace.FILE).stat().st_size < 4400
  last = [e for e in read(tmp_path) if e["ph"] == "i"]
  assert {e["name"] for e in last} == {"the trace ends here: 4000 bytes"}
  assert 10 < len(spans(tmp_path)) < 40
  assert "full at 4000 bytes" in caplog.text


@pytest.mark.parametrize("at", [0.0, 5.0])  # To write anew; to read before.
def test_a_file_of_no_use_ends_the_trace_only(tmp_path, caplog, at):
  (tmp_path / trace.FILE).mkdir()
  with caplog.at_level(logging.WARNING):
    written(tmp_path, event(5, 6), at=at)
  assert "the trace ends" in caplog.text


def test_lanes_of_many_rows_are_of_one_stage(tmp_path):
  rows = (1, 999, 1000, 1001, 2000, 999_999)
  made = [trace.Event("generation", "note", "", 0, 1, row) for row in rows]
  calls = [trace.Event("rewards", "busy", "", 0, 1, row) for row in rows]
  written(tmp_path, *made, *calls, event(0, 1))
  tids = [e["tid"] for e in read(tmp_path) if e["ph"] == "X"]
  assert len({*tids}) == len(tids) == 2 * len(rows) + 1
  assert max(tids) < 2**31


def test_what_comes_before_the_start_or_after_the_end_is_left_out(tmp_path):
  made = trace.Trace(tmp_path)
  made.add(event(0, 1))
  made.start(0.0)
  made.close()
  made.add(event(1, 2))
  made.count("queue", 1.0, {"ready": 1})
  assert spans(tmp_path) == []
