"""Streams that are cut, killed, stopped and followed, under every schedule."""

import concurrent.futures
import json
import threading
import time

import pytest

from jaxrl_post import types
from jaxrl_post.data import difficulty
from jaxrl_post.envs import cut as cuts
from jaxrl_post.envs import events, schedule
from tests.unit import streams

# ------------------------------------------------------------------- as if not

KEPT, READ, DRAINED = (
  {"in_flight": how} for how in ("keep", "recompute", "drain")
)
# Few prompts, so that what their groups have shown decides soon.
POOL = {"size": 7, "pool": difficulty.Pool(results=1, rest=2)}
EXACT = [
  streams.Setup(max_lag=0, fixed=True, filtered=True, skips=(2,), **KEPT),
  streams.Setup(max_lag=1, fixed=True, filtered=True, **READ),
  streams.Setup(max_lag=3, fixed=True, skips=(2, 3), **READ),
  streams.Setup(max_lag=3, fixed=True, filtered=True, skips=(1, 4), **READ),
  streams.Setup(max_lag=2, fixed=True, filtered=True, skips=(2, 3), **DRAINED),
  streams.Setup(max_lag=0, filtered=True, skips=(2,)),
  streams.Setup(max_lag=0, filtered=True, skips=(2,), asynchronous=False),
  streams.Setup(max_lag=0, filtered=True, **POOL),
  streams.Setup(max_lag=0, filtered=True, asynchronous=False, **POOL),
  streams.Setup(max_lag=2, fixed=True, filtered=True, **READ, **POOL),
]


@pytest.mark.parametrize("setup", EXACT, ids=repr)
def test_c95_a_resumed_run_is_the_run_that_went_on(tmp_path, setup):
  one = setup.run(tmp_path / "one")
  assert len(one.batches) == streams.STEPS
  two = setup.run(tmp_path / "two", due=lambda step: False)
  assert streams.repeated(two.batches, one.batches)
  for step in range(1, streams.STEPS, 2):
    rest = setup.resumed(tmp_path / "one", one, step)
    assert streams.repeated(rest.batches, one.batches[step:]), step
    assert rest.params == one.params


FREE = [
  streams.Setup(max_lag=1, filtered=True, on_stale="drop", **KEPT),
  streams.Setup(max_lag=3, skips=(2, 3), **KEPT),
  streams.Setup(max_lag=3, filtered=True, skips=(2, 3), **READ),
  streams.Setup(max_lag=2, on_stale="drop", **READ),
  streams.Setup(max_lag=1, filtered=True, skips=(3,), **DRAINED),
  streams.Setup(max_lag=2, filtered=True, **KEPT, **POOL),
]


def fates(text: str) -> dict[int, str]:
  """Returns what became of each uid, by the events of a run folder."""
  found: dict[int, str] = {}
  for line in text.splitlines():
    event = json.loads(line)
    kind = event["event"]
    if kind in ("Consume", "Filter", "Fail", "Drop", "Pass"):
      for uid in event.get("uids") or [event["uid"]]:
        assert uid not in found, (uid, found[uid], kind)
        found[uid] = kind
  return found


@pytest.mark.parametrize("setup", FREE, ids=repr)
def test_a_free_run_that_goes_on_loses_and_doubles_nothing(tmp_path, setup):
  one = setup.run(tmp_path / "one")
  for step in range(1, streams.STEPS, 2):
    rest = setup.resumed(tmp_path / "one", one, step)
    batches = one.batches[:step] + rest.batches
    assert len(batches) == streams.STEPS
    text = (tmp_path / "one" / f"from-{step}" / events.NAME).read_text()
    found = fates(text)
    trained = [uid for uid, kind in found.items() if kind == "Consume"]
    assert sorted(trained) == sorted(streams.uids(batches))
    last = cuts.from_files(
      rest.cuts[streams.STEPS],
      prompts=setup.items,
      rollout=streams.ENV.rollout,
    )
    out = {entry.uid for entry in last.ledger.outstanding}
    assert out == set()
    assert sorted(found) == list(range(max(found) + 1))
    # Lines and count agree, so the next checkpoint cuts in the right place.
    assert last.events <= len(text.splitlines())
    for i, groups in enumerate(batches):
      made = {
        v for g in groups for r in g.rollouts for v in r.completion.versions
      }
      version = i - sum(skip <= i for skip in setup.skips)
      assert version - setup.max_lag <= min(made) <= max(made) <= version


