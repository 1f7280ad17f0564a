"""Writes journals: a sink that copies values and references, and a thread that does everything else.

`--trace FILE` is one file without payloads, opened at once; so is what GET /diagnostics/journal sends. `--record DIR`
is a `Recording`: files with payloads, opened at the first request. All are flushed several times a second, so that a
killed process loses little. A disk error ends the journal, is kept in `error`, and never touches serving.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec

from reflex_runtime.core.batch import Batch, Failed
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.events import (
    BatchFinished,
    BatchScheduled,
    Event,
    RequestAnswered,
    RequestProgressed,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
from reflex_runtime.observe.files import LineFile, LineTarget, LineWriter, refused, text, utc
from reflex_runtime.observe.journal import (
    IMAGE_MODES,
    KINDS,
    BatchLine,
    EndedLine,
    Footer,
    GroupInfo,
    Header,
    ImageMode,
    Member,
    WarmUpLine,
)
from reflex_runtime.observe.request_record import (
    QueuedRecord,
    RequestRecord,
    add_payload,
    request_line,
    scheduled,
)
from reflex_runtime.version import __version__

CAPACITY = 4096  # lines that wait to be written; a batch of 256 members takes some 30 kB
EARLY = 1000  # notes kept until the first request
KEPT = 4096  # batches whose newcomers are remembered until their requests are answered
IMAGE_BYTES = 256 << 20  # of images that may wait to be written; beyond it requests are dropped


@dataclass(frozen=True, slots=True)
class Recording:
    """Where a journal with payloads goes: DIRECTORY/<YYYYMMDD>-<HHMMSS>-<model_hash>-<session>.jsonl.gz, in UTC.

    images: `full` keeps them, so that actions can be replayed, `hash_only` their SHA-256, `none` neither. A file with
    images is for its owner alone. max_bytes: of a file, after which another part is begun; 0 is no bound.
    """

    directory: str | Path
    gzip: bool = True
    images: ImageMode = "hash_only"
    max_bytes: int = 0

    def __post_init__(self) -> None:
        if self.images not in IMAGE_MODES:
            raise ConfigError(f"Recording.images={self.images!r}: must be one of {', '.join(IMAGE_MODES)}")

    def make(self) -> None:
        """Make the directory. ConfigError when it cannot be made."""
        with refused(f"Recording.directory={str(self.directory)!r}", "be made"):
            Path(self.directory).mkdir(parents=True, exist_ok=True)

    def file(self, header: Header, now: float) -> LineFile:
        """The file of a part."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        part = f"-{header.part}" if header.part > 1 else ""
        suffix = ".jsonl.gz" if self.gzip else ".jsonl"
        path = Path(self.directory) / f"{stamp}-{header.model_hash}-{header.session_id}{part}{suffix}"
        return LineFile(path, self.gzip, private=self.images == "full")


_Item = BatchLine | EndedLine | QueuedRecord | bytes


