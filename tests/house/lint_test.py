"""Lint, format and types are clean: what `make lint` runs."""

import subprocess
import sys

from tests.house import source

FOLDERS = [
  name
  for name in ("src", "tests", "experiments", "bench")
  if any((source.ROOT / name).rglob("*.py"))
]


def succeeds(*command: str) -> None:
  """Runs a tool of this Python at the repository's root.

  Raises:
    AssertionError: with the tool's words, when it exits other than 0.
    subprocess.TimeoutExpired: after five minutes.
  """
  done = subprocess.run(
    [sys.executable, "-m", *command],
    cwd=source.ROOT,
    capture_output=True,
    check=False,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
  succeeds("ruff", "check", "--quiet", *FOLDERS)


def test_files_are_formatted():
  succeeds("ruff", "format", "--check", *FOLDERS)


def test_types_are_clean():
  succeeds("pyright", "--pythonpath", sys.executable)
