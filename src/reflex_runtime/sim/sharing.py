"""What callers and a device take from each other where they share processor cores, fitted to a journal.

A model on the CPU runs beside the server's event loop, and often beside its callers. Each request that comes while a
batch runs makes the batch longer. So a size that was recorded while callers came back looks slower than it is beside a
hold, in which they come back first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final, NamedTuple

import msgspec

from reflex_runtime.core.percentile import percentile
from reflex_runtime.telemetry.journal import BatchLine
from reflex_runtime.telemetry.journal_reader import Journal

FEW: Final = 4  # batches of a size that show no relation
SETTLED: Final = 0.5  # seconds from the first request: batches before it are slow because caches are cold
SPARED: Final = 0.25  # share of a batch's time that is its own at least
EARLY: Final = 0.1  # quantile of the times of a size: what comes later in a longer batch is its effect, not its cause
ASSUMED: Final = 0.0625  # share of the batches' time that requests take where cores are shared, with an error as large
HURRIED: Final = 0.75  # think times beside a free device over those beside a batch, where one kind was not recorded
HURRIED_BY: Final = 0.25  # more or less


class Stolen(NamedTuple):
    """Seconds by which a request that comes while a batch runs makes it longer, and the standard error of that."""

    seconds: float = 0.0
    error: float = 0.0


def shares_cores(journal: Journal) -> bool:
    """Whether the models of a journal ran on the processor that served them."""
    return any("CPU" in provider for provider in journal.header.providers)


def stolen_in(batches: Sequence[BatchLine], came: Sequence[float], shared: bool) -> Stolen:
    """What a request takes from a batch.

    Per size a line through the batches' times over the requests that came meanwhile, one slope for all sizes. A longer
    batch sees more requests because it is longer, so those that came early stand in for all (an instrumental variable).
    A journal whose batches of a size all had as many shows no slope: then what is assumed where cores are shared
    counts. came: when requests came, ascending.
    """
    over = under = early = spread = 0.0
    count = -1
    for points in _points(batches, came):
        e, k, y = (sum(column) / len(points) for column in zip(*points, strict=True))
        over += sum((first - e) * (seconds - y) for first, _, seconds in points) / y**2
        under += sum((first - e) * (n - k) for first, n, _ in points) / y**2
        early += sum((first - e) ** 2 for first, _, _ in points) / y**2
        spread += sum((seconds - y) ** 2 for _, _, seconds in points) / y**2
        count += len(points) - 1
    slope, seen = 0.0, 0.0  # seen: how much the journal says, one over the squared error
    if count > 0 and under > 0.0 and spread > 0.0:
        slope, seen = over / under, under**2 * count / (spread * early)
    usual = _usual(batches, came) if shared else 0.0
    known = 1.0 / usual**2 if usual > 0.0 else seen / max(slope**2 * seen - 1.0, 1e-9)  # else it is shrunk to 0
    if seen + known <= 0.0:
        return Stolen()
    return Stolen(max(0.0, (slope * seen + usual * known) / (seen + known)), (seen + known) ** -0.5)


def alone(batches: Iterable[BatchLine], came: Sequence[float], stolen: float) -> list[BatchLine]:
    """The batches with the times that they would have taken if nothing had come meanwhile."""
    found = []
    for batch in batches:
        own = max(SPARED * batch.elapsed, batch.elapsed - stolen * _during(batch, came))
        found.append(msgspec.structs.replace(batch, elapsed=own))
    return found


def _during(batch: BatchLine, came: Sequence[float]) -> int:
    return bisect_right(came, batch.finished) - bisect_right(came, batch.finished - batch.elapsed)


def _usual(batches: Sequence[BatchLine], came: Sequence[float]) -> float:
    """Seconds a request, if all together take the assumed share of the device's time."""
    count = sum(_during(batch, came) for batch in batches)
    return ASSUMED * sum(batch.elapsed for batch in batches) / count if count else 0.0


def _points(batches: Iterable[BatchLine], came: Sequence[float]) -> Iterable[list[tuple[float, float, float]]]:
    """(requests that came early, all that came, seconds) of the batches of each slot, stage and size."""
    runs: dict[tuple[str, str, int], list[BatchLine]] = defaultdict(list)
    begins = came[0] + SETTLED if came else 0.0
    for batch in batches:
        if batch.at >= begins and not batch.crashed and not batch.apart and 0.0 < batch.elapsed < inf:
            runs[batch.group, batch.stage, batch.size].append(batch)
    for own in runs.values():
        if len(own) < FEW:
            continue
        early = percentile(sorted(batch.elapsed for batch in own), EARLY)
        points = []
        for batch in own:
            began = batch.finished - batch.elapsed
            first = bisect_right(came, began + early) - bisect_right(came, began)
            points.append((float(first), float(_during(batch, came)), batch.elapsed))
        yield points
