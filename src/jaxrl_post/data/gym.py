"""Examples from reasoning-gym: tasks made by procedure, checked by program.

Needs the extra `gym`. Only experiments that use it import this module.
"""

import dataclasses
import difflib
import hashlib
from collections.abc import Iterable
from typing import Literal

import reasoning_gym
from reasoning_gym import factory
from reasoning_gym.coaching import base_curriculum

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
    _check_name(self.name, factory.DATASETS, "a reasoning-gym data set")

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


@dataclasses.dataclass(frozen=True)
class Levels:
  """One reasoning-gym data set at every level of its curriculum.

  For `curriculum.Tasks`; as a source of its own it has all levels.

  Attributes:
    name: a data set that has a curriculum in reasoning-gym.
    size: how many entries of each level.
    seed: of the entries; each level has one of its own made of it.
    ranges: what a level means for an attribute that is a range: "inclusive"
      from the lowest level up to this one, "upper_bound" this one alone.
    most: takes so many levels, the easiest; None takes all.
    options: further settings, as of `Gym`; those of the level go before them.
    chat: as of `Gym`.
    system: likewise.
  """

  name: str
  size: int
  seed: int
  ranges: Literal["inclusive", "upper_bound"] = "inclusive"
  most: int | None = None
  options: tuple[tuple[str, object], ...] = ()
  chat: bool = False
  system: str | None = None

  def __post_init__(self) -> None:
    _check_name(
      self.name, factory.CURRICULA, "a reasoning-gym data set with a curriculum"
    )
    if self.most is not None and self.most < 1:
      raise types.InputError(
        f"source.most: expected >= 1 or None, got {self.most}. Correct it."
      )
    self._of(self.options, self.seed)  # Refuses what `Gym` does.

  def load(self) -> tuple[types.Example, ...]:
    """Makes the entries of all levels, the easiest first."""
    return tuple(entry for level in self.levels() for entry in level)

  def levels(self) -> tuple[tuple[types.Example, ...], ...]:
    """Makes the entries of each level, see `Gym.load`.

    Returns:
      As many levels as the attribute with the most of them has; one with fewer
      stays at its last. Entry i of a level follows from seed, level and i.

    Raises:
      types.InputError: when the data set has no entries of a level.
    """
    attributes = factory.create_curriculum(self.name).attributes.values()
    number = max((len(attribute.levels) for attribute in attributes), default=1)
    return tuple(map(self._level, range(min(number, self.most or number))))

  def _level(self, level: int) -> tuple[types.Example, ...]:
    ladder = factory.create_curriculum(self.name)
    ladder.set_global_level(level)
    mode = base_curriculum.RangeAttributeMode(self.ranges)
    text = f"{self.name} {self.seed} {level}".encode()
    # NumPy takes seeds below 2**32, to which data sets add the index.
    seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1
    try:
      shape = ladder.generate_configuration(
        dict(self.options), base_curriculum.DefaultCurriculumContext(mode)
      )
      options = tuple(
        (field.name, getattr(shape, field.name))
        for field in dataclasses.fields(shape)
        if field.name not in ("size", "seed")
      )
      return self._of(options, seed).load()
    except (AssertionError, TypeError, ValueError) as error:
      reason = " ".join(str(error).split())
      raise types.InputError(
        f"source.most: expected levels of {self.name} that reasoning-gym has "
        f"entries of, got level {level} ({reason}). Lower most, or "
        "correct its options."
      ) from error

  def _of(self, options: tuple[tuple[str, object], ...], seed: int) -> Gym:
    return Gym(self.name, self.size, seed, options, self.chat, self.system)


def _check_name(name: str, known: Iterable[str], rule: str) -> None:
  """Refuses a name that is none of those that are known."""
  if name in known:
    return
  near = difflib.get_close_matches(name, known, 1)
  hint = f"Did you mean {near[0]!r}?" if near else "Its README lists them."
  raise types.InputError(f"source.name: expected {rule}, got {name!r}. {hint}")
