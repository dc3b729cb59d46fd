r"""Qwen3-0.6B learns what another language model calls a good answer.

Needs, on disk:

* `models/Qwen3-0.6B`, a Hugging Face folder; or `--set model.path=FOLDER`.
* `data/judged/train.jsonl` and `test.jsonl`, a JSON object a line with
  `question` and `answer`, the latter for the judge to compare with. Or
  `--set data.train.path=FILE` and `--set data.held_out.path=FILE`.

And a server with OpenAI's interface (vLLM, SGLang, llama.cpp, or OpenAI's own),
in the environment:

    JUDGE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=Qwen/Qwen3-8B \
      python -m jaxrl_post.main --exp=judge --workdir=runs/judge

With `JUDGE_KEY=NAME` its key is read from the variable NAME. As many requests
are under way as `rewards.workers` times `rewards.batch`. What is trained on may
learn to please the judge rather than to be right: read `rollouts.txt`.

This recipe has NOT been run at full size: no accelerator was at hand. Its
tests run it on CPU with a model of 0.1M weights and a server that counts words.
"""

import functools
import os

from jaxrl_post import config
from jaxrl_post.algos import losses, objective
from jaxrl_post.data import dataset, sources
from jaxrl_post.envs import evaluate
from jaxrl_post.models import decoder
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import judge, pool, shaping
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

_SYSTEM = "Answer in a few sentences. /no_think"
_MAX_TOKENS = 512


def _questions(part: str, limit: int | None = None) -> sources.Jsonl:
  return sources.Jsonl(
    path=f"data/judged/{part}.jsonl",
    prompt="question",
    answer="answer",
    limit=limit,
  )


def get_config() -> config.Run:
  """The recipe."""
  who = judge.Judge(
    url=os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1"),
    model=os.environ.get("JUDGE_MODEL", "Qwen/Qwen3-8B"),
    key=os.environ.get("JUDGE_KEY", ""),
    deadline_s=60.0,
  )
  return config.Run(
    model=decoder.Model(
      path="models/Qwen3-0.6B", dtype="bfloat16", remat="layer"
    ),
    data=dataset.Data(
      train=_questions("train"),
      held_out=_questions("test", limit=128),
      system=_SYSTEM,
      max_prompt=512,
    ),
    # A judge that does not answer should not end a run of hours.
    rewards=pool.Rewards(
      functions=(
        functools.partial(judge.graded, judge=who),
        functools.partial(shaping.overlong, most=_MAX_TOKENS, margin=128),
      ),
      weights=(1.0, 0.2),
      workers=2,
      batch=32,
      timeout_s=90.0,
      retries=1,
      on_failure="mask",
    ),
    algo=objective.Objective(region=losses.Clip(high=0.28)),
    optim=optim.Optim(learning_rate=1e-6, warmup_steps=5, microbatches=64),
    sampling=engine.Sampling(
      max_tokens=_MAX_TOKENS, rows=128, block=16, dtype="bfloat16"
    ),
    placement=mesh.Placement(mode="split", generation_fraction=0.5),
    checkpoint=checkpoint.Checkpoint(every=20),
    evaluation=evaluate.Evaluation(every=20),
    num_steps=200,
    groups_per_step=64,
    group_size=8,
    max_lag=1,
  )
