"""Whether the parts of an algorithm fit together, before a device is taken."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post import types
from jaxrl_post.algos import algorithm


def probe(
  algo: algorithm.Algorithm, sequences: int, shape: tuple[int, int]
) -> None:
  """Runs an algorithm on shapes alone: parts of the user's own may be wrong.

  Args:
    algo: of the run.
    sequences: of a batch.
    shape: of its rows, and of the positions in each.

  Raises:
    InputError: or whatever such a part raises.
  """

  # Shapes take the place of arrays, hence Any.
  def of(*shape: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

  tokens, ids = of(*shape), of(*shape, dtype="int32")
  known = tokens if "reference" in algo.needs else None
  top = of(*shape, algo.candidates) if algo.candidates else None
  jax.eval_shape(
    algo.advantages,
    types.AdvantageInputs(
      rewards=of(sequences),
      group_ids=of(sequences, dtype="int32"),
      rollout_ids=of(sequences, dtype="int32"),
      sequence=ids,
      segment_ids=ids,
      loss_mask=tokens,
      turn_rewards=tokens,
      penalty=tokens,
      old_logprobs=tokens,
      reference_logprobs=known,
      values=None if algo.critic is None else tokens,
    ),
  )
  jax.eval_shape(
    algo.loss,
    types.LossInputs(
      logprobs=tokens,
      entropy=tokens,
      old_logprobs=tokens,
      sampler_logprobs=tokens,
      reference_logprobs=known,
      advantages=tokens,
      loss_mask=tokens,
      shares=tokens,
      segment_ids=ids,
      lag=tokens,
      num_tokens=of(),
      teacher_logprobs=top,
      candidate_logprobs=top,
    ),
  )
