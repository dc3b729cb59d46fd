"""Completions in the making, as the host keeps them."""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.sampling import copies, pages, steps, stop_strings
from jaxrl_post.sampling import prefix as prefixes

# Token ids to text.
Decode: TypeAlias = Callable[[Sequence[int]], str]


@dataclasses.dataclass(eq=False)
class Row:
  """A completion in the making.

  Attributes:
    uid: identity.
    request: that asked for it.
    member: which of its request's completions it is.
    tag: of what it shares its prompt with.
    age: how many were begun before it.
    used: positions of its own in the cache.
    unread: blocks it has been through whose tokens are not below yet, its row
      in them and how many tokens it read there.
    turn: where its last turn began: behind the last token of no policy.
    looked: tokens that were looked at for stop strings.
    stopped: whether a stop string has ended it.
    scored: its prompt, as it was first read; None if not asked for.
    routed: experts of its prompt, as it was last read, see `noted`; or None.
    routing: those of the tokens behind it, from the last one of the prompt on,
      as they are in the cache.
    held: whether it has ended and stays in the cache.
    since: when it got its row, by time.monotonic().
    waited: how long others have waited while it was held, in tokens that its
      row could have made.
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
  unread: list[tuple[copies.Made, int, int]] = dataclasses.field(
    default_factory=list
  )
  turn: int = 0
  looked: int = 0
  stopped: bool = False
  scored: copies.Scored | None = None
  routed: copies.Routing | None = None
  routing: list[np.ndarray] = dataclasses.field(default_factory=list)
  held: bool = False
  since: float = 0.0
  waited: int = 0

  def sit(self, waiting: "Waiting", tag: int, age: int) -> None:
    """Begins in a row, behind the prompt.

    Args:
      waiting: that has its prompt.
      tag: of what it shares the prompt with.
      age: how many were begun before it.
    """
    self.tag, self.age, self.used = tag, age, 0
    self.scored = self.scored or waiting.scored
    self.routed, self.routing = waiting.routed, []
    self.since = time.monotonic()

  def follow(self, held: "Row") -> None:
    """Begins in the row of a held completion, behind what that has made."""
    self.tag, self.age, self.used = held.tag, held.age, held.used
    self.scored, self.routed = held.scored, held.routed
    self.routing = [part[: held.used] for part in held.routings()]
    self.since = time.monotonic()

  def take(self, made: copies.Made, index: int, used: int) -> None:
    """Goes through a block.

    Args:
      made: the block.
      index: of its row.
      used: positions of its own in the cache now.
    """
    self.unread.append((made, index, used - self.used))
    self.used = used

  def read(self) -> None:
    """Takes what it has made from the blocks it has been through."""
    for made, index, count in self.unread:
      routing = made.routing(index, count)
      self.routing += [] if routing is None else [routing]
      tokens, logprobs, *most = made.read(index)
      self.tokens += tokens
      self.logprobs += logprobs
      self.versions += [made.version] * len(tokens)
      for ids, scores in zip(*most, strict=True):
        self.top.append(tuple(zip(ids, scores, strict=True)))
    self.unread.clear()

  def stop(self, decode: Decode | None) -> bool:
    """Cuts it behind the first new token that completes a stop string.

    Args:
      decode: ids to text; None where no request has stop strings.

    Returns:
      Whether there is one.
    """
    sampling = self.request.sampling
    if decode is None or not sampling.stop_strings:
      return False
    self.read()
    start = max(self.looked, sampling.min_tokens)
    place = stop_strings.first_stop(
      self.tokens, start, sampling.stop_strings, decode, self.turn
    )
    self.looked = len(self.tokens)
    if place is None:
      return False
    extra = len(self.tokens) - (place + 1)
    for made in (self.tokens, self.logprobs, self.versions, self.top):
      del made[len(made) - extra :]
    self.stopped = True
    return True

  @property
  def is_due(self) -> bool:
    """Whether others have waited for as long as it takes to make it again.

    So whatever comes, holding it and making it again cost at most twice of what
    would have been best (Karlin et al. 1988, "Competitive snoopy caching").
    """
    return self.held and self.waited >= self.used

  def continues(self, held: "Row") -> bool:
    """Whether it goes on from what a held row has in the cache."""
    now, then = self.request.sampling, held.request.sampling
    # Prompts that are scored are read by another program.
    scored = now.prompt_logprobs, now.prompt_logprobs and now.temperature
    return (
      self.request.prompt == held.request.prompt
      and scored
      == (then.prompt_logprobs, then.prompt_logprobs and then.temperature)
      and self.tokens[: len(held.tokens)] == held.tokens
    )

  def partial(self) -> types.Partial:
    """Returns what is read of it."""
    return types.Partial(
      uid=self.uid,
      tokens=tuple(self.tokens),
      logprobs=tuple(self.logprobs),
      versions=tuple(self.versions),
    )

  def routings(self) -> list[np.ndarray]:
    """Returns `routing` as one array, if there is any."""
    return [np.concatenate(self.routing)] if self.routing else []

  def finished(self) -> types.Completion:
    """Returns all of it, once it has ended.

    Raises:
      RunError: a token was drawn from what is no distribution.
    """
    if math.isnan(sum(self.logprobs)):
      raise types.RunError(
        f"engine: expected log-probabilities of completion {self.uid}, got NaN "
        f"from weights of version {self.versions[-1]}. Weights or products are "
        "not finite."
      )
    asked = self.request.sampling.top_logprobs
    unknown = ((),) * (len(self.tokens) - len(self.top))
    top = (*unknown, *(most[:asked] for most in self.top))
    ended = steps.finish(self.tokens, self.request.sampling.stop_ids)
    routing = None
    if self.routed is not None:
      own = [part[: len(self.tokens)] for part in self.routings()]
      routing = np.concatenate([self.routed.read(), *own])
    return types.Completion(
      uid=self.uid,
      tokens=tuple(self.tokens),
      logprobs=tuple(self.logprobs),
      versions=tuple(self.versions),
      finish="stop" if self.stopped else ended,
      top_logprobs=top if asked else (),
      prompt_logprobs=() if self.scored is None else self.scored.read(),
      routing=routing,
    )


def turn_of(versions: Sequence[int]) -> int:
  """Returns where the last turn begins in tokens of these versions."""
  own = itertools.takewhile(lambda version: version >= 0, reversed(versions))
  return len(versions) - sum(1 for _ in own)


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
      row.looked, row.turn = len(row.tokens), turn_of(row.versions)
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
    scored: the prompt's log-probabilities, if asked for and all of it is read.
    routed: its experts, if they are noted and all of it is read.
  """

  request: types.Request
  rows: collections.deque[Row]
  prefix: prefixes.Read | None = None
  source: int = 0
  begin: int = 0
  tag: int = 0
  scored: copies.Scored | None = None
  routed: copies.Routing | None = None

  @property
  def ready(self) -> bool:
    """Whether all of the prompt is read."""
    return self.prefix is not None and self.begin >= len(self.request.prompt)

  def tag_at(self, place: int) -> int:
    """Returns the tag of the rows that share the `place`-th of its prefixes."""
    return (self.tag + place) % (2**32 - 1) + 1

  def read(self, prefix: prefixes.Read, begin: int) -> None:
    """Takes a prefix that has its prompt up to `begin`."""
    self.prefix, self.begin = prefix, begin
    length = len(self.request.prompt)
    if self.ready and prefix.routing is not None:
      self.routed = copies.Routing(prefix.routing, self.source, length)
    if self.ready and prefix.scores is not None:
      self.scored = copies.Scored(prefix.scores.logprobs, self.source, length)
      # What puts prefixes into the cache is compiled for those without.
      self.prefix = dataclasses.replace(prefix, scores=None)


