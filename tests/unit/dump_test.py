"""Dumps: what is written is read, by anyone, or refused in one line."""

import json
import math
import pathlib
import re

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.runtime import dump

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def rollout(prompt, uid, tokens, reward, **fields) -> types.Rollout:
  """Makes a rollout whose numbers float32 and int32 just hold."""
  logprobs = np.float32([-(0.1**i) / 3 for i in range(len(tokens))])
  return types.Rollout(
    prompt=prompt,
    completion=types.Completion(
      uid=uid,
      tokens=tokens,
      logprobs=tuple(logprobs.tolist()),
      versions=tuple(range(len(tokens))),
      finish=fields.pop("finish", "stop"),
    ),
    temperature=fields.pop("temperature", 1.0),
    text=fields.pop("text", "t"),
    reward=reward,
    **fields,
  )


def prompt(uid, tokens, reference="r", text="p", said=()) -> types.Prompt:
  return types.Prompt(
    uid=uid, tokens=tokens, text=text, reference=reference, messages=said
  )


def some(first: int = 0) -> list[types.Group]:
  """Makes two groups with all that is hard: no reward, no token, odd text."""
  a = prompt(first, (5, 6, 7), {"answer": [1, None]}, "a\n\u2028\ud800")
  said = ({"role": "user", "content": "p\u2028", "more": [{"x": None}]},)
  b = prompt(first + 9, (2**31 - 1,), "42", said=said)
  return [
    types.Group(
      prompt=a,
      rollouts=(
        rollout(a, 18, (3, 4, 5), 1 / 3, parts={"exact": 0.1}, text="\x0c"),
        rollout(a, 19, (), math.nan, failure="timed out", finish="length"),
      ),
    ),
    types.Group(prompt=b, rollouts=(rollout(b, 20, (9,), -0.0),)),
  ]


@pytest.fixture(name="path")
def _path(tmp_path) -> pathlib.Path:
  path = dump.batch(tmp_path / "deep" / "dump", 1)
  dump.write(path, some(), {"seed": 3})
  return path


def test_what_is_written_is_read(path):
  assert repr(dump.read(path)) == repr(some())  # NaN differs from itself.
  assert dump.about(path) == {"format": 1, "seed": 3}


def test_logprobs_are_those_of_float32(tmp_path):
  (group,) = some()[:1]
  exact = group.rollouts[0].completion.logprobs
  dump.write(tmp_path / "1", [group], {})
  found = dump.read(tmp_path / "1")[0].rollouts[0].completion.logprobs
  assert np.float32(found).tobytes() == np.float32(exact).tobytes()
  assert found == exact


def test_messages_that_json_cannot_hold_are_left_out(tmp_path):
  asked = prompt(0, (1,), said=({"role": "user", "content": {1, 2}},))
  dump.write(tmp_path / "1", [types.Group(prompt=asked, rollouts=())], {})
  assert dump.read(tmp_path / "1")[0].prompt.messages == ()


def test_a_reference_that_json_cannot_hold_is_its_repr(tmp_path):
  asked = prompt(0, (1,), reference={1, 2})
  dump.write(tmp_path / "1", [types.Group(prompt=asked, rollouts=())], {})
  assert dump.read(tmp_path / "1")[0].prompt.reference == "{1, 2}"
  (line,) = (tmp_path / "1" / "groups.jsonl").read_text().splitlines()
  assert "reference" not in json.loads(line)


def test_a_number_that_json_cannot_hold_leaves_nothing(tmp_path):
  asked = prompt(0, (1,))
  group = types.Group(
    prompt=asked, rollouts=(rollout(asked, 0, (1,), math.inf),)
  )
  with pytest.raises(types.RunError, match="Out of range float"):
    dump.write(tmp_path / "1", [group], {})
  assert list(tmp_path.iterdir()) == []


def test_the_reader_of_the_documents_reads_it(path):
  text = (DOCS / "running.md").read_text(encoding="utf-8")
  (code,) = re.findall(r"```python\n(.*?glob.*?)```", text, re.DOTALL)
  assert len(code.splitlines()) <= 7
  seen = {}
  exec(code.replace("run/dump", str(path.parent)), seen)
  assert "jaxrl_post" not in code
  last = some()[1].rollouts[0]
  assert seen["rollout"]["reward"] == last.reward
  assert tuple(seen["tokens"].tolist()) == last.completion.tokens


