"""Our counters and histograms say on the wire what prometheus-client's own would."""

from __future__ import annotations

import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from reflex_runtime.core.batch import Batch, BatchFinished, Cause
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.metrics import Metrics, SeriesRow, SeriesSet

BUCKETS = (0.001, 0.01, 0.1, 1, 10)
ROWS = (
    SeriesRow("asked_total", "Questions", ("what",)),
    SeriesRow("took_seconds", "Time", (), BUCKETS),
)


def page(registry: CollectorRegistry, counter: Any, histogram: Any) -> list[str]:
    """What a scrape gets. counter, histogram: the series of these label values."""
    rng = random.Random(0)
    histogram("nobody")  # exists from the start
    for who in ("a", 'quoted "b"\n', "ö"):
        for _ in range(50):
            counter(who, "x").inc()
            histogram(who).observe(rng.choice((0.0, 0.001, 0.5, 1.0, 7.0, 1e9)))
        counter(who, "y").inc(2.5)
    text = generate_latest(registry).decode()
    return [line for line in text.split("\n") if "_created" not in line]  # when a series began: ours do not say


def test_the_page_is_the_same() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    ours = SeriesSet(ROWS, registry, ("who",))
    counter = Counter("asked_total", "Questions", ("who", "what"), registry=other)
    histogram = Histogram("took_seconds", "Time", ("who",), buckets=BUCKETS, registry=other)
    found = page(registry, lambda *v: ours.counter(ROWS[0].name, *v), lambda *v: ours.histogram(ROWS[1].name, *v))
    assert found == page(other, counter.labels, histogram.labels)


def test_a_series_that_comes_during_a_scrape_does_not_break_it() -> None:
    """Events make series on their own thread."""
    series: dict[tuple[str, ...], float] = {("first",): 1.0}

    def value(number: float) -> float:
        series["late",] = 2.0
        return number

    row = SeriesRow("reflex_late_total", "Some", value=value)
    assert [sample.value for sample in row.collect(("name",), series).samples] == [1.0]


@pytest.mark.parametrize(("crashed", "apart", "steps"), [(False, False, 2), (True, False, 0), (False, True, 0)])
def test_denoise_steps_of_a_failed_call_do_not_count(crashed: bool, apart: bool, steps: int) -> None:
    """Its members run again, and would count twice."""
    metrics = Metrics()
    metrics.add_slot("prod", "arm", lambda: 0.0, lambda: 0.0, lambda: 0.0)
    grants = {Ticket(Request(group="prod"), i, 0.0): 1.0 for i in range(2)}
    batch = Batch(1, "prod", "", "denoise", Cause.IDLE, 0.0, 0.0, 0.0, grants)
    metrics(BatchFinished(1.0, batch, 0.5, crashed, apart))
    assert metrics.slots["prod"].steps.value == steps
    assert metrics.slots["prod"].busy.value == 0.5


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    SeriesSet(ROWS, registry)
    with pytest.raises(ValueError, match="asked"):
        SeriesSet(ROWS, registry)
