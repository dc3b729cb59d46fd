"""Reading prompts: which of them go through `prefill` together, and when."""

import contextlib
from collections.abc import Iterable
from typing import Any

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


class Reader:
  """Turns prompts into prefixes, a call of bounded size at a time.

  Short prompts of one bucket share a call; a long one takes several, of a chunk
  each, so that whoever asks can do something else in between.
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

  def warm_up(self, params: types.Tree) -> list[prefixes.Prefix]:
    """Compiles the programs of every bucket; returns a prefix of each."""
    prefixes = []
    for bucket in self.buckets:
      num, chunk = self._shape(bucket)
      tokens = np.zeros((num, chunk), np.int32)
      prefix = self._prefill(params, tokens, np.ones(num, np.int32), bucket)
      if chunk < bucket:
        prefix = self._extend(params, prefix, tokens, chunk)
      prefixes.append(prefix)
    return prefixes

  def read(
    self,
    params: types.Tree,
    first: rows.Waiting,
    others: Iterable[rows.Waiting],
    width: int,
  ) -> int:
    """Makes one call.

    Args:
      params: weights.
      first: whose prompt, or its next chunk, is read.
      others: in which those of the same bucket are looked for.
      width: rows that can share a prefix in the cache: a tag each.

    Returns:
      Tokens of prompts that were read, without padding.
    """
    bucket = self._bucket(first)
    num, chunk = self._shape(bucket)
    if first.prefix is not None:
      tokens = np.zeros((num, chunk), np.int32)
      piece = first.request.prompt[first.begin : first.begin + chunk]
      tokens[0, : len(piece)] = piece
      first.prefix = self._extend(params, first.prefix, tokens, first.begin)
      first.begin += chunk
      return len(piece)
    batch = [
      w for w in others if w.prefix is None and self._bucket(w) == bucket
    ]
    batch = batch[:num]
    tokens = np.zeros((num, chunk), np.int32)
    length = np.ones(num, np.int32)
    for i, waiting in enumerate(batch):
      prompt = waiting.request.prompt
      tokens[i, : len(prompt[:chunk])] = prompt[:chunk]
      length[i] = len(prompt)
    prefix = self._prefill(params, tokens, length, bucket)
    for i, waiting in enumerate(batch):
      waiting.prefix, waiting.source, waiting.begin = prefix, i, chunk
      waiting.tag = self._tag
      self._tag += -(-len(waiting.request.uids) // width)
    return int(np.minimum(length[: len(batch)], chunk).sum())

  def _shape(self, bucket: int) -> tuple[int, int]:
    """Returns prompts and tokens of a call."""
    num = min(max(1, self._call_tokens // bucket), self._most)
    return num, min(bucket, self._call_tokens)

  def _bucket(self, waiting: rows.Waiting) -> int:
    length = len(waiting.request.prompt)
    return next(b for b in self.buckets if b >= length)

  def _prefill(
    self,
    params: types.Tree,
    tokens: np.ndarray,
    length: np.ndarray,
    bucket: int,
  ) -> prefixes.Prefix:
    # Room for whole chunks: one that went beyond it would be moved back.
    room = -(-bucket // tokens.shape[1]) * tokens.shape[1]
    with self._dispatch:
      return self._compiled.prefill(params, tokens, length, room)

  def _extend(
    self,
    params: types.Tree,
    prefix: prefixes.Prefix,
    tokens: np.ndarray,
    begin: int,
  ) -> prefixes.Prefix:
    with self._dispatch:
      return self._compiled.extend(
        params, prefix, tokens, np.array(begin, np.int32)
      )
