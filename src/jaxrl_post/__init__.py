"""RL post-training of language models as pure JAX functions.

The names below are promised to stay between minor versions; everything else
may be imported too, by its room. Importing the package starts no device, reads
no file, and loads a room only when a name of it is used.
"""

import importlib
from typing import Any

# Name to the module that has it.
_HOMES = {
  # Records.
  "Batch": "types",
  "Completion": "types",
  "Example": "types",
  "Group": "types",
  "InputError": "types",
  "LossInputs": "types",
  "Policy": "types",
  "Prompt": "types",
  "Request": "types",
  "Rollout": "types",
  "RunError": "types",
  "SamplingParams": "types",
  "TrainState": "types",
  # Steps: pure, to be jitted or called.
  "completions": "sampling.steps",
  "decode": "sampling.steps",
  "init": "training.step",
  "insert": "sampling.steps",
  "Layout": "data.pack",
  "pack": "data.pack",
  "plan": "placement.publish",
  "prefill": "sampling.prefix",
  "score": "training.step",
  "update": "training.step",
  # Whole runs.
  "Decoder": "models.decoder",
  "Run": "config",
  "load": "config",
  "override": "config",
  "run": "loop",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
  """Loads a promised name on its first use."""
  if name not in _HOMES:
    raise AttributeError(f"jaxrl_post has no {name!r}; it has {__all__}")
  return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
