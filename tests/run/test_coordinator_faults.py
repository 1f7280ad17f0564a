"""The coordinator and what can go wrong around it: nobody is left waiting, and nobody gets a wrong answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from reflex_runtime import BatchConfig, BatchCoordinator, BatchEntry
from reflex_runtime.core.batch import DeviceLost, RequestSettled
from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    CutShort,
    Drained,
    InFlightCapReached,
    ProcessorError,
    ProcessorHung,
    QueueFull,
    ResultCountMismatch,
    WaitTimeout,
)
from reflex_runtime.feeds.runtime.health import BatchError, BatchTimeout, Health, HealthEvent, StageError
from reflex_runtime.run import coordinator as module
from reflex_runtime.run import device as device_module
from run.coordinated import Caller, Coordinator, Detector, Stepped, busy_with, echo, end_of, nobody_left
from run.helpers import PATIENCE, Log


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    yield from nobody_left()


class NanFound(ProcessorError):
    """A processor's own kind of failure."""


class Starts(Detector):
    """Starts when `may_start` is set, with what `fault` is."""

    def __init__(self, fault: BaseException | None = None) -> None:
        super().__init__()
        self.starting, self.may_start = threading.Event(), threading.Event()
        self.fault = fault

    def on_start(self) -> None:
        super().on_start()
        self.starting.set()
        assert self.may_start.wait(PATIENCE)
        if self.fault is not None:
            raise self.fault


class Stops(Detector):
    """Stops when `may_stop` is set, with what `fault` is."""

    def __init__(self, fault: BaseException | None = None) -> None:
        super().__init__()
        self.may_stop = threading.Event()
        self.fault = fault

    def on_stop(self) -> None:
        super().on_stop()
        assert self.may_stop.wait(PATIENCE)
        if self.fault is not None:
            raise self.fault


