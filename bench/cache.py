"""Compares pages of the cache: what they waste, and what a token takes.

    python bench/cache.py [--quick] [--repeats N]

The model is that of W2 (bench/workloads.py) with completions of 16 to 256
tokens, all lengths as often as each other. Each page size decodes the same
blocks, in turn; a page as long as a completion is a cache without pages. Waste
is counted in the lengths themselves, over a rollout that refills its rows: the
positions of pages in use, divided by those that hold something, minus 1.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import numpy as np
import own as owns
import workloads

from jaxrl_post import types
from jaxrl_post.sampling import engine as engines

_SHORTEST, _LONGEST = 16, 256
_PAGES = (16, 32, 64, _LONGEST)
_WASTE, _SPEED = 0.25, 1.05


def _requests(w: workloads.Workload, count: int) -> list[types.Request]:
  """Asks for completions of all lengths, in random order."""
  rng = np.random.default_rng(0)
  lengths = np.linspace(_SHORTEST, _LONGEST, count).round().astype(int)
  asked = []
  for number, length in enumerate(rng.permutation(lengths).tolist()):
    first = number * w.group
    asked.append(
      types.Request(
        prompt=tuple(rng.integers(1, w.vocab, w.prompt_len).tolist()),
        uids=tuple(range(first, first + w.group)),
        sampling=types.SamplingParams(max_tokens=length),
      )
    )
  return asked


def waste(engine: engines.Engine, own: owns.Own, count: int) -> float:
  """Returns positions in use per position that holds something, minus 1."""
  for request in _requests(own.w, count):
    engine.add(request)
  size, held, live = own.steps.size, 0, 0
  while engine.busy:
    engine.step(own.policy.params, 0)
    there = [len(half.tokens) for half in engine.partials()]
    shared = own.w.prompt_len - 1
    prompts = len({half.uid // own.w.group for half in engine.partials()})
    live += sum(there) + prompts * shared
    pages = sum(-(-used // size.page) for used in there)
    held += (pages + prompts * -(-shared // size.page)) * size.page
  return held / live - 1


def main() -> None:
  """Reads the command line, measures, and prints a line of JSON."""
  about = (__doc__ or "").partition("\n")[0]
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument("--quick", action="store_true", help="a smoke test")
  parser.add_argument("--repeats", type=int, default=7)
  chosen = parser.parse_args()
  name = "W1" if chosen.quick else "W2"
  w = dataclasses.replace(
    workloads.WORKLOADS[name], max_tokens=_LONGEST, mean_tokens=_LONGEST
  )
  blocks: dict[int, list[float]] = {page: [] for page in _PAGES}
  made = {page: owns.make(w, w.rows, 8, page=page) for page in _PAGES}
  engine = {page: own.engine(own.steps) for page, own in made.items()}
  for page, own in made.items():
    for request in owns.requests(w, 0, workloads.prompts(w, 0)):
      engine[page].add(request)
    for _ in range(3):
      engine[page].step(own.policy.params, 0)
  for _ in range(1 if chosen.quick else chosen.repeats):
    for page, own in made.items():
      begun = time.perf_counter()
      engine[page].step(own.policy.params, 0)
      blocks[page].append((time.perf_counter() - begun) / 8 * 1e3)
  results = {}
  print("page  ms a token (spread)      of no pages  waste")
  for page, own in made.items():
    ratio = statistics.median(
      a / b for a, b in zip(blocks[page], blocks[_LONGEST], strict=True)
    )
    wasted = waste(own.engine(own.steps), own, 8 if chosen.quick else 32)
    low, high = min(blocks[page]), max(blocks[page])
    print(
      f"{page:4d}  {statistics.median(blocks[page]):6.1f} ({low:.1f}.."
      f"{high:.1f})  {ratio:12.2f}  {wasted:.2f}"
    )
    results[f"page_{page}/time"] = {
      "value": round(ratio, 4),
      "goal": _SPEED,
      "peer": 1.0,
      "met": ratio <= _SPEED,
    }
    results[f"page_{page}/waste"] = {
      "value": round(wasted, 4),
      "goal": _WASTE,
      "peer": None,
      "met": wasted <= _WASTE,
    }
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
  print(json.dumps(results))


if __name__ == "__main__":
  main()
