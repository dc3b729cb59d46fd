"""Tests, by kind; see docs/map.md."""
