"""What happened in a stream, in order: a file to read, and to follow again.

One JSON object a line: a ledger's event, or one of two more. `Take` and `Run`
say on which weights each block ran, so a run that does the same things in the
same order samples the same tokens and trains the same batches.
"""

import collections
import dataclasses
import json
import logging
import os
import pathlib
import typing

from jaxrl_post import types
from jaxrl_post.envs import ledger as ledgers


@dataclasses.dataclass(frozen=True)
class Begin:
  """The first event of a run.

  Attributes:
    digest: of all that decides what is sampled and trained.
  """

  digest: str


@dataclasses.dataclass(frozen=True)
class Take:
  """The engine has newer weights from now on.

  Attributes:
    version: of them, as `ledger.Ledger.version`.
  """

  version: int


@dataclasses.dataclass(frozen=True)
class Run:
  """The engine makes a block."""


@dataclasses.dataclass(frozen=True)
class Restore:
  """The run continues from a checkpoint; rollouts in the making go on.

  Attributes:
    step: batches trained.
  """

  step: int


# Of the file in a run folder.
NAME = "events.jsonl"

Event = ledgers.Event | Begin | Take | Run | Restore

_KINDS = {kind.__name__: kind for kind in typing.get_args(Event)}


class Log:
  """Appends events to a file; complete whenever the process is killed.

  Attributes:
    path: of the file.
    count: lines in it.
  """

  def __init__(self, path: str | os.PathLike[str], keep: int = 0) -> None:
    """Opens the file.

    Args:
      path: made if missing.
      keep: lines that stay; those after them belong to a run that was lost.
        If there are fewer whole lines, that is warned of.
    """
    self.path, self.count, end = pathlib.Path(path), 0, 0
    self.path.touch()
    with self.path.open("rb+") as file:
      while self.count < keep and file.readline().endswith(b"\n"):
        self.count, end = self.count + 1, file.tell()
      file.truncate(end)
    if self.count < keep:
      logging.warning(
        "%s: expected %d events, got %d; the rest is lost",
        self.path,
        keep,
        self.count,
      )
    # Line by line: a checkpoint counts lines that a kill must not take back.
    self._file = self.path.open("a", buffering=1, encoding="utf-8")

  def write(self, event: Event) -> None:
    """Appends an event."""
    line = {"event": type(event).__name__, **dataclasses.asdict(event)}
    self._file.write(f"{json.dumps(line)}\n")
    self.count += 1

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read(path: str | os.PathLike[str], digest: str) -> collections.deque[Event]:
  """Reads the events of a run of these settings, that ended by itself.

  Args:
    path: of a file that `Log` wrote.
    digest: of the run that will follow them.

  Returns:
    The events after `Begin`, in order. A last line that is torn is left out.

  Raises:
    InputError: there is no such file, it is of something else, of other
      settings, or of a run that was interrupted, whose rollouts were continued.
  """
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise types.InputError(
      f"stream.follow: expected the events.jsonl of a run, got {path} "
      f"({error}). Name the file."
    ) from error
  events: collections.deque[Event] = collections.deque()
  whole, _, _ = text.rpartition("\n")
  for number, line in enumerate(whole.splitlines(), 1):
    events.append(_parse(line, f"{path}, line {number}"))
  if not events:
    raise types.InputError(
      f"stream.follow: expected events in {path}, got none. Name the "
      "events.jsonl of a run that has trained a batch."
    )
  first = events.popleft()
  if first != Begin(digest):
    raise types.InputError(
      "stream.follow: expected events of a run with the settings and data of "
      f"this one, got others in {path}. Follow it with its own settings."
    )
  return events


def _parse(line: str, place: str) -> Event:
  try:
    fields = json.loads(line)
    kind = _KINDS[fields.pop("event")]
    if "uids" in fields:
      fields["uids"] = tuple(fields["uids"])
    event = kind(**fields)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise types.InputError(
      f"stream.follow: expected an event in {place}, got {line[:80]!r}. Name "
      "the events.jsonl of a run."
    ) from error
  if isinstance(event, Restore):
    raise types.InputError(
      "stream.follow: expected a run that was never interrupted, got a "
      f"restart after step {event.step} in {place}. Follow another run."
    )
  return event
