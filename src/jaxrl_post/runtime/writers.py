"""The numbers of a run for dashboards: TensorBoard, W&B, Prometheus.

Each gets the names of `metrics.jsonl`, which is written whatever they do. A
run does not die for a dashboard: one that fails is warned of once, and how
many lines it missed is said at the end.
"""

import contextlib
import dataclasses
import importlib
import logging
import math
import os
import pathlib
import re
import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jaxrl_post import types

_HOST = "127.0.0.1"
# By writer, the extra of ours that brings it and what it imports.
_PACKAGES = {
  "tensorboard": (
    "tensorboard.summary.writer.event_file_writer",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
  ),
  "wandb": ("wandb",),
  "prometheus": ("prometheus_client", "prometheus_client.core"),
}
NAMES = ("tensorboard", "wandb")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Watch:
  """How one process of a run is looked at; no part of the run itself.

  Attributes:
    writers: of `NAMES`, who gets the metrics beside `metrics.jsonl`.
    prometheus_port: where to answer a Prometheus server on this machine; 0 is
      any free port, None answers nobody.
    profile: first and last step that `jax.profiler` captures; None for none.
    slots: whether the trace has a lane for each row of the engine.
    planned_s: seconds that a step was planned to take; None without a plan.
  """

  writers: tuple[str, ...] = ()
  prometheus_port: int | None = None
  profile: tuple[int, int] | None = None
  slots: bool = False
  planned_s: float | None = None

  def __post_init__(self) -> None:
    for name in self.writers:
      if name not in NAMES:
        raise types.InputError(
          f"--writers: expected some of {', '.join(NAMES)}, got {name!r}. "
          "Correct it."
        )
      _modules(name, "--writers")
    if self.prometheus_port is not None:
      _modules("prometheus", "--prometheus_port")

  def check(self, num_steps: int) -> None:
    """Refuses what a run cannot give.

    Args:
      num_steps: of the whole run.

    Raises:
      InputError: the capture begins after its last step, or the port is taken.
    """
    if self.prometheus_port:
      with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
          probe.bind((_HOST, self.prometheus_port))
        except OSError as error:
          raise _taken(self.prometheus_port, error) from error
    if self.profile is not None and self.profile[0] > num_steps:
      first, last = self.profile
      raise types.InputError(
        f"--profile_steps: expected a first step within num_steps={num_steps}, "
        f"got {first}:{last}. Name steps of the run."
      )


def steps(text: str) -> tuple[int, int]:
  """Reads N:M, the first and the last step of a capture.

  Raises:
    InputError: it is something else, or N is above M or below 1.
  """
  match = re.fullmatch(r"(\d+):(\d+)", text)
  if match is None or not 1 <= int(match[1]) <= int(match[2]):
    raise types.InputError(
      f"--profile_steps: expected FIRST:LAST with 1 <= FIRST <= LAST, got "
      f"{text!r}. For steps 3 and 4: 3:4."
    )
  return int(match[1]), int(match[2])


@runtime_checkable
class Writer(Protocol):
  """Takes the numbers of steps.

  Attributes:
    errors: what it may raise when it fails.
  """

  errors: tuple[type[BaseException], ...]

  def open(self) -> None:
    """Begins; called once, before all else."""
    ...

  def step(self, step: int, values: Mapping[str, float]) -> None:
    """Takes the finite numbers of one step, which may be an earlier one."""
    ...

  def close(self) -> None:
    """Writes what is left."""
    ...


class Writers:
  """All writers of a run, none of which can end it.

  Attributes:
    failures: steps that were not written, by writer.
    ports: where Prometheus is answered: one number, or none.
  """

  def __init__(
    self,
    watch: Watch,
    folder: str | os.PathLike[str],
    settings: Mapping[str, Any],
  ) -> None:
    """Opens them.

    Args:
      watch: which.
      folder: of the run; TensorBoard and W&B write into folders of it.
      settings: of the run, for W&B.

    Raises:
      InputError: the port is taken.
    """
    self.failures: dict[str, int] = {}
    self.ports: tuple[int, ...] = ()
    self._writers: dict[str, Writer] = {}
    path = pathlib.Path(folder)
    made: dict[str, Writer] = {}
    prometheus = None
    if watch.prometheus_port is not None:
      prometheus = _Prometheus(watch.prometheus_port, path.name)
      made["prometheus"] = prometheus
    if "tensorboard" in watch.writers:
      made["tensorboard"] = _TensorBoard(path)
    if "wandb" in watch.writers:
      made["wandb"] = _WandB(path, settings)
    with contextlib.ExitStack() as stack:
      for name, writer in made.items():
        try:
          writer.open()
        except writer.errors as error:
          _log.warning("%s: could not be opened: %s", name, error)
          self.failures[name] = 0
        else:
          stack.callback(writer.close)
          self._writers[name] = writer
      stack.pop_all()  # All are open, and `close` is for them.
    if prometheus is not None:
      self.ports = (prometheus.port,)

  def step(self, step: int, values: Mapping[str, float]) -> None:
    """Hands a line of metrics on; numbers that are not finite are left out."""
    finite = {k: float(v) for k, v in values.items() if math.isfinite(v)}
    for name in self.failures.keys() - self._writers.keys():
      self.failures[name] += 1  # It was never open.
    for name, writer in self._writers.items():
      try:
        writer.step(step, finite)
      except writer.errors as error:
        if name not in self.failures:
          _log.warning("%s: step %d was not written: %s", name, step, error)
        self.failures[name] = self.failures.get(name, 0) + 1

  def close(self) -> None:
    """Closes them, and says what they missed."""
    for name, writer in self._writers.items():
      try:
        writer.close()
      except writer.errors as error:
        _log.warning("%s: could not be closed: %s", name, error)
    for name, count in self.failures.items():
      _log.warning("%s: %d steps were not written", name, count)


