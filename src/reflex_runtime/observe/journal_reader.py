"""Reads journals, also those that a crash cut short.

A missing footer, blank lines and a torn last line are what a crash leaves, and are accepted. Anything else (a
torn line with others after it, an empty file, a later version) raises JournalError, which names file and line.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

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
    Note,
    RequestLine,
    WarmUpLine,
)
from reflex_runtime.observe.schema_1 import Schema1, complete

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
        name.removeprefix(f"{policy}."): group
        for name, group in header.groups.items()
        if name.startswith(f"{policy}.")
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
