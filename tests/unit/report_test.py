"""The report: what it reads, the page it writes, what the terminal shows."""

import dataclasses
import html.parser
import json
import re

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.planning import plan
from jaxrl_post.runtime import (
  compare,
  diagnose,
  draw,
  history,
  log,
  page,
  report,
  samples,
)
from tests.unit import report_runs

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(html.parser.HTMLParser):
  """What a browser would make of a page, as far as a parser can tell."""

  def __init__(self, text: str) -> None:
    super().__init__()
    self.open: list[str] = []
    self.tags: list[str] = []
    self.loads: list[str] = []
    self.handlers: list[str] = []
    self.text = ""
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag not in VOID:
      self.open.append(tag)
    for name, value in attrs:
      if name in ("src", "href", "srcset", "action", "data", "xlink:href"):
        self.loads.append(value)
      if name.startswith("on"):
        self.handlers.append(name)

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    if tag not in VOID:
      self.open.pop()

  def handle_endtag(self, tag):
    assert self.open and self.open[-1] == tag, f"{tag} in {self.open}"
    self.open.pop()

  def handle_data(self, data):
    self.text += data


def test_the_page_is_whole_and_loads_nothing(tmp_path):
  run = report_runs.full(tmp_path / "run")
  report.report([run])
  text = (run / "report.html").read_text()
  found = Page(text)
  assert found.open == []
  assert "script" not in found.tags and found.handlers == []
  assert found.loads == ["data:,"]
  assert not re.search(r"https?:|url\((?!#)|@import", text)
  policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
  assert f'content="{policy}"' in text
  assert 'name="viewport" content="width=device-width' in text
  assert "prefers-color-scheme: dark" in text
  # Timeline, six curves of which five have no figure or one, two histograms.
  assert found.tags.count("svg") == 6
  for words in (
    "Composition: the time is lost between the stages",
    "--set max_lag=1",
    "Step 8, of median length among 4",
    "outstanding (to 8)",
    "share of trained tokens by lag",
    "placement.mode",
  ):
    assert words in found.text


def test_what_a_model_wrote_is_text_and_never_runs(tmp_path):
  run = report_runs.full(tmp_path / "<b>run")
  report.report([run])
  found = Page((run / "report.html").read_text())
  assert "img" not in found.tags and "b" not in found.tags[:12]
  # In the first and the last rollout, and in the configuration.
  assert found.text.count(report_runs.HOSTILE) == 3
  assert "newest" in found.text and "not shown" not in found.text


# Escape, NUL, carriage return, C1, and marks that turn the direction.
CONTROLS = "\x1b\x00\r\x9b\u202e\u2066\u200f\ufeff"


def test_no_control_is_on_the_page_or_in_the_terminal(tmp_path):
  run = report_runs.full(tmp_path / "run\x1b[2J")
  with (run / "rollouts.txt").open("a", encoding="utf-8") as file:
    file.write(f"step 99 prompt 0 \u202e---\n    a{CONTROLS}b\n")
  settings = json.loads((run / "config.json").read_text())
  settings["seed"] = f"c{CONTROLS}d"
  (run / "config.json").write_text(json.dumps(settings))
  terminal = report.report([run])
  text = (run / "report.html").read_bytes().decode("utf-8")
  escapes = "".join(repr(c)[1:-1] for c in CONTROLS)
  assert escapes == r"\x1b\x00\r\x9b\u202e\u2066\u200f\ufeff"
  assert f"a{escapes}b" in text and f"c{escapes}d" in text
  assert "Step 99 prompt 0 \\u202e" in text and r"run\x1b[2J" in text
  assert r"run\x1b[2J" in terminal
  for shown in (text, terminal):
    assert not set(CONTROLS) & set(shown)
  # Still a whole page, and words of other scripts are as they were.
  assert Page(text).open == []
  assert log.visible("é漢字 🙂±\n") == "é漢字 🙂±\n"


def test_the_terminal_gets_the_same_in_30_lines_of_80_columns(tmp_path):
  run = report_runs.full(tmp_path / "run")
  rows = [json.loads(x) for x in (run / "metrics.jsonl").open()]
  for row in rows[8:]:
    row |= {"compile/count": 9.0, "loss/bad_updates": 1.0, "eval/reward": 0.5}
  report_runs.write(run, rows, report_runs.config(placement__mode="roles"))
  for folders in ([run], [run, report_runs.full(tmp_path / "earlier")]):
    lines = report.report(folders).splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == f"page: {run / 'report.html'}"
  assert sum(line[:1] in "12345" for line in lines if line) >= 5
  assert any(line.startswith("lever    --set max_lag=1") for line in lines)
  assert any(line.startswith("regime   composition: sign") for line in lines)


def test_long_words_are_cut_to_fit_the_terminal(tmp_path):
  run = history.read(report_runs.full(tmp_path / "run"))
  found = diagnose.diagnose(run.rows, run.config)
  long = "word " * 100
  found = dataclasses.replace(
    found,
    signs=[dataclasses.replace(sign, why=long) for sign in found.signs],
    because=long,
    levers=[dataclasses.replace(found.levers[0], flags="", why=long, how=long)],
    notes=[long, long, long],
  )
  lines = report.summary(run, found, run.path / "x").splitlines()
  assert len(lines) <= 30 and max(map(len, lines[:-1])) <= 80


