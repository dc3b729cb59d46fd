"""Conversations that begin anew: what each of a rollout's rows trains."""

import dataclasses
from typing import Any

import pytest

from jaxrl_post import types
from jaxrl_post.algos import baselines
from jaxrl_post.algos import objective as objectives
from jaxrl_post.data import pack, segments
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.envs import (
  conversations,
  conversing,
  multi_turn,
  renewal,
  schedule,
  single_turn,
)
from jaxrl_post.planning import costs
from jaxrl_post.rewards import shaping
from jaxrl_post.runtime import dump, log, metrics
from tests.unit import conversing_test as single

END, THOUGHT, SAYS = 2, 30, 40
PROMPT = types.Prompt(uid=0, tokens=(9, 8), text="9 8", reference=None)
# Three turns that begin with a thought each.
THINKS = ((THOUGHT, 10, END), (THOUGHT, 11, END), (THOUGHT, 12, END))
_NAMES = {renewal.name(u, k): u for u in range(4) for k in range(5)}


def _ids(text: str) -> tuple[int, ...]:
  return tuple(int(word) for word in text.split())


def encode(messages, ended):
  """What the template puts behind a turn."""
  del ended
  said = [_ids(message["content"]) for message in messages]
  return tuple(i for ids in said for i in (SAYS, *ids, SAYS + 1))


def render(messages):
  """A template that leaves the thoughts of earlier turns out."""
  found = []
  for message in messages:
    ids = _ids(message["content"])
    if message["role"] == "assistant":
      ids = (*(i for i in ids if i != THOUGHT), END)
    found += ids if message["role"] != "tool" else (SAYS, *ids, SAYS + 1)
  return tuple(found)


@dataclasses.dataclass(frozen=True)
class Says:
  """Says 50, 51, ...; after `folds` turns a summary takes all others' place."""

  folds: int = 9
  turns: int = 2
  schemas = ()

  def reset(self, prompt):
    return 0

  def step(self, state, text):
    if state == self.turns:
      return multi_turn.Step(reward=8.0)
    message = {"role": "tool", "content": f"{50 + state}"}
    step = multi_turn.Step(
      state=state + 1, messages=(message,), reward=2.0**state
    )
    if state + 1 == self.folds:
      summary = {"role": "user", "content": "60 61"}
      return dataclasses.replace(step, messages=(summary,), replaces=True)
    return step

  def failed(self, state, reason):
    raise AssertionError(reason)


class Engine(single.Engine):
  """Says what is in a script, by the conversation and its turn."""

  def __init__(self, script) -> None:
    super().__init__()
    self.script = {uid: list(turns) for uid, turns in script.items()}

  def _made(self, uid, begun, request, version):
    own = self.script[_NAMES[uid]].pop(0)
    begun = begun or types.Partial(uid=uid, tokens=(), logprobs=(), versions=())
    return types.Completion(
      uid=uid,
      tokens=(*begun.tokens, *own),
      logprobs=(*begun.logprobs, *[-0.5, -0.25, -0.125][: len(own)]),
      versions=(*begun.versions, *[version] * len(own)),
      finish="stop",
    )


def env_of(environment, renews=None, *, group=1, max_prompt=32, **settings):
  sampling = types.SamplingParams(max_tokens=32, stop_ids=(END,))
  cfg = multi_turn.Conversation(
    environment=lambda: environment, renewal=renews, **settings
  )
  return multi_turn.MultiTurn(
    single_turn.SingleTurn(
      group, sampling, lambda ids: " ".join(f"{i}" for i in ids)
    ),
    cfg,
    environment,
    encode,
    None if renews is None else render,
    max_prompt,
  )


def talk(env, script):
  """Has a group of conversations; returns engine and completions by uid."""
  engine = Engine(script)
  talks = conversing.Conversing(engine, env, lambda uid: PROMPT, lockstep=True)
  talks.add(env.request(PROMPT))
  done, version = {}, 3
  while talks.busy:
    done |= {c.uid: c for c in talks.step(None, version) or ()}
    version += 1
  return engine, done


RETELL = renewal.Renewal(max_rows=3, retell=True)


def rollouts_of(env, done, *rewards):
  return [
    dataclasses.replace(env.rollout(PROMPT, done[uid]), reward=reward)
    for uid, reward in enumerate(rewards)
  ]


def group_of(rollouts):
  return types.Group(prompt=PROMPT, rollouts=tuple(rollouts))


def row_of(batch, number: int) -> dict[str, list]:
  """Returns what a batch has of a sequence, token by token."""
  at = batch.sequence == number
  names = ("tokens", "positions", "loss_mask", "policy_versions")
  names = (*names, "sampler_logprobs", "turn_rewards")
  return {name: getattr(batch, name)[at].tolist() for name in names}


# ------------------------------------------------------------- whose is what


