"""The recording: what was asked, what was answered and which batches ran, so that both can be run again.

One JSON object a line. `Recorder` (recorder.py) writes it, `read_recording` reads it; `reflex replay` runs it again and
`reflex report` sums it up. Lines are `header`, `request`, `batch`, `ended`, `refused`, `footer`, and those that
`Recorder.note` adds (`outcome`, `decision`, …). Readers pass over kinds and keys they do not know.

Clocks: `timestamp` is UTC. `arrival` counts seconds from the header's `origin`. What the scheduler saw (`schedule`,
batches, `ended`) keeps the seconds of its own monotonic clock unrounded: a schedule replayed with them is the same to
the last bit.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Admission, Ticket
from reflex_runtime.core.time_cost import TimeCost
from reflex_runtime.telemetry.lines import LineReader

SCHEMA_VERSION = 1

ImageMode = Literal["full", "hash_only", "none"]
IMAGE_MODES: tuple[ImageMode, ...] = ("full", "hash_only", "none")
SentImage = bytes | str | NDArray[Any]


class RecordingError(ReflexError):
    """A recording cannot be read. The message names the file and, where there is one, the line."""

    code, http_status = "recording_unreadable", 422


@dataclass(slots=True)
class Answered:
    """What a server hands over for one request: references only, cheap to make where every microsecond counts.

    images: as sent, by name: PNG or JPEG bytes, base64 text (a data URL will do), or uint8 [h, w, 3].
    state: as sent, [state_dim]. seed: of the noise, as used. arrived: seconds on the server's monotonic clock.
    executed: how many actions of the last chunk the caller has executed, where it said so.
    actions: [num_actions, action_dim] as answered, None without an answer. cache: `hit`, `hit_stale`, `miss`, `off`.
    total_s, queue_s, batch_s: as in the answer. batch: None when it never ran.
    measured_ms: its share of measured device time. error: (slug, message). routing: {slot, routing_key, degraded,
    cached} where two policies are served. model_hash: of the policy it was asked of. steps: denoising steps it had run,
    where that differs from `denoising_steps`.
    """

    request_id: str
    episode_id: str | None = None
    robot_id: str | None = None
    instruction: str | None = None
    state: Sequence[float] | NDArray[Any] | None = None
    seed: int = 0
    images: Mapping[str, SentImage] = field(default_factory=dict)
    arrived: float = 0.0
    deadline_ms: float | None = None
    executed: int | None = None
    actions: NDArray[Any] | None = None
    denoising_steps: int = 0
    inference_mode: str = ""
    cache: str = "off"
    guard: dict[str, Any] | None = None
    rtc: dict[str, Any] | None = None
    total_s: float = 0.0
    queue_s: float = 0.0
    batch_s: float = 0.0
    batch: Admission | None = None
    measured_ms: float = 0.0
    steps: int | None = None
    error: tuple[str, str] | None = None
    routing: dict[str, Any] | None = None
    slot: str = "prod"
    model_hash: str = ""


# -- the lines ---------------------------------------------------------------------------------------------------------


class PolicyInfo(msgspec.Struct, frozen=True):
    """One served policy."""

    slot: str = "prod"
    model_id: str = ""
    model_hash: str = ""


class Header(msgspec.Struct, frozen=True, tag_field="kind", tag="header", kw_only=True):
    """First line. origin: the monotonic second from which `arrival` counts.

    groups: how each slot was scheduled, see `settings_of`; warm: what its cost model had learned before the first
    request, see `warmed`. split: a's percent when the recording began. part: of its session, from 1; later parts go on
    with the same origin, ids and numbers.
    """

    schema_version: int = SCHEMA_VERSION
    session_id: str = ""
    started_at: str = ""
    model_hash: str = ""
    config_hash: str = ""
    export_dir: str = ""
    model_type: str = ""
    export_kind: str = ""
    embodiment: str = ""
    hardware: Any = None
    providers: list[str] = []
    redaction: dict[str, Any] = {}
    notes: Any = ""
    reflex_version: str = ""
    policies: list[PolicyInfo] | None = None
    origin: float = 0.0
    split: int | None = None
    groups: dict[str, dict[str, Any]] = {}
    warm: dict[str, Warm] = {}
    part: int = 1

    def hash_of(self, slot: str) -> str:
        """The model hash of a slot."""
        return next((p.model_hash for p in self.policies or () if p.slot == slot), self.model_hash)


class Warm(msgspec.Struct, frozen=True):
    """A warm-up as a cost model saw it: (stage, size, seconds) of its batches, shares of its requests in seconds."""

    shape: str
    cost_class: str
    wants: float
    batches: list[tuple[str, int, float]]
    shares: list[float]


class Asked(msgspec.Struct):
    """What was asked. image_sha256, image_b64: one text when the only image is `image`, else by name."""

    request_id: str
    episode_id: str | None = None
    robot_id: str | None = None
    instruction: str | None = None
    state: list[float | str] | None = None
    seed: int = 0
    executed: int | None = None
    image_sha256: str | dict[str, str] | None = None
    image_b64: str | dict[str, str] | None = None

    def images(self) -> dict[str, bytes]:
        """The recorded images, PNG or JPEG, by name; empty when none were recorded."""
        kept = self.image_b64
        if kept is None:
            return {}
        return {name: base64.b64decode(data) for name, data in _by_name(kept).items()}

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each image as sent, by name."""
        return {} if self.image_sha256 is None else _by_name(self.image_sha256)


