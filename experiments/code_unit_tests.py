r"""Qwen2.5-Coder-0.5B learns to write Python that passes its tests.

Needs, on disk:

* `models/Qwen2.5-Coder-0.5B-Instruct`, a Hugging Face folder; or
  `--set model.path=FOLDER`.
* `data/code/train.jsonl` and `test.jsonl`, a JSON object a line with `prompt`
  and `tests`: statements such as `"assert f(1) == 2"`, or
  `{"input": ..., "output": ...}` for programs that read and print. Or
  `--set data.train.path=FILE` and `--set data.held_out.path=FILE`.

Programs of the model run in a sandbox (`rewards.sandbox`), which takes Linux on
x86_64 or aarch64. Half of the devices train, half generate:

    python -m jaxrl_post.main --exp=code_unit_tests --mode=dry_run
    python -m jaxrl_post.main --exp=code_unit_tests --workdir=runs/code

Every program takes a core for as long as it runs: as many `rewards.workers` as
the host has cores to spare.

This recipe has NOT been run at full size: no accelerator was at hand. Its
tests run it on CPU with a model of 0.1M weights.
"""

import functools

from jaxrl_post import config
from jaxrl_post.algos import losses, objective
from jaxrl_post.data import dataset, sources
from jaxrl_post.envs import evaluate
from jaxrl_post.models import decoder
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import code, pool, shaping
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

_SYSTEM = "Answer with one block of Python, between ```python and ```."


def _tasks(part: str, limit: int | None = None) -> sources.Jsonl:
  return sources.Jsonl(
    path=f"data/code/{part}.jsonl", prompt="prompt", answer="tests", limit=limit
  )


def get_config() -> config.Run:
  """The recipe."""
  return config.Run(
    model=decoder.Model(
      path="models/Qwen2.5-Coder-0.5B-Instruct",
      dtype="bfloat16",
      remat="layer",
    ),
    data=dataset.Data(
      train=_tasks("train"),
      held_out=_tasks("test", limit=128),
      system=_SYSTEM,
      max_prompt=768,
    ),
    rewards=pool.Rewards(
      functions=(
        functools.partial(code.passed, partial=True, timeout_s=6.0),
        shaping.repetition,
      ),
      weights=(1.0, 0.1),
      workers=8,
      timeout_s=20.0,
      on_failure="mask",
    ),
    algo=objective.Objective(region=losses.Clip(high=0.28)),
    optim=optim.Optim(learning_rate=1e-6, warmup_steps=5, microbatches=64),
    sampling=engine.Sampling(
      max_tokens=768, rows=128, block=16, dtype="bfloat16"
    ),
    placement=mesh.Placement(mode="split", generation_fraction=0.5),
    checkpoint=checkpoint.Checkpoint(every=20),
    evaluation=evaluate.Evaluation(every=20),
    num_steps=200,
    groups_per_step=64,
    group_size=8,
    max_lag=1,
  )
