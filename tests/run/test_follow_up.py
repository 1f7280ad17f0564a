"""A second processor for parts of what the first one answered: batches over frames, and one answer for each frame."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from reflex_runtime.core.batch import Done, Failed
from reflex_runtime.core.errors import Cancelled, ConfigError, Displaced, Expired, ProcessorError, WaitTimeout
from reflex_runtime.run.batch_processor import BatchConfig, BatchEntry
from reflex_runtime.run.submitted_frame import Join
from run.coordinated import Caller, Coordinator, Detector, Stepped, end_of, nobody_left
from run.helpers import PATIENCE


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield from nobody_left()


class Letters:
    """Asks about every letter of a frame; the result is what was answered, or the class of the error."""

    def __init__(self, processor: Detector, **config: Any) -> None:
        self.processor = processor
        self.config = BatchConfig(**{"max_batch_size": 16, "max_latency": 0.0, "max_in_flight_per_feed": 0} | config)

    def parts(self, frame: Any, value: Any) -> tuple[Sequence[Any], Join]:
        def join(answers: Sequence[Done | Failed]) -> Any:
            return frame, [a.value if isinstance(a, Done) else type(a.error).__name__ for a in answers]

        return list(value), join


def frames(entries: Sequence[BatchEntry]) -> list[Any]:
    return [entry.frame for entry in entries]


def upper(entries: Sequence[BatchEntry]) -> list[Any]:
    return [ValueError("no letter") if entry.frame == "!" else entry.frame.upper() for entry in entries]


def pair(second: Detector | None = None, is_open: bool = True, **config: Any) -> tuple[Coordinator, Detector, Detector]:
    first = Detector(is_open, frames, "first")
    second = second or Detector(True, upper, "second")
    batching = BatchConfig(max_batch_size=8, max_latency=0.0, **config)
    return Coordinator(first, batching, then=Letters(second)), first, second


def test_i18_parts_of_all_frames_of_a_batch_share_the_next_one_and_each_frame_has_its_own() -> None:
    coordinator, first, second = pair(is_open=False)
    with coordinator as handle:
        busy = handle.submit("busy", "")
        first.busy()
        futures = [handle.submit(f"feed{i}", word) for i, word in enumerate(("ab", "", "c!d"))]
        first.gate.set()
        assert [end_of(future) for future in [busy, *futures]] == [
            ("", []), ("ab", ["A", "B"]), ("", []), ("c!d", ["C", "ProcessorError", "D"]),
        ]  # fmt: skip
        (together,) = second.calls  # feeds take turns in it
        assert sorted((entry.feed_id, entry.frame) for entry in together) == [
            ("feed0", "a"), ("feed0", "b"), ("feed2", "!"), ("feed2", "c"), ("feed2", "d"),
        ]  # fmt: skip
        told = coordinator.all_metrics()
        assert (told["first"].processed, told["second"].processed, told["second"].failed) == (4, 4, 1)
        assert coordinator.metrics().batch_sizes == {1: 1, 3: 1}
        assert told["second"].batch_sizes == {5: 1}
    assert first.threads == second.threads
    assert (first.methods[0], first.methods[-1], second.methods[-1]) == ("on_start", "on_stop", "on_stop")


def test_i18_parts_are_timed_apart() -> None:
    coordinator, _, _ = pair()
    with coordinator as handle:
        for _ in range(4):
            handle.submit_and_wait("a", "xyz")
        first, second = (coordinator._scheduler.cost_model(name).snapshot() for name in ("first", "second"))
        assert (first[0]["samples"], second[0]["samples"]) == (4, 4)
        sizes = {name: owned.sizes for name, owned in coordinator._owned.items()}
        for each in sizes.values():
            each._alone = True
        coordinator.relearn()
        assert (sizes["first"].alone, sizes["second"].alone) == (False, True)
        assert coordinator._scheduler.cost_model("first").snapshot() == []
        assert coordinator._scheduler.cost_model("second").snapshot() != []


def test_i18_parts_have_what_is_left_of_the_frames_time_and_a_frame_says_what_it_misses() -> None:
    clock = Stepped()
    first, second = Detector(True, frames, "first"), Detector(False, upper, "second")
    coordinator = Coordinator(
        first, BatchConfig(max_batch_size=8, max_latency=0.0), clock=clock, then=Letters(second, max_batch_size=1)
    )
    with coordinator as handle:
        future = handle.submit("a", "xy", time_limit=1.0)
        second.busy()
        clock.step(2.0, coordinator)  # y waits behind x, which runs
        second.gate.set()
        assert end_of(future) == ("xy", ["X", Expired.__name__])


def test_i18_a_frame_whose_parts_find_no_room_says_so() -> None:
    first, second = Detector(True, frames, "first"), Detector(True, upper, "second")
    then = Letters(second, max_batch_size=1, queue_capacity=2)
    with Coordinator(first, BatchConfig(max_latency=0.0), then=then) as handle:
        _, answers = handle.submit_and_wait("a", "vwxyz")
    assert answers[:2] == ["V", "W"]
    assert set(answers[2:]) == {"QueueFull"}


def test_i18_a_frame_that_fails_in_the_first_processor_or_between_both_has_no_parts() -> None:
    coordinator, first, second = pair()
    first.answer = lambda entries: [ValueError("dark")] * len(entries)
    with coordinator as handle:
        with pytest.raises(ProcessorError, match="dark"):
            handle.submit_and_wait("a", "x")
        first.answer = lambda entries: [3] * len(entries)  # `parts` raises
        with pytest.raises(ProcessorError, match=r"Letters\.parts: TypeError"):
            handle.submit_and_wait("a", "x")
        first.answer = frames
        assert handle.submit_and_wait("a", "x") == ("x", ["X"])
    assert second.frames == [["x"]]


def one_by_one(**config: Any) -> tuple[Coordinator, Detector]:
    """Parts run alone, and the first of them waits at a gate."""
    second = Detector(False, upper, "second")
    batching = BatchConfig(max_latency=0.0, **config)
    return Coordinator(Detector(True, frames, "first"), batching, then=Letters(second, max_batch_size=1)), second


def test_i18_a_caller_that_leaves_takes_its_parts_with_it() -> None:
    coordinator, second = one_by_one()
    with coordinator as handle:
        future = handle.submit("a", "xyz")
        second.busy()
        assert future.cancel()
        second.gate.set()
        assert handle.submit_and_wait("b", "b") == ("b", ["B"])
        assert coordinator.all_metrics()["second"].dropped == 3
    assert second.frames == [["x"], ["b"]]


def test_f9_a_caller_that_timed_out_gets_no_more_parts_computed() -> None:
    coordinator, second = one_by_one(response_timeout=0.5)
    with coordinator as handle:
        caller = Caller(handle, "a", "xyz")
        second.busy()
        assert isinstance(caller.end(), WaitTimeout)
        second.gate.set()
        assert end_of(handle.submit("b", "b")) == ("b", ["B"])  # however long it takes
    assert second.frames == [["x"], ["b"]]


def test_f11_a_stop_answers_every_frame_and_names_the_parts_that_did_not_run() -> None:
    coordinator, first, second = pair(is_open=False)
    handle = coordinator.start()
    future = handle.submit("a", "xy")
    first.busy()
    coordinator.signal()
    first.gate.set()
    assert coordinator.join(PATIENCE)
    assert end_of(future) == ("xy", ["Closed", "Closed"])
    assert second.frames == []
    assert "on_stop" in second.methods


def test_f12_a_second_processor_that_does_not_start_stops_the_first() -> None:
    coordinator, first, second = pair()

    def fails() -> None:
        raise ValueError("no weights")

    second.on_start = fails  # type: ignore[method-assign]
    with pytest.raises(ProcessorError, match="no weights"):
        coordinator.start()
    assert first.methods == ["on_start", "on_stop"]
    with pytest.raises(ConfigError, match="both processors are called 'first'"):
        Coordinator(Detector(name="first"), then=Letters(Detector(name="first")))


@pytest.mark.parametrize("seed", range(4))
def test_x2_every_frame_is_answered_once_whatever_becomes_of_its_parts(seed: int) -> None:
    chance = random.Random(seed)
    first, second = Detector(True, frames, "first"), Detector(True, upper, "second")
    first.answer = lambda entries: [ValueError("x") if chance.random() < 0.1 else e.frame for e in entries]

    def some(entries: Sequence[BatchEntry]) -> list[Any]:
        if chance.random() < 0.1:
            raise ValueError("whole")
        return [ValueError("one") if chance.random() < 0.1 else entry.frame for entry in entries]

    second.answer = some
    ends: list[int] = []
    guard = threading.Lock()
    then = Letters(second, max_batch_size=3, queue_capacity=12)
    with Coordinator(first, BatchConfig(max_latency=0.0, max_in_flight_per_feed=0), then=then) as handle:
        futures = []
        for number in range(120):
            word = "ab!c"[: chance.randrange(5)]
            limit = chance.choice([None, None, 0.002])
            try:
                future = handle.submit(f"f{number % 5}", word, time_limit=limit)
            except Exception:
                continue

            def ended(_: Any, number: int = number) -> None:
                with guard:
                    ends.append(number)

            future.add_done_callback(ended)
            futures.append((word, future))
            if chance.random() < 0.05:
                future.cancel()
        for word, future in futures:
            if future.cancelled():
                continue
            error = future.exception(PATIENCE)
            if error is None:
                frame, answers = future.result()
                assert (frame, len(answers)) == (word, len(word))
            else:
                assert isinstance(error, (ProcessorError, Expired, Cancelled, Displaced))
    assert len(ends) == len(set(ends)) == len(futures)