class Given(msgspec.Struct):
    """What was answered. What is not finite stands as text: `NaN`, `Infinity`, `-Infinity`."""

    actions: list[list[float | str]]
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


class AdmittedIn(msgspec.Struct):
    """The admission group. members: request ids of those admitted together, itself among them."""

    id: int
    size: int
    reason: str = ""
    cause: str = ""
    members: list[str] = []


class Cost(msgspec.Struct):
    """Milliseconds: what its admission group was predicted to cost, and its own share of what was measured."""

    estimate_ms: float | None = None
    measured_ms: float = 0.0


class Scheduled(msgspec.Struct):
    """What the scheduler was asked. ticket: its order of arrival there, unique in the file; None when it was refused.

    arrived: when it could first run (its pictures were decoded), on the scheduler's clock. The rest is the
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


class Failure(msgspec.Struct):
    """How it failed."""

    slug: str
    message: str = ""


class Recorded(msgspec.Struct, tag_field="kind", tag="request"):
    """One request and its end. seq: order of the answers, from 0 by 1. arrival: seconds from the header's origin.

    denoise: steps. mode: inference mode. deadline: milliseconds it was given. schedule: None when it never came to the
    scheduler. What it refused has it once the whole file is read: see `Refused`. model_hash: of the policy it was asked
    of, which another may replace while the server runs; "" in older files, whose header knows.
    """

    seq: int
    timestamp: datetime
    arrival: float
    slot: str
    request: Asked
    response: Given | None
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
    batch: AdmittedIn | None = None
    cost: Cost = msgspec.field(default_factory=Cost)
    schedule: Scheduled | None = None
    model_hash: str = ""


class RanBatch(msgspec.Struct, tag_field="kind", tag="batch"):
    """One call of the processor: one step of those that take several. at, finished: on the scheduler's clock.

    elapsed, expected: seconds; expected 0 when unknown. members, entered: tickets, the latter for the first time.
    looked: when the free device had looked since the last batch and found nothing it wanted to send, where known.
    """

    id: int
    slot: str
    stage: str
    cause: str
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


class Ended(msgspec.Struct, tag_field="kind", tag="ended"):
    """A ticket that ended without an answer (`cancelled`, `shed`, `failed`, …); at: on the scheduler's clock."""

    ticket: int
    at: float
    outcome: str


class Refused(msgspec.Struct, tag_field="kind", tag="refused"):
    """What the scheduler was asked by a request it refused. Its answer may stand before it or after it."""

    request_id: str
    schedule: Scheduled


class Footer(msgspec.Struct, frozen=True, tag_field="kind", tag="footer"):
    """Last line of a recording that was closed. dropped: requests and batches that are not in the file."""

    ended_at: str
    total_requests: int
    dropped: int = 0


