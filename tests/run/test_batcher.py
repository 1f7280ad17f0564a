"""The asyncio driver on real threads: nothing here sleeps to wait for something."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Done,
    More,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    ConfigError,
    CutShort,
    Drained,
    Expired,
    ProcessorError,
    ProcessorHung,
    QueueFull,
    Rejected,
)
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.run import audience
from reflex_runtime.run.audience import SLICE
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.processor import BaseProcessor, FunctionProcessor
from run.helpers import PATIENCE, Gate, Log, asleep, run

BY_COUNT = [GroupConfig(flush=FlushPolicy.by_size(64, 0.0))]  # no cost to learn, no hold


async def outcome(waiter: asyncio.Future[Any]) -> Any:
    """What a future ended with."""
    try:
        return await waiter
    except Exception as error:
        return error


# -- submitting --------------------------------------------------------------------------------------------------------


def test_requests_of_one_turn_of_the_loop_share_a_batch() -> None:
    async def main() -> None:
        gate = Gate(is_open=True)
        async with Batcher({"default": gate}, BY_COUNT) as batcher:
            await asleep(batcher)
            assert await asyncio.gather(*(batcher.run(Request(i)) for i in range(5))) == [0, 1, 2, 3, 4]
        assert gate.calls == [[0, 1, 2, 3, 4]]
        assert (gate.started, gate.stopped) == (1, 1)

    run(main())


def test_b5_while_the_device_is_busy_the_queue_grows_into_one_batch() -> None:
    async def main() -> None:
        gate = Gate()
        async with Batcher({"default": gate}, BY_COUNT) as batcher:
            first = batcher.submit(Request("first"))
            await gate.busy()
            rest = []
            for i in range(10):
                rest.append(batcher.submit(Request(i)))
                await asyncio.sleep(0)  # a turn of the loop each: only the device holds them together
            assert len(gate.calls) == 1
            gate.gate.set()
            await asyncio.gather(first.waiter, *(t.waiter for t in rest))
        assert gate.calls == [["first"], list(range(10))]

    run(main())


def test_b13_a_refusal_is_raised_at_once_and_told_to_the_sinks() -> None:
    async def main() -> None:
        gate, log = Gate(), Log()
        async with Batcher({"default": gate}, [GroupConfig(capacity=1)], [log]) as batcher:
            running = batcher.submit(Request("running"))
            await gate.busy()
            waiting = batcher.submit(Request("waiting"))
            with pytest.raises(QueueFull):
                batcher.submit(Request("too many"))
            await asyncio.sleep(0)  # the next turn of the loop
            assert [e.request.payload for e in log.of(RequestRejected)] == ["too many"]
            gate.gate.set()
            await asyncio.gather(running.waiter, waiting.waiter)

    run(main())


def test_b16_thousands_that_are_cancelled_together_are_taken_back_in_slices() -> None:
    """So that whoever else needs the loop gets its turn between two of them."""

    async def main() -> None:
        gate, turn = Gate(), 0
        cancelled: Counter[int] = Counter()
        many = [GroupConfig(capacity=5000, flush=FlushPolicy.by_size(64, 0.0))]
        async with Batcher({"default": gate}, many) as batcher:
            running = batcher.submit(Request("running"))
            await gate.busy()
            left: list[Ticket] = []

            def settled(ticket: Ticket) -> None:
                assert isinstance(ticket.outcome.error, Cancelled)  # type: ignore[union-attr]
                left.append(ticket)
                cancelled[turn] += 1

            tickets = [batcher.submit(Request(i), settled) for i in range(3000)]
            for ticket in tickets:
                batcher.cancel(ticket)
            assert batcher.scheduler.queued("default") == 3000 - SLICE
            while len(left) < 3000:
                turn += 1
                before = batcher.scheduler.queued("default")
                await asyncio.sleep(0)
                assert before - batcher.scheduler.queued("default") <= 2 * SLICE
            assert left == tickets
            assert max(cancelled.values()) <= 2 * SLICE
            gate.gate.set()
            await running.waiter
        assert gate.calls == [["running"]]

    run(main())


def test_b16_a_few_that_are_cancelled_are_taken_back_at_once_and_all_when_it_closes() -> None:
    async def main() -> None:
        gate = Gate()
        async with Batcher({"default": gate}, [GroupConfig(capacity=5000)]) as batcher:
            running = batcher.submit(Request("running"))
            await gate.busy()
            few = [batcher.submit(Request(i)) for i in range(SLICE)]
            for ticket in few:
                batcher.cancel(ticket)
            assert batcher.scheduler.queued("default") == 0
            ended: list[Ticket] = []
            many = [batcher.submit(Request(i), ended.append) for i in range(1000)]
            for ticket in many:
                batcher.cancel(ticket)
            gate.gate.set()
            assert await batcher.close()
            assert set(ended) == set(many)
            assert await running.waiter == "running"
            assert [type(await outcome(ticket.waiter)) for ticket in few] == [Cancelled] * SLICE

    run(main())


def test_b20_everybody_is_told_when_it_has_closed_however_many_there_are() -> None:
    async def main() -> None:
        gate, ended = Gate(), list[Ticket]()
        async with Batcher({"default": gate}, [GroupConfig(capacity=9000)]) as batcher:
            running = batcher.submit(Request("running"))
            await gate.busy()
            tickets = [batcher.submit(Request(i), ended.append) for i in range(8000)]
            gate.gate.set()
            await batcher.close(drain=False)
            assert running.waiter.done()
            assert len(ended) == 8000
            assert set(ended) == set(tickets)

    run(main())


def test_answers_by_the_thousand_are_told_in_slices_and_in_order() -> None:
    async def main() -> None:
        gate, log = Gate(), Log()
        everyone = [GroupConfig(capacity=5000, flush=FlushPolicy.by_size(4000, 0.0))]
        async with Batcher({"default": gate}, everyone, [log]) as batcher:
            first = batcher.submit(Request("first"))
            await gate.busy()
            tickets = [batcher.submit(Request(i)) for i in range(1000)]
            gate.gate.set()
            await first.waiter
            seen, most = len(log.of(RequestSettled)), 0
            while seen < 1001:
                await asyncio.sleep(0)
                now = len(log.of(RequestSettled))
                seen, most = now, max(most, now - seen)
            assert most <= 3 * SLICE  # of 1,000; the device may hand over twice in one turn
            assert [e.ticket for e in log.of(RequestSettled)] == [first, *tickets]
            assert [t.waiter.result() for t in tickets] == list(range(1000))

    run(main())


def test_deadlines_that_pass_together_are_answered_in_one_slice_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice fills what one turn of the loop has for answers: two of them make everybody else wait twice as long."""
    monkeypatch.setattr(audience, "TURN", 0.0)  # one answer is a slice

    async def main() -> None:
        gate, turn, now = Gate(), 0, [0.0]
        answered: Counter[int] = Counter()
        async with Batcher({"default": gate}, [GroupConfig(capacity=5000)], clock=lambda: now[0]) as batcher:
            running = batcher.submit(Request("running"))
            await gate.busy()

            def settled(ticket: Ticket) -> None:
                assert isinstance(ticket.outcome.error, Expired)  # type: ignore[union-attr]
                answered[turn] += 1

            for i in range(300):
                batcher.submit(Request(i, time_limit=0.02), settled)
            now[0] = 1.0  # all of them have passed when the first is looked at
            while answered.total() < 300:
                turn += 1
                await asyncio.sleep(0)
            assert set(answered.values()) == {1}
            gate.gate.set()
            await running.waiter

    run(main())