def test_c39_each_turn_trains_behind_what_the_template_leaves_of_the_others():
  env = env_of(Says(), RETELL)
  engine, done = talk(env, {0: THINKS})
  made, second = done[0], (9, 8, 10, END, SAYS, 50, SAYS + 1)
  third = (*second, 11, END, SAYS, 51, SAYS + 1)
  assert made.uid == 0 and made.finish == "stop"
  assert made.tokens == sum(THINKS, ())
  assert made.versions == (3, 3, 3, 4, 4, 4, 5, 5, 5)
  assert made.segments == ((3, second), (6, third))
  assert [turn.end for turn in made.turns] == [3, 6, 9]
  # The engine saw these very prompts, each with random numbers of its own.
  assert [r.prompt for r in engine.asked] == [(9, 8), second, third]
  assert not any(r.begun for r in engine.asked)
  names = [r.uids for r in engine.asked]
  assert names == [(renewal.name(0, k),) for k in range(3)]
  assert names[0] == (0,) and len({*names}) == 3
  assert engine.freed == [uid for (uid,) in names]
  (rollout,) = rollouts_of(env, done, 1.0)
  assert rollout.text == f"{THOUGHT} 12"
  assert rollout.conversation.split("\n")[:2] == [
    f"{THOUGHT} 10 {END}",
    "--- row 2 ---",
  ]
  batch = pack.pack([group_of([rollout])], pack.Layout(rows=3, length=16))
  earned = (1.0, 2.0, 8.0)
  for number, prompt in enumerate(((9, 8), second, third)):
    own, context = THINKS[number], len(prompt)
    assert row_of(batch, number) == {
      "tokens": [*prompt, *own],
      "positions": list(range(context + 3)),
      "loss_mask": [0.0] * context + [1.0] * 3,
      "policy_versions": [-1] * context + [3 + number] * 3,
      "sampler_logprobs": [0.0] * context + [-0.5, -0.25, -0.125],
      "turn_rewards": [0.0] * (context + 2) + [earned[number]],
    }
  assert batch.rollout_ids.tolist() == [0, 0, 0]
  assert batch.rewards.tolist() == [1.0] * 3
  assert batch.group_ids.tolist() == [0] * 3
  assert batch.loss_mask.sum() == 9


def test_c39_turns_that_append_share_a_row_whose_observation_is_masked():
  script = (THINKS[0], (11, END), THINKS[2])
  env = env_of(Says(), RETELL)
  _, done = talk(env, {0: script})
  made, second = done[0], (9, 8, 10, END, SAYS, 50, SAYS + 1)
  said = (SAYS, 51, SAYS + 1)
  assert made.segments == ((3, second),)
  assert made.tokens == (*script[0], *script[1], *said, *script[2])
  assert made.versions == (3, 3, 3, 4, 4, -1, -1, -1, 5, 5, 5)
  assert [turn.end for turn in made.turns] == [3, 5, 11]
  batch = pack.pack(
    [group_of(rollouts_of(env, done, 1.0))], pack.Layout(rows=2, length=16)
  )
  mask = [0.0] * 7 + [1.0] * 2 + [0.0] * 3 + [1.0] * 3
  assert row_of(batch, 1)["loss_mask"] == mask
  assert row_of(batch, 1)["tokens"] == [*second, *made.tokens[3:]]


def test_an_environment_puts_a_summary_in_the_place_of_all_that_was_said():
  env = env_of(Says(folds=2), renewal.Renewal(max_rows=2))
  engine, done = talk(env, {0: THINKS})
  made = done[0]
  # The first answer goes on behind the turn, thought and all.
  assert engine.asked[1].begun[0].tokens == (*THINKS[0], SAYS, 50, SAYS + 1)
  assert made.segments == ((9, (60, 61)),)
  assert [r.uids for r in engine.asked] == [(0,), (0,), (renewal.name(0, 1),)]
  assert [*segments.split(rollouts_of(env, done, 0.0)[0])] == [
    segments.Row(prompt=(9, 8), begin=0, end=9),
    segments.Row(prompt=(60, 61), begin=9, end=12),
  ]


def test_a_template_that_only_appends_gives_the_one_row_of_today():
  script = {0: ((10, END), (11, END), (12, END))}
  _, plain = talk(env_of(Says()), script)
  engine, told = talk(env_of(Says(), RETELL), script)
  assert told == plain and not told[0].segments
  assert [r.uids for r in engine.asked] == [(0,)] * 3


