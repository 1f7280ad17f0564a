"""The lines of a journal: one file format for `--trace` and `--record`, described in `docs/journal.md`.

One JSON object a line: `header`, `warm`, `request`, `batch`, `ended`, `footer`, and notes of any other kind (`outcome`,
`decision`, `shadow`, …). With payloads (`--record`) request lines carry what was asked and answered; without
(`--trace`) they have ids, times and outcomes. Readers skip unknown kinds and keys.

Clocks: `timestamp` is UTC. `arrival` counts seconds from the header's `origin`. Times of the scheduler (`schedule`,
batches, `ended`) are seconds of its monotonic clock, unrounded: a schedule replayed with them is the same to the last
bit.

Reading: a missing footer, blank lines and a torn last line are accepted, because a crash leaves them. Anything else (a
torn line with others after it, an empty file, a later version, a line without end) raises JournalError, which names
file and line.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Cause
from reflex_runtime.core.errors import ConfigError, ReflexError

SCHEMA_VERSION = 2

Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]  # beyond them a picture has no axis

ImageMode = Literal["full", "hash_only", "none"]
IMAGE_MODES: tuple[ImageMode, ...] = ("full", "hash_only", "none")


class JournalError(ReflexError):
    """A journal cannot be read. The message names the file and, if known, the line."""

    code, http_status = "journal_unreadable", 422


class PolicyInfo(msgspec.Struct, frozen=True):
    slot: str = "prod"
    model_id: str = ""
    model_hash: str = ""


class CostInfo(msgspec.Struct, frozen=True):
    """The fields of a `TimeCost`. padded_stages: only with sizes."""

    stages: list[str]
    affine: bool
    sizes: list[int]
    padded_stages: list[str] | msgspec.UnsetType = msgspec.UNSET


class GroupInfo(msgspec.Struct, frozen=True):
    """The units and settings of a group.

    unit: of cost and budget (`seconds`, `tokens`, `requests`). budget: ceiling on a batch's cost, None without one.
    max_size: most members. flush: fields of the `FlushPolicy`, None for inf. cost: None for another cost model, which
    cannot be replayed. max_queued_seconds: None without a bound. planned: a controller
    changes the budget. tenant: set if groups take turns as one.
    """

    unit: str
    budget: float | None
    max_size: int
    flush: dict[str, Any] = {}
    capacity: int = 0
    max_queued_seconds: float | None = None
    max_in_flight_per_client: int = 0
    weight: float = 1.0
    tenant: str | msgspec.UnsetType = msgspec.UNSET
    latest_only: bool = False
    promote_after: float = 0.0
    planned: bool = False
    cost: CostInfo | None = None

    @property
    def or_times_fixed(self) -> str:
        """The rest of its budget in words, if a batch with a large fixed part may take longer."""
        times = self.flush.get("times_fixed")
        return f" or {times:g} × the fixed part" if isinstance(times, int | float) and times else ""


class PolicyHead(msgspec.Struct, frozen=True, kw_only=True):
    """The header fields of one of several policies; see `Header`."""

    model_hash: str = ""
    config_hash: str = ""
    export_dir: str = ""
    model_type: str = ""
    export_kind: str = ""
    embodiment: str | None = ""
    control_rate_hz: float | None = None
    state_names: list[str] | None = None
    action_names: list[str] | None = None
    providers: list[str] = []
    policies: list[PolicyInfo] | None = None
    split: int | None = None


class Header(msgspec.Struct, frozen=True, tag_field="kind", tag="header", kw_only=True):
    """First line. started_at: UTC wall clock at `origin`, the monotonic second from which `arrival` counts.

    payloads: whether request lines carry observations and actions. split: a's percent at the beginning. part: of its
    session, from 1; later parts continue with the same origin, ids and numbers. control_rate_hz, state_names,
    action_names: of the embodiment, if its file has them. Fields of policy servers are empty in other journals. served:
    by name, if there are several policies; the other fields are then the first's, and slots are NAME.SLOT.
    """

    schema_version: int = SCHEMA_VERSION
    started_at: str = ""
    origin: float = 0.0
    payloads: bool = False
    groups: dict[str, GroupInfo] = {}
    reflex_version: str = ""
    python_version: str = ""
    session_id: str = ""
    part: int = 1
    model_hash: str = ""
    config_hash: str = ""
    export_dir: str = ""
    model_type: str = ""
    export_kind: str = ""
    embodiment: str = ""
    control_rate_hz: float | None = None
    state_names: list[str] = []
    action_names: list[str] = []
    hardware: Any = None
    providers: list[str] = []
    redaction: dict[str, Any] = {}
    notes: Any = ""
    policies: list[PolicyInfo] | None = None
    split: int | None = None
    served: dict[str, PolicyHead] | msgspec.UnsetType = msgspec.UNSET

    def without_requests(self, path: Path) -> None:
        """ConfigError for a journal without lines of requests, if its writer makes none."""
        if self.schema_version == 1:  # its traces of policies have no requests either
            return
        if self.groups and not self.model_hash:  # which policies and functions have
            kind = "a language model" if any(g.unit == "tokens" for g in self.groups.values()) else "feeds"
            raise ConfigError(f"{path}: a trace of {kind}, which has batches and no requests; reflex trace reads it")

    def hash_of(self, slot: str) -> str:
        """The model hash of a slot."""
        return next((p.model_hash for p in self.policies or () if p.slot == slot), self.model_hash)


class WarmUpLine(msgspec.Struct, frozen=True, tag_field="kind", tag="warm"):
    """The warm-up of a slot's cost model; in every part of a session.

    batches: (stage, size, seconds). shares: each request's part of them, in seconds.
    """

    slot: str
    shape: str
    cost_class: str
    wants: float
    batches: list[tuple[str, Annotated[int, msgspec.Meta(ge=1, le=1_000_000)], Seconds]]
    shares: list[float]


# -- requests ----------------------------------------------------------------------------------------------------------


class JournalRequest(msgspec.Struct):
    """A request. Only with payloads: instruction, state, executed, past, images.

    past: request ids of the earlier observations of its episode that the policy saw with it, oldest first.

    image_sha256, image_b64: one text when the only image is `image`, else by name.
    """

    request_id: str
    episode_id: str | None = None
    robot_id: str | None = None
    instruction: str | None = None
    state: list[float | str] | None = None
    seed: int = 0
    executed: int | None = None
    past: list[str] | None = None
    image_sha256: str | dict[str, str] | None = None
    image_b64: str | dict[str, str] | None = None

    @property
    def episode(self) -> str:
        return episode_key(self.robot_id, self.episode_id)

    def images(self) -> dict[str, bytes]:
        """The recorded images, PNG or JPEG, by name; empty when none were recorded."""
        return {name: base64.b64decode(data) for name, data in _by_name(self.image_b64).items()}

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each image as sent, by name."""
        return _by_name(self.image_sha256)


