"""Every call as a generator without I/O, which the sync and the async client both run.

A call yields an `Attempt`, or the seconds of a pause. The client does it and sends back the reply or the error of an
attempt, and None after a pause. The generator's return value is the call's result.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict, TypeVar, Unpack
from urllib.parse import quote, urlencode

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.client.errors import BadAnswer, ClientError, StaleRequest, Unreachable
from reflex_runtime.client.exchange import Attempt, Chunk, Reply, chunk, decoded, refused, result
from reflex_runtime.pacing import doubled

GRACE: Final = 0.5  # seconds beyond its deadline: the server is to say itself that its answer came too late
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts where the server names none, doubling

Picture = NDArray[np.uint8] | bytes
"""uint8 [height, width, 3], or a PNG or JPEG file's bytes."""

Wire = Literal["msgpack", "json"]
Encoding = Literal["raw", "png", "jpeg"]
Priority = Literal["urgent", "default", "background"]


class ActFields(TypedDict, total=False):
    """What `act` takes, by name.

    image: the policy's only picture; images: by the policy's names. state: [n], in the robot's units. seed: of the
    noise, else made from request_id. deadline_ms: from this call on, all attempts included. executed: how many actions
    of the last chunk were executed; delay: how many will be until the answer is there.
    """

    image: Picture | None
    images: Mapping[str, Picture] | None
    instruction: str | None
    state: Sequence[float] | NDArray[Any] | None
    episode_id: str | None
    robot_id: str | None
    seed: int | None
    priority: Priority | None
    deadline_ms: float | None
    request_id: str | None
    executed: int | None
    delay: int | None


@dataclass(slots=True)
class Retries:
    """Whether and when to ask again. Pure: times are passed in.

    most: further attempts. until: the next attempt must begin by then. spread: a random number in [0, 1); up to a tenth
    is added to each pause, so that robots that were refused together do not return together.

    Only requests that cannot run twice (`retry_safe`) are repeated, and not those that were late or that a newer
    request replaced. The pause is at least Retry-After, else 0.1 s, doubling to 2 s.
    """

    most: int
    until: float
    spread: Callable[[], float] = random.random
    made: int = 0

    def after(self, error: ClientError, now: float) -> float | None:
        """Seconds to wait before the next attempt, or None to give up."""
        if not error.retry_safe or self.made >= self.most or isinstance(error, StaleRequest):
            return None
        pause = error.retry_after
        if pause is None:
            pause = doubled(FIRST_PAUSE, LONGEST_PAUSE, self.made)
        pause *= 1.0 + 0.1 * self.spread()
        if now + pause >= self.until:
            return None
        self.made += 1
        return pause


