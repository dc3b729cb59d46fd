"""Our engine on a workload, and what the machine allows, for bench/rollout.py.

    echo 0 | python bench/own.py W1 [--rows N] [--block N] [--quick]

Further orders: `limits` times matrix products and memory, `gap` tells how long
a rollout is outside compiled programs, `compilations` how many programs 200
random prompts compile after a warm-up.
"""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import workloads

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import transformer
from jaxrl_post.placement import generator
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.runtime import clock
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import programs

_SQUARE = 2048
_READ_BYTES = 256 << 20
_PROMPTS, _SHORT = 200, 8
_logprobs = jax.jit(decoders.logprobs, static_argnums=0)


def parameters(w: workloads.Workload) -> types.Tree:
  """Returns the weights as `transformer.spec` declares them, on the host."""
  drawn = workloads.weights(w)
  heads, kv_heads, head = w.heads, w.kv_heads, w.head_width
  shapes = {
    "q": (w.width, heads, head),
    "k": (w.width, kv_heads, head),
    "v": (w.width, kv_heads, head),
    "o": (heads, head, w.width),
    "gate": (w.width, w.ff),
    "up": (w.width, w.ff),
    "down": (w.ff, w.width),
  }
  layers = {
    name: np.stack([layer[name].T.reshape(shape) for layer in drawn["layers"]])
    for name, shape in shapes.items()
  }
  norms = np.ones((w.layers, w.width), np.float32)
  return {
    "embed": drawn["embed"],
    "layers": {**layers, "attn_norm": norms, "mlp_norm": norms.copy()},
    "final_norm": norms[0].copy(),
  }


def config(w: workloads.Workload) -> transformer.Config:
  """Returns the shape of the workload's model."""
  return transformer.Config(
    num_layers=w.layers,
    width=w.width,
    num_heads=w.heads,
    num_kv_heads=w.kv_heads,
    head_width=w.head_width,
    ff_width=w.ff,
    vocab_size=w.vocab,
    rope_theta=w.rope_theta,
    norm_eps=w.norm_eps,
  )


def one_device(axes: Sequence[str]) -> jax.sharding.Mesh:
  """Returns a mesh of the first device."""
  device = np.asarray(jax.devices()[:1]).reshape((1,) * len(axes))
  return meshes.over(device, axes)


@dataclasses.dataclass(frozen=True)
class Own:
  """The engine, with what it takes to make another one."""

  w: workloads.Workload
  decoder: decoders.Decoder
  mesh: jax.sharding.Mesh
  cfg: engines.Sampling
  steps: programs.Steps
  policy: types.Policy

  def engine(self, steps: programs.Steps) -> engines.Engine:
    """Returns an engine over compiled steps; its completions are the same."""
    build = generator.build(
      steps,
      self.mesh,
      cfg=self.cfg,
      max_prompt=self.w.prompt_len,
      vocab_size=self.w.vocab,
      lock=contextlib.nullcontext(),
    )
    return build(jax.random.key(1))


def check(w: workloads.Workload, params: types.Tree) -> float:
  """Returns the log-probability of the checked sequence under weights."""
  tokens = jnp.asarray([workloads.checked(w)])
  taken, _ = _logprobs(
    decoders.Decoder(config(w)),
    params,
    tokens=tokens,
    positions=jnp.arange(tokens.shape[1])[None],
    segment_ids=jnp.ones_like(tokens),
    temperature=jnp.ones(tokens.shape),
  )
  return float(taken.sum())


def make(w: workloads.Workload, rows: int, block: int, **sizes: Any) -> Own:
  """Makes what an engine of so many rows needs; `sizes` are of `Sampling`."""
  cfg = engines.Sampling(
    max_tokens=w.max_tokens, rows=rows, block=block, **sizes
  )
  mesh = one_device(meshes.GENERATION_AXES)
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  decoder = decoders.Decoder(config(w))
  steps = generator.compiled(
    mesh,
    rules={},
    decoder=decoder,
    cfg=cfg,
    max_prompt=w.prompt_len,
    group=w.group,
  )
  policy = types.Policy(
    params=jax.device_put(parameters(w), whole),
    version=0,
    step=0,
    fingerprints=None,
  )
  return Own(w, decoder, mesh, cfg, steps, policy)


def requests(
  w: workloads.Workload, step: int, prompts: list[list[int]]
) -> list[types.Request]:
  """Asks for a group of each prompt."""
  sampling = types.SamplingParams(max_tokens=w.max_tokens, stop_ids=w.end_ids)
  return [
    types.Request(
      prompt=tuple(prompt),
      uids=tuple(range(first, first + w.group)),
      sampling=sampling,
    )
    for first, prompt in zip(
      range(step * w.rows, (step + 1) * w.rows, w.group), prompts, strict=True
    )
  ]


def completions(
  engine: engines.Engine, policy: types.Policy, asked: list[types.Request]
) -> list[list[int]]:
  """Returns the ids of completions, in the order they were asked for."""
  made = engines.generate(engine, policy, asked)
  return [list(completion.tokens) for completion in made]


# ------------------------------------------------------------ other orders


def gap(own: Own) -> Callable[[], dict[str, Any]]:
  """Returns an order that tells how long a rollout is outside programs.

  Every compiled step is waited for at once, which only adds to the time
  outside: an engine that works while a program runs is not given that.
  """
  spent: dict[str, float] = {}

  def timed(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **more: Any) -> Any:
      begun = time.perf_counter()
      out = jax.block_until_ready(step(*args, **more))
      spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun
      return out

    return run

  fields = [field.name for field in dataclasses.fields(own.steps)]
  given = {name: getattr(own.steps, name) for name in fields}
  wrapped = {n: timed(n, step) for n, step in given.items() if callable(step)}
  engine = own.engine(dataclasses.replace(own.steps, **wrapped))
  asked = requests(own.w, 0, workloads.prompts(own.w, 0))

  def order() -> dict[str, Any]:
    spent.clear()
    begun = time.perf_counter()
    engines.generate(engine, own.policy, asked)
    return {"seconds": time.perf_counter() - begun, "programs": dict(spent)}

  return order


