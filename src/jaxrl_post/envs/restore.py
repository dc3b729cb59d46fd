"""Conversations in checkpoints: those that a stop breaks off go on.

All that was said is among the tokens of a completion in the making; what it
takes beside them is the environment's own state. No turn that was answered is
played again, so no tool is called twice whose answer had come.
"""

import dataclasses
import json
from typing import Any, Protocol, runtime_checkable

from jaxrl_post import types
from jaxrl_post.envs import multi_turn
from jaxrl_post.rewards import combine


@runtime_checkable
class Restorable(Protocol):
  """An environment whose conversations go on after a restart of the run.

  Both methods are to be quick, as sampling waits for them.
  """

  def save(self, state: Any) -> Any:
    """Returns what JSON can hold of a state; all of it."""
    ...

  def restore(self, prompt: types.Prompt, saved: Any) -> Any:
    """Returns the state that was saved, in another process.

    Args:
      prompt: that the conversation is about.
      saved: from `save`, written to JSON and read: tuples are lists.
    """
    ...


@types.host_record
class Kept:
  """What a checkpoint has of a conversation beside its tokens.

  Attributes:
    turns: those that were answered; their answers are among the tokens.
    state: of the environment after these, as JSON; empty without turns.
    asked: whether a further turn has ended, and its answer had not come.
  """

  turns: tuple[types.Turn, ...]
  state: str = ""
  asked: bool = False


def kept(
  env: multi_turn.MultiTurn, talk: multi_turn.Talk, *, asked: bool
) -> Kept | None:
  """Returns what a checkpoint needs of a conversation beside its tokens.

  Args:
    env: says how conversations go.
    talk: before the turn under way.
    asked: whether that turn has ended, and its answer has not come.

  Returns:
    None if it cannot go on, because turns were answered by an environment
    that is not `Restorable`.

  Raises:
    RunError: what the environment saves is nothing that JSON can hold.
  """
  if not talk.turns:  # `reset` makes its state again.
    return Kept(turns=(), asked=asked)
  if not isinstance(env.environment, Restorable):
    return None
  try:
    state = json.dumps(env.environment.save(talk.state), allow_nan=False)
  except (TypeError, ValueError) as error:
    raise types.RunError(
      "env.environment: expected save() to return what JSON can hold, got "
      f"{combine.one_line(str(error))}. Mend the environment."
    ) from error
  return Kept(turns=talk.turns, state=state, asked=asked)


def resumed(
  env: multi_turn.MultiTurn,
  prompt: types.Prompt,
  request: types.Request,
  begun: types.Partial,
) -> multi_turn.Talk | None:
  """Returns a conversation as it was when a checkpoint was made.

  Args:
    env: says how conversations go.
    prompt: that it is about.
    request: for its group.
    begun: with what was `kept`.

  Returns:
    None if turns were answered and the environment is not `Restorable`.
  """
  was: Kept = begun.talk
  alone = dataclasses.replace(
    request,
    uids=(begun.uid,),
    begun=(dataclasses.replace(begun, talk=None),),
    hold=len(was.turns) + 1 < env.cfg.max_turns,
  )
  if not was.turns:
    return env.begin(prompt, alone)
  if not isinstance(env.environment, Restorable):
    return None
  state = env.environment.restore(prompt, json.loads(was.state))
  return multi_turn.Talk(request=alone, state=state, turns=was.turns)
