"""Tunix's own GRPO update on a workload, for bench/update.py.

    echo 0 | PYTHON bench/peer_update_tunix.py W1 [--rows N]

Runs in an environment with google-tunix. Its trainer is called with its loss as
its GRPO learner calls it, on examples as the learner makes them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peer_tunix
import scored
import workloads
from flax import nnx
from tunix.rl import algo_core
from tunix.rl import trainer as trainers
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer


def trainer(
  w: workloads.Workload, model: nnx.Module, rows: int
) -> trainers.Trainer:
  """Builds the trainer as cluster and learner do."""
  algo = grpo_learner.GRPOConfig(
    num_generations=w.group, num_iterations=1, beta=0.0, epsilon=scored.CLIP
  )
  algo.temperature = 1.0
  found = trainers.Trainer(
    model=model,
    optimizer=optax.adamw(scored.LEARNING_RATE, weight_decay=0.0),
    training_config=peft_trainer.TrainingConfig(
      eval_every_n_steps=10**9,
      gradient_accumulation_steps=w.rows // rows if rows < w.rows else None,
    ),
    custom_checkpoint_metadata_fn=dict,
  )
  found.is_managed_externally = True

  def loss(model, train_example, algo_config):
    return algo_core.grpo_loss_fn(
      model,
      train_example,
      algo_config=algo_config,
      pad_id=workloads.PAD_ID,
      eos_id=w.vocab,
    )

  found.with_loss_fn(loss, has_aux=True)
  found.with_gen_model_input_fn(
    lambda example: {"train_example": example, "algo_config": algo}
  )
  return found


def examples(
  w: workloads.Workload, batch: scored.Batch, rows: int
) -> list[grpo_learner.TrainExample]:
  """Pads completions to the limit and cuts the batch, as the learner does."""
  shape = (w.rows, w.max_tokens)
  ids, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  for row, tokens in enumerate(batch.completions):
    ids[row, : len(tokens)] = tokens
    mask[row, : len(tokens)] = 1
  prompts = jnp.asarray(batch.prompts, jnp.int32)
  gains = batch.advantages(w.group)
  return [
    grpo_learner.TrainExample(
      prompt_ids=prompts[part],
      prompt_mask=jnp.ones_like(prompts[part]),
      completion_ids=jnp.asarray(ids[part]),
      completion_mask=jnp.asarray(mask[part]),
      advantages=jnp.asarray(gains[part]),
      ref_per_token_logps=None,
      old_per_token_logps=None,
    )
    for begin in range(0, w.rows, rows)
    for part in (slice(begin, begin + rows),)
  ]


def updater(
  w: workloads.Workload, model: nnx.Module, rows: int
) -> Callable[[scored.Batch], None]:
  """Returns an update by microbatches of some rows."""
  found = trainer(w, model, rows)

  def update(batch: scored.Batch) -> None:
    found.train(examples(w, batch, rows))
    jax.block_until_ready(nnx.state(found.model))

  return update


def main() -> None:
  """Reads the command line and serves."""
  w, chosen = scored.asked(__doc__)
  model = peer_tunix.build(w)
  scored.serve(
    w,
    updater(w, model, chosen.rows),
    check=lambda: peer_tunix.check(w, model),
    version=peer_tunix.version(),
  )


if __name__ == "__main__":
  main()