class _TensorBoard:
  """Event files in `tensorboard/`, by the package tensorboard alone."""

  def __init__(self, folder: pathlib.Path) -> None:
    self._package, self._events, self._summaries = _modules(
      "tensorboard", "writers"
    )
    self.errors: tuple[type[BaseException], ...] = (OSError,)
    self._folder = folder / "tensorboard"
    self._begun = False

  def open(self) -> None:
    self._file = self._package.EventFileWriter(str(self._folder))

  def step(self, step: int, values: Mapping[str, float]) -> None:
    now = time.time()
    if not self._begun:  # What a killed run has shown from here on goes.
      start = self._events.SessionLog(status=self._events.SessionLog.START)
      self._file.add_event(
        self._events.Event(wall_time=now, step=step, session_log=start)
      )
      self._begun = True
    made = [
      self._summaries.Summary.Value(tag=name, simple_value=value)
      for name, value in values.items()
    ]
    summary = self._summaries.Summary(value=made)
    self._file.add_event(
      self._events.Event(wall_time=now, step=step, summary=summary)
    )
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class _WandB:
  """A run of W&B in `wandb/`, offline: `wandb sync` uploads it."""

  def __init__(self, folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
    (self._wandb,) = _modules("wandb", "writers")
    self.errors: tuple[type[BaseException], ...] = (OSError, self._wandb.Error)
    self._folder, self._settings, self._last = folder, settings, 0

  def open(self) -> None:
    self._run = self._wandb.init(
      mode="offline",
      project="jaxrl_post",
      name=self._folder.name,
      dir=str(self._folder),
      config=dict(self._settings),
    )

  def step(self, step: int, values: Mapping[str, float]) -> None:
    self._last = max(step, self._last)  # W&B drops what comes later.
    self._run.log(dict(values), step=self._last)

  def close(self) -> None:
    self._run.finish()


def _taken(port: int, error: OSError) -> types.InputError:
  return types.InputError(
    f"--prometheus_port: expected a free port, got {port} ({error.strerror}). "
    "Name another, or 0 for any."
  )


class _Prometheus:
  """Answers on this machine only, with the numbers of the last step."""

  def __init__(self, port: int, name: str) -> None:
    self._client, self._core = _modules("prometheus", "--prometheus_port")
    self.errors: tuple[type[BaseException], ...] = ()
    self.port, self._name = port, name
    self._values: Mapping[str, float] = {}

  def open(self) -> None:
    registry = self._client.CollectorRegistry()
    registry.register(self)
    try:
      self._server, self._thread = self._client.start_http_server(
        self.port, addr=_HOST, registry=registry
      )
    except OSError as error:
      raise _taken(self.port, error) from error
    self.port = int(self._server.server_port)

  def collect(self) -> list[Any]:
    """Returns the metrics, as the client asks for them."""
    # The resource, by OpenTelemetry's conventions and their Prometheus names.
    about = {"service_name": "jaxrl_post", "service_instance_id": self._name}
    core = self._core
    return [
      core.InfoMetricFamily("target", "The run.", value=about),
      *(
        core.GaugeMetricFamily(prometheus_name(key), key, value=value)
        for key, value in sorted(self._values.items())
      ),
    ]

  def step(self, step: int, values: Mapping[str, float]) -> None:
    if step <= self._values.get("step", -1.0):
      self._values = {**self._values, **values}  # Late, of an evaluation.
    else:
      self._values = {**values, "step": float(step)}

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


def prometheus_name(key: str) -> str:
  """Returns the Prometheus name of a metric: `sync/copy_s` is seconds."""
  name = re.sub(r"[^a-zA-Z0-9_]", "_", re.sub(r"_s$", "_seconds", key))
  return f"jaxrl_post_{name}"


def _modules(name: str, flag: str) -> tuple[Any, ...]:
  try:
    return tuple(importlib.import_module(x) for x in _PACKAGES[name])
  except ImportError as error:
    raise types.InputError(
      f"{flag}: expected what {name} needs to be installed, got: {error}. Run "
      f"pip install 'jaxrl_post[{name}]', or leave it out."
    ) from error