class JournalWriter:
    """A sink that writes what one scheduler did, and what its server answered.

    to: a file, without payloads (`.gz` compresses; a file that is there is kept as PATH.1), or a `Recording`.
        ConfigError at once when it cannot be written. Or a `LineTarget`, for one journal without payloads.
    groups: the scheduler's, so that the file says what its numbers mean. header: further fields of `Header`.
    capacity: most lines waiting; beyond it, and beyond `IMAGE_BYTES` of images, they are dropped and counted.
    clock: the scheduler's. wall: seconds since the epoch. notes: asked for further notes about a batch that finished.

    path: of the file, None before a recording's first request. recorded: requests written.
    """

    events = frozenset(
        {BatchScheduled, BatchFinished, RequestProgressed, RequestSettled, RequestRejected, RequestAnswered}
    )

    def __init__(
        self,
        to: str | Path | Recording | LineTarget,
        groups: Iterable[GroupConfig] = (),
        capacity: int = CAPACITY,
        *,
        header: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        notes: Callable[[BatchFinished], Mapping[str, Any]] | None = None,
    ) -> None:
        if not capacity >= 1:
            raise ConfigError(f"JournalWriter.capacity={capacity!r}: must be >= 1 lines")
        self.recorded = 0
        self._recording = to if isinstance(to, Recording) else None
        self._notes, self._wall = notes, wall
        self._origin, self._began = clock(), wall()
        self._groups = {config.name: info_of(config) for config in groups}
        self._header = dict(header or {})
        self._warm: list[bytes] = []
        self._scheduled: dict[int, tuple[int, tuple[float, ...]]] = {}  # batch in flight → queued, idle polls
        self._open: BatchLine | None = None  # finished; the outcomes of its members are the next events
        self._next = 0  # the member whose outcome comes next
        self._behind: list[bytes] = []  # notes that stand behind it, whatever the order of sinks
        self._entered: dict[int, list[str]] = {}  # batch → ids of those that entered: answers may come before its line
        self._progress = ProgressFold()
        self._early: list[bytes] | None = None  # notes from before the first request
        self._waiting_bytes = self._written_bytes = self._too_large = 0
        self._part = self._batches = self._recorded_before = self._dropped_before = 0  # the writer thread's
        self._opened: LineTarget | None = None
        if isinstance(to, Recording):
            to.make()
            self.path: Path | None = None
            self._early = []
        elif not isinstance(to, str | Path):
            self.path, self._opened = to.path, to
        else:
            self.path = Path(to)
            with refused(f"JournalWriter.to={str(to)!r}"):
                self._opened = LineFile(self.path, self.path.suffix == ".gz")
        self._lines: LineWriter[_Item] = LineWriter(
            "reflex-trace" if self._recording is None else "reflex-record",
            self._start,
            self._line,
            self._finish,
            capacity,
            eager=self._recording is None,
            limit=0 if self._recording is None else self._recording.max_bytes,
            turns=isinstance(to, str | Path | Recording),
        )

    @property
    def error(self) -> OSError | None:
        """The disk error that ended the journal."""
        return self._lines.error

    @property
    def dropped(self) -> int:
        """Lines that are not in the file because the disk could not keep up, or failed."""
        return self._lines.dropped + self._too_large

    @property
    def cpu(self) -> float:
        """Processor seconds the writer's thread has used."""
        return self._lines.cpu

    def note(self, kind: str, /, **fields: Any) -> None:
        """Write a line of another kind: `outcome` {episode_id, slot, success, reward?}, `decision` {…}, …

        fields: what JSON can carry; anything else becomes its text. `timestamp` is added. Before its first request a
        recording has no file, and notes wait for it.
        """
        if kind in KINDS:
            raise ValueError(f"JournalWriter.note: kind {kind!r} is written by the journal itself")
        line = _safe({"timestamp": utc(self._wall(), "microseconds"), **fields} | {"kind": kind})
        if self._open is not None:
            self._behind.append(line)
        elif self._early is None:
            self._lines.put(line)
        elif len(self._early) < EARLY:
            self._early.append(line)

    def warmed(self, warm: WarmUpLine) -> None:
        """What warm-up taught a slot's cost model. Called before the first request."""
        line = _encode(warm) + b"\n"
        self._warm.append(line)  # for the head of later parts
        if self._recording is None:
            self._lines.put(line)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is queued and the footer. Returns whether all of it reached the file within `timeout` seconds."""
        self._flush()
        return self._lines.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- the sink ------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """Take an event: references and a few numbers. Never waits, never raises for the disk."""
        if isinstance(event, (RequestSettled, RequestProgressed)):
            if self._open is not None:
                self._outcome(self._open, event)
            if isinstance(event, RequestSettled):
                self._progress.ended(event.ticket.seq)
                if isinstance(event.ticket.outcome, Failed):
                    self._put(EndedLine(event.ticket.seq, event.at, _ending(event.ticket)))
            elif event.value is not None:
                self._progress.answered(event.ticket.seq)
        elif isinstance(event, RequestAnswered):
            self._answered(event)
        elif isinstance(event, BatchScheduled):
            self._scheduled[event.batch.id] = event.queued, event.idle_polls
        elif isinstance(event, BatchFinished):
            self._finished(event)
        elif isinstance(event, RequestRejected):
            asked = scheduled(event.request, None, event.at)
            self._put(EndedLine(None, event.at, event.error.outcome, event.request.id, asked))

    def _finished(self, event: BatchFinished) -> None:
        self._flush()
        batch = event.batch
        queued, idle_polls = self._scheduled.pop(batch.id, (None, ()))
        info = self._groups.get(batch.group)
        tokens = self._progress.ran(batch, event.apart) if info is not None and info.unit == "tokens" else None
        if not self._lines.takes():
            return
        self._entered[batch.id] = [ticket.request.id for ticket in batch.admitted]
        if len(self._entered) > KEPT:
            del self._entered[next(iter(self._entered))]
        members = _members(batch)
        if tokens is not None:
            for member, before in zip(members, tokens, strict=True):
                member.computed, member.known, member.cached = before
        self._open = BatchLine(
            id=batch.id,
            group=batch.group,
            partition=str(batch.partition),
            stage=batch.stage,
            reason=batch.reason,
            cause=batch.cause,
            at=batch.scheduled_at,
            finished=event.at,
            elapsed=event.elapsed,
            expected=batch.expected if batch.expected > 0.0 else None,
            cost=batch.cost,
            unit=info.unit if info is not None else None,
            size=len(members),
            queued=queued,
            crashed=event.crashed,
            apart=event.apart,
            left=[ticket.seq for ticket in batch.left],
            notes=dict(batch.notes) if self._notes is None else {**batch.notes, **self._notes(event)},
            members=members,
            short_of=batch.short_of,
            looked=list(idle_polls),
        )
        self._next = 0
        if event.apart:
            for member in members:
                member.outcome = "apart"
            self._flush()

    def _outcome(self, open_batch: BatchLine, event: RequestSettled | RequestProgressed) -> None:
        """A member's outcome. They follow a finished batch in the order of its grants; what stands between them (a
        request that leaves at the boundary after its step) is not the outcome of a batch."""
        members, last = open_batch.members, self._next - 1
        if last >= 0 and members[last].guessed and members[last].seq == event.ticket.seq:
            self._next = last  # of a step with guesses several answers come
        elif self._next == len(members):
            return
        member = members[self._next]
        if member.seq == event.ticket.seq:
            member.outcome = "more" if isinstance(event, RequestProgressed) else _ending(event.ticket)
            if member.guessed and member.outcome in ("more", "done"):
                member.outputs = (member.outputs or 0) + 1
            self._next += 1
            if self._next == len(members) and not member.guessed:
                self._flush()

    def _flush(self) -> None:
        if self._open is not None:
            self._put(self._open)
            self._open = None
            for note in self._behind:
                self._lines.put(note)
            self._behind.clear()

    def _answered(self, event: RequestAnswered) -> None:
        answered, ticket = event.detail, event.ticket
        if not isinstance(answered, RequestRecord):
            return
        if self._recording is None:
            answered = copy(answered)
            answered.images, answered.state = {}, None
        size = answered.image_bytes
        if self._waiting_bytes + size - self._written_bytes > IMAGE_BYTES:
            self._too_large += 1
            return
        entered = [] if answered.batch is None else self._entered.get(answered.batch.id, [])
        schedule = None if ticket is None else scheduled(ticket.request, ticket, event.at)
        if self._put(QueuedRecord(answered, event.outcome, event.status, event.wire, entered, schedule)):
            self._waiting_bytes += size

    def _put(self, item: _Item) -> bool:
        if self._early is not None:
            early, self._early = self._early, None
            for note in early:
                self._lines.put(note)
        return self._lines.put(item)

    # -- on the writer's thread ----------------------------------------------------------------------------------------

    def _start(self) -> tuple[LineTarget, bytes]:
        self._part += 1
        header = self._head()
        file: LineTarget | None
        if self._recording is not None:
            file = self._recording.file(header, self._wall())
            self.path = file.path
        else:
            assert self.path is not None
            file, self._opened = self._opened, None
            file = file or LineFile(self.path, self.path.suffix == ".gz")
        warm = self._warm if self._recording is not None or self._part > 1 else []
        return file, _encode(header) + b"\n" + b"".join(warm)

    def _head(self) -> Header:
        told = {key: value for key, value in self._header.items() if value is not None}
        told["session_id"] = self._header["session_id"] = str(told.get("session_id") or uuid.uuid4())
        if self._recording is not None:
            told |= {"payloads": True, "redaction": {"images": self._recording.images}}
        told |= {
            "part": self._part,
            "started_at": utc(self._began, "microseconds"),
            "origin": self._origin,
            "groups": self._groups,
            "reflex_version": __version__,
            "python_version": platform.python_version(),
        }
        return msgspec.convert(msgspec.to_builtins(told, enc_hook=str), Header)

    def _line(self, item: _Item) -> bytes:
        if isinstance(item, bytes):
            return item
        if isinstance(item, BatchLine):
            self._batches += 1
            return _safe(_tidy(item))
        return _safe(item) if isinstance(item, EndedLine) else self._request(item)

    def _request(self, taken: QueuedRecord) -> bytes:
        self._written_bytes += taken.answered.image_bytes
        line = request_line(taken, self.recorded, self._origin, self._began)
        if self._recording is not None:
            add_payload(line, taken.answered, self._recording.images)
        written = _safe(line)
        self.recorded += 1
        return written

    def _finish(self) -> bytes:
        recorded, batches, dropped = self.recorded, self._batches, self.dropped
        told = recorded - self._recorded_before, batches, dropped - self._dropped_before
        self._recorded_before, self._batches, self._dropped_before = recorded, 0, dropped
        return _encode(Footer(utc(self._wall(), "microseconds"), *told)) + b"\n"


def _members(batch: Batch) -> list[Member]:
    at, entered, members = batch.scheduled_at, set(batch.admitted), []
    for ticket, units in batch.grants.items():
        asked = ticket.request
        state = "waiting" if ticket in entered else "resident"
        client, age, limit = str(asked.client), at - ticket.arrived, asked.time_limit
        member = Member(ticket.seq, asked.id, client, units, asked.wants, state, age, limit)
        if ticket in batch.extra:
            member.guessed = batch.extra[ticket]
        members.append(member)
    return members


def _tidy(batch: BatchLine) -> BatchLine:
    """Microseconds are enough where no replay needs more."""
    batch.expected, batch.cost = _micro(batch.expected), _micro(batch.cost)
    for member in batch.members:
        member.age, member.limit = round(member.age, 6), _micro(member.limit)
    return batch


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _ending(ticket: Ticket) -> str:
    if not isinstance(ticket.outcome, Failed):
        return "done"
    error = ticket.outcome.error
    return error.outcome if isinstance(error, ReflexError) else "failed"


# -- lines, whatever callers and processors wrote into them: text that is not Unicode is escaped ----------------------


def _as_text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"unwritable: {type(error).__name__}: {error}"


_encode: Final = msgspec.json.Encoder(enc_hook=_as_text).encode


def _safe(line: Any) -> bytes:
    try:
        return _encode(line) + b"\n"
    except Exception:
        return _encode(_plain(msgspec.to_builtins(line, enc_hook=_as_text, str_keys=True))) + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def info_of(group: GroupConfig) -> GroupInfo:
    """The units of a group's numbers, and the settings from which a replay builds it again."""
    model, budget = group.cost(), group.flush.max_batch_cost
    return GroupInfo(
        unit=model.unit,
        budget=budget if budget < inf else None,
        max_size=group.flush.max_batch_size,
        flush={name: None if value == inf else value for name, value in asdict(group.flush).items()},
        capacity=group.capacity,
        max_queued_seconds=group.max_queued_seconds if group.max_queued_seconds < inf else None,
        max_in_flight_per_client=group.max_in_flight_per_client,
        weight=group.weight,
        tenant=group.tenant or msgspec.UNSET,
        latest_only=group.latest_only,
        promote_after=group.promote_after,
        planned=group.controller is not None,
        cost=_cost(model) if isinstance(model, TimeCost) else None,
    )


