r"""A small model of each family, to be compiled and not run.

    python -m jaxrl_post.main --exp=families:gemma3 --mode=compile \
        --topology=tpu7x:2x2x1

compiles all programs of a run for a machine that is not there (docs/compile.md
has the table of families and chips). Two layers have the kinds, heads and head
widths of the model that is named, and all its options; they are narrow, and the
vocabulary is short: how wide they are decides how long compiling takes, and not
which kernels there are. Neither weights nor prompts are read: there are none.
"""

import dataclasses
from typing import Any

from jaxrl_post import config, types
from jaxrl_post.data import dataset, sources
from jaxrl_post.models import decoder, experts, transformer, variants
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import exact, pool
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim


def _never(index: int) -> types.Example:
  raise AssertionError(f"expected no prompt to be read, got {index} asked for")


def _run(shape: transformer.Config, expert: int = 1) -> config.Run:
  """Of eight devices four train and four generate."""
  return config.Run(
    model=decoder.Model(config=shape, dtype="bfloat16", remat="layer"),
    data=dataset.Data(train=sources.Generated(_never, size=8), max_prompt=128),
    rewards=pool.Rewards(functions=(exact.exact,)),
    optim=optim.Optim(microbatches=2),
    sampling=engine.Sampling(
      max_tokens=384, rows=32, prefill_tokens=64, dtype="bfloat16"
    ),
    placement=mesh.Placement(
      mode="split",
      training=mesh.TrainingAxes(expert=expert, tensor=2 // expert),
      generation=mesh.GenerationAxes(expert=expert, tensor=2),
    ),
    groups_per_step=8,
    group_size=4,
  )


def _shape(**own: Any) -> transformer.Config:
  """Returns two narrow layers with what a family has of its own."""
  return transformer.Config(
    num_layers=2, width=512, ff_width=1024, vocab_size=8 * 1187, **own
  )


def get_config() -> config.Run:
  """Llama 3.2 1B."""
  scaling = transformer.RopeScaling(
    factor=32.0, low_factor=1.0, high_factor=4.0, original_positions=8192
  )
  return _run(
    _shape(
      num_heads=32,
      num_kv_heads=8,
      head_width=64,
      rope_theta=5e5,
      rope_scaling=scaling,
      max_positions=131072,
    )
  )


def smollm2() -> config.Run:
  """SmolLM2 135M, whose 9 heads two devices do not divide."""
  return _run(
    _shape(num_heads=9, num_kv_heads=3, head_width=64, rope_theta=1e5)
  )


def qwen2_5() -> config.Run:
  """Qwen2.5 7B."""
  return _run(
    _shape(
      num_heads=28,
      num_kv_heads=4,
      head_width=128,
      rope_theta=1e6,
      norm_eps=1e-6,
      tie_embeddings=False,
      qkv_bias=True,
      max_positions=32768,
    )
  )


def qwen3() -> config.Run:
  """Qwen3 8B."""
  return _run(_qwen3(8))


def qwen3_moe() -> config.Run:
  """Qwen3 30B-A3B, its experts in two parts; of 128 there are 16."""
  shape = dataclasses.replace(
    _qwen3(4), ff_width=768, experts=experts.Experts(num=16, per_token=8)
  )
  return _run(shape, expert=2)


def _qwen3(num_kv_heads: int) -> transformer.Config:
  return _shape(
    num_heads=32,
    num_kv_heads=num_kv_heads,
    head_width=128,
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=False,
    qk_norm=True,
    max_positions=40960,
  )


def gemma3() -> config.Run:
  """Gemma 3 4B: a layer with a window, of 256 positions, and one without."""
  return _run(
    _shape(
      num_heads=8,
      num_kv_heads=4,
      head_width=256,
      rope_theta=1e6,
      rope_scaling=transformer.RopeScaling(factor=8.0),
      norm_eps=1e-6,
      qk_norm=True,
      max_positions=131072,
      window=variants.Window(size=256, layers=(True, False), rope_theta=1e4),
      gemma=variants.Gemma(query_scalar=256.0),
    )
  )
