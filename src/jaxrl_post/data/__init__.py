"""Prompts, tokenizers, and rows for the device."""
