"""Which texts of a batch share a call of the model: a call pads its texts to the longest, and padding is computed.

Sorted by length, the texts are cut into calls where the sum of what is computed and of what a call costs by itself is
least. So a short text beside a long one costs what it costs alone. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

MOST_PLACES = 16_384  # tokens of one call, padding included: it bounds the memory of a call
MOST_TEXTS = 64  # texts of one call, so that cutting a batch is brief


def calls_of(
    lengths: Sequence[int],
    work: Callable[[float], float],
    fixed: float,
    most: int = MOST_PLACES,
    pairs: int = MOST_PLACES**2,
) -> list[list[int]]:
    """The calls: places of `lengths`, each call's longest text first.

    work: of a text by its length, in any unit; fixed: of a call by itself, in the same unit. most: places of one call;
    pairs: of places of the same text, in all texts of one call. A single text may have any length.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    count = len(order)
    best, cut = [0.0] + [inf] * count, [0] * (count + 1)  # best[i]: least for the first i texts of `order`
    for first in range(count):
        longest = lengths[order[first]]
        each = work(longest)
        room = max(1, min(most // longest, pairs // longest**2))
        for texts in range(1, min(count - first, MOST_TEXTS, room) + 1):
            total = best[first] + fixed + each * texts
            if total < best[first + texts]:
                best[first + texts], cut[first + texts] = total, first
    found: list[list[int]] = []
    end = count
    while end:
        found.append(order[cut[end] : end])
        end = cut[end]
    return found[::-1]