def _cost(model: TimeCost) -> dict[str, Any]:
    found = {"stages": list(model.stages), "affine": model.affine, "sizes": list(model.sizes)}
    if model.sizes:
        found["padded_stages"] = list(model.padded_stages)
    return found


def warmed(slot: str, batches: Iterable[tuple[Batch, float]], finished: Iterable[Ticket]) -> WarmUpLine | None:
    """A slot's warm-up: its (batch, seconds) and the tickets that ran to their end; None when it was empty."""
    ran = [(batch.stage, len(batch), elapsed) for batch, elapsed in batches]
    tickets = list(finished)
    if not ran or not tickets:
        return None
    one = tickets[0].request
    return WarmUpLine(slot, str(one.shape), str(one.cost_class), one.wants, ran, [t.shared for t in tickets])


def hardware() -> dict[str, Any]:
    """The facts of this machine that decide a model's speed; a server adds its accelerator."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    return {"system": platform.system(), "machine": platform.machine(), "cpu": model, "cores": os.cpu_count() or 0}


class Progress(NamedTuple):
    """Of one member before its batch, in tokens; None where its beginning was not seen.

    computed: in the cache, those found there included. known: prompt and outputs. cached: found in the prefix cache on
    entering with this batch; None when it found nothing or did not enter.
    """

    computed: float | None
    known: float | None
    cached: float | None


class ProgressFold:
    """Counts computed and known tokens of every request that has run and has not ended. A preempted request starts over
    when it enters again; what it knew stays known."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}  # seq → computed, known
        self._guessed: dict[int, bool] = {}  # seq, where the last batch had guesses → whether its first token has come

    def ran(self, batch: Batch, failed: bool = False) -> list[Progress]:
        """What the members of a finished batch had before it, in the order of its grants. failed: the call failed, and
        they run again."""
        entered, counts = set(batch.admitted), self._counts
        found = []
        self._guessed = dict.fromkeys([ticket.seq for ticket in batch.extra], False)
        for ticket, units in batch.grants.items():
            cached = None
            if ticket in entered:
                cached = batch.cached.get(ticket)
                known = counts[ticket.seq][1] if ticket.seq in counts else ticket.request.wants
                counts[ticket.seq] = (cached or 0.0, known)
            before = counts.get(ticket.seq)
            if before is None:
                found.append(Progress(None, None, None))
                continue
            found.append(Progress(*before, cached))
            if not failed:
                counts[ticket.seq] = (before[0] + units - batch.extra.get(ticket, 0.0), before[1])
        return found

    def answered(self, seq: int) -> None:
        """Count one more known token. The one before it was computed with it, if it is not the first of its batch."""
        if seq in self._counts:
            computed, known = self._counts[seq]
            self._counts[seq] = (computed + self._guessed.get(seq, False), known + 1.0)
            if seq in self._guessed:
                self._guessed[seq] = True

    def ended(self, seq: int) -> None:
        self._counts.pop(seq, None)
