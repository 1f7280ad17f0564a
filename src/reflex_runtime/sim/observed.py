"""The load of a journal, as callers that would react to other settings.

A caller that waits for its answer before it asks again would ask sooner after a faster answer. So the recorded times
alone do not say what another setting would bring. Each client of the journal becomes one of three kinds:

- *returns*: it never asks before its answer, and its think times (answer to next request) are more regular than its
  gaps (request to request). It asks again so long after the answer.
- *by the clock*: it never asks before its answer, and its gaps are more regular. It asks after the gap, or at once if
  the answer comes later than that.
- *does not wait*: it asks before its answer, or only once. Its requests come at the recorded times.

Two things are seen only in all clients together. Connections of a pool take turns: a connection that was free for long
asks next, whoever is behind it. Their think times are long and nearly those of the one before; they do not wait.
Callers that were answered together share what delays them, such as a busy processor: they get think times that were
recorded together, of those beside a free device or beside a running batch, as in the simulation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from random import Random
from statistics import StatisticsError, correlation, median
from typing import Literal, NamedTuple

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.percentile import percentile
from reflex_runtime.core.request import Request
from reflex_runtime.sim.recorded import request_of
from reflex_runtime.sim.sharing import HURRIED, Stolen, shares_cores, stolen_in
from reflex_runtime.sim.workload import Arrival, RecordedArrivals, RequestStream, WorkloadPart
from reflex_runtime.telemetry.journal import BatchLine
from reflex_runtime.telemetry.journal_reader import Journal

Kind = Literal["returns", "by the clock", "does not wait"]

OVERLAPS = 0.02  # share of a client's requests that may come before its last answer: it was cancelled, or is shared
FEW = 4  # requests of a client that show no habit
CLEARLY = 0.0001  # seconds by which gaps must be more regular than think times, as for holds
AT_ONCE = 0.001  # seconds within which a batch begins that did not wait for those who were just answered
ALIKE = 0.6  # correlation of one think time with the next from which on callers are delayed together, and
POOLED = 0.9  # of a pool, whose
LONG = 2.0  # think times are that many times the latency
WHOLE = 0.9  # share of the recording in which a caller must ask to be there all the time


class SeenRequest(NamedTuple):
    """A request of the journal. Seconds of the scheduler's clock.

    came: when it was asked; ready: when it could first run; ended: when it had its answer or its error. served: seconds
    from the request at the server to its answer, encoding included.
    """

    request: Request
    came: float
    ready: float
    ended: float
    outcome: str
    served: float


@dataclass(frozen=True, slots=True)
class RecordedCaller:
    """A client that waits for its answers; a part of a workload.

    requests: in turn, from the first again after the last. pauses: likewise, seconds from an answer to the next
    request, or with `by_clock` from one request to the next. first, until: when it asks first, and not any more.
    """

    requests: Sequence[Request]
    pauses: Sequence[float]
    by_clock: bool
    first: float
    until: float = inf
    prepared_in: float = 0.0

    def streams(self, seed: str) -> Sequence[RequestStream]:
        return (_RecordedCallerStream(self),)


class _RecordedCallerStream:
    waits = True

    def __init__(self, caller: RecordedCaller, shared: _Cohorts | None = None) -> None:
        self._caller, self._shared = caller, shared
        self._asked = 0
        self._last = 0.0

    def next(self, now: float) -> Arrival | None:
        caller, turn, busy_at = self._caller, self._asked, None
        if turn == 0:
            at = caller.first
        else:
            if self._shared is not None:
                pause, beside = self._shared.pauses(now)
                busy_at = now + beside
            else:
                pause = caller.pauses[(turn - 1) % len(caller.pauses)]
            at = max(now, self._last + pause) if caller.by_clock else now + pause
        if at > caller.until:
            return None
        self._asked, self._last = turn + 1, at
        request = caller.requests[turn % len(caller.requests)]
        return Arrival(at, request, prepared_in=caller.prepared_in, busy_at=busy_at)


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """Callers that are delayed together; a part of a workload. cohorts: think times of callers that were answered at
    the same time, in the order in which they asked. beside: the same where a batch ran then. hurried: the first over
    the second, where one of them is empty."""

    callers: Sequence[RecordedCaller]
    cohorts: Sequence[Sequence[float]]
    beside: Sequence[Sequence[float]] = ()
    hurried: float = 1.0

    def streams(self, seed: str) -> Sequence[RequestStream]:
        free = self.cohorts or [[self.hurried * think for think in cohort] for cohort in self.beside]
        beside = self.beside or [[think / self.hurried for think in cohort] for cohort in self.cohorts]
        shared = _Cohorts((free, beside), Random(seed))
        return [_RecordedCallerStream(caller, shared) for caller in self.callers]


class _Cohorts:
    """Draws one of the recorded cohorts of each kind for all that are answered at one time."""

    def __init__(self, kinds: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]], rng: Random) -> None:
        self._kinds, self._rng = kinds, rng
        self._weights = [[len(cohort) for cohort in cohorts] for cohorts in kinds]
        self._now = -inf
        self._drawn: list[Sequence[float]] = []
        self._taken = 0

    def pauses(self, now: float) -> tuple[float, float]:
        """Beside a free device, and beside a running batch."""
        if now != self._now:
            choose = self._rng.choices
            self._drawn = [choose(*kind)[0] for kind in zip(self._kinds, self._weights, strict=True)]
            self._now, self._taken = now, 0
        self._taken += 1
        free, beside = (cohort[(self._taken - 1) % len(cohort)] for cohort in self._drawn)
        return free, beside


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """The load of a journal. Seconds.

    parts: to simulate. span: how long it lasts. steady: all callers wait and were there all the time, so it may be
    simulated for longer. clients: how many of each kind. pauses: all think times, all gaps. open_rate: requests a
    second that do not wait. between: what passes between two batches while work waits. stolen:
    by which a request that comes while a batch runs makes it longer. prepared_in: seconds that a
    request's pictures take, one after the other.
    """

    requests: Sequence[SeenRequest]
    parts: Sequence[WorkloadPart]
    span: float
    steady: bool
    clients: Mapping[Kind, int]
    pauses: Mapping[Kind, Sequence[float]]
    open_rate: float
    between: float
    stolen: Stolen
    prepared_in: float

    def text(self) -> str:
        """One line for people."""
        told = []
        for kind, what in (("returns", "wait for their answer, then"), ("by the clock", "ask by the clock, every")):
            ranked = sorted(self.pauses.get(kind, ()))  # type: ignore[call-overload]
            if ranked:
                middle, high = (1e3 * percentile(ranked, share) for share in (0.5, 0.95))
                told.append(f"{self.clients[kind]} callers {what} {middle:.1f} ms (p95 {high:.1f})")  # type: ignore[index]
        if self.open_rate:
            told.append(f"{self.open_rate:.1f} requests/s that do not wait")
        return "; ".join(told)


def observe(journal: Journal) -> ObservedLoad:
    """Fit the callers of a journal. ConfigError when it has too few requests to say anything."""
    seen = seen_requests(journal)
    if len(seen) < 2 or seen[-1].came <= seen[0].came:
        raise ConfigError(f"{journal.path}: {len(seen)} requests came to the scheduler; too few to fit a load to")
    first = seen[0].came
    span = max(one.came for one in seen) - first + 1e-9
    prepared_in = _preparing(seen)
    parts: list[WorkloadPart] = []
    together: list[RecordedCaller] = []
    alike, pooled = _in_common(seen)
    clients: Counter[Kind] = Counter()
    pauses: defaultdict[Kind, list[float]] = defaultdict(list)
    unasked: list[Arrival] = []
    steady = True
    for own in _by_client(seen).values():
        kind, values = ("does not wait", []) if pooled else habit(own)
        clients[kind] += 1
        if kind == "does not wait":
            unasked += [Arrival(s.came - first, s.request, prepared_in=prepared_in * (s.ready > s.came)) for s in own]
            continue
        pauses[kind] += values
        begins, last = own[0].came - first, own[-1].came - first
        whole = last - begins >= WHOLE * span
        steady = steady and whole
        pictures = prepared_in if any(s.ready > s.came for s in own) else 0.0
        requests = [s.request for s in own]
        until = inf if whole else last
        caller = RecordedCaller(requests, values, kind == "by the clock", begins, until, pictures)
        (together if alike and kind == "returns" else parts).append(caller)
    if together:
        hurried = HURRIED if shares_cores(journal) else 1.0
        parts.append(RecordedGroup(together, *cohorts_of(seen, journal.batches), hurried))
    if unasked:
        parts.append(RecordedArrivals(unasked))
    stolen = stolen_in(journal.batches, [one.came for one in seen], shares_cores(journal))
    return ObservedLoad(
        seen, parts, span, steady and not unasked, clients, pauses, len(unasked) / span,
        _between(journal.batches, seen), stolen, prepared_in,
    )  # fmt: skip


def seen_requests(journal: Journal) -> list[SeenRequest]:
    """The requests that came to the scheduler, in the order in which they came."""
    finished = {seq: b.finished for b in journal.batches for seq in b.seqs}
    ended = {e.ticket: e.at for e in journal.ended}
    found = []
    for line in journal.requests:
        asked = line.schedule
        if asked is None:
            continue
        came = asked.arrived if asked.admitted is None else asked.admitted
        request = request_of(line)
        if request.time_limit is not None:  # what was left of it when it was ready is recorded
            request = replace(request, time_limit=request.time_limit + asked.arrived - came)
        end = came
        if asked.ticket is not None:
            end = ended.get(asked.ticket, finished.get(asked.ticket, asked.arrived))
        served = line.latency.total_ms / 1e3
        found.append(SeenRequest(request, came, asked.arrived, max(end, came), line.outcome, served))
    return sorted(found, key=lambda one: one.came)


def habit(own: Sequence[SeenRequest]) -> tuple[Kind, list[float]]:
    """What kind of caller a client is, and its pauses. own: its requests, in order."""
    if len(own) < FEW:
        return "does not wait", []
    overlaps = sum(later.came < earlier.ended for earlier, later in pairwise(own))
    if overlaps > OVERLAPS * len(own):
        return "does not wait", []
    thinks = [max(0.0, later.came - earlier.ended) for earlier, later in pairwise(own)]
    gaps = [later.came - earlier.came for earlier, later in pairwise(own)]
    if _spread(gaps) < _spread(thinks) - CLEARLY:
        return "by the clock", gaps
    return "returns", thinks


def _thinks(seen: Sequence[SeenRequest]) -> list[tuple[float, float, float]]:
    """(when the last one was answered, think time, gap) of each request that follows one of its client, in order."""
    last: dict[tuple[str, Hashable], SeenRequest] = {}
    found = []
    for one in seen:
        key = (one.request.group, one.request.client)
        before = last.get(key)
        if before is not None and before.ended <= one.came:
            found.append((before.ended, one.came - before.ended, one.came - before.came))
        last[key] = one
    return found


def _in_common(seen: Sequence[SeenRequest]) -> tuple[bool, bool]:
    """Whether callers are delayed together, and whether they are connections of a pool."""
    thinks = _thinks(seen)
    if len(thinks) < 8 or len(_by_client(seen)) < 3:
        return False, False
    think, gap = (_with_next([one[place] for one in thinks]) for place in (1, 2))
    long = median(one[1] for one in thinks) > LONG * median(one.ended - one.came for one in seen)
    pooled = long and think > POOLED and gap > POOLED
    return think > ALIKE and not long, pooled


def _with_next(values: Sequence[float]) -> float:
    """The correlation of each value with the next; 0 if they do not differ."""
    try:
        return correlation(values[:-1], values[1:])
    except StatisticsError:
        return 0.0


def cohorts_of(
    seen: Sequence[SeenRequest], batches: Sequence[BatchLine]
) -> tuple[list[list[float]], list[list[float]]]:
    """The think times of those that were answered together, beside a free device and beside a batch that ran at once.
    A kind of which there are few counts as none."""
    found: dict[float, list[float]] = defaultdict(list)
    for answered, think, _ in _thinks(seen):
        found[answered].append(think)
    began = sorted(batch.at for batch in batches)
    kinds: tuple[list[list[float]], list[list[float]]] = ([], [])
    for answered, cohort in found.items():
        place = bisect_left(began, answered)
        kinds[place < len(began) and began[place] <= answered + AT_ONCE].append(cohort)
    for few, other in (kinds, kinds[::-1]):
        if len(few) < FEW:
            other += few
            few.clear()
            break
    return kinds


def _by_client(seen: Sequence[SeenRequest]) -> dict[tuple[str, Hashable], list[SeenRequest]]:
    found: dict[tuple[str, Hashable], list[SeenRequest]] = defaultdict(list)
    for one in seen:
        found[one.request.group, one.request.client].append(one)
    return found


def _spread(values: Sequence[float]) -> float:
    ranked = sorted(values)
    return percentile(ranked, 0.75) - percentile(ranked, 0.25)


def _preparing(seen: Sequence[SeenRequest]) -> float:
    """Seconds that a request takes to be prepared, as if one followed the other; 0 where none are."""
    prepared = sorted((one for one in seen if one.ready > one.came), key=lambda one: one.ready)
    if not prepared:
        return 0.0
    before = [-inf, *(one.ready for one in prepared)]
    return median(one.ready - max(one.came, last) for one, last in zip(prepared, before, strict=False))


def _between(batches: Sequence[BatchLine], seen: Sequence[SeenRequest]) -> float:
    """The median time from one batch's end to the start of the next, where that had no reason to wait."""
    ordered = sorted(batches, key=lambda b: b.at)
    gaps = []
    for last, this in pairwise(ordered):
        waiting = any(this.at - m.age <= last.finished for m in this.members)
        if waiting and not this.looked and this.cause != Cause.TIMEOUT:
            gaps.append(max(0.0, this.finished - this.elapsed - last.finished))
    return median(gaps) if gaps else 0.0
