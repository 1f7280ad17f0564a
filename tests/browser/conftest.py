"""Fixtures of servers."""

from serving.fixtures import pair, tiny

__all__ = ["pair", "tiny"]
