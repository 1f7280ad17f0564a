"""Which batches run on the event loop: the rule by itself, and with a real loop, a real thread and a clock of ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, BatchFinished, Cause, Done, Failed, More
from reflex_runtime.core.errors import Cancelled, ProcessorError, ReflexError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.device import BRIEF, KINDS, MOST_PROOF, PROOF, BriefBatches
from reflex_runtime.run.processor import BaseProcessor
from run.helpers import PATIENCE, Log, asleep, run

BY_COUNT = [GroupConfig(flush=FlushPolicy.by_size(64, 0.0))]  # no cost to learn, no hold
LONG = 10 * BRIEF


class Anywhere(BaseProcessor):
    """Answers with the thread it ran on. A batch takes as long as its slowest payload says, by the clock."""

    any_thread = True

    def __init__(self) -> None:
        self.now = 64.0
        self.sizes: list[int] = []
        self.hang: threading.Event | None = None

    def clock(self) -> float:
        return self.now

    def run(self, batch: Batch) -> Sequence[Any]:
        self.sizes.append(len(batch))
        self.now += max(ticket.request.payload for ticket in batch.grants)
        if self.hang is not None:
            assert self.hang.wait(PATIENCE)
        return [threading.current_thread()] * len(batch)


def batch_of(size: int, partition: Any = "p", stage: str = "") -> Batch:
    tickets = {Ticket(Request(partition=partition), i, 0.0): 1.0 for i in range(size)}
    return Batch(1, "default", partition, stage, Cause.IDLE, 0.0, 0.0, 0.0, tickets)


def proven(size: int = 1, seconds: float = BRIEF / 4) -> BriefBatches:
    made = BriefBatches(BRIEF, {"default": Anywhere()})
    for _ in range(PROOF):
        assert not made.fits(batch_of(size))
        assert not made.group("default")
        made.ran(batch_of(size), seconds)
    return made


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_p50_many_in_a_row_must_be_brief() -> None:
    made = BriefBatches(BRIEF, {"default": Anywhere()})
    for _ in range(PROOF - 1):
        made.ran(batch_of(1), BRIEF)
    made.ran(batch_of(1), LONG)
    for _ in range(PROOF - 1):
        made.ran(batch_of(1), BRIEF)
    assert not made.fits(batch_of(1))
    made.ran(batch_of(1), BRIEF)
    assert made.fits(batch_of(1))
    assert made.group("default")


def test_p50_a_larger_batch_is_predicted_to_take_longer_in_proportion() -> None:
    made = proven(size=4, seconds=BRIEF / 4)
    assert made.fits(batch_of(1))
    assert made.fits(batch_of(16))
    assert not made.fits(batch_of(17))
    made.ran(batch_of(16), BRIEF / 2)  # it was not so long after all
    assert made.fits(batch_of(32))


def test_p50_partitions_and_stages_are_proven_apart() -> None:
    made = proven()
    assert not made.fits(batch_of(1, partition="another"))
    assert not made.fits(batch_of(1, stage="denoise"))


def test_p50_a_long_one_needs_proof_again_and_more_each_time_that_it_comes_soon() -> None:
    made = proven()
    for times in (2, 4):
        made.ran(batch_of(1), LONG)
        assert not made.fits(batch_of(1))
        assert not made.group("default")
        for _ in range(times * PROOF - 1):
            made.ran(batch_of(1), BRIEF)
        assert not made.fits(batch_of(1))
        made.ran(batch_of(1), BRIEF)
        assert made.fits(batch_of(1))
    for _ in range(4 * PROOF):
        made.ran(batch_of(1), BRIEF)
    made.ran(batch_of(1), LONG)  # the first in a long time
    for _ in range(PROOF):
        made.ran(batch_of(1), BRIEF)
    assert made.fits(batch_of(1))


def test_p50_the_proof_is_bounded() -> None:
    made = proven()
    for _ in range(20):
        made.ran(batch_of(1), LONG)
        for _ in range(MOST_PROOF):
            made.ran(batch_of(1), BRIEF)
        assert made.fits(batch_of(1))


def test_many_kinds_are_measured_anew_and_take_no_memory() -> None:
    made = proven()
    for i in range(KINDS):
        made.ran(batch_of(1, partition=i), BRIEF)
    assert not made.fits(batch_of(1))
    assert not made.group("default")


def test_p50_a_batch_that_failed_proves_nothing_unless_it_was_long() -> None:
    made = BriefBatches(BRIEF, {"default": Anywhere()})
    for _ in range(2 * PROOF):
        made.ran(batch_of(1), 0.0, failed=True)
    assert not made.group("default")
    made = proven()
    made.ran(batch_of(1), 0.0, failed=True)
    assert made.fits(batch_of(1))
    made.ran(batch_of(1), LONG, failed=True)
    assert not made.fits(batch_of(1))


@pytest.mark.parametrize("limit", [0.0, BRIEF])
def test_p50_a_processor_must_allow_it_and_zero_switches_it_off(limit: float) -> None:
    processor = Anywhere()
    processor.any_thread = limit == 0.0
    made = BriefBatches(limit, {"default": processor})
    for _ in range(2 * PROOF):
        made.ran(batch_of(1), 0.0)
    assert not made.group("default")


# -- with a loop and a thread ------------------------------------------------------------------------------------------


async def where(batcher: Batcher, seconds: float = 0.0, times: int = 1) -> bool:
    """Whether the last of so many batches ran on the loop."""
    for _ in range(times):
        await asleep(batcher)
        ran = await batcher.run(Request(seconds))
    return bool(ran is threading.current_thread())


def test_p50_a_brief_model_runs_on_the_loop_and_a_slow_one_does_not() -> None:
    async def main() -> None:
        for seconds, expected in ((BRIEF, True), (2 * BRIEF, False)):
            processor, log = Anywhere(), Log()
            async with Batcher({"default": processor}, BY_COUNT, [log], clock=processor.clock) as batcher:
                assert not await where(batcher, seconds, PROOF)
                assert await where(batcher, seconds) is expected
                batcher.flush()
            notes = [bool(event.batch.notes.get("on_loop")) for event in log.of(BatchFinished)]
            assert notes == [False] * PROOF + [expected]

    run(main())


def test_p51_requests_of_one_turn_share_the_batch_and_the_loop_has_its_turn_between_batches() -> None:
    async def main() -> None:
        processor = Anywhere()
        flush = FlushPolicy.by_size(4, 0.0)
        async with Batcher({"default": processor}, [GroupConfig(flush=flush)], clock=processor.clock) as batcher:
            assert not await where(batcher, 0.0, PROOF)
            await asleep(batcher)
            turns = 0

            async def turning() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            other = asyncio.create_task(turning())
            seen = []

            async def ask() -> None:
                ran = await batcher.run(Request(0.0))
                seen.append((turns, ran is threading.current_thread()))

            await asyncio.gather(*(ask() for _ in range(12)))
            other.cancel()
            assert processor.sizes[PROOF:] == [4, 4, 4]
            assert all(here for _, here in seen)
            assert len({turn for turn, _ in seen}) == 3

    run(main())


def test_p52_a_long_batch_sends_its_kind_back_to_the_thread() -> None:
    async def main() -> None:
        processor = Anywhere()
        async with Batcher({"default": processor}, BY_COUNT, clock=processor.clock) as batcher:
            await where(batcher, 0.0, PROOF)
            assert await where(batcher, LONG)
            assert not await where(batcher, 0.0, 2 * PROOF)
            assert await where(batcher)

    run(main())


def test_p50_a_batch_too_large_to_be_brief_is_handed_to_the_thread() -> None:
    async def main() -> None:
        processor = Anywhere()
        async with Batcher({"default": processor}, BY_COUNT, clock=processor.clock) as batcher:
            await where(batcher, BRIEF / 2, PROOF)
            await asleep(batcher)
            ran = await asyncio.gather(*(batcher.run(Request(BRIEF / 2)) for _ in range(3)))
            assert processor.sizes[-1] == 3
            assert set(ran) != {threading.current_thread()}

    run(main())


def test_p50_while_another_group_waits_that_is_not_brief_the_thread_takes_both() -> None:
    async def main() -> None:
        brief, slow = Anywhere(), Anywhere()
        groups = [GroupConfig(name=name, flush=FlushPolicy.by_size(64, 0.0)) for name in ("brief", "slow")]
        async with Batcher({"brief": brief, "slow": slow}, groups, clock=brief.clock) as batcher:
            for _ in range(PROOF):
                await asleep(batcher)
                await batcher.run(Request(0.0, group="brief"))
            await asleep(batcher)
            both = [batcher.run(Request(0.0, group=name)) for name in ("brief", "slow")]
            assert threading.current_thread() not in await asyncio.gather(*both)
            await asleep(batcher)
            assert await batcher.run(Request(0.0, group="brief")) is threading.current_thread()

    run(main())


class Steps(Anywhere):
    """Answers `first` to a request's first step, and an error to its second."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = Done("at once")
        self.dropped = threading.Event()

    def run(self, batch: Batch) -> Sequence[Any]:
        super().run(batch)
        return [self.first if ticket.batches == 1 else Failed(ReflexError("broken")) for ticket in batch.grants]

    def drop(self, tickets: Sequence[Ticket]) -> None:
        self.dropped.set()


