"""Conversations that a stop breaks off, and that go on where they were."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.envs import conversing, renewal
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import ledger as ledgers
from tests.unit import conversing_test as single
from tests.unit import streams


@dataclasses.dataclass(frozen=True)
class Restores(single.Counts):
  """Can be restored; notes what was asked, restored and begun.

  Attributes:
    hangs: number of the turn whose answer waits, and for what.
    asked: states that were to be answered.
    resets: prompts of the conversations that began.
  """

  hangs: tuple[int, threading.Event] | None = None
  asked: list = dataclasses.field(default_factory=list)
  resets: list = dataclasses.field(default_factory=list)

  def reset(self, prompt):
    self.resets.append(prompt.uid)
    return super().reset(prompt)

  def step(self, state, text):
    self.asked.append(state)
    if self.hangs is not None and state[1] == self.hangs[0]:
      assert self.hangs[1].wait(10.0)
    return super().step(state, text)

  def save(self, state):
    return {"done": state[1]}

  def restore(self, prompt, saved):
    return prompt.reference, saved["done"]


def stepped(talks, steps, version=0):
  """Returns conversations that have ended after so many steps, by uid."""
  done = {}
  for number in range(steps):
    done |= {c.uid: c for c in talks.step(None, version + number) or ()}
  return done


def written(partials):
  """Returns what a checkpoint gives back of partials."""
  begun = types.Partial(uid=0, tokens=(), logprobs=(), versions=())
  one = cuts.Open(uid=0, begun=(begun, *partials), sampled=(), scored=())
  cut = cuts.Cut(
    ledger=ledgers.start(1, 0),
    frontier=frontiers.Frontier(),
    groups=(one,),
    steps={},
    counters=cuts.Counters(),
    events=0,
  )
  read = cuts.from_files(
    cuts.to_files(cut),
    prompts=streams.data(),
    rollout=lambda *_: pytest.fail("none"),
  )
  assert read == cut
  return read.groups[0].begun[1:]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_conversations_go_on_past_their_first_turn(steps, far):
  one, two = Restores(), Restores()
  plain = conversing.Conversing(
    single.Engine(),
    single.env_of(single.Counts()),
    single.PROMPTS.__getitem__,
    lockstep=True,
  )
  plain.add(single.env_of(one).request(single.PROMPTS[1]))
  whole = stepped(plain, 3)
  engine = single.Engine()
  if far:  # As engines in other processes, which tell of nothing half made.
    engine.partials = lambda: ()
  talks = conversing.Conversing(
    engine, single.env_of(one), single.PROMPTS.__getitem__, lockstep=True
  )
  talks.add(single.env_of(one).request(single.PROMPTS[1]))
  assert not stepped(talks, steps)
  kept = written(talks.partials())
  assert [(p.uid, len(p.tokens)) for p in kept] == [
    (2, 6 * steps),
    (3, 6 * steps),
  ]
  assert all(len(p.talk.turns) == steps for p in kept)
  env, engine = single.env_of(two), single.Engine()
  again = conversing.Conversing(
    engine, env, single.PROMPTS.__getitem__, lockstep=True
  )
  again.add(dataclasses.replace(env.request(single.PROMPTS[1]), begun=kept))
  assert stepped(again, 3 - steps, version=steps) == whole
  assert not again.busy
  # Nothing begins anew, and no tool is called for what was answered.
  assert two.resets == []
  assert sorted(two.asked) == sorted(
    (1, done) for done in range(steps, 3) for _ in range(2)
  )
  assert [r.hold for r in engine.asked[:2]] == [True, True]


@pytest.mark.parametrize("turns", [0, 1])
def test_a_turn_whose_answer_was_not_there_is_answered_again(turns):
  _, _, whole = single.talk(group=1)
  never = threading.Event()
  one, two = Restores(hangs=(turns, never)), Restores()
  talks = conversing.Conversing(
    single.Engine(),
    single.env_of(one, group=1),
    single.PROMPTS.__getitem__,
    lockstep=False,
  )
  talks.add(single.env_of(one, group=1).request(single.PROMPTS[0]))
  late = time.monotonic() + 10.0
  while (0, turns) not in one.asked and time.monotonic() < late:
    talks.step(None, 0)
  (kept,) = written(talks.partials())
  never.set()
  assert kept.talk.asked and len(kept.talk.turns) == turns
  assert len(kept.tokens) == 6 * turns + 3 and kept.tokens[-1] == single.END
  env, engine = single.env_of(two, group=1), single.Engine()
  again = conversing.Conversing(
    engine, env, single.PROMPTS.__getitem__, lockstep=True
  )
  again.add(dataclasses.replace(env.request(single.PROMPTS[0]), begun=(kept,)))
  assert not engine.asked and again.busy
  done = stepped(again, 3)
  assert (done[0].tokens, done[0].turns) == (whole[0].tokens, whole[0].turns)
  assert two.asked == [(0, number) for number in range(turns, 3)]


def test_a_turn_whose_experts_are_noted_begins_anew_while_it_waits():
  waits = Restores(hangs=(1, threading.Event()))
  talks = conversing.Conversing(
    single.Engine(),
    single.env_of(waits, group=1),
    single.PROMPTS.__getitem__,
    lockstep=False,
  )
  talks.add(talks._env.request(single.PROMPTS[1]))
  late = time.monotonic() + 10
  while not talks._asked and time.monotonic() < late:
    talks.step(None, 0)
  assert len(talks.partials()) == 1
  ((uid, made),) = talks._asked.items()
  routing = np.zeros((9, 1, 2), np.int8)
  talks._asked[uid] = dataclasses.replace(made, routing=routing)
  assert talks.partials() == ()
  waits.hangs[1].set()


def test_what_cannot_be_restored_begins_anew_but_for_first_turns():
  env, engine = single.env_of(single.Counts(), group=1), single.Engine()
  talks = conversing.Conversing(
    engine, env, single.PROMPTS.__getitem__, lockstep=True
  )
  talks.add(env.request(single.PROMPTS[0]))
  talks.step(None, 0)
  talks.add(env.request(single.PROMPTS[1]))
  assert [p.uid for p in engine.partials()] == [0, 1]
  (kept,) = talks.partials()
  assert kept.uid == 1
  again = conversing.Conversing(
    single.Engine(), env, single.PROMPTS.__getitem__, lockstep=True
  )
  request = dataclasses.replace(env.request(single.PROMPTS[1]), begun=(kept,))
  again.add(request)
  done = []
  while again.busy:
    done += again.step(None, 7) or ()
  assert done[0].versions[:4] == (0, 7, 7, 7) and len(done[0].turns) == 3
  # Nor where an environment that could is no longer there.
  could = single.env_of(Restores(), group=1)
  talks = conversing.Conversing(
    single.Engine(), could, single.PROMPTS.__getitem__, lockstep=True
  )
  talks.add(could.request(single.PROMPTS[0]))
  talks.step(None, 0)
  begun = talks.partials()
  assert len(begun[0].talk.turns) == 1
  again = conversing.Conversing(
    single.Engine(), env, single.PROMPTS.__getitem__, lockstep=True
  )
  again.add(dataclasses.replace(env.request(single.PROMPTS[0]), begun=begun))
  made = stepped(again, 3, version=5)[0]
  assert made.versions[0] == 5 and len(made.turns) == 3


@pytest.mark.parametrize("state", [{1, 2}, float("nan"), single.Counts()])
def test_a_state_that_json_cannot_hold_ends_the_run(state):
  class Odd(Restores):
    def save(self, _):
      return state

  talks = conversing.Conversing(
    single.Engine(),
    single.env_of(Odd()),
    single.PROMPTS.__getitem__,
    lockstep=True,
  )
  talks.add(single.env_of(Odd()).request(single.PROMPTS[0]))
  with pytest.raises(types.RunError, match="save.. to return what JSON can"):
    talks.step(None, 0)


def test_a_cut_only_copies_and_a_save_or_restore_that_hangs_is_late():
  never = threading.Event()

  class Hangs(Restores):
    def save(self, state):
      if state[1] == 2:
        never.wait()
      return super().save(state)

    def restore(self, prompt, saved):
      never.wait()

    def failed(self, state, reason):
      assert reason == "no answer within 0.3 s"
      return dataclasses.replace(
        single.Counts.step(self, state, ""), state=(0, 3)
      )

  env = single.env_of(Hangs(), group=1, timeout_s=0.3)
  talks = conversing.Conversing(
    single.Engine(), env, single.PROMPTS.__getitem__, lockstep=True
  )
  talks.add(env.request(single.PROMPTS[0]))
  talks.step(None, 0)
  kept = talks.partials()
  assert [p.talk.state for p in kept] == ['{"done": 1}']
  talks.step(None, 0)
  (late,) = talks.partials()
  assert late.talk.turns[-1].timeouts == 1
  assert late.talk.state == '{"done": 3}'
  request = dataclasses.replace(env.request(single.PROMPTS[0]), begun=kept)
  again = conversing.Conversing(
    single.Engine(), env, single.PROMPTS.__getitem__, lockstep=True
  )
  with pytest.raises(types.RunError, match="restore.. to end within 0.3 s"):
    again.add(request)
  never.set()


@pytest.mark.parametrize(
  ("change", "keeps"),
  [
    ({}, True),
    ({"history": ({"role": "user", "content": "p"},)}, False),
    (
      {
        "before": types.Completion(
          uid=0, tokens=(), logprobs=(), versions=(), finish="stop"
        )
      },
      False,
    ),
  ],
)
def test_with_renewal_a_first_row_is_kept_under_its_uid(change, keeps):
  env = single.env_of(Restores(), renewal=renewal.Renewal())
  talks = conversing.Conversing(
    single.Engine(), env, single.PROMPTS.__getitem__, lockstep=True
  )
  talks.add(env.request(single.PROMPTS[1]))
  talks.step(None, 0)
  talks._talks = {
    uid: dataclasses.replace(talk, **change)
    for uid, talk in talks._talks.items()
  }
  kept = talks.partials()
  assert [p.uid for p in kept] == ([2, 3] if keeps else [])
