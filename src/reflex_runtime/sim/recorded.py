"""Simulates a journal: its scheduler with the recorded or other settings, callers that make its load, its device.

A caller that waits for its answer sends its next request sooner after a faster answer. So the recorded times alone do
not show the effect of another setting. Each client of the journal is one of three kinds:

- *returns*: it never sends before its answer, and its think times (answer to next request) are more regular than its
  gaps (request to request). It sends again one think time after the answer.
- *by the clock*: it never sends before its answer, and its gaps are more regular. It sends after the gap, or at once if
  the answer comes later than that.
- *does not wait*: it sends before its answer, or only once. Its requests come at the recorded times.

Connections of a pool take turns: the connection that was free for longest sends next, for any caller. Their think times
are long, and each is nearly equal to the one before. They count as clients that do not wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from random import Random
from statistics import StatisticsError, correlation, median
from typing import Any, Final, Literal, NamedTuple

import msgspec

from reflex_runtime.core.batch import Batch, Cause, Done, More, Outcome
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.flush import FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.core.statistics import percentile
from reflex_runtime.observe.journal import BatchLine, GroupInfo, Journal, RequestLine, SchedulerRequest, WarmUpLine
from reflex_runtime.sim.report import Report, ms, number, share
from reflex_runtime.sim.run import Ran, RequestEnd, Run, line_through, simulate
from reflex_runtime.sim.workload import Arrival, RecordedArrivals, RequestStream, WorkloadPart

Kind = Literal["returns", "by the clock", "does not wait"]

OVERLAPS = 0.02  # share of a client's requests that may come before its last answer, such as after a cancellation
FEW = 4  # requests: with fewer a client counts as one that does not wait
CLEARLY = 0.0001  # seconds by which gaps must be more regular than think times, as in holds
POOLED = 0.9  # least correlation of successive think times, and gaps, of the connections of a pool
LONG = 2.0  # least median think time of connections of a pool, in median latencies
WHOLE = 0.9  # share of the recording that a steady caller must cover


# -- the scheduler -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changes:
    """Settings that differ from the recorded ones; None keeps the recorded value. Seconds."""

    max_batch_cost: float | None = None
    batch_timeout: float | None = None
    max_batch_size: int | None = None

    def of(self, flush: FlushPolicy) -> FlushPolicy:
        """A recorded flush policy with these changes."""
        if self.max_batch_cost is not None:
            flush = replace(flush, max_batch_cost=self.max_batch_cost, times_fixed=0.0)
        if self.max_batch_size is not None:
            flush = replace(flush, max_batch_size=self.max_batch_size)
        if self.batch_timeout is not None:  # the hold of every request, or that for expected returns, whichever it has
            hold = (0.0, self.batch_timeout, self.batch_timeout)
            if any(flush.hold_max):
                flush = replace(flush, hold_max=hold)
            else:
                flush = replace(flush, returns=self.batch_timeout)
        return flush


def scheduler_of(recording: Journal, changes: Changes | None = None) -> Scheduler:
    """A scheduler with the recorded settings of every slot, and its cost models as they were after the warm-up.

    ConfigError if the recording lacks the settings of a slot.
    """
    settings = recording.groups
    missing = [slot for slot in recording.slots if slot not in settings or not settings[slot].flush]
    if missing or not settings:
        raise ConfigError(
            f"{recording.path}: the header's `groups` lack the settings of {', '.join(missing) or 'its slots'}, and "
            "without them a schedule cannot be replayed"
        )
    scheduler = Scheduler([_group(name, info, changes or Changes()) for name, info in settings.items()])
    for name, warm in recording.warm.items():
        if name in settings:
            teach(scheduler.cost_model(name), name, warm)
    return scheduler


def flush_of(name: str, info: GroupInfo) -> FlushPolicy:
    """The flush policy of a recorded group. ConfigError if the journal's cannot be read."""
    known = info.flush.keys() & FlushPolicy.__dataclass_fields__.keys()  # earlier journals have other settings, too
    flush: dict[str, Any] = {k: tuple(v) if isinstance(v := info.flush[k], list) else v for k in known}
    flush = {key: inf if value is None else value for key, value in flush.items()}
    try:
        return FlushPolicy(**flush)
    except TypeError as error:
        raise ConfigError(f"slot {name}: the journal's settings of its batches cannot be read: {error}") from None