def test_p51_a_resident_that_ends_on_the_loop_is_dropped_although_nothing_else_comes() -> None:
    async def main() -> None:
        processor = Steps()
        async with Batcher({"default": processor}, BY_COUNT, clock=processor.clock) as batcher:
            await where(batcher, 0.0, PROOF)
            await asleep(batcher)
            processor.first = More("half")
            ticket = batcher.submit(Request(0.0))
            with pytest.raises(ReflexError, match="broken"):
                await ticket.waiter
            assert ticket.batches == 2
            assert await asyncio.to_thread(processor.dropped.wait, PATIENCE)

    run(main())


def test_p52_a_hang_on_the_loop_is_noticed_by_the_thread() -> None:
    class OnLoop(threading.Event):
        """What hangs there alone."""

        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is not loop:
                return True
            processor.now += 1.0
            return super().wait(timeout)

    async def main() -> None:
        processor.hang, stuck = OnLoop(), threading.Event()

        def leave() -> None:
            stuck.set()
            hang.set()  # so that the test goes on

        hang = processor.hang
        given: Any = {"clock": processor.clock, "watchdog": 0.01, "on_stuck": leave}  # the thread looks in real time
        async with Batcher({"default": processor}, BY_COUNT, **given) as batcher:
            while not await where(batcher):
                pass
        assert stuck.is_set()

    loop, processor = threading.current_thread(), Anywhere()
    run(main())


