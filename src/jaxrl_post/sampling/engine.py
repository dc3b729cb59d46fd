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
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.sampling import pages, reader, rows, steps
from jaxrl_post.sampling import prefix as prefixes

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
    prefill_tokens: most tokens of a prefill call: several short prompts, or a
      chunk of a long one, between the chunks of which others go on.
    page: positions of a page of the cache. Large ones are read faster, small
      ones waste less: half a page a row.
    cache: memory of the cache, as a share of what it takes for all rows to
      reach the longest prompt and completion, in (0, 1]. Where it comes to an
      end, the youngest completions wait and are made again up to where they
      were: the same tokens, for more work.
    top_logprobs: most probable tokens that a request can have reported with
      each of its own; as many are computed for every token.
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
  prefill_tokens: int = 512
  page: int = 32
  cache: float = 1.0
  top_logprobs: int = 0
  in_flight: Literal["keep", "recompute", "drain"] = "keep"
  dtype: Literal["float32", "bfloat16"] = "float32"

  def __post_init__(self) -> None:
    names = ("max_tokens", "rows", "block", "prefill_tokens", "page")
    for name in names:
      if getattr(self, name) < 1:
        raise types.InputError(
          f"sampling.{name}: expected >= 1, got {getattr(self, name)}. "
          "Correct the value."
        )
    if self.top_logprobs < 0:
      raise types.InputError(
        f"sampling.top_logprobs: expected >= 0, got {self.top_logprobs}. 0 "
        "reports none."
      )
    if not 0 < self.cache <= 1:
      raise types.InputError(
        f"sampling.cache: expected a share in (0, 1], got {self.cache}. 1 "
        "holds all rows at their longest."
      )
    if self.temperature < _COLDEST:
      raise types.InputError(
        f"sampling.temperature: expected >= {_COLDEST}, got "
        f"{self.temperature}. Training needs completions that differ."
      )


