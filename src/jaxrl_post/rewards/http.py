"""A reward that a server gives, for many rollouts a request.

It gets `POST` with `{"rollouts": [{"prompt", "completion", "reference"}, ...]}`
and answers `{"rewards": [...]}`: for each a number, numbers by name, or null.
`rewards.batch` says how many there are at most.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.rewards import client, combine, protocol


def check(url: Any, deadline_s: Any = 8.0, attempts: Any = 4) -> None:
  """Refuses settings of `scored` that cannot be.

  Raises:
    types.InputError: naming the one, and no secret in it.
  """
  client.check_url("reward http: url", url)
  is_time = isinstance(deadline_s, int | float) and 0 < deadline_s < math.inf
  is_count = isinstance(attempts, int) and attempts >= 1
  for holds, name, rule, value in (
    (is_time, "deadline_s", "> 0 s", deadline_s),
    (is_count, "attempts", "a whole number >= 1", attempts),
  ):
    if not holds or isinstance(value, bool):
      raise types.InputError(
        f"reward http: {name}: expected {rule}, got "
        f"{combine.one_line(repr(value), 80)}. Correct it."
      )


@protocol.checked(check)
@protocol.batched
def scored(
  rollouts: Sequence[types.Rollout],
  references: Sequence[Any],
  *,
  url: str,
  deadline_s: float = 8.0,
  attempts: int = 4,
) -> list[protocol.RewardValue]:
  """Asks the server.

  A configuration says which: `functools.partial(http.scored, url=...)`.

  Args:
    rollouts: what was answered.
    references: as JSON can hold them.
    url: of the server.
    deadline_s: for all attempts, in seconds; below `rewards.timeout_s`.
    attempts: at most so many, with pauses between them.

  Returns:
    What the server says of each, in the same order.

  Raises:
    types.InputError: a setting is wrong, which `pool.Rewards` says before, or
      a reference is no JSON.
    types.RunError: no answer in time, or not one reward for each rollout.
  """
  check(url, deadline_s, attempts)
  body = {
    "rollouts": [
      {
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "reference": reference,
      }
      for rollout, reference in zip(rollouts, references, strict=True)
    ]
  }
  answer = client.post(
    url,
    body,
    deadline_s=deadline_s,
    attempts=attempts,
    seed=f"{rollouts[0].completion.uid}",
  )
  match answer:
    case {"rewards": [*rewards]} if len(rewards) == len(rollouts):
      return rewards
    case {"rewards": [*rewards]}:
      got = f"{len(rewards)}"
    case _:
      got = f"{answer!r:.80}"
  raise types.RunError(
    f'reward server: expected {{"rewards": [...]}} with {len(rollouts)} '
    f"of them, got {got}"
  )
