"""A processor that declares captured sizes: what is predicted of its batches, and what the hit-rate gauge says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest

from reflex_runtime import Batcher, FlushPolicy, GroupConfig, Request
from reflex_runtime.core.batch import Batch, BatchScheduled, Event
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.request import Ticket
from reflex_runtime.observe.metrics import Metrics
from reflex_runtime.run.processor import BaseProcessor
from run.helpers import asleep


class Padding(BaseProcessor):
    """Takes 1 ms + 2 ms · the size it runs at, which is the next captured one, on a clock that only it moves."""

    def __init__(self, captured_sizes: tuple[int, ...]) -> None:
        self.captured_sizes = captured_sizes
        self.now = 0.0

    def run(self, batch: Batch) -> Sequence[Any]:
        n = len(batch)
        size = next((s for s in self.captured_sizes if s >= n), None)
        if self.captured_sizes:
            batch.notes["captured"] = size is not None
        self.now += 0.001 + 0.002 * (size or n)
        return [None] * n


class Served:
    """Bursts of requests through a Batcher with Metrics; each burst is one batch."""

    def __init__(self, processor: Padding) -> None:
        self.metrics = Metrics()
        self.sizes: list[int] = []
        group = GroupConfig(
            name="prod", flush=FlushPolicy.window(10.0, 0.0), cost=lambda: TimeCost(sizes=processor.captured_sizes)
        )
        self.batcher = Batcher(
            {"prod": processor}, [group], [self.metrics, self._watch], watchdog=0.0, clock=lambda: processor.now
        )
        self.metrics.add_slot("prod", "unknown", lambda: 0.0, lambda: 0.0, lambda: 0.0)

    def _watch(self, event: Event) -> None:
        if isinstance(event, BatchScheduled):
            self.sizes.append(len(event.batch))

    async def bursts(self, *sizes: int) -> None:
        self.sizes.clear()
        for n in sizes:
            await asleep(self.batcher)
            await asyncio.gather(*(self.batcher.run(Request(None, group="prod", client=i)) for i in range(n)))
        assert self.sizes == list(sizes)

    def predicted(self, n: int) -> float:
        tally = self.batcher.scheduler.cost_model("prod").tally()
        for i in range(n):
            tally.add(Ticket(Request(None, group="prod"), i, 0.0), 1.0)
        return tally.cost

    @property
    def hit_rate(self) -> float:
        (found,) = re.findall(rb"^reflex_captured_graph_hit_rate\{.*\} (\S+)$", self.metrics.render(), re.MULTILINE)
        return float(found)


def test_b24_a_batch_is_predicted_at_the_size_it_is_padded_to() -> None:
    async def main() -> None:
        served = Served(Padding((2, 8)))
        async with served.batcher:
            await served.bursts(*(1, 3, 2, 8, 5) * 6)
            assert served.predicted(1) == pytest.approx(served.predicted(2))
            assert served.predicted(3) == pytest.approx(served.predicted(8))
            assert served.predicted(8) > 2.0 * served.predicted(2)  # 17 ms and 5 ms
            assert served.predicted(9) > served.predicted(8)  # beyond the largest it runs as it is

    asyncio.run(main())


def test_b24_a_flush_at_a_captured_size_is_a_hit() -> None:
    async def main() -> None:
        served = Served(Padding((2, 8)))
        async with served.batcher:
            assert served.hit_rate == 0.0
            await served.bursts(1, 2, 3, 8)
            assert served.hit_rate == 1.0
            await served.bursts(9, 10, 1, 9)
            assert served.hit_rate == 5 / 8

    asyncio.run(main())


def test_b24_without_captured_sizes_the_hit_rate_is_0_and_nothing_is_padded() -> None:
    async def main() -> None:
        served = Served(Padding(()))
        assert BaseProcessor().captured_sizes == ()
        async with served.batcher:
            await served.bursts(*(1, 4) * 6)
            assert served.hit_rate == 0.0
            assert served.predicted(4) > served.predicted(3) > served.predicted(2) > served.predicted(1)

    asyncio.run(main())
