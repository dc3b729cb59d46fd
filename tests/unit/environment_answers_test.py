"""What environments may return, what of it ends a run, and settings."""

import dataclasses
import json
import threading
import time
from typing import Any

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.envs import conversations, conversing, multi_turn, schedule
from tests.unit import conversing_test as single

SAYS = {"role": "tool", "content": "1"}


@dataclasses.dataclass(frozen=True)
class Returns(single.Counts):
  """Answers with whatever it is given."""

  made: Any = None

  def step(self, state, text):
    return self.made


def step_of(**fields: Any) -> multi_turn.Step:
  """Returns a step with whatever in it, as no types are checked in a run."""
  step = multi_turn.Step()
  for name, value in fields.items():
    object.__setattr__(step, name, value)
  return step


def test_numbers_of_arrays_are_plain_ones_from_then_on():
  step = step_of(reward=np.float32(0.5), calls=np.int64(2), errors=np.int32(1))
  _, _, done = single.talk(Returns(made=step))
  (turn,) = done[0].turns
  assert json.loads(json.dumps(dataclasses.asdict(turn)))["reward"] == 0.5
  assert (turn.calls, turn.errors) == (2, 1)
  said = multi_turn.checked(step_of(messages=[SAYS]))
  assert said.messages == (SAYS,)


@pytest.mark.parametrize(
  ("wrong", "rule"),
  [
    (None, "a multi_turn.Step, got None"),
    ({"reward": float("nan")}, "a reward from -1e\\+15 to 1e\\+15 in a step"),
    ({"reward": 2e15}, "a reward .*got 2000000000000000.0"),
    ({"reward": "1"}, "a reward .*got '1'"),
    ({"reward": None}, "a reward .*got None"),
    ({"reward": {"reward": 1.0}}, "a reward"),
    ({"calls": 1.5}, "calls and errors .*, got 1.5"),
    ({"errors": -1}, "calls and errors .*, got -1"),
    ({"messages": "more"}, "messages with a role and a content .*got 'more'"),
    ({"messages": SAYS}, "messages with a role"),
    ({"messages": ()}, "messages, or None, which ends it, got \\(\\)"),
    ({"messages": []}, "messages, or None"),
    ({"messages": ({"role": "tool"},)}, "messages with a role"),
    ({"messages": ({"role": "tool", "content": 1},)}, "messages with a role"),
  ],
)
def test_what_is_no_answer_ends_the_run_and_is_named(wrong, rule):
  step = wrong if wrong is None else step_of(**wrong)
  with pytest.raises(
    types.RunError, match=f"^env.environment: expected {rule}"
  ):
    single.talk(Returns(made=step))

  @dataclasses.dataclass(frozen=True)
  class Fails(single.Counts):
    def step(self, state, text):
      raise OSError

    def failed(self, state, reason):
      return step

  with pytest.raises(types.RunError, match=f"expected {rule}"):
    single.talk(Fails())


def test_an_answer_that_comes_late_after_all_is_lost_no_more():
  gate = threading.Event()

  @dataclasses.dataclass(frozen=True)
  class Slow(single.Counts):
    def step(self, state, text):
      gate.wait()
      return super().step(state, text)

    def failed(self, state, reason):
      return multi_turn.Step()

  env = single.env_of(Slow(), group=4, workers=1, timeout_s=0.01)
  talks = conversing.Conversing(
    single.Engine(), env, single.PROMPTS.__getitem__, lockstep=True
  )
  talks.add(env.request(single.PROMPTS[0]))
  assert len(talks.step(None, 0) or ()) == 4
  assert len(talks._desk._lost) == 4
  gate.set()
  end = time.monotonic() + 5
  while talks._desk._lost and time.monotonic() < end:
    threading.Event().wait(0.01)
  assert not talks._desk._lost


def test_settings_out_of_range_are_refused():
  wrong: list[dict] = [{"max_turns": 0}, {"workers": 0}, {"timeout_s": 0.0}]
  for setting in wrong:
    (name,) = setting
    with pytest.raises(types.InputError, match=f"env.{name}: expected"):
      multi_turn.Conversation(environment=single.Counts, **setting)
  cfg = multi_turn.Conversation(environment=single.Counts)
  stream = schedule.StreamConfig()
  assert conversations.made(None, stream, 0) is None
  assert conversations.made(cfg, stream, 3) == single.Counts()
  fixed = schedule.StreamConfig(deterministic=True)
  assert conversations.made(cfg, fixed, 0) == single.Counts()
  with pytest.raises(types.InputError, match="got max_lag=1"):
    conversations.made(cfg, fixed, 1)
  with pytest.raises(types.InputError, match="stream.follow: expected none"):
    conversations.made(cfg, schedule.StreamConfig(follow="events.jsonl"), 0)
  with pytest.raises(types.InputError, match="env.timeout_s: expected less"):
    conversations.made(cfg, schedule.StreamConfig(stall_s=cfg.timeout_s), 0)
  nobody: Any = dict
  none = multi_turn.Conversation(environment=nobody)
  with pytest.raises(types.InputError, match="one that returns {}"):
    conversations.made(none, stream, 0)
  half = type("Half", (single.Counts,), {"save": lambda self, state: state})
  with pytest.raises(types.InputError, match="both save and restore"):
    conversations.made(multi_turn.Conversation(environment=half), stream, 0)