def test_a_torn_last_line_and_a_missing_trace_are_no_fault(tmp_path):
  run = report_runs.full(tmp_path / "run")
  (run / "trace.json").unlink()
  (run / "rollouts.txt").unlink()
  with (run / "metrics.jsonl").open("a") as file:
    file.write('{"step": 13, "time/sec')
  assert "steps 7 to 10" in report.report([run])
  text = Page((run / "report.html").read_text()).text
  assert "No trace.json in the run folder" in text
  assert "None were logged" in text


@pytest.mark.parametrize(
  ("file", "content", "words"),
  [
    ("config.json", None, "got one without config.json"),
    ("metrics.jsonl", None, "got one without metrics.jsonl"),
    ("metrics.jsonl", "", "got 0 lines without any"),
    ("metrics.jsonl", '{"step": 0}\n', "got 1 lines without any"),
    (
      "metrics.jsonl",
      "{}\n{oops\n",
      "metrics.jsonl, line 2: expected an object",
    ),
    ("metrics.jsonl", "[1]\n", "got [1]"),
    ("config.json", "{", "config.json: expected an object of JSON"),
  ],
)
def test_a_folder_without_a_run_is_one_line(tmp_path, file, content, words):
  run = report_runs.full(tmp_path / "run")
  (run / file).unlink()
  if content is not None:
    (run / file).write_text(content)
  with pytest.raises(types.InputError) as error:
    report.report([run])
  assert words in str(error.value) and "\n" not in str(error.value)
  assert not (run / "report.html").exists()


def test_all_that_read_runs_refuse_what_is_none_alike(tmp_path):
  said = set()
  for read in (report.report, compare.text, plan.text):
    with pytest.raises(types.InputError) as error:
      read([tmp_path, tmp_path / "none"])
    said.add(str(error.value))
  (line,) = said
  assert line.startswith(f"{tmp_path}: expected the folder of a run, got one")


def test_a_short_run_has_a_page_too(tmp_path):
  run = report_runs.full(tmp_path / "run", steps=1)
  assert "regime   not known: needs 3 steps that count" in report.report([run])
  assert Page((run / "report.html").read_text()).open == []


def test_lengths_come_back_from_their_percentiles():
  row = {
    "completion/min_tokens": 1,
    "completion/p10_tokens": 2,
    "completion/p25_tokens": 2,
    "completion/p50_tokens": 4,
    "completion/p75_tokens": 4,
    "completion/p90_tokens": 4,
    "completion/p99_tokens": 8,
    "completion/max_tokens": 8,
  }
  found = dict(page.length_shares([row], 8))
  assert list(found) == [str(n) for n in range(1, 9)]
  assert sum(found.values()) == pytest.approx(1.0)
  assert found["2"] == pytest.approx(0.25) and found["4"] > 0.5
  wide = page.length_shares([row], 4096)
  assert len(wide) <= 24 and wide[0] == ("1–171", pytest.approx(1.0))
  assert page.length_shares([{**row, "completion/p50_tokens": None}], 8) == []


def test_lags_are_weighted_by_the_tokens_of_their_step():
  rows = [
    {"loss/tokens": 300.0, "lag/0/tokens": 1.0, "lag/1/tokens": 0.0},
    {"loss/tokens": 100.0, "lag/0/tokens": 0.0, "lag/1/tokens": 1.0},
  ]
  found = page.lag_shares(rows)
  assert found[:2] == [("0", 0.75), ("1", 0.25)]
  assert page.lag_shares([{"step": 1}]) == []


def test_a_timeline_is_of_the_step_of_median_length(tmp_path):
  run = report_runs.full(tmp_path / "run")
  rows = report_runs.lines({"busy": 1.0}, {"busy": 1.0})
  rows[5]["time/seconds"] += 0.4  # a long step, and a short one after it
  found = samples.typical(run, rows, np.arange(12) >= 2)
  assert found.seconds == pytest.approx(1.0)
  assert [round(span.end - span.start, 2) for span in found.spans] == [
    0.05,
    0.55,
    0.4,
    0.65,
    0.3,
    0.05,
    0.05,
  ]
  assert {span.lane for span in found.spans} == {0, 1, 2}
  ready = [value for _, value in found.levels["ready"]]
  assert ready == [0, 8, 0]


def test_curves_leave_out_what_is_not_finite_and_stay_small():
  points = [(float(i), float("nan") if i % 2 else i / 7) for i in range(10000)]
  svg = draw.curves("t<", [draw.Curve(name="x", points=points)])
  assert "nan" not in svg and 'aria-label="t&lt;"' in svg
  line = re.search(r'points="([^"]*)"', svg)
  assert line and 200 <= len(line[1].split()) <= 300
  assert draw.curves("t", [draw.Curve(name="x", points=points[1:2])]) == ""
  assert "<circle" in draw.curves(
    "t", [draw.Curve(name="x", points=[(3.0, 2.0)])]
  )