# -------------------------------------------------------------------- followed


def followed(folder) -> schedule.Again:
  return schedule.Again(events.read(folder / events.NAME, ""))


def late(uid: int) -> int:
  """Lengths of which some are never made, however slow the trainer is."""
  return 10**9 if uid // streams.GROUP % 5 == 0 else 1 + uid % 3


def test_a_followed_run_drops_whom_that_run_dropped(tmp_path):
  setup = streams.Setup(max_lag=1, on_stale="drop")
  options = {
    "score": streams.by_index,
    "engine": streams.Engine(rows=20, length=late),
  }
  one = setup.run(tmp_path / "one", **options)
  text = (tmp_path / "one" / events.NAME).read_text()
  assert "Drop" in fates(text).values()
  options["engine"] = streams.Engine(rows=20, length=late)
  two = setup.run(tmp_path / "two", plan=followed(tmp_path / "one"), **options)
  assert streams.repeated(two.batches, one.batches)
  # Nobody waits for the blocks of those that were dropped last.
  assert text.startswith((tmp_path / "two" / events.NAME).read_text())


def test_a_followed_run_passes_over_what_that_run_did(tmp_path):
  setup = streams.Setup(max_lag=2, filtered=True, **KEPT, **POOL)
  one = setup.run(tmp_path / "one")
  text = (tmp_path / "one" / events.NAME).read_text()
  assert "Pass" in fates(text).values()
  two = setup.run(tmp_path / "two", plan=followed(tmp_path / "one"))
  assert streams.repeated(two.batches, one.batches)


def test_a_run_can_be_followed_as_far_as_it_went(tmp_path):
  setup = streams.Setup(max_lag=2, **READ)
  one = setup.run(tmp_path / "one")
  lines = (tmp_path / "one" / "events-3").read_text()
  for name, text in (
    ("stopped", lines),  # The weights of step 3 are out.
    ("killed", lines[: lines.rindex('{"event": "Publish"')]),
    ("in a block", lines[: lines.rindex('{"event": "Consume"')]),
  ):
    (tmp_path / name).mkdir()
    (tmp_path / name / events.NAME).write_text(text)
    began = time.monotonic()
    with pytest.raises(types.RunError, match="that ends with .* num_steps"):
      setup.run(tmp_path / f"after {name}", plan=followed(tmp_path / name))
    assert time.monotonic() - began < streams.LATE_S / 2
  short = setup.run(
    tmp_path / "short", plan=followed(tmp_path / "one"), num_steps=3
  )
  assert streams.repeated(short.batches, one.batches[:3])


# ---------------------------------------------------------- stopped, and broken


@pytest.mark.parametrize("setup", [*EXACT, FREE[0], FREE[2], FREE[4]], ids=repr)
def test_a_stop_while_a_batch_is_awaited_leaves_a_checkpoint(tmp_path, setup):
  asked = threading.Event()
  one = setup.run(tmp_path / "one")
  engine = setup.engine()
  (tmp_path / "two").mkdir()
  with setup.opened(
    tmp_path / "two", engine=engine, stopping=asked.is_set
  ) as rollouts:
    policy = streams.FIRST
    for _ in range(2):
      policy = setup.updated(policy, rollouts.next())
      rollouts.publish(policy, time.monotonic())
    engine.script = asked.set  # In a block whose rollouts are waited for.
    while (groups := rollouts.next()) is not None:
      policy = setup.updated(policy, groups)
      rollouts.publish(policy, time.monotonic())
    began = time.monotonic()
    files = cuts.to_files(rollouts.cut())
  assert time.monotonic() - began < streams.LATE_S / 2
  rest = setup.run(tmp_path / "two", first=(policy, files))
  assert policy.step + len(rest.batches) == streams.STEPS
  if setup in EXACT:
    assert streams.repeated(rest.batches, one.batches[policy.step :])


