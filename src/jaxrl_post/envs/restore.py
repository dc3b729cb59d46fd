"""Conversations in checkpoints: those that a stop breaks off go on.

All that was said is among the tokens of a completion in the making; what it
takes beside them is the environment's own state. No turn is answered again
whose answer the checkpoint has; later ones are.
"""

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxrl_post import types
from jaxrl_post.envs import multi_turn
from jaxrl_post.rewards import combine


@runtime_checkable
class Restorable(Protocol):
  """An environment whose conversations go on after a restart of the run.

  `save` is called once an answer, within the time that the answer has; a run
  ends if `restore` takes longer than `env.timeout_s`.
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


def saved(env: multi_turn.MultiTurn, answer: multi_turn.Answer) -> str:
  """Returns the state after an answer as JSON.

  Returns:
    Empty if the conversation has ended, or none goes on after a restart.

  Raises:
    RunError: what the environment saves is nothing that JSON can hold.
  """
  environment, step = env.environment, answer.step
  if step.messages is None or not isinstance(environment, Restorable):
    return ""
  try:
    return json.dumps(environment.save(step.state), allow_nan=False)
  except (TypeError, ValueError) as error:
    raise types.RunError(
      "env.environment: expected save() to return what JSON can hold, got "
      f"{combine.one_line(str(error))}. Mend the environment."
    ) from error


def ask(
  env: multi_turn.MultiTurn, talk: multi_turn.Talk, made: types.Completion
) -> multi_turn.Answer:
  """Has a turn answered, as `MultiTurn.ask`, and the state after it `saved`."""
  answer = env.ask(talk, made)
  return dataclasses.replace(answer, saved=saved(env, answer))


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
    that is not `Restorable`, or were told in other words than are kept.
  """
  if not talk.turns:  # `reset` makes its state again.
    return Kept(turns=(), asked=asked)
  if not talk.saved or talk.before is not None or talk.history:
    return None
  return Kept(turns=talk.turns, state=talk.saved, asked=asked)


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
    None if turns were answered and the environment is not `Restorable`, or
    tells all messages anew.

  Raises:
    RunError: the environment took too long.
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
  environment, renews = env.environment, env.cfg.renewal
  retells = renews is not None and renews.retell
  if retells or not isinstance(environment, Restorable):
    return None
  state = _within(
    env.cfg.timeout_s,
    lambda: environment.restore(prompt, json.loads(was.state)),
  )
  return multi_turn.Talk(
    request=alone, state=state, turns=was.turns, saved=was.state
  )


def _within(timeout_s: float, make: Callable[[], Any]) -> Any:
  """Returns what is made, or raises what that raises, within a time."""
  found, errors = list[Any](), list[BaseException]()

  def work() -> None:
    try:
      found.append(make())
    except BaseException as error:
      errors.append(error)  # For whoever waits.

  # A daemon: one that hangs must not keep the process alive.
  thread = threading.Thread(target=work, name="restore", daemon=True)
  thread.start()
  thread.join(timeout_s)
  if errors:
    raise errors[0]
  if not found:
    raise types.RunError(
      f"env.environment: expected restore() to end within {timeout_s:g} s "
      "(env.timeout_s), got no end. Mend the environment."
    )
  return found[0]
