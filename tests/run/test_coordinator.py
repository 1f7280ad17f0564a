"""The thread driver for many feeds: what it promises while everybody behaves. Faults are in test_coordinator_faults."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import pytest

from reflex_runtime import BatchConfig, BatchCoordinator, BatchEntry
from reflex_runtime.core.batch import (
    BatchFinished,
    BatchScheduled,
    Cause,
    RequestAbandoned,
    RequestQueued,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.errors import (
    Cancelled,
    Closed,
    ConfigError,
    Displaced,
    Drained,
    Expired,
    InFlightCapReached,
    ProcessorError,
    QueueFull,
    ReflexError,
    WaitTimeout,
)
from reflex_runtime.feeds.runtime.health import BatchSubmissionRejected, Health, HealthEvent
from reflex_runtime.observe.batch_metrics import BatchMetrics, FeedBatchMetrics
from reflex_runtime.run import coordinator as module
from run.coordinated import Caller, Coordinator, Detector, Patient, Stepped, busy_with, echo, end_of, nobody_left
from run.helpers import PATIENCE, Log


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    yield from nobody_left()


def jain(shares: Sequence[float]) -> float:
    """1 for equal shares, 1/n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares))


def adds_up(figures: BatchMetrics | FeedBatchMetrics) -> bool:
    refused = figures.rejected + figures.in_flight_exceeded + figures.closed
    ended = figures.processed + figures.failed + figures.dropped
    return figures.submitted == refused + ended + figures.pending and figures.pending >= 0


# -- F1 ----------------------------------------------------------------------------------------------------------------


def test_f1_defaults() -> None:
    assert BatchConfig() == BatchConfig(4, 0.050, None, 5.0, 1, 30.0, 60.0)
    assert [f.name for f in fields(BatchConfig)] == [
        "max_batch_size",
        "max_latency",
        "queue_capacity",
        "response_timeout",
        "max_in_flight_per_feed",
        "startup_timeout",
        "watchdog",
    ]
    assert (BatchConfig().capacity, BatchConfig(max_batch_size=1).capacity) == (16, 4)
    assert BatchConfig(max_batch_size=32).capacity == 128
    assert BatchConfig(queue_capacity=9).capacity == 9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch_size", 0),
        ("max_batch_size", 2.5),
        ("max_batch_size", True),
        ("max_latency", -0.001),
        ("max_latency", float("nan")),
        ("max_latency", "soon"),
        ("queue_capacity", 0),
        ("queue_capacity", 3),  # below the batch size
        ("response_timeout", 0),
        ("response_timeout", float("inf")),
        ("max_in_flight_per_feed", -1),
        ("startup_timeout", 0.0),
        ("watchdog", -1.0),
        ("watchdog", None),
    ],
)
def test_f1_an_invalid_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"BatchConfig\.{field}={value!r}: must be"):
        BatchConfig(**{field: value})


def test_f1_zero_switches_off_holds_caps_and_the_watchdog() -> None:
    with Coordinator(Detector(), BatchConfig(max_latency=0, max_in_flight_per_feed=0, watchdog=0)) as handle:
        futures = [handle.submit("cam", n) for n in range(16)]
        assert [end_of(f) for f in futures] == [("cam", n) for n in range(16)]


def test_f1_a_queue_below_two_batches_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with Coordinator(Detector(), BatchConfig(max_batch_size=4, queue_capacity=8)):
        assert not caplog.records
    with Coordinator(Detector(), BatchConfig(max_batch_size=4, queue_capacity=7)):
        pass
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "queue_capacity=7 is below twice max_batch_size=4" in record.getMessage()


def test_f1_more_feeds_than_places_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with Coordinator(Detector(), BatchConfig(max_batch_size=1, queue_capacity=3)) as handle:
        for n in (1, 2, 3, 1):
            handle.submit_and_wait(f"cam{n}", None)
        assert not caplog.records
        for n in (4, 5, 6, 4):
            handle.submit_and_wait(f"cam{n}", None)
    assert [r.getMessage() for r in caplog.records if "more feeds than queue_capacity=3" in r.getMessage()]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("feed", ["", "x" * 257, 7, None])
def test_f1_a_feed_has_a_name(feed: Any) -> None:
    with Coordinator(Detector()) as handle:
        with pytest.raises(ConfigError, match="feed_id="):
            handle.submit_and_wait(feed, None)
        assert handle.metrics().submitted == 0


# -- F2 ----------------------------------------------------------------------------------------------------------------


def test_f2_one_thread_starts_runs_and_stops_the_processor() -> None:
    detector = Detector()
    with Coordinator(detector) as handle:
        callers = [Caller(handle, f"cam{n}", n) for n in range(8)]
        assert [c.end() for c in callers] == [(f"cam{n}", n) for n in range(8)]
    assert len(detector.threads) == 1
    assert threading.get_ident() not in detector.threads
    assert detector.methods[0] == "on_start"
    assert detector.methods[-1] == "on_stop"
    assert set(detector.methods[1:-1]) == {"process"}


def test_f2_start_returns_once_the_processor_is_ready() -> None:
    detector = Detector()
    coordinator = Coordinator(detector)
    assert detector.log == []
    assert coordinator.start() is coordinator
    assert detector.methods == ["on_start"]
    assert coordinator.stop()
    assert detector.methods == ["on_start", "on_stop"]


