"""Draws the reward curve of runs.

    python bench/curve.py RUN... --out FILE

A dot is the mean reward of a step's batch, the band its standard error over
groups, the line a mean over neighbouring steps, a diamond the reward on
held-out prompts. The ending of FILE, .svg or .png, chooses the format. Needs
matplotlib (extra `dev`).
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.figure
import numpy as np

from jaxrl_post.runtime import history, summary

# Of Okabe and Ito: colours that all readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Equal runs give equal files, with text as text.
_STYLE: Any = {"svg.hashsalt": "curve", "svg.fonttype": "none", "font.size": 10}


def series(
  rows: Sequence[history.Row], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Takes one metric out of the lines of a run.

  Returns:
    Steps that have the metric, and its values; NaN where the line has null.
  """
  found = [(row["step"], row[name]) for row in rows if name in row]
  steps = np.array([step for step, _ in found], float)
  values = [math.nan if value is None else value for _, value in found]
  return steps, np.array(values, float)


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
  """Averages every value with its neighbours.

  Args:
    values: of consecutive steps; NaN is left out.
    reach: neighbours to each side; fewer, but as many on both sides, at the
      ends.

  Returns:
    As many values. A straight line stays as it is, ends included.
  """
  out = np.full(len(values), math.nan)
  for i in range(len(values)):
    near = min(reach, i, len(values) - 1 - i)
    window = values[i - near : i + near + 1]
    if np.isfinite(window).any():
      out[i] = np.nanmean(window)
  return out


def draw(runs: Sequence[pathlib.Path], reach: int) -> matplotlib.figure.Figure:
  """Draws the curves of some runs into one picture.

  Raises:
    SystemExit: a folder holds no run, or one without a step.
  """
  figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
  axes = figure.add_subplot()
  for i, run in enumerate(runs):
    colour = _COLOURS[i % len(_COLOURS)]
    rows = _read(run)
    steps, mean = series(rows, "reward/mean")
    name = run.resolve().name if len(runs) > 1 else "training batches"
    axes.plot(steps, mean, ".", color=colour, alpha=0.5, markeredgewidth=0)
    axes.plot(steps, smooth(mean, reach), color=colour, lw=2, label=name)
    at, error = series(rows, "reward/standard_error")
    if len(at) == len(steps):
      low, high = mean - error, mean + error
      axes.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
    tests, score = series(rows, "eval/reward")
    if len(tests):
      label = "held-out prompts" if i == len(runs) - 1 else None
      look = {"mfc": "white", "mec": colour, "ls": "none", "zorder": 3}
      axes.plot(tests, score, "D", label=label, **look)
  axes.set_xlabel("step")
  axes.set_ylabel("mean reward")
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(axis="y", alpha=0.3)
  axes.margins(x=0.02)
  axes.legend(frameon=False, loc="best")
  return figure


def main(arguments: Sequence[str] | None = None) -> None:
  """Reads the command line and writes the picture."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN")
  parser.add_argument("--out", required=True, type=pathlib.Path)
  parser.add_argument(
    "--reach", type=int, default=2, help="neighbours averaged to each side"
  )
  chosen = parser.parse_args(arguments)
  with mpl.rc_context(_STYLE):
    figure = draw(chosen.runs, chosen.reach)
    # Without a date: drawing again changes nothing.
    fixed = {"Date": None} if chosen.out.suffix == ".svg" else None
    figure.savefig(chosen.out, dpi=150, metadata=fixed)


def _read(run: pathlib.Path) -> list[history.Row]:
  try:
    rows = summary.read(run)
  except OSError as error:
    sys.exit(f"{run}: expected a run folder, got none ({error.strerror}).")
  if not any("reward/mean" in row for row in rows):
    sys.exit(f"{run}: expected a run with a step, got none. Train it first.")
  return rows


if __name__ == "__main__":
  main()
