"""Every experiment resolves, and the tree of settings stays small."""

import ast
import pathlib

import pytest

from jaxrl_post import config
from tests.house import source

MAX_LEAVES = 120
EXPERIMENTS = sorted((source.ROOT / "experiments").glob("[!_]*.py"))
NAMED = [pytest.param(p, id=p.stem) for p in EXPERIMENTS]


def test_the_demo_is_an_experiment():
  assert "tiny" in [path.stem for path in EXPERIMENTS]


@pytest.mark.parametrize("path", NAMED)
def test_an_experiment_is_a_run_of_at_most_120_leaves(path: pathlib.Path):
  run = config.load(path.stem, path.parent)
  assert isinstance(run, config.Run)
  leaves = config.leaves(run)
  assert 0 < len(leaves) <= MAX_LEAVES, f"got {len(leaves)} leaves"


@pytest.mark.parametrize("path", NAMED)
def test_a_leaf_is_a_plain_value_or_a_function(path: pathlib.Path):
  plain = (bool, int, float, str, tuple, type(None))
  odd = {
    key: type(value).__name__
    for key, value in config.leaves(config.load(path.stem, path.parent)).items()
    if not isinstance(value, plain) and not callable(value)
  }
  assert odd == {}


@pytest.mark.parametrize("path", NAMED)
def test_an_experiment_says_what_it_is(path: pathlib.Path):
  functions = {
    node.name: ast.get_docstring(node)
    for node in source.parse(path).body
    if isinstance(node, ast.FunctionDef)
  }
  assert functions["get_config"]
