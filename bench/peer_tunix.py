"""Tunix's own sampler on a workload, for bench/rollout.py.

    echo 0 | PYTHON bench/peer_tunix.py W1

Runs in an environment with google-tunix. The sampler is called as the rollout
worker of its GRPO learner calls it: text in, every prompt once a completion.
"""

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import workloads
from flax import nnx
from tunix.generate import sampler as samplers
from tunix.models.llama3 import model as llama
from tunix.rl import common

_KERNELS = ("gate", "up", "down")


class Tokenizer:
  """Text is ids in decimal; the end id is one that the model cannot draw."""

  def __init__(self, w: workloads.Workload) -> None:
    self._end = w.vocab

  def encode(self, text: str, **_: Any) -> list[int]:
    """Returns the ids of a text."""
    return [int(word) for word in text.split()]

  def decode(self, ids: list[int], **_: Any) -> str:
    """Returns the text of ids."""
    return " ".join(map(str, ids))

  def bos_id(self) -> None:
    """There is none."""

  def eos_id(self) -> int:
    """Returns the end id."""
    return self._end

  def pad_id(self) -> int:
    """Returns the id of padding."""
    return workloads.PAD_ID


def placed(w: workloads.Workload) -> dict[tuple[Any, ...], np.ndarray]:
  """Returns the weights by their path in Tunix's model."""
  drawn = workloads.weights(w)
  ones, head = np.ones(w.width, np.float32), w.head_width
  found: dict[tuple[Any, ...], np.ndarray] = {
    ("embedder", "input_embedding"): drawn["embed"],
    ("final_norm", "w"): ones,
  }
  for index, layer in enumerate(drawn["layers"]):
    at = ("layers", index)
    found[*at, "input_layernorm", "w"] = ones
    found[*at, "post_attention_layernorm", "w"] = ones
    for name in "qkv":
      split = layer[name].T.reshape(w.width, -1, head)
      found[*at, "attn", f"{name}_proj", "w"] = split
    joined = layer["o"].T.reshape(-1, head, w.width)
    found[*at, "attn", "o_proj", "w"] = joined
    for name in _KERNELS:
      found[*at, "mlp", f"{name}_proj", "kernel"] = layer[name].T
  return found


def build(w: workloads.Workload) -> llama.Llama3:
  """Builds the model and gives it the weights, all of them."""
  config = llama.ModelConfig(
    num_layers=w.layers,
    vocab_size=w.vocab,
    embed_dim=w.width,
    hidden_dim=w.ff,
    num_heads=w.heads,
    head_dim=w.head_width,
    num_kv_heads=w.kv_heads,
    rope_theta=int(w.rope_theta),
    norm_eps=w.norm_eps,
    weight_tying=True,
  )
  devices = np.asarray(jax.devices()[:1]).reshape(1, 1)
  mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
  with mesh:
    model = llama.Llama3(config, rngs=nnx.Rngs(params=0))
  state, wanted = nnx.state(model), placed(w)
  variables = dict(nnx.to_flat_state(state))
  if variables.keys() != wanted.keys():
    odd = sorted(map(str, variables.keys() ^ wanted.keys()))
    sys.exit(f"peer_tunix: expected the weights of Llama, got also {odd}.")
  for path, variable in variables.items():
    if variable.shape != wanted[path].shape:
      sys.exit(f"peer_tunix: {path}: expected {variable.shape}.")
    variable.value = jax.device_put(
      jnp.asarray(wanted[path]), jax.sharding.NamedSharding(mesh, jax.P())
    )
  nnx.update(model, state)
  return model


def version() -> str:
  """Says what is measured."""
  return "google-tunix " + importlib.metadata.version("google-tunix")


def check(w: workloads.Workload, model: llama.Llama3) -> float:
  """Returns the log-probability of the checked sequence."""
  ids = jnp.asarray([workloads.checked(w)])
  graph, state = nnx.split(model)
  taken = common.compute_per_token_logps(
    graph,
    state,
    prompt_tokens=ids[:, :1],
    completion_tokens=ids[:, 1:],
    pad_id=workloads.PAD_ID,
    eos_id=w.vocab,
  )
  return float(jnp.sum(taken[0] if isinstance(taken, tuple) else taken))


def sampler(w: workloads.Workload, model: llama.Llama3) -> samplers.Sampler:
  """Returns a sampler that shares the weights of a model."""
  return samplers.Sampler(
    model,
    Tokenizer(w),
    samplers.CacheConfig(
      cache_size=w.prompt_len + w.max_tokens,
      num_layers=w.layers,
      num_kv_heads=w.kv_heads,
      head_dim=w.head_width,
    ),
  )


def rollouts(
  w: workloads.Workload, sampler: samplers.Sampler
) -> Callable[[int, list[list[int]]], list[list[int]]]:
  """Returns what makes the completions of a step's prompts."""
  tokenizer = Tokenizer(w)

  def generate(step: int, prompts: list[list[int]]) -> list[list[int]]:
    texts = [tokenizer.decode(ids) for ids in prompts for _ in range(w.group)]
    made = sampler(
      texts,
      max_generation_steps=w.max_tokens,
      max_prompt_length=w.prompt_len,
      temperature=1.0,
      top_p=1.0,
      top_k=None,
      seed=step,
      eos_tokens=w.end_ids or None,
    )
    return [ids.tolist() for ids in made.tokens]

  return generate


def main() -> None:
  """Reads the command line and serves."""
  w = workloads.WORKLOADS[sys.argv[1]]
  model = build(w)
  workloads.serve(
    w,
    rollouts(w, sampler(w, model)),
    check=check(w, model),
    version=version(),
  )


if __name__ == "__main__":
  main()
