"""The reward pool: forms of functions, retries, values for failures, limits.

Whatever a reward does, the pool goes on, and says of which rollout it was.
"""

import asyncio
import functools
import math
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.rewards import combine, protocol
from jaxrl_post.rewards import pool as pools
from jaxrl_post.runtime import assign, metrics
from tests.unit import pool_test

WAIT_S = pool_test.WAIT_S
rollout = pool_test.rollout

# More than its worker may have; and what nobody would want to carry over.
GIGABYTE = 10**9


@protocol.batched
def all_of(rollouts, references):
  """Says how many came together; a reference may ask for something odd."""
  if "raise" in references:
    raise ValueError("one of these")
  if "short" in references:
    return [1.0] * (len(rollouts) - 1)
  return [{"size": len(rollouts), "own": reference} for reference in references]


async def slowly(rollout, reference):
  """Waits, and says when it began and ended."""
  began = time.monotonic()
  await asyncio.sleep(reference[0])
  if reference[1] == "raise":
    raise ValueError("late")
  return {"began": began, "ended": time.monotonic(), "own": reference[1]}


@protocol.batched
async def all_slowly(rollouts, references):
  await asyncio.sleep(0.01)
  return np.array([float(reference) for reference in references])


def flaky(rollout, reference):
  """Fails as often as the file of its rollout is not yet long enough."""
  path = pathlib.Path(reference[0])
  calls = len(path.read_text()) if path.exists() else 0
  path.write_text("x" * (calls + 1))
  if calls < reference[1]:
    raise ConnectionError("try again")
  return float(calls)


def _fail(error):
  raise error


def _print():
  for _ in range(60):
    print("x" * 10**6)
  os.write(2, b"y" * 10**6)
  return 2.0


def _start_threads():
  for _ in range(4):
    wait = threading.Event().wait
    threading.Thread(target=wait, args=(600,), daemon=True).start()
  return 4.0


