"""Families of Prometheus series that exist already, as one page."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, generate_latest


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
