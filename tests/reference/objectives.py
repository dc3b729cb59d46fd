"""Training objectives the slow way: float64, and loops over tokens.

Written from the formulas alone. A sequence is its trained tokens and nothing
else, so that there are no masks, no padding and no packing. Gradients are
worked out by hand, each by the chain rule from log-probabilities of tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
  """The trained tokens of a sequence, in order, and what it was given."""

  new: tuple[float, ...]
  old: tuple[float, ...]
  sampler: tuple[float, ...]
  reference: tuple[float, ...]
  entropy: tuple[float, ...]
  lag: tuple[float, ...]
  turn_rewards: tuple[float, ...]
  values: tuple[float, ...]
  reward: float
  group: int
  rollout: int


Batch = Sequence[Sampled]
PerToken = list[list[float]]


# ---------------------------------------------------------------- advantages


def kl_value(estimator: str, policy: float, reference: float) -> float:
  if estimator == "k1":
    return policy - reference
  if estimator == "k2":
    return 0.5 * (policy - reference) ** 2
  log_r = reference - policy
  return math.exp(log_r) - 1.0 - log_r


def token_extra(s: Sampled, kl: Mapping[str, Any] | None) -> list[float]:
  """What each token has earned by itself: its turn, less a KL in the reward."""
  extra = list(s.turn_rewards)
  if kl is not None and kl["place"] == "reward":
    for t in range(len(extra)):
      gap = kl_value(kl["estimator"], s.old[t], s.reference[t])
      extra[t] -= kl["coef"] * gap
  return extra


def totals(batch: Batch, kl: Mapping[str, Any] | None) -> list[float]:
  """What the rollout of each sequence has earned, of all its sequences."""
  extra = dict.fromkeys((s.rollout for s in batch), 0.0)
  for s in batch:
    extra[s.rollout] += sum(token_extra(s, kl))
  return [s.reward + extra[s.rollout] for s in batch]


def mean_of(numbers: Sequence[float]) -> float:
  return sum(numbers) / len(numbers)


def deviation_of(numbers: Sequence[float]) -> float:
  if len(numbers) < 2:
    return 0.0
  centre = mean_of(numbers)
  square = sum((x - centre) ** 2 for x in numbers)
  return math.sqrt(square / (len(numbers) - 1))


def group_scores(
  batch: Batch, rewards: Sequence[float], scale: str
) -> list[float]:
  """Scores rollouts against those of their prompt that have a reward."""
  scores = []
  for i, own in enumerate(batch):
    once = {
      other.rollout: rewards[j]
      for j, other in enumerate(batch)
      if other.group == own.group and math.isfinite(rewards[j])
    }
    peers = list(once.values())
    if not math.isfinite(rewards[i]) or max(peers) == min(peers):
      scores.append(0.0)
      continue
    gap = rewards[i] - mean_of(peers)
    if scale == "std":
      gap /= deviation_of(peers) + EPS
    elif scale == "mean":
      gap /= abs(mean_of(peers)) + EPS
    elif scale == "others":
      others = list(peers)
      others.remove(rewards[i])
      gap = rewards[i] - mean_of(others)
    scores.append(gap)
  return scores


def spread(batch: Batch, scores: Sequence[float]) -> PerToken:
  return [[a] * len(s.new) for s, a in zip(batch, scores, strict=True)]


def whitened(rows: PerToken) -> PerToken:
  flat = [x for row in rows for x in row]
  if max(flat) == min(flat):
    return [[0.0] * len(row) for row in rows]
  centre, scale = mean_of(flat), deviation_of(flat) + EPS
  return [[(x - centre) / scale for x in row] for row in rows]


def group(batch: Batch, kl: Any, scale: str = "std") -> PerToken:
  return spread(batch, group_scores(batch, totals(batch, kl), scale))


def over_batch(batch: Batch, kl: Any, *, whiten: bool) -> PerToken:
  rewards = totals(batch, kl)
  once = {s.rollout: r for s, r in zip(batch, rewards, strict=True)}
  valid = [r for r in once.values() if math.isfinite(r)]
  scores = []
  for r in rewards:
    if not math.isfinite(r):
      scores.append(0.0)
    elif not whiten:
      scores.append(r)
    elif max(valid) == min(valid):
      scores.append(0.0)
    else:
      scores.append((r - mean_of(valid)) / (deviation_of(valid) + EPS))
  return spread(batch, scores)


def returns(
  batch: Batch, kl: Any, *, gamma: float = 1.0, centre: bool = False
) -> PerToken:
  """REINFORCE++: discounted sums of what follows, whitened over tokens."""
  own = [s.reward if math.isfinite(s.reward) else 0.0 for s in batch]
  if centre:
    own = group_scores(batch, [s.reward for s in batch], "none")
  rows = []
  for s, reward in zip(batch, own, strict=True):
    earned, row = token_extra(s, kl), []
    if earned:
      earned[-1] += reward
    for t in range(len(earned)):
      total = 0.0
      for later in range(t, len(earned)):
        total += gamma ** (later - t) * earned[later]
      row.append(total)
    rows.append(row)
  return whitened(rows)


def gae(
  rewards: Sequence[float],
  values: Sequence[float],
  *,
  gamma: float,
  decay: float,
) -> list[float]:
  """Generalised advantages of one sequence, by the definition's double sum."""
  num, found = len(rewards), []
  for t in range(num):
    total = 0.0
    for later in range(t, num):
      after = values[later + 1] if later + 1 < num else 0.0
      delta = rewards[later] + gamma * after - values[later]
      total += (gamma * decay) ** (later - t) * delta
    found.append(total)
  return found