def test_f2_frames_may_come_before_the_start() -> None:
    coordinator = Coordinator(Detector())
    future = coordinator.submit("cam", 1)
    with coordinator:
        assert end_of(future) == ("cam", 1)


def test_f2_a_processor_has_one_owner_at_a_time() -> None:
    detector = Detector()
    first = BatchCoordinator(detector)
    with pytest.raises(ConfigError, match="'detector' belongs to another coordinator"):
        BatchCoordinator(detector)
    first.start()
    with pytest.raises(ConfigError, match="belongs to another"):
        BatchCoordinator(detector)
    assert first.stop()
    second = BatchCoordinator(detector)
    assert first.stop()  # again, and it is not its own any more
    with pytest.raises(ConfigError, match="belongs to another"):
        BatchCoordinator(detector)
    with second as handle:
        assert handle.submit_and_wait("cam", 1) == ("cam", 1)


def test_f2_a_coordinator_that_is_forgotten_owns_nothing() -> None:
    detector = Detector()
    BatchCoordinator(detector).stop()
    with BatchCoordinator(detector) as handle:
        assert handle.submit_and_wait("cam", 1) == ("cam", 1)


def test_f2_it_starts_once_and_never_after_its_stop() -> None:
    detector = Detector()
    coordinator = BatchCoordinator(detector)
    with coordinator:
        with pytest.raises(ConfigError, match="started already"):
            coordinator.start()
    with pytest.raises(ConfigError, match="started already"):
        coordinator.start()
    never = BatchCoordinator(detector)
    assert never.stop()
    with pytest.raises(ConfigError, match="stopped already"):  # somebody else may own its processor by now
        never.start()
    assert detector.methods == ["on_start", "on_stop"]


class Wrong:
    id: Any = "wrong"

    def on_start(self) -> None: ...
    def process(self, entries: Any) -> Any: ...
    def on_stop(self) -> None: ...


@pytest.mark.parametrize("name", ["", None, 7, "x" * 65])
def test_f2_a_processor_has_an_id(name: Any) -> None:
    wrong = Wrong()
    wrong.id = name
    with pytest.raises(ConfigError, match=r"Wrong\.id="):
        BatchCoordinator(wrong)


def test_f2_a_processor_needs_process_alone() -> None:
    wrong = Wrong()
    wrong.process = None  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match=r"has no method process\(\)"):
        BatchCoordinator(wrong)

    class Least:
        id = "least"

        def process(self, entries: Any) -> list[Any]:
            return [entry.frame for entry in entries]

    with BatchCoordinator(Least()) as handle:
        assert handle.submit_and_wait("cam", 7) == 7


def test_f2_the_answering_thread_may_not_wait_for_an_answer() -> None:
    errors: list[Any] = []

    def asks_itself(entries: Sequence[BatchEntry]) -> list[Any]:
        with pytest.raises(ConfigError, match="would wait for itself") as caught:
            coordinator.submit_and_wait("other", None)
        errors.append(caught.value)
        return echo(entries)

    coordinator = Coordinator(Detector(answer=asks_itself))
    with coordinator as handle:
        assert handle.submit_and_wait("cam", 1) == ("cam", 1)
    assert len(errors) == 1


def test_f2_nor_may_a_callback_on_whichever_thread_it_runs() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector)
    ends: list[Any] = []

    def ask(_: Future[Any]) -> None:
        try:
            coordinator.submit_and_wait("third", None)
        except ConfigError as error:
            ends.append((threading.current_thread(), str(error)))

    with coordinator as handle:
        first = busy_with(coordinator, detector)
        future = handle.submit("second", 2)
        ticket_of_second = future.take_back  # type: ignore[attr-defined]
        future.add_done_callback(ask)
        ticket_of_second()  # its frame is taken back: the answer comes on this thread
        [(thread, message)] = ends
        assert thread is threading.current_thread()
        assert "would wait for itself" in message
        detector.gate.set()
        end_of(first)


def test_f2_entries_carry_what_the_feed_sent() -> None:
    detector = Detector()
    before = time.monotonic()
    with Coordinator(detector) as handle:
        handle.submit_and_wait("cam1", "a", {"zoom": 2})
        handle.submit_and_wait("cam1", "b", pts=1.25)
        handle.submit_and_wait("cam2", "c")
        handle.submit_and_wait("cam1", "d", sequence=70)
        handle.submit_and_wait("cam1", "e")
    entries = [entry for call in detector.calls for entry in call]
    assert [(e.feed_id, e.frame, e.view, e.sequence, e.pts) for e in entries] == [
        ("cam1", "a", {"zoom": 2}, 0, None),
        ("cam1", "b", None, 1, 1.25),
        ("cam2", "c", None, 0, None),
        ("cam1", "d", None, 70, None),
        ("cam1", "e", None, 2, None),
    ]
    assert all(isinstance(e, BatchEntry) for e in entries)
    arrivals = [before, *(e.arrived for e in entries), time.monotonic()]
    assert arrivals == sorted(arrivals)


@pytest.mark.parametrize("name", ["newest", "deadline", "sequence_number"])
def test_f2_what_may_not_be_said_of_a_frame_is_an_error(name: str) -> None:
    detector = Detector()
    with Coordinator(detector) as handle:
        with pytest.raises(TypeError, match=name):
            handle.submit("cam1", "a", **{name: None})
        handle.submit_and_wait("cam1", "b")
    assert [[e.frame for e in call] for call in detector.calls] == [["b"]]


