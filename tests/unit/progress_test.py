import io
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxrl_post.runtime import progress

LEVELS = " ▁▂▃▄▅▆▇█"


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


METRICS = {
  "reward/mean": 0.5,
  "staleness/mean": 1.25,
  "throughput/consumed_per_device_hour": 1234.4,
}


@pytest.fixture
def ticks():
  return itertools.count(0, 30).__next__


def test_a_terminal_has_one_line_that_is_rewritten(ticks, monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  out = Terminal()
  shown = progress.Progress(10, out, ticks)
  for step in (1, 2, 3):
    shown.update(step, METRICS)
  assert "\n" not in out.getvalue()
  last = out.getvalue().split("\r\x1b[K")[-1]
  # 30 seconds a step, seven to go.
  assert last.split("  ") == [
    "step 3/10",
    "reward 0.500",
    "lag 1.2",
    "rollouts/device-h 1234",
    "3 min 30 s left",
  ]
  shown.close()
  assert out.getvalue().endswith("left\n")


def test_a_line_never_wraps(ticks, monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "20")
  out = Terminal()
  progress.Progress(10, out, ticks).update(1, METRICS)
  assert len(out.getvalue().split("\x1b[K")[1]) == 19


def test_a_log_file_has_a_plain_line_each_tenth(ticks):
  out = io.StringIO()
  shown = progress.Progress(40, out, ticks)
  for step in range(1, 41):
    shown.update(step, METRICS)
  shown.close()
  steps = [line.split()[1] for line in out.getvalue().splitlines()]
  assert steps == ["1/40", *(f"{s}/40" for s in range(4, 41, 4))]
  assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_a_resumed_run_estimates_from_its_own_steps(ticks):
  out = io.StringIO()
  shown = progress.Progress(100, out, ticks)
  shown.update(90, {})
  shown.update(100, {})
  assert out.getvalue().splitlines() == [
    "step 90/100",
    "step 100/100  0 s left",
  ]


def test_what_is_not_known_is_left_out(ticks):
  out = io.StringIO()
  progress.Progress(10, out, ticks).update(1, {"reward/mean": math.nan})
  assert out.getvalue() == "step 1/10\n"


def heights(drawing: str, height: int) -> list[int]:
  rows = [line.split("│")[1] for line in drawing.split("\n")[:height]]
  return [
    sum(LEVELS.index(c) for c in column) for column in zip(*rows, strict=True)
  ]


def test_a_curve_looks_like_this():
  drawn = progress.curve([0.0, 0.5, 1.0, 0.5], width=16, height=2, first=3)
  assert drawn == "\n".join(
    [
      "1 │    ▁▁▁▁████▁▁▁▁",
      "0 │▁▁▁▁████████████",
      "  └────────────────",
      "   3              6",
    ]
  )


@hypothesis.settings(max_examples=30)
@hypothesis.given(
  st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=150),
  st.integers(16, 80),
  st.integers(1, 10),
)
def test_rising_numbers_draw_a_curve_that_never_falls(values, width, height):
  found = heights(progress.curve(sorted(values), width, height), height)
  assert len(found) <= width
  assert found == sorted(found)
  if min(values) != max(values) and len(set(found)) > 1:
    assert found[0] == 1 and found[-1] == 8 * height


@hypothesis.settings(max_examples=30)
@hypothesis.given(
  st.lists(st.sampled_from([math.nan, 1.0, 2.0, math.inf]), max_size=100)
)
def test_gaps_are_blank(values):
  drawn = progress.curve(values, width=100)
  if not any(map(math.isfinite, values)):
    assert drawn == "(no numbers to draw)"
    return
  each = 100 // len(values)
  found = heights(drawn, 8)[::each]
  assert [h > 0 for h in found] == [math.isfinite(v) for v in values]


def test_many_steps_are_averaged_into_the_columns():
  drawn = progress.curve([0.0, 2.0] * 50 + [3.0] * 100, width=20)
  assert set(heights(drawn, 8)[:10]) == {1}
  assert set(heights(drawn, 8)[10:]) == {64}
  top, bottom = drawn.split("\n")[0], drawn.split("\n")[7]
  assert top.startswith("3 │") and bottom.startswith("1 │")
  assert drawn.endswith("1" + " " * 16 + "200")
