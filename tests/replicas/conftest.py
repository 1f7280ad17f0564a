"""The exports that tests of replicas share."""

from serving.fixtures import pair, tiny

__all__ = ["pair", "tiny"]
