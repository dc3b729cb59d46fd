"""One prompt, one completion, one reward: the conversation of most runs."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class SingleTurn:
  """Turns prompts into requests and completions into rollouts.

  Attributes:
    group_size: completions of each prompt.
    sampling: how each is sampled.
    decode: token ids to text, without special tokens.
  """

  group_size: int
  sampling: types.SamplingParams
  decode: Callable[[Sequence[int]], str]

  def request(self, prompt: types.Prompt) -> types.Request:
    """Asks for a group; its uids are those of no other draw."""
    first = prompt.uid * self.group_size
    return types.Request(
      prompt=prompt.tokens,
      uids=tuple(range(first, first + self.group_size)),
      sampling=self.sampling,
    )

  def owner(self, uid: int) -> int:
    """Returns the uid of the prompt that a completion answers."""
    return uid // self.group_size

  def rollout(
    self, prompt: types.Prompt, completion: types.Completion
  ) -> types.Rollout:
    """Joins a prompt and its completion, not yet scored."""
    tokens = completion.tokens
    stops = self.sampling.stop_ids
    # A token that completes a stop string is text, and stays.
    if completion.finish == "stop" and tokens[-1] in stops:
      tokens = tokens[:-1]
    return types.Rollout(
      prompt=prompt,
      completion=completion,
      temperature=self.sampling.temperature,
      text=self.decode(tokens),
    )