def critic(
  batch: Batch, kl: Any, *, gamma: float = 1.0, decay: float
) -> PerToken:
  """PPO: generalised advantages of a critic's values, whitened over tokens."""
  rows = []
  for s in batch:
    earned = token_extra(s, kl)
    if earned and math.isfinite(s.reward):
      earned[-1] += s.reward
    rows.append(gae(earned, s.values, gamma=gamma, decay=decay))
  return whitened(rows)


def teacher(batch: Batch, kl: Any, *, rewards: float = 0.0) -> PerToken:
  scored = group(batch, kl)
  return [
    [
      s.reference[t] - s.old[t] + rewards * scored[i][t]
      for t in range(len(s.new))
    ]
    for i, s in enumerate(batch)
  ]


def preference(batch: Batch, kl: Any, *, beta: float) -> PerToken:
  """DPO of each pair; twice, since a mean over rollouts halves it again."""
  rewards, scores = totals(batch, kl), [0.0] * len(batch)
  for i, own in enumerate(batch):
    pair = {
      other.rollout: rewards[j]
      for j, other in enumerate(batch)
      # One that does not train leaves its partner alone.
      if other.group == own.group and math.isfinite(rewards[j]) and other.old
    }
    if len(pair) != 2 or own.rollout not in pair:
      continue
    worse, better = sorted(pair, key=lambda rollout: pair[rollout])
    if pair[worse] == pair[better]:
      continue
    moved = dict.fromkeys(pair, 0.0)
    for s in batch:
      if s.rollout in moved:
        moved[s.rollout] += sum(s.old) - sum(s.reference)
    d = moved[better] - moved[worse]
    pull = beta / (1.0 + math.exp(beta * d))
    scores[i] = 2.0 * pull if own.rollout == better else -2.0 * pull
  return spread(batch, scores)


# ------------------------------------------------------------------ reducers


def shares(batch: Batch, kind: str, longest: int = 0) -> PerToken:
  tokens = sum(len(s.new) for s in batch)
  rollouts: dict[int, int] = {}
  for s in batch:
    if s.new:
      rollouts[s.rollout] = rollouts.get(s.rollout, 0) + len(s.new)
  rows = []
  for s in batch:
    if not s.new:
      rows.append([])
      continue
    share = {
      "token_mean": 1.0 / tokens,
      "sequence_mean": 1.0 / (len(rollouts) * rollouts[s.rollout]),
      "sequence_sum": 1.0 / len(rollouts),
      "constant": 1.0 / (len(rollouts) * max(longest, 1)),
    }[kind]
    rows.append([share] * len(s.new))
  return rows


# ----------------------------------------------------------- off-policy parts


def proximal(s: Sampled, kind: str) -> list[float]:
  if kind == "recomputed":
    return list(s.old)
  if kind == "sampler":
    return list(s.sampler)
  found = []
  for t in range(len(s.new)):
    share = s.lag[t] / (s.lag[t] + 1.0)
    found.append(share * s.new[t] + (1.0 - share) * s.sampler[t])
  return found


def weights(
  s: Sampled,
  start: Sequence[float],
  advantages: Sequence[float],
  correction: Mapping[str, Any],
) -> list[float]:
  num = len(s.new)
  gaps = [start[t] - s.sampler[t] for t in range(num)]
  if correction["kind"] == "off_policy_mask":
    fall = mean_of([s.sampler[t] - s.new[t] for t in range(num)])
    drop = mean_of(advantages) < 0 and fall > correction["delta"]
    return [0.0 if drop else 1.0] * num
  if correction["level"] == "sequence":
    gaps = [sum(gaps)] * num
  elif correction["level"] == "geometric":
    gaps = [sum(gaps) / num] * num
  found = []
  for gap in gaps:
    w = math.exp(gap)
    inside = correction["low"] <= w <= correction["high"]
    if correction["kind"] == "truncate":
      found.append(min(max(w, correction["low"]), correction["high"]))
    elif correction["kind"] == "mask":
      found.append(w if inside else 0.0)
    else:
      found.append(1.0 if inside else 0.0)
  return found


# ------------------------------------------------------------- trust regions

# Of a token: loss, its derivative by the logarithm of the ratio, and its direct
# derivative by the token's own log-probability.
Piece = tuple[float, float, float]


