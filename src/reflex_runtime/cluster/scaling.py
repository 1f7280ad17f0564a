"""How many replicas a load needs. Pure: Ray asks it through `policy`; the triggers of deploy/k8s say the same."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Final

FULL: Final = 0.8  # share of a device's time that a replica may be busy: a queue grows without bound towards 1
BACKLOG: Final = "reflex_backlog_seconds"  # the names under which replicas report the two
BUSY: Final = "reflex_device_busy_share"
_SLACK: Final = 1e-6  # sums of floats


def replicas_for(backlogs: Iterable[float], busy: Iterable[float], target: float) -> int:
    """The replicas with which none has more than `target` seconds of waiting work, and none is busy beyond `FULL`.

    backlogs: predicted seconds of waiting work of each replica; busy: the share of its time that its device computes.
    A backlog says that there are too few replicas, but not that there are too many: it is empty until a device is
    nearly full. So the busy share decides how few are enough. At least 1.
    """
    waiting, computing = sum(backlogs), sum(busy)
    return max(1, ceil(waiting / target - _SLACK), ceil(computing / FULL - _SLACK))
