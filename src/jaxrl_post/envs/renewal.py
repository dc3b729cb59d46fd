"""Conversations that begin anew, with what is left of them as the next prompt.

That is so where an environment puts other messages in the place of those that
there were (a summary, say), or where a chat template leaves out of earlier
turns what it had in them (thoughts). What was sampled before trains behind the
prompt that it was sampled behind: the rollout has one more training row.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post import types

# Of rows beyond the first: their names lie as far apart as they can (Knuth, The
# Art of Computer Programming 3, 6.4), so that no two under way are equal.
_STRIDE, _NAMES = 0x9E3779B1, 2**32


@dataclasses.dataclass(frozen=True)
class Renewal:
  """How conversations may begin anew.

  Attributes:
    max_rows: most training rows of a rollout; one that needs another ends by
      the limit. A batch has room for so many rows of each rollout.
    retell: put all messages through the chat template before each turn, which
      may then leave out of earlier ones what it likes; otherwise a conversation
      begins anew only where the environment says so.
  """

  max_rows: int = 4
  retell: bool = False

  def __post_init__(self) -> None:
    if self.max_rows < 2:
      raise types.InputError(
        f"env.renewal.max_rows: expected >= 2, got {self.max_rows}. Leave "
        "env.renewal out for one row."
      )


def name(uid: int, number: int) -> int:
  """Returns the uid under which an engine samples a row of a conversation.

  Equal uids and positions are equal random keys, and positions begin anew.

  Args:
    uid: of the conversation.
    number: of the row, from 0, which has the uid itself.
  """
  return (uid + number * _STRIDE) % _NAMES


def begun(prompt: types.Prompt) -> tuple[Mapping[str, Any], ...]:
  """Returns the messages of a prompt; one of text is a user's words."""
  return prompt.messages or ({"role": "user", "content": prompt.text},)


def text(messages: Sequence[Mapping[str, Any]]) -> str:
  """Returns a conversation without a chat template: contents end to end."""
  return "".join(message["content"] for message in messages)
