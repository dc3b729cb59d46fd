"""Settings: how they are found, read, changed and written down."""

import dataclasses
import functools
import json
import math
import operator
import pathlib
import typing
from collections.abc import Callable
from typing import Literal

import pytest

from jaxrl_post import config, prepare, types
from jaxrl_post.algos import (
  corrections,
  distill,
  dpo,
  grpo,
  objective,
  reducers,
)
from jaxrl_post.data import dataset, sources
from jaxrl_post.envs import multi_turn
from jaxrl_post.models import decoder, transformer
from jaxrl_post.placement import settings
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import assign, checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim
from tests.e2e import experiment

ROOT = pathlib.Path(__file__).parents[2]


def make(index: int) -> types.Example:
  return types.Example(prompt="a", reference=index)


def score(rollout: types.Rollout, reference: int) -> float:
  return 0.0


def tiny(**fields) -> config.Run:
  return config.Run(
    model=decoder.Model(
      config=transformer.Config(
        num_layers=1,
        width=8,
        num_heads=1,
        num_kv_heads=1,
        head_width=8,
        ff_width=8,
        vocab_size=8,
      )
    ),
    data=dataset.Data(train=sources.Generated(make, size=4), alphabet="ab"),
    rewards=pool.Rewards(functions=(score,)),
    **fields,
  )


# ---------------------------------------------------------------------- --set


@pytest.mark.parametrize(
  ("assignment", "expected"),
  [
    ("num_steps=7", 7),
    ("num_steps=1_000", 1000),
    ("optim.learning_rate=1e-3", 1e-3),
    ("optim.learning_rate=1", 1.0),
    ("stream.asynchronous=TRUE", True),
    ("stream.asynchronous=true", True),
    ("optim.schedule=cosine", "cosine"),
    ("data.alphabet=a=b", "a=b"),
    ("data.alphabet=none", None),
    ("data.epochs=None", None),
    ("data.epochs=3", 3),
    ("placement.cpu_devices=none", None),
    ("rewards.weights=2", (2.0,)),
    ("rewards.functions=operator:eq", (operator.eq,)),
    ("data.train.make=operator:index", operator.index),
    ("algo.region.low=0.1", 0.1),
  ],
)
def test_a_value_is_read_by_the_type_of_its_leaf(assignment, expected):
  run = config.override(tiny(max_lag=0), [assignment])
  value = config.leaves(run)[assignment.partition("=")[0]]
  assert value == expected
  assert type(value) is type(expected)


def test_the_last_assignment_wins_and_the_original_stays():
  run = tiny()
  assert config.override(run, ["seed=1", "seed=2"]).seed == 2
  assert run.seed == 0
  assert config.override(run, []) == run


def test_settings_that_go_together_may_stand_in_any_order():
  pair = ["stream.asynchronous=false", "max_lag=0"]
  one, other = (config.override(tiny(), x) for x in (pair, pair[::-1]))
  assert one == other
  assert not one.stream.asynchronous


def test_an_assignment_changes_one_leaf_only():
  run = tiny()
  before, after = map(config.leaves, (run, config.override(run, ["seed=5"])))
  assert {k for k in before if before[k] != after[k]} == {"seed"}


@dataclasses.dataclass(frozen=True)
class Leaves:
  """One leaf of every kind that the tree may have."""

  sizes: tuple[int, ...] = ()
  pair: tuple[int, int] = (1, 2)
  flag: bool = False
  maybe: Literal["low", "high"] | None = None
  number: float = 0.0
  function: Callable[..., float] = math.sqrt


