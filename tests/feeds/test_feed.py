"""One feed: what it reads, drops, retries and tells. Sources and batch points are played by hand, time is a number."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from feeds.chaos import ChaosSource
from feeds.fakes import (
    END,
    PATIENCE,
    Camera,
    Clock,
    Collector,
    Endless,
    Log,
    Pauses,
    Point,
    balanced,
    ended,
    frame,
    number_in,
    quiet,
)
from reflex_runtime.core.errors import (
    Closed,
    ConfigError,
    Drained,
    Expired,
    InFlightCapReached,
    ProcessorError,
    QueueFull,
    TooLate,
    WaitTimeout,
)
from reflex_runtime.feeds.runtime.feed import Feed, FeedConfig
from reflex_runtime.feeds.runtime.health import (
    DROPS,
    FeedConnected,
    FeedDisconnected,
    FeedEnded,
    FeedFailed,
    FeedStageError,
    StageError,
    StageFigures,
)
from reflex_runtime.feeds.runtime.pipeline import Pipeline, Result, Source, SourceError
from thinned import thinned


class Made:
    """A feed with everything it talks to. Time stands still, or a frame may be too old on a busy machine."""

    def __init__(
        self,
        source: Source,
        answer: Callable[[int], Any] = lambda sequence: sequence,
        pipeline: Pipeline | None = None,
        hold: bool = False,
        clock: Clock | None = None,
        pause: Any = None,
        seed: int = 1,
        **config: Any,
    ) -> None:
        self.point, self.sink, self.log, self.pauses = Point(answer), Collector(), Log(), Pauses(hold)
        self.feed = Feed(
            "cam", source, pipeline or Pipeline(batch=self.point), [self.sink], FeedConfig(**config), emit=self.log,
            clock=clock or Clock(), pause=pause or self.pauses, seed=seed,
        )  # fmt: skip

    def run(self) -> Made:
        """To its own end."""
        self.feed.start()
        ended(self.feed)
        assert balanced(self.feed)
        return self

    @property
    def drops(self) -> dict[str, int]:
        return {reason: n for reason, n in self.feed.snapshot().drops.items() if n}


class Gate:
    """An answer that waits until the test opens it. entered: released with every question."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Semaphore(0)

    def __call__(self, sequence: int) -> int:
        self.entered.release()
        assert self.open.wait(PATIENCE)
        return sequence

    def busy(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE)


# -- to the end --------------------------------------------------------------------------------------------------------


def test_f14_a_file_goes_through_whole_and_in_order() -> None:
    made = Made(Camera(*range(50), END, live=False)).run()
    assert made.sink.sequences == made.sink.values == list(range(50))
    assert [r.feed for r in made.sink.results] == ["cam"] * 50
    assert [type(event) for event in made.log.events] == [FeedConnected, FeedEnded]
    snapshot = made.feed.snapshot()
    assert (snapshot.state, snapshot.mode, snapshot.frames, snapshot.processed) == ("ended", "file", 50, 50)
    assert (snapshot.position, snapshot.resolution, snapshot.latency.count) == (4.9, (8, 6), 50)
    assert set(snapshot.drops) == set(DROPS)
    assert made.sink.closed == 1


def test_it_closes_its_source_and_its_sinks_before_it_says_that_it_ended() -> None:
    camera, told = Camera(END, live=False), []
    made = Made(camera)
    made.feed._on_end = lambda: told.append((made.feed.over, made.sink.closed))
    made.run()
    assert told == [(True, 1)]
    assert (camera.opens, camera.closes) == (1, 1)


def test_a_frame_without_a_batch_point_has_no_value() -> None:
    made = Made(Camera(0, END, live=False), pipeline=Pipeline()).run()
    assert made.sink.values == [None]


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_age", 0.0), ("max_age", float("nan")), ("queue", 0), ("restarts", -1), ("retries", -1),
     ("retries", None), ("queue", 2.5)],
)  # fmt: skip
def test_a_wrong_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"FeedConfig\.{field}="):
        FeedConfig(**{field: value})


def test_without_a_limit_no_frame_is_too_old() -> None:
    clock = Clock()
    made = Made(Camera(0, END), clock=clock, max_age=None).run()
    assert (made.drops, made.point.asked) == ({}, [("cam", 0, None)])


@pytest.mark.parametrize("name", ["", "x" * 257, 7])
def test_a_wrong_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"Feed\.name="):
        Feed(name, Camera())

