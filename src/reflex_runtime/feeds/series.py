"""The figures of feeds and their coordinators as Prometheus series.

Nothing is counted here. A scrape takes one snapshot of the runtime, so all series of a page belong to the same moment
and agree with `Runtime.snapshot()` and `handle.metrics()`. Histograms count since the start; Prometheus computes the
percentiles. A value that was not measured yet has no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from reflex_runtime.feeds.outputs.outbox import OutputSnapshot
from reflex_runtime.feeds.snapshot import FeedSnapshot, RuntimeSnapshot
from reflex_runtime.telemetry.batch_metrics import BOUNDS, BatchMetrics, Durations
from reflex_runtime.telemetry.series import SeriesRow

SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, inf)  # items per batch
REFUSALS = ("rejected", "in_flight_exceeded", "closed")
ENDS = ("processed", "failed", "dropped")


class FeedSeries:
    """A Prometheus collector over a runtime.

    snapshot: `Runtime.snapshot`, called once for each scrape, on its thread. registry: it is registered there.
    """

    def __init__(self, snapshot: Callable[[], RuntimeSnapshot], registry: CollectorRegistry) -> None:
        self._snapshot = snapshot
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Every series by name, type and help, without samples and without a snapshot."""
        return _series({}, {}, {})

    def collect(self) -> Iterable[Metric]:
        """Every series as it is now."""
        snapshot = self._snapshot()
        return _series(snapshot.feeds, snapshot.coordinators, snapshot.outputs)


def _series(
    feeds: Mapping[str, FeedSnapshot],
    coordinators: Mapping[str, BatchMetrics],
    outputs: Mapping[str, OutputSnapshot],
) -> Iterator[Metric]:
    both = {(c, name): share for c, figures in coordinators.items() for name, share in figures.feeds.items()}
    yield from (row.collect(("feed",), {(name,): feed for name, feed in feeds.items()}) for row in _OF_FEEDS)
    by_name = {(name,): figures for name, figures in coordinators.items()}
    yield from (row.collect(("coordinator",), by_name) for row in _OF_COORDINATORS)
    yield from (row.collect(("coordinator", "feed"), both) for row in _OF_BOTH)
    yield from (row.collect(("output",), {(name,): output for name, output in outputs.items()}) for row in _OF_OUTPUTS)


def _timing(name: str, help: str, value: Callable[[Any], Durations]) -> SeriesRow:
    def counts(snapshot: Any) -> tuple[Sequence[int], float]:
        durations = value(snapshot)
        return durations.buckets, durations.total

    return SeriesRow(name, help, counts, bounds=BOUNDS)


def _of(names: Iterable[str]) -> Callable[[Any], dict[str, float]]:
    return lambda figures: {name: getattr(figures, name) for name in names}


def _stages(what: str) -> Callable[[FeedSnapshot], dict[str, float]]:
    return lambda feed: {name: getattr(figures, what) for name, figures in feed.stages.items()}


def _crossed(way: str) -> Callable[[FeedSnapshot], dict[str, float]]:
    return lambda feed: {name: counts[way] for name, counts in feed.lines.items()}


def _admissions(figures: BatchMetrics) -> dict[str, float]:
    refused = _of(REFUSALS)(figures)
    return {"admitted": figures.submitted - sum(refused.values())} | refused


def _sizes(figures: BatchMetrics) -> tuple[Sequence[int], float]:
    counts = [0] * len(SIZES)
    for size, n in figures.batch_sizes.items():
        counts[next(i for i, bound in enumerate(SIZES) if size <= bound)] += n
    return counts, float(sum(size * n for size, n in figures.batch_sizes.items()))