def test_f2_feeds_beyond_those_it_knows_are_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_FEEDS", 3)
    detector = Detector()
    with Coordinator(detector) as handle:
        for feed in ("a", "b", "c", "d", "b", "a"):  # d puts a out, and a comes back for b's place
            handle.submit_and_wait(feed, None)
    assert [(e.feed_id, e.sequence) for [e] in detector.calls] == [
        ("a", 0), ("b", 0), ("c", 0), ("d", 0), ("b", 1), ("a", 0),
    ]  # fmt: skip


# -- F3 ----------------------------------------------------------------------------------------------------------------


def test_f3_a_caller_is_blocked_for_max_latency_and_response_timeout_at_most() -> None:
    detector = Detector(is_open=False)
    with Coordinator(detector, BatchConfig(max_latency=0.04, response_timeout=0.06)) as handle:
        caller = Caller(handle, "cam", 1)
        error = caller.end()
        assert isinstance(error, WaitTimeout)
        assert "feed 'cam': no answer within 0.1 s" in str(error)
        assert caller.seconds >= 0.1
        detector.gate.set()


def test_f3_a_caller_that_gave_up_is_told_so_even_if_its_frame_is_taken_back_at_once() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_latency=0.0, response_timeout=0.01))
    abandon = coordinator.device.abandon

    def taken_back(ticket: Any) -> bool:
        answered = abandon(ticket)
        coordinator.device.cancel(ticket)  # as the next batch does, on the device's thread
        return answered

    coordinator.device.abandon = taken_back  # type: ignore[method-assign]
    with coordinator as handle:
        busy_with(coordinator, detector)
        error = Caller(handle, "cam", "late").end()
        detector.gate.set()
    assert isinstance(error, WaitTimeout)


def test_f3_every_outcome_has_an_error_of_its_own() -> None:
    def faulty(entries: Sequence[BatchEntry]) -> list[Any]:
        return [ValueError("bad frame") if e.frame == "bad" else e.frame for e in entries]

    detector = Detector(is_open=False, answer=faulty)
    config = BatchConfig(max_batch_size=1, queue_capacity=2, response_timeout=PATIENCE, max_in_flight_per_feed=1)
    coordinator = Coordinator(detector, config)
    handle = coordinator.start()
    first = busy_with(coordinator, detector)
    bad = Caller(handle, "bad", "bad")
    coordinator.asked(2)
    with pytest.raises(InFlightCapReached, match="feed 'bad' has 1 frame"):
        handle.submit_and_wait("bad", None)
    expired = Caller(handle, "late", time_limit=0.02)
    assert isinstance(expired.end(), Expired)
    late = handle.submit("waits", None)
    with pytest.raises(QueueFull, match="detector: 2 frames wait already, the frame is dropped"):
        handle.submit_and_wait("third", None)
    assert late.cancel()
    detector.gate.set()
    assert end_of(first) == "busy"
    error = bad.end()
    assert isinstance(error, ProcessorError)
    assert "ValueError: bad frame" in str(error)
    assert isinstance(error.__cause__, ValueError)
    detector.gate.clear()
    last = handle.submit("last", "last")
    detector.busy()
    detector.busy()
    drained = Caller(handle, "drained")
    coordinator.asked(6)
    coordinator.signal()
    assert isinstance(drained.end(), Drained)
    with pytest.raises(Closed, match="detector: the coordinator is stopping"):
        handle.submit("new", None)
    detector.gate.set()
    assert coordinator.join()
    assert end_of(last) == "last"


def test_f3_an_answer_that_comes_with_the_timeout_is_taken() -> None:
    """The time is over, but before the caller has left the answer is there: it is the answer that counts."""
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_latency=0, response_timeout=0.02))
    abandon = coordinator.device.abandon

    def late(ticket: Any) -> bool:
        detector.gate.set()
        while ticket.outcome is None:
            time.sleep(0)
        return abandon(ticket)

    coordinator.device.abandon = late  # type: ignore[method-assign]
    with coordinator as handle:
        assert handle.submit_and_wait("cam", 1) == ("cam", 1)
        assert handle.metrics().timed_out == 0


# -- F4 ----------------------------------------------------------------------------------------------------------------


def test_f4_a_full_queue_refuses_at_once_and_the_feed_goes_on() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=1, queue_capacity=3))
    with coordinator as handle:
        first = busy_with(coordinator, detector)
        waiting = [handle.submit(f"cam{n}", n) for n in range(3)]
        for _ in range(50):
            with pytest.raises(QueueFull):
                handle.submit("fast", "dropped")
            with pytest.raises(QueueFull):
                handle.submit_and_wait("fast", "dropped")
        detector.gate.set()
        assert [end_of(f) for f in (first, *waiting)] == [("busy", "busy"), *((f"cam{n}", n) for n in range(3))]
        assert handle.submit_and_wait("fast", "next") == ("fast", "next")
        assert handle.metrics().feeds["fast"].rejected == 100
    assert [["dropped"]] not in detector.frames


def test_f4_a_frame_that_was_refused_holds_no_place() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=1, queue_capacity=1))
    with coordinator as handle:
        busy_with(coordinator, detector)
        waiting = handle.submit("cam", 1)
        with pytest.raises(QueueFull):
            handle.submit("other", 2)
        assert waiting.cancel()
        again = handle.submit("other", 3)  # neither the place nor the count was taken by its first
        detector.gate.set()
        assert end_of(again) == ("other", 3)


# -- F5 ----------------------------------------------------------------------------------------------------------------


