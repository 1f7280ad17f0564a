"""Feeds and coordinators together, on real threads: started, watched, changed while they run, and stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from feeds.chaos import ChaosSource
from feeds.fakes import END, PATIENCE, Camera, Collector, Detector, Endless, Log, Tracker, quiet
from reflex_runtime.core.errors import Closed, ConfigError, ProcessorError
from reflex_runtime.feeds.outputs.annotated import AnnotatedVideo
from reflex_runtime.feeds.outputs.json_lines import JsonLines
from reflex_runtime.feeds.plan import batching_of, plan_of
from reflex_runtime.feeds.runtime.health import (
    BatchSubmissionRejected,
    FeedConnected,
    FeedEnded,
    FeedFailed,
    FeedStageError,
    HealthEvent,
    StageError,
    ThreadDetached,
)
from reflex_runtime.feeds.runtime.pipeline import Pipeline, SourceError
from reflex_runtime.feeds.runtime.runtime import LIMIT, Events, Runtime
from reflex_runtime.run.coordinator import BatchConfig

QUICK = BatchConfig(max_batch_size=4, max_latency=0.002)


def threads() -> set[str]:
    """Names of this package's threads, but for timekeepers, which are told to go and not waited for."""
    names = {t.name for t in set(threading.enumerate()) - _earlier}
    return {name for name in names if name.startswith("reflex-") and not name.endswith(("-timekeeper", "-ownerless"))}


_earlier: set[threading.Thread] = set()  # threads of tests before, some of which are about to end


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    _earlier.update(threading.enumerate())
    yield
    _earlier.clear()


def balanced(runtime: Runtime) -> bool:
    return all(
        s.frames == s.processed + sum(s.drops.values()) + s.waiting for s in runtime.snapshot().feeds.values()
    )  # fmt: skip


class Told(Log):
    """Everything that a runtime tells from now on, as it comes."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        events = runtime.events()
        self._thread = threading.Thread(target=lambda: [self(event) for event in events], daemon=True)
        self._thread.start()

    def all(self) -> Told:
        """Returns once everything is here, after a stop."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self


# -- running -----------------------------------------------------------------------------------------------------------


def test_f14_files_go_through_one_detector_whole_each_in_order() -> None:
    runtime, detector, sinks = Runtime(), Detector(), [Collector() for _ in range(4)]
    point = runtime.coordinator(detector, QUICK)
    for i, sink in enumerate(sinks):
        camera = Camera(*range(1000 * i, 1000 * i + 60), END, live=False)
        runtime.feed(f"cam{i}", camera, Pipeline(batch=point), [sink])
    assert threads() == set()  # nothing runs before the start
    with runtime:
        assert runtime.wait(PATIENCE)
        snapshot = runtime.snapshot()
    for i, sink in enumerate(sinks):
        assert sink.sequences == list(range(60))
        assert sink.values == list(range(1000 * i, 1000 * i + 60))  # by content: each feed got its own
        assert snapshot.feeds[f"cam{i}"].state == "ended"
    assert snapshot.coordinators["detector"].processed == 240
    assert detector.log == ["start", "stop"]
    assert threads() == set()
    json.dumps(snapshot.as_dict(), allow_nan=False)


def test_f14_frames_of_one_file_share_batches_and_its_results_stay_in_order() -> None:
    runtime, detector, sink = Runtime(), Detector(is_open=False), Collector()
    config = BatchConfig(max_batch_size=4, max_latency=0.001, max_in_flight_per_feed=4)
    point = runtime.coordinator(detector, config)

    class Film(Camera):
        def read(self) -> Any:
            self.taken += 1
            if self.taken == 6:
                filled.set()
            return super().read()

        taken = 0

    filled = threading.Event()

    def opens(*frame: Any, sequence: int, **more: Any) -> Any:
        if sequence == 0:  # the four behind it are in the queue: none is waited for
            assert filled.wait(PATIENCE)
        if sequence == 3:  # three frames are at the batch point, one of them in the first batch
            detector.gate.set()
        return submit(*frame, sequence=sequence, **more)

    submit, point.submit = point.submit, opens  # type: ignore[method-assign]
    runtime.feed("file", Film(*range(40), END, live=False), Pipeline(point), [sink])
    with runtime:
        assert runtime.wait(PATIENCE)
        snapshot = runtime.snapshot()
    assert sink.values == sink.sequences == list(range(40))
    assert 2 <= max(map(len, detector.calls[:2])) <= 4, "the first may have taken what came behind it, too"
    assert snapshot.feeds["file"].in_flight == 0


