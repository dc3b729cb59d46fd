"""Evaluation beside training: weights of one version, an end to every wait.

The engines are those of `streams`: tokens depend on uid, place and weights
alone, so what an evaluation has to answer is known. One of version v does not
end before v + 1 is published, so every one of them has weights come meanwhile.
"""

import contextlib
import dataclasses
import json
import logging
import threading
import time

import pytest

from jaxrl_post import loop, prepare, record, types
from jaxrl_post.envs import beside
from jaxrl_post.runtime import clock as clocks
from jaxrl_post.runtime import history, log, writers
from tests.e2e import runs
from tests.unit import streams

ASKED = [
  types.Request(prompt=(1,), uids=(u,), sampling=types.SamplingParams())
  for u in range(900, 904)
]
# Settings of a run that may evaluate beside training.
SPLIT = (
  "placement.mode=split",
  "placement.training.fsdp=1",
  "max_lag=1",
  "evaluation.beside.blocks=1",
)


class Examinee(streams.Engine):
  """Ends nothing, and goes on to be busy, before it may."""

  def __init__(self, may_end=lambda: True) -> None:
    super().__init__(rows=2, length=lambda uid: 20)
    self.may_end = may_end

  def step(self, params, version, _=None):
    return super().step(params, version) if self.may_end() else []


def alone(policy: types.Policy) -> list[types.Completion]:
  """What an evaluation gets for which training waits."""
  engine, done = Examinee(), {}
  for request in ASKED:
    engine.add(request)
  while engine.busy:
    made = engine.step(policy.params, policy.version)
    done |= {completion.uid: completion for completion in made}
  return [done[request.uids[0]] for request in ASKED]


@dataclasses.dataclass
class Trained:
  """What a run has trained, evaluated and written, each in order."""

  batches: list = dataclasses.field(default_factory=list)
  policies: list = dataclasses.field(default_factory=list)
  answers: dict = dataclasses.field(default_factory=dict)
  lines: list = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def opened(
  lane, score, lines, *, due=lambda step: True, stop=lambda: False, patience=20
):
  clock = clocks.Clock(("generation", "training"))
  tests = beside.Tests(
    lane,
    score,
    due=due,
    log=lambda step, values: lines.append(("evaluated", step)),
    clock=clock,
    stopping=stop,
    patience_s=patience,
  )
  try:
    yield tests
  finally:
    tests.close()
    clock.close()


def trained(folder, setup: streams.Setup, *, blocks: int = 0) -> Trained:
  """Trains as the loop does; with blocks evaluates every second step."""
  folder.mkdir()
  made, policy = Trained(policies=[streams.FIRST]), streams.FIRST

  def tester(policy: types.Policy) -> Examinee:
    last = policy.step == streams.STEPS
    return Examinee(lambda: last or made.policies[-1].step > policy.step)

  lane = beside.Lane(tester, blocks=blocks or 1, stall_s=streams.LATE_S)

  def score(policy, ends) -> dict[str, float]:
    made.answers[policy.step] = lane.sample(policy, ASKED)
    return {"eval/version": float(policy.version)}

  def due(step: int) -> bool:
    return blocks > 0 and step % 2 == 0

  with opened(lane, score, made.lines, due=due) as tests:
    tests(policy, 0)
    with setup.opened(folder, lane=lane) as rollouts:
      while policy.step < streams.STEPS:
        made.batches.append(rollouts.next())
        policy = setup.updated(policy, made.batches[-1])
        rollouts.publish(policy, time.monotonic())
        made.policies.append(policy)
        tests(policy, policy.step)
        made.lines.append(("trained", policy.step))
      tests.finish()
  return made


