"""The host side of sampling: which completion is in which row.

Continuous batching over the pure steps of `steps`: between two blocks, rows
that ended are handed out, refilled from waiting requests, and the next block
is dispatched with whatever weights are the newest.

A completion can be taken out half made (`Engine.partials`) and go on in another
engine (`types.Request.begun`): with the same key, weights and sizes, what comes
out is what would have come without the break, bit for bit. Its tokens are put
through `decode` again, see `steps`.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.sampling import steps

# Below it, logits divided by the temperature leave float32.
_COLDEST = 0.01


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are sampled in training, and the size of the engine.

  Attributes:
    temperature: of the training rollouts; at least 0.01.
    max_tokens: longest completion.
    rows: completions in flight at a time.
    block: tokens made per dispatch; new weights take effect between blocks.
    prefill_prompts: prompts per prefill call.
    max_stop_ids: most stop tokens a request may have.
    in_flight: what newer weights mean for a completion in the making. "keep":
      it goes on, over keys and values of the older ones. "recompute": its
      prompt and tokens are read again by the newer ones first, which costs a
      decode step a token. "drain": none is in the making then, because whoever
      calls the engine holds newer weights back until it is not busy; to the
      engine itself the same as "keep". In all of them a token keeps the
      log-probability and version that it was sampled with.
    dtype: of weights, cache and matrix products in the engine.
  """

  temperature: float = 1.0
  max_tokens: int = 32
  rows: int = 64
  block: int = 8
  prefill_prompts: int = 8
  max_stop_ids: int = 4
  in_flight: Literal["keep", "recompute", "drain"] = "keep"
  dtype: Literal["float32", "bfloat16"] = "float32"

  def __post_init__(self) -> None:
    names = ("max_tokens", "rows", "block", "prefill_prompts", "max_stop_ids")
    for name in names:
      if getattr(self, name) < 1:
        raise types.InputError(
          f"sampling.{name}: expected >= 1, got {getattr(self, name)}. "
          "Correct the value."
        )
    if self.temperature < _COLDEST:
      raise types.InputError(
        f"sampling.temperature: expected >= {_COLDEST}, got "
        f"{self.temperature}. Training needs completions that differ."
      )


@dataclasses.dataclass(frozen=True)
class Steps:
  """The compiled steps of one engine, as a placement provides them."""

  empty: Callable[[], steps.DecodeState]
  prefill: Callable[..., steps.Prefix]
  insert: Callable[..., steps.DecodeState]
  decode: Callable[
    [types.Tree, steps.DecodeState, jax.Array],
    tuple[steps.DecodeState, steps.Block],
  ]


def buckets(longest: int, shortest: int = 16) -> tuple[int, ...]:
  """Returns the padded prompt lengths: powers of two up to `longest`.

  The last one is `longest` itself, so no prompt is padded beyond the limit.
  """
  sizes = []
  size = shortest
  while size < longest:
    sizes.append(size)
    size *= 2
  return (*sizes, longest)


@dataclasses.dataclass
class _Row:
  """A completion in the making."""

  uid: int
  request: types.Request
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)

  def partial(self) -> types.Partial:
    return types.Partial(
      uid=self.uid,
      tokens=tuple(self.tokens),
      logprobs=tuple(self.logprobs),
      versions=tuple(self.versions),
    )

  def finished(self) -> types.Completion:
    return types.Completion(
      uid=self.uid,
      tokens=tuple(self.tokens),
      logprobs=tuple(self.logprobs),
      versions=tuple(self.versions),
      finish=steps.finish(self.tokens, self.request.sampling.stop_ids),
    )


def _rows_of(request: types.Request) -> collections.deque[_Row]:
  """Returns the completions of a request as far as they are made."""
  begun = {partial.uid: partial for partial in request.begun}
  rows = collections.deque(_Row(uid, request) for uid in request.uids)
  for row in rows:
    if row.uid in begun:
      row.tokens += begun[row.uid].tokens
      row.logprobs += begun[row.uid].logprobs
      row.versions += begun[row.uid].versions
  return rows


@dataclasses.dataclass
class _Waiting:
  """A request of which some completions have no row yet."""

  request: types.Request
  rows: collections.deque[_Row]
  prefix: steps.Prefix | None = None
  source: int = 0


