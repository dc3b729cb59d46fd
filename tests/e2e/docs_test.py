"""The custom loop of the documents runs, learns, and is short."""

import jax

from tests.house import docs_test, source


def test_the_custom_loop_learns_in_at_most_40_lines():
  text = (source.ROOT / "docs" / "custom_loop.md").read_text(encoding="utf-8")
  (code,) = docs_test.blocks(text)
  assert len(code.strip().splitlines()) <= 40
  seen = {}
  with jax.numpy_dtype_promotion("standard"):  # as its reader has it
    exec(compile(code, "docs/custom_loop.md", "exec"), seen)
  rewards = [rollout.reward for rollout in seen["rollouts"]]
  assert sum(rewards) / len(rewards) > 0.9  # It starts at a half.
  assert seen["metrics"]["mismatch/max_abs"] < 1e-4
