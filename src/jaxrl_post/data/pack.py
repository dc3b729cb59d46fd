"""Groups of rollouts to the arrays of one optimizer step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_post import types


def pack(
  groups: Sequence[types.Group],
  *,
  rows: int,
  length: int,
  microbatches: int = 1,
  minibatches: int = 1,
  mask_stale_tokens: bool = False,
) -> types.Batch:
  """Lays out rollouts in rows of a fixed length, as many in one as fit.

  The longest come first, each into the first row that has room for it. Rows
  that are in use fill one microbatch after the other: those at the end may be
  empty, which costs the trainer nothing.

  Args:
    groups: finished and scored; at most `rows` rollouts in all.
    rows: B, and N: each rollout is a sequence, and may need a row of its own.
    length: T, at least the longest prompt plus completion.
    microbatches: M, of each minibatch.
    minibatches: K, with M divides B. Each has as many rollouts as the others,
      give or take one. The k-th has rows k, k + K, ..., and of these its m-th
      microbatch m, m + M, ...
    mask_stale_tokens: train, of each rollout, only the tokens of the newest
      version among its tokens.

  Returns:
    A batch of NumPy arrays. The mask is 1 on exactly the completion tokens
    that a policy sampled, the stop token included, whatever their values, and
    0 on those of version -1, as of a tool; with `mask_stale_tokens` also 0
    on those that an older version sampled than the newest of their rollout,
    which stay as context and keep log-probability and version. Sequences are
    numbered in the order of the groups, and lie in their rows without gaps;
    where no token is, there is neither segment nor mask, and numbers beyond the
    last sequence have no reward.
  """
  found = [(i, r) for i, group in enumerate(groups) for r in group.rollouts]
  sizes = np.array([_size(rollout) for _, rollout in found], int)
  if len(found) > rows:
    raise ValueError(
      f"pack: expected at most {rows} rollouts, got {len(found)}"
    )
  longest = sizes.max(initial=0)
  if longest > length:
    raise ValueError(f"pack: expected at most {length} tokens, got {longest}")
  batch = _empty(rows, length)
  at, begin, segment = (np.zeros(len(found), int) for _ in range(3))
  # The longest take turns in the minibatches, so that those are alike.
  turn = np.empty(len(found), int)
  turn[np.argsort(-sizes, kind="stable")] = np.arange(len(found)) % minibatches
  for part in range(minibatches):
    mine = np.flatnonzero(turn == part)
    place, begin[mine], segment[mine] = _places(sizes[mine], length)
    row = _row(place, rows // minibatches, microbatches)
    at[mine] = row * minibatches + part
  number = np.repeat(np.arange(len(found)), sizes)
  # All tokens of all rollouts, one behind the other, and where each belongs.
  offset = np.arange(len(number)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
  target = at[number], begin[number] + offset
  batch["sequence"][target] = number
  batch["segment_ids"][target] = segment[number]
  batch["positions"][target] = offset
  for name, values in _tokens([r for _, r in found]).items():
    batch[name][target] = values
  sampled = batch["policy_versions"] >= 0
  if mask_stale_tokens:
    newest = np.full(rows + 1, -1)
    newest[: len(found)] = [
      max(r.completion.versions, default=-1) for _, r in found
    ]
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


def trained(batch: types.Batch, *, truncated: bool = True) -> np.ndarray:
  """Returns the mask of a batch as `training.step.score` leaves it.

  Args:
    batch: from `pack`.
    truncated: whether rollouts train that the length limit ended.

  Returns:
    `loss_mask`, 0 on the tokens of sequences that are left out, [B, T].
  """
  valid = np.isfinite(np.asarray(batch.rewards))
  if not truncated:
    valid &= ~np.asarray(batch.truncated)
  known = np.append(valid, False)[np.asarray(batch.sequence)]
  return np.asarray(batch.loss_mask) * known


def _row(place: np.ndarray, rows: int, microbatches: int) -> np.ndarray:
  """Returns where the row that a minibatch uses as its `place`-th lies."""
  microbatch, slot = np.divmod(place, rows // microbatches)
  return slot * microbatches + microbatch


def _size(rollout: types.Rollout) -> int:
  return len(rollout.prompt.tokens) + len(rollout.completion.tokens)


def _places(
  sizes: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns row, first position and number in the row, from 1, of each size.

  Rows are used in order. First fit, the longest first: at most 11/9 of the rows
  that are needed (Dosa 2007).
  """
  count = len(sizes)
  left, taken = np.full(count, length), np.zeros(count, int)
  row, begin, segment = (np.zeros(count, int) for _ in range(3))
  for number in sorted(range(count), key=lambda i: -sizes[i]):
    at = int(np.argmax(left >= sizes[number]))
    taken[at] += 1
    row[number], begin[number] = at, length - left[at]
    segment[number] = taken[at]
    left[at] -= sizes[number]
  return row, begin, segment


def _empty(rows: int, length: int) -> dict[str, Any]:
  """Returns the fields of a batch of nothing."""

  def tokens(value: float, dtype: Any = np.float32) -> np.ndarray:
    return np.full((rows, length), value, dtype)

  return dict(
    tokens=tokens(0, np.int32),
    positions=tokens(0, np.int32),
    segment_ids=tokens(0, np.int32),
    sequence=tokens(rows, np.int32),
    loss_mask=tokens(0),
    sampler_logprobs=tokens(0),
    policy_versions=tokens(-1, np.int32),
    turn_rewards=tokens(0),
    temperature=np.ones(rows, np.float32),
    rewards=np.full(rows, np.nan, np.float32),
    group_ids=np.full(rows, rows - 1, np.int32),
    rollout_ids=np.arange(rows, dtype=np.int32),
    truncated=np.zeros(rows, bool),
    advantages=tokens(0),
    # Not known yet; whoever used them all the same would skip the update.
    old_logprobs=tokens(np.nan),
    reference_logprobs=tokens(np.nan),
  )


def _tokens(rollouts: Sequence[types.Rollout]) -> dict[str, np.ndarray]:
  """Returns what is known of each token, of all rollouts in order."""
  tokens: list[int] = []
  logprobs: list[float] = []
  versions: list[int] = []
  for rollout in rollouts:
    prompt, completion = rollout.prompt.tokens, rollout.completion
    tokens += (*prompt, *completion.tokens)
    logprobs += (*[0.0] * len(prompt), *completion.logprobs)
    versions += (*[-1] * len(prompt), *completion.versions)
  return {
    "tokens": np.array(tokens, np.int32),
    "sampler_logprobs": np.array(logprobs, np.float32),
    "policy_versions": np.array(versions, np.int32),
  }
