"""`@batched` on `async def`: awaited on the loop of its callers, one call at a time."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from reflex_runtime.core.batch import BatchFinished, BatchScheduled, RequestQueued, RequestRejected, RequestSettled
from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    CutShort,
    Drained,
    Expired,
    ProcessorError,
    ProcessorHung,
    QueueFull,
    ResultCountMismatch,
    WaitTimeout,
)
from reflex_runtime.core.request import Priority
from reflex_runtime.run.batched import BatchedCoroutine, batched
from run.helpers import PATIENCE, Log, run


class Slow:
    """A batched coroutine function that waits for a gate. calls: the items of every call."""

    def __init__(self, **options: Any) -> None:
        self.gate, self.entered = asyncio.Event(), asyncio.Event()
        self.calls: list[list[Any]] = []

        @batched(**options)
        async def double(items: list[int]) -> list[int]:
            """Twice each item."""
            self.calls.append(list(items))
            self.entered.set()
            await self.gate.wait()
            return [2 * item for item in items]

        self.double: BatchedCoroutine[int, int] = double

    async def busy(self) -> None:
        await self.entered.wait()
        self.entered.clear()

    async def asked(self, *items: int, **how: Any) -> list[asyncio.Task[int]]:
        """Tasks that ask for these items, in this order; each has asked when it returns."""
        tasks = [asyncio.create_task(self.double(item, **how)) for item in items]
        await asyncio.sleep(0)
        return tasks


def test_it_looks_like_the_function_and_nothing_runs_before_it_is_awaited() -> None:
    slow = Slow()
    assert (slow.double.__name__, slow.double.__doc__) == ("double", "Twice each item.")  # type: ignore[attr-defined]
    unawaited = slow.double(1)
    assert asyncio.iscoroutine(unawaited)
    unawaited.close()
    assert slow.calls == []


def test_what_comes_in_one_turn_shares_a_call_and_what_comes_during_it_the_next() -> None:
    slow = Slow(max_batch_size=3)

    async def main() -> None:
        first = await slow.asked(1, 2)
        await slow.busy()
        rest = await slow.asked(3, 4) + await slow.asked(5, 6)
        assert len(slow.calls) == 1  # one at a time
        slow.gate.set()
        assert await asyncio.gather(*first, *rest) == [2, 4, 6, 8, 10, 12]

    run(main())
    assert slow.calls == [[1, 2], [3, 4, 5], [6]]


def test_an_urgent_item_goes_first() -> None:
    slow = Slow(max_batch_size=1)

    async def main() -> None:
        tasks = await slow.asked(1)
        await slow.busy()
        tasks += await slow.asked(2)
        tasks += await slow.asked(3, priority=Priority.URGENT)
        slow.gate.set()
        assert await asyncio.gather(*tasks) == [2, 4, 6]

    run(main())
    assert slow.calls == [[1], [3], [2]]


def test_b17_an_item_past_its_time_limit_ends_while_a_call_is_out_and_is_not_computed() -> None:
    slow = Slow()

    async def main() -> None:
        first = await slow.asked(1, time_limit=PATIENCE)
        await slow.busy()
        with pytest.raises(Expired):
            await slow.double(2, time_limit=0.010)
        slow.gate.set()
        assert await first[0] == 2

    run(main())
    assert slow.calls == [[1]]


def test_b16_a_cancelled_item_is_not_computed_and_one_that_runs_leaves_the_others_alone() -> None:
    slow = Slow()

    async def main() -> None:
        running, company = await slow.asked(1, 2)
        await slow.busy()
        (waiting,) = await slow.asked(3)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        slow.gate.set()
        assert await company == 4
        assert await slow.double(4) == 8

    run(main())
    assert slow.calls == [[1, 2], [4]]


@pytest.mark.parametrize("repeatable", [True, False])
def test_one_bad_item_fails_alone_where_calls_may_be_repeated(repeatable: bool) -> None:
    @batched(repeatable=repeatable)
    async def invert(items: list[float]) -> list[float]:
        return [1 / item for item in items]

    async def main() -> list[float | BaseException]:
        return await asyncio.gather(*(invert(item) for item in (1.0, 2.0, 0.0, 4.0)), return_exceptions=True)

    results = run(main())
    failed = [result for result in results if isinstance(result, ProcessorError)]
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in failed)
    if repeatable:
        assert (results[:2], len(failed), results[3]) == ([1.0, 0.5], 1, 0.25)
    else:
        assert len(failed) == 4


@pytest.mark.parametrize("results", [None, {1: 2}, [], [1, 2], "x"])
def test_b19_other_results_than_one_for_each_item_are_a_clear_error(results: Any) -> None:
    @batched
    async def odd(items: list[int]) -> Any:
        return results

    with pytest.raises(ResultCountMismatch, match=r"odd returned (a |None)|returned \d results for 1 item;"):
        run(odd(1))


def test_b19_a_call_that_is_cancelled_from_inside_answers_its_callers() -> None:
    @batched
    async def given_up(items: list[int]) -> list[int]:
        raise asyncio.CancelledError

    with pytest.raises(ProcessorError, match="cancelled"):
        run(given_up(1))


def test_beyond_its_capacity_it_refuses() -> None:
    slow = Slow(capacity=1)

    async def main() -> None:
        first = await slow.asked(1)
        await slow.busy()
        second = await slow.asked(2)
        with pytest.raises(QueueFull):
            await slow.double(3)
        slow.gate.set()
        assert await asyncio.gather(*first, *second) == [2, 4]

    run(main())


def test_a_function_that_awaits_itself_is_told_so_and_what_it_leaves_behind_may_call_it() -> None:
    left: list[asyncio.Task[int]] = []

    @batched
    async def recursive(items: list[int]) -> list[int]:
        if items == [0]:
            return [7]
        if items == [1]:
            return [await recursive(0)]
        if items == [2]:
            return await asyncio.gather(recursive(0))
        left.append(asyncio.create_task(after()))
        return items

    async def after() -> int:
        await over.wait()
        return await recursive(0)

    async def main() -> None:
        for item in (1, 2):
            with pytest.raises(ConfigError, match="itself"):
                await recursive(item)
        assert await recursive(3) == 3
        over.set()
        assert await left[0] == 7

    over = asyncio.Event()
    run(main())


def test_loops_that_run_side_by_side_batch_apart() -> None:
    both = threading.Barrier(2)
    calls: list[list[int]] = []

    @batched
    async def meet(items: list[int]) -> list[int]:
        calls.append(items)
        both.wait(PATIENCE)  # each loop is in a call of its own at the same time
        return [item + 1 for item in items]

    async def main(start: int) -> list[int]:
        return await asyncio.gather(meet(start), meet(start + 1))

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda start: run(main(start)), (0, 10)))
    assert answers == [[1, 2], [11, 12]]
    assert sorted(calls) == [[0, 1], [10, 11]]


def test_loops_that_run_one_after_another_leave_nothing_behind() -> None:
    slow = Slow()
    slow.gate.set()
    assert [run(slow.double(item)) for item in (1, 2, 3)] == [2, 4, 6]
    assert len(slow.double._calls) == 1


def test_a_sink_is_told_every_event_in_order() -> None:
    slow, log = Slow(), Log()
    slow.gate.set()

    async def main() -> None:
        slow.double.add_sink(log)
        assert await slow.double(1) == 2
        await slow.double.close()
        with pytest.raises(Closed):
            await slow.double(2)
        await asyncio.sleep(0)

    run(main())
    kinds = [type(event) for event in log.seen]
    assert kinds == [RequestQueued, BatchScheduled, BatchFinished, RequestSettled, RequestRejected]


def test_b20_close_finishes_the_queue_refuses_what_comes_later_and_holds_for_its_loop() -> None:
    slow = Slow(max_batch_size=1)

    async def main() -> None:
        tasks = await slow.asked(1, 2)
        await slow.busy()
        closing = asyncio.create_task(slow.double.close())
        await asyncio.sleep(0)
        slow.gate.set()
        assert await asyncio.gather(*tasks) == [2, 4]
        await closing
        with pytest.raises(Closed):
            await slow.double(3)

    run(main())
    assert run(slow.double(4)) == 8


def test_b20_close_leaves_nobody_with_a_call_that_hangs() -> None:
    slow = Slow(max_batch_size=1)

    async def main() -> None:
        running, queued = await slow.asked(1, 2)
        await slow.busy()
        await slow.double.close(timeout=0.010)
        with pytest.raises(CutShort):
            await running
        with pytest.raises(Drained):
            await queued

    run(main())


@pytest.mark.parametrize("name", ["partial", "callable", "bound"])
def test_whatever_makes_a_coroutine_is_a_coroutine_function(name: str) -> None:
    import functools

    class Doubles:
        async def __call__(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    async def times(by: int, items: list[int]) -> list[int]:
        return [by * item for item in items]

    doubles = Doubles()
    made: Any = {"partial": functools.partial(times, 2), "callable": doubles, "bound": doubles.__call__}[name]
    double: Any = batched(made)
    assert isinstance(double, BatchedCoroutine)
    assert run(double(21)) == 42


def test_wrong_settings_of_a_call_name_the_setting() -> None:
    slow = Slow()
    call: Any = slow.double
    with pytest.raises(ConfigError, match="time_limit=-1: must be >= 0 seconds"):
        run(call(1, time_limit=-1))
    with pytest.raises(ConfigError, match=r"priority=0: must be one of Priority\.URGENT"):
        run(call(1, priority=0))
    with pytest.raises(TypeError, match="positional argument"):
        call(1, 2)


def test_a_call_that_hangs_is_cancelled_and_its_callers_are_told() -> None:
    ended: list[str] = []

    @batched(watchdog=0.05)
    async def ask(items: list[int]) -> list[int]:
        try:
            if items == [1]:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        if items == [2]:
            raise TimeoutError("its own")
        return items

    async def main() -> None:
        with pytest.raises(ProcessorHung, match=r"within 0\.05 s"):
            await ask(1)
        assert ended == ["cancelled"]
        with pytest.raises(ProcessorError, match="its own") as caught:
            await ask(2)
        assert not isinstance(caught.value, ProcessorHung)
        assert await ask(3) == 3
        await ask.close()

    run(main())


def test_a_timeout_is_the_same_word_with_a_thread_and_without_and_cancels_the_item() -> None:
    async def main() -> None:
        slow, opened, calls = Slow(max_batch_size=1), threading.Event(), list[list[int]]()

        @batched(max_batch_size=1)
        def double(items: list[int]) -> list[int]:
            calls.append(items)
            assert opened.wait(PATIENCE)
            return [2 * item for item in items]

        first = [asyncio.ensure_future(slow.double(1)), asyncio.ensure_future(double.aio(1))]
        await slow.entered.wait()
        for ask in (slow.double, double.aio):
            with pytest.raises(WaitTimeout, match=r"^double: no answer within 0\.02 s$"):
                await ask(2, timeout=0.02)
            with pytest.raises(ConfigError, match="timeout=-1: must be >= 0 seconds"):
                await ask(2, timeout=-1)
        slow.gate.set()
        opened.set()
        assert await asyncio.gather(*first) == [2, 2]
        assert [await ask(3, timeout=PATIENCE) for ask in (slow.double, double.aio)] == [6, 6]
        assert slow.calls == calls == [[1], [3]]
        double.close()

    run(main())
