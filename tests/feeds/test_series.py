"""F13: every figure of a snapshot stands on the page, nothing else does, and something here moves every series."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from observe.test_batch_metrics import FAULT, Play
from reflex_runtime.core.batch import Done
from reflex_runtime.feeds.pages import FeedSeries
from reflex_runtime.feeds.runtime.health import FeedSnapshot, OutputSnapshot, RuntimeSnapshot, StageFigures
from reflex_runtime.observe.batch_metrics import BOUNDS, BatchMetrics, Durations, Times
from reflex_runtime.observe.metrics import SIZES
from reflex_runtime.run.coordinator import BatchConfig, BatchCoordinator
from run.helpers import PATIENCE

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]

SERIES = {
    "reflex_feed_up": "gauge",
    "reflex_feed_frames_total": "counter",
    "reflex_feed_frames_processed_total": "counter",
    "reflex_feed_drops_total": "counter",
    "reflex_feed_waiting": "gauge",
    "reflex_feed_in_flight": "gauge",
    "reflex_feed_fps": "gauge",
    "reflex_feed_age_seconds": "gauge",
    "reflex_feed_latency_seconds": "histogram",
    "reflex_feed_restarts_total": "counter",
    "reflex_feed_sink_errors_total": "counter",
    "reflex_feed_corrupt_total": "counter",
    "reflex_feed_stage_runs_total": "counter",
    "reflex_feed_stage_errors_total": "counter",
    "reflex_feed_stage_seconds_total": "counter",
    "reflex_feed_zone_count": "gauge",
    "reflex_feed_line_in_total": "counter",
    "reflex_feed_line_out_total": "counter",
    "reflex_feed_submissions_total": "counter",
    "reflex_feed_timeouts_total": "counter",
    "reflex_feed_pending": "gauge",
    "reflex_feed_answer_seconds": "histogram",
    "reflex_feed_output_up": "gauge",
    "reflex_feed_output_results_total": "counter",
    "reflex_feed_output_sent_total": "counter",
    "reflex_feed_output_drops_total": "counter",
    "reflex_feed_output_waiting": "gauge",
    "reflex_feed_output_retries_total": "counter",
    "reflex_feed_batch_submissions_total": "counter",
    "reflex_feed_batch_items_total": "counter",
    "reflex_feed_batch_timeouts_total": "counter",
    "reflex_feed_batch_pending": "gauge",
    "reflex_feed_batches_total": "counter",
    "reflex_feed_batch_size": "histogram",
    "reflex_feed_batch_fill_ratio": "gauge",
    "reflex_feed_batch_formation_seconds": "histogram",
    "reflex_feed_batch_processing_seconds": "histogram",
    "reflex_feed_batch_consecutive_errors": "gauge",
}


def page_of(snapshot: Callable[[], RuntimeSnapshot]) -> str:
    registry = CollectorRegistry()
    FeedSeries(snapshot, registry)
    return generate_latest(registry).decode()


def read(text: str) -> Page:
    found: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


# -- what the page must say, written down a second time and naively ----------------------------------------------------


class Expected:
    def __init__(self, snapshot: RuntimeSnapshot) -> None:
        self.page: Page = {}
        for name, feed in snapshot.feeds.items():
            self.feed(name, feed)
        for name, figures in snapshot.coordinators.items():
            self.coordinator(name, figures)
        for name, output in snapshot.outputs.items():
            self.output(name, output)

    def say(self, series: str, value: float | None, **labels: str) -> None:
        if value is not None:
            self.page[series, frozenset(labels.items())] = float(value)

    def timing(self, series: str, timing: Durations, **labels: str) -> None:
        self.say(f"{series}_count", timing.count, **labels)
        self.say(f"{series}_sum", timing.total, **labels)
        for i, bound in enumerate(BOUNDS):
            edge = "+Inf" if bound == float("inf") else str(bound)
            self.say(f"{series}_bucket", sum(timing.buckets[: i + 1]), le=edge, **labels)

    def feed(self, name: str, feed: FeedSnapshot) -> None:
        self.say("reflex_feed_up", feed.state == "running", feed=name)
        self.say("reflex_feed_frames_total", feed.frames, feed=name)
        self.say("reflex_feed_frames_processed_total", feed.processed, feed=name)
        for reason, count in feed.drops.items():
            self.say("reflex_feed_drops_total", count, feed=name, reason=reason)
        self.say("reflex_feed_waiting", feed.waiting, feed=name)
        self.say("reflex_feed_in_flight", feed.in_flight, feed=name)
        self.say("reflex_feed_fps", feed.fps, feed=name)
        self.say("reflex_feed_age_seconds", feed.age, feed=name)
        self.timing("reflex_feed_latency_seconds", feed.latency, feed=name)
        self.say("reflex_feed_restarts_total", feed.restarts, feed=name)
        self.say("reflex_feed_sink_errors_total", feed.sink_errors, feed=name)
        self.say("reflex_feed_corrupt_total", feed.corrupt, feed=name)
        for stage, figures in feed.stages.items():
            self.say("reflex_feed_stage_runs_total", figures.runs, feed=name, stage=stage)
            self.say("reflex_feed_stage_errors_total", figures.errors, feed=name, stage=stage)
            self.say("reflex_feed_stage_seconds_total", figures.seconds, feed=name, stage=stage)
        for zone, count in feed.zones.items():
            self.say("reflex_feed_zone_count", count, feed=name, zone=zone)
        for line, counts in feed.lines.items():
            self.say("reflex_feed_line_in_total", counts["in"], feed=name, line=line)
            self.say("reflex_feed_line_out_total", counts["out"], feed=name, line=line)

    def output(self, name: str, output: OutputSnapshot) -> None:
        self.say("reflex_feed_output_up", output.state == "connected", output=name)
        self.say("reflex_feed_output_results_total", output.taken, output=name)
        self.say("reflex_feed_output_sent_total", output.sent, output=name)
        for reason, count in output.drops.items():
            self.say("reflex_feed_output_drops_total", count, output=name, reason=reason)
        self.say("reflex_feed_output_waiting", output.waiting, output=name)
        self.say("reflex_feed_output_retries_total", output.retries, output=name)

    def coordinator(self, name: str, m: BatchMetrics) -> None:
        admitted = m.processed + m.failed + m.dropped + m.pending
        entered = {"admitted": admitted, "rejected": m.rejected, "closed": m.closed}
        for outcome, count in (entered | {"in_flight_exceeded": m.in_flight_exceeded}).items():
            self.say("reflex_feed_batch_submissions_total", count, coordinator=name, outcome=outcome)
        for outcome, count in {"processed": m.processed, "failed": m.failed, "dropped": m.dropped}.items():
            self.say("reflex_feed_batch_items_total", count, coordinator=name, outcome=outcome)
        self.say("reflex_feed_batch_timeouts_total", m.timed_out, coordinator=name)
        self.say("reflex_feed_batch_pending", m.pending, coordinator=name)
        self.say("reflex_feed_batches_total", m.batches_dispatched, coordinator=name)
        sizes = [size for size, count in m.batch_sizes.items() for _ in range(count)]
        self.say("reflex_feed_batch_size_count", len(sizes), coordinator=name)
        self.say("reflex_feed_batch_size_sum", sum(sizes), coordinator=name)
        for bound in SIZES:
            edge = "+Inf" if bound == float("inf") else str(bound)
            self.say("reflex_feed_batch_size_bucket", sum(s <= bound for s in sizes), coordinator=name, le=edge)
        self.say("reflex_feed_batch_fill_ratio", m.fill_ratio, coordinator=name)
        self.timing("reflex_feed_batch_formation_seconds", m.formation, coordinator=name)
        self.timing("reflex_feed_batch_processing_seconds", m.processing, coordinator=name)
        self.say("reflex_feed_batch_consecutive_errors", m.consecutive_errors, coordinator=name)
        for feed, share in m.feeds.items():
            both = {"coordinator": name, "feed": feed}
            for outcome in ("rejected", "in_flight_exceeded", "closed", "processed", "failed", "dropped"):
                self.say("reflex_feed_submissions_total", getattr(share, outcome), outcome=outcome, **both)
            self.say("reflex_feed_timeouts_total", share.timed_out, **both)
            self.say("reflex_feed_pending", share.pending, **both)
            self.timing("reflex_feed_answer_seconds", share.latency, **both)


# -- a busy runtime ----------------------------------------------------------------------------------------------------


def played(seed: int) -> BatchMetrics:
    """A coordinator with something of everything, and a last batch that failed."""
    rng, play = Random(seed), Play()
    for _ in range(400):
        play.submit(f"cam{rng.randrange(6)}", rng.choice((None, None, 0.03)))
        play.now += rng.choice((0.001, 0.01, 0.06))
        if rng.random() < 0.7:
            play.end([rng.choice((Done(1), Done(1), FAULT)) for _ in range(3)])
            play.begin()
        if rng.random() < 0.05:
            play.abandon(rng.randrange(9))
    play.begin()
    play.end([FAULT])
    play.submit("waits")
    play.scheduler.close(play.now, drain=True)
    play.submit("late")
    return play.meter.snapshot()


def timing(rng: Random, n: int = 50) -> Durations:
    times = Times()
    for _ in range(n):
        times.add(rng.expovariate(20.0))
    return times.take()()


def feed(name: str, seed: int, **figures: Any) -> FeedSnapshot:
    rng = Random(seed)
    drops = {"overrun": rng.randrange(1, 99), "stale": rng.randrange(1, 99), "queue_full": 0}
    made: dict[str, Any] = {"frames": 500, "processed": 300, "waiting": 3, "in_flight": 1, "drops": drops, "fps": 29.5}
    made |= {"age": 0.125, "latency": timing(rng), "restarts": 2, "sink_errors": 4, "corrupt": 5}
    made |= {"stages": {"track": StageFigures(9, 2, 0.5)}, "zones": {"door": 3}, "lines": {"gate": {"in": 1, "out": 2}}}
    return FeedSnapshot(name=name, mode="live", source="rtsp://…", state="running", **(made | figures))


def busy() -> RuntimeSnapshot:
    feeds = {"cam1": feed("cam1", 1), 'the "yard"\n\\': feed("yard", 2), "gone": feed("gone", 3, fps=0.0, age=9.0)}
    figures: dict[str, Any] = {"taken": 9, "sent": 5, "waiting": 1, "drops": {"overrun": 3}, "retries": 2}
    output = OutputSnapshot(name="mqtt", where="mqtt://h/t", state="connected", **figures)
    coordinators = {"detector": played(1), "reader": played(2)}
    return RuntimeSnapshot(
        state="running", uptime=9.0, feeds=feeds, coordinators=coordinators, outputs={"mqtt": output}
    )


def fresh() -> RuntimeSnapshot:
    feeds = {"cam1": FeedSnapshot(name="cam1", mode="live", source="x", state="connecting", drops={"overrun": 0})}
    return RuntimeSnapshot(state="running", uptime=0.0, feeds=feeds, coordinators={"detector": BatchMetrics()})


def test_f13_the_page_says_what_the_snapshot_says_and_nothing_else() -> None:
    snapshot = busy()
    assert read(page_of(lambda: snapshot)) == Expected(snapshot).page


def test_f13_no_series_without_a_test_that_moves_it() -> None:
    families = {f.name + ("_total" if f.type == "counter" else ""): f for f in FeedSeries(busy, _registry()).collect()}
    assert {name: family.type for name, family in families.items()} == SERIES
    before, after = read(page_of(fresh)), read(page_of(busy))
    for name in SERIES:
        told = {key for key in after if key[0] in (name, f"{name}_count")}
        assert told, name
        moved = [key for key in told if after[key] > 0.0 and after[key] != before.get(key, 0.0)]
        assert moved, name
        outcomes = {dict(key[1]).get("outcome") for key in told}
        assert outcomes == {dict(key[1]).get("outcome") for key in moved}, name  # every value of it


def test_f13_a_feed_is_up_only_while_it_runs() -> None:
    for state in ("connecting", "running", "reconnecting", "ended", "failed", "stopped"):
        snapshot = RuntimeSnapshot(
            state="running", uptime=0.0, feeds={"cam": FeedSnapshot(name="cam", mode="live", source="x", state=state)},
            coordinators={},
        )  # fmt: skip
        found = read(page_of(lambda snapshot=snapshot: snapshot))
        assert found["reflex_feed_up", frozenset({("feed", "cam")})] == (state == "running")


def test_f13_what_was_not_measured_has_no_sample() -> None:
    found = read(page_of(fresh))
    assert found == Expected(fresh()).page
    names = {name for name, _ in found}
    assert not names & {"reflex_feed_age_seconds", "reflex_feed_batch_fill_ratio"}
    assert found["reflex_feed_batch_processing_seconds_count", frozenset({("coordinator", "detector")})] == 0.0


def test_f13_percentiles_of_the_snapshot_lie_in_the_bucket_that_the_page_gives() -> None:
    snapshot = busy()
    page = read(page_of(lambda: snapshot))
    for name, figures in snapshot.coordinators.items():
        for kind in ("processing", "formation"):
            told: Durations = getattr(figures, kind)
            series, labels = f"reflex_feed_batch_{kind}_seconds", {("coordinator", name)}
            count = page[f"{series}_count", frozenset(labels)]
            assert told.mean == pytest.approx(page[f"{series}_sum", frozenset(labels)] / count)
            assert count <= 512  # so that both are over the same values
            for share, value in ((0.5, told.p50), (0.95, told.p95), (0.99, told.p99)):
                assert value is not None
                edges = ["+Inf" if b == float("inf") else str(b) for b in BOUNDS]
                below = [page[f"{series}_bucket", frozenset(labels | {("le", edge)})] for edge in edges]
                i = next(i for i, n in enumerate(below) if n >= share * count)
                assert (BOUNDS[i - 1] if i else -1.0) < value <= BOUNDS[i]


def test_f13_a_scrape_is_one_snapshot_and_registering_is_none() -> None:
    asked = []

    def snapshot() -> RuntimeSnapshot:
        asked.append(1)
        return busy()

    registry = CollectorRegistry()
    FeedSeries(snapshot, registry)
    assert not asked
    generate_latest(registry)
    assert len(asked) == 1
    with pytest.raises(ValueError, match="Duplicated"):
        FeedSeries(snapshot, registry)


class Doubles:
    id = "doubles"

    def on_start(self) -> None:
        """Nothing to load."""

    def process(self, entries: Any) -> list[Any]:
        return [entry.frame * 2 for entry in entries]

    def on_stop(self) -> None:
        """Nothing to free."""


def test_f13_a_real_coordinator_tells_the_same_both_ways() -> None:
    coordinator = BatchCoordinator(Doubles(), BatchConfig(max_batch_size=4, max_latency=0.005))
    with coordinator as handle:
        futures = [handle.submit(f"cam{i % 8}", i) for i in range(8)]
        assert [future.result(PATIENCE) for future in futures] == [2 * i for i in range(8)]
        assert handle.submit_and_wait("cam1", 21) == 42
        snapshot = RuntimeSnapshot(
            state="running", uptime=1.0, feeds={}, coordinators={coordinator.id: handle.metrics()}
        )
        page = read(page_of(lambda: snapshot))
    assert page == Expected(snapshot).page
    items = frozenset({("coordinator", "doubles"), ("outcome", "processed")})
    assert page["reflex_feed_batch_items_total", items] == 9
    assert page["reflex_feed_batch_size_sum", frozenset({("coordinator", "doubles")})] == 9


def _registry() -> CollectorRegistry:
    return CollectorRegistry()
