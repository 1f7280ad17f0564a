"""Our counters and histograms say on the wire what prometheus-client's own would."""

from __future__ import annotations

import random

import prometheus_client as theirs
from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.observe import metrics as ours

BUCKETS = (0.001, 0.01, 0.1, 1, 10)


def page(counter: type, histogram: type) -> list[str]:
    rng = random.Random(0)
    registry = CollectorRegistry()
    count = counter("asked_total", "Questions", ("who", "what"), registry=registry)
    times = histogram("took_seconds", "Time", ("who",), buckets=BUCKETS, registry=registry)
    times.labels("nobody")  # exists from the start
    for who in ("a", 'quoted "b"\n', "ö"):
        for _ in range(50):
            count.labels(who, "x").inc()
            times.labels(who).observe(rng.choice((0.0, 0.001, 0.5, 1.0, 7.0, 1e9)))
        count.labels(who, "y").inc(2.5)
    text = generate_latest(registry).decode()
    return [line for line in text.split("\n") if "_created" not in line]  # when a series began: ours do not say


def test_the_page_is_the_same() -> None:
    assert page(ours.Counter, ours.Histogram) == page(theirs.Counter, theirs.Histogram)


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    ours.Counter("asked_total", "Questions", (), registry=registry)
    try:
        ours.Counter("asked_total", "Questions", (), registry=registry)
    except ValueError:
        return
    raise AssertionError("two counters of one name")
