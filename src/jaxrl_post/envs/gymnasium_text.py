"""Text environments with Gymnasium's interface, as whom the policy talks to.

Towers et al. 2024 (arXiv 2407.17032). Such an environment changes as it goes,
and a turn may be asked again; so the state of a conversation is its seed and
what was said, and each turn plays it once more in a new environment.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.envs import multi_turn


@types.host_record
class _Played:
  """What has been done in an environment.

  Attributes:
    seed: of its reset.
    said: its actions, as the policy said them, in order.
  """

  seed: int
  said: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GymnasiumText:
  """Environments whose observations are text; `restore.Restorable`, too.

  Attributes:
    make: makes one, as `lambda: gymnasium.make("...")`. Of one seed and the
      same actions it always says the same.
    action: what the policy said to an action, of one text always the same;
      where it raises ValueError, KeyError, IndexError or TypeError the policy
      is told so.
  """

  make: Callable[[], Any]
  action: Callable[[str], Any] = str

  @property
  def schemas(self) -> Sequence[Mapping[str, Any]]:
    """None: actions are what the policy says."""
    return ()

  def example(self, seed: int) -> types.Example:
    """Makes the prompt of a seed; for `sources.Generated(it.example, size)`.

    Returns:
      The first observation. The reference, by which a conversation finds its
      environment again, is the seed.
    """
    environment = self.make()
    try:
      observation, _ = environment.reset(seed=seed)
    finally:
      environment.close()
    return types.Example(prompt=str(observation), reference=seed)

  def reset(self, prompt: types.Prompt) -> _Played:
    """Returns the state of a conversation in which nothing was done."""
    return _Played(seed=int(prompt.reference))

  def step(self, state: _Played, text: str) -> multi_turn.Step:
    """Takes an action.

    Returns:
      What is seen then, and the action's reward; no messages when it is over.

    Raises:
      InputError: the environment was over before its last action, so it does
        not do the same again.
    """
    try:
      action = self.action(text)
    except (ValueError, KeyError, IndexError, TypeError) as error:
      return self.failed(state, f"no action: {error}")
    environment = self.make()
    try:
      environment.reset(seed=state.seed)
      for said in state.said:
        _, _, terminated, truncated, _ = environment.step(self.action(said))
        if terminated or truncated:
          raise types.InputError(
            "env.environment: expected an environment that does the same again "
            f"of seed {state.seed}, got one that was over sooner. Seed it in "
            "reset()."
          )
      seen, reward, terminated, truncated, _ = environment.step(action)
    finally:
      environment.close()
    if terminated or truncated:
      return multi_turn.Step(reward=float(reward))
    return multi_turn.Step(
      state=dataclasses.replace(state, said=(*state.said, text)),
      messages=({"role": "user", "content": str(seen)},),
      reward=float(reward),
    )

  def failed(self, state: _Played, reason: str) -> multi_turn.Step:
    """Says why nothing was done."""
    message = {"role": "user", "content": reason}
    return multi_turn.Step(state=state, messages=(message,), errors=1)

  def save(self, state: _Played) -> list[str]:
    """See `restore.Restorable`."""
    return list(state.said)

  def restore(self, prompt: types.Prompt, saved: list[str]) -> _Played:
    """See `restore.Restorable`; nothing is played."""
    return _Played(seed=int(prompt.reference), said=tuple(saved))
