"""The reward pool: what comes back, and what is left behind."""

import dataclasses
import functools
import importlib.util
import math
import multiprocessing
import os
import pathlib
import pickle
import re
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.rewards import blame, check, exact, worker
from jaxrl_post.rewards import format as format_reward
from jaxrl_post.rewards import pool as pools

# Far above what any call here needs on a busy machine.
WAIT_S = 60.0


def rollout(uid: int = 0, reference: object = None, text: str = ""):
  prompt = types.Prompt(uid=uid, tokens=(1,), text="?", reference=reference)
  completion = types.Completion(
    uid=uid, tokens=(), logprobs=(), versions=(), finish="stop"
  )
  return types.Rollout(
    prompt=prompt, completion=completion, temperature=1.0, text=text
  )


class OddError(Exception):
  """Pickles well and cannot be rebuilt."""

  def __init__(self, first, second):
    super().__init__(f"{first} and {second}")


ERRORS = {
  "raise": ValueError("boom"),
  "odd": OddError("this", "that"),
  "quit": SystemExit(3),
  "own timeout": TimeoutError("the server is slow"),
  "user": types.InputError("data: expected less, got more. Correct it."),
}


def scripted(rollout, reference):
  """Does what the reference says."""
  verb, *rest = reference
  if verb in ERRORS:
    raise ERRORS[verb]
  match verb:
    case "give":
      return rest[0]
    case "wait":
      threading.Event().wait(rest[0])
      return rest[1]
    case "die":
      os.kill(os.getpid(), signal.SIGKILL)
    case "hang":
      threading.Event().wait(600)
    case "print":
      print("x" * 10_000_000)
      return 1.0
    case "interrupt":
      os.kill(os.getpid(), signal.SIGINT)
      return 1.0
  raise AssertionError(verb)


def pid(rollout, reference):
  return {"pid": os.getpid()}


def slow(rollout, reference):
  return {"slow": scripted(rollout, ("wait", 0.1, 1.0))}


def config(**fields):
  base = {"functions": (scripted,), "workers": 2, "timeout_s": 1.0}
  return pools.Rewards(**(base | fields))


def score(pool, reference, uid=0):
  return pool.submit(rollout(uid, reference)).result(timeout=WAIT_S)


def children() -> set[int | None]:
  """Returns the processes of this one that run; those of fixtures too."""
  return {child.pid for child in multiprocessing.active_children()}


def alive(process_id: int) -> bool:
  try:
    os.kill(process_id, 0)
  except ProcessLookupError:
    return False
  return True


@pytest.fixture(scope="module")
def stop():
  with pools.Pool(config()) as pool:
    yield pool


@pytest.fixture(scope="module")
def mask():
  with pools.Pool(config(on_failure="mask", workers=1)) as pool:
    yield pool


def test_the_pool_says_how_long_it_took_to_start_and_how_big_workers_are(stop):
  assert 0 < stop.start_s < worker.START_S
  assert 2**20 < stop.worker_bytes < 2**33


def test_a_bare_number_is_a_part_of_the_functions_name(stop):
  scored = score(stop, ("give", 0.5))
  assert (scored.reward, scored.parts) == (0.5, {"scripted": 0.5})
  assert scored.failure == ""


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.array(1.0)])
def test_whatever_is_a_number_is_a_reward(stop, value):
  assert score(stop, ("give", value)).reward == 1.0


def test_c86_results_are_paired_by_rollout_not_by_order(stop):
  futures = [
    stop.submit(rollout(i, ("wait", (4 - i) * 0.1, i))) for i in range(4)
  ]
  scored = [f.result(timeout=WAIT_S) for f in futures]
  assert [s.reward for s in scored] == [0, 1, 2, 3]
  assert [s.completion.uid for s in scored] == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [math.nan, None])
def test_c84_nan_and_none_are_no_reward_under_both_policies(stop, mask, value):
  for pool in (stop, mask):
    scored = score(pool, ("give", {"a": value, "b": 1.0}))
    assert math.isnan(scored.reward)
    assert scored.failure == f"no reward: {value}"
    assert scored.parts == {"b": 1.0}