@pytest.mark.parametrize("where", ["submission", "stage", "sink"])
def test_frames_of_a_file_in_flight_are_counted_when_its_thread_dies(where: str) -> None:
    runtime = Runtime()
    point = runtime.coordinator(Detector(), BatchConfig(max_batch_size=4, max_latency=0.001, max_in_flight_per_feed=4))
    submit = point.submit

    def dies(result: Any) -> Any:
        if result.frame.sequence == 5:
            raise SystemExit(1)
        return result

    def submits(*frame: Any, sequence: int, **more: Any) -> Any:
        if sequence == 5:
            raise SystemExit(1)
        return submit(*frame, sequence=sequence, **more)

    if where == "submission":
        point.submit = submits  # type: ignore[method-assign]
    stages, sinks = ([dies] * (where == "stage"), [dies] * (where == "sink"))
    runtime.feed("file", Camera(*range(40), END, live=False), Pipeline(point, stages), sinks)
    with runtime:
        assert runtime.wait(PATIENCE)
    snapshot = runtime.snapshot()
    feed = snapshot.feeds["file"]
    assert (feed.state, feed.waiting, feed.in_flight) == ("failed", 0, 0)
    assert feed.frames == feed.processed + sum(feed.drops.values())
    assert snapshot.coordinators["detector"].pending == 0


@pytest.mark.parametrize(("feeds", "ahead"), [(1, 4), (3, 3), (8, 1), (32, 1)])
def test_f4_files_together_ask_for_no_more_than_the_queue_holds(feeds: int, ahead: int) -> None:
    runtime, sinks = Runtime(), [Collector() for _ in range(feeds)]
    plan = plan_of([f"f{i}=shapes:realtime=0" for i in range(feeds)], None, {})
    point = runtime.coordinator(Detector(), batching_of(plan))
    for i, sink in enumerate(sinks):
        runtime.feed(f"f{i}", Camera(*range(60), END, live=False), Pipeline(batch=point), [sink])
    with runtime:
        assert runtime.wait(PATIENCE)
        metrics = runtime.snapshot().coordinators["detector"]
    assert [sink.sequences for sink in sinks] == [list(range(60))] * feeds
    assert (metrics.rejected, metrics.dropped, metrics.in_flight_exceeded) == (0, 0, 0)
    assert point.most_ahead == ahead
    later = batching_of(dataclasses.replace(plan, file=Path("feeds.toml")))  # which may name 256
    assert later.capacity >= 256 * later.max_in_flight_per_feed


def test_f4_file_feeds_lose_nothing_to_a_tiny_queue_and_to_each_other() -> None:
    runtime, detector, sinks = Runtime(), Detector(is_open=False), [Collector() for _ in range(8)]
    config = BatchConfig(max_batch_size=2, max_latency=0.001, queue_capacity=2)
    point = runtime.coordinator(detector, config)
    for i, sink in enumerate(sinks):
        runtime.feed(f"cam{i}", Camera(*range(40), END, live=False), Pipeline(batch=point), [sink])
    events = runtime.events()
    with runtime:
        assert any(isinstance(event, BatchSubmissionRejected) for event in events)
        detector.gate.set()
        assert runtime.wait(PATIENCE)
        snapshot = runtime.snapshot()
    assert [sink.sequences for sink in sinks] == [list(range(40))] * 8
    assert all(not any(feed.drops.values()) for feed in snapshot.feeds.values())
    assert snapshot.coordinators["detector"].rejected > 0  # it was contended


