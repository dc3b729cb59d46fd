"""The root of the configuration tree, `--exp` and `--set`.

An experiment is a Python file with `get_config() -> config.Run`. Each class of
the tree stands beside the code that reads it; this file composes them, checks
what spans two rooms, and edits leaves.
"""

import dataclasses
import importlib.util
import inspect
import math
import pathlib
import sys
import types as python_types
import typing
from collections.abc import Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.algos import algorithm, grpo
from jaxrl_post.data import dataset
from jaxrl_post.envs import beside, evaluate, multi_turn, schedule
from jaxrl_post.models import decoder, named
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import assign, dump
from jaxrl_post.runtime import checkpoint as checkpoints
from jaxrl_post.sampling import engine
from jaxrl_post.training import lora
from jaxrl_post.training import optim as optims
from jaxrl_post.training import warmup as warmups


@dataclasses.dataclass(frozen=True)
class Run:
  """One run.

  Attributes:
    model: the policy.
    reference: a model that never trains, with which a KL, a preference or a
      distillation compares; None is the policy's own first weights.
    data: what it is asked.
    rewards: how answers are scored.
    algo: rewards to advantages to loss.
    optim: the optimizer.
    sampling: the rollouts.
    stream: how generation runs beside training.
    placement: which devices do what.
    checkpoint: what is kept on disk.
    evaluation: how the policy is tested on held-out prompts.
    env: whom the policy talks to, in several turns; None is one turn.
    warmup: supervised steps before the first rollout.
    debug: batches on disk, to look at and to train on again; None has none.
    num_steps: batches to train on.
    groups_per_step: prompts in a batch.
    group_size: rollouts of each prompt; 1 only with a critic.
    max_lag: how many versions a trained token may be behind the trainer.
    mask_stale_tokens: train, of each rollout, only the tokens of its newest
      version; those that older weights sampled stay as context.
    seed: of weights, data order and sampling.
    logged_groups: groups a step whose rollouts are written to rollouts.txt.
  """

  model: decoder.Model
  data: dataset.Data
  rewards: pool.Rewards
  reference: decoder.Model | None = None
  algo: algorithm.Algorithm = grpo.objective()
  optim: optims.Optim = optims.Optim()
  sampling: engine.Sampling = engine.Sampling()
  stream: schedule.StreamConfig = schedule.StreamConfig()
  placement: mesh.Placement = mesh.Placement()
  checkpoint: checkpoints.Checkpoint = checkpoints.Checkpoint()
  evaluation: evaluate.Evaluation = evaluate.Evaluation()
  warmup: warmups.Warmup = warmups.Warmup()
  env: multi_turn.Conversation | None = None
  debug: dump.Debug | None = None
  num_steps: int = 100
  groups_per_step: int = 8
  group_size: int = 8
  max_lag: int = 1
  mask_stale_tokens: bool = False
  seed: int = 0
  logged_groups: int = 1

  def __post_init__(self) -> None:
    least = 1 if "values" in self.algo.needs else 2
    rules = (
      ("num_steps", self.num_steps >= 1, ">= 1"),
      ("groups_per_step", self.groups_per_step >= 1, ">= 1"),
      # A group of one has no other rollout to be compared with, but a critic.
      ("group_size", self.group_size >= least, f">= {least}"),
      ("max_lag", self.max_lag >= 0, ">= 0"),
      # Random keys take 32 bits of a seed.
      ("seed", 0 <= self.seed < 2**32, "in [0, 2**32)"),
      ("logged_groups", self.logged_groups >= 0, ">= 0"),
    )
    for name, holds, rule in rules:
      if not holds:
        raise types.InputError(
          f"{name}: expected {rule}, got {getattr(self, name)}. Correct it."
        )
    if self.data.held_out is None:
      _check_not_evaluated(self)
    if self.evaluation.beside is not None:
      tests, best = self.data.held_out is not None, self.checkpoint.best_by
      mode = self.placement.mode
      beside.check(mode, self.max_lag, best_by=best, held_out=tests)
    _check_leaves(self, "")
    _check_algorithm(self)
    _check_reference(self)
    in_turn = not self.stream.asynchronous and self.placement.mode != "roles"
    if self.placement.publish.buffers == "free_first" and not in_turn:
      raise types.InputError(
        "placement.publish.buffers: expected double where generation goes on "
        "with the old weights, got free_first. Set stream.asynchronous=false, "
        "in mode colocated or split."
      )
    if self.stream.deterministic or self.stream.follow:
      _check_repeats(self)
    if self.replay is not None:
      _check_samples_nothing(self)
    if self.max_lag and not self.stream.asynchronous:
      raise types.InputError(
        f"stream.asynchronous: expected true with max_lag={self.max_lag}, got "
        "false. Set max_lag=0 or stream.asynchronous=true."
      )

  @property
  def rows(self) -> int:
    """Rollouts in a batch."""
    return self.groups_per_step * self.group_size

  @property
  def replay(self) -> str | None:
    """The dump that is trained on, instead of sampling; None samples."""
    return None if self.debug is None else self.debug.replay

  @property
  def length(self) -> int:
    """Tokens of the longest rollout, prompt included."""
    return self.data.max_prompt + self.sampling.max_tokens