class Guarded(Detector):
    """Notices when two threads, or two calls, are inside."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.inside = 0
        self.most = 0

    def process(self, entries: Sequence[BatchEntry]) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            return super().process(entries)
        finally:
            self.inside -= 1


def raises(error: BaseException) -> Callable[[Any], Any]:
    def answer(_: Any) -> Any:
        raise error

    return answer


def coordinator_is_busy(handle: BatchCoordinator) -> bool:
    return handle.device.busy


def together(coordinator: Coordinator, detector: Detector, n: int) -> list[Future[Any]]:
    """n frames of as many feeds that go in one batch, the gate open."""
    first = busy_with(coordinator, detector)
    futures = [coordinator.submit(f"cam{k}", k) for k in range(n)]
    detector.gate.set()
    end_of(first)
    return futures


# -- on_start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ValueError("no model"), SystemExit("no model"), TimeoutError("no model")])
def test_f12_on_start_that_raises(fault: BaseException) -> None:
    class Slow(Coordinator):
        def stop(self, timeout: float = 5.0) -> bool:
            ends.append(end_of(early))  # it is not this which releases it: nothing ran on what did not start
            return super().stop(timeout)

    ends: list[Any] = []
    detector = Starts(fault)
    detector.may_start.set()
    coordinator = Slow(detector)
    early = coordinator.submit("early", 1)
    with pytest.raises(ProcessorError, match=f"detector: on_start failed: {type(fault).__name__}: no model") as caught:
        coordinator.start()
    assert caught.value.__cause__ is fault
    assert [type(e) for e in ends] == [Drained]
    with pytest.raises(Closed):
        coordinator.submit("cam", 1)
    assert coordinator.detached is None
    assert coordinator.lost is None
    assert detector.methods == ["on_start"]  # what did not start is not stopped
    detector.fault = None
    with Coordinator(detector) as handle:  # it may be owned again
        assert handle.submit_and_wait("cam", 1) == ("cam", 1)


def test_f12_on_start_that_hangs_is_left_behind_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.GRACE == 2.0
    monkeypatch.setattr(module, "GRACE", 0.1)
    detector = Starts()
    coordinator = Coordinator(detector, BatchConfig(startup_timeout=0.05, response_timeout=PATIENCE))
    early = Caller(coordinator, "early", 1)
    coordinator.asked(1)
    began = time.monotonic()
    with pytest.raises(ProcessorError, match=r"on_start took longer than startup_timeout=0\.05 s; its thread "
                                             r"reflex-detector-1 was left behind"):  # fmt: skip
        coordinator.start()
    assert 0.15 <= time.monotonic() - began < PATIENCE / 2
    assert coordinator.detached == "reflex-detector-1"
    assert isinstance(early.end(), Drained)
    with pytest.raises(Closed):
        coordinator.submit("cam", 1)
    with pytest.raises(ConfigError, match="belongs to another"):  # it is still inside
        Coordinator(detector)
    detector.may_start.set()
    assert coordinator.join(PATIENCE)
    assert coordinator.detached is None
    assert detector.methods == ["on_start", "on_stop"]
    assert len(detector.threads) == 1
    with Coordinator(detector):
        pass


def test_f12_on_start_that_ends_within_the_grace_is_an_error_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GRACE", PATIENCE)
    detector = Starts()

    class Lets(Coordinator):
        def signal(self) -> None:
            super().signal()
            detector.may_start.set()  # the limit has passed

    coordinator = Lets(detector, BatchConfig(startup_timeout=0.05))
    early = coordinator.submit("early", 1)
    with pytest.raises(ProcessorError, match=r"on_start took longer than startup_timeout=0\.05 s$"):
        coordinator.start()
    assert coordinator.detached is None
    assert isinstance(end_of(early), Drained)
    assert detector.methods == ["on_start", "on_stop"]


def test_f12_on_start_that_comes_back_late_and_raises_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.02)
    detector = Starts(SystemExit())
    log = Log()
    coordinator = Coordinator(detector, BatchConfig(startup_timeout=0.02), sinks=[log])
    with pytest.raises(ProcessorError, match="took longer"):
        coordinator.start()
    detector.may_start.set()
    assert coordinator.join(PATIENCE)
    assert detector.methods == ["on_start"]
    assert log.of(DeviceLost) == []


def test_f12_an_interrupted_start_stops_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ready(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            raise KeyboardInterrupt

    detector = Detector()
    coordinator = Coordinator(detector)
    monkeypatch.setattr("reflex_runtime.run.device.Future", Ready)
    monkeypatch.setattr(module, "GRACE", PATIENCE)
    with pytest.raises(KeyboardInterrupt):
        coordinator.start()
    monkeypatch.undo()
    assert coordinator.detached is None
    with Coordinator(detector):
        pass


def test_f11_stop_while_on_start_runs() -> None:
    """Whoever waits is released at once, not when the model is loaded."""
    detector = Starts()
    coordinator = Coordinator(detector, BatchConfig(response_timeout=PATIENCE))
    starter = threading.Thread(target=coordinator.start)
    starter.start()
    assert detector.starting.wait(PATIENCE)
    early = Caller(coordinator, "early", 1)
    coordinator.asked(1)
    coordinator.signal()
    assert isinstance(early.end(), Drained)
    assert not coordinator.join(0.02)
    assert coordinator.detached == "reflex-detector-1"
    detector.may_start.set()
    starter.join(PATIENCE)
    assert coordinator.stop()
    assert detector.methods == ["on_start", "on_stop"]


# -- process that fails ------------------------------------------------------------------------------------------------


def bad_one(entries: Sequence[BatchEntry]) -> list[Any]:
    if any(e.frame == 2 for e in entries):
        raise ValueError("bad frame")
    return echo(entries)


def test_f8_process_that_raises_is_repeated_to_find_the_guilty_frame() -> None:
    detector = Detector(is_open=False, answer=bad_one)
    coordinator = Coordinator(detector)
    with coordinator as handle:
        ends = [end_of(f) for f in together(coordinator, detector, 4)]
        assert [ends[0], ends[1], ends[3]] == [("cam0", 0), ("cam1", 1), ("cam3", 3)]
        assert type(ends[2]) is ProcessorError
        assert "ValueError: bad frame" in str(ends[2])
        assert handle.metrics().consecutive_errors == 0
        assert handle.submit_and_wait("cam2", 7) == ("cam2", 7)
        figures = handle.metrics()
    assert (figures.failed, figures.processed, figures.batches_dispatched) == (1, 5, 6)
    assert detector.frames == [["busy"], [0, 1, 2, 3], [0, 1], [2], [3], [7]]
    assert len(detector.threads) == 1


def test_f8_process_that_is_not_repeatable_is_called_once() -> None:
    class Once(Detector):
        repeatable = False

    detector = Once(is_open=False, answer=bad_one)
    coordinator = Coordinator(detector)
    with coordinator as handle:
        ends = [end_of(f) for f in together(coordinator, detector, 4)]
        assert [type(e) for e in ends] == [ProcessorError] * 4
        assert handle.metrics().consecutive_errors == 1
        assert handle.submit_and_wait("cam0", 7) == ("cam0", 7)
        assert handle.metrics().consecutive_errors == 0
    assert detector.frames == [["busy"], [0, 1, 2, 3], [7]]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda entries: echo(entries)[:-1], "returned 3 results for 4"),
        (lambda entries: [*echo(entries), "more"], "returned 5 results for 4"),
        (lambda entries: [], "returned 0 results for 4"),
        (lambda entries: None, "Detector.process returned None; it must return a list"),
        (lambda entries: {"a": 1, "b": 2, "c": 3, "d": 4}, "Detector.process returned a dict; it must return a list"),
        (lambda entries: "four", "Detector.process returned a str; it must return a list"),
    ],
)
def test_f8_a_wrong_number_of_results_fails_the_batch(returned: Callable[[Any], Any], words: str) -> None:
    detector = Detector(is_open=False, answer=lambda entries: (returned if len(entries) == 4 else echo)(entries))
    coordinator = Coordinator(detector)
    with coordinator as handle:
        ends = [end_of(f) for f in together(coordinator, detector, 4)]
        assert [type(e) for e in ends] == [ResultCountMismatch] * 4
        assert all(words in str(e) for e in ends)
        assert handle.submit_and_wait("cam0", 7) == ("cam0", 7)
    assert detector.frames == [["busy"], [0, 1, 2, 3], [7]]  # nobody can tell whose is missing: not repeated


def test_f8_an_error_that_a_processor_raises_as_ours_is_not_its_own_cause() -> None:
    def fails(entries: Sequence[BatchEntry]) -> list[Any]:
        raise ProcessorError("no light")

    with Coordinator(Detector(answer=fails)) as handle, pytest.raises(ProcessorError, match="no light") as caught:
        handle.submit_and_wait("cam", 1)
    assert caught.value.__cause__ is None


def test_f8_a_result_that_is_no_sequence_is_an_error() -> None:
    with Coordinator(Detector(answer=lambda entries: 7)) as handle:
        with pytest.raises(ResultCountMismatch, match="returned an int; it must return a list"):
            handle.submit_and_wait("cam", 1)


def test_f8_none_and_exceptions_fail_their_own_frame_alone() -> None:
    def some(entries: Sequence[BatchEntry]) -> list[Any]:
        made: dict[Any, Any] = {1: None, 2: KeyError("box"), 3: QueueFull("of another coordinator")}
        return [made.get(e.frame, e.frame) for e in entries]

    detector = Detector(is_open=False, answer=some)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=5))
    with coordinator as handle:
        ends = [end_of(f) for f in together(coordinator, detector, 5)]
        assert (ends[0], ends[4]) == (0, 4)
        assert [type(e) for e in ends[1:4]] == [ProcessorError] * 3
        assert "found None" in str(ends[1])
        assert "KeyError: 'box'" in str(ends[2])
        assert isinstance(ends[2].__cause__, KeyError)
        assert "QueueFull: of another coordinator" in str(ends[3])
        figures = handle.metrics()
        assert (figures.failed, figures.processed, figures.consecutive_errors) == (3, 3, 0)
    assert len(detector.calls) == 2


@pytest.mark.parametrize("error", [QueueFull("full"), Drained("gone"), WaitTimeout("late"), NanFound("nan")])
def test_f8_what_a_processor_raises_is_a_processor_error(error: Exception) -> None:
    """A refusal of another coordinator is no refusal of this one: the frame ran, and a retry is not safe."""
    with Coordinator(Detector(answer=raises(error))) as handle:
        with pytest.raises(ProcessorError) as caught:
            handle.submit_and_wait("cam", 1)
        assert not caught.value.retry_safe
        assert str(error) in str(caught.value)
        assert isinstance(caught.value, type(error)) == isinstance(error, ProcessorError)
        figures = handle.metrics()
    assert (figures.failed, figures.dropped, figures.timed_out) == (1, 0, 0)


def test_f8_results_may_be_any_sequence() -> None:
    with Coordinator(Detector(answer=lambda entries: tuple(range(len(entries))))) as handle:
        assert handle.submit_and_wait("cam", 1) == 0


def test_f8_falsy_results_are_results() -> None:
    values = [0, "", [], False, {}]
    detector = Detector(is_open=False, answer=lambda entries: [values[0 if e.frame == "busy" else e.frame]
                                                               for e in entries])  # fmt: skip
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=5))
    with coordinator:
        assert [f.result(PATIENCE) for f in together(coordinator, detector, 5)] == values


# -- process that hangs ------------------------------------------------------------------------------------------------


def test_f12_a_hung_batch_is_answered_and_its_late_results_reach_nobody() -> None:
    back = threading.Event()

    def hang(entries: Sequence[BatchEntry]) -> list[Any]:
        if entries[0].frame == "old":
            assert back.wait(2 * PATIENCE)
        return echo(entries)

    clock, log, detector = Stepped(), Log(), Guarded(answer=hang)
    config = BatchConfig(max_batch_size=2, watchdog=800.0, response_timeout=3600.0)
    coordinator = Coordinator(detector, config, sinks=[log], clock=clock)
    hung = [Caller(coordinator, f"cam{n}", "old") for n in range(2)]
    coordinator.asked(2)
    with coordinator as handle:
        detector.busy()
        clock.step(750.0, coordinator)
        assert handle.metrics().pending == 2
        clock.step(50.0, coordinator)
        for caller in hung:
            error = caller.end()
            assert type(error) is ProcessorHung
            assert "detector: the processor did not come back within 800 s" in str(error)
        later = [handle.submit(f"cam{n}", "new") for n in range(2)]  # their places are free again
        clock.step(800.0, coordinator)
        with pytest.raises(TimeoutError):
            later[0].result(0.05)  # nobody else calls the processor, and it does not hang a second time
        assert len(detector.calls) == 1
        assert coordinator.lost is None
        back.set()
        assert [end_of(f) for f in later] == [("cam0", "new"), ("cam1", "new")]
        figures = handle.metrics()
    assert (figures.failed, figures.processed, figures.pending) == (2, 2, 0)
    assert detector.most == 1
    assert len(detector.threads) == 1
    assert detector.methods[-1] == "on_stop"
    assert log.of(DeviceLost) == []
    assert len({e.ticket for e in log.of(RequestSettled)}) == len(log.of(RequestSettled)) == 4


def test_f12_a_second_hang_is_noticed_too() -> None:
    gates = [threading.Event(), threading.Event()]

    def hang(entries: Sequence[BatchEntry]) -> list[Any]:
        assert gates[entries[0].frame].wait(2 * PATIENCE)
        return echo(entries)

    clock, detector = Stepped(), Detector(answer=hang)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=1, watchdog=800.0), clock=clock)
    with coordinator as handle:
        for n in (0, 1):
            future = handle.submit("cam", n)
            detector.busy()
            clock.step(800.0, coordinator)
            assert type(end_of(future)) is ProcessorHung
            gates[n].set()
        assert end_of(handle.submit("cam", 0)) == ("cam", 0)
        assert handle.metrics().failed == 2


def test_f12_the_watchdog_counts_from_the_call_and_not_from_the_arrival() -> None:
    gates = {"busy": threading.Event(), 1: threading.Event()}

    def hang(entries: Sequence[BatchEntry]) -> list[Any]:
        assert gates[entries[0].frame].wait(2 * PATIENCE)
        return echo(entries)

    clock, detector = Stepped(), Detector(answer=hang)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=1, watchdog=800.0), clock=clock)
    with coordinator as handle:
        first = busy_with(coordinator, detector)
        second = handle.submit("cam", 1)
        clock.step(700.0, coordinator)
        gates["busy"].set()
        assert end_of(first) == ("busy", "busy")
        detector.busy()
        clock.step(700.0, coordinator)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        clock.step(100.0, coordinator)
        assert type(end_of(second)) is ProcessorHung
        gates[1].set()


def test_f12_the_watchdog_needs_nobody_to_ring_it() -> None:
    detector = Detector(is_open=False)
    with Coordinator(detector, BatchConfig(watchdog=0.2)) as handle:
        for _ in range(2):
            began = time.monotonic()
            hung = handle.submit("cam", 2)
            detector.busy()
            assert type(end_of(hung)) is ProcessorHung
            assert time.monotonic() - began >= 0.19
            detector.gate.set()
            while coordinator_is_busy(handle):
                time.sleep(0)
            detector.gate.clear()
        detector.gate.set()


def test_f12_without_a_watchdog_nothing_is_given_up() -> None:
    clock, detector = Stepped(), Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(watchdog=0), clock=clock)
    with coordinator:
        future = busy_with(coordinator, detector)
        clock.step(1e6, coordinator)
        with pytest.raises(TimeoutError):
            future.result(0.05)
        detector.gate.set()
        assert end_of(future) == ("busy", "busy")


def test_f12_a_hung_call_that_raises_in_the_end_hurts_nobody() -> None:
    clock, detector = Stepped(), Detector(is_open=False, answer=bad_one)
    coordinator = Coordinator(detector, BatchConfig(watchdog=800.0), clock=clock)
    with coordinator as handle:
        hung = handle.submit("cam", 2)
        detector.busy()
        clock.step(800.0, coordinator)
        assert type(end_of(hung)) is ProcessorHung
        detector.gate.set()
        assert end_of(handle.submit("cam", 3)) == ("cam", 3)
        assert handle.metrics().failed == 1


def test_f11_stop_while_the_processor_hangs() -> None:
    clock, detector = Stepped(), Guarded(is_open=False)
    config = BatchConfig(max_batch_size=1, watchdog=800.0, response_timeout=3600.0)
    coordinator = Coordinator(detector, config, clock=clock)
    handle = coordinator.start()
    hung = Caller(handle, "cam0", 0)
    detector.busy()
    clock.step(800.0, coordinator)
    assert type(hung.end()) is ProcessorHung
    waiting = [Caller(handle, f"cam{n}", n) for n in range(4)]
    coordinator.asked(5)
    began = time.monotonic()
    coordinator.signal()
    assert [type(c.end()) for c in waiting] == [Drained] * 4
    assert not coordinator.join(0.05)
    assert time.monotonic() - began < PATIENCE / 2
    assert coordinator.detached == "reflex-detector-1"
    with pytest.raises(Closed, match="is stopping"):
        handle.submit("cam", 1)
    with pytest.raises(ConfigError, match="belongs to another"):
        Coordinator(detector)
    detector.gate.set()
    assert coordinator.stop()
    assert coordinator.detached is None
    assert detector.methods == ["on_start", "process", "on_stop"]
    assert len(detector.threads) == 1
    assert detector.most == 1


def test_f11_stop_gives_up_a_batch_that_does_not_end_in_time() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector)
    coordinator.start()
    future = busy_with(coordinator, detector)
    began = time.monotonic()
    assert not coordinator.stop(0.1)
    assert 0.1 <= time.monotonic() - began < PATIENCE / 2
    assert type(end_of(future)) is CutShort
    assert coordinator.detached == "reflex-detector-1"
    detector.gate.set()
    assert coordinator.join()
    assert detector.methods == ["on_start", "process", "on_stop"]
    assert coordinator.metrics().failed == 1


# -- a thread that dies ------------------------------------------------------------------------------------------------


class Heard(list[HealthEvent]):
    def of(self, kind: type[HealthEvent]) -> list[HealthEvent]:
        return [event for event in self if isinstance(event, kind)]


def test_f10_a_dead_thread_answers_everybody_and_is_told_once_per_feed() -> None:
    def dies(entries: Sequence[BatchEntry]) -> list[Any]:
        raise SystemExit("out of memory")

    detector = Detector(is_open=False, answer=dies)
    log, heard = Log(), Heard()
    config = BatchConfig(max_batch_size=2, queue_capacity=15, response_timeout=PATIENCE)
    coordinator = Coordinator(detector, config, sinks=[log, Health("detector", heard.append)])
    handle = coordinator.start()
    assert handle.lost is None
    running = busy_with(coordinator, detector, "cam0")
    waiting = [Caller(handle, f"cam{n}", n) for n in range(1, 9)]
    coordinator.asked(9)
    futures = [handle.submit(f"cam{n}", n) for n in range(9, 16)]
    with pytest.raises(QueueFull):
        handle.submit("cam16", 16)  # known all the same
    detector.gate.set()
    error = end_of(running)
    assert type(error) is ProcessorError
    assert "SystemExit: out of memory" in str(error)
    assert {type(e) for e in [c.end() for c in waiting] + [end_of(f) for f in futures]} == {Drained}
    assert handle.lost is not None
    assert "SystemExit: out of memory" in str(handle.lost)
    for feed in ("cam0", "cam1", "new", "new", "cam0"):
        with pytest.raises(Closed, match=r"detector: the coordinator died: .*SystemExit: out of memory"):
            handle.submit(feed, 1)
        with pytest.raises(Closed, match="died"):
            handle.submit_and_wait(feed, 1)
    assert coordinator.stop()
    assert coordinator.detached is None
    assert len(log.of(DeviceLost)) == 1
    told = heard.of(StageError)
    assert sorted(e.source for e in told) == sorted([*(f"cam{n}" for n in range(17)), "new"])
    assert detector.methods == ["on_start", "process"]
    assert handle.metrics().pending == 0


def test_f10_an_ordinary_stop_is_no_stage_error() -> None:
    heard = Heard()
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, sinks=[Health("detector", heard.append)])
    coordinator.start()
    running = busy_with(coordinator, detector)
    waiting = coordinator.submit("cam", 1)
    coordinator.signal()
    with pytest.raises(Closed):
        coordinator.submit("cam", 2)
    detector.gate.set()
    assert coordinator.join()
    assert end_of(running) == ("busy", "busy")
    assert isinstance(end_of(waiting), Drained)
    assert heard == []


def test_f10_a_thread_that_dies_after_the_stop_was_to_end_anyway() -> None:
    heard = Heard()
    detector = Detector(is_open=False, answer=raises(SystemExit()))
    coordinator = Coordinator(detector, sinks=[Health("detector", heard.append)])
    coordinator.start()
    future = busy_with(coordinator, detector)
    assert not coordinator.stop(0.02)
    assert type(end_of(future)) is CutShort
    detector.gate.set()
    assert coordinator.stop()
    assert heard.of(StageError) == []


def test_f12_a_thread_that_dies_after_it_hung_is_lost() -> None:
    detector = Detector(is_open=False, answer=raises(SystemExit()))
    clock, log = Stepped(), Log()
    coordinator = Coordinator(detector, BatchConfig(watchdog=800.0), sinks=[log], clock=clock)
    coordinator.start()
    hung = busy_with(coordinator, detector)
    clock.step(800.0, coordinator)
    assert type(end_of(hung)) is ProcessorHung
    waiting = coordinator.submit("cam", 1)
    detector.gate.set()
    assert isinstance(end_of(waiting), Drained)
    assert coordinator.stop()
    assert coordinator.lost is not None
    assert len(log.of(DeviceLost)) == 1


def test_f11_stop_waits_for_a_thread_that_is_dying() -> None:
    class Dying(Coordinator):
        def died(self) -> None:
            super().died()
            dead.set()
            assert buried.wait(PATIENCE)

    dead, buried = threading.Event(), threading.Event()
    coordinator = Dying(Detector(answer=raises(SystemExit())))
    coordinator.start()
    coordinator.submit("cam", 1)
    assert dead.wait(PATIENCE)
    assert not coordinator.stop(0.02)
    assert coordinator.detached == "reflex-detector-1"
    timer = threading.Timer(0.1, buried.set)
    timer.start()
    assert coordinator.stop(PATIENCE)
    assert coordinator.detached is None
    timer.join()


@pytest.mark.parametrize("fault", [SystemExit(), ValueError("a bad callback")])
def test_f12_a_callback_that_raises_harms_nobody(fault: BaseException) -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(response_timeout=PATIENCE))

    def end(_: Future[Any]) -> None:
        raise fault

    with coordinator as handle:
        first = busy_with(coordinator, detector)
        futures = [handle.submit(f"cam{n}", n) for n in range(6)]
        futures[0].add_done_callback(end)
        detector.gate.set()
        assert [end_of(f) for f in (first, *futures)] == [("busy", "busy"), *((f"cam{n}", n) for n in range(6))]
        assert handle.submit_and_wait("cam0", 7) == ("cam0", 7)
        assert handle.metrics().pending == 0
        assert handle.lost is None


def test_f12_a_caller_who_settles_his_future_himself_harms_nobody() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector)
    with coordinator as handle:
        busy_with(coordinator, detector)
        mine, other = handle.submit("cam0", 0), handle.submit("cam1", 1)
        mine.set_result("enough")
        detector.gate.set()
        assert end_of(other) == ("cam1", 1)
        assert handle.submit_and_wait("cam0", 7) == ("cam0", 7)
        assert handle.lost is None


def test_f11_a_callback_that_blocks_does_not_hold_up_the_stop() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector)
    handle = coordinator.start()
    busy = busy_with(coordinator, detector)
    inside, may_go = threading.Event(), threading.Event()

    def block(_: Future[Any]) -> None:
        inside.set()
        may_go.wait(PATIENCE)

    busy.add_done_callback(block)
    detector.gate.set()
    assert inside.wait(PATIENCE)
    stopped = threading.Event()
    stopper = threading.Thread(target=lambda: (coordinator.stop(0.05), stopped.set()), daemon=True)
    stopper.start()
    assert stopped.wait(PATIENCE / 2), "the stop waited for a callback"
    assert coordinator.detached is not None
    with pytest.raises(Closed):
        handle.submit("cam", 1)
    may_go.set()
    assert coordinator.join(PATIENCE)


def test_f8_every_missing_output_has_an_error_of_its_own() -> None:
    detector = Detector(answer=lambda entries: [None for _ in entries])
    coordinator = Coordinator(detector)
    with coordinator as handle:
        errors = [end_of(handle.submit("cam", n)) for n in range(3)]
    assert [type(e) for e in errors] == [ProcessorError] * 3
    assert len({id(e) for e in errors}) == 3  # a shared one would gather the tracebacks, and frames, of all


# -- on_stop -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ValueError("cannot free"), SystemExit("cannot free")])
def test_f11_on_stop_that_raises_is_reported(fault: BaseException) -> None:
    detector = Stops(fault)
    detector.may_stop.set()
    coordinator = Coordinator(detector)
    handle = coordinator.start()
    assert handle.submit_and_wait("cam", 1) == ("cam", 1)
    assert coordinator.stop()
    assert coordinator.stop_error is fault
    assert coordinator.detached is None
    assert coordinator.lost is None
    assert detector.methods == ["on_start", "process", "on_stop"]


def test_f11_on_stop_that_hangs_is_left_behind() -> None:
    detector = Stops()
    coordinator = Coordinator(detector)
    handle = coordinator.start()
    began = time.monotonic()
    assert not coordinator.stop(0.1)
    assert 0.1 <= time.monotonic() - began < PATIENCE / 2
    assert coordinator.detached == "reflex-detector-1"
    assert coordinator.stop_error is None
    with pytest.raises(Closed):
        handle.submit("cam", 1)
    detector.may_stop.set()
    assert coordinator.stop()
    assert coordinator.detached is None
    assert detector.methods == ["on_start", "on_stop"]


def test_f11_a_slow_batch_and_a_slow_on_stop_share_the_time_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = Stops()
    coordinator = Coordinator(detector)
    coordinator.start()
    clock = Stepped()
    for user in (module, device_module):
        monkeypatch.setattr(user, "time", SimpleNamespace(monotonic=clock))

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.now += 60.0  # the last batch takes all the time there is
            return super().wait(timeout)

    coordinator.device._ended = Ended()
    began = time.monotonic()
    assert not coordinator.stop(60.0)
    assert time.monotonic() - began < PATIENCE
    assert coordinator.detached == "reflex-detector-1"
    monkeypatch.undo()
    detector.may_stop.set()
    assert coordinator.stop()


# -- feeds that give up ------------------------------------------------------------------------------------------------


def test_f9_a_feed_that_vanishes_while_it_waits_costs_nothing() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_latency=0, response_timeout=0.05, max_batch_size=1))
    with coordinator as handle:
        running = busy_with(coordinator, detector)
        gone = [Caller(handle, f"gone{n}", "gone") for n in range(3)]
        assert [type(c.end()) for c in gone] == [WaitTimeout] * 3
        there = handle.submit("there", 1)
        detector.gate.set()
        assert end_of(running) == ("busy", "busy")
        assert end_of(there) == ("there", 1)
        figures = handle.metrics()
    assert detector.frames == [["busy"], [1]]
    assert (figures.dropped, figures.timed_out, figures.pending) == (3, 3, 0)


def test_f9_timeouts_pile_up_no_further_than_the_cap_and_late_answers_reach_no_later_frame() -> None:
    detector = Detector(is_open=False)
    heard = Heard()
    config = BatchConfig(max_batch_size=2, max_latency=0, response_timeout=0.02, max_in_flight_per_feed=2)
    health = Health("detector", heard.append, every=60.0)
    coordinator = Coordinator(detector, config, sinks=[health])
    with coordinator as handle:
        busy_with(coordinator, detector)
        numbers = iter(range(1000))
        for _ in range(5):
            feeds = [Caller(handle, f"cam{n}", next(numbers)) for n in range(3)]
            ends = [type(c.end()) for c in feeds]
            assert set(ends) <= {WaitTimeout, InFlightCapReached}
        figures = handle.metrics()
        assert figures.pending == 1 + 3 * 2
        assert (figures.timed_out, figures.in_flight_exceeded) == (6, 9)
        detector.gate.set()
        for _ in range(20):  # each is answered with its own content or not at all
            for n in range(3):
                frame = next(numbers)
                end = Caller(handle, f"cam{n}", frame).end()
                assert end == (f"cam{n}", frame) or type(end) in (WaitTimeout, InFlightCapReached)
    computed = {frame for call in detector.frames for frame in call if frame != "busy"}
    assert not computed & set(range(15))  # those given up while they waited
    health.flush(time.monotonic())
    assert sum(e.count for e in heard.of(BatchTimeout)) == coordinator.metrics().timed_out  # type: ignore[attr-defined]


def test_f4_a_full_queue_at_64_feeds() -> None:
    detector = Detector(is_open=False)
    coordinator = Coordinator(detector, BatchConfig(max_batch_size=4, response_timeout=PATIENCE))
    with coordinator as handle:
        running = busy_with(coordinator, detector)
        callers = [Caller(handle, f"cam{n}", n) for n in range(64)]
        coordinator.asked(65)
        figures = handle.metrics()
        assert (figures.pending, figures.rejected) == (17, 48)
        detector.gate.set()
        ends = [c.end() for c in callers]
        assert end_of(running) == ("busy", "busy")
        figures = handle.metrics()
    assert sum(type(e) is QueueFull for e in ends) == 48
    assert sum(e == (f"cam{n}", n) for n, e in enumerate(ends)) == 16
    assert (figures.processed, figures.rejected, figures.pending) == (17, 48, 0)
    assert [len(call) for call in detector.calls] == [1, 4, 4, 4, 4]


# -- stop, whatever happens --------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[Sequence[BatchEntry]], Any]] = {
    "none": echo,
    "raises": raises(ValueError("bad")),
    "too few": lambda entries: echo(entries)[1:],
    "none returned": lambda entries: None,
    "none inside": lambda entries: [None for _ in entries],
    "dies": raises(SystemExit()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_f11_stop_during_a_fault_answers_everybody_once(fault: str) -> None:
    detector = Detector(is_open=False, answer=FAULTS[fault])
    log = Log()
    config = BatchConfig(max_batch_size=4, queue_capacity=32, max_in_flight_per_feed=2, response_timeout=PATIENCE)
    coordinator = Coordinator(detector, config, sinks=[log])
    handle = coordinator.start()
    ended: list[Future[Any]] = []
    callers: list[Any] = []
    futures = [busy_with(coordinator, detector)]
    futures += [handle.submit(f"cam{n}", n) for n in range(12)]
    for future in futures:
        future.add_done_callback(ended.append)
    callers = [Caller(handle, f"cam{n}", n) for n in range(12)]
    coordinator.asked(25)
    stopper = threading.Thread(target=coordinator.stop)
    stopper.start()
    detector.gate.set()
    stopper.join(PATIENCE)
    assert not stopper.is_alive()
    for caller in callers:
        assert isinstance(caller.end(), (tuple, Drained, ProcessorError))
    for future in futures:
        assert isinstance(end_of(future), (tuple, Drained, ProcessorError))
    assert len(ended) == len(set(ended)) == 13
    settled = [e.ticket for e in log.of(RequestSettled)]
    assert len(settled) == len(set(settled)) == 25
    figures = handle.metrics()
    assert (figures.submitted, figures.pending) == (25, 0)
    assert figures.processed + figures.failed + figures.dropped == 25
    assert coordinator.detached is None


def test_f11_a_stop_from_the_processor_itself_does_not_wait_for_itself() -> None:
    def stops(entries: Sequence[BatchEntry]) -> list[Any]:
        assert not coordinator.stop()
        return echo(entries)

    coordinator = Coordinator(detector := Detector(answer=stops))
    handle = coordinator.start()
    began = time.monotonic()
    assert handle.submit_and_wait("cam", 1) == ("cam", 1)
    assert time.monotonic() - began < PATIENCE / 2
    assert coordinator.stop()
    assert coordinator.detached is None
    assert detector.methods == ["on_start", "process", "on_stop"]


def test_f10_batch_errors_count_batches() -> None:
    heard = Heard()
    health = Health("detector", heard.append, every=60.0)
    coordinator = Coordinator(Detector(answer=bad_one), sinks=[health])
    with coordinator as handle:
        for frame in (1, 2, 2, 2, 1):
            end_of(handle.submit("cam", frame))
    health.flush(time.monotonic())
    assert [(e.source, e.count) for e in heard.of(BatchError)] == [("detector", 1), ("detector", 2)]  # type: ignore[attr-defined]
