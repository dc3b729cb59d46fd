"""The records that cross from one room to another, and the words they use.

Device records are frozen trees of arrays (`record`), host records are frozen
and hold token ids, never re-encoded text (`host_record`). Shape letters:
P prompts, G group size, B rows, T positions, S cached positions, V vocabulary,
D width, F feed-forward width, N query heads, K key/value heads, H head width,
L layers. Log-probabilities are in nats.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar, dataclass_transform

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

_T = TypeVar("_T")

# Hotter samples are uniform anyway; float32 ends at 1e38.
HOTTEST = 1e6
# U+FFFD stands for half a character, whose rest is in the next token.
_HALVES = {"\ufffd", *map(chr, range(0xD800, 0xE000))}

# A nested dictionary of arrays: weights, gradients, or their shardings.
Tree = Any
# A completion that ended in a row of an engine: row, uid, since when it had the
# row by time.monotonic(), and its tokens.
Seat: TypeAlias = tuple[int, int, float, int]


class InputError(ValueError):
  """A mistake in the user's input: one line, exit code 2, no traceback."""


class RunError(RuntimeError):
  """A fault of the run itself: exit code 1, with its cause."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[_T]) -> type[_T]:
  """Declares a device record: frozen, keyword-only, a JAX tree."""
  # JAX rebuilds records with leaves that are not arrays (shardings, tracers of
  # vmap), so the shape checker must leave the constructor alone.
  setattr(cls, "__no_type_check__", True)  # noqa: B010 (unknown to pyright)
  return flax.struct.dataclass(cls, kw_only=True)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def host_record(cls: type[_T]) -> type[_T]:
  """Declares a host record: frozen, keyword-only, never sharded."""
  return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


# --------------------------------------------------------------- on device


@record
class TrainState:
  """Everything an update changes.

  Attributes:
    step: batches consumed, whether or not their update was applied.
    version: batches that have changed the weights; the policy version of
      `params`.
    params: the weights, in the trainer's dtype; with adapters those beneath
      them, which stay as they are.
    opt_state: the optimizer's state, of what trains only.
    key: random key of the rollouts; constant, every token folds in its own
      uid and position.
    reference: weights that a KL, a teacher or a preference compares with, only
      those that train; None where nothing does, with adapters, where it is
      `params`, and where it is a model of its own.
    critic: a `training.critic.State`; None without one.
    adapters: of low rank, see `training.lora`; None where weights train.
  """

  step: Int[Array, ""]
  version: Int[Array, ""]
  params: Tree
  opt_state: Tree
  key: jax.Array
  reference: Tree = None
  critic: Tree = None
  adapters: Tree = None


@record
class Batch:
  """Scored completions: N sequences, one or more in each of B rows.

  Arrays of shape [B, T] are aligned with `tokens`: entry t speaks of token t,
  given the tokens before it in its sequence.

  Attributes:
    tokens: prompt then completion, sequence behind sequence; 0 where none is.
      Sequences of a row with the same prompt have it once: all but its last
      token is a segment of its own, which comes first, and theirs begin with
      the last.
    positions: 0, 1, ... in each sequence; 0 where none is.
    segment_ids: 1, 2, ... on the segments of a row, 0 where none is.
    prefix_ids: the segment of which a token is the continuation; that of the
      token itself where there is no other.
    sequence: which sequence a token is of; N where none is, or several are.
    loss_mask: 1 on tokens that train, from lengths, never from token values.
    sampler_logprobs: reported by the engine that sampled; 0 where none did.
    policy_versions: policy version that sampled the token; -1 where none did.
    turn_rewards: what a token has earned beside its sequence's reward.
    temperature: sampling temperature of each sequence, applied to logits.
    rewards: of each sequence; NaN where there is none.
    group_ids: sequences with equal id answer one draw of a prompt; in [0, N).
    rollout_ids: sequences with equal id are of one rollout; in [0, N).
    truncated: whether the sequence ended by the length limit.
    advantages: filled by `score`, likewise those below.
    old_logprobs: the trainer's own, before the update; NaN where the update
      finds them itself.
    reference_logprobs: of the reference policy; NaN where there is none.
    teacher_ids: the most probable tokens of a teacher in each place; None
      without one.
    teacher_logprobs: of these.
    values: of the critic before the update; None without one, as the next.
    returns: what the critic is to predict.
    routing: experts that the engine sent each token through, -1 where it read
      none; None where the trainer chooses them.
  """

  tokens: Int[Array, "B T"]
  positions: Int[Array, "B T"]
  segment_ids: Int[Array, "B T"]
  prefix_ids: Int[Array, "B T"]
  sequence: Int[Array, "B T"]
  loss_mask: Float[Array, "B T"]
  sampler_logprobs: Float[Array, "B T"]
  policy_versions: Int[Array, "B T"]
  turn_rewards: Float[Array, "B T"]
  temperature: Float[Array, " N"]
  rewards: Float[Array, " N"]
  group_ids: Int[Array, " N"]
  rollout_ids: Int[Array, " N"]
  truncated: Bool[Array, " N"]
  advantages: Float[Array, "B T"]
  old_logprobs: Float[Array, "B T"]
  reference_logprobs: Float[Array, "B T"]
  teacher_ids: Int[Array, "B T num"] | None = None
  teacher_logprobs: Float[Array, "B T num"] | None = None
  values: Float[Array, "B T"] | None = None
  returns: Float[Array, "B T"] | None = None
  routing: Int[Array, "B T L X"] | None = None


@record
class AdvantageInputs:
  """What a baseline may see of a whole step; shapes as in `Batch`.

  Attributes:
    rewards: one a sequence; NaN where there is none.
    group_ids: sequences that answer one draw of a prompt.
    rollout_ids: sequences of one rollout, which each have its reward.
    sequence: which sequence a token is of; N where none is.
    segment_ids: likewise, within a row.
    loss_mask: 1 on tokens that train.
    turn_rewards: of single tokens, beside those of their sequences.
    penalty: of single tokens, taken off their rewards.
    old_logprobs: of the trainer before the update.
    reference_logprobs: of the reference policy; None without one.
    values: of a critic; None without one.
    sampled: 1 where turn rewards are a rollout's; None is where it trains.
  """

  rewards: Float[Array, " N"]
  group_ids: Int[Array, " N"]
  rollout_ids: Int[Array, " N"]
  sequence: Int[Array, "B T"]
  segment_ids: Int[Array, "B T"]
  loss_mask: Float[Array, "B T"]
  turn_rewards: Float[Array, "B T"]
  penalty: Float[Array, "B T"]
  old_logprobs: Float[Array, "B T"]
  reference_logprobs: Float[Array, "B T"] | None = None
  values: Float[Array, "B T"] | None = None
  sampled: Float[Array, "B T"] | None = None


@record
class LossInputs:
  """What a loss may see of some rows: [B, T]; masked entries carry anything.

  Attributes:
    logprobs: under the weights being trained; differentiable, as `entropy`.
    entropy: of the distribution of each token, in nats.
    old_logprobs: under the trainer's weights before the update.
    sampler_logprobs: under the engine that sampled the token.
    reference_logprobs: under the reference policy; None without one.
    advantages: from the baseline.
    loss_mask: 1 on tokens that train.
    shares: of each token in the loss of the step; 0 where the mask is 0.
    segment_ids: which tokens of a row are one sequence.
    lag: versions between the sampler's weights and those before the update.
    num_tokens: trained tokens of the whole step; a scalar.
    teacher_logprobs: a teacher's most probable tokens in each place; None
      without one.
    candidate_logprobs: the same tokens under the weights being trained, and
      differentiable.
  """

  logprobs: Float[Array, "B T"]
  entropy: Float[Array, "B T"]
  old_logprobs: Float[Array, "B T"]
  sampler_logprobs: Float[Array, "B T"]
  reference_logprobs: Float[Array, "B T"] | None
  advantages: Float[Array, "B T"]
  loss_mask: Float[Array, "B T"]
  shares: Float[Array, "B T"]
  segment_ids: Int[Array, "B T"]
  lag: Float[Array, "B T"]
  num_tokens: Float[Array, ""]
  teacher_logprobs: Float[Array, "B T num"] | None = None
  candidate_logprobs: Float[Array, "B T num"] | None = None


# ----------------------------------------------------------------- on host


@host_record
class Policy:
  """Weights that may be sampled from, on the generation submesh.

  A host record on purpose: `version` changes every update, so passing it into
  a jitted function as a constant would compile again each time. Steps take
  `policy.params`.

  Attributes:
    params: weights in the engine's dtype and sharding.
    version: optimizer updates applied in these weights.
    step: batches the trainer had consumed when it published them.
    fingerprints: checksums per leaf, as computed on the training and on the
      generation submesh; equal when every bit arrived.
  """

  params: Tree
  version: int
  step: int
  fingerprints: tuple[Tree, Tree] | None = None


@host_record
class Example:
  """One item of a data source, before it becomes a prompt of a run."""

  prompt: str | tuple[Mapping[str, str], ...]
  reference: Any


@host_record
class Prompt:
  """One draw from the data: the `uid`-th prompt of the run.

  Two draws of the same item have different uids, and so are different groups.
  `messages` are what is asked before any template: plain text is a user's.
  """

  uid: int
  tokens: tuple[int, ...]
  text: str
  reference: Any
  messages: tuple[Mapping[str, Any], ...] = ()


@host_record
class SamplingParams:
  """How one rollout is sampled.

  Attributes:
    temperature: divides the logits; 0 takes the most probable token.
    top_k: keeps the k most probable tokens; 0 keeps all.
    top_p: keeps tokens while the probability before them is below p; 1 keeps
      all.
    min_p: keeps tokens whose probability is at least this part of that of the
      most probable one; 0 keeps all.
    max_tokens: longest completion, in tokens.
    min_tokens: tokens before which no stop token can be drawn, and none can
      complete a stop string; at most `max_tokens`.
    stop_ids: a token of this set ends the completion and is part of it.
    stop_strings: text that ends the completion with the token that completes
      it, which is part of it.
    logit_bias: pairs of a token id and what is added to its logit, within
      +-1e30; no id twice.
    forbidden_ids: tokens that are never drawn, whatever their bias.
    top_logprobs: how many of the most probable tokens are reported with each
      token.
    prompt_logprobs: whether the log-probabilities of the prompt's tokens are
      reported as well.
    seed: replaces the run's random key for this request, in [0, 2**31); None
      keeps it.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  max_tokens: int = 32
  min_tokens: int = 0
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  logit_bias: tuple[tuple[int, float], ...] = ()
  forbidden_ids: tuple[int, ...] = ()
  top_logprobs: int = 0
  prompt_logprobs: bool = False
  seed: int | None = None

  def __post_init__(self) -> None:
    most = self.max_tokens
    stops, bias = self.stop_strings, self.logit_bias
    biased = [token for token, _ in bias]
    forbidden = self.forbidden_ids
    small = all(abs(value) <= 1e30 for _, value in bias)
    readable = all(text and not _HALVES & set(text) for text in stops)
    seeded = self.seed is None or 0 <= self.seed < 2**31
    is_usable = 0 <= self.temperature <= HOTTEST
    once = len(set(biased)) == len(biased)
    rules = (
      (is_usable, "temperature", f"in [0, {HOTTEST:g}]", self.temperature),
      (self.top_k >= 0, "top_k", ">= 0 (0 keeps all)", self.top_k),
      (0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p),
      (0 <= self.min_p < 1, "min_p", "in [0, 1) (0 keeps all)", self.min_p),
      (most >= 1, "max_tokens", ">= 1", most),
      (
        0 <= self.min_tokens <= most,
        "min_tokens",
        f"in [0, max_tokens = {most}]",
        self.min_tokens,
      ),
      (readable, "stop_strings", "non-empty texts without U+FFFD", stops),
      (min(self.stop_ids, default=0) >= 0, "stop_ids", ">= 0", self.stop_ids),
      (min(biased, default=0) >= 0, "logit_bias", "ids >= 0", bias),
      (once, "logit_bias", "no id twice", bias),
      (small, "logit_bias", "values within +-1e30", bias),
      (min(forbidden, default=0) >= 0, "forbidden_ids", "ids >= 0", forbidden),
      (self.top_logprobs >= 0, "top_logprobs", ">= 0", self.top_logprobs),
      (seeded, "seed", "in [0, 2**31) or None", self.seed),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise InputError(
          f"sampling.{name}: expected {rule}, got {value}. Correct the value."
        )


@host_record
class Partial:
  """A completion that is half made.

  Attributes:
    uid: as asked for.
    tokens: the ids so far; may be empty.
    logprobs: of each token, as in `Completion`.
    versions: policy version that made each token; -1 where none did.
    talk: a `restore.Kept` past the sampling of a first turn; None else.
  """

  uid: int
  tokens: tuple[int, ...]
  logprobs: tuple[float, ...]
  versions: tuple[int, ...]
  talk: Any = None


@host_record
class Request:
  """A group to sample: one prompt, one completion for each of `uids`.

  Attributes:
    prompt: token ids of the prompt.
    uids: identity of each completion; with the position it is the whole
      source of randomness of a token.
    sampling: how to sample each of them.
    begun: completions that go on from these tokens; all others start at the
      end of the prompt. A turn that ended goes on behind tokens that the policy
      did not sample, as of a tool's answer: those have version -1.
    hold: keep a completion in the cache when it ends, for a request of the same
      prompt that goes on from it (`begun`), which then reads the new tokens
      only. Without that, or when others needed the memory, the same tokens come
      out of more work. `max_tokens` and `min_tokens` count all tokens of a
      completion, those of other turns and of tools too.
  """

  prompt: tuple[int, ...]
  uids: tuple[int, ...]
  sampling: SamplingParams
  begun: tuple[Partial, ...] = ()
  hold: bool = False


@host_record
class Turn:
  """What the policy said before an environment answered, or the end came.

  Attributes:
    end: tokens of the completion up to its last one.
    whole: whether the policy ended it, and not the limit of tokens.
    reward: what the environment gave for it, beside the rollout's reward.
    calls: of tools in it.
    errors: those of them that failed, of any kind.
    timeouts: of these, those that took too long.
  """

  end: int
  whole: bool = True
  reward: float = 0.0
  calls: int = 0
  errors: int = 0
  timeouts: int = 0


@host_record
class Completion:
  """What the engine made for one uid.

  Attributes:
    uid: as asked for.
    tokens: the ids, the stop token included.
    logprobs: of each token, in nats, under the temperature-scaled
      distribution over the whole vocabulary; as it was given where no policy
      made it.
    versions: policy version that made each token; -1 where none did.
    finish: "stop" by a stop token or a stop string, "length" by the limit.
    top_logprobs: ids and log-probabilities of the most probable tokens in each
      place, the most probable first; empty in the places of tokens that were
      made before a break, and altogether if not asked for.
    prompt_logprobs: of each token of the prompt after the first, given those
      before it, in the same kind of distribution; empty if not asked for.
    turns: of a conversation with an environment; its finish is "length" where
      turns or tokens ended before it did. Empty without an environment.
    routing: experts, in each layer, of every token that the engine read: all of
      prompt and completion but the last; None where they were not noted. Not
      looked at by `==`.
    segments: of a conversation that began anew: for each time where, and the
      ids of the prompt that takes the place of all before; one more row trains
      for each, see `segments.split`. `tokens` are those of all, end to end.
  """

  uid: int
  tokens: tuple[int, ...]
  logprobs: tuple[float, ...]
  versions: tuple[int, ...]
  finish: Literal["stop", "length"]
  top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
  prompt_logprobs: tuple[float, ...] = ()
  turns: tuple[Turn, ...] = ()
  routing: Int[np.ndarray, "T L X"] | None = dataclasses.field(
    default=None, compare=False
  )
  segments: tuple[tuple[int, tuple[int, ...]], ...] = ()


@host_record
class Rollout:
  """One sampled conversation with its score.

  Attributes:
    prompt: what was asked.
    completion: what was answered, as ids.
    temperature: the temperature it was sampled at.
    text: the completion for people and rewards, without its stop token; of a
      conversation with an environment what the policy said in its last turn.
    conversation: all of it for people, what the environment said included;
      empty without one.
    reward: in the task's own unit; NaN when there is none. Turns of the
      completion may have rewards beside it, see `earned`.
    parts: named parts of the reward, unweighted.
    failure: why there is no reward; empty otherwise.
  """

  prompt: Prompt
  completion: Completion
  temperature: float
  text: str
  reward: float = float("nan")
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  failure: str = ""
  conversation: str = ""

  @property
  def earned(self) -> float:
    """What it has earned in all: its reward and those of its turns.

    NaN when there is no reward, whatever the turns have.
    """
    turns = (turn.reward for turn in self.completion.turns)
    return math.fsum((self.reward, *turns))


@host_record
class Group:
  """The rollouts of one draw of a prompt."""

  prompt: Prompt
  rollouts: tuple[Rollout, ...]
