"""Completions in the making, as the host keeps them."""

import collections
import dataclasses
from typing import Any

import jax

from jaxrl_post import types
from jaxrl_post.sampling import prefix as prefixes
from jaxrl_post.sampling import steps


class Made:
  """A block on its way to the host."""

  def __init__(self, block: steps.Block, version: int) -> None:
    """Begins the copy of what rows read later."""
    self.version = version
    self._arrays: Any = dict(
      tokens=block.tokens,
      logprobs=block.logprobs,
      valid=block.valid,
      top_ids=block.top_ids,
      top_logprobs=block.top_logprobs,
    )
    for array in self._arrays.values():
      array.copy_to_host_async()

  def read(self, index: int) -> dict[str, Any]:
    """Returns what a row has made in it, as lists; waits for the copy."""
    self._arrays = jax.device_get(self._arrays)
    valid = self._arrays["valid"][index]
    return {k: x[index][valid].tolist() for k, x in self._arrays.items()}


@dataclasses.dataclass
class Row:
  """A completion in the making.

  Attributes:
    uid: identity.
    request: that asked for it.
    member: which of its request's completions it is.
    tag: of what it shares its prompt with.
    age: how many were begun before it.
    used: positions of its own in the cache.
    unread: blocks it has been through whose tokens are not below yet.
  """

  uid: int
  request: types.Request
  member: int
  tag: int = 0
  age: int = 0
  used: int = 0
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  top: list[tuple[tuple[int, float], ...]] = dataclasses.field(
    default_factory=list
  )
  unread: list[tuple[Made, int]] = dataclasses.field(default_factory=list)

  def read(self) -> None:
    """Takes what it has made from the blocks it has been through."""
    for made, index in self.unread:
      part = made.read(index)
      self.tokens += part["tokens"]
      self.logprobs += part["logprobs"]
      self.versions += [made.version] * len(part["tokens"])
      for ids, logprobs in zip(
        part["top_ids"], part["top_logprobs"], strict=True
      ):
        self.top.append(tuple(zip(ids, logprobs, strict=True)))
    self.unread.clear()

  def partial(self) -> types.Partial:
    """Returns what is read of it."""
    return types.Partial(
      uid=self.uid,
      tokens=tuple(self.tokens),
      logprobs=tuple(self.logprobs),
      versions=tuple(self.versions),
    )

  def finished(self) -> types.Completion:
    """Returns all of it, once it has ended."""
    asked = self.request.sampling.top_logprobs
    unknown = ((),) * (len(self.tokens) - len(self.top))
    top = (*unknown, *(most[:asked] for most in self.top))
    return types.Completion(
      uid=self.uid,
      tokens=tuple(self.tokens),
      logprobs=tuple(self.logprobs),
      versions=tuple(self.versions),
      finish=steps.finish(self.tokens, self.request.sampling.stop_ids),
      top_logprobs=top if asked else (),
    )


def rows_of(request: types.Request) -> collections.deque[Row]:
  """Returns the completions of a request as far as they are made."""
  begun = {partial.uid: partial for partial in request.begun}
  rows = collections.deque(
    Row(uid, request, member) for member, uid in enumerate(request.uids)
  )
  for row in rows:
    if row.uid in begun:
      row.tokens += begun[row.uid].tokens
      row.logprobs += begun[row.uid].logprobs
      row.versions += begun[row.uid].versions
  return rows


@dataclasses.dataclass
class Waiting:
  """A request of which some completions have no row yet.

  Attributes:
    request: the request.
    rows: those completions.
    prefix: its prompt as far as it is read, among others.
    source: which of the prefix it is.
    begin: the first position of the prompt that is not read.
    tag: of the first rows that share this prefix.
  """

  request: types.Request
  rows: collections.deque[Row]
  prefix: prefixes.Prefix | None = None
  source: int = 0
  begin: int = 0
  tag: int = 0

  @property
  def ready(self) -> bool:
    """Whether all of the prompt is read."""
    return self.prefix is not None and self.begin >= len(self.request.prompt)


def check_begun(request: types.Request, vocab_size: int) -> None:
  """Refuses to continue what this request cannot have begun.

  Raises:
    RunError: names the completion and what is wrong with it.
  """
  sampling, uids = request.sampling, [p.uid for p in request.begun]
  for begun in request.begun:
    sizes = [len(x) for x in (begun.tokens, begun.logprobs, begun.versions)]
    bad = [t for t in begun.tokens if not 0 <= t < vocab_size]
    stops = [t for t in begun.tokens if t in sampling.stop_ids]
    most = sampling.max_tokens - 1
    rules = (
      (begun.uid in request.uids, f"a uid of {request.uids}", begun.uid),
      (uids.count(begun.uid) == 1, "each uid once", uids),
      (len({*sizes}) == 1, "as many log-probabilities and versions", sizes),
      (sizes[0] <= most, f"at most {most} tokens", sizes[0]),
      (not bad, f"tokens in [0, {vocab_size})", bad),
      (not stops, "no stop token", stops),
    )
    for holds, rule, value in rules:
      if not holds:
        raise types.RunError(
          f"completion {begun.uid} to continue: expected {rule}, got "
          f"{value}. What was kept of it is damaged, or of another run."
        )
