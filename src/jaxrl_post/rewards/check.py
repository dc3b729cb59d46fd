"""A contract test for a reward of one's own.

    python -m jaxrl_post.rewards.check FILE.py:FUNCTION --example='{...}'

Asks the function about ordinary and about odd completions, in a worker process
as a run does, and prints what came of each as it comes. Exit code 0: it keeps
the contract; 1: it does not, or gave no reward at all; 2: the input was wrong,
or no worker came up with it.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.rewards import combine, pool, probe

_KEYS = {"prompt", "completion", "reference", "reward"}
_LONG = 200_000
_WIDE = 20_000
# So many calls one after the other that end their worker, which takes seconds
# to come up again, are enough.
_MOST_ENDED = 3
_ODD = {
  "empty": "",
  "space": " \n\t\n ",
  "long": "word " * (_LONG // 5),
  "one line": "9" * _LONG,
  "unicode": "\u0661\u00bd \u2212\u221e \U0001f600 e\u0301 \u202eabc",
  "control": "half \ufffd a character \x00 and \x1b[31m red",
  "open": "\\boxed{1 <answer> ```python\n((((",
  "braces": "{}{0}{reference} %s %(x)s \\1 $x",
  "json": '{"a": [null, NaN]}',
  # Expressions that try each split of a run take seconds, or hours, here.
  "stars": "answer:" + "*" * _WIDE,
  "blanks": "```" + " " * _WIDE,
  "blanks in a box": "\\boxed{1" + " " * _WIDE + "1}",
}


@types.host_record
class Case:
  """A question to a reward.

  Attributes:
    name: for people.
    rollout: with the reference in its prompt.
    expected: its reward; None where any will do.
    strict: whether a failure breaks the contract; otherwise it is told only.
  """

  name: str
  rollout: types.Rollout
  expected: float | None = None
  strict: bool = True


@types.host_record
class Verdict:
  """What came of a case.

  Attributes:
    name: of the case.
    reward: NaN when there is none.
    said: failure, parts, or what is wrong.
    holds: whether that is within the contract.
    failed: whether the function failed, within the contract or not.
  """

  name: str
  reward: float
  said: str
  holds: bool
  failed: bool = False


def load(target: str) -> Callable[..., Any]:
  """Loads a reward.

  Args:
    target: `FILE.py:FUNCTION` or `MODULE:FUNCTION`.

  Returns:
    The function, which may be a partial.

  Raises:
    types.InputError: there is no such file, module or function, or importing
      it raised, whatever it was.
  """
  place, _, name = target.rpartition(":")
  path = pathlib.Path(place)
  try:
    if path.suffix == ".py":
      spec = importlib.util.spec_from_file_location(
        f"jaxrl_post_checked_{path.stem}", path.resolve()
      )
      assert spec is not None and spec.loader is not None
      module = importlib.util.module_from_spec(spec)
      sys.modules[spec.name] = module
      spec.loader.exec_module(module)
    else:
      module = importlib.import_module(place)
    function = getattr(module, name)
  except KeyboardInterrupt:
    raise
  except BaseException as e:  # SystemExit too: a script, and no module
    raise types.InputError(
      f"{target}: expected FILE.py:FUNCTION or MODULE:FUNCTION, got "
      f"{combine.one_line(f'{type(e).__name__}: {e}')}. Correct it."
    ) from e
  if not callable(function):
    raise types.InputError(
      f"{target}: expected a function, got a {type(function).__name__}. "
      "Name another."
    )
  return function


def cases(example: dict[str, Any]) -> list[Case]:
  """Makes the questions.

  Args:
    example: with `prompt`, `completion`, `reference`, and the `reward` that is
      expected, of which all may be missing.

  Returns:
    The example, if it has a completion; odd completions with its reference,
    which may not fail; and odd references, which are told only.
  """
  completion, reference = example.get("completion"), example.get("reference")
  # Without a reference to go by, any refusal is in order.
  given = "reference" in example
  made: list[Case] = []
  if completion is not None:
    made.append(
      Case(
        name="example",
        rollout=_rollout(example, completion, reference),
        expected=example.get("reward"),
      )
    )
  for name, text in _ODD.items():
    rollout = _rollout(example, text, reference)
    made.append(Case(name=name, rollout=rollout, strict=given))
  for name, odd in (("None", None), ("empty", ""), ("list", [1, {"a": None}])):
    rollout = _rollout(example, completion or "42", odd)
    made.append(Case(name=f"reference {name}", rollout=rollout, strict=False))
  return [_numbered(case, uid) for uid, case in enumerate(made)]


def check(
  function: Callable[..., Any],
  example: dict[str, Any],
  *,
  timeout_s: float = 10.0,
  memory_mb: int | None = None,
) -> Iterator[Verdict]:
  """Asks a reward all questions, one by one, and then all at once.

  Args:
    function: the reward.
    example: as `cases` takes it.
    timeout_s: longest call, in seconds.
    memory_mb: as `pool.Rewards` has it.

  Yields:
    A verdict a case, as it comes; after the first with a reward, one on whether
    it is scored alike again; then one on whether a batch gives what single
    calls gave. Where calls end their worker one after the other, or no case had
    a reward, the last verdict says so.

  Raises:
    types.InputError: a setting is wrong, or no worker can get the function.
    types.RunError: a worker did not start, as its import raises there.
  """
  asked = cases(example)
  cfg = pool.Rewards(
    functions=(function,),
    timeout_s=timeout_s,
    memory_mb=memory_mb,
    on_failure="mask",
  )
  cfg = dataclasses.replace(
    cfg, functions=(probe.wrapped(function),), batch=len(asked)
  )
  kept: list[tuple[Case, Verdict]] = []
  given = ended = 0
  with pool.Pool(cfg) as workers:
    for case in asked:
      verdict, has_ended = _verdict(case, *_asked(workers, case))
      yield verdict
      ended = ended + 1 if has_ended else 0
      if ended == _MOST_ENDED:
        yield _broken(
          "the rest",
          f"not asked: {ended} calls one after the other ended their worker",
        )
        return
      if verdict.failed:
        continue
      if not kept:
        yield _again(verdict, _verdict(case, *_asked(workers, case))[0])
      kept.append((case, verdict))
      given += not math.isnan(verdict.reward)
    if kept:
      yield _together(workers, kept)
  if not given:
    advice = "" if example else "; give --example, of what earns one"
    none = f"0 of {len(asked)} gave a reward{advice}"
    yield _broken("any reward", none)


def line(verdict: Verdict) -> str:
  """Returns a verdict as a line for people."""
  mark = "fail" if verdict.failed else "ok  "
  mark = mark if verdict.holds else "BAD "
  reward = "-" if math.isnan(verdict.reward) else f"{verdict.reward:.6g}"
  return f"{verdict.name:<18}{reward:>10}  {mark} {verdict.said}"


def main(argv: Sequence[str]) -> int:
  """Checks the reward that the arguments name.

  Returns:
    The exit code.
  """
  parser = argparse.ArgumentParser(prog="python -m jaxrl_post.rewards.check")
  parser.add_argument("target", help="FILE.py:FUNCTION or MODULE:FUNCTION")
  parser.add_argument(
    "--example",
    default="{}",
    help='JSON: {"prompt", "completion", "reference", "reward"}, or some of it',
  )
  parser.add_argument("--timeout_s", type=float, default=10.0)
  parser.add_argument("--memory_mb", type=int, default=None)
  given = parser.parse_args(argv)
  made = broken = 0
  try:
    for verdict in check(
      load(given.target),
      _example(given.example),
      timeout_s=given.timeout_s,
      memory_mb=given.memory_mb,
    ):
      if not made:
        print(f"{'case':<18}{'reward':>10}")
      print(line(verdict), flush=True)
      made, broken = made + 1, broken + (not verdict.holds)
  except (types.InputError, types.RunError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(f"{broken} of {made} cases break the contract")
  return int(broken > 0)


def _example(text: str) -> dict[str, Any]:
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    value = None
  if not isinstance(value, dict) or not value.keys() <= _KEYS:
    raise types.InputError(
      f"--example: expected a JSON object with {', '.join(sorted(_KEYS))}, or "
      f"some of them, got {combine.one_line(text, 80)}. Correct it."
    )
  number = f"a number {combine.RANGE}, or null"
  for key, kind, rule in (
    ("prompt", str, "text"),
    ("completion", str | None, "text or null"),
    ("reward", int | float | None, number),
  ):
    given = value.get(key, "" if key == "prompt" else None)
    is_number = isinstance(given, int | float)
    is_large = is_number and abs(given) > combine.LARGEST
    if not isinstance(given, kind) or is_large:
      raise types.InputError(
        f"--example: {key}: expected {rule}, got "
        f"{combine.one_line(repr(given), 80)}. Correct it."
      )
  return value


def _rollout(
  example: dict[str, Any], text: str, reference: Any
) -> types.Rollout:
  # Bytes stand in for the tokens of a tokenizer that is not known here.
  tokens = tuple(text.encode(errors="surrogatepass"))
  return types.Rollout(
    prompt=types.Prompt(
      uid=0, tokens=(1,), text=example.get("prompt", "?"), reference=reference
    ),
    completion=types.Completion(
      uid=0,
      tokens=tokens,
      logprobs=(0.0,) * len(tokens),
      versions=(0,) * len(tokens),
      finish="stop",
    ),
    temperature=1.0,
    text=text,
  )


def _numbered(case: Case, uid: int) -> Case:
  completion = dataclasses.replace(case.rollout.completion, uid=uid)
  rollout = dataclasses.replace(case.rollout, completion=completion)
  return dataclasses.replace(case, rollout=rollout)


def _asked(
  workers: pool.Pool, case: Case
) -> tuple[types.Rollout | types.InputError, float]:
  """Returns the scored rollout, or how the reference was refused; seconds."""
  began = time.monotonic()
  try:
    answer = workers.submit(case.rollout).result()
  except types.InputError as error:
    return error, time.monotonic() - began
  return answer, time.monotonic() - began


def _verdict(
  case: Case, answer: types.Rollout | types.InputError, seconds: float
) -> tuple[Verdict, bool]:
  """Returns what came of a case, and whether it ended its worker."""
  took = f"{seconds:.3f} s"
  if isinstance(answer, types.InputError):
    # Refusing a reference is right; refusing a completion would end the run.
    refusal = combine.one_line(str(answer))
    return Verdict(
      name=case.name,
      reward=math.nan,
      said=f"{took}, refuses the input: {refusal}",
      holds=not case.strict,
      failed=True,
    ), False
  parts = ", ".join(f"{k}={v:.6g}" for k, v in answer.parts.items())
  told = "" if case.strict or not answer.failure else "told only: "
  said = f"{took}, {told}{answer.failure or parts}"
  is_missing = answer.failure.startswith("no reward: ")
  failed = bool(answer.failure) and not is_missing
  holds = not case.strict or not failed
  if case.expected is not None and not _equal(answer.reward, case.expected):
    said, holds = f"{said}; expected {case.expected:.6g}", False
  made = Verdict(
    name=case.name,
    reward=answer.reward,
    said=said,
    holds=holds,
    failed=failed,
  )
  return made, answer.failure.startswith(("worker died", "timeout after "))


def _again(first: Verdict, again: Verdict) -> Verdict:
  """Names a second answer; marks one that is not the first."""
  again = dataclasses.replace(again, name=f"{first.name} again")
  if _equal(first.reward, again.reward):
    return again
  said = f"{again.said}; the first time it was {first.reward:.6g}"
  return dataclasses.replace(again, said=said, holds=False)


def _together(
  workers: pool.Pool, kept: Sequence[tuple[Case, Verdict]]
) -> Verdict:
  """Asks all at once what was answered one by one."""
  futures = workers.submit_all([case.rollout for case, _ in kept])
  differ, why = [], ""
  for (_, verdict), future in zip(kept, futures, strict=True):
    try:
      answer = future.result()
    except types.InputError as error:
      reward, failure = math.nan, combine.one_line(str(error))
    else:
      reward, failure = answer.reward, answer.failure
    if not _equal(verdict.reward, reward):
      differ.append(verdict.name)
      why = why or failure
  if differ:
    said = f"differ: {', '.join(differ)}" + (f" ({why})" if why else "")
    return _broken("all at once", said)
  return Verdict(
    name="all at once", reward=math.nan, said="the same", holds=True
  )


def _broken(name: str, said: str) -> Verdict:
  return Verdict(name=name, reward=math.nan, said=said, holds=False)


def _equal(a: float, b: float) -> bool:
  return a == b or (math.isnan(a) and math.isnan(b))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
