"""Writes journals: a sink that copies values and references, and a thread that does everything else.

`--trace FILE` is one file without payloads, opened at once; so is the answer of GET /diagnostics/journal. `--record
DIR` is a `Recording`: files with payloads, opened at the first request. The sink only appends to a bounded queue. The
thread wakes a few times a second at most, and writes all lines that came; a killed process loses those of less than a
second. A disk error ends the journal, is kept in `error`, and never affects serving.
"""

from __future__ import annotations

import base64
import logging
import os
import platform
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self
from weakref import WeakSet

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Event,
    Failed,
    RequestAnswered,
    RequestProgressed,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.cost import TimeCost
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.observe.files import create, refused, text, utc, write_all
from reflex_runtime.observe.journal import (
    IMAGE_MODES,
    KINDS,
    AdmissionGroup,
    BatchLine,
    Cost,
    CostInfo,
    EndedLine,
    Failure,
    Footer,
    GroupInfo,
    Header,
    ImageMode,
    JournalAnswer,
    JournalRequest,
    Latency,
    Member,
    RequestLine,
    SchedulerRequest,
    WarmUpLine,
    client_text,
)
from reflex_runtime.version import __version__

log = logging.getLogger("reflex.observe")

CAPACITY = 4096  # lines that wait to be written; a batch of 256 members takes some 30 kB
EARLY = 1000  # notes kept until the first request
KEPT = 4096  # batches whose entered requests are remembered until these are answered
IMAGE_BYTES = 256 << 20  # most bytes of images that wait; further requests are dropped
GATHER = 0.2  # seconds the thread waits for more lines after the first
FLUSH = 0.5  # seconds of work between flushes; a killed process loses at most this much
PLENTY = 256  # lines that end this wait
_LEVEL = 1  # of compression: half the size of level 6 is not worth three times its time
_CHUNK = 1 << 18  # bytes handed to the file at a time
_TURN = 0.0005  # seconds of work until the thread pauses; other threads wait so long for the interpreter
_BREATH = 0.0001  # seconds of such a pause