def test_an_unknown_group_is_a_config_error() -> None:
    async def main() -> None:
        async with Batcher({"default": Gate(is_open=True)}) as batcher:
            with pytest.raises(ConfigError, match="nobody"):
                batcher.submit(Request(group="nobody"))
            assert await batcher.run(Request(1)) == 1

    run(main())


def test_the_loop_answers_while_a_batch_is_on_the_device() -> None:
    async def main() -> None:
        gate = Gate()
        async with Batcher({"default": gate}) as batcher:
            ticket = batcher.submit(Request(1))
            await gate.busy()
            turns = 0
            for _ in range(1000):
                await asyncio.sleep(0)
                turns += 1
            assert turns == 1000
            assert not ticket.waiter.done()
            gate.gate.set()
            assert await ticket.waiter == 1

    run(main())


def test_residents_stay_for_as_many_steps_as_they_want() -> None:
    class Steps(BaseProcessor):
        def run(self, batch: Batch) -> Sequence[Any]:
            return [
                Done(t.batches) if t.batches == t.request.payload else More(None, wants=1.0) for t in batch.grants
            ]

    async def main() -> None:
        async with Batcher({"default": Steps()}, [GroupConfig(flush=FlushPolicy.by_size(8, 0.0))]) as batcher:
            assert await asyncio.gather(*(batcher.run(Request(n)) for n in (3, 1, 7))) == [3, 1, 7]

    run(main())


