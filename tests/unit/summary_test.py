"""What a run says at its end."""

import json

from jaxrl_post.runtime import summary


def _row(step, **values):
  base = {
    "reward/mean": step / 10,
    "throughput/generated_per_device_hour": 1234.4,
    "throughput/consumed_per_device_hour": 1200.0,
    "idle/generation": 0.25,
    "idle/training": 0.5,
    "sync/latency_s": step / 1000,
    "staleness/mean": 0.75,
    "staleness/max": 1.0,
  }
  return {"step": step, **base, **values}


def test_the_four_numbers_and_the_curve_are_there():
  rows = [{"step": 0, "eval/reward": 0.25, "eval/reward_exact": 0.125}]
  rows += [_row(1), _row(2), _row(3, **{"staleness/max": 2.0})]
  rows += [_row(4, **{"eval/reward": 0.75, "eval/reward_exact": 0.5})]
  text = summary.text(rows)
  for part in (
    "1234 generated, 1200 consumed",
    "generation 0.25, training 0.50",
    "3.0 ms",
    "max 2 in any",
    "held-out reward          0.250 after step 0, 0.750 after step 4",
    "held-out reward exact    0.125 after step 0, 0.500 after step 4",
  ):
    assert part in text
  assert max(map(len, text.splitlines())) <= 80


def test_nulls_are_numbers_that_are_not_there():
  text = summary.text([_row(1, **{"sync/latency_s": None})])
  assert "not measured" in text


def test_a_run_without_steps_says_so():
  assert summary.text([]) == "no step was trained"


def test_rows_are_read_in_order(tmp_path):
  lines = [json.dumps({"step": step}) for step in (0, 1)]
  (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  assert summary.read(tmp_path) == [{"step": 0}, {"step": 1}]
