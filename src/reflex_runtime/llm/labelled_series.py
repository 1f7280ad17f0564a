"""The series of several runtime processes as one page: each sample says whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.core import Sample

from reflex_runtime.observe.series import rendered


def labelled(label: str, pages: Mapping[str, Iterable[Metric]]) -> bytes:
    """The families of each name as one page of Prometheus text, every sample with its name as this label."""
    families: dict[str, Metric] = {}
    for name, page in pages.items():
        for family in page:
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [
                Sample(s.name, {**s.labels, label: name}, s.value, s.timestamp, s.exemplar) for s in family.samples
            ]
    return rendered(families.values())
