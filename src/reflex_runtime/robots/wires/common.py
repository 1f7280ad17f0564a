"""What several wires need: bounded msgpack and arrays, identity and limits of a request, websocket sessions."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.serving.handler import PendingRequest, RequestHandler
from reflex_runtime.robots.serving.question import (
    IDS,
    MAX_TEXT,
    OWN,
    ActAnswer,
    Question,
    RequestLimits,
    WireObservation,
    text_of,
)
from reflex_runtime.settings.declare import did_you_mean
from reflex_runtime.web.arrays import array_in, check_keys, type_of
from reflex_runtime.web.errors import ClientError, NotFound
from reflex_runtime.web.fields import brief, check_id, client_errors, invalid_input, printable
from reflex_runtime.web.request import (
    INTERNAL,
    UNSUPPORTED,
    HttpRequest,
    HttpResponse,
    Route,
    SocketMessage,
    WebSocket,
)

# -- arrays ------------------------------------------------------------------------------------------------------------


_FORMS: Final = {
    "__image__": ("format", "data", "dtype", "shape"), "__ndarray__": ("data", "dtype", "shape"),
    "__npgeneric__": ("data", "dtype"), "__ndarray_class__": ("as_npy",), "nd": ("type", "kind", "shape", "data"),
}  # fmt: skip


def array_of_map(found: dict[str, Any]) -> Any:
    """The array, number or encoded picture that a map represents in one of these forms; any other map unchanged.
    Nothing is unpickled, and PNG and JPEG stay encoded.

    openpi:        {"__ndarray__": True, "data": bytes, "dtype": "<f8", "shape": [8]}
                   {"__npgeneric__": True, "data": 0.5, "dtype": "<f8"}
    vla-eval:      {"__image__": True, "format": "png", "data": bytes, "shape": [256, 256, 3]}    or jpeg, or raw
    GR00T:         {"__ndarray_class__": True, "as_npy": bytes of numpy.save}
    msgpack-numpy: {"nd": True, "type": "<f4", "kind": "", "shape": [8], "data": bytes}      nd: False for a number
    """
    mark, data = next((mark for mark in _FORMS if mark in found), "nd"), found.get("data")
    if mark == "nd" and ("nd" not in found or "data" not in found):
        return found
    check_keys(found, mark, *_FORMS[mark])
    if mark == "__image__" and (form := found.get("format")) != "raw":
        if form not in ("png", "jpeg") or not isinstance(data, bytes):
            raise ClientError(printable(f"an image needs data, and a format: png, jpeg or raw, not {brief(form)}"))
        return data
    if mark in ("__image__", "__ndarray__"):
        return array_in(data, found.get("dtype"), found.get("shape"))
    if mark == "__npgeneric__":
        type_of(found.get("dtype"))
        if not isinstance(data, (bool, int, float, str, bytes)):
            raise ClientError("a numpy scalar needs data that is a number or a text")
        return data
    if mark == "__ndarray_class__":
        return _npy(found.get("as_npy"))
    if found.get("kind", b"") not in (b"", ""):  # V: structures; O: a pickle
        raise ClientError("an array of kind O or V is not read: send numbers or texts")
    if found["nd"] is True:
        return array_in(data, found.get("type"), found.get("shape"))
    dtype = type_of(found.get("type"))
    if not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise ClientError("a numpy scalar needs as many bytes as its type has")
    return np.ndarray((), dtype, buffer=data).item()


def _npy(data: Any) -> Any:
    """The array in a file of numpy.save, as a view: numpy parses only the header."""
    if not isinstance(data, bytes):
        raise ClientError("as_npy is no file of numpy.save")
    file, form = io.BytesIO(data), np.lib.format
    try:
        read = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
        shape, turned, dtype = read(file, max_header_size=1024)
    except Exception as error:  # numpy parses the header as Python, which may raise anything
        raise ClientError(f"as_npy is no file of numpy.save: {str(error)[:100]}") from None
    array = array_in(memoryview(data)[file.tell() :], dtype.str, list(shape[::-1] if turned else shape))
    return array.T if turned else array


def packer(form: Callable[[NDArray[Any]], Mapping[Any, Any]]) -> Callable[[Any], bytes]:
    """A function that encodes values with arrays as msgpack. form: makes the map that represents an array."""

    def array(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return form(value)
        raise NotImplementedError(f"{type(value).__name__} is not written")

    return msgspec.msgpack.Encoder(enc_hook=array).encode


# -- identity and limits -----------------------------------------------------------------------------------------------


_TOLD: Final = ("request_id", "timing", "batch", "cache", "guard", "rtc", "model_hash", "policy_changed", "warnings")


LIMITS: Final = RequestLimits.__struct_fields__
OF_SOCKETS: Final = ("robot_id", "episode_id", "priority", "deadline_ms", "policy")
"""The parameters of a websocket's URL; they hold for all its requests."""


