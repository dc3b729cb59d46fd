"""Groups of rollouts to the arrays of one optimizer step."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxrl_post import types
from jaxrl_post.data import segments


@types.host_record
class Layout:
  """The shape of a step's arrays.

  Attributes:
    rows: B.
    length: T.
    together: rollouts of one prompt that a row has room for, however long they
      are; each `rows` x `together` sequences are a batch.
    microbatches: M, of each minibatch.
    minibatches: K, with M divides B. The k-th has rows k, k + K, ..., and of
      these its m-th microbatch m, m + M, ...
    unit: rollouts of a group that go to the same minibatch: so many, and the
      next so many. A multiple of `together`.
    alone: whether each rollout has a row of its own, for a model that cannot
      tell sequences of a row apart; `together` is 1 then.
    routing: what completions have of each token, as [L, X]: the experts that it
      is to go through; None for a trainer that chooses them.
  """

  rows: int
  length: int
  together: int = 1
  microbatches: int = 1
  minibatches: int = 1
  unit: int = 1
  alone: bool = False
  routing: jax.ShapeDtypeStruct | None = None

  def __post_init__(self) -> None:
    if self.alone and self.together > 1:
      raise ValueError(
        f"pack: expected a row for each rollout, got one for {self.together}"
      )
    if self.unit % self.together:
      raise ValueError(
        f"pack: expected a unit of a multiple of {self.together} rollouts, got "
        f"{self.unit}"
      )

  @property
  def sequences(self) -> int:
    """N, the most sequences of a batch: a rollout has one, or several."""
    return self.rows * self.together


# Longest row of several rollouts: all of its tokens are compared with each
# other.
_LONGEST = 2048


def layout(
  rollouts: int,
  group_size: int,
  *,
  max_prompt: int,
  max_tokens: int,
  flops: Callable[[int], float],
  microbatches: int = 1,
  minibatches: int = 1,
  row_parts: int = 1,
  length_parts: int = 1,
  alone: bool = False,
  routing: jax.ShapeDtypeStruct | None = None,
  most_rows: int = 1,
) -> Layout:
  """Decides how many rollouts of a prompt share it in a row.

  As many as make the fewest operations for a rollout, if all are as long as
  they may be: the more there are, the less of the prompt each computes, and the
  more tokens of others each is compared with, for nothing.

  Args:
    rollouts: of a batch.
    group_size: rollouts of a prompt.
    max_prompt: its longest, in tokens.
    max_tokens: longest completion.
    flops: operations of a token in a layer, with so many keys to read.
    microbatches: of a minibatch.
    minibatches: of a batch.
    row_parts: of a mesh, by rows.
    length_parts: likewise, by positions.
    alone: whether each rollout has a row of its own.
    routing: see `Layout`. Where it is noted no room is spared: a prompt that
      the engine read twice may have gone through two sets of experts.
    most_rows: of a rollout whose conversation may begin anew. With several
      there is room for so many of each, and none is made for those of others
      in a row, since few have its prompt.

  Returns:
    A layout for so many rollouts. Rows divide evenly over all parts, unless
    `rollouts` does not. Which rollouts share a minibatch depends on neither
    `microbatches` nor parts.
  """
  parts = microbatches * minibatches * row_parts
  unit = math.gcd(group_size, rollouts // minibatches)

  def length(together: int) -> int:
    size = max_prompt - 1 + together * (max_tokens + 1)
    return -(-size // length_parts) * length_parts

  def cost(together: int) -> float:
    # Twice the keys: softmax takes as long as the products.
    keys = 2 * length(together)
    return length(together) / together * flops(keys)

  fit = [
    n
    for n in range(2, unit + 1)
    if not unit % n and not rollouts % (n * parts) and length(n) <= _LONGEST
    if not alone and most_rows == 1 and routing is None
  ]
  best = min([1, *fit], key=cost)
  return Layout(
    rows=rollouts * most_rows // best,
    length=length(best),
    together=best,
    microbatches=microbatches,
    minibatches=minibatches,
    unit=unit,
    alone=alone,
    routing=routing,
  )


# A prompt: its ids, and the experts that they went through, if that is noted.
_Asked: TypeAlias = tuple[tuple[int, ...], bytes]


@dataclasses.dataclass(frozen=True)
class _Block:
  """Rollouts of one prompt that stay together, by number."""

  prompt: _Asked
  members: tuple[int, ...]
  size: int  # tokens of the members, without what they share

  @property
  def shared(self) -> int:
    """Tokens that several rollouts of this prompt have once."""
    return max(len(self.prompt[0]) - 1, 0)


class _Piece(NamedTuple):
  """Tokens of a sequence that lie side by side."""

  number: int  # of the sequence
  owner: int  # the same, or N if the piece is of several
  begin: int  # in the rollout, and `end`
  end: int
  row: int
  at: int
  segment: int
  prefix: int


def pack(
  groups: Sequence[types.Group],
  layout: Layout,
  *,
  mask_stale_tokens: bool = False,
) -> types.Batch:
  """Lays out rollouts in rows of a fixed length, as many in one as fit.

  A rollout is one sequence, or several, see `segments`. Minibatches get
  `layout.unit` rollouts of a group at a time, with all their sequences. Of
  these, up to `layout.together` with the same prompt are a block. The largest
  blocks of a minibatch come first, each into the first row that has their
  prompt already and room for them, or else the first that has room. In a row,
  sequences with the same prompt have its tokens once. Rows that are in use fill
  one microbatch after the other: those at the end may be empty, which costs the
  trainer nothing.

  Args:
    groups: finished and scored.
    layout: has room for their blocks, certainly if there are no more of them
      than rows.
    mask_stale_tokens: train, of each rollout, only the tokens of the newest
      version among its tokens.

  Returns:
    A batch of NumPy arrays. The mask is 1 on exactly the completion tokens
    that a policy sampled, the stop token included, whatever their values, and
    0 on those of version -1, as of a tool; with `mask_stale_tokens` also 0
    on those that an older version sampled than the newest of their rollout,
    which stay as context and keep log-probability and version. The reward of a
    turn is at its last token, or at the rollout's next one with mask 1. The
    last token of a rollout, which no engine has read, has routing -1. Each
    sequence has the reward of its rollout. They are numbered in the order of
    the groups, those of a rollout as they were made, and a row has its tokens
    without gaps; where no token is, there is neither segment nor mask, and
    numbers beyond the last sequence have no reward. Minibatches have equally
    many units, give or take one.
  """
  parts = [
    part
    for number, group in enumerate(groups)
    for rollout in group.rollouts
    for part in segments.parts(number, rollout, newest_only=mask_stale_tokens)
  ]
  rollouts = [part.rollout for part in parts]
  found = [(part.group, part.rollout) for part in parts]
  if len(found) > layout.sequences:
    raise ValueError(
      f"pack: expected at most {layout.sequences} sequences, got {len(found)}"
    )
  for rollout in rollouts:
    _check_routing(rollout, layout)
  pieces = list(_pieces(found, layout))
  sizes = np.array([p.end - p.begin for p in pieces], int)
  batch = _empty(layout)

  def each(values: Sequence[int]) -> np.ndarray:
    return np.repeat(np.array(values, int), sizes)

  # All tokens of all pieces, one behind the other, and where each belongs.
  offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
  target = each([p.row for p in pieces]), each([p.at for p in pieces]) + offset
  batch["sequence"][target] = each([p.owner for p in pieces])
  batch["segment_ids"][target] = each([p.segment for p in pieces])
  batch["prefix_ids"][target] = each([p.prefix for p in pieces])
  batch["positions"][target] = each([p.begin for p in pieces]) + offset
  earned = [part.earned for part in parts]
  for name, values in _tokens(pieces, rollouts, earned).items():
    batch[name][target] = values
  if layout.routing is not None:
    _route(batch["routing"], pieces, rollouts)
  sampled = batch["policy_versions"] >= 0
  if mask_stale_tokens:
    newest = np.full(layout.sequences + 1, -1)
    newest[: len(found)] = [part.newest for part in parts]
    sampled &= batch["policy_versions"] == newest[batch["sequence"]]
  batch["loss_mask"] = sampled.astype(np.float32)
  first: dict[int, int] = {}
  for number, (group, rollout) in enumerate(found):
    completion = rollout.completion
    batch["temperature"][number] = rollout.temperature
    batch["rewards"][number] = rollout.reward
    batch["group_ids"][number] = group
    batch["rollout_ids"][number] = first.setdefault(completion.uid, number)
    batch["truncated"][number] = completion.finish == "length"
  # Arrays of the host: the step that takes the batch places them.
  return types.Batch(**batch)


def trained(
  batch: types.Batch, *, truncated: bool = True, equal: bool = True
) -> np.ndarray:
  """Returns the mask of a batch as `training.step.score` leaves it.

  Args:
    batch: from `pack`.
    truncated: whether rollouts train that the length limit ended.
    equal: whether groups train whose rewards agree.

  Returns:
    `loss_mask`, 0 on the tokens of sequences that are left out, [B, T].
  """
  valid = np.isfinite(np.asarray(batch.rewards))
  if not equal:
    ids, turns = np.asarray(batch.group_ids), np.zeros(len(valid) + 1, "f")
    paid = np.asarray(batch.turn_rewards) * np.asarray(batch.loss_mask)
    whole = np.append(np.asarray(batch.rollout_ids), len(valid))
    np.add.at(turns, whole[np.asarray(batch.sequence)], paid)
    rewards = np.asarray(batch.rewards) + turns[whole[:-1]]
    top, low = np.full(len(ids), -np.inf), np.full(len(ids), np.inf)
    np.maximum.at(top, ids[valid], rewards[valid])
    np.minimum.at(low, ids[valid], rewards[valid])
    valid &= (top > low)[ids]
  if not truncated:
    valid &= ~np.asarray(batch.truncated)
  known = np.append(valid, False)[np.asarray(batch.sequence)]
  return np.asarray(batch.loss_mask) * known


def _pieces(
  found: Sequence[tuple[int, types.Rollout]], layout: Layout
) -> Iterator[_Piece]:
  """Lays out the pieces of all minibatches, row by row."""
  rollouts = [r for _, r in found]
  units = _units(found, layout.unit)
  # The largest take turns in the minibatches, so that those are alike.
  units.sort(key=lambda unit: -sum(_size(rollouts[n]) for n in unit))
  for part in range(layout.minibatches):
    mine = units[part :: layout.minibatches]
    blocks = [b for unit in mine for b in _blocks(unit, rollouts, layout)]
    rows = (
      [{b.prompt: list(b.members)} for b in blocks]
      if layout.alone
      else _rows(blocks, layout.length)
    )
    if len(rows) > layout.rows // layout.minibatches:
      raise ValueError(
        f"pack: expected at most {layout.rows} rows, each for "
        f"{layout.together} rollouts of one prompt, got {len(rows)} of one of "
        f"{layout.minibatches} minibatches"
      )
    for place, families in enumerate(rows):
      row = _row(place, layout) * layout.minibatches + part
      yield from _row_pieces(families, rollouts, row, layout.sequences)


def _units(
  found: Sequence[tuple[int, types.Rollout]], size: int
) -> list[list[int]]:
  """Returns what shares a minibatch: `size` rollouts of a group, by number."""
  members: dict[int, dict[int, list[int]]] = {}
  for number, (group, rollout) in enumerate(found):
    mine = members.setdefault(group, {})
    mine.setdefault(rollout.completion.uid, []).append(number)
  return [
    list(itertools.chain(*[*mine.values()][begin : begin + size]))
    for mine in members.values()
    for begin in range(0, len(mine), size)
  ]


def _blocks(
  unit: Sequence[int], rollouts: Sequence[types.Rollout], layout: Layout
) -> Iterator[_Block]:
  """Returns what of a unit lies together in a row."""
  alike: dict[_Asked, list[int]] = {}
  for number in unit:
    alike.setdefault(_asked(rollouts[number]), []).append(number)
  for prompt, members in alike.items():
    for begin in range(0, len(members), layout.together):
      part = tuple(members[begin : begin + layout.together])
      own = [len(rollouts[n].completion.tokens) for n in part]
      # Each has the last token of the prompt for itself.
      block = _Block(prompt, part, sum(own) + len(part) * bool(prompt[0]))
      if block.shared + block.size > layout.length:
        raise ValueError(
          f"pack: expected at most {layout.length} tokens, got "
          f"{block.shared + block.size}"
        )
      yield block


def _asked(rollout: types.Rollout) -> _Asked:
  prompt, routing = rollout.prompt.tokens, rollout.completion.routing
  if routing is None:
    return prompt, b""
  return prompt, routing[: max(len(prompt) - 1, 0)].tobytes()


def _row_pieces(
  families: dict[_Asked, list[int]],
  rollouts: Sequence[types.Rollout],
  row: int,
  several: int,
) -> Iterator[_Piece]:
  """Lays out a row; what several rollouts have is `several`'s."""
  at, segment = 0, 1
  for (prompt, _), members in families.items():
    shared = max(len(prompt) - 1, 0) if len(members) > 1 else 0
    cuts = [(n, n, shared, _size(rollouts[n])) for n in members]
    if shared:
      cuts = [(members[0], several, 0, shared), *cuts]
    first = segment
    for number, owner, begin, end in cuts:
      prefix = first if shared else segment
      yield _Piece(number, owner, begin, end, row, at, segment, prefix)
      at, segment = at + end - begin, segment + 1


