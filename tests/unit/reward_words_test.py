r"""Rewards for words and letters, and penalties; what earns what."""

import dataclasses
import functools
import time

import pytest

from jaxrl_post import types
from jaxrl_post.rewards import choice, code, math, number, shaping, text
from tests.unit import pool_test


def rollout(words: str) -> types.Rollout:
  return pool_test.rollout(text=words)


# -------------------------------------------------------------------- text


@pytest.mark.parametrize(
  ("raw", "plain"),
  [
    ("The  Eiffel Tower!", "eiffel tower"),
    ("a\tcat, an owl\nand the-dog", "cat owl and thedog"),
    ("\uff34\uff4f\uff4b\uff59\uff4f", "tokyo"),
    ("Stra\u00dfe", "strasse"),
    ("theatre", "theatre"),
    ("", ""),
  ],
)
def test_a_text_is_normalised(raw, plain):
  assert text.normalised(raw) == plain


@pytest.mark.parametrize(
  ("given", "reference", "right"),
  [
    ("the Eiffel Tower.", "Eiffel tower", 1),
    ("Eiffel", "Eiffel tower", 0),
    ("I think it is Paris", "Paris", 0),
    (r"I think: \boxed{Paris}.", "paris", 1),
    ("So.\n#### Paris", "Paris", 1),
    ("NYC", ["New York", "nyc"], 1),
    ("7", 7, 1),
    ("", "Paris", 0),
  ],
)
def test_texts_are_the_same_once_normalised(given, reference, right):
  assert text.same(rollout(given), reference) == right


@pytest.mark.parametrize(
  ("given", "reference", "share"),
  [
    ("the Eiffel tower", "Eiffel Tower", 1.0),
    # Two words in common, of three and two.
    ("big Eiffel tower", "Eiffel Tower", 2 * 2 / 5),
    ("tower tower", "tower", 2 * 1 / 3),
    ("x", ["a b c d", "x y"], 2 * 1 / 3),
    ("", "Paris", 0.0),
  ],
)
def test_overlap_is_f1_of_words(given, reference, share):
  assert text.overlap(rollout(given), reference) == pytest.approx(share)


@pytest.mark.parametrize("reference", [None, "", "the", [], ["x", None], {}])
def test_a_reference_without_words_is_refused(reference):
  for reward in (text.same, text.overlap):
    with pytest.raises(types.InputError, match="^reward text: expected a ref"):
      reward(rollout("x"), reference)


# ------------------------------------------------------------------ choice


@pytest.mark.parametrize(
  ("words", "letter"),
  [
    ("B", "B"),
    (" (b) ", "B"),
    ("**C**.", "C"),
    ("B) Paris", None),  # not said to be the answer
    (r"\boxed{B}", "B"),
    (r"\boxed{\text{E}}", "E"),
    (r"\boxed{\textbf{(D)}}", "D"),
    (r"\boxed{(B) Paris}", "B"),
    (r"\boxed{B. Paris}", "B"),
    (r"\boxed{A} no, \boxed{C}", "C"),
    (r"\boxed{a dog}", None),
    (r"\boxed{Berlin}", None),
    (r"\boxed{B", None),
    ("#### D", "D"),
    ("The answer is (C).", "C"),
    ("The answer is C because A and B are wrong.", "C"),
    ("Answer: **D**", "D"),
    ("answer is: option B.", "B"),
    ("The answer is A. No, the answer is B", "B"),
    ("the answer is a dog", None),
    ("The answer is Berlin.", None),
    ("I like A and B", None),
    ("K", None),
    ("", None),
  ],
)
def test_c80_a_letter_counts_where_it_is_said_to_be_the_answer(words, letter):
  assert choice.chosen(words) == letter


@pytest.mark.parametrize(
  ("reference", "right"),
  [("C", 1), ("(C)", 1), ("c.", 1), (2, 1), ("D", 0), (0, 0)],
)
def test_the_right_letter_or_its_place_earns_one(reference, right):
  assert choice.choice(rollout("The answer is (C)."), reference) == right


@pytest.mark.parametrize("reference", [None, "", "K", "Paris", 10, -1, 1.0])
def test_a_reference_that_is_no_letter_is_refused(reference):
  with pytest.raises(types.InputError, match="^reward choice: expected a lett"):
    choice.choice(rollout("A"), reference)


# ----------------------------------------------------------------- shaping


def of_tokens(*tokens: int) -> types.Rollout:
  completion = types.Completion(
    uid=0,
    tokens=tokens,
    logprobs=(0.0,) * len(tokens),
    versions=(0,) * len(tokens),
    finish="stop",
  )
  prompt = types.Prompt(uid=0, tokens=(1,), text="?", reference=None)
  return types.Rollout(
    prompt=prompt, completion=completion, temperature=1.0, text=""
  )


@pytest.mark.parametrize(
  ("length", "expected"),
  [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (140, -1)],
)
def test_an_answer_is_punished_softly_as_it_nears_the_limit(length, expected):
  reward = functools.partial(shaping.overlong, most=100, margin=20)
  assert reward(of_tokens(*range(length)), None) == expected


@pytest.mark.parametrize("margin", [0, -1, 101])
def test_a_margin_beyond_the_limit_is_refused(margin):
  with pytest.raises(types.InputError, match="0 < margin <= 100, got"):
    shaping.overlong(of_tokens(), None, most=100, margin=margin)


@pytest.mark.parametrize(
  ("tokens", "size", "expected"),
  [
    ((1, 2, 3, 4), 2, 0.0),
    ((1, 1, 1, 1), 2, -2 / 3),
    ((1, 2, 1, 2, 1), 2, -2 / 4),
    ((1, 1), 1, -1 / 2),
    ((1, 1), 3, 0.0),
    ((), 2, 0.0),
  ],
)
def test_a_repeated_run_is_punished_by_its_share(tokens, size, expected):
  made = shaping.repetition(of_tokens(*tokens), None, size=size)
  assert made == pytest.approx(expected)


def test_a_run_of_no_token_is_refused():
  with pytest.raises(types.InputError, match="size >= 1, got 0"):
    shaping.repetition(of_tokens(), None, size=0)


# --------------------------------------------------------- all that read text

WIDE = 10**5
BLANK = " " * WIDE


@pytest.mark.parametrize(
  "words",
  [
    "answer:" + "*" * WIDE,
    "answer" + " :" * WIDE,
    f"answer is A{BLANK}x",
    "\\text{" * WIDE,
    f"\\boxed{BLANK}x",
    f"\\boxed{{1{BLANK}1}}",
    f"#### 1{BLANK}x",
    f"```{BLANK}",
    "```" + "a" * WIDE,
    "1,111" * WIDE,
  ],
  ids=lambda words: words[:12],
)
def test_a_long_text_is_read_in_linear_time(words):
  given = rollout(words)
  began = time.process_time()
  choice.choice(given, "B")
  number.number(given, "1")
  text.same(given, "1")
  math.correct(given, "1")
  code.program(words)
  assert time.process_time() - began < 5


def test_what_an_environment_says_is_neither_long_nor_said_again():
  made = of_tokens(1, 2, 9, 9, 9, 9, 1, 2, 1, 2)
  versions = (0, 0, -1, -1, -1, -1, 1, 1, 1, 1)
  completion = dataclasses.replace(made.completion, versions=versions)
  made = dataclasses.replace(made, completion=completion)
  assert shaping.overlong(made, None, most=8, margin=4) == -0.5
  # Runs 1 2; 1 2, 2 1, 1 2: none goes over what was said in between.
  assert shaping.repetition(made, None, size=2) == -1 / 4