@pytest.mark.parametrize(
  ("name", "text", "expected"),
  [
    ("sizes", "1, 2,3", (1, 2, 3)),
    ("sizes", "", ()),
    ("pair", "(3, 4)", (3, 4)),
    ("flag", "False", False),
    ("maybe", "low", "low"),
    ("maybe", "none", None),
    ("number", "inf", math.inf),
    ("function", "math:cos", math.cos),
  ],
)
def test_every_kind_of_leaf_can_be_set(name, text, expected):
  hint = typing.get_type_hints(Leaves)[name]
  assert assign._parse(text, hint, "--set x") == expected


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    (
      {"optim": optim.Optim(minibatches=2), "group_size": 2},
      "optim.minibatches.* got 2 and 1",
    ),
    ({"group_size": 4}, "group_size: expected 2 .* got 4"),
    (
      {"algo": distill.objective()},
      "reference: expected a model with an algorithm that dist",
    ),
    (
      {
        "algo": grpo.objective(),
        "group_size": 4,
        "sampling": engine.Sampling(dtype="int8"),
      },
      None,
    ),
    (
      {
        "algo": objective.Objective(correction=None),
        "group_size": 4,
        "sampling": engine.Sampling(dtype="int8"),
      },
      "algo.correction: expected importance weights .* got none",
    ),
    (
      {
        "algo": objective.Objective(correction=None, proximal="sampler"),
        "group_size": 4,
        "sampling": engine.Sampling(dtype="int8"),
      },
      None,
    ),
  ],
)
def test_an_algorithm_that_the_run_does_not_serve_is_refused(fields, expected):
  fields = {"algo": dpo.objective(), **fields}
  if expected is None:
    tiny(**fields)
    return
  with pytest.raises(types.InputError, match=expected):
    tiny(**fields)


def test_two_algorithms_of_equal_leaves_are_told_apart():
  one, two = (
    config.describe(tiny(algo=objective.Objective(reducer=reducer)))
    for reducer in (reducers.TokenMean(), reducers.SequenceMean())
  )
  assert one != two
  assert f"algo.reducer = {reducers.__name__}:TokenMean" in one


def test_a_group_that_may_be_left_out_is_set_as_a_whole_or_begun():
  run = config.override(tiny(), ["algo.correction=none"])
  assert run.algo.correction is None
  split = ["placement.mode=roles", "placement.roles.generation_replicas=2"]
  run = config.override(tiny(), split)
  assert run.placement.roles == settings.Roles(generation_replicas=2)
  assert config.override(run, ["placement.roles=None"]).placement.roles is None
  # One that needs a value has no defaults to begin with.
  with pytest.raises(
    types.InputError, match="coef: expected a run with algo.k"
  ):
    config.override(tiny(), ["algo.kl.coef=0.1"])


@pytest.mark.parametrize(
  ("assignment", "words"),
  [
    ("num_steps", "expected name=value, got no '='"),
    ("num_step=3", "Did you mean 'num_steps'?"),
    ("optim.lerning_rate=1e-5", "Did you mean 'learning_rate'?"),
    ("sampling.top_p=0.9", "Sampling has no field 'top_p'"),
    ("optim=3", "Set one of: name, learning_rate"),
    ("num_steps.x=3", "It has no fields"),
    ("num_steps=many", "expected int, got 'many'"),
    ("num_steps=1.5", "expected int, got '1.5'"),
    ("num_steps=none", "expected int, got 'none'"),
    ("optim.learning_rate=fast", "expected float, got 'fast'"),
    ("stream.asynchronous=1", "expected true or false, got '1'"),
    ("optim.schedule=step", "'constant' or 'linear' or 'cosine', got 'step'"),
    ("model.remat=true", "'none' or 'dots' or 'layer', got 'true'"),
    ("data.epochs=x", "expected int"),
    ("data.train.make=nowhere:make", "module:name of a function"),
    ("data.train.make=math:pi", "module:name of a function, got 'math:pi'"),
    ("data.train.make=math", "module:name of a function"),
    ("rewards.weights=1,x", "expected float, got 'x'"),
    ("num_steps=0", "num_steps: expected >= 1, got 0"),
    # C06: a group of one has nobody to be compared with.
    ("group_size=1", "group_size: expected >= 2, got 1"),
    ("stream.asynchronous=false", "expected true with max_lag=1"),
  ],
)
def test_a_wrong_assignment_is_refused_in_one_line(assignment, words):
  with pytest.raises(types.InputError) as error:
    config.override(tiny(), [assignment])
  message = str(error.value)
  assert words in message
  assert "\n" not in message
  # What it is about stands in front.
  assert message.startswith(("--set ", *assignment.split("=")[:1]))