# -- work ahead of the batch point -------------------------------------------------------------------------------------


class _Preparing(Point):
    """A batch point whose processor prepares frames. threads: where it did."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.fault: Exception | None = None

    def prepare(self, image: Any) -> str:
        self.threads.append(threading.current_thread().name.rpartition("-")[2])
        if self.fault is not None:
            raise self.fault
        return f"prepared {number_in(image)}"


@pytest.mark.parametrize(("live", "where"), [(False, "capture"), (True, "pipeline")])
def test_the_processors_preparation_runs_on_the_feeds_own_threads(live: bool, where: str) -> None:
    point = _Preparing()
    Made(Camera(5, END, live=live), pipeline=Pipeline(batch=point)).run()
    assert (point.views, point.threads) == (["prepared 5"], [where])


def test_a_preparation_that_raises_costs_its_frame_only() -> None:
    point = _Preparing()
    point.fault = ValueError("no picture")
    made = Made(Camera(1, 2, END, live=False), pipeline=Pipeline(batch=point)).run()
    assert (made.drops, point.views) == ({"failed": 2}, [])
    assert made.feed.snapshot().state == "ended"


# -- live: newest wins -------------------------------------------------------------------------------------------------


def test_f14_live_the_newest_frame_wins() -> None:
    gate, camera = Gate(), Camera(0)
    made = Made(camera, gate)
    made.feed.start()
    gate.busy()  # with frame 0
    camera.give(1, 2, 3, 4)
    camera.idle()
    gate.open.set()
    made.sink.wait(2)
    camera.give(END)
    ended(made.feed)
    assert made.sink.sequences == [0, 4]
    assert made.drops == {"overrun": 3}
    assert balanced(made.feed)


def test_f14_a_camera_is_never_blocked_by_a_model() -> None:
    gate, source = Gate(), Endless()
    made = Made(source, gate)
    made.feed.start()
    gate.busy()
    seen = source.given
    while source.given < seen + 1000:  # it is read on while the model stands still
        assert made.feed.state == "running"
    assert made.feed.snapshot().in_flight == 1
    assert balanced(made.feed)
    gate.open.set()
    assert made.feed.stop(PATIENCE)


def test_live_a_frame_that_waited_too_long_is_not_asked_about() -> None:
    clock, gate, camera = Clock(), Gate(), Camera(0)
    made = Made(camera, gate, clock=clock, max_age=0.5)
    made.feed.start()
    gate.busy()
    camera.give(1)
    camera.idle()
    clock.now += 0.5
    gate.open.set()
    made.sink.wait(1)
    camera.give(END)
    ended(made.feed)
    assert made.drops == {"stale": 1}
    assert [sequence for _, sequence, _ in made.point.asked] == [0]


def test_live_a_frame_that_waited_too_long_is_no_work_for_the_stages() -> None:
    clock, seen = Clock(), []

    def slow(result: Result) -> Result:
        seen.append(result.frame.sequence)
        clock.now += 0.6
        return result

    made = Made(Camera(), clock=clock, pipeline=Pipeline(after=[slow]), max_age=0.5, queue=2)
    for sequence in (0, 1):  # both are in the queue, of one age, before a stage runs
        made.feed.ledger.read(waiting := frame(sequence, clock.now))
        made.feed.queue.put(waiting)
    made.feed.queue.close()
    assert made.feed._consume() is None
    assert (seen, made.sink.sequences, made.drops) == ([0], [0], {"stale": 1})


@pytest.mark.parametrize(
    ("error", "reason"),
    [(QueueFull(), "queue_full"), (InFlightCapReached(), "in_flight"), (WaitTimeout(), "timeout"),
     (Expired(), "stale"), (TooLate(), "stale"), (ProcessorError("bad frame"), "failed")],
)  # fmt: skip
def test_f4_live_what_is_refused_is_dropped_by_reason_and_the_feed_goes_on(error: Exception, reason: str) -> None:
    def answer(sequence: int) -> int:
        if sequence < 3:
            raise error
        return sequence

    made = Made(Camera(0, 1, 2, 3, END), answer, queue=8).run()
    assert made.drops == {reason: 3}
    assert made.sink.sequences == [3]
    assert made.pauses.seconds == []
    assert made.feed.snapshot().error == str(error)


# -- file: nothing is lost ---------------------------------------------------------------------------------------------


def test_f4_file_what_is_refused_is_asked_again_with_growing_pauses() -> None:
    refusals: list[Exception] = [QueueFull(), InFlightCapReached(), WaitTimeout(), *[QueueFull()] * 5]

    def answer(sequence: int) -> int:
        if sequence == 1 and refusals:
            raise refusals.pop(0)
        return sequence

    made = Made(Camera(0, 1, 2, END, live=False), answer).run()
    assert made.sink.sequences == [0, 1, 2]
    assert made.drops == {}
    assert made.pauses.seconds == pytest.approx([0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.1])
    assert {limit for _, _, limit in made.point.asked} == {None}  # a file's frame does not grow old


def test_file_a_frame_that_is_never_answered_fails_after_its_retries() -> None:
    def answer(sequence: int) -> int:
        if sequence == 0:
            raise WaitTimeout("no answer")
        return sequence

    made = Made(Camera(0, 1, END, live=False), answer, retries=2).run()
    assert made.drops == {"failed": 1}
    assert made.sink.sequences == [1]
    assert [s for _, s, _ in made.point.asked] == [0, 0, 0, 1]
    assert [(e.error, e.count) for e in made.log.of(FeedStageError)] == [("no answer", 1)]


def test_file_a_frame_that_the_processor_fails_on_is_not_asked_again() -> None:
    def answer(sequence: int) -> int:
        if sequence == 0:
            raise ProcessorError("bad frame")
        return sequence

    made = Made(Camera(0, 1, END, live=False), answer).run()
    assert (made.drops, made.sink.sequences) == ({"failed": 1}, [1])


# -- reconnect ---------------------------------------------------------------------------------------------------------


def test_f14_a_lost_camera_is_opened_again_and_numbers_go_on() -> None:
    camera = Camera(0, 1, SourceError("gone"), 2, SourceError("gone again"), 3, END)
    made = Made(camera, queue=8).run()
    assert made.sink.sequences == [0, 1, 2, 3]
    assert (camera.opens, camera.closes) == (3, 3)
    kinds = [FeedConnected, FeedDisconnected] * 2 + [FeedConnected, FeedEnded]
    assert [type(event) for event in made.log.events] == kinds
    snapshot = made.feed.snapshot()
    assert (snapshot.restarts, snapshot.error, snapshot.state) == (2, "gone again", "ended")
    assert [e.retry_in for e in made.log.of(FeedDisconnected)] == made.pauses.seconds


def test_f14_the_pause_doubles_to_half_a_minute_and_starts_anew_after_a_frame() -> None:
    refuse = [SourceError("refused") for _ in range(8)]
    camera = Camera(0, SourceError("gone"), END, refuse=refuse)
    made = Made(camera).run()
    expected = [1, 2, 4, 8, 16, 30, 30, 30, 1]
    assert len(made.pauses.seconds) == len(expected)
    for pause, nominal in zip(made.pauses.seconds, expected, strict=True):
        assert 0.8 * nominal <= pause <= 1.2 * nominal
    assert len({round(p / n, 9) for p, n in zip(made.pauses.seconds, expected, strict=True)}) > 5  # jitter


def test_the_jitter_is_of_the_seed() -> None:
    def pauses(seed: int) -> list[float]:
        made = Made(Camera(END, refuse=[SourceError("away")] * 5), seed=seed)
        return made.run().pauses.seconds

    assert pauses(1) == pauses(1) != pauses(2)


def test_f14_beyond_its_restarts_a_feed_has_failed() -> None:
    camera = Camera(0, *[SourceError("gone")] * 3)
    made = Made(camera, restarts=2).run()
    assert camera.opens == 3
    assert made.feed.state == "failed"
    assert made.sink.sequences == [0]
    assert [e.error for e in made.log.of(FeedFailed)] == ["gone"]
    assert [e.retry_in is None for e in made.log.of(FeedDisconnected)] == [False, False, True]


@pytest.mark.parametrize("live", [True, False])
def test_what_cannot_come_back_is_not_tried_again(live: bool) -> None:
    camera = Camera(live=live, refuse=[SourceError("no such file", retryable=False)])
    made = Made(camera).run()
    assert (made.feed.state, camera.opens, camera.closes) == ("failed", 1, 1)
    assert [type(event) for event in made.log.events] == [FeedFailed]


def test_a_file_that_breaks_off_fails_after_its_frames() -> None:
    made = Made(Camera(0, 1, SourceError("truncated"), live=False)).run()
    assert (made.feed.state, made.sink.sequences) == ("failed", [0, 1])
    assert made.feed.snapshot().error == "truncated"


def test_any_exception_of_a_source_is_a_lost_source() -> None:
    made = Made(Camera(0, OSError("bus reset"), 1, END), queue=8).run()
    assert made.sink.sequences == [0, 1]
    assert made.log.of(FeedDisconnected)[0].error == "OSError: bus reset"


# -- failures within ---------------------------------------------------------------------------------------------------


def test_f10_a_stage_that_raises_costs_its_frame_and_is_told_at_most_once_a_second() -> None:
    clock = Clock()

    def stage(result: Result) -> Result:
        sequence = result.frame.sequence
        if sequence == 8:
            clock.now += 1.0
        if sequence < 9:
            raise ValueError(f"frame {sequence}")
        return result

    made = Made(Camera(*range(10), END, live=False), pipeline=Pipeline(Point(), [stage]), clock=clock).run()
    assert (made.drops, made.sink.sequences) == ({"failed": 9}, [9])
    place = f" (test_feed.py, line {stage.__code__.co_firstlineno + 5})"
    told = made.log.of(FeedStageError)
    assert [(e.count, e.error, e.source) for e in told] == [
        (1, f"stage stage: ValueError: frame 0{place}", "cam"),
        (8, f"stage stage: ValueError: frame 8{place}", "cam"),
    ]
    assert made.feed.snapshot().stages == {"stage": StageFigures(10, 9, 1.0)}


def test_f10_what_is_held_back_is_told_on_recovery_and_at_the_end() -> None:
    def stage(result: Result) -> Result:
        if result.frame.sequence not in (3, 7):
            raise ValueError("no")
        return result

    made = Made(Camera(*range(9), END, live=False), pipeline=Pipeline(after=[stage]), clock=Clock()).run()
    assert [e.count for e in made.log.of(FeedStageError)] == [1, 2, 4]  # at once, on recovery; at the end, not before
    assert made.drops == {"failed": 7}


def test_a_sink_that_raises_is_counted_and_the_others_get_the_result() -> None:
    made = Made(Camera(*range(5), END, live=False))

    def broken(result: Any) -> None:
        raise OSError("no space")

    broken_at = f"OSError: no space (test_feed.py, line {broken.__code__.co_firstlineno + 1})"
    made.feed.sinks = (broken, made.sink)
    made.run()
    assert made.sink.sequences == [0, 1, 2, 3, 4]
    snapshot = made.feed.snapshot()
    assert (snapshot.processed, snapshot.sink_errors, snapshot.error) == (5, 5, broken_at)
    assert sum(e.count for e in made.log.of(FeedStageError)) == 5


def test_a_sink_that_cannot_be_closed_does_not_keep_the_feed_from_ending() -> None:
    made = Made(Camera(END, live=False))

    class Broken:
        def __call__(self, result: Any) -> None: ...

        def close(self) -> None:
            raise OSError("no space")

    made.feed.sinks = (Broken(), made.sink)
    made.run()
    assert (made.feed.state, made.sink.closed) == ("ended", 1)
    assert [e.error for e in made.log.of(FeedStageError)] == ["a sink could not be closed: OSError: no space"]


def test_a_failed_stage_is_no_lost_coordinator() -> None:
    assert not issubclass(FeedStageError, StageError)


def test_what_the_source_could_not_decode_is_in_the_snapshot() -> None:
    camera = Camera(0, END, live=False)
    made = Made(camera).run()
    assert made.feed.snapshot().corrupt == 0  # it does not say
    camera.corrupt = 3  # type: ignore[attr-defined]
    assert made.feed.snapshot().corrupt == 3


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_capture_thread_that_dies_says_so(error: BaseException) -> None:
    made = Made(Camera(0, error, live=False)).run()
    assert (made.feed.state, made.sink.sequences) == ("failed", [0])
    assert [type(error).__name__ in e.error for e in made.log.of(FeedFailed)] == [True]


class PanicException(BaseException):
    """As a library in Rust raises it."""


def test_a_source_that_panics_is_one_that_failed() -> None:
    made = Made(Camera(0, PanicException("unwrap"), live=False)).run()
    assert (made.feed.state, made.sink.sequences) == ("failed", [0])
    assert [e.error for e in made.log.of(FeedFailed)] == ["Panic: PanicException: unwrap"]


@pytest.mark.parametrize("where", ["stage", "sink"])
def test_a_stage_or_a_sink_that_panics_costs_one_frame(where: str) -> None:
    def panics(result: Any) -> Any:
        if result.frame.sequence == 1:
            raise PanicException("unwrap")
        return result

    pipeline = Pipeline(after=[panics]) if where == "stage" else Pipeline()
    made = Made(Camera(0, 1, 2, END, live=False), pipeline=pipeline)
    if where == "sink":
        made.feed.sinks = (panics, made.sink)  # type: ignore[assignment]
    made.run()
    assert made.feed.state == "ended"
    assert made.sink.sequences == ([0, 2] if where == "stage" else [0, 1, 2])
    assert ["PanicException: unwrap" in e.error for e in made.log.of(FeedStageError)] == [True]


def test_a_pipeline_thread_that_dies_says_so_and_the_frame_is_counted() -> None:
    def answer(sequence: int) -> int:
        raise SystemExit(1)

    made = Made(Camera(0), answer).run()
    assert (made.feed.state, made.drops) == ("failed", {"failed": 1})
    assert len(made.log.of(FeedFailed)) == 1
    assert made.sink.closed == 1


def test_f10_a_lost_coordinator_ends_the_feed_and_is_not_told_twice() -> None:
    made = Made(camera := Camera(0))
    made.feed.start()
    made.sink.wait(1)
    made.point.lost = ProcessorError("the thread died")
    made.point.answer = lambda sequence: (_ for _ in ()).throw(Closed("died"))
    camera.give(1)
    ended(made.feed)
    assert made.feed.state == "failed"
    assert [e.error for e in made.log.of(FeedFailed)] == ["ProcessorError: the thread died"]
    assert made.log.of(FeedStageError) == []  # the coordinator's health tells that, once for each feed
    assert balanced(made.feed)


@pytest.mark.parametrize("error", [Closed("stopped"), Drained("stopped")])
@pytest.mark.parametrize("live", [True, False])
def test_a_coordinator_that_was_stopped_ends_the_feed(error: Exception, live: bool) -> None:
    def answer(sequence: int) -> int:
        raise error

    made = Made(Camera(0, live=live), answer).run()
    assert (made.feed.state, made.drops) == ("failed", {"closed": 1})


# -- stop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [True, False])
def test_f11_stop_ends_a_feed_that_waits_for_its_camera(live: bool) -> None:
    camera = Camera(live=live)
    made = Made(camera)
    made.feed.start()
    camera.idle()
    assert made.feed.stop(PATIENCE)
    assert (made.feed.state, made.feed.detached, camera.closes) == ("stopped", (), 1)
    assert made.log.of(FeedFailed) == made.log.of(FeedEnded) == made.log.of(FeedDisconnected) == []


def test_f11_stop_ends_a_feed_that_waits_to_reconnect() -> None:
    made = Made(Camera(refuse=[SourceError("refused")] * 2), hold=True)
    made.feed.start()
    assert made.pauses.entered.acquire(timeout=PATIENCE)
    assert made.feed.state == "reconnecting"
    assert made.feed.stop(PATIENCE)
    assert made.feed.state == "stopped"


def test_f11_stop_ends_a_file_feed_that_waits_to_ask_again() -> None:
    def answer(sequence: int) -> int:
        raise QueueFull

    made = Made(Camera(*range(9), live=False), answer, hold=True)
    made.feed.start()
    assert made.pauses.entered.acquire(timeout=PATIENCE)
    assert made.feed.stop(PATIENCE)
    snapshot = made.feed.snapshot()
    assert snapshot.state == "stopped"
    assert snapshot.drops["stopped"] == snapshot.frames > 0
    assert balanced(made.feed)


def test_f11_a_frame_at_the_batch_point_still_gets_its_answer() -> None:
    gate = Gate()
    made = Made(Camera(*range(9), live=False), gate)
    made.feed.start()
    gate.busy()
    made.feed.signal()
    gate.open.set()
    ended(made.feed)
    assert made.sink.sequences == [0]
    assert balanced(made.feed)
    assert made.feed.snapshot().waiting == 0


def test_f11_a_source_that_does_not_hear_is_left_behind_and_named() -> None:
    camera = Camera(deaf=True)
    made = Made(camera)
    made.feed.start()
    camera.idle()
    quiet(made.feed, but="capture")
    assert not made.feed.stop(0.02)
    assert made.feed.detached == ("reflex-feed-cam-capture",)
    assert made.feed.over  # its results have ended, and its sinks are closed
    camera.let_go()
    ended(made.feed)


def test_what_an_abandoned_feed_still_gets_reaches_no_sink() -> None:
    gate = Gate()
    made = Made(Camera(0), gate)
    made.feed.start()
    gate.busy()
    quiet(made.feed, but="pipeline")
    assert not made.feed.stop(0.02)
    assert made.feed.detached == ("reflex-feed-cam-pipeline",)
    assert made.sink.closed == 1  # what it wrote until now is not lost
    gate.open.set()
    ended(made.feed)
    assert made.sink.results == []
    assert made.sink.closed == 1
    assert made.drops == {"stopped": 1}


class Stuck(Collector):
    """A sink that takes a result only once the test opens its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def __call__(self, result: Any) -> None:
        self.gate(0)
        super().__call__(result)


