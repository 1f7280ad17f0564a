"""The figures of feeds and their coordinators as Prometheus series.

Nothing is counted here: a scrape takes one snapshot of the runtime and writes it down, so every series of a page is of
the same moment and says what `Runtime.snapshot()` and `handle.metrics()` say. Percentiles are left to whoever asks: the
histograms have counted everything since the start. What was not measured yet has no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from reflex_runtime.drivers.batch_metrics import BOUNDS, BatchMetrics, Durations, FeedBatchMetrics
from reflex_runtime.feeds.snapshot import FeedSnapshot, RuntimeSnapshot

SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, inf)  # items per batch
REFUSALS = ("rejected", "in_flight_exceeded", "closed")
ENDS = ("processed", "failed", "dropped")

_Labels = tuple[str, ...]
_Samples = Iterable[tuple[_Labels, float | None]]


class FeedSeries:
    """A Prometheus collector over a runtime.

    snapshot: `Runtime.snapshot`, called once for each scrape, on its thread. registry: it is registered there.
    """

    def __init__(self, snapshot: Callable[[], RuntimeSnapshot], registry: CollectorRegistry) -> None:
        self._snapshot = snapshot
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Every series by name, type and help, without samples: so that nothing is asked of a runtime yet."""
        return _series({}, {})

    def collect(self) -> Iterable[Metric]:
        """Every series as it is now."""
        snapshot = self._snapshot()
        return _series(snapshot.feeds, snapshot.coordinators)


def _series(feeds: Mapping[str, FeedSnapshot], coordinators: Mapping[str, BatchMetrics]) -> Iterator[Metric]:
    yield from _of_feeds(feeds)
    yield from _of_coordinators(coordinators)
    yield from _of_both(
        {(c, name): feed for c, figures in coordinators.items() for name, feed in figures.feeds.items()}
    )


def _of_feeds(feeds: Mapping[str, FeedSnapshot]) -> Iterator[Metric]:
    def each(value: Callable[[FeedSnapshot], float | None]) -> _Samples:
        return (((name,), value(feed)) for name, feed in feeds.items())

    by = ("feed",)
    yield _gauge("reflex_feed_up", "1 while the feed is running", by, each(lambda f: f.state == "running"))
    yield _counter("reflex_feed_frames_total", "Frames read from the source", by, each(lambda f: f.frames))
    yield _counter(
        "reflex_feed_frames_processed_total", "Frames answered and through every stage", by, each(lambda f: f.processed)
    )
    drops = (((name, reason), n) for name, feed in feeds.items() for reason, n in feed.drops.items())
    yield _counter("reflex_feed_drops_total", "Frames that left unanswered, by reason", ("feed", "reason"), drops)
    yield _gauge("reflex_feed_waiting", "Frames read and not done with, now", by, each(lambda f: f.waiting))
    yield _gauge("reflex_feed_in_flight", "Of these, at the batch point, now", by, each(lambda f: f.in_flight))
    yield _gauge("reflex_feed_fps", "Frames answered per second, over the last two", by, each(lambda f: f.fps))
    yield _gauge("reflex_feed_age_seconds", "Age of the last answered frame, now", by, each(lambda f: f.age))
    latency = (((name,), feed.latency) for name, feed in feeds.items())
    yield _timing("reflex_feed_latency_seconds", "Capture of a frame to its answer", by, latency)
    yield _counter("reflex_feed_restarts_total", "Times the source was opened again", by, each(lambda f: f.restarts))
    yield _counter("reflex_feed_sink_errors_total", "Results on which a sink failed", by, each(lambda f: f.sink_errors))
    yield _counter("reflex_feed_corrupt_total", "Packets that could not be decoded", by, each(lambda f: f.corrupt))