def clip(
  ratio: float, a: float, *, low: float, high: float, dual: float | None = None
) -> Piece:
  free = -a * ratio
  bound = -a * min(max(ratio, 1.0 - low), 1.0 + high)
  loss, slope = free, -a * ratio
  if bound > free:
    loss, slope = bound, 0.0
  if dual is not None and a < 0 and loss > -a * dual:
    loss, slope = -a * dual, 0.0
  return loss, slope, 0.0


def cispo(
  ratio: float, a: float, new: float, *, low: float, high: float
) -> Piece:
  used = min(max(ratio, 1.0 - low), 1.0 + high)
  return -used * a * new, 0.0, -used * a


def sapo(ratio: float, a: float, *, positive: float, negative: float) -> Piece:
  tau = positive if a > 0 else negative
  gate = 1.0 / (1.0 + math.exp(-tau * (ratio - 1.0)))
  return -a * 4.0 / tau * gate, -a * 4.0 * gate * (1.0 - gate) * ratio, 0.0


def dppo(
  ratio: float, a: float, moved: float, *, low: float, high: float
) -> Piece:
  if (a > 0 and moved > high) or (a < 0 and moved < -low):
    return 0.0, 0.0, 0.0
  return -a * ratio, -a * ratio, 0.0


def region(s: Sampled, t: int, ratio: float, a: float, kind: Any) -> Piece:
  name, limits = kind
  if name == "clip":
    return clip(ratio, a, **limits)
  if name == "cispo":
    return cispo(ratio, a, s.new[t], **limits)
  if name == "sapo":
    return sapo(ratio, a, **limits)
  if name == "dppo":
    moved = math.exp(s.new[t]) - math.exp(s.sampler[t])
    return dppo(ratio, a, moved, **limits)
  if name == "square":  # the own loss of the tests: A (log r)^2
    log_r = math.log(ratio)
    return a * log_r**2, 2.0 * a * log_r, 0.0
  return -a * s.new[t], 0.0, -a  # score


# ------------------------------------------------------------------ together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """An algorithm in the words of this file."""

  advantages: Callable[..., PerToken]
  ratio: str = "token"
  region: tuple[str, Mapping[str, Any]]
  kl: Mapping[str, Any] | None = None
  entropy: float = 0.0


def kl_slope(kl: Mapping[str, Any], policy: float, reference: float) -> float:
  if kl["gradient"] == "unbiased" or kl["estimator"] == "k2":
    return policy - reference
  if kl["estimator"] == "k1":
    return 1.0
  return 1.0 - math.exp(reference - policy)


def loss_and_gradient(
  batch: Batch,
  settings: Settings,
  *,
  corrections: Sequence[Mapping[str, Any]] = (),
  start: str = "recomputed",
  shares: PerToken,
) -> tuple[float, PerToken]:
  """Returns the loss, and its derivative by each `new`."""
  advantages = settings.advantages(batch, settings.kl)
  loss, gradient = 0.0, []
  for i, s in enumerate(batch):
    old, row = proximal(s, start), [0.0] * len(s.new)
    weight = [1.0] * len(s.new)
    for correction in corrections:
      more = weights(s, old, advantages[i], correction) if s.new else []
      weight = [x * y for x, y in zip(weight, more, strict=True)]
    for t in range(len(s.new)):
      value, slopes = token_loss(s, t, old, advantages[i][t], settings)
      loss += shares[i][t] * weight[t] * value
      for u, slope in slopes.items():
        row[u] += shares[i][t] * weight[t] * slope
      value, slope = token_extras(s, t, settings)
      loss += shares[i][t] * value
      row[t] += shares[i][t] * slope
    gradient.append(row)
  return loss, gradient


def token_loss(
  s: Sampled, t: int, old: Sequence[float], a: float, settings: Settings
) -> tuple[float, dict[int, float]]:
  """Returns a token's loss, and its derivative by each `new` it depends on."""
  num = len(s.new)
  if settings.ratio == "token":
    log_ratio = s.new[t] - old[t]
  else:
    log_ratio = sum(s.new[u] - old[u] for u in range(num)) / num
  value, by_ratio, by_own = region(
    s, t, math.exp(log_ratio), a, settings.region
  )
  if settings.ratio == "sequence":
    slopes = {u: by_ratio / num for u in range(num)}
    slopes[t] += by_own
  else:
    slopes = {t: by_ratio + by_own}
  return value, slopes


def token_extras(s: Sampled, t: int, settings: Settings) -> tuple[float, float]:
  """Returns what a penalty and a bonus add, and its derivative."""
  value, slope, kl = -settings.entropy * s.entropy[t], 0.0, settings.kl
  if kl is not None and kl["place"] == "loss":
    gap = kl_value(kl["estimator"], s.new[t], s.reference[t])
    value += kl["coef"] * gap
    slope += kl["coef"] * kl_slope(kl, s.new[t], s.reference[t])
  return value, slope
