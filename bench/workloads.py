"""The work that bench/rollout.py has every system do. Needs only NumPy.

It is imported by scripts that run in the environments of other libraries, so
that shapes, weights, prompts and the way of asking are the same for all.

A system is a process of its own. It says on standard output that it is ready,
then reads orders on standard input, one a line, and answers each with one line
of JSON. Between two orders it waits, so systems that take turns do not disturb
one another. By hand: `echo 0 | python bench/peer_tunix.py W1`.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PAD_ID = 0
# Prompts hold neither the padding nor an end id.
_FIRST_ID = 128
_SEED, _SPREAD = 1234, 0.02
_CHECKED_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Workload:
  """A Llama-like model with random weights, and a batch of prompts for it.

  The embedding is also the head; there are no biases; temperature is 1.

  Attributes:
    name: as on the command line.
    layers: of the model.
    width: of the residual stream.
    heads: of queries.
    kv_heads: of keys and values.
    ff: width of the feed-forward layer.
    vocab: ids of the model.
    prompts: in a batch.
    group: completions of each prompt.
    prompt_len: tokens in every prompt.
    max_tokens: longest completion.
    mean_tokens: of the completions; below `max_tokens` they end by themselves.
    head_width: of queries, keys and values.
    rope_theta: base of the rotary phases.
    norm_eps: of the norms.
  """

  name: str
  layers: int
  width: int
  heads: int
  kv_heads: int
  ff: int
  vocab: int
  prompts: int
  group: int
  prompt_len: int
  max_tokens: int
  mean_tokens: int
  head_width: int = 64
  rope_theta: float = 1e6
  norm_eps: float = 1e-5

  @property
  def rows(self) -> int:
    """Completions in a batch."""
    return self.prompts * self.group

  @property
  def ragged(self) -> bool:
    """Whether completions end at different lengths."""
    return self.mean_tokens < self.max_tokens

  @property
  def end_ids(self) -> tuple[int, ...]:
    """Ids that end a completion; none where all have the full length.

    Random weights draw all ids about equally often, so this many of them give
    lengths that are about geometric, with the mean that is wanted.
    """
    if not self.ragged:
      return ()
    return tuple(range(1, 1 + self.vocab // self.mean_tokens))

  @property
  def layer_weights(self) -> int:
    """Weights in the matrix products of one layer."""
    attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
    return attention + 3 * self.width * self.ff


WORKLOADS = {
  w.name: w
  for w in (
    Workload("W1", 4, 256, 4, 2, 1024, 512, 16, 8, 32, 32, 32),
    Workload("W2", 8, 512, 8, 2, 2048, 4096, 8, 8, 64, 64, 64),
    Workload("W3", 30, 576, 9, 3, 1536, 49152, 4, 4, 64, 64, 64),
    Workload("W4", 8, 512, 8, 2, 2048, 4096, 8, 8, 64, 256, 64),
  )
}


def weights(w: Workload) -> dict[str, Any]:
  """Draws the weights; norms are not among them, they are ones.

  Returns:
    `embed`, [vocab, width], and `layers`: for each a dict of `q`, `k`, `v`,
    `o`, `gate`, `up` and `down`, float32, [out, in].
  """
  rng = np.random.default_rng(_SEED)

  def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(_SPREAD)

  queries, keys = w.heads * w.head_width, w.kv_heads * w.head_width
  embed = draw(w.vocab, w.width)
  layers = [
    {
      "q": draw(queries, w.width),
      "k": draw(keys, w.width),
      "v": draw(keys, w.width),
      "o": draw(w.width, queries),
      "gate": draw(w.ff, w.width),
      "up": draw(w.ff, w.width),
      "down": draw(w.width, w.ff),
    }
    for _ in range(w.layers)
  ]
  return {"embed": embed, "layers": layers}


def prompts(w: Workload, step: int) -> list[list[int]]:
  """Returns the prompts of a step, each once."""
  rng = np.random.default_rng((_SEED, 3, step))
  shape = (w.prompts, w.prompt_len)
  return rng.integers(_FIRST_ID, w.vocab, shape).tolist()


def checked(w: Workload) -> list[int]:
  """Returns the sequence whose log-probability tells whose model it is."""
  rng = np.random.default_rng((_SEED, 5))
  return rng.integers(_FIRST_ID, w.vocab, _CHECKED_TOKENS).tolist()


def lengths(w: Workload, step: int) -> list[int]:
  """Returns lengths for a system that can be given one for each row.

  Returns:
    Quantiles of the geometric distribution, cut at the longest, which occurs;
    their mean is that of the workload. The step says in which order.
  """
  if not w.ragged:
    return [w.max_tokens] * w.rows
  at = (np.arange(w.rows) + 0.5) / w.rows
  drawn = np.ceil(np.log1p(-at) / np.log1p(-1 / w.mean_tokens))
  drawn = drawn.clip(1, w.max_tokens).astype(int)
  drawn[-1] = w.max_tokens
  # What the cut changed is made good where it shows the least.
  middle = np.argsort(abs(drawn - w.mean_tokens))[: w.rows // 2]
  each, rest = divmod(w.mean_tokens * w.rows - int(drawn.sum()), len(middle))
  drawn[middle] += each
  drawn[middle[:rest]] += 1
  return np.random.default_rng((_SEED, 7, step)).permutation(drawn).tolist()


def flops(w: Workload, made: Sequence[int]) -> int:
  """Counts the operations that sampling cannot do without.

  Args:
    w: the workload.
    made: tokens of each completion.

  Returns:
    Floating-point operations: each prompt is read once, not once a row; the
    last token of a row is not read; logits are for sampled tokens only.
  """
  tokens = w.prompts * w.prompt_len
  seen = w.prompts * w.prompt_len * (w.prompt_len + 1) // 2
  for count in made:
    tokens += count - 1
    seen += (count - 1) * w.prompt_len + (count - 1) * count // 2
  products = 2 * w.layers * w.layer_weights * tokens
  attention = 4 * w.layers * w.heads * w.head_width * seen
  return products + attention + 2 * w.vocab * w.width * sum(made)


def cores() -> int:
  """Returns how many threads a system shall use."""
  return len(os.sched_getaffinity(0))


def serve(
  w: Workload,
  generate: Callable[[int, list[list[int]]], Sequence[Sequence[int]]],
  *,
  check: float,
  version: str,
  others: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
) -> None:
  """Answers orders until there are no more.

  Args:
    w: the workload.
    generate: makes the completions of a step's prompts, as host integers, in
      the order of the prompts; what it takes is what is timed.
    check: sum of the log-probabilities of `checked`, in nats.
    version: what is measured.
    others: what other orders are answered with. A number is a step.
  """
  _say({"check": check, "version": version})
  for line in sys.stdin:
    order = line.strip()
    if not order.isdecimal():
      _say(dict((others or {})[order]()))
      continue
    asked = prompts(w, int(order))
    begun = time.perf_counter()
    rows = generate(int(order), asked)
    seconds = time.perf_counter() - begun
    made = [len(row) for row in rows]
    _expect(len(made) == w.rows, f"{w.rows} completions", len(made))
    longest = max(made)
    _expect(longest <= w.max_tokens, f"at most {w.max_tokens} tokens", longest)
    full = w.ragged or min(made) == w.max_tokens
    _expect(full, f"{w.max_tokens} tokens in each", min(made))
    ids = [int(id_) for row in rows for id_ in row]
    _expect(0 <= min(ids) <= max(ids) < w.vocab, "ids of the model", max(ids))
    _say({"seconds": seconds, "lengths": made})


def _expect(holds: bool, rule: str, got: object) -> None:
  if not holds:
    sys.exit(f"{sys.argv[0]}: expected {rule}, got {got}.")


def _say(answer: Mapping[str, Any]) -> None:
  print(json.dumps(answer), flush=True)
