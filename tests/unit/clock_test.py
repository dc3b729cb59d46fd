import threading

import jax
import jax.experimental.compilation_cache.compilation_cache
import jax.monitoring
import jax.numpy as jnp
import pytest

from jaxrl_post.runtime import clock

TRACE = "/jax/core/compile/jaxpr_trace_duration"
LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILE = "/jax/core/compile/backend_compile_duration"
STAGES = ("generation", "training")


class Time:
  """Virtual seconds."""

  def __init__(self) -> None:
    self.at = 100.0

  def __call__(self) -> float:
    return self.at

  def passes(self, seconds: float) -> None:
    self.at += seconds


@pytest.fixture
def now():
  return Time()


@pytest.fixture
def clk(now):
  made = clock.Clock(STAGES, now)
  yield made
  made.close()


class Program:
  """A result that is there when the test says so."""

  def __init__(self) -> None:
    self.ended, self.looked = threading.Event(), threading.Event()

  def block_until_ready(self) -> None:
    self.looked.set()
    assert self.ended.wait(10)


def ends(clk: clock.Clock, stage: str, program: Program) -> None:
  """Ends a program, and waits until the clock knows."""
  program.ended.set()
  after = Program()
  after.ended.set()
  clk.launched(stage, "nothing", after)
  assert after.looked.wait(10)  # It is only looked at when the last one went.


def compiles(now: Time, seconds: float, event: str = COMPILE) -> None:
  now.passes(seconds)
  jax.monitoring.record_event_duration_secs(event, seconds, fun_name="f")


def test_each_second_goes_to_the_state_of_its_stage(clk, now):
  clk.start()
  with clk.span("generation", "busy"):
    now.passes(6)
  with clk.span("generation", "wait/queue_full"):
    now.passes(3)
  with clk.span("generation", "sync"):
    now.passes(1)
  got = clk.snapshot()
  assert got["T"] == 10
  assert got["busy/generation"] == 0.6
  assert got["idle/generation"] == got["idle/generation/queue_full"] == 0.3
  assert got["idle/generation/lag_gate"] == 0
  assert got["overhead/generation/sync"] == 0.1
  # Training was in no span at all.
  assert got["busy/training"] == got["idle/training"] == 0
  assert got["accounting/residual"] == 1


def test_idle_is_the_sum_of_its_reasons(clk, now):
  clk.start()
  waits = [kind for kind in clock.KINDS if kind.startswith("wait/")]
  assert len(waits) == 6
  for seconds, kind in enumerate(waits, 1):
    with clk.span("training", kind):
      now.passes(seconds)
  got = clk.snapshot()
  for seconds, kind in enumerate(waits, 1):
    assert got[f"idle/training/{kind[5:]}"] == seconds / 21
  assert got["idle/training"] == pytest.approx(1)


def test_an_inner_span_suspends_the_outer_one(clk, now):
  clk.start()
  with clk.span("training", "busy"):
    now.passes(2)
    with clk.span("training", "checkpoint"):
      now.passes(3)
      with clk.span("training", "wait/host"):
        now.passes(1)
      now.passes(1)
    now.passes(3)
  got = clk.snapshot()
  assert got["busy/training"] == 0.5
  assert got["overhead/training/checkpoint"] == 0.4
  assert got["idle/training/host"] == 0.1


def test_stages_do_not_suspend_each_other(clk, now):
  clk.start()
  waits = clk.span("training", "wait/queue_empty")
  with waits, clk.span("generation", "busy"):
    now.passes(4)
  got = clk.snapshot()
  assert got["idle/training"] == got["busy/generation"] == 1
  assert got["accounting/residual"] == 0


def test_seconds_in_no_span_are_the_residual_of_the_worst_stage(clk, now):
  clk.start()
  with clk.span("training", "busy"), clk.span("generation", "eval"):
    now.passes(6)
  with clk.span("training", "compile"):
    now.passes(2)
  now.passes(2)
  got = clk.snapshot()
  assert got["accounting/residual"] == pytest.approx(0.4)
  assert got["overhead/training/compile"] == 0.2
  assert got["overhead/generation/eval"] == 0.6