def test_a_sink_that_is_stuck_is_not_closed_under_its_thread_and_those_after_it_get_nothing() -> None:
    made, stuck, later = Made(Camera(0)), Stuck(), Collector()
    made.feed.sinks = (made.sink, stuck, later)
    made.feed.start()
    stuck.gate.busy()
    assert not made.feed.stop(0.02)
    assert (made.sink.closed, stuck.closed, later.closed) == (1, 0, 1)
    stuck.gate.open.set()
    ended(made.feed)
    assert (made.sink.closed, stuck.closed, later.closed) == (1, 1, 1)
    assert later.results == []


def test_a_feed_that_was_never_started_can_be_stopped_and_stays_so() -> None:
    made = Made(Camera(0))
    assert made.feed.stop()
    made.feed.start()
    assert (made.feed.state, made.sink.closed, made.feed.detached) == ("stopped", 1, ())
    assert made.feed.stop()
    assert made.sink.closed == 1


def test_starting_twice_starts_once() -> None:
    camera = Camera(0, END, live=False)
    made = Made(camera)
    made.feed.start()
    made.feed.start()
    ended(made.feed)
    assert camera.opens == 1


def test_a_feed_that_gets_no_threads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(Camera(0))

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.raises(RuntimeError, match="new thread"):
        made.feed.start()
    assert (made.feed.state, made.sink.closed) == ("failed", 1)
    assert len(made.log.of(FeedFailed)) == 1


