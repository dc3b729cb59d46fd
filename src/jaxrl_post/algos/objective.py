"""What a policy is trained for: one composition for every algorithm.

The loss of a token is its trust region's, times its corrections, plus a KL
penalty, minus an entropy bonus; a reducer says what share of the step's loss a
token has. Each part is a small frozen record with one function; a file of this
room with an `objective` is a named algorithm: parts and defaults of its paper.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post import types
from jaxrl_post.algos import (
  baselines,
  corrections,
  divergence,
  losses,
  reducers,
)


@runtime_checkable
class Baseline(Protocol):
  """Turns rewards into advantages; `needs` as in `Objective.needs`."""

  needs: frozenset[str]

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Returns one number a token, 0 where the mask is 0."""
    ...


@runtime_checkable
class Region(Protocol):
  """Turns ratios and advantages into losses of tokens."""

  def losses(
    self, log_ratio: Float[Array, "B T"], inputs: types.LossInputs
  ) -> losses.TokenLosses:
    """Returns losses, and 1 where a gradient was cut; 0 off the mask."""
    ...


@runtime_checkable
class Correction(Protocol):
  """Weighs tokens that another policy has sampled."""

  def weights(self, inputs: types.LossInputs) -> corrections.Weights:
    """Returns weights, and 1 where one was changed; 0 off the mask."""
    ...


@runtime_checkable
class Reducer(Protocol):
  """Gives each trained token its share in the loss of a step."""

  def shares(self, counts: reducers.Counts) -> Float[Array, "B T"]:
    """Returns the shares, 0 off the mask."""
    ...


# A user's own loss: of the logarithms of ratios and whatever a loss may see, to
# losses of tokens. Off the mask what it sees is 0, and what it says not used.
OwnLoss = Callable[[jax.Array, types.LossInputs], jax.Array]

Proximal: TypeAlias = Literal["recomputed", "sampler", "loglinear"]

# What a step provides, see `Objective.needs`; to a critic also "values".
_PROVIDED = frozenset(
  {
    "reference",
    "old",
    "single_update",
    "pairs",
    "teacher",
    "candidates",
    "one_row",
  }
)


