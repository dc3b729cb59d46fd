"""Some of what a checkpoint holds: its weights without the optimizer."""

import logging
import pathlib
from collections.abc import Mapping

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxrl_post import types
from jaxrl_post.runtime import checkpoint
from jaxrl_post.runtime import manifest as manifests

_log = logging.getLogger(__name__)


def find(folder: pathlib.Path, step: int | None = None) -> pathlib.Path:
  """Finds a checkpoint that is whole.

  Args:
    folder: the checkpoints of a run.
    step: finished steps; None is the newest that is whole.

  Returns:
    The folder of the checkpoint, called as its step.

  Raises:
    InputError: there is none of that step, or none that is whole.
  """
  known = sorted(checkpoint.steps(folder)) if folder.is_dir() else []
  if step is not None and step not in known:
    there = ", ".join(map(str, known)) or "none"
    raise types.InputError(
      f"--step: expected that of a checkpoint ({there}) in {folder}, got "
      f"{step}. Name one that is there."
    )
  for number in reversed(known) if step is None else (step,):
    path = folder / str(number)
    fault = manifests.fault(path)
    if fault is None:
      return path
    _log.warning("checkpoint %s is not whole (%s)", path, fault)
  raise types.InputError(
    f"--workdir: expected a checkpoint that is whole, got none in {folder}. "
    "Name another run, or another step of it."
  )


def read(
  path: pathlib.Path, wanted: Mapping[str, types.Tree]
) -> dict[str, types.Tree]:
  """Reads fields of the state that a checkpoint holds, and nothing else of it.

  Args:
    path: from `find`.
    wanted: a field's name in `types.TrainState`, with a `jax.ShapeDtypeStruct`
      for each of its arrays.

  Returns:
    The fields by name, bit for bit, as arrays in the host's memory.

  Raises:
    InputError: a leaf is missing, too many, or of another shape or dtype.
  """
  stored = manifests.read(path).leaves
  asked = {
    f".{field}{name}": leaf
    for field, tree in wanted.items()
    for name, leaf in checkpoint.describe(tree).items()
  }
  heads = tuple(f".{field}[" for field in wanted)
  have = {name: leaf for name, leaf in stored.items() if name.startswith(heads)}
  checkpoint.check_leaves(path, have, asked)
  context = ocp.Context()
  context.pytree.loading.partial_load = True

  def one(place: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    # An array of NumPy that is not there; by its type it is read as one.
    tree: types.Tree = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    for key in reversed(place):
      tree = {key.key: tree}
    with context:
      state = str((path / checkpoint.STATE).absolute())
      (array,) = jax.tree.leaves(ocp.load(state, tree))
    return array

  # One at a time: all at once, as many bytes again would wait beside them.
  return jax.tree.map_with_path(one, dict(wanted))
