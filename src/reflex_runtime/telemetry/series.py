"""Counters and histograms without locks, collected by prometheus-client.

They are written on one thread, several times for every request; prometheus-client's own take a lock each time and cost
five times as much. A scrape on another thread reads numbers that are at most one observation apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class CounterChild:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add."""
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
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histogram:
    """A histogram and its series by label values. buckets: ascending upper bounds; one without a bound is added."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds = (*(float(b) for b in buckets), inf)
        self._names = [floatToGoString(bound) for bound in self._bounds]  # type: ignore[no-untyped-call]
        self._children: dict[tuple[str, ...], HistogramChild] = {}
        registry.register(self)

    def labels(self, *values: str) -> HistogramChild:
        """The series of these label values, made if it is new."""
        return self._children.setdefault(values, HistogramChild(self._bounds))

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._help, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, child in self._children.items():
            below = accumulate(child.counts)
            family.add_metric(values, list(zip(self._names, below, strict=True)), child.total)
        return [family]
