"""What each stage did and when, for Perfetto and chrome://tracing.

`trace.json` in the run folder is a JSON array of Chrome trace events, one a
line, written as things happen; the closing bracket is left out, as the format
allows, so that a run that was killed leaves a whole trace. Times are
microseconds since T = 0, the first admission. docs/metrics.md has the events.
"""

import functools
import json
import logging
import os
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_post.runtime import folder as folder_lib

FILE = "trace.json"
# About a million and a half events; what comes later is left out.
MAX_BYTES = 256 * 2**20
# Numbers of the lanes, by what they show; lane i beside one is _STRIDE n + i,
# with room for the rows of any engine.
_LANES = {"training": 1, "generation": 2, "rewards": 3, "profile": 4}
_STRIDE = 10**6
_BESIDE = {"generation": "slot", "rewards": "rewards"}
_FLUSH_S = 1.0
_TIMES = re.compile(r'"ts":([\d.]+)(?:,"dur":([\d.]+))?')

# One encoder for all: to make one takes longer than to write an event.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_quoted = functools.lru_cache(_encode)
_log = logging.getLogger(__name__)


class Event(NamedTuple):
  """Something that took time.

  Attributes:
    lane: a stage, or "rewards" or "profile".
    kind: what the seconds count as, without the reason of a wait.
    name: the finer word.
    begin: in seconds of T; likewise the next.
    end: not before `begin`.
    beside: which of the lanes beside the stage's own; 0 is its own.
    args: more about it, for who looks.
  """

  lane: str
  kind: str
  name: str
  begin: float
  end: float
  beside: int = 0
  args: Mapping[str, Any] | None = None


class Trace:
  """Appends events to a file; whoever calls holds a lock.

  A file that cannot be read or written ends the trace, with a warning, and not
  the run.

  Attributes:
    step: that training is at; in every event.
    slots: whether rows of the engine are to have lanes of their own.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    *,
    slots: bool = False,
  ) -> None:
    """Opens nothing before `start`.

    Args:
      folder: of the run.
      slots: see above.
    """
    self.step, self.slots = 0, slots
    self._path = pathlib.Path(folder) / FILE
    self._file: Any = None
    self._size = 0
    self._flushed = 0.0
    self._named: set[int] = set()

  def start(self, seconds: float) -> None:
    """Opens the file, and cuts off what happened later than T = `seconds`.

    What was under way then ends there: the seconds of the stages remain those
    of the clock that goes on.
    """
    kept = ""
    try:
      if seconds > 0 and self._path.exists():
        with self._path.open(encoding="utf-8", errors="replace") as file:
          kept = "".join(_before(line, seconds * 1e6) for line in file)
      folder_lib.write(self._path, kept or "[\n")
      self._file = self._path.open("a", encoding="utf-8")
    except OSError as error:
      self._fail(error)
    self._size = len(kept)
    if not kept:
      meta = {"ph": "M", "pid": 1, "tid": 0}
      self._write(
        {"name": "process_name", **meta, "args": {"name": "jaxrl_post"}}
      )
    for lane in ("training", "generation", "rewards"):
      self._lane(lane, 0)

  def add(self, event: Event) -> None:
    """Appends an event; before `start` and after `close` it does nothing."""
    if self._file is None:
      return
    begin = round(event.begin * 1e6, 1)
    # The end and not the length is rounded: neighbours then meet.
    length = round(round(event.end * 1e6, 1) - begin, 1)
    tid = self._lane(event.lane, event.beside)
    args = {"step": self.step, **event.args} if event.args else None
    more = _encode(args) if args else f'{{"step":{self.step}}}'
    # By hand, as it is a third of the time of an encoder.
    self._write_line(
      f'{{"name":{_quoted(event.name)},"cat":"{event.kind}","ph":"X",'
      f'"ts":{begin},"dur":{length},"pid":1,"tid":{tid},"args":{more}}},\n',
      begin,
    )

  def count(self, name: str, at: float, values: Mapping[str, float]) -> None:
    """Appends numbers that hold from T = `at` on."""
    if self._file is not None:
      event = {"name": name, "ph": "C", "ts": round(at * 1e6, 1), "pid": 1}
      self._write({**event, "tid": 0, "args": dict(values)})

  def close(self) -> None:
    """Closes the file, for good."""
    file, self._file = self._file, None
    if file is not None:
      try:
        file.close()
      except OSError as error:
        self._fail(error)

  def _lane(self, lane: str, beside: int) -> int:
    """Returns the number of a lane, which has its name from then on."""
    number = _LANES[lane]
    tid = number * _STRIDE + beside if beside else number
    if tid not in self._named:
      self._named.add(tid)
      name = f"{_BESIDE[lane]} {beside}" if beside else lane
      meta = {"ph": "M", "pid": 1, "tid": tid}
      self._write({"name": "thread_name", **meta, "args": {"name": name}})
      order = {"sort_index": number * _STRIDE + beside}
      self._write({"name": "thread_sort_index", **meta, "args": order})
    return tid

  def _write(self, event: Mapping[str, Any]) -> None:
    self._write_line(f"{_encode(event)},\n", event.get("ts", 0.0))

  def _write_line(self, line: str, at: float) -> None:
    if self._file is None:
      return
    self._size += len(line)
    full = self._size > MAX_BYTES
    if full:
      name = f"the trace ends here: {MAX_BYTES} bytes"
      last = {"name": name, "ph": "i", "s": "g", "ts": at}
      line = _encode({**last, "pid": 1, "tid": 0}) + ",\n"
    try:
      self._file.write(line)
      now = time.monotonic()
      if full or now - self._flushed > _FLUSH_S:
        self._file.flush()
        self._flushed = now
    except OSError as error:
      self._fail(error)
    if full:
      _log.warning("%s: full at %d bytes, and ends", self._path, MAX_BYTES)
      self.close()

  def _fail(self, error: OSError) -> None:
    self._file = None
    _log.warning("%s: the trace ends: %s", self._path, error)


def _before(line: str, end: float) -> str:
  """Returns what of a line happened before `end`, in microseconds."""
  if not line.endswith(",\n"):
    return line if line == "[\n" else ""  # Torn by a kill, or a bracket.
  times = _TIMES.search(line)
  if times is None:
    return line
  begin, length = float(times[1]), float(times[2] or 0)
  if begin >= end:
    return ""
  if begin + length <= end:
    return line
  cut = f'"ts":{times[1]},"dur":{round(end - begin, 1)}'
  return line[: times.start()] + cut + line[times.end() :]
