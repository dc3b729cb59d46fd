"""Half a run: rollouts without training, training without rollouts."""

import json
import logging
import math
import shutil

import jax
import numpy as np
import pytest
from absl import flags

from jaxrl_post import collect, config, loop, main, prepare, types
from jaxrl_post.runtime import dump
from jaxrl_post.runtime import folder as folder_lib
from jaxrl_post.runtime import hosts as hosts_lib
from tests.e2e import runs

# Half of the rollouts have no reward, and tokens are of two versions.
EXP = "with_patches"
COMPUTED = ("loss/", "reward/", "completion/", "mismatch/", "staleness/")


def assert_equal(got: types.TrainState, expected: types.TrainState) -> None:
  """Compares weights, both moments, counts and the key, bit for bit."""
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def state(folder) -> types.TrainState:
  return runs.state(folder, runs.configured(exp=EXP))


def computed(line) -> dict[str, float]:
  return {k: v for k, v in line.items() if k.startswith(COMPUTED)}


@pytest.fixture(name="cache", scope="module", autouse=True)
def _cache():
  with runs.compile_cache():
    yield


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory):
  """Trains two batches, dumping them; then two more, as after a kill."""
  folder = tmp_path_factory.mktemp("trained")
  settings = ("max_lag=1", "debug.dump=true")
  settled = config.to_json(runs.configured(*settings, exp=EXP))
  with folder_lib.open_folder(folder, settled):
    pass
  first = runs.train(folder, *settings, "num_steps=2", exp=EXP)
  # A run that was killed in its third step had dumped it already.
  third = dump.batch(folder / "dump", 3)
  shutil.copytree(dump.batch(folder / "dump", 1), third)
  second = runs.train(folder, *settings, exp=EXP)
  return folder, [*first.groups, *second.groups]


def test_a_dump_is_what_was_trained(trained):
  folder, groups = trained
  batches = dump.batches(folder / "dump")
  assert [int(path.name) for path in batches] == [1, 2, 3, 4]
  # By their text: NaN differs from itself.
  assert repr([tuple(dump.read(path)) for path in batches]) == repr(groups)
  abouts = [dump.about(path) for path in batches]
  assert [about["step"] for about in abouts] == [1, 2, 3, 4]
  assert [about["policy_version"] for about in abouts] == [0, 1, 2, 3]
  rewards = [r.reward for group in groups[0] for r in group.rollouts]
  assert sum(map(math.isnan, rewards)) == len(rewards) // 2


def test_a_replay_ends_with_the_same_weights(
  trained, tmp_path, caplog, monkeypatch
):
  folder, _ = trained
  for module, name in ((loop.scorer, "opened"), (loop.generation, "samplers")):
    monkeypatch.setattr(module, name, None)  # Neither is called.
  source = ("max_lag=1", f"debug.replay={folder / 'dump'}")
  whole, halves = tmp_path / "whole", tmp_path / "halves"
  with caplog.at_level(logging.WARNING):
    one = runs.train(whole, *source, "num_steps=9", exp=EXP)
    runs.train(halves, *source, "num_steps=3", exp=EXP)
    two = runs.train(halves, *source, exp=EXP)
  expected = state(folder)
  assert int(expected.step) == 4
  assert_equal(state(whole), expected)
  assert_equal(state(halves), expected)
  # The dump ended, as data ends.
  assert len(one.groups) == 4 and len(two.groups) == 1
  ended = [m for m in caplog.messages if m.startswith("data ended")]
  assert ended == ["data ended: 0 groups left over, too few for a batch of 4"]
  last = one.metrics[-1]
  assert computed(last) == computed(runs.metrics(folder)[-1])
  assert last["ledger/trained"] == last["ledger/admitted"] == 16
  assert last["throughput/generated_per_device_hour"] == 0


def test_a_replay_is_not_evaluated(trained, tmp_path):
  source = f"debug.replay={trained[0] / 'dump'}"
  run = runs.train(tmp_path, source, "num_steps=1", exp="with_held_out")
  assert [line["step"] for line in run.metrics] == [1]
  assert "eval/reward" not in run.metrics[0]


# ------------------------------------------------------------- without training


