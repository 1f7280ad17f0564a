"""One answer from the answers of several replicas: Prometheus pages and snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.telemetry.series import rendered

_ADDED: Final = frozenset(  # gauges
    {"reflex_policy_runtime_queue_depth", "reflex_in_flight_requests", "reflex_backlog_seconds"}
)
_Key = tuple[str, tuple[tuple[str, str], ...]]


class PageSum:
    """The Prometheus pages of replicas as one, in which nothing counts twice and nothing is lost.

    Counters and histograms are added, those of earlier lives included. So are gauges of how much there is; of all other
    gauges it has the largest, because a threshold on one asks for the worst replica.
    """

    def __init__(self) -> None:
        self._last: dict[str, bytes] = {}  # by replica: the last page of its present life
        self._lost: list[Metric] = []  # counters of earlier lives

    def page(self, pages: Mapping[str, bytes], own: bytes, more: Iterable[Metric]) -> bytes:
        """pages: by replica. own: of the front. more: families that are added as they are."""
        self._last |= pages
        current = [pages.get(name, last) for name, last in self._last.items()]
        families = _added([*map(_families, [own, *current]), self._lost])
        return rendered([*families, *more])

    def lost(self, name: str) -> None:
        """The replica has ended: what it counted is kept."""
        page = self._last.pop(name, None)
        if page is not None:
            counted = [f for f in _families(page) if f.type in ("counter", "histogram", "summary")]
            self._lost = _added([self._lost, counted])


def _families(page: bytes) -> list[Metric]:
    return list(text_string_to_metric_families(page.decode()))


def _added(pages: Iterable[Iterable[Metric]]) -> list[Metric]:
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, float]] = {}
    for page in pages:
        for family in page:
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = values.setdefault(family.name, {})
            add = family.type in ("counter", "histogram", "summary") or family.name in _ADDED
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                before = found.get(key)
                if before is None:
                    found[key] = sample.value
                else:
                    found[key] = before + sample.value if add else max(before, sample.value)
    for name, family in families.items():
        family.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()]
    return list(families.values())
