"""The outside world: run folder, checkpoints, clock, metrics, terminal."""
