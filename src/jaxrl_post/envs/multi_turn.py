"""Conversations with an environment: several turns, one completion.

The tokens of all turns, and between them those of what the environment said,
are one completion of one prompt; the latter have version -1 and never train.
Nothing that the policy sampled is ever read as text and encoded again to train:
where a conversation begins anew, with what is left of it as a prompt, what was
sampled before is a row of its own.
"""

import dataclasses
import itertools
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxrl_post import types
from jaxrl_post.data import segments
from jaxrl_post.envs import renewal as renewals
from jaxrl_post.envs import single_turn
from jaxrl_post.rewards import combine

# What an environment says: `role` and `content`, as a chat template takes them.
Message: TypeAlias = Mapping[str, Any]
# Messages, and whether the turn before them has its end token, to their ids.
Encode: TypeAlias = Callable[[Sequence[Message], bool], tuple[int, ...]]
# All messages of a conversation to the ids of a prompt.
Render: TypeAlias = Callable[[Sequence[Message]], tuple[int, ...]]


@types.host_record
class Step:
  """How an environment answers a turn.

  Attributes:
    state: of the conversation from now on; whatever the environment likes.
    messages: what it says, at least one token; None ends the conversation.
    replaces: whether `messages` are all of the conversation from now on, turns
      of the policy included, in the place of what there was; for
      `env.renewal`.
    reward: for the turn, beside the reward of the rollout; finite, within
      `combine.LARGEST`.
    calls: of tools that the policy asked for in it.
    errors: those of them that failed.
  """

  state: Any = None
  messages: tuple[Message, ...] | None = None
  replaces: bool = False
  reward: float = 0.0
  calls: int = 0
  errors: int = 0


@runtime_checkable
class Environment(Protocol):
  """Whom the policy talks to. States are not changed, but replaced.

  `step` may be called again for the same state: a run that goes on has the
  answers that its checkpoint has, and asks for all later ones again; unless
  there is a `restore.Restorable`, also those of a conversation past its first.
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
    renewal: how conversations may begin anew; None has them go on only.
  """

  environment: Callable[[], Environment]
  max_turns: int = 4
  workers: int = 16
  timeout_s: float = 10.0
  renewal: renewals.Renewal | None = None

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
    if self.most_rows > self.max_turns:
      raise types.InputError(
        f"env.renewal.max_rows: expected at most env.max_turns = "
        f"{self.max_turns}, got {self.most_rows}. Lower it."
      )

  @property
  def most_rows(self) -> int:
    """Most training rows of a conversation."""
    return 1 if self.renewal is None else self.renewal.max_rows