@pytest.mark.parametrize(
  ("value", "shown"),
  [
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    (-2e15, "-2000000000000000.0"),
    ("1", "'1'"),
    ([1.0], "[1.0]"),
  ],
)
def test_c84_what_is_no_number_in_range_is_a_failure(stop, mask, value, shown):
  with pytest.raises(types.RunError) as raised:
    score(stop, ("give", value), uid=7)
  place = "reward scripted, rollout 7"
  rule = "expected a number from -1e+15 to 1e+15"
  told, _, advice = str(raised.value).partition(". Mend the function")
  assert told == f"{place}: {rule}, got {shown}"
  assert advice and "rewards.on_failure=mask" in advice
  scored = score(mask, ("give", value))
  assert math.isnan(scored.reward)
  assert scored.failure == f"reward is {shown}"


def test_c73_stop_raises_the_workers_error_with_its_traceback(stop):
  with pytest.raises(types.RunError) as raised:
    score(stop, ("raise",), uid=7)
  told, _, advice = str(raised.value).partition(". Mend the function ")
  assert told == "reward scripted, rollout 7: ValueError: boom"
  assert "jaxrl_post.rewards.check" in advice
  assert "or set rewards.on_failure=mask" in advice and "\n" not in advice
  cause = raised.value.__cause__
  assert isinstance(cause, ValueError)
  assert "pool_test.py" in str(cause.__cause__)
  assert "in scripted" in str(cause.__cause__)


def test_the_traceback_of_a_reward_is_that_of_its_own_file(stop):
  for question, kind in ((("raise",), "ValueError: boom"), (("odd",), "")):
    with pytest.raises(types.RunError) as raised:
      score(stop, question)
    shown = blame.traceback_of(raised.value)
    files = set(re.findall(r'^  File "([^"]+)"', shown, re.MULTILINE))
    assert files == {__file__}
    head, *_ = shown.splitlines()
    assert head == "Traceback (most recent call last):"
    assert "in scripted\n    " in shown
    assert shown.endswith(f"{kind}\n\n")
  # Of what is no reward's fault there is none.
  with pytest.raises(types.RunError) as raised:
    score(stop, ("give", "1"))
  assert blame.traceback_of(raised.value) == ""
  assert blame.traceback_of(types.InputError("x")) == ""


def test_what_is_tried_is_named_as_the_check_takes_it(monkeypatch):
  monkeypatch.chdir(pathlib.Path(__file__).parent)
  partial = functools.partial(functools.partial(scripted), x=1)
  assert blame.target(scripted) == "pool_test.py:scripted"
  assert blame.target(partial) == "pool_test.py:scripted"
  assert blame.target(exact.exact) == "jaxrl_post.rewards.exact:exact"
  for function in (scripted, exact.exact):
    loaded = check.load(blame.target(function))
    assert loaded.__qualname__ == function.__qualname__


def test_mask_keeps_a_one_line_reason_and_goes_on(mask):
  scored = score(mask, ("raise",))
  assert math.isnan(scored.reward)
  assert scored.failure == "ValueError: boom"
  assert score(mask, ("give", 1.0)).reward == 1.0


def test_an_error_that_cannot_be_rebuilt_is_told_and_breaks_nothing(stop, mask):
  with pytest.raises(types.RunError, match="OddError: this and that") as raised:
    score(stop, ("odd",))
  assert raised.value.__cause__ is not None
  assert "pool_test.py" in str(raised.value.__cause__.__cause__)
  assert score(mask, ("odd",)).failure == "OddError: this and that"
  assert score(stop, ("give", 1.0)).reward == 1.0


def test_an_exit_inside_a_reward_ends_neither_worker_nor_run(stop):
  with pytest.raises(types.RunError, match="SystemExit: 3"):
    score(stop, ("quit",))


def test_a_call_that_hangs_is_ended_and_named(stop, mask):
  with pytest.raises(types.RunError) as raised:
    score(stop, ("hang",), uid=7)
  told, _, advice = str(raised.value).partition(". Raise rewards.timeout_s")
  assert told == "reward scripted, rollout 7: timeout after 1 s"
  assert advice.startswith(", or set rewards.on_failure=mask")
  assert score(mask, ("hang",)).failure == "timeout after 1 s"
  # The next worker takes longer than a second to start, which costs nobody.
  assert score(mask, ("give", 1.0)).reward == 1.0


def test_a_timeout_of_the_function_itself_is_its_own_error(mask):
  failure = score(mask, ("own timeout",)).failure
  assert failure == "TimeoutError: the server is slow"


