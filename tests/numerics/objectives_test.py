"""Every objective against a slow float64 one, and what may not change it.

All products of algorithms, corrections, proximal policies and reducers: an
objective either agrees with the reference, or is refused.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from tests.numerics import objective_cases as cases
from tests.reference import objectives as reference

_SCORE = {"rloo", "reinforce", "sft", "distill", "distill_rewards", "dpo"}
_SCORE |= {"score_k3_entropy"}
_REFUSAL = r"^algo\.\w+(\.\w+)?(, algo\.\w+)?: expected .*, got .*\. \w+.*\.$"
_NO_IMPORTANCE = {"none", "off_policy_mask"}


def _is_refused(algorithm: str, correction: str, proximal: str) -> bool:
  """Says by name, apart from the code, which products make no sense."""
  if algorithm in cases.IMPOSSIBLE:
    return True
  if proximal == "sampler" and correction not in _NO_IMPORTANCE:
    return True
  if proximal != "recomputed" and algorithm in _SCORE:
    return True
  reads_old = algorithm.startswith(("distill", "dpo")) or "reward" in algorithm
  return proximal == "loglinear" and reads_old


def _products(*more, refused: bool = False):
  names = (*cases.ALGORITHMS, *cases.IMPOSSIBLE)
  return [
    pytest.param(*product, id="-".join(product))
    for product in itertools.product(
      names, cases.CORRECTIONS, cases.PROXIMALS, *more
    )
    if _is_refused(*product[:3]) == refused
  ]


_EACH = ("algorithm", "correction", "proximal")
_of_each = pytest.mark.parametrize(_EACH, _products())


def _make(algorithm, correction, proximal, reducer="token_mean"):
  made = {**cases.ALGORITHMS, **cases.IMPOSSIBLE}[algorithm]
  objective = made[0]() if isinstance(made, tuple) else made()
  return dataclasses.replace(
    objective,
    **cases.CORRECTIONS[correction][0],
    proximal=proximal,
    reducer=cases.REDUCERS[reducer][0],
  )


@functools.cache
def _found(algorithm, correction, proximal):
  """Evaluates an objective on all variants, under all reducers.

  Operation by operation, for all of them at once: to compile a program for each
  objective takes ten times as long.

  Returns:
    Losses [V, 4], their gradients [V, 4, B, T], and weights [V, 4, B, T].
  """
  objective = _make(algorithm, correction, proximal)

  def one(fields, advantages, shares):
    def loss(logprobs):
      inputs = types.LossInputs(
        **{**fields, "logprobs": logprobs},
        advantages=advantages,
        shares=shares,
        num_tokens=jnp.sum(fields["loss_mask"]),
      )
      value, shown = objective.loss(inputs)
      return value, shown.get("loss/importance_mean", inputs.loss_mask)

    return jax.value_and_grad(loss, has_aux=True)(fields["logprobs"])

  every = jax.vmap(jax.vmap(one, in_axes=(None, None, 0)))
  given = cases.loss_inputs(), cases.advantages(algorithm), cases.shares()
  (loss, weights), gradient = every(*given)
  return np.asarray(loss), np.asarray(gradient), np.asarray(weights)


def _at(variant: str) -> int:
  return cases.VARIANTS.index(variant)


def _by_sequence(x: np.ndarray, variant: str) -> list[np.ndarray]:
  """Takes [..., B, T] apart into trained tokens of sequences, in order."""
  laid = cases.variants()[variant]
  numbers = laid.rows["sequence"]
  trained = laid.rows["loss_mask"] > 0
  return [x[..., (numbers == n) & trained] for n in range(cases.NUM)]


_BATCH = cases.sampled()


@functools.cache
def _reference_shares(reducer):
  return reference.shares(_BATCH, reducer, cases.REDUCERS[reducer][1])


@pytest.mark.parametrize((*_EACH, "reducer"), _products(tuple(cases.REDUCERS)))
def test_loss_and_gradient_agree_with_the_reference(
  algorithm, correction, proximal, reducer
):
  loss, gradient, _ = _found(algorithm, correction, proximal)
  index = list(cases.REDUCERS).index(reducer)
  expected, slopes = reference.loss_and_gradient(
    _BATCH,
    cases.ALGORITHMS[algorithm][1],
    corrections=cases.CORRECTIONS[correction][1],
    start=proximal,
    shares=_reference_shares(reducer),
  )
  np.testing.assert_allclose(loss[0, index], expected, atol=1e-5, rtol=1e-5)
  rows = _by_sequence(gradient[0, index], "packed")
  np.testing.assert_allclose(
    np.concatenate(rows), np.concatenate(slopes), atol=1e-5, rtol=1e-5
  )


@pytest.mark.parametrize(_EACH, _products(refused=True))
def test_the_other_products_are_refused_in_one_line(
  algorithm, correction, proximal
):
  for reducer in cases.REDUCERS:
    with pytest.raises(types.InputError, match=_REFUSAL) as fault:
      _make(algorithm, correction, proximal, reducer)
    assert "\n" not in str(fault.value)


@_of_each
def test_c20_c29_c39_masked_tokens_neither_pull_nor_matter(
  algorithm, correction, proximal
):
  loss, gradient, _ = _found(algorithm, correction, proximal)
  packed, garbage = _at("packed"), _at("garbage")
  np.testing.assert_array_equal(loss[garbage], loss[packed])
  np.testing.assert_array_equal(gradient[garbage], gradient[packed])
  masks = np.asarray(cases.loss_inputs()["loss_mask"])[:, None]
  assert np.all(np.where(masks == 0, gradient, 0) == 0)
  assert np.all(np.isfinite(gradient)) and np.all(np.isfinite(loss))


@_of_each
def test_c44_order_numbers_and_rows_carry_no_meaning(
  algorithm, correction, proximal
):
  loss, gradient, _ = _found(algorithm, correction, proximal)
  packed = np.concatenate(_by_sequence(gradient[0], "packed"), axis=-1)
  for variant in ("moved", "alone"):
    at = _at(variant)
    np.testing.assert_allclose(loss[at], loss[0], atol=1e-6, rtol=1e-6)
    rows = _by_sequence(gradient[at], variant)
    same = np.concatenate([rows[n] for n in cases.numbers(variant)], axis=-1)
    np.testing.assert_allclose(same, packed, atol=1e-6, rtol=1e-6)


@_of_each
def test_c11_the_losses_of_parts_add_up(algorithm, correction, proximal):
  loss, gradient, _ = _found(algorithm, correction, proximal)
  parts = [_at(name) for name in cases.VARIANTS if "part" in name]
  np.testing.assert_allclose(loss[parts].sum(0), loss[0], atol=1e-6, rtol=1e-6)
  whole = np.moveaxis(gradient[0], 0, -1)
  cut = np.stack([cases.part(whole, number) for number in range(len(parts))])
  found = np.moveaxis(gradient[parts], 1, -1)
  np.testing.assert_allclose(found, cut, atol=1e-6)


@_of_each
def test_c26_on_policy_every_correction_is_one(algorithm, correction, proximal):
  loss, gradient, weights = _found(algorithm, correction, proximal)
  at = _at("agree")
  mask = np.asarray(cases.loss_inputs()["loss_mask"])[at]
  np.testing.assert_array_equal(weights[at], np.stack([mask] * 4))
  plain = _found(algorithm, "none", proximal)
  np.testing.assert_allclose(loss[at], plain[0][at], atol=1e-6)
  np.testing.assert_allclose(gradient[at], plain[1][at], atol=1e-6)


@_of_each
def test_c01_equal_rewards_have_no_gradient(algorithm, correction, proximal):
  loss, gradient, _ = _found(algorithm, correction, proximal)
  at = _at("equal")
  if algorithm in cases.SILENT:
    assert np.all(gradient[at] == 0)
  else:
    assert np.any(gradient[at] != 0)
  if algorithm in cases.SILENT - {"entropy"}:
    assert np.all(loss[at] == 0)


def test_corrections_act_on_some_tokens_and_not_on_all():
  for correction in set(cases.CORRECTIONS) - {"none"}:
    weights = _found("grpo", correction, "recomputed")[2][0, 0]
    mask = np.asarray(cases.loss_inputs()["loss_mask"])[0] > 0
    raw = _found("grpo", "token_mask", "recomputed")[2][0, 0]
    changed = weights[mask] != 1
    assert changed.any() and np.unique(weights[mask]).size > 1
    assert np.any(raw[mask] != 0)


def test_the_batch_has_all_kinds_of_groups():
  sizes = {}
  for one in _BATCH:
    sizes.setdefault(one.group, set()).add(one.rollout)
  assert {len(rollouts) for rollouts in sizes.values()} == {1, 2, 3, 4}
  assert any(np.isnan(one.reward) for one in _BATCH)
  assert len({one.rollout for one in _BATCH}) == len(_BATCH) - 1


def _nudged(i, t, by):
  new = list(_BATCH[i].new)
  new[t] += by
  one = dataclasses.replace(_BATCH[i], new=tuple(new))
  return [*_BATCH[:i], one, *_BATCH[i + 1 :]]


@pytest.mark.parametrize(
  "algorithm",
  [
    name
    for name, (_, words) in cases.ALGORITHMS.items()
    # Those whose gradient is, by design, not that of their loss.
    if words.region[0] != "cispo"
    and words.ratio != "sequence_token"
    and "unbiased" not in name
  ],
)
def test_the_gradient_of_the_reference_is_that_of_its_loss(algorithm):
  words = cases.ALGORITHMS[algorithm][1]
  shares, step = _reference_shares("sequence_mean"), 1e-6

  def of(batch):
    return reference.loss_and_gradient(batch, words, shares=shares)

  _, slopes = of(_BATCH)
  for i in range(0, len(_BATCH), 3):
    for t in range(len(_BATCH[i].new)):
      up, down = (of(_nudged(i, t, by))[0] for by in (step, -step))
      found = (up - down) / (2 * step)
      np.testing.assert_allclose(slopes[i][t], found, atol=1e-7)