def test_f5_the_count_is_released_before_a_callback_sees_the_answer() -> None:
    ends: list[Any] = []
    over = threading.Event()

    def again(future: Future[Any]) -> None:
        ends.append(future.result())
        if len(ends) == 2_000:
            over.set()
        else:
            handle.submit("cam", len(ends)).add_done_callback(again)

    with Coordinator(Detector(), BatchConfig(max_in_flight_per_feed=1)) as handle:
        handle.submit("cam", 0).add_done_callback(again)
        assert over.wait(3 * PATIENCE)
        assert handle.metrics().in_flight_exceeded == 0
    assert ends == [("cam", n) for n in range(2_000)]


def test_f5_the_count_is_released_before_a_caller_wakes() -> None:
    with Coordinator(Detector(), BatchConfig(max_in_flight_per_feed=1, max_batch_size=2)) as handle:

        def feed(name: str) -> None:
            for n in range(1000):
                assert handle.submit_and_wait(name, n) == (name, n)
            ends.append(name)

        ends: list[str] = []
        threads = [threading.Thread(target=feed, args=(f"cam{n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(ends) == ["cam0", "cam1", "cam2"]
        assert handle.metrics().in_flight_exceeded == 0


def test_f5_in_flight_lasts_from_submission_to_answer() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=1, max_in_flight_per_feed=2))
    with coordinator as handle:
        running = busy_with(coordinator, detector, "cam")
        waiting = handle.submit("cam", 2)
        for _ in range(3):
            with pytest.raises(InFlightCapReached, match="has 2 frames in flight"):
                handle.submit("cam", 3)
        other = handle.submit("other", 1)  # the cap is each feed's own
        detector.gate.set()
        assert end_of(running) == ("cam", "busy")
        assert end_of(waiting) == ("cam", 2)
        assert end_of(other) == ("other", 1)
        assert end_of(handle.submit("cam", 4)) == ("cam", 4)


# -- F6 ----------------------------------------------------------------------------------------------------------------


def test_f6_a_lone_feed_does_not_wait_for_company() -> None:
    log = Log()
    with Coordinator(Detector(), BatchConfig(max_latency=PATIENCE), sinks=[log]) as handle:
        for n in range(5):
            assert handle.submit_and_wait("cam", n) == ("cam", n)
    assert [e.batch.cause for e in log.of(BatchScheduled)] == [Cause.IDLE] * 5


def test_f6_a_full_batch_goes_at_once() -> None:
    log = Log()
    detector = Detector()
    with Coordinator(detector, Patient(max_batch_size=3, max_latency=60.0), sinks=[log]) as handle:
        futures = [handle.submit(f"cam{n}", n) for n in range(3)]
        assert [end_of(f) for f in futures] == [(f"cam{n}", n) for n in range(3)]
    assert detector.frames == [[0, 1, 2]]
    assert [e.batch.cause for e in log.of(BatchScheduled)] == [Cause.SIZE]


def test_f6_a_held_batch_goes_when_its_hold_is_over() -> None:
    clock, log, detector = Stepped(), Log(), Detector()
    coordinator = Coordinator(detector, Patient(max_batch_size=8, max_latency=0.5), sinks=[log], clock=clock)
    with coordinator as handle:
        oldest = handle.submit("cam1", 1)
        clock.step(0.25, coordinator)
        youngest = handle.submit("cam2", 2)
        clock.step(0.125, coordinator)
        with pytest.raises(TimeoutError):
            oldest.result(0.05)  # it is held
        clock.step(0.125, coordinator)
        end_of(oldest)
        end_of(youngest)
        assert handle.metrics().formation.p99 == 0.5
    assert detector.frames == [[1, 2]]
    assert [e.batch.cause for e in log.of(BatchScheduled)] == [Cause.HELD]


def test_f6_company_that_waits_while_the_processor_is_busy_goes_together() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=4))
    with coordinator as handle:
        busy_with(coordinator, detector)
        futures = [handle.submit(f"cam{n}", n) for n in range(6)]
        detector.gate.set()
        for future in futures:
            end_of(future)
    assert detector.frames == [["busy"], [0, 1, 2, 3], [4, 5]]


# -- F7 ----------------------------------------------------------------------------------------------------------------

OVERLOAD = BatchConfig(max_batch_size=4, queue_capacity=100_000, max_in_flight_per_feed=0, max_latency=0)


def test_f7_first_in_first_out_within_a_feed() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, OVERLOAD)
    with coordinator as handle:
        busy_with(coordinator, detector)
        order: list[Any] = []
        futures = []
        for n in range(60):
            future = handle.submit(f"cam{n % 7 % 3}", n)
            future.add_done_callback(lambda f: order.append(f.result()))
            futures.append(future)
        detector.gate.set()
        for future in futures:
            end_of(future)
    sent = {f"cam{feed}": [n for n in range(60) if n % 7 % 3 == feed] for feed in range(3)}
    assert {f: [e.frame for call in detector.calls[1:] for e in call if e.feed_id == f] for f in sent} == sent
    assert {f: [n for feed, n in order if feed == f] for f in sent} == sent  # answered in that order, too


def test_f7_a_backlog_of_one_feed_does_not_delay_another() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, OVERLOAD)
    with coordinator as handle:
        busy_with(coordinator, detector)
        flood = [handle.submit("fast", n) for n in range(1000)]
        slow = handle.submit("slow", 0)
        detector.gate.set()
        assert end_of(slow) == ("slow", 0)
        end_of(flood[-1])
    assert any(e.feed_id == "slow" for e in detector.calls[1])


