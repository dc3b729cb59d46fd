r"""Qwen3-0.6B learns grade-school maths: where a GPU or TPU user starts.

Needs, on disk:

* `models/Qwen3-0.6B`, the Hugging Face folder with config.json, tokenizer.json,
  tokenizer_config.json and the safetensors; or `--set model.path=FOLDER`. Any
  model of a supported family will do.
* `data/gsm8k/train.jsonl` and `test.jsonl`, a JSON object a line with the
  fields `question` and `answer`; or `--set data.train.path=FILE` and
  `--set data.held_out.path=FILE`. The answer ends with `#### NUMBER`, or is
  the number.

Half of the devices train, half generate, at most one version ahead:

    python -m jaxrl_post.main --exp=gsm8k_qwen3 --mode=dry_run
    python -m jaxrl_post.main --exp=gsm8k_qwen3 --workdir=runs/gsm8k

On a single device add `--set placement.mode=colocated`. What memory holds: the
trainer 16 bytes a weight (float32 weights, two averages, gradient), spread
over its devices, and on each of them the logits of `model.chunk` tokens,
vocabulary x 8 bytes a token; an engine its weights in bfloat16, and for
Qwen3-0.6B 0.17 GiB of cache for each of its `sampling.rows` / (generating
devices) completions of 1536 tokens. Too much? Raise `optim.microbatches`, lower
`sampling.rows`.

`--exp=gsm8k_qwen3:qwen3_8b` is a larger run for TPU slices, with the shape of
the model in place of a checkpoint, for `--mode=compile` (docs/compile.md);
`gsm8k_qwen3:qwen3_30b_a3b` another, of a mixture of experts.

This recipe has NOT been run at full size: no accelerator was at hand. Its
tests run it on CPU with a model of 0.1M weights. The settings are those that
published runs of this kind have in common; expect to tune them.
"""

import dataclasses

from jaxrl_post import config
from jaxrl_post.algos import losses, objective
from jaxrl_post.data import dataset, sources
from jaxrl_post.envs import evaluate
from jaxrl_post.models import decoder, experts, transformer
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import number, pool
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

# Qwen3's own switch: without it the model thinks for longer than 1024 tokens.
_SYSTEM = (
  "Reason step by step and put the final number within \\boxed{}. /no_think"
)


def _questions(part: str, limit: int | None = None) -> sources.Jsonl:
  return sources.Jsonl(
    path=f"data/gsm8k/{part}.jsonl",
    prompt="question",
    answer="answer",
    limit=limit,
  )


def get_config() -> config.Run:
  """The recipe."""
  return config.Run(
    model=decoder.Model(
      path="models/Qwen3-0.6B", dtype="bfloat16", remat="layer"
    ),
    data=dataset.Data(
      train=_questions("train"),
      held_out=_questions("test", limit=256),
      system=_SYSTEM,
      max_prompt=512,
    ),
    # A slow or dying worker should not end a run of hours: see reward/missing.
    rewards=pool.Rewards(
      functions=(number.number,), workers=4, on_failure="mask"
    ),
    algo=objective.Objective(region=losses.Clip(high=0.28)),
    optim=optim.Optim(learning_rate=1e-6, warmup_steps=5, microbatches=64),
    sampling=engine.Sampling(
      max_tokens=1024, rows=128, block=16, dtype="bfloat16"
    ),
    placement=mesh.Placement(mode="split", generation_fraction=0.5),
    checkpoint=checkpoint.Checkpoint(every=20),
    # As Qwen3's model card has it for answers without thinking.
    evaluation=evaluate.Evaluation(
      every=20, temperature=0.7, top_k=20, top_p=0.8
    ),
    num_steps=200,
    groups_per_step=64,
    group_size=8,
    max_lag=1,
  )


def qwen3_8b() -> config.Run:
  """A run of Qwen3-8B with answers of 3072 tokens, to be compiled."""
  shape = transformer.Config(
    num_layers=36,
    width=4096,
    num_heads=32,
    num_kv_heads=8,
    head_width=128,
    ff_width=12288,
    vocab_size=151936,
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=False,
    qk_norm=True,
    max_positions=40960,
  )
  run = get_config()
  return dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, path=None, config=shape),
    data=dataclasses.replace(run.data, max_prompt=1024),
    optim=dataclasses.replace(run.optim, microbatches=32),
    sampling=engine.Sampling(
      max_tokens=3072, rows=512, block=16, prefill_tokens=4096, dtype="bfloat16"
    ),
    placement=mesh.Placement(
      mode="split", generation=mesh.GenerationAxes(tensor=4)
    ),
    groups_per_step=128,
    group_size=16,
  )


def qwen3_30b_a3b() -> config.Run:
  """The same of Qwen3-30B-A3B, with 128 experts of which a token takes 8."""
  run = qwen3_8b()
  assert run.model.config is not None
  shape = dataclasses.replace(
    run.model.config,
    num_layers=48,
    width=2048,
    num_kv_heads=4,
    ff_width=768,
    experts=experts.Experts(num=128, per_token=8),
  )
  return dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, config=shape),
    optim=dataclasses.replace(run.optim, microbatches=64),
    placement=mesh.Placement(
      mode="split",
      training=mesh.TrainingAxes(expert=8),
      generation=mesh.GenerationAxes(expert=2, tensor=4),
    ),
  )