def _check_algorithm(run: Run) -> None:
  """Refuses an algorithm that the rest of the run does not serve."""
  needs, cfg = run.algo.needs, run.optim
  rules = (
    (
      run.algo.corrects or not run.sampling.quantized,
      "algo.correction",
      f"importance weights with sampling.dtype={run.sampling.dtype}, which "
      "samples from other probabilities than it trains",
      "none",
    ),
    (
      "pairs" not in needs or run.group_size == 2,
      "group_size",
      "2 with an algorithm that compares the two rollouts of a prompt",
      str(run.group_size),
    ),
    (
      "teacher" not in needs or not run.stream.filter_zero_signal,
      "stream.filter_zero_signal",
      "false with a teacher, whose signal is not in the rewards",
      "true",
    ),
    (
      run.group_size > 1 or not run.stream.filter_zero_signal,
      "stream.filter_zero_signal",
      "false with group_size=1, where it would leave out every group",
      "true",
    ),
    (
      "single_update" not in needs or cfg.updates == 1,
      "optim.minibatches, optim.epochs",
      "1 and 1 with an algorithm whose loss is exact for one update a batch",
      f"{cfg.minibatches} and {cfg.epochs}",
    ),
  )
  _hold(rules)


def _check_reference(run: Run) -> None:
  """Refuses a reference that nothing compares with, or a part of one."""
  reference, algo, every = run.reference, run.algo, run.algo.reference_moves[0]
  used = bool({"reference", "candidates"} & algo.needs)
  adapters = isinstance(run.optim.trained, lora.Lora)
  _hold(
    (
      (
        reference is None or used,
        "reference",
        "none with an algorithm that compares with none",
        "a model",
      ),
      (
        reference is not None or "teacher" not in algo.needs,
        "reference",
        "a model with an algorithm that distils, as a policy learns nothing "
        "from its own first weights",
        "none",
      ),
      (
        reference is None or not every,
        "algo.kl.every",
        "0 with a reference that is a model of its own and never moves",
        str(every),
      ),
      (
        reference is None or reference.remat == "none",
        "reference.remat",
        "none, as nothing goes backward through a reference",
        reference.remat if reference else "none",
      ),
      (
        not adapters or not every,
        "algo.kl.every",
        "0 with adapters, whose reference is the weights beneath them",
        str(every),
      ),
      (
        "reference" not in run.placement.park
        or (used and not (adapters and reference is None)),
        "placement.park",
        "reference only where there are weights of one, besides the policy's",
        "it where there are none",
      ),
    )
  )


def _hold(rules: Sequence[tuple[bool, str, str, str]]) -> None:
  """Refuses two settings that exclude each other, by the first broken rule."""
  for holds, name, rule, value in rules:
    if not holds:
      raise types.InputError(
        f"{name}: expected {rule}, got {value}. Change one of the two."
      )


