"""The trainer's steps: init, score, update; the optimizer."""
