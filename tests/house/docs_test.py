"""Documents speak of files that exist, in examples that parse."""

import ast
import re

import pytest

from tests.house import source

DOCS = sorted((source.ROOT / "docs").glob("*.md"))
TEXTS = sorted([*source.ROOT.glob("*.md"), *DOCS])
# Where a path in a document may start from.
BASES = (source.ROOT, source.PACKAGE, source.ROOT / "docs")
# A place on somebody's own machine.
PRIVATE = re.compile(r"(?<![\w.~/])/(home|root|tmp|work|Users|mnt)/")


def paths(text: str) -> set[str]:
  """Finds what a document says is a file or a folder of the repository.

  Returns:
    Words in backticks that begin with one of our folders or end as our files
    do, and the targets of links that stay inside the repository.
  """
  text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
  words = re.findall(r"`([\w./-]+)`", text)
  folders = {p.name for base in BASES for p in base.iterdir() if p.is_dir()}
  ours = {
    word
    for word in words
    if word.split("/")[0] in folders | {"src"}
    and "/" in word
    or re.search(r"\w\.(py|md|toml)$", word)
  }
  links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
  return ours | {link for link in links if "://" not in link}


def blocks(text: str) -> list[str]:
  """Returns the code of the blocks marked `python run`."""
  pattern = r"^```python run\n(.*?)^```"
  return re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)


def test_the_finders_find():
  text = "`src/x.py` `a.b` `x <y>` [l](docs/m.md#a) [w](https://a.b/c.md)\n"
  assert paths(text) == {"src/x.py", "docs/m.md"}
  code = "```python run\nx = 1\n```\n```sh\nls `src/y.py`\n```\n"
  assert blocks(code) == ["x = 1\n"] and paths(code) == set()
  assert PRIVATE.search("see /home/me") and not PRIVATE.search("a/home/b")


@pytest.mark.parametrize("name", ["README.md", "docs/map.md"])
def test_every_path_that_is_named_exists(name: str):
  found = paths((source.ROOT / name).read_text(encoding="utf-8"))
  missing = {p for p in found if not any((b / p).exists() for b in BASES)}
  assert found and missing == set()


def test_nothing_speaks_of_a_private_place():
  code = [p for p in source.scripts() if "tests" not in p.parts]
  found = {
    source.name(path)
    for path in [*TEXTS, *code]
    if PRIVATE.search(path.read_text(encoding="utf-8"))
  }
  assert found == set()


@pytest.mark.parametrize("name", [source.name(path) for path in TEXTS])
def test_examples_parse(name: str):
  for code in blocks((source.ROOT / name).read_text(encoding="utf-8")):
    ast.parse(code)


def test_the_map_has_every_room():
  text = (source.ROOT / "docs" / "map.md").read_text(encoding="utf-8")
  rooms = source.rooms() - {"__init__"}
  assert {room for room in rooms if f"`{room}" not in text} == set()