def _check_repeats(run: Run) -> None:
  """Refuses what a run that is to repeat itself cannot have."""
  name = "stream.follow" if run.stream.follow else "stream.deterministic"
  if run.placement.mode == "roles":
    raise types.InputError(
      f"{name}: expected placement.mode colocated or split, got roles, where "
      "clocks decide what is sampled when. Choose another mode."
    )
  in_flight = run.sampling.in_flight
  if run.stream.deterministic and run.max_lag and in_flight == "keep":
    raise types.InputError(
      "stream.deterministic: expected sampling.in_flight recompute or drain "
      f"with max_lag={run.max_lag}, got keep: keys and values of older weights "
      "are in no checkpoint. Choose one of the two."
    )


_PLACES = tuple(f"rewards.model.{x}" for x in ("devices", "tensor", "batch"))


def may_change(run: Run) -> tuple[str, ...]:
  """Names the settings that a continued run may change.

  Returns:
    Those that say where and how far a run goes, and not what it computes:
    `num_steps` only while no learning rate schedule depends on it.
  """
  names = (
    *(_PLACES if run.rewards.model is not None else ()),
    "placement",
    "checkpoint",
    "evaluation.every",
    "evaluation.timeout_s",
    "evaluation.beside",
    "logged_groups",
    "stream.stall_s",
  )
  return (*names, "num_steps") if run.optim.schedule == "constant" else names


def _check_not_evaluated(run: Run) -> None:
  """Refuses what needs held-out prompts."""
  for name, rule, value, wrong in (
    ("evaluation.every", "0", run.evaluation.every, run.evaluation.every > 0),
    (
      "checkpoint.best_by",
      "no metric of an evaluation",
      run.checkpoint.best_by,
      run.checkpoint.best_by.startswith("eval/"),
    ),
  ):
    if wrong:
      raise types.InputError(
        f"{name}: expected {rule} without data.held_out, got {value}. Give the "
        "experiment held-out prompts."
      )


def _check_samples_nothing(run: Run) -> None:
  """Refuses, in a replay, what says how to sample."""
  mode, follow = run.placement.mode, run.stream.follow
  for name, rule, value, wrong in (
    ("placement.mode", "colocated or split", mode, mode == "roles"),
    ("stream.follow", "none", follow, bool(follow)),
  ):
    if wrong:
      raise types.InputError(
        f"{name}: expected {rule} with debug.replay, which samples nothing, "
        f"got {value}. Set one of them."
      )


def _check_leaves(node: Any, prefix: str) -> None:
  """Refuses what no setting may be: out of its Literal, NaN or infinite."""
  hints = typing.get_type_hints(type(node))
  for field in dataclasses.fields(node):
    value, name = getattr(node, field.name), f"{prefix}{field.name}"
    if assign.is_group(value):
      _check_leaves(value, f"{name}.")
    if isinstance(value, float) and not math.isfinite(value):
      raise types.InputError(
        f"{name}: expected a finite number, got {value}. Correct it."
      )
    hint = hints[field.name]
    is_literal = typing.get_origin(hint) is typing.Literal
    if is_literal and value not in typing.get_args(hint):
      raise types.InputError(
        f"{name}: expected {assign.type_name(hint)}, got {value!r}. Correct it."
      )


# ------------------------------------------------------------------ --exp


def load(experiment: str, folder: pathlib.Path) -> Run:
  """Finds an experiment and calls its `get_config`.

  Args:
    experiment: NAME of a file in `folder`, or a path to one; followed by
      `:function` it calls that instead of `get_config`.
    folder: where named experiments are.

  Returns:
    The configuration, with the file's defaults.

  Raises:
    InputError: there is no such experiment or function, it needs a package
      that is not installed, or it does not return a `Run`.
  """
  name, _, function = experiment.partition(":")
  function = function or "get_config"
  path = pathlib.Path(name)
  path = path if path.suffix == ".py" else folder / f"{name}.py"
  if not path.is_file():
    known = sorted(p.stem for p in folder.glob("[!_]*.py"))
    raise types.InputError(
      f"--exp={experiment}: expected a file, got none at {path}."
      f"{assign.near(name, known)} Known: {', '.join(known) or 'none'}."
    )
  module = _module(path)
  make = getattr(module, function, None)
  if not callable(make):
    raise types.InputError(
      f"--exp={experiment}: expected a function {function} in {path}, got "
      "none. Name one that is there."
    )
  try:
    inspect.signature(make).bind()
  except TypeError as error:
    raise types.InputError(
      f"--exp={experiment}: expected {function}() without arguments, got "
      f"{function}{inspect.signature(make)}. Give its arguments defaults."
    ) from error
  run = make()
  if not isinstance(run, Run):
    raise types.InputError(
      f"--exp={experiment}: expected {function}() to return config.Run, got "
      f"{type(run).__name__}. Return one."
    )
  return run


