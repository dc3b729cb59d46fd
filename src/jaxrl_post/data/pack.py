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
  mask_stale_tokens: bool = False,
) -> types.Batch:
  """Lays out rollouts one a row, padded on the right to a fixed shape.

  Args:
    groups: finished and scored; at most `rows` rollouts in all.
    rows: B.
    length: T, at least the longest prompt plus completion.
    mask_stale_tokens: train, of each rollout, only the tokens of the newest
      version among its tokens.

  Returns:
    A batch of NumPy arrays. The mask is 1 on exactly the completion tokens
    that a policy sampled, the stop token included, whatever their values, and
    0 on those of version -1, as of a tool; with `mask_stale_tokens` also 0
    on those that an older version sampled than the newest of their rollout,
    which stay as context and keep log-probability and version. Rows beyond
    the rollouts are empty: no segment, no mask, no reward.
  """
  tokens, positions, segments = (
    np.zeros((rows, length), np.int32) for _ in range(3)
  )
  mask, logprobs = (np.zeros((rows, length), np.float32) for _ in range(2))
  versions = np.full((rows, length), -1, np.int32)
  temperature = np.ones(rows, np.float32)
  rewards = np.full(rows, np.nan, np.float32)
  group_ids = np.full(rows, rows - 1, np.int32)
  pairs = [(i, r) for i, g in enumerate(groups) for r in g.rollouts]
  if len(pairs) > rows:
    raise ValueError(
      f"pack: expected at most {rows} rollouts, got {len(pairs)}"
    )
  for row, (group, rollout) in enumerate(pairs):
    prompt, completion = rollout.prompt.tokens, rollout.completion
    start, end = len(prompt), len(prompt) + len(completion.tokens)
    if end > length:
      raise ValueError(f"pack: expected at most {length} tokens, got {end}")
    tokens[row, :end] = (*prompt, *completion.tokens)
    positions[row, :end] = np.arange(end)
    segments[row, :end] = 1
    newest = max(completion.versions, default=0)
    mask[row, start:end] = [
      v >= 0 and (v == newest or not mask_stale_tokens)
      for v in completion.versions
    ]
    logprobs[row, start:end] = completion.logprobs
    versions[row, start:end] = completion.versions
    temperature[row] = rollout.temperature
    rewards[row] = rollout.reward
    group_ids[row] = group
  # Arrays of the host: the step that takes the batch places them.
  fields: dict[str, Any] = dict(
    tokens=tokens,
    positions=positions,
    segment_ids=segments,
    loss_mask=mask,
    sampler_logprobs=logprobs,
    policy_versions=versions,
    temperature=temperature,
    rewards=rewards,
    group_ids=group_ids,
    advantages=np.zeros(rows, np.float32),
    old_logprobs=np.zeros((rows, length), np.float32),
  )
  return types.Batch(**fields)