class Note(msgspec.Struct):
    """A line of any other kind; its fields as written. at: UTC, as text."""

    kind: str
    fields: dict[str, Any]

    @property
    def at(self) -> str:
        """When, UTC."""
        return str(self.fields.get("timestamp", ""))


Line = Recorded | RanBatch | Ended | Refused | Note


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording as read. footer: None when the recorder was not closed. torn: the last line was cut off.

    outcomes, decisions: notes of these kinds; others: notes of every other kind.
    """

    path: Path
    header: Header
    requests: list[Recorded]
    batches: list[RanBatch]
    ended: list[Ended]
    outcomes: list[Note]
    decisions: list[Note]
    others: list[Note]
    footer: Footer | None
    torn: bool

    @property
    def slots(self) -> list[str]:
        """The slots in it, in order."""
        return sorted({r.slot for r in self.requests} | {b.slot for b in self.batches})


class RecordingReader:
    """Reads a recording line by line, in as much memory as one line takes.

        reader = RecordingReader(path)
        reader.header
        for line in reader: …
        reader.footer, reader.torn            # once the lines are read

    Missing footer, blank lines and a torn last line are accepted; anything else that is not a recording (a torn line
    with others after it, an empty file, an unknown version) raises RecordingError naming file and line.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader: LineReader[Header, Line] = LineReader(
            self.path, Header, Footer, SCHEMA_VERSION, _decode, "a recording", partial(_bad, self.path)
        )
        self.header = self._reader.header

    def __iter__(self) -> Iterator[Line]:
        return iter(self._reader)

    @property
    def footer(self) -> Footer | None:
        """The footer, once it was met."""
        found: Footer | None = self._reader.footer
        return found

    @property
    def torn(self) -> bool:
        """Whether the last line was cut off, once it was met."""
        return self._reader.torn


def read_recording(path: str | Path, images: bool = True) -> Recording:
    """Read a whole recording. images: False leaves recorded images out, which is most of what a large one holds."""
    reader = RecordingReader(path)
    kinds: dict[type[Any], list[Any]] = {Recorded: [], RanBatch: [], Ended: [], Refused: [], Note: []}
    for line in reader:
        if not images and isinstance(line, Recorded):
            line.request.image_b64 = None
        kinds[type(line)].append(line)
    notes: list[Note] = kinds[Note]
    refused = {line.request_id: line.schedule for line in kinds[Refused]}
    for line in kinds[Recorded]:
        if line.schedule is None:
            line.schedule = refused.get(line.request.request_id)
    return Recording(
        reader.path,
        reader.header,
        sorted(kinds[Recorded], key=lambda r: r.seq),
        kinds[RanBatch],
        kinds[Ended],
        [n for n in notes if n.kind == "outcome"],
        [n for n in notes if n.kind == "decision"],
        [n for n in notes if n.kind not in ("outcome", "decision")],
        reader.footer,
        reader.torn,
    )


class _Kind(msgspec.Struct):
    kind: str


_kind = msgspec.json.Decoder(_Kind).decode
_line = msgspec.json.Decoder(Header | Recorded | RanBatch | Ended | Refused | Footer).decode
KINDS = frozenset({"header", "request", "batch", "ended", "refused", "footer"})


def _decode(line: bytes) -> Any:
    kind = _kind(line).kind
    if kind in KINDS:
        return _line(line)
    fields = msgspec.json.decode(line)
    del fields["kind"]
    return Note(kind, fields)


def _bad(path: Path, what: str, line: int | None) -> RecordingError:
    if line is None:
        return RecordingError(f"{path}: {what}", path=str(path))
    return RecordingError(f"{path}, line {line}: {what}", path=str(path), line=line)


def _by_name(kept: str | dict[str, str]) -> dict[str, str]:
    return {"image": kept} if isinstance(kept, str) else kept


# -- what a server puts into the header --------------------------------------------------------------------------------


