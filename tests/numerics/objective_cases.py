"""Objectives in the package's words and in the reference's, and their inputs.

A batch of sixteen sequences in six rows: groups of one to four, a rollout
without a reward, one that is left out, one of two sequences, equal rewards,
tokens of tools in the middle.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import types
from jaxrl_post.algos import (
  baselines,
  cispo,
  corrections,
  dapo,
  distill,
  divergence,
  dpo,
  dr_grpo,
  gspo,
  losses,
  maxrl,
  ppo,
  reducers,
  reinforce,
  reinforce_pp,
  rloo,
  sapo,
  sft,
)
from jaxrl_post.algos import objective as objectives
from tests.reference import objectives as reference

LONGEST = 8
NUM, ROWS, WIDTH = 16, 16, 24
# Group, rollout, reward, prompt's length, and which tokens behind it train.
_SPECS = (
  (0, 0, 0.7, 2, "11"),
  (1, 1, 1.0, 1, "111"),
  (1, 2, 0.25, 2, "1"),
  (2, 3, 0.9, 2, "1101"),
  (2, 4, 0.9, 1, "111"),
  (2, 5, 0.9, 1, "10011"),
  (3, 6, 1.0, 2, "1111"),
  (3, 7, 0.0, 1, "11011"),
  (3, 8, np.nan, 2, "000"),
  (3, 9, 0.5, 2, "11"),
  (3, 9, 0.5, 3, "101"),
  (4, 10, -0.5, 1, "11"),
  (4, 11, 2.0, 2, "1011"),
  (5, 12, 1.0, 1, "000"),
  (5, 13, 0.0, 1, "11"),
)
_PACKED = ((0, 1, 2), (3, 4), (5, 6, 7), (8, 9), (10, 11, 12), (13, 14))
_PARTS = 3
_FLOATS = (
  "logprobs",
  "entropy",
  "old_logprobs",
  "sampler_logprobs",
  "reference_logprobs",
  "lag",
  "turn_rewards",
  "values",
)
VARIANTS = (
  "packed",
  "garbage",
  "moved",
  "alone",
  "agree",
  "equal",
  "part 0",
  "part 1",
  "part 2",
)


@functools.cache
def tokens() -> list[dict[str, np.ndarray]]:
  """Draws the numbers of each sequence's tokens, those off the mask too."""
  rng, worth = np.random.default_rng(7), np.random.default_rng(8)
  found = []
  for group, _, _, prompt, trained in _SPECS:
    size = prompt + len(trained)
    new = -rng.uniform(0.1, 2.5, size)
    old = new + rng.normal(0, 0.3, size)
    mask = np.array([0.0] * prompt + [float(c) for c in trained])
    turns = rng.choice([0.0, 0.0, 0.25, -0.125], size)
    one = {
      "logprobs": new,
      "entropy": rng.uniform(0.1, 2.0, size),
      "old_logprobs": old,
      "sampler_logprobs": old + rng.normal(0, 0.4, size),
      "reference_logprobs": new + rng.normal(0, 0.4, size),
      "lag": rng.integers(0, 4, size).astype(float),
      "turn_rewards": turns if group in {1, 3} else np.zeros(size),
      "values": worth.normal(0.5, 0.5, size),
      "loss_mask": mask,
    }
    # The reference reads the numbers that float32 holds.
    found.append({k: x.astype(np.float32) for k, x in one.items()})
  return found


def sampled() -> list[reference.Sampled]:
  """Returns the batch as the reference has it: trained tokens only."""
  found = []
  for (group, rollout, reward, _, _), one in zip(_SPECS, tokens(), strict=True):
    keep = one["loss_mask"] > 0
    rows = {k: tuple(map(float, one[k][keep])) for k in _FLOATS}
    for name in ("old", "sampler", "reference"):
      rows[name] = rows.pop(f"{name}_logprobs")
    rows["new"] = rows.pop("logprobs")
    reward = float(np.float32(reward))
    found.append(
      reference.Sampled(**rows, reward=reward, group=group, rollout=rollout)
    )
  return found


@dataclasses.dataclass(frozen=True)
class Laid:
  """The batch in rows, [B, T], and tables of its sequences, [N]."""

  rows: dict[str, np.ndarray]
  tables: dict[str, np.ndarray]


