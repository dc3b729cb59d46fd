"""`--mode=report RUN [EARLIER]`: what a finished run says, and what to change.

Reads a run folder and writes `report.html` into it; the same in 30 lines for
the terminal. No device is started.
"""

import pathlib
import textwrap
from collections.abc import Sequence

from jaxrl_post import types
from jaxrl_post.runtime import diagnose, folder, history, log, page

FILE = "report.html"
LINES, COLUMNS = 30, 80


def report(folders: Sequence[pathlib.Path]) -> str:
  """Writes the page of a run.

  Args:
    folders: of the run; and, for two of the signs, of an earlier one.

  Returns:
    The diagnosis for a terminal: at most 30 lines of 80 columns.

  Raises:
    InputError: a folder has no run, or one without a trained step, or is
      named twice; or the page cannot be written.
  """
  history.check_distinct(folders)
  run, *others = [history.read(path) for path in folders]
  earlier = (others[0].rows, others[0].config) if others else None
  found = diagnose.diagnose(run.rows, run.config, earlier)
  text = page.html(run, found)
  target = run.path / FILE
  try:
    folder.write(target, text)
  except OSError as error:
    raise types.InputError(
      f"{target}: expected a file that can be written, got {error.strerror}. "
      "Copy the run to where you may write."
    ) from error
  return summary(run, found, target)


def summary(
  run: history.Run, found: diagnose.Diagnosis, target: pathlib.Path
) -> str:
  """Says a diagnosis in a terminal.

  Returns:
    At most `LINES` lines of at most `COLUMNS` columns; but a long path is not
    cut. Control characters are written out.
  """
  rows, window = run.rows, found.window
  lines = _wrap(page.about(rows, run.config, window))
  lines += [
    "",
    f"{'sign, of ' + window.span:<42}{'figure':>7}{'fires if':>10}",
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
  return log.visible("\n".join(lines))


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