def test_a_stop_does_not_wait_for_rewards(tmp_path):
  release = threading.Event()
  asked = threading.Event()

  def score(rollout: types.Rollout) -> float:
    asked.set()
    release.wait(streams.LATE_S)
    return streams.by_index(rollout)

  with streams.Setup(max_lag=1).opened(
    tmp_path, score=score, stopping=asked.is_set
  ) as rollouts:
    began = time.monotonic()
    assert rollouts.next() is None
    cut = rollouts.cut()
    assert time.monotonic() - began < streams.LATE_S / 2
    release.set()
  assert any(group.sampled for group in cut.groups)


def test_c73_what_a_cut_raises_reaches_the_trainer(tmp_path):
  engine = streams.Engine()

  def partials():
    raise ValueError("boom")

  engine.partials = partials
  setup = streams.Setup(max_lag=1)
  with (
    pytest.raises(ValueError, match="boom"),
    setup.opened(tmp_path, engine=engine) as rollouts,
  ):
    policy = setup.updated(streams.FIRST, rollouts.next())
    rollouts.publish(policy, cut=True)
    rollouts.cut()


def test_a_worker_that_died_leaves_a_cut_of_what_it_had_done(tmp_path):
  engine, setup = streams.Engine(), streams.Setup(max_lag=1)

  def script() -> None:
    raise ValueError("boom")

  with (
    pytest.raises(ValueError, match="boom"),
    setup.opened(tmp_path, engine=engine) as rollouts,
  ):
    policy = setup.updated(streams.FIRST, rollouts.next())
    engine.script = script
    rollouts.publish(policy)
    assert rollouts._worker is not None
    concurrent.futures.wait([rollouts._worker], streams.LATE_S)
    files = cuts.to_files(rollouts.cut())
    rollouts.next()
  rest = setup.run(tmp_path, first=(policy, files))
  assert len(rest.batches) == streams.STEPS - 1


# ------------------------------------------------------------------- long runs


def test_what_a_long_run_keeps_does_not_grow(tmp_path):
  setup = streams.Setup(max_lag=1)
  policy = streams.FIRST
  with setup.opened(tmp_path, num_steps=40, score=streams.by_index) as rollouts:
    for _ in range(40):
      policy = setup.updated(policy, rollouts.next())
      rollouts.publish(policy)
    made = rollouts.cut()
  assert len(made.steps) <= 3
  assert not made.frontier.done


def test_c93_what_is_left_of_an_epoch_is_carried_on_or_told(tmp_path, caplog):
  setup = streams.Setup(asynchronous=False)
  for size, epochs, batches, left in ((7, 1, 3, 1), (7, 2, 7, 0), (5, 3, 7, 1)):
    caplog.clear()
    made = setup.run(
      tmp_path / f"{size}-{epochs}",
      items=streams.data(size, epochs=epochs),
      num_steps=99,
      score=streams.by_index,
    )
    assert [len(groups) for groups in made.batches] == [2] * batches
    assert f"data ended: {left} groups left over" in caplog.text


def test_a_log_that_lost_lines_counts_those_it_has(tmp_path, caplog):
  path = tmp_path / events.NAME
  path.write_text('{"event": "Run"}\n{"event": "R')
  log = events.Log(path, keep=5)
  log.write(events.Run())
  log.close()
  assert log.count == 2
  assert path.read_text() == '{"event": "Run"}\n' * 2
  assert "expected 5 events, got 1" in caplog.text