def test_f7_backlogged_feeds_get_equal_shares() -> None:
    """One feed submits thirty times as much as seven others, all of them wait: everybody is served alike."""
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, OVERLOAD)
    with coordinator as handle:
        busy_with(coordinator, detector)
        last = []
        for n in range(100):
            last = [handle.submit("fast", (n, i)) for i in range(30)]
            last += [handle.submit(f"cam{feed}", n) for feed in range(7)]
        detector.gate.set()
        for future in last:
            end_of(future)
    served = [e.feed_id for call in detector.calls[1:] for e in call][: 8 * 90]
    shares = Counter(served)
    assert len(shares) == 8
    assert jain(list(shares.values())) >= 0.999
    assert min(shares.values()) >= 89


def test_f7_shares_stay_equal_while_frames_keep_coming() -> None:
    sent: Counter[str] = Counter()
    shares: Counter[str] = Counter()
    over = threading.Event()
    ahead = {"fast": 900, **{f"cam{n}": 30 for n in range(7)}}

    def count(entries: Sequence[BatchEntry]) -> list[Any]:
        if over.is_set():  # what is left of the fast one's frames runs until the stop is heard of
            return echo(entries)
        shares.update(e.feed_id for e in entries)
        while not over.is_set() and any(sent[feed] - shares[feed] < 8 for feed in ahead):
            time.sleep(0)  # a share is only owed to whoever has frames waiting
        if sum(shares.values()) >= 4000:
            over.set()
        return echo(entries)

    def feed(name: str) -> None:
        waiting: deque[Future[Any]] = deque()
        while not over.is_set():
            while len(waiting) < ahead[name]:
                try:
                    waiting.append(handle.submit(name, None))
                except Closed:  # it was over meanwhile
                    return
                sent[name] += 1
            end_of(waiting.popleft())

    detector = Detector(answer=count)
    coordinator = Coordinator(detector, OVERLOAD)
    with coordinator as handle:
        handle.submit("busy", None)
        threads = [threading.Thread(target=feed, args=(name,), daemon=True) for name in ahead]
        for thread in threads:
            thread.start()
        assert over.wait(3 * PATIENCE)
        coordinator.signal()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    slow = [shares[f"cam{n}"] for n in range(7)]
    assert jain(slow) >= 0.99
    assert min(slow) >= 0.95 * sum(shares.values()) / 8


def test_f7_a_feed_that_floods_a_small_queue_gives_way_to_the_others() -> None:
    detector = Detector(is_open=False)
    told: list[HealthEvent] = []
    health = Health("detector", told.append)
    config = BatchConfig(max_batch_size=4, queue_capacity=8, max_in_flight_per_feed=0)
    coordinator = Coordinator(detector, config, sinks=[health])
    with coordinator as handle:
        busy_with(coordinator, detector)
        flood = [handle.submit("fast", n) for n in range(8)]
        slow = [handle.submit(f"cam{n}", n) for n in range(6)]  # each takes a place of the flood
        assert [type(future.exception(PATIENCE)) for future in flood[2:]] == [Displaced] * 6  # told at once
        with pytest.raises(QueueFull):
            handle.submit("fast", 8)
        detector.gate.set()
        assert all(end_of(future) is not None for future in (*slow, *flood[:2]))
        metrics = handle.metrics()
    health.flush(time.monotonic())
    assert metrics.feeds["fast"].dropped == 6
    refused = sum(event.count for event in told if isinstance(event, BatchSubmissionRejected))
    assert refused == 7  # those that gave way, and the one that was refused at once


def test_f7_capped_feeds_leave_room_for_everybody() -> None:
    """With the default cap a feed holds one place, however fast it is: a fast one cannot fill the queue."""
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=2, queue_capacity=8))
    with coordinator as handle:
        busy_with(coordinator, detector)
        futures = [handle.submit("fast", 0)]
        for _ in range(100):
            with pytest.raises(InFlightCapReached):
                handle.submit("fast", 0)
        futures += [handle.submit(f"cam{n}", 0) for n in range(7)]
        detector.gate.set()
        for future in futures:
            end_of(future)
        assert handle.metrics().rejected == 0


# -- F9 ----------------------------------------------------------------------------------------------------------------


def test_f9_an_abandoned_frame_that_waits_is_never_computed() -> None:
    detector = Detector(is_open=False)
    log = Log()
    coordinator = Coordinator(detector, BatchConfig(max_latency=0, response_timeout=0.05), sinks=[log])
    with coordinator as handle:
        running = busy_with(coordinator, detector)
        assert isinstance(Caller(handle, "cam", "old").end(), WaitTimeout)
        with pytest.raises(InFlightCapReached):  # its place is kept until the next batch is formed
            handle.submit("cam", "new")
        assert handle.metrics().feeds["cam"].pending == 1
        detector.gate.set()
        assert end_of(running) == ("busy", "busy")
        # The answer to `running` and the next formation are one step: the place is free by now.
        assert end_of(handle.submit("cam", "new")) == ("cam", "new")
        figures = handle.metrics().feeds["cam"]
    assert detector.frames == [["busy"], ["new"]]
    assert (figures.timed_out, figures.dropped, figures.processed) == (1, 1, 1)
    [left] = log.of(RequestAbandoned)
    assert isinstance(left.ticket.outcome.error, Cancelled)


