"""Which values sampling takes, which tokens they leave, and at what work."""

import math

import hypothesis
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxrl_post import types
from jaxrl_post.sampling import pick
from tests.reference import truncation

_PROBS = np.array([0.5, 0.3, 0.15, 0.05])
_ALLOWED = jax.jit(pick.allowed)


def _allowed(probs=_PROBS, top_k=0, top_p=1.0, min_p=0.0):
  padded = np.pad(np.asarray(probs), (0, 30 - len(probs)))
  found = _ALLOWED(
    jnp.asarray(padded, jnp.float32)[None],
    jnp.array([top_k], jnp.int32),
    jnp.array([top_p], jnp.float32),
    jnp.array([min_p], jnp.float32),
  )
  return set(np.flatnonzero(found[0]).tolist())


@pytest.mark.parametrize(
  ("top_p", "kept"),
  [
    (1e-42, {0}),
    (0.01, {0}),
    (0.49, {0}),
    (0.51, {0, 1}),
    (0.79, {0, 1}),
    (0.81, {0, 1, 2}),
    (1.0, {0, 1, 2, 3}),
  ],
)
def test_c45_top_p_keeps_tokens_with_less_than_p_before_them(top_p, kept):
  assert _allowed(top_p=top_p) == kept
  assert _allowed(_PROBS * 7, top_p=top_p) == kept


@pytest.mark.parametrize(
  ("top_k", "kept"),
  [
    (1, {0}),
    (2, {0, 1}),
    (4, {0, 1, 2, 3}),
    (100, {0, 1, 2, 3}),
    (2**31 - 1, {0, 1, 2, 3}),
    (0, {0, 1, 2, 3}),
  ],
)
def test_c45_top_k_keeps_the_k_most_probable(top_k, kept):
  assert _allowed(top_k=top_k) == kept


@pytest.mark.parametrize(
  ("min_p", "kept"),
  [
    (0.0, {0, 1, 2, 3}),
    (0.09, {0, 1, 2, 3}),
    (0.11, {0, 1, 2}),
    (0.29, {0, 1, 2}),
    (0.31, {0, 1}),
    (0.59, {0, 1}),
    (0.61, {0}),
    (0.999, {0}),
  ],
)
def test_c45_min_p_compares_with_the_most_probable(min_p, kept):
  assert _allowed(min_p=min_p) == kept


def test_c45_of_equal_tokens_the_smaller_ids_are_kept():
  probs = np.array([0.1, 0.2, 0.2, 0.3, 0.2])
  assert _allowed(probs, top_k=2) == {1, 3}
  assert _allowed(probs, top_k=3) == {1, 2, 3}
  assert _allowed(probs, top_p=0.31) == {1, 3}
  assert _allowed(probs, top_p=0.6) == {1, 2, 3}
  assert _allowed(np.full(8, 0.125), top_p=0.3) == {0, 1, 2}
  assert _allowed(np.full(8, 0.125), top_k=5, top_p=0.7) == {0, 1, 2, 3, 4}


def test_each_rule_reads_the_whole_distribution():
  assert _allowed(top_k=2, top_p=0.79) == {0, 1}
  assert _allowed(top_k=2, top_p=0.6) == {0, 1}  # 0.5 / 0.8 would be above.
  assert _allowed(top_k=3, top_p=0.79, min_p=0.61) == {0}


@hypothesis.given(
  ranks=st.lists(st.integers(0, 12), min_size=1, max_size=30),
  top_k=st.integers(0, 35),
  top_p=st.integers(1, 41),
  min_p=st.integers(0, 40),
)
@hypothesis.settings(max_examples=150)
def test_allowed_is_what_going_down_the_ranks_gives(ranks, top_k, top_p, min_p):
  # Quarters add up exactly in both; odd parts keep p off the exact ties.
  probs = np.array(ranks) / 4.0
  probs[0] += 0.25
  top_p = 1.0 if top_p == 41 else top_p / 41.37
  min_p = min_p / 41.37
  found = _allowed(probs, top_k, top_p, min_p)
  assert found == truncation.allowed(probs, top_k, top_p, min_p)
  assert found


