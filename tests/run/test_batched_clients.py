"""Whom `@batched` takes a coroutine's item to be from, and that callers who ask again share their calls again."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from ipc.virtual import VirtualLoop
from reflex_runtime.core.batch import Event, RequestSettled
from reflex_runtime.run.audience import SLICE
from reflex_runtime.run.batched import GONE, LoopClients, _of_this_loop, batched
from run.helpers import PATIENCE, run
from thinned import thinned


def test_items_in_flight_are_clients_apart_and_later_ones_get_the_same_each_once() -> None:
    clients = LoopClients(lambda: 64.0)
    first = [clients.take() for _ in range(8)]
    assert len(set(first)) == 8
    for client in first:
        clients.give_back(client)
    fewer = [clients.take() for _ in range(4)]
    assert len(set(fewer)) == 4
    assert set(fewer) < set(first)
    more = [clients.take() for _ in range(5)]
    assert set(first) < {*fewer, *more}
    assert len({*fewer, *more}) == 9


def test_a_client_whose_item_ended_long_ago_is_not_passed_on() -> None:
    now = 64.0
    clients = LoopClients(lambda: now)
    first = clients.take()
    clients.give_back(first)
    now += GONE
    assert clients.take() == first
    clients.give_back(first)
    now += GONE * 1.001
    assert clients.take() != first
    assert not clients._free


def test_items_of_two_loops_are_never_one_client() -> None:
    assert LoopClients().take() != LoopClients().take()


@pytest.mark.parametrize("callers", thinned([8, 32], [8]))
@pytest.mark.parametrize("new", [False, True], ids=["tasks", "new tasks"])
def test_b15_callers_that_come_back_one_by_one_share_every_call(callers: int, new: bool) -> None:
    """Calls of 5 ms and 5 ms more with all callers, which ask again up to 2 ms after their answer. Virtual time."""
    seconds, slowest = 3.0, 0.002
    sizes: list[int] = []

    @batched(max_batch_size=64)
    async def model(items: list[int]) -> list[int]:
        sizes.append(len(items))
        await asyncio.sleep(0.005 + 0.005 * len(items) / callers)
        return items

    async def one(number: int) -> int:
        return await model(number)

    async def caller(number: int, until: float) -> None:
        loop, rng = asyncio.get_running_loop(), random.Random(number)
        while loop.time() < until:
            if new:
                await asyncio.create_task(one(number))
            else:
                await model(number)
            await asyncio.sleep(rng.uniform(0.0, slowest))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        calls = _of_this_loop(model._calls, model._make)
        calls.dispatcher._clock = calls.clients._clock = loop.time
        await asyncio.gather(*(caller(number, loop.time() + seconds) for number in range(callers)))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    practised = sizes[len(sizes) // 3 : -callers]
    assert sum(practised) / len(practised) >= 0.94 * callers
    assert len(sizes) >= 0.95 * seconds / (0.010 + slowest)  # no hold for callers that do not exist


class Three:
    """A batched `def`, and three coroutines that ask in one turn of the loop while its thread sleeps."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self._asleep = threading.Event()

        @batched
        def double(items: list[int]) -> list[int]:
            self._asleep.clear()
            self.calls.append(items)
            return [2 * item for item in items]

        self.double = double
        self.device = double._driver.device
        self._wait = self.device._wait
        self.device._wait = self._noted  # type: ignore[method-assign]

    def _noted(self) -> None:
        self._asleep.set()
        self._wait()

    async def ask(self) -> list[asyncio.Task[int]]:
        """Ask, after a first call. Returns the tasks, of which none has been answered yet."""
        assert await self.double.aio(0) == 0
        assert await asyncio.to_thread(self._asleep.wait, PATIENCE)
        with self.device._lock:  # free while it sleeps
            tasks = [asyncio.create_task(self.double.aio(item)) for item in (1, 2, 3)]
        await asyncio.sleep(0)
        return tasks


def test_items_of_one_turn_wake_the_device_once_after_the_last_of_them() -> None:
    three = Three()

    async def main() -> None:
        device = three.device
        wake, waiting = device.wake, []

        def noted() -> None:
            waiting.append(len(device.scheduler._groups["double"].active))
            wake()

        device.wake = noted  # type: ignore[method-assign]
        tasks = await three.ask()
        assert device._bell.waiting  # it still sleeps
        assert await asyncio.gather(*tasks) == [2, 4, 6]
        assert len(waiting) == 2  # one for the first call, one for the three

    run(main())
    assert three.calls == [[0], [1, 2, 3]]
    assert three.double.close()


def test_answers_of_one_call_reach_the_loop_in_one_turn() -> None:
    three = Three()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[int]] = []
        done: list[int] = []

        def let_the_loop_run(event: Event) -> None:
            if isinstance(event, RequestSettled):
                passed = threading.Event()
                loop.call_soon_threadsafe(loop.call_soon, loop.call_soon, passed.set)
                assert passed.wait(PATIENCE)
                done.append(sum(task.done() for task in tasks))

        tasks += await three.ask()
        three.double.add_sink(let_the_loop_run)
        assert await asyncio.gather(*tasks) == [2, 4, 6]
        assert done == [0, 0, 0]

    run(main())
    assert three.double.close()


def test_thousands_of_cancels_in_one_turn_are_made_in_slices() -> None:
    gate, entered = threading.Event(), threading.Event()
    calls: list[int] = []

    @batched(max_batch_size=1)
    def held(items: list[int]) -> list[int]:
        calls.extend(items)
        entered.set()
        assert gate.wait(PATIENCE)
        return items

    async def main() -> None:
        first = asyncio.create_task(held.aio(0))
        assert await asyncio.to_thread(entered.wait, PATIENCE)
        tasks = [asyncio.create_task(held.aio(item)) for item in range(1, 1 + 3 * SLICE)]
        await asyncio.sleep(0)
        queued = []
        for task in tasks:
            task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
            queued.append(held._driver.device.scheduler._groups["held"].queued)
        assert queued[0] == 2 * SLICE
        assert queued[-1] == 0
        gate.set()
        assert await first == 0

    run(main())
    assert calls == [0]
    assert held.close()


def test_a_thread_that_comes_after_one_that_ended_is_another_client() -> None:
    """The system gives it the same identity again, and it would pay for what that one had."""
    seen: list[Event] = []

    @batched
    def echo(items: list[int]) -> list[int]:
        return items

    echo.add_sink(seen.append)
    for item in range(4):
        thread = threading.Thread(target=echo, args=(item,))
        thread.start()
        thread.join()
    assert echo.close()
    assert len({event.ticket.request.client for event in seen if isinstance(event, RequestSettled)}) == 4
