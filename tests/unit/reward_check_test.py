"""The contract test for rewards of one's own: what it finds."""

import json

import pytest

from jaxrl_post import types
from jaxrl_post.rewards import check

FILE = '''
import itertools
import functools
import os

from jaxrl_post.rewards import protocol

calls = itertools.count()

def good(rollout, reference):
  return float(rollout.text == str(reference))

def parsing(rollout, reference):
  """Takes the first number, without looking whether there is one."""
  return float(int(rollout.text.split()[0]) == reference)

def drawn(rollout, reference):
  return float(next(calls))

def silent(rollout, reference):
  return None

def nothing():
  return 1.0

def dies(rollout, reference):
  print("x" * 10**6)
  os._exit(3)

@protocol.batched
def one(rollouts, references):
  print("x" * 10**6)
  return [1.0]

half = functools.partial(good)
number = 3
'''


@pytest.fixture(name="file", scope="module")
def _file(tmp_path_factory):
  path = tmp_path_factory.mktemp("check") / "mine.py"
  path.write_text(FILE)
  return path


EXAMPLE = json.dumps({"completion": "42", "reference": 42, "reward": 1})


def test_a_reward_that_keeps_the_contract_exits_0(file, capsys):
  assert check.main([f"{file}:good", f"--example={EXAMPLE}"]) == 0
  out = capsys.readouterr().out
  assert "0 of 18 cases break the contract" in out
  assert out.count(" ok ") == 18 and "BAD" not in out
  assert [line.split()[1] for line in out.splitlines()[1:2]] == ["1"]


def test_a_reward_that_raises_on_odd_completions_exits_1(file, capsys):
  assert check.main([f"{file}:parsing", f"--example={EXAMPLE}"]) == 1
  lines = capsys.readouterr().out.splitlines()
  bad = [line for line in lines if " BAD " in line]
  assert any(
    line.startswith("empty ") and "IndexError: " in line for line in bad
  )
  assert any("ValueError: invalid literal" in line for line in bad)
  # What is said of odd references breaks nothing.
  assert not any(line.startswith("reference") for line in bad)
  assert "told only: " not in "".join(bad)


def test_an_example_that_earns_another_reward_exits_1(file, capsys):
  example = json.dumps({"completion": "41", "reference": 42, "reward": 1})
  assert check.main([f"{file}:half", f"--example={example}"]) == 1
  assert capsys.readouterr().out.count("expected 1") == 2


def test_a_reward_that_is_drawn_is_found_out(file):
  example = json.loads(EXAMPLE)
  del example["reward"]
  made = {v.name: v for v in check.check(check.load(f"{file}:drawn"), example)}
  assert made["example"].holds and not made["example again"].holds
  assert "the first time it was" in made["example again"].said
  assert not made["all at once"].holds


def test_no_reward_is_within_the_contract(file, capsys):
  assert check.main([f"{file}:silent", f"--example={EXAMPLE}"]) == 1
  out = capsys.readouterr().out  # but not when the example expects one
  assert out.count("BAD") == 3
  assert "no reward: None" in out and "0 of 16 gave a reward" in out


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["FILE:other"], "AttributeError"),
    (["FILE:number"], "expected a function, got a int"),
    (["none.py:good"], "FileNotFoundError"),
    (["no_such_module:good"], "ModuleNotFoundError"),
    (["good"], "ValueError"),
    (["FILE:good", "--example=[]"], "expected a JSON object"),
    (["FILE:good", "--example={"], "expected a JSON object"),
    (["FILE:good", '--example={"text": 1}'], "expected a JSON object"),
    (["FILE:good", '--example={"prompt": null}'], "prompt: expected text"),
    (["FILE:good", '--example={"completion": 3}'], "completion: expected te"),
    (["FILE:good", '--example={"reward": "x"}'], "reward: expected a number"),
    (["FILE:good", '--example={"reward": 1e16}'], "reward: expected a number"),
    (["FILE:good", "--example=" + "[" * 10**5], "expected a JSON object"),
    (["FILE:good", "--timeout_s=0"], "rewards.timeout_s: expected"),
  ],
)
def test_a_wrong_input_is_one_line_and_exits_2(arguments, said, file, capsys):
  given = [argument.replace("FILE", str(file)) for argument in arguments]
  assert check.main(given) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert err.startswith("error: ") and said in err


