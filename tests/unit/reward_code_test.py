"""What programs earn by their tests, in the sandbox."""

import threading

import pytest

from jaxrl_post import types
from jaxrl_post.rewards import code, sandbox
from tests.unit import pool_test


def rollout(text: str) -> types.Rollout:
  return pool_test.rollout(text=text)


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("```python\nx = 1\n```", "x = 1\n"),
    ("a\n```python\nx\n```\nb\n```py\ny\n```\nc", "y\n"),
    ("```\nx\n```\n```text\nno\n```", "x\n"),
    ("```bash\nls\n```", ""),
    ("```python\nx = '```'\n```", "x = '```'\n"),
    ("``` python\nx\n", "x\n"),
    ("print(1)", "print(1)"),
    ("", ""),
  ],
)
def test_the_program_is_the_last_block_of_python(text, found):
  assert code.program(text) == found


DOUBLE = "```python\ndef f(x):\n  return 2 * x\n```"
ASSERTS = ["assert f(1) == 2", "assert f(-3) == -6", "assert f(0) == 0"]


@pytest.mark.parametrize(
  ("text", "partial", "earned"),
  [
    (DOUBLE, False, 1.0),
    ("def f(x): return x + x", False, 1.0),
    ("def f(x): return abs(2 * x)", False, 0.0),
    ("def f(x): return abs(2 * x)", True, 2 / 3),
    ("def g(x): return 2 * x", True, 0.0),
    ("def f(x): return", True, 0.0),
    ("", True, 0.0),
    ("```bash\nls\n```", True, 0.0),
    # None of these does the task.
    ("import os; os._exit(0)", True, 0.0),
    ("raise SystemExit(0)", True, 0.0),
    ("def f(x): raise SystemExit(0)", True, 0.0),
    ("def f(x): import os; os._exit(0)", True, 0.0),
    ("print('0\\n1\\n2\\nok\\npassed')", True, 0.0),
    (
      "import os\nfor fd in range(3, 9):\n  try:\n"
      "    os.write(fd, b'0\\n1\\n2\\n')\n  except OSError: pass",
      True,
      0.0,
    ),
  ],
)
def test_a_program_is_scored_by_statements(text, partial, earned):
  given = rollout(text)
  assert code.passed(given, ASSERTS, partial=partial) == earned


def test_a_test_that_hangs_leaves_those_before_it():
  text = "def f(x):\n  while x == -3: pass\n  return 2 * x"
  made = code.passed(rollout(text), ASSERTS, partial=True, timeout_s=0.5)
  assert made == 1 / 3


SUMS = [
  {"input": "1 2\n", "output": "3\n"},
  {"input": "-1 1\n", "output": "0"},
]


@pytest.mark.parametrize(
  ("text", "partial", "earned"),
  [
    ("print(sum(map(int, input().split())))", False, 1.0),
    (
      "if __name__ == '__main__':\n  print(eval(input().replace(' ', '+')))",
      False,
      1.0,
    ),
    ("print(3, ' ')", True, 0.5),
    ("print(3)", False, 0.0),
    ("print(3); raise ValueError", True, 0.0),
    ("while True: print(3)", True, 0.0),
  ],
)
def test_a_program_is_scored_by_what_it_prints(text, partial, earned):
  given = rollout(text)
  assert code.passed(given, SUMS, partial=partial) == earned


def test_starts_of_python_take_no_time_from_the_tests(monkeypatch):
  given = []

  def run(source, *, timeout_s, **_):
    given.append(timeout_s)
    threading.Event().wait(0.2)  # a start on a busy host
    return sandbox.Result(
      status="done", stdout="1", stderr="", seconds=0.125, passed=()
    )

  monkeypatch.setattr(sandbox, "run", run)
  tests = [{"input": "", "output": "1"}] * 5
  assert code.passed(rollout("print(1)"), tests, timeout_s=0.5) == 0.0
  assert given == [0.5, 0.375, 0.25, 0.125]
  assert code.passed(rollout("print(1)"), tests, timeout_s=0.75) == 1.0


def test_tests_may_be_json_in_a_text():
  assert code.passed(rollout(DOUBLE), '["assert f(2) == 4"]') == 1.0


@pytest.mark.parametrize(
  "reference",
  [
    None,
    [],
    "f(1)",
    ["f(1)", {}],
    [{"input": "1"}],
    3,
    [{"input": 1, "output": "1"}],
  ],
)
def test_a_reference_without_tests_is_refused(reference):
  with pytest.raises(types.InputError, match="^reward code: expected a list"):
    code.passed(rollout(DOUBLE), reference)
