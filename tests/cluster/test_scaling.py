"""How many replicas a load needs."""

from __future__ import annotations

import pytest

from reflex_runtime.cluster.scaling import replicas_for


@pytest.mark.parametrize(
    ("backlogs", "busy", "needed"),
    [
        ([0.0], [0.0], 1),
        ([0.2], [0.9], 2),
        ([0.21, 0.0], [0.5, 0.5], 2),
        ([0.9, 0.3], [1.0, 1.0], 6),
        ([0.0, 0.0, 0.0, 0.0], [0.7, 0.7, 0.7, 0.7], 4),  # nothing waits, and still none can be spared
        ([0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1], 1),
        ([0.1] * 8, [0.8] * 8, 8),
    ],
)
def test_x7_a_backlog_asks_for_more_replicas_and_idle_devices_for_fewer(
    backlogs: list[float], busy: list[float], needed: int
) -> None:
    assert replicas_for(backlogs, busy, target=0.2) == needed
