"""`@batched`: a function over a list that anybody calls with one item."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from drivers.helpers import PATIENCE, run
from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    CutShort,
    Drained,
    ProcessorError,
    QueueFull,
    ResultCountMismatch,
    WaitTimeout,
)
from reflex_runtime.drivers.decorator import BatchedFunction, batched


class Slow:
    """A batched function that waits for a gate. calls: the items of every call."""

    def __init__(self, **options: Any) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.calls: list[list[Any]] = []

        @batched(**options)
        def double(items: list[int]) -> list[int]:
            """Twice each item."""
            self.calls.append(list(items))
            self.entered.set()
            assert self.gate.wait(PATIENCE)
            return [2 * item for item in items]

        self.double: BatchedFunction[int, int] = double
        self._asked = threading.Semaphore(0)
        submit = double._device.submit

        def counted(*args: Any) -> Any:
            try:
                return submit(*args)
            finally:
                self._asked.release()

        double._device.submit = counted  # type: ignore[method-assign]

    def asked(self, n: int) -> None:
        """Returns once n more items have been asked for."""
        for _ in range(n):
            assert self._asked.acquire(timeout=PATIENCE)

    def busy(self) -> None:
        assert self.entered.wait(PATIENCE)
        self.entered.clear()


def test_it_looks_like_the_function_it_wraps() -> None:
    slow = Slow()
    assert slow.double.__name__ == "double"  # type: ignore[attr-defined]
    assert slow.double.__doc__ == "Twice each item."


def test_a_call_blocks_and_returns_the_result_of_its_item() -> None:
    slow = Slow()
    slow.gate.set()
    assert slow.double(21) == 42
    assert slow.calls == [[21]]
    assert slow.double.close()


def test_threads_share_calls_and_each_gets_its_own_answer() -> None:
    slow = Slow(max_batch_size=16)
    with ThreadPoolExecutor(33) as pool:
        first = pool.submit(slow.double, 1000)
        slow.busy()
        rest = [pool.submit(slow.double, i) for i in range(32)]
        slow.asked(33)
        slow.gate.set()
        assert first.result() == 2000
        assert [f.result() for f in rest] == [2 * i for i in range(32)]
    assert [len(call) for call in slow.calls] == [1, 16, 16]
    assert slow.double.close()


def test_coroutines_share_calls_without_blocking_their_loop() -> None:
    slow = Slow()

    async def main() -> None:
        first = asyncio.create_task(slow.double.aio(1))
        await asyncio.to_thread(slow.busy)
        rest = [asyncio.create_task(slow.double.aio(i)) for i in range(2, 6)]
        await asyncio.sleep(0)
        assert not first.done()  # and the loop runs
        slow.gate.set()
        assert await asyncio.gather(first, *rest) == [2, 4, 6, 8, 10]

    run(main())
    assert slow.calls == [[1], [2, 3, 4, 5]]
    assert slow.double.close()


def test_one_bad_item_does_not_fail_its_neighbours() -> None:
    @batched()
    def invert(items: list[float]) -> list[float]:
        return [1 / item for item in items]

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(invert, item) for item in (1.0, 2.0, 0.0, 4.0)]
        errors = [f.exception() for f in results]
    assert [f.result() for f, e in zip(results, errors, strict=True) if e is None] == [1.0, 0.5, 0.25]
    assert isinstance(errors[2], ProcessorError)
    assert isinstance(errors[2].__cause__, ZeroDivisionError)
    assert invert.close()


def test_b19_a_wrong_number_of_results_is_a_clear_error() -> None:
    @batched()
    def lossy(items: list[int]) -> list[int]:
        return []

    with pytest.raises(ResultCountMismatch):
        lossy(1)
    assert lossy.close()


def test_b19_a_function_that_ends_its_thread_is_run_on_another() -> None:
    lives = iter([True])

    @batched()
    def leaves(items: list[int]) -> list[int]:
        if next(lives, False):
            raise SystemExit
        return items

    with pytest.raises(ProcessorError, match="died"):
        leaves(1)
    assert leaves(2) == 2
    assert leaves.close()


def test_a_timeout_of_the_function_is_not_a_timeout_of_the_caller() -> None:
    @batched()
    def remote(items: list[int]) -> list[int]:
        raise TimeoutError("upstream")

    with pytest.raises(ProcessorError, match="upstream"):
        remote(1, timeout=PATIENCE)
    assert remote.close()


def test_a_caller_that_stops_waiting_is_not_computed() -> None:
    slow = Slow()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow.double, 1)
        slow.busy()
        with pytest.raises(WaitTimeout):
            slow.double(2, timeout=0.010)
        slow.gate.set()
        assert first.result() == 2
    assert slow.double(3) == 6
    assert slow.calls == [[1], [3]]
    assert slow.double.close()


def test_b16_a_cancelled_coroutine_is_not_computed() -> None:
    slow = Slow()

    async def main() -> None:
        first = asyncio.create_task(slow.double.aio(1))
        await asyncio.to_thread(slow.busy)
        leaving = asyncio.create_task(slow.double.aio(2))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        slow.gate.set()
        assert await first == 2

    run(main())
    assert slow.double(3) == 6
    assert slow.calls == [[1], [3]]
    assert slow.double.close()


def test_beyond_its_capacity_it_refuses() -> None:
    slow = Slow(capacity=1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow.double, 1)
        slow.busy()
        second = pool.submit(slow.double, 2)
        slow.asked(2)
        with pytest.raises(QueueFull):
            slow.double(3)
        slow.gate.set()
        assert (first.result(), second.result()) == (2, 4)
    assert slow.double.close()


def test_a_function_that_calls_itself_is_told_so() -> None:
    @batched()
    def recursive(items: list[int]) -> list[int]:
        return [recursive(item) for item in items]

    with pytest.raises(ConfigError, match="itself"):
        recursive(1, timeout=PATIENCE)
    assert recursive.close()


def test_b20_close_finishes_the_queue_and_refuses_what_comes_later() -> None:
    slow = Slow(max_batch_size=2, max_latency=60.0)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(slow.double, i) for i in range(3)]
        slow.busy()
        slow.asked(3)
        closing = pool.submit(slow.double.close)
        slow.gate.set()
        assert [f.result() for f in asked] == [0, 2, 4]
        assert closing.result()
    with pytest.raises(Closed):
        slow.double(9)


def test_b20_close_without_drain_answers_the_queue() -> None:
    slow = Slow(max_batch_size=1)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(slow.double, 1)
        slow.busy()
        queued = pool.submit(slow.double, 2)
        slow.asked(2)
        closing = pool.submit(slow.double.close, False)
        assert isinstance(queued.exception(PATIENCE), Drained)
        slow.gate.set()
        assert running.result() == 2
        assert closing.result()


def test_b20_close_does_not_leave_callers_with_a_function_that_hangs() -> None:
    slow = Slow(max_batch_size=1)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(slow.double, 1)
        slow.busy()
        queued = pool.submit(slow.double, 2)
        slow.asked(2)
        assert not slow.double.close(timeout=0.05)
        assert isinstance(running.exception(PATIENCE), CutShort)
        assert isinstance(queued.exception(PATIENCE), Drained)
        slow.gate.set()


def test_closing_one_that_never_ran() -> None:
    slow = Slow()
    assert slow.double.close()
    with pytest.raises(Closed):
        slow.double(1)


def test_it_needs_its_parentheses() -> None:
    with pytest.raises(ConfigError, match="parentheses"):
        batched(lambda items: items)  # type: ignore[arg-type]