def _group(name: str, info: GroupInfo, changes: Changes) -> GroupConfig:
    cost = info.cost
    if cost is None:
        raise ConfigError(
            f"slot {name}: its batches were not bounded by learned times, so its schedule cannot be replayed; record "
            "reflex serve EXPORT"
        )
    padded = None if cost.padded_stages is msgspec.UNSET else cost.padded_stages
    return GroupConfig(
        name=name,
        flush=changes.of(flush_of(name, info)),
        capacity=info.capacity,
        max_queued_seconds=info.max_queued_seconds or inf,
        max_in_flight_per_client=info.max_in_flight_per_client,
        weight=info.weight,
        tenant=info.tenant or "",
        latest_only=info.latest_only,
        promote_after=info.promote_after,
        cost=lambda: TimeCost(cost.stages, cost.affine, cost.sizes, padded_stages=padded),
        controller=Planner() if info.planned else None,
    )


def teach(model: TimeCost, slot: str, warm: WarmUpLine) -> None:
    """Give the measurements of a warm-up to the cost model."""

    def ticket(i: int) -> Ticket:
        return Ticket(Request(group=slot, shape=warm.shape, cost_class=warm.cost_class, wants=warm.wants), i, 0.0)

    for stage, size, seconds in warm.batches:
        grants = {ticket(i): 1.0 for i in range(size)}
        model.observe(Batch(0, slot, "", stage, Cause.IDLE, 0.0, 0.0, 0.0, grants), seconds)
    for i, shared in enumerate(warm.shares):
        done = ticket(i)
        done.shared = shared
        model.settled((done,))


def request_of(line: RequestLine) -> Request:
    """The request that the scheduler got."""
    recorded = line.schedule
    assert recorded is not None
    if recorded.priority not in set(Priority):
        raise ConfigError(f"request {line.request.request_id[:100]!r}: priority={recorded.priority}: no such priority")
    return Request(
        id=line.request.request_id,
        group=line.slot,
        partition=recorded.partition,
        client=recorded.client,
        priority=Priority(recorded.priority),
        time_limit=recorded.time_limit,
        shape=recorded.shape,
        cost_class=recorded.cost_class,
        stage=recorded.stage,
        weight=recorded.weight,
        wants=recorded.wants,
    )


class RecordedSteps:
    """Answers like a processor with the recorded stages: after each comes the next, and the last repeats."""

    def __init__(self, recording: Journal) -> None:
        self._stages = {name: info.cost.stages for name, info in recording.groups.items() if info.cost is not None}

    def __call__(self, ticket: Ticket, units: float) -> Outcome:
        stages = self._stages[ticket.request.group]
        left = ticket.wants - units
        if left <= 1e-9:
            return Done()
        if ticket.stage not in stages:
            known = ", ".join(map(repr, stages))
            raise ConfigError(f"request {ticket.id[:100]!r}: stage={ticket.stage[:100]!r}: its slot has only {known}")
        at = stages.index(ticket.stage)
        return More(wants=left, stage=stages[min(at + 1, len(stages) - 1)])


# -- the load ----------------------------------------------------------------------------------------------------------


