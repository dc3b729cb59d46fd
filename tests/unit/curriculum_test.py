"""Levels of tasks: when they move, what counts for which, and resuming."""

import collections
import dataclasses
import itertools
import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxrl_post import types
from jaxrl_post.data import curriculum, dataset, gym, prompts, sources
from jaxrl_post.data import frontier as frontiers
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import events
from tests.unit import stream_resume_test as resumes
from tests.unit import streams


@dataclasses.dataclass(frozen=True)
class Task:
  """Examples whose reference says task, level and index."""

  name: str
  number: int
  size: int = 5

  def levels(self):
    return [
      [
        types.Example(prompt="a", reference=(self.name, level, i))
        for i in range(self.size)
      ]
      for level in range(self.number)
    ]


CFG = curriculum.Curriculum(rise=0.75, fall=0.25, groups=2)
TASKS = curriculum.Tasks((Task("sums", 4), Task("words", 2)))


def ladder(cfg=CFG, tasks=TASKS):
  names = [task.name for task in tasks.tasks for _ in range(task.number)]
  return curriculum.ladder(cfg, names, tasks.weights)


def data(cfg: curriculum.Curriculum | None = CFG, tasks=TASKS, epochs=None):
  return prompts.load(
    tasks,
    streams.Letters(),
    max_tokens=4,
    seed=0,
    epochs=epochs,
    curriculum=cfg,
  )


class Shown:
  """Finished groups, each counted at once; of one task of four levels."""

  def __init__(self, cfg=CFG) -> None:
    self.on = ladder(cfg, curriculum.Tasks((Task("sums", 4),)))
    self.evidence = curriculum.Evidence()

  def group(self, level: int, *rewards: float) -> int:
    """Returns the level after a group of a draw of this one."""
    self.evidence = curriculum.note(self.on, self.evidence, level, rewards)
    self.evidence = curriculum.count(self.on, self.evidence)
    return curriculum.sums(self.on, self.evidence)["sums"][0]


def test_a_level_rises_and_falls_by_the_share_of_a_full_window():
  shown = Shown()
  assert shown.group(0, 1.0, 1.0) == 0  # One group of two.
  assert shown.group(0, 1.0, 0.0) == 1  # Three of four: enough.
  # The window of a level begins with nothing.
  assert curriculum.sums(shown.on, shown.evidence)["sums"] == (1, 0, 0, 0)
  assert shown.group(1, 0.0, 0.0) == 1
  assert shown.group(1, 0.0, 1.0) == 1  # One of four is not below a quarter.
  assert shown.group(1, 0.0, 0.0) == 1  # The newest two: one of four.
  assert shown.group(1, 0.0, 0.0) == 0
  for _ in range(3):  # There is none below.
    assert shown.group(0, 0.0, 0.0) == 0
  assert len(shown.evidence.seen["sums"].window) == 2


def test_rollouts_are_counted_not_groups_and_only_those_with_a_reward():
  shown = Shown()
  assert shown.group(0, math.nan, math.nan) == 0
  assert shown.evidence == curriculum.Evidence()
  assert shown.group(0, 0.0) == 0
  assert shown.group(0, 1.0, 2.5, 1.0, math.nan) == 1


def test_the_highest_level_stays():
  shown = Shown(dataclasses.replace(CFG, start=3, groups=1))
  assert [shown.group(3, 1.0) for _ in range(2)] == [3, 3]
  assert curriculum.sums(shown.on, shown.evidence)["sums"] == (3, 1, 1, 0)


def test_what_comes_late_counts_for_the_level_it_was_drawn_at():
  shown = Shown(dataclasses.replace(CFG, groups=1))
  assert shown.group(0, 1.0) == 1
  # Drawn before the move, in any number: no failure of the new level.
  assert [shown.group(0, 0.0) for _ in range(5)] == [1] * 5
  assert curriculum.sums(shown.on, shown.evidence)["sums"] == (1, 0, 0, 5)
  assert shown.group(1, 0.0) == 0


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.permutations(range(6)))
def test_the_order_in_which_groups_end_does_not_matter(order):
  on, evidence = ladder(), curriculum.Evidence()
  rewards = [[1.0], [1.0], [0.0, 1.0], [0.0], [1.0], [0.0]]
  draws = [0, 6, 12, 1, 7, 4]  # A draw of sums has 0 to 3 in each six.
  for i in order:
    evidence = curriculum.note(on, evidence, draws[i], rewards[i])
  text = json.dumps(curriculum.to_json(evidence))
  evidence = curriculum.count(on, curriculum.from_json(json.loads(text)))
  found = curriculum.sums(on, evidence)
  # By draws: level 0 solved; the first of level 1 is too early to count.
  assert found == {"sums": (1, 1, 1, 2), "words": (0, 0, 1, 0)}
  text = json.dumps(curriculum.to_json(evidence))
  assert curriculum.from_json(json.loads(text)) == evidence


