"""Scores a policy on held-out prompts."""

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from jaxrl_post import types
from jaxrl_post.envs import beside as besides
from jaxrl_post.envs import pass_at_k, work
from jaxrl_post.rewards import protocol

_GLANCE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """When and how held-out prompts are answered.

  Attributes:
    every: steps between evaluations, besides those before the first and after
      the last step; 0 for these two only.
    temperature: 0 takes the most probable token.
    top_k: see `types.SamplingParams`; likewise the next.
    top_p: 1 keeps every token.
    timeout_s: longest wait for the rewards of one evaluation.
    samples: several completions of each prompt; None takes one.
    beside: evaluates while training goes on; None has training wait.
  """

  every: int = 0
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  timeout_s: float = 600.0
  samples: pass_at_k.Samples | None = None
  beside: besides.Beside | None = None

  def __post_init__(self) -> None:
    rules = (
      ("every", self.every >= 0, ">= 0"),
      ("temperature", 0 <= self.temperature < math.inf, ">= 0"),
      ("top_k", self.top_k >= 0, ">= 0 (0 keeps all)"),
      ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
      ("timeout_s", 0 < self.timeout_s < math.inf, "> 0 seconds"),
    )
    for name, holds, rule in rules:
      if not holds:
        raise types.InputError(
          f"evaluation.{name}: expected {rule}, got {getattr(self, name)}. "
          "Correct the value."
        )
    if self.number > 1 and not self.temperature:
      raise types.InputError(
        "evaluation.temperature: expected > 0 with evaluation.samples.number "
        f"{self.number}, got 0. All completions of a prompt would be one."
      )

  @property
  def number(self) -> int:
    """Completions of each prompt."""
    return self.samples.number if self.samples is not None else 1

  def due(self, step: int, num_steps: int) -> bool:
    """Says whether the state after `step` batches is evaluated."""
    ends = step in (0, num_steps)
    return ends or (self.every > 0 and step % self.every == 0)


def evaluate(
  prompts: Sequence[types.Prompt],
  *,
  env: work.Env,
  generate: Callable[[Sequence[types.Request]], list[types.Completion]],
  rewards: protocol.Scorer,
  timeout_s: float,
  samples: pass_at_k.Samples | None = None,
  stopping: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
  """Samples and scores every prompt.

  Args:
    prompts: the held-out set.
    env: how to ask; its sampling decides between greedy and drawn.
    generate: requests to completions in the same order.
    rewards: scores the rollouts.
    timeout_s: longest wait for all rewards together.
    samples: what several completions of a prompt are asked.
    stopping: whether the run was asked to stop; looked at twice a second.

  Returns:
    `reward`, those of turns included, and `reward_<part>`, means over the
    rollouts that have a reward; `missing`, how many have none; over all of them
    `truncated`, the share that ended by the limit, and `tokens`; `rollouts`,
    how many there are; with `samples` also what `pass_at_k.metrics` says.
    Nothing once the run is to stop.

  Raises:
    RunError: the rewards took longer than `timeout_s`.
    Exception: what a reward, or a function of `samples`, raised.
  """
  completions = generate([env.request(prompt) for prompt in prompts])
  asked = [p for p in prompts for _ in range(env.group_size)]
  futures = rewards.submit_all(
    [
      env.rollout(prompt, completion)
      for prompt, completion in zip(asked, completions, strict=True)
    ]
  )
  late, deadline = set(futures), time.monotonic() + timeout_s
  while late and time.monotonic() < deadline:
    if stopping():
      return {}
    patience = max(0.0, min(_GLANCE_S, deadline - time.monotonic()))
    done, late = concurrent.futures.wait(
      late, patience, concurrent.futures.FIRST_EXCEPTION
    )
    for future in done:
      future.result()  # What a reward raised comes before what is late.
  if late:
    raise types.RunError(
      f"evaluation: expected all rewards within {timeout_s:g} s "
      f"(evaluation.timeout_s), got {len(futures) - len(late)} of "
      f"{len(futures)}"
    )
  rollouts = [future.result() for future in futures]
  scored = [r for r in rollouts if math.isfinite(r.reward)]
  truncated = [r.completion.finish == "length" for r in rollouts]
  metrics = {
    "reward": _mean([r.earned for r in scored]),
    "missing": float(len(rollouts) - len(scored)),
    "truncated": _mean(truncated),
    "tokens": _mean([len(r.completion.tokens) for r in rollouts]),
    "rollouts": float(len(rollouts)),
  }
  for name in sorted({part for r in scored for part in r.parts}):
    parts = [r.parts[name] for r in scored if name in r.parts]
    metrics[f"reward_{name}"] = _mean(parts)
  if samples is not None:
    size = env.group_size
    starts = range(0, len(rollouts), size)
    groups = [rollouts[at : at + size] for at in starts]
    metrics |= pass_at_k.metrics(samples, groups)
  return metrics


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values) if values else math.nan
