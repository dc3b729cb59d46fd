"""Transformer families as weight specs and functions; weights in and out."""
