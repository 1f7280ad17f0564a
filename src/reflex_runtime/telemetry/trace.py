"""The batch trace: one JSON line per batch, because a scheduler rarely crashes but quietly makes bad batches, and a bad
batch cannot be searched for, only looked at.

`TraceWriter` is a sink that writes the file, `read_trace` reads it, `reflex trace` shows it. One format for robots,
feeds and tokens: a batch is a map from request to units, whatever the units are. `docs/trace.md` describes every key.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestProgressed, RequestSettled
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
from reflex_runtime.telemetry.lines import LineFile, LineReader, LineWriter, text, utc
from reflex_runtime.telemetry.progress import ProgressFold
from reflex_runtime.version import __version__

SCHEMA_VERSION = 1


class TraceError(ReflexError):
    """A trace cannot be read. The message names the file and, where there is one, the line."""

    code, http_status = "trace_unreadable", 422


# -- the lines ---------------------------------------------------------------------------------------------------------


class GroupInfo(msgspec.Struct, frozen=True):
    """What the numbers of a group mean.

    unit: of cost and budget (`seconds`, `tokens`, `requests`). budget: ceiling on a batch's cost, None without one.
    max_size: most members.
    """

    unit: str
    budget: float | None
    max_size: int


class Header(msgspec.Struct, frozen=True, tag_field="kind", tag="header"):
    """First line. started_at: UTC wall clock at `origin`, the monotonic second from which times are counted."""

    schema_version: int
    started_at: str
    origin: float
    reflex_version: str
    python_version: str
    groups: dict[str, GroupInfo]


class Member(msgspec.Struct, omit_defaults=True):
    """One request in one batch. What is None is not written.

    seq: order of arrival at the scheduler, unique in the file; id and client are the caller's words and need not be.
    units: what this batch granted it. asked: what it wanted when it arrived.
    state: `waiting` when it entered from the queue with this batch, `resident` when it stayed from an earlier one.
    age: seconds from its arrival until the batch was scheduled; for one that entered, the time it waited.
    limit: seconds it was given to be answered in, from its arrival; None without a deadline.
    outcome: `done`, `more` (it stays for another step), `apart` (the call failed as a whole, and
        it runs again with fewer), or how it ended: `failed`, `cancelled`, …; None if unknown.
    computed, known, cached: of tokens only, before this batch: how many were in the cache, how many there were (prompt
    and outputs), and how many the prefix cache had on entering with it.
    """

    seq: int
    id: str
    client: str
    units: float
    asked: float
    state: str
    age: float
    limit: float | None = None
    outcome: str | None = None
    computed: float | None = None
    known: float | None = None
    cached: float | None = None


class TracedBatch(msgspec.Struct, tag_field="kind", tag="batch"):
    """One batch, written when it finished. Seconds throughout; scheduled_at counts from the header's origin.

    cost, unit: the estimate the budget is compared with, None when it was not finite. expected: predicted seconds of
    this call, None when unknown. queued: how many still waited when it left, None if unknown. crashed: the
    processor is to blame (`BatchFinished`). left: seqs of residents gone since the group's last batch (preempted,
    cancelled, expired). short_of: what kept the others out: `budget`, `places`, `memory`, `share`, `room`, `apart`, or
    empty.
    """

    id: int
    group: str
    partition: str
    stage: str
    reason: str
    cause: str
    scheduled_at: float
    elapsed: float
    expected: float | None
    cost: float | None
    unit: str | None
    size: int
    queued: int | None
    crashed: bool
    left: list[int]
    notes: dict[str, Any]
    members: list[Member]
    short_of: str = ""

    @property
    def entered(self) -> list[Member]:
        """The members that came from the queue with this batch."""
        return [m for m in self.members if m.state == "waiting"]


class Divergence(msgspec.Struct, frozen=True, tag_field="kind", tag="divergence"):
    """How far a shadow's chunk was from the one `slot` answered the request with, in the robot's units.

    mean, largest: of the absolute differences. per_joint, per_step: means.
    """

    request_id: str
    slot: str
    mean: float
    largest: float
    per_joint: tuple[float, ...]
    per_step: tuple[float, ...]


class Footer(msgspec.Struct, frozen=True, tag_field="kind", tag="footer"):
    """Last line of a trace that was closed. dropped: batches that ran and are not in the file."""

    ended_at: str
    batches: int
    dropped: int


# -- writing -----------------------------------------------------------------------------------------------------------


class TraceWriter:
    """A sink that writes every batch of one scheduler to `path` when it finishes; `.gz` compresses.

    A file that is there is kept as PATH.1, at the start and each time the file is turned (`lines.turn_all`).

    groups: the scheduler's groups, so that the file says what its numbers mean. notes: asked for further notes about a
    batch when it finishes. capacity: most batches waiting to be
    written; beyond it, and after a disk error, they are dropped and counted; serving is never held up. clock: the
    driver's.

    The sink copies values and returns; a thread of its own does everything else. A disk error ends the trace, is kept
    in `error`, and reaches nobody else. Raises ConfigError at once when the file cannot be opened.
    """

    events = frozenset({BatchScheduled, BatchFinished, RequestProgressed, RequestSettled})

    def __init__(
        self,
        path: str | Path,
        groups: Iterable[GroupConfig] = (),
        capacity: int = 1024,
        clock: Callable[[], float] = time.monotonic,
        notes: Callable[[BatchFinished], Mapping[str, Any]] | None = None,
    ) -> None:
        if not capacity >= 1:
            raise ConfigError(f"TraceWriter.capacity={capacity!r}: must be >= 1 batches")
        self.path = Path(path)
        self._notes = notes
        self._queued: dict[int, int] = {}  # batch in flight → how many waited behind it
        self._open: TracedBatch | None = None  # finished; the outcomes of its members are the next events
        self._next = 0  # the member whose outcome comes next
        self._progress = ProgressFold()
        self._origin = clock()
        self._groups = {config.name: _info(config) for config in groups}
        self._header = Header(
            SCHEMA_VERSION, utc(), self._origin, __version__, platform.python_version(), self._groups
        )
        try:
            self._opened: LineFile | None = self._open_file()
        except OSError as error:
            raise ConfigError(f"TraceWriter.path={str(path)!r}: cannot be written: {error.strerror}") from error
        self._written = self._dropped_before = 0  # in this file; before it
        self._lines = LineWriter("reflex-trace", self._start, self._encode, self._finish, capacity, eager=True)

    @property
    def error(self) -> OSError | None:
        """The disk error that ended the trace."""
        return self._lines.error

    @property
    def dropped(self) -> int:
        """Batches that are not in the file."""
        return self._lines.dropped

    def __call__(self, event: Event) -> None:
        """Take an event. Costs a copy of a few values per batch and member; never waits."""
        if isinstance(event, (RequestSettled, RequestProgressed)):
            if self._open is not None:
                self._ended(self._open, event)
            if self._progress:
                self._follow(event)
        elif isinstance(event, BatchScheduled):
            self._queued[event.batch.id] = event.queued
        elif isinstance(event, BatchFinished):
            self._finished(event)

    def diverged(self, found: Divergence) -> None:
        """A line about a shadow's answer, which is known only after its batch is written."""
        self._lines.put(found)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is queued and the footer. Returns whether all of it reached the file within `timeout` seconds."""
        self._flush()
        return self._lines.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _finished(self, event: BatchFinished) -> None:
        self._flush()
        batch = event.batch
        queued = self._queued.pop(batch.id, None)
        info = self._groups.get(batch.group)
        tokens = self._progress.ran(batch, event.apart) if info is not None and info.unit == "tokens" else None
        if not self._lines.takes():
            return
        at = batch.scheduled_at
        entered = set(batch.admitted)
        members = []
        for ticket, units in batch.grants.items():
            asked = ticket.request
            state = "waiting" if ticket in entered else "resident"
            age = at - ticket.arrived
            client, limit = str(asked.client), asked.time_limit
            members.append(Member(ticket.seq, asked.id, client, units, asked.wants, state, age, limit))
        if tokens is not None:
            for member, before in zip(members, tokens, strict=True):
                member.computed, member.known, member.cached = before
        self._open = TracedBatch(
            id=batch.id,
            group=batch.group,
            partition=str(batch.partition),
            stage=batch.stage,
            reason=batch.reason,
            cause=batch.cause,
            scheduled_at=at - self._origin,
            elapsed=event.elapsed,
            expected=batch.expected if batch.expected > 0.0 else None,
            cost=batch.cost,
            unit=info.unit if info is not None else None,
            size=len(members),
            queued=queued,
            crashed=event.crashed,
            left=[ticket.seq for ticket in batch.left],
            notes=dict(batch.notes) if self._notes is None else {**batch.notes, **self._notes(event)},
            members=members,
            short_of=batch.short_of,
        )
        self._next = 0
        if event.apart:
            for member in members:
                member.outcome = "apart"
            self._flush()

    def _ended(self, open_batch: TracedBatch, event: RequestSettled | RequestProgressed) -> None:
        """A member's outcome. They follow a finished batch in the order of its grants; what stands between them (a
        request that leaves at the boundary after its step) is not the outcome of a batch."""
        member = open_batch.members[self._next]
        if member.seq == event.ticket.seq:
            member.outcome = "more" if isinstance(event, RequestProgressed) else _ending(event.ticket)
            self._next += 1
            if self._next == len(open_batch.members):
                self._flush()

    def _follow(self, event: RequestSettled | RequestProgressed) -> None:
        if isinstance(event, RequestSettled):
            self._progress.ended(event.ticket.seq)
        elif event.value is not None:
            self._progress.answered(event.ticket.seq)

    def _flush(self) -> None:
        if self._open is not None:
            self._lines.put(self._open)
            self._open = None

    # -- on the writer's thread ----------------------------------------------------------------------------------------

    def _open_file(self) -> LineFile:
        return LineFile(self.path, self.path.suffix == ".gz")

    def _start(self) -> tuple[LineFile, bytes]:
        file, self._opened = self._opened or self._open_file(), None
        return file, _line(self._header)

    def _encode(self, item: TracedBatch | Divergence) -> bytes:
        if isinstance(item, Divergence):
            return _line(item)
        self._written += 1
        return _line(_tidy(item))

    def _finish(self) -> bytes:
        dropped = self.dropped
        footer = Footer(utc(), self._written, dropped - self._dropped_before)
        self._written, self._dropped_before = 0, dropped
        return _line(footer)


def _info(config: GroupConfig) -> GroupInfo:
    budget = config.flush.max_batch_cost
    return GroupInfo(config.cost().unit, budget if budget < inf else None, config.flush.max_batch_size)


def _ending(ticket: Ticket) -> str:
    if isinstance(ticket.outcome, Done):
        return "done"
    error = ticket.outcome.error
    return error.outcome if isinstance(error, ReflexError) else "failed"


def _tidy(batch: TracedBatch) -> TracedBatch:
    """Microseconds are enough. What is not finite is written as null."""
    batch.scheduled_at = round(batch.scheduled_at, 6)
    batch.elapsed = round(batch.elapsed, 6)
    if batch.cost is not None:
        batch.cost = round(batch.cost, 6)
    if batch.expected is not None:
        batch.expected = round(batch.expected, 6)
    for member in batch.members:
        member.age = round(member.age, 6)
        if member.limit is not None:
            member.limit = round(member.limit, 6)
    return batch


def _line(item: Header | TracedBatch | Divergence | Footer) -> bytes:
    try:
        return msgspec.json.encode(item, enc_hook=str) + b"\n"
    except Exception as error:  # callers choose ids, processors write notes: neither may end the trace
        assert isinstance(item, TracedBatch)
        item.notes = {"unwritable": text(f"{type(error).__name__}: {error}")}
        item.partition = text(item.partition)
        for member in item.members:
            member.id, member.client = text(member.id), text(member.client)
        return msgspec.json.encode(item, enc_hook=str) + b"\n"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as read. footer: None when the writer was not closed. torn: the last line was cut off and left out."""

    path: Path
    header: Header
    batches: list[TracedBatch]
    footer: Footer | None
    torn: bool
    divergences: Sequence[Divergence] = ()

    @property
    def groups(self) -> Mapping[str, GroupInfo]:
        """What each group's numbers mean; empty when the writer was not told."""
        return self.header.groups


def read_trace(path: str | Path) -> Trace:
    """Read a trace; `.gz` is decompressed.

    A missing footer, blank lines and a torn last line are what a crash leaves behind, and are accepted. Anything else
    that is not a trace (a torn line with others after it, an empty file, an unknown version) raises TraceError.
    """
    path = Path(path)
    decode = msgspec.json.Decoder(Header | TracedBatch | Divergence | Footer).decode
    reader: LineReader[Header, TracedBatch | Divergence] = LineReader(
        path, Header, Footer, SCHEMA_VERSION, decode, "a batch trace", partial(_bad, path)
    )
    batches: list[TracedBatch] = []
    divergences: list[Divergence] = []
    for line in reader:
        if isinstance(line, Divergence):
            divergences.append(line)
        else:
            batches.append(line)
    return Trace(path, reader.header, batches, reader.footer, reader.torn, divergences)


def _bad(path: Path, what: str, line: int | None) -> TraceError:
    if line is None:
        return TraceError(f"{path}: {what}", path=str(path))
    return TraceError(f"{path}, line {line}: {what}", path=str(path), line=line)
