"""The wires on websockets, as their stock clients speak them: openpi and vla-eval."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from bench.load.wires.connection import Connection, masked, payload_of, reply_of, request
from bench.load.wires.expected import Expected, Observed
from bench.load.wires.http import batch_in
from bench.load.wires.target import Target
from reflex_runtime.client.errors import BadAnswer, ServerError
from reflex_runtime.client.exchange import Reply, refused
from reflex_runtime.robots.wires import openpi, vla_eval
from reflex_runtime.robots.wires.vla_eval import EvalMessage
from reflex_runtime.web.errors import ClientError

TEXT, BINARY = 0x81, 0x82  # the first byte of a whole frame


class _WebsocketCaller:
    """One websocket. After an error that makes it unusable, the next `ask` opens another."""

    schemes: ClassVar[tuple[str, ...]] = ("http", "https", "ws", "wss")
    setting: ClassVar[str] = ""
    path: ClassVar[str] = "/"

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target = target
        self._connection: Connection | None = None

    async def connect(self) -> None:
        """Upgrade a connection, and exchange the first frames."""
        connection, address = Connection(self._target), self._target.address
        headers = {
            "Host": address.netloc, "Upgrade": "websocket", "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "cmVmbGV4LWJlbmNoLTEyMw==",
        }  # fmt: skip
        if self._target.key:
            headers["Authorization"] = f"Api-Key {self._target.key}"
        own = address.scheme in ("ws", "wss")
        path = (address.path or "/") if own else f"{address.path}{self.path}"
        answer = await connection.exchange(request("GET", path, headers))
        if not answer.startswith(b"HTTP/1.1 101"):
            connection.close()
            raise refused(reply_of(answer))
        connection.upgraded()
        self._connection = connection
        await self._greet(connection)

    async def close(self) -> None:
        """Abort the connection without a close frame, as stock clients do when they exit."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _greet(self, connection: Connection) -> None:
        """Exchange the first frames and set `announced`."""
        raise NotImplementedError

    async def _exchange(self, frame: bytes) -> bytes:
        """Send a masked frame and wait for the next one of the server; opens a websocket if there is none."""
        if self._connection is None:
            await self.connect()
        assert self._connection is not None, "connected"
        try:
            answer = await self._connection.exchange(frame)
        except BaseException:
            self._connection = None  # an answer may still be on its way
            raise
        if answer[0] & 0x0F == 8:
            await self.close()
            raise BadAnswer(f"{self._target.address.url} closed the websocket: {payload_of(answer)[2:202]!r}")
        return answer


class OpenpiCaller(_WebsocketCaller):
    """openpi: the metadata comes first, then an answer to each observation."""

    config: ClassVar[str] = "openpi"

    def expected(self) -> Expected | None:
        """From the metadata of our own servers."""
        return Expected.of("metadata", self.announced.get("reflex"))

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """A frame with one observation."""
        fields = _nested(observed)
        if deadline_ms and "reflex" in self.announced:
            fields["reflex/deadline_ms"] = deadline_ms
        return masked(openpi.encode(fields))

    async def ask(self, frame: bytes) -> int:
        """Send it. Answers are binary frames, errors are text frames."""
        answer = await self._exchange(frame)
        if answer[0] == TEXT:
            if "reflex" not in self.announced:  # other servers close the websocket after an error
                await self.close()
            raise _refusal(payload_of(answer).decode(errors="replace"))
        if b"actions" not in answer:
            raise BadAnswer("no array `actions` in the answer")
        return batch_in(answer)

    async def _greet(self, connection: Connection) -> None:
        frame = await connection.exchange(b"")
        if frame[0] != BINARY:
            raise BadAnswer(f"metadata expected, a text frame came: {payload_of(frame)[:200]!r}")
        try:
            self.announced = openpi.decode(payload_of(frame))
        except ClientError as error:
            raise BadAnswer(f"the metadata cannot be read: {error.message}") from None


class VlaEvalCaller(_WebsocketCaller):
    """vla-eval: a hello in each direction, an episode, and one action for each observation."""

    config: ClassVar[str] = "vla-eval"
    path: ClassVar[str] = "/vla-eval"

    def expected(self) -> Expected | None:
        """None: the hello of vla-eval does not name pictures."""
        return None

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """An observation with raw pictures. The protocol has no field for a deadline."""
        payload = _nested(observed)
        for pictures in (payload, payload.get("images", {})):
            pictures |= {name: _raw(value) for name, value in pictures.items() if _is_picture(value)}
        return masked(vla_eval.encode(EvalMessage("observation", payload, 2)))

    async def ask(self, frame: bytes) -> int:
        """Send it. The answer is one action, usually from the chunk that the server buffers."""
        answer = _message(await self._exchange(frame))
        if answer.type == "error":
            error = answer.payload.get("error")
            raise _refused(answer.payload) if "message" in answer.payload else ServerError(str(error)[:300])
        if answer.type != "action" or not isinstance(answer.payload.get("actions"), np.ndarray):
            raise BadAnswer(f"no action, but {answer.type}: {str(answer.payload)[:200]}")
        return 0

    async def _greet(self, connection: Connection) -> None:
        hello = EvalMessage("hello", {"harness_version": "", "protocol_version": 1}, 0)
        answer = _message(await connection.exchange(masked(vla_eval.encode(hello))))
        if answer.type != "hello":
            raise BadAnswer(f"hello expected, {answer.type} came")
        self.announced = answer.payload
        connection.send(masked(vla_eval.encode(EvalMessage("episode_start", {}, 1))))


def _message(frame: bytes) -> EvalMessage:
    try:
        return vla_eval.decode(payload_of(frame))
    except ClientError as error:
        raise BadAnswer(f"no message of vla-eval: {error.message}") from None


def _nested(observed: Observed) -> dict[str, Any]:
    """Move names with the prefix `images/` into a map `images`."""
    fields = {name: value for name, value in observed.items() if not name.startswith("images/")}
    nested = {name.removeprefix("images/"): v for name, v in observed.items() if name.startswith("images/")}
    return fields | ({"images": nested} if nested else {})


def _is_picture(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 3


def _raw(picture: Any) -> dict[str, Any]:
    data = {"data": picture.tobytes(), "dtype": picture.dtype.str, "shape": picture.shape}
    return {"__image__": True, "format": "raw"} | data


def _refused(body: Mapping[str, Any]) -> ServerError:
    """The exception for the JSON error of our servers."""
    return refused(Reply(0, {}, json.dumps(body, default=str).encode()))


def _refusal(text: str) -> ServerError:
    """The exception for a text frame: our JSON, or another server's text, usually a traceback."""
    with suppress(ValueError):
        body = json.loads(text)
        if isinstance(body, dict) and "error" in body:
            return _refused(body)
    lines = text.strip().splitlines() or ["an empty text frame"]
    return ServerError(lines[-1][:300], code="server_error")