def test_feeds_come_and_go_while_it_runs() -> None:
    runtime, first, second = Runtime(), Camera(0), Camera(1)
    point = runtime.coordinator(Detector(), QUICK)
    sinks = [Collector() for _ in range(3)]
    runtime.feed("first", first, Pipeline(batch=point), [sinks[0]], max_age=None)
    with runtime:
        sinks[0].wait(1)
        runtime.feed("second", second, Pipeline(batch=point), [sinks[1]], max_age=None)
        sinks[1].wait(1)
        assert set(runtime.snapshot().feeds) == {"first", "second"}
        assert runtime.remove("first", PATIENCE)
        assert set(runtime.snapshot().feeds) == {"second"}
        assert (first.closes, sinks[0].closed) == (1, 1)
        second.give(2)
        sinks[1].wait(2)  # the other does not mind
        runtime.feed("first", Camera(7), Pipeline(batch=point), [sinks[2]], max_age=None)  # its name is free again
        sinks[2].wait(1)
    assert (sinks[0].values, sinks[1].values, sinks[2].values) == ([0], [1, 2], [7])
    assert threads() == set()


def test_it_is_over_when_every_feed_is() -> None:
    runtime, last = Runtime(), Camera(live=False)
    runtime.feed("first", Camera(END, live=False))
    runtime.feed("last", last)
    log = Told(runtime)
    with runtime:
        log.wait(FeedEnded)
        assert not runtime.over
        last.give(END)
        log.wait(FeedEnded, 2)
        assert runtime.over


def test_a_refused_coordinator_lets_go_of_its_processor() -> None:
    runtime, second = Runtime(), Detector()
    runtime.coordinator(Detector())
    with pytest.raises(ConfigError, match="used already"):
        runtime.coordinator(second)
    runtime.stop()
    closed = Detector("late")
    with pytest.raises(Closed):
        runtime.coordinator(closed)
    for processor in (second, closed):
        with Runtime() as other:
            other.coordinator(processor)


def test_a_feed_that_gets_no_threads_is_not_kept_and_its_sink_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Collector()

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Runtime() as runtime:
        runtime.feed("first", Camera(), sinks=[shared])
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", none_left)
            with pytest.raises(RuntimeError, match="new thread"):
                runtime.feed("second", Camera(), sinks=[shared])
        assert (set(runtime.snapshot().feeds), shared.closed) == ({"first"}, 0)
        runtime.feed("second", Camera(), sinks=[shared])
    assert shared.closed == 1


def test_a_coordinator_may_be_added_while_it_runs() -> None:
    with Runtime() as runtime:
        sink = Collector()
        point = runtime.coordinator(Detector("late"), QUICK)
        runtime.feed("cam", Camera(5), Pipeline(batch=point), [sink], max_age=None)
        sink.wait(1)

        class Broken(Detector):
            def on_start(self) -> None:
                raise OSError("no model")

        with pytest.raises(ProcessorError, match="no model"):
            runtime.coordinator(Broken("broken"), QUICK)
        assert set(runtime.snapshot().coordinators) == {"late"}
    assert sink.values == [5]
    assert threads() == set()


def test_removing_and_adding_many_times_leaks_no_thread() -> None:
    with Runtime() as runtime:
        point = runtime.coordinator(Detector(), QUICK)
        before = threads()
        for i in range(50):
            runtime.feed("cam", Camera(i), Pipeline(batch=point))
            assert runtime.remove("cam", PATIENCE)
        assert threads() == before