def limits_of(said: Mapping[str, Any]) -> RequestLimits:
    """The limits of one request; the 422 names a wrong field. Numbers may be text."""
    with client_errors(RequestLimits):
        return msgspec.convert(said, RequestLimits, strict=False)


def limits_among(values: Mapping[str, Any]) -> RequestLimits:
    """The limits among other values."""
    return limits_of({name: values[name] for name in LIMITS if values.get(name) is not None})


def limits_in(observation: Mapping[str, Any]) -> RequestLimits:
    """The limits under `reflex/…` in an observation."""
    own = {name[len(OWN) :]: text_of(value) for name, value in observation.items() if name.startswith(OWN)}
    for name in own.keys() - set(LIMITS):
        raise invalid_input(OWN + name, f"no such field{did_you_mean(name, LIMITS, OWN)}")
    return limits_of(own)


def socket_limits(query: Mapping[str, str]) -> RequestLimits:
    """The limits in the query of a websocket's URL. An error refuses the handshake."""
    said = limits_of(query)
    for name in query.keys() - set(OF_SOCKETS):
        raise invalid_input(name, f"belongs to a request; the URL of a websocket takes {', '.join(OF_SOCKETS)}")
    for name in ("robot_id", "episode_id"):
        if (id := getattr(said, name)) is not None:
            check_id(name, id)
    return said


def question_of(
    observed: WireObservation,
    limits: RequestLimits,
    robot_id: str | None = None,
    episode_id: str | None = None,
    said: RequestLimits | None = None,
    part: str = "",
) -> Question:
    """A question. limits: of the request; said: of its websocket. robot_id: used if `limits` has none. part: suffix of
    the ids of robot and request, if a message has several."""
    images, state, instruction = observed
    robot, request = limits.robot_id or robot_id, limits.request_id
    own = msgspec.structs.asdict(limits) | {"robot_id": robot and robot + part, "episode_id": episode_id}
    own["request_id"] = request and request + part.replace("/", IDS["request_id"])
    if said is not None:
        own["priority"] = limits.priority or said.priority
        own["deadline_ms"] = said.deadline_ms if limits.deadline_ms is None else limits.deadline_ms
    return Question(images=images, state=state, instruction=instruction, **own)


class Episodes:
    """Names the episodes of one robot. A reset begins a new one; so does a new instruction without a name."""

    def __init__(self, own: str) -> None:
        """own: the name of the episode if the caller gives none."""
        self._own = self._name = own
        self._epoch = 0
        self._prompt: int | None = None

    def reset(self) -> None:
        """Begin a new episode with the next observation."""
        self._epoch += 1

    def of(self, name: str | None, prompt: str | None) -> str:
        """The episode of an observation. name: the caller's, if it gave one."""
        if name is not None:
            check_id("episode_id", name)
        seen = None if prompt is None else hash(prompt)  # the text may have thousands of characters
        if (name or self._own) != self._name:
            self._name, self._epoch = name or self._own, 0
        elif name is None and self._prompt is not None and seen != self._prompt:
            self._epoch += 1
        self._prompt = seen
        return f"{self._name}#{self._epoch}" if self._epoch else self._name


def answer_details(answer: ActAnswer) -> dict[str, Any]:
    """The fields of an answer that every wire sends with the actions."""
    return {name: getattr(answer, name) for name in _TOLD}


# -- msgpack -----------------------------------------------------------------------------------------------------------


FRAME_VALUES: Final = 20_000

Hook = Callable[[dict[str, Any]], Any]


def unpack(data: bytes, hook: Hook = array_of_map) -> Any:
    """The value of a frame; ClientError for a malformed one. Keys of maps become text. Each map passes through `hook`.

    A frame has at most `FRAME_VALUES` values, keys included. The library bounds only each container, and 16 MB of empty
    maps would take a gigabyte, so its hooks count all values. For nested lists the library allocates their announced
    lengths first: at most 160 MB, while it reads.
    """
    left, most = FRAME_VALUES, min(FRAME_VALUES, len(data))

    def count(values: int) -> None:
        nonlocal left
        left -= values
        if left < 0:
            raise ClientError(f"the frame holds over {FRAME_VALUES} values: send arrays as arrays")

    def read_map(pairs: list[tuple[Any, Any]]) -> Any:
        count(2 * len(pairs) + 1)
        return hook({_text(key): value for key, value in pairs})

    def read_list(values: list[Any]) -> list[Any]:
        count(len(values))
        return values

    try:
        return msgpack.unpackb(
            data, object_pairs_hook=read_map, list_hook=read_list, ext_hook=_refuse, strict_map_key=False,
            max_array_len=most, max_map_len=most // 2, max_str_len=MAX_TEXT, max_ext_len=0,
        )  # fmt: skip
    except ValueError as error:  # all errors of msgpack
        bounds = f"{FRAME_VALUES} values, texts of {MAX_TEXT} bytes, no extensions"
        why = str(error) or type(error).__name__
        raise ClientError(f"the frame is not msgpack within the bounds ({bounds}): {why}") from None