@pytest.mark.parametrize(
  "broken",
  [
    None,
    {"seen": {}, "new": [[1, 2]]},
    {"seen": {"sums": [1]}, "new": []},
    {"seen": {"sums": [1, 0, [1, 0]]}, "new": []},
    {"seen": {"sums": [-1, 0]}, "new": []},
  ],
)
def test_what_is_no_evidence_is_refused(broken):
  whole = frontiers.to_json(frontiers.Frontier())
  with pytest.raises(types.RunError, match="Resume from another checkpoint"):
    frontiers.from_json({**whole, "levels": broken})


# ------------------------------------------------------------------- the draws


def test_a_draw_is_of_one_level_and_item_whatever_was_solved():
  items = data()
  assert items.sizes == (5,) * 6 and items.ladder is not None
  rounds = collections.defaultdict(list)
  for uid in range(60):
    name, level, index = items[uid].reference
    assert items.ladder.at(uid) == (name, level)
    rounds[name, level].append(index)
  assert len(rounds) == 6
  for asked in rounds.values():  # Two passes, each of every item once.
    assert sorted(asked[:5]) == sorted(asked[5:]) == [0, 1, 2, 3, 4]
  again = data()
  assert [again[u] for u in range(60)] == [items[u] for u in range(60)]
  assert again.digest == items.digest


def test_rounds_have_the_weights_of_their_tasks():
  items = data(tasks=dataclasses.replace(TASKS, weights=(1, 3)))
  assert items.ladder is not None
  asked = collections.Counter(
    name for name, level in map(items.ladder.at, range(1000)) if level == 0
  )
  assert asked["words"] == 3 * asked["sums"] == 300


def test_draws_end_before_any_level_comes_again():
  assert len(data(epochs=2)) == 2 * 5 * 6
  seen = curriculum.Evidence()
  on = ladder()
  number = curriculum.pass_over(on, seen, itertools.count(1))
  assert number == 3  # Levels 1 to 3 of sums; words is at level 0.


def test_without_a_curriculum_all_levels_are_asked_alike():
  items = data(None)
  assert items.ladder is None and items.sizes == (30,)
  first = [items[uid].reference for uid in range(30)]
  assert sorted(first) == sorted(e.reference for e in TASKS.load())


# ---------------------------------------------------------------------- a run

CLIMB = curriculum.Curriculum(rise=0.9, fall=0.4, groups=3)


def score(rollout: types.Rollout) -> float:
  """Solves the two easiest levels, half of the next, nothing beyond."""
  level = rollout.prompt.reference[1]
  return float(level < 2 or (level == 2 and rollout.completion.uid % 2))


@pytest.mark.parametrize(
  ("setup", "start"),
  [
    (streams.Setup(), 0),
    (streams.Setup(asynchronous=False), 1),
    (streams.Setup(max_lag=2, fixed=True, in_flight="recompute"), 0),
  ],
  ids=str,
)
def test_c95_a_resumed_run_climbs_as_the_run_that_went_on(
  tmp_path, setup, start
):
  task = curriculum.Tasks((Task("sums", 4),))
  items = data(dataclasses.replace(CLIMB, start=start), task)
  options = {"items": items, "score": score, "num_steps": 12}
  one = setup.run(tmp_path, **options)
  levels = [{g.prompt.reference[1] for g in groups} for groups in one.batches]
  assert levels[0] == {start} and levels[-1] == {2}
  # Of a window of 3 groups, level by level, and none is skipped.
  assert {*itertools.chain(*levels)} == {*range(start, 3)}
  for step in (1, 5):
    rest = setup.resumed(tmp_path, one, step, **options)
    assert streams.repeated(rest.batches, one.batches[step:]), step
    text = (tmp_path / f"from-{step}" / events.NAME).read_text()
    resumes.fates(text)  # Each draw once.
  last = cuts.from_files(
    one.cuts[12], prompts=items, rollout=streams.ENV.rollout
  )
  assert last.counters.levels["sums"][0] == 2
  assert last.ledger.passed > 0


def test_a_free_run_counts_each_group_for_the_level_it_was_drawn_at(tmp_path):
  setup = streams.Setup(max_lag=3)
  items = data(CLIMB, curriculum.Tasks((Task("sums", 4), Task("words", 3))))
  options = {"items": items, "score": score, "num_steps": 20}
  one = setup.run(tmp_path, **options)
  rest = setup.resumed(tmp_path, one, 9, **options)
  for made in (one, rest):
    cut = cuts.from_files(
      made.cuts[20], prompts=items, rollout=streams.ENV.rollout
    )
    # Both reach the level of which half is solved, and stay.
    assert [v[0] for v in cut.counters.levels.values()] == [2, 2]
    late = sum(v[3] for v in cut.counters.levels.values())
    # A move takes a full window; what was drawn before it may come after it.
    assert 0 <= late <= cut.ledger.trained.groups - 2 * 2 * CLIMB.groups
    line = curriculum.metrics(cut.counters.levels)
    assert line["curriculum/words/level"] == 2.0
    assert line["curriculum/words/solved"] == 0.5


