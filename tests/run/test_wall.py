"""What an item raises is its own fault, whatever class that has: neighbours are answered, threads and loops go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request
from reflex_runtime.run.batched import batched
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.coordinator import BatchCoordinator, NewestFrame
from reflex_runtime.run.processor import ASYNC_WALL, WALL, BaseProcessor, Panic, Wall
from run.helpers import PATIENCE, run


class PanicException(BaseException):
    """As a library in Rust raises it."""


class Odd(Exception):
    """An ordinary error."""


FAULTS = [PanicException, Odd, BaseException]
INTERRUPTS = [KeyboardInterrupt, SystemExit, GeneratorExit]


def lengths(texts: list[str], fault: type[BaseException]) -> list[int]:
    if "bad" in texts:
        raise fault("unwrap on a None value")
    return [len(text) for text in texts]


@pytest.mark.parametrize("wall", [WALL, ASYNC_WALL])
@pytest.mark.parametrize("kind", [PanicException, BaseException])
def test_out_of_the_wall_comes_an_exception_that_names_what_was_raised(wall: Wall, kind: type[BaseException]) -> None:
    with pytest.raises(Panic, match=f"^{kind.__name__}: why$") as caught, wall:
        raise kind("why")
    assert type(caught.value.__cause__) is kind


@pytest.mark.parametrize("wall", [WALL, ASYNC_WALL])
@pytest.mark.parametrize("kind", [Odd, *INTERRUPTS])
def test_exceptions_and_interrupts_pass(wall: Wall, kind: type[BaseException]) -> None:
    with pytest.raises(kind), wall:
        raise kind("why")


def test_only_an_await_can_be_cancelled() -> None:
    with pytest.raises(asyncio.CancelledError), ASYNC_WALL:
        raise asyncio.CancelledError
    with pytest.raises(Panic, match="CancelledError"), WALL:
        raise asyncio.CancelledError


def answers(call: Callable[[str], Any]) -> list[Any]:
    """Of seven good items and a bad one, from threads that ask together; an error as its text."""
    together = threading.Barrier(8)

    def one(text: str) -> Any:
        together.wait()
        try:
            return call(text)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, ["fine"] * 7 + ["bad"]))


@pytest.mark.parametrize("fault", [*FAULTS, asyncio.CancelledError])
def test_a_function_fails_its_item_alone(fault: type[BaseException]) -> None:
    @batched(max_batch_size=8)
    def call(texts: list[str]) -> list[int]:
        return lengths(texts, fault)

    assert answers(call) == [4] * 7 + [f"ProcessorError: {fault.__name__}: unwrap on a None value"]
    assert call("after") == 5
    assert call.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_coroutine_fails_its_item_alone(fault: type[BaseException]) -> None:
    @batched(max_batch_size=8)
    async def call(texts: list[str]) -> list[int]:
        await asyncio.sleep(0)
        return lengths(texts, fault)

    async def main() -> None:
        asked = [*["fine"] * 7, "bad"]
        *fine, bad = await asyncio.gather(*map(call, asked), return_exceptions=True)
        assert fine == [4] * 7
        assert isinstance(bad, ProcessorError)
        assert bad.message == f"{fault.__name__}: unwrap on a None value"
        assert await call("after") == 5

    run(main())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_coordinator_fails_a_frame_alone(fault: type[BaseException]) -> None:
    class Lengths:
        id = "lengths"

        def process(self, entries: Sequence[Any]) -> list[int]:
            return lengths([entry.frame for entry in entries], fault)

    with BatchCoordinator(Lengths()) as handle:
        frames = [handle.submit(f"cam {i}", frame) for i, frame in enumerate(("fine", "fine", "bad", "fine"))]
        *_, bad, last = [frame.exception(PATIENCE) or frame.result() for frame in frames]
        assert (str(bad), last) == (f"{fault.__name__}: unwrap on a None value", 4)
        assert handle.submit("cam", "after").result(PATIENCE) == 5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_frame_that_cannot_be_taken_costs_no_other_one(fault: type[BaseException]) -> None:
    class Echo:
        id = "echo"

        def process(self, entries: Sequence[Any]) -> list[Any]:
            return [entry.frame for entry in entries]

    def newest() -> NewestFrame:
        raise fault("the buffer is gone")

    with BatchCoordinator(Echo()) as handle:
        with pytest.raises(ProcessorError, match=f"{fault.__name__}: the buffer is gone"):
            handle.submit_and_wait("bad", 1, newest=newest)
        assert handle.submit_and_wait("good", 2) == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_batcher_fails_a_request_alone(fault: type[BaseException]) -> None:
    class Lengths(BaseProcessor):
        def run(self, batch: Batch) -> list[int]:
            return lengths([ticket.request.payload for ticket in batch.grants], fault)

    async def main() -> None:
        groups = [GroupConfig(flush=FlushPolicy.by_size(4, 60.0))]
        async with Batcher({"default": Lengths()}, groups) as batcher, asyncio.timeout(PATIENCE):
            asked = [batcher.run(Request(text)) for text in ("fine", "fine", "bad", "fine")]
            *_, bad, last = await asyncio.gather(*asked, return_exceptions=True)
            assert (str(bad), last) == (f"{fault.__name__}: unwrap on a None value", 4)

    run(main())


def test_the_wall_keeps_no_item_alive() -> None:
    """An error that a caller keeps must not keep the other items of its batch."""

    @batched
    def panics(items: list[Any]) -> list[Any]:
        held = items
        raise PanicException(len(held))

    with pytest.raises(ProcessorError) as caught:
        panics("item")
    trace = caught.value.__cause__.__traceback__ if caught.value.__cause__ else None
    while trace is not None:
        assert "held" not in trace.tb_frame.f_locals
        trace = trace.tb_next
    assert panics.close()
