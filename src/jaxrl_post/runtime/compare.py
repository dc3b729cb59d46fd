"""Says whether a change worked: `--mode=compare A B` of two run folders."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxrl_post import types
from jaxrl_post.runtime import folder as folder_lib
from jaxrl_post.runtime import history, log, steps

RATE_MARGIN, RATE_CLEAR = 0.05, 0.2  # parts of the throughput of A
REWARD_MARGIN, REWARD_CLEAR = 0.1, 0.5  # standard deviations of a reward
LAG_TOLERATED, LAG_GROWTH = 4.0, 1.25  # versions; times the lag of A

# What two runs must share, with what is below, and what of it they need not.
_FIXED = {
  "model": ("chunk", "dtype", "remat"),
  "data": ("held_out", "epochs"),
  "rewards.functions": (),
  "rewards.weights": (),
  "rewards.model": ("devices", "tensor", "dtype", "batch"),
  "groups_per_step": (),
  "group_size": (),
  "sampling.max_tokens": (),
}
# And for their evaluations to be compared.
_TESTED = {
  "data.held_out": (),
  "evaluation": ("every", "timeout_s", "beside"),
}
_SHOWN_CHANGES = 8
_LABEL, _COLUMN = 26, 18


@types.host_record
class Verdict:
  """What became of a change.

  Attributes:
    name: worked, no difference, bad deal, slower, worse or undecided.
    reasons: a line each: throughput, reward, lag.
  """

  name: str
  reasons: tuple[str, ...]


# -------------------------------------------------------------------- judging


def check(runs: Sequence[history.Run]) -> None:
  """Refuses runs that cannot be compared with the first.

  Raises:
    InputError: the model, the training data, the reward functions or the shape
      of a batch is another; it names the setting.
  """
  first = runs[0]
  for run in runs[1:]:
    for name, here, there in _differing(first, run):
      # What an older run does not know of differs not; a reward model does.
      known = folder_lib.ABSENT not in (here, there)
      if _of(name, _FIXED) and (known or name.startswith("rewards.model.")):
        _refuse(name, (first, here), (run, there))
    here, there = _digest(first), _digest(run)
    if here and there and here != there:
      _refuse("digest of data.train", (first, here), (run, there))


def _digest(run: history.Run) -> str | None:
  """Returns the digest of the training data, if a checkpoint tells."""
  for meta in sorted((run.path / "checkpoints").glob("[0-9]*/meta.json")):
    try:
      return json.loads(meta.read_text(encoding="utf-8"))["data"]
    except (OSError, json.JSONDecodeError, KeyError):
      continue  # of a save that was cut off; another one says the same
  return None


def _refuse(
  name: str, one: tuple[history.Run, str], other: tuple[history.Run, str]
) -> None:
  raise types.InputError(
    f"--mode=compare: expected runs with one {name}, got {one[1]} in "
    f"{one[0].path} and {other[1]} in {other[0].path}. Compare runs of one "
    "model, data, rewards and batch shape."
  )


def _differing(a: history.Run, b: history.Run) -> list[tuple[str, str, str]]:
  """Returns name and both values of each setting that is not the same."""
  ours, theirs = (folder_lib.leaves(run.config) for run in (a, b))
  names, absent = sorted(ours.keys() | theirs.keys()), folder_lib.ABSENT
  both = [(x, ours.get(x, absent), theirs.get(x, absent)) for x in names]
  return [(name, here, there) for name, here, there in both if here != there]


def _of(name: str, prefixes: Mapping[str, Iterable[str]]) -> bool:
  """Says whether a setting is below one of these, and not excepted."""
  for prefix, but in prefixes.items():
    excepted = any(f"{name}.".startswith(f"{prefix}.{x}.") for x in but)
    if f"{name}.".startswith(f"{prefix}.") and not excepted:
      return True
  return False


def verdict(a: history.Run, b: history.Run) -> Verdict:
  """Judges the change from A to B.

  Throughput is rollouts consumed a device-hour. It rose or fell if its whole
  interval is beyond `RATE_MARGIN`. Otherwise it is the same if the interval is
  within `RATE_CLEAR`, and unclear if it is not. Likewise the reward at equal
  device-hours, with `REWARD_MARGIN` and `REWARD_CLEAR` times the standard
  deviation of a rollout's reward, the mean of both runs; without rewards it is
  the same.
  The lag is out of tolerance if the mean over trained tokens is above
  `LAG_TOLERATED` and above `LAG_GROWTH` times that of A.

  Returns:
    undecided: fewer steps count than an interval needs, or what would decide is
    unclear. worked: throughput rose, or the reward at the same throughput, and
    nothing else got worse. bad deal: throughput rose, with a lower reward or a
    lag out of tolerance. slower: throughput fell, the reward did not. worse:
    the reward fell, or the lag went out of tolerance, and throughput did not
    rise. no difference: throughput and reward are the same.
  """
  ours, theirs = steps.measure(a), steps.measure(b)
  speeds = [found["consumed a device-hour"] for found in (ours, theirs)]
  speed = _relative(*speeds)
  pace = _grade(speed, RATE_MARGIN, RATE_CLEAR)
  change = steps.reward_change(a, b)
  deviations = [history.mean(run.rows, "reward/std") for run in (a, b)]
  margin = REWARD_MARGIN * sum(deviations) / 2
  clear = REWARD_CLEAR / REWARD_MARGIN * margin
  score = _grade(change.interval, margin, clear)
  if all(
    np.isnan(history.column(run.rows, "reward/mean")).all() for run in (a, b)
  ):
    score = "same"
  lags = [found["mean lag, versions"].value for found in (ours, theirs)]
  limit = max(LAG_TOLERATED, LAG_GROWTH * float(np.nan_to_num(lags[0])))
  stale = lags[1] > limit
  before, after = (found.value for found in speeds)
  rise = after / before - 1.0 if before > 0 else math.nan
  lag = f"{lags[1]:.2f} after {lags[0]:.2f}"
  place = "out of" if stale else "within"
  known = not any(map(math.isnan, lags))
  reasons = (
    f"throughput: {pace}, {_span(rise, speed, '+.1%')}; margin "
    f"{RATE_MARGIN:.0%}",
    f"reward at equal device-hours: {score}, "
    f"{_span(change.value, change.interval, '+.3f')}; margin {margin:.3f}",
    f"mean lag: {place} tolerance, {lag}; limit {limit:.1f}"
    if known
    else "mean lag: not known",
  )
  few = min(int(history.counted(run.rows).sum()) for run in (a, b))
  if few < steps.LEAST_STEPS:
    short = f"steps that count: {few}, and {steps.LEAST_STEPS} are needed"
    return Verdict(name="undecided", reasons=(short, *reasons))
  return Verdict(name=_name(pace, score, stale=stale), reasons=reasons)


def _span(value: float, interval: tuple[float, float], form: str) -> str:
  if math.isnan(value):
    return "not known"
  if any(math.isnan(end) for end in interval):
    return f"{value:{form}} without an interval"
  return f"{value:{form}} ({interval[0]:{form}} to {interval[1]:{form}})"


def _name(pace: str, score: str, *, stale: bool) -> str:
  """Returns the verdict on two grades and a lag; `verdict` says the rules."""
  if pace == "fell":
    return "worse" if score == "fell" else "slower"
  if score == "fell" or stale:
    return {"rose": "bad deal", "unclear": "undecided"}.get(pace, "worse")
  if "unclear" in (pace, score):
    return "undecided"
  return "worked" if "rose" in (pace, score) else "no difference"


def _relative(a: steps.Estimate, b: steps.Estimate) -> tuple[float, float]:
  """Returns the interval of b / a - 1, by that of its logarithm."""
  if not (a.value > 0 and b.value > 0):
    return math.nan, math.nan
  error = math.hypot(a.error / a.value, b.error / b.value)
  middle = math.log(b.value / a.value)
  return math.expm1(middle - error), math.expm1(middle + error)


def _grade(interval: tuple[float, float], margin: float, clear: float) -> str:
  """Returns rose, fell, same or unclear."""
  low, high = interval
  if low > margin:
    return "rose"
  if high < -margin:
    return "fell"
  return "same" if low >= -clear and high <= clear else "unclear"


# --------------------------------------------------------------------- showing


def text(folders: Sequence[str | os.PathLike[str]]) -> str:
  """Compares run folders, each with the first.

  Args:
    folders: two or more.

  Returns:
    What the runs are, their figures side by side with 95 % intervals, a verdict
    on each but the first with its reasons, and what to know of them.

  Raises:
    InputError: a folder is no run, is named twice, or cannot be compared with
      the first.
  """
  history.check_distinct(folders)
  runs = [history.read(folder) for folder in folders]
  check(runs)
  letters = [chr(ord("A") + at) for at in range(len(runs))]
  lines = []
  for letter, run in zip(letters, runs, strict=True):
    count = (
      f"{len(run.rows)} steps, of which {history.counted(run.rows).sum()} count"
    )
    lines += [f"{letter}  {run.path}", f"   {count}; {_devices(run)}"]
    lines += _changes(runs[0], run) if run is not runs[0] else []
  lines += ["", _line("", letters)]
  lines += [_line(label, cells) for label, cells in _table(runs).items()]
  for letter, run in zip(letters[1:], runs[1:], strict=True):
    found = verdict(runs[0], run)
    lines += ["", f"{letter} against A: {found.name}"]
    lines += [f"  {reason}" for reason in found.reasons]
  return log.visible("\n".join([*lines, "", *_notes(runs, letters)]))


def _line(label: str, cells: Iterable[str]) -> str:
  return f"{label:{_LABEL}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)


def _devices(run: history.Run) -> str:
  found = {x for x in history.column(run.rows, "devices") if x > 0}
  number = " or ".join(f"{x:.0f}" for x in sorted(found))
  return f"devices: {number or 'unknown'}"


def _changes(a: history.Run, b: history.Run) -> list[str]:
  """Returns a line for each setting that is not that of A."""
  found = [
    f"   {name}: {_short(there)} after {_short(here)}"
    for name, here, there in _differing(a, b)
  ]
  more = len(found) - _SHOWN_CHANGES
  found[_SHOWN_CHANGES:] = [f"   and {more} more settings"] if more > 0 else []
  return found or ["   all settings are those of A"]


def _short(value: str) -> str:
  return value if len(value) <= 30 else f"{value[:27]}..."


def _table(runs: Sequence[history.Run]) -> dict[str, list[str]]:
  """Returns the cells of each line by its label."""
  found = [steps.measure(run) for run in runs]
  labels = {label: None for each in found for label in each}
  none = steps.Estimate(value=math.nan, error=math.nan)
  table = {
    label: [_show(each.get(label, none)) for each in found] for label in labels
  }
  most = [history.column(run.rows, "staleness/max") for run in runs]
  table["most lag, versions"] = [f"{np.nanmax(x, initial=0):.0f}" for x in most]
  at = [history.column(run.rows, "step") for run in runs]
  name = "throughput/trained_tokens_per_s"
  tokens = [
    np.nan_to_num(history.column(run.rows, name))
    * history.column(run.rows, "time/seconds")
    for run in runs
  ]
  held = [steps.held(run) for run in runs]
  for label, along in (
    ("reward at equal rollouts", at),
    ("reward at equal tokens", tokens),
    ("reward at equal device-h", held),
  ):
    least = min(each[-1] for each in along)
    table[label] = [
      _show(steps.reward(run, each <= least))
      for run, each in zip(runs, along, strict=True)
    ]
  everything = [
    _show(steps.reward(run, each > 0))
    for run, each in zip(runs, at, strict=True)
  ]
  table["reward at the end"] = everything
  if all(_same_tests(runs[0], run) for run in runs):
    table |= _tests(runs)
  return table


def _tests(runs: Sequence[history.Run]) -> dict[str, list[str]]:
  """Returns the lines of evaluations: the last common one, and the last."""
  name = "eval/reward"
  tests = [
    {
      int(line["step"]): history.number(line, name)
      for line in run.lines
      if not math.isnan(history.number(line, name))
    }
    for run in runs
  ]
  common = set.intersection(*map(set, tests))
  ends = [max(found, default=None) for found in tests]
  table = {}
  if common:
    step = max(common)
    label = f"held-out, step {step}"
    table[label] = [f"{found[step]:.4g}" for found in tests]
  if len(set(ends)) > 1:
    table["held-out, last"] = [
      "-" if end is None else f"{found[end]:.4g} (step {end})"
      for found, end in zip(tests, ends, strict=True)
    ]
  return table


def _show(found: steps.Estimate) -> str:
  if math.isnan(found.value):
    return "-"
  large = abs(found.value) >= 100
  value = f"{found.value:.0f}" if large else f"{found.value:.3g}"
  if math.isnan(found.error):
    return value
  return f"{value} ± " + (
    f"{found.error:.0f}" if large else f"{found.error:.2g}"
  )


def _same_tests(a: history.Run, b: history.Run) -> bool:
  return not any(_of(name, _TESTED) for name, *_ in _differing(a, b))


def _notes(runs: Sequence[history.Run], letters: Sequence[str]) -> list[str]:
  """Returns what a reader should know before believing the table."""
  first, notes = runs[0], []
  tells: tuple[tuple[Callable[[history.Run], bool], str], ...] = (
    (
      lambda run: _devices(run) != _devices(first),
      "other devices than A: rates are of a device-hour, seconds are not",
    ),
    (
      lambda run: not _same_tests(first, run),
      "other evaluations than A: those of no run are shown",
    ),
    (
      lambda run: _digest(run) is None,
      "no checkpoint: only settings say that its data are those of A",
    ),
    (
      lambda run: any(
        name in ("evaluation.every", "checkpoint.every")
        for name, *_ in _differing(first, run)
      ),
      "evaluates or saves at other steps than A, and that takes time",
    ),
  )
  for holds, note in tells:
    found = [x for x, run in zip(letters, runs, strict=True) if holds(run)]
    notes += [f"{', '.join(found)}: {note}"] if found else []
  for letter, run in zip(letters, runs, strict=True):
    count = int(history.restarted(run.rows).sum())
    notes += [f"{letter}: was continued {count} times or more"] if count else []
  return [
    *notes,
    "± is half of the 95 % interval over the steps of that run. What differs "
    "from run",
    "to run, such as a seed or a busy machine, is not in it.",
  ]
