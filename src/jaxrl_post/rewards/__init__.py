"""Text to number, on the host."""
