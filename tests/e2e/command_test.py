"""The command line: what it refuses and how, what it prints, what it leaves."""

import concurrent.futures
import json
import pathlib
import shutil

import pytest

from jaxrl_post import config, prepare, types
from jaxrl_post.runtime import folder
from tests.e2e import runs


def refused(*assignments: str, exp: str = "get_config", devices: int = 8):
  """Returns the line that a start with these settings ends with."""
  with pytest.raises(types.InputError) as error:
    cfg = runs.configured(*assignments, exp=exp)
    prepare.plan(cfg, prepare.prepare(cfg), devices)
  message = str(error.value)
  assert "\n" not in message
  return message


# ------------------------------------------- in processes, for their exit codes

WRONG = {
  "misspelt setting": (
    ("--set=optim.lerning_rate=1e-5",),
    "--set optim.lerning_rate: Optim has no field 'lerning_rate'. "
    "Did you mean 'learning_rate'?",
  ),
  "unknown flag": (("--wrokdir=x",), "wrokdir"),
  "positional argument": (("num_steps=3",), "got 'num_steps=3'"),
  "an experiment to report on": (
    ("--mode=report", "run"),
    "--exp: expected none with --mode=report",
  ),
  "unknown writer": (
    ("--writers=tensorboard,csv",),
    "--writers: expected ",
  ),
  "nothing to look at": (
    ("--mode=dry_run", "--trace_slots"),
    "--trace_slots: expected none with --mode=dry_run",
  ),
  "rows that do not divide": (
    runs.settings("placement.training.fsdp=3", "placement.generation.data=3"),
    "expected a multiple of 3 data-parallel parts x 1 microbatches x 1 ",
  ),
  "rate without time to fall": (
    runs.settings("optim.schedule=linear", "optim.warmup_steps=4"),
    "optim.warmup_steps: expected less than the run's 4 updates with ",
  ),
}


@pytest.fixture(name="refusals", scope="module")
def _refusals(tmp_path_factory):
  """Starts with each mistake, two at a time."""

  def one(args) -> tuple[pathlib.Path, runs.Outcome]:
    cwd = tmp_path_factory.mktemp("cwd")
    return cwd, runs.run(cwd, runs.experiment(), "--workdir=run", *args)

  with concurrent.futures.ThreadPoolExecutor(2) as workers:
    found = workers.map(one, (args for args, _ in WRONG.values()))
    return dict(zip(WRONG, found, strict=True))


@pytest.mark.parametrize("mistake", WRONG)
def test_c124_a_mistake_is_one_line_exit_2_and_no_folder(mistake, refusals):
  cwd, end = refusals[mistake]
  assert end.code == 2
  lines = end.err.splitlines()
  assert [x for x in lines if x.startswith("error: ")] == lines[-1:]
  assert WRONG[mistake][1] in lines[-1]
  assert "Traceback" not in end.err
  assert list(cwd.iterdir()) == []


# ------------------------------------------------------------- in this process


def test_c124_an_unknown_experiment_lists_the_known():
  with pytest.raises(types.InputError) as error:
    config.load("tinny", runs.ROOT / "experiments")
  assert "Did you mean 'tiny'?" in str(error.value)
  assert "Known: " in str(error.value)


@pytest.mark.parametrize(
  ("assignment", "words"),
  [
    ("num_steps=many", "--set num_steps: expected int, got 'many'"),
    ("num_steps", "--set num_steps: expected name=value"),
    ("sampling.top_p=0.9", "Sampling has no field 'top_p'"),
    # C06
    ("group_size=1", "group_size: expected >= 2, got 1"),
    ("data.max_prompt=1", "expected a prompt of at most 1 tokens"),
    ("data.alphabet=abcdefgh", "vocab"),
    ("sampling.rows=6,", "expected int, got '6,'"),
  ],
)
def test_a_wrong_setting_is_named(assignment, words):
  assert words in refused(assignment)


def test_lag_needs_a_thread_of_its_own():
  message = refused("stream.asynchronous=false", "max_lag=1")
  assert message.startswith("max_lag") or "stream.asynchronous" in message


def test_more_devices_than_there_are_names_both_numbers():
  message = refused("placement.mode=split", "placement.generation.data=9")
  assert message.startswith("placement")
  assert "10" in message
  assert "8" in message


def test_rows_of_the_engine_must_divide():
  message = refused("placement.mode=split", "placement.generation.data=3")
  assert message.startswith("sampling.rows: expected a multiple of 3")


def test_microbatches_must_divide():
  assert "16 rollouts" in refused("optim.microbatches=5")


def test_a_missing_model_folder_is_named():
  assert "no/such/model" in refused(exp="from_folder")


def test_a_malformed_line_is_named_by_its_number(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("data.jsonl").write_text('{"prompt": "a", "answer": 1}\n{oh\n')
  assert refused(exp="from_file").startswith("data.jsonl:2: expected a JSON")


def test_prompts_outside_of_the_alphabet_are_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("data.jsonl").write_text('{"prompt": "xyz", "answer": 1}\n')
  assert "'x'" in refused(exp="from_file")


def test_a_folder_of_another_run_is_refused_by_leaf_and_values(tmp_path):
  def enter(*assignments: str) -> None:
    cfg = runs.configured(*assignments)
    free = config.may_change(cfg)
    with folder.open_folder(tmp_path, config.to_json(cfg), free):
      pass

  enter("seed=1")
  enter("seed=1", "num_steps=9", "placement.mode=split")
  with pytest.raises(types.InputError, match="seed=1 there, 2 now") as error:
    enter("seed=2", "num_steps=9")
  assert str(error.value).startswith("--workdir: ")
  assert "num_steps" not in str(error.value)


# --------------------------------------------------------------------- modes


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory):
  """Trains once with a flag, then evaluates what it left."""
  cwd = tmp_path_factory.mktemp("cwd")
  command = (
    runs.experiment("with_held_out"),
    "--set=num_steps=3",
    "--workdir=run",
  )
  train = runs.run(cwd, *command)
  assert train.code == 0, train.err
  saved = (cwd / "run" / "config.json").read_text()
  test = runs.run(cwd, *command, "--mode=eval")
  assert test.code == 0, test.err
  return cwd / "run", saved, train, test


