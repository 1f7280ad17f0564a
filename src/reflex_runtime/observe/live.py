"""Figures for the dashboard and `reflex top`: a fold over the events of a server, read as snapshots.

It is a sink only while there are watchers, and costs nothing otherwise; its figures begin with the first watcher. Every
list in a snapshot is bounded, and the rest is counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Done,
    Event,
    RequestAnswered,
    RequestProgressed,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.statistics import Rate, percentile
from reflex_runtime.observe.journal import client_label, client_text

STREAM: Final = "/dashboard/stream"  # the path of a server's snapshots, one a line
BATCHES = 256  # in a snapshot: the newest
MEMBERS = 64  # of a batch
CLIENTS = 64  # in a snapshot: those answered last
NAME = 48  # characters of a client's name: names often differ at their end
REMEMBERED = 1024  # clients whose figures are kept
WINDOW = 512  # newest latencies of a group that percentiles are taken from
OWN = 64  # newest latencies of a client, likewise
UNSEEN: Final = 2.0  # seconds after the last snapshot until the fold ends
APART: Final = 1024  # step between ids of one process's batches, so that those of several processes differ
RATE_S = 5.0  # seconds over which rates are taken


class LiveMember(msgspec.Struct, array_like=True):
    """A request in a batch. units: as granted. waited: seconds since it arrived. entered: its first batch."""

    client: str
    units: float
    waited: float
    entered: bool


class LiveBatch(msgspec.Struct):
    """A batch that has ended, or that runs now, without `took`.

    at: when it was formed, in seconds of the snapshot's clock. took, expected: seconds; expected 0.0 if unknown. cost:
    in the unit of its group. queued: requests of its group left waiting when it was formed; short_of: the limit that
    kept them out. cause: why it left when it did. failed: the call failed. members: at most 64 of `size`. process: its
    name, if there are several.
    """

    id: int
    group: str
    stage: str
    cause: str
    at: float
    expected: float
    cost: float
    size: int
    queued: int
    short_of: str
    members: list[LiveMember]
    took: float | None = None
    failed: bool = False
    process: str = ""


class LiveClient(msgspec.Struct):
    """A robot, feed or caller. rate: answers a second now. age: seconds since its last answer, or since a refusal
    before the first. p95: seconds, of its last 64. lost: requests without a result; why: the last one's error. wire:
    its protocol, "" if unknown."""

    name: str
    group: str
    wire: str
    rate: float
    age: float
    answers: int
    p95: float | None
    lost: int
    why: str


class LiveGroup(msgspec.Struct):
    """A slot or workload. busy: its share of the device's time since the last snapshot. error: predicted over measured
    time of the batches since then. rate: answers a second. Percentiles: seconds, of the last 512 answers.
    tokens: of answers that come in parts, a second; first, gap: seconds from the arrival to the first of them, and
    between two."""

    name: str
    busy: float
    batches: int
    requests: int
    rate: float
    p50: float | None
    p95: float | None
    p99: float | None
    error: float | None
    outcomes: dict[str, int]
    tokens: float = 0.0
    first_p50: float | None = None
    first_p99: float | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None


class LiveSnapshot(msgspec.Struct):
    """One moment. at: seconds on the clock of its batches. left_out: batches since the last one that are not in it.

    server: figures of the server itself; see the page.
    """

    at: float
    number: int
    batches: list[LiveBatch]
    running: list[LiveBatch]
    left_out: int
    groups: list[LiveGroup]
    clients: list[LiveClient]
    clients_known: int
    server: Mapping[str, Any]


_rate = partial(Rate, RATE_S)
_window: Callable[[], deque[float]] = partial(deque, maxlen=WINDOW)


@dataclass(slots=True)
class _ClientFigures:
    group: str
    wire: str = ""
    why: str = ""
    answers: int = 0
    lost: int = 0
    at: float = 0.0
    rate: Rate = field(default_factory=_rate)
    latencies: deque[float] = field(default_factory=partial(deque, maxlen=OWN))


@dataclass(slots=True)
class _GroupFigures:
    busy: float = 0.0
    batches: int = 0
    requests: int = 0
    predicted: float = 0.0
    measured: float = 0.0
    rate: Rate = field(default_factory=_rate)
    tokens: Rate = field(default_factory=_rate)
    latencies: deque[float] = field(default_factory=_window)
    firsts: deque[float] = field(default_factory=_window)
    gaps: deque[float] = field(default_factory=_window)
    outcomes: Counter[str] = field(default_factory=Counter)


class Live:
    """The fold. Called with one event at a time, on the thread that takes snapshots.

    `busy`, `batches` and the times of a group count from the last snapshot, all else from the first event.
    """

    events = frozenset(
        {BatchScheduled, BatchFinished, RequestProgressed, RequestSettled, RequestRejected, RequestAnswered}
    )

    def __init__(self, now: float) -> None:
        self._clients: OrderedDict[Hashable, _ClientFigures] = OrderedDict()
        self._groups: dict[str, _GroupFigures] = {}
        self._running: dict[Batch, LiveBatch] = {}
        self._parts: dict[Ticket, float | None] = {}  # when the latest part of an answer came; None before the first
        self._ended: deque[LiveBatch] = deque(maxlen=BATCHES)
        self._number = self._count = 0
        self._since = now

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestProgressed):
            if event.value is not None:
                self._part(event.at, event.ticket)
        elif isinstance(event, RequestSettled):
            self._settled(event.at, event.ticket)
        elif isinstance(event, BatchScheduled):
            self._running[event.batch] = _live_batch(event.batch, event.queued)
            for ticket in event.batch.admitted:
                if ticket.request.streams:
                    self._parts.setdefault(ticket, None)
        elif isinstance(event, BatchFinished):
            self._finished(event)
        elif isinstance(event, RequestAnswered):
            if event.ticket is not None and event.wire:
                self._client(event.ticket.request.client, event.ticket.request.group).wire = event.wire
        elif isinstance(event, RequestRejected):
            request = event.request
            self._lost(event.at, request.client, request.group, event.error)

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """The figures since the last snapshot. now: on the clock of the events."""
        passed = max(now - self._since, 1e-9)
        for batch in self._running.values():
            self._group(batch.group).busy += max(0.0, now - max(batch.at, self._since))
        groups = [_group(name, found, passed, now) for name, found in self._groups.items()]
        newest = [(name, self._clients[name]) for name in list(reversed(self._clients))[:CLIENTS]]
        batches, left_out = list(self._ended), self._count - len(self._ended)
        self._number += 1
        self._since, self._count = now, 0
        self._ended.clear()
        return LiveSnapshot(
            at=now,
            number=self._number,
            batches=batches,
            running=list(self._running.values()),
            left_out=left_out,
            groups=groups,
            clients=sorted((_client(name, found, now) for name, found in newest), key=attrgetter("name")),
            clients_known=len(self._clients),
            server=server,
        )

    # -- events --------------------------------------------------------------------------------------------------------

    def _settled(self, now: float, ticket: Ticket) -> None:
        request, outcome = ticket.request, ticket.outcome
        if ticket in self._parts and isinstance(outcome, Done):
            self._part(now, ticket)
        self._parts.pop(ticket, None)
        if not isinstance(outcome, Done):
            self._lost(now, request.client, request.group, outcome.error)
            return
        client, group = self._client(request.client, request.group), self._group(request.group)
        seconds = now - ticket.arrived
        for figures in (client, group):
            figures.latencies.append(seconds)
            figures.rate.arrive(now)
        client.answers += 1
        client.at = now
        group.requests += 1
        group.outcomes["ok"] += 1

    def _part(self, now: float, ticket: Ticket) -> None:
        """A part of an answer: a token."""
        group, before = self._group(ticket.request.group), self._parts.get(ticket, now)
        group.tokens.arrive(now)
        if before is None:
            group.firsts.append(now - ticket.arrived)
        elif before < now:
            group.gaps.append(now - before)
        self._parts[ticket] = now

    def _lost(self, now: float, client: Hashable, group: str, error: BaseException) -> None:
        found, figures = self._client(client, group), self._group(group)
        found.lost += 1
        found.why = getattr(error, "code", "failed")
        found.at = found.at or now
        figures.outcomes[getattr(error, "outcome", "failed")] += 1

    def _finished(self, event: BatchFinished) -> None:
        batch, elapsed = event.batch, event.elapsed
        ended = self._running.pop(batch, None) or _live_batch(batch, 0)
        ended.took, ended.failed = _us(elapsed), event.crashed or event.apart
        self._ended.append(ended)
        self._count += 1
        group = self._group(batch.group)
        group.busy += max(0.0, min(elapsed, event.at - self._since))  # the rest is in the snapshots before
        group.batches += 1
        if batch.predicted > 0.0 and elapsed > 0.0 and not ended.failed:
            group.predicted += batch.predicted
            group.measured += elapsed

    def _client(self, client: Hashable, group: str) -> _ClientFigures:
        if client == "":  # a request without a client, such as a shadow's, counts for its group only
            return _ClientFigures(group)
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = _ClientFigures(group)
            if len(self._clients) > REMEMBERED:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(client)
            found.group = group
        return found

    def _group(self, name: str) -> _GroupFigures:
        return self._groups.get(name) or self._groups.setdefault(name, _GroupFigures())


def _live_batch(batch: Batch, queued: int) -> LiveBatch:
    admitted, at = set(batch.admitted), batch.scheduled_at
    members = [
        LiveMember(_name(t.request.client), units, _us(at - t.arrived), t in admitted)
        for t, units in list(batch.grants.items())[:MEMBERS]
    ]
    return LiveBatch(
        batch.id, batch.group, batch.stage, batch.cause.value, _us(at), _us(batch.predicted), batch.cost,
        len(batch), queued, batch.short_of, members,
    )  # fmt: skip


def _group(name: str, found: _GroupFigures, passed: float, now: float) -> LiveGroup:
    error = found.predicted / found.measured if found.measured else None
    p50, p95, p99 = _percentiles(found.latencies, 0.5, 0.95, 0.99)
    parts = [*_percentiles(found.firsts, 0.5, 0.99), *_percentiles(found.gaps, 0.5, 0.99)]
    group = LiveGroup(
        name, found.busy / passed, found.batches, found.requests, found.rate.value(now), p50, p95, p99, error,
        dict(found.outcomes), found.tokens.value(now), *parts,
    )  # fmt: skip
    found.busy, found.batches, found.predicted, found.measured = 0.0, 0, 0.0, 0.0
    return group


def _percentiles(values: Iterable[float], *shares: float) -> list[Any]:
    """The percentiles; each None without values."""
    ranked = sorted(values)
    return [percentile(ranked, share) if ranked else None for share in shares]


def _client(name: Hashable, found: _ClientFigures, now: float) -> LiveClient:
    (p95,) = _percentiles(found.latencies, 0.95)
    age, rate = now - found.at, found.rate.value(now)
    return LiveClient(_name(name), found.group, found.wire, rate, age, found.answers, p95, found.lost, found.why)


def _name(client: Hashable) -> str:
    return client_label(client_text(client), NAME)


def _us(seconds: float) -> float:
    """Seconds rounded to microseconds: half of the text in JSON."""
    return round(seconds, 6)


# -- processes ---------------------------------------------------------------------------------------------------------


class ServerLives(Protocol):
    """restarts: of the server. last_exit: how the previous process ended."""

    @property
    def restarts(self) -> int: ...
    @property
    def last_exit(self) -> str | None: ...


class LiveProcess(msgspec.Struct):
    """A process of a server.

    state: ready, or why it cannot answer. restarts: how often it was restarted. memory: resident bytes, None if
    unknown. running, waiting: requests that it computes, and that wait for it; None if other processes compute. why:
    how the previous process ended, or why it is not ready.
    """

    name: str
    pid: int | None
    state: str
    restarts: int
    memory: int | None
    running: int | None
    waiting: int | None
    why: str


def live_process(
    name: str, pid: int | None, state: str, restarts: int, running: int | None, waiting: int | None, why: str = ""
) -> LiveProcess:
    """A process with its memory now. why: cut to 200 characters."""
    memory = None
    if pid is not None:
        with suppress(OSError, ValueError, IndexError):  # no /proc
            memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return LiveProcess(name, pid, state, restarts, memory, running, waiting, why[:200])


def own_process(
    state: str, lives: ServerLives | None, running: int | None, waiting: int | None, why: str = ""
) -> LiveProcess:
    """This process, the server. lives: from its supervisor, if there is one."""
    restarts, last_exit = (lives.restarts, lives.last_exit) if lives is not None else (0, None)
    return live_process("server", os.getpid(), state, restarts, running, waiting, why or last_exit or "")


class OnDemandLive:
    """The fold of a process whose snapshots another process asks for. It is a sink from the first snapshot until none
    was taken for `UNSEEN` seconds.

    add, remove: make it a sink of the process's events, and end that. server: figures of the process itself, called
    before each snapshot, when it may deliver events. Everything happens on the loop."""

    def __init__(
        self, add: Callable[[Live], None], remove: Callable[[Live], None], server: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._add, self._remove, self._server = add, remove, server
        self._live: Live | None = None
        self._lapse: asyncio.TimerHandle | None = None

    def snapshot(self) -> LiveSnapshot:
        """Everything since the last one."""
        self.close()
        if self._live is None:
            self._live = Live(time.monotonic())
            self._add(self._live)
        self._lapse = asyncio.get_running_loop().call_later(UNSEEN, self._end, self._live)
        figures = self._server()
        return self._live.snapshot(time.monotonic(), figures)

    def close(self) -> None:
        """Stop the timer."""
        if self._lapse is not None:
            self._lapse.cancel()

    def _end(self, live: Live) -> None:
        self._remove(live)
        self._live = None


# -- several processes as one ------------------------------------------------------------------------------------------


class LiveParts:
    """The snapshots of several processes, merged into one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of processes, in order of appearance
        self.newest: dict[str, LiveSnapshot] = {}
        self._new: dict[str, LiveSnapshot] = {}  # not shown yet
        self._number = 0

    def take(self, name: str, snapshot: LiveSnapshot) -> None:
        """Take a snapshot of that process."""
        self._numbers.setdefault(name, len(self._numbers))
        before = self._new.get(name)
        if before is not None:  # two snapshots since the last merge
            batches = [*before.batches, *snapshot.batches]
            snapshot.batches = batches[-BATCHES:]
            snapshot.left_out += before.left_out + max(0, len(batches) - BATCHES)
        self._new[name] = self.newest[name] = snapshot

    def forget(self, name: str) -> None:
        """Drop the process: it has ended, or sends no snapshots now."""
        self.newest.pop(name, None)

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """Everything since the last one. server: figures of the server as a whole."""
        self._number += 1
        new, self._new = self._new, {}
        all_of = list(self.newest.values())
        batches = [batch for name, snapshot in new.items() for batch in self._own(name, snapshot.batches)]
        running = [batch for name, snapshot in self.newest.items() for batch in self._own(name, snapshot.running)]
        batches.sort(key=lambda batch: batch.at)
        left_out = sum(snapshot.left_out for snapshot in new.values()) + max(0, len(batches) - BATCHES)
        shown = [client for snapshot in all_of for client in snapshot.clients]
        groups: dict[str, list[LiveGroup]] = {}
        for group in chain.from_iterable(snapshot.groups for snapshot in all_of):
            groups.setdefault(group.name, []).append(group)
        clients = _merged_clients(shown)
        return LiveSnapshot(
            at=now,
            number=self._number,
            batches=batches[-BATCHES:],
            running=running,
            left_out=left_out,
            groups=[_merged_group(several, len(all_of)) for several in groups.values()],
            clients=sorted(clients[:CLIENTS], key=lambda client: client.name),
            clients_known=sum(snapshot.clients_known for snapshot in all_of) - (len(shown) - len(clients)),
            server=server,
        )

    def _own(self, name: str, batches: list[LiveBatch]) -> Iterator[LiveBatch]:
        """Batches of a process, with ids that are unique over all processes."""
        for batch in batches:
            yield msgspec.structs.replace(batch, id=batch.id * APART + self._numbers[name], process=name)


