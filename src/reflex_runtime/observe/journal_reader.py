"""Reads journals, also those that a crash cut short.

A missing footer, blank lines and a torn last line are what a crash leaves, and are accepted. Anything else (a
torn line with others after it, an empty file, a later version) raises JournalError, which names file and line.

Files of `schema_version` 1 are read as what version 2 would say. `--trace` and `--record` had formats of their own
then: a trace counted times from its origin and had no requests; a recording had the warm-up in its header and only
tickets as members of its batches. What neither had keeps its default, and so does all but `seq` of a request.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal import (
    KINDS,
    SCHEMA_VERSION,
    BatchLine,
    EndedLine,
    Footer,
    GroupInfo,
    Header,
    JournalError,
    Line,
    Member,
    Note,
    RequestLine,
    WarmUpLine,
)

_NO_JOURNAL = "not a journal"
_WRITES = "reflex serve --trace FILE or --record DIR writes one"
_CHUNK = 1 << 18  # bytes read at a time


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal as read. requests: in order of their answers. warm: by slot.

    footer: None when the writer was not closed. torn: the last line was cut off and left out.
    """

    path: Path
    header: Header
    requests: list[RequestLine]
    batches: list[BatchLine]
    ended: list[EndedLine]
    notes: list[Note]
    warm: dict[str, WarmUpLine]
    footer: Footer | None
    torn: bool

    @property
    def groups(self) -> Mapping[str, GroupInfo]:
        """What each group's numbers mean; empty when the writer did not know."""
        return self.header.groups

    @property
    def slots(self) -> list[str]:
        """The slots in it, in order."""
        return sorted({r.slot for r in self.requests} | {b.group for b in self.batches})

    def seconds(self, batch: BatchLine) -> float:
        """When the batch was formed, in seconds from the beginning of the journal."""
        return batch.at - self.header.origin

    def noted(self, kind: str) -> list[Note]:
        """The notes of a kind."""
        return [note for note in self.notes if note.kind == kind]


def read_journal(path: str | Path, images: bool = True) -> Journal:
    """Read a whole journal; `.gz` is decompressed. images: False leaves recorded images out, which is most of what a
    large one holds."""
    reader = JournalReader(path)
    kinds: dict[type[Any], list[Any]] = {RequestLine: [], BatchLine: [], EndedLine: [], Note: [], WarmUpLine: []}
    for line in reader:
        if not images and isinstance(line, RequestLine):
            line.request.image_b64 = None
        kinds[type(line)].append(line)
    refused = {line.request_id: line.schedule for line in kinds[EndedLine] if line.schedule is not None}
    for line in kinds[RequestLine]:
        if line.schedule is None:
            line.schedule = refused.get(line.request.request_id)
    if reader.header.schema_version == 1:
        complete(kinds[RequestLine], kinds[BatchLine])
    return Journal(
        path=reader.path,
        header=reader.header,
        requests=sorted(kinds[RequestLine], key=lambda line: line.seq),
        batches=kinds[BatchLine],
        ended=kinds[EndedLine],
        notes=kinds[Note],
        warm={line.slot: line for line in kinds[WarmUpLine]},
        footer=reader.footer,
        torn=reader.torn,
    )


class JournalReader:
    """Reads a journal line by line, in as much memory as one line takes.

        reader = JournalReader(path)
        reader.header
        for line in reader: …
        reader.footer, reader.torn            # once the lines are read

    policy: of several, only requests, batches and notes of this one, as if it had been alone. ConfigError where it is
    not in the journal.
    """

    def __init__(self, path: str | Path, policy: str | None = None) -> None:
        self.path = Path(path)
        self.footer: Footer | None = None
        self.torn = False
        self._number = self._torn_at = 0
        self._old: Schema1 | None = None
        self._read = self._lines()
        self._policy = policy
        header = self._first()
        self.header = header if policy is None else _header_of(header, policy, self.path)

    def __iter__(self) -> Iterator[Line]:
        """The lines between header and footer."""
        if self._old is not None:
            yield from self._old.warm
        for line, _ in self._whole():
            try:
                found = _decode(line, self._old)
            except msgspec.ValidationError as error:
                raise self._bad(f"not a line of a journal: {error}") from error
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._torn_at, self.torn = self._number, True
                continue
            if isinstance(found, Header):
                raise self._bad("a second header")
            if isinstance(found, Footer):
                self.footer = found
            elif self._policy is None or _belongs(found, self._policy):
                if isinstance(found, BatchLine):
                    found.cause = _cause(found.cause)
                yield found

    def _whole(self) -> Iterator[tuple[bytes, bool]]:
        """Lines that are not blank, none of them after a torn one or the footer."""
        for line, ended in self._read:
            if not line.strip():
                continue
            if self._torn_at:
                raise self._bad("not a whole line, and others follow it", self._torn_at)
            if self.footer is not None:
                raise self._bad("comes after the footer")
            yield line, ended

    def _first(self) -> Header:
        """The header, its version first: another version has other keys."""
        for line, ended in self._whole():
            try:
                found = msgspec.json.decode(line, type=_AnyHeader)
                if found.kind != "header":
                    raise self._bad(f"{_NO_JOURNAL}: the first line is a {found.kind!r:.80}, not a header; {_WRITES}")
                if found.schema_version == 1:
                    self._old = Schema1(msgspec.json.decode(line))
                    return msgspec.convert(self._old.header, Header)
                if found.schema_version != SCHEMA_VERSION:
                    raise self._bad(_other_version(found))
                return msgspec.json.decode(line, type=Header)
            except msgspec.ValidationError as error:
                raise self._bad(f"{_NO_JOURNAL}: {error}; {_WRITES}") from error
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                why = f"{_NO_JOURNAL}: not JSON: {error}" if ended else "no whole header"
                raise self._bad(f"{why}; {_WRITES}") from error
        raise self._bad(f"empty, not even a header; {_WRITES}", 1)

    def _lines(self) -> Iterator[tuple[bytes, bool]]:
        """Each line, and whether it ended in a newline; counts them."""
        rest = b""
        try:
            for part in _parts(self.path):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    self._number += 1
                    yield line, True
        except zlib.error as error:
            raise self._bad(f"not readable as gzip: {error}", self._number + 1) from error
        except OSError as error:
            raise self._bad(error.strerror or str(error), 0) from error
        if rest:
            self._number += 1
            yield rest, False

    def _bad(self, what: str, number: int | None = None) -> JournalError:
        """number: of the line; the one just read by default, 0 for none."""
        number = self._number if number is None else number
        if number == 0:
            return JournalError(f"{self.path}: {what}", path=str(self.path))
        return JournalError(f"{self.path}, line {number}: {what}", path=str(self.path), line=number)


