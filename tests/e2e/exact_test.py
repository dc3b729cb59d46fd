"""Runs that repeat themselves: deterministic, continued, followed."""

import functools
import pathlib
import shutil
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxrl_post import types
from tests.e2e import runs

# Completions of many blocks, and so many versions; fewer rows than groups.
LONG = (
  "num_steps=6",
  "checkpoint.every=2",
  "checkpoint.keep=9",
  "sampling.max_tokens=20",
  "sampling.block=3",
  "sampling.rows=24",
)
FIXED = ("stream.deterministic=true", "sampling.in_flight=recompute")
DRAINED = ("stream.deterministic=true", "sampling.in_flight=drain")
FILTERED = "stream.filter_zero_signal=true"
EVERY = ("checkpoint.every=1",)
FREE = ("max_lag=2", *EVERY, "sampling.in_flight=keep")
# What is no clock's.
COMPUTED = (
  "loss/",
  "reward/",
  "completion/",
  "mismatch/",
  "staleness/",
  "ledger/",
)


@types.host_record
class Made:
  """A run that several tests read, and its folder."""

  folder: pathlib.Path
  run: runs.Trained


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory) -> Callable[..., Made]:
  """Makes each run once, when it is first asked for."""

  @functools.cache
  def made(*settings: str) -> Made:
    folder = tmp_path_factory.mktemp("made") / "one"
    return Made(folder=folder, run=runs.train(folder, *LONG, *settings))

  return made


def assert_equal(one: runs.Trained, other: runs.Trained) -> None:
  """Compares weights, moments and the metrics of every step, bit for bit."""
  for got, want in zip(
    jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True
  ):
    if jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
      got, want = map(jax.random.key_data, (got, want))
    np.testing.assert_array_equal(got, want)
  assert computed(one) == computed(other)


def computed(run: runs.Trained) -> list[dict[str, float]]:
  return [
    {name: value for name, value in line.items() if name.startswith(COMPUTED)}
    for line in run.metrics
  ]


def continued(folder: pathlib.Path, step: int, *settings: str) -> runs.Trained:
  """Goes on from a copy of a run folder, as it was when killed after a step."""
  copy = folder.with_name(f"{folder.name}-{step}")
  shutil.copytree(folder, copy)
  for path in (copy / "checkpoints").iterdir():
    if int(path.name) > step:
      shutil.rmtree(path)
  return runs.train(copy, *LONG, *settings)


def oldest(group: types.Group) -> int:
  return min(v for r in group.rollouts for v in r.completion.versions)


@pytest.mark.parametrize(
  ("settings", "steps"),
  [
    (("max_lag=4", *FIXED), (2, 4)),
    pytest.param(("max_lag=2", *DRAINED), (2,), marks=pytest.mark.slow),
    pytest.param(("max_lag=1", FILTERED, *FIXED), (4,), marks=pytest.mark.slow),
  ],
)
def test_deterministic_runs_are_equal_and_go_on_as_if_never_stopped(
  tmp_path, settings, steps
):
  one = runs.train(tmp_path / "one", *LONG, *settings)
  assert max(line["staleness/max"] for line in one.metrics) > 0
  assert_equal(runs.train(tmp_path / "two", *LONG, *settings), one)
  for step in steps:
    assert_equal(continued(tmp_path / "one", step, *settings), one)


@pytest.mark.parametrize(("settings", "step"), [((), 2), ((FILTERED,), 4)])
def test_c95_at_lag_zero_any_run_goes_on_as_if_never_stopped(
  tmp_path, settings, step
):
  one = runs.train(tmp_path / "one", *LONG, "max_lag=0", *settings)
  assert_equal(continued(tmp_path / "one", step, "max_lag=0", *settings), one)


@pytest.mark.parametrize(
  "in_flight",
  [
    "keep",
    pytest.param("recompute", marks=pytest.mark.slow),
    pytest.param("drain", marks=pytest.mark.slow),
  ],
)
def test_a_free_run_loses_no_prompt_and_keeps_its_bound_when_it_goes_on(
  made, in_flight
):
  settings = ("max_lag=2", *EVERY, f"sampling.in_flight={in_flight}")
  first = made(*settings)
  rest = continued(first.folder, 2, *settings)
  batches = (*first.run.groups[:2], *rest.groups)
  uids = sorted(group.prompt.uid for batch in batches for group in batch)
  assert uids == list(range(24))
  for version, batch in enumerate(batches):
    assert all(version - oldest(group) <= 2 for group in batch)
  last = rest.metrics[-1]
  assert last["ledger/trained"] == 24
  assert last["ledger/admitted"] == 24 + last["ledger/outstanding"]


