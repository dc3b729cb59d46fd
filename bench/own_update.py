"""Our update on a workload, and what the machine allows, for bench/update.py.

    echo 0 | python bench/own_update.py W1 [--rows N]

The order `limits` times large float32 matrix products.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import own as owns
import scored
import workloads

from jaxrl_post import types
from jaxrl_post.algos import grpo, losses, reducers
from jaxrl_post.data import pack
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.training import optim, step

_SQUARE, _LIMIT_S = 2048, 0.5


def groups(w: workloads.Workload, batch: scored.Batch) -> list[types.Group]:
  """Returns a batch as the stream hands it to the trainer."""
  found = []
  for first in range(0, w.rows, w.group):
    prompt = types.Prompt(
      uid=first, tokens=tuple(batch.prompts[first]), text="", reference=None
    )
    rollouts = tuple(
      types.Rollout(
        prompt=prompt,
        completion=types.Completion(
          uid=row,
          tokens=tuple(batch.completions[row]),
          logprobs=(0.0,) * len(batch.completions[row]),
          versions=(0,) * len(batch.completions[row]),
          finish="length",
        ),
        temperature=1.0,
        text="",
        reward=batch.rewards[row],
      )
      for row in range(first, first + w.group)
    )
    found.append(types.Group(prompt=prompt, rollouts=rollouts))
  return found


class Trained:
  """The state that updates change, and its compiled steps."""

  def __init__(self, w: workloads.Workload, microbatches: int) -> None:
    """Places weights and optimizer; nothing is compiled yet."""
    self._w = w
    self._layout = pack.layout(
      w.rows,
      w.group,
      max_prompt=w.prompt_len,
      max_tokens=w.max_tokens,
      flops=functools.partial(transformer.layer_flops, owns.config(w)),
      microbatches=microbatches,
    )
    self._decoder = decoders.Decoder(owns.config(w))
    # No sampler is there to be corrected for; the mean is the peers'.
    algo = dataclasses.replace(
      grpo.objective(),
      region=losses.Clip(low=scored.CLIP, high=scored.CLIP),
      reducer=reducers.SequenceMean(),
      correction=None,
    )
    optimizer = optim.build(
      optim.Optim(learning_rate=scored.LEARNING_RATE), num_steps=1
    )
    params = jax.device_put(owns.parameters(w))
    self._state = step.init(params, jax.random.key(1), optimizer)
    both = {
      "decoder": self._decoder,
      "algo": algo,
      "microbatches": microbatches,
    }
    self._score = jax.jit(functools.partial(step.score, **both))
    self._update = jax.jit(
      functools.partial(step.update, optimizer=optimizer, **both),
      donate_argnums=0,
    )
    self._logprobs = jax.jit(decoders.logprobs, static_argnums=0)

  def update(self, batch: scored.Batch) -> None:
    """Packs, scores and trains a batch."""
    rows = pack.pack(groups(self._w, batch), self._layout)
    ready = self._score(self._state.params, rows)
    self._state, _ = self._update(self._state, ready)
    jax.block_until_ready(self._state)

  def check(self) -> float:
    """Returns the log-probability of the checked sequence."""
    tokens = jnp.asarray([workloads.checked(self._w)])
    taken, _ = self._logprobs(
      self._decoder,
      self._state.params,
      tokens=tokens,
      positions=jnp.arange(tokens.shape[1])[None],
      segment_ids=jnp.ones_like(tokens),
      temperature=jnp.ones(tokens.shape),
    )
    return float(taken.sum())


def limits() -> Callable[[], dict[str, float]]:
  """Returns an order that measures GFLOP/s of large float32 products."""
  square = jax.random.normal(jax.random.key(0), (2, _SQUARE, _SQUARE))
  multiply = jax.jit(lambda x: x[0] @ x[1])

  def order() -> dict[str, float]:
    jax.block_until_ready(multiply(square))
    times: list[float] = []
    while len(times) < 5 or sum(times) < _LIMIT_S:
      begun = time.perf_counter()
      jax.block_until_ready(multiply(square))
      times.append(time.perf_counter() - begun)
    middle = sorted(times)[len(times) // 2]
    return {"square": 2 * _SQUARE**3 / middle / 1e9}

  return order


def main() -> None:
  """Reads the command line and serves."""
  w, rows = scored.asked(__doc__)
  trained = Trained(w, w.rows // rows)
  scored.serve(
    w,
    trained.update,
    check=trained.check,
    version=f"jax {jax.__version__}",
    others={"limits": limits()},
  )


if __name__ == "__main__":
  main()