@dataclasses.dataclass(frozen=True)
class MultiTurn:
  """Turns prompts into requests and whole conversations into rollouts.

  Attributes:
    single: the same for a conversation of one turn.
    cfg: how conversations go.
    environment: whom the policy talks to.
    encode: what the environment says to ids, the beginning of the policy's
      next turn included.
    render: all of a conversation to ids, likewise; None if none begins anew.
    max_prompt: longest prompt of one that does, in tokens.
  """

  single: single_turn.SingleTurn
  cfg: Conversation
  environment: Environment
  encode: Encode
  render: Render | None = None
  max_prompt: int = 0

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
      `conversation` is all of it, with what the environment said, and with the
      new prompts where it began anew.
    """
    made = self.single.rollout(prompt, completion)
    begin = segments.begin_of_newest(completion)
    tokens, decode = completion.tokens, self.single.decode
    first, *rest = segments.split(made)
    shown = [decode(tokens[: first.end]) if rest else made.text]
    for number, row in enumerate(rest, 2):
      text = decode((*row.prompt, *tokens[row.begin : row.end]))
      shown.append(f"--- row {number} ---\n{text}")
    return dataclasses.replace(
      made,
      text=self.said(tokens[begin:], completion.versions[begin:]),
      conversation="\n".join(shown),
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
    return Talk(
      request=request,
      state=self.environment.reset(prompt),
      turns=(),
      history=renewals.begun(prompt) if self._retells else (),
    )

  def ask(self, talk: "Talk", made: types.Completion) -> "Answer":
    """Has the environment answer a turn; may take long.

    Args:
      talk: before the turn.
      made: the completion up to the end of the turn.

    Raises:
      RunError: the answer is none, see `checked`, or is no token.
    """
    text = self.said(made.tokens, made.versions)
    step = checked(self.environment.step(talk.state, text))
    return self._encoded(talk, made, step)

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
      RunError: what stands for it is no answer, see `checked`, or is no token.
    """
    step = checked(self.environment.failed(talk.state, reason))
    calls, errors = max(step.calls, 1), max(step.errors, 1)
    step = dataclasses.replace(step, calls=calls, errors=errors)
    return dataclasses.replace(self._encoded(talk, made, step), late=late)

  @property
  def _retells(self) -> bool:
    return self.cfg.renewal is not None and self.cfg.renewal.retell

  def _encoded(
    self, talk: "Talk", made: types.Completion, step: Step
  ) -> "Answer":
    if step.messages is None:
      return Answer(step=step)
    if step.replaces or self._retells:
      return self._retold(talk, made, step, step.messages)
    ended = made.tokens[-1] in self.sampling.stop_ids
    said = self.encode(step.messages, ended)
    if not said:
      raise _refused("messages of at least one token", step.messages)
    return Answer(step=step, said=said)

  def _retold(
    self,
    talk: "Talk",
    made: types.Completion,
    step: Step,
    messages: tuple[Message, ...],
  ) -> "Answer":
    """Encodes all of a conversation; what only goes on goes on."""
    if self.render is None:
      raise types.RunError(
        "env.environment: expected messages that follow the others without "
        "env.renewal, got a step that replaces them all. Set env.renewal."
      )
    if not step.replaces:
      text = self.said(made.tokens, made.versions)
      own = {"role": "assistant", "content": text}
      messages = (*talk.history, own, *messages)
    history = messages if self._retells else ()
    prompt = self.render(messages)
    so_far = (*talk.request.prompt, *made.tokens)
    said = prompt[len(so_far) :]
    if said and prompt[: len(so_far)] == so_far:
      return Answer(step=step, said=said, history=history)
    return Answer(step=step, prompt=prompt, history=history)

  def ended(
    self, talk: "Talk", made: types.Completion, turn: types.Turn
  ) -> types.Completion:
    """Returns a conversation that ends with a turn.

    Args:
      talk: before the turn.
      made: the completion up to the end of the turn, of the newest row.
      turn: that row's, with `end` counted in it.
    """
    whole = segments.joined(talk.before, made)
    last = dataclasses.replace(turn, end=len(whole.tokens))
    return dataclasses.replace(whole, turns=(*talk.turns, last))

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
      the environment or because no turn, no token or no row is left, in which
      case `finish` is "length" and nothing is said any more.
    """
    step, said = answer.step, answer.said
    turn = types.Turn(
      end=len(made.tokens),
      reward=step.reward,
      calls=step.calls,
      errors=step.errors,
      timeouts=int(answer.late),
    )
    whole = self.ended(talk, made, turn)
    if step.messages is None:
      return whole
    limit = dataclasses.replace(whole, finish="length")
    if len(whole.turns) >= self.cfg.max_turns:
      return limit
    talk = dataclasses.replace(
      talk,
      state=step.state,
      turns=whole.turns,
      history=answer.history,
      saved=answer.saved,
    )
    if answer.prompt:
      number = len(whole.segments) + 1
      if number >= self.cfg.most_rows or len(answer.prompt) > self.max_prompt:
        return limit
      return self._anew(talk, whole, answer.prompt)
    if len(made.tokens) + len(said) >= talk.request.sampling.max_tokens:
      return limit
    request = self._next(talk.request, made, said, len(talk.turns))
    return dataclasses.replace(talk, request=request)

  def _anew(
    self, talk: "Talk", whole: types.Completion, prompt: tuple[int, ...]
  ) -> "Talk":
    """Asks for a turn behind a prompt of its own, in the next row."""
    begun = (*whole.segments, (len(whole.tokens), prompt))
    request = dataclasses.replace(
      talk.request,
      prompt=prompt,
      uids=(renewals.name(whole.uid, len(begun)),),
      begun=(),
      hold=len(talk.turns) + 1 < self.cfg.max_turns,
    )
    before = dataclasses.replace(whole, segments=begun)
    return dataclasses.replace(talk, request=request, before=before)

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
      `combine.LARGEST`, its counts are no whole numbers from 0 on, its
      messages are not some with a role and a content of text, or are none at
      all.
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
    if not messages:
      raise _refused("messages, or None, which ends it", messages)
    messages = tuple(messages)
  if step.replaces not in (False, True) or (step.replaces and not messages):
    raise _refused("replaces of true or false, true with messages", step)
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


@types.host_record
class Talk:
  """A conversation under way.

  Attributes:
    request: that asks, or asked, for the turn.
    state: of the environment, before that turn.
    turns: those that were answered.
    before: what was made in rows before this one, which is the newest of its
      segments; None in the first.
    history: all messages so far, if they are told anew for each turn.
    saved: its state as JSON, if the environment is a `restore.Restorable`.
  """

  request: types.Request
  state: Any
  turns: tuple[types.Turn, ...]
  before: types.Completion | None = None
  history: tuple[Message, ...] = ()
  saved: str = ""


@types.host_record
class Answer:
  """An answer to a turn.

  Attributes:
    step: of the environment.
    said: its messages as ids, up to where the policy's next turn begins; empty
      if the conversation ends or begins anew.
    prompt: all of the conversation as ids, if it begins anew.
    history: see `Talk`, from now on.
    late: whether it stands for one that took too long.
    saved: see `Talk`, of the state from now on.
  """

  step: Step
  said: tuple[int, ...] = ()
  prompt: tuple[int, ...] = ()
  history: tuple[Message, ...] = ()
  late: bool = False
  saved: str = ""
