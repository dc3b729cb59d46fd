"""Objectives that make no sense are refused, by the setting's name."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from jaxrl_post import types
from jaxrl_post.algos import (
  baselines,
  corrections,
  dapo,
  distill,
  divergence,
  dpo,
  grpo,
  losses,
  ppo,
  reducers,
  reinforce_pp,
)
from jaxrl_post.algos import objective as objectives
from tests.unit import objective_inputs as small

_NAN, _INF = float("nan"), float("inf")


def _case(where, make, *args, **words):
  name = getattr(make, "__name__", "")
  return pytest.param(
    where, functools.partial(make, *args, **words), id=f"{name}-{args}-{words}"
  )


@dataclasses.dataclass(frozen=True)
class _Oracle:
  """Wants values, and is no critic that a step could train."""

  needs = frozenset({"values", "luck"})

  def advantages(self, inputs):
    return inputs.values


_REWARD = {"place": "reward"}
_IN_REWARD = divergence.Kl(0.1, **_REWARD)
_OBJECTIVE = objectives.Objective
_WITH_SIGNAL = divergence.Kl(0.1, without_signal=False)


def _top(**parts):
  return dataclasses.replace(distill.top(), **parts)


@dataclasses.dataclass(frozen=True)
class _Own:
  advantages: object
  needs = frozenset()


def _scored(own):
  rows = jnp.ones((2, 3))
  _OBJECTIVE(baseline=_Own(own)).advantages(
    types.AdvantageInputs(
      rewards=jnp.ones(4),
      group_ids=jnp.zeros(4, jnp.int32),
      rollout_ids=jnp.arange(4),
      sequence=rows.astype(jnp.int32),
      segment_ids=rows.astype(jnp.int32),
      loss_mask=rows,
      turn_rewards=rows,
      penalty=rows,
      old_logprobs=rows,
    )
  )


_CASES = [
  *(_case("region.low", losses.Clip, x) for x in (0.0, -0.1, 1.1, _NAN)),
  *(_case("region.high", losses.Clip, 0.2, x) for x in (0.0, -1.0, _NAN)),
  *(
    _case("region.dual", losses.Clip, 0.2, 0.2, x)
    for x in (1.2, 0.0, _NAN, _INF)
  ),
  _case("region.low", losses.Cispo, 0.0),
  _case("region.high", losses.Cispo, 1.0, 0.0),
  _case("region.positive", losses.Sapo, 0.0),
  _case("region.negative", losses.Sapo, 1.0, _INF),
  _case("region.high", losses.Dppo, 0.2, 1.5),
  *(
    _case("correction", corrections.Importance, **bounds)
    for bounds in (
      {"high": 0.5},
      {"low": 1.5},
      {"low": -0.1},
      {"high": _NAN},
      {"low": _NAN},
    )
  ),
  *(
    _case("correction.delta", corrections.OffPolicyMask, x)
    for x in (-1.0, _NAN, _INF)
  ),
  *(_case("kl.coef", divergence.Kl, x) for x in (0.0, -1.0, _NAN, _INF)),
  _case("kl.gradient", divergence.Kl, 0.1, gradient="unbiased", **_REWARD),
  *(_case("baseline.gamma", baselines.Returns, x) for x in (-0.1, 2.0, _NAN)),
  _case("baseline.gamma", baselines.Critic, 1.5),
  _case("baseline.decay", baselines.Critic, 1.0, -1.0),
  *(
    _case("baseline.coef", baselines.Critic, model=model, coef=coef)
    for model, coef in (
      ("own", 0.1),
      ("head", None),
      ("head", -0.1),
      ("head", _NAN),
      ("head", _INF),
    )
  ),
  *(
    _case("baseline.clip", baselines.Critic, clip=x)
    for x in (0.0, -0.2, _NAN, _INF)
  ),
  *(
    _case("baseline.learning_rate", baselines.Critic, learning_rate=x)
    for x in (-1e-5, _NAN, _INF)
  ),
  *(_case("baseline.rewards", distill.objective, x) for x in (-1.0, _NAN)),
  *(_case("baseline.beta", dpo.objective, x) for x in (0.0, _NAN, _INF)),
  _case("reducer.length", reducers.Constant, 0),
  *(_case("entropy", _OBJECTIVE, entropy=x) for x in (-1.0, _NAN, _INF)),
  _case("ratio", _OBJECTIVE, ratio="sequence", region=losses.Score()),
  _case("ratio", _OBJECTIVE, ratio="sequence_token", region=losses.Cispo()),
  _case("proximal", _OBJECTIVE, proximal="loglinear", region=losses.Score()),
  _case("proximal", _OBJECTIVE, proximal="loglinear", kl=_IN_REWARD),
  *(_case("region.num", divergence.TopK, x) for x in (0, -1)),
  _case("baseline", _OBJECTIVE, region=divergence.TopK()),
  _case("ratio", _top, ratio="sequence"),
  _case("proximal", _top, proximal="loglinear"),
  _case("proximal", _top, proximal="sampler"),
  _case("kl.place", _top, kl=_IN_REWARD),
  *(
    _case("kl.without_signal", _OBJECTIVE, baseline=baseline, kl=_WITH_SIGNAL)
    for baseline in (
      baselines.Critic(),
      baselines.Returns(),
      baselines.Batch(),
      baselines.Teacher(),
    )
  ),
  _case(
    "proximal",
    _OBJECTIVE,
    proximal="loglinear",
    baseline=baselines.Teacher(),
  ),
  _case("correction, algo.filters", _OBJECTIVE, proximal="sampler"),
  _case(
    "correction, algo.filters",
    _OBJECTIVE,
    proximal="sampler",
    correction=None,
    filters=(corrections.Importance(),),
  ),
  _case("baseline", _OBJECTIVE, baseline=_Oracle()),
  _case("kl.place", _OBJECTIVE, baseline=baselines.Teacher(), kl=_IN_REWARD),
  _case("kl.place", _OBJECTIVE, baseline=baselines.Preference(), kl=_IN_REWARD),
]


@pytest.mark.parametrize(
  "own",
  [
    lambda x, inputs: x[:, :1],
    lambda x, inputs: x.sum(),
    lambda x, inputs: x > 0,
    lambda x, inputs: None,
  ],
  ids=("column", "number", "bool", "none"),
)
def test_an_own_loss_is_a_float_for_each_token(own):
  with pytest.raises(types.InputError, match=r"algo\.region: expected one"):
    _OBJECTIVE(region=own).loss(small.inputs([-1.0, -2.0]))


@pytest.mark.parametrize(
  "own",
  [
    lambda inputs: inputs.rewards,
    lambda inputs: inputs.rewards.sum(),
    lambda inputs: inputs.loss_mask > 0,
  ],
  ids=("sequence", "number", "bool"),
)
def test_an_own_baseline_is_a_float_for_each_token(own):
  with pytest.raises(types.InputError, match=r"algo\.baseline: expected one"):
    _scored(own)


@pytest.mark.parametrize(("where", "make"), _CASES)
def test_impossible_settings_are_refused_by_name(where, make):
  with pytest.raises(types.InputError) as fault:
    make()
  message = str(fault.value)
  assert message.startswith(f"algo.{where}: expected "), message
  assert ", got " in message or " got " in message
  assert "\n" not in message and message.endswith(".")


@pytest.mark.parametrize(
  ("where", "made", "allowed"),
  [
    (
      "correction.level",
      corrections.Importance(),
      "token, sequence, geometric",
    ),
    ("correction.action", corrections.Importance(), "truncate, mask, reject"),
    ("kl.estimator", divergence.Kl(0.1), "k1, k2, k3"),
    ("kl.place", divergence.Kl(0.1), "loss, reward"),
    ("kl.gradient", divergence.Kl(0.1), "own, unbiased"),
    ("baseline.scale", baselines.Group(), "std, mean, none"),
    ("baseline.model", baselines.Critic(), "own, head"),
    ("ratio", _OBJECTIVE(), "token, sequence, sequence_token"),
    ("proximal", _OBJECTIVE(), "recomputed, sampler, loglinear"),
  ],
)
def test_a_word_that_is_none_of_a_setting_is_refused(where, made, allowed):
  # The tests' own checker would be first to refuse it.
  object.__setattr__(made, where.split(".")[-1], "wrong")
  with pytest.raises(types.InputError) as fault:
    made.__post_init__()
  assert str(fault.value) == (
    f"algo.{where}: expected one of {allowed}, got wrong. Correct the word."
  )


def test_a_baseline_is_refused_with_what_it_lacks():
  with pytest.raises(types.InputError, match="_Oracle, which needs luck, val"):
    objectives.Objective(baseline=_Oracle())


@pytest.mark.parametrize("model", ["own", "head"])
def test_ppo_has_a_critic_that_a_step_can_serve(model):
  objective = ppo.objective(model, decay=0.95)
  critic = objective.critic
  assert critic is objective.baseline
  assert (critic.gamma, critic.decay, critic.model) == (1.0, 0.95, model)
  assert ppo.objective().critic.decay == 1.0
  assert objective.region == losses.Clip(0.2, 0.2)
  assert objective.ratio == "token"
  assert objective.needs == {"values", "start", "one_row"}


@pytest.mark.parametrize(
  ("objective", "needs"),
  [
    (grpo.objective(), {"start"}),
    (objectives.Objective(correction=None, proximal="sampler"), set()),
    (objectives.Objective(proximal="loglinear"), set()),
    (objectives.Objective(kl=divergence.Kl(0.1)), {"reference", "start"}),
    (objectives.Objective(kl=_IN_REWARD), {"reference", "old", "start"}),
    (distill.objective(), {"reference", "old", "start", "teacher"}),
    (
      dpo.objective(),
      {"reference", "old", "start", "single_update", "pairs"},
    ),
    (reinforce_pp.objective(), {"start", "one_row"}),
  ],
)
def test_an_objective_says_what_it_needs(objective, needs):
  assert objective.needs == needs


def test_dapo_leaves_out_truncated_rollouts_and_clips_higher():
  objective = dapo.objective()
  assert objective.mask_truncated and not grpo.objective().mask_truncated
  assert objective.region == losses.Clip(0.2, 0.28)
