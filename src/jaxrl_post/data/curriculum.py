"""How hard the prompts of a task are, by what its groups have shown.

A task has levels, each with items of its own. The draws of a run name all of
them: a round asks for one task, and has a draw for each of its levels. Those of
other levels than its present one are passed over. So a draw says which level it
is of, prompts follow from data, seed and draw alone, and what comes late counts
for the level that it was drawn at. Nothing here knows a clock; evidence counts
when `count` is called, which the stream does with each new policy.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl_post import types
from jaxrl_post.data import mixture

_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Curriculum:
  """When the level of a task rises, and when it falls.

  Attributes:
    solved: a rollout that earned this or more, turns included, has solved its
      prompt.
    rise: share of solved rollouts with which a task goes one level up.
    fall: share below which it goes one level down.
    groups: of a task at its present level, the newest, whose rollouts are
      counted; before there are so many, its level stays.
    start: the level at which every task begins; 0 is the easiest.
  """

  solved: float = 1.0
  rise: float = 0.8
  fall: float = 0.2
  groups: int = 16
  start: int = 0

  def __post_init__(self) -> None:
    shares = 0 <= self.fall < self.rise <= 1
    rules = (
      (shares, "rise", "0 <= fall < rise <= 1", (self.fall, self.rise)),
      (self.groups >= 1, "groups", ">= 1", self.groups),
      (self.start >= 0, "start", ">= 0", self.start),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"data.curriculum.{name}: expected {rule}, got {value}. Correct it."
        )


@runtime_checkable
class Levelled(Protocol):
  """A task that has levels, such as `gym.Levels`."""

  @property
  def name(self) -> str:
    """Of the task, in metrics."""
    ...

  def levels(self) -> Sequence[Sequence[types.Example]]:
    """Makes the examples of each level, the easiest first."""
    ...


@dataclasses.dataclass(frozen=True)
class Tasks:
  """A source of tasks that have levels.

  With `data.curriculum` each is asked at its own level; without, as held-out
  prompts are, all examples of all levels alike.

  Attributes:
    tasks: of different names, of letters, digits, `.`, `-` and `_`.
    weights: of the rounds, one for each task, as of a `mixture.Mixture`; None
      asks them equally often.
  """

  tasks: tuple[Levelled, ...]
  weights: tuple[float, ...] | None = None

  def __post_init__(self) -> None:
    strange = [task for task in self.tasks if not isinstance(task, Levelled)]
    if strange:
      raise types.InputError(
        "data.train.tasks: expected tasks with levels, such as gym.Levels, got "
        f"{strange[0]!r:.100}. Correct the experiment."
      )
    names, weights = [task.name for task in self.tasks], self.weights
    clear = all(map(_NAME.fullmatch, names)) and len({*names}) == len(names)
    fits = weights is None or len(weights) == len(names)
    positive = all(
      isinstance(w, int | float) and 0 < w < math.inf for w in weights or ()
    )
    rules = (
      (bool(names), "tasks", "at least one", "none"),
      (clear, "tasks", "different names of letters and digits", names),
      (fits, "weights", f"one for each of {len(names)} tasks", weights),
      (positive, "weights", "numbers above 0", weights),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"data.train.{name}: expected {rule}, got {value}. Correct it."
        )

  def load(self) -> tuple[types.Example, ...]:
    """Makes all examples: task by task, level by level."""
    return tuple(
      example
      for task in self.tasks
      for level in task.levels()
      for example in level
    )

  def parts(self) -> tuple[tuple[str, Sequence[types.Example]], ...]:
    """Makes the examples of each level of each task, with the task's name."""
    return tuple(
      (task.name, level) for task in self.tasks for level in task.levels()
    )


@types.host_record
class Ladder:
  """The levels of a run's tasks.

  Attributes:
    cfg: when they rise and fall.
    parts: task and level of the items of each source of the order.
    pattern: the source of each draw, which repeats behind its end.
  """

  cfg: Curriculum
  parts: tuple[tuple[str, int], ...]
  pattern: np.ndarray

  @property
  def top(self) -> dict[str, int]:
    """The highest level of each task."""
    return dict(sorted(self.parts, key=lambda part: part[1]))

  @property
  def period(self) -> int:
    """Draws until the pattern repeats."""
    return len(self.pattern)

  def at(self, draw: int) -> tuple[str, int]:
    """Returns task and level of a draw."""
    return self.parts[int(self.pattern[draw % len(self.pattern)])]