def test_p52_what_interrupts_the_loop_answers_its_batch() -> None:
    async def main() -> None:
        processor = Anywhere()
        async with Batcher({"default": processor}, BY_COUNT, clock=processor.clock) as batcher:
            await where(batcher, 0.0, PROOF)
            await asleep(batcher)
            ticket = batcher.submit(Request(0.0))
            processor.hang = Interrupting(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                batcher.device.turn()
            processor.hang = None
            batcher.flush()
            with pytest.raises(Exception, match="interrupted"):
                await ticket.waiter
            await where(batcher)  # and the device goes on
            assert batcher.scheduler.idle

    run(main())


def test_p52_what_is_no_exception_fails_a_batch_on_the_loop_and_what_waits_goes_on() -> None:
    """A function that nobody awaits cannot be cancelled: the error is its own, as a panic of Rust is."""

    async def main() -> None:
        processor = Anywhere()
        groups = [GroupConfig(flush=FlushPolicy.by_size(1, 0.0))]
        async with Batcher({"default": processor}, groups, watchdog=0.0, clock=processor.clock) as batcher:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            await where(batcher, 0.0, PROOF)
            await asleep(batcher)
            tickets = [batcher.submit(Request(0.0)) for _ in range(2)]
            processor.hang = Interrupting(asyncio.CancelledError())
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(ProcessorError, match="CancelledError"):
                    await tickets[0].waiter
                await tickets[1].waiter

    run(main())


def test_p52_an_error_of_the_scheduler_on_the_loop_is_one_of_the_device() -> None:
    async def main() -> None:
        processor, lost = Anywhere(), asyncio.Event()
        async with Batcher(
            {"default": processor}, BY_COUNT, watchdog=0.0, clock=processor.clock, on_fatal=lost.set
        ) as batcher:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            await where(batcher, 0.0, PROOF)
            await asleep(batcher)

            def fails(now: float) -> None:
                raise ZeroDivisionError("in a cost model")

            batcher.scheduler.next_batch = fails  # type: ignore[method-assign, assignment]
            ticket = batcher.submit(Request(0.0))
            async with asyncio.timeout(PATIENCE):
                await lost.wait()
                with pytest.raises(ReflexError):
                    await ticket.waiter

    run(main())


def test_what_ends_while_the_loop_forms_no_batch_is_told() -> None:
    async def main() -> None:
        processor = Anywhere()
        async with Batcher({"default": processor}, BY_COUNT, watchdog=0.0, clock=processor.clock) as batcher:
            await where(batcher, 0.0, PROOF)
            await asleep(batcher)
            forms = batcher.scheduler.next_batch

            def sheds(now: float) -> Batch | None:
                batcher.scheduler.next_batch = forms  # type: ignore[method-assign]
                batcher.scheduler.cancel(ticket, now)
                return None

            batcher.scheduler.next_batch = sheds  # type: ignore[method-assign]
            ticket = batcher.submit(Request(0.0))
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(Cancelled):
                    await ticket.waiter

    run(main())


class Interrupting(threading.Event):
    """What comes, once, while the processor waits."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error: BaseException | None = error

    def wait(self, timeout: float | None = None) -> bool:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True
