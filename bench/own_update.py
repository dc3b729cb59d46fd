"""Our update on a workload, and what the machine allows, for bench/update.py.

    echo 0 | python bench/own_update.py W1 [--rows N] [--padded]

With --padded every completion takes the room of the longest. The order `limits`
times large float32 matrix products.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import own as owns
import scored
import workloads

from jaxrl_post import types
from jaxrl_post.algos import grpo, losses, reducers
from jaxrl_post.data import pack
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import publish
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.training import optim

_SQUARE, _LIMIT_S = 2048, 0.5


def groups(
  w: workloads.Workload, batch: scored.Batch, *, padded: bool = False
) -> list[types.Group]:
  """Returns a batch as the stream hands it to the trainer.

  Args:
    w: the workload.
    batch: what was sampled.
    padded: lengthen each completion to the longest that may be, with tokens
      that do not train: then no two fit into a row.
  """
  found = []
  fill = w.max_tokens if padded else 0
  for first in range(0, w.rows, w.group):
    prompt = types.Prompt(
      uid=first, tokens=tuple(batch.prompts[first]), text="", reference=None
    )
    rollouts = tuple(
      types.Rollout(
        prompt=prompt,
        completion=_completion(row, batch.completions[row], fill),
        temperature=1.0,
        text="",
        reward=batch.rewards[row],
      )
      for row in range(first, first + w.group)
    )
    found.append(types.Group(prompt=prompt, rollouts=rollouts))
  return found


def _completion(
  uid: int, tokens: Sequence[int], length: int
) -> types.Completion:
  """Makes a completion of at least a length."""
  more = max(length - len(tokens), 0)
  return types.Completion(
    uid=uid,
    tokens=(*tokens, *(workloads.PAD_ID,) * more),
    logprobs=(0.0,) * (len(tokens) + more),
    versions=(*(0,) * len(tokens), *(-1,) * more),
    finish="length",
  )


class Trained:
  """The state that updates change, its compiled steps, and its policy."""

  def __init__(
    self,
    w: workloads.Workload,
    microbatches: int,
    away: types.Tree | None = None,
    *,
    padded: bool = False,
  ) -> None:
    """Places weights and optimizer; nothing of the update is compiled yet.

    Args:
      w: the workload.
      microbatches: parts of a batch.
      away: shardings of an engine's weights. None if nobody samples: then
        updates use the memory of the weights again.
      padded: as of `groups`.
    """
    self._w, self._padded = w, padded
    cfg = owns.config(w)
    self._layout = pack.layout(
      w.rows,
      w.group,
      max_prompt=w.prompt_len,
      max_tokens=w.max_tokens,
      flops=functools.partial(transformer.layer_flops, cfg),
      microbatches=microbatches,
    )
    # No sampler is there to be corrected for; the mean is the peers'.
    algo = dataclasses.replace(
      grpo.objective(),
      region=losses.Clip(low=scored.CLIP, high=scored.CLIP),
      reducer=reducers.SequenceMean(),
      correction=None,
    )
    cut = optim.Optim(
      learning_rate=scored.LEARNING_RATE, microbatches=microbatches
    )
    mesh = owns.one_device(meshes.TRAINING_AXES)
    home = meshes.weight_shardings(
      transformer.spec(cfg), meshes.TRAINING_RULES, mesh
    )
    params = jax.device_put(owns.parameters(w), home)
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      params,
    )
    self._publisher = None
    if away is not None:
      self._publisher = publish.plan(home, away, shapes, "float32")
    self._trainer = trainers.build(
      mesh,
      params=shapes,
      decoder=decoders.Decoder(cfg),
      algo=algo,
      optimizer=optim.build(cut, num_steps=1),
      cut=cut,
      key=jax.random.key(1),
      keep_params=self._publisher is not None and self._publisher.aliases,
      park=(),
      lock=contextlib.nullcontext(),
    )
    self._state = self._trainer.start(params)
    self._updates = 0
    self.policy = self._published()

  def update(self, batch: scored.Batch) -> None:
    """Packs, scores and trains a batch, and publishes the weights."""
    found = groups(self._w, batch, padded=self._padded)
    rows = self._trainer.put(pack.pack(found, self._layout))
    ready = self._trainer.score(self._state, rows)
    self._state, _ = self._trainer.update(self._state, ready)
    self._updates += 1
    self.policy = self._published()
    jax.block_until_ready((self._state, self.policy))

  def check(self) -> float:
    """Returns the log-probability of the checked sequence, by the policy."""
    state = self.policy or self._state
    return owns.check(self._w, state.params)

  def _published(self) -> types.Policy | None:
    """Returns what the sampler shall use next."""
    if self._publisher is None:
      return None
    params, _ = self._publisher(self._state.params)
    count = self._updates
    return types.Policy(params=params, version=count, step=count)


def limits() -> Callable[[], dict[str, float]]:
  """Returns an order that measures GFLOP/s of large float32 products."""
  multiply = jax.jit(lambda x: x[0] @ x[1])

  def order() -> dict[str, float]:
    square = jax.random.normal(jax.random.key(0), (2, _SQUARE, _SQUARE))
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
  w, chosen = scored.asked(
    __doc__,
    padded={"action": "store_true", "help": "give all the longest's room"},
  )
  trained = Trained(w, w.rows // chosen.rows, padded=chosen.padded)
  scored.serve(
    w,
    trained.update,
    check=trained.check,
    version=f"jax {jax.__version__}",
    others={"limits": limits()},
  )


if __name__ == "__main__":
  main()
