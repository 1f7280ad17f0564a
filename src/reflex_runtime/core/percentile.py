"""The one definition of a percentile: guards, reports, statistics and the simulator agree on what p99 is."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

_ROUNDING = 1e-9  # 0.07 · 100 is a little more than 7 in binary: still the seventh value


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of the values do not exceed, a value that occurred.

    ordered: ascending, at least one; IndexError without any. share: in (0, 1], 0.99 for p99.
    """
    return ordered[max(1, ceil(share * len(ordered) - _ROUNDING)) - 1]