@dataclasses.dataclass(frozen=True)
class Objective:
  """An algorithm, part by part.

  Attributes:
    baseline: rewards to advantages.
    ratio: what is compared, see `losses.log_ratio`.
    region: the trust region; or a function of (log ratios, LossInputs) to
      losses of tokens.
    proximal: the policy that ratios start from, and that corrections compare
      with the sampler: the trainer's own before the update ("recomputed"); the
      sampler's ("sampler"), with ratios that bear its lag; or a mean of the
      logarithms of the sampler's and the newest, by lag ("loglinear", AReaL),
      which needs no pass over the batch before the update.
    correction: for lag and for the engine's numerics; None goes without.
    filters: further ones, whose product with it counts.
    reducer: the share of a token in the loss.
    kl: penalty on leaving the reference; None has no reference.
    entropy: factor of the entropy bonus.
    mask_truncated: leave out rollouts that ended by the length limit (DAPO,
      section 3.4).
  """

  baseline: Baseline = baselines.Group()
  ratio: losses.Level = "token"
  region: Region | OwnLoss = losses.Clip()
  proximal: Proximal = "recomputed"
  correction: Correction | None = corrections.Importance()
  filters: tuple[Correction, ...] = ()
  reducer: Reducer = reducers.TokenMean()
  kl: divergence.Kl | None = None
  entropy: float = 0.0
  mask_truncated: bool = False

  def __post_init__(self) -> None:
    self._check_kinds()
    losses.check_choice("algo.ratio", self.ratio, losses.Level)
    losses.check_choice("algo.proximal", self.proximal, Proximal)
    if not 0 <= self.entropy < math.inf:
      raise types.InputError(
        f"algo.entropy: expected >= 0, got {self.entropy}. 0 goes without."
      )
    provided = _PROVIDED | ({"values"} if self.critic is not None else set())
    missing = ", ".join(sorted(self.baseline.needs - provided))
    if missing:
      raise types.InputError(
        "algo.baseline: expected one that a step can serve, got "
        f"{type(self.baseline).__name__}, which needs {missing}. Take one that "
        f"needs no more than {', '.join(sorted(provided))}."
      )
    self._check_pairs()

  def _check_kinds(self) -> None:
    for where, kind, part in (
      ("baseline", Baseline, self.baseline),
      ("region", Region | Callable, self.region),
      ("reducer", Reducer, self.reducer),
    ):
      if not isinstance(part, kind):
        raise types.InputError(
          f"algo.{where}: expected a part as docs/algorithms.md has them, got "
          f"{part!r}. Take one of those, or give yours what they have."
        )

  def _check_pairs(self) -> None:
    score = isinstance(self.region, losses.Score)
    in_reward = self.kl is not None and self.kl.place == "reward"
    scored = not isinstance(self.baseline, baselines.Preference)
    if isinstance(self.baseline, baselines.Teacher):
      scored = self.baseline.rewards > 0
    importance = any(
      isinstance(c, corrections.Importance)
      for c in (self.correction, *self.filters)
    )
    top = self.candidates > 0
    compares = isinstance(
      self.baseline,
      baselines.Group | baselines.LeaveOneOut | baselines.Preference,
    )
    plain = self.baseline == baselines.Batch(whiten=False)
    rules = (
      (
        not (self.mask_equal and not compares),
        "algo.kl.without_signal",
        "true with a baseline that does not compare the rollouts of a group",
        "false",
      ),
      (
        not (top and not plain),
        "algo.baseline",
        "Batch(whiten=False) with divergence.TopK, which has no advantage",
        type(self.baseline).__name__,
      ),
      (
        not (score and self.ratio != "token"),
        "algo.ratio",
        "token with losses.Score, which has no ratio",
        self.ratio,
      ),
      (
        not (isinstance(self.region, losses.Cispo) and self.ratio != "token"),
        "algo.ratio",
        "token with losses.Cispo, whose weight has no gradient",
        self.ratio,
      ),
      (
        not (top and self.ratio != "token"),
        "algo.ratio",
        "token with divergence.TopK, which has no ratio",
        self.ratio,
      ),
      (
        not (self.proximal == "sampler" and importance),
        "algo.correction, algo.filters",
        "no importance weights with proximal=sampler, where they are 1",
        (self.correction, *self.filters),
      ),
      (
        not ((score or top) and self.proximal != "recomputed"),
        "algo.proximal",
        "recomputed with losses.Score and divergence.TopK, which have no ratio",
        self.proximal,
      ),
      (
        not ("old" in self.needs and self.proximal == "loglinear"),
        "algo.proximal",
        "recomputed or sampler with advantages from log-probabilities",
        self.proximal,
      ),
      (
        not (in_reward and (top or not scored)),
        "algo.kl.place",
        "loss with a baseline that knows no reward of a token",
        "reward",
      ),
    )
    for holds, where, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"{where}: expected {rule}, got {value}. Change one of the two."
        )

  @property
  def needs(self) -> frozenset[str]:
    """What a step has to provide.

    Returns:
      Of "reference" (log-probabilities of a reference policy), "old" (those of
      the weights before the update, as a pass of its own before it), "start"
      (the same, if the batch has several updates), "single_update" (one update
      a batch), "pairs" (two rollouts of each prompt), "one_row" (each rollout
      in one row, as what follows a token counts), "teacher" (a reference that
      is not the policy's own past), "candidates" (its most probable tokens in
      each place), "values" (a critic's).
    """
    needs = set(self.baseline.needs)
    if isinstance(self.region, divergence.TopK):
      needs |= self.region.needs
    if self.proximal == "recomputed":
      needs.add("start")
    if self.kl is not None:
      needs.add("reference")
      if self.kl.place == "reward":
        needs.add("old")
    return frozenset(needs)

  @property
  def candidates(self) -> int:
    """How many of a teacher's most probable tokens the loss compares."""
    return self.region.num if isinstance(self.region, divergence.TopK) else 0

  @property
  def mask_equal(self) -> bool:
    """Whether groups whose rewards agree are left out."""
    return self.kl is not None and not self.kl.without_signal

  @property
  def corrects(self) -> bool:
    """Whether something weighs tokens for what the sampler's policy was."""
    return self.proximal != "recomputed" or any(
      isinstance(c, corrections.Importance)
      for c in (self.correction, *self.filters)
    )

  @property
  def reference_moves(self) -> tuple[int, float]:
    """After how many batches the reference moves, 0 for never; and how far."""
    return (0, 1.0) if self.kl is None else (self.kl.every, self.kl.share)

  @property
  def critic(self) -> baselines.Critic | None:
    """The settings of the critic; None without one."""
    if isinstance(self.baseline, baselines.Critic):
      return self.baseline
    return None

  def shares(
    self,
    mask: Float[Array, "B T"],
    sequence: Int[Array, "B T"],
    rollout_ids: Int[Array, " N"],
  ) -> Float[Array, "B T"]:
    """Returns the share of each token in the loss, see the reducer."""
    return self.reducer.shares(reducers.count(mask, sequence, rollout_ids))

  def advantages(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Scores tokens, see the baseline; a KL in the reward is taken off first.

    Returns:
      One number a token, 0 where the mask is 0.
    """
    found = self.baseline.advantages(self._penalised(inputs))
    return _of_tokens("algo.baseline", found, inputs.loss_mask)

  def returns(self, inputs: types.AdvantageInputs) -> Float[Array, "B T"]:
    """Says what the critic is to predict, of the same rewards as `advantages`.

    Returns:
      One number a token, 0 where the mask is 0.
    """
    assert self.critic is not None, "only of an objective with a critic"
    return self.critic.returns(self._penalised(inputs))

  def _penalised(self, inputs: types.AdvantageInputs) -> types.AdvantageInputs:
    """Takes a KL in the reward off the rewards of tokens."""
    if self.kl is None or self.kl.place != "reward":
      return inputs
    assert inputs.reference_logprobs is not None
    gap = divergence.estimate(
      inputs.old_logprobs,
      inputs.reference_logprobs,
      inputs.loss_mask,
      estimator=self.kl.estimator,
    )
    penalty = inputs.penalty + self.kl.coef * gap
    return dataclasses.replace(inputs, penalty=penalty)

  def loss(
    self, inputs: types.LossInputs
  ) -> tuple[Float[Array, ""], dict[str, Float[Array, "B T"]]]:
    """Sums the losses of some rows' tokens, each times its share in the step.

    Args:
      inputs: the rows of one microbatch.

    Returns:
      The share of these rows in the loss, in nats, and numbers of each token:
      `loss/clip_fraction`, 1 where the trust region acts; `loss/entropy`; with
      corrections `loss/importance_mean`, the weight,
      `loss/importance_squared`, and `loss/importance_capped`, 1 where one acts;
      where a reference is known `loss/kl`, its estimate, by k1 without `kl`.
    """
    inputs = dataclasses.replace(inputs, old_logprobs=self._proximal(inputs))
    log_ratio, mask = losses.log_ratio(inputs, self.ratio), inputs.loss_mask
    clipped = jnp.zeros_like(mask)
    if isinstance(self.region, Region):
      token_loss, clipped = self.region.losses(log_ratio, inputs)
    else:
      found = self.region(log_ratio, losses.masked(inputs))
      found = _of_tokens("algo.region", found, mask)
      token_loss = jnp.where(mask > 0, found, 0.0)
    entropy = jnp.where(mask > 0, inputs.entropy, 0.0)
    shown = {"loss/clip_fraction": clipped, "loss/entropy": entropy}
    used = [c for c in (self.correction, *self.filters) if c is not None]
    weight, changed = mask, jnp.zeros_like(mask)
    for correction in used:
      one, acts = correction.weights(inputs)
      weight, changed = weight * one, jnp.maximum(changed, acts)
    if used:
      token_loss = token_loss * weight
      shown |= {
        "loss/importance_mean": weight,
        "loss/importance_squared": jnp.square(weight),
        "loss/importance_capped": changed,
      }
    gap = self._gap(inputs)
    if gap is not None:
      shown["loss/kl"] = gap
      if self.kl is not None and self.kl.place == "loss":
        token_loss = token_loss + self.kl.coef * gap
    if self.entropy:
      token_loss = token_loss - self.entropy * entropy
    return jnp.sum(token_loss * inputs.shares), shown

  def _gap(self, inputs: types.LossInputs) -> jax.Array | None:
    """Estimates the KL to the reference; None without one."""
    if self.kl is not None:
      return self.kl.estimate(inputs)
    if inputs.reference_logprobs is None:
      return None
    return divergence.estimate(
      jax.lax.stop_gradient(inputs.logprobs),
      inputs.reference_logprobs,
      inputs.loss_mask,
      estimator="k1",
    )

  def _proximal(self, inputs: types.LossInputs) -> jax.Array:
    if self.proximal == "sampler":
      return inputs.sampler_logprobs
    if self.proximal == "recomputed":
      return inputs.old_logprobs
    # AReaL: the newest version is one ahead of the one before the update.
    share = inputs.lag / (inputs.lag + 1.0)
    gap = losses.difference(
      inputs.logprobs, inputs.sampler_logprobs, inputs.loss_mask
    )
    return jax.lax.stop_gradient(inputs.sampler_logprobs + share * gap)


def _of_tokens(where: str, found: Any, mask: jax.Array) -> jax.Array:
  """Refuses what a part returns unless it is a number for each token."""
  shape = getattr(found, "shape", None)
  kind = getattr(found, "dtype", type(found).__name__)
  if shape != mask.shape or not jnp.issubdtype(kind, jnp.floating):
    got = kind if shape is None else f"{kind} {list(shape)}"
    raise types.InputError(
      f"{where}: expected one that returns a float for each token, "
      f"{list(mask.shape)}, got {got}. Correct the function."
    )
  return found
