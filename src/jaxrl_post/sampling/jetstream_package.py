"""google-jetstream 0.2.2, made to run on today's JAX and without TensorFlow."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import pathlib
import sys
import types as python_types
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl_post import types

VERSION = "0.2.2"

# What JetStream imports for tokenizers that are not used here: the first is all
# of TensorFlow.
_STAND_INS = {
  "seqio": (),
  "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary"),
  "tiktoken": ("Encoding",),
  "tiktoken.load": ("load_tiktoken_bpe",),
}


@dataclasses.dataclass(frozen=True)
class Package:
  """The modules of JetStream, and gRPC.

  Attributes:
    engine_api: `Engine` and `ResultTokens`.
    token_utils: padding, and what became of a block.
    tokenizer_api: `Tokenizer`.
    tokenizer_pb2: what a tokenizer is described by.
    orchestrator: `Driver` and `LLMOrchestrator`.
    messages: requests and responses.
    services: stub and servicer.
    grpc: the package grpc.
  """

  engine_api: Any
  token_utils: Any
  tokenizer_api: Any
  tokenizer_pb2: Any
  orchestrator: Any
  messages: Any
  services: Any
  grpc: Any


@functools.cache
def load() -> Package:
  """Imports JetStream, once.

  Its files stay as they are, but

  * it calls `jax.tree_map`, which JAX no longer has: JAX is given one;
  * its imports of seqio (TensorFlow) and tiktoken find stand-ins, which are
    gone afterwards;
  * it sets the root logger to DEBUG and to stdout: the logger is put back;
  * its orchestrator is compiled as by `python -O`. Its only assertion, that
    some slot is taken, fails whenever another of its threads gives the last one
    back at that moment, and would end the process. A block for nobody is all
    that comes of it.

  Returns:
    The modules.

  Raises:
    InputError: it is not installed, or in another version.
  """
  try:
    found = importlib.metadata.version("google-jetstream")
    if found != VERSION:
      raise ImportError(found)
    with _stand_ins(), _root_logger_kept():
      module = importlib.import_module
      package = Package(
        engine_api=module("jetstream.engine.engine_api"),
        token_utils=module("jetstream.engine.token_utils"),
        tokenizer_api=module("jetstream.engine.tokenizer_api"),
        tokenizer_pb2=module("jetstream.engine.tokenizer_pb2"),
        orchestrator=_unasserted("jetstream.core.orchestrator"),
        messages=module("jetstream.core.proto.jetstream_pb2"),
        services=module("jetstream.core.proto.jetstream_pb2_grpc"),
        grpc=module("grpc"),
      )
  except ImportError as error:
    raise types.InputError(
      f"google-jetstream: expected version {VERSION} and the packages of the "
      f"extra jetstream, got {error}. Run pip install 'jaxrl_post[jetstream]', "
      f"then pip install --no-deps google-jetstream=={VERSION}."
    ) from None
  if not hasattr(jax, "tree_map"):
    setattr(jax, "tree_map", jax.tree.map)  # noqa: B010 (unknown to pyright)
  return package


def _unasserted(name: str) -> python_types.ModuleType:
  """Imports a module without its assertions."""
  spec = importlib.util.find_spec(name)
  if spec is None or spec.origin is None:
    raise ImportError(f"no module {name}")
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # Its dataclasses look it up.
  source = pathlib.Path(spec.origin).read_text(encoding="utf-8")
  exec(compile(source, spec.origin, "exec", optimize=1), vars(module))
  return module


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
  """Answers imports of what JetStream only imports."""
  made = [name for name in _STAND_INS if name not in sys.modules]
  for name in made:
    module = python_types.ModuleType(name)
    vars(module).update({n: type(n, (), {}) for n in _STAND_INS[name]})
    sys.modules[name] = module
  try:
    yield
  finally:
    for name in made:
      del sys.modules[name]


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
  """Undoes what an import does to the root logger."""
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  try:
    yield
  finally:
    root.setLevel(level)
    for handler in set(root.handlers) - {*handlers}:
      root.removeHandler(handler)