def lay(plan: tuple[tuple[int, ...], ...], numbers: np.ndarray) -> Laid:
  """Lays sequences out in rows.

  Args:
    plan: the sequences of each row.
    numbers: the new number of each sequence, of each group and of each rollout.
  """
  rows = {k: np.zeros((ROWS, WIDTH), np.float32) for k in tokens()[0]}
  rows["segment_ids"] = np.zeros((ROWS, WIDTH), np.int32)
  rows["sequence"] = np.full((ROWS, WIDTH), NUM, np.int32)
  tables = {
    "rewards": np.full(NUM, np.nan, np.float32),
    "group_ids": np.zeros(NUM, np.int32),
    "rollout_ids": np.zeros(NUM, np.int32),
  }
  for at, members in enumerate(plan):
    begin = 0
    for segment, i in enumerate(members):
      one, own = tokens()[i], int(numbers[i])
      place = slice(begin, begin + len(one["lag"]))
      for name, x in one.items():
        rows[name][at, place] = x
      rows["segment_ids"][at, place] = segment + 1
      rows["sequence"][at, place] = own
      group, rollout, reward, _, _ = _SPECS[i]
      tables["rewards"][own] = reward
      tables["group_ids"][own] = numbers[group]
      tables["rollout_ids"][own] = numbers[rollout]
      begin = place.stop
  return Laid(rows, tables)


def numbers(name: str) -> np.ndarray:
  """Returns the number that each sequence of the batch has in a variant."""
  if name == "moved":
    return np.random.default_rng(5).permutation(NUM)
  return np.arange(NUM)


def _variant(name: str) -> Laid:
  same = numbers(name)
  if name == "alone":
    return lay(tuple((i,) for i in range(len(_SPECS))), same)
  if name == "moved":
    # The empty rows move too.
    plan = _PACKED + ((),) * (ROWS - len(_PACKED))
    order = np.random.default_rng(3).permutation(ROWS)
    return lay(tuple(plan[i] for i in order), same)
  laid = lay(_PACKED, same)
  rows, off = laid.rows, laid.rows["loss_mask"] == 0
  if name == "garbage":
    bad = np.array([np.nan, -np.inf, 1e30, np.inf], np.float32)
    for shift, field in enumerate(_FLOATS):
      fill = np.resize(np.roll(bad, shift), rows[field].shape)
      rows[field] = np.where(off, fill, rows[field])
  elif name == "agree":
    for field in ("old_logprobs", "sampler_logprobs"):
      rows[field] = rows["logprobs"].copy()
  elif name == "equal":
    laid.tables["rewards"][np.isfinite(laid.tables["rewards"])] = 0.9
    rows["turn_rewards"][:] = 0
  return laid


@functools.cache
def variants() -> dict[str, Laid]:
  """Returns the batch in each way but in parts."""
  return {name: _variant(name) for name in VARIANTS if "part" not in name}


def part(x: np.ndarray, number: int) -> np.ndarray:
  """Returns [rows of a part, then rows of nothing]."""
  rows = x[number : len(_PACKED) : _PARTS]
  return np.concatenate([rows, np.zeros_like(x[len(rows) :])])


def _stack(found: dict[str, np.ndarray]) -> jax.Array:
  parts = [part(found["packed"], n) for n in range(_PARTS)]
  return jnp.asarray(np.stack([*found.values(), *parts]))


@functools.cache
def loss_inputs() -> dict[str, jax.Array]:
  """Returns what all objectives read, each variant after the other."""
  names = [*_FLOATS[:-2], "loss_mask", "segment_ids"]
  return {
    name: _stack({v: laid.rows[name] for v, laid in variants().items()})
    for name in names
  }


@functools.cache
def shares() -> jax.Array:
  """Returns the shares of each variant under each reducer."""
  found = []
  for reducer, _ in REDUCERS.values():

    @jax.jit
    def one(*tables, reducer=reducer):
      return reducer.shares(reducers.count(*tables))

    by = {}
    for name, laid in variants().items():
      rows = laid.rows
      ids = laid.tables["rollout_ids"]
      by[name] = np.asarray(one(rows["loss_mask"], rows["sequence"], ids))
    found.append(_stack(by))
  return jnp.stack(found, axis=1)


