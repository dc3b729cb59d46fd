"""Examples from reasoning-gym: tasks made by procedure, checked by program.

Needs the extra `gym`. Only experiments that use it import this module.
"""

import dataclasses
import difflib

import reasoning_gym
from reasoning_gym import factory

from jaxrl_post import types


@dataclasses.dataclass(frozen=True)
class Gym:
  """One reasoning-gym data set.

  Attributes:
    name: the data set, "basic_arithmetic" for example.
    size: how many entries.
    seed: of the entries. Train and evaluation sets take different seeds.
    options: further settings of the data set, as pairs of name and value.
    chat: makes prompts of one user message instead of bare text.
    system: a system message before the user's; asks for `chat`.
  """

  name: str
  size: int
  seed: int
  options: tuple[tuple[str, object], ...] = ()
  chat: bool = False
  system: str | None = None

  def __post_init__(self) -> None:
    rules = (
      (self.size >= 1, "size", ">= 1", self.size),
      (
        self.system is None or self.chat,
        "chat",
        "True with a system message",
        self.chat,
      ),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"source.{name}: expected {rule}, got {value}. Correct the value."
        )
    if self.name not in factory.DATASETS:
      near = difflib.get_close_matches(self.name, factory.DATASETS, 1)
      hint = f"Did you mean {near[0]!r}?" if near else "Its README lists them."
      raise types.InputError(
        f"source.name: expected a reasoning-gym data set, got {self.name!r}. "
        f"{hint}"
      )

  def load(self) -> tuple[types.Example, ...]:
    """Makes the entries.

    Returns:
      Questions, with the whole entry as the reference: what the scorer needs.

    Raises:
      types.InputError: when the data set refuses an option.
    """
    options = dict(self.options)
    try:
      entries = reasoning_gym.create_dataset(
        self.name, **options, size=self.size, seed=self.seed
      )
    except (AssertionError, TypeError, ValueError) as error:
      raise types.InputError(
        f"source.options: expected options of {self.name}, got {options} "
        f"({error}). Correct the option."
      ) from error
    return tuple(
      types.Example(prompt=self._prompt(entry["question"]), reference=entry)
      for entry in entries
    )

  def _prompt(self, question: str) -> str | tuple[dict[str, str], ...]:
    if not self.chat:
      return question
    user = {"role": "user", "content": question}
    if self.system is None:
      return (user,)
    return ({"role": "system", "content": self.system}, user)
