"""Where the seconds of each stage go.

A stage is always in one state: that of the oldest program which its devices
have not ended, else the span opened last and not yet closed, else none. Seconds
in none, or in a span of kind "other", are nobody's, and show in
`accounting/residual`. When a program ends, a thread sees that waits for its
result: whoever launched it may do other things, or sleep, and neither makes a
stage look busy. Compilation hides inside spans; what JAX reports of it is moved
from the span that is open on the thread that compiled.
"""

import collections
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from jaxrl_post import types
from jaxrl_post.runtime import trace as traces

KINDS = (
  "busy",
  "sync",
  "compile",
  "checkpoint",
  "eval",
  "wait/queue_empty",
  "wait/queue_full",
  "wait/lag_gate",
  "wait/reward_pending",
  "wait/weights_pending",
  "wait/host",
  "other",  # Around all others: what none of them explains.
)
WAITS = tuple(kind for kind in KINDS if kind.startswith("wait/"))
OVERHEADS = ("sync", "compile", "checkpoint", "eval")
# Above this `accounting/residual` a run's own numbers are not to be trusted.
TRUSTED = 0.01
# Longest wait, in seconds, for a program that is under way when a run ends.
_GRACE_S = 1.0

# Names of jax 0.10. The second also covers a hit in the persistent cache,
# which the third announces just before it, on the same thread.
_COMPILE_EVENTS = (
  "/jax/core/compile/jaxpr_trace_duration",
  "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
_BACKEND_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(eq=False, slots=True)
class _State:
  """A span, or a program."""

  stage: str
  kind: str
  name: str
  step: int | None = None  # of its launch: its end may be seen in the next one


@dataclasses.dataclass(slots=True)
class _Part:
  """Seconds of T that one state had a stage for, or compilation in it."""

  kind: str
  begin: float
  end: float


@dataclasses.dataclass(eq=False, slots=True)
class _Stage:
  """What a stage is doing, and has done."""

  totals: dict[str, float]
  spans: list[_State] = dataclasses.field(default_factory=list)
  programs: collections.deque[_State] = dataclasses.field(
    default_factory=collections.deque
  )
  # Who has had it since the last change, and for which seconds.
  owner: _State | None = None
  parts: list[_Part] = dataclasses.field(default_factory=list)
  launched: "queue.SimpleQueue[tuple[_State, Any] | None]" = dataclasses.field(
    default_factory=queue.SimpleQueue
  )
  watcher: threading.Thread | None = None
  failure: BaseException | None = None  # Of the watcher.


@dataclasses.dataclass(eq=False, slots=True)
class _Thread:
  """What one thread is doing: its open spans and its compilations."""

  spans: list[_State] = dataclasses.field(default_factory=list)
  compiled: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  cache_hit: bool = False


class Clock:
  """Accounts for every second of each stage; spans may come from any thread.

  Attributes:
    compilations: programs built in this process since the clock was made; a
      step that builds one after its first calls was compiled again.
    from_cache: those of them that the persistent cache had.
    compile_seconds: time spent on tracing, lowering and compiling them.
  """

  def __init__(
    self,
    stages: Iterable[str],
    now: Callable[[], float] = time.monotonic,
    trace: traces.Trace | None = None,
  ) -> None:
    """Begins to listen for compilations; time counts from `start` on.

    Args:
      stages: their names.
      now: seconds on any scale that never goes back.
      trace: takes all that is accounted for, event by event; None for nobody.
    """
    self.compilations = 0
    self.from_cache = 0
    self.compile_seconds = 0.0
    self._now, self._trace = now, trace
    self._lock = threading.Lock()
    self._threads: dict[int, _Thread] = {}
    self._stages = {
      stage: _Stage(dict.fromkeys(KINDS, 0.0)) for stage in stages
    }
    self._start: float | None = None
    self._charged_to = 0.0
    self._calls: set[int] = set()  # Lanes of rewards that are taken.
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    jax.monitoring.register_event_listener(self._on_event)

  def start(self, past: Mapping[str, Any] | None = None) -> None:
    """Sets T = 0, the first time it is called: at the first admission.

    Spans that are open already count from now on.

    Args:
      past: `totals` of the processes that ran before this one; T goes on from
        theirs, and so does the trace.
    """
    with self._lock:
      if self._start is not None:
        return
      begun = past["T"] if past else 0.0
      if self._trace is not None:
        self._trace.start(begun)
      self._charged_to = self._now()
      self._start = self._charged_to - begun
      for stage, kinds in (past["stages"] if past else {}).items():
        self._stages[stage].totals.update(kinds)

  def totals(self) -> dict[str, Any]:
    """Returns `T` and, by stage and kind, seconds; what JSON can hold."""
    with self._lock:
      self._charge()
      wall = self._charged_to - self._start if self._start is not None else 0.0
      stages = {n: dict(stage.totals) for n, stage in self._stages.items()}
    return {"T": wall, "stages": stages}

  @contextlib.contextmanager
  def span(self, stage: str, kind: str, name: str = "") -> Iterator[None]:
    """Puts a stage into a state for as long as the block runs.

    Args:
      stage: one of the clock's stages.
      kind: one of `KINDS`: what it does, or why its devices stand idle.
      name: of what it does, for the trace; "" is the kind, or its reason.

    Yields:
      Nothing. The stage's former span is suspended and then goes on: time is
      charged to the innermost span only, and while one of the stage's programs
      runs to none.
    """
    if kind not in KINDS:
      raise ValueError(f"span: expected one of {KINDS}, got {kind!r}.")
    span = _State(stage, kind, name or kind.rpartition("/")[2])
    spans = self._stages[stage].spans
    with self._lock:
      self._charge()
      spans.append(span)
      thread = self._here()
      thread.spans.append(span)
    try:
      yield
    finally:
      with self._lock:
        self._charge()
        thread.spans.remove(span)
        # Spans of two threads need not close in the order they opened.
        spans.remove(span)

  def launched(self, stage: str, name: str, result: Any) -> None:
    """Counts a stage as busy until a program has ended.

    Args:
      stage: whose devices run it, after what they were given before.
      name: of the program, for the trace.
      result: some of what it returns; of no use to whoever frees it, as it is
        held until then.

    Raises:
      BaseException: whatever waiting for an earlier program of the stage
        raised, but for that a result is gone or that the program failed.
    """
    step = None if self._trace is None else self._trace.step
    made, program = self._stages[stage], _State(stage, "busy", name, step)
    with self._lock:
      failure, made.failure = made.failure, None
      if failure is not None:
        raise failure
      self._charge()
      made.programs.append(program)
      if made.watcher is None:
        made.watcher = threading.Thread(
          target=self._watch, args=(made,), name=f"{stage} clock", daemon=True
        )
        made.watcher.start()
    made.launched.put((program, result))

  def calls(self, name: str, count: int) -> Callable[[object], None]:
    """Follows calls that are answered in other processes, for the trace.

    Args:
      name: of the calls.
      count: how many were made just now.

    Returns:
      What is to be called at the end of each of them, from any thread.
    """
    with self._lock:
      # Read as T at the end: what a checkpoint left is sent before T goes on.
      since, left = self._now(), count
      lane = next(
        i for i in range(len(self._calls) + 1) if i not in self._calls
      )
      if count:
        self._calls.add(lane)

    def done(_: object) -> None:
      nonlocal left
      with self._lock:
        left -= 1
        if not left:
          self._calls.discard(lane)
          begin, end = self._at(since), self._at(self._now())
          args = {"calls": count}
          self._write(
            traces.Event("rewards", "busy", name, begin, end, lane, args)
          )

    return done

  def note(
    self,
    stage: str,
    name: str,
    seconds: tuple[float, float],
    beside: int,
    args: Mapping[str, Any] | None = None,
  ) -> None:
    """Puts an event into the trace that counts as nothing.

    Args:
      stage: or another lane of the trace.
      name: of the event.
      seconds: from when to when, as `now` of the clock tells.
      beside: which of the lanes beside the stage's own; 0 is its own.
      args: more about it.
    """
    with self._lock:
      begin, end = map(self._at, seconds)
      self._write(traces.Event(stage, "note", name, begin, end, beside, args))

  def seats(self, seats: Iterable[types.Seat]) -> None:
    """Puts completions into lanes of their rows, if the trace is to have them.

    Args:
      seats: that ended just now.
    """
    if self._trace is None or not self._trace.slots:
      return
    for row, uid, begin, tokens in seats:
      # Words of OpenTelemetry's conventions for generative models.
      args = {"uid": uid, "gen_ai.usage.output_tokens": tokens}
      seconds = (begin, self._now())
      self.note("generation", f"rollout {uid}", seconds, row + 1, args)

  def count(self, values: Callable[[], Mapping[str, float]]) -> None:
    """Puts the lengths of the queue, as they are now, into a trace, if any.

    Args:
      values: counts them, by name; only called for a trace.
    """
    if self._trace is None:
      return
    made = values()
    with self._lock:
      if self._trace is not None:
        self._trace.count("queue", self._at(self._now()), made)

  def at_step(self, step: int) -> None:
    """Marks what comes in the trace as of a step of training."""
    if self._trace is not None:
      self._trace.step = step

  def snapshot(self) -> dict[str, float]:
    """Sums up the time since `start`; all zero before it.

    Returns:
      `T` in seconds; as fractions of it, for each stage, `idle/<stage>`,
      `idle/<stage>/<reason>`, `busy/<stage>` and
      `overhead/<stage>/{sync,compile,checkpoint,eval}`;
      `accounting/residual`, the largest fraction of a stage that was in no
      span or in one of kind "other"; `compile/{count,from_cache,seconds}`,
      cumulative.
    """
    past = self.totals()
    wall, totals = past["T"], past["stages"]
    with self._lock:
      metrics = {
        "T": wall,
        "compile/count": float(self.compilations),
        "compile/from_cache": float(self.from_cache),
        "compile/seconds": self.compile_seconds,
      }
    residual = 0.0
    for stage, seconds in totals.items():
      part = {k: s / wall if wall > 0 else 0.0 for k, s in seconds.items()}
      metrics[f"busy/{stage}"] = part["busy"]
      metrics[f"idle/{stage}"] = sum(part[wait] for wait in WAITS)
      for wait in WAITS:
        metrics[f"idle/{stage}/{wait.removeprefix('wait/')}"] = part[wait]
      for kind in OVERHEADS:
        metrics[f"overhead/{stage}/{kind}"] = part[kind]
      if wall > 0:
        explained = sum(part[kind] for kind in KINDS if kind != "other")
        residual = max(residual, 1.0 - explained)
    metrics["accounting/residual"] = residual
    return metrics

  def close(self) -> None:
    """Stops listening, and ends the trace. To be called once."""
    jax.monitoring.unregister_event_duration_listener(self._on_duration)
    jax.monitoring.unregister_event_listener(self._on_event)
    for stage in self._stages.values():
      if stage.watcher is not None:
        stage.launched.put(None)
        stage.watcher.join(_GRACE_S)
    with self._lock:
      self._charge()
      for stage in self._stages.values():
        self._hand_over(stage, None)
      if self._trace is not None:
        self._trace.close()
        self._trace = None

  def _watch(self, stage: _Stage) -> None:
    """Waits for the programs of a stage, one after the other."""
    while (item := stage.launched.get()) is not None:
      program, result = item
      failure = None
      try:
        # A result that is gone was given to a later program, which comes next;
        # of one that failed, whoever reads it hears.
        with contextlib.suppress(RuntimeError):
          jax.block_until_ready(result)
      except BaseException as error:  # For the next launch to raise.
        failure = error
      del item, result  # Nothing is kept alive by looking at it.
      with self._lock:
        self._charge()
        stage.programs.remove(program)
        stage.failure = failure or stage.failure

  def _charge(self) -> None:
    """Charges each stage's time up to now to the state that it is in."""
    if self._start is None:
      return
    now = self._now()
    begin, end = self._at(self._charged_to), self._at(now)
    for stage in self._stages.values():
      owner = None
      if stage.programs:
        owner = stage.programs[0]
      elif stage.spans:
        owner = stage.spans[-1]
      if owner is not stage.owner:
        self._hand_over(stage, owner)
      if owner is None or now == self._charged_to:
        continue
      stage.totals[owner.kind] += now - self._charged_to
      if stage.parts and stage.parts[-1].kind == owner.kind:
        stage.parts[-1].end = end
      else:
        stage.parts.append(_Part(owner.kind, begin, end))
    self._charged_to = now

  def _hand_over(self, stage: _Stage, owner: _State | None) -> None:
    """Writes what the last owner had a stage for, and gives it to another."""
    was, stage.owner = stage.owner, owner
    parts, stage.parts = stage.parts, []
    if was is None:
      return
    for part in parts:
      kind = part.kind.partition("/")[0]
      name = was.name if part.kind == was.kind else part.kind
      args = None if was.step is None else {"step": was.step}
      self._write(
        traces.Event(was.stage, kind, name, part.begin, part.end, args=args)
      )

  def _write(self, event: traces.Event) -> None:
    if self._trace is not None:
      self._trace.add(event)

  def _at(self, now: float) -> float:
    """Returns T; 0 before the start."""
    return 0.0 if self._start is None else max(0.0, now - self._start)

  def _here(self) -> _Thread:
    return self._threads.setdefault(threading.get_ident(), _Thread())

  def _on_event(self, event: str, **kwargs: str | int) -> None:
    if event == _CACHE_HIT_EVENT:
      with self._lock:
        self._here().cache_hit = True

  def _on_duration(
    self, event: str, duration_secs: float, **kwargs: str | int
  ) -> None:
    if event not in _COMPILE_EVENTS and event != _BACKEND_EVENT:
      return
    with self._lock:
      self._charge()
      thread = self._here()
      new = _not_yet_seen(thread.compiled, self._now(), duration_secs)
      self.compile_seconds += new
      if event == _BACKEND_EVENT:
        self.compilations += 1
        self.from_cache += thread.cache_hit
        thread.cache_hit = False
      if thread.spans:
        span = thread.spans[-1]
        stage = self._stages[span.stage]
        # While a program runs, devices do not wait for the compiler.
        if stage.owner is span and span.kind != "compile":
          moved = _compiled(stage.parts, new)
          stage.totals[span.kind] -= moved
          stage.totals["compile"] += moved


def _compiled(parts: list[_Part], seconds: float) -> float:
  """Makes the last seconds of a span compilation, as far as it has them.

  Returns:
    How many were not compilation before.
  """
  moved = 0.0
  begin = end = parts[-1].end if parts else 0.0
  while parts and (moved < seconds or parts[-1].kind == "compile"):
    part = parts.pop()
    begin = part.begin
    if part.kind != "compile":
      taken = min(part.end - part.begin, seconds - moved)
      moved += taken
      if part.begin < part.end - taken:
        begin = part.end - taken
        parts.append(_Part(part.kind, part.begin, begin))
        break
  if begin < end:
    parts.append(_Part("compile", begin, end))
  return moved


def _not_yet_seen(
  seen: list[tuple[float, float]], end: float, seconds: float
) -> float:
  """Adds an interval to `seen`; returns its length less what it contains.

  A trace contains the compilations of what it evaluates on the way, and JAX
  reports those first.
  """
  start = end - seconds
  inside = 0.0
  # Middles, as the reports come a little later than what they report.
  while seen and (seen[-1][0] + seen[-1][1]) / 2 >= start:
    first, last = seen.pop()
    inside += last - first
  seen.append((start, end))
  return max(0.0, seconds - inside)
