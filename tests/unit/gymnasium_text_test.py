"""Environments with Gymnasium's interface, played again for each turn."""

import dataclasses
import json
import random

import pytest

from jaxrl_post import types
from jaxrl_post.envs import gymnasium_text, multi_turn, restore


class Number:
  """Is over when its number is named; counts how often it was closed."""

  closed = 0
  fair = True

  def reset(self, *, seed):
    draw = random.Random(seed if self.fair else None)
    self.number, self.left = draw.randrange(10), 5
    return f"0 to 9, seed {seed}", {}

  def step(self, action):
    self.left -= 1
    right = action == self.number
    hint = "more" if action < self.number else "less"
    return hint, float(right), right, self.left == 0, {}

  def close(self):
    type(self).closed += 1


def prompt(env, seed):
  example = env.example(seed)
  return types.Prompt(
    uid=0, tokens=(1,), text=example.prompt, reference=example.reference
  )


def test_a_game_is_played_to_its_end():
  env = gymnasium_text.GymnasiumText(Number, action=int)
  assert isinstance(env, multi_turn.Environment)
  wanted = random.Random(7).randrange(10)
  asked = prompt(env, 7)
  assert asked.text == "0 to 9, seed 7"
  state, seen = env.reset(asked), []
  for guess in range(10):
    made = env.step(state, str(guess))
    # A turn that is asked again is answered alike.
    assert env.step(state, str(guess)) == made
    if made.messages is None or guess == 4:
      break
    seen.append(made.messages[0]["content"])
    state = made.state
  last = min(wanted, 4)
  assert seen == ["more"] * last
  assert made == multi_turn.Step(reward=float(wanted <= 4))


def test_a_game_goes_on_from_what_was_saved_and_plays_nothing_for_it():
  env = gymnasium_text.GymnasiumText(Number, action=int)
  assert isinstance(env, restore.Restorable)
  asked = prompt(env, 7)
  state = env.step(env.reset(asked), "0").state
  state = env.step(state, "no number").state  # Told, and not played again.
  saved = json.loads(json.dumps(env.save(state)))
  before = Number.closed
  again = env.restore(asked, saved)
  assert again == state and Number.closed == before
  assert env.step(again, "9") == env.step(state, "9")


def test_the_limit_of_an_environment_ends_it_too():
  env = gymnasium_text.GymnasiumText(Number, action=lambda text: 10)
  state = env.reset(prompt(env, 3))
  for _ in range(4):
    state = env.step(state, "").state
  assert env.step(state, "") == multi_turn.Step(reward=0.0)


def test_what_is_no_action_is_told_and_changes_nothing():
  env = gymnasium_text.GymnasiumText(Number, action=int)
  state = env.reset(prompt(env, 3))
  made = env.step(state, "seven")
  assert made.state == state and made.errors == 1 and made.reward == 0.0
  assert "no action: invalid literal" in made.messages[0]["content"]


def test_an_environment_that_is_over_sooner_the_next_time_is_refused():
  class Hasty(Number):
    made = 0

    def reset(self, *, seed):
      type(self).made += 1
      self.number, self.left = 10, 6 - type(self).made
      return "", {}

  env = gymnasium_text.GymnasiumText(Hasty, action=int)
  state = dataclasses.replace(env.reset(prompt(env, 0)), said=("1",) * 4)
  with pytest.raises(
    types.InputError, match=r"env.environment: .* over sooner"
  ):
    env.step(state, "1")


def test_environments_are_closed():
  before = Number.closed
  env = gymnasium_text.GymnasiumText(Number, action=int)
  env.step(env.reset(prompt(env, 1)), "1")
  assert Number.closed == before + 2
