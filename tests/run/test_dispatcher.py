"""The driver for work that is awaited. A real loop; calls are answered when the test says so."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Done,
    Failed,
    Outcome,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    CutShort,
    Drained,
    Expired,
    ProcessorError,
    QueueFull,
    ReflexError,
    ResultCountMismatch,
)
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.run.audience import SLICE
from reflex_runtime.run.batcher import Dispatcher
from run.helpers import Log, cannot_learn, run

HOLD = 0.005


class Calls:
    """A `send` whose calls stay out until they are answered."""

    def __init__(self) -> None:
        self.out: list[tuple[Batch, asyncio.Future[Sequence[Outcome]]]] = []
        self.payloads: list[list[Any]] = []
        self.came = asyncio.Event()
        self.cancelled = 0

    def __call__(self, batch: Batch) -> asyncio.Future[Sequence[Outcome]]:
        self.payloads.append([ticket.request.payload for ticket in batch.grants])
        call: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._ended)
        self.out.append((batch, call))
        self.came.set()
        return call

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self.cancelled += call.cancelled()

    async def until(self, n: int) -> None:
        """Returns once so many calls were sent in all."""
        while len(self.payloads) < n:
            self.came.clear()
            await self.came.wait()

    def answer(self, index: int = 0) -> None:
        batch, call = self.out.pop(index)
        call.set_result([Done(ticket.request.payload) for ticket in batch.grants])

    def fail(self, error: Exception) -> None:
        self.out.pop(0)[1].set_exception(error)


def made(calls: Callable[[Batch], Any], log: Log | None = None, **options: Any) -> Dispatcher:
    options.setdefault("flush", FlushPolicy.by_size(4, HOLD))
    dispatcher = Dispatcher([GroupConfig(**options)], calls, [log] if log else ())
    dispatcher.start()
    return dispatcher


async def turns(n: int = 2) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def test_what_comes_in_one_turn_of_the_loop_leaves_together_at_its_end() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls, flush=FlushPolicy(max_batch_size=64))
        tickets = [dispatcher.submit(Request(i)) for i in range(10)]
        assert calls.payloads == [], "nothing is decided inside the turn"
        await turns(1)
        assert calls.payloads == [list(range(10))]
        calls.answer()
        assert await asyncio.gather(*(t.waiter for t in tickets)) == list(range(10))

    run(main())


def test_calls_are_out_side_by_side_up_to_max_batches() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = Dispatcher([GroupConfig(flush=FlushPolicy(max_batch_size=1))], calls, max_batches=2)
        dispatcher.start()
        tickets = [dispatcher.submit(Request(i)) for i in range(3)]
        await turns()
        assert calls.payloads == [[0], [1]]
        calls.answer(1)
        assert await tickets[1].waiter == 1, "answers come in any order"
        await turns()
        assert calls.payloads[2:] == [[2]]
        calls.answer()
        calls.answer()
        await asyncio.gather(*(t.waiter for t in tickets))

    run(main())


def test_a_hold_ends_by_one_timer_and_nothing_is_polled() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        asked = 0
        decide = dispatcher.scheduler.next_batch

        def counted(now: float) -> Batch | None:
            nonlocal asked
            asked += 1
            return decide(now)

        dispatcher.scheduler.next_batch = counted  # type: ignore[method-assign]
        ticket = dispatcher.submit(Request("lone"))
        await calls.until(1)
        assert loop.time() - begun >= HOLD * 0.99
        # held, then sent and asked again; a timer of the loop may go off a clock tick early, once
        assert asked <= 5
        calls.answer()
        await ticket.waiter
        await turns()
        assert dispatcher._timer is None, "nobody waits: there is no timer"

    run(main())


def test_an_earlier_reason_to_look_moves_the_timer() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls, flush=FlushPolicy.by_size(4, 3600.0))
        first = dispatcher.submit(Request("first"))
        await turns()
        assert calls.payloads == []
        second = dispatcher.submit(Request("second", time_limit=0.001))
        with pytest.raises(Expired):
            await second.waiter
        for _ in range(3):
            dispatcher.submit(Request("more"))
        await calls.until(1)
        assert calls.payloads[0] == ["first", "more", "more", "more"]
        calls.answer()
        await first.waiter

    run(main())


def test_an_urgent_request_goes_while_a_call_is_out() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls, flush=FlushPolicy(max_batch_size=4, hold_max=(0.0, 60.0, 60.0)))
        dispatcher.submit(Request("first", priority=Priority.URGENT))
        await turns()
        dispatcher.submit(Request("held"))
        await turns()
        assert calls.payloads == [["first"]]
        dispatcher.submit(Request("urgent", priority=Priority.URGENT))
        await turns(1)
        assert calls.payloads == [["first"], ["urgent", "held"]]
        await dispatcher.close(drain=False)

    run(main())


@pytest.mark.parametrize("late", [True, False], ids=["awaited", "at once"])
@pytest.mark.parametrize(
    ("error", "kind"), [(QueueFull("elsewhere"), QueueFull), (OSError("torn"), ProcessorError)], ids=["ours", "other"]
)
def test_what_send_raises_fails_the_whole_batch(error: Exception, kind: type[ReflexError], late: bool) -> None:
    async def main() -> None:
        calls = Calls()

        def send(batch: Batch) -> Any:
            if not late:
                raise error
            return calls(batch)

        dispatcher = made(send, flush=FlushPolicy())
        tickets = [dispatcher.submit(Request(i)) for i in range(3)]
        if late:
            await calls.until(1)
            calls.fail(error)
        for ticket in tickets:
            with pytest.raises(kind, match=str(error)):
                await ticket.waiter
        assert dispatcher.scheduler.idle

    run(main())


def test_a_coroutine_may_send_and_outcomes_may_differ() -> None:
    async def main() -> None:
        async def send(batch: Batch) -> list[Outcome]:
            await asyncio.sleep(0)
            return [Done(1), Failed(ProcessorError("mine alone"))]

        dispatcher = made(send, flush=FlushPolicy())
        good, bad = dispatcher.submit(Request()), dispatcher.submit(Request())
        assert await good.waiter == 1
        with pytest.raises(ProcessorError, match="mine alone"):
            await bad.waiter

    run(main())


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_wrong_number_of_outcomes_fails_the_batch(n: int) -> None:
    async def main() -> None:
        async def send(batch: Batch) -> list[Outcome]:
            return [Done()] * n

        dispatcher = made(send, flush=FlushPolicy())
        tickets = [dispatcher.submit(Request(i)) for i in range(2)]
        for ticket in tickets:
            with pytest.raises(ResultCountMismatch, match=f"{n} outcomes for 2"):
                await ticket.waiter

    run(main())


def test_a_batch_on_which_the_cost_model_fails_is_answered_and_the_next_one_runs() -> None:
    async def main() -> None:
        async def send(batch: Batch) -> list[Outcome]:
            return [Done("right")] * len(batch)

        dispatcher = made(send, flush=FlushPolicy())
        model = dispatcher.scheduler.cost_model("default")
        learn, model.observe = model.observe, cannot_learn
        ticket = dispatcher.submit(Request())
        with pytest.raises(ProcessorError, match="could not be completed: ZeroDivisionError"):
            await ticket.waiter
        model.observe = learn
        assert await dispatcher.submit(Request()).waiter == "right"
        assert dispatcher.scheduler.idle

    run(main())


def test_a_call_that_somebody_cancels_fails_its_batch() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls, flush=FlushPolicy())
        ticket = dispatcher.submit(Request())
        await calls.until(1)
        calls.out[0][1].cancel()
        with pytest.raises(ProcessorError, match="cancelled"):
            await ticket.waiter

    run(main())


def test_cancel_takes_a_waiting_request_at_once_and_drops_the_answer_of_one_that_is_out() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls)
        out = dispatcher.submit(Request("out"))
        await calls.until(1)
        waits = dispatcher.submit(Request("waits"))
        dispatcher.cancel(waits)
        with pytest.raises(Cancelled):
            await waits.waiter
        dispatcher.cancel(out)
        await turns()
        assert not out.waiter.done()
        calls.answer()
        with pytest.raises(Cancelled):
            await out.waiter
        assert calls.payloads == [["out"]]

    run(main())


def test_b16_ten_thousand_that_are_cancelled_together_are_taken_back_in_slices() -> None:
    """Others need the loop between two of them, and none is sent meanwhile, although there is room for it."""

    async def main() -> None:
        calls, turn, left = Calls(), 0, list[Ticket]()
        told: Counter[int] = Counter()
        many = GroupConfig(flush=FlushPolicy(max_batch_size=64), capacity=20_000)
        dispatcher = Dispatcher([many], calls, max_batches=1)
        dispatcher.start()
        dispatcher.submit(Request("out"))
        await calls.until(1)

        def settled(ticket: Ticket) -> None:
            assert isinstance(ticket.outcome.error, Cancelled)  # type: ignore[union-attr]
            left.append(ticket)
            told[turn] += 1

        tickets = [dispatcher.submit(Request(i), settled) for i in range(10_000)]
        stays = dispatcher.submit(Request("stays"))
        calls.answer()  # there is room in the next turn
        for ticket in tickets:
            dispatcher.cancel(ticket)
        assert dispatcher.scheduler.queued("default") == 10_001 - SLICE
        while len(left) < 10_000:
            turn += 1
            before = dispatcher.scheduler.queued("default")
            await asyncio.sleep(0)
            assert before - dispatcher.scheduler.queued("default") <= 2 * SLICE
        assert left == tickets
        assert max(told.values()) <= 2 * SLICE
        await calls.until(2)
        assert calls.payloads == [["out"], ["stays"]]
        calls.answer()
        assert await stays.waiter == "stays"

    run(main())


def test_x2_everybody_is_told_when_it_has_closed_however_many_there_are() -> None:
    async def main() -> None:
        calls, ended = Calls(), Counter[Ticket]()
        many = GroupConfig(flush=FlushPolicy(max_batch_size=1), capacity=9000)
        dispatcher = Dispatcher([many], calls, max_batches=1)
        dispatcher.start()
        tickets = [dispatcher.submit(Request(i), lambda ticket: ended.update([ticket])) for i in range(8000)]
        await calls.until(1)
        for ticket in tickets[1000:]:
            dispatcher.cancel(ticket)
        await dispatcher.close(drain=False)
        assert ended == Counter(tickets)

    run(main())


def test_answers_by_the_thousand_are_told_in_slices_and_in_order() -> None:
    async def main() -> None:
        calls, log = Calls(), Log()
        everyone = GroupConfig(flush=FlushPolicy(max_batch_size=1000), capacity=1000)
        dispatcher = Dispatcher([everyone], calls, [log])
        dispatcher.start()
        tickets = [dispatcher.submit(Request(i)) for i in range(1000)]
        await calls.until(1)
        calls.answer()
        seen, most = 0, 0
        while seen < 1000:
            await turns(1)
            now = len(log.of(RequestSettled))
            seen, most = now, max(most, now - seen)
        assert most <= 2 * SLICE
        assert [event.ticket for event in log.of(RequestSettled)] == tickets

    run(main())


def test_an_input_takes_effect_at_the_end_of_the_turn() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls, flush=FlushPolicy())
        dispatcher.input(lambda scheduler, now: scheduler.pause("default", now + 3600.0, now))
        ticket = dispatcher.submit(Request("x"))
        await turns()
        assert calls.payloads == []
        assert dispatcher.input(lambda scheduler, now: scheduler.queued("default")) == 1
        dispatcher.input(lambda scheduler, now: scheduler.pause("default", 0.0, now))
        await turns(1)
        assert calls.payloads == [["x"]]
        calls.answer()
        await ticket.waiter

    run(main())


def test_events_go_to_the_sinks_in_order_and_settled_is_called_in_place_of_a_future() -> None:
    async def main() -> None:
        calls, log, settled = Calls(), Log(), []
        dispatcher = Dispatcher([GroupConfig(flush=FlushPolicy(), capacity=1)], calls, [log], max_batches=1)
        dispatcher.start()
        dispatcher.submit(Request("a"), settled.append)
        with pytest.raises(QueueFull):
            dispatcher.submit(Request("b"))
        await turns()
        kinds = [type(event) for event in log.seen]
        assert kinds == [RequestQueued, RequestRejected, BatchScheduled]
        dispatcher.submit(Request("c"))
        await turns()
        with pytest.raises(QueueFull):
            dispatcher.submit(Request("d"))
        await turns(1)
        assert type(log.seen.pop()) is RequestRejected, "also when nothing else happens"
        del log.seen[3:]
        calls.answer()
        await turns(3)
        assert [type(event) for event in log.seen[3:5]] == [BatchFinished, RequestSettled]
        assert [ticket.outcome for ticket in settled] == [Done("a")]
        assert log.of(BatchFinished)[0].elapsed > 0.0

    run(main())


def test_x2_closing_drains_what_waits_without_holds() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls, flush=FlushPolicy.by_size(8, 3600.0))
        tickets = [dispatcher.submit(Request(i)) for i in range(3)]
        await turns()
        closing = asyncio.ensure_future(dispatcher.close())
        await calls.until(1)
        with pytest.raises(Closed):
            dispatcher.submit(Request("late"))
        assert not closing.done()
        calls.answer()
        async with asyncio.timeout(5.0):  # not its time limit: it returns when the last one has its answer
            await closing
        assert [t.waiter.result() for t in tickets] == [0, 1, 2]

    run(main())


def test_x2_when_the_time_is_over_what_waits_is_drained_and_what_is_out_is_cut_short() -> None:
    async def main() -> None:
        calls, log, problems = Calls(), Log(), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        dispatcher = Dispatcher([GroupConfig(flush=FlushPolicy(max_batch_size=1))], calls, [log], max_batches=1)
        dispatcher.start()
        out, waits = dispatcher.submit(Request("out")), dispatcher.submit(Request("waits"))
        await calls.until(1)
        await dispatcher.close(timeout=0.001)
        assert isinstance(out.waiter.exception(), CutShort)
        assert isinstance(waits.waiter.exception(), Drained)
        assert len(log.of(RequestSettled)) == 2
        await turns()
        assert calls.cancelled == 1, "the call is told that nobody waits for it"
        assert len(log.of(RequestSettled)) == 2
        await dispatcher.close()
        assert problems == []

    run(main())


def test_x2_closing_without_drain_settles_everybody_before_it_returns() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls, flush=FlushPolicy(max_batch_size=2))
        tickets = [dispatcher.submit(Request(i)) for i in range(2)]
        await calls.until(1)
        tickets.append(dispatcher.submit(Request("not decided on yet")))
        calls.out[0][1].set_result([Done("just in time")] * 2)
        await dispatcher.close(drain=False)
        assert [t.waiter.result() for t in tickets[:2]] == ["just in time"] * 2
        assert isinstance(tickets[2].waiter.exception(), Drained)

    run(main())


def test_x2_a_closing_that_is_cancelled_settles_everybody_all_the_same() -> None:
    async def main() -> None:
        calls = Calls()
        dispatcher = made(calls, flush=FlushPolicy())
        ticket = dispatcher.submit(Request())
        await calls.until(1)
        closing = asyncio.ensure_future(dispatcher.close(timeout=60.0))
        await turns()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert isinstance(ticket.waiter.exception(), CutShort)

    run(main())


def test_closing_what_never_started_is_nothing() -> None:
    run(Dispatcher([GroupConfig()], Calls.__call__).close())  # type: ignore[arg-type]


def test_nothing_is_left_of_a_request_without_the_collector_also_when_its_call_failed() -> None:
    class Payload:
        pass

    async def main() -> None:
        async def send(batch: Batch) -> list[Outcome]:
            await asyncio.sleep(0)
            if batch.id % 2:
                raise ProcessorError("as a whole")
            return [Done()] * len(batch)

        dispatcher = made(send, flush=FlushPolicy())
        settled: list[None] = []
        gone = []
        for _ in range(200):
            payload = Payload()
            gone.append(weakref.ref(payload))
            dispatcher.submit(Request(payload), lambda ticket: settled.append(None))
            del payload
            await turns(8)
        assert len(settled) == 200
        alive = sum(payload() is not None for payload in gone)
        assert alive < 40, "beside the few last ones, which the core forgets late"

    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()
