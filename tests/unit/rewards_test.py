r"""Rewards: what earns 1 and what does not."""

import concurrent.futures
import functools
import pickle
import threading

import pytest

from jaxrl_post import types
from jaxrl_post.data import gym as gym_data
from jaxrl_post.rewards import answer, combine, exact, gym, number
from jaxrl_post.rewards import format as format_reward
from jaxrl_post.rewards import math as math_reward
from jaxrl_post.rewards import pool as pools


def rollout(text: str, reference: object = None) -> types.Rollout:
  prompt = types.Prompt(uid=0, tokens=(1,), text="?", reference=reference)
  completion = types.Completion(
    uid=0, tokens=(), logprobs=(), versions=(), finish="stop"
  )
  return types.Rollout(
    prompt=prompt, completion=completion, temperature=1.0, text=text
  )


def test_exact_is_one_iff_the_stripped_texts_are_equal():
  assert exact.exact(rollout(" 42\n"), 42) == 1.0
  assert exact.exact(rollout("a b"), " a b") == 1.0
  assert exact.exact(rollout("42.0"), 42) == 0.0
  assert exact.exact(rollout("A"), "a") == 0.0


def test_format_matches_the_whole_completion():
  matches = functools.partial(
    format_reward.matches, pattern=r"<think>.*</think>\d+"
  )
  assert matches(rollout("<think>a\nb</think>7\n"), None) == 1.0
  assert matches(rollout("so <think>a</think>7"), None) == 0.0
  assert matches(rollout("<think>a</think>7 or"), None) == 0.0
  assert pickle.loads(pickle.dumps(matches))(rollout("7"), None) == 0.0


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("no mark", None),
    ("", None),
    (r"\boxed{3} then \boxed{4}", "4"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed {a}", "a"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{12", ""),
    (r"\boxed{3} then \boxed{4", ""),
    (r"\boxed{}", ""),
    (r"in \boxed. It is \boxed{2}, \boxed.", "2"),
    ("#### 42\nmore 7", "42"),
    ("#### 42 and more", "42"),
    ("#### 42" + "x" * 480, "42"),
    ("#### 42.", "42"),
    ("#### -1,234.5", "-1,234.5"),
    ("#### 2x + 1", "2x + 1"),
    (r"#### 2\frac{2}{3}", r"2\frac{2}{3}"),
    (r"#### \frac{1}{2}", r"\frac{1}{2}"),
    (r"\boxed{1} #### 2", "2"),
    (r"#### 2 \boxed{1}", "1"),
  ],
)
def test_the_answer_is_what_follows_the_last_mark(text, found):
  assert answer.marked(text) == found


C80 = [
  ("4", r"first \boxed{3}, so \boxed{4}", 1),
  ("3", r"first \boxed{3}, so \boxed{4}", 0),
  ("840", r"\boxed{840}. Let me explain. Final: \boxed{840}", 1),
  ("42", "#### 42" + " and so on" * 48, 1),
  ("42", "#### 42" + "x" * 480, 1),
  ("18", "She makes $18 a day.\n#### 18", 1),
  ("12", r"\boxed{12", 0),
  ("7", r"\boxed{}", 0),
  ("7", "", 0),
]


@pytest.mark.parametrize(
  ("gold", "text", "right"),
  [
    *C80,
    ("42", "The answer is 42.", 1),
    ("42", "42 or 43", 0),
    (42, "42", 1),
    (2.50, "2.5", 1),
    (1e-7, "0.0000001", 1),
    (7, "1e-7", 0),
    ("So 6 * 7 = 42.\n#### 42", "It is 42", 1),
    ("1000", r"\boxed{1,000}", 1),
    ("1,000", r"\boxed{1\,000}", 1),
    ("1000", r"\boxed{1{,}000}", 1),
    ("1000000", "1,000,000", 1),
    ("2.5", r"\boxed{\$2.50}", 1),
    ("-5", "-5", 1),
    ("-5", "5", 0),
    ("-5", "\N{MINUS SIGN}5", 1),
    ("3", "10-3", 1),
    ("4", r"\boxed{004}", 1),
    ("2", r"\boxed{2.0}", 1),
    ("0.5", ".5", 1),
    ("5", r"\boxed{5\text{ cm}}", 1),
    ("90", r"\boxed{90^\circ}", 1),
    ("1", r"\boxed{\frac{1}{2}}", 0),
    ("2", r"\boxed{\frac{1}{2}}", 0),
    ("1", r"\boxed{1/2}", 0),
    ("2", "the answer is 1/2", 0),
    ("10", r"\boxed{10^2}", 0),
    ("0.3333", "0.33333", 0),
    ("7", "7" * 5000, 0),
    ("7", "no digit", 0),
  ],
)
def test_number_compares_numbers(gold, text, right):
  assert number.number(rollout(text), gold) == right


def test_number_refuses_a_reference_without_a_number():
  with pytest.raises(types.InputError, match="got 'E'"):
    number.number(rollout("4"), "E")