# -- conservation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", thinned(range(4), [0]))
@pytest.mark.parametrize("live", [True, False])
def test_every_frame_of_a_chaotic_camera_is_in_one_place_at_every_moment(seed: int, live: bool) -> None:
    chance = random.Random(seed)
    outcomes = (QueueFull, InFlightCapReached, WaitTimeout, Expired, ProcessorError)

    def answer(sequence: int) -> int:
        if made.sink.results and chance.random() < 0.3:  # of a camera perhaps only the last frame comes so far
            raise chance.choice(outcomes)("chaos")
        return sequence

    def stage(item: Any) -> Any:
        if not made.sink.results:
            return item
        if chance.random() < 0.05:
            raise ValueError("chaos")
        return None if chance.random() < 0.05 else item

    source = ChaosSource(
        seed, length=1500, fps=0, live=live, bad_pts=0.1, resize=0.05, lose=0.01, refuse=0.2, freeze=0.01,
        freeze_s=(0.0, 0.001),
    )  # fmt: skip
    point = Point(answer)
    made = Made(source, pipeline=Pipeline(point, [stage, stage]), restarts=10**9, retries=10**9)
    watching = threading.Event()
    unbalanced = []

    def watch() -> None:
        while not watching.is_set():
            if not balanced(made.feed):
                unbalanced.append(made.feed.snapshot())

    watcher = threading.Thread(target=watch)
    watcher.start()
    made.run()
    watching.set()
    watcher.join(PATIENCE)
    snapshot = made.feed.snapshot()
    assert not unbalanced
    assert snapshot.waiting == 0
    assert snapshot.state == "ended"
    assert snapshot.processed >= len(made.sink.results) > 0
    assert made.sink.sequences == sorted(set(made.sink.sequences))
    if not live:
        assert set(made.drops) <= {"failed", "stale"}  # `Expired` is not a file's, but the test's
