"""Streams of conversations: the same promises as of single turns."""

import dataclasses
import json
import threading

import pytest

from jaxrl_post import types
from jaxrl_post.envs import (
  conversing,
  events,
  multi_turn,
  renewal,
  single_turn,
)
from jaxrl_post.envs import cut as cuts
from jaxrl_post.sampling import fleet as fleets
from jaxrl_post.sampling import server as servers
from tests.unit import conversing_test as single
from tests.unit import stream_resume_test as resumes
from tests.unit import streams


@dataclasses.dataclass(frozen=True)
class Talks:
  """Says up to two things, each after a few milliseconds that none chose."""

  schemas = ()

  def reset(self, prompt):
    return prompt.uid, 0

  def step(self, state, text):
    uid, done = state
    threading.Event().wait(1e-3 * (streams.time.monotonic_ns() % 3))
    if done == streams.mixed(uid, 5) % 3:
      return multi_turn.Step(reward=1.0)
    if streams.mixed(uid, done, 7) % 5 == 0:
      raise OSError("no luck")
    message = {"role": "tool", "content": f"{done}"}
    return multi_turn.Step(state=(uid, done + 1), messages=(message,), calls=1)

  def failed(self, state, reason):
    message = {"role": "tool", "content": "failed"}
    return multi_turn.Step(state=(state[0], state[1] + 1), messages=(message,))


class Restores(Talks):
  """The same, and its conversations go on after a restart."""

  def save(self, state):
    return state[1]

  def restore(self, prompt, saved):
    return prompt.uid, saved


ENV = multi_turn.MultiTurn(
  single_turn.SingleTurn(
    streams.GROUP, types.SamplingParams(max_tokens=64), lambda ids: ""
  ),
  multi_turn.Conversation(environment=Talks, workers=4),
  Talks(),
  lambda messages, ended: tuple(ord(x) for m in messages for x in m["content"]),
)


@dataclasses.dataclass(frozen=True)
class Folds(Talks):
  """The same, but what it says takes the place of all that was said."""

  def step(self, state, text):
    step = super().step(state, text)
    return dataclasses.replace(step, replaces=step.messages is not None)


FOLDS = dataclasses.replace(
  ENV,
  cfg=multi_turn.Conversation(
    environment=Folds, workers=4, renewal=renewal.Renewal(max_rows=2)
  ),
  environment=Folds(),
  render=lambda messages: tuple(ord(m["content"][0]) for m in messages),
  max_prompt=4,
)


RESTORES = dataclasses.replace(ENV, environment=Restores())


def made(setup, folder, *, lockstep=False, of=None, step=0, env=ENV, **options):
  """Runs a stream of conversations; or goes on with one from a step."""
  options |= {
    "env": env,
    "engine": conversing.Conversing(
      streams.Engine(recompute=setup.in_flight == "recompute", finish="stop"),
      env,
      streams.data(setup.size).__getitem__,
      lockstep=lockstep,
    ),
  }
  if of is None:
    return setup.run(folder, **options)
  return setup.resumed(folder, of, step, **options)


def completions(batches):
  """Yields completions with the number of their batch."""
  for number, groups in enumerate(batches):
    for group in groups:
      yield from ((number, r.completion) for r in group.rollouts)


def test_lag_0_trains_the_same_however_long_answers_take(tmp_path):
  runs = [
    made(
      streams.Setup(max_lag=0, asynchronous=asynchronous, fixed=fixed),
      tmp_path / f"{asynchronous}{fixed}{lockstep}",
      lockstep=lockstep,
    )
    for asynchronous, fixed, lockstep in (
      (False, False, False),
      (True, False, False),
      (True, True, True),
      (False, False, True),
    )
  ]
  assert len(runs[0].batches) == streams.STEPS
  for run in runs[1:]:
    assert streams.repeated(run.batches, runs[0].batches)
  turns = {
    len(completion.turns) for _, completion in completions(runs[0].batches)
  }
  assert turns == {1, 2, 3}


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
  "env",
  [ENV, RESTORES, FOLDS],
  ids=["anew", "goes on", "folds"],
)
def test_c95_a_resumed_run_of_lag_0_is_the_run_that_went_on(
  tmp_path, fixed, env
):
  setup = streams.Setup(max_lag=0, fixed=fixed, skips=(2,))
  one = made(setup, tmp_path, lockstep=fixed, env=env)
  assert {len(c.segments) for _, c in completions(one.batches)} == (
    {0, 1} if env is FOLDS else {0}
  )
  for step in (1, 3):
    rest = made(setup, tmp_path, lockstep=fixed, of=one, step=step, env=env)
    assert streams.repeated(rest.batches, one.batches[step:])
    assert rest.params == one.params


@pytest.mark.parametrize(
  ("in_flight", "env"),
  [("keep", ENV), ("recompute", RESTORES), ("drain", RESTORES)],
  ids=["keep", "recompute", "drain"],
)
def test_half_made_conversations_are_neither_lost_nor_doubled(
  tmp_path, in_flight, env
):
  setup = streams.Setup(max_lag=2, in_flight=in_flight, filtered=True)
  one = made(setup, tmp_path, env=env)
  if in_flight == "drain":  # One that goes on may have begun with others.
    for _, completion in completions(one.batches):
      assert len({*completion.versions} - {-1}) == 1
  for step in (1, 2, 5):
    rest = made(setup, tmp_path, of=one, step=step, env=env)
    batches = one.batches[:step] + rest.batches
    assert len(batches) == streams.STEPS
    text = (tmp_path / f"from-{step}" / events.NAME).read_text()
    found = resumes.fates(text)
    trained = [uid for uid, kind in found.items() if kind == "Consume"]
    assert sorted(trained) == sorted(streams.uids(batches))
    last = cuts.from_files(
      rest.cuts[streams.STEPS], prompts=streams.data(), rollout=ENV.rollout
    )
    versions = []
    for number, completion in completions(batches):
      own = [v for v in completion.versions if v >= 0]
      assert number - 2 <= min(own) <= max(own) <= number
      assert completion.turns[-1].end == len(completion.tokens)
      versions += own
    assert last.ledger.trained.tokens == len(versions)
    assert last.counters.generated >= len([*completions(batches)])