def _refuse(*_: Any) -> Any:
    raise ValueError("msgpack extension")


def _text(key: Any) -> str:
    if isinstance(key, bytes):
        return key.decode()
    if not isinstance(key, str):
        raise ClientError("the frame holds a map whose keys are not texts")
    return key


# -- one websocket is one robot ----------------------------------------------------------------------------------------


Frame = str | bytes


def socket_route(
    path: str, session: Callable[[RequestHandler, WebSocket], MessageSession], handler: RequestHandler
) -> Route:
    """The route of a wire's websocket."""

    async def serve(socket: WebSocket) -> None:
        await session(handler, socket).run()

    return Route(path, _websocket_only, most=handler.config.max_body_bytes, socket=serve)


async def _websocket_only(request: HttpRequest) -> HttpResponse:
    """Refuse a plain request on the path of a websocket."""
    raise NotFound(f"{request.path} is for websockets; docs/wires.md describes their protocol")


class MessageSession(ABC):
    """The base of a wire's session on a websocket. Clients send one request at a time.

    robot: its name. said: limits of the URL's query. first: whether the server sends `hello` before any message comes.
    """

    first: ClassVar = False

    def __init__(self, wire: str, handler: RequestHandler, socket: WebSocket) -> None:
        self.said = socket_limits(socket.query)
        self.handler, self.socket = handler.one(self.said.policy), socket
        self.robot = self.said.robot_id or f"ws-{socket.id}"
        self._wire = wire

    @abstractmethod
    def read(self, frame: bytes) -> Any:
        """Decode a message for `take`."""

    @abstractmethod
    async def take(self, message: SocketMessage, sent: Any) -> Frame | None:
        """The frame that answers a decoded message; None for no answer. Exceptions are answered as errors."""

    @abstractmethod
    def hello(self) -> bytes:
        """The frame that describes the policy."""

    @abstractmethod
    def error(self, error: ReflexError, request_id: str) -> Frame:
        """The frame for an error."""

    async def run(self) -> None:
        """Answer messages until the peer leaves."""
        await self.socket.accept()
        if self.first:
            hello = await self.greet()
            if hello is None:
                return
            await self.socket.send(hello)
        async for message in self.socket:
            if isinstance(message.data, str):
                await self.socket.close(UNSUPPORTED, "messages are binary frames")
                return
            frame = await self.answer(message, message.data)
            if frame is not None:
                await self.socket.send(frame)

    async def answer(self, message: SocketMessage, data: bytes) -> Frame | None:
        """The frame that answers a message."""
        try:
            sent = self.read(data)
            self.socket.app.check_open()
            return await self.take(message, sent)
        except Exception as failure:
            reported = self.handler.reported(failure, self.pending(message))
            return self.error(reported.error, reported.request_id)

    async def greet(self) -> bytes | None:
        """`hello`, once a policy is ready."""
        if await self.handler.runtime.wait_started():
            return self.hello()
        await self.socket.close(INTERNAL, "the policy could not be started")
        return None

    async def infer(self, message: SocketMessage, question: Callable[[], Question]) -> ActAnswer:
        """The policy's answer. question: called once the request is admitted."""
        return await self.handler.infer_row(self.pending(message), 0, question, message.received)

    def pending(self, message: SocketMessage) -> PendingRequest:
        return PendingRequest(self._wire, message.id, self.robot, message.started, self.socket)

    def report(self, episode: str, result: dict[str, Any], robot: str) -> None:
        """Count whether a robot's episode succeeded, if the result reports it and the policy answered in it."""
        success = _success_in(result)
        if success is not None and self.socket.may_change:
            with suppress(NotFound):
                self.handler.served.ended(episode, success, robot)


def _success_in(result: dict[str, Any]) -> bool | None:
    """Whether the result of an episode is a success; None if it has no such field."""
    for found in (result.get("metrics"), result.get("result"), result):
        success = found.get("success") if isinstance(found, dict) else None
        if isinstance(success, (bool, int, float)) and success in (0, 1):
            return bool(success)
    return None
