"""Conversations with an environment: several turns, one completion.

The tokens of all turns, and between them those of what the environment said,
are one completion of one prompt; the latter have version -1 and never train.
Nothing that the policy sampled is ever read as text and encoded again.
"""

import dataclasses
import itertools
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxrl_post import types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.envs import schedule, single_turn
from jaxrl_post.rewards import combine

# What an environment says: `role` and `content`, as a chat template takes them.
Message: TypeAlias = Mapping[str, Any]
# Messages, and whether the turn before them has its end token, to their ids.
Encode: TypeAlias = Callable[[Sequence[Message], bool], tuple[int, ...]]


@types.host_record
class Step:
  """How an environment answers a turn.

  Attributes:
    state: of the conversation from now on; whatever the environment likes.
    messages: what it says; None ends the conversation.
    reward: for the turn, beside the reward of the rollout; finite, within
      `combine.LARGEST`.
    calls: of tools that the policy asked for in it.
    errors: those of them that failed.
  """

  state: Any = None
  messages: tuple[Message, ...] | None = None
  reward: float = 0.0
  calls: int = 0
  errors: int = 0


@runtime_checkable
class Environment(Protocol):
  """Whom the policy talks to. States are not changed, but replaced.

  `step` may be called again for the same state: a conversation that a stop of
  the run breaks begins anew.
  """

  @property
  def schemas(self) -> Sequence[Mapping[str, Any]]:
    """JSON schemas of functions, for the chat template; may be empty."""
    ...

  def reset(self, prompt: types.Prompt) -> Any:
    """Returns the state of a new conversation; quickly, as sampling waits."""
    ...

  def step(self, state: Any, text: str) -> Step:
    """Answers a turn that the policy has ended, in a thread of its own.

    Args:
      state: from `reset`, or of the last answer.
      text: what the policy said in this turn, without its end token.
    """
    ...

  def failed(self, state: Any, reason: str) -> Step:
    """Answers, quickly, a turn whose `step` raised or took too long.

    Args:
      state: as `step` was given.
      reason: in one line.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Conversation:
  """How conversations go.

  Attributes:
    environment: makes whom the policy talks to, once a run; such as a class.
    max_turns: most turns of the policy; `sampling.max_tokens` is the limit of
      all tokens of a conversation, those of the environment too.
    workers: most answers in the making at a time, each in a thread.
    timeout_s: longest time for an answer; then the policy is told so.
  """

  environment: Callable[[], Environment]
  max_turns: int = 4
  workers: int = 16
  timeout_s: float = 10.0

  def __post_init__(self) -> None:
    for name, least in (("max_turns", 1), ("workers", 1)):
      if getattr(self, name) < least:
        raise types.InputError(
          f"env.{name}: expected >= {least}, got {getattr(self, name)}. "
          "Correct the value."
        )
    if not 0 < self.timeout_s < math.inf:
      raise types.InputError(
        f"env.timeout_s: expected > 0 seconds, got {self.timeout_s}. Correct "
        "the value."
      )


@dataclasses.dataclass(frozen=True)
class MultiTurn:
  """Turns prompts into requests and whole conversations into rollouts.

  Attributes:
    single: the same for a conversation of one turn.
    cfg: how conversations go.
    environment: whom the policy talks to.
    encode: what the environment says to ids, the beginning of the policy's
      next turn included.
  """

  single: single_turn.SingleTurn
  cfg: Conversation
  environment: Environment
  encode: Encode

  @property
  def group_size(self) -> int:
    """Conversations of each prompt."""
    return self.single.group_size

  @property
  def sampling(self) -> types.SamplingParams:
    """How each is sampled."""
    return self.single.sampling

  def request(self, prompt: types.Prompt) -> types.Request:
    """Asks for the first turns of a group."""
    return self.single.request(prompt)

  def owner(self, uid: int) -> int:
    """Returns the uid of the prompt that a conversation is about."""
    return self.single.owner(uid)

  def rollout(
    self, prompt: types.Prompt, completion: types.Completion
  ) -> types.Rollout:
    """Joins a prompt and its conversation, not yet scored.

    Returns:
      A rollout whose `text` is the policy's last turn, and whose
      `conversation` is all of it, with what the environment said.
    """
    made = self.single.rollout(prompt, completion)
    return dataclasses.replace(
      made,
      text=self.said(completion.tokens, completion.versions),
      conversation=made.text,
    )

  def said(self, tokens: Sequence[int], versions: Sequence[int]) -> str:
    """Returns the text of the last turn in a completion, without its end."""
    begin = len(versions) - sum(
      1 for _ in itertools.takewhile(lambda v: v >= 0, reversed(versions))
    )
    turn = tokens[begin:]
    if turn and turn[-1] in self.single.sampling.stop_ids:
      turn = turn[:-1]
    return self.single.decode(turn)

  def begin(self, prompt: types.Prompt, request: types.Request) -> "Talk":
    """Returns a conversation in which nobody has said anything."""
    return Talk(request=request, state=self.environment.reset(prompt), turns=())

  def ask(self, talk: "Talk", made: types.Completion) -> "Answer":
    """Has the environment answer a turn; may take long.

    Args:
      talk: before the turn.
      made: the completion up to the end of the turn.

    Raises:
      RunError: the answer is none, see `checked`.
    """
    text = self.said(made.tokens, made.versions)
    step = checked(self.environment.step(talk.state, text))
    return self._encoded(made, step)

  def excuse(
    self, talk: "Talk", made: types.Completion, reason: str, *, late: bool
  ) -> "Answer":
    """Returns what stands for an answer that did not come.

    Args:
      talk: before the turn.
      made: the completion up to the end of the turn.
      reason: why, in one line.
      late: whether it took too long.

    Raises:
      RunError: what stands for it is no answer, see `checked`.
    """
    step = checked(self.environment.failed(talk.state, reason))
    calls, errors = max(step.calls, 1), max(step.errors, 1)
    step = dataclasses.replace(step, calls=calls, errors=errors)
    return dataclasses.replace(self._encoded(made, step), late=late)

  def _encoded(self, made: types.Completion, step: Step) -> "Answer":
    if step.messages is None:
      return Answer(step=step)
    ended = made.tokens[-1] in self.sampling.stop_ids
    said = self.encode(step.messages, ended)
    if not said:
      raise ValueError(  # Told to the policy, if `failed` has words for it.
        f"env: expected messages of at least one token, got {step.messages}"
      )
    return Answer(step=step, said=said)

  def answered(
    self, talk: "Talk", made: types.Completion, answer: "Answer"
  ) -> "Talk | types.Completion":
    """Goes on from an answer.

    Args:
      talk: before the turn.
      made: the completion up to the end of the turn.
      answer: to it.

    Returns:
      The conversation with its next request; or all of it if it has ended, by
      the environment or because no turn or no token is left, in which case
      `finish` is "length" and nothing is said any more.
    """
    step, said = answer.step, answer.said
    turn = types.Turn(
      end=len(made.tokens),
      reward=step.reward,
      calls=step.calls,
      errors=step.errors,
      timeouts=int(answer.late),
    )
    turns = (*talk.turns, turn)
    whole = dataclasses.replace(made, turns=turns)
    if step.messages is None:
      return whole
    limit = dataclasses.replace(whole, finish="length")
    if len(turns) >= self.cfg.max_turns:
      return limit
    if len(made.tokens) + len(said) >= talk.request.sampling.max_tokens:
      return limit
    return Talk(
      request=self._next(talk.request, made, said, len(turns)),
      state=step.state,
      turns=turns,
    )

  def _next(
    self,
    request: types.Request,
    made: types.Completion,
    said: tuple[int, ...],
    turns: int,
  ) -> types.Request:
    """Asks for the turn behind what was said."""
    begun = types.Partial(
      uid=made.uid,
      tokens=(*made.tokens, *said),
      logprobs=(*made.logprobs, *[0.0] * len(said)),
      versions=(*made.versions, *[-1] * len(said)),
    )
    return dataclasses.replace(
      request,
      uids=(made.uid,),
      begun=(begun,),
      hold=turns + 1 < self.cfg.max_turns,
    )


def checked(step: Any) -> Step:
  """Reads what an environment returned.

  Returns:
    The step with plain numbers in it, whose messages are a tuple.

  Raises:
    RunError: it is no step, its reward is not finite or beyond
      `combine.LARGEST`, its counts are no whole numbers from 0 on, or its
      messages are not some with a role and a content of text.
  """
  if not isinstance(step, Step):
    raise _refused("a multi_turn.Step", step)
  # A part of that name, and nothing else, is a number that can be used.
  reward = combine.read("reward", step.reward).parts.get("reward")
  if reward is None or isinstance(step.reward, Mapping):
    raise _refused(f"a reward {combine.RANGE} in a step", step.reward)
  for count in (step.calls, step.errors):
    if not isinstance(count, numbers.Integral) or count < 0:
      raise _refused("calls and errors that are whole numbers >= 0", count)
  messages = step.messages
  if messages is not None:
    if not isinstance(messages, list | tuple) or not all(map(_says, messages)):
      raise _refused("messages with a role and a content of text", messages)
    messages = tuple(messages)
  return dataclasses.replace(
    step,
    messages=messages,
    reward=reward,
    calls=int(step.calls),
    errors=int(step.errors),
  )


def _says(message: Any) -> bool:
  return isinstance(message, Mapping) and all(
    isinstance(message.get(name), str) for name in ("role", "content")
  )


def _refused(rule: str, value: Any) -> types.RunError:
  got = combine.one_line(reprlib.repr(value))
  return types.RunError(
    f"env.environment: expected {rule}, got {got}. Mend the environment."
  )


def made(
  cfg: Conversation | None, stream: schedule.StreamConfig, max_lag: int
) -> Environment | None:
  """Makes the environment of a run; None without one.

  Args:
    cfg: how conversations go; None is one turn.
    stream: how generation runs beside training.
    max_lag: of the run.

  Raises:
    InputError: it is none; or the stream is one that answers, which take
      whatever time, do not allow.
  """
  if cfg is None:
    return None
  if stream.follow:
    raise types.InputError(
      "stream.follow: expected none with env, whose answers come when they "
      f"come and are no events, got {stream.follow}. Leave it out."
    )
  if stream.deterministic and max_lag:
    raise types.InputError(
      "stream.deterministic: expected max_lag=0 with env, as conversations "
      "that a checkpoint breaks begin anew with newer weights, got "
      f"max_lag={max_lag}. Set max_lag=0."
    )
  if cfg.timeout_s >= stream.stall_s:
    raise types.InputError(
      f"env.timeout_s: expected less than stream.stall_s = {stream.stall_s:g}, "
      f"got {cfg.timeout_s:g}: an answer would pass for a stall. Lower it."
    )
  environment = cfg.environment()
  if not isinstance(environment, Environment):
    raise types.InputError(
      "env.environment: expected a function that returns what has schemas, "
      f"reset, step and failed, got one that returns {environment!r}. Correct "
      "it."
    )
  return environment


def build(
  cfg: Conversation | None,
  environment: Environment | None,
  group_size: int,
  sampling: types.SamplingParams,
  tokenizer: tokenizers.Tokenizer,
) -> "single_turn.SingleTurn | MultiTurn":
  """Returns how prompts are asked.

  Args:
    cfg: how conversations go; None is one turn.
    environment: from `made`.
    group_size: rollouts of each prompt.
    sampling: how each is sampled.
    tokenizer: of the run.
  """
  single = single_turn.SingleTurn(group_size, sampling, tokenizer.decode)
  if cfg is None or environment is None:
    return single
  schemas = tuple(environment.schemas)

  def encode(messages: Sequence[Message], ended: bool) -> tuple[int, ...]:
    return tokenizer.continuation(messages, tools=schemas, ended=ended)

  return MultiTurn(single, cfg, environment, encode)


@types.host_record
class Talk:
  """A conversation under way.

  Attributes:
    request: that asks, or asked, for the turn.
    state: of the environment, before that turn.
    turns: those that were answered.
  """

  request: types.Request
  state: Any
  turns: tuple[types.Turn, ...]


@types.host_record
class Answer:
  """An answer to a turn.

  Attributes:
    step: of the environment.
    said: its messages as ids, up to where the policy's next turn begins; empty
      if the conversation ends.
    late: whether it stands for one that took too long.
  """

  step: Step
  said: tuple[int, ...] = ()
  late: bool = False