def _header_of(header: Header, policy: str, path: Path) -> Header:
    """The header that a journal of this policy alone would have."""
    if not header.served or policy not in header.served:
        there = f"only {', '.join(header.served)}" if header.served else "one policy without a name"
        raise ConfigError(f"--policy={policy}: not in {path}, which has {there}")
    own = {name: value for name, value in msgspec.structs.asdict(header.served[policy]).items() if value is not None}
    groups = {
        name.removeprefix(f"{policy}."): group for name, group in header.groups.items() if name.startswith(f"{policy}.")
    }
    told: dict[str, Any] = {"policies": None, "split": None, "served": msgspec.UNSET, "groups": groups}
    return msgspec.structs.replace(header, **(told | own))


def _belongs(line: Line, policy: str) -> bool:
    """Whether a line is of this policy; what it says of a slot is then said as with one policy."""
    if isinstance(line, Note):
        return bool(line.fields.pop("policy", None) == policy)
    prefix = f"{policy}."
    if isinstance(line, RequestLine) and line.slot.startswith(prefix):
        line.slot = line.slot.removeprefix(prefix)
        if line.routing is not None:
            line.routing["slot"] = line.slot
        return True
    if isinstance(line, BatchLine) and line.group.startswith(prefix):
        line.group = line.group.removeprefix(prefix)
        return True
    return False


class _AnyHeader(msgspec.Struct):
    kind: str = ""
    schema_version: int = 0
    reflex_version: str = "?"


def _other_version(found: _AnyHeader) -> str:
    return (
        f"schema_version {found.schema_version}, by reflex {found.reflex_version}; this release reads "
        f"1 and {SCHEMA_VERSION}: read the file with the release that wrote it, or write it again with this one"
    )


class _Kind(msgspec.Struct):
    kind: str


_AnyKind = Header | WarmUpLine | RequestLine | BatchLine | EndedLine | Footer
_kind = msgspec.json.Decoder(_Kind).decode
_known = msgspec.json.Decoder(_AnyKind).decode


def _decode(line: bytes, old: Schema1 | None) -> Any:
    kind = _kind(line).kind
    if old is None and kind in KINDS:
        return _known(line)
    fields = msgspec.json.decode(line)
    if old is not None:
        fields = old.line(fields)
        if isinstance(fields, BatchLine):
            return fields
        kind = fields["kind"]
        if kind in KINDS:
            return msgspec.convert(fields, _AnyKind)
    del fields["kind"]
    return Note(kind, fields)


def _cause(word: Any) -> Any:
    """Older journals have the reason where there was no finer cause."""
    older = {"timeout": "held", "budget_reached": "full", "single_request_over_budget": "over_budget"}
    return older.get(str(word), word)


def _parts(path: Path) -> Iterator[bytes]:
    """The file's bytes, decompressed, some at a time. A compressed file that was cut off ends after the last byte that
    can be had: `gzip` reads ahead and would lose what it had."""
    with path.open("rb") as file:
        compressed = path.suffix == ".gz"
        inflate = zlib.decompressobj(31)
        while data := file.read(_CHUNK):
            if not compressed:
                yield data
                continue
            while data:
                yield inflate.decompress(data)
                data = inflate.unused_data
                if data:  # another member follows
                    inflate = zlib.decompressobj(31)
        if compressed:
            yield inflate.flush()


# -- schema_version 1 --------------------------------------------------------------------------------------------------