def episode_key(robot_id: str | None, episode_id: str | None) -> str:
    """The key of an episode: its id, with the robot's if that is known. "" without an episode. No id has a line
    break."""
    return f"{robot_id}\n{episode_id}" if robot_id and episode_id else episode_id or ""


def _by_name(kept: str | dict[str, str] | None) -> dict[str, str]:
    return {"image": kept} if isinstance(kept, str) else kept or {}


class JournalAnswer(msgspec.Struct):
    """An answer. actions: None without payloads; values that are not finite are text: `NaN`, `Infinity`,
    `-Infinity`."""

    actions: list[list[float | str]] | None
    num_actions: int
    action_dim: int

    def array(self) -> NDArray[np.float32]:
        """float32 [num_actions, action_dim], to the last bit as it was sent."""
        return np.array(self.actions, np.float64).astype(np.float32).reshape(self.num_actions, self.action_dim)


class Latency(msgspec.Struct):
    """Milliseconds, as in the answer."""

    total_ms: float
    queue_ms: float
    batch_ms: float


class AdmissionGroup(msgspec.Struct):
    """The admission group. members: request ids of those admitted together, itself among them."""

    id: int
    size: int
    reason: str = ""
    cause: str = ""
    members: list[str] = []


class Cost(msgspec.Struct):
    """Milliseconds: the predicted cost of its admission group, and its own share of the measured time."""

    estimate_ms: float | None = None
    measured_ms: float = 0.0


class SchedulerRequest(msgspec.Struct):
    """A request as the scheduler got it. ticket: its order of arrival, unique in the file; None if it was refused.

    arrived: when it could first run (its pictures were decoded), on the scheduler's clock; admitted: when it came, if
    that was earlier. ready: False if it ended before it could run; then it came at `arrived`. The rest is the
    `core.request.Request`.
    """

    ticket: int | None
    arrived: float
    client: str = ""
    priority: int = 1
    time_limit: float | None = None
    partition: str = ""
    shape: str = ""
    cost_class: str = ""
    stage: str = ""
    weight: float = 1.0
    wants: float = 1.0
    admitted: float | None = None
    ready: bool = True


class Failure(msgspec.Struct):
    slug: str
    message: str = ""