@pytest.mark.parametrize(
  ("assignments", "expected"),
  [
    (["algo=gspo"], "name of a setting in it, got 'gspo' for all .* FILE"),
    (
      ["algo.region=none"],
      "setting in it, got 'none' .* low, high, dual. .*FILE",
    ),
    (
      ["algo.filters=none"],
      "expected nothing, as in --set algo.filters=, or Correction FILE, got 'n",
    ),
    (["algo.kl=0.1"], "expected none, or Kl FILE, got '0.1'. Write it there.$"),
    (
      ["optim.trained=lora"],
      "expected none, or Lora or Only FILE, got 'lora'. Write it there, or set "
      "one of these, which makes it with the rest: optim.trained.rank=8, "
      r"optim.trained.alpha=16.0, optim.trained.targets=q,[a-z,]+ \(Lora\); "
      r"optim.trained.patterns=\* \(Only\)\.$",
    ),
    (["optim.trained=builtins:print"], "expected none, or Lora or Only FILE"),
    (
      ["algo.kl.coef=0.25"],
      "a run with algo.kl, got one without. Write "
      r"kl=divergence\.Kl\(coef=0.25\) FILE; then --set changes it.$",
    ),
    (
      ["algo.kl.place=reward"],
      r"Write kl=divergence\.Kl\(coef=\.\.\., place=reward\) FILE; then",
    ),
    (["algo.kl.wrong=1"], "a run with algo.kl, got one without. Write one"),
    (["data.held_out.size=9"], "a run with data.held_out, got one .* FILE"),
    (["optim=3"], "Set one of: name, learning_rate[a-z_, 0-9]*.$"),
    (["optim.trained.rank=8", "optim.trained=none"], "got 'none' and settings"),
    (["algo.region.high=-1"], "algo.region.high: expected > 0, got -1.0. "),
    (["algo.region.low=1.2"], "algo.region.low: expected in .0, 1., got 1.2. "),
  ],
)
def test_what_no_text_can_say_is_told_where_to_say_it(assignments, expected):
  file = r"in the experiment file \(docs/running.md, Settings\)"
  with pytest.raises(types.InputError, match=expected.replace("FILE", file)):
    config.override(tiny(), assignments)
  assert "\n## Settings\n" in (ROOT / "docs" / "running.md").read_text()


def test_an_empty_text_is_no_parts():
  filters = (corrections.OffPolicyMask(),)
  run = tiny(algo=dataclasses.replace(grpo.objective(), filters=filters))
  assert config.override(run, ["algo.filters="]).algo.filters == ()


def test_a_pair_that_is_no_pair_is_refused():
  hint = typing.get_type_hints(Leaves)["pair"]
  for text in ("3", "(3,", "x"):
    with pytest.raises(types.InputError, match="--set x: expected"):
      assign._parse(text, hint, "--set x")


# ---------------------------------------------------------------------- --exp

FILE = """
from jaxrl_post import config
from jaxrl_post.data import dataset, sources
from jaxrl_post.envs import multi_turn
from tests.unit import config_test as here

def get_config():
  return here.tiny(seed=3)

def other():
  return here.tiny(seed=4)

def wrong():
  return 5
"""


@pytest.fixture(name="folder")
def _folder(tmp_path):
  (tmp_path / "first.py").write_text(FILE)
  (tmp_path / "_private.py").write_text("")
  (tmp_path / "needs.py").write_text("import no_such_package_anywhere")
  return tmp_path


def test_an_experiment_is_found_by_name_or_path(folder):
  assert config.load("first", folder).seed == 3
  assert config.load("first:other", folder).seed == 4
  path = folder / "first.py"
  assert config.load(str(path), folder / "elsewhere").seed == 3
  assert config.load(f"{path}:other", folder / "elsewhere").seed == 4


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("frist", "Did you mean 'first'? Known: first, needs."),
    ("nothing", "Known: first, needs."),
    ("first:absent", "expected a function absent"),
    ("first:wrong", "to return config.Run, got int"),
    ("needs", "the package 'no_such_package_anywhere'"),
  ],
)
def test_an_experiment_that_is_none_is_refused(folder, name, words):
  with pytest.raises(types.InputError) as error:
    config.load(name, folder)
  assert words in str(error.value)
  assert "\n" not in str(error.value)


# ----------------------------------------------------------------- writing down


