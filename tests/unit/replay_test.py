"""A replay: batches of a dump, whatever wrote them, and which are refused."""

import logging

import pytest

from jaxrl_post import prepare, types
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.envs import replay
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.runtime import dump
from tests.e2e import runs


def group(uid: int) -> types.Group:
  prompt = types.Prompt(uid=uid, tokens=(1,), text="", reference=None)
  return types.Group(prompt=prompt, rollouts=())


@pytest.fixture(name="folder")
def _folder(tmp_path):
  """Writes three batches of three groups."""
  for number in (1, 2, 3):
    groups = [group(3 * number + i) for i in range(3)]
    dump.write(dump.batch(tmp_path, number), groups, {})
  return tmp_path


@pytest.fixture(name="clock")
def _clock():
  clock = clocks.Clock(("generation", "training"))
  clock.start()
  yield clock
  clock.close()


def opened(folder, clock, groups_per_step=2, step=0) -> replay.Replay:
  return replay.Replay(
    folder,
    ledgers.start(groups_per_step, 1, step=step),
    clock=clock,
  )


def uids(rollouts: replay.Replay) -> list[list[int]]:
  found = []
  while groups := rollouts.next():
    found.append([one.prompt.uid for one in groups])
  return found


def test_groups_come_in_order_and_the_end_is_that_of_data(
  folder, clock, caplog
):
  with caplog.at_level(logging.WARNING), opened(folder, clock) as rollouts:
    assert uids(rollouts) == [[3, 4], [5, 6], [7, 8], [9, 10]]
  assert caplog.messages == [
    "data ended: 1 groups left over, too few for a batch of 2"
  ]


def test_a_run_that_continues_passes_over_what_it_trained(folder, clock):
  with opened(folder, clock, groups_per_step=3, step=2) as rollouts:
    assert uids(rollouts) == [[9, 10, 11]]


def test_the_accounts_are_those_of_a_run_that_samples_nothing(folder):
  policy = types.Policy(params=None, version=1, step=1)
  now = [0.0]
  clock = clocks.Clock(("generation", "training"), now=lambda: now[0])
  clock.start()
  with opened(folder, clock, step=1) as rollouts:
    rollouts.next()
    rollouts.publish(policy, 0.0, cut=True)
    cut = rollouts.cut()
    now[0] = 5.0
    assert clock.snapshot()["idle/generation/queue_full"] == 1.0
  now[0] = 10.0
  assert clock.snapshot()["idle/generation/queue_full"] == 0.5
  clock.close()
  assert cut is None
  assert rollouts.booked == ledgers.start(2, 1, step=2)
  assert rollouts.sync_seconds == {}
  assert rollouts.counters.generated == rollouts.counters.sampled_tokens == 0


def test_a_damaged_batch_is_refused_when_it_comes(folder, clock):
  with opened(folder, clock, groups_per_step=3) as rollouts:
    rollouts.next()
    (folder / "00000002" / "groups.jsonl").write_text("")
    with pytest.raises(types.InputError, match="groups.jsonl has 0 bytes"):
      rollouts.next()


# --------------------------------------------------- before a device is touched


def written(folder, **changes) -> None:
  """Writes an empty batch that says it is of the experiment, but for these."""
  cfg = runs.configured()
  about = prepare.about(cfg, prepare.prepare(cfg))
  dump.write(dump.batch(folder, 1), [], {**about, **changes})


def prepared(folder, *assignments: str) -> None:
  cfg = runs.configured(f"debug.replay={folder}", *assignments)
  prepare.prepare(cfg)


def test_a_dump_of_shorter_or_as_long_rollouts_is_taken(tmp_path):
  written(tmp_path)
  prepared(tmp_path)
  prepared(tmp_path, "sampling.max_tokens=6", "groups_per_step=2", "seed=5")


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"group_size": 8}, "of group_size 4, as this run has, got 8"),
    ({"vocab_size": 9}, "of vocab_size 8, as this run has, got 9"),
    ({"tokenizer": "abc"}, "as this run has, got abc"),
    ({"max_tokens": 9}, "of max_tokens at most 5, as this run has, got 9"),
    ({"max_prompt": 4}, "of max_prompt at most 3, as this run has, got 4"),
    (
      {"max_prompt": None},
      "of max_prompt at most 3, as this run has, got None",
    ),
  ],
)
def test_a_dump_of_another_run_is_one_line(tmp_path, changes, words):
  written(tmp_path, **changes)
  with pytest.raises(types.InputError) as error:
    prepared(tmp_path)
  assert words in str(error.value)
  assert str(error.value).startswith("debug.replay: ")
  assert "\n" not in str(error.value)


def test_no_dump_is_one_line(tmp_path):
  with pytest.raises(types.InputError, match="expected a dump"):
    prepared(tmp_path / "none")


def test_a_tokenizer_is_told_by_its_ids():
  def digest(*assignments: str) -> str:
    cfg = runs.configured(*assignments)
    return prepare.about(cfg, prepare.prepare(cfg))["tokenizer"]

  assert digest() == digest("seed=3")
  assert digest() != digest("data.alphabet=abdc")


@pytest.mark.parametrize(
  "setting", ["placement.mode=roles", "stream.follow=events.jsonl"]
)
def test_a_replay_refuses_what_says_how_to_sample(setting):
  name, _, value = setting.partition("=")
  runs.configured(setting)
  with pytest.raises(types.InputError, match=f"{name}: .* got {value}"):
    runs.configured("debug.replay=x", setting)
  cfg = runs.configured("debug.replay=x", "debug.replay=none")
  assert cfg.debug.replay is None