class RequestLine(msgspec.Struct, tag_field="kind", tag="request"):
    """One request and its answer, written by a server. seq: order of the answers, from 0 by 1.

    arrival: seconds from the header's origin. denoise: steps. mode: inference mode. deadline: its limit in
    milliseconds. schedule: None if it never reached the scheduler. model_hash: of the policy that it asked, which may
    be replaced while the server runs. wire: its protocol.
    """

    seq: int
    timestamp: datetime
    arrival: float
    slot: str
    request: JournalRequest
    response: JournalAnswer | None
    latency: Latency
    denoise: int = 0
    mode: str = ""
    cache: str = "off"
    guard: dict[str, Any] | None = None
    deadline: float | None = None
    rtc: dict[str, Any] | None = None
    error: Failure | None = None
    routing: dict[str, Any] | None = None
    outcome: str = "ok"
    status: int = 200
    batch: AdmissionGroup | None = None
    cost: Cost = msgspec.field(default_factory=Cost)
    schedule: SchedulerRequest | None = None
    model_hash: str = ""
    wire: str = ""


class EndedLine(msgspec.Struct, tag_field="kind", tag="ended", omit_defaults=True):
    """A request that ended at the scheduler without a result (`cancelled`, `shed`, `failed`, …).

    at: on the scheduler's clock. ticket: None if the scheduler refused it; then `schedule` has the request, and the
    request's own line may stand before or after.
    """

    ticket: int | None
    at: float
    outcome: str
    request_id: str = ""
    schedule: SchedulerRequest | None = None


# -- batches -----------------------------------------------------------------------------------------------------------


class Member(msgspec.Struct, omit_defaults=True):
    """One request in one batch. None is not written.

    seq: order of arrival at the scheduler, unique in the file; id and client are the caller's words and need not be.
    units: granted by this batch. asked: units that it wanted when it arrived.
    state: `waiting` when it entered from the queue with this batch, `resident` when it stayed from an earlier one.
    age: seconds from its arrival until the batch was scheduled; for one that entered, the time it waited.
    limit: seconds from its arrival to its deadline; None without one.
    outcome: `done`, `more` (it stays for another step), `apart` (the call failed as a whole, and it runs again with
        fewer), or how it ended: `failed`, `cancelled`, …; None if unknown.
    computed, known, cached: of tokens only, before this batch: tokens in the cache, all tokens (prompt and
        outputs), and tokens found in the prefix cache when it entered with this batch.
    guessed, outputs: of tokens only, if it had guesses: how many of `units` they were, and the tokens that came out.
    """

    seq: int
    id: str
    client: str
    units: float
    asked: float
    state: str
    age: Seconds
    limit: float | None = None
    outcome: str | None = None
    computed: float | None = None
    known: float | None = None
    cached: float | None = None
    guessed: float | None = None
    outputs: int | None = None


class BatchLine(msgspec.Struct, tag_field="kind", tag="batch", kw_only=True):
    """One call of the processor, or one step of several. Written when it finished. All times are seconds.

    at, finished: on the scheduler's clock. cost, unit: the estimate that is compared with the budget, None if not
    finite. expected: predicted seconds of this call, None if unknown. queued: requests still waiting when it left,
    None if unknown. crashed, apart: see `BatchFinished`. left: seqs of residents gone since the group's last batch
    (preempted, cancelled, expired). short_of: the limit that kept others out: `budget`, `places`, `memory`, `share`,
    `room`, `apart`, or empty. looked: times since the last batch at which the scheduler held a free device, or only
    refused waiting requests.
    """

    id: int
    group: str
    partition: str = ""
    stage: str = ""
    reason: str
    cause: str
    at: Seconds
    finished: Seconds
    elapsed: Seconds
    expected: Seconds | None
    cost: float | None
    unit: str | None
    size: int
    queued: int | None
    crashed: bool = False
    apart: bool = False
    left: list[int] = []
    notes: dict[str, Any] = {}
    members: list[Member]
    short_of: str = ""
    looked: list[float] = []

    @property
    def entered(self) -> list[Member]:
        """The members that came from the queue with this batch."""
        return [m for m in self.members if m.state == "waiting"]

    @property
    def seqs(self) -> list[int]:
        """The tickets in it."""
        return [m.seq for m in self.members]


class Footer(msgspec.Struct, frozen=True, tag_field="kind", tag="footer"):
    """Last line of a closed file: requests and batches in it, and lines that were dropped."""

    ended_at: str
    total_requests: int
    batches: int
    dropped: int = 0


class Note(msgspec.Struct):
    """A line of any other kind; its fields as written."""

    kind: str
    fields: dict[str, Any]

    @property
    def at(self) -> str:
        """Its time, UTC."""
        return str(self.fields.get("timestamp", ""))