def compilations(own: Own, engine: engines.Engine, count: int) -> dict:
  """Counts programs that random prompts compile after a warm-up.

  Returns:
    The number of `prompts`, and of programs that were compiled during them.
    Lengths, group sizes, limits and temperatures are random as well.
  """
  w, rng = own.w, np.random.default_rng(0)
  engine.warm_up(own.policy.params)
  engines.generate(engine, own.policy, requests(w, 0, workloads.prompts(w, 0)))
  asked = []
  for number in range(count):
    length = rng.integers(1, w.prompt_len + 1)
    first = number * w.group
    sampling = types.SamplingParams(
      temperature=float(rng.uniform(0.5, 1.5)),
      max_tokens=int(rng.integers(1, _SHORT + 1)),
      stop_ids=w.end_ids,
    )
    asked.append(
      types.Request(
        prompt=tuple(rng.integers(1, w.vocab, length).tolist()),
        uids=tuple(range(first, first + int(rng.integers(1, w.group + 1)))),
        sampling=sampling,
      )
    )
  watch = clock.Clock(())
  engines.generate(engine, own.policy, asked)
  watch.close()
  return {"prompts": count, "compilations": watch.compilations}


def limits(own: Own, seconds: float) -> Callable[[], dict[str, float]]:
  """Returns an order that measures the machine, as JAX can use it.

  `decode` is the rate of the matrix products of one decode step at the
  workload's rows, every weight read once: of the layers and the head, without
  norms, attention and sampling. The weights of each layer are arrays of their
  own, so none is cut out of a stack first.
  """
  w = own.w
  products = 2 * w.rows * (w.layers * w.layer_weights + w.vocab * w.width)
  key = jax.random.key(0)
  run = jax.jit(_chain)
  chain = (jax.random.normal(key, (w.rows, w.width)), _flat(own))
  square = jax.random.normal(key, (2, _SQUARE, _SQUARE))
  multiply = jax.jit(lambda x: x[0] @ x[1])
  data = jnp.ones(_READ_BYTES // 4)
  total = jax.jit(jnp.sum)

  def order() -> dict[str, float]:
    return {
      "decode": products / _seconds(lambda: run(*chain), seconds) / 1e9,
      "square": 2
      * _SQUARE**3
      / _seconds(lambda: multiply(square), seconds)
      / 1e9,
      "read": _READ_BYTES / _seconds(lambda: total(data), seconds) / 1e9,
    }

  return order


def _flat(own: Own) -> dict[str, Any]:
  """Returns the weights as matrices, a layer at a time."""
  w, tree = own.w, own.policy.params
  wide = {"q", "k", "v", "gate", "up"}

  def matrix(name: str, index: int) -> jax.Array:
    x = tree["layers"][name][index]
    shape = (w.width, -1) if name in wide else (-1, w.width)
    return jnp.array(x.reshape(shape))

  names = (*sorted(wide), "o", "down")
  layers = [{n: matrix(n, i) for n in names} for i in range(w.layers)]
  return {"layers": layers, "head": jnp.array(tree["embed"].T)}


def _chain(x: jax.Array, weights: dict[str, Any]) -> jax.Array:
  """Multiplies through all layers; what joins two products is kept cheap."""
  for layer in weights["layers"]:
    q, k, v = (x @ layer[name] for name in ("q", "k", "v"))
    heads = q.reshape(len(q), -1, k.shape[1]) + (k + v)[:, None]
    x = x + heads.reshape(q.shape) @ layer["o"]
    x = x + ((x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
  return x @ weights["head"]


def _seconds(run: Callable[[], jax.Array], least: float) -> float:
  """Returns the median time of runs that take `least` seconds in all."""
  for _ in range(2):
    jax.block_until_ready(run())
  times: list[float] = []
  while len(times) < 5 or sum(times) < least:
    begun = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - begun)
  return float(np.median(times))


def main() -> None:
  """Reads the command line and serves."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("workload", choices=sorted(workloads.WORKLOADS))
  parser.add_argument("--rows", type=int, help="of the engine; default all")
  parser.add_argument("--block", type=int, default=32)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  chosen = parser.parse_args()
  w = workloads.WORKLOADS[chosen.workload]
  own = make(w, chosen.rows or w.rows, chosen.block)
  engine = own.engine(own.steps)

  def generate(step: int, prompts: list[list[int]]) -> list[list[int]]:
    return completions(engine, own.policy, requests(w, step, prompts))

  count = _PROMPTS // 10 if chosen.quick else _PROMPTS
  made: dict[str, Callable[[], dict]] = {}

  def later(name: str, build: Callable[[], Callable[[], dict]]) -> Callable:
    """Builds what an order needs when it first comes."""

    def order() -> dict:
      if name not in made:
        made[name] = build()
      return made[name]()

    return order

  workloads.serve(
    w,
    generate,
    check=check(w, own.policy.params),
    version=f"jax {jax.__version__}",
    others={
      "limits": later("limits", lambda: limits(own, 0.5)),
      "gap": later("gap", lambda: gap(own)),
      "compilations": lambda: compilations(own, engine, count),
    },
  )


if __name__ == "__main__":
  main()