def test_a_worker_that_dies_is_noticed_and_replaced(stop, mask):
  with pytest.raises(types.RunError, match="rollout 7: its worker died.*-9"):
    score(stop, ("die",), uid=7)
  assert score(mask, ("die",)).failure == "worker died"
  assert score(mask, ("give", 1.0)).reward == 1.0


def test_a_users_mistake_is_raised_under_both_policies(stop, mask):
  for pool in (stop, mask):
    with pytest.raises(types.InputError, match="expected less"):
      score(pool, ("user",))


def test_a_lot_of_output_blocks_nobody(stop):
  assert score(stop, ("print",)).reward == 1.0


def test_workers_leave_ctrl_c_to_the_run(stop):
  assert score(stop, ("interrupt",)).reward == 1.0


def test_a_reference_that_cannot_be_sent_is_refused(stop):
  with pytest.raises(types.InputError, match="can be pickled"):
    stop.submit(rollout(reference=lambda: 1))


def test_submitting_outside_of_the_block_is_refused():
  with pytest.raises(types.RunError, match="outside"):
    pools.Pool(config()).submit(rollout())


EXPERIMENT = """
import functools
import dataclasses

@dataclasses.dataclass(frozen=True)
class Sheet:
  answer: str

def right(rollout, reference):
  return float(rollout.text == reference.answer)

def scaled(rollout, reference, *, function, by):
  return {"scaled": by * function(rollout, reference)}

functions = (right, functools.partial(scaled, function=right, by=10))
"""


def test_functions_of_an_experiment_file_and_of_the_package_run_together(
  tmp_path,
):
  path = tmp_path / "experiment.py"
  path.write_text(EXPERIMENT)
  spec = importlib.util.spec_from_file_location("a_run_by_path", path)
  module = importlib.util.module_from_spec(spec)
  sys.modules["a_run_by_path"] = module
  spec.loader.exec_module(module)
  shape = functools.partial(format_reward.matches, pattern=".*5}")
  cfg = config(
    functions=(*module.functions, shape), weights=(1.0, 0.5, 2.0), workers=1
  )
  text = r"\boxed{0.5}"
  with pools.Pool(cfg) as pool:
    future = pool.submit(rollout(0, module.Sheet(text), text))
    scored = future.result(timeout=WAIT_S)
  assert scored.parts == {"right": 1.0, "scaled": 10.0, "matches": 1.0}
  assert scored.reward == 1.0 + 5.0 + 2.0


def test_closing_ends_every_worker_and_fails_what_is_left():
  before = threading.active_count(), children()
  with pools.Pool(config(functions=(pid, slow), timeout_s=60.0)) as pool:
    first = pool.submit(rollout()).result(timeout=WAIT_S).parts["pid"]
    # More than a pipe holds, so that the sender itself is blocked.
    left = [pool.submit(rollout(i, "x" * 100_000)) for i in range(100)]
  assert not alive(int(first))
  assert (threading.active_count(), children()) == before
  errors = [f.exception(timeout=0) for f in left]
  assert all(f.done() for f in left)
  assert "rollout 99" in str(errors[99])
  assert isinstance(errors[99], types.RunError)


def test_c73_an_error_in_the_block_leaves_no_process_behind():
  before, found = children(), []

  def fail():
    with pools.Pool(config(functions=(pid, scripted), workers=1)) as pool:
      scored = pool.submit(rollout(0, ("give", 0.0)))
      found.append(scored.result(timeout=WAIT_S).parts["pid"])
      pool.submit(rollout(1, ("hang",)))
      raise KeyError("elsewhere")

  with pytest.raises(KeyError, match="elsewhere"):
    fail()
  assert not alive(int(found[0]))
  assert children() == before


def test_workers_that_cannot_start_end_the_run(tmp_path):
  path = tmp_path / "lazy.py"
  path.write_text("def reward(rollout, reference):\n  return 1.0\n")
  spec = importlib.util.spec_from_file_location("lazy_by_path", path)
  module = importlib.util.module_from_spec(spec)
  sys.modules["lazy_by_path"] = module
  spec.loader.exec_module(module)
  path.write_text("raise ImportError('only once')")
  before = children()
  with pytest.raises(types.RunError, match="expected 1 workers"):
    pools.Pool(config(functions=(module.reward,), workers=1)).__enter__()
  assert children() == before


