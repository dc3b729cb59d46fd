"""The numbers of a step that are computed on the host.

Pure functions from host records and counters to metric names and floats. NaN
means that there is nothing to average.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxrl_post import types

# Of the distribution of lengths.
PERCENTS = (10, 25, 50, 75, 90, 99)
# What is known of the lengths of a batch, and the share that is no longer.
LENGTHS = {
  "completion/min_tokens": 0.0,
  **{f"completion/p{p}_tokens": p / 100 for p in PERCENTS},
  "completion/max_tokens": 1.0,
}


def batch_metrics(groups: Sequence[types.Group]) -> dict[str, float]:
  """Sums up rewards and lengths of the groups of one step.

  Args:
    groups: as they were sampled and scored, whatever is trained of them.

  Returns:
    Over rollouts with a reward, those of turns included (`Rollout.earned`):
    `reward/mean`, `reward/std` (divided by n),
    `reward/standard_error` of the mean, from the means of groups since the
    rollouts of one are no independent draws (NaN with fewer than two groups);
    `reward/<part>`, the mean over those that have the part;
    `reward/missing`, how many have no reward; `reward/replaced`, how many
    have a value of the user's for what failed. Over all rollouts:
    `completion/{mean,max,min}_tokens`, `completion/p<q>_tokens`, the length
    that q percent do not exceed; `completion/truncated`, the share that
    ended by the limit; `completion/mean_tokens_finished`, of the others.
    `signal/zero_fraction`: the share of groups without two different rewards.
  """
  rollouts = [rollout for group in groups for rollout in group.rollouts]
  rewards = _valid(rollouts)
  lengths = [len(r.completion.tokens) for r in rollouts]
  finished = [
    len(r.completion.tokens) for r in rollouts if r.completion.finish == "stop"
  ]
  by_group = [_valid(group.rollouts) for group in groups]
  means = [np.mean(values) for values in by_group if values]
  spread = np.std(means, ddof=1) if len(means) > 1 else math.nan
  metrics = {
    "reward/mean": _over(np.mean, rewards),
    "reward/std": _over(np.std, rewards),
    "reward/standard_error": float(spread) / math.sqrt(max(len(means), 1)),
    "reward/missing": float(len(rollouts) - len(rewards)),
    "reward/replaced": float(
      sum(bool(r.failure) and not math.isnan(r.reward) for r in rollouts)
    ),
    "completion/mean_tokens": _over(np.mean, lengths),
    "completion/max_tokens": _over(np.max, lengths),
    "completion/min_tokens": _over(np.min, lengths),
    "completion/truncated": _ratio(
      len(rollouts) - len(finished), len(rollouts)
    ),
    "completion/mean_tokens_finished": _over(np.mean, finished),
    "signal/zero_fraction": _over(
      np.mean, [len(set(values)) < 2 for values in by_group]
    ),
  }
  for percent in PERCENTS:
    metrics[f"completion/p{percent}_tokens"] = _over(
      lambda x, q=percent: np.percentile(x, q, method="inverted_cdf"), lengths
    )
  for part in sorted({name for r in rollouts for name in r.parts}):
    values = [r.parts[part] for r in rollouts if part in r.parts]
    metrics[f"reward/part/{part}"] = _over(np.mean, values)
  return metrics


def conversations(
  groups: Sequence[types.Group], max_turns: int
) -> dict[str, float]:
  """Sums up the conversations of one step.

  Args:
    groups: as they were sampled and scored.
    max_turns: most turns of the policy.

  Returns:
    Under `env/`, over all rollouts: `turns_mean` and `turns_max`, turns of the
    policy; `tool_calls`, mean a rollout; `tool_errors` and `tool_timeouts`, how
    many of the calls failed, and of these took too long; `truncated_turns` and
    `truncated_tokens`, the shares that ended because no turn, or no token (or
    row, or room for a new prompt), was left; `observation_tokens`, mean of what
    the environment said; `turn_reward`, mean of the sums of what turns earned;
    `rows_mean` and `rows_max`, training rows.
  """
  made = [r.completion for group in groups for r in group.rollouts]
  counts = [len(c.turns) for c in made]
  rows = [1 + len(c.segments) for c in made]
  turns = [turn for c in made for turn in c.turns]
  ends = [c.turns[-1] for c in made if c.turns and c.finish == "length"]
  # The last turn that there may be, which the policy ended itself.
  late = sum(
    c.finish == "length" and len(c.turns) == max_turns and c.turns[-1].whole
    for c in made
  )
  return {
    "env/turns_mean": _over(np.mean, counts),
    "env/turns_max": _over(np.max, counts),
    "env/tool_calls": _ratio(sum(turn.calls for turn in turns), len(made)),
    "env/tool_errors": float(sum(turn.errors for turn in turns)),
    "env/tool_timeouts": float(sum(turn.timeouts for turn in turns)),
    "env/truncated_turns": _ratio(late, len(made)),
    "env/truncated_tokens": _ratio(len(ends) - late, len(made)),
    "env/observation_tokens": _over(
      np.mean, [sum(v < 0 for v in c.versions) for c in made]
    ),
    "env/turn_reward": _over(
      np.mean, [sum(turn.reward for turn in c.turns) for c in made]
    ),
    "env/rows_mean": _over(np.mean, rows),
    "env/rows_max": _over(np.max, rows),
  }


def staleness(
  policy_versions: Int[np.ndarray, "B T"],
  loss_mask: Float[np.ndarray, "B T"],
  version: int,
  *,
  sequence: Int[np.ndarray, "B T"],
  rollout_ids: Int[np.ndarray, " N"],
) -> dict[str, float]:
  """Measures the lag of the tokens of one batch.

  Args:
    policy_versions: version that sampled each token.
    loss_mask: 1 on tokens that train.
    version: the trainer's version when the batch's first update begins.
    sequence: of which each token is; those of a rollout as they were made.
    rollout_ids: of which each sequence is; those without a trained token do not
      count.

  Returns:
    `staleness/mean` and `staleness/max` over trained tokens;
    `staleness/head`, the mean over rollouts of the lag of the first of them.
  """
  mask = np.asarray(loss_mask) > 0
  lag = version - np.asarray(policy_versions)
  # Tokens of a sequence lie in order: the first that is found comes first, of
  # rollouts in their first sequence.
  own, first = np.unique(sequence[mask], return_index=True)
  _, heads = np.unique(rollout_ids[own], return_index=True)
  heads = lag[mask][first[heads]]
  return {
    "staleness/mean": _over(np.mean, lag[mask]),
    "staleness/max": _over(np.max, lag[mask]),
    "staleness/head": _over(np.mean, heads),
  }


def masked(
  policy_versions: Int[np.ndarray, "B T"], loss_mask: Float[np.ndarray, "B T"]
) -> dict[str, float]:
  """Measures how much of what was sampled is only context.

  Args:
    policy_versions: version that sampled each token; -1 where none did.
    loss_mask: 1 on tokens that train, as the batch was packed.

  Returns:
    `staleness/masked_tokens`: the share of sampled tokens with mask 0.
  """
  sampled = np.asarray(policy_versions) >= 0
  return {
    "staleness/masked_tokens": _over(
      np.mean, np.asarray(loss_mask)[sampled] == 0
    )
  }


@types.host_record
class Counts:
  """What a run has done since its first admission.

  Attributes:
    generated: rollouts whose generation completed, whatever became of them.
    consumed: rollouts with a weight other than zero in an applied update.
    sampled_tokens: tokens of completions that the engine made.
    trained_tokens: tokens with loss mask 1 in applied updates.
  """

  generated: int
  consumed: int
  sampled_tokens: int
  trained_tokens: int


def throughput(
  counts: Counts, devices: int, seconds: float
) -> dict[str, float]:
  """Relates what was done to what was held for it.

  Args:
    counts: since the first admission.
    devices: all that the run holds, each counted once.
    seconds: of wall clock, since the first admission.

  Returns:
    Under `throughput/`: `generated_per_device_hour`,
    `consumed_per_device_hour`, `yield` (consumed / generated),
    `sampled_tokens_per_s` and `trained_tokens_per_s`, both of the whole run.
  """
  hours = devices * seconds / 3600.0
  return {
    "throughput/generated_per_device_hour": _ratio(counts.generated, hours),
    "throughput/consumed_per_device_hour": _ratio(counts.consumed, hours),
    "throughput/yield": _ratio(counts.consumed, counts.generated),
    "throughput/sampled_tokens_per_s": _ratio(counts.sampled_tokens, seconds),
    "throughput/trained_tokens_per_s": _ratio(counts.trained_tokens, seconds),
  }


def _valid(rollouts: Iterable[types.Rollout]) -> list[float]:
  return [r.earned for r in rollouts if not math.isnan(r.reward)]


def _over(
  statistic: Callable[..., np.floating], values: Sequence[float] | np.ndarray
) -> float:
  return float(statistic(values)) if len(values) else math.nan


def _ratio(part: float, whole: float) -> float:
  return part / whole if whole > 0 else math.nan