def test_f9_an_abandoned_frame_that_runs_keeps_its_place_to_the_end_and_reaches_nobody() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_latency=0, response_timeout=0.05))
    abandon = coordinator.device.abandon

    def while_it_runs(ticket: Any) -> bool:
        detector.busy()
        return abandon(ticket)

    coordinator.device.abandon = while_it_runs  # type: ignore[method-assign]
    with coordinator as handle:
        assert isinstance(Caller(handle, "cam", "old").end(), WaitTimeout)
        with pytest.raises(InFlightCapReached):
            handle.submit_and_wait("cam", "new")
        free = handle.submit("other", 1)
        detector.gate.set()
        end_of(free)
        assert end_of(handle.submit("cam", "new")) == ("cam", "new")
        figures = handle.metrics().feeds["cam"]
    assert (figures.timed_out, figures.processed, figures.in_flight_exceeded) == (1, 2, 1)


def test_f9_a_cancelled_future_takes_its_frame_back() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=1))
    with coordinator as handle:
        running = busy_with(coordinator, detector)
        waiting = handle.submit("cam", "old")
        assert waiting.cancel()
        assert waiting.cancel()  # as futures have it
        again = handle.submit("cam", "new")  # its place was released at once
        assert running.cancel()  # it runs to its end, for nobody
        with pytest.raises(InFlightCapReached):
            handle.submit("busy", None)
        detector.gate.set()
        assert end_of(again) == ("cam", "new")
        figures = handle.metrics()
    assert waiting.cancelled()
    assert running.cancelled()
    assert detector.frames == [["busy"], ["new"]]
    assert (figures.dropped, figures.processed, figures.timed_out) == (2, 1, 0)


def test_f9_an_interrupted_caller_takes_its_frame_back() -> None:
    """Ctrl-C in the main thread: nobody waits for the answer any more."""
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector)

    class Interrupt:
        def __radd__(self, other: float) -> float:
            raise KeyboardInterrupt

    with coordinator as handle:
        first = busy_with(coordinator, detector)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coordinator, "patience", Interrupt())  # asked for when it begins to wait
            with pytest.raises(KeyboardInterrupt):
                handle.submit_and_wait("cam", "old")
        again = handle.submit("cam", "new")
        detector.gate.set()
        end_of(first)
        assert end_of(again) == ("cam", "new")
        assert handle.metrics().feeds["cam"].dropped == 1
    assert detector.frames == [["busy"], ["new"]]


# -- F11: an ordinary stop ---------------------------------------------------------------------------------------------


def test_f11_a_batch_being_formed_is_still_processed() -> None:
    detector = Detector()
    coordinator = Coordinator(detector, Patient(max_batch_size=4, max_latency=60.0))
    handle = coordinator.start()
    held = [Caller(handle, f"cam{n}", n) for n in range(3)]
    coordinator.asked(3)
    assert coordinator.stop()
    assert [c.end() for c in held] == [(f"cam{n}", n) for n in range(3)]
    assert detector.methods == ["on_start", "process", "on_stop"]


def test_f11_a_running_batch_ends_well_and_who_waits_is_released_before_on_stop() -> None:
    waiting: list[Caller] = []
    left: list[Caller] = []

    class Watched(Detector):
        def on_stop(self) -> None:
            for caller in waiting:
                caller.join(PATIENCE)
            left.extend(c for c in waiting if c.is_alive())
            super().on_stop()

    detector = Watched(is_open=False)
    config = BatchConfig(max_batch_size=2, queue_capacity=64, response_timeout=PATIENCE)
    coordinator = Coordinator(detector, config)
    handle = coordinator.start()
    running = Caller(handle, "busy", "busy")
    detector.busy()
    waiting += [Caller(handle, f"cam{n}", n) for n in range(20)]
    coordinator.asked(21)
    coordinator.signal()
    for caller in waiting:  # while the batch still runs
        error = caller.end()
        assert isinstance(error, Drained)
        assert error.retry_safe
    with pytest.raises(Closed, match="is stopping"):
        handle.submit("new", None)
    assert running.is_alive()
    detector.gate.set()
    assert coordinator.join()
    assert running.end() == ("busy", "busy")
    assert left == []
    assert detector.methods == ["on_start", "process", "on_stop"]
    assert coordinator.detached is None
    assert coordinator.stop_error is None


