"""Series for prometheus-client: counters and histograms that events write, and tables of series read from snapshots.

Counters and histograms are written on one thread, several times for every request, without a lock; prometheus-client's
own take one each time and cost five times as much. A scrape on another thread reads numbers that are at most one
observation apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class CounterChild:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Counter:
    """A counter and its series by label values. The name ends in `_total`."""

    def __init__(self, name: str, help: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._help, self._labels = name.removesuffix("_total"), help, labels
        self._children: dict[tuple[str, ...], CounterChild] = {}
        registry.register(self)

    def labels(self, *values: str) -> CounterChild:
        """The series of these label values, made if it is new."""
        return self._children.setdefault(values, CounterChild())

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._help, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        return [family]


class HistogramChild:
    """One series of a histogram. bounds: upper bounds of its buckets, inclusive, the last one inf."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histogram:
    """A histogram and its series by label values. buckets: ascending upper bounds; one without a bound is added."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds = (*(float(b) for b in buckets), inf)
        self._children: dict[tuple[str, ...], HistogramChild] = {}
        registry.register(self)

    def labels(self, *values: str) -> HistogramChild:
        """The series of these label values, made if it is new."""
        return self._children.setdefault(values, HistogramChild(self._bounds))

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._help, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        samples = ((values, (child.counts, child.total)) for values, child in self._children.items())
        return [_histogram(self._name, self._help, self._labels, self._bounds, samples)]


# -- rows --------------------------------------------------------------------------------------------------------------


class SeriesRow(NamedTuple):
    """A series: a histogram where there are buckets, a counter where the name ends in `_total`, any other one a gauge.

    labels: beside those that all series of its server have.
    value: of those that are read from snapshots at a scrape: a number; None for no sample; with a label a mapping of
    numbers by its values; with buckets (the last one inf) the counts below each, and their total.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()
    value: Callable[[Any], Any] | None = None

    @property
    def kind(self) -> str:
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"

    def collect(self, labels: Sequence[str], snapshots: Mapping[Any, Any]) -> Metric:
        """The series of these snapshots, which stand under the values of `labels`."""
        assert self.value is not None, self.name
        values = ((key, self.value(snapshot)) for key, snapshot in snapshots.items())
        if self.buckets:
            return _histogram(self.name, self.help, labels, self.buckets, values)
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name.removesuffix("_total"), self.help, labels=(*labels, *self.labels))
        for key, value in values:
            for more, number in ((((k,), n) for k, n in value.items()) if self.labels else (((), value),)):
                if number is not None:
                    family.add_metric((*key, *more), float(number))
        return family


class SeriesSet:
    """The series of these rows in a registry. labels: that all of them have, before their own."""

    def __init__(self, rows: Iterable[SeriesRow], registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._made: dict[str, Counter | Histogram | Gauge] = {}
        for row in rows:
            names = (*labels, *row.labels)
            if row.kind == "histogram":
                self._made[row.name] = Histogram(row.name, row.help, names, row.buckets, registry)
            elif row.kind == "counter":
                self._made[row.name] = Counter(row.name, row.help, names, registry)
            else:
                self._made[row.name] = Gauge(row.name, row.help, names, registry=registry)

    def counter(self, name: str, *values: str) -> CounterChild:
        """The series of a counter with these values of its labels."""
        made = self._made[name]
        assert isinstance(made, Counter), name
        return made.labels(*values)

    def histogram(self, name: str, *values: str) -> HistogramChild:
        made = self._made[name]
        assert isinstance(made, Histogram), name
        return made.labels(*values)

    def gauge(self, name: str, *values: str) -> Gauge:
        made = self._made[name]
        assert isinstance(made, Gauge), name
        return made.labels(*values) if values else made


def _histogram(
    name: str,
    help: str,
    labels: Sequence[str],
    bounds: Sequence[float],
    samples: Iterable[tuple[Sequence[str], tuple[Sequence[int], float]]],
) -> Metric:
    family = HistogramMetricFamily(name, help, labels=labels)
    names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
    for values, (counts, total) in samples:
        family.add_metric(values, list(zip(names, accumulate(counts), strict=True)), total)
    return family


class _Families:
    """A collector of existing families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._families


def rendered(families: Iterable[Metric]) -> bytes:
    """Their page."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)
