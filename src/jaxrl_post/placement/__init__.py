"""Which devices do what, and how weights get there."""