class SeenRequest(NamedTuple):
    """A request of the journal. Seconds of the scheduler's clock.

    came: when the scheduler got it; ready: when it could first run; ended: when it had its answer or its error. served:
    seconds from the request at the server to its answer, encoding included.
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

    requests: sent in turn, over and over. pauses: used likewise, seconds from an answer to the next request, or with
    `by_clock` from one request to the next. first: time of the first request. until: time after which none is sent.
    """

    requests: Sequence[Request]
    pauses: Sequence[float]
    by_clock: bool
    first: float
    until: float = inf
    prepared_in: float = 0.0

    def streams(self, seed: str) -> Sequence[RequestStream]:
        turn, last = 0, 0.0

        def arrival(now: float) -> Arrival | None:
            nonlocal turn, last
            if turn == 0:
                at = self.first
            else:
                pause = self.pauses[(turn - 1) % len(self.pauses)]
                at = max(now, last + pause) if self.by_clock else now + pause
            if at > self.until:
                return None
            request = self.requests[turn % len(self.requests)]
            turn, last = turn + 1, at
            return Arrival(at, request, prepared_in=self.prepared_in)

        return (RequestStream(True, arrival),)


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """The load of a journal. Seconds.

    parts: to simulate. span: its length. steady: all callers wait and sent all the time, so it may be simulated for
    longer. clients: how many of each kind. pauses: all think times, all gaps. open_rate: requests a second of clients
    that do not wait. between: the driver's time between two batches while work waits. prepared_in: seconds that a
    request's pictures take, prepared one after the other.
    """

    requests: Sequence[SeenRequest]
    parts: Sequence[WorkloadPart]
    span: float
    steady: bool
    clients: Mapping[Kind, int]
    pauses: Mapping[Kind, Sequence[float]]
    open_rate: float
    between: float
    prepared_in: float

    def text(self) -> str:
        """One line for people."""
        parts = []
        for kind, what in (("returns", "wait for their answer, then"), ("by the clock", "ask by the clock, every")):
            ranked = sorted(self.pauses.get(kind, ()))  # type: ignore[call-overload]
            if ranked:
                middle, high = (1e3 * percentile(ranked, share) for share in (0.5, 0.95))
                parts.append(f"{self.clients[kind]} callers {what} {middle:.1f} ms (p95 {high:.1f})")  # type: ignore[index]
        if self.open_rate:
            parts.append(f"{self.open_rate:.1f} requests/s that do not wait")
        return "; ".join(parts)


def observe(journal: Journal) -> ObservedLoad:
    """Fit the callers of a journal. ConfigError if it has too few requests."""
    seen = seen_requests(journal)
    if len(seen) < 2:
        raise ConfigError(f"{journal.path}: has {len(seen)} requests, too few to learn a load from")
    if seen[-1].came <= seen[0].came:
        raise ConfigError(f"{journal.path}: its {len(seen)} requests came at one moment, which is no load")
    first = seen[0].came
    span = max(one.came for one in seen) - first + 1e-9
    prepared_in = _preparation_time(seen)
    parts: list[WorkloadPart] = []
    pooled = _pooled(seen)
    clients: Counter[Kind] = Counter()
    pauses: defaultdict[Kind, list[float]] = defaultdict(list)
    unawaited: list[Arrival] = []
    steady = True
    for own in _by_client(seen).values():
        kind, values = ("does not wait", []) if pooled else habit(own)
        clients[kind] += 1
        if kind == "does not wait":
            unawaited += [Arrival(s.came - first, s.request, prepared_in=prepared_in * (s.ready > s.came)) for s in own]
            continue
        pauses[kind] += values
        begins, last = own[0].came - first, own[-1].came - first
        whole = last - begins >= WHOLE * span
        steady = steady and whole
        pictures = prepared_in if any(s.ready > s.came for s in own) else 0.0
        requests = [s.request for s in own]
        until = inf if whole else last
        parts.append(RecordedCaller(requests, values, kind == "by the clock", begins, until, pictures))
    if unawaited:
        parts.append(RecordedArrivals(unawaited))
    return ObservedLoad(
        seen, parts, span, steady and not unawaited, clients, pauses, len(unawaited) / span,
        _time_between(journal.batches), prepared_in,
    )  # fmt: skip


