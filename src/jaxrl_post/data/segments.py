"""The training rows of a rollout: one, or one for each prompt that it had."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxrl_post import types


@types.host_record
class Row:
  """What one row trains of a rollout.

  Attributes:
    prompt: ids that the engine was given.
    begin: of its tokens, in the completion of the rollout.
    end: likewise, behind the last one.
  """

  prompt: tuple[int, ...]
  begin: int
  end: int


def split(rollout: types.Rollout) -> tuple[Row, ...]:
  """Returns the rows of a rollout, in the order in which they were sampled.

  Returns:
    One with the prompt and all tokens, if the conversation never began anew;
    else one more for each of the completion's segments. Their tokens end to end
    are those of the completion.
  """
  made = rollout.completion
  begins = (0, *(begin for begin, _ in made.segments), len(made.tokens))
  prompts = (rollout.prompt.tokens, *(prompt for _, prompt in made.segments))
  spans = zip(prompts, itertools.pairwise(begins), strict=True)
  return tuple(Row(prompt=p, begin=b, end=e) for p, (b, e) in spans)


@types.host_record
class Part:
  """A sequence of a batch.

  Attributes:
    group: number of its group.
    rollout: that it is of, but with its own prompt and tokens only.
    earned: by each token, beside the reward.
    newest: version among all tokens of the rollout; -1 where none has one.
  """

  group: int
  rollout: types.Rollout
  earned: Sequence[float]
  newest: int


def parts(
  group: int, rollout: types.Rollout, *, newest_only: bool
) -> Iterator[Part]:
  """Yields the sequences of a rollout, in the order of `split`.

  Args:
    group: number of its group.
    rollout: scored.
    newest_only: whether only tokens of the newest version train.

  Raises:
    ValueError: something is not known of each token.
  """
  made = rollout.completion
  for name in ("logprobs", "versions"):
    if len(getattr(made, name)) != len(made.tokens):
      raise ValueError(
        f"pack: rollout {made.uid}: expected {name} of each of its "
        f"{len(made.tokens)} tokens, got {len(getattr(made, name))}"
      )
  newest = max(made.versions, default=-1)
  earned = _earned(made, newest if newest_only else 0)
  for row in split(rollout):
    span = slice(row.begin, row.end)
    completion = types.Completion(
      uid=made.uid,
      tokens=made.tokens[span],
      logprobs=made.logprobs[span],
      versions=made.versions[span],
      finish=made.finish,
      # Refused with `renewal`, by which alone a conversation begins anew.
      routing=None if made.segments else made.routing,
    )
    prompt = dataclasses.replace(rollout.prompt, tokens=row.prompt)
    part = dataclasses.replace(rollout, prompt=prompt, completion=completion)
    yield Part(group=group, rollout=part, earned=earned[span], newest=newest)


def _earned(made: types.Completion, least: int) -> list[float]:
  """Returns what each token has earned: a turn's reward is at its last one.

  Where that does not train, at the next that does, or else the last: no reward
  is lost. Tokens of versions from `least` on train.
  """
  earned = [0.0] * len(made.tokens)
  trained = [i for i, v in enumerate(made.versions) if v >= least]
  for turn in made.turns:
    later = (i for i in trained if i >= turn.end - 1)
    earned[next(later, trained[-1])] += turn.reward
  return earned


def begin_of_newest(made: types.Completion) -> int:
  """Returns where the newest row begins, in the tokens of a completion."""
  return made.segments[-1][0] if made.segments else 0


def joined(
  before: types.Completion | None, made: types.Completion
) -> types.Completion:
  """Puts a row behind those before it, of which there may be none.

  Args:
    before: their completion, whose last segment begins behind its tokens.
    made: what the engine made for this row, whatever its uid.

  Returns:
    The completion of all, with the uid and the segments of `before`.
  """
  if before is None:
    return made
  return types.Completion(
    uid=before.uid,
    tokens=before.tokens + made.tokens,
    logprobs=before.logprobs + made.logprobs,
    versions=before.versions + made.versions,
    finish=made.finish,
    top_logprobs=before.top_logprobs + made.top_logprobs,
    prompt_logprobs=before.prompt_logprobs,
    segments=before.segments,
  )