def test_reconnecting_many_times_leaks_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.feeds.runtime.feed.OPEN_S", 0.0)
    losses = [item for i in range(200) for item in (i, SourceError("gone"))]
    with Runtime() as runtime:
        log = Told(runtime)
        runtime.feed("cam", Camera(*losses, live=True))
        log.wait(FeedConnected, 200)
        assert threads() == {"reflex-feed-cam-capture", "reflex-feed-cam-pipeline"}
        assert runtime.snapshot().feeds["cam"].restarts >= 199
    assert threads() == set()


def test_wait_without_files_is_until_the_stop() -> None:
    for cameras in (0, 1):
        runtime = Runtime()
        for _ in range(cameras):
            runtime.feed("live", Camera())
        runtime.start()
        assert not runtime.wait(0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(runtime.wait, PATIENCE)
            runtime.stop()
            assert waiting.result(PATIENCE / 2)


def test_wait_is_for_file_feeds_and_no_longer_than_told() -> None:
    with Runtime() as runtime:
        runtime.feed("live", Camera())
        file = Camera(0, live=False)
        runtime.feed("file", file)
        assert not runtime.wait(0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(runtime.wait, PATIENCE)
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
            file.give(END)
            assert waiting.result(PATIENCE / 2)  # it is woken: it does not find out when its time is over


def test_wait_returns_at_a_stop() -> None:
    runtime = Runtime()
    runtime.feed("file", Camera(live=False))
    runtime.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runtime.wait, PATIENCE)
        runtime.stop()
        assert waiting.result(PATIENCE / 2)


def test_conservation_holds_through_a_chaotic_run() -> None:
    runtime, chance = Runtime(), random.Random(5)

    class Moody(Detector):
        def process(self, entries: Any) -> list[Any]:
            if chance.random() < 0.1:
                raise ValueError("moody")
            return [{"text": str(entry.sequence)} for entry in entries]

    point = runtime.coordinator(Moody(), BatchConfig(max_batch_size=2, max_latency=0.001, queue_capacity=3))
    sinks = {}
    for i in range(8):
        live = i % 2 == 0
        source = ChaosSource(i, length=300, fps=2000.0 if live else 0.0, live=live, bad_pts=0.1, resize=0.1, flood=0.01)
        sinks[f"cam{i}"] = Collector()
        runtime.feed(f"cam{i}", source, Pipeline(batch=point), [sinks[f"cam{i}"]])
    log = Told(runtime)
    with runtime:
        while len(log.of(FeedEnded)) < 8:
            assert balanced(runtime)
        snapshot = runtime.snapshot()
    for name, feed in snapshot.feeds.items():
        assert (feed.waiting, feed.frames, feed.state) == (0, 300, "ended")
        assert feed.processed == len(sinks[name].results)
        assert sinks[name].sequences == sorted(set(sinks[name].sequences))
        if feed.mode == "file":
            assert {reason for reason, n in feed.drops.items() if n} <= {"failed"}
    metrics = snapshot.coordinators["detector"]
    refused = metrics.rejected + metrics.in_flight_exceeded + metrics.closed
    assert metrics.submitted == refused + metrics.processed + metrics.failed + metrics.dropped + metrics.pending
    assert sum(feed.processed for feed in snapshot.feeds.values()) == metrics.processed
    rejections = sum(event.count for event in log.all().of(BatchSubmissionRejected))
    assert rejections == metrics.rejected  # what was told adds up to the truth


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_f2_a_processor_id_may_be_used_once() -> None:
    runtime = Runtime()
    runtime.coordinator(Detector("same"))
    with pytest.raises(ConfigError, match="'same' is used already"):
        runtime.coordinator(Detector("same"))
    runtime.stop()


def test_a_feeds_name_may_be_used_once() -> None:
    runtime = Runtime()
    runtime.feed("cam", Camera())
    with pytest.raises(ConfigError, match="'cam' is used already"):
        runtime.feed("cam", Camera())
    with pytest.raises(KeyError):
        runtime.remove("other")
    runtime.stop()


def test_a_pipeline_that_keeps_state_belongs_to_one_feed() -> None:
    runtime = Runtime()
    runtime.feed("cam1", Camera(), shared := Pipeline(after=[Tracker()]))
    with pytest.raises(ConfigError, match="pass a function that makes one"):
        runtime.feed("cam2", Camera(), shared)
    assert runtime.remove("cam1")
    runtime.feed("cam2", Camera(), shared)  # free again
    for name in ("cam3", "cam4"):
        runtime.feed(name, Camera(), lambda: Pipeline(after=[Tracker()]))
    plain = Pipeline()
    for name in ("cam5", "cam6"):
        runtime.feed(name, Camera(), plain)
    runtime.stop()


def test_a_video_belongs_to_one_feed_and_lines_to_any_number(tmp_path: Path) -> None:
    runtime, video, lines = Runtime(), AnnotatedVideo(tmp_path / "out.mp4"), JsonLines(tmp_path / "out.jsonl")
    runtime.feed("cam1", Camera(), sinks=[video, lines])
    with pytest.raises(ConfigError, match="AnnotatedVideo of 'cam2' belongs to another feed"):
        runtime.feed("cam2", Camera(), sinks=[lines, video])
    runtime.feed("cam2", Camera(), sinks=[lines])
    runtime.stop()


def test_f1_more_feeds_than_places_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    runtime, sinks = Runtime(), [Collector() for _ in range(5)]
    point = runtime.coordinator(Detector(), BatchConfig(max_batch_size=1, queue_capacity=4))
    for i, sink in enumerate(sinks):
        runtime.feed(f"cam{i}", Camera(0, live=False), Pipeline(batch=point), [sink])
    with caplog.at_level(logging.WARNING), runtime:
        for sink in sinks:
            sink.wait(1)
    assert sum("more feeds than queue_capacity=4" in record.message for record in caplog.records) == 1


def test_a_shared_sink_is_closed_by_its_last_feed() -> None:
    runtime, sink, one, two = Runtime(), Collector(), Camera(live=False), Camera(live=False)
    log = Told(runtime)
    runtime.feed("one", one, sinks=[sink])
    runtime.feed("two", two, sinks=[sink])
    with runtime:
        one.give(END)
        log.wait(FeedEnded)
        assert sink.closed == 0
        two.give(END)
        log.wait(FeedEnded, 2)
        assert sink.closed == 1


# -- starting ----------------------------------------------------------------------------------------------------------


class Failing(Detector):
    def on_start(self) -> None:
        raise OSError("no model")


def test_f12_if_one_coordinator_does_not_start_the_others_are_stopped() -> None:
    runtime, good, camera, sink = Runtime(), Detector("good"), Camera(0), Collector()
    runtime.coordinator(good)
    runtime.coordinator(Failing("bad"))
    runtime.feed("cam", camera, sinks=[sink])
    with pytest.raises(ProcessorError, match="no model"):
        runtime.start()
    assert good.log == ["start", "stop"]
    assert (camera.opens, sink.closed) == (0, 1)
    assert threads() == set()
    assert runtime.snapshot().state == "stopped"


def test_it_is_started_once_and_takes_nothing_after_its_stop() -> None:
    runtime = Runtime()
    runtime.start()
    with pytest.raises(ConfigError, match="running"):
        runtime.start()
    report = runtime.stop()
    assert report.clean
    assert runtime.stop() is report
    for late in (lambda: runtime.feed("cam", Camera()), lambda: runtime.coordinator(Detector())):
        with pytest.raises(Closed):
            late()
    with pytest.raises(ConfigError, match="stopped"):
        runtime.start()


def test_a_stop_while_it_starts() -> None:
    runtime, loading, go_on = Runtime(), threading.Event(), threading.Event()

    class Slow(Detector):
        def on_start(self) -> None:
            loading.set()
            assert go_on.wait(PATIENCE)

    camera, slow = Camera(), Slow("slow")
    runtime.coordinator(slow)
    runtime.feed("cam", camera)
    with ThreadPoolExecutor(2) as pool:
        starting = pool.submit(runtime.start)
        assert loading.wait(PATIENCE)
        stopping = pool.submit(runtime.stop, PATIENCE)
        while runtime.snapshot().state != "stopping":
            assert not stopping.done()
        go_on.set()
        assert isinstance(starting.exception(PATIENCE), Closed)
        assert stopping.result(PATIENCE).clean
    assert (slow.log, camera.opens) == (["stop"], 0)
    assert threads() == set()


def test_a_runtime_that_never_started_can_be_stopped() -> None:
    runtime, sink = Runtime(), Collector()
    runtime.coordinator(Detector())
    runtime.feed("cam", Camera(), sinks=[sink])
    assert runtime.stop().clean
    assert sink.closed == 1
    assert runtime.snapshot().feeds["cam"].state == "stopped"


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_f11_feeds_are_signalled_then_coordinators_then_both_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    modules = {"Feed": "reflex_runtime.feeds.runtime.feed", "BatchCoordinator": "reflex_runtime.run.coordinator"}
    for kind, part in (("Feed", "feed"), ("BatchCoordinator", "coordinator")):
        module = modules[kind]
        for verb in ("signal", "join"):
            real = getattr(getattr(__import__(module, fromlist=[kind]), kind), verb)

            def noted(self: Any, *args: Any, real: Any = real, step: str = f"{verb} {part}") -> Any:
                steps.append(step)
                return real(self, *args)

            monkeypatch.setattr(f"{module}.{kind}.{verb}", noted)
    runtime = Runtime()
    point = runtime.coordinator(Detector())
    for name in ("a", "b"):
        runtime.feed(name, Camera(), Pipeline(batch=point))
    runtime.start()
    runtime.stop()
    order = list(dict.fromkeys(steps))
    assert order == ["signal feed", "signal coordinator", "join feed", "join coordinator"]


def test_f11_stop_with_feeds_at_the_batch_point() -> None:
    """The batch that runs is answered, callers that wait are released, and nobody is stuck."""
    runtime, detector = Runtime(), Detector(is_open=False)
    point = runtime.coordinator(detector, BatchConfig(max_batch_size=1, queue_capacity=8))
    sinks = [Collector() for _ in range(3)]
    for i, sink in enumerate(sinks):
        runtime.feed(f"cam{i}", Camera(i), Pipeline(batch=point), [sink], max_age=None)
    log = Told(runtime)
    runtime.start()
    detector.busy()
    while runtime.snapshot().coordinators["detector"].pending < 3:
        assert not log.of(FeedFailed)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(runtime.stop, PATIENCE)
        while runtime.snapshot().state != "stopping":
            assert not stopping.done()
        detector.gate.set()
        assert stopping.result(PATIENCE).clean
    assert sum(len(sink.results) for sink in sinks) >= 1
    snapshot = runtime.snapshot()
    assert [feed.state for feed in snapshot.feeds.values()] == ["stopped"] * 3
    assert balanced(runtime)
    assert sum(feed.waiting for feed in snapshot.feeds.values()) == 0
    log.all()
    assert log.of(StageError) == log.of(FeedFailed) == []
    assert detector.log == ["start", "stop"]


def test_f11_a_processor_that_hangs_does_not_hang_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.feeds.runtime.runtime.LAST_CALL_S", PATIENCE)
    runtime, detector = Runtime(), Detector(is_open=False)
    point = runtime.coordinator(detector, QUICK)
    feed = runtime.feed("cam", Camera(0), Pipeline(batch=point), max_age=None)
    log = Told(runtime)
    runtime.start()
    detector.busy()
    began = time.monotonic()
    report = runtime.stop(0.3)
    assert time.monotonic() - began < PATIENCE / 2
    assert feed.detached == ()  # the coordinator's end released it
    assert len(report.detached) == 1
    assert "detector" in report.detached[0]
    assert not report.clean
    assert [event.source for event in log.wait(ThreadDetached)] == ["detector"]
    detector.gate.set()


def test_f11_a_source_that_hangs_is_reported_and_left_behind() -> None:
    runtime, deaf, other = Runtime(), Camera(deaf=True), Camera()
    feeds = [runtime.feed("deaf", deaf), runtime.feed("other", other)]
    log = Told(runtime)
    runtime.start()
    deaf.idle()
    for feed in feeds:
        quiet(feed, but="deaf-capture")
    report = runtime.stop(0.2)
    assert report.detached == ("reflex-feed-deaf-capture",)
    assert [(e.source, e.error) for e in log.wait(ThreadDetached)] == [("deaf", "reflex-feed-deaf-capture")]
    deaf.let_go()


def test_removing_a_feed_whose_source_hangs_is_reported() -> None:
    with Runtime() as runtime:
        deaf, log = Camera(deaf=True), Told(runtime)
        feed = runtime.feed("deaf", deaf)
        deaf.idle()
        quiet(feed, but="capture")
        assert not runtime.remove("deaf", 0.02)
        assert len(log.wait(ThreadDetached)) == 1
        assert runtime.snapshot().feeds == {}
        deaf.let_go()


def test_f11_stop_during_a_pause_before_a_reconnect_and_before_a_retry() -> None:
    runtime, detector = Runtime(), Detector(is_open=False)
    point = runtime.coordinator(detector, BatchConfig(max_batch_size=1, queue_capacity=1))
    gone = runtime.feed("gone", Camera(refuse=[SourceError("refused")] * 99))
    for i in range(3):
        runtime.feed(f"file{i}", Camera(*range(9), live=False), Pipeline(batch=point))
    runtime.start()
    detector.busy()
    while runtime.snapshot().coordinators["detector"].rejected < 5 or gone.state != "reconnecting":
        assert balanced(runtime)
    detector.gate.set()
    assert runtime.stop(PATIENCE).clean
    assert {feed.state for feed in runtime.snapshot().feeds.values()} == {"stopped"}
    assert threads() == set()


def test_f11_what_on_stop_raises_is_reported() -> None:
    class Sour(Detector):
        def on_stop(self) -> None:
            raise OSError("device busy")

    runtime = Runtime()
    runtime.coordinator(Sour("sour"))
    runtime.start()
    report = runtime.stop()
    assert (report.errors, report.clean, report.detached) == ((("sour", "device busy"),), False, ())


def test_f11_64_idle_feeds_stop_at_once() -> None:
    runtime = Runtime()
    point = runtime.coordinator(Detector(), BatchConfig(max_batch_size=64))
    cameras = [Camera() for _ in range(64)]
    for i, camera in enumerate(cameras):
        runtime.feed(f"cam{i}", camera, Pipeline(batch=point))
    runtime.start()
    for camera in cameras:
        camera.idle()
    assert len([name for name in threads() if name.startswith("reflex-feed-")]) == 128
    assert runtime.stop(PATIENCE).clean  # a camera with nothing to give never returns by itself
    assert threads() == set()


def test_two_stops_at_a_time_are_one() -> None:
    runtime = Runtime()
    runtime.feed("cam", Endless())
    runtime.start()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(runtime.stop), pool.submit(runtime.stop)
        assert first.result(PATIENCE) is second.result(PATIENCE)


def test_f11_a_feed_left_behind_lets_go_of_a_sink_that_it_shares() -> None:
    runtime, shared = Runtime(), Collector()
    entered, go_on = threading.Semaphore(0), threading.Event()

    def hang(frame: Any) -> Any:
        entered.release()
        assert go_on.wait(PATIENCE)
        return frame

    good = runtime.feed("good", Camera(0), Pipeline(), [shared], max_age=None)
    stuck = runtime.feed("stuck", Camera(0), Pipeline(after=[hang]), [shared], max_age=None)
    runtime.start()
    shared.wait(1)
    assert entered.acquire(timeout=PATIENCE)
    for feed in (good, stuck):
        quiet(feed, but="stuck-pipeline")
    report = runtime.stop(0.05)
    assert report.detached == ("reflex-feed-stuck-pipeline",)
    assert shared.closed == 1, "what the other feed gave is written out"
    go_on.set()
    assert stuck.join(PATIENCE)
    assert (shared.closed, [r.feed for r in shared.results]) == (1, ["good"])


# -- a lost coordinator ------------------------------------------------------------------------------------------------


def test_f10_a_coordinator_that_dies_is_one_stage_error_for_each_feed() -> None:
    runtime, detector = Runtime(), Detector()
    detector.faults[13] = SystemExit(1)
    point = runtime.coordinator(detector, QUICK)
    cameras = [Camera(0) for _ in range(6)]
    sinks = [Collector() for _ in cameras]
    for i, (camera, sink) in enumerate(zip(cameras, sinks, strict=True)):
        runtime.feed(f"cam{i}", camera, Pipeline(batch=point), [sink], max_age=None)
    unknown = Camera()
    runtime.feed("late", unknown, Pipeline(batch=point), max_age=None)  # sends its first frame when all is lost
    log = Told(runtime)
    with runtime:
        for sink in sinks:
            sink.wait(1)
        cameras[0].give(13)
        log.wait(FeedFailed)
        for camera in (*cameras[1:], unknown):
            camera.give(1)
        log.wait(FeedFailed, 7)
        log.wait(StageError, 7)
        assert balanced(runtime)
        states = {feed.state for feed in runtime.snapshot().feeds.values()}
    assert states == {"failed"}
    log.all()
    names = sorted([*(f"cam{i}" for i in range(6)), "late"])
    assert sorted(event.source for event in log.of(StageError)) == names
    assert sorted(event.source for event in log.of(FeedFailed)) == names
    assert log.of(FeedStageError) == []


def test_f10_an_ordinary_stop_is_no_stage_error() -> None:
    runtime, sinks = Runtime(), [Collector() for _ in range(4)]
    point = runtime.coordinator(Detector(), QUICK)
    for i, sink in enumerate(sinks):
        runtime.feed(f"cam{i}", Endless(), Pipeline(batch=point), [sink])
    log = Told(runtime)
    with runtime:
        for sink in sinks:
            sink.wait(5)
    log.all()
    assert log.of(StageError) == log.of(FeedFailed) == log.of(ThreadDetached) == []
    assert balanced(runtime)


# -- events ------------------------------------------------------------------------------------------------------------


def test_events_keep_the_newest_and_count_what_was_missed() -> None:
    events = Events()
    for i in range(LIMIT + 10):
        events.add(HealthEvent(float(i), "cam"))
    assert events.missed == 10
    events.close()
    assert [event.at for event in events] == [float(i) for i in range(10, LIMIT + 10)]


def test_a_reader_waits_for_events_and_ends_with_the_runtime() -> None:
    runtime, camera = Runtime(), Camera(live=False)
    runtime.feed("cam", camera)
    first, second = runtime.events(), runtime.events()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, first)
        with runtime:
            camera.give(END)
            assert runtime.wait(PATIENCE)
        assert [type(event) for event in reading.result(PATIENCE)] == [FeedConnected, FeedEnded]
    assert len(list(second)) == 2  # each reader has its own
    assert list(runtime.events()) == []  # after the end there is nothing to wait for


def test_a_reader_may_leave() -> None:
    with Runtime() as runtime:
        events = runtime.events()
        events.close()
        assert runtime._readers == ()  # nothing is kept for it
        runtime.feed("cam", Camera(END, live=False))
        assert runtime.wait(PATIENCE)
        assert list(events) == []
    assert Events().next(0.001) is None
