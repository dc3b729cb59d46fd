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
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.sampling import blocks, copies, programs, reader, rows, space
from jaxrl_post.sampling import tally as tallies

# Below it, logits divided by the temperature leave float32.
_COLDEST = 0.01
# Larger sizes have no meaning, and overflow a device's integers.
_MOST = 2**24


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are sampled in training, and the size of the engine.

  Attributes:
    temperature: of the training rollouts; from 0.01 to 1e6.
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
      decode step a token: weights that come faster than that let nothing end.
      "drain": none is in the making then, because whoever calls the engine
      holds newer weights back until it is not busy. What is held for another
      turn (`types.Request.hold`) stays with "keep" only. In all of them a token
      keeps the log-probability and version that it was sampled with.
    dtype: of weights, cache and matrix products in the engine. "int8" holds
      the matrices of layers in 8 bits with a scale for each output channel,
      and the rest, cache and products in bfloat16; "int8_cache" keys and values
      of the cache in 8 bits too, with a scale for each position and key head.
      How far off that is, `mismatch/*` says.
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
  dtype: Literal["float32", "bfloat16", "int8", "int8_cache"] = "float32"

  def __post_init__(self) -> None:
    names = ("max_tokens", "rows", "block", "prefill_tokens", "page")
    for name in names:
      if not 1 <= getattr(self, name) <= _MOST:
        raise types.InputError(
          f"sampling.{name}: expected a number in [1, {_MOST}], got "
          f"{getattr(self, name)}. Correct the value."
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
    if not _COLDEST <= self.temperature <= types.HOTTEST:
      raise types.InputError(
        f"sampling.temperature: expected a number in [{_COLDEST}, "
        f"{types.HOTTEST:g}], got {self.temperature}. Training needs "
        "completions that differ."
      )

  @property
  def compute(self) -> Literal["float32", "bfloat16"]:
    """Dtype of matrix products, and of all that is not quantized."""
    return "float32" if self.dtype == "float32" else "bfloat16"

  @property
  def quantized(self) -> bool:
    """Whether the matrices of layers are `quantize.Int8`."""
    return self.dtype in ("int8", "int8_cache")

  @property
  def quantized_cache(self) -> bool:
    """Whether keys and values are cached in 8 bits."""
    return self.dtype == "int8_cache"


class Engine:
  """Turns requests into completions, a block at a time.

  Attributes:
    between: state of generation in a step while no program of it runs.
    seats: of what ended in the last step: row, uid, begin (time.monotonic()) in
      that row, tokens.
  """

  between = "wait/host"

  def __init__(
    self,
    compiled: programs.Steps,
    cfg: Sampling,
    *,
    max_prompt: int,
    vocab_size: int,
    key: jax.Array,
    dispatch: contextlib.AbstractContextManager[Any],
    free_idle: bool = False,
    decode: rows.Decode | None = None,
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
      decode: ids to text, see `stop_strings.first_stop`; None refuses requests
        with stop strings.
    """
    self._steps = compiled
    self._size = compiled.size
    self._cfg = cfg
    self._vocab_size = vocab_size
    self._key = key
    self._dispatch = dispatch
    self._free_idle = free_idle
    self._text = decode
    self._reader = reader.Reader(
      compiled,
      max_prompt=max_prompt,
      call_tokens=cfg.prefill_tokens,
      most=-(-cfg.rows // self._size.group),
      dispatch=dispatch,
    )
    self._state: types.Tree = None  # See `programs.Steps`.
    self._rows: list[rows.Row | None] = [None] * cfg.rows
    self._space = space.Space(
      self._rows, self._size, block=cfg.block, max_tokens=cfg.max_tokens
    )
    self._waiting: collections.deque[rows.Waiting] = collections.deque()
    self._version: int | None = None
    self._weights = programs.LaidOut(compiled.layout)
    self._crowded = False
    self._begun = 0
    self._tally = tallies.Tally()
    self._has_cache = False  # Even if a launch has lost it.
    self.seats: list[types.Seat] = []

  @property
  def room(self) -> int:
    """Rows that no completion has, or waits for; one that is held has none."""
    waiting = sum(len(w.rows) for w in self._waiting)
    return len(self._rows) - len(self._space.running()) - waiting

  @property
  def busy(self) -> bool:
    """Whether a step would make tokens."""
    return bool(self._waiting or self._space.running())

  def check(self, request: types.Request) -> None:
    """Refuses a request that `add` would refuse; queues nothing.

    Raises:
      InputError: the request does not fit the engine: prompt, completion or
        stop ids too long, a token that the model does not have, or stop strings
        without `decode`.
      RunError: a completion that it continues is not half made by this request.
    """
    rows.check(
      request,
      max_prompt=self._reader.buckets[-1],
      max_tokens=self._cfg.max_tokens,
      top_logprobs=self._cfg.top_logprobs,
      vocab_size=self._vocab_size,
      decode=self._text,
    )

  def add(self, request: types.Request) -> None:
    """Queues a group; raises as `check` does."""
    self.check(request)
    self._waiting.append(rows.Waiting(request, rows.rows_of(request)))

  def metrics(self) -> dict[str, float]:
    """Returns what the engine has done since it was made.

    Returns:
      What prompts and blocks have cost, see `Reader` and `Tally`. The first
      tokens of a completion that is continued go through blocks again.
    """
    return {**self._reader.metrics(), **self._tally.metrics()}

  def partials(self) -> tuple[types.Partial, ...]:
    """Returns the completions that are half made, as of the last block.

    Returns:
      Those that have a token, in a row or waiting for one. A request of the
      same prompt, uids and sampling that has them in `begun` continues them.
    """
    half = [row for _, row in self._space.running()]
    for row in half:
      row.read()
    half += [row for waiting in self._waiting for row in waiting.rows]
    return tuple(row.partial() for row in half if row.tokens)

  def renew(self) -> None:
    """Has the next step take its weights for newer ones, see `in_flight`.

    Also after an update that was skipped, whose weights keep their version.
    """
    self._version = None

  def release(self, uids: Collection[int]) -> None:
    """Frees the rows of completions that are held and will not go on."""
    self._cut({i: 0 for i, row in self._space.held() if row.uid in uids})

  def warm_up(self, params: types.Tree) -> None:
    """Compiles every program the engine will run, with no effect on state."""
    nobody = types.Request(
      prompt=(0,), uids=(), sampling=types.SamplingParams()
    )
    for prefix in self._reader.warm_up(params):
      waiting = rows.Waiting(nobody, rows.rows_of(nobody), prefix)
      self._insert([rows.Joining(waiting, [], [])])
    self._cut({0: -1})  # Of nobody.
    self._resume_rows([])
    self._decode(params)

  def step(
    self,
    params: types.Tree,
    version: int,
    launched: Callable[[str, Any], None] = lambda name, result: None,
  ) -> list[types.Completion]:
    """Refills idle rows and makes one block.

    Args:
      params: the newest weights.
      version: their policy version, stamped on every token of the block. When
        it is another than before, see `Sampling.in_flight`.
      launched: called with the name and the result of each program that takes
        long, "prefill" or "decode", when the devices have been given it.

    Returns:
      The completions that ended in this block, in row order.
    """
    if version != self._version:
      # A prompt read by older weights would be in tokens stamped with newer.
      for waiting in self._waiting:
        waiting.prefix, waiting.begin = None, 0
      if self._cfg.in_flight != "keep":
        self._cut({i: 0 for i, _ in self._space.held()})
      if self._cfg.in_flight == "recompute":
        self._rebuild()
      self._version = version
    self._reader.launched = launched
    self._refill(params)
    self._make_room()
    block = self._decode(params)
    launched("decode", block)
    self._reader.wait()  # So that either's time is its own.
    begun = time.monotonic()
    made = copies.Made(block, version)
    for _, row in self._space.running():  # What can be done while devices work.
      row.read()
    active, used = jax.device_get((block.active, block.made))
    self._tally.seconds += time.monotonic() - begun
    done = self._settle(active, used, made)
    if not self.busy:
      self._weights.drop()  # Whoever brings newer ones may free them.
      if self._free_idle:
        self._state, self._has_cache = None, False
        self._rows[:] = [None] * len(self._rows)
    return done

  def _settle(
    self, active: np.ndarray, used: np.ndarray, made: copies.Made
  ) -> list[types.Completion]:
    """Takes out what has ended in a block, by itself or a stop string."""
    done, cut, self.seats = [], {}, []
    running = self._space.running()
    self._tally.add([int(used[i]) - row.used for i, row in running])
    for _, row in self._space.held() if self._waiting else ():
      row.waited += self._cfg.block
    for index, row in running:
      row.take(made, index, int(used[index]))
      stopped = row.stop(self._text)
      if active[index] and not stopped:
        continue
      row.read()
      done.append(row.finished())
      self.seats.append((index, row.uid, row.since, len(row.tokens)))
      row.held = row.request.hold and self._steps.holds
      if active[index] or (stopped and row.held):
        cut[index] = len(row.tokens) if row.held else 0
      row.used = len(row.tokens)
      if not row.held:
        self._rows[index] = None
    self._cut(cut)
    self._crowded = self._crowded and not done
    return done

  def _refill(self, params: types.Tree) -> None:
    """Fills idle rows, as far as prompts are read and there are pages."""
    self._resume()
    joining: list[rows.Joining] = []
    idle = not self._space.running()
    while self._waiting and (None in self._rows or self._let_go(idle)):
      first = self._waiting[0]
      if not first.ready:
        self._reader.read(params, first, self._waiting, self._size.group)
        if not first.ready and self._space.running():
          break  # The next chunk after a block of the others.
        continue
      at = [] if self._crowded else self._space.places(first)
      if not at:
        if self._let_go(idle):
          continue
        break
      begun = [first.rows.popleft() for _ in at]
      joining = self._seat(joining, rows.Joining(first, at, begun))
      if not first.rows:
        self._waiting.popleft()
    self._insert(joining)

  def _resume(self) -> None:
    """Has held rows go on where a request continues them."""
    held = {row.uid: (index, row) for index, row in self._space.held()}
    going: list[tuple[int, rows.Row]] = []
    stale = {}
    for waiting in self._waiting if held else ():
      for row in tuple(waiting.rows):
        if row.uid not in held:
          continue
        index, old = held.pop(row.uid)
        if not row.continues(old):
          stale[index] = 0
          continue
        waiting.rows.remove(row)
        row.follow(old)
        self._rows[index] = row
        going.append((index, row))
    self._cut(stale)
    if going:
      self._waiting = collections.deque(w for w in self._waiting if w.rows)
      self._resume_rows(going)

  def _resume_rows(self, going: Sequence[tuple[int, rows.Row]]) -> None:
    at, inserted = rows.resumed(going, self._size, self._cfg.max_tokens)
    with self._dispatch:
      self._state = self._steps.resume(self._allocated(), at, inserted)

  def _let_go(self, idle: bool) -> bool:
    """Frees held rows for those that wait; returns whether there were some.

    Those that are due, or where nothing else runs any.
    """
    wanted = sum(len(waiting.rows) for waiting in self._waiting)
    out = self._space.due(idle)[:wanted]
    self._cut(dict.fromkeys(out, 0))
    return bool(out)

  def _make_room(self) -> None:
    """Has the youngest rows wait until the others have pages for a block."""
    if self._space.is_ample:
      return
    for part in range(self._size.parts):
      while self._space.need(part) > self._space.free(part):
        row = self._space.victim(part)
        if not row.held:
          self._crowded = True
          row.read()
          self._put_back(row)
        self._cut({self._rows.index(row): 0})

  def _put_back(self, row: rows.Row) -> None:
    """Has a row wait before all others, with those of its prompt."""
    first = self._waiting[0] if self._waiting else None
    if first is None or first.request is not row.request:
      first = rows.Waiting(row.request, collections.deque())
      self._waiting.appendleft(first)
    first.rows.appendleft(row)

  def _rebuild(self) -> None:
    """Has every row wait, to read what it has made again, before all others."""
    running = self._space.by_request()
    for _, row in running[::-1]:
      row.read()
      self._put_back(row)
    self._cut({index: 0 for index, _ in running})
    self._crowded = False

  def _seat(
    self, joining: list[rows.Joining], group: rows.Joining
  ) -> list[rows.Joining]:
    """Has a group take its rows; returns those that are still to insert."""
    for index, row in zip(group.at, group.rows, strict=True):
      row.sit(group.waiting, group.tag(self._size), self._begun)
      self._begun += 1
      self._rows[index] = row
    if joining and not group.fits(joining):
      self._insert(joining)
      joining = []
    return [*joining, group]

  def _insert(self, joining: Sequence[rows.Joining]) -> None:
    """Puts groups of one prefix into their rows, in one call."""
    if not joining:
      return
    inserted = rows.inserted(joining, self._size, self._cfg.max_tokens)
    with self._dispatch:
      self._state = self._steps.insert(
        joining[0].waiting.prefix, self._allocated(), *inserted
      )

  def _cut(self, left: Mapping[int, int]) -> None:
    """Ends rows on the devices, with so many tokens that remain of each."""
    if not left:
      return
    every = np.full(len(self._rows), -1, np.int32)
    for index, count in left.items():
      every[index] = count
      if not count:
        self._rows[index] = None
    with self._dispatch:
      self._state = self._steps.cut(self._allocated(), every)

  def _decode(self, params: types.Tree) -> blocks.Block:
    with self._dispatch:
      weights, state = self._weights.of(params), self._allocated()
      self._state, block = self._steps.decode(weights, state, self._key)
    return block

  def _allocated(self) -> types.Tree:
    state, self._state = self._state, None  # The caller donates it.
    if state is None and self._has_cache:
      raise types.RunError(
        "engine: expected the cache of the rows in flight, got none: a launch "
        "has failed before. Make another engine."
      )
    self._has_cache = True
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