def test_seconds_of_the_outer_span_are_the_residual(clk, now):
  clk.start()
  with (
    clk.span("training", "other", "loop"),
    clk.span("generation", "wait/lag_gate"),
  ):
    now.passes(0.5)
    with clk.span("training", "wait/host", "pack"):
      now.passes(9)
    now.passes(0.25)
    with clk.span("training", "busy"):
      now.passes(10)
    now.passes(0.25)
    got = clk.snapshot()
  assert got["accounting/residual"] == pytest.approx(0.05)
  assert got["idle/training"] == got["idle/training/host"] == 0.45
  assert got["busy/training"] == 0.5


def test_a_snapshot_counts_spans_that_are_open(clk, now):
  clk.start()
  with clk.span("training", "busy"):
    now.passes(5)
    assert clk.snapshot()["busy/training"] == 1
    now.passes(5)
    assert clk.snapshot()["busy/training"] == 1
  assert clk.snapshot()["T"] == 10


def test_time_counts_from_the_first_start(clk, now):
  with clk.span("training", "busy"):
    now.passes(50)
    assert clk.snapshot()["T"] == clk.snapshot()["busy/training"] == 0
    clk.start()
    now.passes(2)
    clk.start()
    now.passes(2)
  assert clk.snapshot()["T"] == 4
  assert clk.snapshot()["busy/training"] == 1


def test_a_block_that_raises_ends_its_span(clk, now):
  clk.start()
  with pytest.raises(ZeroDivisionError), clk.span("training", "busy"):
    now.passes(1)
    raise ZeroDivisionError
  now.passes(1)
  assert clk.snapshot()["busy/training"] == 0.5


def test_spans_of_two_threads_may_close_in_any_order(clk, now):
  clk.start()
  opened, closed = threading.Event(), threading.Event()

  def publish():
    with clk.span("generation", "sync"):
      opened.set()
      assert closed.wait(10)

  with clk.span("generation", "wait/weights_pending"):
    now.passes(1)
    other = threading.Thread(target=publish)
    other.start()
    assert opened.wait(10)
    now.passes(2)  # the span opened last wins
  now.passes(3)
  closed.set()
  other.join(10)
  now.passes(4)
  got = clk.snapshot()
  assert got["idle/generation"] == 0.1
  assert got["overhead/generation/sync"] == 0.5


def test_an_unknown_state_is_refused(clk):
  refused = pytest.raises(ValueError, match="expected one of")
  with refused, clk.span("training", "wait/lunch"):
    pass


def test_compilation_is_taken_from_the_span_of_its_thread(clk, now):
  clk.start()
  with clk.span("training", "wait/host"), clk.span("generation", "busy"):
    now.passes(1)
    compiles(now, 0.5, TRACE)
    compiles(now, 0.5, LOWER)
    compiles(now, 2.0)
    now.passes(1)
  got = clk.snapshot()
  assert got["overhead/generation/compile"] == 0.6
  assert got["busy/generation"] == 0.4
  assert got["idle/training"] == 1  # the outer span of another stage
  assert got["compile/count"] == clk.compilations == 1
  assert got["compile/seconds"] == clk.compile_seconds == 3
  assert got["accounting/residual"] == pytest.approx(0)


def test_compilation_on_a_thread_without_a_span_is_only_counted(clk, now):
  clk.start()
  with clk.span("training", "busy"):
    other = threading.Thread(target=compiles, args=(now, 2.0))
    other.start()
    other.join(10)
  got = clk.snapshot()
  assert got["compile/count"] == 1 and got["compile/seconds"] == 2
  assert got["busy/training"] == 1
  assert got["overhead/training/compile"] == 0


def test_what_compiles_inside_a_trace_counts_once(clk, now):
  clk.start()
  with clk.span("training", "busy"):
    compiles(now, 1.0)  # on its own, before
    now.passes(1)
    begun = now.at
    now.passes(1)
    compiles(now, 0.5, TRACE)
    compiles(now, 1.5)
    now.passes(1)
    jax.monitoring.record_event_duration_secs(TRACE, now.at - begun)
    now.passes(4)
  got = clk.snapshot()
  assert got["T"] == 10
  assert got["overhead/training/compile"] == 0.5  # 1 + 4, not 1 + 2 + 4
  assert got["compile/seconds"] == 5
  assert got["compile/count"] == 2


def test_compilation_before_the_start_takes_nothing(clk, now):
  with clk.span("training", "busy"):
    now.passes(3)
    clk.start()
    now.passes(1)
    jax.monitoring.record_event_duration_secs(COMPILE, 3.5)
  got = clk.snapshot()
  assert got["overhead/training/compile"] == 1
  assert got["busy/training"] == 0


