"""Random operations on the generate batcher, tens of thousands, over a real connection that is lost now and then."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from random import Random
from typing import Any

import pytest

from ipc.runtime import Unavailable, World, run, world
from reflex_runtime.core.batch import BatchScheduled, Done, Event, RequestQueued, RequestSettled
from reflex_runtime.core.errors import ProcessorHung, ReflexError, Rejected
from reflex_runtime.ipc.frames import ProtocolError, RpcError
from reflex_runtime.ipc.generate_batcher import GenerateBatcher, GenerateBatcherConfig
from reflex_runtime.ipc.peer import ConnectionLost
from reflex_runtime.ipc.streams import StreamHandle
from thinned import thinned

OPERATIONS = 15_000  # of each seed; whatever can happen happens dozens of times
CONFIG = GenerateBatcherConfig(
    max_batch_size=5, stream_limit=12, max_pending=30, call_timeout_ms=60.0, pause_on_backpressure_ms=1.0,
    ungroupable_options=("seed",),
)  # fmt: skip
PRIORITIES = ("urgent", "default", "background")


class Watch:
    """A sink that counts every ticket's ends and looks at every batch."""

    events = frozenset({RequestQueued, RequestSettled, BatchScheduled})

    def __init__(self) -> None:
        self.open: dict[int, None] = {}
        self.queued = self.settled = self.done = 0
        self.last: dict[tuple[Any, Any], int] = {}
        self.sizes: Counter[int] = Counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            self.queued += 1
            self.open[event.ticket.seq] = None
        elif isinstance(event, RequestSettled):
            self.settled += 1
            self.done += isinstance(event.ticket.outcome, Done)
            del self.open[event.ticket.seq]  # KeyError: settled twice
        elif isinstance(event, BatchScheduled):
            self._look(event)

    def _look(self, event: BatchScheduled) -> None:
        batch = event.batch
        self.sizes[len(batch)] += 1
        for ticket in batch.grants:
            tier = (ticket.request.partition, ticket.request.priority)
            assert ticket.seq > self.last.get(tier, -1), "first in, first out within a tier of a partition"
            self.last[tier] = ticket.seq
            assert ticket.request.partition == batch.partition


