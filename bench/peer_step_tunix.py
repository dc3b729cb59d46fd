"""Tunix's own sampler and update in turn on a workload, for bench/step.py.

    echo 0 | PYTHON bench/peer_step_tunix.py W1 [--rows N]

Runs in an environment with google-tunix. Sampler and trainer share one model,
as they do in its cluster when both have the same devices.
"""

import peer_tunix
import peer_update_tunix
import scored


def main() -> None:
  """Reads the command line and serves."""
  w, chosen = scored.asked(__doc__)
  model = peer_tunix.build(w)
  sampler = peer_tunix.sampler(w, model)
  scored.serve_steps(
    w,
    peer_tunix.rollouts(w, sampler),
    peer_update_tunix.updater(w, model, chosen.rows),
    check=lambda: peer_tunix.check(w, sampler.transformer),
    version=peer_tunix.version(),
  )


if __name__ == "__main__":
  main()
