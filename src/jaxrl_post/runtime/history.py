"""A run as its folder tells it, and which of its steps count.

Rates and fractions in `metrics.jsonl` are means since the first admission, and
so hold the compilation at the start for ever. What a step `added` does not.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_post import types
from jaxrl_post.runtime import folder as folder_lib
from jaxrl_post.runtime import log

STAGES = ("generation", "training")
# Of each process; they do not count, as the pipeline fills.
FIRST_STEPS = 5

Row = Mapping[str, Any]


@types.host_record
class Run:
  """What a run folder says.

  Attributes:
    path: of the folder, as it was given.
    config: config.json.
    lines: of metrics.jsonl, oldest first, from `joined`.
  """

  path: pathlib.Path
  config: Mapping[str, Any]
  lines: Sequence[Row]

  @property
  def rows(self) -> list[Row]:
    """The lines of steps that were trained and timed."""
    return [
      line
      for line in self.lines
      if number(line, "step") > 0 and number(line, "time/seconds") > 0
    ]


def read(folder: str | os.PathLike[str]) -> Run:
  """Reads a run folder; of a run that is under way, what is there.

  Returns:
    The run. A last line of metrics.jsonl without its end, which is still being
    written or was cut by a kill, is left out.

  Raises:
    InputError: there is no run, its files are damaged, or no step was trained.
  """
  path = pathlib.Path(folder)
  settings = _text(path, folder_lib.CONFIG_FILE)
  texts = _text(path, log.METRICS_FILE).split("\n")[:-1]
  run = Run(
    path=path,
    config=_parsed(path / folder_lib.CONFIG_FILE, settings),
    lines=joined(
      _parsed(f"{path / log.METRICS_FILE}, line {at}", text)
      for at, text in enumerate(texts, 1)
    ),
  )
  if not run.rows:
    raise types.InputError(
      f"{path}: expected a run with a trained step, got {len(texts)} lines "
      "without any. Train it first, or name another."
    )
  return run


def check_distinct(folders: Sequence[str | os.PathLike[str]]) -> None:
  """Refuses a folder that is named twice, in whatever way.

  Raises:
    InputError: naming it.
  """
  seen: dict[pathlib.Path, str | os.PathLike[str]] = {}
  for folder in folders:
    path = pathlib.Path(folder).resolve()
    if path in seen:
      raise types.InputError(
        f"{folder}: expected folders of different runs, got that of "
        f"{seen[path]} once more. Name each run once."
      )
    seen[path] = folder


def joined(lines: Iterable[Row]) -> list[Row]:
  """Puts late evaluations where they belong.

  Args:
    lines: of metrics.jsonl, in order.

  Returns:
    The same, but what was evaluated beside training stands in the line of its
    step, and not in one of its own, if the step has one.
  """
  made: list[Row] = []
  places: dict[Any, int] = {}
  for line in lines:
    step = line.get("step")
    if step in places and "eval/version" in line:
      made[places[step]] = {**made[places[step]], **line}
    else:
      places[step] = len(made)
      made.append(line)
  return made


def _text(path: pathlib.Path, name: str) -> str:
  if not path.is_dir():
    raise types.InputError(
      f"{path}: expected the folder of a run, got none. Correct the name."
    )
  try:
    return (path / name).read_text(encoding="utf-8", errors="replace")
  except OSError as error:
    raise types.InputError(
      f"{path}: expected the folder of a run, got one without {name} "
      f"({error.strerror}). Name the folder of a run."
    ) from error


def _parsed(place: str | pathlib.Path, text: str) -> dict[str, Any]:
  try:
    found = json.loads(text)
  except json.JSONDecodeError as error:
    found = error.msg.lower()
  if not isinstance(found, dict):
    raise types.InputError(
      f"{place}: expected an object of JSON, got {found!s:.40}. Repair the "
      "file or name another run."
    )
  return found


def leaf(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
  """Returns a setting of a config.json by its dotted name."""
  node: Any = config
  for part in name.split("."):
    if not isinstance(node, Mapping) or part not in node:
      return default
    node = node[part]
  return node


def number(row: Row, name: str) -> float:
  """Returns a value of a line; NaN where it has none."""
  value = row.get(name)
  if isinstance(value, bool) or not isinstance(value, int | float):
    return math.nan
  return float(value) if math.isfinite(value) else math.nan


def column(rows: Sequence[Row], name: str) -> Float[np.ndarray, " N"]:
  """Returns a value of each line; NaN where one has none."""
  return np.array([number(row, name) for row in rows], float)


def mean(rows: Sequence[Row], name: str) -> float:
  """Returns the mean of a value over the lines that have it, or NaN."""
  values = column(rows, name)
  values = values[~np.isnan(values)]
  return float(values.mean()) if len(values) else math.nan


def added(totals: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
  """Returns what each step added to a sum since the first admission."""
  return np.diff(totals, prepend=0.0)


def restarted(rows: Sequence[Row]) -> Bool[np.ndarray, " N"]:
  """Says at which steps another process went on, as far as lines tell."""
  falls = np.zeros(len(rows), bool)
  for name in ("compile/seconds", "engine/decode_tokens", "engine/decode_s"):
    falls |= added(column(rows, name)) < 0.0
  return falls


def counted(rows: Sequence[Row]) -> Bool[np.ndarray, " N"]:
  """Says which steps count: the one rule for all that is said of a run.

  Args:
    rows: of trained steps, in order.

  Returns:
    False for a step in which a program was built, and for one without the line
    before it. False, while the pipeline fills, for the first `FIRST_STEPS` of
    each process, and for as many more as generation was ahead at most
    (`staleness/max`); and, as it drains, for as many and one at the end.
  """
  at = np.arange(len(rows))
  ahead = int(np.nanmax(column(rows, "staleness/max"), initial=0.0))
  since = at - np.maximum.accumulate(np.where(restarted(rows), at, 0))
  ok = (since >= FIRST_STEPS + ahead) & (at < len(rows) - 1 - ahead)
  ok &= added(column(rows, "step")) == 1.0
  ok &= added(column(rows, "time/seconds")) > 0.0
  for name in ("compile/count", "compile/seconds"):
    ok &= added(np.nan_to_num(column(rows, name))) == 0.0
  return ok