_OF_FEEDS = (
    SeriesRow("reflex_feed_up", "1 while the feed is running", lambda f: f.state == "running"),
    SeriesRow("reflex_feed_frames_total", "Frames read from the source", lambda f: f.frames),
    SeriesRow("reflex_feed_frames_processed_total", "Frames answered and through every stage", lambda f: f.processed),
    SeriesRow("reflex_feed_drops_total", "Frames that left unanswered, by reason", lambda f: f.drops, "reason"),
    SeriesRow("reflex_feed_waiting", "Frames read and not yet answered or dropped, now", lambda f: f.waiting),
    SeriesRow("reflex_feed_in_flight", "Of these, at the batch point, now", lambda f: f.in_flight),
    SeriesRow("reflex_feed_fps", "Frames answered per second, over the last two", lambda f: f.fps),
    SeriesRow("reflex_feed_age_seconds", "Age of the last answered frame, now", lambda f: f.age),
    _timing("reflex_feed_latency_seconds", "Capture of a frame to its answer", lambda f: f.latency),
    SeriesRow("reflex_feed_restarts_total", "Times the source was opened again", lambda f: f.restarts),
    SeriesRow("reflex_feed_sink_errors_total", "Results on which a sink failed", lambda f: f.sink_errors),
    SeriesRow("reflex_feed_corrupt_total", "Packets that could not be decoded", lambda f: f.corrupt),
    SeriesRow("reflex_feed_stage_runs_total", "Frames that a stage got", _stages("runs"), "stage"),
    SeriesRow("reflex_feed_stage_errors_total", "Frames on which a stage failed", _stages("errors"), "stage"),
    SeriesRow("reflex_feed_stage_seconds_total", "Time in a stage", _stages("seconds"), "stage"),
    SeriesRow("reflex_feed_zone_count", "Boxes in a zone, in the last frame", lambda f: f.zones, "zone"),
    SeriesRow("reflex_feed_line_in_total", "Objects that crossed a line inwards", _crossed("in"), "line"),
    SeriesRow("reflex_feed_line_out_total", "Objects that crossed a line outwards", _crossed("out"), "line"),
)
_OF_COORDINATORS = (
    SeriesRow("reflex_feed_batch_submissions_total", "Submissions, admitted or refused", _admissions, "outcome"),
    SeriesRow("reflex_feed_batch_items_total", "Admitted items by how they ended", _of(ENDS), "outcome"),
    SeriesRow("reflex_feed_batch_timeouts_total", "Callers that stopped waiting", lambda m: m.timed_out),
    SeriesRow("reflex_feed_batch_pending", "Admitted items that have not ended, now", lambda m: m.pending),
    SeriesRow("reflex_feed_batches_total", "Batches formed", lambda m: m.batches_dispatched),
    SeriesRow("reflex_feed_batch_size", "Items per batch", _sizes, bounds=SIZES),
    SeriesRow("reflex_feed_batch_fill_ratio", "Items over what their batches could hold", lambda m: m.fill_ratio),
    _timing("reflex_feed_batch_formation_seconds", "Oldest item's arrival to the batch", lambda m: m.formation),
    _timing("reflex_feed_batch_processing_seconds", "Time in the processor, per batch", lambda m: m.processing),
    SeriesRow(
        "reflex_feed_batch_consecutive_errors", "Batches in a row without any answer, now",
        lambda m: m.consecutive_errors,
    ),
)  # fmt: skip
_OF_OUTPUTS = (
    SeriesRow("reflex_feed_output_up", "1 while the receiver takes results", lambda o: o.state == "connected"),
    SeriesRow("reflex_feed_output_results_total", "Results that were given to the output", lambda o: o.taken),
    SeriesRow("reflex_feed_output_sent_total", "Results that arrived at the receiver", lambda o: o.sent),
    SeriesRow("reflex_feed_output_drops_total", "Results that did not arrive, by reason", lambda o: o.drops, "reason"),
    SeriesRow("reflex_feed_output_waiting", "Results that wait to be sent, now", lambda o: o.waiting),
    SeriesRow("reflex_feed_output_retries_total", "Times that the output tried again", lambda o: o.retries),
)
_OF_BOTH = (  # of each feed at each coordinator
    SeriesRow("reflex_feed_submissions_total", "Submissions by how they ended", _of((*REFUSALS, *ENDS)), "outcome"),
    SeriesRow("reflex_feed_timeouts_total", "Times the feed stopped waiting", lambda s: s.timed_out),
    SeriesRow("reflex_feed_pending", "Admitted items that have not ended, now", lambda s: s.pending),
    _timing("reflex_feed_answer_seconds", "Submission to answer", lambda s: s.latency),
)
