"""The exports that tests of servers share."""

from serving.fixtures import pair, tiny

__all__ = ["pair", "tiny"]