@pytest.mark.parametrize("max_lag", [1, 3])
def test_c95_conversations_of_a_cut_go_on_as_if_it_had_not_been(
  tmp_path, max_lag
):
  setup = streams.Setup(max_lag=max_lag, fixed=True, in_flight="recompute")
  options = {"env": RESTORES, "lockstep": True, "score": streams.by_index}
  one, later = made(setup, tmp_path, **options), 0
  for step in (1, 2, 3):
    cut = cuts.from_files(
      one.cuts[step], prompts=streams.data(), rollout=RESTORES.rollout
    )
    rest = made(setup, tmp_path, of=one, step=step, **options)
    assert streams.repeated(rest.batches, one.batches[step:])
    done = {c.uid: c for _, c in completions(rest.batches)}
    for begun in (p for group in cut.groups for p in group.begun):
      completion, count = done[begun.uid], len(begun.tokens)
      assert completion.tokens[:count] == begun.tokens
      assert completion.logprobs[:count] == begun.logprobs
      assert completion.versions[:count] == begun.versions
      turns = begun.talk.turns if begun.talk else ()
      assert completion.turns[: len(turns)] == turns
      later += len(turns) > 0
  assert later > 0


@pytest.mark.parametrize("env", [ENV, FOLDS], ids=["goes on", "begins anew"])
def test_a_cut_comes_back_with_what_turns_earned(tmp_path, env):
  setup = streams.Setup(max_lag=2)
  one = made(setup, tmp_path, env=env)
  kept = [
    cuts.from_files(files, prompts=streams.data(), rollout=env.rollout)
    for files in one.cuts.values()
  ]
  ended = [
    completion
    for cut in kept
    for group in cut.groups
    for completion in (*group.sampled, *(r.completion for r in group.scored))
  ]
  whole = [c for c in ended if c.finish == "stop"]
  assert whole and all(c.turns[-1].reward == 1.0 for c in whole)
  assert env is FOLDS or whole == ended
  assert any(c.segments for c in ended) == (env is FOLDS)
  for cut, files in zip(kept, one.cuts.values(), strict=True):
    assert cuts.to_files(cut) == files
  begun = [p for cut in kept for group in cut.groups for p in group.begun]
  assert begun and all(v >= 0 for p in begun for v in p.versions)


@dataclasses.dataclass(frozen=True)
class Member:
  """One of a fleet."""

  name: str
  server: servers.Server

  def submit(self, order) -> None:
    self.server.submit(order)

  def publish(self, policy) -> None:
    self.server.publish(policy)


def test_several_engines_have_conversations_like_one():
  engines, fleet = [single.Engine(), single.Engine()], []
  members = [
    Member(
      str(index),
      servers.Server(
        engine,
        tester=single.Engine,
        verify=lambda policy: None,
        report=lambda made, index=index: fleet[0].report(index, made),
      ),
    )
    for index, engine in enumerate(engines)
  ]
  fleet.append(fleets.Fleet(members, rows=8, stall_s=20.0))
  fleet[0].publish(types.Policy(params=None, version=3, step=3))
  env = single.env_of(single.Counts())
  talks = conversing.Conversing(
    fleet[0], env, single.PROMPTS.__getitem__, lockstep=False
  )
  for uid in range(4):
    talks.add(env.request(single.PROMPTS[uid]))
  done = {}
  while talks.busy:
    done |= {c.uid: c for c in talks.step(None, 3) or ()}
  for member in members:
    member.server.close()
  _, _, plain = single.talk(uids=range(4))
  assert done.keys() == plain.keys()
  for uid, made in done.items():
    assert made.tokens == plain[uid].tokens and made.turns == plain[uid].turns
  # Each went on where it began, and nobody holds anything for it any more.
  asked = [{uid for r in e.asked for uid in r.uids} for e in engines]
  assert all(asked) and not asked[0] & asked[1]
  assert fleet[0]._homes == {} and fleet[0].partials() == ()


class Counting(conversing.Conversing):
  """Remembers which steps had nothing to sample, and waited in vain."""

  def step(self, *args):
    made = super().step(*args)
    self.vain = [*getattr(self, "vain", ()), made is None]
    return made


def test_waiting_for_answers_is_no_event_and_no_progress(tmp_path):
  @dataclasses.dataclass(frozen=True)
  class Slow(Talks):
    def step(self, state, text):
      threading.Event().wait(0.2)
      return super().step(state, text)

  env = dataclasses.replace(ENV, environment=Slow())
  talks = Counting(
    streams.Engine(finish="stop"),
    env,
    streams.data().__getitem__,
    lockstep=False,
  )
  streams.Setup().run(tmp_path, env=env, engine=talks, num_steps=1)
  lines = (tmp_path / events.NAME).read_text().splitlines()
  runs = sum(json.loads(line)["event"] == "Run" for line in lines)
  assert sum(talks.vain) >= 3
  # The run may end while a step is made.
  assert runs in (talks.vain.count(False), talks.vain.count(False) - 1)