T = TypeVar("T")
Call: TypeAlias = Generator[Attempt | float, Reply | ClientError | None, T]


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one client, and how they are made; the arguments are `Client`'s."""

    url: str
    api_key: str | None
    timeout: float
    retries: int
    wire: Wire
    encoding: Encoding
    clock: Callable[[], float]
    spread: Callable[[], float]

    def __post_init__(self) -> None:
        if not 0.0 < self.timeout < math.inf:
            raise ValueError(f"timeout={self.timeout!r}: must be seconds > 0")
        if self.retries < 0:
            raise ValueError(f"retries={self.retries!r}: must be >= 0")
        if self.wire not in ("msgpack", "json"):
            raise ValueError(f"wire={self.wire!r}: must be 'msgpack' or 'json'")
        if self.encoding not in ("raw", "png", "jpeg"):
            raise ValueError(f"encoding={self.encoding!r}: must be 'raw', 'png' or 'jpeg'")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key: must be printable ASCII")

    def act(self, **fields: Unpack[ActFields]) -> Call[Chunk]:
        """The next actions for this observation, see `ActFields`: POST /act. A later attempt sends the rest of the
        deadline.

        Raises the ClientError of the server's error code; ValueError for arguments that no server would accept.
        """
        began = self.clock()
        request = observation(fields, self.wire, self.encoding)
        reply, attempts = yield from self._ask(
            "POST", "/act", request, self.wire, began, request.get("deadline_ms"),
            request.get("episode_id") or request.get("robot_id"),
        )  # fmt: skip
        request_id = str(request["request_id"])
        try:
            return chunk(reply, request_id, attempts)
        except BadAnswer as error:
            error.request_id = request_id
            raise

    def predict(
        self,
        item: Any,
        function: str = "",
        *,
        deadline_ms: float | None = None,
        priority: Priority | None = None,
        client: str | None = None,
        request_id: str | None = None,
    ) -> Call[Any]:
        """The result of a function for one item: POST /predict, see docs/functions.md. function: its name, where there
        are several.

        Arrays, dataclasses, structs, pydantic models and pictures may be in the item; arrays in a result are arrays
        again. client: whose fair share it takes. A later attempt sends the rest of the deadline.
        """
        own = {"priority": priority, "client": client, "request_id": request_id or uuid.uuid4().hex}
        said = {name: value for name, value in own.items() if value is not None}
        _check_deadline(deadline_ms)
        body = msgspec.msgpack.encode(item, enc_hook=_item)
        path = f"/predict/{quote(function, safe='')}" if function else "/predict"
        try:
            reply, _ = yield from self._ask(
                "POST", f"{path}?{urlencode(said)}", None, "msgpack", self.clock(), deadline_ms, body=body
            )
        except ClientError as error:
            error.request_id = error.request_id or said["request_id"]
            raise
        return result(reply)

    def get(self, path: str) -> Call[dict[str, Any]]:
        """GET a path that answers a JSON object, such as /config or /diagnostics/rollout; repeated while the server is
        unreachable or only a proxy answers."""
        reply, _ = yield from self._ask("GET", path, None, "json", self.clock())
        return decoded(reply)

    def health(self) -> Call[dict[str, Any]]:
        """The body of /health, ready or not: `["state"] == "ready"` when the server serves. One attempt."""
        reply = yield from self._sent("GET", "/health", self._headers("json"), None, self.timeout)
        if reply.status not in (200, 503):
            raise refused(reply)
        return decoded(reply)

    def post(self, path: str, fields: Mapping[str, Any], episode: str | None = None) -> Call[dict[str, Any]]:
        """POST a JSON object to a path, such as /admin/split {"split": 50}; returns the answer. episode: that it is
        about."""
        reply, _ = yield from self._ask("POST", path, fields, "json", self.clock(), episode=episode)
        return decoded(reply) if reply.body else {}

    def report_outcome(
        self, episode_id: str, success: bool, reward: float | None = None, robot_id: str | None = None
    ) -> Call[dict[str, Any]]:
        """Report how an episode ended. `episode` does this by itself. robot_id: if its requests had one."""
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward={reward!r}: must be finite")
        body: dict[str, Any] = {"success": bool(success)}
        if reward is not None:
            body["reward"] = float(reward)
        if robot_id is not None:
            body["robot_id"] = robot_id
        return (yield from self.post(f"/episodes/{quote(episode_id, safe='')}/outcome", body, episode_id))

    def _ask(
        self,
        method: str,
        path: str,
        fields: Mapping[str, Any] | None,
        wire: Wire,
        began: float,
        deadline_ms: float | None = None,
        episode: str | None = None,
        body: bytes | None = None,
    ) -> Call[tuple[Reply, int]]:
        """A 2xx reply and the number of attempts, or the last attempt's error. episode: names it to what is between
        this client and several servers. body: in place of fields; what is left of the deadline is in a header then."""
        headers = self._headers(wire)
        if episode:
            headers["X-Reflex-Episode"] = quote(str(episode), safe="", errors="replace")
        deadline = math.inf if deadline_ms is None else deadline_ms / 1e3
        limit = min(self.timeout, deadline + GRACE)
        retries = Retries(self.retries, began + min(self.timeout, deadline), self.spread)
        while True:
            now = self.clock()
            left_ms = None if deadline_ms is None else max(1e-3, deadline_ms - (now - began) * 1e3)
            if body is not None and left_ms is not None:
                headers["X-Reflex-Deadline-Ms"] = f"{left_ms:.3f}"
            elif fields is not None and left_ms is not None and now > began:
                fields = {**fields, "deadline_ms": left_ms}
            sent = body if fields is None else encoded(fields, wire)
            try:
                reply = yield from self._sent(method, path, headers, sent, max(1e-3, began + limit - now))
                if 200 <= reply.status < 300:
                    return reply, retries.made + 1
                raise refused(reply)
            except ClientError as error:
                if method == "GET" and (isinstance(error, Unreachable) or error.status in (502, 503, 504)):
                    error.retry_safe = True  # it changes nothing
                if error.request_id is None and fields is not None:
                    error.request_id = fields.get("request_id")
                pause = retries.after(error, self.clock())
                if pause is None:
                    raise
            yield pause

    def _headers(self, wire: Wire) -> dict[str, str]:
        kind = f"application/{wire}"
        headers = {"Content-Type": kind, "Accept": kind}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def _sent(self, method: str, path: str, headers: dict[str, str], body: bytes | None, limit: float) -> Call[Reply]:
        """The reply to one attempt, or to one more if a kept connection turns out to be closed; raises its error."""
        came: Reply | ClientError | None = None
        for again in (True, False):
            if came is None:
                came = yield Attempt(self.url, method, path, headers, body, limit, self.clock, again)
        if not isinstance(came, Reply):
            assert came is not None, "a second attempt ends with a reply or an error"
            raise came
        return came


