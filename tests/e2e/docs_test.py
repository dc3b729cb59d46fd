"""The programs of the documents run, and do what is said of them."""

import jax

from tests.house import docs_test, source
from tests.reference import tiny_folder


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


def test_five_lines_sample_a_model_from_a_folder(tmp_path, monkeypatch, capsys):
  text = (source.ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
  code, tools = docs_test.blocks(text)
  exec(compile(tools, "docs/sampling.md", "exec"), {})
  assert len([line for line in code.splitlines() if line]) <= 5
  folder = tmp_path / "path" / "to" / "folder"
  tiny_folder.write(folder, "qwen2", max_position_embeddings=1024)
  monkeypatch.chdir(tmp_path)
  seen = {}
  with jax.numpy_dtype_promotion("standard"):  # as its reader has it
    exec(compile(code, "docs/sampling.md", "exec"), seen)
  made = seen["sampler"].generate(["What is 6 x 7?"], n=4)
  assert len({sample.tokens for sample in made}) == 4
  out = capsys.readouterr().out
  assert out.count(" stop\n") + out.count(" length\n") == 4
