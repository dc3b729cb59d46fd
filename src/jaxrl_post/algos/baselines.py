"""Rewards to advantages.

A baseline says what a rollout's reward is compared with. A rollout counts once,
in however many sequences it trains, and all of them have its advantage. What a
critic or a teacher knows is one number a token.
"""

import dataclasses
import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post import types
from jaxrl_post.algos import losses, sequences

Scale: TypeAlias = Literal["std", "mean", "none"]
CriticModel: TypeAlias = Literal["own", "head"]

_EPS = 1e-6


def group_advantages(
  rewards: Float[Array, " N"],
  group_ids: Int[Array, " N"],
  *,
  scale: Scale = "std",
  leave_one_out: bool = False,
  eps: float = _EPS,
) -> Float[Array, " N"]:
  """Scores each rollout against the other rollouts of its own prompt.

  Group-relative baseline of GRPO (Shao et al. 2024, arXiv 2402.03300, section
  4.1.2). The standard deviation is the sample one, dividing by n - 1, as in
  TRL, verl and slime.

  Args:
    rewards: one number a rollout, in the task's unit; NaN or infinite where
      there is none. Such rollouts do not enter the statistics of their group.
    group_ids: rollouts of one group share an id in [0, N); order carries no
      meaning.
    scale: "std" divides by the group's sample standard deviation plus `eps`,
      "mean" by the magnitude of its mean plus `eps` (MaxRL, Tajwar et al.
      2026, arXiv 2602.02710), "none" keeps the unit of the rewards.
    leave_one_out: the baseline of a rollout is the mean of the others (RLOO,
      Ahmadian et al. 2024, arXiv 2402.14740).
    eps: added to the divisor.

  Returns:
    Advantages that average to zero over each group. Exactly zero for rollouts
    without a reward, for groups of one, and where all rewards of a group agree.
  """
  num = rewards.shape[0]
  valid = jnp.isfinite(rewards)
  rewards = jnp.where(valid, rewards, 0.0)

  def total(x: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x, group_ids, num)

  count = total(valid.astype(jnp.float32))
  mean = total(rewards) / jnp.maximum(count, 1.0)
  centred = jnp.where(valid, rewards - mean[group_ids], 0.0)
  # Equal rewards leave rounding dust, which its own tiny deviation would blow
  # up to an advantage near one.
  centred = jnp.where(differ(rewards, group_ids, valid), centred, 0.0)
  if leave_one_out:
    # r - mean of the others = (r - mean) n / (n - 1).
    centred = centred * (count / jnp.maximum(count - 1.0, 1.0))[group_ids]
  if scale == "none":
    return centred
  if scale == "mean":
    return centred / (jnp.abs(mean) + eps)[group_ids]
  centre = jnp.where(valid, rewards - mean[group_ids], 0.0)
  variance = total(centre * centre) / jnp.maximum(count - 1.0, 1.0)
  return centred / (jnp.sqrt(variance) + eps)[group_ids]


def differ(
  rewards: Float[Array, " N"], group_ids: Int[Array, " N"], valid: jax.Array
) -> jax.Array:
  """Returns whether the valid rewards of each one's group differ, bool [N].

  Decided on the rewards themselves: their deviation has rounding in it.
  """
  num = rewards.shape[0]
  top = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), group_ids, num)
  low = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), group_ids, num)
  return (top > low)[group_ids]


def whiten(
  x: Float[Array, "*dims"], mask: Float[Array, "*dims"], *, eps: float = _EPS
) -> Float[Array, "*dims"]:
  """Gives numbers mean 0 and sample standard deviation 1 over a mask.

  Returns:
    The numbers; exactly 0 where the mask is 0, and where all of them agree.
  """
  keep = mask > 0
  x = jnp.where(keep, x, 0.0)
  count = jnp.sum(mask)
  centred = jnp.where(keep, x - jnp.sum(x) / jnp.maximum(count, 1.0), 0.0)
  top = jnp.max(jnp.where(keep, x, -jnp.inf))
  low = jnp.min(jnp.where(keep, x, jnp.inf))
  centred = jnp.where(top > low, centred, 0.0)
  variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1.0, 1.0)
  return centred / (jnp.sqrt(variance) + eps)