@dataclasses.dataclass(frozen=True)
class Steps:
  """The compiled steps of one engine, as a placement provides them.

  Attributes:
    size: of the cache.
    empty: see `steps`.
    layout: weights as `decode` reads them best.
    prefill: of parameters, tokens, lengths and the bucket.
    extend: see `steps`, likewise the next two.
    insert: donates the state.
    decode: donates the state; of laid out weights.
    cancel: donates the state.
  """

  size: pages.Sizes
  empty: Callable[[], steps.DecodeState]
  layout: Callable[[types.Tree], types.Tree]
  prefill: Callable[..., prefixes.Prefix]
  extend: Callable[..., prefixes.Prefix]
  insert: Callable[..., steps.DecodeState]
  decode: Callable[
    [types.Tree, steps.DecodeState, jax.Array],
    tuple[steps.DecodeState, steps.Block],
  ]
  cancel: Callable[[steps.DecodeState, Any], steps.DecodeState]


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
      dispatch: held around every launch, so that all threads launch programs
        of the same devices in one order.
      free_idle: give the cache's memory back whenever no completion is in
        flight, until the next one. Nothing in it is needed then.
    """
    self._steps = compiled
    self._size = compiled.size
    self._cfg = cfg
    self._vocab_size = vocab_size
    self._key = key
    self._dispatch = dispatch
    self._free_idle = free_idle
    self._reader = reader.Reader(
      compiled,
      max_prompt=max_prompt,
      call_tokens=cfg.prefill_tokens,
      most=-(-cfg.rows // self._size.group),
      dispatch=dispatch,
    )
    self._state: steps.DecodeState | None = None
    self._rows: list[rows.Row | None] = [None] * cfg.rows
    self._waiting: collections.deque[rows.Waiting] = collections.deque()
    self._version: int | None = None
    # Weights as they were given, and as `decode` reads them.
    self._weights: tuple[types.Tree, types.Tree] | None = None
    self._crowded = False
    self._begun = 0

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
    sampling = request.sampling
    changed = {i for i, _ in sampling.logit_bias} | {*sampling.forbidden_ids}
    limits = (
      ("prompt tokens", len(request.prompt), self._reader.buckets[-1]),
      ("max_tokens", request.sampling.max_tokens, self._cfg.max_tokens),
      ("stop ids", len(request.sampling.stop_ids), steps.MAX_IDS),
      ("top_logprobs", request.sampling.top_logprobs, self._cfg.top_logprobs),
      ("biased and forbidden ids", len(changed), steps.MAX_IDS),
      ("largest of them", max(changed, default=0), self._vocab_size - 1),
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
    rows.check_begun(request, self._vocab_size)
    self._waiting.append(rows.Waiting(request, rows.rows_of(request)))

  def partials(self) -> tuple[types.Partial, ...]:
    """Returns the completions that are half made, as of the last block.

    Returns:
      Those that have a token, in a row or waiting for one. A request of the
      same prompt, uids and sampling that has them in `begun` continues them.
    """
    half = [row for row in self._rows if row is not None]
    for row in half:
      row.read()
    half += [row for waiting in self._waiting for row in waiting.rows]
    return tuple(row.partial() for row in half if row.tokens)

  def renew(self) -> None:
    """Has the next step take its weights for newer ones, see `in_flight`.

    Also after an update that was skipped, whose weights keep their version.
    """
    self._version = None

  def warm_up(self, params: types.Tree) -> None:
    """Compiles every program the engine will run, with no effect on state."""
    nobody = types.Request(
      prompt=(0,), uids=(), sampling=types.SamplingParams()
    )
    for prefix in self._reader.warm_up(params):
      self._insert(rows.Waiting(nobody, rows.rows_of(nobody), prefix), [], [])
    self._cancel([])
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
        waiting.prefix, waiting.begin = None, 0
      if self._cfg.in_flight == "recompute":
        self._rebuild(params)
      self._version = version
    self._refill(params)
    self._make_room()
    block = self._decode(params)
    made = rows.Made(block, version)
    for row in self._rows:  # What the host has to do, while devices work.
      if row is not None:
        row.read()
    done = self._settle(block, made)
    if self._free_idle and not self.busy:
      self._state = self._weights = None
    return done

  def _settle(
    self, block: steps.Block, made: rows.Made
  ) -> list[types.Completion]:
    """Waits for a block, and takes out what has ended in it."""
    active, used = jax.device_get((block.active, block.made))
    done = []
    for index, row in enumerate(self._rows):
      if row is None:
        continue
      row.unread.append((made, index))
      row.used = int(used[index])
      if not active[index]:
        row.read()
        done.append(row.finished())
        self._rows[index] = None
    self._crowded = self._crowded and not done
    return done

  def _refill(self, params: types.Tree) -> None:
    """Fills idle rows, as far as prompts are read and there are pages."""
    while self._waiting and None in self._rows:
      first = self._waiting[0]
      if not first.ready:
        self._reader.read(params, first, self._waiting, self._size.group)
        if not first.ready and any(self._rows):
          return  # The next chunk after a block of the others.
        continue
      at = self._places(first)
      if not at:
        return
      self._insert(first, at, [first.rows.popleft() for _ in at])
      if not first.rows:
        self._waiting.popleft()

  def _places(self, waiting: rows.Waiting) -> list[int]:
    """Returns idle rows for the next completions of a prompt, in one part."""
    idle = [self._idle(part) for part in range(self._size.parts)]
    part = max(range(self._size.parts), key=lambda p: len(idle[p]))
    width = self._size.group
    first = waiting.rows[0].member // width
    together = sum(row.member // width == first for row in waiting.rows)
    count = min(len(idle[part]), together)
    if self._crowded:
      return []
    if self._prompt_need(waiting, part, first) > self._prompt_free(part):
      return []
    left = self._free(part) - self._need(part)
    each = self._pages_of(min(self._cfg.block, self._cfg.max_tokens))
    return idle[part][: max(0, min(count, left // each))]

  def _idle(self, part: int) -> list[int]:
    begin = part * self._size.rows
    here = range(begin, begin + self._size.rows)
    return [i for i in here if self._rows[i] is None]

  def _of_part(self, part: int) -> list[rows.Row]:
    begin = part * self._size.rows
    here = self._rows[begin : begin + self._size.rows]
    return [row for row in here if row is not None]

  def _pages_of(self, positions: int) -> int:
    return -(-positions // self._size.page)

  def _prompt_need(self, waiting: rows.Waiting, part: int, place: int) -> int:
    """Returns the pages for a prompt, 0 where rows of the part have it."""
    tag = _tag(waiting, place)
    if any(row.tag == tag for row in self._of_part(part)):
      return 0
    return self._pages_of(len(waiting.request.prompt) - 1)

  def _prompt_free(self, part: int) -> int:
    """Returns the pages for prompts that nobody has."""
    lengths = {r.tag: len(r.request.prompt) for r in self._of_part(part)}
    taken = sum(self._pages_of(n - 1) for n in lengths.values())
    return self._size.pool_pages - taken

  def _free(self, part: int) -> int:
    """Returns the own pages that nobody has."""
    taken = sum(self._pages_of(row.used) for row in self._of_part(part))
    return self._size.pages - taken

  def _need(self, part: int) -> int:
    """Returns the pages that rows take in the next block."""
    need = 0
    for row in self._of_part(part):
      end = min(row.used + self._cfg.block, row.request.sampling.max_tokens)
      need += self._pages_of(end) - self._pages_of(row.used)
    return need

  def _make_room(self) -> None:
    """Has the youngest rows wait until the others have pages for a block."""
    out = []
    for part in range(self._size.parts):
      while self._need(part) > self._free(part):
        row = max(self._of_part(part), key=lambda row: row.age)
        index = self._rows.index(row)
        row.read()
        self._rows[index] = None
        out.append(index)
        self._waiting.appendleft(
          rows.Waiting(row.request, collections.deque([row]))
        )
    if out:
      self._crowded = True
      self._cancel(out)

  def _rebuild(self, params: types.Tree) -> None:
    """Starts every row again where it is, to read what it has made."""
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(self._rows):
      if row is not None:
        groups.setdefault(id(row.request), []).append(index)
    begun = []
    for at in groups.values():
      here = [row for row in (self._rows[i] for i in at) if row is not None]
      for row in here:
        row.read()
      begun.append(rows.Waiting(here[0].request, collections.deque(here)))
    self._cancel([i for at in groups.values() for i in at])
    for waiting, at in zip(begun, groups.values(), strict=True):
      while not waiting.ready:
        self._reader.read(params, waiting, begun, self._size.group)
      together: dict[tuple[int, int], list[tuple[int, rows.Row]]] = {}
      for index, row in zip(at, waiting.rows, strict=True):
        part, place = index // self._size.rows, row.member // self._size.group
        together.setdefault((part, place), []).append((index, row))
      for some in together.values():
        self._insert(waiting, [i for i, _ in some], [row for _, row in some])

  def _insert(
    self, waiting: rows.Waiting, at: list[int], begun: list[rows.Row]
  ) -> None:
    """Puts completions that share a tag into rows of one part."""
    width = self._size.group
    place = begun[0].member // width if begun else 0
    tag = _tag(waiting, place)
    for index, row in zip(at, begun, strict=True):
      row.tag, row.age, row.used = tag, self._begun, 0
      self._begun += 1
      self._rows[index] = row
    inserted = steps.rows_for(
      [row.uid for row in begun],
      waiting.request.sampling,
      width=width,
      begun=[row.tokens for row in begun],
      num_forced=self._cfg.max_tokens,
      tag=tag,
      members=[row.member for row in begun],
    )
    nowhere = [len(self._rows)] * (width - len(at))
    target = np.array(at + nowhere, np.int32)
    source = np.array(waiting.source, np.int32)
    with self._dispatch:
      self._state = self._steps.insert(
        waiting.prefix, self._allocated(), source, target, inserted
      )

  def _cancel(self, at: list[int]) -> None:
    """Ends rows on the devices; their pages are free."""
    ended = np.zeros(len(self._rows), bool)
    ended[at] = True
    with self._dispatch:
      self._state = self._steps.cancel(self._allocated(), ended)

  def _decode(self, params: types.Tree) -> steps.Block:
    with self._dispatch:
      if self._weights is None or self._weights[0] is not params:
        self._weights = None  # Before the next ones take memory.
        self._weights = params, self._steps.layout(params)
      state = self._allocated()
      self._state, block = self._steps.decode(
        self._weights[1], state, self._key
      )
    return block

  def _allocated(self) -> steps.DecodeState:
    state, self._state = self._state, None  # The caller donates it.
    return self._steps.empty() if state is None else state


def _tag(waiting: rows.Waiting, place: int) -> int:
  return (waiting.tag + place) % (2**32 - 1) + 1


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
