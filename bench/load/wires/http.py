"""The wires on POST /act: JSON, msgpack, and json-numpy; and whole requests that a benchmark has made."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from bench.load.wires.connection import Connection, reply_of, request
from bench.load.wires.expected import Expected, Observed
from bench.load.wires.target import Target
from reflex_runtime.client.calls import Encoding, observation
from reflex_runtime.client.errors import BadAnswer
from reflex_runtime.client.exchange import refused

OK = b"HTTP/1.1 200"


class HttpCaller:
    """A kept connection to POST /act."""

    schemes: ClassVar[tuple[str, ...]] = ("http", "https")
    config: ClassVar[str] = ""
    setting: ClassVar[str] = ""
    kind: ClassVar[str] = "application/json"

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target, self._connection = target, Connection(target)

    async def connect(self) -> None:
        """Nothing: the first request opens the connection."""

    def expected(self) -> Expected | None:
        """None: HTTP announces nothing."""
        return None

    async def ask(self, frame: bytes) -> int:
        """POST it; the error of a status other than 200."""
        answer = await self._connection.exchange(frame)
        if not answer.startswith(OK):
            raise refused(reply_of(answer))
        return batch_in(answer)

    async def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> bytes:
        path = f"{self._target.address.path}/act"
        return request("POST", path, self._target.headers(self.kind), body)


def batch_in(answer: bytes) -> int:
    """`size` of the batch, in JSON or msgpack; 0 where the answer does not say it."""
    at = answer.rfind(b'"size":')
    if at >= 0:
        return int(answer[at + 7 : at + 15].split(b",")[0].split(b"}")[0])
    at = answer.rfind(b"\xa4size")
    return answer[at + 5] if at >= 0 and answer[at + 5] < 0x80 else 0


class ActCaller(HttpCaller):
    """POST /act as JSON, pictures as PNG."""

    config: ClassVar[str] = "act"

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """A body of /act: the cameras under `images`, `state`, `instruction`."""
        fields: dict[str, Any] = {}
        for name, value in observed.items():
            if isinstance(value, str):
                fields["instruction"] = value
            elif value.ndim == 3:
                fields.setdefault("images", {})[name] = value
            else:
                fields[name] = value
        if deadline_ms:
            fields["deadline_ms"] = deadline_ms
        return self._post(self._body(fields))

    def _body(self, fields: dict[str, Any]) -> bytes:
        lists = {"state": fields["state"].tolist()} if "state" in fields else {}
        return msgspec.json.encode(_sent(fields, "png") | lists)


class ActMsgpackCaller(ActCaller):
    """POST /act as msgpack, pictures as raw bytes."""

    kind: ClassVar[str] = "application/msgpack"

    def _body(self, fields: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode(_sent(fields, "raw"))


def _sent(fields: dict[str, Any], encoding: Encoding) -> dict[str, Any]:
    """The fields of /act without an id: all requests would have the same one."""
    return {name: value for name, value in observation(fields, encoding).items() if name != "request_id"}


class JsonNumpyCaller(HttpCaller):
    """POST /act as json-numpy, as clients of OpenVLA do."""

    config: ClassVar[str] = "json-numpy"

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """JSON with arrays as maps."""
        fields = {
            name: _numpy_map(value) if isinstance(value, np.ndarray) else value for name, value in observed.items()
        }
        return self._post(json.dumps(fields | ({"deadline_ms": deadline_ms} if deadline_ms else {})).encode())

    async def ask(self, frame: bytes) -> int:
        """The answer is an array, a list of arrays, or a text with the JSON of an array; none says its batch."""
        answer = await self._connection.exchange(frame)
        if not answer.startswith(OK):
            raise refused(reply_of(answer))
        if b"__numpy__" not in answer:
            raise BadAnswer(f"no array of json-numpy: {answer[-100:].decode(errors='replace')!r}")
        return 0


def _numpy_map(value: Any) -> dict[str, Any]:
    data = np.ascontiguousarray(value)
    return {"__numpy__": base64.b64encode(data.tobytes()).decode(), "dtype": data.dtype.str, "shape": list(data.shape)}


class MadeCaller(HttpCaller):
    """Whole HTTP requests, made by whoever measures."""

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """None: they are made."""
        return b""