def discounted(
  rewards: Float[Array, "B T"],
  mask: Float[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  *,
  decay: float,
) -> Float[Array, "B T"]:
  """Adds up what follows: y_t = x_t + decay y_s, s the next token of the mask.

  Tokens off the mask (of tools, or of a prompt) pass on what lies behind them
  and take no time.

  Args:
    rewards: one number a token; read on the mask only.
    mask: 1 on the tokens of the policy.
    segment_ids: nothing passes from one segment to another.
    decay: factor a token.

  Returns:
    The sums on the mask, 0 elsewhere.
  """
  own = mask > 0
  keep = jnp.where(own, decay, 1.0)
  sums = _from_behind(
    jnp.where(own, rewards, 0.0), keep, _same_as_next(segment_ids)
  )
  return jnp.where(own, sums, 0.0)


def following(
  x: Float[Array, "B T"],
  mask: Float[Array, "B T"],
  segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T"]:
  """Returns x at the next token of the mask; 0 at the last of a segment."""
  own, joined = mask > 0, _same_as_next(segment_ids)
  nearest = _from_behind(
    jnp.where(own, x, 0.0), jnp.ones_like(x), joined & ~own
  )
  behind = jnp.pad(nearest[:, 1:], ((0, 0), (0, 1)))
  return jnp.where(own & joined, behind, 0.0)


def _same_as_next(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
  """Returns where the next token is of the same segment."""
  same = segment_ids[:, :-1] == segment_ids[:, 1:]
  return jnp.pad(same, ((0, 0), (0, 1)))


def _from_behind(
  x: Float[Array, "B T"], keep: Float[Array, "B T"], joined: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns y_t = x_t + keep_t y_(t+1), in log T steps (Blelloch 1990).

  The second term only where joined: nothing passes on, not even an infinity.
  """

  def join(later: tuple[jax.Array, ...], here: tuple[jax.Array, ...]):
    x, keep, joined = here
    more = jnp.where(joined, keep * later[0], 0.0)
    return x + more, keep * later[1], joined & later[2]

  steps = (x, keep, joined)
  sums, *_ = jax.lax.associative_scan(join, steps, reverse=True, axis=1)
  return sums


def last(
  mask: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns 1 at the last token of the mask in each segment, 0 elsewhere."""
  place = jnp.arange(1.0, mask.shape[1] + 1) * mask
  return jnp.where(place == sequences.largest(place, segment_ids), mask, 0.0)


def token_rewards(inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
  """Returns the rewards of single tokens: a sequence's at its last one.

  With `penalty` taken off, and the rewards of turns where they were given.
  """
  mask = inputs.loss_mask
  rewards = jnp.where(jnp.isfinite(inputs.rewards), inputs.rewards, 0.0)
  at_end = sequences.gather(rewards, inputs.sequence)
  at_end = at_end * last(mask, inputs.segment_ids)
  return at_end + _token_only(inputs)


def _to_tokens(
  scored: Float[Array, " N"], inputs: types.AdvantageInputs
) -> Float[Array, "B T"]:
  """Gives each token that trains what is its rollout's."""
  found = sequences.gather(scored[inputs.rollout_ids], inputs.sequence)
  return found * inputs.loss_mask


def _token_only(inputs: types.AdvantageInputs) -> jax.Array:
  return losses.difference(
    inputs.turn_rewards, inputs.penalty, inputs.loss_mask
  )


def _earned(inputs: types.AdvantageInputs) -> jax.Array:
  """Returns what counts for whole rollouts: of truncated ones, turns too."""
  counts = inputs.loss_mask if inputs.sampled is None else inputs.sampled
  turns = jnp.where(counts > 0, inputs.turn_rewards, 0.0)
  return turns - jnp.where(inputs.loss_mask > 0, inputs.penalty, 0.0)


@dataclasses.dataclass(frozen=True)
class Group:
  """The mean of the rewards of the same prompt, see `group_advantages`.

  Attributes:
    scale: what the difference is divided by.
  """

  scale: Scale = "std"
  needs = frozenset[str]()

  def __post_init__(self) -> None:
    losses.check_choice("algo.baseline.scale", self.scale, Scale)

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns the advantage of its rollout at each token."""
    made = sequences.rollouts(inputs, _earned(inputs))
    return _to_tokens(group_advantages(*made, scale=self.scale), inputs)


@dataclasses.dataclass(frozen=True)
class LeaveOneOut:
  """The mean of the other rollouts of the prompt, see `group_advantages`."""

  needs = frozenset[str]()

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns the advantage of its rollout at each token."""
    made = sequences.rollouts(inputs, _earned(inputs))
    scored = group_advantages(*made, scale="none", leave_one_out=True)
    return _to_tokens(scored, inputs)


@dataclasses.dataclass(frozen=True)
class Batch:
  """The mean over the step, scaled by its standard deviation; or nothing.

  Attributes:
    whiten: compare with the step; without it the reward is the advantage.
  """

  whiten: bool = True
  needs = frozenset[str]()

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns the advantage of its rollout at each token; 0 without reward."""
    rewards = sequences.rollouts(inputs, _earned(inputs)).rewards
    valid = jnp.isfinite(rewards)
    scored = jnp.where(valid, rewards, 0.0)
    if self.whiten:
      scored = whiten(scored, valid.astype(jnp.float32))
    return _to_tokens(scored, inputs)


@dataclasses.dataclass(frozen=True)
class Returns:
  """REINFORCE++ (Hu 2025, arXiv 2501.03262): what follows a token, whitened.

  Attributes:
    gamma: factor a token.
    group: take the group's mean from the rewards first (its baseline variant).
  """

  gamma: float = 1.0
  group: bool = False
  needs = frozenset({"one_row"})

  def __post_init__(self) -> None:
    _check_share("gamma", self.gamma)

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns discounted rewards, whitened over the tokens of the step."""
    if self.group:
      made = sequences.rollouts(inputs, jnp.zeros_like(inputs.loss_mask))
      centred = group_advantages(*made, scale="none")[inputs.rollout_ids]
      inputs = dataclasses.replace(inputs, rewards=centred)
    mask, ids = inputs.loss_mask, inputs.segment_ids
    rewards = token_rewards(inputs)
    return whiten(discounted(rewards, mask, ids, decay=self.gamma), mask)


@dataclasses.dataclass(frozen=True)
class Critic:
  """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438).

  Attributes:
    gamma: discount a token.
    decay: lambda: 0 trusts the critic, 1 the rewards.
    whiten: give advantages mean 0 and deviation 1 over the tokens of the step.
    model: "own" is a second transformer of the policy's shape, which begins
      with the policy's weights; "head" reads the policy's hidden states. Either
      has a vector of the width for a head, which begins at 0.
    learning_rate: of the optimizer of the second transformer, or of the head.
      Its other settings are those of `optim`, with moments and a gradient norm
      of its own.
    clip: how far an update may move a value, in the unit of the rewards; None
      sets no limit.
    coef: with "head", factor of the value loss's gradient where it enters the
      policy's weights; 0 leaves them to the policy. None with "own".
  """

  gamma: float = 1.0
  decay: float = 0.95
  whiten: bool = True
  model: CriticModel = "own"
  learning_rate: float = 1e-5
  clip: float | None = 0.2
  coef: float | None = None
  needs = frozenset({"values", "one_row"})

  def __post_init__(self) -> None:
    _check_share("gamma", self.gamma)
    _check_share("decay", self.decay)
    losses.check_choice("algo.baseline.model", self.model, CriticModel)
    if self.model == "own":
      fits, rule = self.coef is None, "none with model=own"
    else:
      fits = self.coef is not None and 0 <= self.coef < math.inf
      rule = ">= 0 with model=head"
    clips = self.clip is None or 0 < self.clip < math.inf
    learns = 0 <= self.learning_rate < math.inf
    rules = (
      ("coef", fits, rule, "0.1 goes with head, none with own"),
      ("clip", clips, "> 0, or none", "0.2 is usual"),
      ("learning_rate", learns, ">= 0", "Ten times the policy's is usual"),
    )
    for name, holds, rule, advice in rules:
      if not holds:
        raise types.InputError(
          f"algo.baseline.{name}: expected {rule}, got {getattr(self, name)}. "
          f"{advice}."
        )

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns sums of decayed temporal differences."""
    advantage = self.estimate(inputs)
    return whiten(advantage, inputs.loss_mask) if self.whiten else advantage

  def returns(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns what is to be predicted: advantages as they are, plus values."""
    assert inputs.values is not None
    values = jnp.where(inputs.loss_mask > 0, inputs.values, 0.0)
    return self.estimate(inputs) + values

  def losses(
    self,
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    mask: Float[Array, "B T"],
  ) -> losses.TokenLosses:
    """Returns `losses.value_losses` with this clip."""
    return losses.value_losses(
      values, old_values, returns, mask, clip=self.clip
    )

  def estimate(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns advantages as they are: sum of (gamma decay)^l delta_{t+l}.

    With delta_t = r_t + gamma V_{t+1} - V_t, and V = 0 behind the last token
    of a sequence, also of one that the length limit ended: its reward says all
    that there is to say of it. The next token is the next that trains: those
    of a tool in between take no time, have no value, and pass on what follows.
    """
    mask, ids = inputs.loss_mask, inputs.segment_ids
    assert inputs.values is not None
    values = jnp.where(mask > 0, inputs.values, 0.0)
    after = following(values, mask, ids)
    delta = token_rewards(inputs) + self.gamma * after - values
    return discounted(delta, mask, ids, decay=self.gamma * self.decay)


@dataclasses.dataclass(frozen=True)
class Teacher:
  """On-policy distillation: how much likelier a token is to the teacher.

  The reverse KL to the reference policy as a reward a token (Agarwal et al.
  2024, arXiv 2306.13649; Lu et al. 2025, "On-policy distillation"). The
  reference has to be another policy than the first one that is trained.

  Attributes:
    rewards: weight of the group's advantages beside it; 0 distils only.
  """

  rewards: float = 0.0
  needs = frozenset({"reference", "old", "teacher"})

  def __post_init__(self) -> None:
    if not 0 <= self.rewards < math.inf:
      raise types.InputError(
        f"algo.baseline.rewards: expected >= 0, got {self.rewards}. 0 distils "
        "only."
      )

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns log p_teacher - log p of each token."""
    assert inputs.reference_logprobs is not None
    gap = losses.difference(
      inputs.reference_logprobs, inputs.old_logprobs, inputs.loss_mask
    )
    if not self.rewards:
      return gap
    return gap + self.rewards * Group().advantages(inputs)


@dataclasses.dataclass(frozen=True)
class Preference:
  """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290).

  Of the two rollouts of a prompt the one with the higher reward is preferred.
  The gradient of -log sigmoid(beta d), with d the difference of the two
  log-ratios to the reference, is that of advantages
  +-beta sigmoid(-beta d): so DPO is a baseline for `losses.Score`, summed over
  sequences and without corrections, exact for one update a batch.

  Attributes:
    beta: how much the reference binds.
  """

  beta: float = 0.1
  needs = frozenset({"reference", "old", "single_update", "pairs"})

  def __post_init__(self) -> None:
    if not 0 < self.beta < math.inf:
      raise types.InputError(
        f"algo.baseline.beta: expected > 0, got {self.beta}. 0.1 is usual."
      )

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns twice the above, as the mean over rollouts halves it.

    0 where a prompt does not have two rollouts with different rewards.
    """
    assert inputs.reference_logprobs is not None
    size, own = inputs.rewards.shape[0], inputs.rollout_ids
    gap = losses.difference(
      inputs.old_logprobs, inputs.reference_logprobs, inputs.loss_mask
    )

    def total(x: jax.Array) -> jax.Array:
      found = sequences.scatter(x, inputs.sequence, size)
      return jax.ops.segment_sum(found, own, size)

    moved = total(gap)
    # One that does not train leaves its partner alone.
    rewards, ids = sequences.rollouts(inputs, _earned(inputs))
    rewards = jnp.where(total(inputs.loss_mask) > 0, rewards, jnp.nan)
    side = jnp.sign(group_advantages(rewards, ids, scale="none"))
    valid = jnp.isfinite(rewards).astype(jnp.float32)
    pair = jax.ops.segment_sum(valid, ids, size)[ids] == 2.0
    side = jnp.where(pair, side, 0.0)
    apart = jax.ops.segment_sum(side * moved, ids, size)[ids]
    weight = 2.0 * self.beta * jax.nn.sigmoid(-self.beta * apart) * side
    return _to_tokens(weight, inputs)


def _check_share(name: str, value: float) -> None:
  if not 0 <= value <= 1:
    raise types.InputError(
      f"algo.baseline.{name}: expected in [0, 1], got {value}. 1 is usual."
    )
