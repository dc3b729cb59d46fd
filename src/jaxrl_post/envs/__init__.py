"""Conversations, the ledger, and the bounded-lag stream of rollouts."""
