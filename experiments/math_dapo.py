r"""Qwen2.5-7B learns competition maths by DAPO (Yu et al. 2025, 2503.14476).

Needs, on disk:

* `models/Qwen2.5-7B`, the Hugging Face folder with config.json, tokenizer.json,
  tokenizer_config.json and the safetensors; or `--set model.path=FOLDER`.
* `data/dapo-math-17k.parquet`, with messages in `prompt` and the answer, a
  whole number, in `reward_model.ground_truth`; and `data/aime-2024.parquet` in
  the same form. Or `--set data.train.path=FILE` and
  `--set data.held_out.path=FILE`; the extra `data` reads them.

    python -m jaxrl_post.main --exp=math_dapo --mode=inspect
    python -m jaxrl_post.main --exp=math_dapo --workdir=runs/dapo

All four parts of DAPO: clip-higher and the token mean (`algos/dapo.py`);
dynamic sampling, by leaving out groups whose rewards agree; and a soft penalty
on long answers, beside leaving the loss of cut ones out. On top of it prompts
that all rollouts of their last two groups solved, or none, rest for a while
(`docs/data.md`). The reward is 1 or -1, as in the paper.

This recipe has NOT been run at full size: no accelerator was at hand. Its tests
run it on CPU with a model of 0.1M weights. The paper's own run is larger: 32B
weights, answers of 20480 tokens, 512 prompts of 16 rollouts a batch.
"""

import dataclasses
import functools
import re

from jaxrl_post import config, types
from jaxrl_post.algos import dapo
from jaxrl_post.data import dataset, difficulty, parquet
from jaxrl_post.envs import evaluate, schedule
from jaxrl_post.models import decoder
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import number, pool, shaping
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

_MOST, _MARGIN = 8192, 2048  # tokens of an answer, and where the penalty begins
_ANSWER = re.compile(r"answer\s*:([^\n]*)", re.IGNORECASE)


def correct(rollout: types.Rollout, reference: str) -> float:
  """Scores 1 if the number behind the last "Answer:" is right, -1 if not."""
  answers = _ANSWER.findall(rollout.text)
  last = dataclasses.replace(rollout, text=answers[-1] if answers else "")
  return 2.0 * number.number(last, reference) - 1.0


def _problems(name: str) -> parquet.Parquet:
  return parquet.Parquet(
    path=f"data/{name}.parquet", answer="reward_model.ground_truth"
  )


def get_config() -> config.Run:
  """The recipe."""
  return config.Run(
    model=decoder.Model(
      path="models/Qwen2.5-7B", dtype="bfloat16", remat="layer"
    ),
    data=dataset.Data(
      train=_problems("dapo-math-17k"),
      held_out=_problems("aime-2024"),
      max_prompt=1024,
      # A right answer earns at least 0, however long it is.
      pool=difficulty.Pool(solved=0.0),
    ),
    # A slow or dying worker should not end a run of days: see reward/missing.
    rewards=pool.Rewards(
      functions=(
        correct,
        functools.partial(shaping.overlong, most=_MOST, margin=_MARGIN),
      ),
      workers=4,
      on_failure="mask",
    ),
    algo=dapo.objective(),
    optim=optim.Optim(
      learning_rate=1e-6, warmup_steps=20, minibatches=4, microbatches=64
    ),
    sampling=engine.Sampling(
      max_tokens=_MOST, rows=256, block=16, dtype="bfloat16"
    ),
    stream=schedule.StreamConfig(filter_zero_signal=True),
    placement=mesh.Placement(mode="split", generation_fraction=0.5),
    checkpoint=checkpoint.Checkpoint(every=10),
    evaluation=evaluate.Evaluation(every=10, temperature=1.0, top_p=0.7),
    num_steps=200,
    groups_per_step=128,
    group_size=16,
    max_lag=1,
  )
