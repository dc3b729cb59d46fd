"""The repository as data: its files, its rooms, and which may see which."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "jaxrl_post"

# A file may import from the levels above its own line, never from its own.
LEVELS = (
  ("types", "gguf_header"),
  ("algos", "models", "rewards", "data", "runtime"),
  ("sampling", "training", "envs"),
  ("placement",),
  ("config", "standalone"),
  ("prepare", "record"),
  ("export", "roles", "scorer"),
  ("generation",),
  ("loop",),
  ("collect", "serve", "planning", "show"),
  ("main",),
  ("__init__",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def modules() -> list[pathlib.Path]:
  """Lists the package's files, sorted."""
  return sorted(PACKAGE.rglob("*.py"))


def scripts() -> list[pathlib.Path]:
  """Lists every Python file we wrote, sorted."""
  folders = ("src", "tests", "experiments", "bench")
  return sorted(f for name in folders for f in (ROOT / name).rglob("*.py"))


def name(path: pathlib.Path) -> str:
  """Returns a file's path as people write it."""
  return path.relative_to(ROOT).as_posix()


def parse(path: pathlib.Path) -> ast.Module:
  """Returns a file's syntax tree."""
  return ast.parse(path.read_text(encoding="utf-8"), name(path))


def room(path: pathlib.Path) -> str:
  """Returns the room a file of the package is in."""
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms() -> set[str]:
  """Returns the rooms there are on disk, the package's own names included."""
  return {room(path) for path in modules()}


def imports(tree: ast.AST) -> list[tuple[ast.stmt, str]]:
  """Finds every import of the package.

  Returns:
    The statement and the full dotted name it brings in, for each name.
  """
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found += [(node, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = "." * node.level + (node.module or "")
      found += [(node, f"{base}.{alias.name}") for alias in node.names]
  ours = ("jaxrl_post", ".")
  return [(node, dotted) for node, dotted in found if dotted.startswith(ours)]


def target(dotted: str) -> str:
  """Returns the room that `jaxrl_post.room.module` speaks of."""
  parts = dotted.split(".")
  return parts[1] if len(parts) > 1 else "__init__"