def _of_coordinators(coordinators: Mapping[str, BatchMetrics]) -> Iterator[Metric]:
    def each(value: Callable[[BatchMetrics], float | None]) -> _Samples:
        return (((name,), value(figures)) for name, figures in coordinators.items())

    by, by_outcome = ("coordinator",), ("coordinator", "outcome")
    outcomes = {name: _admissions(figures) for name, figures in coordinators.items()}
    yield _counter(
        "reflex_feed_batch_submissions_total", "Submissions, admitted or refused", by_outcome, _flat(outcomes)
    )
    ends = {name: {end: getattr(figures, end) for end in ENDS} for name, figures in coordinators.items()}
    yield _counter("reflex_feed_batch_items_total", "Admitted items by how they ended", by_outcome, _flat(ends))
    yield _counter("reflex_feed_batch_timeouts_total", "Callers that stopped waiting", by, each(lambda m: m.timed_out))
    yield _gauge("reflex_feed_batch_pending", "Admitted items that have not ended, now", by, each(lambda m: m.pending))
    yield _counter("reflex_feed_batches_total", "Batches formed", by, each(lambda m: m.batches_dispatched))
    sizes = (((name,), _sized(figures.batch_sizes)) for name, figures in coordinators.items())
    yield _histogram("reflex_feed_batch_size", "Items per batch", by, SIZES, sizes)
    yield _gauge(
        "reflex_feed_batch_fill_ratio", "Items over what their batches could hold", by, each(lambda m: m.fill_ratio)
    )
    formation = (((name,), figures.formation) for name, figures in coordinators.items())
    yield _timing("reflex_feed_batch_formation_seconds", "Oldest item's arrival to the batch", by, formation)
    processing = (((name,), figures.processing) for name, figures in coordinators.items())
    yield _timing("reflex_feed_batch_processing_seconds", "Time in the processor, per batch", by, processing)
    yield _gauge(
        "reflex_feed_batch_consecutive_errors", "Batches in a row of which nothing came, now", by,
        each(lambda m: m.consecutive_errors),
    )  # fmt: skip


def _of_both(shares: Mapping[tuple[str, str], FeedBatchMetrics]) -> Iterator[Metric]:
    """What each feed asked of each coordinator."""
    by = ("coordinator", "feed")
    outcomes = (
        ((*key, name), getattr(share, name)) for key, share in shares.items() for name in (*REFUSALS, *ENDS)
    )  # fmt: skip
    yield _counter("reflex_feed_submissions_total", "Submissions by how they ended", (*by, "outcome"), outcomes)
    timeouts = ((key, share.timed_out) for key, share in shares.items())
    yield _counter("reflex_feed_timeouts_total", "Times the feed stopped waiting", by, timeouts)
    pending = ((key, share.pending) for key, share in shares.items())
    yield _gauge("reflex_feed_pending", "Admitted items that have not ended, now", by, pending)
    answers = ((key, share.latency) for key, share in shares.items())
    yield _timing("reflex_feed_answer_seconds", "Submission to answer", by, answers)


def _admissions(figures: BatchMetrics) -> dict[str, float]:
    refused = {name: getattr(figures, name) for name in REFUSALS}
    return {"admitted": figures.submitted - sum(refused.values())} | refused


def _flat(outcomes: Mapping[str, Mapping[str, float]]) -> _Samples:
    return (((name, outcome), n) for name, counts in outcomes.items() for outcome, n in counts.items())


# -- families ----------------------------------------------------------------------------------------------------------


class _Counts(NamedTuple):
    """A histogram's counts, one for each of its bounds, and the sum of what was counted."""

    counts: Sequence[int]
    total: float


def _sized(sizes: Mapping[int, int]) -> _Counts:
    counts = [0] * len(SIZES)
    for size, n in sizes.items():
        counts[next(i for i, bound in enumerate(SIZES) if size <= bound)] += n
    return _Counts(counts, float(sum(size * n for size, n in sizes.items())))


def _counter(name: str, help: str, labels: _Labels, samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily(name.removesuffix("_total"), help, labels=labels), samples)


def _gauge(name: str, help: str, labels: _Labels, samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, help, labels=labels), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: _Samples) -> Metric:
    for values, value in samples:
        if value is not None:
            family.add_metric(values, float(value))
    return family


def _timing(name: str, help: str, labels: _Labels, samples: Iterable[tuple[_Labels, Durations]]) -> Metric:
    return _histogram(name, help, labels, BOUNDS, ((v, _Counts(t.buckets, t.total)) for v, t in samples))


def _histogram(
    name: str, help: str, labels: _Labels, bounds: Sequence[float], samples: Iterable[tuple[_Labels, _Counts]]
) -> Metric:
    family = HistogramMetricFamily(name, help, labels=labels)
    names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
    for values, (counts, total) in samples:
        family.add_metric(values, list(zip(names, accumulate(counts), strict=True)), total)
    return family
