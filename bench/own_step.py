"""Our whole step on a workload, and the machine's limit, for bench/step.py.

    echo 0 | python bench/own_step.py W1 [--rows N] [--engine_rows N]

The engine samples with weights that the trainer published, on the same device.
"""

import jax
import own as owns
import own_update
import scored
import workloads

from jaxrl_post.sampling import engine as engines


def build(
  w: workloads.Workload, microbatches: int, rows: int, block: int
) -> tuple[engines.Engine, own_update.Trained]:
  """Returns an engine, and a trainer that publishes to where it samples."""
  own = owns.make(w, rows, block)
  away = jax.tree.map(lambda x: x.sharding, own.policy.params)
  return own.engine(own.steps), own_update.Trained(w, microbatches, away)


def main() -> None:
  """Reads the command line and serves."""
  w, chosen = scored.asked(
    __doc__,
    engine_rows={"type": int, "help": "of the engine; default all"},
    block={"type": int, "default": 32},
  )
  engine, trained = build(
    w, w.rows // chosen.rows, chosen.engine_rows or w.rows, chosen.block
  )

  def generate(step: int, prompts: list[list[int]]) -> list[list[int]]:
    assert trained.policy is not None
    asked = owns.requests(w, step, prompts)
    return owns.completions(engine, trained.policy, asked)

  scored.serve_steps(
    w,
    generate,
    trained.update,
    check=trained.check,
    version=f"jax {jax.__version__}",
    others={"limits": own_update.limits()},
  )


if __name__ == "__main__":
  main()