# -- every one once, in order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_x2_every_future_settles_once_under_random_histories(seed: int) -> None:
    rng = random.Random(seed)

    def answer(payloads: list[int]) -> list[Any]:
        if rng.random() < 0.1:
            raise RuntimeError("the whole call")
        return [ValueError(p) if p % 7 == 0 else p for p in payloads]

    async def main() -> None:
        log = Log()
        groups = [GroupConfig(flush=FlushPolicy.by_size(8, 0.0), capacity=40)]
        batcher = Batcher({"default": FunctionProcessor(answer)}, groups, [log])
        tickets, refused = [], 0
        async with batcher:
            for i in range(600):
                roll = rng.random()
                if roll < 0.7:
                    try:
                        limit = rng.choice((None, None, 0.0005, 5.0))
                        tickets.append(batcher.submit(Request(i, client=i % 5, time_limit=limit)))
                    except Rejected:
                        refused += 1
                elif roll < 0.85 and tickets:
                    batcher.cancel(rng.choice(tickets))
                else:
                    await asyncio.sleep(0)
        results = [await outcome(ticket.waiter) for ticket in tickets]
        for ticket, result in zip(tickets, results, strict=True):
            if not isinstance(result, Exception):
                assert result == ticket.request.payload
                assert result % 7
            else:
                assert isinstance(result, Cancelled | Expired | ProcessorError), result
        settled = Counter(id(e.ticket) for e in log.of(RequestSettled))
        assert settled == Counter(id(ticket) for ticket in tickets)
        assert len(log.of(RequestRejected)) == refused
        assert batcher.scheduler.idle

    run(main())


def test_sinks_see_the_life_of_a_request_in_order() -> None:
    async def main() -> None:
        log = Log()
        async with Batcher({"default": Gate(is_open=True)}, sinks=[log]) as batcher:
            for i in range(20):
                await batcher.run(Request(i))
        assert [e.at for e in log.seen] == sorted(e.at for e in log.seen)
        order = [RequestQueued, BatchScheduled, BatchFinished, RequestSettled]
        assert [type(e) for e in log.seen] == order * 20

    run(main())


def test_a_sink_gets_what_it_asks_for() -> None:
    async def main() -> None:
        class Picky:
            events = frozenset({BatchFinished})

            def __init__(self) -> None:
                self.seen: list[Any] = []

            def __call__(self, event: Any) -> None:
                self.seen.append(event)

        picky, later = Picky(), Log()
        async with Batcher({"default": Gate(is_open=True)}, sinks=[picky]) as batcher:
            await batcher.run(Request(1))
            batcher.add_sink(later)
            await batcher.run(Request(2))
        assert [type(e) for e in picky.seen] == [BatchFinished, BatchFinished]
        assert [e.ticket.request.payload for e in later.of(RequestSettled)] == [2]

    run(main())


def test_a_sink_that_raises_costs_nobody_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        def broken(event: Any) -> None:
            raise RuntimeError("full disk")

        log = Log()
        async with Batcher({"default": Gate(is_open=True)}, sinks=[broken, log]) as batcher:
            assert await asyncio.gather(*(batcher.run(Request(i)) for i in range(3))) == [0, 1, 2]
        assert len(log.of(RequestSettled)) == 3

    run(main())
    assert "full disk" in caplog.text


def test_flush_hands_out_what_nobody_waits_for() -> None:
    async def main() -> None:
        gate, log = Gate(), Log()
        async with Batcher({"default": gate}, sinks=[log]) as batcher:
            ticket = batcher.submit(Request(1))
            await gate.busy()
            batcher.flush()
            assert len(log.of(BatchScheduled)) == 1
            gate.gate.set()
            await ticket.waiter

    run(main())


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_b16_a_request_cancelled_while_queued_is_never_executed() -> None:
    async def main() -> None:
        gate = Gate()
        async with Batcher({"default": gate}) as batcher:
            first = batcher.submit(Request("first"))
            await gate.busy()
            leaving, staying = batcher.submit(Request("leaving")), batcher.submit(Request("staying"))
            batcher.cancel(leaving)
            with pytest.raises(Cancelled):
                await leaving.waiter
            gate.gate.set()
            await asyncio.gather(first.waiter, staying.waiter)
        assert gate.calls == [["first"], ["staying"]]

    run(main())