@pytest.mark.parametrize(
  ("setup", "blocks"),
  [
    (streams.Setup(max_lag=1), 1),
    (streams.Setup(max_lag=2, in_flight="drain"), 3),
    (streams.Setup(max_lag=1, fixed=True, in_flight="recompute"), 1),
  ],
)
def test_an_evaluation_has_the_weights_of_its_version_while_others_come(
  tmp_path, setup, blocks
):
  made = trained(tmp_path / "beside", setup, blocks=blocks)
  assert sorted(made.answers) == [0, 2, 4, 6]
  for step, answers in made.answers.items():
    assert answers == alone(made.policies[step])
    assert {v for a in answers for v in a.versions} == {step}
  # The bound on the lag holds all the same.
  for step, groups in enumerate(made.batches):
    rollouts = [r for group in groups for r in group.rollouts]
    oldest = min(min(r.completion.versions) for r in rollouts)
    assert step - oldest <= setup.max_lag
  # After the line of its step, and before that of the next evaluated one.
  at = {line: place for place, line in enumerate(made.lines)}
  assert [s for what, s in made.lines if what == "evaluated"] == [0, 2, 4, 6]
  for step in (2, 4):
    assert at["trained", step] < at["evaluated", step]
    assert at["evaluated", step] < at["trained", step + 2]
  assert made.lines[-1] == ("evaluated", 6)
  if setup.fixed:  # What is trained is none of its business.
    without = trained(tmp_path / "without", setup)
    assert streams.repeated(made.batches, without.batches)


def test_a_run_that_is_to_stop_abandons_it_and_logs_nothing(caplog):
  stop, lines = threading.Event(), []
  lane = beside.Lane(lambda policy: Examinee())
  began = threading.Event()

  def score(policy, ends):
    began.set()
    lane.sample(policy, ASKED)  # Nobody makes a block.
    return {"eval/version": 0.0}

  with (
    caplog.at_level(logging.WARNING),
    opened(lane, score, lines, stop=stop.is_set) as tests,
  ):
    assert tests(streams.FIRST, 3) == {}
    assert began.wait(streams.LATE_S)
    stop.set()
    begun = time.monotonic()
    tests.finish()
    assert time.monotonic() - begun < 5
    tests(streams.FIRST, 4)  # A checkpoint is worth more than a number.
    assert not any(t.name == "evaluation" for t in threading.enumerate())
  assert lines == []
  assert "evaluation of step 3: abandoned" in caplog.text


def test_what_an_evaluation_raises_ends_the_run():
  def score(policy, ends):
    raise types.RunError("boom")

  with opened(beside.Lane(), score, []) as tests:
    tests(streams.FIRST, 1)
    with pytest.raises(types.RunError, match="boom"):
      tests.finish()


def test_what_it_raises_as_the_run_is_to_stop_is_not_the_runs_fault(caplog):
  stop, lines = threading.Event(), []

  def score(policy, ends):
    assert stop.wait(streams.LATE_S)
    raise types.RunError("the signal ended the reward workers, too")

  with (
    caplog.at_level(logging.WARNING),
    opened(beside.Lane(), score, lines, stop=stop.is_set) as tests,
  ):
    tests(streams.FIRST, 2)
    stop.set()
    assert tests._thread is not None
    tests._thread.join(streams.LATE_S)
    tests.finish()
  assert lines == []
  assert "evaluation of step 2: abandoned" in caplog.text


def test_an_environment_that_hangs_before_any_block_ends_the_run():
  hangs = threading.Event()
  with opened(beside.Lane(), lambda p, _: hangs.wait(), [], patience=0.1) as it:
    it(streams.FIRST, 2)
    with pytest.raises(types.RunError, match=r"step 2: .* within 0\.1 s"):
      it.finish()
  hangs.set()


def test_without_blocks_an_evaluation_has_a_deadline():
  lane = beside.Lane(lambda policy: Examinee(), stall_s=0.1)
  lines = []
  with opened(lane, lambda p, _: lane.sample(p, ASKED), lines) as tests:
    tests(streams.FIRST, 1)
    with pytest.raises(types.RunError, match=r"a block within 0\.1 s"):
      tests.finish()
  assert lines == []


def test_c73_a_worker_that_raises_ends_an_evaluation_and_the_run(tmp_path):
  engine, lines = streams.Engine(), []

  def script():
    raise ValueError("boom")

  engine.script = script
  lane = beside.Lane(lambda policy: Examinee(lambda: False))
  begun = time.monotonic()
  with opened(lane, lambda p, _: lane.sample(p, ASKED), lines) as tests:
    tests(streams.FIRST, 0)
    with (
      pytest.raises(ValueError, match="boom"),
      streams.Setup(max_lag=1).opened(tmp_path, engine=engine, lane=lane),
    ):
      tests.finish()
  assert time.monotonic() - begun < streams.LATE_S
  assert lines == []