_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class _Header(msgspec.Struct):
    origin: float = 0.0
    started_at: str = ""
    groups: dict[str, dict[str, Any]] = {}
    warm: dict[str, dict[str, Any]] = {}


class _Routing(msgspec.Struct):
    slot: str = "prod"


class _Request(msgspec.Struct):
    seq: int
    timestamp: _Time | None = None
    routing: _Routing | None = None
    error: Any = None


class _RecordedBatch(msgspec.Struct):
    """expected: 0 when unknown. members, entered: tickets."""

    id: int
    slot: str
    stage: str
    cause: Cause
    at: float
    finished: float
    elapsed: float
    expected: float
    members: list[int]
    entered: list[int]
    crashed: bool = False
    notes: dict[str, Any] = {}
    looked: list[float] = []
    apart: bool = False

    def line(self) -> BatchLine:
        entered = set(self.entered)
        members = [
            Member(seq, "", "", 1.0, 1.0, "waiting" if seq in entered else "resident", 0.0) for seq in self.members
        ]
        return BatchLine(
            id=self.id, group=self.slot, stage=self.stage, reason=self.cause.reason.value, cause=self.cause.value,
            at=self.at, finished=self.finished, elapsed=self.elapsed, expected=self.expected or None, cost=None,
            unit="seconds", size=len(members), queued=None, crashed=self.crashed, apart=self.apart, notes=self.notes,
            members=members, looked=self.looked,
        )  # fmt: skip


class _TracedBatch(msgspec.Struct):
    """scheduled_at: seconds from the origin."""

    scheduled_at: float
    elapsed: float


class _Refused(msgspec.Struct):
    request_id: str
    schedule: dict[str, Any]


class Schema1:
    """Translates the lines of one file. header: what its first line is in version 2; warm: lines that follow it."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        known = msgspec.convert(header, _Header)
        self._is_trace = "python_version" in header
        self._origin = known.origin
        self._began = msgspec.convert(known.started_at or "1970-01-01T00:00:00Z", _Time)
        groups = {name: _group(told) for name, told in known.groups.items()}
        self.header = {**header, "payloads": not self._is_trace, "groups": groups}
        warm = [{"kind": "warm", "slot": slot, **line} for slot, line in known.warm.items()]
        self.warm = msgspec.convert(warm, list[WarmUpLine])

    def line(self, found: dict[str, Any]) -> Any:
        """What a line is in version 2: an object, or the fields of one. ValidationError if it is none of version 1."""
        kind = found.get("kind")
        if kind == "batch" and self._is_trace:
            times = msgspec.convert(found, _TracedBatch)
            at = self._origin + times.scheduled_at
            return {**found, "at": at, "finished": at + times.elapsed}
        if kind == "batch":
            return msgspec.convert({**found, "cause": _cause(found.get("cause"))}, _RecordedBatch).line()
        if kind == "request":
            return self._request(found)
        if kind == "refused":
            refused = msgspec.convert(found, _Refused)
            when = {"ticket": None, "at": refused.schedule.get("arrived"), "outcome": "rejected"}
            return {"kind": "ended", **when, "request_id": refused.request_id, "schedule": refused.schedule}
        if kind == "divergence":
            return {**found, "kind": "shadow"}
        return {"total_requests": 0, "batches": 0, **found} if kind == "footer" else found

    def _request(self, found: dict[str, Any]) -> dict[str, Any]:
        known = msgspec.convert(found, _Request)
        came = known.timestamp or self._began
        missing = {
            "timestamp": came,
            "arrival": (came - self._began).total_seconds(),
            "slot": (known.routing or _Routing()).slot,
            "request": {},
            "response": None,
            "latency": {"total_ms": 0.0, "queue_ms": 0.0, "batch_ms": 0.0},
            "outcome": "ok" if known.error is None else "failed",
        }
        line = missing | found
        if isinstance(line["request"], dict):
            line["request"] = {"request_id": str(known.seq)} | line["request"]
        return line


def _group(told: dict[str, Any]) -> dict[str, Any]:
    """A recording's said nothing of units: costs were seconds where a model of times learned them."""
    if "unit" in told:
        return told
    flush = msgspec.convert(told.get("flush", {}), dict[str, Any])
    unit = "requests" if told.get("cost") is None else "seconds"
    return {"unit": unit, "budget": flush.get("max_batch_cost"), "max_size": flush.get("max_batch_size", 0), **told}


def complete(requests: Sequence[RequestLine], batches: Sequence[BatchLine]) -> None:
    """Tell of a recording's members what only the lines of their requests say."""
    asked = {line.schedule.ticket: (line, line.schedule) for line in requests if line.schedule is not None}
    last = {seq: batch for batch in batches for seq in batch.seqs}
    for batch in batches:
        for member in batch.members:
            if not member.id and member.seq in asked:
                line, schedule = asked[member.seq]
                member.id, member.client, member.limit = line.request.request_id, schedule.client, schedule.time_limit
                member.asked, member.age = schedule.wants, batch.at - schedule.arrived
                ended = "done" if line.outcome == "ok" else line.outcome
                member.outcome = "apart" if batch.apart else "more" if last[member.seq] is not batch else ended
