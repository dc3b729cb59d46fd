"""A whole step by torch and transformers on a workload, for bench/step.py.

    echo 0 | PYTHON bench/peer_step_torch.py W1 [--rows N] [--continuous]

Runs in an environment with torch and transformers. What TRL's GRPO trainer does
without a server: one module samples and is trained.
"""

import peer_torch
import peer_update_torch
import scored
import torch


def main() -> None:
  """Reads the command line and serves."""
  w, chosen = scored.asked(__doc__, continuous={"action": "store_true"})
  model = peer_torch.started(w)
  make = peer_torch.continuous if chosen.continuous else peer_torch.whole_batch
  sample = make(w, model)

  def generate(step: int, prompts: list[list[int]]) -> list[list[int]]:
    torch.manual_seed(step)
    with torch.no_grad():
      return sample(step, prompts)

  scored.serve_steps(
    w,
    generate,
    peer_update_torch.updater(w, model, chosen.rows),
    check=lambda: peer_torch.check(w, model),
    version=peer_torch.version(),
  )


if __name__ == "__main__":
  main()
