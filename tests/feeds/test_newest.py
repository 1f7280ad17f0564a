"""The frame of a camera that waits for the processor makes way for a newer one until its batch begins: real
coordinators, whose processor waits for the test."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from feeds.fakes import END, Camera, Clock, Collector, Detector, balanced, ended, frame, number_in
from reflex_runtime.core.errors import Expired, ReflexError, ResultCountMismatch
from reflex_runtime.feeds.runtime.feed import CurrentFrame, Feed, FeedConfig
from reflex_runtime.feeds.runtime.pipeline import Pipeline
from reflex_runtime.run.coordinator import BatchConfig, BatchEntry, NewestFrame
from run.coordinated import Caller, Coordinator, busy_with, nobody_left
from run.coordinated import Detector as Answering


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield from nobody_left()


class Stopping(Detector):
    """Needs its gate opened for every batch."""

    def __init__(self) -> None:
        super().__init__(is_open=False)

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        found = super().process(entries)
        self.gate.clear()
        return found

    def next(self) -> None:
        """The batch inside ends, and the next one begins."""
        self.gate.set()
        self.busy()


class Preparing(Stopping):
    """Notes what it prepares, and on which kind of thread."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[tuple[int, str]] = []
        self.faults_ahead: set[int] = set()
        self.answers_more = 0
        self._held = -1
        self._preparing, self.go_on = threading.Event(), threading.Event()

    def prepare(self, image: Any) -> str:
        number, thread = number_in(image), threading.current_thread().name
        self.prepared.append((number, "feed" if thread.startswith("reflex-feed") else "coordinator"))
        if number in self.faults_ahead:
            raise ValueError("no picture")
        if number == self._held:
            self._preparing.set()
            assert self.go_on.wait(60.0)
        return f"view {number}"

    def hold_up(self, number: int) -> threading.Event:
        """Preparing it takes until `go_on` is set. Returns what is set when it begins."""
        self._held = number
        return self._preparing

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        found = super().process(entries)
        return [(answer, entry.view) for answer, entry in zip(found, entries, strict=True)] + [0] * self.answers_more


class Behind:
    """A camera whose frames wait behind a batch of another feed."""

    def __init__(self, config: FeedConfig | None = None) -> None:
        self.detector, self.sink, self.camera = Preparing(), Collector(), Camera()
        self.clock = Clock()
        self.coordinator = Coordinator(self.detector, BatchConfig(max_batch_size=8, max_latency=0.0))
        self.coordinator.start()
        point = Pipeline(batch=self.coordinator)
        self.feed = Feed("cam", self.camera, point, [self.sink], config, clock=self.clock)
        self.block()
        self.feed.start()

    def block(self) -> None:
        self.busy = busy_with(self.coordinator, self.detector)
        self.coordinator.asked(1)

    def give(self, first: int, *newer: int) -> None:
        """Frames of these numbers: the first one is submitted, the others come while it waits."""
        self.read(first)
        self.coordinator.asked(1)
        for number in newer:
            self.read(number)

    def read(self, number: int) -> None:
        self.camera.give(number)
        self.camera.idle()

    def answer(self, results: int = 1) -> None:
        """The batch before ends, and the one with the frame runs."""
        self.detector.next()
        self.detector.gate.set()
        self.sink.wait(results)

    def end(self) -> dict[str, int]:
        """Returns what was dropped."""
        self.detector.gate.set()
        self.camera.give(END)
        ended(self.feed)
        self.coordinator.stop()
        assert balanced(self.feed)
        return {reason: n for reason, n in self.feed.snapshot().drops.items() if n}


