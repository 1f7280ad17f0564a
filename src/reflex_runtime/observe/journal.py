"""The lines of a journal: one file format for `--trace` and `--record`, described in `docs/journal.md`.

One JSON object a line: `header`, `warm`, `request`, `batch`, `ended`, `footer`, and notes of any other kind (`outcome`,
`decision`, `shadow`, …). With payloads (`--record`) request lines carry what was asked and answered; without
(`--trace`) they carry ids, times and outcomes. Readers pass over kinds and keys they do not know.

Clocks: `timestamp` is UTC. `arrival` counts seconds from the header's `origin`. What the scheduler saw (`schedule`,
batches, `ended`) is in seconds of its own monotonic clock, unrounded: a schedule replayed with them is the same to the
last bit.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError

SCHEMA_VERSION = 2

ImageMode = Literal["full", "hash_only", "none"]
IMAGE_MODES: tuple[ImageMode, ...] = ("full", "hash_only", "none")


class JournalError(ReflexError):
    """A journal cannot be read. The message names the file and, where there is one, the line."""

    code, http_status = "journal_unreadable", 422


class PolicyInfo(msgspec.Struct, frozen=True):
    slot: str = "prod"
    model_id: str = ""
    model_hash: str = ""


class GroupInfo(msgspec.Struct, frozen=True):
    """What the numbers of a group mean, and how it is scheduled.

    unit: of cost and budget (`seconds`, `tokens`, `requests`). budget: ceiling on a batch's cost, None without one.
    max_size: most members. flush, cost: fields of the `FlushPolicy` and of the `TimeCost`, None for inf; a cost of None
    is another cost model, which cannot be replayed. max_queued_seconds: None without a bound. planned: a controller
    changes the budget. tenant: written where groups take turns as one.
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
    cost: dict[str, Any] | None = None

    @property
    def or_times_fixed(self) -> str:
        """The rest of its budget in words, where a batch with a large fixed part may take longer."""
        times = self.flush.get("times_fixed")
        return f" or {times:g} × the fixed part" if isinstance(times, int | float) and times else ""


class PolicyHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the header of one of several policies' journals would say of it; see `Header`."""

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

    payloads: whether request lines carry what was asked and answered. split: a's percent at the beginning. part: of its
    session, from 1; later parts continue with the same origin, ids and numbers. control_rate_hz, state_names,
    action_names: of the embodiment, where its file has them. What only a policy server knows is empty in other
    journals. served: by name, where there are several policies; the rest is then the first's, and slots are NAME.SLOT.
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

    def hash_of(self, slot: str) -> str:
        """The model hash of a slot."""
        return next((p.model_hash for p in self.policies or () if p.slot == slot), self.model_hash)


class WarmUpLine(msgspec.Struct, frozen=True, tag_field="kind", tag="warm"):
    """What a slot's cost model learned before the first request; in every part of a session.

    batches: (stage, size, seconds). shares: each request's part of them, in seconds.
    """

    slot: str
    shape: str
    cost_class: str
    wants: float
    batches: list[tuple[str, int, float]]
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
    """What is kept of an episode is kept under this: an episode is of one robot, where that is known. "" for none.

    No id has a line break in it.
    """
    return f"{robot_id}\n{episode_id}" if robot_id and episode_id else episode_id or ""


def _by_name(kept: str | dict[str, str] | None) -> dict[str, str]:
    return {"image": kept} if isinstance(kept, str) else kept or {}


class JournalAnswer(msgspec.Struct):
    """What was answered. actions: None without payloads; what is not finite stands as text: `NaN`, `Infinity`,
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
    """Milliseconds: what its admission group was predicted to cost, and its own share of what was measured."""

    estimate_ms: float | None = None
    measured_ms: float = 0.0


class SchedulerRequest(msgspec.Struct):
    """What the scheduler was asked. ticket: its order of arrival there, unique in the file; None when it was refused.

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

    arrival: seconds from the header's origin. denoise: steps. mode: inference mode. deadline: milliseconds it was
    given. schedule: None when it never came to the scheduler. model_hash: of the policy it was asked of, which another
    may replace while the server runs. wire: the protocol it came on.
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

    at: on the scheduler's clock. ticket: None when the scheduler refused it; then `schedule` says what it was asked,
    and the request's own line may stand before or after.
    """

    ticket: int | None
    at: float
    outcome: str
    request_id: str = ""
    schedule: SchedulerRequest | None = None


# -- batches -----------------------------------------------------------------------------------------------------------


class Member(msgspec.Struct, omit_defaults=True):
    """One request in one batch. What is None is not written.

    seq: order of arrival at the scheduler, unique in the file; id and client are the caller's words and need not be.
    units: what this batch granted it. asked: what it wanted when it arrived.
    state: `waiting` when it entered from the queue with this batch, `resident` when it stayed from an earlier one.
    age: seconds from its arrival until the batch was scheduled; for one that entered, the time it waited.
    limit: seconds it was given to be answered in, from its arrival; None without a deadline.
    outcome: `done`, `more` (it stays for another step), `apart` (the call failed as a whole, and it runs again with
        fewer), or how it ended: `failed`, `cancelled`, …; None if unknown.
    computed, known, cached: of tokens only, before this batch: how many were in the cache, how many there were (prompt
        and outputs), and how many the prefix cache had on entering with it.
    guessed, outputs: of tokens only, where it had guesses: how many of `units` they were, and the tokens that came.
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
    guessed: float | None = None
    outputs: int | None = None


class BatchLine(msgspec.Struct, tag_field="kind", tag="batch", kw_only=True):
    """One call of the processor; one step of those that take several. Written when it finished. Seconds throughout.

    at, finished: on the scheduler's clock. cost, unit: the estimate the budget is compared with, None when it was not
    finite. expected: predicted seconds of this call, None when unknown. queued: how many still waited when it left,
    None if unknown. crashed, apart: see `BatchFinished`. left: seqs of residents gone since the group's last batch
    (preempted, cancelled, expired). short_of: what kept the others out: `budget`, `places`, `memory`, `share`, `room`,
    `apart`, or empty. looked: when it was decided since the last batch, for a free device, to send nothing yet, or only
    to refuse what waited.
    """

    id: int
    group: str
    partition: str = ""
    stage: str = ""
    reason: str
    cause: str
    at: float
    finished: float
    elapsed: float
    expected: float | None
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
        """Which tickets were in it."""
        return [m.seq for m in self.members]


class Footer(msgspec.Struct, frozen=True, tag_field="kind", tag="footer"):
    """Last line of a file that was closed. Requests and batches in it; dropped: lines that are not."""

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
        """When, UTC."""
        return str(self.fields.get("timestamp", ""))


Line = WarmUpLine | RequestLine | BatchLine | EndedLine | Note
KINDS = frozenset({"header", "warm", "request", "batch", "ended", "footer"})