class Operations:
    """The operations, each by chance."""

    def __init__(self, made: World, random: Random) -> None:
        self.world, self.random = made, random
        self.tasks: dict[asyncio.Task[dict[str, Any]], tuple[StreamHandle, asyncio.Event | None]] = {}
        self.readers: list[StreamHandle] = []
        self.outcomes: Counter[str] = Counter()
        self.callers = self.most = 0
        reserve = made.registry.reserve

        def reserved(handle: StreamHandle) -> None:
            reserve(handle)
            self.most = max(self.most, made.registry.active_count())
            assert made.registry.active_count() <= CONFIG.stream_limit, "more than the room"

        made.registry.reserve = reserved  # type: ignore[method-assign]
        self.all = [
            *[self.enqueue] * 8, *[self.answer] * 8, *[self.end] * 7, *[self.chunk] * 4, *[self.read] * 3,
            self.cancel_task, self.set_cancel, self.close_handle, self.stall, self.stray,
        ]  # fmt: skip

    async def one(self) -> None:
        random = self.random
        chance = random.random()
        self.world.passes(0.0002)
        if chance < 0.0006:
            self.world.runtime.die()
            await self.world.client.gone.wait()
        elif self.world.client.peer is None:
            self.enqueue()
            if chance < 0.5:
                await self.world.connect()
        elif chance < 0.0025:
            for _ in range(2 * CONFIG.max_pending):  # more than may wait
                self.enqueue()
        else:
            random.choice(self.all)()
        if random.random() < 0.25:
            await asyncio.sleep(0)
        if random.random() < 0.015:
            await self.world.round()
        if random.random() < 0.002:
            await self.world.later(random.choice((0.001, 0.001, 0.1)))
        self.check()

    def check(self) -> None:
        """What the runtime was sent since."""
        for method, requests in self.world.runtime.messages:
            assert len(requests) <= CONFIG.max_batch_size
            assert len({(r["model_id"], (r.get("guidance") or {}).get("mode")) for r in requests}) == 1, "mixed"
            alone = any("seed" in r for r in requests)
            assert method == ("generate" if alone else "batch_generate")
            assert not (alone and len(requests) > 1)
        self.world.runtime.messages.clear()
        if len(self.world.runtime.cancels) > 1000:
            del self.world.runtime.cancels[:500]

    # -- callers -------------------------------------------------------------------------------------------------------

    def enqueue(self) -> None:
        random, made = self.random, self.world
        self.callers += 1
        handle = made.registry.register()
        cancel = asyncio.Event() if random.random() < 0.3 else None
        options: dict[str, Any] = {"model_id": random.choice(("a", "a", "b"))}
        if random.random() < 0.1:
            options["guidance"] = {"mode": "json"}
        if random.random() < 0.1:
            options["seed"] = 1
        if random.random() < 0.2:
            options["timeout_ms"] = random.choice((0.0, 1.0, 4.0, 20.0))
        if random.random() < 0.08:
            made.runtime.refusing[handle.id] = RpcError(-32000, "refused by chance")
        task = made.ask(handle.id, random.choice(PRIORITIES), cancel=cancel, **options)
        self.tasks[task] = (handle, cancel)
        task.add_done_callback(self.settled)

    def settled(self, task: asyncio.Task[dict[str, Any]]) -> None:
        handle, _ = self.tasks.pop(task)  # KeyError: it settled twice
        if task.cancelled():
            self.outcomes["task cancelled"] += 1
            handle.close()  # as whoever registers must: the task may never have begun
            return
        error = task.exception()
        if error is not None:
            assert isinstance(error, ReflexError), error
            assert handle.ended or handle.closed, "what failed has no stream"
            self.outcomes[type(error).__name__] += 1
            return
        assert task.result()["stream_id"] == handle.id, "somebody else's answer"
        self.outcomes["started"] += 1
        self.readers.append(handle)
        if len(self.readers) > 40:
            self.readers.pop(0).close()

    def pick(self) -> tuple[asyncio.Task[Any], StreamHandle, asyncio.Event | None] | None:
        if not self.tasks:
            return None
        task = self.random.choice(list(self.tasks))
        return (task, *self.tasks[task])

    def cancel_task(self) -> None:
        if (picked := self.pick()) is not None:
            picked[0].cancel()

    def set_cancel(self) -> None:
        if (picked := self.pick()) is not None and picked[2] is not None:
            picked[2].set()

    def close_handle(self) -> None:
        picked = self.pick()
        if picked is not None and self.random.random() < 0.5:
            picked[1].close()
        elif self.readers:
            self.readers.pop(self.random.randrange(len(self.readers))).close()

    def read(self) -> None:
        if not self.readers:
            return
        index = self.random.randrange(len(self.readers))
        handle = self.readers[index]
        try:
            handle.take(self.random.randrange(1, 40))
        except ReflexError as error:
            self.outcomes[f"read {type(error).__name__}"] += 1
            error.__traceback__ = None  # it holds the handle, which holds the error
            handle.close()
        if handle.closed or (handle.ended and not handle.unread):
            self.readers[index] = self.readers[-1]
            self.readers.pop()

    # -- the runtime ---------------------------------------------------------------------------------------------------

    def answer(self) -> None:
        runtime, random = self.world.runtime, self.random
        if not runtime.calls:
            return
        chance, index = random.random(), random.randrange(len(runtime.calls))
        if chance < 0.02:
            runtime.fail(RpcError(-32603, "the whole message failed"), index)
        else:
            several = runtime.calls[index].method == "batch_generate"
            runtime.wrong = random.choice((-1, 1)) if chance < 0.05 and several else 0
            runtime.answer(index)
            runtime.wrong = 0

    def live(self) -> str | None:
        live = self.world.runtime.live
        return self.random.choice(list(live)) if live else None

    def chunk(self) -> None:
        if (id := self.live()) is not None:
            self.world.runtime.chunk(id, self.random.randrange(1, 30))

    def end(self) -> None:
        if (id := self.live()) is not None:
            event = self.random.choice(("completed", "completed", "cancelled", "error"))
            self.world.runtime.end(id, event, RpcError(-32000, "by chance") if event == "error" else None)

    def stall(self) -> None:
        if (id := self.live()) is not None:
            said = {"stream_id": id, "event": self.random.choice(("backpressure", "slowConsumer"))}
            self.world.runtime.say("stream.event", said)

    def stray(self) -> None:
        """Of a stream that nobody knows, of one that ended, of one that nobody can read."""
        runtime = self.world.runtime
        if (id := self.live()) is not None and self.random.random() < 0.2:
            runtime.say("stream.chunk", {"stream_id": id, "tokens": 7})
        if self.readers:
            runtime.chunk(self.readers[0].id)
        runtime.end("nobody")


