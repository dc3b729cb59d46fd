"""Limits on the tail, and habits that no linter rule of ours knows.

Statements, nested blocks, complexity and arguments are ruff's: pyproject.toml.
"""

import ast
import pathlib

import pytest

from tests.house import source

MAX_LINES = 500
MAX_DEPTH = 2  # functions around a function
BANNED_NAMES = ("common", "core", "helpers", "misc", "utils")

FILES = [pytest.param(p, id=source.name(p)) for p in source.modules()]
SCRIPTS = [pytest.param(p, id=source.name(p)) for p in source.scripts()]


def too_deep(tree: ast.AST, depth: int = 0) -> list[str]:
  """Names the functions with more than `MAX_DEPTH` functions around them."""
  found = []
  for node in ast.iter_child_nodes(tree):
    is_def = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_def and depth > MAX_DEPTH:
      found.append(f"line {node.lineno}: {node.name}")
    found += too_deep(node, depth + is_def)
  return found


def parents(tree: ast.AST, *, exceptions: bool = False) -> list[str]:
  """Names the classes that inherit from more than a form of declaration."""
  forms = {"Protocol", "NamedTuple", "typing.Protocol", "typing.NamedTuple"}
  if exceptions:
    forms |= {"ValueError", "RuntimeError", "Exception"}
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.ClassDef):
      bases = {ast.unparse(b).split("[")[0] for b in node.bases}
      if bases - forms:
        found.append(f"line {node.lineno}: {node.name}")
  return found


def swallows(tree: ast.AST) -> list[str]:
  """Names the handlers that catch everything."""
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.ExceptHandler):
      caught = "" if node.type is None else ast.unparse(node.type)
      if caught == "" or "Exception" in caught.strip("()").split(", "):
        found.append(f"line {node.lineno}: except {caught}")
  return found


def test_the_rules_find_what_breaks_them():
  deep = "def a():\n def b():\n  def c():\n   def d(): pass"
  assert too_deep(ast.parse(deep)) == ["line 4: d"]
  assert parents(ast.parse("class A(B): pass")) == ["line 1: A"]
  assert parents(ast.parse("class A(Protocol[T]): pass")) == []
  assert parents(ast.parse("class A(ValueError): pass")) == ["line 1: A"]
  body = "try: f()\nexcept (OSError, Exception): pass"
  assert swallows(ast.parse(body)) == ["line 2: except (OSError, Exception)"]
  assert swallows(ast.parse("try: f()\nexcept: pass")) == ["line 2: except "]
  assert swallows(ast.parse("try: f()\nexcept OSError: pass")) == []


@pytest.mark.parametrize("path", SCRIPTS)
def test_a_file_fits_in_a_reading(path: pathlib.Path):
  lines = len(path.read_text(encoding="utf-8").splitlines())
  assert lines <= MAX_LINES, f"expected at most {MAX_LINES} lines, got {lines}"


@pytest.mark.parametrize("path", SCRIPTS)
def test_a_name_says_what_is_inside(path: pathlib.Path):
  parts = [*path.relative_to(source.ROOT).parent.parts, path.stem]
  assert not set(parts) & set(BANNED_NAMES)


@pytest.mark.parametrize("path", FILES)
def test_functions_nest_two_deep_at_most(path: pathlib.Path):
  assert too_deep(source.parse(path)) == []


@pytest.mark.parametrize("path", FILES)
def test_classes_do_not_inherit(path: pathlib.Path):
  exceptions = path == source.PACKAGE / "types.py"
  assert parents(source.parse(path), exceptions=exceptions) == []


@pytest.mark.parametrize("path", FILES)
def test_nothing_catches_everything(path: pathlib.Path):
  assert swallows(source.parse(path)) == []


@pytest.mark.parametrize("path", FILES)
def test_nothing_sleeps(path: pathlib.Path):
  calls = {
    ast.unparse(node.func)
    for node in ast.walk(source.parse(path))
    if isinstance(node, ast.Call)
  }
  assert not calls & {"time.sleep", "sleep", "asyncio.sleep"}
