"""Rewards to advantages to loss: arrays in, arrays out, no model."""