def test_b16_cancelling_the_awaiting_task_takes_the_request_back() -> None:
    async def main() -> None:
        gate = Gate()
        async with Batcher({"default": gate}) as batcher:
            first = batcher.submit(Request("first"))
            await gate.busy()
            task = asyncio.create_task(batcher.run(Request("leaving")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.gate.set()
            await first.waiter
        assert gate.calls == [["first"]]

    run(main())


def test_b16_the_value_of_one_cancelled_while_it_runs_is_dropped() -> None:
    async def main() -> None:
        gate, log = Gate(), Log()
        async with Batcher({"default": gate}, sinks=[log]) as batcher:
            leaving, staying = batcher.submit(Request("leaving")), batcher.submit(Request("staying"))
            await gate.busy()
            batcher.cancel(leaving)
            gate.gate.set()
            assert await staying.waiter == "staying"
            with pytest.raises(Cancelled):
                await leaving.waiter
        assert not log.of(BatchFinished)[0].crashed

    run(main())


def test_b16_a_task_cancelled_while_it_runs_leaves_its_neighbours_their_answers() -> None:
    async def main() -> None:
        gate = Gate()
        async with Batcher({"default": gate}, BY_COUNT) as batcher:
            leaving = asyncio.create_task(batcher.run(Request("leaving")))
            staying = asyncio.create_task(batcher.run(Request("staying")))
            await gate.busy()
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            gate.gate.set()
            assert await staying == "staying"
        assert gate.calls == [["leaving", "staying"]]

    run(main())


def test_b17_a_deadline_is_told_while_the_device_is_busy() -> None:
    async def main() -> None:
        gate = Gate()
        async with Batcher({"default": gate}, watchdog=0.0) as batcher:
            first = batcher.submit(Request("first"))
            await gate.busy()
            late = batcher.submit(Request("late", time_limit=0.010))
            with pytest.raises(Expired):
                await late.waiter  # the gate is still shut
            gate.gate.set()
            await first.waiter
        assert gate.calls == [["first"]]

    run(main())


def test_b17_the_earliest_of_many_deadlines_rings_first() -> None:
    async def main() -> None:
        gate = Gate()
        async with Batcher({"default": gate}) as batcher:
            first = batcher.submit(Request("first"))
            await gate.busy()
            order: list[Ticket] = []
            tickets = [batcher.submit(Request(i, time_limit=0.02 * i)) for i in (3, 1, 2)]
            for ticket in tickets:
                ticket.waiter.add_done_callback(lambda _, ticket=ticket: order.append(ticket))
            waiting = [outcome(ticket.waiter) for ticket in tickets]
            assert all(isinstance(error, Expired) for error in await asyncio.gather(*waiting))
            assert order == sorted(tickets, key=lambda ticket: ticket.deadline)
            gate.gate.set()
            await first.waiter

    run(main())


# -- faults ------------------------------------------------------------------------------------------------------------


def test_b19_exceptions_and_wrong_counts_reach_their_callers_and_nobody_else() -> None:
    answers: list[Any] = [lambda p: p[:-1], lambda p: [*p, "one more"], lambda p: 1 / 0, lambda p: None, lambda p: p]

    async def main() -> None:
        turn = iter(answers)
        processor = FunctionProcessor(lambda payloads: next(turn)(payloads), repeatable=False)
        async with Batcher({"default": processor}, BY_COUNT) as batcher:
            for _ in answers[:-1]:
                await asleep(batcher)
                results = await asyncio.gather(*(batcher.run(Request(i)) for i in range(3)), return_exceptions=True)
                assert all(isinstance(result, ProcessorError) for result in results), results
            await asleep(batcher)
            assert await asyncio.gather(*(batcher.run(Request(i)) for i in range(3))) == [0, 1, 2]

    run(main())


def test_b19_a_hung_thread_is_replaced_once_and_then_the_device_is_given_up() -> None:
    async def main() -> None:
        gate, log, fatal, now = Gate(), Log(), asyncio.Event(), [0.0]
        before = threading.active_count()
        given: Any = {"watchdog": 60.0, "on_fatal": fatal.set, "clock": lambda: now[0]}
        batcher = Batcher({"default": gate}, sinks=[log], **given)
        await batcher.start()
        first = batcher.submit(Request("first"))
        await gate.busy()
        second = batcher.submit(Request("second"))  # waits behind the one that hangs
        now[0] = 60.0
        batcher._on_timer()
        with pytest.raises(ProcessorHung):
            await first.waiter
        assert batcher.device.lost is None
        await gate.busy()  # the replacement took the second, and hangs in it
        third = batcher.submit(Request("third"))
        now[0] = 120.0
        batcher._on_timer()
        with pytest.raises(ProcessorHung):
            await second.waiter
        with pytest.raises(Drained):
            await third.waiter
        await fatal.wait()
        assert batcher.device.lost is not None
        assert batcher.device.hung == 2
        with pytest.raises(Closed):
            batcher.submit(Request("fourth"))
        gate.gate.set()  # the lost threads come back, and nobody listens to them
        assert not await batcher.close()
        assert [e.ticket.request.payload for e in log.of(RequestSettled)] == ["first", "second", "third"]
        assert threading.active_count() < before + 10

    run(main())


def test_b19_with_one_thread_a_hung_batch_is_answered_and_no_other_thread_runs_beside_it() -> None:
    async def main() -> None:
        gate, fatal, now = Gate(), asyncio.Event(), [0.0]
        one_by_one = [GroupConfig(flush=FlushPolicy.by_size(1, 0.0))]
        given: Any = {"watchdog": 60.0, "on_fatal": fatal.set, "one_thread": True, "clock": lambda: now[0]}
        async with Batcher({"default": gate}, one_by_one, **given) as batcher:
            first, second = batcher.submit(Request("first")), batcher.submit(Request("second"))
            await gate.busy()
            now[0] = 60.0
            batcher._on_timer()
            with pytest.raises(ProcessorHung):
                await first.waiter
            assert batcher.device.busy
            assert len(gate.calls) == 1  # the second waits for the thread, not for another one
            gate.gate.set()
            assert await second.waiter == "second"
            assert (batcher.device.hung, gate.started, fatal.is_set()) == (1, 1, False)

    run(main())


def test_b17_a_deadline_passes_on_time_behind_a_batch_that_was_given_up() -> None:
    async def main() -> None:
        gate, now = Gate(), [0.0]
        one_by_one = [GroupConfig(flush=FlushPolicy.by_size(1, 0.0))]
        async with Batcher(
            {"default": gate}, one_by_one, watchdog=60.0, clock=lambda: now[0], one_thread=True
        ) as batcher:
            first = batcher.submit(Request("first"))
            await gate.busy()
            waits = batcher.submit(Request("waits", time_limit=90.0))
            now[0] = 60.0
            batcher._on_timer()
            with pytest.raises(ProcessorHung):
                await first.waiter
            assert batcher._timer_at == waits.deadline  # not a whole watchdog later
            now[0] = 90.0
            batcher._on_timer()
            with pytest.raises(Expired):
                await waits.waiter
            gate.gate.set()

    run(main())


def test_b19_the_watchdog_outlasts_a_hold() -> None:
    """The timer goes off while the request is still held on a free device, and is there again when its batch hangs."""

    async def main() -> None:
        gate = Gate()
        hold = [GroupConfig(flush=FlushPolicy.by_size(4, 0.050))]
        async with Batcher({"default": gate}, hold, watchdog=0.020) as batcher:
            with pytest.raises(ProcessorHung):
                await batcher.run(Request(1))
            gate.gate.set()

    run(main())


def test_b19_the_limit_counts_from_the_start_of_the_batch() -> None:
    async def main() -> None:
        gate, now = Gate(is_open=True), [0.0]
        async with Batcher({"default": gate}, BY_COUNT, clock=lambda: now[0]) as batcher:
            await batcher.run(Request("first"))  # from here the timer is set
            await gate.busy()
            gate.gate.clear()
            now[0] = 9.0
            second = batcher.submit(Request("second"))
            await gate.busy()
            now[0] = 18.9
            batcher.device.watchdog = 10.0
            assert batcher.device.look() == 19.0
            assert batcher.device.hung == 0
            now[0] = 19.0
            batcher.device.watchdog = 10.0
            batcher.device.look()
            assert batcher.device.hung == 1
            with pytest.raises(ProcessorHung):
                await second.waiter
            gate.gate.set()

    run(main())


@pytest.mark.parametrize("death", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_b19_a_dying_thread_answers_and_is_replaced(death: BaseException) -> None:
    class Dies(Gate):
        def run(self, batch: Batch) -> Sequence[Any]:
            if len(self.calls) == 0:
                self.calls.append([])
                raise death
            return super().run(batch)

    async def main() -> None:
        dies = Dies(is_open=True)
        async with Batcher({"default": dies}) as batcher:
            with pytest.raises(ProcessorError, match="died"):
                await batcher.run(Request(1))
            assert await batcher.run(Request(2)) == 2
            assert dies.started == 2

    run(main())


def test_b19_a_processor_that_cannot_start_ends_the_device() -> None:
    class Broken(Gate):
        def start(self) -> None:
            raise RuntimeError("no such device")

    async def main() -> None:
        fatal = asyncio.Event()
        batcher = Batcher({"default": Broken()}, on_fatal=fatal.set)
        await batcher.start()
        await fatal.wait()
        with pytest.raises(Closed):
            batcher.submit(Request(1))
        assert not await batcher.close()

    run(main())


def test_b19_errors_in_stop_and_drop_are_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Rude(BaseProcessor):
        def run(self, batch: Batch) -> Sequence[Any]:
            return [More(None, wants=1.0) if t.batches == 1 else Done(1) for t in batch.grants]

        def drop(self, tickets: Sequence[Any]) -> None:
            raise RuntimeError("cannot drop")

        def stop(self) -> None:
            raise RuntimeError("cannot stop")

    async def main() -> None:
        fatal = asyncio.Event()
        async with Batcher({"default": Rude()}, on_fatal=fatal.set) as batcher:
            assert await batcher.run(Request(1)) == 1
        assert not fatal.is_set()
        assert batcher.device.lost is None

    run(main())
    assert "could not be stopped" in caplog.text


# -- closing -----------------------------------------------------------------------------------------------------------


def test_b20_close_finishes_what_is_queued() -> None:
    async def main() -> None:
        gate = Gate()
        batcher = Batcher({"default": gate}, [GroupConfig(flush=FlushPolicy.by_size(4, 60.0))])
        await batcher.start()
        tickets = [batcher.submit(Request(i)) for i in range(10)]
        await gate.busy()
        closing = asyncio.create_task(batcher.close(drain=True))
        await asyncio.sleep(0)
        with pytest.raises(Closed):
            batcher.submit(Request("late"))
        gate.gate.set()
        assert await closing
        assert [t.waiter.result() for t in tickets] == list(range(10))
        assert gate.stopped == 1
        assert await batcher.close()  # once more does no harm

    run(main())


def test_b20_close_without_drain_answers_the_queue_and_lets_the_batch_end() -> None:
    async def main() -> None:
        gate = Gate()
        batcher = Batcher({"default": gate})
        await batcher.start()
        running = batcher.submit(Request("running"))
        await gate.busy()
        queued = batcher.submit(Request("queued"))
        closing = asyncio.create_task(batcher.close(drain=False))
        with pytest.raises(Drained):
            await queued.waiter
        gate.gate.set()
        assert await closing
        assert running.waiter.result() == "running"
        assert gate.calls == [["running"]]

    run(main())


def test_b20_close_with_a_hung_batch_answers_everybody() -> None:
    async def main() -> None:
        gate = Gate()
        batcher = Batcher({"default": gate}, watchdog=0.0)
        await batcher.start()
        running = batcher.submit(Request("running"))
        await gate.busy()
        queued = batcher.submit(Request("queued"))
        assert not await batcher.close(drain=True, timeout=0.1)
        assert isinstance(running.waiter.exception(), CutShort)
        assert isinstance(queued.waiter.exception(), Drained)
        lost = next(t for t in threading.enumerate() if t.name.startswith("reflex-device"))
        gate.gate.set()
        await asyncio.to_thread(lost.join, PATIENCE)
        assert not lost.is_alive()  # it went its way: nothing was restarted, nothing completed twice
        assert gate.started == 1
        assert batcher.device.lost is None

    run(main())


def test_b20_a_close_that_is_cancelled_answers_everybody() -> None:
    async def main() -> None:
        gate = Gate()
        batcher = Batcher({"default": gate}, watchdog=0.0)
        await batcher.start()
        running = batcher.submit(Request("running"))
        await gate.busy()
        closing = asyncio.create_task(batcher.close(drain=True, timeout=PATIENCE))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert isinstance(running.waiter.exception(), CutShort)
        gate.gate.set()

    run(main())


def test_b20_an_error_in_the_block_does_not_wait_for_the_queue() -> None:
    async def main() -> None:
        gate = Gate()
        tickets = []

        async def block() -> None:
            async with Batcher({"default": gate}, [GroupConfig(flush=FlushPolicy.by_size(4, 60.0))]) as batcher:
                tickets.append(batcher.submit(Request("held for company")))
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            await block()
        assert isinstance(tickets[0].waiter.exception(), Drained)
        assert gate.calls == []

    run(main())


def test_close_before_start_and_a_second_start() -> None:
    async def main() -> None:
        batcher = Batcher({"default": Gate(is_open=True)})
        assert await batcher.close()
        await batcher.start()
        with pytest.raises(ConfigError, match="already started"):
            await batcher.start()
        assert await batcher.run(Request(1)) == 1
        assert await batcher.close()

    run(main())


def test_no_thread_is_left_behind() -> None:
    before = {t.name for t in threading.enumerate()}

    async def main() -> None:
        async with Batcher({"default": Gate(is_open=True)}) as batcher:
            await batcher.run(Request(1))

    run(main())
    assert not {t.name for t in threading.enumerate() if t.name.startswith("reflex")} - before


def test_b24_what_prepares_runs_on_the_device_thread_before_the_first_batch() -> None:
    async def main() -> None:
        gate = Gate(is_open=True)
        threads: list[threading.Thread] = []
        batcher = Batcher({"default": gate}, BY_COUNT)
        await batcher.start(lambda: threads.append(threading.current_thread()))
        assert (len(threads), gate.calls) == (1, [])
        assert threads[0] is batcher.device.thread
        assert await batcher.run(Request(1)) == 1
        assert await batcher.close()
        assert len(threads) == 1

    run(main())


def test_b24_what_cannot_prepare_raises_where_it_is_waited_for() -> None:
    def prepare() -> None:
        raise ValueError("no graph")

    async def main() -> None:
        batcher = Batcher({"default": Gate(is_open=True)}, BY_COUNT)
        with pytest.raises(ValueError, match="no graph"):
            await batcher.start(prepare)
        assert await batcher.close(drain=False)

    run(main())


def test_a_callback_takes_the_settled_ticket_in_place_of_a_future(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        told: list[Any] = []

        def fail(ticket: Ticket) -> None:
            raise RuntimeError("broken")

        gate = Gate(is_open=True)
        async with Batcher({"default": gate}, BY_COUNT) as batcher:
            batcher.submit(Request(1, id="one"), fail)
            batcher.submit(Request(2), lambda ticket: told.append(ticket.outcome))
            assert await batcher.run(Request(3)) == 3
        assert told == [Done(2)]
        assert "request one: its answer could not be delivered" in caplog.text

    run(main())


# -- misuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processors", "error", "says"),
    [
        (Gate(), TypeError, "must be a mapping of group names, such as {'default': processor}"),
        ({"default": Gate}, TypeError, r"processors\['default'\] is no Processor, it is a type"),
        ({"default": lambda items: items}, TypeError, "it is a function; wrap a function in FunctionProcessor"),
        ({"default": object()}, TypeError, "is no Processor, it is an object$"),
        ({"defualt": Gate()}, ConfigError, r"processors for \['defualt'\], but the groups are \['default'\]"),
        ({}, ConfigError, "but the groups are"),
        ({"default": Gate(), "other": Gate()}, ConfigError, "but the groups are"),
    ],
)
def test_what_cannot_run_the_batches_of_a_group_is_refused_where_it_is_written(
    processors: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Batcher(processors)


def test_a_batcher_that_was_not_started_and_what_is_no_request_are_refused() -> None:
    async def main() -> None:
        batcher = Batcher({"default": Gate(is_open=True)})
        with pytest.raises(RuntimeError, match="not started; use `async with"):
            await batcher.run(Request("x"))
        async with batcher:
            payload: Any = "x"
            with pytest.raises(TypeError, match=r"takes a Request, not a str: run\(Request\(payload\)\)"):
                await batcher.run(payload)
            assert await batcher.run(Request("x")) == "x"

    run(main())


def test_a_call_in_another_event_loop_is_refused() -> None:
    async def main() -> None:
        async with Batcher({"default": Gate(is_open=True)}) as batcher:

            def elsewhere() -> None:
                with pytest.raises(RuntimeError, match="in another event loop"):
                    asyncio.run(batcher.run(Request("x")))

            await asyncio.to_thread(elsewhere)

    run(main())