def test_f11_a_last_batch_takes_as_many_as_fit_and_the_rest_is_released_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processor is free, more wait than a batch holds: one batch still runs, and nobody waits for it in vain."""
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=2, queue_capacity=64))
    futures = [coordinator.submit(f"cam{n}", n) for n in range(6)]
    prepare = coordinator._prepare

    def ready_and_over() -> None:
        prepare()
        coordinator.signal()

    monkeypatch.setattr(coordinator, "_prepare", ready_and_over)
    coordinator.start()
    detector.busy()
    assert [type(end_of(f)) for f in futures[2:]] == [Drained] * 4  # while the last batch is inside
    assert not futures[0].done()
    detector.gate.set()
    assert coordinator.join()
    assert [end_of(f) for f in futures[:2]] == [("cam0", 0), ("cam1", 1)]
    assert detector.frames == [[0, 1]]


@pytest.mark.parametrize("size", [4, 128])
def test_f11_stop_is_prompt_with_64_blocked_feeds(size: int) -> None:
    """size 4: they wait behind a batch that runs. size 128: they are held for company, and all are processed."""
    kind = Patient if size == 128 else BatchConfig
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, kind(size, 60.0, queue_capacity=128, response_timeout=PATIENCE))
    handle = coordinator.start()
    if size == 4:
        busy_with(coordinator, detector)
        coordinator.asked(1)
    callers = [Caller(handle, f"cam{n}", n) for n in range(64)]
    coordinator.asked(64)
    detector.gate.set()
    assert coordinator.stop(PATIENCE / 2)
    ends = [c.end() for c in callers]
    if size == 128:
        assert ends == [(f"cam{n}", n) for n in range(64)]
    assert all(isinstance(e, Drained) or e == (f"cam{n}", n) for n, e in enumerate(ends))
    assert adds_up(handle.metrics())
    assert handle.metrics().pending == 0


def test_f11_idle_and_never_started_coordinators_stop_too() -> None:
    idle = Coordinator(Detector())
    idle.start()
    began = time.monotonic()
    assert idle.stop(PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2, "it is woken, and not only when its time is over"
    never = Coordinator(Detector())
    waiting = never.submit("cam", 1)
    never.signal()
    assert isinstance(end_of(waiting), Drained)
    assert never.join()
    with pytest.raises(Closed):
        never.submit("cam", 1)


def test_f11_with_returns_what_the_body_raised() -> None:
    detector = Detector()
    with pytest.raises(ZeroDivisionError):
        with Coordinator(detector):
            raise ZeroDivisionError
    assert detector.methods == ["on_start", "on_stop"]


# -- time limits -------------------------------------------------------------------------------------------------------


def test_f6_a_frame_past_its_time_limit_is_not_computed_even_while_the_processor_is_busy() -> None:
    clock, detector = Stepped(), Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=1), clock=clock)
    with coordinator as handle:
        running = busy_with(coordinator, detector)
        later = handle.submit("later", 0, time_limit=800.0)
        sooner = handle.submit("sooner", 1, time_limit=400.0)
        clock.step(400.0, coordinator)
        assert isinstance(end_of(sooner), Expired)
        assert not later.done()
        clock.step(400.0, coordinator)
        assert isinstance(end_of(later), Expired)
        with pytest.raises(ConfigError, match="time_limit"):
            handle.submit("cam", 0, time_limit=-1.0)
        detector.gate.set()
        end_of(running)
    assert detector.frames == [["busy"]]


def test_f6_a_time_limit_needs_nobody_to_ring_it() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=1))
    with coordinator as handle:
        busy_with(coordinator, detector)
        began = time.monotonic()
        futures = [handle.submit(f"cam{n}", 0, time_limit=limit) for n, limit in enumerate((0.1, 0.02, 0.05))]
        assert [type(end_of(f)) for f in futures] == [Expired] * 3
        assert time.monotonic() - began >= 0.1
        detector.gate.set()


# -- sinks -------------------------------------------------------------------------------------------------------------


def test_f10_sinks_get_every_event_in_order_and_those_they_ask_for() -> None:
    class Settled(Log):
        events = frozenset({RequestSettled})

    log, settled = Log(), Settled()
    detector = Detector()
    with Coordinator(detector, BatchConfig(max_latency=0), sinks=[log, settled]) as handle:
        handle.submit_and_wait("cam", 1)
    kinds = [type(e) for e in log.seen]
    assert kinds == [RequestQueued, BatchScheduled, BatchFinished, RequestSettled]
    assert [type(e) for e in settled.seen] == [RequestSettled]


def test_f10_a_sink_that_raises_is_logged_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Any) -> None:
        raise ZeroDivisionError("a sink")

    log = Log()
    with Coordinator(Detector(), sinks=[broken, log]) as handle:
        assert handle.submit_and_wait("cam", 1) == ("cam", 1)
        assert handle.metrics().processed == 1
    assert len(log.of(RequestSettled)) == 1
    assert "detector: a sink failed on RequestSettled" in caplog.text


def test_f10_what_a_callback_causes_is_told_after_what_came_before() -> None:
    """A callback is refused, and takes a frame back, in the middle of a batch's answers: sinks see that order."""
    log = Log()
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=4, max_in_flight_per_feed=2), sinks=[log])
    seen: list[BatchMetrics] = []
    with coordinator as handle:
        busy_with(coordinator, detector)
        first = handle.submit("a", 1)
        taken: list[Future[Any]] = []
        futures = [first, handle.submit("b", 2), handle.submit("b", 3)]

        def meddle(_: Future[Any]) -> None:
            taken.append(handle.submit("c", 4))
            with pytest.raises(ConfigError):
                handle.submit_and_wait("d", 5)
            coordinator.device.wake()
            taken[0].cancel()
            coordinator.signal()
            with pytest.raises(Closed):
                handle.submit("e", 6)
            seen.append(handle.metrics())

        first.add_done_callback(meddle)
        detector.gate.set()
        assert [end_of(f) for f in futures] == [("a", 1), ("b", 2), ("b", 3)]
    ends = [e.ticket.request.client for e in log.of(RequestSettled)]
    assert ends == ["busy", "a", "b", "b", "c"]
    times = [e.at for e in log.seen]
    assert times == sorted(times)
    settled: set[Any] = set()
    for event in log.seen:
        if isinstance(event, RequestSettled):
            settled.add(event.ticket)
        if isinstance(event, RequestQueued):
            assert event.ticket not in settled
    assert isinstance(log.seen[-1], RequestRejected)
    [figures] = seen
    assert adds_up(figures)
    assert all(adds_up(feed) for feed in figures.feeds.values())