def _rows(
  blocks: Sequence[_Block], length: int
) -> list[dict[_Asked, list[int]]]:
  """Returns the rollouts of each row by prompt.

  First fit, the largest first: without prompts to share, at most 11/9 of the
  rows that are needed (Dosa 2007).
  """
  blocks = sorted(blocks, key=lambda b: -(b.shared + b.size))
  left = np.full(len(blocks), length)
  rows: list[dict[_Asked, list[int]]] = []
  for block in blocks:
    there = [i for i, row in enumerate(rows) if block.prompt in row]
    at = next((i for i in there if left[i] >= block.size), None)
    if at is None:
      at = int(np.argmax(left >= block.shared + block.size))
      if at == len(rows):
        rows.append({})
    if block.prompt not in rows[at]:
      left[at] -= block.shared
    left[at] -= block.size
    rows[at].setdefault(block.prompt, []).extend(block.members)
  return rows


def _size(rollout: types.Rollout) -> int:
  return len(rollout.prompt.tokens) + len(rollout.completion.tokens)


def _check_routing(rollout: types.Rollout, layout: Layout) -> None:
  """Refuses a completion whose experts are not known where they are asked."""
  if layout.routing is None:
    return
  made = rollout.completion
  shape = (_size(rollout) - 1, *layout.routing.shape)
  if made.routing is None or made.routing.shape != shape:
    got = None if made.routing is None else made.routing.shape
    raise ValueError(
      f"pack: rollout {made.uid}: expected the experts of all but the last of "
      f"its tokens, {shape}, got {got}"
    )


