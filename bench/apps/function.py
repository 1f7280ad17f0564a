"""The functions that `bench.functions` serves, by every server alike: only the standard library, for any environment.

A square root fails for a negative number, and with it the whole call: one bad item. Answers name their batch.
"""

from __future__ import annotations

import math
import time
from typing import TypedDict


class Item(TypedDict):
    """What a caller sends."""

    x: float


class Batch(TypedDict):
    """What the load generator counts batches by."""

    size: int


class Root(TypedDict):
    """What a caller gets."""

    y: float
    batch: Batch


def roots(items: list[Item]) -> list[Root]:
    """It costs nothing: what is left is the serving."""
    return [{"y": math.sqrt(item["x"]), "batch": {"size": len(items)}} for item in items]


def slow_roots(items: list[Item]) -> list[Root]:
    """2 ms and 0.1 ms an item, in which nobody computes: it stands for a device, not for work on the CPU."""
    time.sleep(0.002 + 0.0001 * len(items))
    return roots(items)


FUNCTIONS = {"roots": roots, "slow_roots": slow_roots}
