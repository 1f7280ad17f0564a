"""The figures of feeds and their coordinators as Prometheus series.

Nothing is counted here. A scrape takes one snapshot of the runtime, so all series of a page belong to the same moment
and agree with `Runtime.snapshot()` and `handle.metrics()`. Histograms count since the start; Prometheus computes the
percentiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from reflex_runtime.feeds.runtime.snapshot import RuntimeSnapshot
from reflex_runtime.observe.series_table import COORDINATORS, FEEDS, FEEDS_AT_COORDINATORS, OUTPUTS


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


def _series(feeds: Mapping[str, Any], coordinators: Mapping[str, Any], outputs: Mapping[str, Any]) -> Iterator[Metric]:
    both = {(c, name): share for c, figures in coordinators.items() for name, share in figures.feeds.items()}
    yield from (row.collect(("feed",), {(name,): feed for name, feed in feeds.items()}) for row in FEEDS)
    by_name = {(name,): figures for name, figures in coordinators.items()}
    yield from (row.collect(("coordinator",), by_name) for row in COORDINATORS)
    yield from (row.collect(("coordinator", "feed"), both) for row in FEEDS_AT_COORDINATORS)
    yield from (row.collect(("output",), {(name,): output for name, output in outputs.items()}) for row in OUTPUTS)
