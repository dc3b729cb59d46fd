"""Where the seconds of each stage go.

A stage is always in one state: the span opened last and not yet closed, or in
none. Seconds in no span are nobody's, and show in `accounting/residual`.
Compilation hides inside spans; what JAX reports of it is moved from the span
that is open on the thread that compiled.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.monitoring

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
)
_WAITS = tuple(kind for kind in KINDS if kind.startswith("wait/"))
_OVERHEADS = ("sync", "compile", "checkpoint", "eval")

# Names of jax 0.10. The second also covers a hit in the persistent cache,
# which the third announces just before it, on the same thread.
_COMPILE_EVENTS = (
  "/jax/core/compile/jaxpr_trace_duration",
  "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
_BACKEND_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(eq=False, slots=True)
class _Span:
  stage: str
  kind: str
  seconds: float = 0.0  # charged to it so far, less what was compilation


@dataclasses.dataclass(eq=False, slots=True)
class _Thread:
  """What one thread is doing: its open spans and its compilations."""

  spans: list[_Span] = dataclasses.field(default_factory=list)
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
    self, stages: Iterable[str], now: Callable[[], float] = time.monotonic
  ) -> None:
    """Begins to listen for compilations; time counts from `start` on.

    Args:
      stages: their names.
      now: seconds on any scale that never goes back.
    """
    self.compilations = 0
    self.from_cache = 0
    self.compile_seconds = 0.0
    self._now = now
    self._lock = threading.Lock()
    self._threads: dict[int, _Thread] = {}
    self._open: dict[str, list[_Span]] = {stage: [] for stage in stages}
    self._totals: dict[str, dict[str, float]] = {
      stage: dict.fromkeys(KINDS, 0.0) for stage in self._open
    }
    self._start: float | None = None
    self._charged_to = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    jax.monitoring.register_event_listener(self._on_event)

  def start(self, past: Mapping[str, Any] | None = None) -> None:
    """Sets T = 0, the first time it is called: at the first admission.

    Spans that are open already count from now on.

    Args:
      past: `totals` of the processes that ran before this one; T goes on from
        theirs.
    """
    with self._lock:
      if self._start is None:
        self._charged_to = self._now()
        self._start = self._charged_to - (past["T"] if past else 0.0)
        for stage, kinds in (past["stages"] if past else {}).items():
          self._totals[stage].update(kinds)

  def totals(self) -> dict[str, Any]:
    """Returns `T` and, by stage and kind, seconds; what JSON can hold."""
    with self._lock:
      self._charge()
      wall = self._charged_to - self._start if self._start is not None else 0.0
      stages = {stage: dict(kinds) for stage, kinds in self._totals.items()}
    return {"T": wall, "stages": stages}

  @contextlib.contextmanager
  def span(self, stage: str, kind: str) -> Iterator[None]:
    """Puts a stage into a state for as long as the block runs.

    Args:
      stage: one of the clock's stages.
      kind: one of `KINDS`: what it does, or why its devices stand idle.

    Yields:
      Nothing. The stage's former span is suspended and then goes on: time is
      charged to the innermost span only.
    """
    if kind not in KINDS:
      raise ValueError(f"span: expected one of {KINDS}, got {kind!r}.")
    span = _Span(stage, kind)
    with self._lock:
      self._charge()
      self._open[stage].append(span)
      thread = self._here()
      thread.spans.append(span)
    try:
      yield
    finally:
      with self._lock:
        self._charge()
        thread.spans.remove(span)
        # Spans of two threads need not close in the order they opened.
        self._open[stage].remove(span)

  def snapshot(self) -> dict[str, float]:
    """Sums up the time since `start`; all zero before it.

    Returns:
      `T` in seconds; as fractions of it, for each stage, `idle/<stage>`,
      `idle/<stage>/<reason>`, `busy/<stage>` and
      `overhead/<stage>/{sync,compile,checkpoint,eval}`;
      `accounting/residual`, the largest fraction of a stage that was in no
      span; `compile/{count,from_cache,seconds}`, cumulative.
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
      metrics[f"idle/{stage}"] = sum(part[wait] for wait in _WAITS)
      for wait in _WAITS:
        metrics[f"idle/{stage}/{wait.removeprefix('wait/')}"] = part[wait]
      for kind in _OVERHEADS:
        metrics[f"overhead/{stage}/{kind}"] = part[kind]
      if wall > 0:
        residual = max(residual, 1.0 - sum(part.values()))
    metrics["accounting/residual"] = residual
    return metrics

  def close(self) -> None:
    """Stops listening for compilations. To be called once."""
    jax.monitoring.unregister_event_duration_listener(self._on_duration)
    jax.monitoring.unregister_event_listener(self._on_event)

  def _charge(self) -> None:
    """Charges each stage's time up to now to its innermost span."""
    if self._start is None:
      return
    now = self._now()
    for stage, spans in self._open.items():
      if spans:
        spans[-1].seconds += now - self._charged_to
        self._totals[stage][spans[-1].kind] += now - self._charged_to
    self._charged_to = now

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
        moved = min(new, span.seconds)
        span.seconds -= moved
        self._totals[span.stage][span.kind] -= moved
        self._totals[span.stage]["compile"] += moved


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
