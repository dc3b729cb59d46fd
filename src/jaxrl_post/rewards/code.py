"""A reward for programs: Python of the completion, against tests.

Programs run in `sandbox.run`, which needs Linux on x86_64 or aarch64 unless
`isolation="limits"`. A worker waits while one runs: as many at a time as
`rewards.workers`, each for at most `timeout_s`, which Python's start does not
count towards: about 0.1 s a process, more on a busy host. So that
`rewards.timeout_s` has to be at least `timeout_s` + starts x the time of one:
one start for statements, and one a test for inputs and outputs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_post import types
from jaxrl_post.rewards import sandbox

# A block that never closes goes on to the end of the text.
_BLOCK = re.compile(
  r"^[ \t]*```[ \t]*+(\w*+)[^\n]*+\n(.*?)(?:^[ \t]*```|\Z)",
  re.DOTALL | re.MULTILINE,
)
_LANGUAGES = ("python", "py", "python3", "")


def program(text: str) -> str:
  """Finds the program of a completion.

  Returns:
    The last fenced block that is marked as Python, or as nothing; without any
    fence all of the text; empty if all blocks are of other languages.
  """
  blocks = _BLOCK.findall(text)
  if not blocks:
    return text
  found = [body for name, body in blocks if name.lower() in _LANGUAGES]
  return found[-1] if found else ""


def passed(
  rollout: types.Rollout,
  reference: Any,
  *,
  partial: bool = False,
  timeout_s: float = 6.0,
  memory_mb: int = 512,
  isolation: Literal["seccomp", "limits"] = "seccomp",
) -> float:
  """Runs the completion's program against the tests of the reference.

  Args:
    rollout: what was answered; `program` finds the program in it.
    reference: a list of statements, such as `assert f(1) == 2`, which run one
      after another behind the program; or a list of `{"input", "output"}`, for
      each of which the program runs anew. Or either as JSON in a text.
    partial: whether some passed tests count.
    timeout_s: for all tests of the completion together, in seconds, without
      the starts of Python.
    memory_mb: most address space of a program, in MiB.
    isolation: as in `sandbox.run`.

  Returns:
    1.0 iff all tests pass; with `partial` the share of those that pass. A
    statement passes if it does not raise, in a program that did not end
    before; what a program prints is right if it is equal but for space at the
    ends of lines and of the text. Tests that are not reached in time fail.

  Raises:
    types.InputError: the reference holds no tests.
  """
  tests = _tests(reference)
  source = program(rollout.text)
  if not source.strip():
    return 0.0
  limits: dict[str, Any] = {"memory_mb": memory_mb, "isolation": isolation}
  if isinstance(tests[0], str):
    ended = sandbox.run(source, tests=tests, timeout_s=timeout_s, **limits)
    results = list(ended.passed)
  else:
    results, left = [], timeout_s
    for test in tests:
      ended = _ran(source, test, left, limits)
      results.append(ended.status == "done" and _prints(ended, test))
      left -= ended.seconds
      if left <= 0 or not (partial or results[-1]):
        break
  share = sum(results) / len(tests)
  return share if partial else float(share == 1.0)


def _ran(
  source: str, test: Mapping[str, str], left: float, limits: dict[str, Any]
) -> sandbox.Result:
  size = len(test["output"].encode()) // 1024
  return sandbox.run(
    source,
    stdin=test["input"],
    timeout_s=left,
    output_kb=64 + 2 * size,
    **limits,
  )


def _prints(ended: sandbox.Result, test: Mapping[str, str]) -> bool:
  return _lines(ended.stdout) == _lines(test["output"])


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.strip().splitlines()]


def _tests(reference: Any) -> Sequence[Any]:
  tests = reference
  if isinstance(reference, str):
    try:
      tests = json.loads(reference)
    except ValueError:
      tests = None
  if isinstance(tests, list | tuple) and tests:
    pairs = [
      isinstance(t, Mapping)
      and all(isinstance(t.get(key), str) for key in ("input", "output"))
      for t in tests
    ]
    if all(pairs) or all(isinstance(test, str) for test in tests):
      return tests
  raise types.InputError(
    "reward code: expected a list of statements, or of {input, output} in text,"
    f" as the reference, got {str(reference)[:80]!r}. Correct the data."
  )