def settings_of(group: GroupConfig) -> dict[str, Any]:
    """How a group is scheduled, JSON-safe: what a schedule replay needs to build it again."""
    model = group.cost()
    flush = {name: None if value == inf else value for name, value in asdict(group.flush).items()}
    cost = {"stages": list(model.stages), "affine": model.affine, "sizes": list(model.sizes)} if isinstance(
        model, TimeCost
    ) else None
    return {
        "flush": flush,
        "capacity": group.capacity,
        "max_in_flight_per_client": group.max_in_flight_per_client,
        "weight": group.weight,
        "latest_only": group.latest_only,
        "promote_after": group.promote_after,
        "planned": group.controller is not None,
        "cost": cost,
    }


def warmed(batches: Iterable[tuple[Batch, float]], finished: Iterable[Ticket]) -> Warm | None:
    """A warm-up for the header: its (batch, seconds) and the tickets that ran to their end; None when it was empty."""
    ran = [(batch.stage, len(batch), elapsed) for batch, elapsed in batches]
    tickets = list(finished)
    if not ran or not tickets:
        return None
    one = tickets[0].request
    return Warm(str(one.shape), str(one.cost_class), one.wants, ran, [t.shared for t in tickets])


def hardware() -> dict[str, Any]:
    """This machine, as far as it decides how fast a model runs here; a server adds its accelerator."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    return {"system": platform.system(), "machine": platform.machine(), "cpu": model, "cores": os.cpu_count() or 0}


# -- what goes into the lines ------------------------------------------------------------------------------------------

_WORDS = {inf: "Infinity", -inf: "-Infinity"}


def finite(values: list[float]) -> list[float | str]:
    """Numbers as JSON can carry them: what is not finite becomes text."""
    if isfinite(sum(values)):
        return values  # type: ignore[return-value]
    return [v if isfinite(v) else _WORDS.get(v, "NaN") for v in values]


def short(array: NDArray[Any]) -> list[list[float | str]]:
    """A matrix as rows; float32 in as few digits as bring back every bit of it."""
    wide = _few_digits(array) if array.dtype == np.float32 else np.asarray(array, np.float64)
    rows: list[list[float | str]] = wide.tolist()
    return rows if np.isfinite(wide).all() else [finite(row) for row in wide.tolist()]


def _few_digits(array: NDArray[np.float32]) -> NDArray[np.float64]:
    """Each value rounded to as few decimals as give the same float32 again: half the text of the usual digits."""
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):  # what is not finite stays as it is
        found = wide * 1e9
        np.rint(found, out=found)
        found /= 1e9
        differ = found.astype(np.float32) != array
        if differ.any():
            found[differ] = wide[differ]
    return found


def sent_bytes(image: SentImage) -> bytes | None:
    """An image as sent, as bytes; None when it is none. A raw array gives its pixels in C order."""
    if isinstance(image, str):
        data = image.partition(",")[2] if image.startswith("data:") else image
        try:
            return base64.b64decode(data)
        except ValueError:
            return None
    if isinstance(image, np.ndarray):
        return np.ascontiguousarray(image).tobytes()
    return bytes(image)


def sha256_of(images: Mapping[str, SentImage]) -> str | dict[str, str] | None:
    """SHA-256 of each image as sent (of an array: of its pixels in C order)."""
    return _packed(
        {name: hashlib.sha256(data).hexdigest() for name, i in images.items() if (data := sent_bytes(i)) is not None}
    )


def base64_of(images: Mapping[str, SentImage]) -> str | dict[str, str] | None:
    """Each image as base64 of a PNG or JPEG that decodes to the very pixels that were served."""
    return _packed({name: text for name, image in images.items() if (text := _base64(image)) is not None})


def _base64(image: SentImage) -> str | None:
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            return None  # it was refused
        return base64.b64encode(_png(image)).decode()
    data = sent_bytes(image)
    return None if data is None else base64.b64encode(data).decode()


def _png(image: NDArray[np.uint8]) -> bytes:
    import io

    import PIL.Image  # here: only callers that send arrays need it

    out = io.BytesIO()
    PIL.Image.fromarray(np.ascontiguousarray(image)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _packed(found: dict[str, str]) -> str | dict[str, str] | None:
    return found["image"] if list(found) == ["image"] else found or None
