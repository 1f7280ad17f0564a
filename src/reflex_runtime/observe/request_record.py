"""A request's line in the journal: what a server hands over for it, and how numbers and images are written."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf, isfinite
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.request import AdmittedBatch, Request, Ticket
from reflex_runtime.observe.journal import (
    AdmissionGroup,
    Cost,
    Failure,
    ImageMode,
    JournalAnswer,
    JournalRequest,
    Latency,
    RequestLine,
    SchedulerRequest,
)

SentImage = bytes | str | NDArray[Any]


class RequestRecord(msgspec.Struct):
    """The `detail` of a `RequestAnswered`: references only, cheap to make where every microsecond counts.

    images: as sent, by name: PNG or JPEG bytes, base64 text (a data URL will do), or uint8 [h, w, 3].
    state: as sent, [state_dim]. seed: of the noise, as used. arrived: seconds on the server's monotonic clock.
    executed: how many actions of the last chunk the caller has executed, where it said so.
    past: request ids of the earlier observations that the policy saw with it, oldest first.
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
    images: Mapping[str, SentImage] = {}
    arrived: float = 0.0
    deadline_ms: float | None = None
    executed: int | None = None
    past: Sequence[str] = ()
    actions: NDArray[Any] | None = None
    denoising_steps: int = 0
    inference_mode: str = ""
    cache: str = "off"
    guard: dict[str, Any] | None = None
    rtc: dict[str, Any] | None = None
    total_s: float = 0.0
    queue_s: float = 0.0
    batch_s: float = 0.0
    batch: AdmittedBatch | None = None
    measured_ms: float = 0.0
    steps: int | None = None
    error: tuple[str, str] | None = None
    routing: dict[str, Any] | None = None
    slot: str = "prod"
    model_hash: str = ""

    @property
    def image_bytes(self) -> int:
        """Bytes its images hold in memory."""
        size = 0
        for image in self.images.values():
            size += image.nbytes if isinstance(image, np.ndarray) else len(image)
        return size


def scheduled(request: Request, ticket: Ticket | None, at: float) -> SchedulerRequest:
    """The request as the scheduler got it, without the payload. at: when it was refused, where there is no ticket."""
    made = SchedulerRequest(
        None, at, str(request.client), int(request.priority), request.time_limit, str(request.partition),
        str(request.shape), str(request.cost_class), request.stage, request.weight, request.wants,
    )  # fmt: skip
    if ticket is not None:
        made.ticket, made.arrived, made.ready = ticket.seq, ticket.arrived, ticket.ready_at < inf
        made.admitted = ticket.admitted if ticket.admitted < ticket.arrived else None
    return made


class QueuedRecord(msgspec.Struct):
    """An answer as it waits to be written. entered: ids of those that entered with its batch. schedule: None where it
    never came to the scheduler."""

    answered: RequestRecord
    outcome: str
    status: int
    wire: str
    entered: list[str]
    schedule: SchedulerRequest | None


def request_line(taken: QueuedRecord, seq: int, origin: float, began: float) -> RequestLine:
    """The line without its payload. began: UTC at `origin`."""
    a = taken.answered
    batch = a.batch
    return RequestLine(
        seq=seq,
        timestamp=datetime.fromtimestamp(began + a.arrived - origin, UTC),
        arrival=round(a.arrived - origin, 6),
        slot=a.slot,
        request=JournalRequest(a.request_id, a.episode_id, a.robot_id, seed=a.seed),
        response=None if a.actions is None else JournalAnswer(None, len(a.actions), a.actions.shape[-1]),
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
        batch=None if batch is None else AdmissionGroup(batch.id, batch.size, batch.reason, batch.cause, taken.entered),
        cost=Cost(None if batch is None else batch.cost * 1e3, round(a.measured_ms, 6)),
        schedule=taken.schedule,
        model_hash=a.model_hash,
        wire=taken.wire,
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
        asked.image_sha256 = sha256_of(a.images)
        asked.image_b64 = base64_of(a.images) if images == "full" else None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


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
    with np.errstate(all="ignore"):  # values that are not finite stay
        found = wide * 1e9
        np.rint(found, out=found)
        found /= 1e9
        differ = found.astype(np.float32) != array
        if differ.any():
            found[differ] = wide[differ]
    return found


# -- images ------------------------------------------------------------------------------------------------------------


def sha256_of(images: Mapping[str, SentImage]) -> str | dict[str, str] | None:
    """SHA-256 of each image as sent (of an array: of its pixels in C order)."""
    sent = {name: _sent_bytes(image) for name, image in images.items()}
    return _packed({name: hashlib.sha256(data).hexdigest() for name, data in sent.items() if data is not None})


def base64_of(images: Mapping[str, SentImage]) -> str | dict[str, str] | None:
    """Each image as base64 of a PNG or JPEG that decodes to the very pixels that were served."""
    return _packed({name: text for name, image in images.items() if (text := _base64(image)) is not None})


def _sent_bytes(image: SentImage) -> bytes | None:
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


def _base64(image: SentImage) -> str | None:
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
    return found["image"] if list(found) == ["image"] else found or None