# ------------------------------------------------------------------- refused


@pytest.mark.parametrize(
  ("settings", "rule"),
  [
    ({"rise": 0.2, "fall": 0.2}, "rise: expected 0 <= fall < rise <= 1"),
    ({"rise": 1.1}, "rise: expected"),
    ({"fall": -0.1}, "rise: expected"),
    ({"groups": 0}, "groups: expected >= 1"),
    ({"start": -1}, "start: expected >= 0"),
  ],
)
def test_settings_out_of_range_are_refused(settings, rule):
  with pytest.raises(types.InputError, match=rule):
    curriculum.Curriculum(**settings)


def test_a_start_beyond_the_levels_of_a_task_is_refused():
  with pytest.raises(types.InputError, match="the 2 levels of words, got 2"):
    data(dataclasses.replace(CFG, start=2))


@pytest.mark.parametrize(
  ("tasks", "weights", "rule"),
  [
    ((), None, "at least one"),
    ((Task("a", 1), Task("a", 2)), None, "different names"),
    ((Task("a/b", 1),), None, "letters and digits"),
    ((Task("a", 1),), (1.0, 2.0), "one for each of 1 tasks"),
    ((Task("a", 1),), (0.0,), "numbers above 0"),
  ],
)
def test_tasks_that_cannot_be_told_apart_or_weighed_are_refused(
  tasks, weights, rule
):
  with pytest.raises(types.InputError, match=rule):
    curriculum.Tasks(tasks, weights)


def test_a_batch_is_counted_by_what_is_asked_at_the_first_level():
  # Of 12 draws of a task with 4 levels, 3 are asked; 13 and on, 4.
  on = ladder(CLIMB, curriculum.Tasks((Task("sums", 4),)))
  assert [curriculum.asked(on, n) for n in (12, 13, 16, 17)] == [3, 4, 4, 5]


@pytest.mark.parametrize(
  ("options", "name"),
  [
    ({"filters": True, "warm_up": 0}, "stream.filter_zero_signal"),
    ({"filters": False, "warm_up": 3}, "warmup.num_steps"),
  ],
)
def test_what_does_not_go_with_levels_is_refused(options, name):
  curriculum.check(None, **options)
  with pytest.raises(types.InputError, match=f"{name}: expected"):
    curriculum.check(CLIMB, **options)


def test_weights_that_nothing_goes_by_are_refused():
  weighted = curriculum.Tasks((Task("sums", 4), Task("words", 2)), (2, 1))
  with pytest.raises(types.InputError, match="data.train.weights: .* without"):
    dataset.Data(train=weighted)


def test_a_curriculum_asks_for_levels_and_for_no_pool():
  plain = sources.Generated(lambda i: types.Example(prompt="a", reference=i), 2)
  with pytest.raises(types.InputError, match="whose tasks have levels, got G"):
    dataset.Data(train=plain, curriculum=CFG)
  with pytest.raises(types.InputError, match="expected no data.pool beside"):
    dataset.Data(train=TASKS, curriculum=CFG, pool=dataset.difficulty.Pool())


# ------------------------------------------------------------------------ gym


def test_gym_has_the_entries_of_each_level_of_its_curriculum():
  task = gym.Levels(name="basic_arithmetic", size=3, seed=1)
  levels = task.levels()
  assert [len(level) for level in levels] == [3] * 5
  assert levels == task.levels() and task.load() == sum(levels, ())
  for number, level in enumerate(levels):
    for example in level:
      shape = example.reference["metadata"]["difficulty"]
      assert shape["num_terms"] == (2, 2 + number)
      assert shape["num_digits"] == (1, 1 + min(number, 3))
  alone = gym.Levels("basic_arithmetic", 3, 1, ranges="upper_bound", most=2)
  *_, hard = alone.levels()
  assert len(alone.levels()) == 2
  assert hard[0].reference["metadata"]["difficulty"]["num_terms"] == (3, 3)
  # More entries or levels change none of those that there were.
  more = gym.Levels("basic_arithmetic", 5, 1)
  assert [level[:3] for level in more.levels()] == [*levels]
  other = gym.Levels("basic_arithmetic", 3, 2).levels()
  assert all(a != b for a, b in zip(levels, other, strict=True))


def test_gym_refuses_what_has_no_curriculum_or_no_such_level():
  with pytest.raises(types.InputError, match="curriculum, got 'composite'"):
    gym.Levels("composite", 3, 1)
  with pytest.raises(types.InputError, match="source.most: expected >= 1"):
    gym.Levels("basic_arithmetic", 3, 1, most=0)
  with pytest.raises(types.InputError, match="source.size: expected >= 1"):
    gym.Levels("basic_arithmetic", 0, 1)
  # A rotation by 50 letters, in the package's own curriculum.
  task = gym.Levels("caesar_cipher", 3, 1)
  with pytest.raises(types.InputError, match="got level 2 .*Lower most"):
    task.levels()
  assert len(dataclasses.replace(task, most=2).levels()) == 2