_REFUSED = [
  ({"top_p": 0.0}, "top_p: expected in (0, 1]"),
  ({"top_p": 1.1}, "top_p: expected in (0, 1]"),
  ({"top_k": -1}, "top_k: expected >= 0"),
  ({"temperature": -1.0}, "temperature: expected in [0, 1e+06]"),
  ({"temperature": math.inf}, "temperature: expected in [0, 1e+06]"),
  ({"temperature": math.nan}, "temperature: expected in [0, 1e+06]"),
  ({"min_p": 1.0}, "min_p: expected in [0, 1)"),
  ({"min_p": -0.1}, "min_p: expected in [0, 1)"),
  ({"min_p": math.nan}, "min_p: expected in [0, 1)"),
  ({"max_tokens": 0}, "max_tokens: expected >= 1"),
  ({"min_tokens": -1}, "min_tokens: expected in [0, max_tokens = 32]"),
  ({"min_tokens": 33}, "min_tokens: expected in [0, max_tokens = 32], got 33"),
  ({"stop_strings": ("a", "")}, "stop_strings: expected non-empty"),
  ({"stop_strings": ("a\ufffd",)}, "stop_strings: expected non-empty"),
  ({"logit_bias": ((-1, 1.0),)}, "logit_bias: expected ids >= 0"),
  ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias: expected no id twice"),
  ({"logit_bias": ((1, math.inf),)}, "logit_bias: expected values within"),
  ({"logit_bias": ((1, -math.inf),)}, "logit_bias: expected values within"),
  ({"logit_bias": ((0, 0.0), (1, math.nan))}, "logit_bias: expected values"),
  ({"logit_bias": ((1, 1e39),)}, "logit_bias: expected values within"),
  ({"forbidden_ids": (3, -2)}, "forbidden_ids: expected ids >= 0"),
  ({"top_logprobs": -1}, "top_logprobs: expected >= 0"),
  ({"seed": -1}, "seed: expected in [0, 2**31)"),
  ({"seed": 2**31}, "seed: expected in [0, 2**31)"),
]


@pytest.mark.parametrize(("options", "message"), _REFUSED)
def test_c45_values_out_of_range_are_refused(options, message):
  with pytest.raises(types.InputError) as caught:
    types.SamplingParams(**options)
  assert str(caught.value).startswith(f"sampling.{message}")
  assert "\n" not in str(caught.value)


def test_c45_values_at_the_edge_are_taken():
  types.SamplingParams(
    min_p=0.0,
    max_tokens=3,
    min_tokens=3,
    stop_strings=("a", " "),
    logit_bias=((0, -1e30), (1, 1e30)),
    forbidden_ids=(0, 0),
    top_logprobs=5,
    prompt_logprobs=True,
    seed=2**31 - 1,
  )
  types.SamplingParams(min_p=0.999, seed=0, temperature=0.0)


def test_controls_of_a_request_fill_rows_alike():
  sampling = types.SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    min_tokens=2,
    stop_ids=(7, 8),
    logit_bias=((4, 1.5), (5, 2.5)),
    forbidden_ids=(5, 0),
  )
  controls = pick.controls_for(sampling, 2, 3, 4)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(controls))
  assert controls.stop_ids.tolist() == [[7, 8, -1]] * 2
  assert controls.bias_ids.tolist() == [[4, 5, 0, -1]] * 2
  assert controls.bias.tolist() == [[1.5, -math.inf, -math.inf, 0.0]] * 2
  for name in ("temperature", "top_k", "top_p", "min_p", "min_tokens"):
    value = getattr(sampling, name)
    np.testing.assert_allclose(getattr(controls, name), [value] * 2)


def test_c45_a_top_k_beyond_int32_keeps_all():
  sampling = types.SamplingParams(top_k=2**40)
  assert pick.controls_for(sampling, 1, 0, 0).top_k.tolist() == [2**31 - 1]


def test_idle_controls_have_the_shapes_and_buffers_of_their_own():
  idle = pick.idle_controls(2, 3, 4)
  plain = pick.controls_for(types.SamplingParams(), 2, 3, 4)
  for a, b in zip(jax.tree.leaves(idle), jax.tree.leaves(plain), strict=True):
    assert (a.dtype, a.shape) == (b.dtype, b.shape) and (a == b).all()
  places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(idle)}
  assert len(places) == len(jax.tree.leaves(idle))


def _primitives(jaxpr, inside=()):
  """Yields the names of all operations, with the conditionals around them."""
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    yield name, inside
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from _primitives(
        inner, (*inside, name) if name in ("cond",) else inside
      )


def test_rows_that_use_nothing_run_no_search_and_no_bias():
  def trace(num_bias, num_stop_ids):
    made = jax.make_jaxpr(lambda *args: pick.pick(*args, num_top=0))(
      jnp.zeros((2, 64)),
      jax.random.split(jax.random.key(0), 2),
      pick.idle_controls(2, num_stop_ids, num_bias),
      jnp.zeros(2, jnp.int32),
    )
    return list(_primitives(made.jaxpr))

  found = trace(3, 2)
  work = ("scatter-add", "scatter", "while", "scan", "sort", "argmax", "top_k")
  around = {name: inside for name, inside in found if name in work}
  assert {"scatter-add", "scatter"} <= around.keys()
  assert {"while", "scan"} & around.keys()
  assert "sort" not in around
  assert all("cond" in inside for inside in around.values())
  none = {name for name, _ in trace(0, 0)}
  assert not none & {"scatter-add", "scatter"}
