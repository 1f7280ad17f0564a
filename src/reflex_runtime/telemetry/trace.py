"""The batch trace: one JSON line per batch, because a scheduler rarely crashes but quietly makes bad batches, and a bad
batch cannot be searched for, only looked at.

`TraceWriter` is a sink that writes the file, `read_trace` reads it, `reflex trace` shows it. One format for robots,
feeds and tokens: a batch is a map from request to units, whatever the units are. `docs/trace.md` describes every key.
"""

from __future__ import annotations

import gzip
import platform
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Literal, Self, cast

import msgspec

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestProgressed, RequestSettled
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
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


class Member(msgspec.Struct):
    """One request in one batch.

    seq: order of arrival at the scheduler, unique in the file; id and client are the caller's words and need not be.
    units: what this batch granted it. asked: what it wanted when it arrived.
    state: `waiting` when it entered from the queue with this batch, `resident` when it stayed from an earlier one.
    age: seconds from its arrival until the batch was scheduled; for one that entered, the time it waited.
    outcome: `done`, `more` (it stays for another step), or how it ended: `failed`, `cancelled`, …; None if unknown.
    """

    seq: int
    id: str
    client: str
    units: float
    asked: float
    state: str
    age: float
    outcome: str | None = None


class TracedBatch(msgspec.Struct, tag_field="kind", tag="batch"):
    """One batch, written when it finished. Seconds throughout; scheduled_at counts from the header's origin.

    cost, unit: the estimate the budget is compared with, None when it was not finite. expected: predicted seconds of
    this call, None when unknown. queued: how many still waited when it left, None if unknown. crashed: no member
    succeeded and the processor is to blame. left: seqs of residents gone since the group's last batch (preempted,
    cancelled, expired).
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

    @property
    def entered(self) -> list[Member]:
        """The members that came from the queue with this batch."""
        return [m for m in self.members if m.state == "waiting"]


class Footer(msgspec.Struct, frozen=True, tag_field="kind", tag="footer"):
    """Last line of a trace that was closed. dropped: batches that ran and are not in the file."""

    ended_at: str
    batches: int
    dropped: int


# -- writing -----------------------------------------------------------------------------------------------------------


class TraceWriter:
    """A sink that writes every batch of one scheduler to `path` when it finishes; `.gz` compresses.

    groups: the scheduler's groups, so that the file says what its numbers mean. capacity: most batches waiting to be
    written; beyond it they are dropped and counted, serving is never held up. clock: the driver's.

    The sink copies values and returns; a thread of its own does everything else. A disk error ends the trace, is kept
    in `error`, and reaches nobody else. Raises ConfigError at once when the file cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        groups: Iterable[GroupConfig] = (),
        capacity: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not capacity >= 1:
            raise ConfigError(f"TraceWriter.capacity={capacity!r}: must be >= 1 batches")
        self.path = Path(path)
        self.error: OSError | None = None
        self.dropped = 0  # batches that found the queue full
        self._capacity = capacity
        self._queue: SimpleQueue[TracedBatch | None] = SimpleQueue()
        self._queued: dict[int, int] = {}  # batch in flight → how many waited behind it
        self._open: TracedBatch | None = None  # finished; the outcomes of its members are the next events
        self._next = 0  # the member whose outcome comes next
        self._closed = False
        self._origin = clock()
        self._groups = {config.name: _info(config) for config in groups}
        self._header = Header(
            SCHEMA_VERSION, _utc(), self._origin, __version__, platform.python_version(), self._groups
        )
        try:
            file = _open(self.path, "wb")
        except OSError as error:
            raise ConfigError(f"TraceWriter.path={str(path)!r}: cannot be written: {error.strerror}") from error
        self._thread = threading.Thread(target=self._main, args=(file,), name="reflex-trace", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Take an event. Costs a copy of a few values per batch and member; never waits."""
        if isinstance(event, (RequestSettled, RequestProgressed)):
            if self._open is not None:
                self._ended(self._open, event)
        elif isinstance(event, BatchScheduled):
            self._queued[event.batch.id] = event.queued
        elif isinstance(event, BatchFinished):
            self._finished(event)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is queued and the footer. Returns whether all of it reached the file within `timeout` seconds."""
        if not self._closed:
            self._flush()
            self._closed = True
            self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive() and self.error is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _finished(self, event: BatchFinished) -> None:
        self._flush()
        batch = event.batch
        queued = self._queued.pop(batch.id, None)
        if self._closed or self.error is not None:
            return
        if self._queue.qsize() >= self._capacity:
            self.dropped += 1
            return
        at = batch.scheduled_at
        entered = set(batch.admitted)
        members = []
        for ticket, units in batch.grants.items():
            asked = ticket.request
            state = "waiting" if ticket in entered else "resident"
            age = at - ticket.arrived
            members.append(Member(ticket.seq, asked.id, str(asked.client), units, asked.wants, state, age))
        info = self._groups.get(batch.group)
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
            notes=dict(batch.notes),
            members=members,
        )
        self._next = 0

    def _ended(self, open_batch: TracedBatch, event: RequestSettled | RequestProgressed) -> None:
        """A member's outcome. They follow a finished batch in the order of its grants; what stands between them (a
        request that leaves at the boundary after its step) is not the outcome of a batch."""
        member = open_batch.members[self._next]
        if member.seq == event.ticket.seq:
            member.outcome = "more" if isinstance(event, RequestProgressed) else _ending(event.ticket)
            self._next += 1
            if self._next == len(open_batch.members):
                self._flush()

    def _flush(self) -> None:
        if self._open is not None:
            self._queue.put(self._open)
            self._open = None

    # -- on the writer's thread ----------------------------------------------------------------------------------------

    def _main(self, file: IO[bytes]) -> None:
        written = 0
        try:
            with file:
                file.write(_line(self._header))
                self._settle(file)
                while (batch := self._queue.get()) is not None:
                    file.write(_line(_tidy(batch)))
                    written += 1
                    self._settle(file)
                file.write(_line(Footer(_utc(), written, self.dropped)))
        except OSError as error:
            self.error = error
            while not self._queue.empty():
                self._queue.get()

    def _settle(self, file: IO[bytes]) -> None:
        """Let readers see what was written, once nothing else waits. Not when compressing: each flush costs bytes."""
        if self._queue.empty() and self.path.suffix != ".gz":
            file.flush()


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
    return batch


