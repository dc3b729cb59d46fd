"""Two stages that take about equally long, for bench/overlap.py to time.

The data, of letters drawn at random, are no task, and the reward is a constant
of the rollout: what is timed is the stages.
"""

import random

from jaxrl_post import config, types
from jaxrl_post.data import dataset, sources
from jaxrl_post.models import decoder, transformer
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import pool
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

_LETTERS = "".join(chr(ord("a") + i) for i in range(26))
_PROMPT = 8


def make(index: int) -> types.Example:
  """Makes a prompt of letters that mean nothing."""
  letters = random.Random(index).choices(_LETTERS, k=_PROMPT)
  return types.Example(prompt="".join(letters), reference="")


def score(rollout: types.Rollout, reference: str) -> float:
  """Scores every other rollout, at no cost."""
  return float(rollout.completion.uid % 2)


def get_config() -> config.Run:
  """Balanced stages; the vocabulary is so large that few rollouts stop.

  A token costs more to train than to sample, but a small engine samples slowly.
  """
  return config.Run(
    model=decoder.Model(
      config=transformer.Config(
        num_layers=4,
        width=128,
        num_heads=4,
        num_kv_heads=2,
        head_width=32,
        ff_width=512,
        vocab_size=512,
      )
    ),
    data=dataset.Data(
      train=sources.Generated(make, size=20_000),
      alphabet=_LETTERS,
      max_prompt=_PROMPT,
    ),
    rewards=pool.Rewards(functions=(score,), batch=64),
    optim=optim.Optim(learning_rate=1e-5),
    sampling=engine.Sampling(max_tokens=48, rows=4, block=2),
    placement=mesh.Placement(cpu_devices=1),
    num_steps=40,
    groups_per_step=8,
    group_size=4,
    max_lag=0,
  )