@pytest.fixture(autouse=True)
def _pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps the coordinator busy is no picture."""
    monkeypatch.setattr("feeds.fakes.number_in", lambda image: -1 if isinstance(image, str) else number_in(image))


def test_f14_a_batch_takes_the_newest_frame_there_is_when_it_begins() -> None:
    behind = Behind()
    behind.give(10, 11, 12)
    behind.clock.now += 0.3
    behind.answer()
    (result,) = behind.sink.results
    assert (result.frame.sequence, result.value) == (2, (12, "view 12"))
    assert (result.frame.pts, result.latency) == (1.2, pytest.approx(0.3))
    assert [entry for call in behind.detector.calls for entry in call if entry[0] == "cam"] == [("cam", 2)]
    assert behind.end() == {"overrun": 2}
    assert behind.feed.snapshot().position == 1.2


def test_f14_without_a_newer_one_the_frame_that_waited_is_computed() -> None:
    behind = Behind()
    behind.give(10)
    behind.answer()
    assert behind.sink.values == [(10, "view 10")]
    assert behind.end() == {}
    assert behind.detector.prepared == [(10, "feed")]


def test_f14_what_is_replaced_is_not_prepared_once_the_processor_is_too_slow() -> None:
    behind = Behind()
    behind.give(10, 11)
    behind.answer()
    behind.block()
    behind.give(20, 21)
    behind.answer(2)
    behind.block()
    behind.give(30)  # as 20 it is not prepared ahead, and then nothing takes its place
    behind.answer(3)
    behind.block()
    behind.give(40)
    behind.answer(4)
    assert behind.sink.values == [(n, f"view {n}") for n in (11, 21, 30, 40)]
    assert behind.end() == {"overrun": 2}
    assert behind.detector.prepared == [
        (10, "feed"), (11, "coordinator"), (21, "coordinator"), (30, "coordinator"), (40, "feed"),
    ]  # fmt: skip


def test_f14_max_age_is_that_of_the_frame_which_is_taken() -> None:
    behind = Behind(FeedConfig(max_age=0.5))
    behind.give(10)
    behind.clock.now += 0.4
    behind.read(11)
    behind.clock.now += 0.4  # the first one is too old now
    behind.answer()
    assert behind.sink.values == [(11, "view 11")]
    assert behind.end() == {"overrun": 1}


def test_f14_a_frame_that_is_too_old_when_its_batch_begins_costs_its_neighbours_nothing() -> None:
    behind = Behind(FeedConfig(max_age=0.5))
    behind.give(10)
    other = behind.coordinator.submit("other", frame(7).image)
    behind.clock.now += 0.5
    behind.detector.next()
    behind.detector.gate.set()
    assert other.result(60.0)[0] == 7
    assert behind.end() == {"stale": 1}
    assert behind.detector.calls[1] == [("other", 0)]
    figures = behind.coordinator.metrics()
    assert (figures.processed, figures.dropped, figures.failed, figures.consecutive_errors) == (2, 1, 0, 0)


def test_f14_a_batch_of_frames_that_are_all_too_old_is_no_call_and_no_fault() -> None:
    behind = Behind(FeedConfig(max_age=0.5))
    behind.give(10)
    behind.clock.now += 0.5
    behind.detector.gate.set()
    behind.busy.result(60.0)
    assert behind.end() == {"stale": 1}
    assert len(behind.detector.calls) == 1
    assert behind.coordinator.metrics().consecutive_errors == 0


def test_f14_a_newer_frame_that_cannot_be_prepared_costs_that_one_only() -> None:
    behind = Behind()
    behind.detector.faults_ahead = {11}
    behind.give(10, 11)
    other = behind.coordinator.submit("other", frame(7).image)
    behind.detector.next()
    behind.detector.gate.set()
    assert other.result(60.0)[0] == 7
    assert behind.end() == {"overrun": 1, "failed": 1}
    assert "no picture" in (behind.feed.snapshot().error or "")


def test_f14_a_frame_that_is_too_old_does_not_hide_that_a_call_has_a_wrong_number_of_results() -> None:
    behind = Behind(FeedConfig(max_age=0.5))
    behind.detector.answers_more = 1
    behind.give(10)
    others = [behind.coordinator.submit(f"other {n}", frame(n).image) for n in range(2)]
    behind.clock.now += 0.5
    behind.detector.next()
    behind.detector.gate.set()
    for other in others:
        with pytest.raises(ResultCountMismatch, match="3 results for 2 requests"):
            other.result(60.0)
    behind.end()


def test_f14_a_frame_whose_feed_gave_it_up_while_its_batch_began_takes_no_other_out_of_the_queue() -> None:
    """A neighbour holds the batch up; meanwhile the feed gives up its frame and prepares the next one."""
    behind, begun, go_on = Behind(), threading.Event(), threading.Event()

    def slow() -> NewestFrame:
        begun.set()
        assert go_on.wait(60.0)
        return NewestFrame(frame(7).image, None, 0, None)

    neighbour = Caller(behind.coordinator, "other", "old", newest=slow)
    behind.coordinator.asked(1)
    behind.coordinator.patience = 0.05
    behind.give(10)
    behind.detector.gate.set()
    assert begun.wait(60.0)
    behind.coordinator.patience = 60.0
    preparing = behind.detector.hold_up(20)
    behind.read(20)
    assert preparing.wait(60.0)
    behind.read(30)
    after = behind.coordinator.submit("after", frame(8).image)
    go_on.set()
    for _ in range(2):
        behind.detector.busy()
        behind.detector.gate.set()
    assert after.result(60.0)[0] == 8
    behind.detector.go_on.set()
    behind.detector.busy()
    behind.detector.gate.set()
    behind.sink.wait(1)
    assert behind.sink.values == [(30, "view 30")]
    assert behind.end() == {"timeout": 1, "overrun": 1}
    neighbour.end()


def test_f14_with_a_longer_queue_the_frame_that_waits_stays() -> None:
    behind = Behind(FeedConfig(queue=2))
    behind.give(10, 11)
    behind.answer()
    behind.detector.busy()
    behind.detector.gate.set()
    behind.sink.wait(2)
    assert behind.sink.values == [(10, "view 10"), (11, "view 11")]
    assert behind.end() == {}


def test_f5_a_frame_whose_caller_has_left_takes_no_other_out_of_the_queue() -> None:
    feed = Feed("cam", Camera(), clock=lambda: 0.5)
    hand, newer = CurrentFrame(frame(1), feed), frame(2)
    feed.queue.put(newer)
    hand.leave()
    taken = hand.newest()
    assert (taken.sequence, hand.frame.sequence, hand.replaced) == (1, 1, False)
    assert feed.queue.get(0.0) is newer


class Held:
    """Stands for a picture."""


@pytest.mark.parametrize("why", ["too old", "not prepared", "has no result", "the call fails"])
def test_f14_a_frame_without_an_answer_is_let_go_at_once(why: str) -> None:
    """Not when cycles are collected: hundreds of large pictures would wait for that."""

    def newest() -> NewestFrame:
        if why == "too old":
            raise Expired
        if why == "not prepared":
            raise ValueError("no picture")
        return NewestFrame(Held(), None, 0, None)

    def answer(entries: Sequence[BatchEntry]) -> Any:
        if why == "the call fails":
            raise ValueError("no call")
        return [ValueError("no result")] * len(entries)

    def ask(coordinator: Coordinator, held: Held) -> None:
        with pytest.raises(ReflexError):
            coordinator.submit_and_wait("cam", held, newest=newest)

    coordinator, held = Coordinator(Answering(answer=answer), BatchConfig(max_latency=0.0)), Held()
    let_go = weakref.ref(held)
    gc.disable()
    try:
        with coordinator:
            ask(coordinator, held)
        del held
        assert let_go() is None
    finally:
        gc.enable()


# -- a call that is repeated -------------------------------------------------------------------------------------------


class Alone(Stopping):
    """Fails on more than one entry, and answers with what it got."""

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        if entries[0].feed_id == "busy":
            return super().process(entries)
        if len(entries) > 1:
            raise ValueError("not together")
        return [entry.frame for entry in entries]


def test_b18_a_call_that_is_repeated_computes_the_same_frames() -> None:
    asked: list[int] = []
    detector = Alone()
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=8, max_latency=0.0))

    def newest(number: int) -> NewestFrame:
        asked.append(number)
        return NewestFrame(f"new {number}", None, number, None)

    with coordinator as handle:
        busy_with(coordinator, detector)
        coordinator.asked(1)
        callers = [Caller(handle, f"feed{n}", f"old {n}", newest=partial(newest, n)) for n in range(3)]
        coordinator.asked(3)
        detector.gate.set()
        assert sorted(caller.end() for caller in callers) == ["new 0", "new 1", "new 2"]
    assert sorted(asked) == [0, 1, 2]