def _module(path: pathlib.Path) -> python_types.ModuleType:
  # A name of its own: workers of the reward pool load the file under it too.
  name = f"jaxrl_post_experiment_{path.stem}"
  spec = importlib.util.spec_from_file_location(name, path.resolve())
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except SyntaxError as error:
    raise types.InputError(
      f"--exp={path}: expected Python, got {error.msg} in line {error.lineno}. "
      "Correct the file."
    ) from error
  except ModuleNotFoundError as error:
    raise types.InputError(
      f"--exp={path}: expected the package {error.name!r}, which is not "
      "installed. Install it; README.md lists the extras."
    ) from error
  return module


# ------------------------------------------------------------------ --set


def override(run: Run, assignments: Sequence[str]) -> Run:
  """Edits leaves, all at once; of two edits of one leaf the last wins.

  Args:
    run: the configuration.
    assignments: each `dotted.name=value`; the value is read by the type of
      the leaf, `none` where it may be None, `module:name` for a function.

  Returns:
    A new configuration, checked.

  Raises:
    InputError: there is no such leaf, or the value is not of its type.
  """
  edits: dict[tuple[str, ...], str] = {}
  for assignment in assignments:
    name, equals, value = assignment.partition("=")
    if not equals:
      raise types.InputError(
        f"--set {assignment}: expected name=value, got no '='. Add a value."
      )
    edits[tuple(name.split("."))] = value
  return assign.replace(run, edits) if edits else run


# -------------------------------------------------------------- looking at it


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
  """Returns every leaf of a configuration by its dotted name."""
  found = {}
  for field in dataclasses.fields(node):
    value, name = getattr(node, field.name), f"{prefix}{field.name}"
    if assign.is_group(value):
      found.update(leaves(value, f"{name}."))
    else:
      found[name] = value
  return found


def to_json(node: Any) -> Any:
  """Returns a configuration as JSON holds it; functions as module:name.

  A class that could be another one, such as an algorithm, is named by `class`.
  """
  if assign.is_group(node):
    names = [f.name for f in dataclasses.fields(node)]
    fields = {name: to_json(getattr(node, name)) for name in names}
    return {"class": _function_name(type(node)), **fields}
  if isinstance(node, tuple):
    return [to_json(x) for x in node]
  if isinstance(node, dict):
    return {name: to_json(x) for name, x in node.items()}
  if callable(node):
    return _function_name(node)
  return node


def _function_name(function: Any) -> str:
  has_name = hasattr(function, "__qualname__") or hasattr(function, "func")
  return named.text(function if has_name else type(function))


def classes(node: Any, prefix: str = "") -> dict[str, str]:
  """Returns the class of each group that could be of another, by its name."""
  found = {}
  hints = typing.get_type_hints(type(node))
  for field in dataclasses.fields(node):
    value, name = getattr(node, field.name), f"{prefix}{field.name}"
    if assign.is_group(value):
      if hints[field.name] is not type(value):
        found[name] = _function_name(type(value))
      found |= classes(value, f"{name}.")
  return found


def describe(run: Run) -> str:
  """Returns the resolved tree as lines `name = value`, chosen classes first."""
  lines = [f"{name} = {kind}" for name, kind in classes(run).items()]
  lines += [f"{name} = {_show(v)}" for name, v in leaves(run).items()]
  return "\n".join(lines)


def _show(value: Any) -> str:
  if isinstance(value, tuple):
    return f"({', '.join(_show(v) for v in value)})"
  if assign.is_group(value):
    return f"{type(value).__name__}{_show(tuple(leaves(value).values()))}"
  return _function_name(value) if callable(value) else repr(value)
