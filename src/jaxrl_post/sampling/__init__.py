"""Prompts to completions: prefill, insert, decode, pick."""
