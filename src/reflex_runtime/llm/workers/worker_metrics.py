"""The series of several runtime processes as one page: each sample has its process as a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families


class _Families:
    """A collector of existing families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(pages: Mapping[str, str]) -> bytes:
    """The Prometheus pages of the processes, by name, as one: every sample with a label `worker`."""
    families: dict[str, Metric] = {}
    for worker, text in pages.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [
                Sample(s.name, {**s.labels, "worker": worker}, s.value, s.timestamp, s.exemplar) for s in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)