def test_a_hit_in_the_persistent_cache_is_counted_apart(clk, now):
  clk.start()
  with clk.span("training", "busy"):
    now.passes(1)
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    compiles(now, 1.0)
    compiles(now, 2.0)
  got = clk.snapshot()
  assert got["compile/count"] == 2
  assert got["compile/from_cache"] == 1
  assert got["overhead/training/compile"] == 0.75


def test_what_jax_reports_is_heard():
  x = jax.device_put(jnp.ones((3, 3)))
  step = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x) + 17)
  clk = clock.Clock(STAGES)
  clk.start()
  with clk.span("training", "busy"):
    before = clk.compilations
    step(x).block_until_ready()
    assert clk.compilations == before + 1
    step(x).block_until_ready()
    assert clk.compilations == before + 1
  got = clk.snapshot()
  assert 0 < got["overhead/training/compile"] < 1
  assert got["overhead/training/compile"] * got["T"] == pytest.approx(
    got["compile/seconds"]
  )
  clk.close()


def test_a_real_persistent_cache_hit_is_told_apart(tmp_path):
  names = {
    "jax_compilation_cache_dir": str(tmp_path),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  old = {name: getattr(jax.config, name) for name in names}
  for name, value in names.items():
    jax.config.update(name, value)
  jax.experimental.compilation_cache.compilation_cache.reset_cache()
  clk = clock.Clock(STAGES)
  x = jax.device_put(jnp.ones((5,)))
  step = jax.jit(lambda x: jnp.tanh(x) * 23)
  counts = []
  for _ in range(2):
    before = clk.compilations, clk.from_cache
    step(x).block_until_ready()
    counts.append((clk.compilations - before[0], clk.from_cache - before[1]))
    step.clear_cache()
  clk.close()
  for name, value in old.items():
    jax.config.update(name, value)
  jax.experimental.compilation_cache.compilation_cache.reset_cache()
  assert counts == [(1, 0), (1, 1)]


def test_a_closed_clock_hears_nothing_more(now):
  clk = clock.Clock(STAGES, now)
  clk.close()
  compiles(now, 1.0)
  assert clk.compilations == 0 and clk.compile_seconds == 0


def test_a_stage_is_busy_from_launch_to_end_whatever_its_thread_does(clk, now):
  clk.start()
  score, update = Program(), Program()
  with clk.span("training", "wait/host"):
    now.passes(1)
    clk.launched("training", "score", score)
    now.passes(1)
    clk.launched("training", "update", update)
    now.passes(1)
    score.ended.set()
    assert update.looked.wait(10)
    now.passes(1)
    ends(clk, "training", update)
    now.passes(5)  # Its thread sleeps, with nothing on the devices.
  got = clk.snapshot()
  assert got["busy/training"] == pytest.approx(3 / 9)
  assert got["idle/training/host"] == pytest.approx(6 / 9)
  assert got["busy/generation"] == 0


def test_a_program_whose_result_was_given_away_ends_with_the_next(clk, now):
  clk.start()
  x = jax.device_put(jnp.ones((3,)))
  x.delete()
  clk.launched("training", "gone", x)
  ends(clk, "training", Program())
  now.passes(1)
  with clk.span("training", "wait/host"):
    now.passes(1)
  assert clk.snapshot()["idle/training/host"] == 0.5


def test_compilation_takes_nothing_from_a_program_that_runs(clk, now):
  clk.start()
  score = Program()
  with clk.span("training", "wait/host"):
    now.passes(2)
    clk.launched("training", "score", score)
    compiles(now, 3)  # of the next one
    ends(clk, "training", score)
    compiles(now, 5)
  got = clk.snapshot()
  assert got["busy/training"] == 0.3
  assert got["overhead/training/compile"] == 0.5
  assert got["idle/training/host"] == 0.2


def test_what_the_watcher_meets_is_raised_by_the_next_launch(clk, now):
  clk.start()

  class Broken(Program):
    def block_until_ready(self) -> None:
      super().block_until_ready()
      raise ZeroDivisionError

  broken = Broken()
  clk.launched("training", "broken", broken)
  now.passes(1)
  ends(clk, "training", broken)
  with pytest.raises(ZeroDivisionError):
    clk.launched("training", "update", Program())
  # It watches on, and nothing is left on the devices.
  now.passes(1)
  update = Program()
  clk.launched("training", "update", update)
  now.passes(1)
  ends(clk, "training", update)
  now.passes(1)
  assert clk.snapshot()["busy/training"] == 0.5
