"""Snapshots of a process for one that shows it."""

from __future__ import annotations

import asyncio
from typing import Any

from reflex_runtime.core.batch import Done
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe.live import OnDemandLive


def test_x4_who_asks_again_sees_what_has_come_since() -> None:
    scheduler, sinks = Scheduler([GroupConfig()]), list[Any]()

    def run() -> None:
        scheduler.submit(Request(None, client="arm"), 0.0)
        batch = scheduler.next_batch(10.0)
        assert batch is not None
        scheduler.complete(batch, [Done()] * len(batch), 0.1, 10.1)
        for event in scheduler.take_events():
            for sink in sinks:
                if type(event) in sink.events:
                    sink(event)

    async def check() -> None:
        asked = OnDemandLive(sinks.append, sinks.remove, dict)
        assert asked.snapshot().batches == []
        run()
        assert [len(asked.snapshot().batches) for _ in range(2)] == [1, 0]
        run()
        run()
        assert len(asked.snapshot().batches) == 2
        assert len(sinks) == 1
        asked.close()

    asyncio.run(check())