# -- F13 ---------------------------------------------------------------------------------------------------------------


def test_f13_nothing_measured_is_none() -> None:
    figures = Coordinator(Detector()).metrics()
    assert (figures.fill_ratio, figures.processing.mean, figures.formation.p95) == (None, None, None)
    assert (figures.submitted, figures.batches_dispatched, figures.feeds) == (0, 0, {})


def test_f13_figures_of_a_short_life() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=4, queue_capacity=5))
    with coordinator as handle:
        busy_with(coordinator, detector, "a")
        futures = [handle.submit(feed, 0) for feed in "bcde"]
        with pytest.raises(InFlightCapReached):
            handle.submit("b", 1)
        futures.append(handle.submit("f", 0))
        with pytest.raises(QueueFull):
            handle.submit("g", 1)
        now = handle.metrics()
        assert (now.submitted, now.pending, now.rejected, now.in_flight_exceeded) == (7 + 1, 6, 1, 1)
        assert now.batch_sizes == {1: 1}
        detector.gate.set()
        for future in futures:
            end_of(future)
        figures = handle.metrics()
    assert (figures.submitted, figures.processed, figures.pending) == (8, 6, 0)
    assert figures.batches_dispatched == 3
    assert figures.batch_sizes == {1: 2, 4: 1}
    assert figures.fill_ratio == 6 / 12
    assert figures.processing.count == figures.formation.count == 3
    assert figures.processing.mean is not None
    assert figures.consecutive_errors == 0
    assert set(figures.feeds) == set("abcdefg")
    assert figures.feeds["b"].latency.count == 1
    with pytest.raises(Closed):
        coordinator.submit("a", 1)
    assert coordinator.metrics().feeds["a"].closed == 1


def test_f13_every_snapshot_adds_up_while_feeds_run() -> None:
    def some_fail(entries: Sequence[BatchEntry]) -> list[Any]:
        return [ValueError() if e.frame % 5 == 0 else e.frame for e in entries]

    snapshots: list[BatchMetrics] = []
    running = threading.Event()
    coordinator = Coordinator(Detector(answer=some_fail), BatchConfig(queue_capacity=8, max_in_flight_per_feed=3))

    def look() -> None:
        while not running.is_set():
            snapshots.append(coordinator.metrics())

    def feed(name: str) -> None:
        for n in range(500):
            try:
                future = coordinator.submit(name, n)
            except ReflexError:
                continue
            if n % 7 == 0:
                future.cancel()
            if n % 11 == 0 and not future.cancelled():
                future.exception(PATIENCE)

    with coordinator:
        looker = threading.Thread(target=look)
        looker.start()
        threads = [threading.Thread(target=feed, args=(f"cam{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        running.set()
        looker.join(PATIENCE)
    snapshots.append(coordinator.metrics())
    assert snapshots[-1].submitted == 2000
    assert snapshots[-1].pending == 0
    for snapshot in snapshots:
        assert adds_up(snapshot)
        assert all(adds_up(f) for f in snapshot.feeds.values())
        assert snapshot.submitted == sum(f.submitted for f in snapshot.feeds.values())
    assert [s.submitted for s in snapshots] == sorted(s.submitted for s in snapshots)


def test_f13_a_snapshot_knows_what_nobody_was_told_yet() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector)
    with coordinator as handle:
        busy_with(coordinator, detector)
        waiting = handle.submit("cam", 1)
        figures = handle.metrics()
        assert (figures.submitted, figures.pending, figures.batches_dispatched) == (2, 2, 1)
        detector.gate.set()
        end_of(waiting)


def test_f10_callbacks_that_are_refused_do_not_pile_up(caplog: pytest.LogCaptureFixture) -> None:
    """Each refusal tells the sinks, in the middle of the answers: one after the other, not one within the other."""
    detector = Detector(is_open=False)
    log = Log()
    config = BatchConfig(max_batch_size=1000, max_in_flight_per_feed=0)
    coordinator = Coordinator(detector, config, sinks=[log])
    refused: list[Any] = []

    def again(_: Future[Any]) -> None:
        try:
            coordinator.submit("cam", None)
        except Closed as error:
            refused.append(error)

    coordinator.start()
    first = busy_with(coordinator, detector)
    futures = [coordinator.submit("cam", n) for n in range(1000)]
    for future in futures:
        future.add_done_callback(again)
    coordinator.signal()
    detector.gate.set()
    assert coordinator.stop()
    end_of(first)
    assert [type(end_of(f)) for f in futures] == [Drained] * 1000
    assert len(refused) == len(log.of(RequestRejected)) == 1000
    assert not caplog.records


class FixedSize(Detector):
    """Says after its start how many entries a call computes."""

    batch_size: int | None = None

    def on_start(self) -> None:
        super().on_start()
        self.batch_size = 2


def test_f6_a_batch_is_no_larger_than_what_the_processor_computes_at_once() -> None:
    detector = FixedSize(is_open=False)
    with Coordinator(detector, BatchConfig(max_batch_size=8, max_latency=0)) as handle:
        futures = [handle.submit("cam0", 0)]
        detector.busy()
        futures += [handle.submit(f"cam{n}", n) for n in range(1, 6)]
        detector.gate.set()
        assert [end_of(future) for future in futures] == [(f"cam{n}", n) for n in range(6)]
    assert detector.frames == [[0], [1, 2], [3, 4], [5]]