def ends_of(journal: Journal) -> dict[int, float]:
    """When each ticket ended: with its error, or with its last batch."""
    found = {seq: b.finished for b in journal.batches for seq in b.seqs}
    return found | {e.ticket: e.at for e in journal.ended if e.ticket is not None}


def came_as(line: RequestLine, recorded: SchedulerRequest) -> tuple[Request, float]:
    """The request as the scheduler got it, and when. The recorded time limit counts from when it was ready."""
    request = request_of(line)
    if recorded.admitted is None:
        return request, recorded.arrived
    if request.time_limit is not None:
        request = replace(request, time_limit=request.time_limit + recorded.arrived - recorded.admitted)
    return request, recorded.admitted


def seen_requests(journal: Journal) -> list[SeenRequest]:
    """The requests that reached the scheduler, in order of arrival."""
    ends = ends_of(journal)
    found = []
    for line in journal.requests:
        recorded = line.schedule
        if recorded is None:
            continue
        request, came = came_as(line, recorded)
        end = came if recorded.ticket is None else ends.get(recorded.ticket, recorded.arrived)
        served = line.latency.total_ms / 1e3
        found.append(SeenRequest(request, came, recorded.arrived, max(end, came), line.outcome, served))
    return sorted(found, key=lambda one: one.came)


def habit(own: Sequence[SeenRequest]) -> tuple[Kind, list[float]]:
    """The kind of a client, and its pauses. own: its requests, in order."""
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


def _pooled(seen: Sequence[SeenRequest]) -> bool:
    """Whether the clients are connections of a pool."""
    clients = _by_client(seen)
    after = sorted(
        (later.came, later.came - earlier.ended, later.came - earlier.came)
        for own in clients.values()
        for earlier, later in pairwise(own)
        if earlier.ended <= later.came
    )
    if len(after) < 8 or len(clients) < 3:
        return False
    thinks, gaps = [think for _, think, _ in after], [gap for _, _, gap in after]
    long = median(thinks) > LONG * median(one.ended - one.came for one in seen)
    return long and _autocorrelation(thinks) > POOLED and _autocorrelation(gaps) > POOLED


def _autocorrelation(values: Sequence[float]) -> float:
    """The correlation of each value with the next; 0 if they do not differ."""
    try:
        return correlation(values[:-1], values[1:])
    except StatisticsError:
        return 0.0


def _by_client(seen: Sequence[SeenRequest]) -> dict[tuple[str, Hashable], list[SeenRequest]]:
    found: dict[tuple[str, Hashable], list[SeenRequest]] = defaultdict(list)
    for one in seen:
        found[one.request.group, one.request.client].append(one)
    return found


def _spread(values: Sequence[float]) -> float:  # between the quartiles
    ranked = sorted(values)
    return percentile(ranked, 0.75) - percentile(ranked, 0.25)


def _preparation_time(seen: Sequence[SeenRequest]) -> float:
    """The median seconds that a request takes to be prepared, one after the other; 0 if none are prepared."""
    prepared = sorted((one for one in seen if one.ready > one.came), key=lambda one: one.ready)
    if not prepared:
        return 0.0
    before = [-inf, *(one.ready for one in prepared)]
    return median(one.ready - max(one.came, last) for one, last in zip(prepared, before, strict=False))


def _time_between(batches: Sequence[BatchLine]) -> float:
    """The median time from one batch's end to the start of the next, if that had no reason to wait."""
    ordered = sorted(batches, key=lambda b: b.at)
    gaps = []
    for last, this in pairwise(ordered):
        waiting = any(this.at - m.age <= last.finished for m in this.members)
        if waiting and not this.looked and this.cause != Cause.HELD:
            gaps.append(max(0.0, this.finished - this.elapsed - last.finished))
    return median(gaps) if gaps else 0.0


# -- a journal through the scheduler again -----------------------------------------------------------------------------

NO_TIME: Final = 1e-6  # seconds of the shortest batch, so that a relative error exists
ALL_TIME: Final = 1e6  # seconds of the longest possible batch


