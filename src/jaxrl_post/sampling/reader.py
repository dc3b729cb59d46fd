"""Reading prompts: which of them go through `prefill` together, and when."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.sampling import prefix as prefixes
from jaxrl_post.sampling import rows


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


def call_shape(
  bucket: int, *, call_tokens: int, most: int
) -> tuple[int, int, int]:
  """Says how prompts of a bucket are read.

  Args:
    bucket: their padded length.
    call_tokens: most tokens of a call.
    most: most prompts of a call.

  Returns:
    Prompts and tokens of each in a call, and positions that a prefix of theirs
    has room for: whole chunks, as one that went beyond it would be moved back.
  """
  num = min(max(1, call_tokens // bucket), most)
  chunk = min(bucket, call_tokens)
  return num, chunk, -(-bucket // chunk) * chunk


class Reader:
  """Turns prompts into prefixes, a call of bounded size at a time.

  Short prompts of one bucket share a call; a long one takes several, of a chunk
  each, so that whoever asks can do something else in between.

  Attributes:
    buckets: padded lengths of prompts.
    tokens: of prompts that were read, without padding.
    calls: in which they were.
    seconds: from the first launch of such reading to its end, as `wait` saw it.
    launched: told of every call, see `engine.Engine.step`.
  """

  def __init__(
    self,
    compiled: Any,
    *,
    max_prompt: int,
    call_tokens: int,
    most: int,
    dispatch: contextlib.AbstractContextManager[Any],
  ) -> None:
    """Says how prompts are read.

    Args:
      compiled: `prefill` and `extend` of an engine.
      max_prompt: longest prompt, in tokens.
      call_tokens: most tokens of a call.
      most: most prompts of a call.
      dispatch: held around every launch.
    """
    self._compiled = compiled
    self.buckets = buckets(max_prompt)
    self._call_tokens = call_tokens
    self._most = most
    self._dispatch = dispatch
    self._tag = 0
    self.launched: Callable[[str, Any], None] = lambda name, result: None
    self.tokens, self.calls, self.seconds = 0, 0, 0.0
    # Since when something is being read, and what was launched last.
    self._since: float | None = None
    self._last: prefixes.Read | None = None

  def warm_up(self, params: types.Tree) -> list[prefixes.Read]:
    """Compiles the programs of every bucket; returns a prefix of each."""
    made = []
    for bucket in self.buckets:
      num, chunk, room = self._shape(bucket)
      tokens = np.zeros((num, chunk), np.int32)
      prefix = self._prefill(params, tokens, np.ones(num, np.int32), room)
      if chunk < bucket:
        prefix = self._extend(params, prefix, tokens, chunk)
      made.append(prefix)
    return made

  def read(
    self,
    params: types.Tree,
    first: rows.Waiting,
    others: Iterable[rows.Waiting],
    width: int,
  ) -> None:
    """Makes one call.

    Args:
      params: weights.
      first: whose prompt, or its next chunk, is read.
      others: in which those of the same bucket are looked for.
      width: rows that can share a prefix in the cache: a tag each.
    """
    bucket = self._bucket(first)
    num, chunk, room = self._shape(bucket)
    if first.prefix is not None:
      tokens = np.zeros((num, chunk), np.int32)
      piece = first.request.prompt[first.begin : first.begin + chunk]
      tokens[0, : len(piece)] = piece
      self._begin()
      prefix = self._extend(params, first.prefix, tokens, first.begin)
      first.read(prefix, first.begin + chunk)
      self._launched(prefix, len(piece))
      return
    # Scoring is another program: a prompt goes through the same one always.
    scored = first.request.sampling.prompt_logprobs
    alike = (
      w
      for w in others
      if w.prefix is None
      and self._bucket(w) == bucket
      and w.request.sampling.prompt_logprobs == scored
    )
    batch = list(itertools.islice(alike, num))
    tokens = np.zeros((num, chunk), np.int32)
    length = np.ones(num, np.int32)
    temperature = np.ones(num, np.float32)
    for i, waiting in enumerate(batch):
      prompt = waiting.request.prompt
      tokens[i, : len(prompt[:chunk])] = prompt[:chunk]
      length[i] = len(prompt)
      temperature[i] = waiting.request.sampling.temperature
    self._begin()
    prefix = self._prefill(
      params, tokens, length, room, temperature if scored else None
    )
    for i, waiting in enumerate(batch):
      waiting.source, waiting.tag = i, self._tag
      waiting.read(prefix, chunk)
      self._tag += -(-len(waiting.request.uids) // width)
    count = int(np.minimum(length[: len(batch)], chunk).sum())
    self._launched(prefix, count)

  def wait(self) -> None:
    """Waits for all that was read since the last call, if anything was."""
    if self._last is None or self._since is None:
      return
    jax.block_until_ready(self._last)
    self.seconds += time.monotonic() - self._since
    self._last = self._since = None

  def _begin(self) -> None:
    if self._since is None:
      self._since = time.monotonic()

  def metrics(self) -> dict[str, float]:
    """Returns `engine/prefill_{tokens,calls,s}`."""
    return {
      "engine/prefill_tokens": float(self.tokens),
      "engine/prefill_calls": float(self.calls),
      "engine/prefill_s": self.seconds,
    }

  def _launched(self, prefix: prefixes.Read, count: int) -> None:
    self._last = prefix
    self.tokens += count
    self.launched("prefill", prefix)
    self.calls += 1

  def _shape(self, bucket: int) -> tuple[int, int, int]:
    return call_shape(bucket, call_tokens=self._call_tokens, most=self._most)

  def _bucket(self, waiting: rows.Waiting) -> int:
    length = len(waiting.request.prompt)
    return next(b for b in self.buckets if b >= length)

  def _prefill(
    self,
    params: types.Tree,
    tokens: np.ndarray,
    length: np.ndarray,
    room: int,
    temperature: np.ndarray | None = None,
  ) -> prefixes.Read:
    with self._dispatch:
      if temperature is None:
        return self._compiled.prefill(params, tokens, length, room)
      return self._compiled.prefill(params, tokens, length, room, temperature)

  def _extend(
    self,
    params: types.Tree,
    prefix: prefixes.Read,
    tokens: np.ndarray,
    begin: int,
  ) -> prefixes.Read:
    with self._dispatch:
      return self._compiled.extend(
        params, prefix, tokens, np.array(begin, np.int32)
      )
