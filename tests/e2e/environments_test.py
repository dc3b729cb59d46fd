"""Runs of conversations: in the loop, by the documents, by the experiment."""

import dataclasses

import jax
import pytest

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.envs import (
  conversations,
  conversing,
  multi_turn,
  renewal,
  schedule,
)
from jaxrl_post.runtime import dump
from tests.e2e import runs
from tests.house import docs_test, source

SMALL = (
  "checkpoint.every=0",
  "data.held_out.size=4",
  "data.train.size=64",
  "evaluation.every=0",
  "group_size=4",
  "groups_per_step=4",
  "num_steps=2",
  "placement.mode=colocated",
  "placement.training.fsdp=1",
  "placement.generation.data=1",
  "sampling.rows=32",
  "sampling.max_tokens=24",
  "warmup.num_steps=0",
)


@dataclasses.dataclass(frozen=True)
class Echo:
  """Says how long the turn was, twice; pays for what is odd."""

  schemas = ()

  def reset(self, prompt):
    return 0

  def step(self, state, text):
    reward = float(len(text) % 2)
    if state == 2:
      return multi_turn.Step(reward=reward)
    message = {"role": "tool", "content": f"{len(text) % 10}="}
    return multi_turn.Step(
      state=state + 1, messages=(message,), reward=reward, calls=1
    )

  def failed(self, state, reason):
    raise AssertionError(reason)


def experiment(*settings: str) -> config.Run:
  run = config.load("tool_calculator", runs.ROOT / "experiments")
  return config.override(run, [*SMALL, *settings])


@dataclasses.dataclass(frozen=True)
class Forgets(Echo):
  """The same, but each answer to an odd turn is all that is left."""

  def step(self, state, text):
    step = super().step(state, text)
    fresh = step.messages is not None and len(text) % 2 == 1
    return dataclasses.replace(step, replaces=fresh)


def train(folder, *settings: str, talk=None) -> list[dict]:
  run = experiment(*settings)
  talk = talk or multi_turn.Conversation(environment=Echo, workers=3)
  run = dataclasses.replace(run, env=talk)
  folder.mkdir()
  with runs.compile_cache(), jax.numpy_dtype_promotion("standard"):
    loop.run(run, prepare.prepare(run), folder)
  return runs.metrics(folder)


def numbers(line: dict) -> dict:
  """Returns what no clock decides."""
  heads = ("reward/", "completion/", "env/", "loss/", "staleness/")
  return {k: v for k, v in line.items() if k.startswith(heads)}


def test_a_run_of_conversations_is_the_same_in_turn_and_beside(tmp_path):
  beside = train(tmp_path / "beside", "max_lag=0", "debug.dump=true")
  in_turn = train(
    tmp_path / "in_turn",
    "max_lag=0",
    "stream.asynchronous=false",
    "stream.deterministic=true",
  )
  assert [numbers(x) for x in beside] == [numbers(x) for x in in_turn]
  first, *steps = beside
  assert first["eval/rollouts"] == 4
  for step, line in enumerate(steps, 1):
    assert line["loss/skipped"] == 0 and line["env/turns_max"] == 3
    assert line["env/tool_errors"] == line["env/tool_timeouts"] == 0
    assert line["staleness/max"] == 0
    assert line["mismatch/mean_abs"] < 1e-5
    groups = dump.read(dump.batch(tmp_path / "beside" / dump.FOLDER, step))
    made = [r.completion for group in groups for r in group.rollouts]
    own = sum(v >= 0 for c in made for v in c.versions)
    assert line["loss/tokens"] == own
    turns = [len(c.turns) for c in made]
    assert line["env/turns_mean"] == pytest.approx(sum(turns) / len(turns))
    rollouts = [r for group in groups for r in group.rollouts]
    assert all(r.conversation.endswith(r.text) for r in rollouts)
    assert any(len(r.conversation) > len(r.text) + 4 for r in rollouts)
    paid = [sum(t.reward for t in c.turns) for c in made]
    assert line["env/turn_reward"] == pytest.approx(sum(paid) / len(paid))


ANEW = multi_turn.Conversation(
  environment=Forgets, renewal=renewal.Renewal(max_rows=3)
)
ROWS = ("max_lag=0", "optim.microbatches=4")