@pytest.mark.parametrize(
  ("exp", "words"),
  [
    ("with_a_word", "algo.region: expected a part as docs/algorithms.md has"),
    ("with_a_sum", "algo.region: expected one that returns a float for each"),
  ],
)
def test_a_part_that_cannot_train_is_refused_in_a_dry_run(tmp_path, exp, words):
  end = runs.run(tmp_path, runs.experiment(exp), "--mode=dry_run")
  assert end.code == 2
  assert [words in line for line in end.err.splitlines()].count(True) == 1
  assert "Traceback" not in end.err


def test_dry_run_prints_the_run_and_touches_no_folder(tmp_path):
  end = runs.run(tmp_path, runs.experiment(), "--mode=dry_run", "--workdir=run")
  assert end.code == 0, end.err
  *leaves, plan = end.out.splitlines()
  # C126: the experiment's value, not the default of the class.
  assert "num_steps = 4" in leaves
  cfg = runs.configured()
  assert len(leaves) == len(config.leaves(cfg)) + len(config.classes(cfg))
  assert plan.startswith("a step: 4 prompts x 4 = 16 rollouts")
  assert list(tmp_path.iterdir()) == []


def test_c126_a_flag_wins_over_the_experiment(trained):
  path, saved, train, test = trained
  assert "num_steps = 3" in train.out.splitlines()
  assert json.loads(saved)["num_steps"] == 3
  assert [line["step"] for line in runs.metrics(path)] == [0, 1, 2, 3]
  # The same command again resolves to the same settings.
  assert (path / "config.json").read_text() == saved
  assert "num_steps = 3" in test.out.splitlines()


@pytest.mark.parametrize(
  ("folders", "code", "words"),
  [
    (("run", "copy"), 0, "B against A: undecided"),
    (("run", "run"), 2, "run: expected folders of different runs, got that of"),
    (
      ("run",),
      2,
      "--mode=compare: expected the folders of 2 to 26 runs, got 1",
    ),
    (("run", "runn"), 2, "runn: expected the folder of a run, got none"),
    (("--exp=tiny", "run", "copy"), 2, "--exp: expected none with"),
  ],
)
def test_runs_are_compared_by_their_folders(trained, folders, code, words):
  path = trained[0]
  shutil.copytree(path, path.parent / "copy", dirs_exist_ok=True)
  end = runs.run(path.parent, "--mode=compare", *folders)
  assert end.code == code, end.err
  assert words in (end.err if code else end.out)
  assert "Traceback" not in end.err
  if code == 0:
    held = runs.metrics(path)[-1]["devices"]
    assert f"3 steps, of which 0 count; devices: {held:.0f}\n" in end.out
    assert "held-out, step 3" in end.out


def test_c93_evaluation_asks_every_prompt_once(trained):
  path, _, _, test = trained
  found = json.loads(test.out.splitlines()[-1])
  assert found["step"] == 3
  assert found["eval/rollouts"] == 10
  assert found["eval/reward"] == pytest.approx(0.7)
  # Of the same weights that the run ended with.
  last = runs.metrics(path)[-1]
  assert {k: v for k, v in last.items() if k.startswith("eval/")} == {
    k: v for k, v in found.items() if k.startswith("eval/")
  }


def test_c120_sets_have_metrics_of_their_own(tmp_path):
  end = runs.run(tmp_path, runs.experiment("with_two_sets"), "--mode=eval")
  assert end.code == 0, end.err
  *shown, last = end.out.splitlines()
  found = json.loads(last)
  assert found["eval/low/rollouts"] == 24
  assert found["eval/reward"] == pytest.approx(0.85)
  assert found["eval/all/rollouts"] == 40
  for k in (1, 2, 4):
    assert found[f"eval/low/pass@{k}"] == 1.0
    assert found[f"eval/all/pass@{k}"] == pytest.approx(0.7)
    assert (
      found[f"eval/all/pass@{k}_low"] < 0.7 < found[f"eval/all/pass@{k}_high"]
    )
  assert found["eval/all/majority@4"] == pytest.approx(0.7)
  assert f"{'all/pass@1':32} {0.7:10.4g}  (0.397 to 0.892)" in shown


def test_a_run_ends_with_its_folder_and_leaves_nobody(trained):
  path, _, train, test = trained
  assert train.out.splitlines()[-1] == f"run folder: {path.resolve()}"
  assert train.survivors == test.survivors == ()


def test_a_report_needs_the_folder_alone(trained):
  path, *_ = trained
  end = runs.run(path.parent, "--mode=report", "run")
  assert end.code == 0, end.err
  assert end.out.splitlines()[-1] == "page: run/report.html"
  assert "3 steps" in (path / "report.html").read_text()
  last = runs.metrics(path)[-1]
  # The experiment takes one of eight.
  assert last["devices"] == 8
  assert last["devices/training"] == last["devices/generation"] == 1
  none = runs.run(path.parent, "--mode=report")
  assert none.code == 2
  assert "expected the folders of 1 to 2 runs, got 0" in none.err