def test_rollouts_of_the_first_weights_are_those_that_a_run_trains(
  trained, tmp_path, caplog
):
  cfg = runs.configured("num_steps=20", "data.epochs=1", "max_lag=1", exp=EXP)
  made = collect.run(cfg, prepare.prepare(cfg), tmp_path, tmp_path / "dump")
  # An epoch has 64 prompts, 4 for each batch.
  assert (made.trained, made.batches, made.rollouts) == (0, 16, 256)
  assert "data ended: 0 groups left over" in caplog.text
  groups = list(dump.read_all(tmp_path / "dump"))
  rewards = [r.reward for group in groups for r in group.rollouts]
  valid = [reward for reward in rewards if math.isfinite(reward)]
  assert made.rewarded == len(valid) == 128
  assert made.reward == pytest.approx(np.mean(valid))
  by_uid = {group.prompt.uid: repr(group) for group in groups}
  assert by_uid.keys() == set(range(64))
  # The first batch of a run is of the first weights.
  assert all(by_uid[g.prompt.uid] == repr(g) for g in trained[1][0])


def test_rollouts_end_when_the_run_is_to_stop(tmp_path):
  cfg = runs.configured(exp=EXP)
  hosts = hosts_lib.Hosts()
  hosts.stopping = "SIGTERM"
  parts = prepare.prepare(cfg)
  made = collect.run(cfg, parts, tmp_path, tmp_path / "none", hosts)
  assert made.batches == made.rollouts == 0 and math.isnan(made.reward)
  assert not (tmp_path / "none").exists()


def test_the_command_samples_with_a_checkpoint_and_changes_no_run(trained):
  folder, groups = trained
  kept = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
  args = (runs.experiment(EXP), "--mode=rollout", f"--workdir={folder}")
  end = runs.run(folder, *args, *runs.settings("max_lag=1", "num_steps=2"))
  assert end.code == 0, end.err
  assert end.survivors == ()
  *_, line, last = end.out.splitlines()
  target = last.removeprefix("dump: ")
  assert line.startswith("weights of step 4: 2 batches, 32 rollouts, 16 of")
  assert "step 2/2  reward" in end.err
  found = list(dump.read_all(target))
  asked = {group.prompt.uid for batch in groups for group in batch}
  uids = {group.prompt.uid for group in found}
  assert len(uids) == 8 and not uids & asked
  assert dump.about(dump.batch(target, 2))["policy_version"] == 4
  now = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
  assert {p: now[p] for p in kept} == kept
  assert {p.relative_to(folder).parts[0] for p in now.keys() - kept.keys()} == {
    target.rpartition("/")[2]
  }


@pytest.mark.parametrize(
  ("setting", "words"),
  [
    ("placement.mode=roles", "expected colocated or split with --mode=rollout"),
    ("debug.replay=x", "expected none with --mode=rollout, got x"),
    ("stream.follow=x", "expected none with --mode=rollout, got x"),
  ],
)
def test_rollouts_refuse_what_they_do_not_do(setting, words):
  with pytest.raises(types.InputError) as error:
    main._check_alone(runs.configured(setting), None, "rollout")
  assert words in str(error.value) and "\n" not in str(error.value)


def test_rollouts_take_one_process():
  cfg = runs.configured()
  main._check_alone(cfg, hosts_lib.Launch("a:1", 1, 0), "rollout")
  for launch in (hosts_lib.Launch(), hosts_lib.Launch("a:1", 2, 0)):
    with pytest.raises(types.InputError, match="one process"):
      main._check_alone(cfg, launch, "rollout")


# ------------------------------------------------------------------- evaluation


def test_an_evaluation_without_a_folder_is_one_json_object(capsys):
  flags.FLAGS.mark_as_parsed()
  cfg = runs.configured(exp="with_held_out")
  assert main._eval(hosts_lib.Hosts(), cfg, prepare.prepare(cfg)) == 0
  found = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert found["step"] == 0
  assert found["eval/reward"] == pytest.approx(0.7)


def test_a_mean_of_nothing_is_null_in_an_evaluation(capsys, monkeypatch):
  flags.FLAGS.mark_as_parsed()
  found = 3, {"eval/reward": math.nan, "eval/missing": 10.0}
  monkeypatch.setattr(main.loop, "test_newest", lambda *_: found)
  cfg = runs.configured(exp="with_held_out")
  main._eval(hosts_lib.Hosts(), cfg, prepare.prepare(cfg))
  *shown, last = capsys.readouterr().out.splitlines()
  assert last == '{"eval/missing": 10.0, "eval/reward": null, "step": 3}'
  assert [line.split() for line in shown] == [
    ["missing", "10"],
    ["reward", "nan"],
  ]
