"""Reflex: one pure scheduler decides which requests share the next forward pass."""