@pytest.mark.parametrize(
  ("gold", "given", "right"),
  [
    ("1000", "1,000", 1),
    ("1/2", r"\frac12", 1),
    ("0.5", r"\frac{1}{2}", 1),
    (r"\frac{1}{2}", "0.5", 1),
    ("1/2", r"\frac{2}{4}", 1),
    ("0.5", r"50\%", 1),
    ("0.5", "50", 0),
    ("5", r"5\text{ cm}", 1),
    ("90", r"90^\circ", 1),
    ("2.5", r"\$2.50", 1),
    ("4", "004", 1),
    ("2", "2.0", 1),
    ("-3/4", r"-\dfrac{3}{4}", 1),
    ("-5", "5", 0),
    ("8/3", r"2\frac{2}{3}", 1),
    ("2", r"2\frac{2}{3}", 0),
    # The same class, other forms.
    ("1000", r"1\,000", 1),
    ("90", "90\N{DEGREE SIGN}", 1),
    ("3", "3.", 1),
    ("8/3", "2 2/3", 1),
    ("1/2", "$1/2$", 1),
    ("1/2", r"\(\frac{1}{2}\)", 1),
    ("5", r"5\,\text{cm}^2", 1),
    ("12", "x = 12", 1),
    ("x^2-1", "(x-1)(x+1)", 1),
    ("(1, 2)", "(2, 1)", 0),
    (r"\{1, 2\}", r"\{2, 1\}", 1),
    ("silent", "listen", 0),
    ("Yes", r"\text{(yes)}", 1),
    (0.5, r"\frac{1}{2}", 1),
    (r"So it is \boxed{7}", "7", 1),
    ("18 apples.\n#### 18", "18", 1),
  ],
)
def test_c78_everyday_forms_of_an_answer(gold, given, right):
  assert math_reward.correct(rollout(rf"\boxed{{{given}}}"), gold) == right


@pytest.mark.parametrize(
  ("gold", "text", "right"),
  [
    *C80,
    ("1/2", r"\boxed{\frac{1}{2}}", 1),
    ("E", r"\boxed{\text{E}}", 1),
    ("A", r"\boxed{\text{E}}", 0),
    ("7", "7", 0),  # an answer has to be marked
    ("7", r"\boxed{" + "1+" * 200 + "1}", 0),
  ],
)
def test_c80_the_last_marked_answer_counts(gold, text, right):
  assert math_reward.correct(rollout(text), gold) == right


def test_c82_math_scores_in_a_thread_as_in_the_main_thread():
  given = rollout(r"\boxed{0.5}")
  assert math_reward.correct(given, "1/2") == 1.0
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    threaded = pool.submit(
      lambda: (
        threading.current_thread() is threading.main_thread(),
        math_reward.correct(given, "1/2"),
      )
    )
    assert threaded.result(timeout=60) == (False, 1.0)


def test_c82_math_scores_in_a_pool_and_endless_answers_end():
  cfg = pools.Rewards(
    functions=(math_reward.correct,), timeout_s=3.0, on_failure="mask"
  )
  with pools.Pool(cfg) as pool:
    futures = [
      pool.submit(rollout(rf"\boxed{{{given}}}", "1/2"))
      for given in ("0.5", "9^{9^{9^9}}", "0.4")
    ]
    scored = [f.result(timeout=60) for f in futures]
  assert [s.failure for s in scored] == ["", "timeout after 3 s", ""]
  assert (scored[0].reward, scored[2].reward) == (1.0, 0.0)


def test_math_refuses_an_empty_reference():
  with pytest.raises(types.InputError, match="got ''"):
    math_reward.correct(rollout(r"\boxed{4}"), "")


def test_gym_scores_by_the_rules_of_the_task():
  source = gym_data.Gym(name="basic_arithmetic", size=2, seed=0)
  entry = source.load()[0].reference
  right = entry["answer"]
  assert gym.solved(rollout(right), entry) == 1.0
  tagged = f"I think <answer>0</answer>, no: <answer>{right}</answer>. Done"
  assert gym.solved(rollout(tagged), entry) == 1.0
  assert gym.solved(rollout("nothing"), entry) == 0.0
  with pytest.raises(types.InputError, match="got '4'"):
    gym.solved(rollout("4"), "4")


def test_functions_have_distinct_names():
  one = functools.partial(format_reward.matches, pattern="a")
  two = functools.partial(format_reward.matches, pattern="b")
  names = combine.names((exact.exact, one, two))
  assert names == ("exact", "matches", "matches_2")


def test_the_reward_is_the_weighted_sum_and_the_parts_are_unweighted():
  scores = (combine.read("a", 2), combine.read("b", {"x": 1.0, "y": True}))
  scored = combine.combine(rollout(""), scores, (0.5, 3.0))
  assert scored.reward == 0.5 * 2 + 3 * (1 + 1)
  assert scored.parts == {"a": 2.0, "x": 1.0, "y": 1.0}
  assert scored.failure == ""


def test_two_parts_of_one_name_are_refused():
  scores = (combine.read("a", 1.0), combine.read("b", {"a": 1.0}))
  with pytest.raises(types.InputError, match="'a' from two functions"):
    combine.combine(rollout(""), scores, (1.0, 1.0))


@pytest.mark.parametrize(
  ("weights", "values", "got"),
  [
    ((1e10, 1.0), (1e10, 0.0), "1e+20"),
    ((1.0, 1.0), (9e14, 9e14), "1.8e+15"),
    ((1e308, -1e308), (1e15, 1e15), "inf"),
  ],
)
def test_weights_that_make_a_reward_too_large_are_told(weights, values, got):
  scores = [
    combine.Score(parts={name: v}) for name, v in zip("ab", values, strict=True)
  ]
  with pytest.raises(types.InputError) as error:
    combine.combine(rollout(""), scores, weights)
  told = "rewards.weights: expected weighted rewards from -1e+15 to 1e+15"
  assert str(error.value).startswith(told)
  assert f"got {got}. Lower" in str(error.value)
