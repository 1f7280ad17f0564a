"""Figures from the samples of a run: percentiles, throughput, errors, batches, and the ratio of two servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from bench.load.generator import OK, LoadRound, Sample
from reflex_runtime.core.statistics import percentile

SHARES: Final = (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
LATE: Final = ("deadline_exceeded", "deadline_unreachable")
LAG: Final = 0.005  # seconds; above it at p99 the generator itself is reported as the limit
BUSY: Final = 0.9  # share of a core; above it too


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one server, in milliseconds; None if it answered nothing.

    latency: from when a request was to be sent. service: from when it was sent. rounds: each round's own.
    missed: of all requests, the share without an answer within the deadline; None without a deadline.
    """

    requests: int
    answers: int
    per_second: float
    latency_ms: dict[str, float] | None
    service_ms: dict[str, float] | None
    missed: float | None
    errors: dict[str, int]
    batches: dict[str, Any]
    rounds: list[dict[str, float | None]]


def figures(rounds: Sequence[LoadRound], deadline: float) -> Figures:
    """Compute the figures of one server from its rounds. deadline: seconds, 0.0 for none."""
    samples = [sample for r in rounds for sample in r.samples]
    good = [sample for sample in samples if sample.kind == OK]
    missed = [s for s in samples if s.kind != OK or s.done - s.due > deadline]
    return Figures(
        requests=len(samples),
        answers=len(good),
        per_second=_per_second(rounds),
        latency_ms=shares([s.done - s.due for s in good]),
        service_ms=shares([s.done - s.sent for s in good]),
        missed=len(missed) / len(samples) if deadline and samples else None,
        errors=dict(Counter(s.kind for s in samples if s.kind != OK).most_common()),
        batches=_batches(rounds, good),
        rounds=[_of_round(r) for r in rounds],
    )


def shares(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles in milliseconds; None without values."""
    ordered = sorted(seconds)
    return {name: round(1e3 * percentile(ordered, share), 3) for name, share in SHARES} if ordered else None


def ratios(first: Figures, second: Figures) -> dict[str, dict[str, float]]:
    """Ratios first / second of each pair of rounds: median, least and most."""
    found = {}
    for name in ("per_second", "p50_ms", "p99_ms"):
        pairs = [(a[name], b[name]) for a, b in zip(first.rounds, second.rounds, strict=True)]
        each = [a / b for a, b in pairs if a is not None and b]
        if each:
            found[name] = {"median": median(each), "least": min(each), "most": max(each)}
    return found


def generator(rounds: Sequence[LoadRound]) -> dict[str, Any]:
    """Lag and CPU of the load generator. limits: it was so late or so busy that it distorts the figures."""
    lags = shares([lag for r in rounds for lag in r.lags]) or {name: 0.0 for name, _ in SHARES}
    cpu = max(r.cpu for r in rounds)
    return {"lag_ms": lags, "cpu": round(cpu, 3), "limits": lags["p99"] > 1e3 * LAG or cpu > BUSY}


def _per_second(rounds: Sequence[LoadRound]) -> float:
    return sum(r.answered for r in rounds) / sum(r.seconds for r in rounds)


def _of_round(r: LoadRound) -> dict[str, float | None]:
    found = shares([s.done - s.due for s in r.samples if s.kind == OK]) or {}
    return {"per_second": _per_second([r]), "p50_ms": found.get("p50"), "p99_ms": found.get("p99")}


def _batches(rounds: Sequence[LoadRound], good: Sequence[Sample]) -> dict[str, Any]:
    """Batch sizes from the answers (each counts as 1/n of a batch of n) and from the server's counters."""
    found: dict[str, Any] = {}
    sizes = Counter(s.batch for s in good if s.batch)
    if sizes:
        found["mean_of_answers"] = sizes.total() / sum(count / size for size, count in sizes.items())
        found["sizes"] = dict(sorted(sizes.items()))
    counted: Counter[str] = Counter()
    for r in rounds:
        counted.update({name: round(value) for name, value in r.server.items()})
    if counted["batches"]:
        found["server_batches"] = counted["batches"]
        found["server_mean"] = counted["requests"] / counted["batches"]
        found["causes"] = {name.removeprefix("cause "): n for name, n in counted.items() if n and name[:6] == "cause "}
    return found
