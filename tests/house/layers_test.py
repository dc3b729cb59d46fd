"""Imports point down, bring in modules, and stand at the top of the file."""

import ast
import pathlib

import pytest

from tests.house import source

FILES = [pytest.param(p, id=source.name(p)) for p in source.modules()]


def allowed(importer: str, imported: str) -> bool:
  """Says whether a file of one room may import from another."""
  below = source.LEVEL[imported] < source.LEVEL[importer]
  return below or importer == imported


def test_every_room_on_disk_has_a_level():
  missing = source.rooms() - source.LEVEL.keys()
  assert not missing, f"rooms without a level in LEVELS: {sorted(missing)}"


def test_the_table_forbids_what_it_should():
  assert allowed("sampling", "models")
  assert allowed("models", "models")
  assert allowed("__init__", "loop")
  assert not allowed("models", "sampling")
  assert not allowed("models", "algos")
  assert not allowed("placement", "config")
  assert not allowed("types", "__init__")


@pytest.mark.parametrize("path", FILES)
def test_imports_point_down(path: pathlib.Path):
  here = source.room(path)
  wrong = [
    f"line {node.lineno}: {here} may not import {dotted}"
    for node, dotted in source.imports(source.parse(path))
    if source.target(dotted) not in source.LEVEL
    or not allowed(here, source.target(dotted))
  ]
  assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES)
def test_imports_bring_in_modules_by_their_full_name(path: pathlib.Path):
  wrong = []
  for node, dotted in source.imports(source.parse(path)):
    file = source.PACKAGE.parent.joinpath(*dotted.split("."))
    if not (file.is_dir() or file.with_suffix(".py").is_file()):
      wrong.append(f"line {node.lineno}: {dotted} is not a module")
  # The package's own names are the one place where names are brought in.
  if path != source.PACKAGE / "__init__.py":
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES)
def test_no_import_stands_inside_a_function(path: pathlib.Path):
  defs = (ast.FunctionDef, ast.AsyncFunctionDef)
  lines = {
    inner.lineno
    for node in ast.walk(source.parse(path))
    if isinstance(node, defs)
    for inner in ast.walk(node)
    if isinstance(inner, ast.Import | ast.ImportFrom)
  }
  assert not lines, f"imports inside functions on lines {sorted(lines)}"