def ladder(
  cfg: Curriculum, names: Sequence[str], weights: Sequence[float] | None
) -> Ladder:
  """Lays out the draws of tasks.

  Args:
    cfg: when levels rise and fall.
    names: the task of each part, of which a task has as many as levels, one
      after the other.
    weights: of the rounds, in the order of the tasks; None for equal ones.

  Returns:
    A ladder in whose pattern a round of a task has a draw of each of its
    levels, the easiest first.

  Raises:
    types.InputError: a task has no level `cfg.start`, or a weight has too many
      digits to be kept exactly.
  """
  counts = collections.Counter(names)
  for name, count in counts.items():
    if cfg.start >= count:
      raise types.InputError(
        f"data.curriculum.start: expected less than the {count} levels of "
        f"{name}, got {cfg.start}. Lower it."
      )
  parts = [(name, i) for name, count in counts.items() for i in range(count)]
  first = {name: parts.index((name, 0)) for name in counts}
  each = [range(first[n], first[n] + count) for n, count in counts.items()]
  rounds = mixture.pattern(weights or [1] * len(each)).tolist()
  pattern = np.asarray([part for task in rounds for part in each[task]])
  return Ladder(cfg=cfg, parts=tuple(parts), pattern=pattern)


def asked(on: Ladder, draws: int) -> int:
  """Counts the draws that are asked if all tasks stay where they begin."""
  starts = np.asarray([on.at(i)[1] == on.cfg.start for i in range(on.period)])
  periods, rest = divmod(draws, on.period)
  return periods * int(starts.sum()) + int(starts[:rest].sum())


def check(cfg: Curriculum | None, *, filters: bool, warm_up: int) -> None:
  """Refuses what does not go with levels.

  Args:
    cfg: the curriculum, if there is one.
    filters: whether groups without signal are left out.
    warm_up: steps on demonstrations.

  Raises:
    types.InputError: names the setting.
  """
  if cfg is None:
    return
  if filters:
    raise types.InputError(
      "stream.filter_zero_signal: expected false with data.curriculum, as a "
      "level that is solved altogether would train nothing, and so never rise, "
      "got true. Leave one of them out."
    )
  if warm_up:
    raise types.InputError(
      "warmup.num_steps: expected 0 with data.curriculum, as demonstrations "
      f"would be of all levels, got {warm_up}. Leave one of them out."
    )


# -------------------------------------------------------------- what was shown


@types.host_record
class Standing:
  """Where a task is.

  Attributes:
    level: its present one.
    window: rollouts that solved their prompt, and those that have a reward, of
      each of the newest groups of this level, the oldest first.
    late: groups that counted when the task had another level than theirs.
  """

  level: int
  window: tuple[tuple[int, int], ...] = ()
  late: int = 0


@types.host_record
class Evidence:
  """What finished groups say about their tasks.

  Attributes:
    seen: where each task is; others are where they began.
    new: draws, how many rollouts solved them and how many have a reward, that
      do not count yet.
  """

  seen: Mapping[str, Standing] = dataclasses.field(default_factory=dict)
  new: tuple[tuple[int, int, int], ...] = ()


def note(
  on: Ladder, evidence: Evidence, draw: int, rewards: Sequence[float]
) -> Evidence:
  """Takes note of a finished group, which does not count yet.

  Args:
    on: says what solves a prompt.
    evidence: so far.
    draw: uid of the group's prompt.
    rewards: what its rollouts have earned; NaN where there is no reward.

  Returns:
    The same evidence if no rollout has a reward.
  """
  valid = [reward for reward in rewards if not math.isnan(reward)]
  if not valid:
    return evidence
  solved = sum(reward >= on.cfg.solved for reward in valid)
  new = (*evidence.new, (draw, solved, len(valid)))
  return dataclasses.replace(evidence, new=new)