@pytest.mark.parametrize(
  ("renews", "max_prompt", "rows"),
  [
    (renewal.Renewal(max_rows=2, retell=True), 32, 2),
    (RETELL, 7, 2),
    (RETELL, 6, 1),
  ],
)
def test_no_row_or_no_room_for_a_prompt_ends_a_conversation(
  renews, max_prompt, rows
):
  env = env_of(Says(), renews, max_prompt=max_prompt)
  engine, done = talk(env, {0: THINKS})
  made = done[0]
  assert made.finish == "length" and made.tokens == sum(THINKS[:rows], ())
  assert len(made.turns) == len(made.segments) + 1 == rows
  assert all(turn.whole for turn in made.turns)
  assert made.turns[-1].end == len(made.tokens)
  assert len(engine.freed) == rows
  found = metrics.conversations([group_of(rollouts_of(env, done, 0.0))], 4)
  assert found["env/rows_mean"] == found["env/rows_max"] == rows
  assert found["env/truncated_tokens"] == 1 and not found["env/truncated_turns"]


def test_rows_of_conversations_under_way_have_names_of_their_own():
  near = [renewal.name(u, k) for u in range(4096) for k in range(8)]
  assert len({*near}) == len(near)
  assert all(0 <= name < 2**32 for name in near)


# ------------------------------------------------------------ shown, and kept


def pair():
  """A group of a rollout of three rows, and of one of one row."""
  env = env_of(Says(), RETELL, group=2)
  _, done = talk(env, {0: THINKS, 1: ((10, END), (11, END), (12, END))})
  return env, done


def test_a_dump_and_a_log_have_the_rows(tmp_path):
  env, done = pair()
  group = group_of(rollouts_of(env, done, 1.0, 0.0))
  path = dump.batch(tmp_path, 1)
  dump.write(path, [group], {})
  (back,) = dump.read(path)
  assert back == group
  assert '"segments"' in (path / "groups.jsonl").read_text()
  lines = log.Log(tmp_path)
  lines.rollouts(1, [group], 1)
  lines.close()
  text = (tmp_path / log.ROLLOUTS_FILE).read_text()
  assert "9 tokens, 3 rows, stop" in text and "--- row 3 ---" in text
  assert "12 tokens, stop" in text


def test_penalties_of_words_count_all_rows_and_repeat_within_a_turn_only():
  env = env_of(Says(), RETELL)
  (rollout,) = rollouts_of(env, talk(env, {0: THINKS})[1], 1.0)
  assert shaping.overlong(rollout, None, most=10, margin=2) == -0.5
  assert shaping.repetition(rollout, None, size=1) == 0.0
  # Said twice, but in two turns.
  same = ((THOUGHT, 10, END),) * 3
  (rollout,) = rollouts_of(env, talk(env, {0: same})[1], 1.0)
  assert shaping.repetition(rollout, None, size=1) == 0.0


# -------------------------------------------------------------------- refused


def test_what_cannot_be_is_refused_in_one_line():
  with pytest.raises(types.InputError, match="max_rows: expected >= 2, got 1"):
    renewal.Renewal(max_rows=1)
  with pytest.raises(types.InputError, match="env.max_turns = 2, got 3"):
    env_of(Says(), RETELL, max_turns=2)
  with pytest.raises(types.RunError, match="without env.renewal, got a step"):
    talk(env_of(Says(folds=1)), {0: THINKS})
  step: Any = multi_turn.Step(replaces=True, messages=())
  with pytest.raises(types.RunError, match="expected messages, or None"):
    multi_turn.checked(step)
  cfg = multi_turn.Conversation(environment=Says, renewal=RETELL)
  stream = schedule.StreamConfig()
  assert conversations.made(cfg, stream, 0, objectives.Objective().needs)
  for baseline in (baselines.Returns(), baselines.Critic()):
    needs = objectives.Objective(baseline=baseline).needs
    with pytest.raises(types.InputError, match="env.renewal: .*max_rows=3"):
      conversations.made(cfg, stream, 0, needs)
    plain = dataclasses.replace(cfg, renewal=None)
    assert conversations.made(plain, stream, 0, needs)
  tree = {
    "stream": {"deterministic": False, "on_stale": "wait"},
    "sampling": {},
    "env": {"renewal": {"max_rows": 4}},
  }
  with pytest.raises(types.InputError, match="env.renewal.max_rows: .*got 4"):
    costs.setting(tree, 1)


def test_without_a_template_a_summary_is_text_and_nothing_is_retold():
  plain = tokenizers.characters("016 ")

  class Tools(Says):
    schemas = ({"type": "function"},)

  def built(renews) -> Any:
    cfg = multi_turn.Conversation(environment=Tools, renewal=renews)
    return conversations.build(
      cfg, Tools(), 1, types.SamplingParams(max_tokens=8), plain, max_prompt=8
    )

  env = built(renewal.Renewal())
  said = ({"role": "user", "content": "60 "}, {"role": "tool", "content": "1"})
  assert env.render(said) == plain.prompt_ids("60 1")[0]
  with pytest.raises(types.RunError, match="with some text .*Mend the env"):
    env.render(({"role": "user", "content": ""},))
  with pytest.raises(types.InputError, match="^env.renewal.retell: .*got true"):
    built(RETELL)
