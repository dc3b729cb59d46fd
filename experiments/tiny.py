"""The demo: a decoder from scratch learns to sort letters.

A short supervised warm-up shows what an answer looks like; GRPO does the rest,
on a split placement of two virtual CPU devices, one to train and one to
generate, with rollouts at most one version old. On two x86-64 cores: under
three minutes, from 0.37 of held-out questions right, greedily, to 0.99.
"""

import random

from jaxrl_post import config, types
from jaxrl_post.algos import grpo
from jaxrl_post.data import dataset, sources
from jaxrl_post.envs import evaluate
from jaxrl_post.models import decoder, transformer
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import pool
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim, warmup

_LETTERS = "abcdefgh"
_LENGTH = 5
_HELD_OUT = 10_000_000


def make(index: int) -> types.Example:
  """Makes the example of an index: letters to sort.

  Training and held-out examples never share a question: the sum of the letters
  decides which of the two a question may be.
  """
  draw = random.Random(index)
  held_out = index >= _HELD_OUT
  while True:
    letters = draw.choices(range(len(_LETTERS)), k=_LENGTH)
    if (sum(letters) % 5 == 0) == held_out:
      break
  question = "".join(_LETTERS[i] for i in letters)
  answer = "".join(_LETTERS[i] for i in sorted(letters))
  return types.Example(prompt=f"{question}>", reference=answer)


def score(rollout: types.Rollout, reference: str) -> dict[str, float]:
  """Scores 1 for the right answer, plus the share of letters in place."""
  text = rollout.text
  right = sum(a == b for a, b in zip(text, reference, strict=False))
  return {
    "exact": float(text == reference),
    "in_place": right / max(len(text), len(reference)),
  }


def get_config() -> config.Run:
  """The demo."""
  return config.Run(
    model=decoder.Model(
      config=transformer.Config(
        num_layers=2,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        head_width=16,
        ff_width=256,
        vocab_size=len(_LETTERS) + 3,
      )
    ),
    data=dataset.Data(
      train=sources.Generated(make, size=20_000),
      held_out=sources.Generated(make, size=256, start=_HELD_OUT),
      alphabet=f"{_LETTERS}>",
      max_prompt=_LENGTH + 1,
    ),
    rewards=pool.Rewards(functions=(score,), batch=64),
    algo=grpo.objective(),
    optim=optim.Optim(learning_rate=8e-4, schedule="linear"),
    sampling=engine.Sampling(max_tokens=_LENGTH + 2, rows=256, block=8),
    placement=mesh.Placement(mode="split", cpu_devices=2),
    evaluation=evaluate.Evaluation(every=100),
    checkpoint=checkpoint.Checkpoint(every=50),
    warmup=warmup.Warmup(num_steps=14, learning_rate=3e-3),
    num_steps=450,
    groups_per_step=32,
    group_size=8,
    max_lag=1,
  )