def test_half_made_rollouts_are_continued_not_sampled_anew(made):
  older = 0
  for step in (1, 3):
    rest = continued(made(*FREE).folder, step, *FREE)
    older += sum(
      oldest(group) < step for batch in rest.groups for group in batch
    )
  # Tokens of weights that the process that went on has never had.
  assert older > 0


@pytest.mark.parametrize(
  "settings",
  [
    pytest.param(("max_lag=3",), marks=pytest.mark.slow),
    ("max_lag=1", FILTERED),
    pytest.param(
      ("max_lag=1", "stream.on_stale=drop", "sampling.in_flight=recompute"),
      marks=pytest.mark.slow,
    ),
    ("max_lag=2", "sampling.in_flight=drain"),
  ],
)
def test_events_of_a_free_run_can_be_followed(tmp_path, settings):
  one = runs.train(tmp_path / "one", *LONG, *settings)
  events = tmp_path / "one" / "events.jsonl"
  two = runs.train(
    tmp_path / "two", *LONG, *settings, f"stream.follow={events}"
  )
  assert_equal(two, one)
  assert two.groups == one.groups
  # Nobody waits for the blocks of rollouts that were dropped at the end.
  text = (tmp_path / "two" / "events.jsonl").read_text()
  assert events.read_text().startswith(text)
  assert text.count("Consume") == 6


def test_events_of_another_run_are_not_followed(tmp_path, made):
  events = made(*FREE).folder / "events.jsonl"
  with pytest.raises(types.InputError, match="^stream.follow: .*settings"):
    runs.train(
      tmp_path / "two", *LONG, *FREE, "seed=1", f"stream.follow={events}"
    )


def test_a_part_of_a_run_can_be_followed_and_not_continued(tmp_path, made):
  one = made(*FREE)
  follow = f"stream.follow={one.folder / 'events.jsonl'}"
  two = runs.train(tmp_path / "two", *LONG, *FREE, follow, "num_steps=2")
  assert two.groups == one.run.groups[:2]
  with pytest.raises(types.InputError, match="^--workdir: .*step 2"):
    runs.train(tmp_path / "two", *LONG, *FREE, follow)


def test_a_run_that_cannot_repeat_itself_is_refused():
  with pytest.raises(types.InputError, match="in_flight recompute or drain"):
    runs.configured("max_lag=1", "stream.deterministic=true")
  with pytest.raises(types.InputError, match="stream.deterministic: .*roles"):
    runs.configured("placement.mode=roles", *FIXED)


def test_checkpoints_of_another_run_or_name_are_refused(tmp_path):
  settings = (*LONG, "num_steps=2", "checkpoint.every=1")
  runs.train(tmp_path / "ours", *settings)
  shutil.copytree(tmp_path / "ours", tmp_path / "renamed")
  runs.train(tmp_path / "theirs", *settings, "sampling.temperature=0.9")
  more = (*settings[:-2], "num_steps=4")
  theirs = tmp_path / "theirs" / "checkpoints"
  shutil.rmtree(tmp_path / "ours" / "checkpoints")
  shutil.copytree(theirs, tmp_path / "ours" / "checkpoints")
  with pytest.raises(types.InputError, match="got one of step 2 of another"):
    runs.train(tmp_path / "ours", *more)
  checkpoints = tmp_path / "renamed" / "checkpoints"
  (checkpoints / "2").rename(checkpoints / "3")
  with pytest.raises(types.InputError, match="the state of step 3"):
    runs.train(tmp_path / "renamed", *more)


def test_a_longer_run_than_the_one_followed_is_refused(tmp_path, made):
  follow = f"stream.follow={made(*FREE).folder / 'events.jsonl'}"
  with pytest.raises(types.InputError, match="Set num_steps=6"):
    runs.train(tmp_path / "two", *LONG, *FREE, follow, "num_steps=7")