@dataclasses.dataclass(frozen=True)
class Joining:
  """Completions of one prompt that go into rows together.

  Attributes:
    waiting: the prompt, all of it read.
    at: rows of the engine.
    rows: completions that share a place in the cache, one for each.
  """

  waiting: Waiting
  at: list[int]
  rows: list[Row]

  def tag(self, size: pages.Sizes) -> int:
    """Returns the tag of these rows."""
    first = self.rows[0].member if self.rows else 0
    return self.waiting.tag_at(first // size.group)

  def fits(self, others: Sequence["Joining"]) -> bool:
    """Whether it goes into one call with others."""
    prefix = others[0].waiting.prefix
    assert prefix is not None
    return (
      self.waiting.prefix is prefix
      and len(others) < len(prefix.length)
      and self.rows[0].tag not in {other.rows[0].tag for other in others}
    )


def inserted(
  joining: Sequence[Joining], size: pages.Sizes, num_forced: int
) -> tuple[np.ndarray, np.ndarray, steps.Rows]:
  """Returns what `steps.insert` takes after the state.

  Args:
    joining: groups of one prefix, see `Joining.fits`.
    size: of the cache.
    num_forced: most tokens that a completion is continued from.

  Returns:
    Sources, places and rows, filled up to as many groups as there are prompts.
  """
  prefix = joining[0].waiting.prefix
  assert prefix is not None
  num = len(prefix.length)
  source = np.zeros(num, np.int32)
  at = np.full((num, size.group), size.parts * size.rows, np.int32)
  groups = []
  for i, group in enumerate(joining):
    source[i] = group.waiting.source
    at[i, : len(group.at)] = group.at
    request = group.waiting.request
    groups.append(
      steps.rows_for(
        [row.uid for row in group.rows],
        request.sampling,
        width=size.group,
        begun=[row.tokens for row in group.rows],
        num_forced=num_forced,
        tag=group.tag(size),
        members=[row.member for row in group.rows],
        hold=request.hold,
      )
    )
  groups += groups[:1] * (num - len(groups))  # Of no effect: in no row.
  return source, at, jax.tree.map(lambda *x: np.concatenate(x), *groups)


def resumed(
  joining: Sequence[tuple[int, Row]], size: pages.Sizes, num_forced: int
) -> tuple[np.ndarray, steps.Rows]:
  """Returns what `steps.resume` takes after the state.

  Args:
    joining: held rows by their index, `used` of whose tokens are in the cache.
    size: of the cache.
    num_forced: most tokens that a completion is continued from.

  Returns:
    Places and rows, filled up to all rows.
  """
  count = size.parts * size.rows
  at = np.full(count, count, np.int32)
  at[: len(joining)] = [index for index, _ in joining]
  alike = [
    steps.rows_for(
      [row.uid],
      row.request.sampling,
      begun=[row.tokens],
      num_forced=num_forced,
      tag=row.tag,
      members=[row.member],
      made=row.used,
      hold=row.request.hold,
    )
    for _, row in joining
  ]
  idle = steps.rows_for(
    [],
    types.SamplingParams(),
    width=count - len(joining),
    num_forced=num_forced,
  )
  return at, jax.tree.map(lambda *x: np.concatenate(x), *alike, idle)


def check(
  request: types.Request,
  *,
  max_prompt: int,
  max_tokens: int,
  top_logprobs: int,
  vocab_size: int,
  decode: Decode | None,
) -> None:
  """Refuses a request that an engine cannot take.

  Args:
    request: what is asked.
    max_prompt: longest prompt, in tokens.
    max_tokens: longest completion.
    top_logprobs: most that are reported with a token.
    vocab_size: ids must be below it.
    decode: ids to text; None takes no stop strings.

  Raises:
    InputError: names the first thing that does not fit, and its limit.
    RunError: a completion that it continues is not half made by this request.
  """
  begun = max((len(partial.tokens) for partial in request.begun), default=0)
  if not request.uids:
    raise types.InputError(
      "request: expected at least one uid, got none. Ask for a completion."
    )
  sampling = request.sampling
  changed = {i for i, _ in sampling.logit_bias} | {*sampling.forbidden_ids}
  limits = (
    ("number of prompt tokens", len(request.prompt), max_prompt),
    (
      "number of tokens that it goes on from",
      begun,
      request.sampling.max_tokens - 1,
    ),
    ("max_tokens", sampling.max_tokens, max_tokens),
    ("number of stop ids", len(sampling.stop_ids), steps.MAX_IDS),
    ("top_logprobs", sampling.top_logprobs, top_logprobs),
    ("number of biased and forbidden ids", len(changed), steps.MAX_IDS),
    ("biased and forbidden ids", max(changed, default=0), vocab_size - 1),
    ("stop ids", max(sampling.stop_ids, default=0), vocab_size - 1),
    ("prompt tokens", max(request.prompt, default=0), vocab_size - 1),
  )
  for name, value, most in limits:
    if value > most:
      raise types.InputError(
        f"request {request.uids[0]}: expected {name} of at most {most}, got "
        f"{value}. Ask for less; the sizes of an engine are settings."
      )
  if min(request.prompt, default=0) < 0:
    raise types.InputError(
      f"request {request.uids[0]}: expected tokens in [0, {vocab_size}), got "
      f"{min(request.prompt)}. Use the tokenizer of the model."
    )
  if not request.prompt:
    raise types.InputError(
      f"request {request.uids[0]}: expected a prompt of at least one token, "
      "got none. Give the prompt a begin token."
    )
  if sampling.stop_strings and decode is None:
    raise types.InputError(
      f"request {request.uids[0]}: expected no stop strings, as this engine "
      f"was made without `decode`, got {sampling.stop_strings}. Leave them "
      "out, or make the engine with the tokenizer's `decode`."
    )
  check_begun(request, vocab_size, decode)


def check_begun(
  request: types.Request, vocab_size: int, decode: Decode | None
) -> None:
  """Refuses to continue what this request cannot have begun.

  Args:
    request: what is asked.
    vocab_size: ids must be below it.
    decode: ids to text; needed for stop strings only.

  Raises:
    RunError: names the completion and what is wrong with it.
  """
  sampling, uids = request.sampling, [p.uid for p in request.begun]
  for begun in request.begun:
    sizes = [len(x) for x in (begun.tokens, begun.logprobs, begun.versions)]
    bad = [t for t in begun.tokens if not 0 <= t < vocab_size]
    turn = turn_of(begun.versions)
    stops = [t for t in begun.tokens[turn:] if t in sampling.stop_ids]
    place = None
    if decode is not None and not bad:
      place = stop_strings.first_stop(
        begun.tokens,
        max(sampling.min_tokens, turn),
        sampling.stop_strings,
        decode,
        turn,
      )
    rules = (
      (begun.uid in request.uids, f"a uid of {request.uids}", begun.uid),
      (uids.count(begun.uid) == 1, "each uid once", uids),
      (len({*sizes}) == 1, "as many log-probabilities and versions", sizes),
      (min(begun.versions, default=0) >= -1, "versions >= -1", begun.versions),
      (not bad, f"tokens in [0, {vocab_size})", bad),
      (not stops, "no stop token in its last turn", stops),
      (place is None, "no stop string in it", f"one up to token {place}"),
    )
    for holds, rule, value in rules:
      if not holds:
        raise types.RunError(
          f"completion {begun.uid} to continue: expected {rule}, got "
          f"{value}. What was kept of it is damaged, or of another run."
        )
