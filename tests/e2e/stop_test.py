"""A run that is asked to stop: after its batch, saved, with exit code 0."""

import signal
import threading

from tests.e2e import runs


def test_sigterm_ends_a_run_after_its_batch_with_a_checkpoint(tmp_path) -> None:
  folder = tmp_path / "run"
  args = [
    runs.experiment(),
    f"--workdir={folder}",
    *runs.settings("num_steps=100000", "checkpoint.every=0"),
  ]
  with runs.started(tmp_path, *args) as process:
    log, patience = folder / "metrics.jsonl", iter(range(2400))
    while not (log.exists() and log.read_text().count("\n") >= 2):
      next(patience)  # two minutes
      threading.Event().wait(0.05)
    process.send_signal(signal.SIGTERM)
    outcome = runs.ended(process)
  assert outcome.code == 0, outcome.err
  assert "stopped by SIGTERM; the same command continues" in outcome.out
  assert outcome.survivors == ()
  steps = len(runs.metrics(folder))
  assert runs.steps(folder) == [steps]