def _line(item: Header | TracedBatch | Footer) -> bytes:
    try:
        return msgspec.json.encode(item, enc_hook=str) + b"\n"
    except Exception as error:  # callers choose ids, processors write notes: neither may end the trace
        assert isinstance(item, TracedBatch)
        item.notes = {"unwritable": _text(f"{type(error).__name__}: {error}")}
        item.partition = _text(item.partition)
        for member in item.members:
            member.id, member.client = _text(member.id), _text(member.client)
        return msgspec.json.encode(item, enc_hook=str) + b"\n"


def _text(value: str) -> str:
    """Text that UTF-8 can carry."""
    return value.encode("utf-8", "backslashreplace").decode()


def _open(path: Path, mode: Literal["rb", "wb"]) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, mode)) if path.suffix == ".gz" else path.open(mode)


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as read. footer: None when the writer was not closed. torn: the last line was cut off and left out."""

    path: Path
    header: Header
    batches: list[TracedBatch]
    footer: Footer | None
    torn: bool

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
    header: Header | None = None
    batches: list[TracedBatch] = []
    footer: Footer | None = None
    torn: int | None = None
    decoder = msgspec.json.Decoder(Header | TracedBatch | Footer)
    for number, line, whole in _lines(path):
        if not line.strip():
            continue
        if torn is not None:
            raise _bad(path, torn, "not a whole line, and others follow it")
        if footer is not None:
            raise _bad(path, number, "comes after the footer")
        try:
            if header is None:
                header = _read_header(line)
                continue
            item = decoder.decode(line)
        except msgspec.ValidationError as error:
            raise _bad(path, number, f"not a line of a batch trace: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if whole and header is None:
                raise _bad(path, number, f"not JSON: {error}") from error
            torn = number
            continue
        if isinstance(item, Header):
            raise _bad(path, number, "a second header")
        if isinstance(item, Footer):
            footer = item
        else:
            batches.append(item)
    if header is None:
        raise _bad(path, torn or 1, "empty, not even a header" if torn is None else "no whole header")
    return Trace(path, header, batches, footer, torn is not None)


class _AnyHeader(msgspec.Struct):
    kind: str = ""
    schema_version: int = 0


def _read_header(line: bytes) -> Header:
    """The header, its version first: another version may have other keys."""
    found = msgspec.json.decode(line, type=_AnyHeader)
    if found.kind != "header":
        raise msgspec.ValidationError(f"the first line is a {found.kind!r}, not a header")
    if found.schema_version != SCHEMA_VERSION:
        raise msgspec.ValidationError(f"schema_version {found.schema_version}; this release reads {SCHEMA_VERSION}")
    return msgspec.json.decode(line, type=Header)


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(number from 1, line, whether it ended in a newline). A compressed file that was cut off just ends."""
    number = 0
    try:
        with _open(path, "rb") as file:
            for line in file:
                number += 1
                yield number, line, line.endswith(b"\n")
    except EOFError:
        return
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _bad(path, number + 1, f"not readable as gzip: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}", path=str(path)) from error


def _bad(path: Path, line: int, what: str) -> TraceError:
    return TraceError(f"{path}, line {line}: {what}", path=str(path), line=line)
