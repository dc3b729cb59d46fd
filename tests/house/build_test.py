"""BUILD says which rooms there are and what each of them sees."""

import ast
import pathlib
import shutil
import subprocess

import pytest

from tests.house import source

BUILD = source.ROOT / "BUILD"
# The package's own names are a target of the package's own name.
TARGET = {"__init__": "jaxrl_post"}
ARGUMENTS = ("-type=build", "-mode=check", "-lint=warn", "-warnings=-native-py")


def calls() -> dict[str, ast.Call]:
  """Returns the calls of BUILD that make a target, by its name."""
  found = {}
  for node in ast.walk(ast.parse(BUILD.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Call):
      names = [k.value for k in node.keywords if k.arg == "name"]
      found |= {ast.literal_eval(value): node for value in names}
  return found


def argument(call: ast.Call, key: str) -> ast.expr:
  """Returns an argument of a target, an empty list when it is not given."""
  given = [k.value for k in call.keywords if k.arg == key]
  return given[0] if given else ast.List([], ast.Load())


def files(call: ast.Call) -> set[pathlib.Path]:
  """Returns the files that a target's `srcs` name."""
  srcs = argument(call, "srcs")
  if isinstance(srcs, ast.List):
    return {source.ROOT / name for name in ast.literal_eval(srcs)}
  assert isinstance(srcs, ast.Call) and ast.unparse(srcs.func) == "glob"
  patterns = ast.literal_eval(srcs.args[0])
  return {file for p in patterns for file in source.ROOT.glob(p)}


def deps(call: ast.Call) -> set[str]:
  """Returns the names of the targets that a target sees."""
  return {d.removeprefix(":") for d in ast.literal_eval(argument(call, "deps"))}


def seen(paths: list[pathlib.Path]) -> set[str]:
  """Returns the targets that files import, their own rooms left out."""
  here = {source.room(path) for path in paths}
  rooms = {
    source.target(dotted)
    for path in paths
    for _, dotted in source.imports(source.parse(path))
  }
  return {TARGET.get(room, room) for room in rooms - here}


@pytest.mark.parametrize("room", sorted(source.rooms()))
def test_each_room_is_a_target_with_its_files_and_what_they_import(room: str):
  name = TARGET.get(room, room)
  assert name in calls(), f"BUILD has no target {name}"
  call = calls()[name]
  paths = [p for p in source.modules() if source.room(p) == room]
  assert files(call) == set(paths)
  wanted = [f":{dep}" for dep in sorted(seen(paths))]
  assert deps(call) == seen(paths), f"BUILD, {name}: expected deps {wanted}"


def test_every_target_has_files_and_is_a_room_or_the_tests():
  known = {TARGET.get(room, room) for room in source.LEVEL} | {"tests"}
  assert calls().keys() <= known
  assert [name for name, call in calls().items() if not files(call)] == []


def test_the_tests_see_every_room():
  rooms = {TARGET.get(room, room) for room in source.rooms()}
  assert deps(calls()["tests"]) == rooms


def linters() -> list[str]:
  """Returns the buildifiers at hand: on PATH or beside this Python."""
  local = source.ROOT / ".venv" / "bin" / "buildifier"
  found = [shutil.which("buildifier"), str(local) if local.exists() else None]
  return sorted({path for path in found if path})


@pytest.mark.parametrize("linter", ["ast", *linters()])
def test_build_is_well_formed_to_every_linter_at_hand(linter: str):
  if linter == "ast":
    statements = ast.parse(BUILD.read_text(encoding="utf-8")).body
    shapes = {type(node).__name__ for node in statements}
    assert shapes == {"Expr"}, "expected only calls and a docstring"
    return
  done = subprocess.run(
    [linter, *ARGUMENTS, str(BUILD)],
    capture_output=True,
    check=False,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stdout + done.stderr