def _row(place: int, layout: Layout) -> int:
  """Returns where the row that a minibatch uses as its `place`-th lies."""
  rows = layout.rows // layout.minibatches
  microbatch, slot = divmod(place, rows // layout.microbatches)
  return slot * layout.microbatches + microbatch


def _empty(layout: Layout) -> dict[str, Any]:
  """Returns the fields of a batch of nothing."""
  num = layout.sequences

  def tokens(value: float, dtype: Any = np.float32, *each: int) -> np.ndarray:
    return np.full((layout.rows, layout.length, *each), value, dtype)

  noted = layout.routing

  return dict(
    tokens=tokens(0, np.int32),
    positions=tokens(0, np.int32),
    segment_ids=tokens(0, np.int32),
    prefix_ids=tokens(0, np.int32),
    sequence=tokens(num, np.int32),
    loss_mask=tokens(0),
    sampler_logprobs=tokens(0),
    policy_versions=tokens(-1, np.int32),
    turn_rewards=tokens(0),
    temperature=np.ones(num, np.float32),
    rewards=np.full(num, np.nan, np.float32),
    group_ids=np.full(num, num - 1, np.int32),
    rollout_ids=np.arange(num, dtype=np.int32),
    truncated=np.zeros(num, bool),
    advantages=tokens(0),
    # Not known yet; whoever used them all the same would skip the update.
    old_logprobs=tokens(np.nan),
    reference_logprobs=tokens(np.nan),
    routing=None if noted is None else tokens(-1, noted.dtype, *noted.shape),
  )


def _tokens(
  pieces: Sequence[_Piece],
  rollouts: Sequence[types.Rollout],
  earned: Sequence[Sequence[float]],
) -> dict[str, np.ndarray]:
  """Returns what is known of each token, of all pieces in order."""
  rewards: list[float] = []
  tokens: list[int] = []
  logprobs: list[float] = []
  versions: list[int] = []
  for piece in pieces:
    rollout = rollouts[piece.number]
    prompt, completion = rollout.prompt.tokens, rollout.completion
    part = slice(piece.begin, piece.end)
    tokens += (*prompt, *completion.tokens)[part]
    logprobs += (*[0.0] * len(prompt), *completion.logprobs)[part]
    versions += (*[-1] * len(prompt), *completion.versions)[part]
    rewards += (*[0.0] * len(prompt), *earned[piece.number])[part]
  return {
    "tokens": np.array(tokens, np.int32),
    "sampler_logprobs": np.array(logprobs, np.float32),
    "policy_versions": np.array(versions, np.int32),
    "turn_rewards": np.array(rewards, np.float32),
  }


def _route(
  batch: np.ndarray,
  pieces: Sequence[_Piece],
  rollouts: Sequence[types.Rollout],
) -> None:
  """Writes where tokens went; the last one of a rollout went nowhere."""
  for piece in pieces:
    routing = rollouts[piece.number].completion.routing
    assert routing is not None, "refused by _check_routing"
    part = routing[piece.begin : piece.end]
    batch[piece.row, piece.at : piece.at + len(part)] = part
