"""What of a model trains: all weights, some of them, or adapters.

Optimizer, gradient and their norms see a tree of leaves, and nothing else.
These functions say which one it is, and what the weights are with it.
"""

import dataclasses
import fnmatch
from typing import TypeAlias

import jax

from jaxrl_post import types
from jaxrl_post.models import spec as specs
from jaxrl_post.training import lora


@dataclasses.dataclass(frozen=True)
class Only:
  """Trains some weights; the others stay as they are, and cost no optimizer.

  Attributes:
    patterns: of paths such as layers/q, embed or final_norm, where * stands
      for anything. What matches one of them trains.
  """

  patterns: tuple[str, ...] = ("*",)

  def __post_init__(self) -> None:
    if not self.patterns:
      raise types.InputError(
        "optim.trained.patterns: expected one or more, got none. '*' is all."
      )

  def has(self, path: tuple) -> bool:
    """Whether the weight of this key path trains."""
    name = _name(path)
    return any(fnmatch.fnmatchcase(name, p) for p in self.patterns)


# None trains all weights.
Setting: TypeAlias = lora.Lora | Only | None


def _name(path: tuple) -> str:
  return "/".join(str(key.key) for key in path)


def check(cfg: Setting, tree: types.Tree) -> None:
  """Refuses a setting that does not fit a model.

  Args:
    cfg: the setting.
    tree: of `specs.Weight`, as `transformer.spec` declares them.

  Raises:
    InputError: names what the model does not have.
  """
  spec(cfg, tree)
  if not isinstance(cfg, Only):
    return
  names = _names(tree)
  for pattern in cfg.patterns:
    if not fnmatch.filter(names, pattern):
      raise types.InputError(
        "optim.trained.patterns: expected patterns that match one of "
        f"{', '.join(names)}, got {pattern!r}. Correct it."
      )


def _names(tree: types.Tree) -> list[str]:
  paths, _ = jax.tree.flatten_with_path(
    tree, is_leaf=lambda x: isinstance(x, specs.Weight)
  )
  return [_name(path) for path, _ in paths]


def spec(cfg: Setting, tree: types.Tree) -> types.Tree:
  """Declares the adapters that a model has besides its weights, or None.

  Raises:
    InputError: see `lora.spec`.
  """
  return lora.spec(tree, cfg) if isinstance(cfg, lora.Lora) else None


def init(cfg: Setting, tree: types.Tree, key: jax.Array) -> types.Tree:
  """Draws the adapters of `spec`, or None; see `lora.init`."""
  return lora.init(tree, key, cfg) if isinstance(cfg, lora.Lora) else None


def changed(cfg: Setting, tree: types.Tree) -> tuple[str, ...] | None:
  """Names the weights that are others after an update.

  Args:
    cfg: the setting.
    tree: of `specs.Weight`, as `transformer.spec` declares them.

  Returns:
    Key paths as `jax.tree_util.keystr` writes them; None if all change.
  """
  if cfg is None:
    return None
  paths, _ = jax.tree.flatten_with_path(
    tree, is_leaf=lambda x: isinstance(x, specs.Weight)
  )
  if isinstance(cfg, Only):
    found = [path for path, _ in paths if cfg.has(path)]
  else:
    targets = [f"layers/{name}" for name in cfg.targets]
    found = [path for path, _ in paths if _name(path) in targets]
  return tuple(jax.tree_util.keystr(path) for path in found)


def choose(
  cfg: Setting, params: types.Tree, adapters: types.Tree
) -> types.Tree:
  """Returns what trains: adapters, or weights with None for frozen ones."""
  if isinstance(cfg, lora.Lora):
    return adapters
  return split(cfg, params)[0]


def split(cfg: Setting, params: types.Tree) -> tuple[types.Tree, types.Tree]:
  """Cuts weights into those that an update changes and those it never does.

  Returns:
    Two trees, each with None in the other's places. `join` undoes it.
  """

  def moves(path: tuple) -> bool:
    return cfg is None or (isinstance(cfg, Only) and cfg.has(path))

  return (
    jax.tree.map_with_path(lambda p, x: x if moves(p) else None, params),
    jax.tree.map_with_path(lambda p, x: None if moves(p) else x, params),
  )


def join(leaves: types.Tree, params: types.Tree) -> types.Tree:
  """Returns `leaves` with the weights of `params` where it has None."""
  return jax.tree.map(
    lambda new, old: old if new is None else new,
    leaves,
    params,
    is_leaf=lambda x: x is None,
  )


def weights(cfg: Setting, params: types.Tree, leaves: types.Tree) -> types.Tree:
  """Returns the weights that a forward pass takes.

  Args:
    cfg: the setting.
    params: all weights; without adapters only the frozen ones are read.
    leaves: from `choose`; the result is differentiable in these.
  """
  if isinstance(cfg, lora.Lora):
    return lora.attach(params, leaves, cfg)
  return join(leaves, params)


def put(
  cfg: Setting, state: types.TrainState, leaves: types.Tree
) -> types.TrainState:
  """Returns the state with other values of what trains."""
  if isinstance(cfg, lora.Lora):
    return dataclasses.replace(state, adapters=leaves)
  return dataclasses.replace(state, params=join(leaves, state.params))


def reference(cfg: Setting, params: types.Tree, kept: types.Tree) -> types.Tree:
  """Returns the weights of the reference policy.

  Args:
    cfg: the setting.
    params: all weights of the state.
    kept: its `reference`, a copy of what trains; None where there is none.

  Returns:
    All weights. With adapters those beneath them, which need no copy; None
    where nothing is kept otherwise.
  """
  if isinstance(cfg, lora.Lora):
    return params
  return None if kept is None else join(kept, params)
