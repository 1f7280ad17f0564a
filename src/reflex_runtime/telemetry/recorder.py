"""Writes recordings while serving: a sink that copies references, and a thread that does everything else.

The file is opened at the first request and flushed several times a second, so that a killed process loses little. A
disk error stops the recording, is kept in `error`, and never touches serving.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from reflex_runtime.core.batch import Failed
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.core.events import (
    BatchFinished,
    BatchScheduled,
    Event,
    RequestAnswered,
    RequestRejected,
    RequestSettled,
)
from reflex_runtime.core.request import Request
from reflex_runtime.telemetry.lines import LineFile, LineWriter, text, utc
from reflex_runtime.telemetry.recording import (
    IMAGE_MODES,
    KINDS,
    AdmittedIn,
    Answered,
    Asked,
    Cost,
    Ended,
    Failure,
    Footer,
    Given,
    Header,
    ImageMode,
    Latency,
    RanBatch,
    Recorded,
    Refused,
    Scheduled,
    base64_of,
    finite,
    sha256_of,
    short,
)
from reflex_runtime.version import __version__

EARLY = 1000  # notes kept until the first request
KEPT = 4096  # admission groups remembered until their requests are answered
LEVEL = 1  # of compression: half the size of level 6 is not worth three times its time
IMAGE_BYTES = 256 << 20  # of images that may wait to be written; beyond it requests are dropped


class _Refused(msgspec.Struct):
    """A request the scheduler refused."""

    at: float
    request: tuple[Any, ...]


class _Taken(msgspec.Struct):
    """An answer as it waits to be written."""

    answered: Answered
    outcome: str
    status: int
    ticket: int | None
    arrived: float
    request: tuple[Any, ...] | None


class _Ran(msgspec.Struct):
    """A batch, and the request ids of those that entered with it."""

    line: RanBatch
    entered: list[str]


_Item = _Ran | Ended | _Refused | _Taken | bytes
_encode: Final = msgspec.json.Encoder(enc_hook=str).encode


class Recorder:
    """A sink for `RequestAnswered` events whose `detail` is an `Answered`, and for what the scheduler did meanwhile.

    directory: made when it is not there; ConfigError when that cannot be. header: `Header`'s fields, read when the file
    is opened, so that they may be completed until the first request. gzip: compress. images: `full` keeps them, so that
    actions can be replayed, `hash_only` their SHA-256, `none` neither.
    clock: the scheduler's. wall: seconds since the epoch. capacity: most lines waiting; beyond it, and beyond
    `IMAGE_BYTES` of images, they are dropped and counted. max_bytes: of a file, after which another part of the
    recording is begun; 0 is no bound. A file with images is for its owner alone.
    notes: asked for further notes about a batch when it finishes.

    recorded: requests written. dropped: lines that were not, requests and batches.
    """

    events = frozenset({RequestAnswered, RequestRejected, RequestSettled, BatchScheduled, BatchFinished})

    def __init__(
        self,
        directory: str | Path,
        header: Mapping[str, Any],
        gzip: bool = True,
        images: ImageMode = "hash_only",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        capacity: int = 10_000,
        max_bytes: int = 0,
        notes: Callable[[BatchFinished], Mapping[str, Any]] | None = None,
    ) -> None:
        if images not in IMAGE_MODES:
            raise ConfigError(f"Recorder.images={images!r}: must be one of {', '.join(IMAGE_MODES)}")
        if not capacity >= 1:
            raise ConfigError(f"Recorder.capacity={capacity!r}: must be >= 1 lines")
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"Recorder.directory={str(directory)!r}: cannot be made: {error.strerror}") from error
        self.header = dict(header)
        self.path: Path | None = None
        self.recorded = 0
        self._gzip, self._images = gzip, images
        self._notes = notes
        self._wall = wall
        self._origin, self._began = clock(), wall()
        self._early: list[bytes] | None = []  # notes from before the first request
        self._waiting_bytes = self._written_bytes = self._too_large = 0
        self._looked: tuple[float, ...] = ()
        self._members: OrderedDict[int, list[str]] = OrderedDict()  # the rest is the writer thread's
        self._part = self._recorded_before = self._dropped_before = 0  # the file's number; counts before it
        self._lines: LineWriter[_Item] = LineWriter(
            "reflex-record", self._start, self._line, self._finish, capacity, limit=max_bytes
        )

    # -- the sink ------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """Take an event: references and a few numbers. Never waits, never raises for the disk."""
        if isinstance(event, RequestSettled):
            outcome = event.ticket.outcome
            if isinstance(outcome, Failed) and event.ticket.ready_at < inf:
                error = outcome.error
                how = error.outcome if isinstance(error, ReflexError) else "failed"
                self._put(Ended(event.ticket.seq, event.at, how))
        elif isinstance(event, RequestAnswered):
            self._answered(event)
        elif isinstance(event, BatchFinished):
            self._finished(event)
        elif isinstance(event, BatchScheduled):
            self._looked = event.looked
        elif isinstance(event, RequestRejected):
            self._put(_Refused(event.at, _facts(event.request)))

    def note(self, kind: str, /, **fields: Any) -> None:
        """Write a line of another kind: `outcome` {episode_id, slot, success, reward?}, `decision` {…}, …

        fields: what JSON can carry; anything else becomes its text. `timestamp` is added. Until the first request there
        is no file, and notes wait for it.
        """
        if kind in KINDS:
            raise ValueError(f"Recorder.note: kind {kind!r} is written by the recorder itself")
        line = _safe({"timestamp": utc(self._wall(), "microseconds"), **fields} | {"kind": kind})
        if self._early is None:
            self._lines.put(line)
        elif len(self._early) < EARLY:
            self._early.append(line)

    @property
    def error(self) -> OSError | None:
        """The disk error that ended the recording."""
        return self._lines.error

    @property
    def dropped(self) -> int:
        """Lines that are not in the file because the disk could not keep up, or failed."""
        return self._lines.dropped + self._too_large

    @property
    def cpu(self) -> float:
        """Processor seconds the writer's thread has used."""
        return self._lines.cpu

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is queued and the footer. Returns whether all of it reached the file within `timeout` seconds."""
        return self._lines.close(timeout)

    def _answered(self, event: RequestAnswered) -> None:
        answered = event.detail
        if not isinstance(answered, Answered):
            return
        size = _size(answered)
        if self._waiting_bytes + size - self._written_bytes > IMAGE_BYTES:
            self._too_large += 1
            return
        ticket = event.ticket
        if ticket is None or ticket.ready_at == inf:  # it ended before it could run
            taken = _Taken(answered, event.outcome, event.status, None, 0.0, None)
        else:
            facts = _facts(ticket.request)
            taken = _Taken(answered, event.outcome, event.status, ticket.seq, ticket.arrived, facts)
        if self._put(taken):
            self._waiting_bytes += size

    def _finished(self, event: BatchFinished) -> None:
        if not self._lines.takes():
            return
        batch = event.batch
        entered = batch.admitted
        line = RanBatch(
            batch.id,
            batch.group,
            batch.stage,
            batch.cause,
            batch.scheduled_at,
            event.at,
            event.elapsed,
            batch.expected,
            [ticket.seq for ticket in batch.grants],
            [ticket.seq for ticket in entered],
            event.crashed,
            dict(batch.notes) if self._notes is None else {**batch.notes, **self._notes(event)},
            list(self._looked),
            event.apart,
        )
        self._looked = ()
        self._put(_Ran(line, [ticket.request.id for ticket in entered]))

    def _put(self, item: _Item) -> bool:
        if self._early is not None:
            early, self._early = self._early, None
            for note in early:
                self._lines.put(note)
        return self._lines.put(item)

    # -- on the writer's thread ----------------------------------------------------------------------------------------

    def _start(self) -> tuple[LineFile, bytes]:
        told = {key: value for key, value in self.header.items() if value is not None}
        told["session_id"] = self.header["session_id"] = str(told.get("session_id") or uuid.uuid4())
        self._part += 1
        told["part"] = self._part
        told.setdefault("reflex_version", __version__)
        told.setdefault("redaction", {"images": self._images})
        told |= {"started_at": utc(self._began, "microseconds"), "origin": self._origin}
        header = msgspec.convert(msgspec.to_builtins(told, enc_hook=str), Header)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._wall()))
        part = f"-{self._part}" if self._part > 1 else ""
        suffix = ".jsonl.gz" if self._gzip else ".jsonl"
        self.path = self.directory / f"{stamp}-{header.model_hash}-{header.session_id}{part}{suffix}"
        return LineFile(self.path, self._gzip, LEVEL, private=self._images == "full"), _encode(header) + b"\n"

    def _line(self, item: _Item) -> bytes:
        if isinstance(item, bytes):
            return item
        if isinstance(item, _Refused):
            return _safe(Refused(str(item.request[0]), _scheduled(None, item.at, item.request)))
        if isinstance(item, _Ran):
            if item.entered:
                self._members[item.line.id] = item.entered
                if len(self._members) > KEPT:
                    self._members.popitem(last=False)
            return _safe(item.line)
        if isinstance(item, Ended):
            return _encode(item) + b"\n"
        line = _safe(self._request(item))
        self.recorded += 1
        self._written_bytes += _size(item.answered)
        return line

    def _request(self, taken: _Taken) -> Recorded:
        a = taken.answered
        batch, estimate = None, None
        if a.batch is not None:
            known = self._members.get(a.batch.id, [])
            batch = AdmittedIn(a.batch.id, a.batch.size, a.batch.reason, a.batch.cause, known)
            estimate = a.batch.cost * 1e3
        response = None
        if a.actions is not None:
            rows = short(a.actions)
            response = Given(rows, len(rows), a.actions.shape[1])
        images = a.images if self._images != "none" else {}
        return Recorded(
            seq=self.recorded,
            timestamp=datetime.fromtimestamp(self._began + a.arrived - self._origin, UTC),
            arrival=round(a.arrived - self._origin, 6),
            slot=a.slot,
            request=Asked(
                a.request_id,
                a.episode_id,
                a.robot_id,
                a.instruction,
                _state(a.state),
                a.seed,
                a.executed,
                sha256_of(images) if images else None,
                base64_of(images) if self._images == "full" and images else None,
            ),
            response=response,
            latency=Latency(_ms(a.total_s), _ms(a.queue_s), _ms(a.batch_s)),
            denoise=a.denoising_steps if a.steps is None else a.steps,
            mode=a.inference_mode,
            cache=a.cache,
            guard=a.guard,
            deadline=a.deadline_ms,
            rtc=a.rtc,
            error=None if a.error is None else Failure(*a.error),
            routing=a.routing,
            outcome=taken.outcome,
            status=taken.status,
            batch=batch,
            cost=Cost(estimate, round(a.measured_ms, 6)),
            schedule=None if taken.request is None else _scheduled(taken.ticket, taken.arrived, taken.request),
            model_hash=a.model_hash,
        )

    def _finish(self) -> bytes:
        recorded, dropped = self.recorded, self.dropped
        told = recorded - self._recorded_before, dropped - self._dropped_before
        self._recorded_before, self._dropped_before = recorded, dropped
        return _encode(Footer(utc(self._wall(), "microseconds"), *told)) + b"\n"


def _facts(request: Request) -> tuple[Any, ...]:
    """A request without its payload."""
    return (
        request.id,
        request.client,
        request.priority,
        request.time_limit,
        request.partition,
        request.shape,
        request.cost_class,
        request.stage,
        request.weight,
        request.wants,
    )


def _scheduled(ticket: int | None, arrived: float, facts: tuple[Any, ...]) -> Scheduled:
    _, client, priority, limit, partition, shape, cost_class, stage, weight, wants = facts
    told = (str(partition), str(shape), str(cost_class), stage, weight, wants)
    return Scheduled(ticket, arrived, str(client), int(priority), limit, *told)


def _state(state: Any) -> list[float | str] | None:
    if state is None:
        return None
    return finite(np.asarray(state, np.float64).tolist())


def _size(answered: Answered) -> int:
    """Bytes of its images."""
    size = 0
    for image in answered.images.values():
        size += image.nbytes if isinstance(image, np.ndarray) else len(image)
    return size


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _safe(line: Any) -> bytes:
    """A line whatever callers wrote into it: text that is not Unicode is escaped."""
    try:
        return _encode(line) + b"\n"
    except Exception:
        return _encode(_plain(msgspec.to_builtins(line, enc_hook=str, str_keys=True))) + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
