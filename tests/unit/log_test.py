import json
import logging

import pytest

from jaxrl_post import types
from jaxrl_post.runtime import log


def lines(folder) -> list[dict]:
  text = (folder / "metrics.jsonl").read_text()
  # Strict: a NaN in the file is an error here.
  return [json.loads(line, parse_constant=int) for line in text.splitlines()]


def group(uid: int = 7, text: str = "one\n\ntwo") -> types.Group:
  prompt = types.Prompt(uid=uid, tokens=(1,), text="What?", reference=None)
  done = types.Completion(
    uid=31,
    tokens=(5, 6, 7),
    logprobs=(-1.0,) * 3,
    versions=(4, 4, 5),
    finish="length",
  )
  first = types.Rollout(
    prompt=prompt,
    completion=done,
    temperature=1.0,
    text=text,
    reward=0.25,
    parts={"maths": 0.0, "form": 1.0},
  )
  second = types.Rollout(
    prompt=prompt,
    completion=done,
    temperature=1.0,
    text="",
    failure="timed out",
  )
  return types.Group(prompt=prompt, rollouts=(first, second))


def test_a_step_is_one_line_with_sorted_keys_at_once(tmp_path):
  out = log.Log(tmp_path)
  out.step(1, {"b/x": 2.0, "a/y": 1, "z": 0.5})
  text = (tmp_path / "metrics.jsonl").read_text()
  assert text == '{"a/y": 1.0, "b/x": 2.0, "step": 1, "z": 0.5}\n'
  out.step(2, {})
  assert [line["step"] for line in lines(tmp_path)] == [1, 2]
  out.close()


def test_numbers_that_json_lacks_are_null_and_infinity_is_warned_of_once(
  tmp_path, caplog
):
  out = log.Log(tmp_path)
  with caplog.at_level(logging.WARNING):
    for step in (1, 2):
      out.step(step, {"loss": float("nan"), "kl": -float("inf"), "ok": 1.0})
  out.close()
  assert [(x["loss"], x["kl"], x["ok"]) for x in lines(tmp_path)] == [
    (None, None, 1.0)
  ] * 2
  assert [r.getMessage().split()[1] for r in caplog.records] == ["kl"]


@pytest.mark.parametrize("again", [3, 2])
def test_no_step_is_there_twice(tmp_path, again):
  out = log.Log(tmp_path)
  out.step(3, {})
  with pytest.raises(types.RunError, match=f"a step after 3, got {again}"):
    out.step(again, {})
  out.close()
  out = log.Log(tmp_path)
  with pytest.raises(types.RunError, match="after 3"):
    out.step(again, {})
  out.close()


def test_c95_a_resumed_run_writes_its_steps_again(tmp_path):
  out = log.Log(tmp_path)
  for step in (1, 2, 3, 4):
    out.step(step, {"x": float(step)})
    out.rollouts(step, [group(step)], 1)
  out.close()
  out = log.Log(tmp_path)
  out.truncate(3)
  out.step(3, {"x": 30.0})
  out.rollouts(3, [group(33)], 1)
  out.close()
  assert [(x["step"], x["x"]) for x in lines(tmp_path)] == [
    (1, 1.0),
    (2, 2.0),
    (3, 30.0),
  ]
  heads = [
    line.split()[:4]
    for line in (tmp_path / "rollouts.txt").read_text().splitlines()
    if line.startswith("step")
  ]
  assert [(h[1], h[3]) for h in heads] == [("1", "1"), ("2", "2"), ("3", "33")]


def test_truncating_to_the_first_step_empties_the_log(tmp_path):
  out = log.Log(tmp_path)
  out.step(5, {})
  out.truncate(0)
  out.step(1, {})
  out.close()
  assert [line["step"] for line in lines(tmp_path)] == [1]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path, caplog):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n{"step": 2, "lo')
  out = log.Log(tmp_path)
  assert "cut off" in caplog.text
  out.step(2, {"loss": 1.0})
  out.close()
  assert lines(tmp_path) == [{"step": 1}, {"step": 2, "loss": 1.0}]


def test_a_sample_shows_what_was_asked_answered_and_scored(tmp_path):
  out = log.Log(tmp_path)
  out.rollouts(12, [group()], 5)
  out.close()
  text = (tmp_path / "rollouts.txt").read_text()
  assert text.split("-")[0] == "step 12 prompt 7 "
  assert "    What?\n" in text and "    one\n\n    two\n" in text
  facts = "uid 31, reward 0.25, form 1, maths 0, 3 tokens, length, versions 4"
  assert facts in text and "to 5" in text
  assert "reward nan" in text and "failure: timed out" in text


def test_samples_keep_to_80_columns_and_to_the_limit(tmp_path):
  out = log.Log(tmp_path)
  out.rollouts(1, [group(text="word " * 100 + "x" * 300)] * 5, 2)
  out.close()
  found = (tmp_path / "rollouts.txt").read_text().splitlines()
  assert max(map(len, found)) == 80
  assert sum(line.startswith("step") for line in found) == 2


def test_what_a_model_writes_cannot_steer_the_terminal_or_the_log(tmp_path):
  out = log.Log(tmp_path)
  out.rollouts(1, [group(text="\x1b[2J\ud800\nstep 9 x\r\f\u2028step 9 y")], 1)
  out.truncate(5)
  out.close()
  text = (tmp_path / "rollouts.txt").read_text()
  assert "\\x1b[2J\\ud800" in text and "\x1b" not in text
  assert "step 9 y" in text