@pytest.mark.parametrize(
  ("step", "logged", "owed"),
  [(0, (), True), (2, (), True), (2, (2,), False), (3, (), False)],
)
def test_a_run_that_goes_on_owes_what_its_weights_were_not_logged_for(
  step, logged, owed
):
  class Notes(record.Silent):
    def has_evaluated(self, step):
      return step in logged

  tools = object.__new__(loop.Tools)
  with opened(
    beside.Lane(), lambda p, _: {}, [], due=lambda s: s % 2 == 0
  ) as tests:
    object.__setattr__(tools, "test", tests)
    object.__setattr__(tools, "notes", Notes())
    assert tools.owes(step) == owed
  # In turn it was logged with its step, or never begun.
  object.__setattr__(tools, "test", lambda policy, step: {})
  assert tools.owes(step) == (step == 0)


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    (("placement.mode=colocated",), "placement.mode: expected split"),
    (("placement.mode=roles",), "placement.mode: expected split"),
    (("max_lag=0",), "max_lag: expected >= 1"),
    (
      ("checkpoint.keep_best=1", "checkpoint.best_by=eval/reward"),
      "checkpoint.best_by: expected no metric of an evaluation",
    ),
    (("evaluation.beside.blocks=0",), "evaluation.beside.blocks: expected"),
  ],
)
def test_where_it_cannot_be_it_is_refused_in_one_line(settings, said):
  with pytest.raises(types.InputError, match=said) as caught:
    runs.configured(*SPLIT, *settings, exp="with_held_out_letters")
  assert "\n" not in str(caught.value)


def test_without_prompts_it_is_refused():
  with pytest.raises(types.InputError, match=r"data\.held_out: expected some"):
    runs.configured(*SPLIT)


def test_with_several_processes_it_is_refused():
  cfg = runs.configured(*SPLIT, exp="with_held_out_letters")
  parts = prepare.prepare(cfg)
  with pytest.raises(types.InputError, match="beside: expected none with sev"):
    prepare.plan(cfg, parts, 4, 2)
  assert prepare.plan(cfg, parts, 2)


def test_a_late_line_belongs_to_its_step(tmp_path):
  made = log.Log(tmp_path)
  made.step(1, {"reward/mean": 0.1})
  made.step(0, {"eval/version": 0.0, "eval/reward": 0.5}, late=True)
  made.step(2, {"reward/mean": 0.2})
  made.step(3, {"reward/mean": 0.3})
  made.step(1, {"eval/version": 1.0, "eval/reward": 0.6}, late=True)
  made.step(3, {"eval/version": 3.0, "eval/reward": 0.7}, late=True)
  assert made.has(1, "eval/version") and not made.has(2, "eval/version")
  with pytest.raises(types.RunError, match="expected a step after 3"):
    made.step(3, {})
  lines = [json.loads(x) for x in (tmp_path / log.METRICS_FILE).open()]
  rows = {row["step"]: row for row in history.joined(lines)}
  assert [row["step"] for row in history.joined(lines)] == [1, 0, 2, 3]
  assert [rows[s].get("eval/reward") for s in range(4)] == [0.5, 0.6, None, 0.7]
  assert [rows[s].get("reward/mean") for s in (1, 2, 3)] == [0.1, 0.2, 0.3]
  # A run that goes on from step 2 keeps what is of it and before.
  made.truncate(3)
  assert made.has(1, "eval/version") and not made.has(3, "eval/version")
  made.step(3, {})
  made.close()


def test_a_dashboard_keeps_the_newest_step_beside_a_late_evaluation(tmp_path):
  prometheus = writers._Prometheus(0, "run")
  prometheus.step(4, {"reward/mean": 0.4})
  prometheus.step(2, {"eval/reward": 0.2})
  assert prometheus._values == {
    "reward/mean": 0.4,
    "eval/reward": 0.2,
    "step": 4.0,
  }
  prometheus.step(5, {"reward/mean": 0.5})
  assert prometheus._values == {"reward/mean": 0.5, "step": 5.0}
