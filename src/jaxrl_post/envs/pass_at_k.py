"""What several completions of one prompt say: pass@k and majority vote."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxrl_post import types

_Z = 1.96  # of 95 %, two-sided


@dataclasses.dataclass(frozen=True)
class Samples:
  """Several completions of each prompt of an evaluation.

  Attributes:
    number: how many.
    success: whether a scored rollout solves its prompt, by `rollout.earned` for
      example; not asked of one whose reward is missing, which does not.
    answer: of a completion's text, for the majority vote; None abstains.
      Without this there is no vote.
  """

  number: int
  success: Callable[[types.Rollout], bool]
  answer: Callable[[str], str | None] | None = None

  def __post_init__(self) -> None:
    if type(self.number) is not int or self.number < 1:
      raise types.InputError(
        f"evaluation.samples.number: expected >= 1, got {self.number!r}. "
        "Correct the value."
      )
    for name in ("success", "answer"):
      value = getattr(self, name)
      if not callable(value) and (value is not None or name == "success"):
        raise types.InputError(
          f"evaluation.samples.{name}: expected a function, got {value!r:.99}. "
          "Correct it."
        )


def estimate(number: int, right: int, k: int) -> float:
  """Estimates the chance that one of k completions is right.

  Without bias, from draws without replacement: 1 - C(n - c, k) / C(n, k) (Chen
  et al. 2021, arXiv 2107.03374, equation 1).

  Args:
    number: n completions that were made.
    right: c of them that were right.
    k: at most n.

  Returns:
    In [0, 1].

  Raises:
    ValueError: the three do not fit together.
  """
  if not (0 <= right <= number and 1 <= k <= number):
    raise ValueError(f"pass@{k} of {right} in {number}: impossible")
  return 1.0 - math.comb(number - right, k) / math.comb(number, k)


def interval(shares: Sequence[float]) -> tuple[float, float]:
  """Returns the 95 % interval of the mean of a share over prompts.

  Wilson's (1927), whose count is that of independent draws with the same
  standard error: it stays in [0, 1], and has a width when all prompts agree.

  Args:
    shares: of each prompt, in [0, 1]; at least one.
  """
  count = float(len(shares))
  mean = sum(shares) / count
  if count > 1:
    error = sum((x - mean) ** 2 for x in shares) / (count - 1) / count
    # A share varies less than a coin does, never more.
    count = max(count, mean * (1 - mean) / error) if error > 0 else count
  widened = 1 + _Z**2 / count
  middle = (mean + _Z**2 / (2 * count)) / widened
  half = mean * (1 - mean) / count + _Z**2 / (4 * count**2)
  half = _Z * math.sqrt(half) / widened
  return max(0.0, middle - half), min(1.0, middle + half)


def majority(
  answers: Sequence[str | None], solved: Sequence[bool]
) -> bool | None:
  """Says whether the most frequent answer to a prompt is right.

  Args:
    answers: of each completion, in the order of their uids; None abstains.
    solved: whether each completion is right.

  Returns:
    Whether the first completion with that answer is right; of answers that are
    equally frequent the one that came first counts. None without any answer.
  """
  votes = collections.Counter(x for x in answers if x is not None)
  if not votes:
    return None
  chosen = votes.most_common(1)[0][0]  # of equals the one that came first
  return solved[answers.index(chosen)]


def metrics(
  samples: Samples, groups: Sequence[Sequence[types.Rollout]]
) -> dict[str, float]:
  """Sums up the scored rollouts of an evaluation.

  Args:
    samples: how they were asked for.
    groups: `samples.number` rollouts of each prompt.

  Returns:
    `pass@<k>` for powers of two up to the number, and for the number; with a
    vote `majority@<number>`, where a prompt without an answer is not solved; of
    each also `<name>_low` and `<name>_high`, the ends of its 95 % interval over
    prompts.

  Raises:
    RunError: `success` or `answer` returned something else.
  """
  number = samples.number
  solved = [[_solved(samples, r) for r in group] for group in groups]
  ks = sorted({2**i for i in range(number.bit_length())} | {number})
  shares = {
    f"pass@{k}": [estimate(number, sum(group), k) for group in solved]
    for k in ks
  }
  if samples.answer is not None:
    shares[f"majority@{number}"] = [
      float(majority([_answer(samples, r) for r in group], right) or False)
      for group, right in zip(groups, solved, strict=True)
    ]
  found = {}
  for name, each in shares.items():
    found[name] = sum(each) / len(each)
    found[f"{name}_low"], found[f"{name}_high"] = interval(each)
  return found


def _solved(samples: Samples, rollout: types.Rollout) -> bool:
  if math.isnan(rollout.reward):
    return False
  found = samples.success(rollout)
  if not isinstance(found, bool):
    raise types.RunError(
      "evaluation.samples.success: expected True or False for a rollout, got "
      f"{found!r}"
    )
  return found


def _answer(samples: Samples, rollout: types.Rollout) -> str | None:
  assert samples.answer is not None
  found = samples.answer(rollout.text)
  if not isinstance(found, str | None):
    raise types.RunError(
      "evaluation.samples.answer: expected text or None for a completion, got "
      f"{found!r}"
    )
  return found
