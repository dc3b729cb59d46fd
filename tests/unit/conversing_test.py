"""Conversations: whose tokens are whose, when they end, who waits for whom."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.data import pack
from jaxrl_post.envs import (
  conversing,
  multi_turn,
  single_turn,
)
from jaxrl_post.runtime import metrics

END, SAYS = 2, 40
PROMPTS = {
  uid: types.Prompt(uid=uid, tokens=(9, 8), text="p", reference=uid)
  for uid in range(8)
}


@dataclasses.dataclass(frozen=True)
class Counts:
  """Says the number of the turn, `turns` times; then it has heard enough."""

  turns: int = 2
  schemas = ()

  def reset(self, prompt):
    return prompt.reference, 0

  def step(self, state, text):
    uid, done = state
    if done == self.turns:
      return multi_turn.Step(reward=10.0)
    return multi_turn.Step(
      state=(uid, done + 1),
      messages=({"role": "tool", "content": f"{done}"},),
      reward=float(done),
      calls=2,
      errors=done,
    )

  def failed(self, state, reason):
    return multi_turn.Step(
      state=state, messages=({"role": "tool", "content": "9"},)
    )


class Engine:
  """Makes turns of two tokens and their end, one block each, in all rows.

  Attributes:
    asked: all requests.
    freed: uids that were released.
    blocks: how many were made.
  """

  between, seats = "busy", ((0, 0, 0.0, 3),)

  def __init__(self, cut=()) -> None:
    self.cut, self.queue = cut, []
    self.asked, self.freed, self.blocks = [], [], 0
    self.room = 8

  @property
  def busy(self) -> bool:
    return bool(self.queue)

  def add(self, request) -> None:
    self.asked.append(request)
    begun = {p.uid: p for p in request.begun}
    self.queue += [(uid, begun.get(uid), request) for uid in request.uids]

  def step(self, params, version, launched=None):
    self.blocks += 1
    queue, self.queue = self.queue, []
    return [
      self._made(uid, was, request, version) for uid, was, request in queue
    ]

  def _made(self, uid, begun, request, version):
    begun = begun or types.Partial(uid=uid, tokens=(), logprobs=(), versions=())
    place = len(begun.tokens)
    own = (10 + uid, 20 + place, END)
    room = request.sampling.max_tokens - place
    return types.Completion(
      uid=uid,
      tokens=(*begun.tokens, *own)[: place + room],
      logprobs=(*begun.logprobs, -0.5, -0.25, -0.125)[: place + room],
      versions=(*begun.versions, version, version, version)[: place + room],
      finish="stop" if room >= 3 else "length",
    )

  def partials(self):
    return tuple(
      begun
      or types.Partial(uid=uid, tokens=(1,), logprobs=(0.0,), versions=(0,))
      for uid, begun, _ in self.queue
    )

  def renew(self) -> None:
    pass

  def release(self, uids) -> None:
    self.freed += uids


def encode(messages, ended):
  """The template of these tests: a mark, the number, a mark."""
  assert ended
  return (SAYS, *[50 + int(m["content"]) for m in messages], SAYS + 1)


def env_of(environment, group=2, max_tokens=32, **settings):
  sampling = types.SamplingParams(max_tokens=max_tokens, stop_ids=(END,))
  return multi_turn.MultiTurn(
    single_turn.SingleTurn(group, sampling, lambda ids: f"{[*ids]}"),
    multi_turn.Conversation(environment=lambda: environment, **settings),
    environment,
    encode,
  )


def talk(environment=None, *, engine=None, uids=(0,), lockstep=True, **options):
  """Has whole groups; returns engine, env and conversations by uid."""
  env = env_of(environment or Counts(), **options)
  engine = engine or Engine()
  talks = conversing.Conversing(
    engine, env, PROMPTS.__getitem__, lockstep=lockstep
  )
  for uid in uids:
    talks.add(env.request(PROMPTS[uid]))
  done, version = {}, 3
  while talks.busy:
    done |= {c.uid: c for c in talks.step(None, version) or ()}
    version += 1
  return engine, env, done


# ------------------------------------------------------------- whose is what


def test_c39_tokens_masks_versions_and_rewards_are_those_of_this_table():
  engine, env, done = talk()
  table = [
    # token, version, log-probability, reward
    (10, 3, -0.5, 0),
    (20, 3, -0.25, 0),
    (END, 3, -0.125, 0.0),
    (SAYS, -1, 0, 0),
    (50, -1, 0, 0),
    (SAYS + 1, -1, 0, 0),
    (10, 4, -0.5, 0),
    (26, 4, -0.25, 0),
    (END, 4, -0.125, 1.0),
    (SAYS, -1, 0, 0),
    (51, -1, 0, 0),
    (SAYS + 1, -1, 0, 0),
    (10, 5, -0.5, 0),
    (32, 5, -0.25, 0),
    (END, 5, -0.125, 10.0),
  ]
  tokens, versions, logprobs, rewards = zip(*table, strict=True)
  made = done[0]
  assert made.tokens == tokens and made.versions == versions
  assert made.logprobs == logprobs and made.finish == "stop"
  assert [turn.end for turn in made.turns] == [3, 9, 15]
  rollout = env.rollout(PROMPTS[0], made)
  assert rollout.text == "[10, 32]"  # The last turn, without its end.
  assert rollout.conversation == f"{[*tokens[:-1]]}"
  group = types.Group(prompt=PROMPTS[0], rollouts=(rollout,))
  batch = pack.pack([group], pack.Layout(rows=1, length=20))
  end = 2 + len(table)
  assert batch.tokens[0, :end].tolist() == [9, 8, *tokens]
  mask = [version >= 0 for version in versions]
  assert batch.loss_mask[0, :end].tolist() == [0, 0, *mask]
  assert batch.policy_versions[0, 2:end].tolist() == [*versions]
  assert batch.sampler_logprobs[0, 2:end].tolist() == [*logprobs]
  assert batch.turn_rewards[0, 2:end].tolist() == [*rewards]
  assert not batch.turn_rewards[0, end:].any()
  lag = metrics.staleness(
    np.asarray(batch.policy_versions),
    np.asarray(batch.loss_mask),
    6,
    sequence=np.asarray(batch.sequence),
    rollout_ids=np.asarray(batch.rollout_ids),
  )
  assert lag == {
    "staleness/mean": 2.0,
    "staleness/max": 3.0,
    "staleness/head": 3.0,
  }
  # With only the newest version the rewards of all turns stay.
  batch = pack.pack(
    [group], pack.Layout(rows=1, length=20), mask_stale_tokens=True
  )
  assert batch.loss_mask[0].nonzero()[0].tolist() == [14, 15, 16]
  assert (batch.turn_rewards * batch.loss_mask).sum() == 11.0


def test_a_turn_asks_to_go_on_from_all_that_was_said():
  engine, env, _ = talk(max_turns=3)
  first, *rest = engine.asked
  assert first.uids == (0, 1) and first.hold and not first.begun
  assert [r.uids for r in rest] == [(0,), (1,), (0,), (1,)]
  # The last turn that there may be needs no row behind it.
  assert [r.hold for r in rest] == [True, True, False, False]
  assert [len(r.begun[0].tokens) for r in rest] == [6, 6, 12, 12]
  assert sorted(engine.freed) == [0, 1]


@pytest.mark.parametrize("uids", [(0,), (2, 5)])
def test_numbers_of_conversations_are_those_of_this_table(uids):
  _, env, done = talk(uids=uids)
  groups = [
    types.Group(
      prompt=PROMPTS[uid],
      rollouts=tuple(
        env.rollout(PROMPTS[uid], done[2 * uid + i]) for i in (0, 1)
      ),
    )
    for uid in uids
  ]
  assert metrics.conversations(groups, 4) == {
    "env/turns_mean": 3.0,
    "env/turns_max": 3.0,
    "env/tool_calls": 4.0,  # Two in each turn but the last.
    "env/tool_errors": 2.0 * len(uids),
    "env/tool_timeouts": 0.0,
    "env/truncated_turns": 0.0,
    "env/truncated_tokens": 0.0,
    "env/observation_tokens": 6.0,
    "env/turn_reward": 11.0,
    "env/rows_mean": 1.0,
    "env/rows_max": 1.0,
  }


# -------------------------------------------------------------- how they end


@pytest.mark.parametrize(
  ("limits", "length", "turns", "late", "whole"),
  [
    ({"max_turns": 2}, 9, 2, "turns", True),
    ({"max_turns": 1}, 3, 1, "turns", True),
    # No room for what is said and a token; room for that token only.
    ({"max_tokens": 6}, 3, 1, "tokens", True),
    ({"max_tokens": 7}, 7, 2, "tokens", False),
    ({"max_tokens": 9}, 9, 2, "tokens", True),
    # The limit of tokens comes in the last turn.
    ({"max_tokens": 8, "max_turns": 2}, 8, 2, "tokens", False),
  ],
  ids=str,
)
def test_no_turn_or_no_token_left_ends_a_conversation(
  limits, length, turns, late, whole
):
  _, env, done = talk(**limits)
  made = done[0]
  assert made.finish == "length" and len(made.tokens) == length
  assert len(made.turns) == turns and made.turns[-1].end == length
  assert made.turns[-1].whole == whole and made.versions[-1] >= 0
  group = types.Group(
    prompt=PROMPTS[0], rollouts=(env.rollout(PROMPTS[0], made),)
  )
  found = metrics.conversations([group], limits.get("max_turns", 4))
  for name in ("turns", "tokens"):
    assert found[f"env/truncated_{name}"] == (name == late)
  layout = pack.Layout(rows=1, length=20)
  assert pack.pack([group], layout).truncated.tolist() == [True]


def test_an_environment_that_raises_is_told_to_the_policy_and_counted():
  @dataclasses.dataclass(frozen=True)
  class Raises(Counts):
    def step(self, state, text):
      if state[1] == 1:
        raise OSError("disk")
      return super().step(state, text)

    def failed(self, state, reason):
      assert reason == "OSError: disk"
      return super().failed((state[0], 2), reason)

  _, _, done = talk(Raises(turns=2))
  made = done[0]
  assert made.tokens[9:12] == (SAYS, 59, SAYS + 1) and made.finish == "stop"
  assert [(t.calls, t.errors, t.timeouts) for t in made.turns] == [
    (2, 0, 0),
    (1, 1, 0),
    (0, 0, 0),
  ]


@pytest.mark.parametrize("kind", [types.InputError, types.RunError])
def test_a_mistake_that_an_environment_names_ends_the_run(kind):
  @dataclasses.dataclass(frozen=True)
  class Refuses(Counts):
    def step(self, state, text):
      raise kind("no key")

  with pytest.raises(kind, match="no key"):
    talk(Refuses())


def test_what_is_never_answered_is_late_and_the_others_have_ended():
  never = threading.Event()

  @dataclasses.dataclass(frozen=True)
  class Hangs(Counts):
    def step(self, state, text):
      if state[0] == 1 and state[1] == 0:
        never.wait()
      return super().step(state, text)

    def failed(self, state, reason):
      assert reason == "no answer within 0.2 s"
      return super().failed((state[0], self.turns), reason)

  _, _, done = talk(Hangs(), uids=(0, 1), lockstep=False, timeout_s=0.2)
  assert [len(done[uid].turns) for uid in range(4)] == [3, 3, 2, 2]
  for uid in (2, 3):
    first = done[uid].turns[0]
    assert (first.calls, first.errors, first.timeouts) == (1, 1, 1)
  never.set()


def test_answers_that_all_hang_end_the_run():
  never = threading.Event()

  @dataclasses.dataclass(frozen=True)
  class Hangs(Counts):
    def step(self, state, text):
      never.wait()
      return super().step(state, text)

  with pytest.raises(types.RunError, match="got 5 that hang"):
    talk(Hangs(), uids=range(4), workers=1, timeout_s=0.01)
  never.set()


# ------------------------------------------------------------- who waits


def test_a_slow_tool_of_one_conversation_stops_no_token_of_others():
  @dataclasses.dataclass(frozen=True)
  class Slow(Counts):
    def step(self, state, text):
      if state == (0, 0):
        threading.Event().wait(1.0)
      return super().step(state, text)

  env = env_of(Slow(), group=1)
  engine = Engine()
  talks = conversing.Conversing(
    engine, env, PROMPTS.__getitem__, lockstep=False
  )
  begun, ended = time.monotonic(), {}
  for uid in range(6):
    talks.add(env.request(PROMPTS[uid]))
  while talks.busy:
    samples = engine.busy
    assert talks.between == ("busy" if samples else "wait/host")
    for completion in talks.step(None, 0) or ():
      ended[completion.uid] = time.monotonic() - begun
    assert talks.seats == (engine.seats if samples else ())
  assert ended.pop(0) >= 1.0
  assert len(ended) == 5 and max(ended.values()) < 0.5


def test_answers_are_made_side_by_side_but_no_more_than_may_be():
  open_, most, lock = [0], [0], threading.Lock()

  @dataclasses.dataclass(frozen=True)
  class Counted(Counts):
    def step(self, state, text):
      with lock:
        open_[0] += 1
        most[0] = max(most[0], open_[0])
      threading.Event().wait(0.05)
      with lock:
        open_[0] -= 1
      return super().step(state, text)

  for workers in (1, 3):
    most[0] = 0
    talk(Counted(turns=1), uids=range(4), workers=workers, lockstep=False)
    assert most[0] == workers


def test_in_lockstep_no_block_is_made_while_an_answer_is_open():
  engines = []

  @dataclasses.dataclass(frozen=True)
  class Looks(Counts):
    def step(self, state, text):
      before = engines[0].blocks
      threading.Event().wait(0.02 * (state[0] % 3))
      assert engines[0].blocks == before
      return super().step(state, text)

  found = []
  for _ in range(2):
    engines[:] = [Engine()]
    engine, _, done = talk(Looks(), engine=engines[0], uids=range(4))
    # One that had raised would count as one call.
    assert {tuple(t.calls for t in c.turns) for c in done.values()} == {
      (2, 2, 0)
    }
    found.append((engine.asked, done))
  assert found[0] == found[1]


def test_an_evaluation_talks_in_rounds_and_comes_back_in_order():
  env, rounds = env_of(Counts(), group=1), []

  def sample(requests):
    rounds.append([uid for r in requests for uid in r.uids])
    assert not any(r.hold for r in requests)
    engine = Engine()
    for request in requests:
      engine.add(request)
    return engine.step(None, 4)

  requests = [env.request(PROMPTS[uid]) for uid in (3, 1)]
  made = conversing.generate(
    sample, requests, env=env, prompts=PROMPTS.__getitem__
  )
  assert [c.uid for c in made] == [3, 1]
  assert rounds == [[3, 1]] * 3
  assert [len(c.turns) for c in made] == [3, 3]


def test_an_answer_of_no_token_is_the_environments_fault_and_ends_the_run():
  env = dataclasses.replace(env_of(Counts()), encode=lambda messages, ended: ())
  talks = conversing.Conversing(
    Engine(), env, PROMPTS.__getitem__, lockstep=True
  )
  talks.add(env.request(PROMPTS[0]))
  with pytest.raises(
    types.RunError, match="^env.environment: expected messages of at least one"
  ):
    talks.step(None, 0)