class MeasuredDevice:
    """A device as fast as in the recorded batches. A batch takes the median time of its slot, stage and size if it is
    that of at least three, else that of a line fitted to all sizes; times a recorded ratio to it, drawn for each batch.

    warm: measurements of the warm-up. The line uses them, because the recorded batches may all have had one size.
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
    """The measured times of each size; those of the warm-up only for sizes without a recorded batch."""
    found = {n: list(seen) for n, seen in sizes.items()}
    for one in warm:
        for stage, n, seconds in one.batches:
            if (one.slot, stage) == key and n not in sizes:
                found.setdefault(n, []).append(seconds)
    return found


def _line(sizes: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """(fixed, marginal) seconds with the least relative error to the medians of the sizes. ConfigError for impossible
    times."""
    longest = max(max(seen) for seen in sizes.values())
    if not longest <= ALL_TIME:
        raise ConfigError(f"a batch of the journal took {longest:g} s; no batch takes longer than {ALL_TIME:g} s")
    points = ((float(n), median(seen), len(seen)) for n, seen in sizes.items())
    return line_through((n, y, count / max(y, NO_TIME) ** 2) for n, y, count in points)


def replay_schedule(recording: Journal, changes: Changes | None = None) -> Report:
    """The recorded requests that could run, with the recorded settings and `changes`, in virtual time."""
    first, last = _span(recording)
    lines = [(line, line.schedule) for line in recording.requests if line.schedule is not None and line.schedule.ready]
    arrivals = [Arrival(schedule.arrived - first, request_of(line)) for line, schedule in lines]
    run = simulate(
        scheduler_of(recording, changes),
        RecordedArrivals(arrivals),
        MeasuredDevice(recording.batches),
        duration=last - first + 1e-9,
        outcome=RecordedSteps(recording),
    )
    return _report_of_all(run)


def recorded_report(recording: Journal) -> Report:
    """The same report for the recording. Latency is from the arrival at the scheduler to the last batch's end."""
    first, last = _span(recording)
    ends = ends_of(recording)
    run = Run(0.0, last - first + 1e-9)
    for line in recording.requests:
        recorded = line.schedule
        if recorded is None:
            continue
        end = recorded.arrived if recorded.ticket is None else ends.get(recorded.ticket, recorded.arrived)
        limit = inf if recorded.time_limit is None else recorded.time_limit
        device = line.cost.measured_ms / 1e3
        request, arrived = request_of(line), recorded.arrived - first
        run.answers.append(RequestEnd(request, arrived, end - first, line.outcome, limit, device))
    for b in recording.batches:
        run.batches.append(Ran(b.at - first, b.elapsed, b.size, b.expected or 0.0, b.cause))
    return _report_of_all(run)


def _report_of_all(run: Run) -> Report:
    """The figures of the whole run: its last batches begin after the last arrival."""
    ends = (*(a.ended for a in run.answers), *(b.started + b.seconds for b in run.batches))
    run.duration = max(run.duration, *ends) + 1e-9
    return Report.of(run)


def _span(recording: Journal) -> tuple[float, float]:
    times = [line.schedule.arrived for line in recording.requests if line.schedule is not None]
    if not times:
        raise ConfigError(f"{recording.path}: the scheduler got none of its requests")
    return min(times), max(times)


def side_by_side(reports: Mapping[str, Report]) -> list[list[str]]:
    """Rows of a table, the first its header: one column per report."""
    cells: dict[str, Callable[[Report], str]] = {
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
    rows = [["", *reports], *([name, *map(cell, reports.values())] for name, cell in cells.items())]
    causes = [report.causes for report in reports.values()]
    lost = [Counter(report.outcomes) - Counter(ok=report.outcomes.get("ok", 0)) for report in reports.values()]
    for counts in (causes, lost):
        total = sum(map(Counter, counts), Counter[str]())
        rows += [[f"  {name}", *(str(each.get(name, 0)) for each in counts)] for name, _ in total.most_common()]
    return rows
