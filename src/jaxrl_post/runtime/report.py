"""`--mode=report RUN [EARLIER]`: what a finished run says, and what to change.

Reads a run folder and writes `report.html` into it; the same in 30 lines for
the terminal. No device is started.
"""

import json
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.runtime import diagnose, folder, log, page, samples
from jaxrl_post.runtime import window as windows

FILE = "report.html"
LINES, COLUMNS = 30, 80


@types.host_record
class Run:
  """What is read of a run folder.

  Attributes:
    path: of the folder.
    rows: all lines of metrics.jsonl.
    config: config.json.
  """

  path: pathlib.Path
  rows: Sequence[windows.Row]
  config: Mapping[str, Any]


def report(folders: Sequence[pathlib.Path]) -> str:
  """Writes the page of a run.

  Args:
    folders: of the run; and, for two of the signs, of an earlier one.

  Returns:
    The diagnosis for a terminal: at most 30 lines of 80 columns.

  Raises:
    InputError: a folder has no run, or one without a trained step; or the
      page cannot be written.
  """
  run, *others = [read(path) for path in folders]
  earlier = None
  if others:
    earlier = windows.trained(others[0].rows), others[0].config
  rows = windows.trained(run.rows)
  found = diagnose.diagnose(rows, run.config, earlier)
  text = page.html(
    run.path.resolve().name,
    run.rows,
    run.config,
    found,
    timeline=samples.typical(run.path, rows, found.window.first),
    rollouts=samples.rollouts(run.path),
  )
  target = run.path / FILE
  try:
    folder.write(target, text)
  except OSError as error:
    raise types.InputError(
      f"{target}: expected a file that can be written, got {error.strerror}. "
      "Copy the run to where you may write."
    ) from error
  return summary(run, found, target)


def read(path: pathlib.Path) -> Run:
  """Reads a run folder; of a run that is under way, what is there.

  Returns:
    The run. A last line of metrics.jsonl without its end is left out.

  Raises:
    InputError: there is no run, its files are damaged, or no step was trained.
  """
  settings = _read(path, folder.CONFIG_FILE)
  lines = _read(path, log.METRICS_FILE).split("\n")[:-1]
  name = folder.CONFIG_FILE
  try:
    config = json.loads(settings)
    rows = []
    for number, line in enumerate(lines, 1):
      name = f"{log.METRICS_FILE}, line {number}"
      rows.append(json.loads(line))
  except json.JSONDecodeError as error:
    raise types.InputError(
      f"{path / name}: expected JSON, got {error.msg.lower()}. Repair the file "
      "or name another run."
    ) from error
  objects = [x for x in (config, *rows) if not isinstance(x, dict)]
  if objects or not windows.trained(rows):
    got = f"{objects[0]!r:.40}" if objects else f"{len(rows)} lines without any"
    raise types.InputError(
      f"{path}: expected a run with a trained step, got {got}. Train it first, "
      "or name another."
    )
  return Run(path=path, rows=rows, config=config)


def summary(run: Run, found: diagnose.Diagnosis, target: pathlib.Path) -> str:
  """Says a diagnosis in a terminal.

  Returns:
    At most `LINES` lines of at most `COLUMNS` columns; but a long path is not
    cut.
  """
  rows, window = windows.trained(run.rows), found.window
  lines = _wrap(page.about(rows, run.config, window))
  lines += [
    "",
    f"{'sign, of ' + page.span(window):<42}{'figure':>7}{'fires if':>10}",
  ]
  for i, sign in enumerate(found.signs, 1):
    figure = "-" if sign.figure is None else f"{sign.figure:.2f}"
    verdict = {True: "FIRES", False: "quiet", None: "not known"}[sign.fires]
    lines.append(
      f"{i} {sign.name:<40}{figure:>7}{sign.rule:>10}  {verdict}".rstrip()
    )
    lines += _wrap(sign.why, "    ", most=1)
  lines += ["", *_item("regime", f"{found.regime}: {found.because}")]
  for lever in found.levers[:1]:
    lines += _item("lever", lever.flags or f"no setting. {lever.why}")
    lines += _item("gain", f"up to {lever.gain:.2f} times: {lever.how}")
  for note in found.notes[:2]:
    lines += _item("note", note, most=1)
  lines.append("")
  for name, value, more in page.tiles(rows, window):
    lines.append(f"{name:<26}{value}, {more}"[:COLUMNS])
  lines.append(f"page: {target}")
  return "\n".join(lines)


def _item(name: str, text: str, most: int = 2) -> list[str]:
  first, *rest = _wrap(text, " " * 9, most)
  return [f"{name:<9}{first[9:]}", *rest]


def _wrap(text: str, indent: str = "", most: int = 2) -> list[str]:
  return textwrap.wrap(
    text,
    COLUMNS,
    initial_indent=indent,
    subsequent_indent=indent,
    max_lines=most,
    placeholder=" ...",
  )


def _read(path: pathlib.Path, name: str) -> str:
  try:
    return (path / name).read_text(encoding="utf-8", errors="replace")
  except OSError as error:
    raise types.InputError(
      f"{path}: expected the folder of a run, got one without {name} "
      f"({error.strerror}). Name the folder of a run."
    ) from error
