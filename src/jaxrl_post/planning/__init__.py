"""Before a run: how fast it would be, and how old its rollouts, elsewhere."""