# -- the fields of a request -------------------------------------------------------------------------------------------


def observation(fields: Mapping[str, Any], wire: Wire, encoding: Encoding) -> dict[str, Any]:
    """The fields of POST /act; ValueError for values that no server would accept."""
    if unknown := fields.keys() - ActFields.__annotations__.keys():
        raise TypeError(f"act() takes no {', '.join(sorted(unknown))}")
    sent = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in fields.items()
        if value is not None
    }
    sent.setdefault("request_id", uuid.uuid4().hex)  # ours, so that every attempt has the same noise
    images = dict(sent.pop("images", {}))
    if "image" in sent:
        sent["image"] = _picture(sent["image"], "image", wire, encoding)
    if images:
        sent["images"] = {name: _picture(value, f"images[{name!r}]", wire, encoding) for name, value in images.items()}
    if "state" in sent:
        sent["state"] = _state(sent["state"], wire)
    _check_deadline(sent.get("deadline_ms"))
    return sent


def _check_deadline(deadline_ms: float | None) -> None:
    if deadline_ms is not None and not 0.0 < deadline_ms <= 600_000.0:
        raise ValueError(f"deadline_ms={deadline_ms!r}: must be in (0, 600000]")


def encoded(fields: Mapping[str, Any], wire: Wire) -> bytes:
    if wire == "msgpack":
        return msgspec.msgpack.encode(dict(fields))
    return json.dumps(dict(fields)).encode()  # NaN goes out as NaN, and the server names the field


def _state(values: Any, wire: Wire) -> Any:
    state = np.asarray(values)
    if state.ndim != 1 or state.dtype.kind not in "fiu":
        raise ValueError(f"state: must be numbers [n], is {state.dtype} {list(state.shape)}")
    if wire == "json":
        return state.tolist()
    with np.errstate(over="ignore"):  # the server names a field that float32 cannot hold
        return _array(state.astype(np.float32))


def _picture(picture: Any, name: str, wire: Wire, encoding: Encoding) -> Any:
    if isinstance(picture, (bytes, bytearray, memoryview)):
        data = bytes(picture)
    else:
        pixels = np.asarray(picture)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
            shape = list(pixels.shape)
            raise ValueError(f"{name}: must be uint8 [height, width, 3] or bytes, is {pixels.dtype} {shape}")
        if wire == "msgpack" and encoding == "raw":
            return _array(pixels)
        jpeg = encoding == "jpeg"
        data = _compressed(pixels, "JPEG") if jpeg else _compressed(pixels, "PNG", compress_level=1)
    return data if wire == "msgpack" else base64.b64encode(data).decode()


def _compressed(pixels: NDArray[np.uint8], kind: str, **options: Any) -> bytes:
    import PIL.Image  # here, so that a program that sends raw pictures never loads it

    out = io.BytesIO()
    PIL.Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def _item(value: Any) -> Any:
    """What msgpack has for a value of an item: arrays, numbers of numpy, pictures of Pillow."""
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump()
    if hasattr(value, "save") and hasattr(value, "mode"):  # a picture
        out = io.BytesIO()
        value.save(out, "PNG", compress_level=1)
        return out.getvalue()
    raise TypeError(f"item: of type {type(value).__name__}, which cannot be sent")


def _array(values: NDArray[Any]) -> dict[str, Any]:
    """The wire form: dtype, shape and little-endian bytes in C order."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "shape": list(little.shape), "data": little.tobytes()}