SCRIPT = """
import os, threading, time
from jaxrl_post import types
from jaxrl_post.rewards import pool

def reward(rollout, reference):
  print(os.getpid(), flush=True)
  threading.Event().wait(600)

if __name__ == "__main__":
  cfg = pool.Rewards(functions=(reward,), timeout_s=600)
  prompt = types.Prompt(uid=0, tokens=(1,), text="", reference=None)
  completion = types.Completion(
    uid=0, tokens=(), logprobs=(), versions=(), finish="stop")
  with pool.Pool(cfg) as workers:
    workers.submit(types.Rollout(
      prompt=prompt, completion=completion, temperature=1.0, text="",
    )).result(timeout=600)
"""


def test_a_script_that_is_killed_takes_its_workers_with_it(tmp_path):
  path = tmp_path / "script.py"
  path.write_text(SCRIPT)
  src = pathlib.Path(pools.__file__).parents[2]
  environment = os.environ | {"PYTHONPATH": str(src)}
  with subprocess.Popen(
    [sys.executable, str(path)], stdout=subprocess.PIPE, env=environment
  ) as script:
    assert script.stdout is not None
    assert select.select([script.stdout], [], [], WAIT_S)[0]
    assert alive(int(script.stdout.readline()))
    script.kill()
    # The pipe ends when the worker, its last holder, does.
    assert select.select([script.stdout], [], [], WAIT_S)[0]
    assert script.stdout.read() == b""


def test_functions_that_no_other_process_can_load_are_refused():
  def local(rollout, reference):
    return 1.0

  for function in (lambda r, x: 1.0, local, functools.partial(local)):
    with pytest.raises(types.InputError, match="top level of a file"):
      config(functions=(function,))


@pytest.mark.parametrize(
  ("fields", "place"),
  [
    ({"functions": ()}, "rewards.functions"),
    ({"weights": (1.0, 2.0)}, "rewards.weights"),
    ({"weights": (math.nan,)}, "rewards.weights"),
    ({"workers": 0}, "rewards.workers"),
    ({"timeout_s": 0.0}, "rewards.timeout_s"),
    ({"timeout_s": math.inf}, "rewards.timeout_s"),
    ({"on_failure": math.nan}, "rewards.on_failure"),
    ({"on_failure": -1e16}, "rewards.on_failure"),
    ({"retries": -1}, "rewards.retries"),
    ({"memory_mb": 0}, "rewards.memory_mb"),
  ],
)
def test_a_setting_out_of_range_is_refused(fields, place):
  with pytest.raises(types.InputError, match=f"^{place}: expected"):
    config(**fields)


def test_experts_of_tokens_do_not_travel_to_rewards():
  plain = rollout(reference=3)
  routing = np.zeros((200, 48, 8), np.int8)
  made = dataclasses.replace(plain.completion, routing=routing)
  sent = pools._dump(dataclasses.replace(plain, completion=made))
  assert len(sent) < 1000
  assert pickle.loads(sent).completion == plain.completion
  assert pickle.loads(sent).completion.routing is None


def test_the_configuration_itself_can_be_pickled():
  cfg = config(weights=(2.0,))
  assert pickle.loads(pickle.dumps(cfg)) == cfg


@pytest.mark.parametrize("verb", [("hang",), ("die",), ("give", math.inf)])
def test_a_batch_with_a_failure_is_scored_again_one_by_one(verb):
  settings = config(on_failure="mask", workers=1, batch=4)
  references = [
    ("give", 1.0),
    verb,
    ("give", 2.0),
    ("give", 3.0),
    ("give", 4.0),
  ]
  with pools.Pool(settings) as pool:
    futures = pool.submit_all(
      [rollout(uid, reference) for uid, reference in enumerate(references)]
    )
    scored = [future.result(timeout=WAIT_S) for future in futures]
  assert [r.completion.uid for r in scored] == [0, 1, 2, 3, 4]
  assert [r.reward for r in scored if not r.failure] == [1.0, 2.0, 3.0, 4.0]
  assert math.isnan(scored[1].reward)


def test_a_batch_under_stop_raises_for_the_rollout_that_raised():
  with pools.Pool(config(workers=1, batch=3)) as pool:
    good, bad = pool.submit_all(
      [rollout(0, ("give", 1.0)), rollout(1, ("raise", ValueError("boom")))]
    )
    assert good.result(timeout=WAIT_S).reward == 1.0
    with pytest.raises(types.RunError, match="rollout 1: ValueError: boom"):
      bad.result(timeout=WAIT_S)