def test_no_reward_is_null_and_offsets_say_where_tokens_are(path):
  lines = (path / "groups.jsonl").read_text(encoding="utf-8").splitlines()
  groups = [json.loads(line) for line in lines]
  made = [one for group in groups for one in group["rollouts"]]
  assert [one["reward"] for one in made] == [1 / 3, None, 0.0]
  with np.load(path / "arrays.npz", allow_pickle=False) as arrays:
    assert arrays["offsets"].tolist() == [0, 3, 3, 4]
    assert arrays["prompt_offsets"].tolist() == [0, 3, 4]
    dtypes = {name: str(arrays[name].dtype) for name in arrays.files}
  assert [one["offset"] for one in made] == [0, 3, 3]
  assert dtypes == {
    "prompt_tokens": "int32",
    "prompt_offsets": "int64",
    "tokens": "int32",
    "logprobs": "float32",
    "versions": "int32",
    "offsets": "int64",
  }


def test_batches_come_by_number_and_their_groups_in_order(tmp_path):
  for number in (11, 9, 10):
    dump.write(dump.batch(tmp_path, number), some(number), {})
  (tmp_path / "notes").mkdir()
  (tmp_path / ".00000003.abc").mkdir()  # left by a kill
  assert [p.name for p in dump.batches(tmp_path)] == [
    "00000009",
    "00000010",
    "00000011",
  ]
  uids = [group.prompt.uid for group in dump.read_all(tmp_path)]
  assert uids == [9, 18, 10, 19, 11, 20]


def test_a_batch_that_is_missing_between_others_is_refused(tmp_path):
  for number in (1, 2, 4):
    dump.write(dump.batch(tmp_path, number), some(number), {})
  with pytest.raises(types.InputError, match="batches 1 to 4, got none of 3"):
    dump.batches(tmp_path)


def test_cut_leaves_what_was_trained_and_nothing_half_written(tmp_path):
  dump.cut(tmp_path / "none", 0)
  for number in (1, 2, 3):
    dump.write(dump.batch(tmp_path, number), some(), {})
  (tmp_path / ".00000004.abc").mkdir()
  (tmp_path / "notes").mkdir()
  dump.cut(tmp_path, 2)
  left = sorted(p.name for p in tmp_path.iterdir())
  assert left == ["00000001", "00000002", "notes"]


def test_a_batch_is_written_once(path):
  with pytest.raises(types.RunError, match="got .*not empty") as error:
    dump.write(path, some(1), {})
  assert error.value.__context__ is None  # It is told in one line.
  assert repr(dump.read(path)) == repr(some())
  assert [p.name for p in path.parent.iterdir()] == [path.name]


def refused(read, *args) -> str:
  with pytest.raises(types.InputError) as error:
    read(*args)
  assert "\n" not in str(error.value)
  return str(error.value)


@pytest.mark.parametrize(
  "name", ["groups.jsonl", "arrays.npz", "about.json", "manifest.json"]
)
def test_damage_is_one_line(path, name):
  data = bytearray((path / name).read_bytes())
  data[len(data) // 2] ^= 1
  (path / name).write_bytes(data)
  assert name in refused(dump.read, path)
  (path / name).unlink()
  assert name in refused(dump.about, path)


def test_a_foreign_folder_is_one_line(path, tmp_path):
  assert "got none" in refused(dump.batches, tmp_path / "none")
  assert "got none" in refused(dump.batches, tmp_path)
  (tmp_path / "00000001").mkdir()
  assert "no manifest.json" in refused(dump.read, tmp_path / "00000001")
  (path / "manifest.json").unlink()
  (path / "more").touch()
  dump.manifests.write(path, {})
  assert "another set of files (more)" in refused(dump.read, path)


@pytest.mark.parametrize(
  ("name", "content", "words"),
  [
    ("about.json", b'{"format": 2}', "got format 2"),
    ("about.json", b"[1]", "got no object in about.json"),
    ("groups.jsonl", b"{}\n", "got KeyError"),
    ("groups.jsonl", b"[\n", "got JSONDecodeError"),
    ("arrays.npz", b"no zip", "got"),
  ],
)
def test_whole_files_of_something_else_are_one_line(path, name, content, words):
  (path / "manifest.json").unlink()
  (path / name).write_bytes(content)
  dump.manifests.write(path, {})
  assert words in refused(dump.read, path)


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    ({"replay": ""}, "debug.replay: expected the folder of a dump"),
    ({"replay": "x", "dump": True}, "debug.dump: expected false"),
  ],
)
def test_settings_that_contradict_are_refused(settings, words):
  assert words in refused(lambda: dump.Debug(**settings))