@pytest.mark.parametrize(
  ("source", "said"),
  [
    ("wrong_name", "got NameError: name 'wrong_name' is not defined."),
    ("{}['a key']", "got KeyError: 'a key'."),
    ("raise SystemExit(0)", "got SystemExit: 0."),
  ],
)
def test_a_file_that_raises_is_one_line_and_exits_2(
  source, said, tmp_path, capsys
):
  path = tmp_path / "raises.py"
  path.write_text(f"{source}\n")
  assert check.main([f"{path}:good"]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1 and said in err


def test_a_worker_that_does_not_start_is_one_line_and_exits_2(tmp_path, capsys):
  path = tmp_path / "there.py"
  path.write_text(
    "import multiprocessing\n"
    "if multiprocessing.parent_process(): raise KeyError\n"
    "def good(rollout, reference): return 1.0\n"
  )
  assert check.main([f"{path}:good"]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert err.startswith("error: reward pool: expected 1 workers")


def test_rewards_of_the_package_load_by_their_module():
  loaded = check.load("jaxrl_post.rewards.exact:exact")
  assert loaded(check.cases({})[0].rollout, "") == 1.0


def test_cases_are_named_and_numbered():
  made = check.cases({"completion": "x", "reference": 1})
  assert [c.rollout.completion.uid for c in made] == list(range(len(made)))
  assert len({c.name for c in made}) == len(made)
  assert all(isinstance(c.rollout, types.Rollout) for c in made)
  # Without a reference every refusal is in order.
  assert not any(c.strict for c in check.cases({}))


@pytest.mark.parametrize("name", ["nothing", "silent"])
def test_a_reward_that_never_is_one_exits_1_without_an_example_too(
  name, file, capsys
):
  assert check.main([f"{file}:{name}"]) == 1
  lines = capsys.readouterr().out.splitlines()
  marks = [line[30:34] for line in lines[1:-1]]
  if name == "silent":  # which is no failure: asked again, and all at once
    assert marks == ["ok  "] * 17 + ["BAD "]
  else:
    assert marks == ["fail"] * 15 + ["BAD "]
  said = "0 of 15 gave a reward; give --example, of what earns one"
  assert lines[-2].endswith(said) and lines[-1].startswith("1 of ")


def test_a_reward_that_is_drawn_is_found_out_without_an_example(file, capsys):
  assert check.main([f"{file}:drawn"]) == 1
  bad = [x for x in capsys.readouterr().out.splitlines() if " BAD " in x]
  assert bad[0].startswith("empty again") and len(bad) == 2


def test_a_batch_of_the_wrong_length_is_found_out_and_prints_are_cut(
  file, capfd
):
  assert check.main([f"{file}:one", f"--example={EXAMPLE}"]) == 1
  out, err = capfd.readouterr()
  (bad,) = [line for line in out.splitlines() if " BAD " in line]
  assert bad.startswith("all at once") and "16 rewards in a list, got 1" in bad
  assert "xxxx" in err and len(err) < 20_000 and "xxxx" not in out
  assert "bytes that a call printed left out" in err


def test_lines_come_at_once_and_deaths_end_it(file, capfd):
  target = check.load(f"{file}:dies")
  made = check.check(target, {})
  first = next(made)  # before the others were asked
  assert first.failed and "worker died" in first.said
  rest = list(made)
  assert [v.name for v in rest] == ["space", "long", "the rest"]
  assert not rest[-1].holds and "3 calls one after" in rest[-1].said
  assert "FAIL" not in check.line(first) and "fail" in check.line(first)
  out, err = capfd.readouterr()
  assert len(out) + len(err) < 10_000
