"""The results of a simulated run: shares, percentiles and causes, and the table that prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from reflex_runtime.core.request import Priority
from reflex_runtime.core.statistics import percentile
from reflex_runtime.sim.run import Run

TRUSTED: Final = 0.25  # share by which the simulation of recorded settings may differ from the recording


def jain(values: Iterable[float]) -> float | None:
    """Jain's index (Σx)² / (n·Σx²): 1 if all are equal, 1/n if one has everything. None without values."""
    found = list(values)
    squares = sum(x * x for x in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else None


def fair_shares(total: float, demands: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Max-min fair shares of `total`: none is larger than its demand; those with larger demands are equal."""
    parts: dict[Hashable, float] = {}
    waiting = sorted(demands, key=lambda k: demands[k])
    while waiting:
        part = min(demands[waiting[0]], total / len(waiting))
        parts[waiting.pop(0)] = part
        total -= part
    return parts


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of the span between warm-up and end. Times in seconds, rates per second, shares 0 to 1.

    Answers count by when they ended and batches by when they started; all other figures count requests by when they
    arrived. Latencies are those of answered requests.

    offered, throughput, goodput: requests made, answered, and answered on time, per second.
    on_time: answered on time ÷ made. on_time_by: the same per priority.
    busy: share of the time the device ran. wasted: share of its time spent on answers that were late or not used.
    fairness: Jain's index over clients of (on time ÷ max-min fair part of all that was on time); None for one client.
    """

    span: float
    offered: float
    throughput: float
    goodput: float
    on_time: float | None
    on_time_by: Mapping[str, float]
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    busy: float
    wasted: float | None
    fairness: float | None
    batch_size: float | None
    sizes: Mapping[int, int]
    outcomes: Mapping[str, int]
    causes: Mapping[str, int]
    clients: Mapping[Hashable, tuple[float, float]]  # (made, on time) per second

    @classmethod
    def of(cls, run: Run) -> Report:
        span = max(1e-9, run.duration - run.warmup)
        answers = [a for a in run.answers if a.arrived >= run.warmup]
        batches = [b for b in run.batches if run.warmup <= b.started < run.duration]
        latencies = sorted(a.latency for a in answers if a.outcome == "ok")
        made = Counter(a.request.client for a in answers)
        good = Counter(a.request.client for a in answers if a.on_time)
        ended = [a for a in run.answers if a.outcome == "ok" and run.warmup <= a.ended < run.duration]
        parts = fair_shares(good.total(), made)
        used = sum(a.device for a in answers)
        ran = (min(b.started + b.seconds, run.duration) - max(b.started, run.warmup) for b in run.batches)
        tiers = Counter(a.request.priority for a in answers)
        good_tiers = Counter(a.request.priority for a in answers if a.on_time)
        return cls(
            span=span,
            offered=len(answers) / span,
            throughput=len(ended) / span,
            goodput=sum(a.on_time for a in ended) / span,
            on_time=good.total() / len(answers) if answers else None,
            on_time_by={p.name.lower(): good_tiers[p] / tiers[p] for p in Priority if tiers[p]},
            mean=fmean(latencies) if latencies else None,
            p50=percentile(latencies, 0.50) if latencies else None,
            p95=percentile(latencies, 0.95) if latencies else None,
            p99=percentile(latencies, 0.99) if latencies else None,
            busy=sum(max(0.0, seconds) for seconds in ran) / span,
            wasted=sum(a.device for a in answers if not a.on_time) / used if used else None,
            fairness=jain(good[c] / parts[c] if parts[c] else 0.0 for c in made) if len(made) > 1 else None,
            batch_size=fmean(b.size for b in batches) if batches else None,
            sizes=dict(sorted(Counter(b.size for b in batches).items())),
            outcomes=dict(Counter(a.outcome for a in answers).most_common()),
            causes=dict(Counter(b.cause for b in batches).most_common()),
            clients={c: (made[c] / span, good[c] / span) for c in made},
        )

    def text(self) -> str:
        largest = max(self.sizes, default=0)
        rows = [
            ("offered", f"{self.offered:.1f} requests/s over {self.span:g} s"),
            ("answered", f"{self.throughput:.1f} /s, {self.goodput:.1f} /s on time"),
            ("on time", share(self.on_time)),
            ("latency", f"p50 {ms(self.p50)}, p95 {ms(self.p95)}, p99 {ms(self.p99)}, mean {ms(self.mean)} ms"),
            ("batch size", f"mean {number(self.batch_size)}, largest {largest}, {sum(self.sizes.values())} batches"),
            ("device", f"busy {share(self.busy)}, of that wasted {share(self.wasted)}"),
            ("outcomes", _counts(self.outcomes)),
            ("causes", _counts(self.causes)),
        ]
        if len(self.on_time_by) > 1:
            rows.insert(3, ("by priority", ", ".join(f"{k} {share(v)}" for k, v in self.on_time_by.items())))
        if self.fairness is not None:
            rows.append(("fairness", f"Jain {self.fairness:.3f} over {len(self.clients)} clients"))
        return "\n".join(f"{name:<12}{value}" for name, value in rows)


def doubt(*figures: tuple[float | None, float | None]) -> str:
    """Why a simulation of recorded settings is not reliable, "" if it is. figures: (simulated, measured) pairs, of p50
    and throughput."""
    off = max((abs((simulated or 0.0) / seen - 1.0) for simulated, seen in figures if seen), default=0.0)
    if off <= TRUSTED:
        return ""
    return (
        f"simulated with the recorded settings, p50 or throughput is off by {off:.0%}: something other than batching "
        "decides the latency. Do not rely on these figures"
    )


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table: first column left, the others right, two blanks between."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def padded(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join(padded(line) for line in lines)


def ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "–"