@functools.cache
def advantages(name: str) -> jax.Array:
  """Returns the advantages of each variant under an algorithm."""
  objective = jax.jit(ALGORITHMS[name][0]().advantages)
  by = {}
  for variant, laid in variants().items():
    rows, tables = laid.rows, laid.tables
    off = rows["loss_mask"] == 0
    bad = np.nan if variant == "garbage" else 0.0
    found = objective(
      types.AdvantageInputs(
        rewards=tables["rewards"],
        group_ids=tables["group_ids"],
        rollout_ids=tables["rollout_ids"],
        sequence=rows["sequence"],
        segment_ids=rows["segment_ids"],
        loss_mask=rows["loss_mask"],
        turn_rewards=rows["turn_rewards"],
        penalty=np.where(off, bad, 0.0).astype(np.float32),
        old_logprobs=rows["old_logprobs"],
        reference_logprobs=rows["reference_logprobs"],
        values=rows["values"],
      )
    )
    assert np.all(np.asarray(found)[off] == 0), variant
    by[variant] = np.where(off, bad, found).astype(np.float32)
  return _stack(by)


def _square(log_ratio: jax.Array, inputs: types.LossInputs) -> jax.Array:
  return inputs.advantages * jnp.square(log_ratio)


def _grpo(**parts):
  return functools.partial(objectives.Objective, **parts)


_STD = reference.group
_CLIP = ("clip", {"low": 0.2, "high": 0.2})
_DUAL = ("clip", {"low": 0.2, "high": 0.2, "dual": 1.3})
_SAPO = ("sapo", {"positive": 1.0, "negative": 1.05})
_DPPO = ("dppo", {"low": 0.1, "high": 0.1})
_SCORE = ("score", {})
_GSPO = ("clip", {"low": 3e-4, "high": 4e-4})


def _by(scored, region=_CLIP, **rest):
  return reference.Settings(advantages=scored, region=region, **rest)


def _kl(estimator, place, gradient="own"):
  words = {"estimator": estimator, "place": place, "gradient": gradient}
  # Far from nothing: the deviation of a group divides by what a KL leaves of
  # equal rewards.
  coef = 0.1 if place == "loss" else 2.0
  return divergence.Kl(coef, **words), {"coef": coef, **words}


def _named():
  bind = functools.partial
  cut = ("cispo", {"low": 1.0, "high": 4.0})
  band = ("cispo", {"low": 0.2, "high": 0.3})
  narrow = losses.Cispo(0.2, 0.3)
  higher = ("clip", {"low": 0.2, "high": 0.28})
  plain, mean = bind(_STD, scale="none"), bind(_STD, scale="mean")
  returns = reference.returns
  return {
    "grpo": (objectives.Objective, _by(_STD)),
    "dr_grpo": (bind(dr_grpo.objective, LONGEST), _by(plain)),
    "dapo": (dapo.objective, _by(_STD, higher)),
    "gspo": (gspo.objective, _by(_STD, _GSPO, ratio="sequence")),
    "gspo_token": (
      bind(gspo.objective, "sequence_token"),
      _by(_STD, _GSPO, ratio="sequence_token"),
    ),
    "cispo": (cispo.objective, _by(_STD, cut)),
    "cispo_band": (_grpo(region=narrow), _by(_STD, band)),
    "sapo": (sapo.objective, _by(_STD, _SAPO)),
    "rloo": (rloo.objective, _by(bind(_STD, scale="others"), _SCORE)),
    "reinforce": (
      reinforce.objective,
      _by(bind(reference.over_batch, whiten=True), _SCORE),
    ),
    "reinforce_pp": (reinforce_pp.objective, _by(returns)),
    "reinforce_pp_baseline": (
      bind(reinforce_pp.objective, group=True),
      _by(bind(returns, centre=True)),
    ),
    "returns_discounted": (
      _grpo(baseline=baselines.Returns(gamma=0.9)),
      _by(bind(returns, gamma=0.9)),
    ),
    "ppo": (
      bind(ppo.objective, decay=0.9),
      _by(bind(reference.critic, decay=0.9)),
    ),
    "maxrl": (maxrl.objective, _by(mean)),
    "sft": (
      sft.objective,
      _by(bind(reference.over_batch, whiten=False), _SCORE),
    ),
    "distill": (distill.objective, _by(reference.teacher, _SCORE)),
    "distill_rewards": (
      bind(distill.objective, 0.5),
      _by(bind(reference.teacher, rewards=0.5), _SCORE),
    ),
    "distill_clip": (
      _grpo(baseline=baselines.Teacher()),
      _by(reference.teacher),
    ),
    "dpo": (dpo.objective, _by(bind(reference.preference, beta=0.1), _SCORE)),
  }


