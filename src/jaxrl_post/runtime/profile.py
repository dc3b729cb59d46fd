"""A capture of `jax.profiler` over some steps of a run."""

import logging
import os
import pathlib
import time

import jax

from jaxrl_post.runtime import clock as clocks

FOLDER = "profile"

_log = logging.getLogger(__name__)


class Profile:
  """Captures from the beginning of one step to the end of another, once."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    steps: tuple[int, int] | None,
    clock: clocks.Clock,
  ) -> None:
    """Starts nothing.

    Args:
      folder: of the run; the capture goes into `profile/` of it.
      steps: the first and the last; None for none.
      clock: whose trace says where the capture is, beside its steps.
    """
    self._folder = pathlib.Path(folder)
    self._steps, self._clock = steps, clock
    self._begun: float | None = None

  def at_step(self, step: int) -> None:
    """Starts or ends the capture, if a step that begins now makes it due."""
    if self._steps is None:
      return
    first, last = self._steps
    if self._begun is None and first <= step <= last:
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0  # Each call of Python: of no use here.
      with self._clock.span("training", "wait/host", "profile"):
        jax.profiler.start_trace(
          self._folder / FOLDER, profiler_options=options
        )
      self._begun = time.monotonic()
    elif step > last:
      self.close()

  def close(self) -> None:
    """Ends a capture that goes on, and links it from the trace.

    If there was to be one and never was, it says so.
    """
    begun, steps = self._begun, self._steps
    self._begun = self._steps = None
    if begun is None:
      if steps is not None:
        _log.warning(
          "--profile_steps=%d:%d: nothing was captured, as this process began "
          "none of these steps",
          *steps,
        )
      return
    seconds = begun, time.monotonic()
    with self._clock.span("training", "wait/host", "profile"):
      jax.profiler.stop_trace()
    made = sorted((self._folder / FOLDER).glob("plugins/profile/*"))
    args = {
      "steps": steps,
      "folder": str(made[-1].relative_to(self._folder)) if made else FOLDER,
    }
    self._clock.note("profile", "jax.profiler", seconds, 0, args)