def test_a_run_trains_the_rows_of_conversations_that_begin_anew(tmp_path):
  lines = train(tmp_path / "run", *ROWS, "debug.dump=true", talk=ANEW)[1:]
  folder = tmp_path / "run" / dump.FOLDER
  for step, line in enumerate(lines, 1):
    groups = dump.read(dump.batch(folder, step))
    made = [r.completion for group in groups for r in group.rollouts]
    rows = [1 + len(c.segments) for c in made]
    assert line["env/rows_mean"] == pytest.approx(sum(rows) / len(rows))
    assert line["env/rows_max"] == max(rows) == 3
    assert line["loss/tokens"] == sum(v >= 0 for c in made for v in c.versions)
    # Of each row, behind its own prompt, the trainer says what the engine said.
    assert line["mismatch/mean_abs"] < 1e-5 and line["staleness/max"] == 0
    assert line["loss/skipped"] == 0
    assert line["completion/mean_tokens"] == pytest.approx(
      sum(len(c.tokens) for c in made) / len(made)
    )
  # Rollouts are counted, and not their rows.
  assert line["throughput/yield"] <= 1.0
  run = experiment("debug.dump=false", f"debug.replay={folder}")
  with pytest.raises(types.InputError, match="max_rows at most 1, .* got 3"):
    prepare.prepare(run)


@pytest.mark.slow
def test_rows_of_a_dump_train_once_more(tmp_path):
  first = train(tmp_path / "run", *ROWS, "debug.dump=true", talk=ANEW)
  replay = f"debug.replay={tmp_path / 'run' / dump.FOLDER}"
  again = train(
    tmp_path / "again", *ROWS, "debug.dump=false", replay, talk=ANEW
  )
  losses = [[x["loss/policy"] for x in found[-2:]] for found in (first, again)]
  assert losses[0] == losses[1]


def test_the_experiment_calls_its_calculator():
  run = experiment()
  parts = prepare.prepare(run)
  env, prompt = parts.env, parts.data.train[0]
  assert isinstance(env, multi_turn.MultiTurn)
  said = prompt.reference
  first, second = map(int, said.strip("[]").split("-"))
  total = first - second
  script = {0: said, 1: f"{total}"}

  def sample(requests):
    made = []
    for request in requests:
      begun = request.begun[0].tokens if request.begun else ()
      versions = request.begun[0].versions if request.begun else ()
      own = (*parts.data.tokenizer.encode(script[-1 in versions]), 1)
      made += [
        types.Completion(
          uid=uid,
          tokens=(*begun, *own),
          logprobs=(0.0,) * (len(begun) + len(own)),
          versions=(*versions, *[0] * len(own)),
          finish="stop",
        )
        for uid in request.uids
      ]
    return made

  (completion,) = conversing.generate(
    sample,
    [dataclasses.replace(env.request(prompt), uids=(0,))],
    env=env,
    prompts=lambda uid: prompt,
  )
  rollout = env.rollout(prompt, completion)
  assert rollout.conversation == f"{said}{total}={total}"
  (score,) = run.rewards.functions
  assert score(rollout, said) == {"exact": 1.0, "in_place": 1.0}
  assert [turn.calls for turn in completion.turns] == [1, 0]
  # The calculator is not asked for what is no call.
  assert env.environment.step(None, "12-[3").errors == 1
  assert env.environment.step(None, "[1-]").errors == 1


def test_the_environment_of_the_documents_plays():
  text = (source.ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
  (code,) = docs_test.blocks(text)
  seen = {}
  exec(compile(code, "docs/environments.md", "exec"), seen)
  cfg = seen["conversation"]
  environment = conversations.made(cfg, schedule.StreamConfig(), 1)
  assert environment is not None and environment == seen["Guess"]()
  prompt = types.Prompt(uid=0, tokens=(1,), text="?", reference="7")
  state, heard = environment.reset(prompt), []
  for guess in ("5", "?", "9", "7"):
    step = environment.step(state, guess)
    state = step.state
    heard.append((step.messages and step.messages[0]["content"], step.reward))
  assert heard == [
    (" more ", 0.0),
    (" no number ", 0.0),
    (" less ", 0.0),
    (None, 1.0),
  ]


@pytest.mark.parametrize(
  ("setting", "match"),
  [
    ("stream.follow=events.jsonl", "stream.follow: expected none with env"),
    ("stream.deterministic=true", "expected max_lag=0 with env"),
  ],
)
def test_what_answers_do_not_allow_is_refused_before_a_device(setting, match):
  run = experiment(setting, "sampling.in_flight=drain", "max_lag=1")
  with pytest.raises(types.InputError, match=match):
    prepare.prepare(run)