def _parts():
  regions = {
    "dual": (losses.Clip(dual=1.3), _DUAL),
    "sapo": (losses.Sapo(), _SAPO),
    "dppo": (losses.Dppo(0.1, 0.1), _DPPO),
    "own": (_square, ("square", {})),
  }
  found = {}
  for name, (region, words) in regions.items():
    for ratio in ("token", "sequence", "sequence_token"):
      found[f"{name}_{ratio}"] = (
        _grpo(region=region, ratio=ratio),
        _by(_STD, words, ratio=ratio),
      )
  for estimator in ("k1", "k2", "k3"):
    for gradient in ("own", "unbiased"):
      kl, words = _kl(estimator, "loss", gradient)
      found[f"{estimator}_{gradient}"] = (_grpo(kl=kl), _by(_STD, kl=words))
    kl, words = _kl(estimator, "reward")
    found[f"{estimator}_reward"] = (_grpo(kl=kl), _by(_STD, kl=words))
    found[f"{estimator}_reward_returns"] = (
      _grpo(kl=kl, baseline=baselines.Returns()),
      _by(reference.returns, kl=words),
    )
  kl, words = _kl("k3", "loss")
  found["score_k3_entropy"] = (
    _grpo(kl=kl, region=losses.Score(), entropy=0.01),
    _by(_STD, _SCORE, kl=words, entropy=0.01),
  )
  found["entropy"] = (_grpo(entropy=0.01), _by(_STD, entropy=0.01))
  return found


# Name to how the package makes it, and to the reference's words for it.
ALGORITHMS = {**_named(), **_parts()}

_IN_REWARD = divergence.Kl(0.1, place="reward")
# What no correction, reducer or proximal policy makes possible.
IMPOSSIBLE = {
  "score_sequence": _grpo(region=losses.Score(), ratio="sequence"),
  "score_sequence_token": _grpo(region=losses.Score(), ratio="sequence_token"),
  "cispo_sequence": _grpo(region=losses.Cispo(), ratio="sequence"),
  "cispo_sequence_token": _grpo(region=losses.Cispo(), ratio="sequence_token"),
  "distill_kl_in_reward": _grpo(baseline=baselines.Teacher(), kl=_IN_REWARD),
  "dpo_kl_in_reward": _grpo(baseline=baselines.Preference(), kl=_IN_REWARD),
}

# Equal rewards leave these without a gradient.
SILENT = {
  name
  for name in ALGORITHMS
  if not name.startswith(
    ("sft", "distill", "k1", "k2", "k3", "score_k3", "ppo")
  )
  and name != "returns_discounted"
}


def _importance(level, action, low, high):
  made = corrections.Importance(level, action, high=high, low=low)
  return made, {"kind": action, "level": level, "low": low, "high": high}


def _corrections():
  single = {
    "token_truncate": _importance("token", "truncate", 0.0, 1.2),
    "token_mask": _importance("token", "mask", 0.7, 1.4),
    "token_reject": _importance("token", "reject", 0.7, 1.4),
    "sequence_truncate": _importance("sequence", "truncate", 0.8, 1.3),
    "geometric_reject": _importance("geometric", "reject", 0.8, 1.2),
  }
  found = {
    name: ({"correction": made}, [words])
    for name, (made, words) in single.items()
  }
  filtered = corrections.OffPolicyMask()
  words = {"kind": "off_policy_mask", "delta": 1e-4}
  found["off_policy_mask"] = (
    {"correction": None, "filters": (filtered,)},
    [words],
  )
  (tis, tis_words), (rs, rs_words) = (
    single["token_truncate"],
    single["geometric_reject"],
  )
  found["truncate_and_reject"] = (
    {"correction": tis, "filters": (rs,)},
    [tis_words, rs_words],
  )
  return {"none": ({"correction": None}, []), **found}


# Name to parts of an objective, and to the reference's words for them.
CORRECTIONS = _corrections()
REDUCERS = {
  "token_mean": (reducers.TokenMean(), 0),
  "sequence_mean": (reducers.SequenceMean(), 0),
  "sequence_sum": (reducers.SequenceSum(), 0),
  "constant": (reducers.Constant(LONGEST), LONGEST),
}
PROXIMALS = ("recomputed", "sampler", "loglinear")