def objects() -> int:
    """Objects that live after a collection."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("seed", thinned([6, 7], [6]))
def test_x2_random_operations_settle_every_caller_once_and_return_every_place(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch()
    caplog.set_level(logging.ERROR)

    async def main() -> None:
        async with world(CONFIG, gated=True, window=32, sinks=[watch]) as made:
            operations = Operations(made, Random(seed))
            before = garbage = 0
            gc.collect()
            gc.disable()  # what lives and what lies in circles is counted here
            try:
                for n in range(OPERATIONS):
                    await operations.one()
                    if n % 5_000 == 4_999:
                        garbage += gc.collect()
                    if n == OPERATIONS // 5:
                        before = objects()
                after = objects()
            finally:
                gc.enable()
            await finish(made, operations)
            check_ends(made, operations, watch)
            assert after - before < 1_500, f"{after - before} objects more after four fifths of the operations"
            assert garbage < 0.1 * operations.callers, f"{garbage} objects in circles of {operations.callers} requests"

    run(main())
    assert not caplog.records, "the loop or a sink complained"


async def finish(made: World, operations: Operations) -> None:
    """Let everybody have an answer."""
    runtime = made.runtime
    if made.client.peer is None:
        await made.connect()
    runtime.gated, runtime.brief = False, True
    while runtime.calls:
        runtime.answer()
    for id in list(runtime.live):
        runtime.end(id)
    if operations.tasks:
        await asyncio.wait(list(operations.tasks))
    await made.round()
    await made.batcher.close(drain=False)
    await made.round()


def check_ends(made: World, operations: Operations, watch: Watch) -> None:
    outcomes, batcher = operations.outcomes, made.batcher
    assert not operations.tasks
    assert sum(n for kind, n in outcomes.items() if not kind.startswith("read")) == operations.callers
    assert not watch.open
    assert watch.queued == watch.settled
    assert outcomes["started"] <= watch.done
    assert made.registry.active_count() == 0
    assert batcher.get_stats()["pending"] == 0
    assert not any(handle.reserved for handle in operations.readers)
    assert made.registry.snapshot()["registered"] == 0
    assert operations.most == CONFIG.stream_limit, "the room was never needed"
    assert set(watch.sizes) == set(range(1, CONFIG.max_batch_size + 1))
    check_reach(batcher, outcomes)


def check_reach(batcher: GenerateBatcher, outcomes: Counter[str]) -> None:
    """Everything that can happen to a request has happened."""
    kinds = (ConnectionLost, ProtocolError, ProcessorHung, Unavailable)
    wanted = {kind.__name__ for kind in kinds} | {"QueueFull", "Displaced", "Cancelled", "Expired", "started"}
    missing = {name for name in wanted if not outcomes[name]}
    assert not missing, f"{missing} of {outcomes}"
    assert issubclass(Unavailable, Rejected)
    stats: dict[str, Any] = batcher.get_stats()
    assert stats["fallbacks"]["options"] > 100
    assert min(stats["backpressure_pauses"], stats["aborted_requests"], stats["transport_errors"]) > 100
