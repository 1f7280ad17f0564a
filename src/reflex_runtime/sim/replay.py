"""Replays a journal through the scheduler in virtual time, on a device fitted to its batches: to try another budget.

Arrivals stay as recorded, although a caller that waits for its answer would ask sooner after a faster answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from random import Random
from statistics import median
from typing import Final

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal import BatchLine, WarmUpLine
from reflex_runtime.observe.journal_reader import Journal
from reflex_runtime.sim.recorded import Changes, RecordedSteps, ends_of, request_of, scheduler_of
from reflex_runtime.sim.report import Report, ms, number, share
from reflex_runtime.sim.run import Ran, RequestEnd, Run, simulate
from reflex_runtime.sim.service import line_through
from reflex_runtime.sim.workload import Arrival, RecordedArrivals

NO_TIME: Final = 1e-6  # seconds: what a batch took at least, where only its relative error counts
ALL_TIME: Final = 1e6  # seconds: no batch takes longer


class MeasuredDevice:
    """A device as fast as the recorded batches were: per slot and stage the median of a size seen at least three times,
    else a line fitted to all of them; times one of the recorded ratios to that, drawn anew for each batch.

    warm: what warm-up measured. It counts for the line, because the recorded batches may all have had one size.
    """

    def __init__(self, batches: Sequence[BatchLine], warm: Iterable[WarmUpLine] = ()) -> None:
        by_stage: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for batch in batches:
            if not batch.crashed and not batch.apart and batch.size:
                by_stage[batch.group, batch.stage][batch.size].append(batch.elapsed)
        if not by_stage:
            raise ConfigError("the recording holds no batch to learn the device's times from")
        self._medians = {
            key: {n: median(seen) for n, seen in sizes.items() if len(seen) >= 3} for key, sizes in by_stage.items()
        }
        warmed = list(warm)
        self._lines = {key: _line(_with_warm(key, sizes, warmed)) for key, sizes in by_stage.items()}
        self._ratios = {
            key: [seconds / self._usual(key, n) for n, seen in sizes.items() for seconds in seen]
            for key, sizes in by_stage.items()
        }

    def seconds(self, batch: Batch, now: float, rng: Random) -> float:
        key = (batch.group, batch.stage)
        if key not in self._lines:
            key = next(iter(self._lines))
        return self._usual(key, len(batch.grants)) * rng.choice(self._ratios[key])

    def usual(self, n: int) -> float:
        """Seconds of n requests in the longest stage."""
        return max(self._usual(key, n) for key in self._lines)

    def _usual(self, key: tuple[str, str], n: int) -> float:
        known = self._medians[key].get(n)
        if known is None:
            fixed, marginal = self._lines[key]
            known = fixed + marginal * n
        return max(known, NO_TIME)


def _with_warm(
    key: tuple[str, str], sizes: Mapping[int, Sequence[float]], warm: Sequence[WarmUpLine]
) -> dict[int, list[float]]:
    """The measured times of each size; those of warm-up only where no batch was recorded."""
    found = {n: list(seen) for n, seen in sizes.items()}
    for one in warm:
        for stage, n, seconds in one.batches:
            if (one.slot, stage) == key and n not in sizes:
                found.setdefault(n, []).append(seconds)
    return found


def _line(sizes: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """(fixed, marginal) seconds of least relative error over the medians of the sizes. ConfigError for times that no
    device takes."""
    longest = max(max(seen) for seen in sizes.values())
    if not longest <= ALL_TIME:
        raise ConfigError(f"a batch of the journal took {longest:g} s; no batch takes longer than {ALL_TIME:g} s")
    points = ((float(n), median(seen), len(seen)) for n, seen in sizes.items())
    return line_through((n, y, count / max(y, NO_TIME) ** 2) for n, y, count in points)


def replay_schedule(recording: Journal, changes: Changes | None = None) -> Report:
    """The recorded requests under the recorded settings with `changes`, in virtual time."""
    first, last = _span(recording)
    asked = [(line, line.schedule) for line in recording.requests if line.schedule is not None and line.schedule.ready]
    arrivals = [Arrival(schedule.arrived - first, request_of(line)) for line, schedule in asked]
    run = simulate(
        scheduler_of(recording, changes),
        RecordedArrivals(arrivals),
        MeasuredDevice(recording.batches),
        duration=last - first + 1e-9,
        outcome=RecordedSteps(recording),
    )
    return Report.of(run)


def recorded_report(recording: Journal) -> Report:
    """The same report for the recording: latency is from the arrival at the scheduler to the last batch's end."""
    first, last = _span(recording)
    ends = ends_of(recording)
    run = Run(0.0, last - first + 1e-9)
    for line in recording.requests:
        asked = line.schedule
        if asked is None:
            continue
        end = asked.arrived if asked.ticket is None else ends.get(asked.ticket, asked.arrived)
        limit = inf if asked.time_limit is None else asked.time_limit
        device = line.cost.measured_ms / 1e3
        request, arrived = request_of(line), asked.arrived - first
        run.answers.append(RequestEnd(request, arrived, end - first, line.outcome, limit, device))
    for b in recording.batches:
        run.batches.append(Ran(b.at - first, b.elapsed, b.size, b.expected or 0.0, b.cause))
    return Report.of(run)


def _span(recording: Journal) -> tuple[float, float]:
    times = [line.schedule.arrived for line in recording.requests if line.schedule is not None]
    if not times:
        raise ConfigError(f"{recording.path}: no request in it came to the scheduler")
    return min(times), max(times)


def side_by_side(reports: Mapping[str, Report]) -> list[list[str]]:
    """Rows of a table, the first its header: one column per report."""
    told: dict[str, Callable[[Report], str]] = {
        "requests": lambda r: str(round(r.offered * r.span)),
        "answered in time": lambda r: share(r.on_time),
        "latency p50, ms": lambda r: ms(r.p50),
        "latency p95, ms": lambda r: ms(r.p95),
        "latency p99, ms": lambda r: ms(r.p99),
        "latency mean, ms": lambda r: ms(r.mean),
        "batches": lambda r: str(sum(r.sizes.values())),
        "batch size, mean": lambda r: number(r.batch_size),
        "batch size, largest": lambda r: str(max(r.sizes, default=0)),
        "device busy": lambda r: share(r.busy),
    }
    rows = [["", *reports], *([name, *map(tell, reports.values())] for name, tell in told.items())]
    causes = [report.causes for report in reports.values()]
    lost = [Counter(report.outcomes) - Counter(ok=report.outcomes.get("ok", 0)) for report in reports.values()]
    for counts in (causes, lost):
        total = sum(map(Counter, counts), Counter[str]())
        rows += [[f"  {name}", *(str(each.get(name, 0)) for each in counts)] for name, _ in total.most_common()]
    return rows