class Engine:
  """Turns requests into completions, a block at a time."""

  def __init__(
    self,
    compiled: Steps,
    cfg: Sampling,
    *,
    max_prompt: int,
    vocab_size: int,
    key: jax.Array,
    insert_width: int,
    dispatch: contextlib.AbstractContextManager[Any],
    free_idle: bool = False,
  ) -> None:
    """Allocates the cache on its first use.

    Args:
      compiled: the steps.
      cfg: sizes.
      max_prompt: longest prompt, in tokens.
      vocab_size: ids must be below it.
      key: the random key of these completions.
      insert_width: rows filled per insert; the group size.
      dispatch: held around every launch, so that all threads launch programs
        of the same devices in one order.
      free_idle: give the cache's memory back whenever no completion is in
        flight, until the next one. Nothing in it is needed then.
    """
    self._steps = compiled
    self._cfg = cfg
    self._buckets = buckets(max_prompt)
    self._vocab_size = vocab_size
    self._key = key
    self._width = insert_width
    self._dispatch = dispatch
    self._free_idle = free_idle
    self._state: steps.DecodeState | None = None
    self._rows: list[_Row | None] = [None] * cfg.rows
    self._waiting: collections.deque[_Waiting] = collections.deque()
    self._version: int | None = None

  @property
  def room(self) -> int:
    """Rows that no completion has, or waits for."""
    taken = sum(row is not None for row in self._rows)
    return len(self._rows) - taken - sum(len(w.rows) for w in self._waiting)

  @property
  def busy(self) -> bool:
    """Whether a step would make tokens."""
    return bool(self._waiting) or any(self._rows)

  def add(self, request: types.Request) -> None:
    """Queues a group.

    Raises:
      InputError: the request does not fit the engine: prompt, completion or
        stop ids too long, or a token that the model does not have.
      RunError: a completion that it continues is not half made by this request.
    """
    limits = (
      ("prompt tokens", len(request.prompt), self._buckets[-1]),
      ("max_tokens", request.sampling.max_tokens, self._cfg.max_tokens),
      ("stop ids", len(request.sampling.stop_ids), self._cfg.max_stop_ids),
      ("largest token", max(request.prompt, default=0), self._vocab_size - 1),
    )
    for name, value, most in limits:
      if value > most:
        raise types.InputError(
          f"request {request.uids[0]}: expected {name} of at most {most}, got "
          f"{value}. Shorten the request or enlarge the engine."
        )
    if not request.prompt:
      raise types.InputError(
        f"request {request.uids[0]}: expected a prompt of at least one token, "
        "got none. Give the prompt a begin token."
      )
    self._check_begun(request)
    self._waiting.append(_Waiting(request, _rows_of(request)))

  def partials(self) -> tuple[types.Partial, ...]:
    """Returns the completions that are half made, as of the last block.

    Returns:
      Those that have a token, in a row or waiting for one. A request of the
      same prompt, uids and sampling that has them in `begun` continues them.
    """
    rows = [row for row in self._rows if row is not None]
    rows += [row for waiting in self._waiting for row in waiting.rows]
    return tuple(row.partial() for row in rows if row.tokens)

  def renew(self) -> None:
    """Has the next step take its weights for newer ones, see `in_flight`.

    Also after an update that was skipped, whose weights keep their version.
    """
    self._version = None

  def warm_up(self, params: types.Tree) -> None:
    """Compiles every program the engine will run, with no effect on state."""
    num = self._cfg.prefill_prompts
    for bucket in self._buckets:
      tokens = np.zeros((num, bucket), np.int32)
      prefix = self._prefill(params, tokens, np.ones(num, np.int32))
      nobody = types.Request(
        prompt=(0,), uids=(), sampling=types.SamplingParams()
      )
      self._insert(_Waiting(nobody, _rows_of(nobody), prefix), [])
    self._decode(params)

  def step(self, params: types.Tree, version: int) -> list[types.Completion]:
    """Refills idle rows and makes one block.

    Args:
      params: the newest weights.
      version: their policy version, stamped on every token of the block. When
        it is another than before, see `Sampling.in_flight`.

    Returns:
      The completions that ended in this block, in row order.
    """
    if version != self._version:
      # A prompt read by older weights would be in tokens stamped with newer.
      for waiting in self._waiting:
        waiting.prefix = None
      if self._cfg.in_flight == "recompute":
        self._rebuild(params)
      self._version = version
    self._refill(params)
    block = jax.device_get(self._decode(params))
    done = []
    counts, starts = block.valid.sum(axis=1), block.valid.argmax(axis=1)
    for index, row in enumerate(self._rows):
      if row is None:
        continue
      count, start = int(counts[index]), int(starts[index])
      sampled = slice(start, start + count)
      row.tokens += block.tokens[index, sampled].tolist()
      row.logprobs += block.logprobs[index, sampled].tolist()
      row.versions += [version] * count
      if not block.active[index]:
        done.append(row.finished())
        self._rows[index] = None
    if self._free_idle and not self.busy:
      self._state = None
    return done

  def _refill(self, params: types.Tree) -> None:
    free = [i for i, row in enumerate(self._rows) if row is None]
    while free and self._waiting:
      first = self._waiting[0]
      if first.prefix is None:
        self._prefill_waiting(params, first, self._waiting)
      count = min(len(free), len(first.rows), self._width)
      at, free = free[:count], free[count:]
      self._insert(first, at)
      if not first.rows:
        self._waiting.popleft()

  def _rebuild(self, params: types.Tree) -> None:
    """Starts every row again where it is, to read what it has made."""
    indices: dict[int, list[int]] = {}
    for index, row in enumerate(self._rows):
      if row is not None:
        indices.setdefault(id(row.request), []).append(index)
    groups = []
    for at in indices.values():
      rows = [row for row in (self._rows[i] for i in at) if row is not None]
      groups.append(_Waiting(rows[0].request, collections.deque(rows)))
    for group, at in zip(groups, indices.values(), strict=True):
      if group.prefix is None:
        self._prefill_waiting(params, group, groups)
      for i in range(0, len(at), self._width):
        self._insert(group, at[i : i + self._width])

  def _bucket(self, waiting: _Waiting) -> int:
    length = len(waiting.request.prompt)
    return next(b for b in self._buckets if b >= length)

  def _prefill_waiting(
    self, params: types.Tree, first: _Waiting, others: Iterable[_Waiting]
  ) -> None:
    """Prefills the prompt of `first`, and others of its bucket with it."""
    num, bucket = self._cfg.prefill_prompts, self._bucket(first)
    batch = [
      w for w in others if w.prefix is None and self._bucket(w) == bucket
    ][:num]
    tokens = np.zeros((num, bucket), np.int32)
    length = np.ones(num, np.int32)
    for i, waiting in enumerate(batch):
      prompt = waiting.request.prompt
      tokens[i, : len(prompt)], length[i] = prompt, len(prompt)
    prefix = self._prefill(params, tokens, length)
    for i, waiting in enumerate(batch):
      waiting.prefix, waiting.source = prefix, i

  def _prefill(
    self, params: types.Tree, tokens: np.ndarray, length: np.ndarray
  ) -> steps.Prefix:
    with self._dispatch:
      return self._steps.prefill(params, tokens, length)

  def _insert(self, waiting: _Waiting, at: list[int]) -> None:
    begun = [waiting.rows.popleft() for _ in at]
    for index, row in zip(at, begun, strict=True):
      self._rows[index] = row
    rows = steps.rows_for(
      [row.uid for row in begun],
      waiting.request.sampling,
      num_stop_ids=self._cfg.max_stop_ids,
      width=self._width,
      begun=[row.tokens for row in begun],
      num_forced=self._cfg.max_tokens,
    )
    nowhere = [len(self._rows)] * (self._width - len(at))
    target = np.array(at + nowhere, np.int32)
    source = np.array(waiting.source, np.int32)
    with self._dispatch:
      self._state = self._steps.insert(
        waiting.prefix, self._allocated(), source, target, rows
      )

  def _decode(self, params: types.Tree) -> steps.Block:
    with self._dispatch:
      state = self._allocated()
      self._state, block = self._steps.decode(params, state, self._key)
    return block

  def _check_begun(self, request: types.Request) -> None:
    """Refuses to continue what this request cannot have begun."""
    sampling, uids = request.sampling, [p.uid for p in request.begun]
    for begun in request.begun:
      sizes = [len(x) for x in (begun.tokens, begun.logprobs, begun.versions)]
      bad = [t for t in begun.tokens if not 0 <= t < self._vocab_size]
      stops = [t for t in begun.tokens if t in sampling.stop_ids]
      most = sampling.max_tokens - 1
      rules = (
        (begun.uid in request.uids, f"a uid of {request.uids}", begun.uid),
        (uids.count(begun.uid) == 1, "each uid once", uids),
        (len({*sizes}) == 1, "as many log-probabilities and versions", sizes),
        (sizes[0] <= most, f"at most {most} tokens", sizes[0]),
        (not bad, f"tokens in [0, {self._vocab_size})", bad),
        (not stops, "no stop token", stops),
      )
      for holds, rule, value in rules:
        if not holds:
          raise types.RunError(
            f"completion {begun.uid} to continue: expected {rule}, got "
            f"{value}. What was kept of it is damaged, or of another run."
          )

  def _allocated(self) -> steps.DecodeState:
    state, self._state = self._state, None  # The caller donates it.
    return self._steps.empty() if state is None else state


def generate(
  engine: Engine, policy: types.Policy, requests: Sequence[types.Request]
) -> list[types.Completion]:
  """Samples all requests with one policy.

  Returns:
    One completion for each uid, in the order of `requests`.
  """
  for request in requests:
    engine.add(request)
  done: dict[int, types.Completion] = {}
  while engine.busy:
    for completion in engine.step(policy.params, policy.version):
      done[completion.uid] = completion
  return [done[uid] for request in requests for uid in request.uids]
