"""The series of several runtime processes as one page: each sample has its process as a label."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.telemetry.pages import rendered


def merged(pages: Mapping[str, str]) -> bytes:
    """The Prometheus pages of the processes, by name, as one: every sample with a label `worker`."""
    families: dict[str, Metric] = {}
    for worker, text in pages.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [
                Sample(s.name, {**s.labels, "worker": worker}, s.value, s.timestamp, s.exemplar) for s in family.samples
            ]
    return rendered(families.values())
