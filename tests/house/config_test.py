"""Every experiment resolves, and the tree of settings stays small."""

import ast
import dataclasses
import pathlib
import typing
from typing import Any

import pytest

from jaxrl_post import config
from jaxrl_post.runtime import assign
from tests.house import source

MAX_LEAVES = 120
EXPERIMENTS = sorted((source.ROOT / "experiments").glob("[!_]*.py"))
NAMED = [pytest.param(p, id=p.stem) for p in EXPERIMENTS]


def test_the_demo_is_an_experiment():
  assert "tiny" in [path.stem for path in EXPERIMENTS]


def left_out(node: Any, prefix: str = "") -> set[str]:
  """Names the groups that may be left out, and are: no setting is in them."""
  found, hints = set(), typing.get_type_hints(type(node))
  for field in dataclasses.fields(node):
    value, name = getattr(node, field.name), f"{prefix}{field.name}"
    if assign.is_group(value):
      found |= left_out(value, f"{name}.")
    elif value is None:
      kinds = typing.get_args(hints[field.name])
      groups = [
        kind
        for kind in kinds
        if dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", 0)
      ]
      found |= {name} if groups else set()
  return found


def test_a_group_that_is_left_out_is_known_by_its_type():
  found = left_out(config.load("tiny", EXPERIMENTS[0].parent))
  assert "placement.roles" in found
  assert "algo.kl" in found
  assert not found & {"data.epochs", "model.path"}


@pytest.mark.parametrize("path", NAMED)
def test_an_experiment_is_a_run_of_at_most_120_leaves(path: pathlib.Path):
  run = config.load(path.stem, path.parent)
  assert isinstance(run, config.Run)
  leaves = config.leaves(run).keys() - left_out(run)
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