HOSTILE = {
  "string": lambda: "x" * GIGABYTE,
  "message": lambda: _fail(ValueError("x" * (GIGABYTE // 10))),
  "parts": lambda: {str(part): 1.0 for part in range(10**6)},
  "name": lambda: {"x" * 10**7: 1.0},
  "huge": lambda: 10**400,
  "memory": lambda: float(len("x" * GIGABYTE)),
  "recursion": lambda: HOSTILE["recursion"](),
  "prints": _print,
  "closes": lambda: sys.stdout.close() or 3.0,
  "threads": _start_threads,
  "child": lambda: subprocess.Popen(["sleep", "0.1"]) and 5.0,
}


def hostile(rollout, reference):
  """Does what the reference says, none of which is decent."""
  is_verb = isinstance(reference, str)
  return HOSTILE[reference]() if is_verb else reference


def scored(functions, references, **fields):
  """Scores references together, and returns their rollouts."""
  base = {"workers": 1, "timeout_s": 20.0, "on_failure": "mask"}
  with pools.Pool(
    pools.Rewards(functions=functions, **(base | fields))
  ) as pool:
    futures = pool.submit_all(
      [rollout(uid, reference) for uid, reference in enumerate(references)]
    )
    return [future.result(timeout=WAIT_S) for future in futures]


def test_the_forms_are_told_apart():
  assert protocol.is_batched(all_of)
  assert protocol.is_batched(functools.partial(functools.partial(all_of)))
  assert not protocol.is_batched(slowly)
  assert isinstance(all_of, protocol.Batched)


def test_a_batched_function_gets_a_batch_and_its_failures_come_alone():
  made = scored((all_of,), [1, 2, 3, "raise", 4, 5, 6, "short"], batch=3)
  assert [r.parts.get("own") for r in made] == [1, 2, 3, None, 4, 5, 6, None]
  # The second batch is asked again one by one, as is the third.
  sizes = [r.parts.get("size") for r in made]
  assert sizes == [3, 3, 3, None, 1, 1, 1, None]
  assert made[3].failure == "ValueError: one of these"
  assert made[7].failure == "expected 1 rewards in a list, got 0"


def test_async_calls_of_a_batch_wait_together_and_one_that_is_late_is_alone():
  # Of one batch, as neither time nor order on a busy machine says it.
  references = [(0.5, 0), (0.5, 1), (0.01, "raise"), (0.5, 3), (60, 4)]
  made = scored((slowly,), references, batch=5, timeout_s=2.0)
  assert [r.parts.get("own") for r in made] == [0, 1, None, 3, None]
  assert made[2].failure == "ValueError: late"
  assert made[4].failure == "timeout after 2 s"
  good = [made[i].parts for i in (0, 1, 3)]
  assert max(p["began"] for p in good) < min(p["ended"] for p in good)


def test_c86_async_results_are_paired_by_rollout_not_by_order():
  references = [(0.3 - 0.1 * i, i) for i in range(4)]
  made = scored((slowly, all_slowly_own), references, batch=4)
  assert [r.parts["own"] for r in made] == [0, 1, 2, 3]
  assert [r.parts["all_slowly_own"] for r in made] == [0, 10, 20, 30]


@protocol.batched
async def all_slowly_own(rollouts, references):
  return await all_slowly(rollouts, [10 * own for _, own in references])


@pytest.mark.parametrize(
  ("retries", "rewards"), [(0, [0.0, None, None]), (2, [0.0, 1.0, None])]
)
def test_a_call_that_fails_is_made_again(retries, rewards, tmp_path):
  references = [(str(tmp_path / f"{n}"), n) for n in (0, 1, 3)]
  made = scored((flaky,), references, retries=retries)
  given = [None if math.isnan(r.reward) else r.reward for r in made]
  assert given == rewards
  assert made[2].failure == "ConnectionError: try again"
  calls = [len((tmp_path / f"{n}").read_text()) for n in (0, 1, 3)]
  assert calls == [1, 1 + bool(retries), 1 + retries]


def test_only_the_function_that_fails_is_asked_again(tmp_path):
  reference = (str(tmp_path / "calls"), 1)
  (one,) = scored(
    (flaky, functools.partial(count, path=str(tmp_path / "others"))),
    [reference],
    retries=3,
  )
  assert one.parts == {"flaky": 1.0, "count": 1.0}


def count(rollout, reference, *, path):
  with open(path, "a", encoding="ascii") as file:
    file.write("x")
  return float(pathlib.Path(path).stat().st_size)


def test_a_value_in_place_of_a_failure_is_a_reward_that_is_counted():
  made = scored(
    (hostile, all_of),
    [1.5, "recursion", math.nan],
    on_failure=-2.0,
    weights=(10.0, 1.0),
  )
  whole, failed, missing = made
  assert (whole.reward, whole.failure) == (10 * 1.5 + 1 + 1.5, "")
  assert failed.parts["hostile"] == -2.0
  # What the other function gave is text, which is a failure, too.
  assert failed.reward == 10 * -2.0 + -2.0
  assert failed.failure.startswith("RecursionError: ")
  # No reward is a decision, and no failure.
  assert math.isnan(missing.reward) and missing.failure == "no reward: nan"
  group = types.Group(prompt=whole.prompt, rollouts=tuple(made))
  told = metrics.batch_metrics([group])
  assert (told["reward/missing"], told["reward/replaced"]) == (1, 1)


@pytest.mark.parametrize(
  ("text", "value"), [("mask", "mask"), ("-0.5", -0.5), ("0", 0.0)]
)
def test_a_setting_of_two_kinds_is_read_as_the_first_it_fits(text, value):
  cfg = pools.Rewards(functions=(hostile,))
  assert assign.replace(cfg, {("on_failure",): text}).on_failure == value
  with pytest.raises(types.InputError, match="'stop' or 'mask' or float, got"):
    assign.replace(cfg, {("on_failure",): f"{text}x"})


@pytest.fixture(scope="module")
def limited():
  cfg = pools.Rewards(
    functions=(hostile,), timeout_s=20.0, memory_mb=700, on_failure="mask"
  )
  with pools.Pool(cfg) as pool:
    yield pool


@pytest.mark.parametrize(
  ("reference", "failure"),
  [
    ("string", "MemoryError"),
    ("memory", "MemoryError"),
    ("message", "ValueError: xxx"),
    ("parts", "reward is 1000000 parts"),
    ("name", "reward is of a part named 'xxx"),
    ("huge", "reward is inf"),
    ("recursion", "RecursionError: "),
    ([1.0, 2.0], "reward is [1.0, 2.0]"),
    (np.array([1.0]), "reward is array([1.])"),
    (1j, "reward is 1j"),
    ({}, "no reward: {}"),
  ],
)
def test_c84_what_is_hostile_is_contained_and_told(limited, reference, failure):
  made = pool_test.score(limited, reference)
  assert math.isnan(made.reward)
  assert made.failure.startswith(failure) and len(made.failure) <= 200
  assert pool_test.score(limited, 1.0).reward == 1.0


@pytest.mark.parametrize(
  ("reference", "reward"),
  [("prints", 2.0), ("closes", 3.0), ("threads", 4.0), ("child", 5.0)],
)
def test_what_is_odd_and_gives_a_number_is_a_reward(limited, reference, reward):
  assert pool_test.score(limited, reference).reward == reward
  assert pool_test.score(limited, 1.0).reward == 1.0


def test_what_a_reward_says_is_one_line_without_control():
  said = combine.one_line("a\n\x1b[31mb\u202e\x00 c" + "d" * 500)
  assert said.startswith("a \ufffd[31mb\ufffd\ufffd cddd") and len(said) == 200


def test_minus_zero_is_zero():
  assert str(combine.read("a", -0.0).parts["a"]) == "0.0"


SCRIPT = """
from tests.unit import pool_forms_test

if __name__ == "__main__":
  made = pool_forms_test.scored((pool_forms_test.hostile,), ["prints", 1.0])
  print([rollout.reward for rollout in made])
"""


def test_a_storm_of_prints_is_cut_and_counted(tmp_path):
  path = tmp_path / "script.py"
  path.write_text(SCRIPT)
  root = pathlib.Path(__file__).parents[2]
  ended = subprocess.run(
    [sys.executable, str(path)],
    capture_output=True,
    check=True,
    env=os.environ | {"PYTHONPATH": f"{root}:{root / 'src'}"},
    timeout=WAIT_S,
  )
  assert ended.stdout.endswith(b"[2.0, 1.0]\n")
  assert len(ended.stdout) < 100_000
  told = [x for x in ended.stderr.decode().splitlines() if "left out" in x]
  lost = int(told[0].split("rewards: ")[1].split()[0])
  # What the pipe still held when the call ended is not counted.
  assert lost > 60_000_000 - 200_000