class LineTarget(Protocol):
    """Where a `JournalWriter` writes: a `LineFile`, or a stream to a client. Called on the writer's thread."""

    path: Path
    size: int

    def write(self, lines: bytes) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class LineFile:
    """A new file to which lines are appended, compressed or not; flushed lines can be read before it is closed.

    path, private: see `files.create`. size: bytes written. Raises OSError where the disk does.
    """

    def __init__(self, path: Path, compress: bool, private: bool = False) -> None:
        self.path = path
        self.size = 0
        self._file = create(path, private)
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31) if compress else None  # 31: with a gzip header

    def write(self, lines: bytes) -> None:
        self._write(lines if self._deflate is None else self._deflate.compress(lines))

    def flush(self) -> None:
        """Make the written lines readable, also in compressed files (it costs a few bytes)."""
        if self._deflate is not None:
            self._write(self._deflate.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        if self._deflate is not None:
            self._write(self._deflate.flush(zlib.Z_FINISH))
        self._file.close()

    def _write(self, data: bytes) -> None:
        write_all(self._file, data)
        self.size += len(data)

    def abandon(self) -> None:
        """Close it after an error; ignores further errors."""
        with suppress(OSError, ValueError):
            self._file.close()


@dataclass(frozen=True, slots=True)
class Recording:
    """The files of a journal with payloads: DIRECTORY/<YYYYMMDD>-<HHMMSS>-<model_hash>-<session>.jsonl.gz, in UTC.

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
        """Make the directory. ConfigError if that fails."""
        with refused(f"Recording.directory={str(self.directory)!r}", "be made"):
            Path(self.directory).mkdir(parents=True, exist_ok=True)

    def file(self, header: Header, now: float) -> LineFile:
        """The file of a part."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        part = f"-{header.part}" if header.part > 1 else ""
        suffix = ".jsonl.gz" if self.gzip else ".jsonl"
        path = Path(self.directory) / f"{stamp}-{header.model_hash}-{header.session_id}{part}{suffix}"
        return LineFile(path, self.gzip, private=self.images == "full")


# -- requests ----------------------------------------------------------------------------------------------------------

SentImage = bytes | str | NDArray[Any]


class RequestRecord(msgspec.Struct):
    """The `detail` of a `RequestAnswered`: request and answer, as references. The event has the rest.

    images: as sent, by name: PNG or JPEG bytes, base64 text (a data URL will do), or uint8 [h, w, 3].
    state: as sent, [state_dim]. seed: of the noise, as used.
    executed: how many actions of the last chunk the caller has executed, None if unknown.
    past: request ids of the earlier observations that the policy saw with it, oldest first.
    actions: [num_actions, action_dim] as answered, None without an answer. cache: `hit`, `hit_stale`, `miss`, `off`.
    routing: {slot, routing_key, degraded, cached} if two policies are served. model_hash: of the policy that it asked.
    """

    request_id: str
    episode_id: str | None = None
    robot_id: str | None = None
    instruction: str | None = None
    state: Sequence[float] | NDArray[Any] | None = None
    seed: int = 0
    images: Mapping[str, SentImage] = {}
    deadline_ms: float | None = None
    executed: int | None = None
    past: Sequence[str] = ()
    actions: NDArray[Any] | None = None
    denoising_steps: int = 0
    inference_mode: str = ""
    cache: str = "off"
    guard: dict[str, Any] | None = None
    rtc: dict[str, Any] | None = None
    routing: dict[str, Any] | None = None
    model_hash: str = ""

    @property
    def image_bytes(self) -> int:
        """Bytes its images hold in memory."""
        size = 0
        for image in self.images.values():
            size += image.nbytes if isinstance(image, np.ndarray) else len(image)
        return size


def scheduled(request: Request, ticket: Ticket | None, at: float) -> SchedulerRequest:
    """The request as the scheduler got it, without the payload. at: time of the refusal, if there is no ticket."""
    made = SchedulerRequest(
        None, at, client_text(request.client), int(request.priority), request.time_limit, str(request.partition),
        str(request.shape), str(request.cost_class), request.stage, request.weight, request.wants,
    )  # fmt: skip
    if ticket is not None:
        made.ticket, made.arrived, made.ready = ticket.seq, ticket.arrived, ticket.ready_at < inf
        made.admitted = ticket.admitted if ticket.admitted < ticket.arrived else None
    return made


def request_line(
    event: RequestAnswered, a: RequestRecord, entered: list[str], origin: float, began: float
) -> RequestLine:
    """The line without `seq` and payload. entered: ids of those that entered with its batch. began: UTC at `origin`."""
    ticket, error = event.ticket, event.error
    total = event.served_in if event.served_in and isfinite(event.served_in) else 0.0
    arrived, queued, ran, batch, share, schedule = event.at - total, 0.0, 0.0, None, 0.0, None
    if ticket is not None:
        arrived, batch, share = ticket.arrived, ticket.admission, ticket.shared
        queued = (event.at if ticket.started is None else ticket.started) - arrived
        ran = 0.0 if ticket.started is None else event.at - ticket.started
        schedule = scheduled(ticket.request, ticket, event.at)
    return RequestLine(
        seq=0,
        timestamp=datetime.fromtimestamp(began + arrived - origin, UTC),
        arrival=round(arrived - origin, 6),
        slot=event.slot,
        request=JournalRequest(a.request_id, a.episode_id, a.robot_id, seed=a.seed),
        response=None if a.actions is None else JournalAnswer(None, len(a.actions), a.actions.shape[-1]),
        latency=Latency(round(total * 1e3, 3), round(queued * 1e3, 3), round(ran * 1e3, 3)),
        denoise=a.denoising_steps,
        mode=a.inference_mode,
        cache=a.cache,
        guard=a.guard,
        deadline=a.deadline_ms,
        rtc=a.rtc,
        error=None if error is None else Failure(error.code, error.message),
        routing=a.routing,
        outcome=event.outcome,
        status=event.status,
        batch=None if batch is None else AdmissionGroup(batch.id, batch.size, batch.reason, batch.cause, entered),
        cost=Cost(None if batch is None else batch.cost * 1e3, round(share * 1e3, 6)),
        schedule=schedule,
        model_hash=a.model_hash,
        wire=event.wire,
    )


def add_payload(line: RequestLine, a: RequestRecord, images: ImageMode) -> None:
    """Add the contents of the request and the answer."""
    if a.actions is not None:
        line.response = JournalAnswer(short(a.actions), a.actions.shape[0], a.actions.shape[1])
    asked = line.request
    asked.instruction, asked.executed = a.instruction, a.executed
    asked.past = list(a.past) or None
    asked.state = None if a.state is None else finite(np.asarray(a.state, np.float64).tolist())
    if a.images and images != "none":
        sent = ((name, _sent_bytes(image)) for name, image in a.images.items())
        asked.image_sha256 = _packed({name: sha256(data).hexdigest() for name, data in sent if data is not None})
        if images == "full":
            kept = {name: encoded for name, image in a.images.items() if (encoded := _base64(image)) is not None}
            asked.image_b64 = _packed(kept)


_Asked = tuple[RequestLine, RequestRecord | None, int]  # its payload where that is written, and the bytes of its images
_Item = BatchLine | EndedLine | _Asked | bytes


class JournalWriter:
    """A sink that writes the batches of one scheduler and the answers of its server.

    to: a file, without payloads (`.gz` compresses; an existing file is kept as PATH.1), or a `Recording`.
        ConfigError at once if it cannot be written. Or a `LineTarget`, for one journal without payloads.
    groups: the scheduler's, for the header: units and settings. header: further fields of `Header`.
    capacity: most lines waiting; beyond it, and beyond `IMAGE_BYTES` of images, they are dropped and counted.
    clock: the scheduler's. wall: seconds since the epoch. notes: gives further notes on a finished batch.

    path: of the file, None before a recording's first request. recorded: requests written. error: of the disk, which
    ended the journal. cpu: processor seconds the thread has used, as of its last write.
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
        self.recorded, self.cpu = 0, 0.0
        self.error: OSError | None = None
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
            with refused(f"the trace {str(to)!r}"):
                self._opened = LineFile(self.path, self.path.suffix == ".gz")
        self._capacity, self._limit = capacity, 0 if self._recording is None else self._recording.max_bytes
        self._full = self._odd = 0  # lines dropped: no room or no file; lost with the file, or not encodable
        self._file: LineTarget | None = None
        self._queue: deque[_Item] = deque()
        self._some, self._hurry = threading.Event(), threading.Event()
        self._told = self._turned = self._closed = False  # the thread was woken; another file is to begin; the last has
        if isinstance(to, str | Path | Recording):
            _writers.add(self)
        name = "reflex-trace" if self._recording is None else "reflex-record"
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that are not in the file: the disk was too slow or failed, or they could not be encoded.

        Lines in the file's buffer at a disk error are not counted.
        """
        return self._full + self._odd + self._too_large

    def note(self, kind: str, /, **fields: Any) -> None:
        """Write a line of another kind: `outcome` {episode_id, slot, success, reward?}, `decision` {…}, …

        fields: values that JSON can carry; others become text. `timestamp` is added. A recording has no file before its
        first request; notes wait for it.
        """
        if kind in KINDS:
            raise ValueError(f"JournalWriter.note: kind {kind!r} is written by the journal itself")
        line = _safe({"timestamp": utc(self._wall(), "microseconds"), **fields} | {"kind": kind})
        if self._open is not None:
            self._behind.append(line)
        elif self._early is None:
            self._enqueue(line)
        elif len(self._early) < EARLY:
            self._early.append(line)
        else:
            self._full += 1

    def warmed(self, warm: WarmUpLine) -> None:
        """Write a slot's warm-up. Called before the first request."""
        line = _encode(warm) + b"\n"
        self._warm.append(line)  # for the head of later parts
        if self._recording is None:
            self._enqueue(line)

    def close(self, timeout: float = 5.0) -> bool:
        """Write the queued lines and the footer. Returns whether all reached the file within `timeout` seconds."""
        self._flush()
        self._closed = True
        self._hurry.set()
        self._some.set()
        self._thread.join(timeout)
        return not self._thread.is_alive() and self.error is None

    def turn(self) -> None:
        """Write the queued lines, finish the file, and continue in another."""
        self._turned = True
        self._hurry.set()
        self._some.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- the sink ------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """Keep references and a few numbers of an event. Never waits; never raises for a disk error."""
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
        members = _members(batch)
        if info is not None and info.unit == "tokens":
            self._progress.ran(batch, members, event.apart)
        if not self._takes():
            return
        self._entered[batch.id] = [ticket.request.id for ticket in batch.admitted]
        if len(self._entered) > KEPT:
            del self._entered[next(iter(self._entered))]
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
            expected=batch.predicted if batch.predicted > 0.0 else None,
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
        """A member's outcome. Outcomes follow a finished batch in the order of its grants; an event between them (a
        request that leaves after its step) is not an outcome of this batch."""
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
                self._enqueue(note)
            self._behind.clear()

    def _answered(self, event: RequestAnswered) -> None:
        asked, ticket = event.detail, event.ticket
        if not isinstance(asked, RequestRecord):
            return
        size = 0 if self._recording is None else asked.image_bytes
        if self._waiting_bytes + size - self._written_bytes > IMAGE_BYTES:
            self._too_large += 1
            return
        batch = None if ticket is None else ticket.admission
        entered = [] if batch is None else self._entered.get(batch.id, [])
        line = request_line(event, asked, entered, self._origin, self._began)
        if self._put((line, None if self._recording is None else asked, size)):
            self._waiting_bytes += size

    def _put(self, item: _Item) -> bool:
        if self._early is not None:
            early, self._early = self._early, None
            for note in early:
                self._enqueue(note)
        return self._enqueue(item)

    def _enqueue(self, item: _Item) -> bool:
        """Queue an item. False if the queue is full, or writing has ended. Never waits."""
        if not self._takes():
            return False
        self._queue.append(item)
        if not self._told:
            self._told = True
            self._some.set()
        elif len(self._queue) == PLENTY:
            self._hurry.set()
        return True

    def _takes(self) -> bool:
        """Whether an item can be queued now; counts one that cannot."""
        if self._closed:
            return False
        if self.error is not None or len(self._queue) >= self._capacity:
            self._full += 1
            return False
        return True

    # -- on the writer's thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            closing, eager = False, self._recording is None
            if eager:
                self._begin()
            while not closing:
                self._some.wait()
                self._hurry.wait(GATHER)
                self._hurry.clear()
                self._some.clear()
                closing = self._closed  # after they are cleared, or a close that comes now would be missed
                self._told = False
                if self._queue:
                    self._file = self._file or self._begin()
                    self._empty()
                    if self._file is not None:
                        self._file.flush()
                if self._turned:
                    self._turned = False
                    self._end()
                    if eager and not closing:
                        self._begin()
                self.cpu = time.thread_time()
            self._end()
        except Exception as error:
            name = threading.current_thread().name
            if isinstance(error, OSError):
                where = self._file.path if self._file is not None else error.filename
                log.error("%s: %s: %s; nothing more is written", name, where, error.strerror or error)
            else:
                log.exception("%s ended", name)
            self._odd += len(self._queue)  # first: who sees the error sees what it cost
            self.error = error if isinstance(error, OSError) else OSError(0, f"{type(error).__name__}: {error}")
            self._queue.clear()
            if self._file is not None:
                self._file.abandon()

    def _begin(self) -> LineTarget:
        """Begin a file, with its header."""
        self._part += 1
        header = self._head()
        if self._recording is not None:
            self._file = self._recording.file(header, self._wall())
            self.path = self._file.path
        else:
            assert self.path is not None
            self._file, self._opened = self._opened or LineFile(self.path, self.path.suffix == ".gz"), None
        warm = self._warm if self._recording is not None or self._part > 1 else []
        self._file.write(_encode(header) + b"\n" + b"".join(warm))
        self._file.flush()
        return self._file

    def _end(self) -> None:
        if self._file is not None:
            recorded, batches, dropped = self.recorded, self._batches, self.dropped
            counts = recorded - self._recorded_before, batches, dropped - self._dropped_before
            self._recorded_before, self._batches, self._dropped_before = recorded, 0, dropped
            self._file.write(_encode(Footer(utc(self._wall(), "microseconds"), *counts)) + b"\n")
            self._file.close()
            self._file = None

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            file = self._file or self._begin()
            file.write(b"".join(lines))
            if 0 < self._limit <= file.size:
                self._end()

    def _empty(self) -> None:
        """Write the queue in short slices, so that other threads get the interpreter. Flushes also if the queue never
        becomes empty."""
        queue, lines, size = self._queue, list[bytes](), 0
        most = min(self._limit or _CHUNK, _CHUNK)
        breath = time.monotonic() + _TURN
        flush = breath + FLUSH
        while queue:
            try:
                line = self._line(queue.popleft())
            except Exception:  # one bad item must not end a file
                self._odd += 1
                log.exception("a line could not be written")
                continue
            lines.append(line)
            size += len(line)
            now = time.monotonic()
            if size >= most or now > flush:
                self._write(lines)
                lines, size = [], 0
            if now > flush:
                if self._file is not None:
                    self._file.flush()
                flush = now + FLUSH
            if now > breath and not self._closed:
                time.sleep(_BREATH)
                breath = time.monotonic() + _TURN
        self._write(lines)

    def _head(self) -> Header:
        fields = {key: value for key, value in self._header.items() if value is not None}
        fields["session_id"] = self._header["session_id"] = str(fields.get("session_id") or uuid.uuid4())
        if self._recording is not None:
            fields |= {"payloads": True, "redaction": {"images": self._recording.images}}
        fields |= {
            "part": self._part,
            "started_at": utc(self._began, "microseconds"),
            "origin": self._origin,
            "groups": self._groups,
            "reflex_version": __version__,
            "python_version": platform.python_version(),
        }
        return msgspec.convert(msgspec.to_builtins(fields, enc_hook=_as_json), Header)

    def _line(self, item: _Item) -> bytes:
        if isinstance(item, bytes):
            return item
        if isinstance(item, BatchLine):
            self._batches += 1
            item.expected, item.cost = _micro(item.expected), _micro(item.cost)  # precise enough: no replay reads them
            for member in item.members:
                member.age, member.limit = round(member.age, 6), _micro(member.limit)
            return _safe(item)
        return _safe(item) if isinstance(item, EndedLine) else self._request(*item)

    def _request(self, line: RequestLine, asked: RequestRecord | None, size: int) -> bytes:
        self._written_bytes += size
        line.seq = self.recorded
        if asked is not None and self._recording is not None:
            add_payload(line, asked, self._recording.images)
        written = _safe(line)
        self.recorded += 1
        return written


_writers: WeakSet[JournalWriter] = WeakSet()


def turn_all() -> None:
    """Continue every journal of this process in a new file, as a server does at SIGHUP."""
    for writer in list(_writers):
        writer.turn()


def _members(batch: Batch) -> list[Member]:
    at, entered, members = batch.scheduled_at, set(batch.admitted), []
    for ticket, units in batch.grants.items():
        asked = ticket.request
        state = "waiting" if ticket in entered else "resident"
        client, age, limit = client_text(asked.client), at - ticket.arrived, asked.time_limit
        member = Member(ticket.seq, asked.id, client, units, asked.wants, state, age, limit)
        if ticket in batch.extra:
            member.guessed = batch.extra[ticket]
        members.append(member)
    return members


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _ending(ticket: Ticket) -> str:
    if not isinstance(ticket.outcome, Failed):
        return "done"
    error = ticket.outcome.error
    return error.outcome if isinstance(error, ReflexError) else "failed"


# -- lines; texts of callers and processors that are not Unicode are escaped ------------------------------------------

_NUMPY: Final = ((np.bool_, bool), (np.integer, int), (np.floating, float))


def _as_json(value: Any) -> Any:
    """Numbers of numpy as numbers, anything else as text."""
    for kind, plain in _NUMPY:
        if isinstance(value, kind):
            return plain(value)
    try:
        return str(value)
    except Exception as error:
        return f"unwritable: {type(error).__name__}: {error}"


_encode: Final = msgspec.json.Encoder(enc_hook=_as_json).encode


def _safe(line: Any) -> bytes:
    try:
        return _encode(line) + b"\n"
    except Exception:
        return _encode(_plain(msgspec.to_builtins(line, enc_hook=_as_json, str_keys=True))) + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def info_of(group: GroupConfig) -> GroupInfo:
    """The units of a group's numbers, and the settings for a replay."""
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


def _cost(model: TimeCost) -> CostInfo:
    padded = list(model.padded_stages) if model.sizes else msgspec.UNSET
    return CostInfo(list(model.stages), model.affine, list(model.sizes), padded)


def warmed(slot: str, batches: Iterable[tuple[Batch, float]], finished: Iterable[Ticket]) -> WarmUpLine | None:
    """A slot's warm-up: its (batch, seconds) and the tickets that ran to their end; None when it was empty."""
    ran = [(batch.stage, len(batch), elapsed) for batch, elapsed in batches]
    tickets = list(finished)
    if not ran or not tickets:
        return None
    one = tickets[0].request
    return WarmUpLine(slot, str(one.shape), str(one.cost_class), one.wants, ran, [t.shared for t in tickets])


def hardware() -> dict[str, Any]:
    """The hardware of this machine; a server adds its accelerator."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    return {"system": platform.system(), "machine": platform.machine(), "cpu": model, "cores": os.cpu_count() or 0}


class ProgressFold:
    """Counts computed and known tokens of every request that has run and has not ended. A preempted request starts over
    when it enters again; what it knew stays known."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}  # seq → computed, known
        self._guessed: dict[int, bool] = {}  # seq, where the last batch had guesses → whether its first token has come

    def ran(self, batch: Batch, members: Sequence[Member], failed: bool) -> None:
        """Fill in the counts of a finished batch's members from before it. failed: the call failed, and they run
        again."""
        entered, counts = set(batch.admitted), self._counts
        self._guessed = dict.fromkeys([ticket.seq for ticket in batch.extra], False)
        for (ticket, units), member in zip(batch.grants.items(), members, strict=True):
            seq = ticket.seq
            if ticket in entered:
                member.cached = batch.cached.get(ticket)
                counts[seq] = (member.cached or 0.0, counts[seq][1] if seq in counts else ticket.request.wants)
            if seq in counts:  # else the journal began later
                member.computed, member.known = computed, known = counts[seq]
                if not failed:
                    counts[seq] = (computed + units - batch.extra.get(ticket, 0.0), known)

    def answered(self, seq: int) -> None:
        """Count one more known token. Unless it is the first of its batch, the one before it counts as computed."""
        if seq in self._counts:
            computed, known = self._counts[seq]
            self._counts[seq] = (computed + self._guessed.get(seq, False), known + 1.0)
            if seq in self._guessed:
                self._guessed[seq] = True

    def ended(self, seq: int) -> None:
        self._counts.pop(seq, None)


# -- numbers -----------------------------------------------------------------------------------------------------------

_WORDS = {inf: "Infinity", -inf: "-Infinity"}


def finite(values: list[float]) -> list[float | str]:
    """Numbers for JSON: those that are not finite become text."""
    if isfinite(sum(values)):
        return values  # type: ignore[return-value]
    return [v if isfinite(v) else _WORDS.get(v, "NaN") for v in values]


def short(array: NDArray[Any]) -> list[list[float | str]]:
    """A matrix as rows; float32 in the fewest digits that restore every bit."""
    wide = _few_digits(array) if array.dtype == np.float32 else np.asarray(array, np.float64)
    rows: list[list[float | str]] = wide.tolist()
    return rows if np.isfinite(wide).all() else [finite(row) for row in wide.tolist()]


def _few_digits(array: NDArray[np.float32]) -> NDArray[np.float64]:
    """Each value rounded to as few decimals as give the same float32 again: half the text of the usual digits."""
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):  # not finite values stay
        found = wide * 1e9
        np.rint(found, out=found)
        found /= 1e9
        differ = found.astype(np.float32) != array
        if differ.any():
            found[differ] = wide[differ]
    return found


# -- images ------------------------------------------------------------------------------------------------------------


def _sent_bytes(image: SentImage) -> bytes | None:
    """The bytes of an image as sent; None if it is not base64. An array gives its pixels in C order."""
    if isinstance(image, str):
        data = image.partition(",")[2] if image.startswith("data:") else image
        try:
            return base64.b64decode(data)
        except ValueError:
            return None
    if isinstance(image, np.ndarray):
        return np.ascontiguousarray(image).tobytes()
    return bytes(image)


def _base64(image: SentImage) -> str | None:
    """A PNG or JPEG that decodes to the very pixels that were served."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            return None  # it was refused
        return base64.b64encode(_png(image)).decode()
    data = _sent_bytes(image)
    return None if data is None else base64.b64encode(data).decode()


def _png(image: NDArray[np.uint8]) -> bytes:
    import io

    import PIL.Image  # here: only callers that send arrays need it

    out = io.BytesIO()
    PIL.Image.fromarray(np.ascontiguousarray(image)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _packed(found: dict[str, str]) -> str | dict[str, str] | None:
    """Values by image, in the form of a line."""
    return found["image"] if list(found) == ["image"] else found or None