def test_leaves_are_all_there_by_dotted_name():
  found = config.leaves(tiny())
  assert found["optim.b1"] == 0.9
  assert found["model.config.num_layers"] == 1
  assert found["rewards.functions"] == (score,)
  assert not any(dataclasses.is_dataclass(value) for value in found.values())


def test_every_leaf_that_is_a_value_can_be_set_to_what_it_is():
  run = tiny()
  simple = {
    name: value
    for name, value in config.leaves(run).items()
    if isinstance(value, int | float | str) or value is None
  }
  assert len(simple) > 50
  again = config.override(run, [f"{k}={v}" for k, v in simple.items()])
  assert again == run


def test_json_names_classes_and_functions():
  tree = json.loads(json.dumps(config.to_json(tiny())))
  assert tree["algo"]["class"] == f"{objective.__name__}:Objective"
  assert tree["rewards"]["functions"] == [f"{__name__}:score"]
  assert tree["data"]["train"]["make"] == f"{__name__}:make"
  assert tree["optim"]["learning_rate"] == 1e-6
  assert tree["data"]["epochs"] is None


def test_json_tells_partials_and_runs_apart():
  one, two = (functools.partial(round, ndigits=n) for n in (1, 2))
  assert config.to_json(one) == "builtins:round(ndigits=1)"
  assert config.to_json(str.strip) == "builtins:str.strip"
  assert config.to_json(one) != config.to_json(two)
  assert config.to_json(tiny()) == config.to_json(tiny())
  assert config.to_json(tiny()) != config.to_json(tiny(seed=1))


def test_a_description_has_a_line_for_every_leaf():
  run = tiny(num_steps=7)
  lines = config.describe(run).splitlines()
  assert len(lines) == len(config.leaves(run)) + len(config.classes(run))
  assert "num_steps = 7" in lines
  assert f"rewards.functions = ({__name__}:score)" in lines


def test_what_may_change_on_resume_exists():
  names = config.leaves(tiny())
  for name in config.may_change(tiny()):
    assert any(n == name or n.startswith(f"{name}.") for n in names), name
  # The end of a run may, while no schedule depends on it.
  assert "num_steps" in config.may_change(tiny())
  for schedule in ("linear", "cosine"):
    run = config.override(tiny(), [f"optim.schedule={schedule}"])
    assert "num_steps" not in config.may_change(run)


def test_a_rate_that_is_to_fall_has_updates_left_for_it(caplog):
  def check(schedule, num_steps):
    cfg = optim.Optim(schedule=schedule, warmup_steps=6, minibatches=2)
    prepare.check_schedule(tiny(optim=cfg, num_steps=num_steps))

  check("constant", 3)  # A run that goes on has more than six.
  assert caplog.text == ""
  check("constant", 2)
  assert "warmup_steps=6 is more than the run's 4 updates" in caplog.text
  assert "never gets to its top. Lower it" in caplog.text
  for schedule in ("linear", "cosine"):
    check(schedule, 4)
    with pytest.raises(types.InputError, match="the run's 6 updates .* got 6"):
      check(schedule, 3)


def test_sizes_of_a_batch_follow_from_the_settings():
  run = tiny(groups_per_step=3, group_size=5)
  assert run.rows == 15
  assert run.length == run.data.max_prompt + run.sampling.max_tokens


def test_the_best_by_an_evaluation_needs_held_out_prompts():
  best = checkpoint.Checkpoint(keep_best=1, best_by="eval/reward")
  run = experiment.with_held_out()
  assert dataclasses.replace(run, checkpoint=best).checkpoint == best
  with pytest.raises(types.InputError, match="checkpoint.best_by: expected no"):
    dataclasses.replace(experiment.get_config(), checkpoint=best)


@dataclasses.dataclass(frozen=True)
class Guess:
  """An environment that is a record, made without arguments."""

  schemas = ()
  most: int = 100


def test_a_class_is_a_value_and_no_group_of_settings():
  run = tiny(env=multi_turn.Conversation(environment=Guess))
  assert config.leaves(run)["env.environment"] is Guess
  name = f"{Guess.__module__}:Guess"
  assert config.to_json(run)["env"]["environment"] == name
  assert f"env.environment = {name}" in config.describe(run)
  with pytest.raises(types.InputError, match="env.environment"):
    config.override(run, ["env.environment.most=3"])
