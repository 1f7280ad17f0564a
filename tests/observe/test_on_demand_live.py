"""Snapshots of one process for several that ask."""

from __future__ import annotations

import asyncio
from typing import Any

from reflex_runtime.core.batch import Done
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe.live import OnDemandLive


def test_x7_two_that_ask_see_every_batch_each() -> None:
    """Pages that two replicas on Ray serve at the same time: none has only what the other has left."""
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
        for asker in ("r0", "r1"):
            asked.snapshot(asker)
        run()
        assert [len(asked.snapshot(asker).batches) for asker in ("r0", "r1", "r0")] == [1, 1, 0]
        run()
        assert [len(asked.snapshot(asker).batches) for asker in ("r1", "r0")] == [1, 1]
        asked.close()

    asyncio.run(check())