def count(on: Ladder, evidence: Evidence) -> Evidence:
  """Lets all that was noted count, in the order of draws.

  A task whose window is full goes a level up or down if its share of solved
  rollouts says so, and begins the window of that level with nothing.

  Returns:
    Evidence without anything new, the same in whichever order it was noted.
  """
  seen, top = dict(evidence.seen), on.top
  for draw, *shown in sorted(evidence.new):
    name, level = on.at(draw)
    was = _standing(on, seen, name)
    if level != was.level:
      seen[name] = dataclasses.replace(was, late=was.late + 1)
      continue
    window = (*was.window, (shown[0], shown[1]))[-on.cfg.groups :]
    now = dataclasses.replace(was, window=window)
    level += _move(on.cfg, window)
    if 0 <= level <= top[name] and level != was.level:
      now = dataclasses.replace(was, level=level, window=())
    seen[name] = now
  return Evidence(seen=seen)


def _move(cfg: Curriculum, window: Sequence[tuple[int, int]]) -> int:
  """Returns 1, 0 or -1: where a window sends its task."""
  if len(window) < cfg.groups:
    return 0
  share = sum(s for s, _ in window) / sum(n for _, n in window)
  return int(share >= cfg.rise) - int(share < cfg.fall)


def _standing(on: Ladder, seen: Mapping[str, Standing], name: str) -> Standing:
  return seen.get(name) or Standing(level=on.cfg.start)


def pass_over(on: Ladder, evidence: Evidence, draws: Iterable[int]) -> int:
  """Counts the draws, from the next one on, that are of other levels.

  Args:
    on: says of which level a draw is.
    evidence: that counts.
    draws: to come, in their order; read up to the first that is to be asked.
  """
  number = 0
  for draw in draws:
    name, level = on.at(draw)
    if level == _standing(on, evidence.seen, name).level:
      break
    number += 1
  return number


def sums(on: Ladder, evidence: Evidence) -> dict[str, tuple[int, ...]]:
  """Returns where each task is, by name.

  Returns:
    Its level; of its window the rollouts that solved their prompt, and those
    that have a reward; and groups that were late.
  """
  found = {}
  for name in on.top:
    now = _standing(on, evidence.seen, name)
    solved, scored = (sum(pair[i] for pair in now.window) for i in (0, 1))
    found[name] = (now.level, solved, scored, now.late)
  return found


def metrics(found: Mapping[str, Sequence[int]]) -> dict[str, float]:
  """Returns what `docs/metrics.md` has under `curriculum/`.

  Args:
    found: from `sums`.
  """
  return {
    f"curriculum/{name}/{key}": float(value)
    for name, (level, solved, scored, late) in found.items()
    for key, value in (
      ("level", level),
      ("solved", solved / scored if scored else math.nan),
      ("late", late),
    )
  }


def to_json(evidence: Evidence) -> dict[str, Any]:
  """Returns the evidence as numbers and lists, for a checkpoint."""
  seen = {
    name: [now.level, now.late, *map(list, now.window)]
    for name, now in sorted(evidence.seen.items())
  }
  return {"seen": seen, "new": [list(one) for one in evidence.new]}


def from_json(data: Any) -> Evidence:
  """Reads what `to_json` wrote.

  Returns:
    The evidence that was written.

  Raises:
    types.RunError: when `data` is no evidence.
  """
  match data:
    case {"seen": dict(seen), "new": [*new]} if all(
      _are_counts(one, 3) for one in new
    ) and all(map(_is_standing, seen.values())):
      standings = {
        name: Standing(
          level=level, late=late, window=tuple((s, n) for s, n in window)
        )
        for name, (level, late, *window) in seen.items()
      }
      return Evidence(
        seen=standings, new=tuple((uid, s, n) for uid, s, n in new)
      )
  raise types.RunError(
    "frontier: expected levels {'seen': {task: [level, late, [int] * 2]}, "
    f"'new': [[int] * 3]}}, got {data!r}. Resume from another checkpoint."
  )


def _is_standing(value: Any) -> bool:
  return (
    isinstance(value, list)
    and _are_counts(value[:2], 2)
    and all(_are_counts(pair, 2) and pair[1] > 0 for pair in value[2:])
  )


def _are_counts(value: Any, length: int) -> bool:
  return (
    isinstance(value, list)
    and len(value) == length
    and all(type(number) is int and number >= 0 for number in value)
  )