# -- names of callers in tables, pictures and the live view ------------------------------------------------------------

_CONNECTION = re.compile(r"\S+ #\d+")


def client_text(client: Hashable) -> str:
    """The client in a journal; one known only by its connection, a pair, is `host #number`."""
    return " #".join(map(str, client)) if isinstance(client, tuple) else str(client)


def client_label(client: str, width: int = 18) -> str:
    """The client in a table. width: characters of a name."""
    if _CONNECTION.fullmatch(client) is None:
        return plain(client or "no client", width)
    name = plain(client, 99)
    return name if len(name) <= 21 else "…" + name[-20:]  # the number tells two of them apart


def plain(text: str, width: int = 18) -> str:
    """Text on one line: unprintable characters become dots, and a long text is cut."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


Line = WarmUpLine | RequestLine | BatchLine | EndedLine | Note
KINDS = frozenset({"header", "warm", "request", "batch", "ended", "footer"})

# -- reading ----------------------------------------------------------------------------------------------------------

_NO_JOURNAL = "not a journal"
_NESTED = "values nested too deeply"
_WRITES = "reflex serve --trace FILE or --record DIR writes one"
_CHUNK = 1 << 18  # bytes read at a time
LONGEST = 1 << 29  # bytes of a line, more than the writer's `IMAGE_BYTES` in base64


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
        """Units and settings of each group; empty if the writer had none."""
        return self.header.groups

    @property
    def slots(self) -> list[str]:
        """The slots in it, in order."""
        return sorted({r.slot for r in self.requests} | {b.group for b in self.batches})

    def seconds(self, batch: BatchLine) -> float:
        """The time at which the batch was formed, in seconds from the beginning of the journal."""
        return batch.at - self.header.origin

    def noted(self, kind: str) -> list[Note]:
        """The notes of a kind."""
        return [note for note in self.notes if note.kind == kind]


def read_journal(path: str | Path, images: bool = True) -> Journal:
    """Read a whole journal; `.gz` is decompressed. images: False leaves recorded images out, most of a large
    journal."""
    reader = JournalReader(path)
    kinds: dict[type[Any], list[Any]] = {RequestLine: [], BatchLine: [], EndedLine: [], Note: [], WarmUpLine: []}
    for line in reader:
        if not images and isinstance(line, RequestLine):
            line.request.image_b64 = None
        kinds[type(line)].append(line)
    requests = sorted(kinds[RequestLine], key=lambda line: line.seq)
    refused: defaultdict[str, deque[SchedulerRequest]] = defaultdict(deque)
    for line in kinds[EndedLine]:
        if line.schedule is not None:
            refused[line.request_id].append(line.schedule)
    for line in requests:  # a caller that tries again may repeat its id; refusals and answers have the same order
        if line.schedule is None and line.outcome != "client_error" and refused[line.request.request_id]:
            line.schedule = refused[line.request.request_id].popleft()
    if reader.header.schema_version == 1:
        complete(requests, kinds[BatchLine])
    return Journal(
        path=reader.path,
        header=reader.header,
        requests=requests,
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

    policy: keep only requests, batches and notes of this one of several. ConfigError if it is not in the journal.
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
            except RecursionError as error:
                raise self._bad(_NESTED) from error
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
        """The header; checks the version first, because other versions have other keys."""
        for line, ended in self._whole():
            try:
                found = msgspec.json.decode(line, type=_AnyHeader)
                if found.kind != "header":
                    raise self._bad(f"{_NO_JOURNAL}: the first line is a {found.kind!r:.80}, not a header; {_WRITES}")
                if found.schema_version == 1:
                    self._old = Schema1(msgspec.json.decode(line))
                    return msgspec.convert(self._old.header, Header)
                if found.schema_version != SCHEMA_VERSION:
                    wrote = f"schema_version {found.schema_version}, by reflex {found.reflex_version}"
                    mend = "read the file with the release that wrote it, or write it again with this one"
                    raise self._bad(f"{wrote}; this release reads 1 and {SCHEMA_VERSION}: {mend}")
                return msgspec.json.decode(line, type=Header)
            except msgspec.ValidationError as error:
                raise self._bad(f"{_NO_JOURNAL}: {error}; {_WRITES}") from error
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                why = f"{_NO_JOURNAL}: not JSON: {error}" if ended else "no whole header"
                raise self._bad(f"{why}; {_WRITES}") from error
            except RecursionError as error:
                raise self._bad(_NESTED) from error
        raise self._bad(f"empty, not even a header; {_WRITES}", 1)

    def _lines(self) -> Iterator[tuple[bytes, bool]]:
        """Each line, and whether it ended in a newline; counts lines."""
        begun: list[bytes] = []  # parts of a line, joined once: a line with images has many
        size = 0
        try:
            for part in _parts(self.path):
                if not begun and part.isspace():  # blank lines: millions take no time
                    self._number += part.count(b"\n")
                    continue
                *lines, rest = part.split(b"\n")
                for line in lines:
                    self._number += 1
                    yield b"".join((*begun, line)), True
                    begun, size = [], 0
                if rest := rest if begun else rest.lstrip():
                    begun.append(rest)
                size += len(rest)
                if size > LONGEST:
                    raise self._bad(f"longer than {LONGEST >> 20} MiB, as no line is", self._number + 1)
        except zlib.error as error:
            raise self._bad(f"not readable as gzip: {error}", self._number + 1) from error
        except OSError as error:
            raise self._bad(error.strerror or str(error), 0) from error
        if size:
            self._number += 1
            yield b"".join(begun), False

    def _bad(self, what: str, number: int | None = None) -> JournalError:
        """number: of the line; the one just read by default, 0 for none."""
        number = self._number if number is None else number
        if number == 0:
            return JournalError(f"{self.path}: {what}", path=str(self.path))
        return JournalError(f"{self.path}, line {number}: {what}", path=str(self.path), line=number)


def _header_of(header: Header, policy: str, path: Path) -> Header:
    """The header as in a journal of this policy alone."""
    if not header.served or policy not in header.served:
        there = f"only {', '.join(header.served)}" if header.served else "one policy without a name"
        raise ConfigError(f"--policy={policy}: not in {path}, which has {there}")
    own = {name: value for name, value in msgspec.structs.asdict(header.served[policy]).items() if value is not None}
    groups = {
        name.removeprefix(f"{policy}."): group for name, group in header.groups.items() if name.startswith(f"{policy}.")
    }
    common: dict[str, Any] = {"policies": None, "split": None, "served": msgspec.UNSET, "groups": groups}
    return msgspec.structs.replace(header, **(common | own))


def _belongs(line: Line, policy: str) -> bool:
    """Whether a line is of this policy; removes the policy from the names of its slots."""
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
    """Journals of earlier versions may have the reason in place of the cause."""
    older = {"timeout": "held", "budget_reached": "full", "single_request_over_budget": "over_budget"}
    return older.get(str(word), word)


def _parts(path: Path) -> Iterator[bytes]:
    """The file's bytes, decompressed, in chunks. A compressed file that was cut off ends after the last readable byte:
    `gzip` reads ahead and would lose bytes."""
    with path.open("rb") as file:
        compressed = path.suffix == ".gz"
        inflate = zlib.decompressobj(31)
        while data := file.read(_CHUNK):
            if not compressed:
                yield data
                continue
            while data:
                yield inflate.decompress(data, _CHUNK)
                data = inflate.unconsumed_tail
                if inflate.eof and (data := inflate.unused_data):  # another member follows
                    inflate = zlib.decompressobj(31)
        if compressed:
            yield inflate.flush()


# -- schema_version 1 --------------------------------------------------------------------------------------------------

# Translated to version 2. In version 1 `--trace` and `--record` have different formats: a trace counts times from its
# origin and has no requests; a recording has the warm-up in its header and only tickets as members of its batches.
# Other fields keep their defaults, of a request all but `seq`.

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
    """Translates the lines of one file. header: its first line in version 2; warm: lines that follow it."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        known = msgspec.convert(header, _Header)
        self._is_trace = "python_version" in header
        self._origin = known.origin
        self._began = msgspec.convert(known.started_at or "1970-01-01T00:00:00Z", _Time)
        groups = {name: _group(group) for name, group in known.groups.items()}
        self.header = {**header, "payloads": not self._is_trace, "groups": groups}
        warm = [{"kind": "warm", "slot": slot, **line} for slot, line in known.warm.items()]
        self.warm = msgspec.convert(warm, list[WarmUpLine])

    def line(self, found: dict[str, Any]) -> Any:
        """A line in version 2: an object, or the fields of one. ValidationError if it is not of version 1."""
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


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """Adds the unit, which a recording lacks: seconds if a cost model learned times, else requests."""
    if "unit" in group:
        return group
    flush = msgspec.convert(group.get("flush", {}), dict[str, Any])
    unit = "requests" if group.get("cost") is None else "seconds"
    return {"unit": unit, "budget": flush.get("max_batch_cost"), "max_size": flush.get("max_batch_size", 0), **group}


def complete(requests: Sequence[RequestLine], batches: Sequence[BatchLine]) -> None:
    """Fill in fields of a recording's members that only the lines of their requests have."""
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