def added(one: Any, other: Any) -> Any:
    """One figure from two of queues: numbers are added; of anything else the first one is taken."""
    if isinstance(one, dict) and isinstance(other, dict):
        return other | {key: added(value, other[key]) if key in other else value for key, value in one.items()}
    number = isinstance(one, int | float) and isinstance(other, int | float) and not isinstance(one, bool)
    return one + other if number else one


def _merged_clients(found: Iterable[LiveClient]) -> list[LiveClient]:
    """One client for each name; its requests may be spread over processes. Rates and counts are added, p95 is the
    worst, and the rest is from the process that answered last."""
    by_name: dict[str, LiveClient] = {}
    for client in found:
        if (before := by_name.get(client.name)) is not None:
            newer, older = sorted((before, client), key=attrgetter("age"))
            summed = {name: getattr(newer, name) + getattr(older, name) for name in ("rate", "answers", "lost")}
            p95, why = worst((newer, older), "p95"), newer.why or older.why
            client = msgspec.structs.replace(newer, **summed, p95=p95, why=why)
        by_name[client.name] = client
    return sorted(by_name.values(), key=attrgetter("age"))


def _merged_group(groups: list[LiveGroup], replicas: int) -> LiveGroup:
    """One group of several replicas. Rates and counts are added, busy is the mean over the devices, p50 the mean of the
    replicas weighted by their answers, p95 and p99 those of the slowest replica."""
    outcomes: Counter[str] = Counter()
    for group in groups:
        outcomes.update(group.outcomes)

    def mean(name: str, weight: str) -> float | None:
        known = [(getattr(g, name), getattr(g, weight)) for g in groups if getattr(g, name) is not None]
        total = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / total if total else None

    figures: dict[str, Any] = {name: sum(getattr(g, name) for g in groups) for name in _SUMMED}
    figures |= {name: worst(groups, name) for name in ("p95", "p99", "first_p99", "gap_p99")}
    figures |= {name: mean(name, "requests") for name in ("p50", "first_p50", "gap_p50")}
    figures |= {"error": mean("error", "batches"), "busy": sum(g.busy for g in groups) / replicas}
    return msgspec.structs.replace(groups[0], **figures, outcomes=dict(outcomes))


_SUMMED = ("batches", "requests", "rate", "tokens")


def worst(figures: Iterable[Any], name: str) -> float | None:
    """The largest known figure of this name."""
    return max((value for one in figures if (value := getattr(one, name)) is not None), default=None)
