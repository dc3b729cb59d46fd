"""What decides how fast a run is: its sizes, and what each part costs."""

import dataclasses
import json
import math
import os
import pathlib
import typing
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from jaxrl_post import types
from jaxrl_post.data import pack
from jaxrl_post.models import experts, transformer, weights
from jaxrl_post.placement import mesh, settings
from jaxrl_post.runtime import folder


@dataclasses.dataclass(frozen=True)
class Setting:
  """The sizes of a run; fields are named as the settings that they are of.

  Attributes:
    mode: "colocated", "split" or "roles", as `placement.mode`.
    training: devices that train.
    generation: devices that generate; when colocated the same ones.
    idle: devices that neither side uses.
    groups_per_step: groups in a batch.
    group_size: rollouts of a group.
    max_lag: bound on the lag.
    rows: completions in flight.
    block: tokens of a dispatch.
    max_tokens: longest completion.
    max_prompt: longest prompt, in tokens.
    prefill_tokens: most tokens of a call that reads prompts.
    drain: whether newer weights wait until nothing is in flight.
    asynchronous: whether generation has a thread of its own.
    cut: microbatches x minibatches of a batch.
    key_cost: operations of a token for a key that it reads, by those for all
      weights of a layer.
    fixed_training: whether the sizes of all axes that train are written out.
    fixed_generation: likewise of those that generate.
    training_axes: product of the written ones, but for fsdp where all are: the
      devices that train are a multiple of it.
    generation_axes: likewise, but for data.
    training_inner: of these, product of those that do not split rollouts.
    generation_inner: likewise, or slots.
  """

  mode: Literal["colocated", "split", "roles"] = "colocated"
  training: int = 1
  generation: int = 1
  idle: int = 0
  groups_per_step: int = 8
  group_size: int = 8
  max_lag: int = 1
  rows: int = 64
  block: int = 8
  max_tokens: int = 32
  max_prompt: int = 32
  prefill_tokens: int = 512
  drain: bool = False
  asynchronous: bool = True
  cut: int = 1
  key_cost: float = 0.0
  fixed_training: bool = False
  fixed_generation: bool = False
  training_axes: int = 1
  generation_axes: int = 1
  training_inner: int = 1
  generation_inner: int = 1

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      least = 0 if field.name in ("idle", "max_lag") else 1
      value = getattr(self, field.name)
      if field.type is int and value < least:
        _refuse(f"setting.{field.name}", f"a number from {least} on", value)
    if self.mode == "colocated" and self.training != self.generation:
      _refuse(
        "setting.generation",
        f"the {self.training} devices that train, when colocated",
        self.generation,
      )

  @property
  def devices(self) -> int:
    """All that the run holds."""
    used = self.training + (self.mode != "colocated") * self.generation
    return used + self.idle

  @property
  def rollouts(self) -> int:
    """Of a batch."""
    return self.groups_per_step * self.group_size

  @property
  def divides(self) -> bool:
    """Whether devices divide into axes, and rollouts and slots over them."""
    if self.training % self.training_axes:
      return False
    if self.generation % self.generation_axes:
      return False
    rows = self.training // self.training_inner * self.cut
    slots = self.generation // self.generation_inner
    return not (self.rollouts % rows or self.rows % slots)

  @property
  def positions(self) -> int:
    """Tokens that the trainer computes for a batch of the longest rollouts."""
    layout = pack.layout(
      self.rollouts,
      self.group_size,
      max_prompt=self.max_prompt,
      max_tokens=self.max_tokens,
      flops=lambda keys: 1.0 + self.key_cost * keys,
      microbatches=self.cut,
      row_parts=self.training // self.training_inner,
    )
    return layout.rows * layout.length

  @property
  def prompts(self) -> int:
    """Prompts that are read in one call."""
    groups = -(-self.rows // self.group_size)
    return min(max(1, self.prefill_tokens // self.max_prompt), groups)

  @property
  def calls(self) -> int:
    """Calls that it takes to read `prompts` of them."""
    return max(1, -(-self.max_prompt // self.prefill_tokens))


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of what a run does, each where nothing else runs beside it.

  A cost "of a row" adds to that of the whole for each of its rows, and so on.

  Attributes:
    column_s: a pass through the model for one token of each row of the engine.
    row_s: of it, of a row of a generation device.
    block_s: of the host, of a block.
    rollout_s: of the host, of a completion.
    call_s: a call that reads prompts.
    read_s: of it, of a token that it has room for.
    update_s: to score and train a batch.
    position_s: of it, of a position of the batch, on one device.
    efficiency: of doubling the devices that train, in (0, 1]: d of them are
      `d * efficiency ** log2(d)` times as fast as one.
    publish_s: from the update to the weights' being there.
    take_s: of generation, until it samples with them.
    reward_s: from the end of a group to its rewards, whatever their number.
    pack_s: of training's host, from the last rewards of a batch to its update:
      threads wake, rows are packed.
    packed_s: of it, of a rollout.
    host_s: likewise after the update: to write metrics, save, evaluate.
    left: share of groups that leave untrained, as without signal; below 1.
    colocated: how many times as long work takes while the other stage works
      too, when colocated: 2 is taking turns.
    split: likewise when split or in roles: 1 is not to notice.
    lengths: a sample of the lengths of completions, in tokens.
  """

  column_s: float
  update_s: float
  lengths: tuple[int, ...]
  row_s: float = 0.0
  block_s: float = 0.0
  rollout_s: float = 0.0
  call_s: float = 0.0
  read_s: float = 0.0
  position_s: float = 0.0
  efficiency: float = 0.9
  publish_s: float = 0.0
  take_s: float = 0.0
  reward_s: float = 0.0
  pack_s: float = 0.0
  packed_s: float = 0.0
  host_s: float = 0.0
  left: float = 0.0
  colocated: float = 2.0
  split: float = 1.0

  def __post_init__(self) -> None:
    for name in (f.name for f in dataclasses.fields(self)):
      value = getattr(self, name)
      if name.endswith("_s") and not 0 <= value < math.inf:
        _refuse(f"costs.{name}", "seconds, at least 0", value)
    rules = (
      ("column_s + row_s", self.column_s + self.row_s > 0, "more than 0"),
      ("update_s + position_s", self.update_s + self.position_s > 0, "as well"),
      ("efficiency", 0 < self.efficiency <= 1, "a number in (0, 1]"),
      ("left", 0 <= self.left < 1, "a share in [0, 1)"),
      ("colocated", 1 <= self.colocated < math.inf, "at least 1"),
      ("split", 1 <= self.split < math.inf, "at least 1"),
    )
    for name, holds, rule in rules:
      if not holds:
        _refuse(f"costs.{name}", rule, getattr(self, name, 0))
    if min(self.lengths, default=0) < 1:
      _refuse("costs.lengths", "at least one, each from 1 on", self.lengths)

  def column(self, setting: Setting) -> float:
    """Returns the seconds of one token of every row."""
    return self.column_s + self.row_s * setting.rows / setting.generation

  def call(self, setting: Setting) -> float:
    """Returns the seconds of reading the prompts of one call."""
    tokens = setting.prompts * setting.max_prompt
    return setting.calls * self.call_s + self.read_s * tokens

  def update(self, setting: Setting) -> float:
    """Returns the seconds of scoring and training a batch."""
    return self.update_s + self.position_s * setting.positions / speed(
      setting.training, self.efficiency
    )

  def pack(self, setting: Setting) -> float:
    """Returns the seconds from a batch to its update."""
    return self.pack_s + self.packed_s * setting.rollouts

  def slowdown(self, setting: Setting) -> float:
    """Returns how many times as long work takes beside the other stage."""
    return self.colocated if setting.mode == "colocated" else self.split


def speed(devices: int, efficiency: float) -> float:
  """Returns how many times as fast as one so many devices train."""
  return devices * efficiency ** math.log2(devices)


def setting(tree: Mapping[str, Any], devices: int) -> Setting:
  """Returns the sizes of a run.

  Args:
    tree: its configuration, as in config.json.
    devices: of JAX, where it trains.

  Raises:
    InputError: it is no configuration, it has no place on so many devices, or
      it runs in a way that is not simulated.
  """
  try:
    stream, sampling = tree["stream"], tree["sampling"]
    for name, wanted in (("deterministic", False), ("on_stale", "wait")):
      if stream[name] != wanted:
        _refuse(
          f"stream.{name}", f"{wanted}, which alone is simulated", stream[name]
        )
    renewal = (tree.get("env") or {}).get("renewal")
    if renewal is not None:
      rule = "none, as a rollout of one row alone is simulated"
      _refuse("env.renewal.max_rows", rule, renewal["max_rows"])
    place = _placement(tree["placement"])
    share = mesh.shares(place, devices)
    return Setting(
      mode=place.mode,
      training=share.training,
      generation=share.generation,
      idle=share.idle,
      groups_per_step=tree["groups_per_step"],
      group_size=tree["group_size"],
      max_lag=tree["max_lag"],
      max_prompt=tree["data"]["max_prompt"],
      drain=sampling["in_flight"] == "drain",
      asynchronous=stream["asynchronous"],
      cut=tree["optim"]["microbatches"] * tree["optim"]["minibatches"],
      key_cost=_key_cost(tree["model"]),
      fixed_training=-1 not in dataclasses.astuple(place.training),
      fixed_generation=-1 not in dataclasses.astuple(place.generation),
      training_axes=_axes(place.training, "fsdp"),
      generation_axes=_axes(place.generation, "data"),
      training_inner=_axes(place.training, *mesh.TRAINING_BATCH),
      generation_inner=_axes(place.generation, *mesh.GENERATION_BATCH),
      **{
        name: sampling[name]
        for name in ("rows", "block", "max_tokens", "prefill_tokens")
      },
    )
  except (KeyError, TypeError, AttributeError) as error:
    raise types.InputError(
      f"{folder.CONFIG_FILE}: expected the settings of a run, got {error} "
      "that is missing or of another kind. Run it again with this version."
    ) from error


def _axes(axes: mesh.TrainingAxes | mesh.GenerationAxes, *but: str) -> int:
  """Returns the product of the written axes but for those named."""
  sizes = dataclasses.asdict(axes).items()
  return math.prod(n for name, n in sizes if n > 0 and name not in but)


def _key_cost(model: Mapping[str, Any]) -> float:
  """Returns `Setting.key_cost` of a model, from its shape."""
  given = model["config"]
  if given is None:
    shape = weights.read_config(model["path"])
  else:
    names = [f.name for f in dataclasses.fields(transformer.Config)]
    if not set(names) <= given.keys():
      raise types.InputError(
        "--mode=plan: expected runs of a transformer of this project, got one "
        f"of {given.get('about')}, whose operations are not known. Plan others."
      )
    # These change nothing of what one key costs.
    beside = {"rope_scaling", "window", "gemma"}
    sizes = {name: given[name] for name in names if name not in beside}
    mixture = sizes["experts"]
    if mixture is not None:
      names = (f.name for f in dataclasses.fields(experts.Experts))
      sizes["experts"] = experts.Experts(**{n: mixture[n] for n in names})
    shape = transformer.Config(**sizes)
  none, one = (transformer.layer_flops(shape, keys) for keys in (0, 1))
  return one / none - 1.0


def _placement(tree: Mapping[str, Any]) -> mesh.Placement:
  """Returns the placement of a configuration in the form of config.json."""

  def fields(node: Mapping[str, Any]) -> dict[str, Any]:
    values = {k: v for k, v in node.items() if k != "class"}
    return {
      k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
    }

  roles = tree["roles"]
  return mesh.Placement(
    **{
      **fields(tree),
      "training": mesh.TrainingAxes(**fields(tree["training"])),
      "generation": mesh.GenerationAxes(**fields(tree["generation"])),
      "publish": settings.Publishing(**fields(tree["publish"])),
      "roles": None if roles is None else settings.Roles(**fields(roles)),
    }
  )


def write(path: str | os.PathLike[str], given: Setting, found: Costs) -> None:
  """Writes sizes and costs, for `read`.

  Raises:
    InputError: it cannot be written there.
  """
  tree = {
    "setting": dataclasses.asdict(given),
    "costs": dataclasses.asdict(found),
  }
  try:
    folder.write(path, json.dumps(tree, indent=2) + "\n")
  except OSError as error:
    raise types.InputError(
      f"--plan: expected a file that can be written, got {path} "
      f"({error.strerror}). Choose another."
    ) from error


def read(path: str | os.PathLike[str]) -> tuple[Setting, Costs]:
  """Reads sizes and costs: of `write`, or written by hand.

  Raises:
    InputError: the file is not there, or not of this form.
  """
  try:
    tree = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise types.InputError(
      f"{path}: expected a JSON file with setting and costs, got none: "
      f"{' '.join(str(error).split())}. docs/planning.md shows one."
    ) from error
  if not isinstance(tree, dict) or tree.keys() != {"setting", "costs"}:
    _refuse(f"{path}", "an object with setting and costs", tree)
  try:
    found = Costs(**_fields(Costs, tree["costs"], "costs"))
    return Setting(**_fields(Setting, tree["setting"], "setting")), found
  except types.InputError as error:
    raise types.InputError(f"{path}: {error}") from error


def _fields(kind: type, node: Any, place: str) -> dict[str, Any]:
  """Returns the fields that JSON has of a record; refuses others."""
  if not isinstance(node, dict):
    _refuse(place, "an object", node)
  known = {field.name: field for field in dataclasses.fields(kind)}
  for name, value in node.items():
    if name not in known:
      _refuse(place, f"fields of {', '.join(known)}", name)
    _check_type(f"{place}.{name}", known[name].type, value)
  for name, field in known.items():
    if field.default is dataclasses.MISSING and name not in node:
      _refuse(f"{place}.{name}", "a value", "none")
  return {k: tuple(v) if isinstance(v, list) else v for k, v in node.items()}


def _check_type(place: str, kind: Any, value: Any) -> None:
  if kind is float:
    holds, rule = type(value) in (int, float), "a number"
  elif kind is int:
    holds, rule = type(value) is int, "a whole number"
  elif kind is bool:
    holds, rule = isinstance(value, bool), "true or false"
  elif kind == tuple[int, ...]:
    holds = isinstance(value, list) and all(type(n) is int for n in value)
    rule = "a list of whole numbers"
  else:
    choices = typing.get_args(kind)
    holds, rule = value in choices, f"one of {', '.join(choices)}"
  if not holds:
    _refuse(place, rule, value)


def _refuse(place: str, rule: str, value: Any) -> NoReturn:
  raise types.InputError(
    f"{place}: expected {rule}, got {str(repr(value)):.60}. Correct it."
  )
